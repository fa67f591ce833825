"""Hidden units of zero are not read: copies of weights by unit, for one text on a CPU, which are never out of date."""

import copy
import functools
import gc
import threading
import weakref

import pytest
import torch
from cases import lively
from transformers import LogitsProcessor, StoppingCriteria, TextStreamer

from subquad import Int4Config, Int8Config
from subquad.decoding import cpu, step, unit_copies
from subquad.decoding.memory import available_memory
from subquad.decoding.step import make_step
from subquad_kernels.c import native


pytestmark = pytest.mark.skipif(
    native.library() is None and "no C compiler" in native.explain()[1], reason="there is no C compiler"
)


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """All that had copies. The first token has the first one."""
    made, init = [], unit_copies.UnitCopies.__init__

    def keep(self, *args):
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(unit_copies, "_TOKENS_BEFORE", 0)
    monkeypatch.setattr(unit_copies.UnitCopies, "__init__", keep)
    return made


def networks(model):
    blocks = model.base_model.blocks
    return [getattr(block, "ffn", None) or block.feed_forward for block in blocks]


def sparse(name, zeros=0.9, **sizes):
    """A model with that share of hidden units that are always zero; half of the others are, for each token."""
    return copy.deepcopy(_sparse(name, zeros, **sizes))


@functools.cache
def _sparse(name, zeros, **sizes):
    model = lively(name, **sizes)
    for network in networks(model):
        weight = network.key.weight.data
        weight[torch.rand(weight.shape[0], generator=torch.Generator().manual_seed(1)) < zeros] = 0
    return model


# One of each block program.
NAMES = ["finch", "goose-7a"]


def alternating(values):
    """Each value with one of the models."""
    return [(NAMES[n % 2], value) for n, value in enumerate(values)]


@pytest.fixture(params=NAMES)
def model(request):
    return sparse(request.param)


def read(model, ids, alone=True):
    """The logits after each token."""
    step = make_step(model, model.new_cache(), ids.shape[0], alone)
    return torch.cat([step(token) for token in ids.split(1, 1)])


def random_ids(*shape):
    return torch.randint(1, 300, shape, generator=torch.Generator().manual_seed(1))


