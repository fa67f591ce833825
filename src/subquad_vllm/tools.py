"""Reads the tool calls of World and G1 models: `--enable-auto-tool-choice --tool-call-parser rwkv`."""

import json
from collections.abc import Sequence

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tool_parsers import ToolParser

from .reasoning import ANSWER, stop_at_next_turn


class RwkvToolParser(ToolParser):
    """
    Reads calls as `tokenizer.parse_response` does, with the same response template. In a stream, a call is sent once
    it is complete. A truncated call is content, and so is a thought, which the reasoning parser separates first.

    Args:
        tokenizer: tokenizer of the model.
        tools: tools of the request.
    """

    engine_based_streaming = True  # vLLM calls `finish_streaming`

    def __init__(self, tokenizer, tools=None):
        super().__init__(tokenizer, tools)
        if not (template := getattr(tokenizer, "response_template", None)):
            raise ValueError("--tool-call-parser rwkv: the tokenizer's chat template has no turns of RWKV World.")
        calls = dict(template["fields"]["tool_calls"])
        calls["open_pattern"] = rf"(?:\A\s++)?{calls['open_pattern']}"  # a space or a blank line is not content
        content = {"content_args": {"strip": False}, "repeats": True, "join": ""}
        fields = {"tool_calls": calls, "content": content}
        self.template = {"start_anchor": ANSWER, "fields": fields}
        self.stream, self.calls = None, 0

    def adjust_request(self, request):
        return stop_at_next_turn(super().adjust_request(request), self.model_tokenizer)

    def extract_tool_calls(self, model_output: str, request) -> ExtractedToolCallInformation:
        if request.tool_choice == "none":
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        message = self.model_tokenizer.parse_response(model_output, self.template, prefix="")
        calls = [
            ToolCall(type="function", function=FunctionCall(name=name, arguments=arguments))
            for name, arguments in map(_call, message.get("tool_calls", ()))
        ]
        return ExtractedToolCallInformation(
            tools_called=bool(calls), tool_calls=calls, content=message.get("content") or None
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request,
    ) -> DeltaMessage | None:
        if request.tool_choice == "none":
            return DeltaMessage(content=delta_text) if delta_text else None
        self.stream = self.stream or self.model_tokenizer.get_response_parser(self.template, prefix="")
        return self._delta(self.stream.feed(delta_text))

    def finish_streaming(self) -> DeltaMessage | None:
        """The text that was held back."""
        if self.stream is None:
            return None
        events, self.stream = self.stream.finalize()[1], None
        return self._delta(events)

    def _delta(self, events: list[dict]) -> DeltaMessage | None:
        content, calls = "", []
        for event in events:
            if event["field"] == "content" and event["type"] == "region_chunk":
                content += event["text"]
            elif event["field"] == "tool_calls" and event["type"] == "region_close":
                name, arguments = _call(event["value"])
                function = DeltaFunctionCall(name=name, arguments=arguments)
                calls.append(
                    DeltaToolCall(id=make_tool_call_id(), type="function", index=self.calls, function=function)
                )
                self.calls += 1
        fields = ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})
        return DeltaMessage(**fields) if fields else None


def _call(call: dict) -> tuple[str, str]:
    """The name of a call, and its arguments as JSON."""
    function = call["function"]
    return function["name"], json.dumps(function["arguments"], ensure_ascii=False)
