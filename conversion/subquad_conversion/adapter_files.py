"""
Merging of adapters into their base models: the files of RWKV-PEFT (LoRA, PiSSA, Bone, DiSHA),
which use the trainer's tensor names, and directories of PEFT (LoRA, MiSS).
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import torch

from subquad.hub.foreign_files import TIME_STATE, listed

from .checkpoint import DIRECTORY_FILES, Checkpoint, open_checkpoint, read_json
from .errors import ConversionError
from .formats import STATE_LEFT_OUT, Format, Plan, PlannedTensor, Shape, Tensors


# Maps a weight without the adapter to the weight with it.
Change = Callable[[torch.Tensor], torch.Tensor]

# The tensors of an adapter: the name of the layer, and the part.
PART = re.compile(r"(.+)\.(lora_[AB]|bone|disha|miss_block)(?:\.weight)?")
INITIAL = re.compile(r"(.+)\.init_(lora_[AB])")
GGUF_PART = re.compile(r".+\.lora_[ab]")
# Prefixes that PEFT and RWKV-PEFT's trainer add to names.
PREFIX = re.compile(r"^(base_model\.model\.|model\.(?=blocks\.))")

SETTINGS = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
KINDS = ("LORA", "MISS")
# Settings of PEFT that an adapter of these kinds may have, with any value or one of a few. Other initialisations also
# change the model's weights. All other settings must be off.
ANY = {
    *("peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "miss_dropout", "mini_r", "use_rslora", "rank_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    *("megatron_core", "qalora_group_size"),
}
ONLY = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "init_weights": (True, False),
}
BY_PEFT = "`PeftModel.from_pretrained(model, DIRECTORY).merge_and_unload()` returns a model to be saved"
ASK_FOR_BASE = "Give the model that it was trained on as `base` of `subquad convert` to merge them."
OTHER_BASE = "Is `base` the model that the adapter was trained on?"


# --- what it is ---


def is_adapter_directory(path: Path) -> bool:
    """Whether a directory holds an adapter of PEFT and no model."""
    return (path / SETTINGS).is_file() and not any((path / name).is_file() for name in DIRECTORY_FILES)


def describe_directory(directory: Path) -> str:
    """Describes the adapter in a directory, with a hint on its use."""
    settings = read_json(directory / SETTINGS)
    kind, model = settings.get("peft_type"), settings.get("base_model_name_or_path")
    trained_on = f" for {model}" if isinstance(model, str) and model else ""
    what = f"{directory} holds an adapter of PEFT ({kind}){trained_on}, not a model."
    if kind in KINDS:
        return f"{what} {ASK_FOR_BASE}"
    if kind == "STATE_TUNING":
        return (
            f"{what} A tuned initial state cannot be merged: `PeftModel.from_pretrained(model, DIRECTORY)` loads it, "
            "and `subquad.save_time_states` writes it for other programs."
        )
    return f"{what} If it can be merged, {BY_PEFT}."


def describe_file(tensors: Tensors) -> str | None:
    """Describes a file without a model, with a hint on its use; None if it is something else."""
    if any(PART.fullmatch(name) for name in tensors):
        return f"an adapter, not a model. {ASK_FOR_BASE}"
    if tensors and all(INITIAL.fullmatch(name) for name in tensors):
        return "what PiSSA took out of a model. Give the adapter itself, and this file as `pissa_init` (--pissa-init)."
    if tensors and all(GGUF_PART.fullmatch(name) for name in tensors):
        return "an adapter of llama.cpp, which `llama-export-lora` merges into its model."
    if tensors and all(TIME_STATE.fullmatch(name) for name in tensors):
        return "a tuned initial state, not a model. `subquad.load_time_states` reads it into an adapter of a model."
    return None


# --- reading ---


@dataclass(frozen=True)
class Adapter:
    """
    An open adapter.

    Attributes:
        checkpoint: its tensors.
        layers: the adapted layers, each with the names of its parts.
        others: weights that replace the model's: names without a prefix, each with its whole name.
        settings: the adapter's configuration in PEFT, {} for a file of RWKV-PEFT.
    """

    checkpoint: Checkpoint
    layers: Mapping[str, Mapping[str, str]]
    others: Mapping[str, str]
    settings: Mapping[str, Any]


@contextmanager
def open_adapter(source: Path) -> Iterator[Adapter]:
    """
    Opens a file of RWKV-PEFT or a directory of PEFT.

    Raises:
        ConversionError: if it is not an adapter, or cannot be merged here.
    """
    file, settings = source, {}
    if source.is_dir():
        file = next((source / name for name in WEIGHTS if (source / name).is_file()), None)
        if file is None:
            raise ConversionError(f"`base` is for an adapter, and {source} has none of {', '.join(WEIGHTS)}.")
        settings = read_json(source / SETTINGS)
        _check_settings(source, settings)
    with open_checkpoint(file) as checkpoint:
        layers, others = defaultdict(dict), {}
        for name in checkpoint.tensors:
            plain = PREFIX.sub("", name)
            if match := PART.fullmatch(plain):
                layers[match[1]][match[2]] = name
            else:
                others[plain] = name
        if not layers:
            example = next(iter(checkpoint.tensors))
            raise ConversionError(
                f"`base` is for an adapter, and {source} is none: it has tensors such as {example}, and none such as "
                "blocks.0.att.key.lora_A, .bone or .disha."
            )
        yield Adapter(checkpoint, layers, others, settings)


def _check_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    if settings.get("peft_type") not in KINDS:
        raise ConversionError(describe_directory(directory))
    for name, value in settings.items():
        usual = value in ONLY[name] if name in ONLY else name in ANY or not value
        if not usual:
            raise ConversionError(
                f"{directory / SETTINGS}: an adapter with `{name}` {value!r} is not merged here. PEFT does that, if "
                f"the model is in our layout: {BY_PEFT}."
            )


# --- merging ---


def merge(
    adapter: Adapter,
    plan: Plan,
    known: Format,
    rename: Callable[[str], str],
    lora_alpha: float | None,
    initial: Checkpoint | None,
) -> tuple[dict[str, Change], list[str]]:
    """
    The changes of a model's tensors, by their names, and notes.

    Args:
        plan, known: the tensors of the base model, and their format.
        rename: maps the trainer's tensor names to ours.
        lora_alpha: LoRA's products are scaled by it, divided by their rank.
        initial: the products that PiSSA removed from the model's weights.

    Raises:
        ConversionError: if the adapter does not fit the model, or its file does not determine how to merge it.
    """
    source, stored = adapter.checkpoint.path, adapter.checkpoint.tensors
    planned = {tensor.target: tensor for tensor in plan.tensors}

    def find(name: str) -> PlannedTensor | None:
        return planned.get(known.written_name(rename(name)))

    layers = {layer: find(f"{layer}.weight") for layer in adapter.layers}
    states = [plain for plain in adapter.others if TIME_STATE.fullmatch(plain)]
    whole = {plain: find(plain) for plain in adapter.others if plain not in states}
    strange = [name for layer, parts in adapter.layers.items() if not layers[layer] for name in parts.values()]
    if strange := strange + [adapter.others[plain] for plain, target in whole.items() if not target]:
        raise ConversionError(f"{source}: the model has no weight for {listed(strange)}. {OTHER_BASE}")
    if both := [adapter.others[plain] for plain in whole if plain.removesuffix(".weight") in layers]:
        raise ConversionError(
            f"{source} holds the weights of layers that have an adapter: {listed(both)}. They may be those before "
            "training, or what PiSSA left of them; save the adapter without them."
        )
    of_layer, title = _changes(adapter, {layer: x.shape for layer, x in layers.items()}, lora_alpha, initial)
    changes = {layers[layer].target: change for layer, change in of_layer.items()}
    notes = [f"the adapter was merged into {len(changes)} weights: {title}"]
    for plain, target in whole.items():
        name = adapter.others[plain]
        if not known.fits(target.target, stored[name].shape, target.shape, plan.sizes):
            raise ConversionError(
                f"{source}: {name} has the shape {stored[name].shape}, the model's {target.shape}. {OTHER_BASE}"
            )
        changes[target.target] = lambda weight, name=name: adapter.checkpoint.read(name)
    if whole:
        notes.append(f"{len(whole)} tensors of the adapter, such as {next(iter(whole))}, replace the model's")
    if states:
        notes.append(STATE_LEFT_OUT)
    return changes, notes


def _changes(
    adapter: Adapter, shapes: Mapping[str, Shape], lora_alpha: float | None, initial: Checkpoint | None
) -> tuple[dict[str, Change], str]:
    """The change of each layer's weight of shape (out, in), and a description of the adapter."""
    path, kinds = adapter.checkpoint.path, {tuple(sorted(parts)) for parts in adapter.layers.values()}
    if len(kinds) > 1 or (kind := kinds.pop()) not in (LORA, *((part,) for part in BLOCKS)):
        raise ConversionError(f"{path}: every layer has lora_A and lora_B, or all have one of {', '.join(BLOCKS)}.")
    for argument, value in (("lora_alpha", lora_alpha), ("pissa_init", initial)):
        if value is not None and (kind != LORA or adapter.settings):
            why = f"its {SETTINGS} has the scale" if kind == LORA else f"its tensors are called {kind[0]}, not lora_A"
            raise ConversionError(f"`{argument}` does not apply to {path}: {why}.")
    return _lora(adapter, shapes, lora_alpha, initial) if kind == LORA else _blocks(adapter, shapes, kind[0])


