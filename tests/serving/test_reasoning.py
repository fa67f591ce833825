"""The parsers that read thoughts and calls of tools in answers, as vLLM's server runs them, without a server."""

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


def parse(parser, tokenizer, output, request, prompt, size):
    """What a stream of pieces of `size` tokens brings: the reasoning, the content and the calls."""
    ids, parts, calls, seen = tokenizer.encode(output), {"reasoning": "", "content": ""}, {}, ""
    for start in range(0, len(ids), size):
        piece = ids[start : start + size]
        text = tokenizer.decode(ids[: start + size]).rstrip("\ufffd")  # half a character waits for its rest
        finished = start + size >= len(ids)
        delta = parser.parse_delta(text[len(seen) :], piece, request, prompt, finished=finished)
        seen = text
        for name in parts if delta else ():
            parts[name] += getattr(delta, name) or ""
        for call in delta.tool_calls or () if delta else ():
            assert call.index == len(calls) and call.id
            calls[call.index] = (call.function.name, call.function.arguments)
    return parts["reasoning"] or None, parts["content"] or None, [*calls.values()]


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
    thinks, asked_for_none = any(options.values()), False in options.values()
    if asked_for_none:  # the model completes the end of the empty thought
        output, thought, answer = f">\n\n{output}", None, f"\n\n{output}"
    elif not thinks:  # there `>` quotes
        output = output.replace("</think>", "</i>")
        thought, answer = None, output
    request = ChatCompletionRequest(messages=CHAT, chat_template_kwargs=options)
    parser_class = ParserManager.get_parser(reasoning_parser_name="rwkv", tokenizer=tokenizer)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False, **options)
    parser = parser_class(tokenizer, chat_template_kwargs=options)
    assert parser.is_reasoning_end(prompt) is not (thinks or asked_for_none)
    assert parser.parse(output, request)[:2] == (thought, answer)
    assert parse(parser, tokenizer, output, request, prompt, size) == (thought, answer, [])
    assert parser.adjust_request(request).stop == ["\n\nUser:", "\n\nSystem:"]
    request.stop = "."
    assert parser.adjust_request(request).stop == [".", "\n\nUser:", "\n\nSystem:"]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL, CALLS = '{"arguments":{"a":"é {"},"id":1,"name":"add"}', [("add", '{"a": "é {"}')]


@pytest.mark.parametrize("reasoning", [None, "rwkv"])
@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("options", "output", "thought", "content", "calls"),
    [
        ({}, f"\n{CALL}\n```", None, None, CALLS),
        ({}, f"\n{CALL}", None, None, CALLS),
        ({"thinking": False}, f"\n[{CALL},\n{CALL}]\n```", None, None, CALLS * 2),
        ({}, '\n{"a":1}\n```', None, '\n{"a":1}\n```', []),
        ({}, f"\n{CALL[:-3]}", None, f"\n{CALL[:-3]}", []),
        ({"thinking": True}, f">So.</think>\n\nI ask.\n```json\n{CALL}\n```", "So.", "\n\nI ask.", CALLS),
        ({"thinking": True}, ">So.</think>\n\nIt is `3`.", "So.", "\n\nIt is `3`.", []),
    ],
)
def test_calls(reasoning, size, options, output, thought, content, calls, tokenizer):
    request = ChatCompletionRequest(messages=CHAT, tools=[TOOL], chat_template_kwargs=options)
    names = {"tool_parser_name": "rwkv", "enable_auto_tools": True, "reasoning_parser_name": reasoning}
    parser_class = ParserManager.get_parser(**names, tokenizer=tokenizer)
    options = {"tools": [TOOL], "add_generation_prompt": True, **options}
    prompt = tokenizer.apply_chat_template(CHAT, return_dict=False, **options)
    if reasoning is None and thought is not None:  # nobody splits it off
        output = output.removeprefix(">So.</think>")
        thought = None
    made = [parser_class(tokenizer, request.tools, chat_template_kwargs=request.chat_template_kwargs) for _ in "ab"]
    found = made[0].parse(output, request, enable_auto_tools=True)
    assert (*found[:2], [(call.name, call.arguments) for call in found[2] or ()]) == (thought, content, calls)
    assert parse(made[1], tokenizer, output, request, prompt, size) == (thought, content, calls)
    assert made[0].adjust_request(request).stop == ["\n\nUser:", "\n\nSystem:"]
    none = ChatCompletionRequest(messages=CHAT, tools=[TOOL], tool_choice="none", chat_template_kwargs=options)
    made = [parser_class(tokenizer, none.tools) for _ in "ab"]
    assert not made[0].parse(f" {CALL}", none)[2] and made[0].parse(f" {CALL}", none)[1] == f" {CALL}"
    assert parse(made[1], tokenizer, f" {CALL}", none, tokenizer.encode("Assistant:"), size) == (None, f" {CALL}", [])


def test_calls_of_other_turns():
    with pytest.raises(TypeError, match="--tool-call-parser rwkv: the tokenizer's chat template has no turns of RWKV"):
        ParserManager.get_parser(
            tool_parser_name="rwkv", enable_auto_tools=True, tokenizer=RwkvWorldTokenizerFast(chat_template=None)
        )


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
