"""Configuration of Gecko."""

from typing import Any

from huggingface_hub.dataclasses import strict

from ...modeling.configuration_checks import CheckedConfig, check_configuration
from ...modeling.layer_types import all_linear
from ...modeling.tensor_parallel import divides_heads, plan_heads, plan_property
from ...modeling.versions import CACHE_NAMES


@strict
class GeckoConfig(CheckedConfig):
    r"""
    Configuration of a Gecko model ("GECKO: An Efficient Neural Architecture Inherently Processing Sequences with
    Arbitrary Lengths"). Names are as in the authors' code, defaults as in their 7B model.

    Args:
        vocab_size: number of token ids.
        model_dim: width of the model, d.
        num_layers: number of blocks.
        num_heads: heads of the attention and of the working memory.
        z_dim: width of the representation z of all heads, from which queries and keys are made.
        value_dim: width of the values of all heads, v.
        ffn_hidden_dim: width of the feed-forward network.
        cema_ndim: complex numbers of CEMA for each dimension, h (equation 1).
        chunk_size: tokens of a chunk, c: a token attends to its chunk and to the one before.
        timenorm_num_groups: groups of channels that have a mean and a variance in timestep decay normalization.
        timenorm_beta1, timenorm_beta2: decays of their averages (equation 11).
        layernorm_num_groups: groups of channels that the other norms, after CEMA and before the feed-forward network,
            normalize separately.
        norm_affine: whether these have weights (and biases).
        norm_eps: epsilon of every norm.
        two_hop_residual: whether the feed-forward network's output is added to the block's input instead of the
            output of its first half.
        rope_base: base of the rotary embeddings.
        num_rope_heads: number of heads, from the first on, that have rotary embeddings. If None, all.
        swiglu: whether the feed-forward network is gated.
        rescale_nffn: whether its output has a learned factor for each channel.
        scale_emb: whether embeddings are multiplied by the square root of `model_dim`.
        share_emb: whether the head has the weights of the embeddings; also as `tie_word_embeddings`.
        dropout: dropout of the embeddings and of the output of either half of a block.
        hidden_dropout: dropout of the normalized output of CEMA, of the gated attention, and of the hidden layer of
            the feed-forward network.
        attention_dropout: dropout of the attention weights.
        document_boundaries: whether every `bos_token_id` begins a new document, which sees nothing of earlier ones.
    """

    model_type = "gecko"
    attribute_map = {
        "hidden_size": "model_dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "ffn_hidden_dim",
        "tie_word_embeddings": "share_emb",
    }
    keys_to_ignore_at_inference = list(CACHE_NAMES)
    layer_types = all_linear
    base_model_fsdp_plan = {
        "embed": "free_full_weight",
        "layers.*": "free_full_weight",
        "output.final_norm": "keep_full_weight",
    }

    ignored_fields = ("efficient_attn", "init_mode", "max_position_embeddings", "memory_efficient_norm")

    vocab_size: int = 32000
    model_dim: int = 4096
    num_layers: int = 32
    num_heads: int = 4
    z_dim: int = 1024
    value_dim: int = 8192
    ffn_hidden_dim: int = 8192
    cema_ndim: int = 16
    chunk_size: int = 2048
    timenorm_num_groups: int = 64
    timenorm_beta1: float | int = 0.999
    timenorm_beta2: float | int = 0.9999
    layernorm_num_groups: int = 1
    norm_affine: bool = True
    norm_eps: float = 1e-5
    two_hop_residual: bool = False
    rope_base: float | int = 500000
    num_rope_heads: int | None = None
    swiglu: bool = True
    rescale_nffn: bool = False
    scale_emb: bool = False
    share_emb: bool = False
    dropout: float | int = 0.0
    hidden_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    document_boundaries: bool = True
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = None
    use_cache: bool = True

    @property
    def only_values(self) -> dict[str, tuple[tuple[Any, ...], str]]:
        """As in [`CheckedConfig`]. The field is one of the authors' code."""
        return super().only_values | {"output_size": ((self.vocab_size, -1), "every output belongs to a token")}

    @plan_property
    def base_model_tp_plan(self) -> dict[str, str]:
        """
        How tensor parallel processes share the model: by heads, if their number divides the number of heads and
        either all heads have rotary embeddings or none has.
        """
        split = divides_heads(self, self.num_heads) and self.num_rope_heads in (0, self.num_heads)
        return {
            "embed": "embedding_rowwise",
            **plan_heads("layers.*.mega", ("wz", "wv", "wr"), "wh2", {"gamma": "rowwise", "beta": "rowwise"}, split),
            "layers.*.mega.wh1": "colwise_gather_output",
            **{f"layers.*.nffn.{name}": "colwise" for name in (("fc1", "fc3") if self.swiglu else ("fc1",))},
            "layers.*.nffn.fc2": "rowwise",
        }

    @property
    def boundary_token_id(self) -> int | None:
        """The id of the token that begins a document; None if no token does."""
        bos = self.bos_token_id
        return bos if self.document_boundaries and bos is not None and 0 <= bos < self.vocab_size else None

    def validate_architecture(self):
        """Raises a ValueError if sizes do not fit together, before any tensor is created."""
        if self.num_rope_heads is None:
            self.num_rope_heads = self.num_heads
        sizes = ("vocab_size", "model_dim", "num_layers", "num_heads", "z_dim", "value_dim", "ffn_hidden_dim")
        sizes += ("cema_ndim", "chunk_size", "timenorm_num_groups", "layernorm_num_groups")
        check_configuration(self, sizes, ("norm_eps", "rope_base"))
        for name, divisor in (
            ("z_dim", "num_heads"),
            ("value_dim", "num_heads"),
            ("model_dim", "timenorm_num_groups"),
            ("model_dim", "layernorm_num_groups"),
        ):
            if getattr(self, name) % getattr(self, divisor):
                raise ValueError(
                    f"`{name}` ({getattr(self, name)}) must be a multiple of `{divisor}` ({getattr(self, divisor)})."
                )
        if not 0 <= self.num_rope_heads <= self.num_heads:
            raise ValueError(f"`num_rope_heads` must be from 0 to {self.num_heads}, got {self.num_rope_heads}.")
        if self.num_rope_heads and self.z_dim // self.num_heads % 2:
            raise ValueError(f"Rotary embeddings need heads of an even size, got {self.z_dim // self.num_heads}.")
        for name in ("timenorm_beta1", "timenorm_beta2", "dropout", "hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be from 0 to below 1, got {getattr(self, name)}.")


__all__ = ["GeckoConfig"]
