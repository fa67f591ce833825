"""
One token at a time. A decoding step is made once for a model, a cache and a batch size, and then called with ids. A
faster step than the model itself examines the model when it is made, and looks for changes at every token.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers.utils import logging

from ..modeling.cache import RecurrentCache
from ..modeling.versions import CACHE_NAME, CACHE_NAMES, RecurrentCausalLMOutput, named_cache


logger = logging.get_logger(__name__)


class DecodingStep(Protocol):
    """
    Reads one token of each row behind those that a cache has read, without gradients.

    Attributes:
        kind: `"eager"`, `"cpu"` or `"cuda_graph"`.
        batch_size: the number of rows.
    """

    kind: str
    batch_size: int

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            input_ids: int64 or int32 (batch, 1).
            attention_mask: (batch, 1), 0 for a row that reads nothing, such as one that has ended; or None.

        Returns:
            the logits of the next token, (batch, vocabulary). The cache is updated.

        Raises:
            ValueError: if there is more than one token in a row, or another number of rows than the step is made for.
        """


class Unsuitable(Exception):
    """A faster step cannot be made. The message is the reason."""


class EagerStep:
    """The decoding step that is the model itself."""

    kind = "eager"

    def __init__(self, model: Callable, cache: RecurrentCache, batch_size: int):
        self.model, self.cache, self.batch_size = model, cache, batch_size

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        check_ids(input_ids, self.batch_size)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **named_cache(self.cache)}
        return self.model(**inputs, use_cache=True, logits_to_keep=1, return_dict=True).logits[:, -1]


def check_ids(input_ids: torch.Tensor, batch_size: int) -> None:
    """
    Raises:
        ValueError: if ids are not one token of each row.
    """
    if input_ids.shape != (batch_size, 1):
        raise ValueError(f"`input_ids` of a decoding step must be ({batch_size}, 1), got {tuple(input_ids.shape)}.")


# Device type to what makes a faster step, or raises [`Unsuitable`]. The package adds its own; a model repository has
# none.
MAKERS: dict[str, Callable[[Any, RecurrentCache, int, bool], DecodingStep]] = {}


def make_step(model: Any, cache: RecurrentCache, batch_size: int | None = None, alone: bool = False) -> DecodingStep:
    """
    The fastest decoding step for a model with a language modeling head, see [`DecodingStep`].

    Args:
        alone: whether nobody changes the model as long as the step is used, so it need not look for changes. The
            weights stay in memory as long.
    """
    if batch_size is None and (batch_size := cache.batch_size) < 1:
        raise ValueError("`batch_size` must be given for a `cache` that has not read a token.")
    if (make := MAKERS.get(model.device.type)) is not None:
        try:
            return make(model, cache, batch_size, alone)
        except Unsuitable as reason:
            logger.info("Each token is read by the model itself: %s", reason)
    return EagerStep(model, cache, batch_size)


class StepByStep:
    """
    The model as `generate` calls it: single tokens are read by a decoding step.

    Args:
        alone: whether nothing else runs between two tokens that could change the model.
    """

    # What a step reads, or may leave out: the position of a single token is not read.
    _accepted = {
        "input_ids",
        "attention_mask",
        *CACHE_NAMES,
        "use_cache",
        "logits_to_keep",
        "return_dict",
        "position_ids",
    }

    def __init__(self, model: Any, alone: bool = False):
        self.model, self.alone, self.cache, self.step = model, alone, None, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, input_ids: torch.Tensor | None = None, **inputs) -> RecurrentCausalLMOutput:
        inputs["input_ids"] = ids = input_ids
        cache = inputs.get(CACHE_NAME)
        others = [name for name, value in inputs.items() if value is not None and name not in self._accepted]
        if others or cache is None or ids is None or ids.shape[1] != 1 or inputs.get("use_cache") is False:
            return self.model(**inputs)
        if self.cache is not cache or self.step.batch_size != ids.shape[0]:
            self.cache, self.step = cache, make_step(self.model, cache, ids.shape[0], self.alone)
        if isinstance(self.step, EagerStep):
            return self.model(**inputs)
        logits = self.step(ids, inputs.get("attention_mask"))
        return RecurrentCausalLMOutput(logits=logits.unsqueeze(1), **named_cache(cache))
