"""Requests that join and leave between two tokens get what `generate` gives each of them alone."""

import asyncio
import random
import threading
import time

import pytest
import torch
from cases import AVEY, CASES, GREEDY, RAVEN_BOTH, RAVEN_FULL, TEXT, VARIANTS, VISUAL, each
from test_prefix_cache import Counted
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation import ContinuousBatchingManager

import subquad
from subquad.decoding.continuous_batching import rows as rows_module
from subquad.modeling.cache import RecurrentCache
from subquad_tokenizers import ByteTokenizer


FINCH = CASES["rwkv6"]
GROWING = (AVEY, RAVEN_FULL, RAVEN_BOTH)
CONSTANT = [case for case in (*TEXT, *VARIANTS) if not (case.growing or case in GROWING)]
# Few rows and short pieces, so that requests wait, rows are reused and prompts are read in pieces.
TIGHT = {"max_requests_per_batch": 5, "max_batch_tokens": 16}


def prompts(number, vocabulary=97, longest=40, seed=0):
    choose = random.Random(seed)
    return [[choose.randrange(vocabulary) for _ in range(choose.randint(1, longest))] for _ in range(number)]


def alone(model, ids, options=GREEDY, /, **others):
    """The new tokens of `generate`."""
    options = {**options, **others}
    given = torch.tensor([ids], device=model.device)
    return model.generate(given, attention_mask=torch.ones_like(given), **options)[0, len(ids) :].tolist()


def is_greedy(model, ids, tokens):
    """Whether each token is the best one behind those before it, by a single forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([ids + tokens], device=model.device)).logits[0, len(ids) - 1 : -1]
    return logits.argmax(-1).tolist() == tokens


def finch():
    """A model without an end of the text."""
    model = FINCH.model()
    model.generation_config.eos_token_id = None
    return model


def batching(model, generation_config=None, **fields):
    config = ContinuousBatchingConfig(**{**TIGHT, **fields})
    greedy = generation_config or GenerationConfig(max_new_tokens=6, **GREEDY)
    return model.continuous_batching_context_manager(greedy, continuous_batching_config=config)


def collect(manager, names):
    """The last output of each request."""
    found = {}
    while len(found) < len(names):
        output = manager.get_result(timeout=60)
        assert output is not None, (manager.fatal_error, len(found))
        if output.status.name in ("FINISHED", "FAILED"):
            found[output.request_id] = output
    return [found[name] for name in names]


def nothing_is_left(manager):
    assert not manager._unfinished and not manager._handlers and not manager._added and not manager._cancelled
    assert not [thread for thread in threading.enumerate() if thread.name == "continuous batching"]


@pytest.mark.quick_cases("rwkv?", "raven", "gecko")
@each(*CONSTANT)
def test_tokens_are_those_of_generate(case):
    """Of lengths below and above the capacities that the states of a Gecko and the windows of a Raven begin with."""
    model, texts = case.model(), prompts(10, longest=90)
    model.generation_config.eos_token_id = None
    texts[7:9] = [texts[2]] * 2  # equal prompts are read together
    lengths = [1 + 5 * n % 13 for n in range(len(texts))]
    with batching(model) as manager:
        assert isinstance(manager, ContinuousBatchingManager)
        names = [manager.add_request(ids, max_new_tokens=n) for ids, n in zip(texts, lengths, strict=True)]
        outputs = collect(manager, names)
    for ids, number, output in zip(texts, lengths, outputs, strict=True):
        assert (output.error, output.prompt_ids, len(output.generated_tokens)) == (None, ids, number)
        assert is_greedy(model, ids, output.generated_tokens)
    nothing_is_left(manager)


@pytest.mark.quick_cases("0")
@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_and_go(seed):
    """Some at once, some later, some cancelled while they wait, are read or run, and some that end early."""
    model, choose = finch(), random.Random(seed)
    answers, cancelled = {}, set()
    with batching(model, max_requests_per_batch=choose.choice([1, 3, 9])) as manager:
        for ids in prompts(40, seed=seed):
            name = manager.add_request(ids, max_new_tokens=choose.randint(1, 12), eos_token_id=[5, 6, 7])
            answers[name] = ids
            if choose.random() < 0.3:
                cancelled.add(gone := choose.choice(list(answers)))
                manager.cancel_request(gone)
            if choose.random() < 0.3:
                time.sleep(0.003)
        outputs = collect(manager, list(answers))
    for output in outputs:
        *tokens, last = output.generated_tokens or [0]
        assert is_greedy(model, answers[output.request_id], output.generated_tokens)
        assert not {5, 6, 7} & set(tokens) and (output.error or last in (5, 6, 7) or len(tokens) < 12)
        assert output.error in (None, "The request was cancelled.")
        assert output.error is None or output.request_id in cancelled
    assert any(output.error is None for output in outputs)
    nothing_is_left(manager)


def test_many_cancellations_leave_nothing():
    model, choose = finch(), random.Random(0)
    with batching(model, max_requests_per_batch=8) as manager:
        names = manager.add_requests(prompts(400, longest=4), max_new_tokens=3)
        for name in names:
            if choose.random() < 0.9:
                manager.cancel_request(name)
        collect(manager, names)
        assert not manager._results
        with manager.pause():
            assert not manager._unfinished
    nothing_is_left(manager)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 4, "eos_token_id": 3},
        {"suppress_tokens": list(range(50))},
        {"begin_suppress_tokens": list(range(90))},
        {"max_length": 44},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_a_request(options):
    """Processors that look at the text get that of the request, beside requests that have none."""
    model, texts = finch(), prompts(6)
    limit = {} if "max_length" in options else {"max_new_tokens": 9}
    with batching(model, GenerationConfig(**GREEDY)) as manager:
        others = manager.add_requests(texts, max_new_tokens=9)
        names = [manager.add_request(ids, **limit, **options) for ids in texts]
        (*plain,) = collect(manager, others + names)
    for ids, output, other in zip(texts, plain[6:], plain, strict=False):
        assert output.generated_tokens == alone(model, ids, **limit, **options)
        assert other.generated_tokens == alone(model, ids, max_new_tokens=9)


def test_options_of_the_model():
    """What is not asked for is as in `generate`: the model's own options, and 20 new tokens."""
    model, texts = finch(), prompts(3)
    model.generation_config.eos_token_id = 3
    answers = model.generate_batch(texts)
    assert [x.generated_tokens for x in answers.values()] == [alone(model, ids, {}) for ids in texts]
    model.generation_config.repetition_penalty = 2.0
    answers = model.generate_batch(texts, GenerationConfig(max_new_tokens=5))
    assert [x.generated_tokens for x in answers.values()] == [alone(model, ids, {}, max_new_tokens=5) for ids in texts]


