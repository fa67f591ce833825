"""Configuration of EmbeddingRWKV's reranker."""

from typing import Any

from huggingface_hub.dataclasses import strict

from ..rwkv7.configuration_rwkv7 import Rwkv7Config
from ..rwkv7_embedding.configuration_rwkv7_embedding import Rwkv7EmbeddingConfig


@strict
class Rwkv7RerankerConfig(Rwkv7EmbeddingConfig):
    r"""
    Configuration of an EmbeddingRWKV's reranker (arXiv:2601.07861) together with its embedding model, whose fields are
    at the top.

    Args:
        reranker_config: a [`Rwkv7Config`] of the reranker's blocks, or its fields. Its vocabulary is one learned
            token; widths of model and heads are the embedding model's. If None, it has as many layers.
        reranker_layers: for each block of the reranker, the layer of the embedding model whose state it reads. If
            None, the layer with the same number.

    For the other fields see [`Rwkv7EmbeddingConfig`].
    """

    model_type = "rwkv7_reranker"
    sub_configs = {"reranker_config": Rwkv7Config}

    reranker_config: dict[str, Any] | Rwkv7Config | None = None
    reranker_layers: list[int] | None = None

    def __post_init__(self, **kwargs):
        if not isinstance(self.reranker_config, Rwkv7Config):
            layers = self.num_hidden_layers if self.reranker_layers is None else len(self.reranker_layers)
            same = {name: getattr(self, name) for name in ("hidden_size", "head_dim", "num_heads", "norm_eps")}
            same |= {name: kwargs[name] for name in self.attribute_map if kwargs.get(name) is not None}
            fields = {"vocab_size": 1, "num_hidden_layers": layers, "use_cache": False, **same}
            fields |= self.reranker_config or {}
            fields.pop("model_type", None)
            from_file = kwargs.get("_from_file", False)
            self.reranker_config = Rwkv7Config.from_dict(fields) if from_file else Rwkv7Config(**fields)
        if not {"num_labels", "id2label"} & kwargs.keys():
            kwargs["num_labels"] = 1
        super().__post_init__(**kwargs)

    @property
    def read_layers(self) -> list[int]:
        """For each block of the reranker, the layer of the embedding model whose state it reads."""
        layers = self.reranker_layers
        return [*range(self.reranker_config.num_hidden_layers)] if layers is None else layers

    def validate_architecture(self):
        """Raises a ValueError if sizes do not fit together, before any tensor is created."""
        super().validate_architecture()
        reranker, read = self.reranker_config, self.read_layers
        reranker.validate_architecture()
        reranker.validate_names()
        for name, size in {"vocab_size": 1, "hidden_size": self.hidden_size, "head_dim": self.head_dim}.items():
            if (found := getattr(reranker, name)) != size:
                raise ValueError(f"`reranker_config`: its `{name}` must be {size}, got {found}.")
        if len(read) != reranker.num_hidden_layers:
            raise ValueError(
                f"`reranker_layers` must have {reranker.num_hidden_layers} numbers, one for each layer of "
                f"`reranker_config`, got {len(read)}."
            )
        if wrong := [layer for layer in read if not 0 <= layer < self.num_hidden_layers]:
            raise ValueError(
                f"`reranker_layers` must be layers of the embedding model, 0 to {self.num_hidden_layers - 1}, got "
                f"{wrong[0]}."
            )
        if self.num_labels != 1:
            raise ValueError(f"`num_labels` must be 1: the reranker gives one score, got {self.num_labels}.")

    # package only
    def set_sizes_from_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """See [`Rwkv7Config`]; the names of the reranker's own tensors begin with `reranker.`."""
        own = {name: shape for name, shape in shapes.items() if name.startswith("reranker.")}
        super().set_sizes_from_shapes({name: shape for name, shape in shapes.items() if name not in own})
        self.reranker_config.set_sizes_from_shapes(own)


__all__ = ["Rwkv7RerankerConfig"]
