"""Answers of World models end where the next turn begins, without being told, and are read as messages."""

import pytest
import torch
from chat_cases import save_speaker
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, pipeline

import subquad_cli as cli
from subquad.decoding.next_turn import NextTurnCriteria
from subquad_conversion.vocabularies import vocabulary_of
from subquad_tokenizers import RwkvWorldTokenizerFast


CALL = 'json{"name":"f","arguments":{"a":1}}\n```\n\nUser:'
QUESTION = [{"role": "user", "content": "Why?"}]
GREEDY = {"do_sample": False, "max_new_tokens": 30}


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """A model that says the text of its name, and where."""
    return lambda name, chain: save_speaker(tmp_path_factory.mktemp(name) / "model", chain)


@pytest.fixture(scope="module")
def answering(speaker):
    return speaker("answers", "think>\n\nSo。\n\nUser:")


@pytest.fixture(scope="module")
def calling(speaker):
    return speaker("calls", CALL)


@pytest.fixture(scope="module")
def tokenizer():
    return RwkvWorldTokenizerFast()


@pytest.fixture(scope="module")
def stops(tokenizer):
    return vocabulary_of(tokenizer).chat_stops


@pytest.mark.parametrize("damage", [{"answer": None}, {"turns": [[1, 2], [3]]}, {"turns": [1, 2, 3]}, {"blank": "a"}])
def test_damaged_ids(stops, damage):
    damaged = {name: value for name, value in (stops | damage).items() if value is not None}
    with pytest.raises(ValueError, match="`chat_stops` of the generation configuration is damaged: "):
        NextTurnCriteria(damaged, torch.zeros(1, 3, dtype=torch.long))


def load(path):
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


def test_pipeline(answering, calling):
    (result,) = pipeline("text-generation", str(answering))(
        QUESTION, tokenizer_encode_kwargs={"thinking": False}, **GREEDY
    )
    answer = {"role": "assistant", "reasoning_content": "", "content": "So。"}
    assert result["generated_text"] == [*QUESTION, answer]
    pipe = pipeline("text-generation", str(calling))
    for size in (1, 2):
        for (result,) in pipe([QUESTION, QUESTION * 2], tools=[{"name": "f"}], batch_size=size, **GREEDY):
            call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
            assert result["generated_text"][-1] == {
                "role": "assistant",
                "reasoning_content": None,
                "tool_calls": [call],
            }


def test_command_without_thoughts(answering, capsys):
    """The end of the empty thought is not a part of what is printed."""
    arguments = ["generate", "Why?", "--chat", "--no-think", "--model", str(answering), "--greedy"]
    assert cli.main([*arguments, "--max-new-tokens", "30"]) == 0
    assert capsys.readouterr().out == "So。\n"


@pytest.mark.parametrize(
    ("prompt", "said", "ends"),
    [
        ("User: a\n\nAssistant:", " A. b\n\nUser:", True),
        ("User: a\n\nAssistant: <think></think", ">\n\nA\n\n\n\nUser:", True),
        ("User: a\n\nAssistant: ```json", "\n{}\n```\n\nUser:", True),
        ("System: a\n\nUser: Assistant:\n\nAssistant: <think", "> A。\n\nUser:", True),
        ("User: a\n\nAssistant:", " A\n\nSystem:", True),
        ("User: a\n\nAssistant:", " A \n\n\nUser:", True),
        ("User: a\n\nAssistant:", " A\r\n\nUser:", True),
        ("User: a\n\nAssistant:", " A\nUser:", False),
        ("User: a\n\nAssistant:", " A。\nUser:", False),
        ("User: a\n\nAssistant:", " A User:", False),
        ("User: a\n\nAssistant:", " A\n\nUsers:", False),
        ("Assistant: a\n\nUser: A", " B\n\nUser:", False),  # the turn of the user goes on
        ("Once upon a time", " A\n\nUser:", False),
        ("A", " B\n\nUser:", False),
    ],
)
def test_where_answers_end(prompt, said, ends, tokenizer, stops):
    prompt, whole = (torch.tensor([tokenizer.encode(text)]) for text in (prompt, prompt + said))
    assert torch.equal(whole[:, : prompt.shape[1]], prompt)
    criterion = NextTurnCriteria(stops, prompt)
    found = [criterion(whole[:, :count], None).item() for count in range(prompt.shape[1], whole.shape[1] + 1)]
    assert found == [False] * (len(found) - 1) + [ends]
    assert criterion(whole.repeat(3, 1), None).tolist() == [ends] * 3


def test_rows_end_alone(answering):
    model, tokenizer = load(answering)
    texts = ["User: a\n\nAssistant: <think", "I think", "User: a b c\n\nAssistant: <think"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    for options in ({}, {"num_return_sequences": 2, "do_sample": True, "temperature": 1e-3}):
        out = model.generate(**inputs, **GREEDY | options)[:, inputs.input_ids.shape[1] :]
        new = tokenizer.batch_decode(out, skip_special_tokens=True)[:: 1 + bool(options)]
        assert new[0] == new[2] == ">\n\nSo。\n\nUser:" and len(new[1]) > len(new[0])
    model.generation_config.chat_stops = None
    assert model.generate(**inputs, **GREEDY).shape[1] == inputs.input_ids.shape[1] + 30


def test_what_a_user_gives_is_kept(answering, tmp_path):
    """Criteria and a configuration of one's own, and the ids in a saved model."""
    model, tokenizer = load(answering)
    ids = tokenizer("User: a\n\nAssistant: <think", return_tensors="pt").input_ids
    seen = []

    def criterion(ids, scores, **kwargs):
        seen.append(ids.shape[1])
        return torch.zeros(len(ids), dtype=torch.bool)

    whole = model.generate(ids, **GREEDY, stopping_criteria=[criterion])
    assert len(seen) == whole.shape[1] - ids.shape[1] < 30
    assert model.generate(ids, GenerationConfig(max_new_tokens=3)).shape[1] == ids.shape[1] + 3
    assert torch.equal(model.generate(ids, GenerationConfig(max_new_tokens=30)), whole)
    model.save_pretrained(tmp_path)
    saved = GenerationConfig.from_pretrained(tmp_path)
    assert saved.chat_stops == model.generation_config.chat_stops and saved.chat_stops["newline"] == 11
    stopped = model.generate(ids, **GREEDY, stop_strings=tokenizer.stop_strings[0], tokenizer=tokenizer)
    assert torch.equal(stopped, whole) and tokenizer.stop_strings == ["\n\nUser:", "\n\nSystem:"]
