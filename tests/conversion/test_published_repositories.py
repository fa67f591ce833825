"""
Repositories as others publish them, code of their own included: `import subquad` makes them load through the classes
of this package. Nothing that they hold is executed, and nothing is unpickled.
"""

import json
import pickle
from pathlib import Path

import pytest
import torch
import transformers
from byte_level_bpe import write_byte_level_bpe
from cases import each_model, tiny_model
from golden_files import read_golden
from huggingface_hub.errors import StrictDataclassError
from rwkv_files import fla_tensors, hub_tensors, reference_logits, trainer_tensors
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoTokenizer

import subquad
from subquad import lm_auto_class
from subquad_tokenizers import WORLD_VOCAB_FILE, RwkvWorldTokenizerFast


RWKV = {
    "hidden_size": 192,
    "attention_hidden_size": 192,
    "num_attention_heads": 64,  # the size of a head, as in the published files
    "num_hidden_layers": 2,
    "intermediate_size": 320,
    "context_length": 4096,
    "head_size_divisor": 8,
    "layer_norm_epsilon": 1e-5,
    "rescale_every": 6,
    "vocab_size": 100,
    "model_version": "5_2",
}
# NameMap to its model type, the names of the classes that its code has, and fields that say nothing new.
PUBLISHED = {
    "rwkv5": ("rwkv5", {"AutoModelForCausalLM": "Rwkv5ForCausalLM", "AutoTokenizer": "Rwkv5Tokenizer"}, RWKV),
    "rwkv6": ("rwkv6", {"AutoModelForCausalLM": "Rwkv6ForCausalLM", "AutoTokenizer": "Rwkv6Tokenizer"}, RWKV),
    "avey_released": ("avey", {"AutoModelForCausalLM": "Avey"}, {"extended_len": 32}),
    "avey_b_hub": ("avey-b", {"AutoModelForMaskedLM": "AveyForMaskedLM"}, {"max_position_embeddings": 2**32}),
    "avey_b_paper": ("avey", {"AutoModelForMaskedLM": "AveyForMaskedLM"}, {}),
    "raven_gated": ("raven", {"AutoModelForCausalLM": "RavenForCausalLM"}, {"exapnd_k": 1, "fuse_norm": True}),
    "raven_plain": ("raven", {"AutoModelForCausalLM": "RavenForCausalLM"}, {"exapnd_v": 1, "use_short_conv": False}),
}
LOADED = [name for name in PUBLISHED if name != "avey_b_paper"]

each_trust = pytest.mark.parametrize("trust", [{}, {"trust_remote_code": True}, {"trust_remote_code": False}])


def content(name):
    """Tensors, fields of the configuration, tokens and the logits of these."""
    if name.startswith("rwkv"):
        ids = torch.arange(3, 40, 4)
        logits = reference_logits(trainer_tensors(name), name, ids.tolist(), head_size_divisor=8)
        return hub_tensors(name), {}, ids[None], logits[None].float()
    golden, weights, fields = read_golden(name)
    return weights, fields, golden["input_ids"], golden["logits"]


def publish(directory, name):
    """Writes the repository; returns tokens and their logits."""
    weights, fields, ids, logits = content(name)
    model_type, classes, extra = PUBLISHED[name]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    kind = model_type.replace("-", "_")
    auto_map = {"AutoConfig": f"configuration_{kind}.Config", "AutoModel": f"modeling_{kind}.Model"}
    auto_map |= {auto: f"modeling_{kind}.{cls}" for auto, cls in classes.items() if auto != "AutoTokenizer"}
    fields = fields | extra | {"model_type": model_type, "auto_map": auto_map, "torch_dtype": "float32"}
    fields |= {"architectures": [next(iter(classes.values()))], "transformers_version": "4.46.0"}
    (directory / "config.json").write_text(json.dumps(fields))
    if tokenizer := classes.get("AutoTokenizer"):
        (directory / "rwkv_vocab_v20230424.txt").write_bytes(Path(WORLD_VOCAB_FILE).read_bytes())
        settings = {
            "tokenizer_class": tokenizer,
            "auto_map": {"AutoTokenizer": [f"tokenization_{kind}.{tokenizer}", None]},
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    else:
        write_byte_level_bpe(directory)
    for part in ("configuration", "modeling", "tokenization"):
        (directory / f"{part}_{kind}.py").write_text("raise RuntimeError('the repository ran its own code')\n")
    return ids, logits


@each_trust
@pytest.mark.parametrize("name", LOADED)
def test_it_loads_without_its_code(name, trust, tmp_path):
    ids, logits = publish(tmp_path, name)
    model_type, classes, _ = PUBLISHED[name]
    config = AutoConfig.from_pretrained(tmp_path, **trust)
    assert type(config).__module__.startswith("subquad.")
    for auto_class in ("AutoModel", lm_auto_class(model_type)):
        model, loading = getattr(transformers, auto_class).from_pretrained(tmp_path, output_loading_info=True, **trust)
        assert type(model) is getattr(subquad, subquad.ARCHITECTURES[model_type][2][auto_class])
        assert not loading["missing_keys"] and not loading["mismatched_keys"], loading
    with torch.no_grad():
        assert (model(ids).logits - logits).abs().max() < 2e-4

    # transformers prefers a tokenizer's code to a registered class where it is told to trust it.
    options = {} if "AutoTokenizer" in classes and trust.get("trust_remote_code") else trust
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, **options)
    assert type(tokenizer).__module__.split(".")[0] in ("subquad_tokenizers", "transformers")
    assert (type(tokenizer) is RwkvWorldTokenizerFast) == ("AutoTokenizer" in classes)
    assert tokenizer.decode(tokenizer("12 ab").input_ids) == "12 ab"


