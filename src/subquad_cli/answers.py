"""Turns of a chat template, and printing of text, for `subquad generate` and `subquad chat`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from .common import UsageError


if TYPE_CHECKING:
    import torch


# A conversation that shows the chat template's text around an answer.
QUESTION = {"role": "user", "content": "A question."}
ANSWER = {"role": "assistant", "content": "An answer."}
NEXT = {"role": "user", "content": "Another question."}


class ChatFormat:
    """
    The turns of a model's chat template.

    Args:
        reader: the tokenizer, or the processor.
        name: the model's name as given by the user.
        think: whether the model should think before it answers; None leaves it to the model.

    Attributes:
        opening: the text in the prompt that begins the thoughts, empty if there should be none.
        completes: the text with which the model completes the end of an empty thought, before its answer; empty if the
            prompt has the whole end, or no empty thought.
        end: the text that ends an answer.
        thinking: the argument of the template that turns thinking on or off.

    Raises:
        UsageError: if there is no template, or it has no argument for `think`.
    """

    def __init__(self, reader, name: str, think: bool | None):
        self.reader, self.tokenizer = reader, getattr(reader, "tokenizer", reader)
        if reader.chat_template is None:
            raise UsageError(f"{name} does not have a chat template.")
        self.thinking = {} if think is None else _thinking_option(self.tokenizer, think)
        if self.thinking is None:
            raise UsageError(f"{name} cannot be told whether to think; leave out --think and --no-think.")
        begun, self.end = _around_answer(self.tokenizer, self.thinking)
        thinks = any(self.thinking.values())
        self.opening, self.completes = (begun, "") if thinks else ("", _missing_end(begun))

    def encode(
        self, question: str, images: list[str], after: str | None = None, system: str | None = None
    ) -> "dict[str, torch.Tensor]":
        """
        The inputs of the model, up to the beginning of its answer.

        Args:
            question: the user's message.
            images: image files, placed before it.
            after: the result of [`~ChatFormat.after`]; None at the beginning of a conversation.
            system: the beginning of the conversation.

        Returns:
            `input_ids` (1, tokens), and the model's arguments for images if there are any.
        """
        content = [*({"type": "image", "path": file} for file in images), {"type": "text", "text": question}]
        message = {"role": "user", "content": content if images else question}
        if after is None:
            before = [] if system is None else [{"role": "system", "content": system}]
            text = self._render(self.reader, *before, message)
        else:
            turns = self._render(self.reader, QUESTION, ANSWER, message)
            text = turns.partition(ANSWER["content"])[2]
            if not text.startswith(self.end):
                raise ValueError(f"The chat template ends answers by {self.end!r}, but this one by {text[:20]!r}.")
            text = after + text.removeprefix(self.end)
        if not images:
            return {"input_ids": self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]}
        inputs = self.reader(text=[text], images=[images], add_special_tokens=False, return_tensors="pt")
        return {name: x for name, x in inputs.items() if name != "attention_mask"}

    def shown(self, answer: str) -> str:
        """The answer without the end of an empty thought."""
        return _without(answer, self.completes)

    def after(self, turns: int, rest: str, ended: bool, **more) -> str | None:
        """The text after which [`~ChatFormat.encode`] puts the next message, given the attributes of a [`Session`]."""
        return None if turns == 0 else rest if ended else self.end

    def _render(self, reader, *messages: dict) -> str:
        return reader.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **self.thinking)


def _thinking_option(tokenizer, think: bool) -> dict[str, bool] | None:
    """The argument of the chat template that turns thinking on or off; None if the template does not have one."""
    for name in ("thinking", "enable_thinking"):
        prompts = {_render(tokenizer, QUESTION, add_generation_prompt=True, **{name: on}) for on in (True, False)}
        if len(prompts) == 2:
            return {name: think}
    return None


def _around_answer(tokenizer, thinking: dict[str, bool]) -> tuple[str, str]:
    """
    From the chat template: the text in the prompt that begins the answer, and the text that ends it. If only white
    space follows an answer, which may also occur within one, the end includes the beginning of the user's next
    message.
    """
    before, _, end = _render(tokenizer, QUESTION, ANSWER).rpartition(ANSWER["content"])
    prompt = _render(tokenizer, QUESTION, add_generation_prompt=True, **thinking)
    opening = prompt[len(before) :] if prompt.startswith(before) else ""
    if not end.strip():
        turns = _render(tokenizer, QUESTION, ANSWER, NEXT)
        end = turns.rpartition(ANSWER["content"])[2].partition(NEXT["content"])[0]
    return opening, end.rstrip()


def _missing_end(opening: str) -> str:
    """The end of the last tag of a text, if the text lacks it."""
    return ">" if "<" in opening.rpartition(">")[2] else ""


def _without(answer: str, completes: str) -> str:
    begun = completes and answer.startswith(completes)
    return answer.removeprefix(completes).lstrip() if begun else answer


def _render(tokenizer, *messages: dict[str, str], **options) -> str:
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)


def character_streamer(
    tokenizer,
    skip_prompt: bool,
    opening: str = "",
    end: str = "",
    known: list[int] | None = None,
    completes: str = "",
    write: Callable[[str], None] | None = None,
):
    """
    A streamer that prints each token as soon as it is generated; `TextStreamer` waits for the end of a word. It prints
    `opening` before the first token, and nothing from `end` on. Its attribute `ended` is true once `end` has come.

    Args:
        known: first ids of the prompt, which are not printed.
        completes: a beginning of an answer that is not printed, like white space after it.
        write: receives the text instead of standard output.
    """
    from transformers import TextStreamer

    class CharacterStreamer(TextStreamer):
        held, ended, begins = opening, False, bool(completes)

        def put(self, value):
            ids = value.reshape(-1).tolist()
            if self.next_tokens_are_prompt:
                self.next_tokens_are_prompt = False
                if self.skip_prompt:
                    return
                begin = self.tokenizer.decode(known or [], **self.decode_kwargs)
                self.print_len = len(begin.rstrip("�"))
            self.token_cache.extend(ids)
            text = self.tokenizer.decode(self.token_cache, **self.decode_kwargs)
            if text.endswith("�"):  # the last bytes of a character are still missing
                return
            self.on_finalized_text(text[self.print_len :])
            self.print_len = len(text)
            if text.endswith("\n"):
                self.token_cache, self.print_len = [], 0

        def on_finalized_text(self, text, stream_end=False):
            text = self.held + text
            if self.begins:
                shown = _without(text, completes)
                self.begins = not shown and not stream_end
                if self.begins:
                    self.held = text
                    return
                text = shown
            stop = text.find(end) if end else -1
            self.ended = stop >= 0
            if stop < 0:  # the last characters may be the first ones of `end`
                begun = 0 if stream_end else max((n for n in range(len(end)) if text.endswith(end[:n])), default=0)
                stop = len(text) - begun
            self.held = "" if stream_end else text[stop:]
            if write is not None:
                write(text[:stop])
            else:
                super().on_finalized_text(text[:stop], stream_end)

    return CharacterStreamer(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
