"""States of texts in files: found by other processes and later, and never wrong, whatever happens to the files."""

import os
import random
import signal
import subprocess
import sys
import threading

import pytest
import torch
from cases import CASES, GREEDY
from limited import limited
from safetensors import SafetensorError
from test_prefix_cache import LORA, TUNED, adapted, few_shot, scale, write

from subquad import PrefixCache
from subquad.decoding.generation import RecurrentGenerationMixin
from subquad.hub.new_files import PARTIAL
from subquad.modeling.state_file import read_state_file, write_state_file
from subquad.states.fingerprint import digest_of
from subquad_cli.common import UsageError
from subquad_cli.run import _keep_states, _take_option


FINCH = CASES["rwkv6"]


def read(model, ids, path, **options):
    """The cache after a text, and the number of tokens read for it, with a new prefix cache."""
    prefixes = PrefixCache(directory=path, **options)
    cache = prefixes.read(model, ids)
    prefixes.flush()
    return cache, prefixes.tokens_read


@pytest.mark.parametrize("name", ["rwkv6", "avey", "raven", "gecko"])
def test_files(name, tmp_path):
    case = CASES[name]
    model, texts = case.model(), few_shot(case, 3)
    for ids in texts:
        read(model, ids[0], tmp_path)  # each in a process of its own
    found, tokens = read(model, texts[2][0], tmp_path)
    assert tokens == 0 and len(list(tmp_path.iterdir())) == 4
    with torch.no_grad():
        expected = model(texts[2], use_cache=True).cache
        logits = [model(case.ids(1, 1), cache=cache).logits for cache in (found, expected)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    # Those of another model, of another dtype, and damaged ones do not count.
    assert read(case.model(seed=1), texts[0][0, :40], tmp_path)[1] == 40
    length = texts[0].shape[1]
    assert read(case.model().to(torch.bfloat16), texts[0][0], tmp_path)[1] == length
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    assert read(model, texts[0][0], tmp_path)[1] == length


@pytest.mark.fast
def test_files_only_help(tmp_path):
    """Whatever a directory holds, and whatever its disk is like, texts are read, with one warning."""
    model, ids, options = FINCH.model(), FINCH.ids(1, 30), {"max_new_tokens": 5, **GREEDY}
    expected = model.generate(ids, **options)
    read(model, ids[0, :-1], tmp_path)
    (file,) = tmp_path.iterdir()
    content, (states, about) = file.read_bytes(), read_state_file(file)
    known = about["text"]["ids"]
    for forged in (
        {"seen_tokens": 28},
        {"seen_tokens": 3 * 10**8},
        {"text": {"ids": [10**30] * 29}},
        {"text": {"ids": [0.5] * 29}},
        {"text": {"ids": [[]] * 29}},
        {"text": {"ids": [*known[:-1], -1]}},
        {"text": {"ids": []}, "seen_tokens": 0},
        {"sizes": {}},
        {"model": 3},
        {"model": {"name": "tiny", "digest": "0123456789abcdef"}},
        {"dtype": 3},
        {"layers.0.wkv": torch.zeros(1)},
        {"after_blocks.output": None},
        {"layers.0.wkv": torch.full((1, 3, 16, 16), torch.nan)},
        {"x": torch.zeros(())},
    ):
        changed = states | {name: x for name, x in forged.items() if name not in about}
        changed = {name: x for name, x in changed.items() if x is not None}
        write_state_file(file, changed, about | {name: x for name, x in forged.items() if name in about})
        prefixes = PrefixCache(directory=tmp_path)
        assert torch.equal(model.generate(ids, prefix_cache=prefixes, **options), expected), forged
        assert prefixes.tokens_read == 29, forged
        prefixes.flush()
        for path in tmp_path.iterdir():
            path.unlink()
    (tmp_path / "directory.state").mkdir()
    os.mkfifo(tmp_path / "pipe.state")
    (tmp_path / "bytes.state").write_bytes(content[:100])
    (tmp_path / "not-a-directory").write_bytes(b"")
    for directory in (tmp_path, tmp_path / "not-a-directory", tmp_path / "not-a-directory" / "below"):
        prefixes = PrefixCache(directory=directory)
        for _ in range(2):
            assert torch.equal(model.generate(ids, prefix_cache=prefixes, **options), expected)
        assert prefixes.tokens_read == 29 and prefixes.tokens_asked == 58
        prefixes.flush()


def test_a_file_that_is_damaged_later_is_written_again(tmp_path):
    model, ids = FINCH.model(), FINCH.ids(20)
    read(model, ids, tmp_path)
    (file,) = tmp_path.iterdir()
    prefixes = PrefixCache(directory=tmp_path)
    prefixes.read(model, FINCH.ids(17, seed=3))
    file.write_bytes(file.read_bytes()[:-1])
    prefixes.read(model, ids)
    prefixes.flush()
    assert prefixes.tokens_read == 37
    assert read(model, ids, tmp_path)[1] == 0


def test_a_full_disk_loses_no_answer(tmp_path, monkeypatch):
    model, ids, options = FINCH.model(), FINCH.ids(1, 30), {"max_new_tokens": 5, **GREEDY}
    expected, warnings = model.generate(ids, **options), []
    monkeypatch.setattr("subquad.states.prefix_files.logger.warning_once", warnings.append)

    def save_file(tensors, path, metadata):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("subquad.modeling.state_file.save_file", save_file)
    prefixes = PrefixCache(directory=tmp_path)
    assert torch.equal(model.generate(ids, prefix_cache=prefixes, **options), expected)
    assert torch.equal(model.generate(ids, prefix_cache=prefixes, **options), expected)
    prefixes.flush()
    assert prefixes.tokens_read == 29 and not list(tmp_path.iterdir())
    assert len({*warnings}) == 1 and "No space left on device" in warnings[0]


def test_files_have_a_limit(tmp_path):
    """Those that were used longest ago go, also those of other models, by size and by number."""
    model, other = FINCH.model(), FINCH.model(seed=1)
    read(model, FINCH.ids(20), tmp_path)
    (file,) = tmp_path.iterdir()
    size = file.stat().st_size
    for options in ({"max_disk_bytes": int(2.5 * size)}, {"max_entries": 2}):
        for seed in range(3):
            read(model, FINCH.ids(20, seed=seed), tmp_path, **options)
        assert len(list(tmp_path.iterdir())) == 2
        assert read(model, FINCH.ids(20, seed=1), tmp_path, **options)[1] == 0
        read(other, FINCH.ids(20), tmp_path, **options)
        assert read(model, FINCH.ids(20, seed=1), tmp_path, **options)[1] == 0  # it was used later than the third
        assert read(model, FINCH.ids(20, seed=2), tmp_path, **options)[1] == 20
    # What memory has no room for comes back from its file.
    prefixes = PrefixCache(max_bytes=1, directory=tmp_path)
    for seed in (5, 6, 5):
        prefixes.read(model, FINCH.ids(20, seed=seed))
        prefixes.flush()
    assert prefixes.tokens_read == 40 and prefixes.nbytes == prefixes.read(model, FINCH.ids(20, seed=6)).nbytes
    prefixes.clear()
    assert read(model, FINCH.ids(20, seed=5), tmp_path)[1] == 20


def test_files_of_other_processes(tmp_path):
    """They are found as soon as they are there, and missed quietly once they are gone."""
    model, ids, warnings = FINCH.model(), FINCH.ids(20), []
    prefixes = PrefixCache(directory=tmp_path)
    prefixes.read(model, FINCH.ids(18, seed=1))
    prefixes.flush()
    limited(lambda: read(model, ids, tmp_path))
    prefixes.read(model, ids)
    assert prefixes.tokens_read == 18
    prefixes = PrefixCache(directory=tmp_path)
    prefixes.read(model, FINCH.ids(17, seed=2))
    prefixes.flush()
    prefixes.read(model, FINCH.ids(17, seed=2))  # looks at the directory for the last time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subquad.states.prefix_files.logger.warning", warnings.append)
        patch.setattr(prefixes.directory, "changed", lambda: False)
        for file in tmp_path.iterdir():
            file.unlink()
        prefixes.read(model, ids)
    assert prefixes.tokens_read == 17 + 20 and warnings == []


def expect(model, caches, ids):
    """Compares caches with the one of a text."""
    with torch.no_grad():
        wanted = model(ids[None], use_cache=True).cache.named_states()
    for cache in caches:
        found = cache.named_states()
        assert found.keys() == wanted.keys() and cache.get_seq_length() == len(ids)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_two_processes_evict(tmp_path):
    """Both delete the files of the other, which may be reading them."""
    model, chance = FINCH.model(), random.Random(0)
    texts = [FINCH.ids(20 + n, seed=n) for n in range(6)]
    read(model, texts[0], tmp_path)
    size = next(tmp_path.iterdir()).stat().st_size

    def work():
        for _ in range(12):
            prefixes = PrefixCache(max_bytes=1, directory=tmp_path, max_disk_bytes=3 * size)
            for text in chance.sample(texts, 3):
                expect(model, [prefixes.read(model, text)], text)
            prefixes.flush()

    threads = [threading.Thread(target=lambda: done.append(limited(work))) for _ in range(2)]
    done = []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 2
    assert len([file for file in tmp_path.iterdir() if not PARTIAL.fullmatch(file.name)]) <= 4


@pytest.mark.parametrize("point", ["save_file", "sync", "os.replace"])
def test_a_killed_writer(point, tmp_path, monkeypatch):
    """Its file is whole or absent, and what it leaves is removed by the next writer."""
    model, ids = FINCH.model(), FINCH.ids(20)

    def work():
        place = {"save_file": "subquad.modeling.state_file.save_file", "sync": "subquad.hub.new_files.sync"}
        monkeypatch.setattr(place.get(point, point), lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
        read(model, ids, tmp_path)

    with pytest.raises(AssertionError, match="ended by SIGKILL"):
        limited(work)
    assert [file for file in tmp_path.iterdir() if PARTIAL.fullmatch(file.name)]
    assert read(model, ids, tmp_path)[1] == 20
    assert read(model, ids, tmp_path)[1] == 0 and len(list(tmp_path.iterdir())) == 1


def test_files_are_written_in_the_background(tmp_path):
    """Nobody waits for them but the end of the process, and no more of them wait than memory may take."""
    model, prefixes, slow = FINCH.model(), PrefixCache(directory=tmp_path), threading.Event()
    write_one = prefixes.directory._write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes.directory, "_write", lambda *job: (slow.wait(60), write_one(*job)))
        size = prefixes.read(model, FINCH.ids(20)).nbytes
        prefixes.max_bytes = 2 * size
        for seed in range(1, 6):
            prefixes.read(model, FINCH.ids(20, seed=seed))
        assert not list(tmp_path.iterdir()) and prefixes.directory.waiting_bytes == 2 * size
        slow.set()
        prefixes.flush()
    assert len(list(tmp_path.iterdir())) == 3 and prefixes.directory.waiting_bytes == 0
    prefixes.read(model, FINCH.ids(20, seed=2))  # it was dropped from memory, and is in a file
    assert prefixes.tokens_read == 120


@pytest.mark.thorough
def test_a_process_ends_when_its_files_are_written(tmp_path):
    code = """
import sys, torch
from cases import CASES
from subquad import PrefixCache
from subquad.decoding.generation import RecurrentGenerationMixin
PrefixCache(directory=sys.argv[1]).read(CASES["rwkv6"].model(), torch.arange(20))
"""
    path = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=os.environ | {"PYTHONPATH": path})
    assert read(FINCH.model(), torch.arange(20), tmp_path)[1] == 0


