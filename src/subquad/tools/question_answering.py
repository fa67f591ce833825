"""The pipeline "question-answering", which transformers 5 removed: it answers questions about a passage."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers.pipelines.base import ChunkPipeline

from ..modeling.arguments import check_counts, parameter_names, refuse_unknown
from ..models import REGISTRY


CONTEXT, NO_ANSWER = 1, 2  # role of a token: part of the passage, or the token whose logits mean "no answer"
DEFAULT_STRIDE = 128
UNLIMITED = 10**9  # a `model_max_length` above this means that the tokenizer has no limit


@dataclass
class Passage:
    """
    A passage and its n tokens.

    Attributes:
        context: the passage as it was given.
        starts, ends: the characters where the text of each token begins and ends, without white space, (n).
        can_start, can_end: whether an answer may begin or end with each token, (n). An answer never begins or ends
            with white space. If several tokens spell one character, an answer may only begin with the first of them
            and end with the last. So two different pairs of tokens are two different answers.
    """

    context: str
    starts: np.ndarray
    ends: np.ndarray
    can_start: np.ndarray
    can_end: np.ndarray


def read_passage(context: str, offsets: np.ndarray) -> Passage:
    """The [`Passage`] of a text, given the characters [begin, end) of each of its tokens, (n, 2)."""
    text = np.fromiter((not character.isspace() for character in context), bool, len(context))
    index = np.arange(len(context))
    following = np.minimum.accumulate(np.where(text, index, len(context))[::-1])[::-1]
    preceding = np.maximum.accumulate(np.where(text, index, -1))
    begins, ends = offsets.T
    starts = np.append(following, len(context))[begins]
    ends = np.append(preceding, -1)[ends - 1] + 1
    real = (begins < offsets[:, 1]) & (starts < ends)
    can_start, can_end = real.copy(), real.copy()
    real = np.flatnonzero(real)
    can_start[real[1:]] = np.diff(starts[real]) > 0
    can_end[real[:-1]] = np.diff(ends[real]) > 0
    return Passage(context, starts, ends, can_start, can_end)


def position_limit(model: nn.Module) -> int | None:
    """Number of positions that a model has; None if its configuration does not limit it."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    for name, module in model.named_modules():
        # RoBERTa and similar models count positions from `padding_idx` + 1 on.
        if "position" in name and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return limit - module.padding_idx - 1
    return limit


def check(example: Any) -> Mapping:
    """
    Returns the example.

    Raises:
        TypeError, ValueError: if it is not a question and a passage; the message names the argument.
    """
    if not isinstance(example, Mapping):
        raise TypeError(f"`inputs` must hold dictionaries with `question` and `context`, got {example!r:.80}.")
    for name in ("question", "context"):
        value = example.get(name)
        if value is None:
            raise ValueError(f"`{name}` is missing.")
        if not isinstance(value, str):
            raise TypeError(f"`{name}` must be a string, got {type(value).__name__}.")
        if not value.strip():
            raise ValueError(f"`{name}` is empty.")
    return example


def pair(inputs: Mapping) -> Mapping | list[Mapping]:
    """One example, or a list of examples if `question` or `context` is a list."""
    question, context = inputs.get("question"), inputs.get("context")
    lists = [value for value in (question, context) if isinstance(value, list | tuple)]
    if not lists:
        return check(inputs)
    if len({len(values) for values in lists}) > 1:
        raise ValueError(f"`question` has {len(question)} entries, `context` has {len(context)}.")
    columns = [value if isinstance(value, list | tuple) else [value] * len(lists[0]) for value in (question, context)]
    return [check({"question": a, "context": b}) for a, b in zip(*columns, strict=True)]