@each_trust
@pytest.mark.parametrize("auto_class", ["AutoConfig", "AutoModel", "AutoModelForMaskedLM"])
def test_the_layout_of_a_paper_asks_for_conversion(auto_class, trust, tmp_path):
    """It calls itself by the model type of another architecture."""
    publish(tmp_path, "avey_b_paper")
    with pytest.raises(StrictDataclassError, match="`subquad convert` converts them"):
        getattr(transformers, auto_class).from_pretrained(tmp_path, **trust)


# --- weights that would have to be unpickled ---


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def write_pickle(directory, *names):
    for name in names:
        (directory / name).write_bytes(pickle.dumps({"x": Touch(directory / "executed")}))


@each_model
@pytest.mark.parametrize("names", [["pytorch_model.bin"], ["shards"], ["trained.pth"], ["a.pth", "b.pth"]], ids=str)
def test_weights_that_are_pickled_ask_for_conversion(names, model_type, tmp_path):
    tiny_model(model_type).config.save_pretrained(tmp_path)
    source = tmp_path / names[0] if len(names) == 1 else tmp_path
    if names == ["shards"]:
        names, source = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)], tmp_path
        weight_map = {"x": names[0], "y": names[1]}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    write_pickle(tmp_path, *names)
    for auto_class in subquad.ARCHITECTURES[model_type][2]:
        for options in ({}, {"use_safetensors": False}, {"weights_only": False, "dtype": torch.float32}):
            with pytest.raises(ValueError) as raised:
                getattr(transformers, auto_class).from_pretrained(tmp_path, **options)
            assert f"the weights are in {', '.join(names)}, and only" in str(raised.value)
            assert f"`subquad convert {source} OUT`" in str(raised.value)
    assert not (tmp_path / "executed").exists()


def test_safetensors_are_read_where_both_are(tmp_path):
    model = tiny_model("rwkv6")
    model.save_pretrained(tmp_path)
    write_pickle(tmp_path, "pytorch_model.bin")
    loaded = AutoModel.from_pretrained(tmp_path, use_safetensors=False)
    assert torch.equal(loaded.embeddings.weight, model.rwkv.embeddings.weight)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("model_type", ["avey-b", "gecko"])
def test_a_file_that_is_named_itself(model_type, tmp_path):
    model = tiny_model(model_type)
    write_pickle(tmp_path, "trained.pth")
    with pytest.raises(ValueError, match=r"`subquad convert .*trained\.pth OUT`"):
        type(model).from_pretrained(tmp_path / "trained.pth", config=model.config)
    assert not (tmp_path / "executed").exists()


def test_a_directory_without_weights_says_so(tmp_path):
    """What a trainer keeps of its own is no weight file."""
    tiny_model("rwkv6").config.save_pretrained(tmp_path)
    write_pickle(tmp_path, "training_args.bin", "optimizer.pt")
    with pytest.raises(OSError, match="no file named model.safetensors"):
        AutoModel.from_pretrained(tmp_path)


@each_model
def test_a_repository_on_the_hub(model_type, tmp_path):
    """As a cache holds it, from which there is nothing but the repository's name to give to `subquad convert`."""
    repository = tmp_path / "models--someone--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    tiny_model(model_type).config.save_pretrained(snapshot)
    write_pickle(snapshot, "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"`subquad convert DIRECTORY/pytorch_model\.bin OUT`"):
        AutoModel.from_pretrained("someone/model", cache_dir=tmp_path)


def test_a_directory_of_flash_linear_attention(tmp_path):
    """It loads as it is, and is saved under our names."""
    sizes = {"layers": 2, "heads": 3, "head_size": 16, "vocabulary": 97, "intermediate": 96, "ranks": (5, 7)}
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "rwkv6",
                "architectures": ["RWKV6ForCausalLM"],
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "vocab_size": 97,
                "num_heads": 4,
                "proj_low_rank_dim": 32,
                "gate_low_rank_dim": 64,
                "norm_eps": 1e-5,
                "attn": None,
                "fuse_norm": True,
                "hidden_ratio": 3.5,
                "intermediate_size": None,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
        )
    )
    save_file(fla_tensors(**sizes), tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.arange(3, 90, 3)[None]
    expected = reference_logits(trainer_tensors("rwkv6", **sizes), "rwkv6", ids[0].tolist(), head_size_divisor=8)
    torch.testing.assert_close(model.eval()(ids).logits[0], expected.float(), atol=1e-4, rtol=0)
    model.save_pretrained(tmp_path / "saved")
    assert load_file(tmp_path / "saved/model.safetensors").keys() == dict(model.state_dict()).keys()
    fields = json.loads((tmp_path / "saved/config.json").read_text())
    assert fields.keys() <= {*subquad.Rwkv6Config().to_dict(), "architectures", "dtype"}
    assert fields["eos_token_id"] == 0


def test_a_hybrid_of_flash_linear_attention_is_refused(tmp_path):
    fields = {"model_type": "rwkv6", "hidden_size": 64, "proj_low_rank_dim": 32, "attn": {"layers": [1]}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(StrictDataclassError, match="(?s)`attn` must be None, got .*layers"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
