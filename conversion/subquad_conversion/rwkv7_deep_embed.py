"""
RWKV-7a and RWKV-7b, in the trainer's layout and in ours. Tensor names distinguish the two, and both from Goose. The
trainer's files have no configuration, and their tables are not merged.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from subquad.models.rwkv7_deep_embed.configuration_rwkv7_deep_embed import OTHER_RELATIVES
from subquad.models.rwkv7_deep_embed.modeling_rwkv7_deep_embed import MERGED_AT_ONCE, merged_rows

from .errors import ConversionError
from .formats import InferredConfig, SourceTensor, Tensors, lengths_of
from .rwkv7 import EMBEDDINGS, VECTORS, Rwkv7Format, Rwkv7Hub, Rwkv7Trainer
from .writer import OutputTensor


PLACES = {"deep_embed_rank": ("rwkv7.blocks.0.ffn.s1", 1)}
PLACES_OF_ATTENTION = {"dea_size": ("rwkv7.blocks.0.qkv.k2", 1), "dea_rank": ("rwkv7.blocks.0.qkv.k1", 1)}
SOFT_CAP = 64.0  # of every published model
# Ends of the names of tables and of the products that belong to their rows.
TABLE, PRODUCT = "_emb.weight", "_emb_x.weight"


def has_tables(tensors: Tensors) -> bool:
    return any(name.endswith(".ffn.s_emb.weight") for name in tensors)


def has_products(tensors: Tensors) -> bool:
    return any(name.endswith(".ffn.s_emb_x.weight") for name in tensors)


def has_attention(tensors: Tensors) -> bool:
    return any(".qkv.qq." in name for name in tensors)


class DeepEmbedFormat(Rwkv7Format):
    """A format of RWKV-7a and 7b."""

    model_type = "rwkv7_deep_embed"
    related = re.compile("|".join((*OTHER_RELATIVES, r"^(rwkv|vit)\.")))
    vectors = re.compile(f"{VECTORS.pattern}|(ffn\\.s0|qkv\\.x_[qkv])$")

    def matches(self, tensors: Tensors) -> bool:
        return super().matches(tensors) and has_tables(tensors)

    def read(self, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> InferredConfig:
        reading = super().read(found, given)
        merged, attention = not has_products(found), has_attention(found)
        if "model_type" in given:
            variant = "RWKV-7b" if attention else "RWKV-7a"
            if attention == (given.get("dea_size") is None):
                raise ConversionError(
                    f"The tensors are those of {variant}, but in the configuration `dea_size` is "
                    f"{given.get('dea_size')}: it belongs to another model."
                )
            if merged != bool(given.get("merged_tables")):
                raise ConversionError(
                    f"The tables of this {variant} are {'' if merged else 'not '}merged, but in the configuration "
                    f"`merged_tables` is {given.get('merged_tables', False)}: it belongs to another model."
                )
        places, notes = {**reading.places, **PLACES}, list(reading.notes)
        variant = {"merged_tables": merged, "dea_size": 1 if attention else None}
        fields = {**reading.fields, **variant, **lengths_of(found, PLACES)}
        if attention:
            places |= PLACES_OF_ATTENTION
            fields |= lengths_of(found, PLACES_OF_ATTENTION)
            if "dea_soft_cap" not in given:
                notes.append(f"`dea_soft_cap` is not stored in the source; {SOFT_CAP:g} was assumed")
        structure = {**reading.structure, **variant}
        return replace(reading, fields=fields, structure=structure, places=places, notes=notes)

    def check_target(self, config: PreTrainedConfig) -> list[str]:
        if config.merged_tables:
            raise ConversionError("The tables are merged, and the trainer's files have tables that are not.")
        cap = config.dea_soft_cap
        if config.dea_size is None or cap == SOFT_CAP:
            return []
        return [f"`dea_soft_cap` is not stored in the tensors: readers of the file must know that it is {cap:g}"]

    def merge_tables(self, outputs: list[OutputTensor], config: PreTrainedConfig) -> list[OutputTensor]:
        if config.merged_tables:
            raise ConversionError("`merge_tables`: the tables of the source are merged already.")
        config.merged_tables = True
        tensors = {output.name: output for output in outputs}
        merged = []
        for output in outputs:
            if output.name.endswith(TABLE) and (product := output.name.replace(TABLE, PRODUCT)) in tensors:
                output = replace(output, fetch=partial(_merged, tensors, output.name, product, config.norm_eps))
            if not output.name.endswith(PRODUCT):
                merged.append(output)
        return merged


def _merged(tensors: Mapping[str, OutputTensor], table: str, product: str, eps: float) -> torch.Tensor:
    """A table with its product, in the dtype in which it is written."""

    def fetch(name: str) -> torch.Tensor:
        return tensors[name].fetch().reshape(tensors[name].shape)

    ln0 = {name: fetch(f"rwkv7.blocks.0.ln0.{name}") for name in ("weight", "bias")}
    weight, parts = fetch(product), (fetch(name).split(MERGED_AT_ONCE) for name in (table, EMBEDDINGS))
    return torch.cat(
        [merged_rows(rows, weight, x, ln0, eps).to(tensors[table].dtype) for rows, x in zip(*parts, strict=True)]
    )


class Rwkv7DeepEmbedTrainer(DeepEmbedFormat, Rwkv7Trainer):
    name = "rwkv7-deep-embed-trainer"
    title = "Goose with DeepEmbed (RWKV-7a, 7b), trainer checkpoint"

    def matches(self, tensors: Tensors) -> bool:
        return super().matches(tensors) and has_products(tensors)


class Rwkv7DeepEmbedHub(DeepEmbedFormat, Rwkv7Hub):
    name = "rwkv7-deep-embed-hub"
    title = "Goose with DeepEmbed (RWKV-7a, 7b), our directory"
    target = None


FORMATS = (Rwkv7DeepEmbedTrainer(), Rwkv7DeepEmbedHub())