def cut(others: int, tokens: int, limit: int | None, stride: int | None) -> Iterator[tuple[int, int]]:
    """
    Yields the pieces [begin, end) of a passage. Neighbouring pieces have `stride` tokens in common.

    Args:
        others: number of tokens that are read together with each piece: the question and special tokens.
        tokens: number of tokens of the passage.
        limit: maximum number of tokens that can be read in one call; None for any number.
        stride: by default 128, or half of the room left by the question if that is less.

    Raises:
        ValueError: if the question is too long, or `stride` is.
    """
    if limit is None or others + tokens <= limit:
        yield 0, tokens
        return
    room = limit - others
    if room < 1:
        raise ValueError(
            f"`question` is too long: with special tokens it has {others} tokens, and at most {limit} can be read."
        )
    if stride is None:
        stride = min(DEFAULT_STRIDE, room // 2)
    if stride >= room:
        raise ValueError(f"`doc_stride` must be less than {room}, the room that the question leaves, got {stride}.")
    for begin in range(0, tokens, room - stride):
        end = min(begin + room, tokens)
        yield begin, end
        if end == tokens:
            return


class QuestionAnsweringPipeline(ChunkPipeline):
    """
    Finds the part of a passage that answers a question, with any model that has a question answering head.

        qa = pipeline("question-answering", model="./avey-b-squad")
        qa(question="Where is the Atomium?", context="The Atomium is in Brussels.")
        # {"score": 0.98, "start": 18, "end": 26, "answer": "Brussels"}

    An answer consists of consecutive tokens of the passage; `start` and `end` are characters of the passage. Its score
    is its probability among all possible answers: the softmax over the sums of the start logit of the first token and
    the end logit of the last token.

    The architectures of this library read a passage of any length in one call. For another model, a passage that is
    too long is cut into pieces that overlap. An answer that is in two pieces gets the larger logits.

    Options of `pipeline(...)` and of a call:
        top_k: number of answers. 1 (the default) gives a dictionary, more give a list of them, the best first.
        max_answer_len: maximum number of tokens of an answer. Default: 15.
        handle_impossible_answer: whether "no answer" (an empty one, with `start` and `end` 0) may be the best. Its
            logits come from the [CLS] token, or from the first token if there is no [CLS] token. With several
            pieces, the piece with the lowest logits for "no answer" counts.
        max_seq_len: maximum number of tokens of a piece, with question and special tokens. Default: the limit of the
            model and its tokenizer.
        doc_stride: number of tokens that a piece shares with the one before it. Default: 128, or half of the room
            left by the question if that is less.
        padding: `"max_length"` pads every piece to `max_seq_len`, for models that are compiled for one length. The
            pieces of a batch are always padded to the longest.
        batch_size: number of pieces that are read in one call.
    """

    _load_tokenizer = True
    _load_processor = _load_image_processor = _load_video_processor = _load_feature_extractor = False
    default_input_names = "question,context"

    def __init__(self, model, tokenizer=None, **kwargs):
        if tokenizer is None or not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                "`tokenizer` must be a fast tokenizer, which knows the characters of each token, got "
                f"{'none' if tokenizer is None else type(tokenizer).__name__}."
            )
        self.position_limit = position_limit(model)
        super().__init__(model=model, tokenizer=tokenizer, **kwargs)

    def _sanitize_parameters(
        self,
        top_k: int | None = None,
        max_answer_len: int | None = None,
        handle_impossible_answer: bool | None = None,
        max_seq_len: int | None = None,
        doc_stride: int | None = None,
        padding: bool | str | None = None,
        **others,
    ) -> tuple[dict, dict, dict]:
        known = parameter_names(QuestionAnsweringPipeline._sanitize_parameters) | {"question", "context", "batch_size"}
        refuse_unknown(others, known, "The pipeline for question answering")
        cutting = {"max_seq_len": max_seq_len, "doc_stride": doc_stride}
        choosing = {"top_k": top_k, "max_answer_len": max_answer_len}
        for name, value in (cutting | choosing).items():
            least = 0 if name == "doc_stride" else 1
            if value is not None:
                check_counts(least, **{name: value})
        if max_seq_len is not None and self.position_limit is not None and max_seq_len > self.position_limit:
            raise ValueError(f"`max_seq_len` is {max_seq_len}, the model has {self.position_limit} positions.")
        if padding not in (None, False, True, "do_not_pad", "longest", "max_length"):
            raise ValueError(f"`padding` must be True, False, 'longest' or 'max_length', got {padding!r}.")
        cutting["padding"] = padding
        choosing["handle_impossible_answer"] = handle_impossible_answer
        cutting, choosing = (
            {name: value for name, value in options.items() if value is not None} for options in (cutting, choosing)
        )
        return cutting, {}, choosing

    def __call__(self, inputs: Any = None, *, question=None, context=None, **kwargs):
        """
        Args:
            inputs: a dictionary with `question` and `context`, a list, dataset or generator of these; or give
            question, context: strings, or lists of strings; if one is a list, the other may be a single string.
            kwargs: options, see the class.

        Returns:
            For one question a dictionary with `score`, `start`, `end` and `answer`, or a list of such dictionaries if
            `top_k` is above 1. For a list of questions, a list of these results; for a dataset or a generator, an
            iterator over them.

        Raises:
            TypeError, ValueError: if an argument is missing, empty or of the wrong type; the message names it.
        """
        if inputs is None:
            inputs = {"question": question, "context": context}
        elif question is not None or context is not None:
            raise ValueError("Give either `inputs` or `question` and `context`, not both.")
        if isinstance(inputs, Mapping):
            inputs = pair(inputs)
        elif isinstance(inputs, list | tuple):
            inputs = [check(example) for example in inputs]
        elif isinstance(inputs, Iterable) and not isinstance(inputs, str | Dataset):
            inputs = (example for example in inputs)
        elif not isinstance(inputs, Dataset):
            check(inputs)
        return [] if inputs == [] else super().__call__(inputs, **kwargs)

    def default_length(self) -> int | None:
        """Maximum number of tokens of a piece by default; None for any number."""
        if self.model.config.model_type in REGISTRY:
            return None
        limits = [self.position_limit, self.tokenizer.model_max_length]
        return min((limit for limit in limits if limit is not None and limit < UNLIMITED), default=None)

    def preprocess(self, example, max_seq_len=None, doc_stride=None, padding=False) -> Iterator[dict[str, Any]]:
        """Yields the pieces of a passage as inputs of the model, with batch size 1: (1, tokens)."""
        example = check(example)
        encoding = self.tokenizer(
            *(example["question"], example["context"]),
            return_offsets_mapping=True,
            return_attention_mask=True,
            truncation=False,
            verbose=False,  # no warning about a long text: it is cut below
        )
        sequences = np.array([-1 if text is None else text for text in encoding.sequence_ids(0)])
        where = np.flatnonzero(sequences == 1)
        passage = read_passage(example["context"], np.array(encoding.pop("offset_mapping"))[where].reshape(-1, 2))
        for name, legible in (("question", 0 in sequences), ("context", passage.can_start.any())):
            if not legible:
                raise ValueError(f"`{name}` has nothing that the tokenizer can read: {example[name]!r:.80}.")

        row = {name: torch.tensor(values) for name, values in encoding.items()}
        row["role"] = torch.from_numpy(np.where(sequences == 1, CONTEXT, 0))
        cls = (sequences == -1) & (np.array(encoding["input_ids"]) == self.tokenizer.cls_token_id)
        row["role"][cls.argmax()] = NO_ANSWER
        before, after = torch.arange(where[0]), torch.arange(where[-1] + 1, len(sequences))
        limit = self.default_length() if max_seq_len is None else max_seq_len
        if padding == "max_length" and limit is None:
            raise ValueError("`padding` 'max_length' needs `max_seq_len`, since the model reads any length.")
        for begin, end in cut(len(sequences) - len(where), len(where), limit, doc_stride):
            tokens = torch.cat((before, where[0] + torch.arange(begin, end), after))
            piece = {name: values[tokens] for name, values in row.items()}
            if padding == "max_length":
                piece = {name: self.pad(name, values, limit - len(tokens)) for name, values in piece.items()}
            piece = {name: values[None] for name, values in piece.items()}
            yield piece | {"passage": passage, "begin": begin, "is_last": end == len(where)}

    def pad(self, name: str, values: torch.Tensor, missing: int) -> torch.Tensor:
        if self.tokenizer.pad_token_id is None:
            raise ValueError("`padding` 'max_length' needs a `tokenizer` with a padding token.")
        value = self.tokenizer.pad_token_id if name == "input_ids" else 0
        return F.pad(values, (missing, 0) if self.tokenizer.padding_side == "left" else (0, missing), value=value)

    def _forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        rest = {name: inputs.pop(name) for name in ("role", "passage", "begin", "is_last")}
        outputs = self.model(**inputs)
        if not hasattr(outputs, "start_logits") or not hasattr(outputs, "end_logits"):
            raise ValueError(
                "`model` must have a question answering head, as in AutoModelForQuestionAnswering; "
                f"{type(self.model).__name__} does not return `start_logits` and `end_logits`."
            )
        return {"start": outputs.start_logits.float(), "end": outputs.end_logits.float(), **rest}

    def postprocess(self, pieces, top_k=1, max_answer_len=15, handle_impossible_answer=False):
        """The best answers of all pieces. Time and memory grow with `tokens * max_answer_len`."""
        passage = pieces[0]["passage"]
        length = len(passage.starts)
        width = min(max_answer_len, length)
        logits = np.full((length, width), -np.inf, np.float32)  # of the answer from token i to token i + j
        no_answer = np.float32(np.inf)
        for piece in pieces:
            start, end, role = (piece[name][0].numpy() for name in ("start", "end", "role"))
            no_answer = min(no_answer, (start[role == NO_ANSWER] + end[role == NO_ANSWER])[0])
            tokens = slice(piece["begin"], piece["begin"] + int((role == CONTEXT).sum()))
            start = np.where(passage.can_start[tokens], start[role == CONTEXT], -np.inf)
            end = np.where(passage.can_end[tokens], end[role == CONTEXT], -np.inf)
            end = np.pad(end, (0, width - 1), constant_values=-np.inf)
            ends = np.lib.stride_tricks.sliding_window_view(end, width)
            logits[tokens] = np.maximum(logits[tokens], start[:, None] + ends)

        logits = np.append(logits, no_answer) if handle_impossible_answer else logits.reshape(-1)
        best = logits.max()
        if np.isnan(best):
            raise ValueError("`model` gave logits that are not numbers (NaN).")
        if best == -np.inf:
            raise ValueError(f"`max_answer_len` {max_answer_len} is too small: every answer has more tokens.")
        scores = np.exp(logits - best)
        total = scores.sum(dtype=np.float64)
        count = min(top_k, int((logits > -np.inf).sum()))
        chosen = np.argpartition(logits, -count)[-count:]
        answers = []
        for i in chosen[np.argsort(-logits[chosen], kind="stable")].tolist():
            first, last = i // width, i // width + i % width
            start, end = (0, 0) if i == length * width else (int(passage.starts[first]), int(passage.ends[last]))
            answer = passage.context[start:end]
            answers.append({"score": float(scores[i] / total), "start": start, "end": end, "answer": answer})
        return answers[0] if top_k == 1 else answers
