"""
The content of a Raven's slot memories after a text (section 7 of "Raven"): the number of tokens written to each slot,
and the tokens it holds at the end. `subquad inspect-memory` is this module on the command line.

    report = inspect_memory(model, tokenizer, "The password is 1378. ...", mark=["1378"])
    save(report, "out")
"""

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...hub.new_files import replacing


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .configuration_raven import RavenConfig

# Kinds of slots, from top to bottom of a figure, in the paper's colors.
KINDS = {"marked": "#c8202c", "shared": "#2456b0", "other": "#1f8a3b", "empty": "#9a9a9a"}
LABELS = {
    "marked": "marked tokens",
    "shared": "neither alone",
    "other": "other tokens",
    "empty": "nothing: it is empty",
}
COLOUR = KINDS["shared"]  # if nothing is marked
# Weights below this are white in a figure and left out of the JSON.
FLOOR = 1e-3
NUMBERS = "memory.json"
LENGTHS = "effective_lengths.png"
MAX_LABELS = 120  # tokens that are written out below a figure
MAX_COLUMNS = 1400


@dataclass(frozen=True)
class Memory:
    """
    The memory of a head at the end of a text.

    Attributes:
        layer, head: the indices of its layer and head. Query heads that share a key head also share its memory.
        effective_lengths: int64 (slots), see [`effective_lengths`].
        holdings: float32 (slots, tokens), see [`holdings`].
        kinds: the kind of each slot, see [`classify`]; None if nothing is marked.
    """

    layer: int
    head: int
    effective_lengths: torch.Tensor
    holdings: torch.Tensor
    kinds: list[str] | None

    @property
    def figure(self) -> str:
        """Name of the file with its holdings."""
        return _figure_name(self.layer, self.head)

    @property
    def normalised_lengths(self) -> torch.Tensor:
        """Effective lengths divided by the number of tokens, float64 (slots)."""
        return self.effective_lengths.double() / self.holdings.shape[1]

    def order(self) -> list[int]:
        """Numbers of the slots from top to bottom of a figure: by kind, then by the mean position of their tokens."""
        held = self.holdings.double()
        centre = (held @ torch.arange(held.shape[1]).double()) / held.sum(1)
        ranks = [0] * len(held) if self.kinds is None else [list(KINDS).index(kind) for kind in self.kinds]
        centre = centre.nan_to_num(torch.inf).tolist()  # an empty slot comes last
        return sorted(range(len(held)), key=lambda slot: (ranks[slot], centre[slot]))


