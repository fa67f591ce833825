"""Separates the thoughts of Goose's G1 models from their answers: `--reasoning-parser rwkv`."""

from collections.abc import Iterable, Sequence

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning import ReasoningParser


ANSWER, BEGIN, END = "Assistant:", "<think>", "</think>"


def stop_at_next_turn(request, tokenizer):
    """Makes a chat request end where the model begins the next turn, in addition to its stop strings."""
    if hasattr(request, "stop"):
        given = [request.stop] if isinstance(request.stop, str) else request.stop or []
        request.stop = [*given, *(text for text in getattr(tokenizer, "stop_strings", ()) if text not in given)]
    return request


class RwkvReasoningParser(ReasoningParser):
    """
    Thoughts are the text between `<think>` and `</think>` at the beginning of an answer. Both are several tokens of
    World, so they are looked for in text. If a request asks for thoughts, its prompt ends with ` <think`, and the
    answer begins with `>`. If it asks for none, the same `>` completes ` <think></think`.

    A stream, and structured outputs, have thoughts only if the request asks for them: nothing else shows in time that
    a thought comes before the answer.

    Args:
        tokenizer: tokenizer of the model.
        chat_template_kwargs: arguments of the request, such as `thinking`.
    """

    def __init__(self, tokenizer, *args, chat_template_kwargs: dict | None = None, **kwargs):
        super().__init__(tokenizer, *args, **kwargs)
        self.options = chat_template_kwargs or {}
        self.opening = self._opening()
        self.before: list[int] = []  # the last ids of the prompt

    def _opening(self, tools: bool = False) -> str:
        """The text in the prompt that begins the answer."""
        chat, tools = [{"role": "user", "content": "?"}], [{"name": "f"}] if tools else None
        options = {"tokenize": False, "add_generation_prompt": True}
        return self._answer(
            self.model_tokenizer.apply_chat_template(chat, **self.options | {"tools": tools} | options)
        )

    @staticmethod
    def _answer(text: str) -> str:
        return text.rpartition(ANSWER)[2].lstrip()

    def adjust_request(self, request):
        return stop_at_next_turn(request, self.model_tokenizer)

    def adjust_initial_state_from_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        self.opening, self.before = self._answer(self._decode(prompt_token_ids)), list(prompt_token_ids[-len(END) :])

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether a prompt of the chat template and the text after it have no open thought."""
        answer = self._answer(self._decode(input_ids))
        return END in answer or not answer.startswith(BEGIN[:-1])

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Whether the thought ends in the last tokens, `delta_ids`. As bytes, its end is `len(END)` tokens."""
        new = len(list(delta_ids)) + len(END) - 1
        return END in self._decode([*self.before, *input_ids][-new:]).rpartition(ANSWER)[2]

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The ids after the thought; none if it does not end in them."""
        text = self._answer(self._decode(self.before))
        for count, index in enumerate(input_ids, 1):
            text += self._decode([index])
            if END in text:
                return list(input_ids[count:])
        return []

    def extract_reasoning(self, model_output: str, request) -> tuple[str | None, str | None]:
        """The thought and the answer; None for either that is not there."""
        self.opening = self._opening(bool(request is not None and request.tools))
        thought, answer = self._split(model_output)
        return thought or None, answer or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """The additions of the last tokens to thought and answer; None while they may be part of a mark."""
        before, now = self._split(previous_text, partly=True), self._split(current_text, partly=True)
        thought, answer = (new[len(old) :] or None for old, new in zip(before, now, strict=True))
        return DeltaMessage(reasoning=thought, content=answer) if thought or answer else None

    def _split(self, text: str, partly: bool = False) -> tuple[str, str]:
        """The thought and the answer. With `partly`, more text will come, and a possible mark is left out."""
        rest = (self.opening + text).lstrip()
        if not rest.startswith(BEGIN[:-1] if self.opening else BEGIN):
            return "", "" if partly and BEGIN.startswith(rest) else text
        thought, end, answer = rest.removeprefix(BEGIN[:-1]).removeprefix(BEGIN[-1]).partition(END)
        if partly and not end:
            held = next((n for n in range(len(END) - 1, 0, -1) if thought.endswith(END[:n])), 0)
            thought = thought[: len(thought) - held]
        return thought, answer

    def _decode(self, ids: Sequence[int]) -> str:
        return self.model_tokenizer.decode(list(ids))