def test_seeds():
    """A request with a seed does not depend on others; requests without one follow torch's, or that of the manager."""
    model, texts = finch(), prompts(8)
    sampled = GenerationConfig(do_sample=True, max_new_tokens=8, eos_token_id=None, pad_token_id=0)
    with batching(model, sampled) as manager:
        name = manager.add_request(texts[0], seed=7)
        (expected,) = collect(manager, [name])
        names = manager.add_requests(texts)
        again = manager.add_request(texts[0], seed=7, temperature=1.0)
        other = manager.add_request(texts[0], seed=8)
        *_, again, other = collect(manager, [*names, again, other])
    assert expected.generated_tokens == again.generated_tokens != other.generated_tokens

    def tokens(**fields):
        answers = model.generate_batch(texts, sampled, ContinuousBatchingConfig(**fields))
        return [answer.generated_tokens for answer in answers.values()]

    torch.manual_seed(0)
    first = tokens()
    assert first != tokens()
    torch.manual_seed(0)
    assert first == tokens()
    assert tokens(seed=3) == tokens(seed=3) != tokens(seed=4)


def test_several_answers_to_a_prompt():
    model, texts = finch(), prompts(3)
    sampled = GenerationConfig(**{**GREEDY, "do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12})
    answers = model.generate_batch(texts, sampled, ContinuousBatchingConfig(seed=0))
    assert list(answers) == [f"req_{n}{end}" for n in range(3) for end in ("__child#0", "__child#1", "")]
    assert [answer.prompt_ids for answer in answers.values()] == [ids for ids in texts for _ in range(3)]
    assert len({tuple(answer.generated_tokens) for answer in answers.values()}) == 9


def test_log_probabilities_and_times():
    model, (ids, *_) = finch(), prompts(1)
    config = ContinuousBatchingConfig(return_logprobs=True)
    greedy = GenerationConfig(max_new_tokens=5, **GREEDY)
    (answer,) = model.generate_batch([ids], greedy, config, record_timestamps=True).values()
    text = torch.tensor([ids + answer.generated_tokens])
    with torch.no_grad():
        expected = model(text).logits[0].log_softmax(-1)[len(ids) - 1 : -1].gather(1, text[0, len(ids) :, None])
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected[:, 0], atol=1e-4, rtol=1e-4)
    times = [answer.created_time, answer.lifespan[0], *answer.timestamps, answer.lifespan[1]]
    assert times == sorted(times) and len(times) == 8


def test_stop_strings():
    model, tokenizer = FINCH.model(vocab_size=128), ByteTokenizer()
    model.generation_config.eos_token_id = None
    texts = prompts(5, 128)
    stops = {"stop_strings": [chr(n) for n in range(32, 60)], "max_new_tokens": 30, "tokenizer": tokenizer}
    with batching(model) as manager:
        outputs = collect(manager, [manager.add_request(ids, **stops) for ids in texts])
        (without,) = collect(manager, [manager.add_request(texts[0], stop_strings="a")])
    assert [output.generated_tokens for output in outputs] == [alone(model, ids, **stops) for ids in texts]
    assert min(len(output.generated_tokens) for output in outputs) < 30
    assert without.error == "`stop_strings` is 'a': they need a `tokenizer`."


@pytest.mark.fast
def test_requests_that_fail():
    """Each is answered with its error, and the others go on."""
    model, (ids, *_) = finch(), prompts(1)
    with batching(model) as manager:
        wrong = {
            "`input_ids` is empty.": manager.add_request([]),
            "`input_ids` must be whole numbers from 0 to 96, got 97.": manager.add_request([3, 97]),
            "from 0 to 96, got 1.5": manager.add_request([1.5]),
            "`num_beams` is 2: continuous batching does not support it.": manager.add_request(ids, num_beams=2),
            "`no_such_option` is not an option of `generate`.": manager.add_request(ids, no_such_option=1),
            "`max_new_tokens` must be greater than 0": manager.add_request(ids, max_new_tokens=0),
            f"{len(ids)} tokens are given, which leaves none": manager.add_request(
                ids, generation_config=GenerationConfig(max_length=1, **GREEDY)
            ),
            "`temperature`": manager.add_request(ids, do_sample=True, temperature=-1.0),
        }
        right = manager.add_request(ids)
        outputs = collect(manager, [*wrong.values(), right])
        with pytest.raises(ValueError, match="'mine' is the name of a request that has not ended"):
            manager.add_requests([], request_id="mine")
            with manager.pause():
                manager.add_request(ids, "mine")
                manager.add_request(ids, "mine")
    for message, output in zip(wrong, outputs, strict=False):
        assert output.status.name == "FAILED" and message in output.error
    assert outputs[-1].generated_tokens == alone(model, ids, max_new_tokens=6)
    with pytest.raises(RuntimeError, match="takes no more requests"):
        manager.add_request(ids)
    with pytest.raises(ValueError, match="`num_beams` is 3"):
        model.generate_batch([ids], GenerationConfig(num_beams=3))


class Failing:
    """A hook that raises at some of the calls with at least `rows` rows."""

    def __init__(self, model, error, rows=1, tokens=1, times=10**6):
        self.error, self.rows, self.tokens, self.times, self.left = error, rows, tokens, times, times
        self.handle = model.base_model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module, args, kwargs):
        rows, tokens = (args[0] if args else kwargs["input_ids"]).shape
        if rows >= self.rows and tokens >= self.tokens and self.left:
            self.left -= 1
            raise self.error


