"""What RWKV-7a and 7b have of their own: the authors' numbers, tables in three forms, attention, refusals."""

import copy
import itertools
import os
import sys

import pytest
import torch
from cases import DEEP_EMBED, DEEP_EMBED_A, GOOSE, GREEDY, each, random_ids
from golden_files import read_golden
from peft import PromptTuningConfig, get_peft_model
from torch.nn.functional import layer_norm
from transformers import AutoConfig, AutoModelForCausalLM

import subquad
from subquad import Rwkv7DeepEmbedConfig, Rwkv7DeepEmbedForCausalLM
from subquad.models.rwkv7_deep_embed import modeling_rwkv7_deep_embed as modeling
from subquad_kernels.c import native


each_variant = each(DEEP_EMBED_A, DEEP_EMBED)
TABLES = ("ffn.s_emb", "qkv.k_emb", "qkv.v_emb")


def published(name, dtype):
    """The authors' tensors, and the model of their weights."""
    tensors, weights, told = read_golden(name)
    state_dict = {name if name == "head.weight" else f"rwkv7.{name}": x.to(dtype) for name, x in weights.items()}
    sizes = {"vocab_size": told["vocab_size"], "hidden_size": 128, "num_hidden_layers": 2}
    config = Rwkv7DeepEmbedConfig(**sizes, dea_size=told.get("dea_size"))
    config.set_sizes_from_shapes({name: x.shape for name, x in state_dict.items()})
    return tensors, Rwkv7DeepEmbedForCausalLM.from_pretrained(None, config=config, state_dict=state_dict, dtype=dtype)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 3e-5), (torch.float32, 1e-4)])
@pytest.mark.parametrize("name", ["rwkv7a", "rwkv7b"])
def test_what_the_demos_of_the_authors_computed(name, dtype, tolerance):
    tensors, model = published(name, dtype)
    attended = {}
    for i, block in enumerate(model.rwkv7.blocks if name == "rwkv7b" else []):
        block.qkv.register_forward_hook(lambda *args, i=i: attended.update({i: args[2]}))

    def close(found, expected):
        torch.testing.assert_close(found, expected.to(dtype), atol=tolerance, rtol=0)

    ids = tensors["input_ids"]
    for sizes in ((70,), (1,) * 70, (33, 1, 36)):
        cache, logits = None, []
        for piece in ids.split(sizes, 1):
            out = model(piece, cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits)
        close(torch.cat(logits, 1), tensors["logits"])
        for i, layer in enumerate(cache.layers):
            for ours, theirs in (("attention_shift", "att_shift"), ("feed_forward_shift", "ffn_shift")):
                close(layer.states[ours], tensors[f"state.{i}.{theirs}"])
            close(layer.states["wkv"].to(dtype), tensors[f"state.{i}.wkv"])
            if name == "rwkv7b":
                close(layer.states["qkv_shift"][:, :256].to(dtype), tensors[f"state.{i}.dea_q_shift"])
    close(model(tensors["input_ids_short"]).logits, tensors["logits_short"])
    hidden = model(ids[:1], output_hidden_states=True).hidden_states
    close(hidden[1], tensors["hidden.0"])
    for i, found in attended.items():
        close(found, tensors[f"dea.{i}"])
    model.merge_tables()
    close(model(ids).logits, tensors["logits"])


@torch.no_grad()
@pytest.mark.skipif(native.library() is None, reason="the C library is not available")
def test_the_c_library_computes_what_the_demo_did(tmp_path):
    """With tables as they are in checkpoints, merged, and mapped from a file."""
    tensors, model = published("rwkv7a", torch.float32)
    for change in (lambda: None, model.merge_tables, lambda: model.map_tables(tmp_path)):
        model.save_pretrained(tmp_path)
        change()
        step = model.decoding_step(model.new_cache(), 2)
        step.eager = None  # never called
        logits = torch.stack([step(token) for token in tensors["input_ids"].split(1, 1)], 1)
        torch.testing.assert_close(logits, tensors["logits"], atol=1e-4, rtol=0)


