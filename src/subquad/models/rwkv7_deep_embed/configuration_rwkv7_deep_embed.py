"""Configuration of RWKV-7a and RWKV-7b."""

import re

from huggingface_hub.dataclasses import strict

from ...modeling.configuration_checks import check_configuration
from ..rwkv7.configuration_rwkv7 import RELATIVES, Rwkv7Config


# The tensors by which the variants differ from Goose and from each other, in their first blocks.
TABLE, PRODUCT, ATTENTION = r"\.ffn\.s_emb\.", r"\.ffn\.s_emb_x\.", r"\.qkv\.qq\."

# The relatives of Goose that are not these two.
OTHER_RELATIVES = {
    pattern: title
    for pattern, title in RELATIVES.items()
    if not re.search(pattern, ".ffn.s_emb.weight") and not re.search(pattern, ".qkv.qq.weight")
}


@strict
class Rwkv7DeepEmbedConfig(Rwkv7Config):
    r"""
    Configuration of an RWKV-7a (Goose with DeepEmbed) or an RWKV-7b (also with DeepEmbedAttention, if `dea_size` is
    not None). Published files have no configuration; the defaults reproduce them.

    Args:
        deep_embed_rank: R; a row of a block's DeepEmbed table is an R by R matrix.
        dea_size: width of the queries and keys of DeepEmbedAttention, M; 256 in published models of RWKV-7b. None
            means RWKV-7a, without this attention.
        dea_rank: rank of the maps that make its keys and values.
        dea_soft_cap: its scores s become `cap * tanh(s / cap)`.
        merged_tables: whether the tables hold the part of each row that is computed from the token's embedding, see
            [`~Rwkv7DeepEmbedForCausalLM.merge_tables`].

    The other fields are those of [`Rwkv7Config`].
    """

    model_type = "rwkv7_deep_embed"
    # package only
    _relatives = OTHER_RELATIVES

    deep_embed_rank: int = 32
    dea_size: int | None = None
    dea_rank: int = 32
    dea_soft_cap: float = 64.0
    merged_tables: bool = False

    @property
    def _block_plan(self) -> dict[str, str]:
        """Tables are split by rows, as embeddings are. Every process gets the whole output of the other layers."""
        tables = ("ffn.s_emb", *(() if self.dea_size is None else ("qkv.k_emb", "qkv.v_emb")))
        layers = [] if self.merged_tables else [f"{table}_x" for table in tables]
        layers += [] if self.dea_size is None else ["qkv.qq"]
        return {
            **super()._block_plan,
            **{"ffn.s0": "rowwise", "ffn.s2": "rowwise"},
            **dict.fromkeys(tables, "embedding_rowwise"),
            **dict.fromkeys(layers, "colwise_gather_output"),
        }

    def validate_architecture(self):
        """Raises a ValueError if sizes do not fit together, before any tensor is created."""
        super().validate_architecture()
        sizes = ("deep_embed_rank", "dea_rank", *(() if self.dea_size is None else ("dea_size",)))
        check_configuration(self, sizes, ("dea_soft_cap",))

    # package only
    def set_sizes_from_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """
        As in [`Rwkv7Config`].

        Raises:
            ValueError: also if the tensors are those of another variant than the configuration's.
        """
        super().set_sizes_from_shapes(shapes)
        if not any(re.search(r"\.att\.r_k$", name) for name in shapes):
            return

        def found(pattern: str) -> bool:
            return any(re.search(pattern, name) for name in shapes)

        wanted = "RWKV-7a" if self.dea_size is None else "RWKV-7b"
        stored = (
            ("RWKV-7b" if found(ATTENTION) else "RWKV-7a") if found(TABLE) else "RWKV-7 (Goose), without DeepEmbed"
        )
        if stored != wanted:
            raise ValueError(
                f"`dea_size` is {self.dea_size}, so this is the configuration of {wanted}, but the tensors are those "
                f"of {stored}."
            )
        if self.merged_tables == found(PRODUCT):
            state = "are not merged" if self.merged_tables else "are merged"
            raise ValueError(f"`merged_tables` is {self.merged_tables}, but the tables of the file {state}.")
        for name, shape in shapes.items():
            if len(shape) != 2:
                continue
            if name.endswith("blocks.0.ffn.s1"):
                self.deep_embed_rank = shape[1]
            elif name.endswith("blocks.0.qkv.k1"):
                self.dea_rank = shape[1]
            elif name.endswith("blocks.0.qkv.k2"):
                self.dea_size = shape[1]


__all__ = ["Rwkv7DeepEmbedConfig"]
