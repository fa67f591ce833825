"""What a model costs: parameters, state and floating-point operations, without loading it."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from . import lm_auto_class
from .presets import PRESETS, preset_config


# Trained models that come with the package: one directory each.
EMBEDDED = Path(__file__).parent / "data"
FLOATS = ("float64", "float32", "bfloat16", "float16")
# Bits of an element, by the names that safetensors files give the dtypes.
BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


class UnknownModelError(ValueError):
    """A name that is neither a preset, nor an embedded model, nor something on disk."""


@dataclass(frozen=True)
class ModelInfo:
    """
    Numbers of one model. None stands where an architecture has no such number.

    FLOPs are those of one token. Of Eagle and Finch they are counted as in appendix E of "Eagle and Finch"
    (arXiv:2404.05892). Of Avey they are those of the matrix products of a full window, k * chunk_size rows: enricher,
    fuser and contextualizer of every block for all of these rows, and the head for one token. That is an upper bound,
    because rows that nothing reads are not computed. Of Avey-B they are those of the matrix products for a token of a
    full split: compressor, enricher, mixing (a dynamic layer's twice a static one's) and fuser of every layer, and the
    head. Not counted are the ranker, at most 2 d_embed for every earlier token, and what is done element by element.
    Of Raven they are those of the matrix products of all layers and the head, and of every head of a slot memory, with
    e the sizes of a key and a value together, 2 e num_slots for reading it and 3 e for each row that is written: topk
    of them, with the router "gsa" all, with "swa" one. Softmax attention adds 4 hidden_size a layer for every token of
    its window, as if that were full. Not counted is what it reads without a window: as much for every token of the
    text. Of Gecko they are those of the matrix products of all layers and the head, and in each layer 2 (z_dim +
    value_dim) for every token of two chunks, as if attention read both in full; 6 z_dim value_dim / num_heads for
    reading the working memory and for a token's share of what its chunk changes there; and 12 for each complex number
    of CEMA's state. VisualRWKV's are those of the Eagle or Finch in it, for a token of the text: tower and projection,
    through which only images pass, count among the parameters alone. Its sizes and its state are that model's, too.

    Attributes:
        source: `preset`, or the path that was read.
        dtype: the dtype that most weights are stored in, None for a preset.
        weight_bytes: size of the weights, None for a preset.
        state_elements: numbers kept between two tokens, however long the text is. Of Raven the slots' keys and values,
            and those of the tokens in a window of softmax attention. Of Gecko the norms' moments, CEMA's state, the
            working memory with its normaliser, and the keys, memory keys and values of two chunks; not counted is
            where the document of each of these tokens begins. None of Avey, and of Avey-B, an encoder.
        state_bytes: their size: float32 for the wkv state, the slots and of Gecko all but keys and values, the model's
            dtype (a preset and weights that are no floats: float32) for the two shifts and for softmax attention.
        state_elements_per_token: numbers kept of every token of the text: Avey keeps its embedding, Raven's softmax
            attention without a window a key and a value. Not counted are Avey's one score for every chunk_size tokens,
            and the room that a cache has for tokens to come.
        state_bytes_per_token: their size, in the model's dtype (float32 as above).
        inference_flops: Eagle and Finch: equations (24) and (28), 2 parameters + 6 elements of the wkv state. Avey:
            one more token, for which the whole window is computed anew. Avey-B: a token's share of the forward pass.
            Raven, Gecko: one more token.
        training_flops: Eagle and Finch: equations (26) and (29), three times that. Avey: three times a token's share
            of the forward pass, k rows, because the chunk_size tokens of a split have one window. Avey-B: three times
            the forward pass. Raven, Gecko: three times the inference, the recurrence as it is written; that training
            computes it in chunks, with products within a chunk, is not counted.
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


def embedded_model(name: str) -> Path | None:
    """Directory of the model of that name that comes with the package, None where there is none."""
    return _embedded().get(name)


def _embedded() -> dict[str, Path]:
    return {path.parent.name: path.parent for path in sorted(EMBEDDED.glob("*/config.json"))}


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
        f"{name_or_path!r} is neither a preset ({', '.join(PRESETS)}), nor an embedded model "
        f"({', '.join(_embedded()) or 'there is none'}), nor a directory, nor a checkpoint file."
    )


