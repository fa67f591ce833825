"""What Goose has of its own: sizes, initialisation, what others computed with it, published directories."""

import json
import math

import pytest
import torch
from cases import GOOSE, random_ids, tiny_config, tiny_model
from golden_files import read_golden
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from subquad import Rwkv7Config, Rwkv7ForCausalLM


def test_ranks_of_new_models():
    """Those of the trainer, which are those of the smallest published model."""
    config = Rwkv7Config(hidden_size=768)
    ranks = (config.decay_low_rank_dim, config.a_low_rank_dim, config.v_low_rank_dim, config.gate_low_rank_dim)
    assert ranks == (64, 64, 32, 128)
    assert Rwkv7Config(hidden_size=4096).gate_low_rank_dim == 320
    assert Rwkv7Config(hidden_size=64).v_low_rank_dim == 32


@pytest.mark.parametrize("layers", [1, 3])
def test_initialisation(layers):
    torch.manual_seed(0)
    model = Rwkv7ForCausalLM(tiny_config("rwkv7", num_hidden_layers=layers, a_low_rank_dim=60))
    width, size = 48, 16
    channels = range(width)
    for l, block in enumerate(model.rwkv7.blocks):
        att, ffn = block.att, block.ffn
        rho, left = (l / (layers - 1) if layers > 1 else 0.0), 1 - l / layers
        linear = [i / (width - 1) - 0.5 for i in channels]
        zig = [z * abs(z) for z in (2 * (i % size - (size - 1) / 2) / (size - 1) for i in channels)]
        expected = {
            **{name: [1 - (i / width) ** (0.2 * left) for i in channels] for name in ("x_r", "x_g")},
            **{name: [1 - (i / width) ** (0.7 * left) for i in channels] for name in ("x_k", "x_v")},
            **{name: [1 - (i / width) ** (0.9 * left) for i in channels] for name in ("x_w", "x_a")},
            "w0": [-5.5 + 6 * (i / (width - 1)) ** (1 + rho**0.3) + 2.5 * zig[i] for i in channels],
            "a0": [-0.19 + 0.3 * zig[i] + 0.4 * linear[i] for i in channels],
            "k_k": [0.71 - 0.1 * x for x in linear],
            "k_a": [1.02] * width,
            "r_k": [-0.04] * width,
        }
        if l > 0:
            expected["v0"] = [0.73 - 0.4 * x for x in linear]
        for name, values in expected.items():
            assert getattr(att, name).flatten().tolist() == pytest.approx(values, abs=1e-5), name
        assert ffn.x_k.flatten().tolist() == pytest.approx([1 - (i / width) ** left**4 for i in channels], abs=1e-6)
        assert hasattr(att, "v0") == hasattr(att, "v1") == hasattr(att, "v2") == (l > 0)
        for letter in "wavg" if l > 0 else "wag":
            assert not getattr(att, f"{letter}1").any()
            second = getattr(att, f"{letter}2")
            rank = second.shape[0]
            gram, gain = (
                (second @ second.T, 0.1) if rank <= width else (second.T @ second, 0.1 * (rank / width) ** 0.5)
            )
            torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), atol=1e-5, rtol=1e-4)
        for projection, gain in ((att.receptance, 1.0), (att.key, 0.1), (att.value, 1.0), (ffn.key, 1.0)):
            weight = projection.weight
            torch.testing.assert_close(weight.T @ weight, gain**2 * torch.eye(width), atol=1e-5, rtol=1e-4)
        assert not att.output.weight.any() and not ffn.value.weight.any()
        assert torch.all(att.ln_x.weight == ((1 + l) / layers) ** 0.7) and not att.ln_x.bias.any()
    assert model.rwkv7.emb.weight.abs().max() <= 1e-4
    head = model.head.weight
    torch.testing.assert_close(head.T @ head, 0.25 * 97 / 48 * torch.eye(width), atol=1e-5, rtol=1e-4)


