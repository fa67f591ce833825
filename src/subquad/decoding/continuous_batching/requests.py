"""Requests of continuous batching: what each asks for, what has been generated, and how its tokens are chosen."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.generation import StopStringCriteria, logits_process
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ..next_turn import NextTurnCriteria


if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Options of `generate` that continuous batching cannot follow, and their values that change nothing.
UNSUPPORTED: dict[str, tuple] = {
    "num_beams": (None, 1),
    "guidance_scale": (None, 1),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "max_time": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "forced_eos_token_id": (None,),
    "token_healing": (None, False),
    "prefill_chunk_size": (None,),
    "cache_implementation": (None, "dynamic"),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
# Processors that look at the scores alone, so they process the rows of several requests together.
OF_SCORES = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)


class Options:
    """
    What requests with the same options of `generate` have in common.

    Args:
        model: the model that generates.
        generation_config: the options; those that are None are the model's own.
        overrides: options that take precedence.
        tokenizer: the tokenizer of `stop_strings`.

    Raises:
        ValueError: if an option is unknown, or continuous batching cannot follow it; the message names it.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        generation_config: GenerationConfig,
        overrides: dict[str, Any],
        tokenizer: Any = None,
    ):
        # Options are looked up by the identity of their tokenizer, so it must live as long.
        self.model, self.tokenizer = model, tokenizer
        config, unknown = model._prepare_generation_config(generation_config)
        unknown |= config.update(**overrides)
        if unknown:
            raise ValueError(f"`{next(iter(unknown))}` is not an option of `generate`.")
        for name, allowed in UNSUPPORTED.items():
            if (value := getattr(config, name, None)) not in allowed:
                raise ValueError(f"`{name}` is {value!r}: continuous batching does not support it.")
        if config.eos_token_id in (-1, [-1]):  # as transformers' managers understand it
            config.eos_token_id = None
        config.validate()
        self.config = config
        model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=model.device)
        lengths = (overrides.get("max_length"), generation_config.max_length, model.generation_config.max_length)
        self._has_length = any(length is not None for length in lengths)
        stops = config.eos_token_id
        self.stops = frozenset(stops if isinstance(stops, list) else [-1 if stops is None else stops])
        self.stop_strings = None
        if config.stop_strings is not None:
            if tokenizer is None:
                raise ValueError(f"`stop_strings` is {config.stop_strings!r}: they need a `tokenizer`.")
            self.stop_strings = StopStringCriteria(tokenizer, config.stop_strings)
        self._processors = self._new_processors(1)
        self.reads_ids = not all(isinstance(each, OF_SCORES) for each in self._processors)

    def _new_processors(self, length: int) -> logits_process.LogitsProcessorList:
        device = self.model.device
        return self.model._get_logits_processor(self.config, input_ids_seq_length=length, device=device)

    def limit(self, length: int) -> int:
        """
        The number of new tokens after a prompt of `length` tokens.

        Raises:
            ValueError: if there is no room for any.
        """
        limit = self.config.max_new_tokens
        if limit is None:
            limit = self.config.max_length - (length if self._has_length else 0)
        if limit < 1:
            raise ValueError(f"{length} tokens are given, which leaves none of a `max_length` of {length + limit}.")
        return limit

    def processors_for(self, length: int) -> logits_process.LogitsProcessorList:
        """The processors for a prompt of `length` tokens."""
        return self._new_processors(length) if self.reads_ids else self._processors