def labelled(info: ModelInfo) -> dict[str, str]:
    """The numbers that a model has, as text, by what they are: what `subquad info` and a model card show."""
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
        "inference": info.inference_flops and f"{info.inference_flops:.2e} FLOPs a token",
        "training": info.training_flops and f"{info.training_flops:.2e} FLOPs a token",
    }
    return {label: str(text) for label, text in texts.items() if text is not None}


def format_bytes(number: int) -> str:
    size = float(number)
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} GB"


def _describe_directory(name: str, path: Path) -> ModelInfo:
    from transformers import AutoConfig

    from subquad_conversion.checkpoint import open_checkpoint

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # what is in the file may break anything that reads it
        try:
            return _describe_checkpoint(name, path)
        except ValueError as refusal:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{path} has no usable config.json ({reason}). {refusal}") from refusal
    counts: Counter = Counter()
    size = 0
    with open_checkpoint(path) as checkpoint:
        for tensor in checkpoint.tensors.values():
            dtype = str(tensor.dtype).removeprefix("torch.")
            counts[dtype] += tensor.elements
            size += tensor.elements * _bits(dtype) // 8
        if hasattr(config, "set_sizes_from_shapes"):
            config.set_sizes_from_shapes({name: tensor.shape for name, tensor in checkpoint.tensors.items()})
    return _info(name, str(path), config, sum(counts.values()), counts.most_common(1)[0][0], size)


def _describe_checkpoint(name: str, path: Path) -> ModelInfo:
    from transformers import AutoConfig

    from subquad_conversion import recognise

    found = recognise(path)
    config = AutoConfig.for_model(found.model_type, **found.sizes)
    size = found.parameters * _bits(found.dtype) // 8
    return _info(name, str(path), config, found.parameters, found.dtype, size)


def _bits(dtype: str) -> int:
    """Bits of one element of a dtype of `torch` or of safetensors."""
    import torch

    return BITS[dtype] if dtype in BITS else 8 * getattr(torch, dtype).itemsize


def _count_on_meta(config) -> int:
    import torch
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, lm_auto_class(config.model_type)).from_config(config, trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.parameters())


def _info(name, source, config, parameters: int, dtype: str | None, weight_bytes: int | None) -> ModelInfo:
    state = state_bytes = growth = growth_bytes = inference = training = None
    bits = _bits(dtype if dtype in FLOATS else "float32")
    model_type = config.model_type
    if model_type == "visual_rwkv":
        config = config.text_config
    if config.model_type in ("rwkv5", "rwkv6"):
        wkv = config.num_hidden_layers * config.attention_hidden_size * config.head_size
        shifts = config.num_hidden_layers * 2 * config.hidden_size
        state = wkv + shifts
        state_bytes = 4 * wkv + bits * shifts // 8
        weights = _count_on_meta(config) if model_type == "visual_rwkv" else parameters
        inference = 2 * weights + 6 * wkv
        training = 3 * inference
    elif config.model_type == "avey":
        growth, growth_bytes = config.d_embed, bits * config.d_embed // 8
        inference, training = _avey_flops(config)
    elif config.model_type == "avey-b":
        inference = _avey_b_flops(config)
        training = 3 * inference
    elif config.model_type == "raven":
        slots, window, growing = _raven_state(config)
        state, state_bytes = slots + window, 4 * slots + bits * window // 8
        if growing:
            growth, growth_bytes = growing, bits * growing // 8
        inference = _raven_flops(config)
        training = 3 * inference
    elif config.model_type == "gecko":
        recurrent, window = _gecko_state(config)
        state, state_bytes = recurrent + window, 4 * recurrent + bits * window // 8
        inference = _gecko_flops(config)
        training = 3 * inference
    return ModelInfo(
        name=name,
        source=source,
        model_type=model_type,
        num_hidden_layers=getattr(config, "num_hidden_layers", None),
        hidden_size=getattr(config, "hidden_size", None),
        num_attention_heads=getattr(config, "num_attention_heads", None),
        vocab_size=getattr(config, "vocab_size", None),
        parameters=parameters,
        dtype=dtype,
        weight_bytes=weight_bytes,
        state_elements=state,
        state_bytes=state_bytes,
        state_elements_per_token=growth,
        state_bytes_per_token=growth_bytes,
        inference_flops=inference,
        training_flops=training,
    )


