"""Gecko against a plain reading of the paper, and what it has beyond the contract."""

import itertools
import math

import cases
import pytest
import torch
import torch.nn.functional as F
from cases import TOLERANCE, VOCABULARY, assert_same_states, tiny_config, tiny_model
from golden_files import read_golden
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from safetensors.torch import save_file

from subquad import GeckoCache, GeckoConfig, GeckoForCausalLM


BOS = 1
SMALL = {"num_layers": 2, "chunk_size": 4}
ONE = {"num_layers": 1, "chunk_size": 4}
LARGE = {"num_layers": 1, "chunk_size": 64}  # rings have room for 64 tokens at first, of 128

VARIANTS = {
    "plain": {},
    "rotary embeddings nowhere, no gate": {
        "num_rope_heads": 0,
        "swiglu": False,
        "z_dim": 60,
        "value_dim": 12,
    },
    "rotary embeddings everywhere, rescaled": {"num_rope_heads": None, "rope_base": 10, "rescale_nffn": True},
    "odd heads, two hops, scaled": {"z_dim": 15, "num_rope_heads": 0, "two_hop_residual": True, "scale_emb": True},
    "tied, pairs of channels": {"share_emb": True, "timenorm_num_groups": 24},
    "groups of channels": {"timenorm_num_groups": 1, "layernorm_num_groups": 3, "norm_eps": 0.1},
    "no weights, short averages": {"norm_affine": False, "timenorm_beta1": 0.5, "timenorm_beta2": 0.8},
    "no average of means": {"timenorm_beta1": 0, "timenorm_beta2": 0},
    "one token a chunk, one moving average": {"chunk_size": 1, "cema_ndim": 1},
    "three tokens a chunk, another begin token": {"chunk_size": 3, "bos_token_id": 5},
    "one chunk, one head": {"chunk_size": 40, "num_heads": 1, "num_rope_heads": 1, "z_dim": 6, "value_dim": 10},
    "no begin token": {"bos_token_id": None},
    "one document": {"document_boundaries": False},
}

# Where begin tokens are in a text of 31 tokens and chunks of four.
BEGINS = {
    "nowhere": [],
    "at the first token": [0],
    "at the first token of a chunk": [8],
    "at the last token of a chunk": [11],
    "on both sides of a border": [15, 16],
    "twice in a chunk": [9, 11],
    "at the first and the last token of a chunk": [0, 8, 11],
    "in neighbouring chunks": [5, 10, 14],
    "in a chunk that has just left": [2, 21],
    "a whole chunk": [12, 13, 14, 15],
    "two chunks": list(range(8, 16)),
    "at the last token": [30],
    "everywhere": list(range(31)),
}


def text(begins, length=31, seed=0, bos=BOS):
    """One row of ids, with begin tokens at these places and nowhere else."""
    ids = torch.randint(6, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))
    ids[:, begins] = bos
    return ids


def texts():
    """The texts of all BEGINS, and some in which begin tokens are at random places."""
    rows = [text(begins, seed=seed) for seed, begins in enumerate(BEGINS.values())]
    generator = torch.Generator().manual_seed(0)
    for seed, share in enumerate((0.1, 0.2, 0.5)):
        begins = (torch.rand(31, generator=generator) < share).nonzero().flatten().tolist()
        rows.append(text(begins, seed=100 + seed))
    return torch.cat(rows)


def padded(rows, side, value):
    """Rows of ids as one batch, and its mask."""
    batch = cases.padded([{"input_ids": row[None]} for row in rows], side, value)
    return batch["input_ids"], batch["attention_mask"]


def pieces(length, seed):
    """Random lengths that sum to `length`."""
    generator, sizes = torch.Generator().manual_seed(seed), []
    while sum(sizes) < length:
        most = min(int(torch.randint(1, 14, (), generator=generator)), length - sum(sizes))
        sizes.append(int(torch.randint(1, most + 1, (), generator=generator)))
    return sizes


def read(model, ids, sizes, cache=None, **inputs):
    """The logits of a text that is read in pieces, and the cache after it."""
    cache = model.new_cache() if cache is None else cache
    logits = [model(piece, cache=cache, **inputs).logits for piece in ids.split(list(sizes), dim=1)]
    return torch.cat(logits, 1), cache


