"""Configuration of Avey-B."""

import math

from huggingface_hub.dataclasses import strict

from ...modeling.configuration_checks import CheckedConfig, check_configuration
from ...modeling.layer_types import all_linear
from ...modeling.tensor_parallel import plan_property


STATIC, DYNAMIC = "static", "dynamic"

# Appendix D of the paper: the kind of each of n layers, from the first to the last.
LAYER_PATTERNS = {
    "interleaved": lambda n: [(STATIC, DYNAMIC)[i % 2] for i in range(n)],
    "interleaved-dynamic-first": lambda n: [(DYNAMIC, STATIC)[i % 2] for i in range(n)],
    "single-dynamic-head": lambda n: [DYNAMIC] + [STATIC] * (n - 1),
    "single-dynamic-tail": lambda n: [STATIC] * (n - 1) + [DYNAMIC],
    "static-then-dynamic": lambda n: [STATIC] * (n // 2) + [DYNAMIC] * (n - n // 2),
    "dynamic-then-static": lambda n: [DYNAMIC] * (n // 2) + [STATIC] * (n - n // 2),
    "all-static": lambda n: [STATIC] * n,
    "all-dynamic": lambda n: [DYNAMIC] * n,
}
CHOICES = {
    "hidden_act": ("gelu", "relu2"),
    "similarity_norm": ("l1", "sum"),
    "score_normalization": ("min", "max"),
    "layer_pattern": tuple(LAYER_PATTERNS),
}


@strict
class AveyBConfig(CheckedConfig):
    r"""
    Configuration of an Avey-B encoder ("Avey-B", Acharya and Hammoud), with the field names of the published
    `config.json` files and the defaults of the published weights. The paper's variant has
    `hidden_act="relu2", similarity_norm="sum", residual_gain=False, final_norm=True`.

    Args:
        vocab_size: number of token ids.
        d_embed: width of an embedding, d.
        n_layers: number of layers of the neural processor, L.
        chunk_size: number of tokens of a split, S.
        k: number of splits that each split retrieves.
        eps: epsilon of every norm, including the norms in a dynamic layer's similarities.
        expansion_factor: the enricher computes `expansion_factor * d_embed` features, m, per token (equation 1).
        context_proportion: share of the features in the tail. One half of the tail is contextualised, the other
            half is its gate. The other features go to the fuser unchanged (section 3.2).
        hidden_act: activation of the enricher: `"gelu"` (exact) or `"relu2"`, ReLU², as in the paper.
        similarity_norm: divisor of a row of similarities in a dynamic layer: `"l1"`, the sum of their magnitudes, or
            `"sum"`, their sum, as in the paper (equation 6).
        residual_gain: whether a layer adds its input times a learned number, or, as in the paper, the input itself.
        final_norm: whether the masked language model has an RMSNorm before its head, as in the paper.
        score_normalization: divisor of a retrieved split's score (section 3.1): `"min"`, the smallest
            retrieved score, as in the published models, or `"max"`, the largest, as in the paper.
        layer_pattern: which layers are static and which dynamic (appendix D): `"interleaved"` (static first),
            `"interleaved-dynamic-first"`, `"single-dynamic-head"`, `"single-dynamic-tail"`, `"static-then-dynamic"`,
            `"dynamic-then-static"`, `"all-static"` or `"all-dynamic"`.
        bidirectional_ranker: whether a split may retrieve splits that follow it (appendix C).
        compressor: whether a split and the splits it retrieves are compressed to the size of one (section 4.3). If
            not, the layers work on windows of `(k + 1) * chunk_size` rows.
        compressor_residual: whether the split itself is added to the output of the compressor (section 4.3).
        classifier_dropout: probability of dropout before the classifiers of texts and tokens.
    """

    model_type = "avey-b"
    attribute_map = {"hidden_size": "d_embed", "num_hidden_layers": "n_layers"}
    layer_types = all_linear
    base_model_fsdp_plan = {"embed": "free_full_weight", "layers.*": "free_full_weight"}

    ignored_fields = ("max_position_embeddings",)

    vocab_size: int = 50368
    d_embed: int = 768
    n_layers: int = 30
    chunk_size: int = 256
    k: int = 3
    eps: float = 1e-12
    expansion_factor: int = 4
    context_proportion: float | int = 0.5
    hidden_act: str = "gelu"
    similarity_norm: str = "l1"
    residual_gain: bool = True
    final_norm: bool = False
    score_normalization: str = "min"
    layer_pattern: str = "interleaved"
    bidirectional_ranker: bool = False
    compressor: bool = True
    compressor_residual: bool = True
    classifier_dropout: float | int = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    cls_token_id: int | None = None
    sep_token_id: int | None = None
    mask_token_id: int | None = None
    tie_word_embeddings: bool = True

    @property
    def tail_size(self) -> int:
        """Number of features of the tail, m_t, which is even."""
        size = int(self.expansion_factor * self.d_embed * self.context_proportion)
        return size + size % 2

    @property
    def context_size(self) -> int:
        """Number of rows of a window, C."""
        return self.chunk_size if self.compressor else (self.k + 1) * self.chunk_size

    @property
    def dynamic_layers(self) -> list[bool]:
        """Whether each layer is dynamic."""
        return [kind == DYNAMIC for kind in LAYER_PATTERNS[self.layer_pattern](self.n_layers)]

    @plan_property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallel processes share the model: by linear layers."""
        # Ranker and layers compare whole embeddings, so every process has these.
        return {
            "embed": "embedding_rowwise",
            "layers.*.enricher": "colwise_gather_output",
            "layers.*.fuser": "rowwise_split_input",
        }

    def validate_architecture(self):
        """Raises a ValueError if sizes or variants do not fit together, before any tensor is created."""
        check_configuration(self, ("vocab_size", "d_embed", "n_layers", "expansion_factor", "chunk_size", "k"))
        features, share = self.expansion_factor * self.d_embed, self.context_proportion
        if not 0 < share <= 1 or not 2 <= self.tail_size <= features:
            raise ValueError(
                f"`context_proportion` must be above 0 and at most 1, and make a tail of at least 2 of the {features} "
                f"features (`expansion_factor` times `d_embed`), got {share}."
            )
        if not 1e-20 <= self.eps < math.inf:
            raise ValueError(f"`eps` must be at least 1e-20 and finite, got {self.eps}.")
        if not 0 <= self.classifier_dropout < 1:
            raise ValueError(f"`classifier_dropout` must be from 0 to below 1, got {self.classifier_dropout}.")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {getattr(self, name)!r}.")


__all__ = ["AveyBConfig"]
