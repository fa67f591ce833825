"""Layers and functions that modeling files share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations import use_kernel_forward_from_hub

from subquad_kernels import group_norm_gate, linear, token_shift

from .padding import Tokens


# The largest input of a wide product. It overflows only if the absolute weights of one output sum to more than
# 32 times 65,504, the largest number of float16.
LARGEST = 1 / 32


def widen(x: torch.Tensor) -> torch.Tensor:
    """The residual stream: float32 in a float16 model, because sums of many blocks may be larger than 65,504."""
    return x.float() if x.dtype == torch.float16 else x


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of sums of x: float32, or float64 if x is."""
    return torch.promote_types(x.dtype, torch.float32)


def multiply_wide(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """
    The product of x with a float16 matrix, without a bias, in float32. A power of two for each row of x scales its
    largest number to 1/64 to 1/32, and is divided out of the result: neither overflows or underflows in float16.
    """
    largest = x.abs().amax(-1, keepdim=True).float().clamp(min=torch.finfo(torch.float32).tiny)
    scale = largest.log2().ceil().exp2() / LARGEST
    return product((x / scale).half()) * scale


class _WideProduct(torch.autograd.Function):
    """
    [`multiply_wide`] of x (..., in) and a weight (out, in). Autograd would multiply gradients by its scales in
    float16; here they get scales of their own.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return multiply_wide(lambda x: linear(x, weight), x)

    @staticmethod
    def setup_context(ctx, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        x, weight = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = multiply_wide(lambda grad: grad @ weight, grad).to(weight.dtype)
        if ctx.needs_input_grad[1]:  # a sum over tokens: scales per input and per output
            x, grad = x.reshape(-1, x.shape[-1]).mT, grad.reshape(-1, grad.shape[-1]).mT
            of_weight = multiply_wide(lambda grad: multiply_wide(lambda x: x @ grad.mT, x).mT, grad).to(weight.dtype)
        return of_x, of_weight


class Linear(nn.Linear):
    """`nn.Linear` through [`subquad_kernels.linear`]. With `wide`, the output in float16 is float32, see [`widen`]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, wide: bool = False):
        super().__init__(in_features, out_features, bias)
        self.wide = wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wide and self.weight.dtype == torch.float16:
            grads = torch.is_grad_enabled()
            out = (_WideProduct.apply if grads else _WideProduct.forward)(x, self.weight)
            return out if self.bias is None else out + self.bias
        return linear(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that also reads the residual stream of a float16 model, see [`widen`]. The output is float16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.weight.dtype or self.weight.dtype != torch.float16:
            return super().forward(x)
        out = nn.functional.layer_norm(x, self.normalized_shape, eps=self.eps)
        return torch.addcmul(self.bias, out, self.weight).to(self.weight.dtype)


# Linear layers whose weights a C library reads: names in C, and attributes.
LINEAR_WEIGHTS: dict[type[nn.Module], dict[str, str]] = {Linear: {"weight": "weight"}}


class _ReluSquared(torch.autograd.Function):
    """
    relu(x)² that keeps only its result for the backward pass: the gradient 2 relu(x) is twice its root. (In float16
    the squares of numbers below 2e-4 vanish, and so does their gradient.)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x.relu()
        # Dynamo of torch 2.11 loses the gradient of tensors that a traced forward pass overwrites.
        return y.square() if torch.compiler.is_compiling() else y.square_()

    @staticmethod
    def setup_context(ctx, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return grad * y.sqrt().mul_(2)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """relu(x)², which keeps only its result for the backward pass."""
    if torch.is_grad_enabled():
        return _ReluSquared.apply(x)
    y = torch.relu(x)
    return y.mul_(y)


def check_inputs(
    config: PreTrainedConfig, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None
) -> torch.Tensor:
    """
    The tokens of a call, (batch, length, ...): whichever of the two inputs is given. Their values are not read.

    Raises:
        ValueError: if not exactly one is given, or a shape or a dtype does not fit.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Exactly one of `input_ids` and `inputs_embeds` must be given.")
    width = config.hidden_size  # not the width of the embeddings' weight: adapters wrap it
    if inputs_embeds is not None:
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != width or inputs_embeds.numel() == 0:
            shape = tuple(inputs_embeds.shape)
            raise ValueError(f"`inputs_embeds` must be (batch, length, {width}) with at least one token, got {shape}.")
        return inputs_embeds
    x = input_ids
    if x.dim() != 2 or x.numel() == 0:
        raise ValueError(f"`input_ids` must be (batch, length) with at least one token, got {tuple(x.shape)}.")
    if x.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`input_ids` must be int64 or int32, got {x.dtype}.")
    return x


def read_tokens(
    config: PreTrainedConfig,
    embeddings: nn.Module,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    wanted: dict[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, Tokens]:
    """
    The embeddings of a call's tokens, (batch, length, width), and their [`Tokens`].
    For the arguments see there.

    Raises:
        ValueError: before any work, if an argument does not fit; the message names it.
    """
    x = check_inputs(config, input_ids, inputs_embeds)
    masks = attention_mask, position_ids, cu_seqlens
    tokens = Tokens(*x.shape[:2], x.device, *masks, input_ids, config.vocab_size, wanted)
    if inputs_embeds is not None:
        return x, tokens
    x = embeddings(input_ids)
    return x, tokens if x.device == input_ids.device else tokens.to(x.device)


def chosen_states(
    states: tuple[torch.Tensor, ...], chosen: bool | int | list[int] | None
) -> tuple[torch.Tensor | None, ...] | None:
    """
    The hidden states that `output_hidden_states` asks for: all, none, or some by index, with None in place of the
    others.
    """
    if not chosen or chosen is True:
        return states if chosen else None
    kept = {i % len(states) for i in ([chosen] if isinstance(chosen, int) else chosen)}
    return tuple(state if i in kept else None for i, state in enumerate(states))


def replaceable(*operators: Callable) -> list[Callable]:
    """
    Operators that `use_kernels=True` replaces with a kernel repository's, for all models that share a modeling file.
    They stay unchanged if no mapping names them, or if `kernels` is not installed.
    """
    return [use_kernel_forward_from_hub(operator.__name__)(operator) for operator in operators]


# Of several architectures, which one file may hold.
group_norm_gate, token_shift = replaceable(group_norm_gate, token_shift)


def zero_without_labels(loss: torch.Tensor, labels: torch.Tensor, ignore_index: int | None = None) -> torch.Tensor:
    """
    A loss, or 0 with gradients of 0 if no label counts: the mean over none would be NaN.

    Args:
        loss: a number.
        labels: any shape; regression targets, which are not integers, all count.
        ignore_index: the label that does not count; -100 if None.
    """
    if labels.is_floating_point():
        return loss
    counts = (labels != (-100 if ignore_index is None else ignore_index)).any()
    return torch.where(counts.to(loss.device), loss, torch.zeros_like(loss))


def labelled_loss(model: PreTrainedModel, labels: torch.Tensor | None, **arguments: Any) -> torch.Tensor | None:
    """The loss that transformers defines for a head, see [`zero_without_labels`]; None without labels."""
    if labels is None:
        return None
    loss = model.loss_function(labels=labels, **arguments)
    return zero_without_labels(loss, labels, arguments.get("ignore_index"))
