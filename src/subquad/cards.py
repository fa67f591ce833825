"""Model cards: the `README.md` of a model repository, made of the templates in `model_cards/`."""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from . import ARCHITECTURES, lm_auto_class
from .info import describe, labelled


# One file an architecture; `card.md` is what all cards have, `use/` one example a task, `papers/` what is cited.
TEMPLATES = Path(__file__).parent / "model_cards"
NAMES = {"rwkv5": "eagle", "rwkv6": "finch", "avey-b": "avey_b"}
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")
# What a card begins with that was made of a directory alone.
BEGINNING = re.compile(r"---\n(?:base_model: (?P<base>\S+)\n)?(?:.+\n)*- subquad\n---\n\n# (?P<name>.+)\n")
TASKS = {
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}


def model_card(
    directory: str | os.PathLike,
    *,
    repo_id: str | None = None,
    has_tokenizer: bool | None = None,
    **known: Any,
) -> ModelCard:
    """
    The card of a saved model: metadata, an example that runs as it is printed, sizes, citation. It says nothing that
    neither the files nor `known` tell: no licence of the weights, no evaluation, no training data.

    Args:
        directory: a model directory with weights.
        repo_id: what the example loads, and the model's name after the last `/`; the directory's name where None.
        has_tokenizer: whether the example uses a tokenizer; where None, it does if the directory has one.
        known: fields of [`ModelCardData`]: `license`, `base_model`, `language`, `datasets`, `eval_results`, ...;
            `tags` are added to those of the architecture, and a `base_model` that is `repo_id` is left out.

    Raises:
        ValueError: where the directory holds no model of an architecture of this package.
    """
    from transformers import AutoConfig

    directory = Path(directory).resolve()
    repo_id = repo_id or directory.name
    name = repo_id.rpartition("/")[2]
    info = describe(str(directory))
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if config.model_type not in ARCHITECTURES:
        raise ValueError(f"{directory}: `model_type` is {config.model_type!r}; known are {', '.join(ARCHITECTURES)}.")
    auto_class = _auto_class(config)
    if has_tokenizer is None:
        has_tokenizer = any((directory / file).is_file() for file in TOKENIZER_FILES)

    architecture = ModelCard(_template(NAMES.get(config.model_type, config.model_type)))
    paper = TEMPLATES / "papers" / f"{architecture.data.paper}.bib"
    fields = {
        "library_name": "transformers",
        "license": "unknown",
        "model_name": name if known.get("eval_results") else None,
        "pipeline_tag": TASKS[auto_class],
        **known,
        "tags": [*architecture.data.tags, "subquad", *known.get("tags", ())],
    }
    if fields.get("base_model") == repo_id:
        del fields["base_model"]
    data = ModelCardData(**fields)

    values = config.get_text_config().to_dict() | {
        "auto_class": auto_class,
        "path": json.dumps(repo_id, ensure_ascii=False),
    }
    body = _fill(
        _template("card"),
        name=name,
        architecture=_fill(architecture.text, **values),
        use=_fill(_template(f"use/{TASKS[auto_class] if has_tokenizer else 'no-tokenizer'}"), **values),
        sizes=_table(["", ""], labelled(info).items()),
        evaluation=_evaluation(data.eval_results),
        license=data.license,
        citation=paper.read_text(encoding="utf-8").strip(),
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def base_model(directory: str | os.PathLike) -> str | None:
    """
    The model on the Hub that this one was loaded from, where its card, if [`model_card`] made it, or its configuration
    names it: transformers wrote `_name_or_path` there up to version 4. None where it names a path, as far as that
    shows.
    """
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    beginning = BEGINNING.match(_readme(directory))
    name = (beginning and beginning["base"]) or config.get("_name_or_path") or ""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name if "/" in name and not Path(name).exists() else None


def is_own_card(directory: str | os.PathLike) -> bool:
    """
    Whether the directory's README.md is word for word what [`model_card`] makes of it, under any name, with a
    tokenizer or without: what nobody wrote may be made anew for another name.
    """
    text = _readme(directory)
    if (beginning := BEGINNING.match(text)) is None:
        return False
    known = {"repo_id": beginning["name"], "base_model": beginning["base"]}
    return any(text == str(model_card(directory, has_tokenizer=tokenizer, **known)) for tokenizer in (True, False))


def _readme(directory: str | os.PathLike) -> str:
    path = Path(directory) / "README.md"
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _auto_class(config) -> str:
    """Name of the saved model's Auto class, that of the language model where the configuration names none of ours."""
    classes = {head: auto_class for auto_class, head in ARCHITECTURES[config.model_type][2].items()}
    return classes.get((config.architectures or [""])[0], lm_auto_class(config.model_type))


def _template(name: str) -> str:
    return (TEMPLATES / f"{name}.md").read_text(encoding="utf-8")


def _fill(template: str, **values: Any) -> str:
    return Template(template).substitute(values).strip()


def _table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [list(header), *rows]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _evaluation(results: list[EvalResult] | None) -> str:
    if not results:
        return "No measurements were given for this card."
    rows = ((x.dataset_name, x.dataset_split or "", x.metric_name or x.metric_type, x.metric_value) for x in results)
    return _table(["dataset", "split", "metric", "value"], rows)


__all__ = ["base_model", "is_own_card", "model_card"]