@dataclass(frozen=True)
class Inspection:
    """
    The result of [`inspect_memory`].

    Attributes:
        router: `"raven"`, `"gsa"` or `"swa"`.
        ids, tokens: the ids of the prompt, as the model read it, and their texts.
        marks: the texts that were marked.
        marked: True for tokens that overlap with them, bool (tokens).
        threshold: see [`classify`].
        memories: the memory of each chosen layer and head.
    """

    router: str
    ids: list[int]
    tokens: list[str]
    marks: list[str]
    marked: torch.Tensor
    threshold: float
    memories: list[Memory]

    def as_dict(self) -> dict[str, Any]:
        """
        All numbers, as they are in `memory.json`. Lists with an entry for every slot are in the order of the slots:

            router, slots, length     length: number of tokens
            ids, tokens               of the prompt
            marks, marked             marked: positions of the marked tokens
            threshold                 share from which a slot counts as one of marked (other) tokens only
            floor                     weights below it are left out of `holdings`
            memories                  a list with, for each layer and head:
                layer, head, figure
                effective_lengths     of every slot; divide by `length` to normalise
                weight                of every slot, the sum of what it holds, from 0 to 1
                marked_weight         of every slot, the part in marked tokens
                kinds                 of every slot, "marked", "shared", "other" or "empty"; null without marks
                order                 the slots from top to bottom of the figure
                holdings              of every slot, `tokens` (positions) and their `weights`
        """
        return {
            "router": self.router,
            "slots": len(self.memories[0].effective_lengths),
            "length": len(self.ids),
            "ids": self.ids,
            "tokens": self.tokens,
            "marks": self.marks,
            "marked": self.marked.nonzero()[:, 0].tolist(),
            "threshold": self.threshold,
            "floor": FLOOR,
            "memories": [self._memory_as_dict(memory) for memory in self.memories],
        }

    def _memory_as_dict(self, memory: Memory) -> dict[str, Any]:
        held = memory.holdings.double()
        slots = []
        for row in held:
            tokens = (row >= FLOOR).nonzero()[:, 0]
            slots.append({"tokens": tokens.tolist(), "weights": _rounded(row[tokens])})
        return {
            "layer": memory.layer,
            "head": memory.head,
            "figure": memory.figure,
            "effective_lengths": memory.effective_lengths.tolist(),
            "weight": _rounded(held.sum(1)),
            "marked_weight": _rounded(held[:, self.marked].sum(1)),
            "kinds": memory.kinds,
            "order": memory.order(),
            "holdings": slots,
        }

    def table(self) -> str:
        """A line for each layer and head: quantiles of the normalised effective lengths, slots of marked tokens."""
        lines = ["layer  head  median   90%  slots of marked tokens only"]
        for memory in self.memories:
            median, high = memory.normalised_lengths.quantile(torch.tensor([0.5, 0.9]).double()).tolist()
            slots = len(memory.effective_lengths)
            marked = "-" if memory.kinds is None else f"{memory.kinds.count('marked')} of {slots}"
            lines.append(f"{memory.layer:>5}  {memory.head:>4}  {median:>6.3f} {high:>5.3f}  {marked}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Prompt:
    """A text as the model reads it, with fields as in [`Inspection`]."""

    ids: list[int]
    tokens: list[str]
    marks: list[str]
    marked: torch.Tensor


# --- numbers ---


def effective_lengths(log_f: torch.Tensor) -> torch.Tensor:
    """
    The number of tokens written to each slot (definition 4), with a routing weight above zero. A token does not count
    if its decay is so close to one that nothing of it is written.

    Args:
        log_f: (tokens, heads, slots), the logarithm of each slot's decay at each token, a r, at most 0.

    Returns:
        int64 (heads, slots).
    """
    return (log_f != 0).sum(0)


def holdings(log_f: torch.Tensor) -> torch.Tensor:
    """
    The weight of each token in each slot at the end: the recurrence unrolled (section 7.1),

        h[i, t] = (1 - exp(log_f[t, i])) exp(sum of log_f[u, i] over the later tokens u)

    so that slot i holds the sum over t of h[i, t] (k[t], v[t]). A slot's weights sum to at most 1.

    Args:
        log_f: as in [`effective_lengths`]; -inf empties a slot.

    Returns:
        float64 (heads, slots, tokens).
    """
    log_f = log_f.double().permute(1, 2, 0)
    # Sums from the end avoid subtraction, which would leave only rounding errors of long sums.
    later = torch.nn.functional.pad(log_f[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))
    return -log_f.expm1() * later.exp()


def classify(held: torch.Tensor, marked: torch.Tensor, threshold: float = 0.9) -> list[str]:
    """
    Classifies slots by whether they hold marked tokens or others.

    Args:
        held: weights of tokens in slots, (slots, tokens): [`holdings`] of a head.
        marked: bool (tokens).
        threshold: smallest share of a slot's weight.

    Returns:
        for each slot: `"marked"` or `"other"` if at least that share is in marked or in other tokens, `"shared"` if
        neither is, `"empty"` if it holds nothing.
    """
    weights = torch.stack((held[:, marked].sum(1), held[:, ~marked].sum(1)))
    kinds = []
    for ours, others in weights.T.tolist():
        if ours + others == 0:
            kinds.append("empty")
        elif ours >= threshold * (ours + others):
            kinds.append("marked")
        elif others >= threshold * (ours + others):
            kinds.append("other")
        else:
            kinds.append("shared")
    return kinds


# --- arguments ---


def choose_layers(config: "RavenConfig", layers: Sequence[int] | Literal["all"] | None) -> list[int]:
    """
    The chosen layers, in order: the given ones, all slot memories, or if None the first, middle and last one.

    Raises:
        ValueError: if there is no such layer, or it is attention.
    """
    there = [number for number in range(config.num_hidden_layers) if config.attention(number) is None]
    memories = f"slot memories are the layers {', '.join(map(str, there))}" if there else "it has no slot memories"
    if layers is None:
        layers = {there[0], there[(len(there) - 1) // 2], there[-1]} if there else ()
    elif isinstance(layers, str) and layers == "all":
        layers = there
    _check_numbers("layers", layers, config.num_hidden_layers)
    for number in layers:
        if number not in there:
            raise ValueError(f"`layers`: layer {number} is softmax attention, which has no slots; {memories}.")
    if not layers:
        raise ValueError(f"`layers` names none, or the model is attention alone: {memories}.")
    return sorted(set(layers))


def choose_heads(config: "RavenConfig", heads: Sequence[int] | None) -> list[int]:
    """
    The chosen heads, in order; all if None. `num_kv_heads` heads have a memory of their own.

    Raises:
        ValueError: if there is no such head.
    """
    if heads is None:
        heads = range(config.num_kv_heads)
    _check_numbers("heads", heads, config.num_kv_heads)
    if not heads:
        raise ValueError("`heads` names none.")
    return sorted(set(heads))


def _check_numbers(name: str, numbers, count: int) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number < count:
            raise ValueError(f"`{name}` must be numbers from 0 to {count - 1}, got {number!r}.")


def read_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: str, mark: str | Sequence[str] = ()) -> Prompt:
    """
    Raises:
        ValueError: if there is no token, if a mark overlaps with none, or if there are marks and the tokenizer has no
            character offsets of tokens.
    """
    marks = [mark] if isinstance(mark, str) else list(mark)
    if marks and not tokenizer.is_fast:
        raise ValueError(
            f"`mark` needs a fast tokenizer, which knows where in a text a token is; got {type(tokenizer).__name__}."
        )
    read = tokenizer(prompt, return_offsets_mapping=bool(marks))
    ids = list(read["input_ids"])
    if not ids:
        raise ValueError("`prompt` is empty.")
    marked = torch.zeros(len(ids), dtype=torch.bool)
    for text in marks:
        found = bytearray(len(prompt))  # 1 for a character that is part of an occurrence
        begin = prompt.find(text) if text else -1
        while begin >= 0:
            found[begin : begin + len(text)] = b"\1" * len(text)
            begin = prompt.find(text, begin + 1)
        here = torch.tensor([any(found[start:stop]) for start, stop in read["offset_mapping"]])
        if not here.any():
            raise ValueError(f"`mark`: no token of the prompt has a part of {text!r}.")
        marked |= here
    return Prompt(ids, [tokenizer.decode([number]) for number in ids], marks, marked)


# --- inspection ---


def inspect_memory(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str,
    *,
    layers: Sequence[int] | Literal["all"] | None = None,
    heads: Sequence[int] | None = None,
    mark: str | Sequence[str] = (),
    threshold: float = 0.9,
) -> Inspection:
    """
    Reads a text and returns the content of the slot memories at its end. It stores the routing of the chosen layers
    and heads, tokens * slots numbers each, and needs no cache.

    Args:
        model: a Raven with any head, or none. It runs in evaluation mode; its mode is restored afterwards.
        tokenizer: the model's.
        prompt: the text, to which the tokenizer may add special tokens.
        layers: numbers of slot memories, or `"all"`. If None, the first, the middle and the last.
        heads: numbers of heads. If None, all.
        mark: texts; every token that overlaps with an occurrence of one of them is marked.
        threshold: share of a slot's weight that must be in marked (or in other) tokens for the slot to count as
            "marked" (or "other"); above 0.5, at most 1.

    Raises:
        ValueError: before any work, if an argument does not fit; the message names it.
    """
    from .modeling_raven import RavenModel

    core = next((module for module in model.modules() if isinstance(module, RavenModel)), None)
    if core is None:
        raise ValueError(f"`model` must be a Raven, got {type(model).__name__}: only a Raven has slot memories.")
    layers, heads = choose_layers(core.config, layers), choose_heads(core.config, heads)
    if not 0.5 < threshold <= 1:
        raise ValueError(f"`threshold` must be above 0.5 and at most 1, got {threshold}.")
    read = read_prompt(tokenizer, prompt, mark)

    memories = []
    with _recorded({number: core.layers[number].attn for number in layers}, heads) as routing, _evaluation(core):
        core(input_ids=torch.tensor([read.ids], device=core.device), use_cache=False)
    for layer in layers:
        log_f = routing.pop(layer)
        for number, head in enumerate(heads):  # one at a time: float64 holdings of a long text are large
            one = log_f[:, number : number + 1]
            held = holdings(one)[0]
            kinds = classify(held, read.marked, threshold) if read.marks else None
            memories.append(Memory(layer, head, effective_lengths(one)[0], held.float(), kinds))
    return Inspection(core.config.router, read.ids, read.tokens, read.marks, read.marked, threshold, memories)


@contextmanager
def _recorded(memories: dict[int, torch.nn.Module], heads: list[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Yields a dictionary that each slot memory fills with its log_f, (tokens, heads, slots) on the CPU."""
    seen = {}

    def recording(number, route):
        def recorded(*args):
            log_f = route(*args)
            seen[number] = log_f[0][:, heads].cpu()
            return log_f

        return recorded

    try:
        for number, memory in memories.items():
            memory.route = recording(number, memory.route)
        yield seen
    finally:
        for memory in memories.values():
            vars(memory).pop("route", None)


@contextmanager
def _evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Without gradients or noise. Modules return to training mode afterwards."""
    training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module in training:
            module.training = True


# --- files ---


def file_names(layers: Sequence[int], heads: Sequence[int]) -> list[str]:
    """The files that [`save`] writes for these layers and heads."""
    return [LENGTHS, *(_figure_name(layer, head) for layer in layers for head in heads), NUMBERS]


def check_directory(directory: str | os.PathLike, names: Sequence[str], force: bool) -> None:
    """
    Raises:
        ValueError: if the directory is a file, or files of these names exist and `force` is not set.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is not a directory.")
    for name in names:
        if not force and (directory / name).exists():
            raise ValueError(f"{directory / name} exists already; `force=True` replaces it.")


def save(inspection: Inspection, directory: str | os.PathLike, force: bool = False) -> list[str]:
    """
    Writes the figures and `memory.json` (see [`Inspection.as_dict`]) to a directory, which is created if it does not
    exist. No file appears before all are complete.

    Args:
        force: whether to replace files of the same names.

    Returns:
        The names of the files: `effective_lengths.png`, one for each layer and head, `memory.json`.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if a file exists and `force` is not set.
    """
    require_matplotlib()
    memories = inspection.memories
    directory = Path(directory)
    check_directory(directory, [LENGTHS, *(memory.figure for memory in memories), NUMBERS], force)
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files = {LENGTHS: _lengths_figure(inspection)}
        files |= {memory.figure: _holdings_figure(inspection, memory) for memory in memories}
        with ExitStack() as stack:
            for name, figure in files.items():
                file = stack.enter_context(replacing(directory / name))
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Glyph .* missing from")  # a box is drawn instead
                    figure.savefig(file, format="png", dpi=120)
            text = json.dumps(inspection.as_dict(), ensure_ascii=False) + "\n"
            stack.enter_context(replacing(directory / NUMBERS)).write_text(text, encoding="utf-8")
    except BaseException:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise
    return [*files, NUMBERS]


def require_matplotlib() -> None:
    """
    Raises:
        ImportError: if it is not installed; the message names the command.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"figures need matplotlib, `pip install 'subquad[inspect]'` ({error})") from error


def _figure_name(layer: int, head: int) -> str:
    return f"layer{layer:02}-head{head:02}.png"


def _rounded(x: torch.Tensor) -> list[float]:
    return [round(number, 6) for number in x.tolist()]


# --- figures ---


def _lengths_figure(inspection: Inspection):
    """Normalized effective lengths from the longest to the shortest, one axis per layer and head (figure 8)."""
    from matplotlib.figure import Figure

    memories = inspection.memories
    rows, columns = (len({getattr(memory, name) for memory in memories}) for name in ("layer", "head"))
    figure = Figure(figsize=(max(1 + 3 * columns, 6.5), 1.3 + 2.1 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axis, memory in zip(axes.flat, memories, strict=True):
        lengths = memory.normalised_lengths.sort(descending=True).values
        axis.stairs(
            lengths.tolist(), (torch.arange(len(lengths) + 1) - 0.5).numpy(), fill=True, color=COLOUR, label="a slot"
        )
        mean = lengths.mean().item()
        axis.axhline(mean, color="black", linewidth=1, linestyle="--", label="were all slots alike")
        axis.set(title=f"layer {memory.layer}, head {memory.head}", ylim=(0, 1.02), xlim=(-0.5, len(lengths) - 0.5))
    figure.supxlabel("slots, the most used first", fontsize="medium")
    figure.supylabel("effective length / length of the text", fontsize="medium")
    figure.suptitle(f"Effective sequence length of {len(inspection.ids):,} tokens, router {inspection.router}")
    axes[0, 0].legend(loc="upper right", fontsize="small")
    return figure


def _holdings_figure(inspection: Inspection, memory: Memory):
    """Slots by tokens: the weight of a token in a slot at the end, in the color of the slot's kind (figure 7)."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    order, length = memory.order(), len(inspection.ids)
    step = -(-length // MAX_COLUMNS)
    held = _strongest(memory.holdings[order].double(), step)
    strength = (1 - held.clamp(FLOOR, 1).log10() / torch.tensor(FLOOR).log10())[..., None]
    colours = [KINDS[memory.kinds[slot]] if memory.kinds else COLOUR for slot in order]
    colours = torch.tensor([to_rgb(colour) for colour in colours], dtype=torch.float64)[:, None]

    labelled = length <= MAX_LABELS
    width = 2.5 + 0.14 * length if labelled else 13
    figure = Figure(figsize=(max(width, 8), 5.2 if len(order) < 128 else 6.5), layout="constrained")
    if memory.kinds:
        # The kind of each slot, beside its row.
        beside, axis = figure.subplots(1, 2, width_ratios=(1, 90))
        beside.imshow(colours.numpy(), aspect="auto", interpolation="nearest")
        beside.set_xticks([])
        axis.set_yticks([])
    else:
        beside = axis = figure.subplots()
    edges = (-0.5, held.shape[1] * step - 0.5, len(order) - 0.5, -0.5)
    axis.imshow((1 - strength * (1 - colours)).numpy(), aspect="auto", interpolation="nearest", extent=edges)
    axis.set_xlim(-0.5, length - 0.5)
    if labelled:
        axis.set_xticks(range(length), [_visible(token) for token in inspection.tokens], rotation=90, fontsize=7)
        for label, marked in zip(axis.get_xticklabels(), inspection.marked.tolist(), strict=True):
            label.set(parse_math=False, color=KINDS["marked"] if marked else "black")
    each = f" (of each {step}, the one held most)" if step > 1 else ""
    axis.set_xlabel("token of the prompt" if labelled else f"position of the token{each}")
    beside.set_yticks(range(len(order)) if len(order) <= 32 else [], order if len(order) <= 32 else [], fontsize=7)
    beside.set_ylabel("slot")
    axis.set_title(
        f"Memory of layer {memory.layer}, head {memory.head} after {length:,} tokens, router {inspection.router}",
        pad=14,
    )
    scale = ScalarMappable(LogNorm(FLOOR, 1), LinearSegmentedColormap.from_list("", ["white", "black"]))
    figure.colorbar(scale, ax=axis, pad=0.01, fraction=0.03, label="what the slot holds of the token")

    if memory.kinds:
        # The marked tokens, above their columns.
        places = inspection.marked.nonzero()[:, 0].tolist()
        style = {"linestyle": "none", "marker": "v", "markersize": 5 if labelled else 3, "color": KINDS["marked"]}
        above = {"transform": axis.get_xaxis_transform(), "clip_on": False}
        axis.plot(places, [1.015] * len(places), **style, **above)
        patches = [
            Patch(color=colour, label=f"{LABELS[kind]} ({memory.kinds.count(kind)})") for kind, colour in KINDS.items()
        ]
        title = f"at least {100 * inspection.threshold:.4g}% of what a slot holds are"
        figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize="small", title=title)
    return figure


def _strongest(x: torch.Tensor, step: int) -> torch.Tensor:
    """The largest of every `step` columns, so that single tokens stay visible if there are more tokens than pixels."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % step))
    return torch.unflatten(x, 1, (-1, step)).amax(2)


def _visible(token: str) -> str:
    """A token's text as a label. Characters that would not be visible are replaced."""
    token = token.replace("\n", "↵").replace("\t", "→")
    token = "".join(c if c.isprintable() else "�" for c in token)
    return f"␣{token[1:]}" if token.startswith(" ") else token or "∅"


__all__ = [
    "Inspection",
    "Memory",
    "classify",
    "effective_lengths",
    "holdings",
    "inspect_memory",
    "save",
]
