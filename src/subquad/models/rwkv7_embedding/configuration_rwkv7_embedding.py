"""Configuration of EmbeddingRWKV's embedding model."""

from huggingface_hub.dataclasses import strict

from ..rwkv7.configuration_rwkv7 import Rwkv7Config


TASKS = ("cls", "sts", "retr")
# The texts of training: a query to be embedded; and a pair to be scored, whose document comes first. No token of the
# World vocabulary extends over the line break between the two parts, so the parts have the ids of the whole.
QUERY = "Instruct: {instruction}\nQuery: {query}"
DOCUMENT = "Instruct: {instruction}\nDocument: {document}\n"
QUERY_AFTER_DOCUMENT = "Query: {query}"


@strict
class Rwkv7EmbeddingConfig(Rwkv7Config):
    r"""
    Configuration of an EmbeddingRWKV (arXiv:2601.07861): Goose without a vocabulary head, and a head for each task.
    Published files have no configuration; the defaults are theirs.

    Args:
        end_token_id: the id at whose tokens the text is pooled. It ends every text.
        tasks: names of the heads.
        default_task: the head of calls without a task. It must be one of `tasks`.
        instruction: the task of retrieval, which is read before queries, and before documents in a reranker.

    For the other fields see [`Rwkv7Config`].
    """

    model_type = "rwkv7_embedding"
    base_model_tp_plan = {}
    base_model_fsdp_plan = {}

    end_token_id: int = 65535
    tasks: list[str] | tuple[str, ...] = TASKS
    default_task: str = "retr"
    instruction: str = "Given a query, retrieve documents that answer the query"
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = 0

    def __post_init__(self, **kwargs):
        if self.eos_token_id is None:
            self.eos_token_id = self.end_token_id
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Raises a ValueError if sizes do not fit together, before any tensor is created."""
        super().validate_architecture()
        if not 0 <= self.end_token_id < self.vocab_size:
            raise ValueError(f"`end_token_id` must be one of the {self.vocab_size} ids, got {self.end_token_id}.")
        if not self.tasks or not all(task.isidentifier() for task in self.tasks):
            raise ValueError(f"`tasks` must be names, at least one, got {self.tasks}.")
        if self.default_task not in self.tasks:
            raise ValueError(f"`default_task` must be one of {', '.join(self.tasks)}, got {self.default_task!r}.")
        if self.tie_word_embeddings:
            raise ValueError("`tie_word_embeddings` must be False: there is no head to tie the embeddings to.")


__all__ = ["Rwkv7EmbeddingConfig"]
