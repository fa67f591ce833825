"""The base class of every model with a recurrent state."""

import torch
from transformers import PreTrainedConfig
from transformers.utils import logging

from .cache import RecurrentCache, check_cache, check_class
from .layers import read_tokens
from .padding import Tokens, last_token
from .saving import SavedPreTrainedModel
from .versions import CACHE_NAMES, RecurrentModelOutput, named_cache


logger = logging.get_logger(__name__)


class RecurrentPreTrainedModel(SavedPreTrainedModel):
    """What models with a recurrent state share: their checks, their cache, and the start and end of a forward pass."""

    cache_class: type[RecurrentCache] = RecurrentCache
    supports_gradient_checkpointing = True
    _can_compile_fullgraph = True
    _skip_keys_device_placement = list(CACHE_NAMES)

    def __init__(self, config: PreTrainedConfig, *args, **kwargs):
        config.validate_architecture()  # its fields may have been set since it was created
        config.validate_names()
        super().__init__(config, *args, **kwargs)

    def new_cache(self, static: bool = False, max_cache_len: int | None = None) -> RecurrentCache:
        """
        An empty cache for this model.

        Args:
            static: see [`RecurrentCache`].
            max_cache_len: number of tokens that a static cache has room for. A recurrent state has no limit.
        """
        return self.cache_class(self.config, static, max_cache_len)

    def read_inputs(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        cache: RecurrentCache | None,
        use_cache: bool | None,
        wanted: dict[str, torch.Tensor] | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, Tokens, RecurrentCache | None, bool]:
        """
        The start of every forward pass: the checks of its arguments, before any work. For `wanted` see [`Tokens`]; the
        others are arguments that libraries give to every model, and that the blocks do not need.

        Returns:
            the embeddings (batch, length, width), which of them are real and where documents begin, the cache to fill,
            if any, and whether to return it.
        """
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        use_cache, cache = self._without_cache_if_checkpointing(use_cache, cache)
        if cache is not None:
            check_class(cache, self.cache_class)
        if cache is not None and torch.compiler.is_compiling():
            # `generate` compiles its steps to one graph each. Their positions only count the tokens.
            position_ids = None
        x, tokens = read_tokens(
            self.config,
            self.get_input_embeddings(),
            input_ids,
            inputs_embeds,
            attention_mask,
            position_ids,
            cu_seqlens,
            wanted,
        )
        if cache is not None:
            check_cache(cache, self.config, tokens, attention_mask)
        elif attention_mask is not None and attention_mask.shape[1] > tokens.length:
            raise ValueError(
                f"`attention_mask` has {attention_mask.shape[1]} columns, but the input has {tokens.length} tokens. "
                "Earlier tokens need the `cache` that has read them."
            )
        elif use_cache:
            cache = self.new_cache()
        return x, tokens, cache, use_cache

    @staticmethod
    def fill_output(x: torch.Tensor, tokens: Tokens, cache: RecurrentCache | None) -> torch.Tensor:
        """
        The output of all blocks, (batch, length, width), in which padding repeats the last real token before it, also
        one of an earlier call. It is zero if there is none.
        """
        if cache is None:
            return tokens.fill(x, None)
        x = tokens.fill(x, cache.after_blocks.get("output"))
        cache.after_blocks.step("output", last_token, x)
        return x

    def make_output(
        self, x: torch.Tensor, tokens: Tokens, cache: RecurrentCache | None, use_cache: bool
    ) -> RecurrentModelOutput:
        """
        The end of the forward pass of a model that keeps nothing but recurrent states: the cache counts the tokens.
        x (batch, length, width) is the model's output.
        """
        x = self.fill_output(x, tokens, cache)
        if cache is not None:
            cache.advance(tokens)
        return RecurrentModelOutput(last_hidden_state=x, **named_cache(cache if use_cache else None))

    def _without_cache_if_checkpointing(self, use_cache: bool, cache: RecurrentCache | None):
        """
        A block that runs again in the backward pass would read its tokens into the state twice.

        Raises:
            ValueError: if a cache was given nevertheless.
        """
        if not (self.training and torch.is_grad_enabled() and (use_cache or cache is not None)):
            return use_cache, cache
        if not any(getattr(module, "gradient_checkpointing", False) for module in self.modules()):
            return use_cache, cache
        if cache is not None:
            raise ValueError("`cache` cannot be continued in training with gradient checkpointing.")
        logger.warning_once("`use_cache=True` is incompatible with gradient checkpointing: no cache is returned.")
        return False, None
