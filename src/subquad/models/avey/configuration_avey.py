"""Configuration of Avey."""

from typing import Any

from huggingface_hub.dataclasses import strict

from ...modeling.configuration_checks import CheckedConfig, check_configuration
from ...modeling.layer_types import all_linear
from ...modeling.tensor_parallel import plan_property
from ...modeling.versions import CACHE_NAMES


@strict
class AveyConfig(CheckedConfig):
    r"""
    Configuration of an Avey model ("Don't Pay Attention", arXiv:2506.11305), with the field names of the published
    `config.json` files.

    Args:
        vocab_size: number of token ids.
        d_embed: width of an embedding, d.
        n_blocks: number of blocks of the neural processor, L.
        expansion_factor: the enricher computes `expansion_factor * d_embed` features, m, per token (equation 1).
        chunk_size: number of tokens of a split, S.
        k: number of splits of a window, including the current one: one more than the paper's k.
        context_proportion: share of the features in the tail. One half of the tail is contextualised, the other
            half is its gate. The other features go to the fuser unchanged (section 2.2.1).
        score_normalization: divisor of a retrieved split's score (section 2.1): `"first"`, the score of the earliest
            retrieved split, as in the published models, or `"max"`, the largest score, as in the paper.
        extended_len: number of rows of a window, C: `k * chunk_size`. Published files may have this field.
        rms_norm_eps: epsilon of every norm.
    """

    model_type = "avey"
    attribute_map = {"hidden_size": "d_embed", "num_hidden_layers": "n_blocks"}
    keys_to_ignore_at_inference = list(CACHE_NAMES)
    layer_types = all_linear
    base_model_fsdp_plan = {
        "wte": "free_full_weight",
        "blocks.*": "free_full_weight",
        "ln_f": "keep_full_weight",
    }

    ignored_fields = ("max_position_embeddings",)

    vocab_size: int = 50304
    d_embed: int = 768
    n_blocks: int = 26
    expansion_factor: int = 4
    chunk_size: int = 64
    k: int = 8
    context_proportion: float | int = 0.5
    score_normalization: str = "first"
    extended_len: int | None = None
    rms_norm_eps: float = 1e-10
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True
    use_cache: bool = True

    def __post_init__(self, **kwargs):
        if self.extended_len is None:
            self.extended_len = self.k * self.chunk_size
        super().__post_init__(**kwargs)

    @property
    def only_values(self) -> dict[str, tuple[tuple[Any, ...], str]]:
        """As in [`CheckedConfig`]."""
        reason = (
            "it is a field of Avey-B, whose files in the format of its paper name `avey` as their model type. "
            "`subquad convert` converts them"
        )
        return {"n_layers": ((None,), reason)} | super().only_values

    @property
    def tail_size(self) -> int:
        """Number of features of the tail, m_t, which is even."""
        size = int(self.expansion_factor * self.d_embed * self.context_proportion)
        return size + size % 2

    @plan_property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallel processes share the model: by linear layers."""
        # Ranker and contextualizer compare whole embeddings, so every process has these.
        return {
            "wte": "embedding_rowwise",
            "blocks.*.ctxt.enricher": "colwise_gather_output",
            "blocks.*.ctxt.fuser": "rowwise_split_input",
        }

    def validate_architecture(self):
        """Raises a ValueError if sizes do not fit together, before any tensor is created."""
        sizes = ("vocab_size", "d_embed", "n_blocks", "expansion_factor", "chunk_size", "k")
        check_configuration(self, sizes, ("rms_norm_eps",))
        features, share = self.expansion_factor * self.d_embed, self.context_proportion
        if not 0 < share <= 1 or not 2 <= self.tail_size <= features:
            raise ValueError(
                f"`context_proportion` must be above 0 and at most 1, and make a tail of at least 2 of the {features} "
                f"features (`expansion_factor` times `d_embed`), got {share}."
            )
        if self.score_normalization not in ("first", "max"):
            raise ValueError(f"`score_normalization` must be 'first' or 'max', got {self.score_normalization!r}.")
        if self.extended_len != self.k * self.chunk_size:
            raise ValueError(
                f"`extended_len` ({self.extended_len}) must be `k` ({self.k}) times `chunk_size` ({self.chunk_size})."
            )


__all__ = ["AveyConfig"]
