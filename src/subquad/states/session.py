"""A text that a model continues: its state, and the part that the model has not read yet."""

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ..decoding.penalties import DecayingPenaltyLogitsProcessor
from ..modeling.cache import RecurrentCache
from ..modeling.state_file import ModelIdentity, check_owner, read_state_file


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Characters of the text's end that a file stores.
SHOWN = 200
# Tokens that a session may have read.
MOST_TOKENS = 2**24


@dataclass
class Session:
    """
    The part of a text that its continuation needs. The model has read all but the last tokens.

    Attributes:
        cache: the state after the tokens that were read.
        unread: ids of the tokens after these. `generate` does not read the last token that it chooses.
        rest: text after these tokens, without ids yet: an answer and the beginning of the next turn need not end at a
            token boundary.
        ended: whether `rest` includes the text that ends an answer in the chat template.
        turns: number of answers that were given in turns of a chat template.
        end: the end of the text, for display.
    """

    cache: RecurrentCache
    unread: list[int] = field(default_factory=list)
    rest: str = ""
    ended: bool = False
    turns: int = 0
    end: str = ""

    def copy(self) -> "Session":
        """An independent copy."""
        return replace(self, cache=self.cache.clone(), unread=list(self.unread))

    @torch.no_grad()
    def generate(
        self,
        model: "PreTrainedModel",
        ids: list[int],
        penalties: dict[str, float] | None = None,
        **options: Any,
    ) -> list[int]:
        """
        Reads the unread tokens and `ids`, and generates more.

        Args:
            ids: the next tokens of the text.
            penalties: arguments of [`DecayingPenaltyLogitsProcessor`] for the new tokens; None: there are none.
            options: options of `model.generate`. The penalties come after the processors in `logits_processor`.

        Returns:
            the ids of the new tokens. After an error, the session is unusable.

        Raises:
            ValueError: if there is no token to read.
        """
        ids = self.unread + ids
        if not ids:
            raise ValueError("There is no token to read: the text ends where the state does, so it needs more text.")
        tokens = self.cache.get_seq_length() + len(ids)
        if penalties is not None:
            given = options.get("logits_processor") or []
            options["logits_processor"] = [*given, DecayingPenaltyLogitsProcessor(len(ids), **penalties)]
        out = model.generate(
            input_ids=torch.tensor([ids], device=model.device),
            attention_mask=torch.ones(1, tokens, dtype=torch.long, device=model.device),
            cache=self.cache,
            **options,
        )
        new = out[0, len(ids) :].tolist()
        ends = model.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        # The token that ends a text is not a part of it.
        self.unread = [token for token in new[-1:] if token not in ends]
        self.rest, self.ended = "", False
        return new

    def end_answer(self, tokenizer: "PreTrainedTokenizerBase", new: list[int], end: str) -> str:
        """
        Ends a turn.

        Args:
            new: the ids from [`~Session.generate`].
            end: the text that ends an answer, "" if there is none.

        Returns:
            the answer, without that text and anything after it.
        """
        text = tokenizer.decode(new, skip_special_tokens=True)
        answer, ended, _ = text.partition(end) if end else (text, "", "")
        if ended:  # by the last token, which is unread and may contain more text
            self.rest = (answer + end)[len(tokenizer.decode(new[:-1], skip_special_tokens=True)) :]
            self.unread, self.ended = [], True
        self.turns += 1
        return answer

    def save(self, path: str | os.PathLike, model: ModelIdentity) -> None:
        """
        Writes one safetensors file, completely or not at all.

        Args:
            model: the model that has read the text.
        """
        names = ("unread", "rest", "ended", "turns")
        text = {name: getattr(self, name) for name in names} | {"end": self.end[-SHOWN:]}
        self.cache.save(path, model, text)


@dataclass(frozen=True)
class SavedSession:
    """
    A session from a file, read and checked before the model is loaded.

    Attributes:
        path: of the file.
        states, about: the content of the file.
    """

    path: str
    states: dict[str, torch.Tensor]
    about: dict[str, Any]

    @classmethod
    def read(cls, path: str | os.PathLike, model: ModelIdentity) -> "SavedSession":
        """
        Raises:
            ValueError: if the file is damaged, was changed, belongs to another model or holds several texts.
        """
        states, about = read_state_file(path)
        check_owner(path, about, model)
        path = os.fspath(path)
        if {state.shape[:1] for state in states.values()} - {(1,)}:
            raise ValueError(f"{path} holds the states of several texts.")
        if (tokens := about["seen_tokens"]) > MOST_TOKENS:
            raise ValueError(
                f"{path} is the state of a text of {tokens:,} tokens. `generate` has a mask of the whole text, so a "
                f"session goes on with at most {MOST_TOKENS:,}. `RecurrentCache.load` reads longer ones."
            )
        text = about.get("text")
        kinds = {"unread": list, "rest": str, "ended": bool, "turns": int, "end": str}
        if not isinstance(text, dict) or {name: type(value) for name, value in text.items()} != kinds:
            raise ValueError(f"{path} does not store where its text ends; `subquad generate --state-out` writes that.")
        return cls(path, states, about)

    @property
    def tokens(self) -> int:
        """Number of tokens read."""
        return self.about["seen_tokens"]

    @property
    def dtype(self) -> str:
        """The dtype of the model that read the text, such as "bfloat16"."""
        return self.about["dtype"]

    @property
    def text(self) -> dict[str, Any]:
        """The attributes of the [`Session`], by their names."""
        return self.about["text"]

    def restore(self, model: "PreTrainedModel") -> Session:
        """
        The session, on the device of a model and in its dtype.

        Raises:
            ValueError: if the model does not have an id, or the states belong to another kind of model.
        """
        unread, config = self.text["unread"], model.config.get_text_config()
        for token in unread:
            if type(token) is not int or not 0 <= token < config.vocab_size:
                raise ValueError(f"{self.path} has the id {str(token)[:20]}, which the model does not know.")
        cache = type(model.new_cache()).from_states(self.path, config, self.states, self.about)
        cache.to(model.device, model.dtype)
        return Session(cache, **self.text)


__all__ = ["SavedSession", "Session"]
