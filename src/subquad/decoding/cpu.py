"""
Decoding on a CPU: all blocks of Eagle, Finch or Goose read one token in a single call of a C library, instead of some
hundred operations each that take longer to be called than to compute.
"""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel, modeling_layers

from subquad_kernels.c.fused_blocks import FusedBlock, FusedBlocks
from subquad_kernels.c.native import MOST_ROWS, WORTHWHILE_CHANNELS, readable
from subquad_kernels.tracing import is_observed

from ..modeling import arguments
from ..modeling.cache import RecurrentCache
from ..modeling.layers import LINEAR_WEIGHTS, LayerNorm, widen
from .step import DecodingStep, EagerStep, Unsuitable, check_ids
from .watch import Watch


if TYPE_CHECKING:
    from ..models.architecture import Architecture, FusedModel


class CpuStep:
    """
    The decoding step by the C library, see [`DecodingStep`]. It calls the model itself while something observes
    torch's operations, while the cache records the past, and if the model has become one that the library cannot read.
    """

    kind = "cpu"

    def __init__(self, model: PreTrainedModel, fused: "FusedModel", cache: RecurrentCache, batch_size: int):
        self.model, self.fused, self.cache, self.batch_size = model, fused, cache, batch_size
        prepare(model, fused)
        self.eager = EagerStep(model, cache, batch_size)

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        check_ids(input_ids, self.batch_size)
        if is_observed() or self.cache.records_past or (prepared := self._prepared()) is None:
            return self.eager(input_ids, attention_mask)
        logits = prepared.read(input_ids, attention_mask, self.cache)
        return self.eager(input_ids, attention_mask) if logits is None else logits

    def _prepared(self) -> "PreparedModel | None":
        try:
            return prepare(self.model, self.fused)
        except Unsuitable:
            return None


def make(
    architectures: Iterable["Architecture"], model: PreTrainedModel, cache: RecurrentCache, batch_size: int
) -> DecodingStep:
    """
    Raises:
        Unsuitable: if the library cannot read the model.
    """
    if batch_size > MOST_ROWS:
        raise Unsuitable(f"there are {batch_size} rows, and the C library is made for {MOST_ROWS}.")
    heads = {each.path(each.heads[each.lm_auto_class]) for each in architectures}
    fused = {each.path(each.heads["AutoModel"]): each.fused for each in architectures if each.fused is not None}
    decoder = _path(type(model.get_decoder()))
    if _path(type(model)) not in heads or decoder not in fused:
        raise Unsuitable(f"the C library has no blocks of {type(model).__name__}.")
    return CpuStep(model, fused[decoder], cache, batch_size)


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# The package of all modeling files.
_MODELS = f"{__package__.rpartition('.')[0]}.models."
# By model. Not an attribute of it: addresses must not be copied or saved with a model.
_prepared: "WeakKeyDictionary[nn.Module, PreparedModel]" = WeakKeyDictionary()


def prepare(model: PreTrainedModel, fused: "FusedModel") -> "PreparedModel":
    """
    The model for the library, made anew if it has changed since the last call.

    Raises:
        Unsuitable: if the library cannot read it.
    """
    prepared = _prepared.get(model)
    if prepared is None or not prepared.watch.is_unchanged():
        _prepared.pop(model, None)
        try:
            prepared = _prepared[model] = PreparedModel(model, fused)
        except ValueError as error:
            raise Unsuitable(str(error)) from error
    return prepared


