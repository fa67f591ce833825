"""`generate` for models with a recurrent state."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import (
    GenerationMode,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.utils import ModelOutput

from ..modeling.arguments import check_tensor_types, parameter_names, refuse_unknown, with_own_names
from ..modeling.cache import RecurrentCache, accept_cache
from ..modeling.padding import find_mask
from ..modeling.self_check import check_once
from ..modeling.versions import CACHE_NAME, CACHE_NAMES, CHUNKS_FROM_THE_BEGINNING, cache_of, named_cache

# package only
from . import continuous_batching
from .next_turn import NextTurnCriteria
from .step import DecodingStep, StepByStepMixin, make_step


# Arguments of `generate` that ask for assisted decoding.
ASSISTED = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens")
# Arguments of `generate` that exclude a prefix cache. Assisted decoding reads the whole text into the cache that it is
# given.
NOT_WITH_PREFIXES = ("inputs_embeds", "pixel_values", "image_features", "cache", "cache_implementation", *ASSISTED)


class RecurrentGenerationMixin(StepByStepMixin):
    """`generate` with a [`RecurrentCache`]."""

    # Makes the prefix cache of a model that is not given one. `subquad run transformers serve` sets it.
    # package only
    make_prefix_cache: Callable | None = None

    def adjust_generation_fn(self, generation_config: GenerationConfig | None, *args, **kwargs) -> None:
        """As in transformers. A generation config made from a model config keeps this model's BOS token."""
        super().adjust_generation_fn(generation_config, *args, **kwargs)
        if generation_config is None and self.generation_config._from_model_config:
            self.generation_config.bos_token_id = self.config.get_text_config(decoder=True).bos_token_id

    def generate(self, *args, **kwargs):
        """
        As in transformers. The output has the cache under both names.

        Args:
            prefix_cache: a [`PrefixCache`] of the package, in which the longest known beginning of each text is looked
                up, and which keeps the states after the prompts and after the generated texts.
        """
        kwargs = with_own_names(kwargs)
        if kwargs.get("cache") is not None:
            kwargs["cache"] = accept_cache(kwargs["cache"], self.cache_class)
        if (ids := _given_ids(args, kwargs)) is not None:
            check_tensor_types({**kwargs, "input_ids": ids})
            if ids.dim() != 2:
                raise ValueError(f"`input_ids` must be (batch, length), got {tuple(ids.shape)}.")
            find_mask(kwargs.get("attention_mask"), *ids.shape, ids.device)
        _check_learned_prompt(self, kwargs)
        # package only
        if (prefix_cache := self._prefix_cache_for(args, kwargs)) is not None:
            return self._generate_behind(prefix_cache, *args, **kwargs)
        return self._generate(*args, **kwargs)

    # package only
    def _prefix_cache_for(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """
        The prefix cache that `generate` is given, which is taken out of its arguments; or the model's own one, if it
        is to have one and the arguments allow it.

        Raises:
            ValueError: if one is given that cannot be used with the arguments.
        """
        given = kwargs.pop("prefix_cache", None)
        if given is None and (self.make_prefix_cache is None or _has_learned_prompt(self)):
            return None
        if given is not None and not hasattr(given, "begin"):
            raise ValueError(f"`prefix_cache` must be a PrefixCache, got {given!r:.80}.")
        refusal = _why_not_behind(args, kwargs, self.generation_config)
        if given is not None and refusal is not None:
            raise ValueError(refusal)
        return self.prefix_cache_of_its_own() if given is None and refusal is None else given

    # package only
    def prefix_cache_of_its_own(self) -> Any:
        """The prefix cache of this model; None unless all models have one."""
        if "own_prefix_cache" not in self.__dict__ and self.make_prefix_cache is not None:
            self.own_prefix_cache = type(self).make_prefix_cache(self)
        return self.__dict__.get("own_prefix_cache")

    # package only
    def _generate_behind(self, prefix_cache: Any, *args, **kwargs):
        """`generate` from the longest beginnings of the texts that the prefix cache knows."""
        ids = _given_ids(args, kwargs)
        mask = kwargs.setdefault("attention_mask", torch.ones_like(ids))
        # The last token is left to `generate`, which needs the logits after it.
        known = mask[:, :-1].cpu() != 0
        reading = prefix_cache.begin(self, [row[real] for row, real in zip(ids[:, :-1].cpu(), known, strict=True)])
        while not reading.is_done:
            reading.step()
        cache = reading.cache(ids.shape[1] - 1)
        out = self._generate(*args, cache=cache, **kwargs)
        sequences = out if isinstance(out, torch.Tensor) else out.sequences
        if cache.batch_size == len(ids) == len(sequences):  # and not beams, or several answers
            length, texts = cache.get_seq_length(), []
            rows = zip(sequences[:, :length].cpu(), mask.cpu() != 0, cache.padding_read().tolist(), strict=True)
            for text, real, padding in rows:
                # Behind the prompt, padding is only at the end.
                text = torch.cat((text[: ids.shape[1]][real], text[ids.shape[1] :]))
                texts.append(text[: length - padding])
            prefix_cache.put_rows(texts, cache, reading.version)
        return out

    def _generate(self, *args, cache: RecurrentCache | None = None, **kwargs):
        if cache is not None:
            _check_not_read_again(cache, args, kwargs, self.generation_config)
            kwargs |= named_cache(cache)
        given = _given_ids(args, kwargs)
        check_once(self, None if given is None else given.device)
        if (stops := getattr(self.generation_config, "chat_stops", None)) and given is not None and len(args) < 4:
            criteria = kwargs.get("stopping_criteria") or ()
            kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, NextTurnCriteria(stops, given)])
        out = super().generate(*args, **kwargs)
        if CACHE_NAME != "cache" and isinstance(out, ModelOutput):
            out.cache = cache_of(out)
        return out

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """
        As in transformers, but a name that neither `generate` nor the model knows is a TypeError with the names that
        look like it.
        """
        prepare = self.prepare_inputs_for_generation  # PEFT puts another method there, which reads `task_ids`
        known = parameter_names(type(self).forward, getattr(prepare, "__func__", prepare))
        known |= self.known_arguments | vars(GenerationConfig()).keys()
        # package only
        known |= {"prefix_cache"}
        refuse_unknown(model_kwargs, known, f"{type(self).__name__}.generate()")
        super()._validate_model_kwargs(model_kwargs)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # transformers decides by the class name, and takes every "rwkv" for its RWKV-4, which has no cache object.
        return True

    # package only
    @property
    def init_continuous_batching(self) -> Callable:
        """
        As in transformers, see [`RecurrentBatchingManager`]. It is missing if there is no continuous batching for the
        model, which is how `transformers serve` recognises that; it then answers one request after the other.
        """
        if reason := continuous_batching.why_not(self):
            raise AttributeError(reason)
        return functools.partial(continuous_batching.start_manager, self)

    # package only
    def generate_batch(self, *args, **kwargs) -> dict:
        """As in transformers: the answers to any number of prompts, see `continuous_batching.generate_batch`."""
        return continuous_batching.generate_batch(self, *args, **kwargs)

    # package only
    def continuous_batching_context_manager(self, *args, **kwargs):
        """As in transformers: a [`RecurrentBatchingManager`] that runs inside of the context."""
        return continuous_batching.batching_context(self, *args, **kwargs)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict,
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ):
        implementation = generation_config.cache_implementation
        if model_kwargs.get(CACHE_NAME) is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            if isinstance(cache := model_kwargs.get(CACHE_NAME), RecurrentCache):
                _check_continuation(cache, generation_config, model_kwargs)
                repeats = max(generation_config.num_beams, generation_config.num_return_sequences)
                if repeats > 1 and cache.batch_size == batch_size:  # the text is continued several times
                    cache.batch_repeat_interleave(repeats)
                cache.reserve(max_cache_length)
        elif implementation in (None, "dynamic", "static"):
            max_cache_len = max(max_cache_length, generation_config.max_cache_len or 1)
            if implementation == "static":
                # As in transformers: a cache as large as the last one, for which the step is already compiled.
                max_cache_len = max(max_cache_len, getattr(self, "_previous_max_cache_length", 1))
                self._previous_max_cache_length = max_cache_len
            cache = self.new_cache(implementation == "static", max_cache_len)
            if generation_config.is_assistant:
                cache.activate_past_recording()
            model_kwargs |= named_cache(cache)
        else:
            raise ValueError(f"`cache_implementation` {implementation!r} does not apply to a recurrent state.")

        cache = model_kwargs.get(CACHE_NAME)
        unallocated = cache is not None and cache.is_compileable and not cache.is_initialized
        if generation_config.prefill_chunk_size and unallocated:
            # transformers also compiles the chunked prefill, and what a compiled call allocates does not last.
            rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
            self.base_model(torch.zeros(rows, 1, dtype=torch.long, device=self.device), cache=cache)
            cache.reset()

    def _prefill(
        self, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict, *args, **kwargs
    ):
        """As in transformers. Marks calls that read the prompt: its last chunk may look like a generated token."""
        model_kwargs["of_prompt"] = True
        try:
            return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        finally:
            del model_kwargs["of_prompt"]

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        *args,
        **kwargs,
    ):
        """As in transformers, but rows that have ended read no padding, so their states do not change."""
        pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        if pads and input_ids.shape[0] > 1:
            stopping_criteria = kwargs["ended_rows"] = _EndedRows(stopping_criteria)
        return super()._sample(input_ids, logits_processor, stopping_criteria, *args, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs,
    ) -> dict:
        """
        As in transformers, but the mask of a generated token has no columns for earlier ones, and is left out if no
        row has ended. The cache is found among the inputs under either name.
        """
        kwargs = with_own_names(kwargs)
        cache, of_prompt = kwargs.pop("cache", None), kwargs.pop("of_prompt", is_first_iteration)
        ended = kwargs.pop("ended_rows", None)
        for name in ("tokenizer", "assistant_tokenizer"):  # `generate` has read them, and gives them to every step
            kwargs.pop(name, None)
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **named_cache(cache),
            **kwargs,
        )
        inputs = _Inputs(inputs)
        ids = inputs.get("input_ids")
        if not of_prompt and cache is not None and ids is not None and ids.shape[1] == 1:
            inputs.pop("attention_mask", None)
            if ended is not None and ended.may_pad():
                # PEFT puts columns for a learned prompt before those of the whole text.
                if not _has_learned_prompt(self):
                    input_ids, attention_mask = input_ids[:, -1:], None
                inputs["attention_mask"] = ended.mask(input_ids, attention_mask)
        return inputs

    # package only
    def decoding_step(self, cache: RecurrentCache, batch_size: int | None = None) -> DecodingStep:
        """
        What reads one token of each row behind those that a cache has read, as fast as this machine can; `generate`
        uses it. (On a CPU, `generate` also skips hidden units of zero.) It is made once, and called for each token:

        ```python
        out = model(prompt, use_cache=True, logits_to_keep=1)
        step, token = model.decoding_step(out.cache), out.logits.argmax(-1)
        for _ in range(100):
            token = step(token).argmax(-1, keepdim=True)
        ```

        Args:
            cache: what the model returned for the prompt, or `model.new_cache()`. Each step updates it.
            batch_size: number of rows; if None, those of the cache.
        """
        return make_step(self, cache, batch_size)

    # transformers takes `max_position_embeddings` for a maximum. Here it is the length of the training texts.

    def _prepare_generated_length(
        self, *, generation_config: GenerationConfig, has_default_max_length: bool, **kwargs
    ):
        default = generation_config.max_length
        config = super()._prepare_generated_length(
            generation_config=generation_config, has_default_max_length=has_default_max_length, **kwargs
        )
        if has_default_max_length and config.max_new_tokens is None:
            config.max_length = default + kwargs["input_ids_length"]
        return config

    def _get_stopping_criteria(self, *args, **kwargs) -> StoppingCriteriaList:
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        for criterion in criteria:
            if isinstance(criterion, MaxLengthCriteria):
                criterion.max_position_embeddings = None  # no warning
        return criteria

    @staticmethod
    def create_masks_for_generate(inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs):
        """
        The mask for a decoding step that may be compiled: one that covers earlier tokens would grow at every step, and
        be compiled again each time.
        """
        if attention_mask is None:
            return None
        # A copy, because the strides of a slice grow with the mask.
        return attention_mask[:, -inputs_embeds.shape[1] :].clone(memory_format=torch.contiguous_format)