def damage(files, chance):
    """One of the things that may happen to a file."""
    file, other = chance.choice(files), chance.choice(files)
    content = bytearray(file.read_bytes())
    kind = chance.randrange(7)
    if kind == 0:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del content[chance.randrange(len(content)) :]
    elif kind == 2:
        content = bytearray(other.read_bytes())  # under another text's name
    elif kind == 3:
        content[:8] = chance.randbytes(8)
    elif kind == 4:
        place = chance.randrange(len(content))
        content[place : place + 64] = bytes(64)
    elif kind == 5:
        file.unlink()
        return
    else:
        file.unlink()
        file.mkdir()
        return
    file.write_bytes(content)


@pytest.mark.parametrize(
    "number", [12, pytest.param(50, marks=pytest.mark.thorough), pytest.param(300, marks=pytest.mark.slow)]
)
def test_faults(number, tmp_path, monkeypatch):
    """Files are damaged, exchanged and lost, before they are found and while they are in use: no state is wrong."""
    model, chance = FINCH.model(), random.Random(number)
    monkeypatch.setattr("subquad.states.prefix_files.logger.warning", lambda text: None)
    texts = [torch.cat((FINCH.ids(30), FINCH.ids(4 + n, seed=n))) for n in range(1, 5)]
    missed = 0
    for n in range(number):
        for path in tmp_path.iterdir():
            if path.is_dir():
                path.rmdir()
        prefixes = PrefixCache(directory=tmp_path)
        for text in texts:
            prefixes.read(model, text)
        prefixes.flush()
        files = [file for file in tmp_path.iterdir() if file.is_file()]
        prefixes = PrefixCache(max_bytes=1, directory=tmp_path)
        if n % 2:
            prefixes.read(model, FINCH.ids(17, seed=9))  # notes the files
            prefixes.flush()  # so that nobody writes what is damaged now
        for _ in range(chance.randrange(1, 4)):
            if files := [file for file in files if file.is_file()]:
                damage(files, chance)
        asked = prefixes.tokens_read
        for text in chance.sample(texts, 4):
            expect(model, [prefixes.read(model, text)], text)
        missed += prefixes.tokens_read > asked
        prefixes.flush()
    assert missed > number / 2


