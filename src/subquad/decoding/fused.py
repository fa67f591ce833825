"""The models whose blocks read one token without torch (RWKV, Raven and Gecko): their parts, and the rest."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel, modeling_layers

from ..modeling import arguments
from ..modeling.cache import RecurrentCache
from ..modeling.layer_state import LayerState
from ..modeling.layers import LINEAR_WEIGHTS, LayerNorm, widen
from ..modeling.padding import Tokens
from .watch import Watch


if TYPE_CHECKING:
    from ..models.architecture import Architecture, FusedModel

Block = TypeVar("Block")
# The package of all modeling files.
_MODELS = f"{__package__.rpartition('.')[0]}.models."


def find_fused(architectures: Iterable["Architecture"], model: PreTrainedModel) -> "FusedModel | None":
    """The parts of a language model of one of the architectures; None if it is none, or has no such blocks."""
    heads = {each.path(each.heads[each.lm_auto_class]) for each in architectures}
    fused = {each.path(each.heads["AutoModel"]): each.fused for each in architectures}
    return fused.get(_path(type(model.get_decoder()))) if _path(type(model)) in heads else None


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class ModelOfBlocks(ABC):
    """
    A model whose blocks read one token by other means than its modules.

    Args:
        make_block: see [`find_block`].

    Attributes:
        found: what was made of its blocks.

    Raises:
        ValueError: if it has other parts than the published model, or such that cannot be read; the message says why.
    """

    def __init__(self, model: PreTrainedModel, fused: "FusedModel", make_block: Callable[..., Block]):
        self.decoder, self.head = decoder, _ = model.get_decoder(), model.get_output_embeddings()
        self._watch = watch = Watch([model, model.base_model, decoder])
        self.first_norm = None if fused.first_norm is None else watch.find(decoder, fused.first_norm)
        self.last_norm, self.states, self.start = watch.find(decoder, fused.last_norm), fused.states, fused.start
        self.width, number = decoder.config.hidden_size, decoder.config.num_hidden_layers
        blocks = watch.find(decoder, fused.blocks)
        if len(blocks) < number:
            raise ValueError(f"There are {len(blocks)} blocks, not {number}.")
        self.found = [find_block(fused, watch, watch.find(blocks, str(n)), make_block) for n in range(number)]
        watch.start()
        if changed := [kind.__name__ for kind in watch.kinds if not _runs_own_forward(kind)]:
            raise ValueError(f"`forward` of {changed[0]} was replaced.")

    def is_unchanged(self) -> bool:
        return self._watch.is_unchanged()

    @abstractmethod
    def read_blocks(
        self, x: torch.Tensor, tokens: Tokens, layers: list[LayerState], positions: dict[str, torch.Tensor]
    ) -> bool:
        """
        Lets all blocks read one token of each row: x (batch, 1, width), which becomes the output of the last one. For
        the positions see `start` of a `FusedModel`.

        Returns:
            whether it was done. If not, the states are to be as they were, or are put back by the caller.
        """

    def read(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, cache: RecurrentCache
    ) -> torch.Tensor | None:
        """The logits (batch, vocabulary) after one token of each row; None if the blocks cannot read it."""
        x, tokens, cache, _ = self.decoder.start_forward(input_ids, None, attention_mask, None, None, cache, True)
        x = x if self.first_norm is None else widen(self.first_norm(x))
        positions, of_blocks, last = None, {}, ()
        if self.start is not None:
            x, positions, of_blocks, last = self.start(self.decoder, x, input_ids, tokens, cache)
        if not self.read_blocks(x, tokens, cache.layers, of_blocks):
            return None
        if positions is not None:
            cache.count_tokens(positions)
        x = self.decoder.fill_output(self.last_norm(x, *last), tokens, cache)
        cache.advance(tokens)
        return self.head(x)[:, -1]


def find_block(fused: "FusedModel", watch: Watch, block: nn.Module, make_block: Callable[..., Block]) -> Block:
    """
    What `make_block(kind, parameters, eps=..., **options)` makes of a block; with `eps_x` if it has a norm `ln_x`.

    Raises:
        ValueError: if the block has parts that the published model does not have, or `make_block` refuses them.
    """
    tensors, numbers = {}, {}
    for path, name in fused.classes.items():
        kind = type(watch.find(block, path))
        if kind.__name__ != name or not kind.__module__.startswith(_MODELS):
            raise ValueError(f"`{path}` is a {kind.__name__}.")
    for name, path in fused.layers.items():
        if (layer := _part(fused, watch, block, name, path)) is None:
            continue
        has_bias = f"{name}.bias" in fused.parameters
        if type(layer) not in LINEAR_WEIGHTS or not (layer.bias is None or has_bias):
            raise ValueError(f"`{path}` is a {type(layer).__name__}, or has a bias.")
        if not has_bias:
            watch.absent.append((layer._parameters, "bias"))
        for part, attribute in LINEAR_WEIGHTS[type(layer)].items():
            tensors[f"{name}.{part}"] = watch.tensor(layer, attribute)
    for name, path in fused.norms.items():
        if (norm := _part(fused, watch, block, name, path)) is None:
            continue
        if not (type(norm) in (LayerNorm, nn.RMSNorm) or path in fused.classes):
            raise ValueError(f"`{path}` is a {type(norm).__name__}.")
        watch.values.append((norm.__dict__, "eps"))
        if (eps := numbers.setdefault("eps_x" if name == "ln_x" else "eps", norm.eps)) != norm.eps:
            raise ValueError(f"The norms have {eps} and {norm.eps}.")
        tensors[name] = watch.tensor(norm, "weight")
        if type(norm) is not nn.RMSNorm:
            tensors[f"{name}_bias"] = watch.tensor(norm, "bias")
    for name, path in fused.parameters.items():
        path, _, attribute = path.rpartition(".")
        owner = watch.find(block, path)
        if name in fused.optional and getattr(owner, attribute, None) is None:
            watch.absent.append((owner._parameters, attribute))
        else:
            tensors[name] = watch.tensor(owner, attribute)
    watch.operators(block)
    return make_block(fused.kind, tensors, **numbers, **fused.options(block))


def _part(fused: "FusedModel", watch: Watch, block: nn.Module, name: str, path: str) -> nn.Module | None:
    """A module of a block; None if it is not there and may be missing."""
    path, _, attribute = path.rpartition(".")
    owner = watch.find(block, path)
    if name in fused.optional and owner._modules.get(attribute) is None:
        watch.absent.append((owner._modules, attribute))
        return None
    return watch.module(owner._modules, attribute)


# Modules whose decorators stand around a `forward`.
_WRAPPERS = (arguments, modeling_layers)


def _runs_own_forward(kind: type[nn.Module]) -> bool:
    """Whether nobody has given a class another `forward`. Patched methods must still run."""
    code = getattr(kind.forward, "__code__", None)
    modules = (*(sys.modules[each.__module__] for each in kind.__mro__ if each is not object), *_WRAPPERS)
    return code is not None and code.co_filename in [getattr(module, "__file__", None) for module in modules]
