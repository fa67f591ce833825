"""Files beside the weights: the tokenizer, and what sentence-transformers reads. It needs no code from here."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AddedToken

from .configuration_rwkv7_embedding import DOCUMENT, QUERY, QUERY_AFTER_DOCUMENT, Rwkv7EmbeddingConfig


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END = "<|embedding|>"  # the name of the token that ends texts
# The longest text in training. Of longer ones, the end was kept.
MAX_LENGTH = 2048
MARK = "\0"
MODULES = [
    # The argument `task` of `encode` chooses the head.
    ("", "sentence_transformers.base.modules.transformer.Transformer", {"kwargs": ["task"]}),
    ("1_Normalize", "sentence_transformers.base.modules.normalize.Normalize", {}),
]
# Makes one text of a pair. START and BETWEEN stand for string literals.
PAIR_TEMPLATE = (
    "{%- set text = namespace(document='', query='') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'document' -%}{%- set text.document = message['content'] -%}"
    "{%- elif message['role'] == 'query' -%}{%- set text.query = message['content'] -%}"
    "{%- else -%}{{ raise_exception('The roles are document and query, got ' ~ message['role'] ~ '.') }}{%- endif -%}"
    "{%- endfor -%}"
    "{{- START ~ text.document ~ BETWEEN ~ text.query ~ eos_token -}}"
)


def save_embedding_files(
    directory: str | os.PathLike, tokenizer: "PreTrainedTokenizerBase", config: Rwkv7EmbeddingConfig
) -> None:
    """
    Saves the tokenizer of an embedding model beside its weights, and the files with which
    `SentenceTransformer(directory)` computes embeddings by stock modules.

    Args:
        tokenizer: one of this package's, such as a new `RwkvWorldTokenizerFast`. It is changed: it ends every text
            with the token `end_token_id` of the configuration.
        config: the model's configuration.

    Raises:
        ValueError: if the tokenizer has another token with that id.
    """
    directory = Path(directory)
    _add_end(tokenizer, config.end_token_id, chat_template=None)
    tokenizer.add_eos_token = True
    if tokenizer("a")["input_ids"][-1] != config.end_token_id:
        raise ValueError(f"{type(tokenizer).__name__} does not end texts with a token of its own.")
    (directory / "chat_template.jinja").unlink(missing_ok=True)  # of the tokenizer before
    tokenizer.save_pretrained(directory)
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": kind, **more}
        for number, (path, kind, more) in enumerate(MODULES)
    ]
    _write(directory / "modules.json", modules)
    text = {"method": "forward", "method_output_name": "pooler_output"}
    _write(
        directory / "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": text},
            "module_output_name": "sentence_embedding",
        },
    )
    _write(
        directory / "config_sentence_transformers.json",
        {
            "model_type": "SentenceTransformer",
            "prompts": {"query": QUERY.format(instruction=config.instruction, query=""), "document": ""},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    )


def save_reranker_files(
    directory: str | os.PathLike, tokenizer: "PreTrainedTokenizerBase", config: Rwkv7EmbeddingConfig
) -> None:
    """
    Saves the tokenizer of a reranker beside its weights, with the chat template by which `CrossEncoder(directory)`
    makes one text of document and query. For the arguments see [`save_embedding_files`].
    """
    pair = DOCUMENT.format(instruction=config.instruction, document=MARK) + QUERY_AFTER_DOCUMENT.format(query="")
    # Jinja's literals have no pairs of surrogates. An instruction may contain the words START and BETWEEN.
    start, between = (json.dumps(part, ensure_ascii=False) for part in pair.split(MARK))
    _add_end(tokenizer, config.end_token_id, PAIR_TEMPLATE.replace("BETWEEN", between).replace("START", start))
    tokenizer.add_eos_token = False  # the template has it
    tokenizer.save_pretrained(directory)


def _add_end(tokenizer: "PreTrainedTokenizerBase", end_token_id: int, chat_template: str | None) -> None:
    if tokenizer.convert_tokens_to_ids(END) != end_token_id or END not in tokenizer.get_added_vocab():
        if len(tokenizer) > end_token_id:
            raise ValueError(f"The tokenizer has {len(tokenizer)} tokens: the id {end_token_id} is not free.")
        # Added tokens get the ids behind the vocabulary, one after the other.
        names = [*(f"<|reserved_{number}|>" for number in range(len(tokenizer), end_token_id)), END]
        tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)
    tokenizer.eos_token = END
    tokenizer.chat_template = chat_template
    tokenizer.model_max_length = MAX_LENGTH
    tokenizer.truncation_side = "left"
    tokenizer.init_kwargs |= {"truncation_side": "left", "response_template": None}


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


__all__ = ["save_embedding_files", "save_reranker_files"]