# Logits of the authors' wiring.


def golden(name, path):
    """A model that is loaded by the names of the authors' code, with its buffers; ids and logits."""
    tensors, weights, config = read_golden(name)
    GeckoConfig(**config).save_pretrained(path)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    model, info = GeckoForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model, tensors["input_ids"], tensors["logits"]


@torch.no_grad()
@pytest.mark.parametrize("name", ["gecko", "gecko_documents"])
def test_published_logits(name, tmp_path):
    model, ids, expected = golden(name, tmp_path)
    torch.testing.assert_close(model(ids).logits, expected, atol=2e-5, rtol=0)
    for sizes in ((1,) * 45, *(pieces(45, seed) for seed in range(2))):
        torch.testing.assert_close(read(model, ids, sizes)[0], expected, atol=2e-5, rtol=0)


# The paper, one document and one token after the other.


def plain_timestep_norm(config, norm, x):
    """Equations 3, 11 and 12 of the tokens x (length, width) of a document."""
    beta1, beta2, m, v, out = config.timenorm_beta1, config.timenorm_beta2, 0, 0, []
    for t, x_t in enumerate(x, 1):
        groups = x_t.view(config.timenorm_num_groups, -1)
        mu = groups.mean(1)
        m = beta1 * m + (1 - beta1) * mu
        v = beta2 * v + (1 - beta2) * (groups - mu[:, None]).square().mean(1)
        mean, variance = m / (1 - beta1**t), v / (1 - beta2**t)
        out.append(((groups - mean[:, None]) / (variance + config.norm_eps).sqrt()[:, None]).flatten())
    return torch.stack(out) * (norm.weight + 1) + norm.bias


def plain_moving_average(config, cema, x):
    """Equations 1 and 2."""
    alpha, delta, size = cema.alpha.sigmoid(), cema.delta.sigmoid(), config.cema_ndim
    theta = torch.stack([2 * math.pi * k / size * cema.theta.sigmoid() for k in range(1, size + 1)], 1)
    eta, h, out = torch.complex(*cema.gamma.unbind(-1)), 0, []
    for x_t in x:
        h = alpha * x_t[:, None] + (1 - alpha * delta) * torch.complex(theta.cos(), theta.sin()) * h
        out.append((eta * h).sum(1).real)
    return torch.stack(out)


