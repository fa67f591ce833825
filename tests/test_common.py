"""What users of transformers expect of every class, beyond the contract."""

import pytest
import torch
import transformers
from cases import (
    CASES,
    GREEDY,
    VOCABULARY,
    each_causal,
    each_head,
    each_model,
    each_rwkv,
    lm_class,
    model_class,
    padded,
    random_ids,
    tiny_config,
    tiny_model,
)
from transformers import AutoModel, generation

import subquad
from subquad.modeling.padding import Tokens


def load(model_type, path, **options):
    """The model that is trained on text alone, by way of its Auto class."""
    return getattr(transformers, lm_class(model_type)).from_pretrained(path, **options)


@pytest.mark.fast
@each_head
def test_save_and_load(model_type, auto_class, tmp_path):
    model, ids = tiny_model(model_type, auto_class), random_ids(2, 9)
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} <= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    fields, expected = loaded.config.to_dict(), model.config.to_dict()
    assert {**fields, "_name_or_path": ""} == {**expected, "_name_or_path": ""}
    torch.testing.assert_close(loaded(ids)[0], model(ids)[0])


@each_causal
@pytest.mark.parametrize("implementation", [None, "static"])
def test_the_length_of_the_training_texts_is_no_limit(model_type, implementation, monkeypatch):
    warned = []
    monkeypatch.setattr(generation.stopping_criteria.logger, "warning_once", warned.append)
    model, ids = tiny_model(model_type), random_ids(1, 9)
    model.config.max_position_embeddings = 5
    options = {**GREEDY, "cache_implementation": implementation, "disable_compile": True}
    assert model.generate(ids, max_new_tokens=3, **options).shape[1] == 9 + 3
    assert model.generate(ids, **options).shape[1] == 9 + 20  # transformers' default
    assert not warned


@each_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_save_and_load_in_a_dtype(model_type, dtype, tmp_path):
    model = tiny_model(model_type).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = load(model_type, tmp_path)
    assert loaded.dtype == dtype
    for (name, p), q in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p, q), name


@each_model
def test_base_model_in_a_head_and_back(model_type, tmp_path):
    model, ids = tiny_model(model_type), random_ids(1, 9)
    model.save_pretrained(tmp_path / "head")
    base = AutoModel.from_pretrained(tmp_path / "head")
    torch.testing.assert_close(base(ids).last_hidden_state, model.base_model(ids).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    again, info = load(model_type, tmp_path / "base", output_loading_info=True)
    assert set(info["missing_keys"]) == (
        set() if model.config.tie_word_embeddings else {f"{model.lm_head_name}.weight"}
    )
    torch.testing.assert_close(again.base_model(ids).last_hidden_state, base(ids).last_hidden_state)


@pytest.mark.fast
@each_head
def test_outputs(model_type, auto_class):
    model, ids = tiny_model(model_type, auto_class), random_ids(2, 9)
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert {state.shape for state in out.hidden_states} == {(2, 9, model.config.hidden_size)}
    as_tuple = model(ids, output_hidden_states=True, return_dict=False)
    torch.testing.assert_close(as_tuple[0], out[0])
    torch.testing.assert_close(as_tuple[-1][0], out.hidden_states[0])
    if CASES[model_type].causal:
        assert out.cache is not None
        assert model(ids, use_cache=False).cache is None
        assert model.train()(ids).cache is None
    model.config.output_hidden_states = True
    assert model(ids).hidden_states is not None


@each_rwkv
def test_hidden_states_are_what_the_blocks_make(model_type):
    model, ids = tiny_model(model_type), random_ids(1, 9)
    seen = []
    hooks = [block.register_forward_hook(lambda _m, _i, out: seen.append(out)) for block in model.rwkv.blocks]
    out = model(ids, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    expected = [model.get_input_embeddings()(ids), *seen[:-1], model.rwkv.ln_out(seen[-1])]
    torch.testing.assert_close(out.hidden_states, tuple(expected))


@each_causal
@pytest.mark.parametrize("kept", [0, 1, 4, torch.tensor([0, 5, 8])])
def test_logits_to_keep(model_type, kept):
    model, ids = tiny_model(model_type), random_ids(2, 9)
    logits = model(ids).logits
    expected = logits[:, kept] if isinstance(kept, torch.Tensor) else logits[:, -kept:]
    # Another number of tokens is multiplied in another order.
    torch.testing.assert_close(model(ids, logits_to_keep=kept).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.fast
@each_causal
def test_loss(model_type):
    model, ids = tiny_model(model_type), random_ids(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    out = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)


@each_model
@pytest.mark.parametrize("size", [VOCABULARY + 11, VOCABULARY - 11])
@pytest.mark.parametrize("tied", [False, True])
def test_resize_token_embeddings(model_type, size, tied, tmp_path):
    model, ids = tiny_model(model_type, tie_word_embeddings=tied), random_ids(1, 9) % (VOCABULARY - 11)
    before = model(ids).logits
    model.resize_token_embeddings(size)
    assert model.config.vocab_size == size
    common = min(size, VOCABULARY)
    after = model(ids).logits
    assert after.shape[-1] == size
    torch.testing.assert_close(after[..., :common], before[..., :common], atol=1e-4, rtol=1e-4)
    assert torch.isfinite(after).all()
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(type(model).from_pretrained(tmp_path)(ids).logits, after)


@each_causal
def test_classification_is_exact_under_padding(model_type):
    model = tiny_model(model_type, "AutoModelForSequenceClassification", num_labels=4, pad_token_id=0)
    rows = [random_ids(n, seed=n) for n in (3, 70, 12)]
    alone = torch.cat([model(row[None]).logits for row in rows])
    for side in ("left", "right", "anywhere"):
        inputs = padded([{"input_ids": row[None]} for row in rows], side)
        torch.testing.assert_close(model(**inputs).logits, alone, atol=1e-4, rtol=1e-4)
        if side != "anywhere":  # without a mask, the padding id at the ends of a row marks the padding
            torch.testing.assert_close(model(inputs["input_ids"]).logits, alone, atol=1e-4, rtol=1e-4)
    # Inside a text the padding id is a token like any other.
    torch.testing.assert_close(
        model(torch.tensor([[5, 0, 7]])).logits,
        model(torch.tensor([[5, 0, 7]]), attention_mask=torch.ones(1, 3)).logits,
    )


@pytest.mark.fast
@each_model
@pytest.mark.parametrize(
    ("problem", "labels", "expected"),
    [
        (None, torch.tensor([0, 2]), torch.nn.functional.cross_entropy),
        ("regression", torch.rand(2, 3), torch.nn.functional.mse_loss),
        (
            "multi_label_classification",
            torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]),
            torch.nn.functional.binary_cross_entropy_with_logits,
        ),
    ],
)
def test_classification_losses(model_type, problem, labels, expected):
    model = tiny_model(model_type, "AutoModelForSequenceClassification", num_labels=3, problem_type=problem)
    out = model(random_ids(2, 9), labels=labels)
    torch.testing.assert_close(out.loss, expected(out.logits, labels))


@each_model
def test_batches_and_singles_agree_in_low_precision(model_type):
    rows = random_ids(3, 20)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)):
        model = tiny_model(model_type).to(dtype)
        batch = model(rows).logits.float()
        for n in range(3):
            alone = model(rows[n : n + 1]).logits.float()[0]
            assert ((batch[n] - alone).norm() / alone.norm()) < tolerance


