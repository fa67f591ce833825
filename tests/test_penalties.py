"""Penalties that decay, against the loop of RWKV's runtime."""

import pytest
import torch
from cases import CASES, GREEDY, padded
from transformers import LogitsProcessor

import subquad
from subquad import DecayingPenaltyLogitsProcessor
from subquad.modeling.versions import CACHE_NAME
from subquad.states.session import Session


FINCH = CASES["rwkv6"]
SIZES = {"presence": 0.5, "frequency": 0.7, "decay": 0.9}


def penalties_of(tokens, vocabulary, presence, frequency, decay):
    """One token after the other, as the runtime counts them."""
    counts = {}
    for token in tokens:
        counts = {each: count * decay for each, count in counts.items()}
        counts[token] = counts.get(token, 0) + 1
    found = torch.zeros(vocabulary)
    for token, count in counts.items():
        found[token] = presence + count * frequency
    return found


class Reference(LogitsProcessor):
    """The same for every row."""

    def __init__(self, prompt_length):
        self.prompt_length = prompt_length

    def __call__(self, input_ids, scores):
        rows = (penalties_of(row[self.prompt_length :].tolist(), scores.shape[1], **SIZES) for row in input_ids)
        return scores - torch.stack(list(rows)).to(scores.device)


@pytest.mark.parametrize("sizes", [SIZES, {}, {"decay": 0.0}, {"presence": 0.0, "decay": 1.0}, {"frequency": -0.2}])
def test_penalties(sizes):
    ids, scores = FINCH.ids(3, 60) % 11, torch.randn(3, 97)
    full = {"presence": 0.3, "frequency": 0.3, "decay": 0.996, **sizes}
    for generated in (0, 1, 55):
        expected = torch.stack([penalties_of(row[60 - generated :].tolist(), 97, **full) for row in ids])
        found = DecayingPenaltyLogitsProcessor(60 - generated, **sizes)(ids, scores)
        torch.testing.assert_close(found, scores - expected, atol=1e-5, rtol=0)
    half = DecayingPenaltyLogitsProcessor(5)(ids, scores.bfloat16())
    assert half.dtype == torch.bfloat16
    # A token of long ago counts nothing any more, but is still known.
    long = torch.cat((torch.tensor([[3]]), torch.full((1, 500), 5)), 1)
    found = DecayingPenaltyLogitsProcessor(0, decay=0.5)(long, torch.zeros(1, 97))
    torch.testing.assert_close(found[0, [3, 4, 5]], -torch.tensor([0.3, 0.0, 0.3 + 0.6]))


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}, {"use_cache": False}, {"ends": True}],
    ids=str,
)
def test_generate(options):
    """Rows of a padded batch, also if some have ended, equal those alone."""
    model, texts = FINCH.model(), [FINCH.text(1, n, seed=n) for n in (9, 5)]
    options = {**GREEDY, "max_new_tokens": 12, **options}

    def run(inputs, processor):
        length = inputs["input_ids"].shape[1]
        return model.generate(**inputs, logits_processor=[processor(length)], **options)[:, length:]

    def ours(length):
        return DecayingPenaltyLogitsProcessor(length, **SIZES)

    if options.pop("ends", False):  # one of the rows after three tokens
        options["eos_token_id"] = run(texts[1], ours)[0, 3].item()
    batch = run(padded(texts, "left"), ours)
    alone = [run(text, ours) for text in texts]
    for n, row in enumerate(alone):
        count = len(row)  # of sequences that are returned for a text
        assert torch.equal(batch[n * count : (n + 1) * count, : row.shape[1]], row)
        assert torch.equal(run(texts[n], Reference), row)
    plain = model.generate(**texts[0], **options)[:, 9:]
    assert not torch.equal(plain, alone[0])


def test_assisted_decoding_and_going_on():
    model, ids = FINCH.model(), FINCH.ids(1, 20).repeat(1, 2)
    options = {**GREEDY, "max_new_tokens": 12, "return_dict_in_generate": True}
    penalties = DecayingPenaltyLogitsProcessor(40, **SIZES)
    out = model.generate(ids, logits_processor=[penalties], **options)
    looked_up = model.generate(ids, logits_processor=[penalties], prompt_lookup_num_tokens=3, **options)
    assert torch.equal(out.sequences, looked_up.sequences)
    # The counts of another turn begin at the end of its prompt, with the whole text and with its new tokens.
    text = torch.cat((out.sequences, FINCH.ids(1, 5, seed=4)), 1)
    expected = model.generate(text, logits_processor=[DecayingPenaltyLogitsProcessor(57, **SIZES)], **options)
    session = Session(out[CACHE_NAME])
    new = session.generate(model, text[0, 51:].tolist(), SIZES, **GREEDY, max_new_tokens=12)
    assert new == expected.sequences[0, 57:].tolist()


def test_penalties_beside_other_processors():
    """A session adds its penalties to the processors that are given."""

    class Only(LogitsProcessor):
        def __call__(self, input_ids, scores):
            allowed = torch.tensor([7, 8])
            return torch.full_like(scores, -torch.inf).index_copy(1, allowed, scores[:, allowed])

    model, processors = FINCH.model(), [Only()]
    sizes = {"presence": 1e4, "frequency": 0.0, "decay": 1.0}
    new = Session(model.new_cache()).generate(
        model, FINCH.ids(1, 9)[0].tolist(), sizes, logits_processor=processors, max_new_tokens=2, **GREEDY
    )
    assert sorted(new) == [7, 8] and len(processors) == 1


def test_refusals():
    for arguments, message in (
        ({"prompt_length": -1}, "`prompt_length` must be a whole number of at least 0, got -1"),
        ({"prompt_length": 2.0}, "`prompt_length` must be a whole number"),
        ({"prompt_length": 0, "presence": float("nan")}, "`presence` must be a finite number, got nan"),
        ({"prompt_length": 0, "frequency": float("inf")}, "`frequency` must be a finite number, got inf"),
        ({"prompt_length": 0, "frequency": "0.3"}, "`frequency` must be a finite number, got '0.3'"),
        ({"prompt_length": 0, "decay": 1.5}, "`decay` must be from 0 to 1, got 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            subquad.DecayingPenaltyLogitsProcessor(**arguments)
    with pytest.raises(ValueError, match="`input_ids` has 4 tokens, `prompt_length` is 5"):
        DecayingPenaltyLogitsProcessor(5)(FINCH.ids(1, 4), torch.zeros(1, 97))
