"""The parser that splits thoughts off answers, as vLLM's server runs it, without a server."""

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

import subquad_vllm
from subquad_tokenizers import RwkvWorldTokenizerFast


# A conversation whose earlier answer has a thought.
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ho", "reasoning_content": "Hm."},
    {"role": "user", "content": "So?"},
]


@pytest.fixture(scope="module")
def tokenizer():
    subquad_vllm.register()
    return RwkvWorldTokenizerFast()


@pytest.mark.parametrize("options", [{"thinking": True}, {"enable_thinking": True}, {"thinking": False}, {}])
@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("output", "thought", "answer"),
    [
        (">First.\n\nThen </b>.</think>\n\nSo > 1.\n\n龘", "First.\n\nThen </b>.", "\n\nSo > 1.\n\n龘"),
        (">Only a thought", "Only a thought", None),
        ("></think>\nSo.", None, "\nSo."),
    ],
)
def test_thoughts_and_answers(options, size, output, thought, answer, tokenizer):
    """At once and as a stream of pieces, when the request asks for thoughts and when it does not."""
    thinks = any(options.values())
    if not thinks:  # there `>` quotes
        output = output.replace("</think>", "</i>")
        thought, answer = None, output
    request = ChatCompletionRequest(messages=CHAT, chat_template_kwargs=options)
    parser_class = ParserManager.get_parser(reasoning_parser_name="rwkv", tokenizer=tokenizer)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False, **options)
    parser = parser_class(tokenizer, chat_template_kwargs=options)
    assert parser.is_reasoning_end(prompt) is not thinks
    assert parser.parse(output, request)[:2] == (thought, answer)

    ids, parts, seen = tokenizer.encode(output), {"reasoning": "", "content": ""}, ""
    for start in range(0, len(ids), size):
        piece = ids[start : start + size]
        text = tokenizer.decode(ids[: start + size]).rstrip("\ufffd")  # half a character waits for its rest
        finished = start + size >= len(ids)
        delta = parser.parse_delta(text[len(seen) :], piece, request, prompt, finished=finished)
        seen = text
        for name in parts if delta else ():
            parts[name] += getattr(delta, name) or ""
    assert parts == {"reasoning": thought or "", "content": answer or ""}


def test_thoughts_that_nobody_asked_for(tokenizer):
    parser = ParserManager.get_reasoning_parser("rwkv")(tokenizer)
    assert parser.extract_reasoning(" <think>One.</think>\n\nTwo.", None) == ("One.", "\n\nTwo.")
    assert parser.extract_reasoning(" One <think>.</think>", None) == (None, " One <think>.</think>")


def test_where_a_thought_ends(tokenizer):
    """What structured outputs begin after."""
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False, thinking=True)
    parser = ParserManager.get_reasoning_parser("rwkv")(tokenizer, chat_template_kwargs={"thinking": True})
    ids, ends = tokenizer.encode(">A </think b.</think>\nSo."), []
    for count in range(1, len(ids) + 1):
        if parser.is_reasoning_end_streaming(prompt + ids[:count], ids[count - 1 : count]):
            ends.append(count)
    assert tokenizer.decode(ids[: ends[0]]).startswith(">A </think b.</think>")
    assert not parser.is_reasoning_end(prompt + ids[: ends[0] - 1]) and parser.is_reasoning_end(prompt + ids)
    assert tokenizer.decode(parser.extract_content_ids(ids)).strip() == "So."
    assert parser.extract_content_ids(ids[: ends[0] - 1]) == []
