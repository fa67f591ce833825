"""Chat templates in transformers and in the other programs that render them."""

import pytest
from other_engines import ENGINES
from transformers.utils.chat_template_utils import render_jinja_template

from subquad.models.visual_rwkv.processing_visual_rwkv import CHAT_TEMPLATE
from subquad_tokenizers import RwkvWorldTokenizerFast


USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    SYSTEM,
    {"role": "user", "content": "  First\r\n\r\nsecond\n\n\n\nthird \n line\n\n"},
    {"role": "assistant", "content": " Yes.\n\n No. \n"},
    {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": " now?"}]},
]
# What `continue_final_message` puts behind the text that the model goes on from.
TAG = "CONTINUE_FINAL_MESSAGE_TAG "
PLAIN = {
    "one turn": {"messages": [USER]},
    "a prompt": {"messages": [USER], "add_generation_prompt": True},
    "no prompt": {"messages": [USER], "add_generation_prompt": False},
    "system": {"messages": [SYSTEM, USER], "add_generation_prompt": True},
    "turns": {"messages": TURNS, "add_generation_prompt": True},
    "no answer": {"messages": [USER, {"role": "assistant", "content": ""}, USER]},
    "no content": {"messages": [USER, {"role": "assistant"}, USER]},
    **{
        f"going on from {text!r}": {"messages": [USER, {"role": "assistant", "content": text + TAG}]}
        for text in ("", "Sure", "```python\n", "Sure:\n\n1.")
    },
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <b> & 'ü'.",
        "parameters": {
            "type": "object",
            "properties": {
                "b": {"type": "integer"},
                "a": {"enum": ["x", 1], "default": None},
                "items": {"type": "array", "items": {"type": ["string", "null"]}},
                "either": {"anyOf": [{"type": "string"}, {"enum": [True]}, {"type": ["number", "null"]}, {}]},
            },
            "required": ["b"],
        },
    },
}
BARE = {"name": "now", "parameters": {"type": "object"}}
CALL = {"name": "add", "arguments": {"b": [1, 0.5, True, None, {}], "a": "é<'&\"\\\n\r\t中x", "items": {"items": 1}}}
CALLS = [{"type": "function", "function": CALL}, {"function": {"name": "add", "arguments": '{"b":1}'}}, CALL]
ASKED = {"role": "assistant", "content": "I ask.", "tool_calls": CALLS}
WORLD = {
    **PLAIN,
    "tools": {"messages": [USER], "tools": [TOOL, BARE], "add_generation_prompt": True},
    "signatures": {"messages": [USER], "tools": [TOOL, BARE], "tool_style": "signatures"},
    "tools and thoughts": {"messages": [USER], "tools": [TOOL], "thinking": True, "add_generation_prompt": True},
    "tools and no thoughts": {"messages": [USER], "tools": [TOOL], "thinking": False, "add_generation_prompt": True},
    "texts": {"messages": [{"role": "user", "content": ["A", {"type": "text", "text": "B"}, "C"]}, USER]},
    "white space": {"messages": [USER, {"role": "assistant", "content": "\n\n  So. \n"}, USER]},
    "thoughts of 2025": {"messages": [USER], "thinking": False, "style": "2025", "add_generation_prompt": True},
    "tools and system": {"messages": [SYSTEM, USER], "tools": [TOOL]},
    "calls": {"messages": [USER, ASKED, {"role": "tool", "content": "3\n\n4"}], "tools": [TOOL]},
    "calls alone": {"messages": [USER, {**ASKED, "content": None}, {"role": "tool", "content": {"a": 1, "b": ["<"]}}]},
    "no arguments": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]
    },
    **{
        f"a tool's {result}": {"messages": [USER, {"role": "tool", "content": result}]}
        for result in ([1, "é<"], [{"a": 1}], [[]], 3, [], {})
    },
    "an empty thought": {"messages": [{"role": "assistant", "content": "So.", "reasoning_content": ""}, USER]},
    "a thought and no content": {"messages": [{"role": "assistant", "reasoning_content": " \nOne.\n"}, USER]},
    "a thought and a call": {"messages": [{**ASKED, "content": "\n", "reasoning_content": "One."}, USER]},
    "a thought and a space": {"messages": [{"role": "assistant", "content": " So.", "reasoning_content": "."}, USER]},
    "no thought": {"messages": [{"role": "assistant", "content": "So.", "reasoning_content": None}, USER]},
    "a thought": {"messages": [{"role": "assistant", "content": "So.", "reasoning_content": "One.\n\nTwo."}, USER]},
    **{
        f"{name} {value}": {"messages": [USER], "add_generation_prompt": True, name: value}
        for name in ("thinking", "enable_thinking")
        for value in (True, False, None)
    },
    "both": {"messages": [USER], "add_generation_prompt": True, "thinking": None, "enable_thinking": True},
}
PICTURES = {
    **PLAIN,
    "a picture": {
        "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "A \n \nB"}]}]
    },
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """What a saved World tokenizer and a processor of VisualRWKV have."""
    directory = tmp_path_factory.mktemp("world")
    RwkvWorldTokenizerFast().save_pretrained(directory)
    saved = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    return {"World": (saved, WORLD), "VisualRWKV": (CHAT_TEMPLATE, PICTURES)}


@pytest.mark.fast
@pytest.mark.parametrize("render", ENGINES)
def test_other_programs_render_the_same_text(render, templates, tmp_path):
    for template, cases in templates.values():
        texts = render(template, list(cases.values()), tmp_path)
        for text, (name, variables) in zip(texts, cases.items(), strict=True):
            options = {key: value for key, value in variables.items() if key != "messages"}
            (expected,), _ = render_jinja_template([variables["messages"]], chat_template=template, **options)
            assert text == expected, name