def plainly(function, *args, **kwargs):
    """What the model's own `forward` gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(step.MAKERS, "cpu")
        return function(*args, **kwargs)


def assert_close(logits, expected, tolerance=1e-5):
    scale = expected.abs().max()
    torch.testing.assert_close(logits / scale, expected / scale, rtol=0, atol=tolerance)


def copied(copies):
    return [x is not None for x in copies._copies]


SIZES = {"middle": {"intermediate_size": 208}, "wide": {"hidden_size": 320, "intermediate_size": 1056}, "usual": {}}


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("dtype", "sizes", "zeros"),
    [
        (DTYPES[(n + m) % 3], sizes, zeros)
        for n, sizes in enumerate(SIZES)
        for m, zeros in enumerate([0, 0.6, 0.95, 1])
    ],
)
def test_equals_the_weights(dtype, sizes, zeros, made):
    if dtype not in native.library().dtypes:
        pytest.skip("needs conversions of float16")
    model = sparse("finch", zeros, **SIZES[sizes]).to(dtype)
    ids = random_ids(1, 6)
    logits = read(model, ids)
    assert copied(*made) == [True, True]
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    assert_close(logits, read(model, ids, alone=False), tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", [Int8Config, Int4Config])
def test_integers(name, method, made, tmp_path):
    """In 8 bits the sums are the same integers; in 4 bits groups are added up in parts."""
    for zeros in (0, 0.9, 1):
        model = sparse(name, zeros, hidden_size=192, intermediate_size=736)
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path, quantization_config=method())
        ids = random_ids(1, 6)
        logits, expected = read(model, ids), read(model, ids, alone=False)
        assert copied(made[-1]) == [True, True]
        assert method is Int4Config or logits.equal(expected)
        # A value that lies between two integers may be rounded to the other one.
        assert_close(logits, expected, 1e-5 if zeros == 1 else 0.02)


@pytest.mark.parametrize("method", [None, Int8Config, Int4Config])
def test_units_of_zero_are_not_read(model, method, made, tmp_path):
    """Nor is the weight itself, once there is a copy."""
    if method is not None:
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path, quantization_config=method())
    step, tokens = make_step(model, model.new_cache(), 1, alone=True), random_ids(1, 4).split(1, 1)
    for _ in range(2):
        step.cache.reset()
        first = [step(token) for token in tokens]
    step.cache.reset()
    (copies,) = made
    for network, copied in zip(networks(model), copies._copies, strict=True):
        network.value.weight.data.fill_(5)
        if method is not Int4Config:
            never = network.key.weight.abs().amax(-1) == 0
            copied.view(network.value.weight.dtype).view(len(never), -1)[never] = torch.nan if method is None else 99
    assert all(step(token).equal(x) for token, x in zip(tokens, first, strict=True))


def test_threads():
    threads = torch.get_num_threads()
    model = sparse("goose", hidden_size=192, intermediate_size=2048)
    try:
        torch.set_num_threads(1)
        expected = read(model, random_ids(1, 5))
        torch.set_num_threads(3)
        assert read(model, random_ids(1, 5)).equal(expected)
    finally:
        torch.set_num_threads(threads)


def generate(model, **options):
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0} | options
    out = model.generate(random_ids(1, 3), output_logits=True, return_dict_in_generate=True, **options)
    return torch.cat(out.logits)


def test_texts_at_the_same_time(model):
    expected, found = generate(model), {}
    workers = [threading.Thread(target=lambda n=n: found.update({n: generate(model)})) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(found[n].equal(expected) for n in range(4))


def of_optimizer(model):
    optimizer = torch.optim.SGD([network.value.weight for network in networks(model)], lr=0.1)
    model(random_ids(2, 4), labels=random_ids(2, 4)).loss.backward()
    optimizer.step()


@torch.no_grad()
def in_place(model):
    for network in networks(model):
        network.value.weight.mul_(-1.5)


def in_data(model):
    """As PEFT merges adapters: no version of the parameter counts it."""
    for network in networks(model):
        network.value.weight.data += 0.1


def new_data(model):
    for network in networks(model):
        network.value.weight.data = torch.randn_like(network.value.weight)


def new_parameter(model):
    for network in networks(model):
        network.value.weight = torch.nn.Parameter(torch.randn_like(network.value.weight))


def loaded(model):
    model.load_state_dict({name: -x for name, x in model.state_dict().items()})


CHANGES = [of_optimizer, in_place, in_data, new_data, new_parameter, loaded, lambda model: model.double().float()]


@pytest.mark.parametrize(("model", "change"), alternating(CHANGES), indirect=["model"])
def test_weights_change_between_texts(model, change, made):
    before = generate(model)
    assert copied(*made) == [True, True]
    change(model)
    logits = generate(model)
    assert_close(logits, plainly(generate, model))
    assert copied(made[1]) == [True, True] and (change is CHANGES[-1]) == logits.equal(before)


class Changing(LogitsProcessor, StoppingCriteria, TextStreamer):
    """Code of a user, which changes the weights when the third token is there."""

    def __init__(self, model):
        self.model, self.calls = model, 0

    def put(self, value):
        self.calls += 1
        if self.calls == 3:
            in_data(self.model)

    def end(self):
        pass

    def __call__(self, input_ids, scores):
        self.put(None)
        return self.result(scores)


PLACES = ["logits_processor", "stopping_criteria", "streamer", "prefix", "hook", "pre_hook", "method"]


@pytest.mark.parametrize(("model", "where"), alternating(PLACES), indirect=["model"])
def test_weights_change_within_a_text(model, where, made):
    """There are no copies wherever somebody's code runs between two tokens."""
    weights = copy.deepcopy(model.state_dict())

    def run():
        model.load_state_dict(weights)
        changing = Changing(model)
        if where == "prefix":
            changing.result = lambda scores: list(range(1, 300))
            return generate(model, prefix_allowed_tokens_fn=changing)
        if where in ("hook", "pre_hook"):
            part = model.get_output_embeddings()
            register = part.register_forward_hook if where == "hook" else part.register_forward_pre_hook
            handle = register(lambda *_: changing.put(None))
            try:
                return generate(model)
            finally:
                handle.remove()
        if where == "method":
            prepare = model.prepare_inputs_for_generation
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    model,
                    "prepare_inputs_for_generation",
                    lambda *args, **kw: changing.put(None) or prepare(*args, **kw),
                )
                return generate(model)
        changing.result = (lambda scores: scores) if where == "logits_processor" else (lambda _: torch.tensor([False]))
        return generate(model, **{where: changing if where == "streamer" else [changing]})

    logits = run()
    assert not made
    assert_close(logits, plainly(run))