LORA = ("lora_A", "lora_B")


def _lora(
    adapter: Adapter, shapes: Mapping[str, Shape], lora_alpha: float | None, initial: Checkpoint | None
) -> tuple[dict[str, Change], str]:
    """
    W + alpha / rank * B A, of (out, rank) and (rank, in). PiSSA: W - B' A' + B A, where B' A' is the initial product.
    """
    path, settings = adapter.checkpoint.path, adapter.settings
    if settings and not isinstance(lora_alpha := settings.get("lora_alpha"), int | float):
        raise ConversionError(f"{path}: `lora_alpha` in its {SETTINGS} must be a number, got {lora_alpha!r}.")
    if (lora_alpha is None) == (initial is None):
        raise ConversionError(
            f"{path} is an adapter of LoRA or of PiSSA, whose tensors have the same names. For LoRA give `lora_alpha` "
            "(--lora-alpha) as in training; it is not stored in the file. For PiSSA give `pissa_init` (--pissa-init), "
            "the file init_pissa.pth of the training."
        )
    terms = [(adapter.checkpoint, adapter.layers)]
    if initial is not None:
        first = defaultdict(dict)
        for name in initial.tensors:
            if match := INITIAL.fullmatch(PREFIX.sub("", name)):
                first[match[1]][match[2]] = name
        if missing := [layer for layer in shapes if len(first[layer]) < len(LORA)]:
            raise ConversionError(f"`pissa_init`: {initial.path} has no init_lora_A and init_lora_B of {missing[0]}.")
        terms.append((initial, first))
    changes, ranks = {}, set()
    for layer, shape in shapes.items():
        products = []
        for checkpoint, layers in terms:
            names = [layers[layer][part] for part in LORA]
            a, b = (checkpoint.tensors[name].shape for name in names)
            if len(a) != 2 or len(b) != 2 or (b[0], a[1]) != shape or a[0] != b[1] or not a[0]:
                raise ConversionError(
                    f"{checkpoint.path}: {' and '.join(names)} have the shapes {a} and {b}, which make no change of "
                    f"the model's weight {shape}. {OTHER_BASE}"
                )
            scale = lora_alpha / (sqrt(a[0]) if settings.get("use_rslora") else a[0]) if initial is None else 1.0
            products.append((-scale if products else scale, *(partial(checkpoint.read, name) for name in names)))
            ranks.add(a[0])
        changes[layer] = partial(_with_products, products)
    title = "PiSSA" if initial else f"LoRA with an alpha of {lora_alpha:g}"
    return changes, f"{title}, rank {' and '.join(map(str, sorted(ranks)))}"