def test_a_step_that_fails(caplog):
    """Its requests end with the reason, and those that wait go on."""
    model, texts = finch(), prompts(12)
    Failing(model, RuntimeError("A wire is loose."), rows=4, times=1)
    with batching(model) as manager:
        outputs = collect(manager, manager.add_requests(texts))
        more = collect(manager, manager.add_requests(texts))
    failed = [output for output in outputs if output.error]
    assert 0 < len(failed) <= 5 and {output.error for output in failed} == {"A wire is loose."}
    for ids, output in zip(texts * 2, outputs + more, strict=True):
        assert output.error or is_greedy(model, ids, output.generated_tokens)
    nothing_is_left(manager)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("DefaultCPUAllocator: full")])
def test_memory_that_is_short(error):
    """Fewer requests run at a time, and shorter pieces are read; all are answered."""
    model, texts = finch(), prompts(8)
    hooks = Failing(model, error, rows=3), Failing(model, error, tokens=20)
    with batching(model, max_batch_tokens=64) as manager:
        outputs = collect(manager, manager.add_requests(texts))
    for hook in hooks:
        hook.handle.remove()
    assert all(is_greedy(model, ids, output.generated_tokens) for ids, output in zip(texts, outputs, strict=True))
    assert {len(output.generated_tokens) for output in outputs} == {6}
    Failing(model, error)
    (output,) = model.generate_batch(texts[:1], max_new_tokens=6).values()
    assert output.error == str(error)


