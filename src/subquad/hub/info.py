"""
Costs of a model without loading it: parameters, state and floating-point operations.

`python -m subquad.hub.info` writes the numbers of the presets to `presets.json`, which loads in
milliseconds.
"""

import json
import math
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..models import REGISTRY
from ..models.architecture import Costs
from ..quantization.methods import METHODS, SCALE
from .presets import PRESETS, preset_config


if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The trained models that come with the package, one directory each.
EMBEDDED = Path(__file__).parent / "embedded"
PRESET_NUMBERS = Path(__file__).parent / "presets.json"
FLOATS = ("float64", "float32", "bfloat16", "float16")


class UnknownModelError(ValueError):
    """A name that is not a preset, not an embedded model and not a path."""


@dataclass(frozen=True)
class ModelInfo:
    """
    The numbers of one model. A number is None if it does not apply, or if the model is another package's.

    FLOPs are for one token. Their definition differs between the architectures: see `costs` in each `architecture.py`.

    Attributes:
        source: `preset`, or the path of the model.
        dtype: the dtype that most weights are stored in; None for a preset.
        weight_bytes: size of the weights; None for a preset.
        state_elements: numbers kept between two tokens, independent of the length of the text.
        state_bytes: their size. Recurrent states are float32; token shifts, keys and values have the dtype of the
            configuration, or else of the weights (float32 for a preset and for weights that are not floating point).
        state_elements_per_token: numbers kept for every token of the text, without spare capacity.
        state_bytes_per_token: their size, in the model's dtype.
        inference_flops: floating-point operations to read or generate one more token.
        training_flops: floating-point operations to train on one token.
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
    state_elements_per_token: int | None
    state_bytes_per_token: int | None
    inference_flops: int | None
    training_flops: int | None

    def state_bytes_after(self, tokens: int) -> int | None:
        """Size of the state after a text of that many tokens; None if the model has no state."""
        if self.state_bytes is None and self.state_bytes_per_token is None:
            return None
        return (self.state_bytes or 0) + (self.state_bytes_per_token or 0) * tokens

    def transformer_bytes_after(self, tokens: int) -> int | None:
        """
        Size of a transformer's keys and values with the same depth and width, in 16 bits, after a text of that many
        tokens: 2 * layers * width numbers for each token, fewer if heads share keys and values.
        """
        if self.num_hidden_layers is None or self.hidden_size is None:
            return None
        return 2 * 2 * self.num_hidden_layers * self.hidden_size * tokens


def embedded_model(name: str) -> Path:
    """
    The directory of the embedded model of that name.

    Raises:
        ValueError: if there is none.
    """
    if name not in (found := embedded_models()):
        raise ValueError(f"There is no embedded model {name!r}; the embedded models are {', '.join(found)}.")
    return found[name]


def embedded_models() -> dict[str, Path]:
    """The directories of all embedded models, by their names."""
    return {path.parent.name: path.parent for path in sorted(EMBEDDED.glob("*/config.json"))}


def known_names() -> dict[str, list[str]]:
    """Names that are not paths: the embedded models, and the presets, which have no weights."""
    return {"embedded models": list(embedded_models()), "presets": list(PRESETS)}


def describe_preset(name: str) -> ModelInfo:
    """Computes the numbers of a preset; [`describe`] reads them from a file."""
    config = preset_config(name)
    return make_info(name, "preset", config, REGISTRY[config.model_type].count_parameters(config), None)


def describe(name_or_path: str) -> ModelInfo:
    """
    The numbers of a model directory, a preset or an embedded model. A directory comes before a preset or an embedded
    model of the same name.

    Raises:
        UnknownModelError: if it is none of these.
        ValueError: if a directory cannot be read, if its weights are not in safetensors, or if the path is a file of
            weights.
    """
    path = Path(name_or_path)
    if not path.is_dir():
        if name_or_path in PRESETS:
            return ModelInfo(**json.loads(PRESET_NUMBERS.read_text(encoding="utf-8"))[name_or_path])
        path = embedded_models().get(name_or_path, path)
    if path.is_dir():
        return _describe_directory(name_or_path, path)
    if path.is_file():
        from .weight_files import check_directory

        check_directory(path)
    raise UnknownModelError(
        f"{name_or_path!r} is not a preset ({', '.join(PRESETS)}), not an embedded model "
        f"({', '.join(embedded_models()) or 'there is none'}), not a directory and not a checkpoint file."
    )


def labelled(info: ModelInfo, length: int | None = None) -> dict[str, str]:
    """
    The numbers of a model as labelled text, as in `subquad info` and model cards, with the cost of the state after
    `length` tokens if that is given.
    """
    state = info.state_elements and f"{info.state_elements:,} elements, {format_bytes(info.state_bytes)}"
    if info.state_elements_per_token:
        growth = f"{info.state_elements_per_token:,} elements, {format_bytes(info.state_bytes_per_token)}"
        state = f"{state} and {growth} a token of the text" if state else f"{growth} a token of the text"
    texts = {
        "architecture": info.model_type,
        "parameters": f"{info.parameters:,} ({info.parameters:.2e})",
        "layers": info.num_hidden_layers,
        "hidden size": info.hidden_size,
        "heads": info.num_attention_heads,
        "vocabulary": info.vocab_size and f"{info.vocab_size:,}",
        "weights": info.weight_bytes and f"{format_bytes(info.weight_bytes)} in {info.dtype}",
        "state": state,
        "at length": length and _state_after(info, length),
        "inference": info.inference_flops and f"{info.inference_flops:.2e} FLOPs a token",
        "training": info.training_flops and f"{info.training_flops:.2e} FLOPs a token",
    }
    return {label: str(text) for label, text in texts.items() if text is not None}


def _state_after(info: ModelInfo, tokens: int) -> str | None:
    sizes = info.state_bytes_after(tokens), info.transformer_bytes_after(tokens)
    if None in sizes:
        return None
    state, transformer = map(format_bytes, sizes)
    return f"{state} after {tokens:,} tokens; {transformer} in a transformer (16 bits, no shared heads)"


def format_bytes(number: int) -> str:
    size = float(number)
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} GB"


def _describe_directory(name: str, path: Path) -> ModelInfo:
    from transformers import AutoConfig

    from .weight_files import DTYPES, find_weights, read_headers

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the file may contain anything, so any part of the reader may fail
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} has no usable config.json ({reason}).") from error
    if not (headers := read_headers(find_weights(path))):
        raise ValueError(f"{path} has no weights in safetensors.")
    quantised = getattr(config, "quantization_config", None) or {}
    own = quantised.get("quant_method") in METHODS.values()
    counts: Counter = Counter()
    size = 0
    for tensor_name, (shape, dtype) in headers.items():
        dtype, elements = str(DTYPES.get(dtype, dtype)).removeprefix("torch."), math.prod(shape)
        size += elements * _bits(dtype) // 8
        if own and dtype == "U8":  # two weights
            dtype, elements = "I4", 2 * elements
        if not (own and tensor_name.endswith(SCALE)):
            counts[dtype] += elements
    if hasattr(config, "set_sizes_from_shapes"):
        config.set_sizes_from_shapes({name: shape for name, (shape, _) in headers.items()})
    return make_info(name, str(path), config, sum(counts.values()), counts.most_common(1)[0][0], size)


def _bits(dtype: str) -> int:
    """Bits of one element of a dtype, by its name in torch or safetensors: `bfloat16`, `F8_E4M3`, `BOOL`."""
    size = re.search(r"\d+", dtype)
    return int(size[0]) if size else 8


def _loaded_dtype(config: "PreTrainedConfig") -> str:
    """The dtype in a configuration, "None" if there is none."""
    return str(getattr(config, "dtype", None)).removeprefix("torch.")


def make_info(
    name: str,
    source: str,
    config: "PreTrainedConfig",
    parameters: int,
    dtype: str | None,
    weight_bytes: int | None = None,
) -> ModelInfo:
    """
    The numbers of a model.

    Args:
        parameters: their number.
        dtype: dtype of most of them, by its name in torch or safetensors; None without weights.
        weight_bytes: size of the weights; None if it follows from the dtype, or without weights.
    """
    if weight_bytes is None and dtype is not None:
        weight_bytes = parameters * _bits(dtype) // 8
    bits = _bits(next((name for name in (_loaded_dtype(config), dtype) if name in FLOATS), "float32"))
    architecture = REGISTRY.get(config.model_type)
    costs = Costs() if architecture is None else architecture.costs(config, parameters)
    text = config.get_text_config()
    state = state_bytes = None
    if costs.fixed_state is not None:
        in_float32, in_dtype = costs.fixed_state
        state, state_bytes = in_float32 + in_dtype, 4 * in_float32 + bits * in_dtype // 8
    growth = costs.growing_state
    return ModelInfo(
        name=name,
        source=source,
        model_type=config.model_type,
        num_hidden_layers=getattr(text, "num_hidden_layers", None),
        hidden_size=getattr(text, "hidden_size", None),
        num_attention_heads=getattr(text, "num_attention_heads", None),
        vocab_size=getattr(text, "vocab_size", None),
        parameters=parameters,
        dtype=dtype,
        weight_bytes=weight_bytes,
        state_elements=state,
        state_bytes=state_bytes,
        state_elements_per_token=growth,
        state_bytes_per_token=growth and bits * growth // 8,
        inference_flops=costs.inference_flops,
        training_flops=costs.training_flops,
    )


__all__ = [
    "ModelInfo",
    "UnknownModelError",
    "describe",
    "describe_preset",
    "embedded_model",
    "embedded_models",
    "format_bytes",
    "labelled",
    "make_info",
]


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(asdict(describe_preset(name)))}" for name in PRESETS)
    PRESET_NUMBERS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