@torch.no_grad()
def write_one(model):
    """Changes a single number, none of those that are compared at every text."""
    model.get_base_model().head.weight[0, 1] += 1


CHANGES = {
    "weights": lambda model: write(model, False),
    "one weight": write_one,
    "through data": lambda model: write(model, True),
    "adapter": lambda model: model.set_adapter("1"),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "scaling": scale,
    "merged": lambda model: model.merge_adapter(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_files_belong_to_weights_and_adapters(name, tmp_path):
    """Also in a process of its own, where nobody has seen the model as it was."""
    model, ids = adapted(LORA, LORA), FINCH.ids(20)
    base = model.get_base_model()
    before = digest_of(base)
    assert digest_of(adapted(LORA, LORA).get_base_model()) == before
    assert [read(base, ids, tmp_path)[1] for _ in range(2)] == [20, 0]
    CHANGES[name](model)
    assert digest_of(base) != before
    cache, tokens = read(base, ids, tmp_path)
    assert tokens == 20
    expect(base, [cache], ids)


def test_files_of_a_model_that_changes(tmp_path):
    """Each set of active adapters has its own."""
    model, ids = adapted(TUNED), FINCH.ids(20)
    base, prefixes = model.get_base_model(), PrefixCache(directory=tmp_path)

    def ask():
        before = prefixes.tokens_read
        expect(base, [prefixes.read(base, ids)], ids)
        prefixes.flush()
        return prefixes.tokens_read - before

    assert [ask(), ask()] == [20, 0]
    with model.disable_adapter():
        assert [ask(), ask()] == [20, 0]
    assert ask() == 0 and len(list(tmp_path.iterdir())) == 2
    write(base, False)
    prefixes.clear()
    assert ask() == 20 and len(list(tmp_path.iterdir())) == 2  # those of the earlier weights were deleted
    prefixes.clear()
    prefixes.clear()  # another model may come
    prefixes.read(FINCH.model(), ids)


def test_no_files_of_what_cannot_be_identified(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr("subquad.states.prefix_cache.logger.warning_once", warnings.append)
    model, ids = FINCH.model(), FINCH.ids(20)
    read(model, ids, tmp_path)
    handle = model.base_model.blocks[0].register_forward_hook(lambda module, inputs, output: output.flip(-1))
    cache, tokens = read(model, ids, tmp_path)
    assert tokens == 20 and len(list(tmp_path.iterdir())) == 1
    expect(model, [cache], ids)
    assert len(warnings) == 1 and "has a hook" in warnings[0]
    handle.remove()
    assert read(model, ids, tmp_path)[1] == 0


def test_a_server_goes_on_after_a_restart(tmp_path, monkeypatch):
    """`subquad run transformers serve --prefix-cache DIRECTORY`"""
    arguments = ["serve", "model", "--prefix-cache", str(tmp_path), "--port", "9"]
    assert _take_option(arguments, "--prefix-cache") == str(tmp_path) and arguments == [
        "serve",
        "model",
        "--port",
        "9",
    ]
    assert _take_option(["--prefix-cache=a=b"], "--prefix-cache") == "a=b"
    assert _take_option(arguments, "--prefix-cache") is None
    with pytest.raises(UsageError, match="--prefix-cache needs a value"):
        _take_option(["serve", "--prefix-cache"], "--prefix-cache")
    with pytest.raises(UsageError, match="was given twice"):
        _take_option(["--prefix-cache=a", "--prefix-cache", "b"], "--prefix-cache")

    monkeypatch.setattr(RecurrentGenerationMixin, "make_prefix_cache", None)
    _keep_states(str(tmp_path))
    turns, prompt = [], FINCH.ids(40).tolist()
    for turn in range(3):
        model = FINCH.model()
        with model.continuous_batching_context_manager() as manager:
            name = manager.add_request(prompt, max_new_tokens=8, eos_token_id=-1)
            answer = manager.get_result(name, timeout=60).generated_tokens
        prefixes = model.own_prefix_cache
        prefixes.flush()
        expected = FINCH.model().generate(torch.tensor([prompt]), max_new_tokens=8, prefix_cache=None, **GREEDY)
        assert answer == expected[0, -8:].tolist()
        turns.append(prefixes.tokens_read)
        prompt = prompt + answer + [5, 6, 7 + turn]
    assert turns == [39, 3, 3]
