"""
The tables of the README that say what works with which architecture, made from the descriptors.

    python -m subquad.support README.md    # writes the tables into a file, between their markers
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from .architecture import Architecture
from .models import REGISTRY


def _auto_classes(architecture: Architecture) -> str:
    return ", ".join(f"`{name.replace('AutoModelFor', '...For')}`" for name in architecture.heads)


def _unless_encoder(architecture: Architecture) -> str:
    return "no: an encoder" if architecture.is_encoder else "yes"


def _always(architecture: Architecture) -> str:
    return "yes"


def _field(name: str) -> Callable[[Architecture], str]:
    return lambda architecture: getattr(architecture.support, name)


# Marker to rows; a row is what works and the cell of an architecture.
TABLES: dict[str, dict[str, Callable[[Architecture], str]]] = {
    "models": {
        "`AutoModel...`": _auto_classes,
        "loads or converts": _field("checkpoints"),
        "logits within 1e-4 of": _field("parity"),
        "state between two tokens": _field("state"),
        "greedy, sampling, beam search, assisted and prompt-lookup decoding, continuing from a cache": _unless_encoder,
        "left and right padding, packed documents (`cu_seqlens`, restarting `position_ids`), exact": _always,
        "training, gradient checkpointing, `torch.compile(fullgraph=True)`": _always,
        "float32, bfloat16, float16": _field("dtypes"),
        'decoding step compiled into one graph on a GPU (`cache_implementation="static"`)': _unless_encoder,
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
        "`torch.export`; ONNX": _field("export"),
    },
}


def table(marker: str) -> str:
    """One of the tables, in Markdown: a column for each architecture."""
    architectures = list(REGISTRY.values())
    header = ["", *(architecture.title for architecture in architectures)]
    rows = [[what, *map(cell, architectures)] for what, cell in TABLES[marker].items()]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_tables(text: str) -> str:
    """
    A text with the tables between their markers, `<!-- table: models -->` and `<!-- end of table -->`.

    Raises:
        ValueError: if a marker is missing.
    """
    for marker in TABLES:
        pattern = re.compile(rf"(<!-- table: {marker} -->\n).*?(\n<!-- end of table -->)", re.DOTALL)
        text, found = pattern.subn(lambda match, marker=marker: f"{match[1]}{table(marker)}{match[2]}", text)
        if not found:
            raise ValueError(f"There is no `<!-- table: {marker} -->` with an end.")
    return text


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