def test_steps_that_look_for_changes_have_no_copies(model, made):
    read(model, random_ids(1, 2), alone=False)
    model.decoding_step(model.new_cache(), 1)(random_ids(1, 1))
    read(model, random_ids(2, 2))
    assert not made


def test_copies_end_with_the_text(model, made):
    generate(model)
    copies = weakref.ref(made.pop())
    gc.collect()
    assert copies() is None


def test_the_first_tokens_have_no_copies(model, made, monkeypatch):
    monkeypatch.setattr(unit_copies, "_TOKENS_BEFORE", 3)
    step, counts = make_step(model, model.new_cache(), 1, alone=True), []
    for token in random_ids(1, 6).split(1, 1):
        step(token)
        counts.append(sum(copied(*made)))
    assert counts == [0, 0, 0, 1, 2, 2]


@pytest.fixture
def log(monkeypatch):
    lines = []
    monkeypatch.setattr(unit_copies.logger, "warning_once", lines.append)
    return lines


@pytest.mark.parametrize("available", [0, 2**20, None])
def test_too_little_memory(model, available, made, log, monkeypatch):
    monkeypatch.setattr(unit_copies, "available_memory", lambda: available)
    assert_close(read(model, random_ids(1, 3)), read(model, random_ids(1, 3), alone=False), 0)
    assert copied(*made) == [False, False] and len(log) == 1
    assert ("is not known" if available is None else "less than") in log[0]


def test_a_copy_that_cannot_be_allocated(model, made, log, monkeypatch):
    """The copies before it are still read."""
    run = cpu.FusedBlocks.copy_by_unit

    def refuse(self, number):
        if number == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore")
        return run(self, number)

    monkeypatch.setattr(cpu.FusedBlocks, "copy_by_unit", refuse)
    assert_close(read(model, random_ids(1, 4)), read(model, random_ids(1, 4), alone=False))
    assert copied(*made) == [True, False] and "can't allocate memory" in log[0] and "more" not in log[0]


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite(model, number, dtype, made, log):
    """Zero times such a weight is NaN, with copies or without."""
    networks(model)[0].value.weight.data[-1, -1] = number
    logits = read(model.to(dtype), random_ids(1, 3))
    assert logits.isnan().all() and read(model, random_ids(1, 3), alone=False).isnan().all()
    assert copied(*made) == [False, False] and "not finite" in log[0]


def test_widths_without_copies(made, log):
    model = sparse("finch", hidden_size=144, attention_hidden_size=128)
    assert read(model, random_ids(1, 3)).equal(read(model, random_ids(1, 3), alone=False))
    assert copied(*made) == [False, False] and "multiple of 64, got 144" in log[0]


def test_available_memory(tmp_path):
    """The least of what the machine and the control groups of the process allow."""

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert available_memory(tmp_path) is None
    write("proc/meminfo", "MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    write("proc/self/cgroup", "0::/a/b\n7:cpu,memory:/old\n")
    assert available_memory(tmp_path) == 3000 * 1024
    for group, limit in (("a", "2000000"), ("a/b", "max")):
        write(f"sys/fs/cgroup/{group}/memory.max", limit + "\n")
        write(f"sys/fs/cgroup/{group}/memory.current", "1500000\n")
        write(f"sys/fs/cgroup/{group}/memory.stat", "anon 900000\ninactive_file 300000\nactive_file 100000\n")
    assert available_memory(tmp_path) == 2000000 - 1100000
    write("sys/fs/cgroup/memory/old/memory.limit_in_bytes", "500000\n")
    write("sys/fs/cgroup/memory/old/memory.usage_in_bytes", "400000\n")
    write("sys/fs/cgroup/memory/old/memory.stat", "inactive_file 0\nactive_file 0\n")
    assert available_memory(tmp_path) == 100000
    write("proc/meminfo", "MemTotal: 4000 kB\n")
    assert available_memory(tmp_path) is None


def test_available_memory_of_this_machine():
    if (available := available_memory()) is not None:
        assert 0 < available < 2**48