def _with_products(products: list[tuple[float, Callable, Callable]], weight: torch.Tensor) -> torch.Tensor:
    weight = weight.float()
    for scale, a, b in products:
        weight = weight + scale * (b().float() @ a().float())
    return weight


def _blocks(adapter: Adapter, shapes: Mapping[str, Shape], part: str) -> tuple[dict[str, Change], str]:
    """All layers have the same form of that part. For square weights alone, several forms may fit."""
    path, forms = adapter.checkpoint.path, BLOCKS[part]
    for layer, shape in shapes.items():
        name = adapter.layers[layer][part]
        stored = adapter.checkpoint.tensors[name].shape
        forms = [form for form in forms if 0 not in stored and form.fits(stored, *shape)]
        if not forms:
            raise ConversionError(
                f"{path}: {name} has the shape {stored}, which makes no change of the model's weight {shape}. "
                f"{OTHER_BASE}"
            )
    if len(forms) > 1:
        raise ConversionError(
            f"{path} has blocks of square weights only, which may belong to inputs or to "
            "outputs: RWKV-PEFT has had both. Merge it with the release that trained it."
        )
    (form,) = forms
    read = adapter.checkpoint.read
    changes = {
        layer: lambda weight, name=parts[part]: form.change(weight.float(), read(name).float())
        for layer, parts in adapter.layers.items()
    }
    return changes, form.title


@dataclass(frozen=True)
class Form:
    """A form of an adapter's tensors: a check of one with a weight (out, in), and the changed weight."""

    title: str
    fits: Callable[[Shape, int, int], bool]
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _by_blocks(weight: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Every r x r block of the weight W becomes W + W X + X; the X are (out / r or 1, in / r or 1, r, r)."""
    r = blocks.shape[-1]
    found = torch.unflatten(torch.unflatten(weight, 1, (-1, r)), 0, (-1, r)).movedim(1, 2)
    return (found + found @ blocks + blocks).movedim(2, 1).reshape(weight.shape)


INPUTS = Form(
    "Bone, a block for every r inputs",
    lambda stored, rows, columns: stored == (columns // stored[-1], *2 * stored[-1:]) and not rows % stored[-1],
    lambda weight, blocks: _by_blocks(weight, blocks[None]),
)
OUTPUTS = Form(
    "Bone, a block for every r outputs",
    # The first files stack them vertically.
    lambda stored, rows, columns: (
        stored in ((rows, stored[-1]), (rows // stored[-1], *2 * stored[-1:])) and not columns % stored[-1]
    ),
    lambda weight, blocks: _by_blocks(weight, blocks.reshape(-1, 1, *2 * blocks.shape[-1:])),
)
SHARED = Form(
    "DiSHA or MiSS, r rows that inputs share",
    lambda stored, rows, columns: stored == (stored[0], rows) and stored[0] <= columns,
    lambda weight, shared: weight + shared.T[:, torch.arange(weight.shape[1]) % len(shared)],
)
BLOCKS = {"bone": (INPUTS, OUTPUTS), "disha": (INPUTS, SHARED), "miss_block": (SHARED,)}