def test_memory_that_is_short_after_a_token(monkeypatch):
    """Requests that end with this token are answered, and the others are read again."""
    forget, calls = rows_module.Rows.forget, []

    def fail_once(self, requests):
        if requests and not calls:
            calls.append(requests)
            raise torch.OutOfMemoryError("full")
        forget(self, requests)

    monkeypatch.setattr(rows_module.Rows, "forget", fail_once)
    model, texts = finch(), prompts(5)
    with batching(model) as manager:
        outputs = collect(manager, [manager.add_request(ids, max_new_tokens=2 + n) for n, ids in enumerate(texts)])
    for number, (ids, output) in enumerate(zip(texts, outputs, strict=True)):
        assert is_greedy(model, ids, output.generated_tokens) and len(output.generated_tokens) == 2 + number
    assert calls
    nothing_is_left(manager)


def test_memory_for_states(monkeypatch):
    model, texts, most = finch(), prompts(20), []
    nbytes = model(torch.tensor([texts[0]])).cache.nbytes
    monkeypatch.setattr("subquad.decoding.continuous_batching.batch._free_memory", lambda device: int(7.5 * nbytes))
    read = rows_module.Rows.read
    monkeypatch.setattr(rows_module.Rows, "read", lambda self: most.append(len(self.requests)) or read(self))
    model.generate_batch(texts, continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=0.5))
    assert max(most) <= 3 + len(texts[:1])


def test_pausing():
    """Weights that are changed meanwhile are used by the next token, and states are kept."""
    model, (ids, *_) = finch(), prompts(1)
    model.train()
    with batching(model) as manager:
        assert not model.training
        with pytest.raises(RuntimeError, match="wait for ever"), manager.pause():
            name = manager.add_request(ids)
            assert manager.get_result(timeout=0.05) is None
            with torch.no_grad():
                model.get_output_embeddings().weight.neg_()
            manager.stop()
        (output,) = collect(manager, [name])
    assert model.training
    model.eval()
    assert output.generated_tokens == alone(model, ids, max_new_tokens=6)
    with pytest.raises(RuntimeError, match="is running"), manager.pause():
        pass


@pytest.mark.parametrize("persistent", [False, True])
def test_weights_that_change(persistent):
    """As between the steps of reinforcement learning: no state of earlier weights is left."""
    model, texts = finch(), prompts(6)
    for seed in range(3):
        answers = model.generate_batch(texts, max_new_tokens=5, do_sample=False, persistent_manager=persistent)
        for ids, answer in zip(texts, answers.values(), strict=True):
            assert is_greedy(model, ids, answer.generated_tokens)
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.1)


def test_stopping(caplog):
    model, texts = finch(), prompts(20)
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY))
    names = manager.add_requests(texts, max_new_tokens=10_000)  # before it is started
    manager.start()
    manager.stop(hard_stop=True)
    outputs = collect(manager, names)
    assert {output.error for output in outputs} == {"The manager was stopped before the request ended."}
    assert manager.get_result() is None and not manager.is_running()
    manager.start()  # again
    (output,) = collect(manager, [manager.add_request(texts[0], max_new_tokens=6)])
    assert output.generated_tokens == alone(model, texts[0], max_new_tokens=6)
    manager.stop(keep_for_next_session=True)
    assert model.init_continuous_batching() is manager and not caplog.text
    assert model.init_continuous_batching(GenerationConfig(max_new_tokens=3)) is manager
    assert "The kept manager has other configurations" in caplog.text
    model.destroy_cached_continuous_batching_manager()
    assert model.init_continuous_batching() is not manager
    nothing_is_left(manager)


def test_the_thread_dies(monkeypatch):
    model, texts = finch(), prompts(3)
    monkeypatch.setattr("subquad.decoding.continuous_batching.batch.Batch.cancel", None)
    with batching(model) as manager:
        names = manager.add_requests(texts, max_new_tokens=10_000)
        manager.cancel_request(names[0])
        outputs = collect(manager, names)
        assert all("not callable" in output.error for output in outputs)
        assert isinstance(manager.background_thread_status.fatal_error, TypeError)
        with pytest.raises(RuntimeError, match="takes no more requests"):
            manager.add_request(texts[0])


