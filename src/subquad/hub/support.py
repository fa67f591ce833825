"""The documentation's tables of supported features by architecture, made from the descriptors."""

from collections.abc import Callable

from ..models.architecture import Architecture


def _auto_classes(architecture: Architecture) -> str:
    return ", ".join(f"`{name.replace('AutoModelFor', '...For')}`" for name in architecture.heads)


def _if_generating(architecture: Architecture) -> str:
    if architecture.generates:
        return "yes"
    return "no: an encoder" if architecture.is_encoder else "no: it generates no text"


def _padding(architecture: Architecture) -> str:
    return "padding; a row has one text" if architecture.embedder else "yes"


def _always(architecture: Architecture) -> str:
    return "yes"


def _field(name: str) -> Callable[[Architecture], str]:
    return lambda architecture: getattr(architecture.support, name)


# Table to rows; a row maps a feature to an architecture's cell.
TABLES: dict[str, dict[str, Callable[[Architecture], str]]] = {
    "models": {
        "`AutoModel...`": _auto_classes,
        "loads or converts": _field("checkpoints"),
        "logits within 1e-4 of": _field("parity"),
        "state between two tokens": _field("state"),
        "greedy, sampling, beam search, assisted and prompt-lookup decoding, continuing from a cache": _if_generating,
        "left and right padding, packed documents (`cu_seqlens`, restarting `position_ids`), exact": _padding,
        "training, gradient checkpointing, `torch.compile(fullgraph=True)`": _always,
        "float32, bfloat16, float16": _field("dtypes"),
        "decoding on a CPU by a C library that is compiled at first use": _if_generating,
        'decoding step compiled into one graph on a GPU (`cache_implementation="static"`)': _if_generating,
    },
    "tools": {
        "PEFT: LoRA, DoRA, AdaLoRA, VeRA, (IA)³": _field("adapters"),
        "state tuning": _field("state_tuning"),
        "`Trainer`, accelerate, TRL": _field("trainers"),
        "DDP, FSDP2, ZeRO-3, sharded checkpoints": _field("distributed"),
        "tensor parallel": _field("tensor_parallel"),
        "CPU and disk offload": _always,
        "pipelines": _field("pipelines"),
        "`transformers serve`": _field("serving"),
        "lm-eval": _field("lm_eval"),
        "torchao, bitsandbytes": _field("quantization"),
        "8 and 4 bits on a CPU (`Int8Config`, `Int4Config`, `subquad convert --quantize`)": _always,
        "`torch.export`; ONNX": _field("export"),
    },
}


def rows(table: str, architecture: Architecture) -> list[tuple[str, str]]:
    """The features of a table, each with the cell of one architecture."""
    return [(what, cell(architecture)) for what, cell in TABLES[table].items()]