class PreparedModel:
    """
    A model as the library reads it.

    Raises:
        ValueError: if it has other parts than the published model, or such that the library cannot read; the message
            says why.
    """

    def __init__(self, model: PreTrainedModel, fused: "FusedModel"):
        self.decoder, self.head = decoder, _ = model.get_decoder(), model.get_output_embeddings()
        self.watch = watch = Watch([model, model.base_model, decoder])
        self.first_norm, self.last_norm = (watch.find(decoder, x) for x in (fused.first_norm, fused.last_norm))
        width, number = decoder.config.hidden_size, decoder.config.num_hidden_layers
        if width < WORTHWHILE_CHANNELS:
            raise ValueError(f"{width} channels are as fast in torch.")
        blocks = watch.find(decoder, fused.blocks)
        if len(blocks) < number:
            raise ValueError(f"There are {len(blocks)} blocks, not {number}.")
        self.blocks = FusedBlocks([_fuse(fused, watch, watch.find(blocks, str(n))) for n in range(number)])
        watch.start()
        if changed := [kind.__name__ for kind in watch.kinds if not _runs_own_forward(kind)]:
            raise ValueError(f"`forward` of {changed[0]} was replaced.")

    def read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, cache: RecurrentCache):
        """The logits (batch, vocabulary) after one token of each row; None, and nothing has changed, if it cannot."""
        x, tokens, cache, _ = self.decoder.read_inputs(input_ids, None, attention_mask, None, None, cache, True)
        x = widen(self.first_norm(x))
        layers = cache.layers
        before = [[layer.states.get(name) for layer in layers] for name in STATES]
        overwrite = tokens.mask is None and all(layer.can_overwrite("wkv") for layer in layers)
        after = self.blocks(x, *before, overwrite)
        if after is None:
            return None
        for layer, old, new in zip(layers, zip(*before, strict=True), zip(*after, strict=True), strict=True):
            layer.set(dict(zip(STATES, map(tokens.keep_rows, old, new), strict=True)))
        x = self.decoder.filled_output(self.last_norm(x), tokens, cache)
        cache.advance(tokens)
        return self.head(x)[:, -1]


# The states of a block, in the order of [`FusedBlocks`].
STATES = ("attention_shift", "feed_forward_shift", "wkv")


def _fuse(fused: "FusedModel", watch: Watch, block: nn.Module) -> FusedBlock:
    """
    Raises:
        ValueError: if the block has other parts than those of the published model, or such that the library cannot
            read.
    """
    tensors = {}
    for path, name in fused.classes.items():
        kind = type(watch.find(block, path))
        if kind.__name__ != name or not kind.__module__.startswith(_MODELS):
            raise ValueError(f"`{path}` is a {kind.__name__}.")
    for name, path in fused.layers.items():
        layer = watch.find(block, path)
        if type(layer) not in LINEAR_WEIGHTS or layer.bias is not None:
            raise ValueError(f"`{path}` is a {type(layer).__name__}, or has a bias.")
        watch.absent.append((layer._parameters, "bias"))
        for part, attribute in LINEAR_WEIGHTS[type(layer)].items():
            tensors[f"{name}.{part}"] = watch.tensor(layer, attribute)
    for name, path in fused.norms.items():
        norm = watch.find(block, path)
        if not (type(norm) is LayerNorm or path in fused.classes):
            raise ValueError(f"`{path}` is a {type(norm).__name__}.")
        watch.values.append((norm.__dict__, "eps"))
        tensors |= {name: watch.tensor(norm, "weight"), f"{name}_bias": watch.tensor(norm, "bias")}
    for name, path in fused.parameters.items():
        path, _, attribute = path.rpartition(".")
        owner = watch.find(block, path)
        if name in fused.optional and not hasattr(owner, attribute):
            watch.absent.append((owner._parameters, attribute))
        else:
            tensors[name] = watch.tensor(owner, attribute)
    if 0 < sum(name in tensors for name in fused.optional) < len(fused.optional):
        raise ValueError(f"There must be all or none of {fused.optional}.")
    if unreadable := [name for name, x in tensors.items() if not readable(x.dtype, x)]:
        raise ValueError(f"`{unreadable[0]}` is not in the memory of the CPU.")
    watch.operators(block)
    ln1, ln2, ln_x = (watch.find(block, fused.norms[name]) for name in ("ln1", "ln2", "ln_x"))
    if ln1.eps != ln2.eps:
        raise ValueError(f"The norms have {ln1.eps} and {ln2.eps}.")
    return FusedBlock(fused.kind, tensors, ln_x.num_groups, ln1.eps, ln_x.eps, fused.of_token)


# Modules whose decorators stand around a `forward`.
_WRAPPERS = (arguments, modeling_layers)


def _runs_own_forward(kind: type[nn.Module]) -> bool:
    """Whether nobody has given a class another `forward`. Patched methods must still run."""
    code = getattr(kind.forward, "__code__", None)
    modules = (*(sys.modules[each.__module__] for each in kind.__mro__ if each is not object), *_WRAPPERS)
    return code is not None and code.co_filename in [getattr(module, "__file__", None) for module in modules]
