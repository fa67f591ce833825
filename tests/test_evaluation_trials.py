"""Recipes, trials and ablations, in examples/evaluation: what they change, what is measured, what is said of it."""

import json

import torch
from evaluation_cases import perturbed
from examples.evaluation import baselines, needle
from examples.evaluation.models import make_config, make_model


def small(architecture, width=64, **fields):
    torch.manual_seed(0)
    return perturbed(
        make_model(make_config(architecture, vocabulary=20, width=width, layers=2, window=8, **fields)), 0.2
    )


@torch.no_grad()
def test_a_gecko_without_its_memory_sees_its_attention_alone():
    ids = torch.randint(3, 20, (2, 40), generator=torch.Generator().manual_seed(0))
    whole, lacking = (baselines.without(part, small("gecko")) for part in ("", "working memory"))
    # Up to two chunks nothing has left the attention.
    before, after = (slice(None, 16), slice(16, None))
    difference = (whole(ids).logits - lacking(ids).logits).abs().amax(-1)
    assert difference[:, before].max() < 1e-5 and difference[:, after].min() > 1e-5
    # The same with a cache, token by token.
    logits, cache = [], None
    for token in ids.split(1, dim=1):
        out = lacking(token, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), lacking(ids).logits, rtol=1e-3, atol=1e-4)


def test_a_finch_without_its_changing_decay_has_the_same_decays_for_all_tokens():
    model, taken = small("finch"), []
    with torch.no_grad():
        changing = model.rwkv.blocks[0].attention.log_decay(torch.randn(1, 5, 64))
    assert changing.std(1).min() > 0
    baselines.without("changing decay", model)
    attention = model.rwkv.blocks[0].attention
    decays = attention.log_decay(torch.randn(1, 5, 64))
    torch.testing.assert_close(decays, decays[:, :1].expand_as(decays))
    torch.testing.assert_close(decays[0, 0].flatten(), -attention.time_decay.flatten().exp().float())
    ids = torch.randint(1, 20, (2, 9))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    taken = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert taken == [f"rwkv.blocks.{i}.attention.time_decay_w{j}" for i in (0, 1) for j in (1, 2)]
    assert attention.time_decay.grad.abs().max() > 0


def reader(**fields):
    """A small Avey with the needle's vocabulary."""
    return make_model(
        make_config("avey", vocabulary=len(needle.IDS) + 1, width=64, layers=1, window=64, **fields)
    ).eval()


@torch.no_grad()
def test_what_the_ranker_retrieves():
    """One split is retrieved, that which is most like the question: the needle's if the question repeats it."""
    model = reader(k=2)
    words, digit = [needle.IDS[word] for word in ("rain", "cold", "moon", "pale")], needle.IDS["7"]
    needle_split, other = [*words, digit] + 27 * [words[0]], 32 * [needle.IDS["river"]]
    asks = [needle_split[:-4], other[:-4]]  # the question is like the needle's split, or like the other one
    texts = torch.tensor([[*needle_split, *other, *ask, digit] for ask in asks] + [[*other, *other, *asks[0], digit]])
    assert needle.are_retrieved(model, texts, 1).tolist() == [True, False, True]
    assert needle.are_retrieved(small("raven"), texts, 1) is None


def config_of(path, name):
    return json.loads((path / name / "config.json").read_text(encoding="utf-8"))


def test_trials_measure_each_recipe(run_task, tmp_path):
    cells = [(row["architecture"], row["recipe"], row["variant"]) for row in run_task("trials")["rows"]]
    expected = [("raven", "common"), ("raven", "sparse"), ("avey", "common"), ("avey", "mixed")]
    assert cells == [(*which, variant) for which in expected for variant in needle.VARIANTS]
    assert [config_of(tmp_path, f"needle-raven-{name}-0")["topk"] for name in ("common", "sparse")] == [16, 4]


def test_ablations_measure_pairs(run_task, tmp_path):
    rows = run_task("ablations")["rows"]
    assert [(row["architecture"], row["recipe"], row["length"]) for row in rows] == [
        (architecture, recipe, 64 if architecture == "finch" else 48)
        for architecture in ("avey", "raven", "gecko", "finch")
        for recipe in ("common", "without")
    ]
    # The parts of Gecko and Finch are switched off, and Avey's window is as long without the ranker.
    sizes = [{row["parameters"] for row in rows[n : n + 2]} for n in range(0, 8, 2)]
    assert [len(size) for size in sizes] == [1, 2, 1, 1]
    assert config_of(tmp_path, "needle-avey-without-0")["k"] == 1
    assert config_of(tmp_path, "needle-raven-without-0")["router"] == "gsa"
