"""Model cards: the `README.md` of a model repository, filled in from templates."""

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

from ..models import REGISTRY
from ..models.architecture import MODELS
from .info import describe, labelled


# `card.md` is the frame of all cards, `use/` has one example per task. The text about an
# architecture is in its folder, and so is the citation, unless another folder has it.
TEMPLATES = Path(__file__).parent / "model_cards"
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")
# The beginning of a card that was made from a directory alone.
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
    The card of a saved model: metadata, an example that runs as printed, sizes, citation. Everything in it comes from
    the files or from `known`: no licence of the weights, no evaluation, no training data otherwise.

    Args:
        directory: a model directory with weights.
        repo_id: the repository that the example loads; the part after the last `/` is the model's name. If None, the
            name of the directory.
        has_tokenizer: whether the example uses a tokenizer. If None, it does if the directory has one.
        known: fields of [`ModelCardData`]: `license`, `base_model`, `language`, `datasets`, `eval_results`, ...
            `tags` are added to the architecture's tags. A `base_model` equal to `repo_id` is left out.

    Raises:
        ValueError: if the directory does not hold a model of this package.
        UnknownArgument: if a field looks like one of [`ModelCardData`], but is none.
    """
    from transformers import AutoConfig

    from ..modeling.arguments import UnknownArgument, nearest, parameter_names

    names = parameter_names(ModelCardData.__init__)
    for field in known.keys() - names:  # a card may have others, unknown to the Hub
        if hint := nearest(field, names, 0.8):
            raise UnknownArgument(f"ModelCardData has no field `{field}`.{hint}")
    directory = Path(directory).resolve()
    # A directory name may contain line breaks, which would begin new lines of the card.
    repo_id = "".join(letter if letter.isprintable() else "_" for letter in repo_id or directory.name)
    name = repo_id.rpartition("/")[2]
    info = describe(str(directory))
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if config.model_type not in REGISTRY:
        raise ValueError(f"{directory}: `model_type` is {config.model_type!r}; known are {', '.join(REGISTRY)}.")
    auto_class = _auto_class(config)
    if has_tokenizer is None:
        has_tokenizer = any((directory / file).is_file() for file in TOKENIZER_FILES)

    architecture = ModelCard(REGISTRY[config.model_type].card.read_text(encoding="utf-8"))
    paper = MODELS / architecture.data.paper / "paper.bib"
    task = getattr(architecture.data, "task", TASKS[auto_class])
    fields = {
        "library_name": "transformers",
        "license": "unknown",
        "model_name": name if known.get("eval_results") else None,
        "pipeline_tag": task,
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
        use=_fill(_template(f"use/{task if has_tokenizer else 'no-tokenizer'}"), **values),
        targets=json.dumps(REGISTRY[config.model_type].adapter_targets.projections),
        sizes=_table(["", ""], labelled(info).items()),
        evaluation=_evaluation(data.eval_results),
        license=data.license,
        citation=paper.read_text(encoding="utf-8").strip(),
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def base_model(directory: str | os.PathLike) -> str | None:
    """
    The Hub model that this one was loaded from, as named by its card (if [`model_card`] made it) or by its
    configuration (transformers wrote `_name_or_path` there up to version 4). None if the name looks like a path.
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
    Whether the directory's README.md is exactly what [`model_card`] makes for it, under any name, with or without a
    tokenizer. Such a card was never edited, so it may be replaced.
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
    """Name of the saved model's Auto class; the language model's if the configuration names none of our classes."""
    architecture = REGISTRY[config.model_type]
    classes = {head: auto_class for auto_class, head in architecture.heads.items()}
    return classes.get((config.architectures or [""])[0], architecture.lm_auto_class)


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
