"""Avey-B against the published outputs and against its equations, written out split by split in float64."""

import json

import cases
import pytest
import torch
import torch.nn.functional as F
from cases import random_ids, tiny_config, tiny_model
from golden_files import read_golden
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForMaskedLM

from subquad import ARCHITECTURES, AveyBForMaskedLM
from subquad.models.avey_b import modeling_avey_b


PAPER = {"hidden_act": "relu2", "similarity_norm": "sum", "residual_gain": False, "final_norm": True}
VARIANTS = {
    "hub": {},
    "paper": PAPER,
    "largest score": {"score_normalization": "max"},
    "bidirectional": {"bidirectional_ranker": True},
    "no compressor": {"compressor": False},
    "no residual": {"compressor_residual": False},
    "dynamic first": {"layer_pattern": "interleaved-dynamic-first", "context_proportion": 1.0},
    "all of the paper": {**PAPER, "bidirectional_ranker": True, "compressor": False, "score_normalization": "max"},
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)
HEADS = [name for name in ARCHITECTURES["avey-b"][2] if name != "AutoModel"]


def tiny(variant="hub", auto_class=None, **fields):
    return tiny_model("avey-b", auto_class, **VARIANTS[variant], **fields)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A directory as on the Hub, the ids of two texts, and what the published model makes of them."""
    path = tmp_path_factory.mktemp("avey-b")
    tensors, weights, config = read_golden("avey_b_hub")
    (path / "config.json").write_text(json.dumps({**config, "model_type": "avey-b"}))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path, *(tensors[name] for name in ("input_ids", "last_hidden_state", "logits"))


def norm(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def plain_window(model, x, i):
    """What the first layer gets for split i of x (splits, S, D)."""
    c = model.config
    y = x / (x.norm(dim=-1, keepdim=True) + 1e-8)
    scores = {}
    for j in range(len(x) if c.bidirectional_ranker else i):
        if j != i:
            scores[j] = (y[i] @ y[j].T).amax(1).sum()
    best = sorted(scores, key=lambda j: -scores[j])[: c.k]
    rows = x.new_zeros((c.k - len(best)) * c.chunk_size, c.d_embed)
    if best:
        divisor = {"min": min, "max": max}[c.score_normalization](scores[j] for j in best) + 1e-8
        rows = torch.cat([rows, *(x[j] * scores[j] / divisor for j in best)])
    rows = torch.cat([rows, x[i]])
    if not c.compressor:
        return rows
    return model.model.ranker.down_proj @ rows + (x[i] if c.compressor_residual else 0)


def plain_layers(model, h):
    """Hidden states of windows h (W, C, D): of the last S rows, after each layer."""
    c, seen = model.config, []
    for layer in model.model.layers:
        features = layer.enricher(norm(h, layer.norm.weight, c.eps))
        features = F.gelu(features) if c.hidden_act == "gelu" else F.relu(features).square()
        tail, gate, head = features.split([c.tail_size // 2, c.tail_size // 2, features.shape[-1] - c.tail_size], -1)
        if layer.spatial_proj is not None:
            weights = layer.spatial_proj
        elif c.similarity_norm == "l1":
            y = tail / tail.norm(dim=-1, keepdim=True).clamp_min(c.eps)
            weights = y @ y.mT
            weights = weights / weights.abs().sum(-1, keepdim=True).clamp_min(c.eps)
        else:
            y = tail / (tail.square().sum(-1, keepdim=True) + c.eps).sqrt()
            weights = y @ y.mT
            weights = weights / (weights.sum(-1, keepdim=True) + c.eps)
        h = layer.fuser(torch.cat((weights @ tail * gate, head), -1)) + (layer.alpha if c.residual_gain else 1) * h
        seen.append(h[:, -c.chunk_size :])
    return seen


def plain(model, ids):
    """Hidden states (layers + 1, batch, length, D) of a model in float64."""
    c, rows = model.config, []
    for row in ids:
        x = F.pad(model.model.embed.weight[row], (0, 0, 0, -len(row) % c.chunk_size)).unflatten(0, (-1, c.chunk_size))
        windows = torch.stack([plain_window(model, x, i) for i in range(len(x))])
        rows.append(torch.stack([h.flatten(0, 1)[: len(row)] for h in (x, *plain_layers(model, windows))]))
    return torch.stack(rows, 1)


def padded(rows, side, width=0):
    """Ids with a token in place of padding that changes everything it is taken for, and the mask."""
    more = max(width - max(map(len, rows)), 0)
    inputs = cases.padded([{"input_ids": row[None]} for row in rows], side, 7, more)
    return inputs["input_ids"], inputs["attention_mask"]


# The published model, and the equations.


@pytest.mark.fast
def test_published_outputs(published):
    path, ids, hidden, logits = published
    model, info = AutoModelForMaskedLM.from_pretrained(path, output_loading_info=True)
    assert isinstance(model, AveyBForMaskedLM)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(model(ids).logits, logits, atol=1e-4, rtol=0)
    base = AutoModel.from_pretrained(path)
    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            torch.testing.assert_close(base(ids).last_hidden_state, hidden, atol=1e-4, rtol=0)
    model.save_pretrained(path / "again")
    again = AutoModelForMaskedLM.from_pretrained(path / "again")
    assert torch.equal(again(ids).logits, model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "length"), [*((name, 70) for name in VARIANTS), ("hub", 1), ("hub", 13), ("paper", 1), ("paper", 8)]
)
def test_equations(variant, length):
    model, ids = tiny(variant).double(), random_ids(2, length)
    out, expected = model(ids, output_hidden_states=True), plain(model, ids)
    torch.testing.assert_close(torch.stack(out.hidden_states), expected)
    torch.testing.assert_close(model(ids).logits, out.logits)
    last = expected[-1] if model.ln_f is None else norm(expected[-1], model.ln_f.weight, model.config.eps)
    torch.testing.assert_close(out.logits, last @ model.model.embed.weight.T)


@each_variant
def test_gradients(variant):
    model, ids = tiny(variant).double(), random_ids(2, 29)
    x = model.model.embed.weight[ids].detach()
    probe = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    for states in (model.model(ids).last_hidden_state, plain(model, ids)[-1]):
        model.zero_grad()
        (states * probe).sum().backward()
        results.append([p.grad for name, p in model.named_parameters() if name != "ln_f.weight"])
    for grad, expected in zip(*results, strict=True):
        assert grad.abs().sum() > 0
        torch.testing.assert_close(grad, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        ("interleaved", "SDSDS"),
        ("interleaved-dynamic-first", "DSDSD"),
        ("single-dynamic-head", "DSSSS"),
        ("single-dynamic-tail", "SSSSD"),
        ("static-then-dynamic", "SSDDD"),
        ("dynamic-then-static", "DDSSS"),
        ("all-static", "SSSSS"),
        ("all-dynamic", "DDDDD"),
    ],
)
def test_layer_patterns(pattern, kinds, tmp_path):
    model, ids = tiny(layer_pattern=pattern, n_layers=5), random_ids(1, 20)
    assert "".join("SD"[layer.spatial_proj is None] for layer in model.model.layers) == kinds
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(AutoModel.from_pretrained(tmp_path)(ids)[0], model.model(ids)[0])


def test_initialisation():
    torch.manual_seed(0)
    model = AveyBForMaskedLM(tiny_config("avey-b", d_embed=64, chunk_size=32))
    static, dynamic = model.model.layers[:2]
    assert model.lm_head.weight is model.model.embed.weight
    for weight in (model.model.embed.weight, model.model.ranker.down_proj, static.spatial_proj):
        assert weight.std().item() == pytest.approx((2 / sum(weight.shape)) ** 0.5, rel=0.1)
    for linear in (static.enricher, dynamic.fuser):
        for weight in (linear.weight, linear.bias):
            assert weight.abs().max().item() == pytest.approx(linear.in_features**-0.5, rel=0.1)
    assert (static.norm.weight == 1).all()
    assert dynamic.alpha == 1


# Padding and packed documents.


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "side"), [*((name, "anywhere") for name in VARIANTS), ("hub", "left"), ("paper", "right")]
)
def test_padding(variant, side):
    model = tiny(variant)
    rows = [random_ids(n, seed=n) for n in (33, 1, 70, 8)]
    alone = [model.model(row[None], output_hidden_states=True).hidden_states for row in rows]
    for chosen, width in ((range(4), 0), ([0], 50), ([1], 90)):
        ids, mask = padded([rows[i] for i in chosen], side, width)
        states = model.model(ids, mask, output_hidden_states=True).hidden_states
        for n, i in enumerate(chosen):
            for x, x_expected in zip(states, alone[i], strict=True):
                torch.testing.assert_close(x[n, mask[n] == 1], x_expected[0], atol=1e-4, rtol=1e-4)
                assert not x[n, mask[n] == 0].any()


@torch.no_grad()
def test_a_row_without_tokens():
    model, ids = tiny(), random_ids(2, 9)
    mask = torch.tensor([[1], [0]]).expand(2, 9)
    states = model.model(ids, mask).last_hidden_state
    torch.testing.assert_close(states[:1], model.model(ids[:1]).last_hidden_state)
    assert not states[1].any()
    assert not model.model(ids, mask.roll(1, 0) * 0).last_hidden_state.any()


@torch.no_grad()
@each_variant
def test_packed_documents(variant):
    model = tiny(variant).model
    documents = [random_ids(n, seed=n) for n in (9, 1, 40, 8, 22)]
    expected = torch.cat([model(row[None]).last_hidden_state for row in documents], 1)
    ids, borders = torch.cat(documents)[None], torch.tensor([0, 9, 10, 50, 58, 80])
    positions = torch.cat([torch.arange(len(row)) for row in documents])[None]
    for options in ({"cu_seqlens": borders}, {"cu_seq_lens_q": borders.int()}, {"position_ids": positions}):
        out = model(ids, **options).last_hidden_state
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    out = model(ids.view(2, 40), position_ids=positions.view(2, 40)).last_hidden_state
    cut = torch.cat([model(row[None]).last_hidden_state for row in ids.view(2, 40)[0].split([9, 1, 30])], 1)
    torch.testing.assert_close(out[:1], cut, atol=1e-4, rtol=1e-4)
    assert (out[0] - out[1]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("variant", "batch"),
    [("hub", "left"), ("hub", "anywhere"), ("hub", "packed"), ("bidirectional", "right"), ("bidirectional", "packed")],
)
def test_gradients_under_padding(variant, batch):
    model = tiny(variant).double()
    rows = [random_ids(n, seed=n) for n in (33, 1, 20)]

    def grads(losses):
        model.zero_grad()
        sum(losses).backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = grads(model(row[None]).logits.square().sum() for row in rows)
    if batch == "packed":
        found = grads([model(torch.cat(rows)[None], cu_seqlens=torch.tensor([0, 33, 34, 54])).logits.square().sum()])
    else:
        ids, mask = padded(rows, batch)
        found = grads([model(ids, mask).logits[mask == 1].square().sum()])
    for x, x_expected in zip(found, expected, strict=True):
        torch.testing.assert_close(x, x_expected, atol=1e-8, rtol=1e-8)


def test_an_answer_in_padding_is_an_error():
    model = tiny(auto_class="AutoModelForQuestionAnswering")
    ids, mask = padded([random_ids(n, seed=n) for n in (13, 30)], "left")
    first = torch.tensor([17, 0])
    outside = torch.tensor([17, 31])  # the second one is ignored, as by the models of transformers
    for positions in (first, outside, first[:, None]):
        assert model(ids, mask, start_positions=positions, end_positions=first).loss < 10
    wrong = torch.tensor([16, 0])
    for positions in (
        {"start_positions": wrong, "end_positions": first},
        {"start_positions": first, "end_positions": wrong},
    ):
        name = next(name for name, x in positions.items() if x is wrong)
        with pytest.raises(ValueError, match=f"`{name}` of row 0 is 16, which is padding"):
            model(ids, mask, **positions)


@pytest.mark.parametrize("side", ["left", "anywhere"])
@pytest.mark.parametrize("auto_class", HEADS)
def test_heads_under_padding(auto_class, side):
    """Logits and losses of a padded batch are those of its texts."""
    model = tiny(auto_class=auto_class)
    rows = [random_ids(n, seed=n) for n in (13, 30)]
    ids, mask = padded(rows, side)
    labels = {
        "AutoModelForMaskedLM": [{"labels": row % 5} for row in rows],
        "AutoModelForTokenClassification": [{"labels": row % 2} for row in rows],
        "AutoModelForSequenceClassification": [{"labels": torch.tensor(n)} for n in range(2)],
        "AutoModelForQuestionAnswering": [
            {"start_positions": torch.tensor(3), "end_positions": torch.tensor(5 + n)} for n in range(2)
        ],
    }[auto_class]
    alone = [
        model(row[None], **{name: x[None] for name, x in label.items()})
        for row, label in zip(rows, labels, strict=True)
    ]
    together = {}
    for name in labels[0]:
        values = [label[name] for label in labels]
        if values[0].dim():
            together[name] = torch.full_like(ids, -100)
            for n, value in enumerate(values):
                together[name][n, mask[n] == 1] = value
        else:
            together[name] = torch.stack(values)
            if "positions" in name:
                together[name] = torch.stack([row.nonzero()[x, 0] for row, x in zip(mask, values, strict=True)])
    out = model(ids, mask, **together)
    weights = torch.tensor([float(len(row)) for row in rows]) if "Token" in auto_class or "LM" in auto_class else None
    losses = torch.stack([one.loss for one in alone])
    expected = losses.mean() if weights is None else (losses * weights).sum() / weights.sum()
    torch.testing.assert_close(out.loss, expected)
    for n, one in enumerate(alone):
        for name in one.keys() & {"logits", "start_logits", "end_logits"}:
            x, x_expected = out[name][n], one[name][0]
            if name != "logits" or x.dim() == 2:
                x = x[mask[n] == 1]
            torch.testing.assert_close(x, x_expected, atol=1e-5, rtol=1e-5)
    if "start_logits" in out:
        assert (out.start_logits[mask == 0] == torch.finfo(torch.float32).min).all()


def test_pooling_is_the_mean_of_real_tokens():
    model = tiny(auto_class="AutoModelForSequenceClassification")
    ids, mask = padded([random_ids(5), random_ids(11)], "right")
    states = model.model(ids, mask).last_hidden_state
    mean = torch.stack([states[0, :5].mean(0), states[1].mean(0)])
    torch.testing.assert_close(model(ids, mask).logits, model.classifier(mean))


def test_question_answering_refuses_packed_documents():
    model = tiny(auto_class="AutoModelForQuestionAnswering")
    with pytest.raises(ValueError, match="`cu_seqlens`: an answer"):
        model(random_ids(1, 6), cu_seqlens=torch.tensor([0, 6]))


# Long texts, and graphs.


def rows_seen(model):
    """Collects the number of rows that go through the first layer."""
    seen = []
    model.model.layers[0].register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].shape[:2].numel()))
    return seen


@torch.no_grad()
@pytest.mark.parametrize("variant", ["hub", "no compressor"])
def test_few_rows_at_a_time(variant, monkeypatch):
    model, ids = tiny(variant), random_ids(2, 70)
    expected = model(ids, output_hidden_states=True)
    monkeypatch.setattr(modeling_avey_b, "MAX_ROWS_OF_CPU", 80)
    seen = rows_seen(model)
    out = model(ids, output_hidden_states=True)
    assert sum(seen) == 18 * model.config.context_size
    assert max(seen) <= 80 < sum(seen)
    torch.testing.assert_close(out.hidden_states, expected.hidden_states)
    with torch.enable_grad():  # a backward pass would have to keep them all
        model(ids)
    assert seen[-1] == sum(seen[:-1])


@pytest.mark.fast
@torch.no_grad()
def test_only_splits_with_tokens_are_computed():
    model = tiny()
    seen = rows_seen(model)
    ids, mask = padded([random_ids(9), random_ids(70), random_ids(1)], "left")
    model(ids, mask)
    assert seen == [8 * (2 + 9 + 1)]


@pytest.mark.thorough
@torch.no_grad()
def test_a_text_of_more_than_96k_tokens():
    model = tiny(d_embed=16, n_layers=2, chunk_size=256)
    seen, ids = rows_seen(model), random_ids(1, 98_304 + 1_000)
    out = model.model(ids).last_hidden_state[0]
    assert out.isfinite().all()
    assert max(seen) == modeling_avey_b.MAX_ROWS_OF_CPU
    assert sum(seen) == 388 * 256
    x = F.pad(model.model.embed.weight[ids[0]], (0, 0, 0, -ids.shape[1] % 256)).unflatten(0, (-1, 256))
    model, x = model.double(), x.double()
    for i in (0, 200, 387):
        expected = plain_layers(model, plain_window(model, x, i)[None])[-1][0].float()
        found = out[i * 256 : (i + 1) * 256]
        torch.testing.assert_close(found, expected[: len(found)], atol=1e-4, rtol=1e-4)


@pytest.mark.thorough
@torch.no_grad()
def test_compiled_calls_of_many_lengths(monkeypatch):
    model, graphs = tiny().model, []
    monkeypatch.setattr(modeling_avey_b, "MAX_ROWS_OF_CPU", 24)

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for length in (50, 70, 150):
        ids = random_ids(2, length)
        torch.testing.assert_close(compiled(ids)[0], model(ids)[0], atol=1e-4, rtol=1e-4)
    assert len(graphs) <= 2


@torch.no_grad()
@pytest.mark.parametrize("batch", ["padded", "packed"])
def test_texts_stay_apart(batch):
    """Whatever is in one text, numbers that are none included, no other text reads any of it."""
    model, rows = tiny().model, [random_ids(20), random_ids(9)]
    if batch == "padded":
        ids, options = padded(rows, "left")
        options, second = {"attention_mask": options}, slice(20 + 11, None)
    else:
        ids, options, second = torch.cat(rows)[None], {"cu_seqlens": torch.tensor([0, 20, 29])}, slice(20, None)
    x = model.embed(ids)
    x.view(-1, x.shape[-1])[3] = torch.nan
    states = model(inputs_embeds=x, **options)[0].flatten(0, 1)
    assert not states[:20].isfinite().all()
    torch.testing.assert_close(states[second], model(rows[1][None])[0][0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_short_texts_rank_nothing(monkeypatch):
    model = tiny().model
    ids, mask = padded([random_ids(8), random_ids(5), random_ids(1)], "right")
    expected = model(ids, mask)[0]
    monkeypatch.setattr(modeling_avey_b, "split_ranker", lambda *_, **__: pytest.fail("there is nothing to rank"))
    assert torch.equal(model(ids, mask)[0], expected)


@pytest.mark.parametrize(("variant", "dtype"), [("hub", torch.float16), ("paper", torch.bfloat16)])
def test_low_precision(variant, dtype):
    model, ids = tiny(variant), random_ids(2, 40)
    expected = model.model(ids).last_hidden_state
    low = tiny(variant).to(dtype)
    states = low.model(ids).last_hidden_state
    assert states.dtype == dtype
    assert (states.float() - expected).norm() / expected.norm() < (0.05 if dtype == torch.bfloat16 else 0.01)
    low(ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() for p in low.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layers": 0}, "`n_layers` must be at least 1, got 0"),
        ({"chunk_size": 0}, "`chunk_size` must be at least 1, got 0"),
        ({"k": 0}, "`k` must be at least 1, got 0"),
        ({"context_proportion": 0.0}, "`context_proportion` must be above 0 and at most 1.*, got 0.0"),
        ({"classifier_dropout": 1.0}, "`classifier_dropout` must be from 0 to below 1, got 1.0"),
        ({"hidden_act": "relu"}, "`hidden_act` must be one of gelu, relu2, got 'relu'"),
        ({"similarity_norm": "softmax"}, "`similarity_norm` must be one of l1, sum, got 'softmax'"),
        ({"score_normalization": "first"}, "`score_normalization` must be one of min, max, got 'first'"),
        ({"layer_pattern": "SD"}, "`layer_pattern` must be one of interleaved, .*, got 'SD'"),
    ],
)
def test_wrong_configuration(fields, message):
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        tiny_config("avey-b", **fields)