def _avey_flops(config) -> tuple[int, int]:
    """Of one more token and of one token in training, as [`ModelInfo`] has them."""
    rows, half = config.extended_len, config.tail_size // 2
    features = config.expansion_factor * config.d_embed
    weights = features * config.d_embed + (features - half) * config.d_embed  # enricher, fuser
    # Similarities of every row with those up to it, and their weighted sum.
    contextualizer = 2 * 2 * (rows * (rows + 1) // 2) * half
    window = config.n_blocks * (2 * weights * rows + contextualizer)
    head = 2 * config.vocab_size * config.d_embed
    return window + head, 3 * (window // config.chunk_size + head)


def _avey_b_flops(config) -> int:
    """Of one token's share of the forward pass, as [`ModelInfo`] has them."""
    rows, half = config.context_size, config.tail_size // 2
    features = config.expansion_factor * config.d_embed
    weights = features * config.d_embed + (features - half) * config.d_embed  # enricher, fuser
    # The weighted sum of all rows of the window; where the layer is dynamic, their similarities first.
    products = sum(2 if dynamic else 1 for dynamic in config.dynamic_layers)
    row = 2 * config.n_layers * weights + 2 * products * rows * half
    compressor = 2 * (config.k + 1) * config.chunk_size * config.d_embed if config.compressor else 0
    # Without a compressor the layers compute the whole window for the tokens of one split.
    return compressor + row * (rows // config.chunk_size) + 2 * config.vocab_size * config.d_embed


def _raven_state(config) -> tuple[int, int, int]:
    """Elements of all slots, of all windows of softmax attention, and of every token of the text."""
    memory = config.num_heads * config.num_slots * (config.head_k_dim + config.head_v_dim)
    slots = window = growing = 0
    for spec in map(config.attention, range(config.num_hidden_layers)):
        if spec is None:
            slots += memory
            continue
        token = 2 * spec["num_kv_heads"] * (config.hidden_size // spec["num_heads"])
        if spec["window_size"] is None:
            growing += token
        else:
            window += spec["window_size"] * token
    return slots, window, growing


def _raven_flops(config) -> int:
    """Of one token, as [`ModelInfo`] has them."""
    d, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
    entry = config.head_k_dim + config.head_v_dim
    router = decay = 0
    if config.router == "raven":
        router = kv_heads * config.num_slots * d + (d * d if config.router_type == "mlp" else 0)
    if config.router != "swa":
        decay = kv_heads * d * (config.num_slots if config.decay_type == "GLA" else 1)
    # Queries and output, keys and values.
    weights = d * (heads + kv_heads) * entry + router + decay + (d * config.value_dim if config.use_output_gate else 0)
    written = {"raven": config.topk, "gsa": config.num_slots, "swa": 1}[config.router]
    memory = 2 * weights + heads * entry * (2 * config.num_slots + 3 * written)

    flops = 2 * config.vocab_size * d
    for spec in map(config.attention, range(config.num_hidden_layers)):
        flops += 2 * 3 * d * config.intermediate_size
        if spec is None:
            flops += memory
        else:
            shared = spec["num_heads"] // spec["num_kv_heads"]
            flops += 2 * (2 * d * d + 2 * d * (d // shared)) + 4 * d * (spec["window_size"] or 0)
    return flops


def _gecko_state(config) -> tuple[int, int]:
    """Elements of all that is updated with every token or chunk, and of the keys and values of two chunks."""
    moments = 3 * config.timenorm_num_groups
    memory = config.z_dim * (config.value_dim // config.num_heads + 1)
    recurrent = config.num_layers * (moments + 2 * config.model_dim * config.cema_ndim + memory) + moments
    return recurrent, config.num_layers * 2 * config.chunk_size * (2 * config.z_dim + config.value_dim)


def _gecko_flops(config) -> int:
    """Of one token, as [`ModelInfo`] has them."""
    d, z, v = config.model_dim, config.z_dim, config.value_dim
    weights = d * (z + 2 * v + d) + v * d + (3 if config.swiglu else 2) * d * config.ffn_hidden_dim
    attention = 2 * (z + v) * 2 * config.chunk_size
    memory, average = 6 * z * v // config.num_heads, 12 * d * config.cema_ndim
    return config.num_layers * (2 * weights + attention + memory + average) + 2 * config.vocab_size * d


__all__ = ["ModelInfo", "UnknownModelError", "describe", "embedded_model", "format_bytes", "labelled"]
