"""The parameters of a block of Eagle (RWKV-5), Finch (RWKV-6) or Goose (RWKV-7, 7a): their names and shapes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import torch

from .c.native import STRIP


# The highest rank, summed over all maps of a token shift. `block.c` has room for so many channels.
MOST_RANKS = 1024
# The low ranks of a block, and into how many maps each is divided.
MAPS = {"wkv": {"shift": 5, "decay": 1}, "delta_wkv": {"decay": 1, "rate": 1, "mix": 1, "gate": 1}}
MAPS["deep_delta_wkv"] = MAPS["delta_wkv"] | {"factor": 1}


def block_shapes(
    kind: str, sizes: tuple[int, int, int], parameters: dict[str, torch.Tensor]
) -> dict[str, tuple[int, ...]]:
    """
    The shapes of all that a block has, matrices as (outputs, inputs).

    Args:
        kind: `"wkv"` for Eagle and Finch, `"delta_wkv"` for Goose, `"deep_delta_wkv"` for Goose with DeepEmbed.
        sizes: the hidden size, the channels of all heads, and the intermediate size.
        parameters: are asked for the ranks, and for what some blocks do not have.

    Raises:
        ValueError: if there are low ranks with a part that is missing, or too many ranks.
    """
    width, inner, middle = sizes
    names = ["ln1", "ln1_bias", "ln2", "ln2_bias", "mu_r", "mu_k", "mu_v", "mu_g", "mu_ffn_key"]
    of_inner = ["ln_x", "ln_x_bias", "bonus", "decay.base"]
    shapes = dict.fromkeys((f"{name}.weight" for name in ("receptance", "key", "value")), (inner, width))
    shapes |= {"output.weight": (width, inner), "ffn_key.weight": (middle, width), "ffn_value.weight": (width, middle)}
    low_ranks = [name for name in MAPS[kind] if f"{name}.up" in parameters]
    if kind == "wkv":
        names.append("mu_ffn_receptance")
        names += [mu for name, mu in (("shift", "mu_x"), ("decay", "mu_w")) if name in low_ranks]
        shapes |= {"gate.weight": (inner, width), "ffn_receptance.weight": (width, width)}
    else:
        names += ["mu_w", "mu_a"]
        of_inner += ["k_k", "k_a", "rate.base", *(["mix.base"] if "mix" in low_ranks else [])]
        low_ranks += [name for name in MAPS[kind] if name not in (*low_ranks, "mix")]
    for name in low_ranks:
        maps, down = MAPS[kind][name], parameters.get(f"{name}.down")
        ranks = down.shape[-1] if down is not None and down.dim() else 0
        if not 0 < ranks <= MOST_RANKS or ranks % maps:
            raise ValueError(f"`{name}.down` must have up to {MOST_RANKS} columns for {maps} maps, got {ranks}.")
        shapes[f"{name}.down"] = (width, ranks)
        outputs = middle if name == "factor" else inner
        shapes[f"{name}.up"] = (maps, ranks // maps, width) if maps > 1 else (ranks, outputs)
        if name == "factor":
            shapes["factor.base"] = (middle,)
    return shapes | dict.fromkeys(names, (width,)) | dict.fromkeys(of_inner, (inner,))


class Block(ABC):
    """
    A block that is read without the modules that hold its parameters.

    Args:
        kind: `"wkv"` for Eagle (RWKV-5) and Finch (RWKV-6), `"delta_wkv"` for Goose (RWKV-7),
            `"deep_delta_wkv"` for Goose with DeepEmbed (RWKV-7a).
        parameters: by the names of `block.c`: the matrices (out, in) as `NAME.weight`; the low ranks as `NAME.down`,
            `NAME.up` and `NAME.base`; and vectors. A matrix of integers may have a `NAME.scale`.
        heads: number of heads.
        eps: epsilon of the two norms of the block's input.
        eps_x: epsilon of the norm of the heads.
        of_token: whether the interpolations weight the token itself, as in Eagle, instead of the one before.

    Attributes:
        dtype: dtype of the parameters, and of the stored tokens.
        stream_dtype: dtype of the residual stream: float32 if `dtype` is float16, whose range it may exceed.
        shapes: shapes of the parameters by name, see [`block_shapes`].
        rank: number of rows and columns of a token's matrix of DeepEmbed; 0 without it.
        mixes: whether it reads the values of Goose's first block.

    Raises:
        ValueError: if it cannot be read; the message gives the reason.
    """

    # The beginning of an error about a dtype.
    refusal: str

    def __init__(
        self,
        kind: str,
        parameters: dict[str, torch.Tensor],
        heads: int,
        eps: float,
        eps_x: float,
        of_token: bool = False,
    ):
        dtypes, fits_head = self.limits()
        for name in ("ln1", "ln_x", "ffn_key.weight"):
            if name not in parameters or not parameters[name].dim():
                raise ValueError(f"There must be a tensor `{name}`.")
        ln1, ln_x, key = (parameters[name] for name in ("ln1", "ln_x", "ffn_key.weight"))
        self.kind, self.heads, self.mixes = kind, heads, "mix.up" in parameters
        self.eps, self.eps_x, self.of_token, self.dtype = eps, eps_x, of_token, ln1.dtype
        self.stream_dtype = torch.float32 if self.dtype == torch.float16 else self.dtype
        sizes = ln1.shape[-1], ln_x.shape[-1], key.shape[0] * (STRIP if key.dtype == torch.uint8 else 1)
        self.width, self.inner, self.middle = sizes
        check_sizes(self.refusal, self.dtype, dtypes, *sizes)
        if heads < 1 or self.inner % heads or not fits_head(self.inner // heads):
            raise ValueError(f"There cannot be {heads} heads of {self.inner} channels.")
        self.state_shape = heads, self.inner // heads, self.inner // heads
        self.shapes = block_shapes(kind, sizes, parameters)
        self.rank = self.shapes.get("factor.down", (0, 0))[1]
        integers = [name for name, x in parameters.items() if not x.is_floating_point()]
        check_names(parameters, self.shapes, {f"{name.rpartition('.')[0]}.scale" for name in integers})
        self.take(parameters)

    @abstractmethod
    def limits(self) -> tuple[Collection[torch.dtype], Callable[[int], bool]]:
        """The dtypes that can be read, and whether a head may have so many channels."""

    @abstractmethod
    def take(self, parameters: dict[str, torch.Tensor]) -> None:
        """
        Takes the parameters, which have the right names.

        Raises:
            ValueError: if one has another shape than in `shapes`, or cannot be read.
        """


def check_sizes(refusal: str, dtype: torch.dtype, dtypes: Collection[torch.dtype], *sizes: int) -> None:
    """
    Raises:
        ValueError: if a block cannot have this dtype, with a message that begins with `refusal`, or these widths.
    """
    if dtype not in dtypes:
        raise ValueError(f"{refusal} {dtype}.")
    if any(not size or size % 16 for size in sizes):
        raise ValueError(f"The widths must be multiples of 16, got {list(sizes)}.")


def check_names(parameters: Collection[str], needed: Collection[str], allowed: Collection[str] = ()) -> None:
    """
    Raises:
        ValueError: if a parameter is missing, or there is one that is neither needed nor allowed.
    """
    if missing := [name for name in needed if name not in parameters]:
        raise ValueError(f"There must be a tensor `{missing[0]}`.")
    if others := [name for name in parameters if name not in needed and name not in allowed]:
        raise ValueError(f"Such a block has no {', '.join(f'`{name}`' for name in others)}.")


def check_alike(blocks: Sequence[Block], *names: str) -> None:
    """
    Raises:
        ValueError: if blocks differ in sizes or in the attributes of these names; or if they are Goose's, and not
            just the first one has values of its own.
    """
    first = blocks[0]
    for number, block in enumerate(blocks):
        for name in ("kind", "width", "inner", "middle", "state_shape", *names):
            if (value := getattr(block, name)) != getattr(first, name):
                raise ValueError(f"Block {number} has the {name} {value}, the first one {getattr(first, name)}.")
        if first.kind.endswith("delta_wkv") and block.mixes != (number > 0):
            raise ValueError(f"Block {number} reads the values of another block, or should.")
