"""
One token at a time. A decoding step is made once for a model, a cache and a batch size, and then called with ids. A
faster step than the model itself examines the model when it is made, and looks for changes at every token.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from transformers import CompileConfig, GenerationConfig
from transformers.generation import (
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
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


# Device type to what makes a faster step, or raises [`Unsuitable`].
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
    # package only
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
    _accepted = {"attention_mask", "use_cache", "logits_to_keep", "return_dict", "position_ids", *CACHE_NAMES}

    def __init__(self, model: Any, alone: bool = False):
        self.model, self.alone, self.cache, self.step = model, alone, None, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, input_ids: torch.Tensor | None = None, **inputs) -> RecurrentCausalLMOutput:
        cache, ids = inputs.get(CACHE_NAME), input_ids
        others = [name for name, value in inputs.items() if value is not None and name not in self._accepted]
        inputs["input_ids"] = ids
        if others or cache is None or ids is None or ids.shape[1] != 1 or inputs.get("use_cache") is False:
            return self.model(**inputs)
        if self.cache is not cache or self.step.batch_size != ids.shape[0]:
            self.cache, self.step = cache, make_step(self.model, cache, ids.shape[0], self.alone)
        if isinstance(self.step, EagerStep):
            return self.model(**inputs)
        logits = self.step(ids, inputs.get("attention_mask"))
        return RecurrentCausalLMOutput(logits=logits.unsqueeze(1), **named_cache(cache))


# Whether no code of a user runs between the tokens that `generate` writes here.
_alone: ContextVar[bool] = ContextVar("alone", default=False)


# Packages whose code changes no model while `generate` runs.
_HARMLESS = {"transformers", "builtins", __name__.partition(".")[0], "subquad_cli", "subquad_tokenizers"}


def _is_known(x: Any) -> bool:
    """Whether something that `generate` calls, and what this has to call, changes no model."""
    called = [x, *(value for value in getattr(x, "__dict__", {}).values() if callable(value))]
    return x is None or {str(each.__module__).partition(".")[0] for each in called} <= _HARMLESS


class StepByStepMixin(GenerationMixin):
    """`generate` of transformers; in the installed package, with decoding steps and continuous batching."""

    @property
    def init_continuous_batching(self):
        """Missing on purpose: this is how `transformers serve` recognises a model without continuous batching."""
        raise AttributeError(self.generate_batch.__doc__)

    def generate_batch(self, *args, **kwargs):
        """Continuous batching of a recurrent state needs the package subquad: `import subquad` before the model."""
        raise ValueError(self.generate_batch.__doc__)

    continuous_batching_context_manager = generate_batch

    # package only
    def _sample(
        self, ids: torch.Tensor, processors: LogitsProcessorList, criteria: StoppingCriteriaList, *args, **kwargs
    ):
        """As in transformers."""
        before = _alone.set(all(map(_is_known, (self, *processors, *criteria, kwargs.get("streamer")))))
        try:
            return super()._sample(ids, processors, criteria, *args, **kwargs)
        finally:
            _alone.reset(before)

    # package only
    def get_compiled_call(self, compile_config: CompileConfig | None) -> Callable:
        """As in transformers; or if nothing is to be compiled, a call that reads single tokens by a decoding step."""
        if getattr(self, "_compiles", False):
            return super().get_compiled_call(compile_config)
        return StepByStep(self, _alone.get())

    # package only
    def _beam_search(self, *args, generation_config: GenerationConfig, **kwargs):
        """As in transformers, which calls `self` for each token."""
        caller = self if generation_config.disable_compile else StepByStep(self)
        return super()._beam_search.__func__(caller, *args, generation_config=generation_config, **kwargs)

    # package only
    def _get_logits_processor(self, generation_config: GenerationConfig, *args, **kwargs) -> LogitsProcessorList:
        """As in transformers, whose guidance calls `self` for each token."""
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)
        for processor in processors:
            guides = isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
            if guides and not generation_config.disable_compile:
                processor.model = StepByStep(self)
        return processors

    # package only
    def _valid_auto_compile_criteria(self, model_kwargs: dict, generation_config: GenerationConfig) -> bool:
        """Whether `generate` is to call [`~StepByStepMixin.get_compiled_call`] in place of the model."""
        compiles = self._compiles = super()._valid_auto_compile_criteria(model_kwargs, generation_config)
        asked = generation_config.cache_implementation == "static" and not generation_config.disable_compile
        if asked and not compiles and self.device.type == "cpu":
            logger.warning_once(
                '`cache_implementation="static"`: transformers does not compile the decoding step on a CPU, so a '
                "static cache gains nothing."
            )
        return compiles or not generation_config.disable_compile
