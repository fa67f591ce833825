"""
A causal model as programs of `torch.export`, for runtimes without transformers and this package.

A program is a function without side effects: from tokens and states to the logits of the next token and the new
states. Two programs generate text: one reads the prompt, the other continues token by token.

    states = initial_states(model)
    prefill, decode = export_program(model).module(), export_program(model, length=1).module()
    logits, states = prefill(input_ids, states, attention_mask)    # tokens (batch, length)
    logits, states = decode(logits.argmax(-1, keepdim=True), states)

States are the tensors of a static cache, except for its count of padding. The batch comes first. [`initial_states`]
has their names and their order.
"""

import os

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch.export import ExportedProgram
from transformers import PreTrainedModel

from ..modeling.arguments import check_counts
from ..modeling.cache import PADDING
from ..modeling.heads import CausalLMHead


# The shortest call of a program of any length. Export treats the sizes 0 and 1 as constants, and the token shift reads
# all tokens but one.
SHORTEST = 3


class _Step(nn.Module):
    """A call of a model with its cache, as a function of tokens and states."""

    def __init__(self, model: PreTrainedModel, max_cache_len: int | None):
        super().__init__()
        self.model, self.max_cache_len = model, max_cache_len

    def forward(
        self, input_ids: torch.Tensor, states: dict[str, torch.Tensor], attention_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        cache = self.model.new_cache(static=True, max_cache_len=self.max_cache_len)
        cache.set_states(states)
        out = self.model(input_ids, attention_mask=attention_mask, cache=cache, logits_to_keep=1)
        found = cache.named_states()
        return out.logits[:, -1], {name: found[name] for name in states}


@torch.no_grad()
def initial_states(
    model: PreTrainedModel, batch_size: int = 1, max_cache_len: int | None = None
) -> dict[str, torch.Tensor]:
    """
    The states at the beginning of a text: zeros, or trained by state tuning.

    Args:
        model: a causal language model.
        batch_size: number of texts.
        max_cache_len: maximum number of tokens, padding included. Needed if the cache grows with the text, and ignored
            otherwise.

    Raises:
        ValueError: if the model is not a causal language model, a size is no count, or `max_cache_len` is needed and
            missing.
    """
    if not isinstance(model, CausalLMHead):
        raise ValueError(
            f"`model` must be a causal language model of this package, got {type(model).__name__}. For a model "
            "with adapters give `model.get_base_model()`, which contains them. A model without a state is exported by "
            "`torch.export.export(model, (), {'input_ids': ..., 'attention_mask': ...})`."
        )
    check_counts(batch_size=batch_size)
    cache = model.new_cache(static=True, max_cache_len=max_cache_len)
    if max_cache_len is None and getattr(cache, "growing", None):
        raise ValueError(f"`max_cache_len` must be given: the cache of {type(model).__name__} grows with the text.")
    padding = torch.zeros(batch_size, 1, dtype=torch.long, device=model.device)
    model(padding, attention_mask=padding, cache=cache)  # padding changes no state
    # In the order of their names, as in a file of safetensors: programs of torch 2.8 accept only one order.
    return {name: state.clone() for name, state in sorted(cache.named_states().items()) if name != PADDING}


@torch.no_grad()
def export_program(
    model: PreTrainedModel, length: int | None = None, *, batch_size: int = 1, max_cache_len: int | None = None
) -> ExportedProgram:
    """
    Exports one call of a causal model.

    The program takes `input_ids` (batch, length), the states, and, if it reads more than one token, an
    `attention_mask` (batch, length), which is 0 for padding anywhere in a row. Pad a shorter prompt, and read a longer
    one in several calls. The program returns the logits (batch, vocabulary) after the last token of each row, and the
    new states. It does not check whether `max_cache_len` is exceeded; the caller must.

    Args:
        model: a causal language model in evaluation mode, on the device where the program will run.
        length: number of tokens of a call; if None, any number of at least 3.
        batch_size, max_cache_len: see [`initial_states`].

    Raises:
        ValueError: if an argument is not valid, or the model is in training mode.
    """
    if length is not None:
        check_counts(length=length)
    states = initial_states(model, batch_size, max_cache_len)
    if model.training:
        raise ValueError("`model` is in training mode; call `model.eval()` before it is exported.")
    input_ids = torch.zeros(batch_size, length or 2 * SHORTEST, dtype=torch.long, device=model.device)
    args, shapes = (input_ids, states), None
    if length != 1:
        args = (*args, torch.ones_like(input_ids))
    if length is None:
        any_length = {1: torch.export.Dim("length", min=SHORTEST, max=max_cache_len)}
        shapes = (any_length, dict.fromkeys(states), any_length)
    return torch.export.export(_Step(model, max_cache_len).eval(), args, dynamic_shapes=shapes)


def inline_operators(program: ExportedProgram) -> ExportedProgram:
    """
    The same program in torch's own operators, so that it loads without `subquad_kernels`. The custom operators are
    replaced by their plain torch code, traced for the sizes of the program.

    Args:
        program: a program of any model of this package, with fixed sizes, exported on a CPU.

    Raises:
        ValueError: if a size is not fixed.
    """
    if program.range_constraints:
        raise ValueError(f"`program` must have fixed sizes, got {program.range_constraints}.")
    module = program.module()
    for node in module.graph.nodes:
        if getattr(node.target, "namespace", None) == "subquad_kernels":
            node.target = OPDEFS[node.target.name()]._init_fn
    module.recompile()
    args, kwargs = program.example_inputs
    with torch.no_grad():
        return torch.export.export(module, args, kwargs).run_decompositions({})


def _cummax(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.cummax` of integers, missing in ONNX."""
    x = x.movedim(dim, -1)
    earlier = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device).tril()
    found = torch.where(earlier, x.unsqueeze(-2), torch.iinfo(x.dtype).min).max(-1)
    return found.values.movedim(-1, dim), found.indices.movedim(-1, dim)


def _solve_triangular(
    matrix: torch.Tensor, x: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    """`torch.linalg.solve_triangular` with ones on the diagonal, missing in ONNX."""
    assert unitriangular
    power = -(matrix.triu(1) if upper else matrix.tril(-1))
    # The inverse is the sum of all powers. Powers from the number of rows on are zero.
    for _ in range((matrix.shape[-1] - 1).bit_length()):
        x, power = x + (power @ x if left else x @ power), power @ power
    return x


# Replacements for operators that ONNX lacks.
DECOMPOSITIONS = {
    torch.ops.aten.cummax.default: _cummax,
    torch.ops.aten.linalg_solve_triangular.default: _solve_triangular,
}


def save_onnx(program: ExportedProgram, path: str | os.PathLike) -> None:
    """
    Writes a program of [`export_program`], inlined, as an ONNX model. Its inputs are `input_ids`, `past.NAME` for each
    state, and `attention_mask` if it reads more than one token; its outputs are `logits` and `present.NAME` for each
    state.
    """
    _, states, *mask = program.example_inputs[0]
    names = ["input_ids", *(f"past.{name}" for name in states), *["attention_mask" for _ in mask]]
    program = program.run_decompositions(DECOMPOSITIONS)
    outputs = ["logits", *(f"present.{name}" for name in states)]
    torch.onnx.export(program, dynamo=True, input_names=names, output_names=outputs, verbose=False).save(path)
