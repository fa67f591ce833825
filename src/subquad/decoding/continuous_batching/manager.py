"""The managers of continuous batching, with the interface of transformers' own."""

import asyncio
import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.utils import logging

from .batch import Batch
from .requests import Options, Request


if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.get_logger(__name__)
# The fields of a `ContinuousBatchingConfig` that apply to recurrent states, or are always so here.
APPLY = {
    "max_requests_per_batch",
    "max_batch_tokens",
    "max_memory_percent",
    "max_queue_size",
    "return_logprobs",
    "seed",
    "per_request_processors",
    "drop_unsupported_processors",
    "auto_switch_to_flash",
    "allow_block_sharing",
    "scheduler_type",
}
# Running requests, prompt tokens of a step, and the part of the free memory for states, if they are not given.
ON_A_CPU = (64, 1024, 0.6)
ON_A_GPU = (256, 4096, 0.8)
# The seconds that a request waits for a place in a full queue.
PATIENCE = 10
# The number of different options of requests that are kept.
MOST_OPTIONS = 256
# Where a server puts arguments of `add_request` that its own call lacks; `generation_config` replaces the manager's.
SERVED: ContextVar[dict[str, Any] | None] = ContextVar("served", default=None)


class RecurrentBatchingManager(ContinuousBatchingManager):
    """
    Continuous batching for models with a recurrent state of constant size. A thread of its own generates; requests are
    added, answered and cancelled at any time. `model.init_continuous_batching()` makes one, and
    `model.continuous_batching_context_manager()` also starts and stops it.

    Every request may have its own options of `generate`: temperature, penalties, suppressed tokens, a seed, and so on.
    A request that fails is answered with a `GenerationOutput` whose `error` is the reason; the others go on.

    Args:
        model: the model that generates; it is in evaluation mode until the manager is stopped.
        generation_config: the options of requests that have none of their own. Options that are None are the model's.
        continuous_batching_config: `max_requests_per_batch` requests run at a time, with `max_batch_tokens` tokens of
            prompts between two of their tokens (64 and 1,024 by default, on a GPU 256 and 4,096). The states take
            `max_memory_percent` of the free memory at most (0.6, on a GPU 0.8). Also `max_queue_size`, `seed`,
            `return_logprobs` and `allow_block_sharing`, which allows a prefix cache. Fields that only apply to pages
            of keys and values have no effect; one warning names them.

    Attributes:
        fatal_error: the error that ended the thread, or None.

    Raises:
        ValueError: if continuous batching cannot follow an option; the message names it.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
    ):
        if reason := why_not(model):
            raise ValueError(reason)
        config = continuous_batching_config or ContinuousBatchingConfig()
        self.continuous_batching_config = config
        _warn_of_fields(config)
        self.model, self.warmed_up = model, False
        self.generation_config = model.generation_config if generation_config is None else generation_config
        self._options: dict[str, Options] = {}
        self._default = self._options_of(self.generation_config, {})
        most, piece, memory = ON_A_CPU if model.device.type == "cpu" else ON_A_GPU
        self._new_batch = functools.partial(
            Batch,
            model,
            config.max_requests_per_batch or most,
            config.max_batch_tokens or piece,
            config.max_memory_percent or memory,
            None if config.seed is None else torch.Generator(model.device).manual_seed(config.seed),
            config.return_logprobs,
        )
        self._thread: threading.Thread | None = None
        # All that the thread shares with others is read and written under this lock.
        self._changed = threading.Condition()
        self._unfinished: dict[str, Request] = {}
        self._added: list[Request] = []
        self._cancelled: list[Request] = []
        self._results: deque[GenerationOutput] = deque()
        self._handlers: dict[str, tuple[Callable[[GenerationOutput], None], asyncio.AbstractEventLoop]] = {}
        self._number = 0
        self._stops = self._stops_at_once = self._parked = self._ended = False
        self._pausing: list[int] = []
        # `transformers serve` asks whether the thread is alive.
        self.background_thread_status = SimpleNamespace(fatal_error=None)

    @property
    def fatal_error(self) -> BaseException | None:
        return self.background_thread_status.fatal_error

    # Control.

    def is_running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def warmup(self) -> None:
        """Does nothing: the step of each number of rows is captured when it is first needed."""
        self.warmed_up = True

    def start(self) -> None:
        """Starts the thread."""
        if self.is_running():
            logger.warning("The manager is already running.")
            return
        self._stops = self._stops_at_once = self._ended = False
        self.background_thread_status.fatal_error = None
        self._was_training = self.model.training
        self.model.eval()
        self._thread = threading.Thread(target=self._run, name="continuous batching", daemon=True)
        self._thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """
        Stops the thread once all requests have ended.

        Args:
            block: whether to wait for it.
            timeout: the seconds to wait at most; None waits as long as it takes.
            keep_for_next_session: whether `init_continuous_batching` returns this manager again.
            hard_stop: whether to end all requests with an error instead of answering them.

        Raises:
            RuntimeError: if it is called inside of [`~RecurrentBatchingManager.pause`].
        """
        if threading.get_ident() in self._pausing:
            raise RuntimeError("`stop` would wait for ever inside of `pause`.")
        if (thread := self._thread) is None:
            logger.warning("The manager is not running.")
            return
        with self._changed:
            self._stops, self._stops_at_once = True, self._stops_at_once or hard_stop
            self._changed.notify_all()
        if block:
            thread.join(timeout)
            if thread.is_alive():
                logger.warning(f"The thread still answers requests after {timeout} seconds.")
        if keep_for_next_session:
            self.model._cached_continuous_batching_manager = self

    def destroy(self) -> None:
        """Stops the thread, if it runs."""
        if self.is_running():
            self.stop()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """
        Keeps the thread from using the model, for example to change its weights. Requests keep their states and go on
        afterwards.

        Raises:
            RuntimeError: if the thread does not run.
        """
        with self._changed:
            self._pausing.append(threading.get_ident())
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._parked or not self._works())
        try:
            if not self._works():
                raise RuntimeError("`pause` needs a manager that is running.") from self.fatal_error
            yield
        finally:
            with self._changed:
                self._pausing.remove(threading.get_ident())
                self._changed.notify_all()

    # Requests.

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **options: Any,
    ) -> str:
        """
        Adds a request.

        Args:
            input_ids: the ids of the prompt.
            request_id: its name; None makes one.
            max_new_tokens: the maximum number of tokens to generate; by default as in `generate`.
            streaming: whether every token is delivered, not only the whole answer.
            record_timestamps: whether the output has the time of each token.
            eos_token_id: end-of-sequence ids, -1 for none; by default those of the generation config.
            options: options of `generate` for this request; also `seed`, with which its random numbers do not depend
                on other requests, and `tokenizer`, which `stop_strings` need.

        Returns:
            its name.

        Raises:
            RuntimeError: if the manager stops, or its thread has died.
            ValueError: if there is an unfinished request of that name.
            queue.Full: if there is no place in the queue for 10 seconds.
        """
        fields = {"streaming": streaming, "record_timestamps": record_timestamps}
        options |= {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        return self._add([input_ids], [request_id], fields, options)[0]

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **options: Any,
    ) -> list[str]:
        """
        As [`~RecurrentBatchingManager.add_request`] for several prompts, which are read in this order. A `seed` is the
        one of the first request; the next one has `seed + 1`.
        """
        fields = {"streaming": streaming, "record_timestamps": record_timestamps}
        return self._add(inputs, [None] * len(inputs), fields, options | {"max_new_tokens": max_new_tokens})

    def _add(
        self, inputs: list[list[int]], names: list[str | None], fields: dict[str, Any], options: dict[str, Any]
    ) -> list[str]:
        """Adds requests; `fields` are arguments of [`Request`]. Returns their names."""
        options = {**(SERVED.get() or {}), **{name: value for name, value in options.items() if value is not None}}
        config, seed = options.pop("generation_config", self.generation_config), options.pop("seed", None)
        copies = config.num_return_sequences or 1
        size = self.continuous_batching_config.max_queue_size
        with self._changed:
            if self._stops or self.fatal_error is not None:
                raise RuntimeError("The manager takes no more requests.") from self.fatal_error
            if size and not self._changed.wait_for(lambda: len(self._unfinished) < size, PATIENCE):
                raise queue.Full(f"{len(self._unfinished)} requests are unfinished, and `max_queue_size` is {size}.")
            given = []
            for name in names:
                given.append(f"req_{self._number}" if name is None else name)
                self._number += name is None
            if taken := [name for name in given if name in self._unfinished]:
                raise ValueError(f"`request_id` {taken[0]!r} is the name of a request that has not ended.")
            for ids, name in zip(inputs, given, strict=True):
                for number in range(copies):
                    child = name if number == copies - 1 else f"{name}__child#{number}"
                    self._admit(child, ids, config, options, seed=seed, **fields)
                    seed = None if seed is None else seed + 1
            self._changed.notify_all()
        return given

    def _admit(
        self, name: str, ids: list[int], config: GenerationConfig, options: dict[str, Any], **fields: Any
    ) -> None:
        """Adds one request, or answers it with the error of its options."""
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
        try:
            request = Request(name, ids, self._options_of(config, options), **fields)
        except Exception as error:
            status = RequestStatus.FAILED
            self._deliver([GenerationOutput(request_id=name, prompt_ids=ids, error=str(error), status=status)])
            return
        self._unfinished[name] = request
        self._added.append(request)

    def _options_of(self, config: GenerationConfig, overrides: dict[str, Any]) -> Options:
        """Requests with the same options share them, so their tokens are chosen together."""
        if config is self.generation_config and not overrides and self._options:
            return self._default
        overrides = dict(overrides)
        tokenizer = overrides.pop("tokenizer", None)
        key = f"{id(tokenizer)} {config.to_json_string(use_diff=False)} {sorted(overrides.items(), key=str)}"
        if (options := self._options.pop(key, None)) is None:
            options = Options(self.model, config, overrides, tokenizer)
        self._options[key] = options  # the last one used comes last
        if len(self._options) > MOST_OPTIONS:
            del self._options[next(iter(self._options))]
        return options

    def cancel_request(self, request_id: str) -> None:
        """Ends a request before its time; its output has an error. Nothing happens if it has already ended."""
        with self._changed:
            if (request := self._unfinished.get(request_id)) is not None:
                self._cancelled.append(request)
                self._changed.notify_all()

    # Answers.

    def get_result(
        self, request_id: str | Container[str] | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """
        Takes the oldest output that has not been taken.

        Args:
            request_id: only outputs of this request, or of these.
            timeout: the seconds to wait at most; None waits as long as an output can still come.

        Returns:
            the output; None if none has come.
        """
        wanted = (request_id,) if isinstance(request_id, str) else request_id

        def place() -> int | None:
            found = (n for n, x in enumerate(self._results) if wanted is None or x.request_id in wanted)
            return next(found, None)

        with self._changed:
            self._changed.wait_for(lambda: place() is not None or not self._works(), timeout)
            if (number := place()) is None:
                return None
            output = self._results[number]
            del self._results[number]
            return output

    def __iter__(self) -> Iterator[GenerationOutput]:
        """The outputs of all requests as they come, as long as the manager runs."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """The outputs of a request as they come, up to the last one."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.status in (RequestStatus.FINISHED, RequestStatus.FAILED):
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Lets the running event loop call `callback` with every output of a request, also with earlier ones."""
        with self._changed:
            self._handlers[request_id] = callback, asyncio.get_running_loop()
            earlier = [output for output in self._results if output.request_id == request_id]
            self._results = deque(output for output in self._results if output.request_id != request_id)
            self._deliver(earlier)

    def _deliver(self, outputs: list[GenerationOutput]) -> None:
        """Gives outputs to their handlers, or keeps them to be taken. Called under the lock."""
        calls: dict[asyncio.AbstractEventLoop, list[tuple[Callable, GenerationOutput]]] = {}
        for output in outputs:
            if (handler := self._handlers.get(output.request_id)) is None:
                self._results.append(output)
                continue
            callback, loop = handler
            calls.setdefault(loop, []).append((callback, output))
            if output.status in (RequestStatus.FINISHED, RequestStatus.FAILED):
                del self._handlers[output.request_id]
        for loop, several in calls.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the outputs
                loop.call_soon_threadsafe(_call_all, several)  # a wake-up takes longer than a call
        self._changed.notify_all()

    # The thread.

    def _works(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._ended

    @torch.no_grad()
    def _run(self) -> None:
        error = "The manager was stopped before the request ended."
        try:
            if self.model.device.type == "cuda":
                torch.cuda.set_device(self.model.device)
            shares = self.continuous_batching_config.allow_block_sharing
            batch = self._new_batch(prefix_cache=self.model.prefix_cache_of_its_own() if shares else None)
            while self._take(batch):
                for changed in batch.step():
                    self._hand_over(changed)
        except BaseException as fatal:
            logger.error("Continuous batching has failed.", exc_info=fatal)
            self.background_thread_status.fatal_error = error = fatal
        finally:
            if self._was_training:
                self.model.train()
            with self._changed:
                for request in self._unfinished.values():
                    if not request.is_finished:
                        request.fail(error)
                self._added.clear()
                self._cancelled.clear()
                self._ended = True
                self._hand_over(list(self._unfinished.values()))

    def _take(self, batch: Batch) -> bool:
        """Waits for something to do, and gives new requests to the batch. Returns whether to go on."""
        with self._changed:
            while True:
                if self._pausing:
                    self._parked = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: not self._pausing)
                    self._parked = False
                    batch.forget_version()
                if self._stops_at_once:
                    return False
                batch.waiting.extend(self._added)
                self._added.clear()
                cancelled = [request for request in self._cancelled if not request.is_finished]
                self._cancelled.clear()
                if cancelled:
                    batch.cancel(cancelled)
                    self._hand_over(cancelled)
                if batch.has_work:
                    return True
                if self._stops:
                    return False
                self._changed.wait()

    def _hand_over(self, requests: list[Request]) -> None:
        """Delivers the answers of requests that have ended, and new tokens of others that are streamed."""
        outputs = [request.to_output() for request in requests if request.is_finished or request.streaming]
        with self._changed:
            for request in requests:
                if request.is_finished:
                    self._unfinished.pop(request.request_id, None)
            if outputs:
                self._deliver(outputs)


def _call_all(calls: list[tuple[Callable, GenerationOutput]]) -> None:
    for callback, output in calls:
        callback(output)


def _warn_of_fields(config: ContinuousBatchingConfig) -> None:
    """Warns of fields without effect."""
    default = ContinuousBatchingConfig()
    changed = [name for name, value in vars(config).items() if value != getattr(default, name, None)]
    if config.scheduler_type == default.scheduler_type:
        changed = [name for name in changed if name not in APPLY]
    if changed:
        logger.warning_once(f"These fields of `ContinuousBatchingConfig` do not apply to recurrent states: {changed}.")


def why_not(model: "PreTrainedModel") -> str | None:
    """Why there is no continuous batching for a model; None if there is."""
    name = type(model).__name__
    if model.config.get_text_config() is not model.config:
        return f"{name} reads images, and continuous batching reads ids alone. Use `generate`."
    if model.new_cache().grows:
        return f"The state of this {name} grows with the text, so it is no row of a fixed size. Use `generate`."
    if len({*getattr(model, "hf_device_map", {}).values()}) > 1 or getattr(model, "_device_mesh", None) is not None:
        return f"This {name} is spread over several devices, and continuous batching runs on one. Use `generate`."
    return None


def start_manager(
    model: "PreTrainedModel",
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
) -> RecurrentBatchingManager:
    """
    `model.init_continuous_batching`: a manager that is not started, or one that was kept for the next session, with
    its own configurations. `workload_hints` sizes pages of keys and values, so it has no effect.
    """
    if (kept := model.__dict__.get("_cached_continuous_batching_manager")) is None:
        return RecurrentBatchingManager(model, generation_config, continuous_batching_config)
    own = kept.generation_config, kept.continuous_batching_config
    if any(
        each not in (None, x) for each, x in zip((generation_config, continuous_batching_config), own, strict=True)
    ):
        logger.warning(
            "The kept manager has other configurations than the given ones, which have no effect. Call "
            "`destroy_cached_continuous_batching_manager` first."
        )
    return kept


@contextlib.contextmanager
def batching_context(
    model: "PreTrainedModel",
    generation_config: GenerationConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: Any = None,
) -> Iterator[RecurrentBatchingManager]:
    """
    `model.continuous_batching_context_manager`: a manager that runs inside of the context. There is nothing to warm
    up, so `warmup` has no effect.
    """
    manager = start_manager(model, generation_config, continuous_batching_config)
    manager.start()
    try:
        yield manager
    except BaseException:
        manager.stop(hard_stop=True)
        raise
    manager.stop(block=block, timeout=timeout, keep_for_next_session=persistent_manager)


def generate_batch(
    model: "PreTrainedModel",
    inputs: list[list[int]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **options: Any,
) -> dict[str, GenerationOutput]:
    """
    `model.generate_batch`: the answers to all prompts, by the names of their requests and in their order.

    Args:
        inputs: the ids of each prompt.
        progress_bar: whether to show how many requests are answered.
        options: options of `generate` for all of them, such as `max_new_tokens` or `seed`.
    """
    if not inputs:
        return {}
    with batching_context(
        model,
        generation_config,
        continuous_batching_config=continuous_batching_config,
        persistent_manager=persistent_manager,
    ) as manager:
        names = manager.add_requests(inputs, record_timestamps=record_timestamps, **options)
        copies = manager.generation_config.num_return_sequences or 1
        ends = [*(f"__child#{number}" for number in range(copies - 1)), ""]
        answers = dict.fromkeys(f"{name}{end}" for name in names for end in ends)
        for _ in tqdm(answers, desc="requests", disable=not progress_bar):
            if (output := manager.get_result(answers)) is None:
                raise RuntimeError("Continuous batching has failed.") from manager.fatal_error
            answers[output.request_id] = output
    return answers
