"""What a model costs: parameters, state and floating-point operations, without loading it."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .presets import PRESETS, preset_config


# Trained models that come with the package: one directory each.
EMBEDDED = Path(__file__).parent / "data"


class UnknownModelError(ValueError):
    """A name that is neither a preset nor something on disk."""


@dataclass(frozen=True)
class ModelInfo:
    """
    Numbers of one model. FLOPs are those of one token, as appendix E of "Eagle and Finch" (arXiv:2404.05892) counts
    them; None stands where an architecture has no such number.

    Attributes:
        source: `preset`, or the path that was read.
        dtype: the dtype that most weights are stored in, None for a preset.
        weight_bytes: size of the weights, None for a preset.
        state_elements: numbers kept between two tokens, however long the text is.
        state_bytes: their size: float32 for the wkv state, the model's dtype (a preset: float32) for the two shifts.
        inference_flops: equations (24) and (28), 2 parameters + 6 elements of the wkv state.
        training_flops: equations (26) and (29), three times that.
    """

    name: str
    source: str
    model_type: str
    num_hidden_layers: int | None
    hidden_size: int | None
    num_attention_heads: int | None
    vocab_size: int | None
    parameters: int
    dtype: str | None
    weight_bytes: int | None
    state_elements: int | None
    state_bytes: int | None
    inference_flops: int | None
    training_flops: int | None


def embedded_model(name: str) -> Path | None:
    """Directory of the model of that name that comes with the package, None where there is none."""
    known = {path.parent.name: path.parent for path in EMBEDDED.glob("*/config.json")}
    return known.get(name)


def describe(name_or_path: str) -> ModelInfo:
    """
    The numbers of a preset, of an embedded model, of a model directory, or of a checkpoint that can be converted.
    A name goes before a directory of the same name; `./name` is always a path.

    Raises:
        UnknownModelError: where it is none of these.
        ValueError: where a directory or file is there and cannot be read.
    """
    if name_or_path in PRESETS:
        config = preset_config(name_or_path)
        return _info(name_or_path, "preset", config, _count_on_meta(config), None, None)
    path = embedded_model(name_or_path) or Path(name_or_path)
    if path.is_dir():
        return _describe_directory(name_or_path, path)
    if path.is_file():
        return _describe_checkpoint(name_or_path, path)
    raise UnknownModelError(
        f"{name_or_path!r} is neither a directory nor a preset; the presets are {', '.join(PRESETS)}."
    )


def _describe_directory(name: str, path: Path) -> ModelInfo:
    from transformers import AutoConfig

    from subquad_conversion.checkpoint import open_checkpoint

    config = AutoConfig.from_pretrained(path)
    counts: Counter = Counter()
    size = 0
    with open_checkpoint(path) as checkpoint:
        for tensor in checkpoint.tensors.values():
            counts[str(tensor.dtype).removeprefix("torch.")] += tensor.elements
            size += tensor.elements * getattr(tensor.dtype, "itemsize", 1)
        if hasattr(config, "set_sizes_from_shapes"):
            config.set_sizes_from_shapes({name: tensor.shape for name, tensor in checkpoint.tensors.items()})
    return _info(name, str(path), config, sum(counts.values()), counts.most_common(1)[0][0], size)


def _describe_checkpoint(name: str, path: Path) -> ModelInfo:
    from transformers import AutoConfig

    from subquad_conversion import recognise

    found = recognise(path)
    config = AutoConfig.for_model(found.model_type, **found.sizes)
    size = found.parameters * _width(found.dtype)
    return _info(name, str(path), config, found.parameters, found.dtype, size)


def _width(dtype: str) -> int:
    """Bytes of one element."""
    import torch

    return getattr(torch, dtype).itemsize


def _count_on_meta(config) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def _info(name, source, config, parameters: int, dtype: str | None, weight_bytes: int | None) -> ModelInfo:
    state = state_bytes = flops = None
    if config.model_type in ("rwkv5", "rwkv6"):
        wkv = config.num_hidden_layers * config.attention_hidden_size * config.head_size
        shifts = config.num_hidden_layers * 2 * config.hidden_size
        state = wkv + shifts
        state_bytes = 4 * wkv + _width(dtype or "float32") * shifts
        flops = 2 * parameters + 6 * wkv
    return ModelInfo(
        name=name,
        source=source,
        model_type=config.model_type,
        num_hidden_layers=getattr(config, "num_hidden_layers", None),
        hidden_size=getattr(config, "hidden_size", None),
        num_attention_heads=getattr(config, "num_attention_heads", None),
        vocab_size=getattr(config, "vocab_size", None),
        parameters=parameters,
        dtype=dtype,
        weight_bytes=weight_bytes,
        state_elements=state,
        state_bytes=state_bytes,
        inference_flops=flops,
        training_flops=None if flops is None else 3 * flops,
    )


__all__ = ["ModelInfo", "UnknownModelError", "describe", "embedded_model"]
