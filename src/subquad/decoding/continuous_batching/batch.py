"""What continuous batching does between two tokens: whose prompt is read, and who gets a token."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import is_psutil_available, logging

from ...modeling.cache import RecurrentCache
from ...modeling.versions import named_cache
from .requests import Request, choose_tokens, fail_all
from .rows import Rows


if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.get_logger(__name__)
# How much longer than the first of some prompts the others may be, and how much shorter, to be read together.
SIMILAR = 1.25
# The number of waiting requests among which those with similar prompts are looked for.
LOOKED_AT = 256


@dataclass(eq=False)
class Prompts:
    """
    Prompts of similar length that are read together, padded on the left, in pieces.

    Args:
        requests: the requests of each row; those with the same text share it.
        ids: int64 (rows, tokens), on the CPU.
        mask: bool (rows, tokens), False for padding, on the CPU; None if there is none.
        cache: the states after the first `read` tokens.
        reading: reads all but the last token from the states of a prefix cache; None if there is none.
    """

    requests: list[list[Request]]
    ids: torch.Tensor
    mask: torch.Tensor | None
    cache: RecurrentCache
    read: int = 0
    reading: Any = None

    @property
    def places(self) -> dict[Request, int]:
        """The requests that have not ended, and the row of each."""
        return {each: row for row, several in enumerate(self.requests) for each in several if not each.is_finished}

    @property
    def is_read(self) -> bool:
        """Whether all tokens have been read."""
        return self.read == self.ids.shape[1]


class Batch:
    """
    The requests of one model: those that wait, those whose prompts are being read, and those that run.

    Args:
        model: the model that generates.
        most: the largest number of running requests.
        piece: the number of prompt tokens that are read between two decoding steps.
        memory: the part of the free memory that states may take, from 0 to 1.
        generator: the random numbers of requests without a seed; None takes torch's.
        with_logprobs: whether the requests keep log-probabilities.
        prefix_cache: a [`PrefixCache`], or None.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        most: int,
        piece: int,
        memory: float,
        generator: torch.Generator | None = None,
        with_logprobs: bool = False,
        prefix_cache: Any = None,
    ):
        self.model, self.most, self.piece, self.memory = model, most, piece, memory
        self.generator, self.with_logprobs, self.prefix_cache = generator, with_logprobs, prefix_cache
        self.waiting: deque[Request] = deque()
        self.prompts: Prompts | None = None
        self.rows = Rows(model)
        self._is_measured = False

    @property
    def has_work(self) -> bool:
        """Whether there is a request that has not ended."""
        return bool(self.waiting) or self.prompts is not None or self.rows.cache is not None

    def cancel(self, requests: list[Request]) -> None:
        """Ends requests before their time."""
        gone = set(requests)
        fail_all(requests, "The request was cancelled.")
        self.waiting = deque(each for each in self.waiting if each not in gone)
        self.rows.forget(requests)
        if self.prompts is not None and not self.prompts.places:
            self.prompts = None

    def forget_version(self) -> None:
        """Called when the model may have changed: no state of a text that was begun before is kept for others."""
        begun = [] if self.prompts is None else list(self.prompts.places)
        for request in [*begun, *self.rows.requests]:
            request.version = None
        if self.prompts is not None and self.prompts.reading is not None:
            self.prompts.reading.version = None

    def step(self) -> Iterator[list[Request]]:
        """
        Reads a piece of prompts, then lets each running request generate a token. If one of the two fails, its
        requests end with the error; if memory was short, they are read again, fewer at a time.

        Yields:
            after each of the two, the requests that have a new token or have ended.
        """
        try:
            changed = self._read_prompts()
        except Exception as error:
            changed = self._fail_prompts(error)
        yield changed
        try:
            changed = self._decode()
        except Exception as error:
            changed = self._fail_running(error)
        yield changed

    def _take_prompts(self) -> None:
        """Begins to read the first waiting request, and others whose prompts are equal or of similar length."""
        free = self.most - len(self.rows.requests)
        if not self.waiting or free < 1:
            return
        first = self._unread(self.waiting[0].text)
        together: dict[tuple[int, ...], list[Request]] = {}
        taken, most = [], first
        for request in itertools.islice(self.waiting, LOOKED_AT):
            text = tuple(request.text)
            if text not in together and together:
                unread = self._unread(text)
                if not first / SIMILAR <= unread <= first * SIMILAR:
                    continue
                if (len(together) + 1) * max(most, unread) > self.piece:
                    continue
                most = max(most, unread)
            together.setdefault(text, []).append(request)
            taken.append(request)
            if len(taken) == free:
                break
        gone = set(taken)
        self.waiting = deque(each for each in self.waiting if each not in gone)
        for request in taken:
            request.begin()
        longest = max(map(len, together))
        ids = torch.tensor([[0] * (longest - len(text)) + list(text) for text in together])
        lengths = torch.tensor([len(text) for text in together])
        mask = torch.arange(longest) >= longest - lengths[:, None]
        cache = self.model.new_cache()
        # From here on an error ends these requests.
        self.prompts = Prompts(list(together.values()), ids, None if mask.all() else mask, cache)
        if self.prefix_cache is not None:
            # The last token is read in any case, for the logits after it.
            self.prompts.reading = self.prefix_cache.begin(self.model, [text[:-1] for text in together])
            for request in taken:
                request.version = self.prompts.reading.version

    def _unread(self, text: Sequence[int]) -> int:
        """The number of tokens of a text that no state covers."""
        return len(text) - (0 if self.prefix_cache is None else self.prefix_cache.known(text[:-1]))

    def _read_prompts(self) -> list[Request]:
        """Reads a piece of prompts. Returns the requests that got their first token by it."""
        if self.prompts is None:
            self._take_prompts()
        if (prompts := self.prompts) is None:
            return []
        rows, length = prompts.ids.shape
        if (reading := prompts.reading) is not None:
            reading.step(self.piece)
            if not reading.is_done:
                return []
            prompts.cache, prompts.read = reading.cache(length - 1), length - 1
            prompts.reading = prompts.mask = None
        end = min(prompts.read + max(1, self.piece // rows), length)
        piece = slice(prompts.read, end)
        out = self.model(
            input_ids=prompts.ids[:, piece].to(self.model.device),
            attention_mask=None if prompts.mask is None else prompts.mask[:, piece].to(self.model.device),
            use_cache=True,
            logits_to_keep=1,
            **named_cache(prompts.cache),
        )
        prompts.read = end
        if end < length:
            return []
        requests, logits = list(prompts.places), out.logits[list(prompts.places.values()), -1]
        choose_tokens(requests, logits, self.generator, self.with_logprobs)
        return requests

    def _decode(self) -> list[Request]:
        """Gives rows to the requests whose prompts have been read, and lets all running ones generate a token."""
        if (prompts := self.prompts) is not None and prompts.is_read:
            if places := prompts.places:
                self._measure(prompts.cache)
                prompts.cache.batch_select_indices(torch.tensor(list(places.values())))
                self.rows.put(list(places), prompts.cache)
            self.prompts = None
        if not (running := self.rows.requests):
            return []
        choose_tokens(running, self.rows.read(), self.generator, self.with_logprobs)
        ended = [request for request in running if request.is_finished]
        if self.prefix_cache is not None:
            for request in ended:
                if request.error is None:  # the state is the one before the last token
                    ids = request.text[:-1]
                    self.prefix_cache.put(ids, self.rows.state_of(request, len(ids)), request.version)
        self.rows.forget(ended)
        return running

    def _measure(self, cache: RecurrentCache) -> None:
        """Limits the number of running requests to what the memory has room for."""
        if self._is_measured or (free := _free_memory(self.model.device)) is None:
            return
        self._is_measured = True
        room = max(1, int(free * self.memory / (cache.nbytes / cache.batch_size)))
        if room < self.most:
            logger.warning(f"The free memory has room for the states of {room} requests at a time, not {self.most}.")
            self.most = room

    def _fail_prompts(self, error: Exception) -> list[Request]:
        """Called when prompts could not be read. Returns the requests that have ended."""
        prompts, self.prompts = self.prompts, None
        if short := _is_out_of_memory(error) and self.piece > 1:
            self.piece //= 2
            logger.warning(f"Memory was short, so prompts are read {self.piece} tokens at a time: {error}")
        return self._give_up([] if prompts is None else list(prompts.places), error, short)

    def _fail_running(self, error: Exception) -> list[Request]:
        """Called when running requests could not get a token. Returns the requests that have ended."""
        requests = self.rows.requests
        if self.prompts is not None and self.prompts.is_read:
            requests = [*requests, *(each for each in self.prompts.places if each not in requests)]
            self.prompts = None
        self.rows.clear()
        if short := _is_out_of_memory(error) and len(requests) > 1:
            self.most = len(requests) // 2
            logger.warning(f"Memory was short, so only {self.most} requests run at a time: {error}")
        return self._give_up(requests, error, short)

    def _give_up(self, requests: list[Request], error: Exception, again: bool) -> list[Request]:
        """Lets requests wait again, or ends them with an error. Returns those that have ended."""
        left = [request for request in requests if not request.is_finished]
        if again:
            self.waiting.extendleft(reversed(left))
        else:
            logger.error("A step of continuous batching has failed.", exc_info=error)
            fail_all(left, error)
        return [request for request in requests if request.is_finished]


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory was short, on a GPU or the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _free_memory(device: torch.device) -> int | None:
    """The free memory of a device in bytes; None if it is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu" and is_psutil_available():
        import psutil

        return psutil.virtual_memory().available
    return None
