"""The base class of every model with a recurrent state."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from ..hub.saving import SavedPreTrainedModel
from .cache import RecurrentCache, accept_cache, check_cache

# package only
from .context_parallel import ContextParallelCache
from .layers import read_tokens
from .padding import Tokens, last_token
from .versions import CACHE_NAMES, RecurrentModelOutput, named_cache


class RecurrentBlock(GradientCheckpointingLayer):
    """
    A block with states of its own. The last positional argument of its `forward` is the cache, or None.

    Under gradient checkpointing, states enter and leave the recomputed part as tensors, like x. So gradients pass
    through them, and the second computation does not change the cache.
    """

    layer_idx: int
    _checkpoint: Callable | None = None

    # package only
    def __call__(self, *inputs: Any, **options: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Lets states come from another process, and go to one."""
        cache = inputs[-1] if inputs else None
        if not isinstance(cache, ContextParallelCache):
            return super().__call__(*inputs, **options)
        cache.begin_block(inputs[0])
        return cache.end_block(super().__call__(*inputs, **options), self.layer_idx)

    @property
    def _gradient_checkpointing_func(self) -> Callable:
        """transformers sets this to `torch.utils.checkpoint.checkpoint`, and calls it instead of `forward`."""
        return self._forward_with_checkpointing

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, checkpoint: Callable) -> None:
        self._checkpoint = checkpoint

    def _forward_with_checkpointing(self, forward: Callable, *inputs: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        *inputs, cache = inputs
        if not isinstance(cache, RecurrentCache):
            return self._checkpoint(forward, *inputs, cache)
        layer, entering, names = cache.layers[self.layer_idx], cache.frozen(), []
        before = {name: layer.get(name) for name in layer.states}

        def run(*tensors):
            states = dict(zip(before, tensors[len(inputs) :], strict=True))
            outputs = forward(*tensors[: len(inputs)], entering.with_states(self.layer_idx, states))
            names[:] = states
            return *(outputs if isinstance(outputs, tuple) else (outputs,)), *states.values()

        results = self._checkpoint(run, *inputs, *before.values())
        outputs = results[: len(results) - len(names)]
        layer.set(dict(zip(names, results[len(outputs) :], strict=True)))
        layer.aliased.update(names)
        return outputs if len(outputs) > 1 else outputs[0]


class RecurrentPreTrainedModel(SavedPreTrainedModel):
    """Base class of models with a recurrent state: checks, cache, start and end of a forward pass."""

    cache_class: type[RecurrentCache] = RecurrentCache
    # The cache with which several processes read one text; None if they cannot.
    # package only
    context_parallel_class: type[ContextParallelCache] | None = None
    supports_gradient_checkpointing = True
    _can_compile_fullgraph = True
    # Why a CUDA graph captured for one token would be wrong for the next one; None if it is right.
    uncapturable: str | None = None
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
            max_cache_len: capacity of a static cache in tokens. A recurrent state has no limit.
        """
        return self.cache_class(self.config, static, max_cache_len)

    def start_forward(
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
        Starts a forward pass: checks its arguments before any work. For `wanted` see [`Tokens`]; the others are
        arguments that libraries pass to every model and that the blocks do not need.

        Returns:
            the embeddings (batch, length, width), the call's [`Tokens`], the cache to fill, if any, and whether to
            return it.
        """
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        cache = accept_cache(cache, self.cache_class)
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
            cache.begin_call(tokens)
            self._check_recomputable(cache)
        elif attention_mask is not None and attention_mask.shape[1] > tokens.length:
            raise ValueError(
                f"`attention_mask` has {attention_mask.shape[1]} columns, but the input has {tokens.length} tokens. "
                "Earlier tokens need the `cache` that has read them."
            )
        elif use_cache:
            cache = self.new_cache()
        return x, tokens, cache, use_cache

    def _check_recomputable(self, cache: RecurrentCache) -> None:
        """
        Raises:
            ValueError: if gradient checkpointing would recompute a block from other states than it had at first.
        """
        if cache.is_recomputable or not (self.training and torch.is_grad_enabled()):
            return
        if any(getattr(module, "gradient_checkpointing", False) for module in self.modules()):
            raise ValueError(
                "`cache` records the past, or gets states from another process: this is impossible in training with "
                "gradient checkpointing."
            )

    @staticmethod
    def fill_output(x: torch.Tensor, tokens: Tokens, cache: RecurrentCache | None) -> torch.Tensor:
        """
        The output of all blocks, (batch, length, width), in which padding repeats the last real token before it, even
        from an earlier call, or is zero if there is none.
        """
        if cache is None:
            return tokens.forward_fill(x, None)
        x = tokens.forward_fill(x, cache.after_blocks.get("output"))
        cache.after_blocks.update_with("output", last_token, x)
        return x

    def finish_forward(
        self, x: torch.Tensor, tokens: Tokens, cache: RecurrentCache | None, use_cache: bool
    ) -> RecurrentModelOutput:
        """
        Ends the forward pass of a model that keeps nothing but recurrent states: the cache counts the tokens.
        x (batch, length, width) is the model's output.
        """
        # package only
        if isinstance(cache, ContextParallelCache):
            x = cache.end_block(x, -1)
        x = self.fill_output(x, tokens, cache)
        if cache is not None:
            cache.advance(tokens)
        return RecurrentModelOutput(last_hidden_state=x, **named_cache(cache if use_cache else None))
