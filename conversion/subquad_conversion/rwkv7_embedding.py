"""
EmbeddingRWKV: Goose with the trainer's names after `rwkv.` and its heads (`head.`), in one file; and its reranker
(`reranker.`) in another, to be read with the file of its embedding model.
"""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig

from subquad.hub.loading import NameMap
from subquad.models.rwkv7.loading_rwkv7 import BONUS
from subquad.models.rwkv7_embedding.retrieval_files import save_embedding_files, save_reranker_files

from .checkpoint import Checkpoint, open_checkpoint
from .errors import ConversionError
from .formats import InferredConfig, SourceTensor, Tensors, count_blocks, lengths_of, one_line
from .rwkv7 import PLACES, Rwkv7Format


RERANKER = "reranker."
SCORE = "reranker.head.2.weight"
HEAD = re.compile(r"head\.(\w+)_head\..+")
# In a trainer's checkpoints, which hold its whole module: a frozen tower and an untrained projection of images.
IMAGES = ("vit.", "proj.")
UNUSED = re.compile(r"(rwkv|reranker)\.blocks\.0\.att\.v[012]")
# The embedding model's layers that the reranker reads: its name in files, and ours.
LAYERS, FIELD = "reranker_layer_idx", "reranker_layers"


def places_of(prefix: str, layers: int) -> dict[str, tuple[str, int]]:
    """The source of each size of a stack of blocks. A single block has no rank of the mixing of values."""
    return {
        size: (name.replace("rwkv7.", prefix, 1), axis)
        for size, (name, axis) in PLACES.items()
        if layers > 1 or size != "v_low_rank_dim"
    }


class EmbeddingFormat(Rwkv7Format):
    name = "rwkv7-embedding"
    title = "EmbeddingRWKV, trainer checkpoint"
    model_type = "rwkv7_embedding"
    sign = "rwkv.blocks.0.att.r_k"
    name_map = NameMap({"^reranker.token.": "reranker.emb."}, {".att.r_k": BONUS})

    def matches(self, tensors: Tensors) -> bool:
        other = any(name.startswith("ranking_head.") for name in tensors)
        return self.sign in tensors and any(map(HEAD.fullmatch, tensors)) and not other and SCORE not in tensors

    def is_buffer(self, name: str) -> bool:
        return UNUSED.fullmatch(name) is not None or name.startswith(IMAGES)

    def read(self, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> InferredConfig:
        layers = count_blocks(found, "rwkv.blocks.")
        places = places_of("rwkv.", layers)
        tasks = sorted({head[1] for head in map(HEAD.fullmatch, found) if head})
        fields = {"num_hidden_layers": layers, "tasks": tasks}
        if given.get("default_task", "retr") not in tasks:
            fields["default_task"] = tasks[0]
        images = sum(name.startswith(IMAGES) for name in found)
        notes = [f"{images} tensors of images ({', '.join(IMAGES)}) were left out"] if images else []
        end = {"eos_token_id": given.get("end_token_id", self.config_class.end_token_id)}
        sizes = lengths_of(found, places) | fields | end
        return InferredConfig(sizes, fields, places, shape_fields={"end_token_id": 0, "eos_token_id": 0}, notes=notes)

    def save_processor(
        self, directory: Path, config: PreTrainedConfig, generation: GenerationConfig, vision_tower: Path | None
    ) -> None:
        """The tokenizer with the token that ends texts, and the files that sentence-transformers reads."""
        try:
            save = save_reranker_files if self.model_type == RERANKER_FORMAT.model_type else save_embedding_files
            save(directory, AutoTokenizer.from_pretrained(directory, trust_remote_code=False), config)
        except Exception as error:  # a file may hold anything, so any part of the readers may fail
            raise ConversionError(f"`tokenizer`: choose another, or none. {one_line(error)}") from error


class RerankerFormat(EmbeddingFormat):
    name = "rwkv7-reranker"
    title = "EmbeddingRWKV's reranker with its embedding model, trainer checkpoints"
    model_type = "rwkv7_reranker"

    def matches(self, tensors: Tensors) -> bool:
        return SCORE in tensors and super().matches({name: x for name, x in tensors.items() if name != SCORE})

    def needs_base(self, tensors: Tensors) -> bool:
        return bool({SCORE, SCORE.removeprefix(RERANKER)} & tensors.keys()) and self.sign not in tensors

    def gather(
        self, checkpoint: Checkpoint, stack: ExitStack, vision_tower: Path | None, base: Path | None
    ) -> Checkpoint | None:
        """Adds the embedding model `base` to a reranker, whose names may lack their prefix."""
        if not self.needs_base(checkpoint.tensors):
            return None
        if base is None:
            raise ConversionError(
                f"{checkpoint.path} is a reranker, which only works with the embedding model that it was trained "
                "with: give that as `base` (--base of `subquad convert`)."
            )
        embedder = stack.enter_context(open_checkpoint(base))
        if not EMBEDDING_FORMAT.matches(embedder.tensors):
            raise ConversionError(f"`base` must be the embedding model of the reranker; {base} is none.")
        settings = {name: x for name, x in embedder.settings.items() if name not in ("model_type", "architectures")}
        merged = Checkpoint(embedder.path, settings=settings, lists=checkpoint.lists)
        merged.include(embedder, lambda name: name)
        prefix = "" if SCORE in checkpoint.tensors else RERANKER
        merged.include(checkpoint, lambda name: None if name.startswith(IMAGES) else prefix + name)
        return merged

    def with_options(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        fields = super().with_options(given, options)
        return {FIELD if name == LAYERS else name: value for name, value in fields.items()}

    def read(self, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> InferredConfig:
        reading = super().read(found, given)
        layers = count_blocks(found, "reranker.blocks.")
        places = places_of(RERANKER, layers)
        own = {"model_type": "rwkv7", "num_hidden_layers": layers}
        read_layers = {} if given.get(FIELD) is None else {FIELD: given[FIELD]}
        return InferredConfig(
            reading.fields | {"reranker_config": lengths_of(found, places) | own, **read_layers},
            reading.structure | {"reranker_config": own, FIELD: [0] * layers},
            reading.places | {f"reranker_{size}": place for size, place in places.items()},
            shape_fields=reading.shape_fields,
            notes=reading.notes,
        )


EMBEDDING_FORMAT, RERANKER_FORMAT = EmbeddingFormat(), RerankerFormat()
FORMATS = (EMBEDDING_FORMAT, RERANKER_FORMAT)
