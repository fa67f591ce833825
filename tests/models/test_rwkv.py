"""What Eagle and Finch have of their own: sizes, initialisation, published files."""

import json
import math

import pytest
import torch
from cases import each_rwkv, model_class, random_ids, tiny_config, tiny_model
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import subquad


def test_unknown_preset():
    with pytest.raises(ValueError, match="'finch-9b'.*finch-1.6b"):
        subquad.preset_config("finch-9b")


@each_rwkv
@pytest.mark.parametrize("layers", [1, 3])
def test_initialisation(model_type, layers):
    """Appendix H, from its own words."""
    torch.manual_seed(0)
    model = model_class(model_type)(tiny_config(model_type, num_hidden_layers=layers, initializer_range=0.02))
    width = model.config.hidden_size
    for l, block in enumerate(model.rwkv.blocks):
        attention, feed_forward = block.attention, block.feed_forward
        r0, r1 = (l / (layers - 1) if layers > 1 else 0.0), 1 - l / layers

        def mu(name, att=attention, ffn=feed_forward):
            if model_type == "rwkv6":
                return getattr({"f": ffn}.get(name[0], att), f"time_maa_{name[-1]}")[0, 0].tolist()
            full = {"r": "receptance", "k": "key", "v": "value", "g": "gate"}[name[-1]]
            stored = getattr({"f": ffn}.get(name[0], att), f"time_mix_{full}")[0, 0]
            return (1 - stored).tolist()  # Eagle's files hold one minus it

        ramp = [1 - (i / width) ** r1 for i in range(width)]
        half = [1 - (i / width) ** (r1 / 2) for i in range(width)]
        for name in ("k", "fk", "fr", *(("x", "w") if model_type == "rwkv6" else ())):
            assert mu(name) == pytest.approx(ramp, abs=1e-6), name
        assert mu("v") == pytest.approx([x - 0.3 * r0 for x in ramp], abs=1e-6)
        assert mu("r") == mu("g") == pytest.approx(half, abs=1e-6)

        decay = [-6 + 5 * (i / (width - 1)) ** (0.7 + 1.3 * r0) for i in range(width)]
        assert attention.time_decay.flatten().tolist() == pytest.approx(decay, abs=1e-5)
        bonus = [r0 * (1 - i / (width - 1)) + 0.1 * ((i + 1) % 3) for i in range(width)]
        assert attention.time_faaaa.flatten().tolist() == pytest.approx(bonus, abs=1e-6)

        assert torch.all(attention.ln_x.weight == ((1 + l) / layers) ** 0.7)
        for zero in (attention.output, feed_forward.value, feed_forward.receptance):
            assert torch.all(zero.weight == 0)
        key = feed_forward.key.weight  # (intermediate, width): orthogonal columns, gain rows / columns
        gain = key.shape[0] / key.shape[1]
        torch.testing.assert_close(key.T @ key, gain**2 * torch.eye(width), atol=1e-4, rtol=1e-4)
        for projection in (attention.receptance, attention.key, attention.value, attention.gate):
            bound = 1 / math.sqrt(width)
            assert bound * 0.9 < projection.weight.abs().max() <= bound
        if model_type == "rwkv6":
            for name in ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2"):
                assert 5e-5 < getattr(attention, name).abs().max() <= 1e-4
        for norm in (block.ln1, block.ln2):
            assert torch.all(norm.weight == 1)
            assert torch.all(norm.bias == 0)

    embeddings, head = model.rwkv.embeddings.weight, model.head.weight
    assert 0.019 < embeddings.abs().max() <= 0.02
    torch.testing.assert_close(head.T @ head, 0.25 * torch.eye(width), atol=1e-5, rtol=1e-5)


def published_directory(path, model_type, **config):
    """A repository as published: canonical names, and a config.json with the fields and quirks of its day."""
    sizes = {"lora_rank_tokenshift": 5, "lora_rank_decay": 7} if model_type == "rwkv6" else {}
    model = tiny_model(model_type, hidden_size=128, head_size=32, intermediate_size=160, **sizes)
    name = model_type.capitalize()
    fields = {
        "architectures": [f"{name}ForCausalLM"],
        "auto_map": {
            "AutoConfig": f"configuration_{model_type}.{name}Config",
            "AutoModelForCausalLM": f"modeling_{model_type}.{name}ForCausalLM",
        },
        "attention_hidden_size": 128,
        "bos_token_id": 0,
        "context_length": 4096,
        "eos_token_id": 0,
        "head_size_divisor": 8,
        "hidden_size": 128,
        "intermediate_size": None,
        "layer_norm_epsilon": 1e-05,
        "model_type": model_type,
        "model_version": "5_2",
        "num_attention_heads": 64,
        "num_hidden_layers": 3,
        "rescale_every": 6,
        "tie_word_embeddings": False,
        "transformers_version": "4.34.0",
        "use_cache": True,
        "vocab_size": 97,
        **config,
    }
    (path / "config.json").write_text(json.dumps(fields))
    for kind in ("configuration", "modeling"):
        (path / f"{kind}_{model_type}.py").write_text("raise RuntimeError('the repository ran its own code')\n")
    save_file(model.state_dict(), path / "model.safetensors", metadata={"format": "pt"})
    return model