def plain_rms_norm(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def plain_rotary(config, x, place):
    """x (heads, size) of the token at that place."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    angle = place * float(config.rope_base) ** (-torch.arange(pairs.shape[1], dtype=x.dtype) / pairs.shape[1])
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(1)
    return torch.cat((turned[: config.num_rope_heads], x[config.num_rope_heads :]))


def plain_memories(config, keys, values, begin):
    """Equations 17 to 24: the memory after each chunk of a document that begins at that place."""
    z, memory, after = 0, torch.zeros(keys.shape[1], keys.shape[2], values.shape[2], dtype=keys.dtype), {}
    for s in range(begin // config.chunk_size, (begin + len(keys)) // config.chunk_size):
        chunk = slice(max(s * config.chunk_size - begin, 0), (s + 1) * config.chunk_size - begin)
        k, v = keys[chunk].transpose(0, 1), values[chunk].transpose(0, 1)
        w = k.exp().sum(1)
        z_before, z = z, z + w
        phi, psi = k.exp() / w[:, None], k.softmax(-1)
        memory = (z_before / z)[..., None] * memory + (w / z)[..., None] * (phi.mT @ (v - psi @ memory))
        after[s] = memory
    return after


def plain_mega(config, mega, x, begin):
    size, heads = config.chunk_size, config.num_heads
    t = plain_timestep_norm(config, mega.timenorm, x)
    groups = (plain_moving_average(config, mega.cema, t) + t).unflatten(-1, (config.layernorm_num_groups, -1))
    m = plain_rms_norm(groups, config.norm_eps).flatten(1)
    if config.norm_affine:
        m = m * (mega.rmsnorm.weight + 1)
    m = m * (1 + config.hidden_dropout)
    z = plain_rms_norm(mega.wz(m).unflatten(-1, (heads, -1)), config.norm_eps)
    gamma = (mega.gamma + 1).unflatten(-1, (heads, -1)) / math.sqrt(z.shape[-1])
    q, k, q_m, k_m = (
        z * scale + shift for scale, shift in zip(gamma, mega.beta.unflatten(-1, (heads, -1)), strict=True)
    )
    v, gate = F.silu(mega.wv(t)).unflatten(-1, (heads, -1)), F.silu(mega.wr(m))
    if config.num_rope_heads:
        q, k = (torch.stack([plain_rotary(config, y, begin + i) for i, y in enumerate(rows)]) for rows in (q, k))

    memories, out = plain_memories(config, k_m, v, begin), []
    for i in range(len(x)):
        chunk = (begin + i) // size
        seen = slice(max((chunk - 1) * size - begin, 0), i + 1)
        weights = torch.einsum("hd,jhd->hj", q[i], k[seen]).softmax(-1) * (1 + config.attention_dropout)
        attended = torch.einsum("hj,jhd->hd", weights, v[seen]).flatten()  # 13
        remembered = 0
        if chunk - 2 in memories:
            remembered = (q_m[i].softmax(-1)[:, None] @ memories[chunk - 2]).flatten()  # 27
        out.append(attended * gate[i] + remembered)
    out = torch.stack(out) * (1 + config.hidden_dropout)
    return x + (mega.wh1(m) + mega.wh2(out)) * (1 + config.dropout)


def plain_feed_forward(config, nffn, y, x):
    groups = y.unflatten(-1, (config.layernorm_num_groups, -1))
    centred = groups - groups.mean(-1, keepdim=True)
    n = plain_rms_norm(centred, config.norm_eps).flatten(1)
    if config.norm_affine:
        n = n * (nffn.norm.weight + 1) + nffn.norm.bias
    hidden = F.silu(nffn.fc1(n)) * (nffn.fc3(n) if config.swiglu else 1)
    out = nffn.fc2(hidden * (1 + config.hidden_dropout)) * (1 + config.dropout)
    return out * (nffn.alpha if config.rescale_nffn else 1) + (x if config.two_hop_residual else y)


def plain(model, ids):
    """Logits of ids (batch, length). Dropout only makes everything larger, by its rate."""
    config, rows = model.config, []
    for row in ids:
        begins = [0, len(row)]
        if config.document_boundaries and config.bos_token_id is not None:
            begins = sorted({*begins, *(row == config.bos_token_id).nonzero().flatten().tolist()})
        logits = []
        for begin, end in itertools.pairwise(begins):
            x = model.model.embed.weight[row[begin:end]] * (math.sqrt(config.model_dim) if config.scale_emb else 1)
            x = x * (1 + config.dropout)
            for block in model.model.layers:
                x = plain_feed_forward(config, block.nffn, plain_mega(config, block.mega, x, begin), x)
            logits.append(
                plain_timestep_norm(config, model.model.output["final_norm"], x) @ model.output["output"].weight.T
            )
        rows.append(torch.cat(logits))
    return torch.stack(rows)


def assert_the_paper(model, ids):
    """Whether logits and the gradients of all parameters, which are returned, are those of [`plain`], in float64."""
    logits, expected = model(ids).logits, plain(model, ids)
    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=1e-9)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads, grads_expected = (torch.autograd.grad((y * weights).sum(), parameters) for y in (logits, expected))
    for name, grad, grad_expected in zip(names, grads, grads_expected, strict=True):
        torch.testing.assert_close(
            grad, grad_expected, atol=1e-8, rtol=1e-8, msg=lambda message, name=name: f"{name} {message}"
        )
    return grads


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_paper(variant):
    model = tiny_model("gecko", **SMALL | VARIANTS[variant]).double()
    bos = model.config.bos_token_id or BOS
    grads = assert_the_paper(model, torch.cat((text([], bos=bos), text([5, 6, 11, 16], seed=1, bos=bos))))
    assert all(grad.abs().sum() > 0 for grad in grads)


@pytest.mark.parametrize("begins", BEGINS)
def test_documents(begins):
    assert_the_paper(tiny_model("gecko", **SMALL).double(), text(BEGINS[begins]))


# Begin tokens, wherever they are.


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"scale_emb": True}, {"document_boundaries": False}, {"bos_token_id": None}])
def test_documents_in_embeddings(fields):
    model, ids = tiny_model("gecko", **ONE | fields), texts()
    embeds = model.get_input_embeddings()(ids)
    logits = model(ids).logits
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, logits)
    cache, out = model.new_cache(), []
    for piece in embeds.split(pieces(31, 0), dim=1):
        out.append(model(inputs_embeds=piece, cache=cache).logits)
    torch.testing.assert_close(torch.cat(out, 1), logits, **TOLERANCE)
    # What is only nearly the begin token begins nothing.
    embeds[..., 0] += 1e-3
    one = tiny_model("gecko", **ONE | fields | {"document_boundaries": False})
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, one(inputs_embeds=embeds).logits)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right", "anywhere"])
def test_documents_in_padded_rows(side):
    # Padding is the begin token itself, which only the mask tells from the text.
    model = tiny_model("gecko", **SMALL, pad_token_id=BOS)
    rows = [text([0, 5], 9)[0], text([], 31, seed=1)[0], text([0, 8, 11], 12, seed=2)[0], text([0], 1, seed=3)[0]]
    more = torch.cat([text(begins, 6, seed=seed) for seed, begins in enumerate(([], [0], [2, 3], []))])
    ids, mask = padded(rows, side, BOS)
    out = model(ids, attention_mask=mask)
    after, _ = read(model, more, (1, 5), out.cache)
    for n, row in enumerate(rows):
        alone = model(torch.cat((row, more[n]))[None]).logits[0]
        torch.testing.assert_close(out.logits[n][mask[n] == 1], alone[: len(row)], **TOLERANCE)
        torch.testing.assert_close(after[n], alone[len(row) :], **TOLERANCE)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    ids, mask = padded(rows, "left", BOS)
    generated = model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    for n, row in enumerate(rows):
        alone = model.generate(row[None], attention_mask=torch.ones_like(row[None]), **options)
        assert generated[n].tolist() == alone[0, len(row) :].tolist()


@torch.no_grad()
def test_a_text_of_millions_of_tokens():
    model, ids = tiny_model("gecko", **SMALL | {"num_rope_heads": None}), text([0, 21])
    expected = tiny_model("gecko", **SMALL | {"num_rope_heads": None}).double()(ids).logits
    cache = model(text([], 16, seed=1)).cache
    # As if those tokens had been read again and again: the document that now begins has nothing of them.
    moved = 4_000_000 - 16
    cache.seen_tokens += moved
    for name in ("lengths", "begins"):
        cache.after_blocks.states[name] += moved
    for sizes in ((31,), (1,) * 31, pieces(31, 0)):
        logits, after = read(model, ids, sizes, cache.clone())
        torch.testing.assert_close(logits.double(), expected, **TOLERANCE)
        assert after.after_blocks.states["lengths"].tolist() == [4_000_031]


# The cache.


@torch.no_grad()
@pytest.mark.parametrize("begins", [[], [30, 64, 65, 127, 140]])
def test_rings_that_grow(begins):
    model, ids = tiny_model("gecko", **LARGE), torch.cat((text(begins, 200), text([], 200, seed=1)))
    whole = model(ids).logits
    assert model(ids[:, :64]).cache.held_tokens == 64
    assert model(ids[:, :65]).cache.held_tokens == 128
    for sizes in ((40, 24, 1, 135), (40, 25, 135), (63, 1, 1, 62, 1, 1, 71), (1, 150, 49), (128, 72)):
        caches = model.new_cache(), model.new_cache(static=True)
        at = 0
        for size in sizes:
            for cache in caches:
                logits = model(ids[:, at : at + size], cache=cache).logits
                torch.testing.assert_close(logits, whole[:, at : at + size], **TOLERANCE)
            at += size
            assert_same_states(*caches)
            assert caches[1].held_tokens == 128


@torch.no_grad()
@pytest.mark.parametrize("loaded", ["dynamic", "static"])
@pytest.mark.parametrize("saved", ["dynamic", "static"])
def test_saved_rings(saved, loaded, tmp_path):
    model, ids = tiny_model("gecko", **LARGE), text([30, 64, 127], 200)
    whole = model(ids).logits
    for length in (40, 64, 65, 150):
        cache = model.new_cache(static=saved == "static")
        model(ids[:, :length], cache=cache)
        cache.save(tmp_path / "cache.safetensors")
        for sizes in ((1, 1, 45), (50,)):
            other = GeckoCache.load(tmp_path / "cache.safetensors", model.config, static=loaded == "static")
            assert_same_states(other, cache)
            stop = length + sum(sizes)
            logits, _ = read(model, ids[:, length:stop], sizes, other)
            torch.testing.assert_close(logits, whole[:, length:stop], **TOLERANCE)


# Dropout.


def larger(x, p=0.5, training=True, train=True, inplace=False):
    """What [`plain`] has for dropout."""
    return x * (1 + p) if training and train else x


@pytest.mark.parametrize("name", ["dropout", "hidden_dropout", "attention_dropout", "all"])
def test_dropout(name, monkeypatch):
    rates = {"dropout": 0.1, "hidden_dropout": 0.2, "attention_dropout": 0.4}
    rates = rates if name == "all" else {name: rates[name]}
    model, ids = tiny_model("gecko", **SMALL, **rates).double(), text([5, 6, 11, 16])
    without = tiny_model("gecko", **SMALL).double()
    torch.testing.assert_close(model(ids).logits, without(ids).logits)
    for module in (F, torch):
        monkeypatch.setattr(module, "dropout", larger)
    logits = model.train()(ids).logits
    torch.testing.assert_close(logits, plain(model, ids), atol=1e-9, rtol=1e-9)
    assert not torch.allclose(logits, without(ids).logits)
    torch.testing.assert_close(model.eval()(ids).logits, without(ids).logits)


@torch.no_grad()
def test_dropout_of_attention():
    model = tiny_model("gecko", **ONE, attention_dropout=0.3).train()
    seen = []
    model.model.layers[0].mega.wh2.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    ids = text([], 2).expand(500, -1)
    for mode in (True, False):
        model.train(mode)(ids)
    # The first token attends to itself alone, all or nothing in each head; of the second there are two weights.
    dropped, full = (x[:, 0].unflatten(-1, (3, -1)) for x in seen)
    kept = (dropped != 0).any(-1)
    torch.testing.assert_close(dropped, full / 0.7 * kept[..., None])
    assert abs(kept.float().mean() - 0.7) < 4 * math.sqrt(0.3 * 0.7 / kept.numel())
    second = seen[0][:, 1].unflatten(-1, (3, -1))[:, 0]
    kinds, counts = torch.unique(second.mul(1e4).round(), dim=0, return_counts=True)
    assert len(kinds) == 4
    shares = torch.tensor([0.09, 0.21, 0.21, 0.49])
    assert (counts.sort().values / 500 - shares).abs().max() < 4 * math.sqrt(0.25 / 500)


# Initialisation.


def assert_normal(x, std, tolerance=0.0):
    n = x.numel()
    assert abs(x.mean()) < 4 * std / math.sqrt(n)
    assert abs(x.std() / std - 1) < 4 / math.sqrt(2 * n) + tolerance


def test_initialisation():
    def made(seed):
        torch.manual_seed(seed)
        return GeckoForCausalLM(tiny_config("gecko", model_dim=192, cema_ndim=16, num_layers=2, rescale_nffn=True))

    model, other = made(0), made(1)
    for n, block in enumerate(model.model.layers):
        mega, nffn, cema = block.mega, block.nffn, block.mega.cema
        for linear in (mega.wz, mega.wv, mega.wr, mega.wh1, mega.wh2, nffn.fc1, nffn.fc2, nffn.fc3):
            assert_normal(linear.weight, math.sqrt(2 / 6 / linear.in_features))  # He's, for a slope of √5
            assert linear.bias is None or not linear.bias.any()
        assert_normal(cema.alpha, 0.2)
        assert_normal(cema.delta, 0.2)
        assert_normal(cema.gamma[..., 0], 1 / 4)
        assert not cema.gamma[..., 1].any()
        frequencies = 192 ** (-torch.arange(1, 193, dtype=torch.float64) / 192)
        order = cema.theta.argsort(descending=True)
        torch.testing.assert_close(cema.theta[order].sigmoid().double(), frequencies, atol=1e-6, rtol=1e-4)
        assert order.diff().sign().unique().tolist() == [-1, 1]
        assert not torch.equal(order, other.model.layers[n].mega.cema.theta.argsort(descending=True))
        zeros = mega.gamma, mega.beta, mega.rmsnorm.weight, nffn.norm.weight, nffn.norm.bias
        assert not any(x.any() for x in (*zeros, mega.timenorm.weight, mega.timenorm.bias))
        assert nffn.alpha.unique().tolist() == pytest.approx([0.1 / 2**n])
    assert not torch.equal(*(block.mega.cema.theta for block in model.model.layers))
    assert not any(x.any() for x in model.model.output["final_norm"].parameters())
    for weight in (model.model.embed.weight, model.output["output"].weight):
        assert_normal(weight, 192**-0.5, tolerance=0.02)
    assert not torch.equal(model.model.embed.weight, model.output["output"].weight)


# Configuration.


@pytest.mark.parametrize("name", ["num_heads", "num_attention_heads"])
def test_all_heads_have_rotary_embeddings(name):
    assert GeckoConfig(**{name: 8}).num_rope_heads == 8
    assert GeckoConfig(**{name: 2}).num_rope_heads == 2
    assert GeckoConfig(**{name: 8}, num_rope_heads=0).num_rope_heads == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({name: 0}, f"`{name}` must be at least 1, got 0")
            for name in (
                *("model_dim", "num_layers", "num_heads", "z_dim", "value_dim", "ffn_hidden_dim", "cema_ndim"),
                *("chunk_size", "timenorm_num_groups", "layernorm_num_groups"),
            )
        ),
        ({"num_heads": 5}, r"`z_dim` \(24\) must be a multiple of `num_heads` \(5\)"),
        ({"num_heads": 4, "value_dim": 74}, r"`value_dim` \(74\) must be a multiple of `num_heads` \(4\)"),
        ({"timenorm_num_groups": 5}, r"`model_dim` \(48\) must be a multiple of `timenorm_num_groups` \(5\)"),
        ({"layernorm_num_groups": 7}, r"`model_dim` \(48\) must be a multiple of `layernorm_num_groups` \(7\)"),
        ({"num_rope_heads": 4}, "`num_rope_heads` must be from 0 to 3, got 4"),
        ({"num_rope_heads": -1}, "`num_rope_heads` must be from 0 to 3, got -1"),
        ({"z_dim": 15}, "Rotary embeddings need heads of an even size, got 5"),
        *(
            ({name: value}, f"`{name}` must be from 0 to below 1, got {value}")
            for name in ("timenorm_beta1", "timenorm_beta2", "dropout", "hidden_dropout", "attention_dropout")
            for value in (-0.1, 1, float("nan"))
        ),
        *(({"rope_base": x}, f"`rope_base` must be above 0 and finite, got {x}") for x in (0.0, float("inf"))),
        ({"output_size": 96}, "`output_size` must be 97 or -1, got 96"),
    ],
)
def test_wrong_configuration(fields, message):
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        tiny_config("gecko", **fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [("chunk_size", 8.0), ("num_rope_heads", "all"), ("norm_affine", "no"), ("dropout", "0.1"), ("bos_token_id", [1])],
)
def test_wrong_types(name, value):
    with pytest.raises(StrictDataclassFieldValidationError, match=f"'{name}'"):
        tiny_config("gecko", **{name: value})


def test_fields_that_are_set_later(tmp_path):
    config = tiny_config("gecko", output_size=VOCABULARY)
    config.chunk_size = 0
    with pytest.raises(ValueError, match="`chunk_size` must be at least 1, got 0"):
        GeckoForCausalLM(config)
    tiny_model("gecko", **ONE).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`num_rope_heads` must be from 0 to 3, got 7"):
        GeckoForCausalLM.from_pretrained(tmp_path, num_rope_heads=7)


@torch.no_grad()
def test_cache_of_a_model_without_documents():
    other = {"document_boundaries": False}
    ids = text([3])
    for one, two in (({}, other), (other, {}), ({}, {"bos_token_id": None}), ({}, {"bos_token_id": 5})):
        cache = tiny_model("gecko", **ONE | one)(ids).cache
        with pytest.raises(ValueError, match="`cache` is the cache of another model"):
            tiny_model("gecko", **ONE | two)(ids, cache=cache)