@dataclass(eq=False)
class Request:
    """
    A request and its answer.

    Args:
        request_id: its name.
        prompt_ids: the ids of the prompt.
        options: its options.
        seed: the seed of its own random numbers; None shares those of the others.
        streaming: whether each token is delivered.
        record_timestamps: whether the time of each token is kept.
    """

    request_id: str
    prompt_ids: list[int]
    options: Options
    seed: int | None = None
    streaming: bool = False
    record_timestamps: bool = False
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)
    status: RequestStatus = RequestStatus.PENDING
    error: str | None = None
    created_time: float = field(default_factory=time.perf_counter)
    began: float = -1
    ended: float = -1
    # The version of the model for a prefix cache; None once the model may have changed.
    version: int | None = None

    def __post_init__(self):
        ids, vocabulary = self.prompt_ids, self.options.model.config.get_text_config().vocab_size
        if not ids:
            raise ValueError("`input_ids` is empty.")
        if wrong := [each for each in ids if type(each) is not int or not 0 <= each < vocabulary]:
            raise ValueError(f"`input_ids` must be whole numbers from 0 to {vocabulary - 1}, got {wrong[0]!r}.")
        self.limit = self.options.limit(len(ids))
        self.processors = self.options.processors_for(len(ids))
        device = self.options.model.device
        self.generator = None if self.seed is None else torch.Generator(device).manual_seed(self.seed)
        self._next_turn = None
        if chat_stops := getattr(self.options.config, "chat_stops", None):
            criteria = NextTurnCriteria(chat_stops, torch.tensor([ids]))
            if criteria.chats.any():
                self._next_turn = criteria, frozenset(criteria.ids["turns"][:, 1].tolist())

    @property
    def text(self) -> list[int]:
        """The prompt and what has been generated."""
        return self.prompt_ids + self.generated_tokens

    @property
    def is_finished(self) -> bool:
        return self.status in (RequestStatus.FINISHED, RequestStatus.FAILED)

    def begin(self) -> None:
        """Called when the request is first read."""
        if self.status == RequestStatus.PENDING:
            self.status, self.began = RequestStatus.PREFILLING, time.perf_counter()

    def add(self, token: int, logprob: float | None) -> None:
        """Takes a generated token, which may be the last one."""
        self.status = RequestStatus.DECODING
        self.generated_tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.record_timestamps:
            self.timestamps.append(time.perf_counter())
        if token in self.options.stops or len(self.generated_tokens) >= self.limit or self._stops_behind(token):
            self.status, self.ended = RequestStatus.FINISHED, time.perf_counter()

    def _stops_behind(self, token: int) -> bool:
        """Whether the text has come to a stop string, or to the next turn of a chat."""
        criteria = [] if self.options.stop_strings is None else [self.options.stop_strings]
        if self._next_turn is not None and token in self._next_turn[1]:
            criteria.append(self._next_turn[0])
        text = torch.tensor([self.text]) if criteria else None
        return any(bool(each(text, None).all()) for each in criteria)

    def fail(self, error: BaseException | str) -> None:
        """Ends the request with an error."""
        self.status, self.ended = RequestStatus.FAILED, time.perf_counter()
        self.error = str(error) or type(error).__name__

    def to_output(self) -> GenerationOutput:
        """The answer so far."""
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            generated_tokens=self.generated_tokens[:],
            logprobs=self.logprobs[:],
            error=self.error,
            status=self.status,
            created_time=self.created_time,
            lifespan=(self.began, self.ended),
            timestamps=self.timestamps[:] if self.record_timestamps else None,
        )


def choose_tokens(
    requests: list[Request], logits: torch.Tensor, generator: torch.Generator | None, with_logprobs: bool
) -> None:
    """
    Gives each request its next token, as `generate` would. A request whose options fail is ended with the error.

    Args:
        requests: the requests, in the order of the rows.
        logits: (rows, vocabulary).
        generator: the random numbers of requests without a seed; None takes torch's.
        with_logprobs: whether the requests keep the logarithm of each token's probability.
    """
    groups: dict[Any, list[int]] = {}
    for row, request in enumerate(requests):
        if request.processors:
            groups.setdefault(request if request.options.reads_ids else request.options, []).append(row)
    scores = logits.to(torch.float32, copy=bool(groups))
    for rows in groups.values():
        first = requests[rows[0]]
        ids = torch.tensor([first.text], device=logits.device) if first.options.reads_ids else None
        try:
            part = scores[rows]
            for processor in first.processors:
                part = processor(ids, part)
            scores[rows] = part
        except Exception as error:  # of one request's options: the others go on
            fail_all((requests[row] for row in rows), error)
    tokens = scores.argmax(-1)
    sampled = [row for row, each in enumerate(requests) if each.options.config.do_sample and not each.is_finished]
    together = [row for row in sampled if requests[row].generator is None]
    for rows in ([together] if together else []) + [[row] for row in sampled if requests[row].generator is not None]:
        own = requests[rows[0]].generator
        tokens[rows] = torch.multinomial(scores[rows].softmax(-1), 1, generator=own or generator)[:, 0]
    logprobs = [None] * len(requests)
    if with_logprobs:
        logprobs = scores.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
    for request, token, logprob in zip(requests, tokens.tolist(), logprobs, strict=True):
        if not request.is_finished:
            request.add(token, logprob)


def fail_all(requests: Iterable[Request], error: BaseException | str) -> None:
    """Ends requests with an error."""
    for request in requests:
        request.fail(error)