def attend_by_token(dea, x, x0, ids):
    """DeepEmbedAttention of one text, token by token: x and x0 (length, width), ids (length)."""
    before, keys, values, out = [torch.zeros(n, dtype=x.dtype) for n in dea.sizes], [], [], []
    for t, token in enumerate(ids):
        row_k = dea.k_emb.weight[token] + dea.k_emb_x.weight @ x0[t]
        row_v = dea.v_emb.weight[token] + dea.v_emb_x.weight @ x0[t]
        raw = [
            dea.qq.weight @ x[t],
            (x[t] @ dea.k1 @ dea.k2) * row_k,
            torch.tanh(x[t] @ dea.v1 @ dea.v2) * row_v,
        ]
        mixed = [
            layer_norm(now + (last - now) * mu.flatten(), now.shape, norm.weight, norm.bias, norm.eps)
            for now, last, mu, norm in zip(
                raw, before, (dea.x_q, dea.x_k, dea.x_v), (dea.lnq, dea.lnk, dea.lnv), strict=True
            )
        ]
        before = raw
        keys.append(mixed[1])
        values.append(mixed[2])
        scores = torch.stack([mixed[0] @ key for key in keys]) / len(mixed[0]) ** 0.5
        weights = (dea.cap * torch.tanh(scores / dea.cap)).softmax(0)
        out.append(sum(w * value for w, value in zip(weights, values, strict=True)))
    return torch.stack(out)


@torch.no_grad()
@pytest.mark.parametrize("most", [1 << 24, 40, 1])
def test_attention_equals_the_equations(most, monkeypatch):
    """Of packed documents, also if the scores are computed in parts."""
    monkeypatch.setattr(modeling, "MOST_SCORES", most)
    model, ids, bounds = DEEP_EMBED.model().double(), random_ids(1, 23), [0, 1, 10, 23]
    for cap in (64.0, 0.5):
        dea, seen = model.rwkv7.blocks[1].qkv, {}
        dea.cap = cap
        hook = dea.register_forward_hook(
            lambda module, args, out, seen=seen: seen.update(x=args[0], x0=args[1], out=out)
        )
        model(ids, cu_seqlens=torch.tensor(bounds))
        hook.remove()
        for first, last in itertools.pairwise(bounds):
            x, x0, found = (seen[name][0, first:last] for name in ("x", "x0", "out"))
            torch.testing.assert_close(found, attend_by_token(dea, x, x0, ids[0, first:last]), atol=1e-11, rtol=0)


@torch.no_grad()
def test_deep_embed_equals_the_equations():
    model, ids, rank = DEEP_EMBED_A.model().double(), random_ids(2, 9), 4
    ffn, seen = model.rwkv7.blocks[2].ffn, {}
    ffn.register_forward_hook(lambda module, args, out: seen.update(x=args[0], x0=args[1], out=out))
    model(ids)
    x, x0 = seen["x"], seen["x0"]
    for row in range(2):
        for t in range(9):
            now, last = x[row, t], x[row, t - 1] if t else torch.zeros(48, dtype=x.dtype)
            hidden = torch.relu(ffn.key.weight @ (now + (last - now) * ffn.x_k.flatten())) ** 2
            table = (ffn.s_emb.weight[ids[row, t]] + ffn.s_emb_x.weight @ x0[row, t]).view(rank, rank)
            low = now @ ffn.s1
            e = torch.stack([sum(low[i] * table[i, j] for i in range(rank)) for j in range(rank)])
            expected = ffn.value.weight @ (hidden * (e @ ffn.s2 + ffn.s0.flatten()))
            torch.testing.assert_close(seen["out"][row, t], expected, atol=1e-11, rtol=1e-11)


@each_variant
def test_a_new_model_is_a_goose(case):
    torch.manual_seed(0)
    model = Rwkv7DeepEmbedForCausalLM(case.config()).eval()
    goose = subquad.Rwkv7ForCausalLM(GOOSE.config()).eval()
    with torch.no_grad():  # zeros at first, which would hide all else
        for name, parameter in model.named_parameters():
            if name.endswith(("output.weight", "ffn.value.weight")):
                parameter.normal_(std=0.2)
    result = goose.load_state_dict(model.state_dict(), strict=False)
    assert not result.missing_keys
    ids = random_ids(2, 20)
    torch.testing.assert_close(model(ids).logits, goose(ids).logits)
    model(ids, labels=ids).loss.backward()
    learned = {"ffn.s0", "ffn.s2", "qkv.lnv.weight"} if case is DEEP_EMBED else {"ffn.s0", "ffn.s2"}
    for name in learned:
        assert all(block.get_parameter(name).grad.abs().max() > 0 for block in model.rwkv7.blocks), name