class _EndedRows(StoppingCriteriaList):
    """Stopping criteria that count the padding behind the end of each row, int64 (batch)."""

    padding: torch.Tensor | None = None
    _ended: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        done = super().__call__(input_ids, scores, **kwargs)
        if self.padding is None:
            self.padding, self._ended = torch.zeros_like(done, dtype=torch.long), torch.zeros_like(done)
        self.padding = self.padding + self._ended  # the newest token of a row that had ended before
        self._ended = self._ended | done
        return done

    def mask(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """The mask of the last tokens (batch, n), with zeros also for the padding behind the end of a row."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        columns = torch.arange(mask.shape[1], device=mask.device)
        return torch.where(columns < mask.shape[1] - self.padding[:, None], mask, 0)

    def may_pad(self) -> bool:
        """Whether there may be padding. Assumed on a GPU: reading the value would synchronize at every token."""
        return self.padding is not None and (self.padding.device.type != "cpu" or bool(self.padding.any()))


class _Inputs(dict):
    """The inputs of a step. PEFT looks for the cache among them, under the name that it knows."""

    def __missing__(self, name: str) -> Any:
        if name in CACHE_NAMES and CACHE_NAME in self:
            return self[CACHE_NAME]
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


def _given_ids(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    return args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))


def _has_learned_prompt(model: RecurrentGenerationMixin) -> bool:
    """Whether PEFT puts a learned prompt before the text: it has replaced a method of the model by its own."""
    adapted = getattr(model.prepare_inputs_for_generation, "__self__", None)
    return getattr(getattr(adapted, "active_peft_config", None), "is_prompt_learning", False)


def _check_learned_prompt(model: RecurrentGenerationMixin, kwargs: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: if PEFT puts a learned prompt before the text, and the text is not read in one step.
    """
    if _has_learned_prompt(model):
        for name in ("cache", "prefix_cache", "prefill_chunk_size", *ASSISTED):
            value = _setting(kwargs, name, model.generation_config)
            if value is not None and not (isinstance(value, RecurrentCache) and not value.get_seq_length()):
                raise ValueError(
                    f"`{name}`: after a prompt that PEFT has learned, the whole text is read in one step."
                )


def _why_not_behind(args: tuple, kwargs: dict[str, Any], default: GenerationConfig) -> str | None:
    """Why a prefix cache cannot be used with arguments of `generate`; None if it can."""
    for name in NOT_WITH_PREFIXES:
        if _setting(kwargs, name, default) is not None:
            return f"`{name}` cannot be given together with `prefix_cache`."
    if _setting(kwargs, "use_cache", default) is False:
        return "`use_cache` must not be False if `prefix_cache` is given."
    ids, mask = _given_ids(args, kwargs), kwargs.get("attention_mask")
    if ids is None:
        return "`prefix_cache` needs `input_ids`."
    if mask is None and ids.shape[0] > 1:
        return f"`prefix_cache` needs an `attention_mask` for `input_ids` with {ids.shape[0]} rows."
    if mask is not None and mask.shape != ids.shape:
        return f"`attention_mask` must be {tuple(ids.shape)} if `prefix_cache` is given, got {tuple(mask.shape)}."
    return None


def _setting(kwargs: dict[str, Any], name: str, default: GenerationConfig | None = None) -> Any:
    """An argument of `generate`, or the field of that name of its `generation_config`, or of the model's."""
    given = kwargs.get(name, getattr(kwargs.get("generation_config"), name, None))
    return getattr(default, name, None) if given is None else given


def _check_not_read_again(
    cache: RecurrentCache, args: tuple, kwargs: dict[str, Any], default: GenerationConfig
) -> None:
    """
    Raises:
        ValueError: if `generate` would read a text from its beginning into a cache that has read some of it.
    """
    if _setting(kwargs, "use_cache", default) is False:
        raise ValueError("`cache` was given, but `use_cache` is False.")
    ids, mask = _given_ids(args, kwargs), kwargs.get("attention_mask")
    if not isinstance(cache, RecurrentCache) or ids is None or not cache.get_seq_length():
        return
    if _setting(kwargs, "prefill_chunk_size", default) is not None and CHUNKS_FROM_THE_BEGINNING:
        raise ValueError(
            "`prefill_chunk_size`: transformers before 5.23 reads chunks from the beginning of a text, but `cache` "
            f"has read {cache.get_seq_length()} tokens."
        )
    if mask is not None and mask.shape[1] > ids.shape[1]:  # only the new tokens
        return
    for name in ASSISTED:
        if _setting(kwargs, name, default) is not None:
            raise ValueError(
                f"`{name}`: assisted decoding reads all tokens of the text, but `cache` has read "
                f"{cache.get_seq_length()}. Give only the new tokens, with the `attention_mask` of the whole text."
            )


def _check_continuation(cache: RecurrentCache, generation_config: GenerationConfig, model_kwargs: dict) -> None:
    """
    Raises:
        ValueError: if there is no token to read after those that the cache has read, or the mask, also one that
            transformers has made, does not agree with what was read.
    """
    mask, read = model_kwargs.get("attention_mask"), cache.get_seq_length()
    if not read:
        return
    if mask is None:  # transformers drops a mask without zeros, and keeps its length
        if (length := getattr(generation_config, "_mask_length", None)) is None:
            return
        mask = torch.ones(cache.batch_size, length)
    if mask.shape[1] <= read:
        raise ValueError(
            f"`cache` has read {read} tokens, but the text has {mask.shape[1]}. Give the whole text, or only its "
            "new tokens with the `attention_mask` of the whole text."
        )
    if mask.shape[0] == cache.batch_size:
        cache.check_mask(mask, mask.shape[1] - read)