def trained(weights):
    """The model of a trainer's tensors."""
    config = Rwkv7Config(vocab_size=97, hidden_size=128, num_hidden_layers=3)
    state_dict = {name if name == "head.weight" else f"rwkv7.{name}": x.float() for name, x in weights.items()}
    config.set_sizes_from_shapes({name: x.shape for name, x in state_dict.items()})
    return Rwkv7ForCausalLM.from_pretrained(None, config=config, state_dict=state_dict).eval()


@pytest.mark.parametrize("sizes", [(71,), (36, 35), (1,) * 71, (64, 1, 6)])
def test_what_the_runtime_of_the_authors_computed(sizes):
    tensors, weights, _ = read_golden("rwkv7_trainer")
    model, cache, logits = trained(weights), None, []
    with torch.no_grad():
        for ids in tensors["input_ids"].split(sizes, dim=1):
            out = model(ids, cache=cache, use_cache=True)
            logits, cache = [*logits, out.logits], out.cache
    torch.testing.assert_close(torch.cat(logits, 1), tensors["logits"], atol=1e-4, rtol=0)
    names = {"wkv": "wkv", "att_shift": "attention_shift", "ffn_shift": "feed_forward_shift"}
    for i in range(3):
        for theirs, ours in names.items():
            expected = tensors[f"state.{i}.{theirs}"]
            torch.testing.assert_close(cache.layers[i].states[ours], expected, atol=1e-4, rtol=0)


def test_a_first_state():
    """A tuned state has the layout of ours."""
    tensors, weights, _ = read_golden("rwkv7_trainer")
    model, ids = trained(weights), tensors["input_ids"]
    cache = model.new_cache()
    for i in range(3):
        state = tensors[f"initial.{i}.wkv"]
        cache.layers[i].states["wkv"] = state.expand(len(ids), *state.shape).clone()
    with torch.no_grad():
        logits = model(ids, cache=cache).logits
    torch.testing.assert_close(logits, tensors["logits_from_initial"], atol=1e-4, rtol=0)


# Directories as others publish them.


def write(path, weights, **config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "rwkv7", **config}))
    save_file({name: x.contiguous() for name, x in weights.items()}, path / "model.safetensors", {"format": "pt"})
    return path


def one_tensor_of_shifts(weights):
    """The first files of flash-linear-attention had one tensor of all token shifts."""
    weights = dict(weights)
    for i in range(2):
        prefix = f"model.layers.{i}.attn.x_"
        weights[f"{prefix}x"] = torch.stack([weights.pop(f"{prefix}{letter}").flatten() for letter in "rwkvag"])
    return weights


@pytest.mark.parametrize("change", [dict, one_tensor_of_shifts])
def test_a_directory_of_flash_linear_attention(change, tmp_path):
    """It loads as it is, though its configuration has a wrong number of heads; what is saved has our names."""
    tensors, weights, config = read_golden("rwkv7_hub")
    source = write(tmp_path / "source", change(weights), **config)
    model, info = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert (model.config.num_heads, model.config.head_dim, config["num_heads"]) == (4, 64, 32)
    with torch.no_grad():
        out = model.eval()(tensors["input_ids"], use_cache=True)
    torch.testing.assert_close(out.logits, tensors["logits"], atol=1e-4, rtol=0)
    names = {"conv_state": "attention_shift", "ffn_state": "feed_forward_shift"}
    for i in range(2):
        states = out.cache.layers[i].states
        torch.testing.assert_close(states["wkv"].mT, tensors[f"state.{i}.recurrent_state"], atol=1e-4, rtol=0)
        for theirs, ours in names.items():
            torch.testing.assert_close(states[ours], tensors[f"state.{i}.{theirs}"], atol=1e-4, rtol=0)

    model.save_pretrained(tmp_path / "saved")
    assert load_file(tmp_path / "saved/model.safetensors").keys() == dict(model.state_dict()).keys()
    saved = json.loads((tmp_path / "saved/config.json").read_text())
    assert saved.keys() <= {*Rwkv7Config().to_dict(), "architectures", "dtype"}
    for path in (source, tmp_path / "saved"):
        base = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
        for name, x in base.state_dict().items():
            assert torch.equal(x, model.state_dict()[f"rwkv7.{name}"]), name


