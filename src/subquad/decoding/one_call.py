"""
Decoding on a CPU: a block reads one token in a single call of a C library, instead of some hundred operations that
take longer to be called than to compute. This is done where nothing can tell the difference. Everywhere else a block's
own `forward` is run.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from subquad_kernels.block_step import BlockStep
from subquad_kernels.native import MOST_ROWS, WORTHWHILE_CHANNELS, readable, watched

from ..modeling.cache import LayerState
from ..modeling.layers import PRODUCTS, LayerNorm
from ..modeling.padding import Tokens


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
    # What the call stands for. Who gives a class another `forward` wants that to be run.
    _forwards: list[tuple[type[nn.Module], Callable]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kinds = (*self.classes.values(), *PRODUCTS, LayerNorm, nn.LayerNorm)
        object.__setattr__(self, "_forwards", [(kind, kind.forward) for kind in kinds])

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
        # First of all whether a graph is traced: a question about the shape would become a part of it.
        if (
            watched()
            or type(tokens) is not Tokens  # those of an engine come with a state of its own
            or x.shape[1] != 1
            or x.shape[0] > MOST_ROWS
            or x.shape[-1] < WORTHWHILE_CHANNELS
            or not x.is_cpu
            or state is None
            or state.record_past
            or tokens.cu_seqlens is not None
            or torch_module._global_forward_hooks
            or torch_module._global_forward_pre_hooks
            or any(kind.forward is not forward for kind, forward in self._forwards)
        ):
            return None
        before, before_ffn, held = (state.get(name) for name in ("attention_shift", "feed_forward_shift", "wkv"))
        prepared = _prepare(self, block)
        if prepared is None:
            return None
        overwrite = tokens.mask is None and state.can_overwrite("wkv")
        done = prepared.step(x, before, before_ffn, held, overwrite, *v_first)
        if done is None:
            return None
        out, after, after_ffn, new, first = done
        pairs = {"attention_shift": (before, after), "feed_forward_shift": (before_ffn, after_ffn), "wkv": (held, new)}
        state.set({name: tokens.keep_rows(*pair) for name, pair in pairs.items()})
        return out, first


@dataclass
class _Prepared:
    """A block's step, and what it was made of."""

    # The dictionary of a module, the name of a part of it, that part and its class: nobody has put another layer there
    # since, such as an adapter, or made it another one.
    modules: list[tuple[dict[str, nn.Module], str, nn.Module, type[nn.Module]]]
    # The dictionary of a module, the name of a parameter in it, and the parameter's type, dtype, address and shape.
    places: list[tuple[dict[str, torch.Tensor], str, type, torch.dtype, int, torch.Size]]
    # The dictionary of a module, and the name of a parameter that it may have but does not.
    absent: list[tuple[dict[str, torch.Tensor], str]]
    # The norms, and what they add to the variance.
    eps: list[tuple[nn.Module, float]]
    step: BlockStep

    def is_current(self) -> bool:
        """Whether nothing has changed its place. (It is asked for every token, and must be quick.)"""
        for names, name, module, kind in self.modules:
            if names.get(name) is not module or type(module) is not kind or not _is_plain(module):
                return False
        for names, name, kind, dtype, address, shape in self.places:
            x = names.get(name)
            if (
                type(x) is not kind
                or x.data_ptr() != address
                or x.dtype != dtype
                or x.shape != shape
                or not x.is_contiguous()
                or x.is_neg()
            ):
                return False
        for names, name in self.absent:
            if names.get(name) is not None:
                return False
        return all(norm.eps == eps for norm, eps in self.eps)


# By block. Not an attribute of it: addresses must not be copied or saved with a model.
_prepared: WeakKeyDictionary[nn.Module, _Prepared] = WeakKeyDictionary()


def _is_plain(module: nn.Module) -> bool:
    """Whether calling the module means no more than running the `forward` of its class."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _prepare(parts: OneCall, block: nn.Module) -> _Prepared | None:
    """None if the block has other parts than those of the published model, or such that the library cannot read."""
    prepared = _prepared.get(block)
    if prepared is None or not prepared.is_current():
        try:
            prepared = _prepared[block] = _make(parts, block)
        except ValueError:
            _prepared.pop(block, None)
            return None
    return prepared


def _make(parts: OneCall, block: nn.Module) -> _Prepared:
    """
    Raises:
        ValueError: if the block has other parts than those of the published model, or such that the library cannot
            read; the message says why. (It may be asked for every token, so it is short.)
    """
    found, modules, places, absent, tensors = {"": block}, [], [], [], {}

    def find(path: str) -> nn.Module:
        if path not in found:
            parent, _, name = path.rpartition(".")
            names = find(parent)._modules
            if names.get(name) is None:
                raise ValueError(f"There is no `{path}`.")
            found[path] = names[name]
            modules.append((names, name, names[name]))
        return found[path]

    def add(name: str, module: nn.Module, attribute: str) -> None:
        names = module._parameters if attribute in module._parameters else module._buffers
        x = names.get(attribute)
        if x is None:  # it may be computed before every call, as torch's weight norm and pruning do
            raise ValueError(f"There is no parameter `{attribute}`.")
        if not readable(x.dtype, x):
            raise ValueError(f"`{attribute}` cannot be read.")
        tensors[name] = x
        places.append((names, attribute, type(x), x.dtype, x.data_ptr(), x.shape))

    for path, cls in parts.classes.items():
        if type(find(path)) is not cls:
            raise ValueError(f"`{path}` is a {type(find(path)).__name__}.")
    for name, path in parts.layers.items():
        layer = find(path)
        if type(layer) not in PRODUCTS or layer.bias is not None:
            raise ValueError(f"`{path}` is a {type(layer).__name__}, or has a bias.")
        for part, attribute in PRODUCTS[type(layer)].items():
            add(f"{name}.{part}", layer, attribute)
        absent.append((layer._parameters, "bias"))
    for name, path in parts.norms.items():
        norm = find(path)
        if not (type(norm) is LayerNorm or path in parts.classes):
            raise ValueError(f"`{path}` is a {type(norm).__name__}.")
        add(name, norm, "weight")
        add(f"{name}_bias", norm, "bias")
    for name, path in parts.parameters.items():
        path, _, attribute = path.rpartition(".")
        module = find(path)
        if name in parts.optional and not hasattr(module, attribute):
            absent.append((module._parameters, attribute))
        else:
            add(name, module, attribute)
    if 0 < sum(name in tensors for name in parts.optional) < len(parts.optional):
        raise ValueError(f"There must be all or none of {parts.optional}.")
    # Operators that `use_kernels=True` may have replaced.
    operators = getattr(block, "_kernel_funcs", {})
    modules.extend((operators, name, part) for name, part in operators.items() if isinstance(part, nn.Module))
    if not all(_is_plain(module) for *_, module in modules):
        raise ValueError("Something else is called with a part of the block.")
    ln1, ln2, ln_x = (find(parts.norms[name]) for name in ("ln1", "ln2", "ln_x"))
    if ln1.eps != ln2.eps:
        raise ValueError(f"The norms have {ln1.eps} and {ln2.eps}.")
    step = BlockStep(parts.kind, tensors, ln_x.num_groups, ln1.eps, ln_x.eps, parts.of_token)
    modules = [(*place, type(place[-1])) for place in modules]
    return _Prepared(modules, places, absent, [(norm, norm.eps) for norm in (ln1, ln2, ln_x)], step)