@each_model
def test_from_meta(model_type):
    with torch.device("meta"):
        model = model_class(model_type)(tiny_config(model_type))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model(torch.zeros(1, 3, dtype=torch.long, device="meta")).logits.shape == (1, 3, VOCABULARY)


@pytest.mark.fast
@each_model
def test_seed_decides_the_weights(model_type):
    def weights(seed):
        torch.manual_seed(seed)
        return torch.cat(
            [p.flatten() for p in model_class(model_type, "AutoModel")(tiny_config(model_type)).parameters()]
        )

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
    assert torch.isfinite(weights(0)).all()


@each_model
def test_offload_to_disk(model_type, tmp_path):
    model, ids = tiny_model(model_type), random_ids(2, 9)
    model.save_pretrained(tmp_path)
    prefix = model.base_model_prefix
    parts = [f"{prefix}.{name}" for name, _ in model.base_model.named_children()]
    device_map = dict.fromkeys([*parts, getattr(model, "lm_head_name", "lm_head")], "cpu")
    device_map |= {
        f"{prefix}.{name}": "disk" for name in ("blocks", "layers", "ranker") if f"{prefix}.{name}" in parts
    }
    loaded = load(model_type, tmp_path, device_map=device_map, offload_folder=tmp_path / "off")
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    if CASES[model_type].causal:
        options = {"max_new_tokens": 4, **GREEDY}
        assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))


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


@each_model
def test_mixed_dtypes_under_autocast(model_type):
    """On a GPU, autocast computes layer norms in float32, whatever the dtype of the weights."""
    model, ids = tiny_model(model_type).to(torch.bfloat16), random_ids(1, 9)
    expected = model(ids).logits
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.register_forward_pre_hook(lambda _m, inputs: (inputs[0].to(torch.bfloat16),))
            module.register_forward_hook(lambda _m, _i, out: out.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(ids).logits
    assert (out - expected).norm() / expected.norm() < 0.05


def test_tokens_move_between_devices():
    tokens = Tokens(2, 3, torch.device("cpu"), torch.tensor([[0, 1, 1], [1, 1, 1]]))
    moved = tokens.to("meta")
    assert moved.mask.device.type == "meta"
    assert tokens.mask.device.type == "cpu"
    assert moved.zero_padding(torch.ones(2, 3, 4, device="meta")).device.type == "meta"
    assert moved.forward_fill(torch.ones(2, 3, 4, device="meta"), None).device.type == "meta"


@each_model
def test_classifier_refuses_packed_documents(model_type):
    model = tiny_model(model_type, "AutoModelForSequenceClassification")
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        with pytest.raises(ValueError, match="`cu_seqlens`: a classifier"):
            model(random_ids(1, 6), **{name: torch.tensor([0, 6])})


def test_exports_are_documented():
    for name in subquad.__all__:
        value = getattr(subquad, name)
        if isinstance(value, type):
            assert value.__doc__, name
