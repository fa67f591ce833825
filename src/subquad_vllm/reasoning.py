"""Splits the thoughts of Goose's G1 models off their answers: `--reasoning-parser rwkv`."""

from collections.abc import Iterable, Sequence

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning import ReasoningParser


ANSWER, BEGIN, END = "Assistant:", "<think>", "</think>"


class RwkvReasoningParser(ReasoningParser):
    """
    Thoughts are what stands between `<think>` and `</think>` at the beginning of an answer. Both are several tokens of
    World, so they are looked for in text. If a request asks for thoughts, its prompt ends with ` <think`, and the
    answer begins with `>`.

    A stream, and structured outputs, have thoughts only if the request asks for them: nothing else shows in time that
    a thought, and not the answer, is about to come.

    Args:
        tokenizer: of the model.
        chat_template_kwargs: those of the request; `thinking` or `enable_thinking` asks for thoughts.
    """

    def __init__(self, tokenizer, *args, chat_template_kwargs: dict | None = None, **kwargs):
        super().__init__(tokenizer, *args, **kwargs)
        given = chat_template_kwargs or {}
        self.begun = bool(given.get("thinking", given.get("enable_thinking")))

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether a prompt of the chat template, and what follows it, has no thought that is still open."""
        answer = self._decode(input_ids).rpartition(ANSWER)[2].lstrip()
        return END in answer or not answer.startswith(BEGIN[:-1])

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Whether the thought ends in the last tokens, `delta_ids`. As bytes, its end is `len(END)` tokens."""
        new = len(list(delta_ids)) + len(END) - 1
        return END in self._decode(input_ids[-new:]).rpartition(ANSWER)[2]

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The ids after those of the thought; none if it does not end in them."""
        text = ""
        for count, index in enumerate(input_ids, 1):
            text += self._decode([index])
            if END in text:
                return list(input_ids[count:])
        return []

    def extract_reasoning(self, model_output: str, request) -> tuple[str | None, str | None]:
        """The thought and the answer; None for either that is not there."""
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
        """What the last tokens add to the thought and to the answer; None while they may be part of a mark."""
        before, now = self._split(previous_text, partly=True), self._split(current_text, partly=True)
        thought, answer = (new[len(old) :] or None for old, new in zip(before, now, strict=True))
        return DeltaMessage(reasoning=thought, content=answer) if thought or answer else None

    def _split(self, text: str, partly: bool = False) -> tuple[str, str]:
        """The thought and the answer. With `partly`, more text will come, and what may begin a mark is left out."""
        begun, rest = self.begun, text.lstrip()
        if begun:
            rest = text.removeprefix(BEGIN[-1])
        elif rest.startswith(BEGIN):
            begun, rest = True, rest.removeprefix(BEGIN)
        if not begun:
            return "", "" if partly and BEGIN.startswith(rest) else text
        thought, end, answer = rest.partition(END)
        if partly and not end:
            held = next((n for n in range(len(END) - 1, 0, -1) if thought.endswith(END[:n])), 0)
            thought = thought[: len(thought) - held]
        return thought, answer

    def _decode(self, ids: Sequence[int]) -> str:
        return self.model_tokenizer.decode(list(ids))
