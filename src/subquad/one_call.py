"""
Decoding on a CPU: a block reads one token in a single call of a C library, instead of some hundred operations that
take longer to be called than to compute. This is done where nothing can tell the difference. Everywhere else a block's
own `forward` is run.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from subquad_kernels.block_step import BlockStep
from subquad_kernels.native import MOST_ROWS, WORTHWHILE_CHANNELS, readable, watched

from .cache import LayerState
from .layers import PRODUCTS
from .padding import Tokens


@dataclass(frozen=True)
class OneCall:
    """
    What a block is made of, by the names that [`subquad_kernels.block_step.BlockStep`] has for it.

    Args:
        kind: of the block.
        classes: the modules whose `forward` the call stands for, with their classes.
        layers: name: a linear layer, such as `"attention.key"`.
        norms: name: a norm with a weight and a bias.
        parameters: name: a parameter.
        of_token: see `BlockStep`.
        optional: names of parameters that some blocks do not have.
    """

    kind: str
    classes: dict[str, type[nn.Module]]
    layers: dict[str, str]
    norms: dict[str, str]
    parameters: dict[str, str]
    of_token: bool = False
    optional: tuple[str, ...] = ()

    def __call__(
        self,
        block: nn.Module,
        x: torch.Tensor,
        tokens: Tokens,
        state: LayerState | None,
        *v_first: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """
        One token of each row, x (batch, 1, width). Sets the states after it.

        Returns:
            the output and `v_first`, see [`BlockStep`]; or None, and nothing is changed, if the block itself must run.
        """
        if (
            x.shape[1] != 1
            or x.shape[0] > MOST_ROWS
            or x.shape[-1] < WORTHWHILE_CHANNELS
            or state is None
            or state.record_past
            or type(tokens) is not Tokens
            or tokens.mask is not None
            or tokens.cu_seqlens is not None
            or torch_module._global_forward_hooks
            or torch_module._global_forward_pre_hooks
            or watched()
        ):
            return None
        before, before_ffn, held = (state.get(name) for name in ("attention_shift", "feed_forward_shift", "wkv"))
        if not readable(x.dtype, x, before, before_ffn, *v_first) or not readable(torch.float32, held):
            return None
        prepared = _prepare(self, block)
        if prepared is None or prepared.step.dtype != x.dtype:
            return None
        done = prepared.step(x, before, before_ffn, held, state.can_overwrite("wkv"), *v_first)
        if done is None:
            return None
        out, after, after_ffn, held, first = done
        state.set({"attention_shift": after, "feed_forward_shift": after_ffn, "wkv": held})
        return out, first


@dataclass
class _Prepared:
    """A block's step, and what it was made of."""

    # The dictionary of a module, the name of a part of it, and that part: nobody has put another layer there since,
    # such as an adapter.
    modules: list[tuple[dict[str, nn.Module], str, nn.Module]]
    # The dictionary of a module, the name of a parameter in it, and the parameter's type, dtype and address.
    places: list[tuple[dict[str, torch.Tensor], str, type, torch.dtype, int]]
    step: BlockStep

    def is_current(self) -> bool:
        """Whether nothing has changed its place. (It is asked for every token, and must be quick.)"""
        for names, name, module in self.modules:
            if names.get(name) is not module or not _is_plain(module):
                return False
        for names, name, kind, dtype, address in self.places:
            x = names.get(name)
            if type(x) is not kind or x.data_ptr() != address or x.dtype != dtype or not x.is_contiguous():
                return False
        return True


# By block. Not an attribute of it: addresses must not be copied or saved with a model.
_prepared: WeakKeyDictionary[nn.Module, _Prepared] = WeakKeyDictionary()


def _is_plain(module: nn.Module) -> bool:
    """Whether calling the module means no more than running the `forward` of its class."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _prepare(parts: OneCall, block: nn.Module) -> _Prepared | None:
    prepared = _prepared.get(block)
    if prepared is None or not prepared.is_current():
        prepared = _make(parts, block)
        if prepared is None:
            _prepared.pop(block, None)
        else:
            _prepared[block] = prepared
    return prepared


def _make(parts: OneCall, block: nn.Module) -> _Prepared | None:
    """None if the block has other parts than those of the published model, or such that the library cannot read."""
    found, modules, places, tensors = {"": block}, [], [], {}

    def find(path: str) -> nn.Module:
        if path not in found:
            parent, _, name = path.rpartition(".")
            names = find(parent)._modules
            found[path] = names[name]
            modules.append((names, name, names[name]))
        return found[path]

    def add(name: str, module: nn.Module, attribute: str) -> None:
        names = module._parameters if attribute in module._parameters else module._buffers
        tensors[name] = x = names[attribute]
        places.append((names, attribute, type(x), x.dtype, x.data_ptr()))

    if any(type(find(path)) is not cls for path, cls in parts.classes.items()):
        return None
    for name, path in parts.layers.items():
        layer = find(path)
        if type(layer) not in PRODUCTS or layer.bias is not None:
            return None
        for part, attribute in PRODUCTS[type(layer)].items():
            add(f"{name}.{part}", layer, attribute)
    for name, path in parts.norms.items():
        norm = find(path)
        if not (type(norm) is nn.LayerNorm or path in parts.classes) or norm.weight is None or norm.bias is None:
            return None
        add(name, norm, "weight")
        add(f"{name}_bias", norm, "bias")
    for name, path in parts.parameters.items():
        path, _, attribute = path.rpartition(".")
        module = find(path)
        if attribute in module._parameters:
            add(name, module, attribute)
        elif name not in parts.optional:
            return None
    if not all(readable(x.dtype, x) for x in tensors.values()) or not all(_is_plain(module) for *_, module in modules):
        return None
    ln1, ln2, ln_x = (find(parts.norms[name]) for name in ("ln1", "ln2", "ln_x"))
    if ln1.eps != ln2.eps:
        return None
    try:
        step = BlockStep(parts.kind, tensors, ln_x.num_groups, ln1.eps, ln_x.eps, parts.of_token)
    except ValueError:
        return None
    return _Prepared(modules, places, step)