# --- tables ---


@torch.no_grad()
@each_variant
def test_merged_tables(case, tmp_path):
    model, ids = case.model(), random_ids(2, 30)
    expected, numbers = model(ids).logits, model.num_parameters()
    merged = copy.deepcopy(model)
    merged.merge_tables()
    torch.testing.assert_close(merged(ids).logits, expected, atol=1e-4, rtol=1e-4)
    width, sizes = 48, (16,) if case is DEEP_EMBED_A else (16, 16, 48)
    assert merged.num_parameters() == numbers - 3 * width * sum(sizes)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(again(ids).logits, merged(ids).logits)
    with pytest.raises(ValueError, match="The tables are merged already"):
        again.merge_tables()
    # One decoding step, from a cache of the model as it was.
    caches = [each(ids[:, :-1], use_cache=True).cache for each in (model, merged)]
    steps = [merged(ids[:, -1:], cache=cache).logits[:, 0] for cache in caches]
    for step in steps:
        torch.testing.assert_close(step, expected[:, -1], atol=1e-4, rtol=1e-4)


def test_only_plain_tables_are_merged(tmp_path):
    model = DEEP_EMBED.model()
    model.rwkv7.blocks[0].ffn.s_emb_x = torch.nn.Sequential(model.rwkv7.blocks[0].ffn.s_emb_x)
    with pytest.raises(ValueError, match=r"`rwkv7\.blocks\.0\.ffn\.s_emb_x` is of class Sequential"):
        model.merge_tables()
    DEEP_EMBED.model().save_pretrained(tmp_path)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=subquad.Int8Config())
    before = {name: x.clone() for name, x in rounded.state_dict().items()}
    with pytest.raises(ValueError, match="is of class Int8Embedding: only plain tables can be merged"):
        rounded.merge_tables()
    assert not rounded.config.merged_tables
    assert all(torch.equal(x, before[name]) for name, x in rounded.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("merged", [False, True])
def test_mapped_tables(merged, tmp_path):
    model, ids = DEEP_EMBED.model(merged_tables=merged), random_ids(2, 20)
    expected = model(ids).logits
    generated = model.generate(ids, max_new_tokens=5, **GREEDY)
    model.save_pretrained(tmp_path / "model", max_shard_size="40KB")
    other = DEEP_EMBED.model(seed=1, merged_tables=merged)
    with pytest.raises(ValueError, match=r"model: rwkv7\.blocks\.0\.ffn\.s_emb\.weight differs from the model's"):
        other.map_tables(tmp_path / "model")
    with pytest.raises(ValueError, match=r"has no tensor rwkv7\.blocks\.0\.ffn\.s_emb\.weight"):
        model.map_tables(tmp_path)
    with pytest.raises(ValueError, match="`directory` must exist, got '/missing'"):
        model.map_tables("/missing")
    model.map_tables(tmp_path / "model")
    assert torch.equal(model(ids).logits, expected)
    assert torch.equal(model.generate(ids, max_new_tokens=5, **GREEDY), generated)
    tables = [block.get_submodule(name).weight for block in model.rwkv7.blocks for name in TABLES]
    addresses = [table.data_ptr() for table in tables]
    if sys.platform == "linux":
        assert {os.path.dirname(mapped_file(address)) for address in addresses} == {str(tmp_path / "model")}
    model.double()  # everything else
    assert addresses == [table.data_ptr() for table in tables] and {x.dtype for x in tables} == {torch.float32}
    torch.testing.assert_close(model(ids).logits.float(), expected, atol=1e-4, rtol=1e-4)
    for action, name in ((lambda: model.resize_token_embeddings(120), "resized"), (model.merge_tables, "merged")):
        if action == model.merge_tables and merged:
            continue
        with pytest.raises(ValueError, match=f"is mapped from a file, and cannot be {name}"):
            action()
    model.float().save_pretrained(tmp_path / "again")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "again")(ids).logits, expected)


