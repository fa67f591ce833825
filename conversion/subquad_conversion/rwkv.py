"""
Common parts of the formats of Eagle (RWKV-5.2) and Finch (RWKV-6.0). Some have the trainer's names, two have the
published Hub models' names, which are ours. The shapes of the vectors differ between trainers.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from transformers import PreTrainedConfig

from subquad.hub.loading import NameMap

from .errors import ConversionError
from .formats import Format, InferredConfig, Shape, SourceTensor, Tensors, count_blocks, lengths_of


HEAD_SIZE = 64  # of every published model; only used if not stored in a file
EMBEDDINGS, HEAD = "rwkv.embeddings.weight", "head.weight"
ATTENTION = "rwkv.blocks.0.attention."
# The source of each size: tensor, axis.
PLACES = {
    "vocab_size": (EMBEDDINGS, 0),
    "hidden_size": (EMBEDDINGS, 1),
    "attention_hidden_size": (f"{ATTENTION}key.weight", 0),
    "intermediate_size": ("rwkv.blocks.0.feed_forward.key.weight", 0),
}
RANKS = {
    "lora_rank_tokenshift": (f"{ATTENTION}time_maa_w2", 1),
    "lora_rank_decay": (f"{ATTENTION}time_decay_w2", 0),
}
# The trainer's names that both versions share.
TRAINER_NAMES = {
    "^emb.": "rwkv.embeddings.",
    "^blocks.": "rwkv.blocks.",
    "^ln_out.": "rwkv.ln_out.",
    ".ln0.": ".pre_ln.",
    ".att.": ".attention.",
    ".ffn.": ".feed_forward.",
}
OURS = NameMap({})  # of published Hub models too
# One of their axes, or both flattened.
HEADS = {"num_attention_heads": (f"{ATTENTION}time_faaaa", 0)}


class RwkvFormat(Format):
    """
    A format of this family.

    Attributes:
        places: size to the tensor and axis that it is read from.
        vectors_of_heads: tensors of the first block's time mixing with a row for each head.
    """

    places: Mapping[str, tuple[str, int]]
    vectors_of_heads: tuple[str, ...]

    def is_misused(self, name: str, value: Any, sizes: Mapping[str, Any]) -> bool:
        return name == "num_attention_heads" and value == sizes["head_size"]

    def read(self, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> InferredConfig:
        """Every size is read separately: the sizes of published models follow no formula."""
        sizes = lengths_of(found, self.places) | {"num_hidden_layers": count_blocks(found, "rwkv.blocks.")}
        heads, head_size, notes = self._heads(found, sizes["attention_hidden_size"], given)
        if "head_size_divisor" not in given:
            notes.append("`head_size_divisor` is not stored in the source; 8 was assumed, as in every World model")
        return InferredConfig(
            sizes | {"num_attention_heads": heads, "head_size": head_size},
            {"num_hidden_layers": sizes["num_hidden_layers"]},
            self.places | HEADS,
            tied=(EMBEDDINGS, HEAD) if given.get("tie_word_embeddings") is True else None,
            notes=notes,
        )

    def _heads(
        self, found: Mapping[str, SourceTensor], width: int, given: Mapping[str, Any]
    ) -> tuple[int, int, list[str]]:
        """Number and size of the heads, and notes. Some trainers flatten the vectors, which hides both numbers."""
        if not lengths_of(found, HEADS)["num_attention_heads"]:
            return 0, 0, []  # the list of faults will report it
        for name in self.vectors_of_heads:
            shape = found[ATTENTION + name].shape if ATTENTION + name in found else ()
            if len(shape) != 2:
                shape = without_ones(shape)
            if len(shape) == 2:
                return shape[0], shape[1], []
        head_size = given.get("head_size")
        notes = []
        if not isinstance(head_size, int) or head_size < 1:
            head_size = HEAD_SIZE
            notes.append(f"the size of a head is not stored in the file; {HEAD_SIZE} was assumed")
        if width % head_size:
            raise ConversionError(
                f"The per-head vectors are flattened and {width} channels are not a multiple of a head size of "
                f"{head_size}; give `head_size` in a configuration file."
            )
        return width // head_size, head_size, notes

    def fits(self, name: str, stored: Shape, shape: Shape, fields: Mapping[str, Any]) -> bool:
        """Vectors may have axes of length 1 or be flattened; decays may also have a row for each head."""
        if stored == shape:
            return True
        leaf = name.rpartition(".")[2]
        if not leaf.startswith("time_"):
            return False
        forms = {without_ones(shape), (prod(shape),)}
        if leaf == "time_decay":
            forms.add(without_ones((fields["num_attention_heads"], fields["head_size"])))
        return without_ones(stored) in forms


class Rwkv5Format(RwkvFormat):
    """
    Eagle.

    Attributes:
        attention: prefix of the first block's time mixing in the source.
    """

    model_type = "rwkv5"
    places = PLACES
    vectors_of_heads = ("time_faaaa", "time_decay")
    attention: str

    def matches(self, tensors: Tensors) -> bool:
        newer = f"{self.attention}time_maa_x" in tensors
        return has_gate(tensors, self.attention) and has_vector_decay(tensors, self.attention) and not newer


class Rwkv6Format(RwkvFormat):
    """
    Finch.

    Attributes:
        attention: prefix of the first block's time mixing in the source.
    """

    model_type = "rwkv6"
    places = PLACES | RANKS
    vectors_of_heads = ("time_faaaa",)
    attention: str

    def matches(self, tensors: Tensors) -> bool:
        return f"{self.attention}time_maa_x" in tensors


def has_gate(tensors: Tensors, attention: str) -> bool:
    """Whether block 0's time mixing, whose names start with `attention`, is gated: version 5.1 and later."""
    return any(f"{attention}{name}" in tensors for name in ("gate.weight", "time_mix_g", "time_mix_gate"))


def has_vector_decay(tensors: Tensors, attention: str) -> bool:
    """Whether every channel of a head has its own decay (version 5.2), instead of one for the whole head."""
    decay, key = tensors.get(f"{attention}time_decay"), tensors.get(f"{attention}key.weight")
    if decay is None or key is None or not key.shape:
        return True  # a damaged file: the list of faults is more helpful than a refusal
    return decay.elements == key.shape[0] or len(without_ones(decay.shape)) > 1


def untold_divisor(config: PreTrainedConfig) -> list[str]:
    """A note about a setting that the trainer's files do not store."""
    if (divisor := config.head_size_divisor) == 8:
        return []
    return [f"`head_size_divisor` is not stored in the tensors: readers of the file must know that it is {divisor}"]


def check_divisor(config: PreTrainedConfig, runtime: str) -> None:
    """
    Raises:
        ConversionError: if a runtime's epsilon for the norm of the heads differs from the model's.
    """
    if config.head_size_divisor != 8:
        raise ConversionError(
            f"`head_size_divisor` is {config.head_size_divisor}; {runtime} has 8 written into its code and would "
            "compute something else."
        )


def without_ones(shape: Shape) -> Shape:
    return tuple(length for length in shape if length != 1)