def test_sizes_that_the_configuration_lacks(tmp_path):
    """All but width, layers and vocabulary come from the tensors."""
    tensors, weights, _ = read_golden("rwkv7_hub")
    source = write(tmp_path / "source", weights, vocab_size=97, hidden_size=256, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tensors["input_ids"]).logits, tensors["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("prefix", ["rwkv7.", ""])
def test_a_directory_of_the_rwkv_organisation(prefix, tmp_path):
    """With the tensors that nothing reads; some repositories have no prefix."""
    tensors, weights, _ = read_golden("rwkv7_trainer")
    named = {name if name == "head.weight" else prefix + name: x for name, x in weights.items()}
    sizes = {"vocab_size": 97, "hidden_size": 128, "num_hidden_layers": 3, "head_dim": 64, "pad_token_id": 0}
    # All fields of the organisation's own class.
    sizes |= {"wkv_implementation": "chunked", "wkv_state_dtype": "float32", "max_position_embeddings": 8192}
    source = write(tmp_path / "source", named, **sizes, norm_bias=True, use_deep_embed=False)
    model, info = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tensors["input_ids"]).logits, tensors["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (["rwkv7.blocks.0.ffn.s_emb.weight"], "RWKV-7a, with DeepEmbed"),
        (["blocks.0.qkv.qq.weight", "blocks.0.ffn.s_emb.weight"], "RWKV-7b, with DeepEmbed and attention"),
        (["blocks.0.ffn.enn.weight"], "an RWKV-8 preview"),
        (["blocks.0.qkv.emm", "blocks.0.qkv.qq.weight", "blocks.0.ffn.s_emb.weight"], "an RWKV-8 preview"),
        (["model.layers.1.attn.q_proj.weight"], r"a hybrid of RWKV-7 \(Goose\) and softmax attention"),
    ],
    ids=str,
)
def test_relatives_are_refused_by_their_names(names, title, tmp_path):
    """One relative has the tensors of another, too."""
    weights = tiny_model("rwkv7").state_dict() | {name: torch.zeros(4, 4) for name in names}
    source = write(tmp_path / "source", weights, **GOOSE.fields, vocab_size=97)
    with pytest.raises(ValueError, match=f"{names[0]} is a tensor of {title}, not of the model type rwkv7"):
        AutoModelForCausalLM.from_pretrained(source)


def test_heads_under_other_names():
    for fields in ({"head_size": 32}, {"num_attention_heads": 2}, {"head_dim": 32, "num_heads": 2}):
        config = Rwkv7Config(hidden_size=64, **fields)
        assert (config.num_heads, config.head_dim) == (config.num_attention_heads, config.head_size) == (2, 32)


def test_fields_of_other_packages_that_say_nothing_are_not_kept():
    fields = {"max_position_embeddings": 2048, "attn": None, "value_dim": [256, 256], "norm_first": True}
    kept = AutoConfig.for_model("rwkv7", hidden_size=256, hidden_ratio=2.0, **fields).to_dict()
    assert not fields.keys() & kept.keys()
    assert kept["intermediate_size"] == 512


# The values of the first layer, which all others read.


def test_decays_stay_above_their_floor():
    """exp(-exp(-1/2)), whatever the decay's map says."""
    model = tiny_model("rwkv7", num_hidden_layers=1)
    with torch.no_grad():
        model.rwkv7.blocks[0].att.w0.fill_(1e4)
    ids = random_ids(1, 300)
    whole = model(ids, use_cache=True)
    assert torch.isfinite(whole.logits).all()
    cache = model(ids[:, :150], use_cache=True).cache
    torch.testing.assert_close(model(ids[:, 150:], cache=cache).logits, whole.logits[:, 150:], atol=1e-4, rtol=1e-4)
    assert math.exp(-math.exp(-0.5)) == pytest.approx(0.545239, abs=1e-6)