def test_streams():
    """Each token is delivered; a handler also gets what came before it."""
    model, (ids, *_) = finch(), prompts(1)
    with batching(model) as manager:
        name = manager.add_request(ids, streaming=True)
        outputs = list(manager.request_id_iter(name))

        async def handled(wait):
            done, got = asyncio.Event(), []

            def callback(output):
                got.append(output)
                if output.status.name == "FINISHED":
                    done.set()

            name = manager.add_request(ids, streaming=True)
            await asyncio.sleep(wait)
            manager.register_result_handler(name, callback)
            await asyncio.wait_for(done.wait(), 60)
            return got

        for wait in (0, 0.3):
            assert [x.generated_tokens for x in asyncio.run(handled(wait))][-1] == outputs[-1].generated_tokens
    expected = alone(model, ids, max_new_tokens=6)
    assert outputs[-1].generated_tokens == expected
    lengths = [len(output.generated_tokens) for output in outputs]
    assert lengths == sorted(set(lengths)) and all(
        x.generated_tokens == expected[: len(x.generated_tokens)] for x in outputs
    )
    nothing_is_left(manager)


def test_a_full_queue(monkeypatch):
    import queue

    monkeypatch.setattr("subquad.decoding.continuous_batching.manager.PATIENCE", 0.05)
    model, texts = finch(), prompts(4)
    with batching(model, max_queue_size=2) as manager:
        with manager.pause():
            names = [manager.add_request(ids) for ids in texts[:2]]
            with pytest.raises(queue.Full, match="2 requests are unfinished"):
                manager.add_request(texts[2])
        monkeypatch.setattr("subquad.decoding.continuous_batching.manager.PATIENCE", 60)
        names += [manager.add_request(ids) for ids in texts[2:]]
        assert not any(output.error for output in collect(manager, names))


def test_equal_prompts_are_read_once():
    model, texts = finch(), prompts(2, longest=40)
    counted = Counted(model)
    (first,) = model.generate_batch(texts[:1], max_new_tokens=1).values()
    tokens = counted.take()
    answers = model.generate_batch(texts[:1] * 12, max_new_tokens=1)
    assert counted.take() == tokens == len(texts[0])
    assert {tuple(answer.generated_tokens) for answer in answers.values()} == {tuple(first.generated_tokens)}


def test_prefix_cache(monkeypatch):
    """A beginning that many prompts share is read once, and so is a conversation that goes on."""
    monkeypatch.setattr(RecurrentCache, "save", None)
    model, shared = finch(), prompts(1, longest=1)[0] * 50
    texts = [shared + [n] * (3 + n) for n in range(6)]
    expected = [alone(model, ids, max_new_tokens=20) for ids in texts]
    monkeypatch.setattr(type(model), "make_prefix_cache", lambda model: subquad.PrefixCache())
    counted = Counted(model)
    with batching(model, max_batch_tokens=32) as manager:
        outputs = collect(manager, manager.add_requests(texts, max_new_tokens=20))
        assert [output.generated_tokens for output in outputs] == expected
        read = counted.take() - 20 * len(texts)
        assert read < sum(map(len, texts)) - 3 * len(shared)
        (output,) = collect(manager, [manager.add_request(texts[3], max_new_tokens=1)])
        assert counted.take() == 1 and output.generated_tokens == expected[3][:1]
        turn = texts[0] + expected[0] + [9, 8]
        (output,) = collect(manager, [manager.add_request(turn, max_new_tokens=1)])
        assert counted.take() <= 4
    assert is_greedy(model, turn, output.generated_tokens) and counted.take()
    with batching(model, allow_block_sharing=False) as manager:
        collect(manager, [manager.add_request(turn, max_new_tokens=1)])
    assert counted.take() == len(turn)
    # Requests whose states cannot be had end with the reason.
    monkeypatch.setattr(subquad.PrefixCache, "begin", lambda *arguments: 1 / 0)
    with batching(model) as manager:
        (output,) = collect(manager, [manager.add_request(turn, max_new_tokens=1)])
    assert output.error == "division by zero"


@pytest.mark.fast
def test_models_without_it():
    """`transformers serve` looks for the method, and then answers one request after the other."""
    for case in GROWING:
        model = case.model()
        assert not hasattr(model, "init_continuous_batching")
        with pytest.raises(ValueError, match="grows with the text"):
            model.generate_batch([[1, 2]])
    with pytest.raises(ValueError, match="reads images"):
        VISUAL[0].model().generate_batch([[1, 2]])


def test_fields_without_effect(caplog):
    model, (ids, *_) = finch(), prompts(1)
    model.generate_batch(
        [ids], continuous_batching_config=ContinuousBatchingConfig(num_blocks=64, use_cuda_graph=True)
    )
    assert "'num_blocks', 'use_cuda_graph'" in caplog.text
    assert model.generate_batch([]) == {}
    with pytest.raises(TypeError, match="no_such_argument"):
        model.init_continuous_batching(no_such_argument=1)