def mapped_file(address: int) -> str:
    """The file that the memory at an address belongs to, empty if it is none."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            place, *_, name = line.rstrip("\n").split(maxsplit=5) if line.count(" ") > 5 else (line.split()[0], "")
            first, last = (int(each, 16) for each in place.split("-"))
            if first <= address < last:
                return name.strip()
    return ""


@torch.no_grad()
@pytest.mark.parametrize("merged", [False, True])
def test_other_vocabularies(merged):
    model, ids = DEEP_EMBED.model(merged_tables=merged), random_ids(2, 20)
    expected = model(ids).logits
    model.resize_token_embeddings(103)
    for block in model.rwkv7.blocks:
        for name in TABLES:
            table = block.get_submodule(name)
            assert table.num_embeddings == len(table.weight) == 103 and table.weight.requires_grad
            torch.testing.assert_close(table.weight[97:], table.weight[:97].mean(0).expand(6, -1))
    torch.testing.assert_close(model(ids).logits[..., :97], expected)
    assert model(torch.full((1, 3), 102)).logits.isfinite().all()
    model.resize_token_embeddings(97)
    torch.testing.assert_close(model(ids).logits, expected)
    assert len(model.rwkv7.blocks[2].qkv.v_emb.weight) == 97


# --- numbers ---


@torch.no_grad()
def test_a_large_stream_in_float16():
    """Attention reads the residual stream as it is, which may be larger than any number of float16."""
    model, ids = DEEP_EMBED.model(), random_ids(2, 20)
    for block in model.rwkv7.blocks:
        block.qkv.k2 *= 0.1
    model.rwkv7.blocks[0].ffn.value.weight *= 1e4
    seen = []
    model.rwkv7.blocks[1].qkv.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    expected = model(ids).logits
    found = model.half()(ids).logits
    assert all(x.abs().max() > 65504 for x, _ in seen)
    assert found.isfinite().all() and seen[1][1].isfinite().all()
    torch.testing.assert_close(found.float(), expected, atol=0.05 * expected.abs().max().item(), rtol=0)


# --- refusals ---


def test_soft_prompts_are_refused():
    adapted = get_peft_model(DEEP_EMBED.model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="`inputs_embeds`: .* Give `input_ids`; soft prompts are not possible"):
        adapted(input_ids=random_ids(1, 5))


def test_continuous_batching():
    assert len(DEEP_EMBED_A.model().generate_batch([[3, 4, 5]], max_new_tokens=2)) == 1
    with pytest.raises(ValueError, match="The state of this Rwkv7DeepEmbedForCausalLM grows with the text"):
        DEEP_EMBED.model().generate_batch([[3, 4, 5]], max_new_tokens=2)


def test_directories_of_another_variant(tmp_path):
    """The weights of one with the configuration of another are refused by name."""
    geese = {"7": GOOSE, "7a": DEEP_EMBED_A, "7b": DEEP_EMBED}
    for name, case in geese.items():
        case.model().save_pretrained(tmp_path / name)
    merged = DEEP_EMBED.model()
    merged.merge_tables()
    merged.save_pretrained(tmp_path / "merged")
    for config, weights, message in (
        ("7", "7a", "is a tensor of RWKV-7a, with DeepEmbed, not of the model type rwkv7"),
        ("7", "7b", "is a tensor of RWKV-7b, with DeepEmbed and attention, not of the model type rwkv7"),
        (
            "7a",
            "7",
            r"`dea_size` is None, .* RWKV-7a, but the tensors are those of RWKV-7 \(Goose\), without DeepEmbed",
        ),
        ("7a", "7b", "`dea_size` is None, .* RWKV-7a, but the tensors are those of RWKV-7b"),
        ("7b", "7a", "`dea_size` is 16, .* RWKV-7b, but the tensors are those of RWKV-7a"),
        ("7b", "merged", "`merged_tables` is False, but the tables of the file are merged"),
        ("merged", "7b", "`merged_tables` is True, but the tables of the file are not merged"),
    ):
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(
                tmp_path / weights, config=AutoConfig.from_pretrained(tmp_path / config)
            )