@each_rwkv
@pytest.mark.parametrize("with_head_size", [True, False])
def test_published_directory_loads_unchanged(model_type, with_head_size, tmp_path):
    fields = {"head_size": 32} if with_head_size else {}
    model = published_directory(tmp_path, model_type, **fields)
    ids = random_ids(1, 30)
    for loaded, head in (
        (AutoModelForCausalLM.from_pretrained(tmp_path), True),
        (AutoModelForCausalLM.from_pretrained(tmp_path, config=AutoConfig.from_pretrained(tmp_path)), True),
        (type(model).from_pretrained(tmp_path), True),
        (AutoModel.from_pretrained(tmp_path), False),
    ):
        c = loaded.config
        assert (c.num_attention_heads, c.head_size, c.intermediate_size) == (4, 32, 160)
        if model_type == "rwkv6":
            assert (c.lora_rank_tokenshift, c.lora_rank_decay) == (5, 7)
        out = loaded(ids, output_hidden_states=True)
        expected = model(ids, output_hidden_states=True)
        torch.testing.assert_close(out.hidden_states, expected.hidden_states)
        if head:
            torch.testing.assert_close(out.logits, expected.logits)


@each_rwkv
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_published_repository_in_the_hub_cache(model_type, variant, tmp_path):
    """Sizes are read from the cached files of a repository that is loaded by its name."""
    snapshot = tmp_path / "models--user--name" / "snapshots" / ("0" * 40)
    (tmp_path / "models--user--name" / "refs").mkdir(parents=True)
    (tmp_path / "models--user--name" / "refs" / "main").write_text("0" * 40)
    snapshot.mkdir(parents=True)
    model = published_directory(snapshot, model_type)
    ids, expected = random_ids(1, 5), model(random_ids(1, 5)).logits
    if variant:
        (snapshot / "model.safetensors").unlink()
        config = (snapshot / "config.json").read_bytes()
        model.save_pretrained(snapshot, variant=variant, max_shard_size="100KB")
        (snapshot / "config.json").write_bytes(config)
        assert (snapshot / f"model.safetensors.index.{variant}.json").exists()
    for auto in (AutoModelForCausalLM, type(model)):
        loaded = auto.from_pretrained("user/name", cache_dir=tmp_path, variant=variant)
        torch.testing.assert_close(loaded(ids).logits, expected)


@each_rwkv
def test_rescale_every_has_no_effect(model_type, tmp_path):
    model = tiny_model(model_type, num_hidden_layers=3, rescale_every=1)
    plain = tiny_model(model_type, num_hidden_layers=3, rescale_every=0)
    ids = random_ids(1, 5)
    assert torch.equal(model(ids).logits, plain(ids).logits)


@each_rwkv
@pytest.mark.parametrize("divisor", [1, 8])
def test_head_size_divisor(model_type, divisor):
    model = tiny_model(model_type, head_size_divisor=divisor)
    assert {block.attention.ln_x.eps for block in model.rwkv.blocks} == {1e-5 * divisor**2}


@each_rwkv
def test_one_head_size_for_two_spellings(model_type):
    by_heads = tiny_config(model_type, head_size=None, num_attention_heads=3)
    assert (by_heads.head_size, by_heads.num_attention_heads) == (16, 3)
    assert by_heads.head_dim == 16
    assert tiny_config(model_type, context_length=77).max_position_embeddings == 77


@each_rwkv
def test_arguments_of_from_pretrained(model_type, tmp_path):
    model, ids = tiny_model(model_type), random_ids(1, 9)
    model.save_pretrained(tmp_path, variant="fp16")
    config = tiny_config(model_type, num_attention_heads=6, head_size=8, max_position_embeddings=5)
    before = config.to_dict()
    loaded = type(model).from_pretrained(tmp_path, variant="fp16", config=config)
    assert config.to_dict() == before
    assert (loaded.config.head_size, loaded.config.context_length) == (16, 5)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    loaded = type(model).from_pretrained(tmp_path, variant="fp16", max_position_embeddings=9, dtype="bfloat16")
    assert (loaded.config.context_length, loaded.dtype) == (9, torch.bfloat16)
    loaded = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict())
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


@each_rwkv
def test_sizes_are_not_read_from_packed_weights(model_type):
    config = tiny_config(model_type)
    config.set_sizes_from_shapes({"rwkv.blocks.0.feed_forward.key.weight": (1536, 1)})
    assert config.intermediate_size == 64
