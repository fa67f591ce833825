"""The benchmarks: every part of every script runs, and what is wrong is not measured."""

import contextlib
import csv
import importlib
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import fake_gpu


ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "benchmarks", ROOT / "kernels" / "benchmarks")
SHARED = ("benchmark", "measuring")
OPERATORS = sorted({path.stem for path in FOLDERS[1].glob("*.py")} - {*SHARED})
CPU = ("--quick", "--device", "cpu")
EAGER = {"triton": "eager", "eager": "eager", "reference": "reference"}


@pytest.fixture(scope="module")
def scripts():
    """Imports a script by its name; the modules are gone once the tests are over."""
    before, path = set(sys.modules), sys.path[:]
    sys.path[:0] = [*map(str, FOLDERS), str(ROOT / "examples")]
    yield importlib.import_module
    sys.path[:] = path
    own = {path.stem for folder in (*FOLDERS, ROOT / "examples") for path in folder.glob("*.py")}
    for name in own & (set(sys.modules) - before):
        del sys.modules[name]


def kind_of(module):
    """The class of the cases that the script of an operator measures."""
    (kind,) = (
        x
        for x in vars(module).values()
        if isinstance(x, type) and x.__module__ == module.__name__ and "ours" in vars(x)
    )
    return kind


@pytest.fixture
def run(scripts, monkeypatch, tmp_path):
    """Runs the script of an operator in its eager form, or that of models; returns the rows that it writes."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(scripts("measuring"), "plot", lambda *how: None)

    def call(name, *options, code=0):
        arguments, module = [*CPU, "--out", str(tmp_path), *options], scripts(name)
        try:
            module.main(arguments) if name == "models" else scripts("benchmark").main(kind_of(module), arguments)
        except SystemExit as error:
            assert error.code == code
        with open(tmp_path / f"{name}.csv", newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    return call


def assert_measured(rows):
    assert not [row["note"] for row in rows if row["note"].startswith(("failed", "out of memory"))]
    assert all(row["part"] == "check" or float(row["milliseconds"]) > 0 for row in rows)


# Operators.


@pytest.mark.quick_cases("wkv", "token_shift")
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_measured(name, scripts, run, tmp_path, capsys):
    rows = run(name)
    assert_measured(rows)
    steps = {"step"} if "step quick" in kind_of(scripts(name)).sizes else set()
    assert {row["part"] for row in rows} == {"check", "operator"} | steps
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(report["rows"]) == len(rows)
    assert report["versions"] in (tmp_path / f"{name}.md").read_text()
    assert "0 of" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["wkv", "chunk_attention"])
def test_an_operator_is_measured_on_a_gpu(name, scripts, run, monkeypatch):
    """The kernels are tested elsewhere: the eager form stands for them."""
    kind = kind_of(scripts(name))
    right = kind.ours
    monkeypatch.setattr(
        kind, "ours", lambda self, backend, *how, **inputs: right(self, EAGER[backend], *how, **inputs)
    )
    with fake_gpu():
        rows = run(name, "--device", "cuda", "--parts", "check", "operator", "step")
    failed = [row["note"] for row in rows if row["note"].startswith(("failed", "out of memory", "not done"))]
    assert [note for note in failed if "does not support backward on CPU" not in note] == []
    steps = {row["what"].rpartition(" step")[2] for row in rows if row["part"] == "step"}
    assert steps == ({"", ", graph"} if "step quick" in kind.sizes else set())


@pytest.mark.parametrize("wrong", ["kernel", "in place", "peer"])
def test_what_is_wrong_is_not_measured(wrong, scripts, run, monkeypatch):
    kind = kind_of(scripts("timestep_decay_norm"))
    ours, plain = kind.ours, kind.plain

    def changed(self, backend, inplace=False, **inputs):
        if wrong == "in place":  # the right result, in new memory
            inputs = {key: x.clone() for key, x in inputs.items()} if inplace else inputs
        out, *states = ours(self, backend, inplace, **inputs)
        return (out * 1.001 if wrong == "kernel" and backend != "reference" else out, *states)

    monkeypatch.setattr(kind, "ours", changed)
    if wrong == "peer":
        monkeypatch.setattr(kind, "plain", lambda self, **inputs: plain(self, **inputs) * 1.001)
    assert {row["part"] for row in run("timestep_decay_norm", code=1)} == {"check"}


def test_a_row_that_fails_stops_nothing(scripts, tmp_path):
    results = scripts("measuring").Results(tmp_path / "rows.csv", "cpu", 60, "versions")
    row = {"part": "operator", "what": "forward", "implementation": "fla", "length": 8}

    def fail(error):
        raise error

    assert not results.measure(row, lambda: fail(torch.OutOfMemoryError("17 GiB")))
    assert not results.measure({**row, "implementation": "subquad"}, lambda: fail(ValueError("no\nsuch thing")))
    assert results.measure({**row, "length": 16}, lambda: {"milliseconds": 2.0})
    results.deadline = 0
    assert not results.measure({**row, "length": 32}, lambda: fail(AssertionError("too late")))
    assert (results.failed, results.skipped) == (1, 1)
    with open(tmp_path / "rows.csv", newline="", encoding="utf-8") as file:
        notes = [row["note"] for row in csv.DictReader(file)]
    assert notes == ["out of memory", "failed: ValueError: no", ""]
    results.bar.close()


def test_ours_is_measured_first_and_the_rest_later(run):
    measured = run("wkv", "--parts", "operator", "step", "--ours")
    assert {row["implementation"] for row in measured} == {"subquad"}
    rows = run("wkv", "--parts", "operator", "step", "--resume")
    assert rows[: len(measured)] == measured  # not again
    assert "subquad" not in {row["implementation"] for row in rows[len(measured) :]}


def test_a_share_of_what_is_compiled(scripts, run, monkeypatch):
    """The others' configurations are shared, and the first share has ours too. Nothing else is compiled."""
    monkeypatch.setattr(kind_of(scripts("wkv")), "peers", ("FlashAttention",))
    measured = run("wkv", "--parts", "operator", "step", "--compile-only", "2/2")
    assert {row["implementation"] for row in measured} == {"FlashAttention"}
    rows = run("wkv", "--parts", "operator", "step", "--compile-only", "1/2")
    assert {row["implementation"] for row in rows} == {"subquad", "FlashAttention"}


# Models.


def test_a_brief_run_of_a_model(run):
    rows = run("models", "--models", "finch", "--parts", "read", "decode", "generate", "train", "--brief")
    assert_measured(rows)
    found = {name: {row["what"] for row in rows if row["implementation"] == name} for name in ("subquad", "Llama")}
    assert found["Llama"] == {"finch first token", "finch generate", "finch training"} < found["subquad"]
    assert not found["subquad"] & {"finch all tokens", "finch training, checkpointed"}
    assert all("torch" in row["versions"] and row["date"] and row["command"] for row in rows)


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_model_is_measured(device, scripts, run):
    models = scripts("models")
    names = ("finch", "avey", "avey-b") if device == "cuda" else models.MODELS
    parts = set(models.PARTS) - ({"check", "long"} if device == "cuda" else set())
    with fake_gpu() if device == "cuda" else contextlib.nullcontext():
        rows = run("models", "--models", *names, "--parts", *parts, "--device", device)
    assert_measured(rows)
    assert {row["part"] for row in rows} == {*parts, "made"}
    found = {(row["what"], row["implementation"]) for row in rows}
    for name in names:
        whats = ("all tokens", "training") + ("first token", "one more token") * (name != "avey-b")
        assert found >= {(f"{name} {what}", "subquad") for what in whats}
    assert found >= {("avey first token", "plain"), ("avey-b all tokens", "ModernBERT")}


def test_a_wrong_model_is_not_measured(scripts, run, monkeypatch):
    ours = scripts("models").Ours
    right = ours.logits
    monkeypatch.setattr(ours, "logits", lambda self, ids, **how: right(self, ids, **how) * 1.01)
    rows = run("models", "--models", "avey-b", "--parts", "check", "read", code=1)
    assert {row["part"] for row in rows} == {"check"}


def test_finch_is_measured_on_a_cpu(scripts, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    names = ["subquad float32", "subquad int8", "subquad int4", "llama.cpp F32", "rwkv fp32"]
    scripts("cpu").main(["--quick", "--out", str(tmp_path), "--zeros", "0.85", "--implementations", *names])
    assert "llama.cpp is left out: there are no compilers of C and C++" in capsys.readouterr().out
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert all(row["milliseconds"] > 0 for row in rows if row["part"] != "error")
    errors = {row["implementation"]: float(row["note"].split()[1]) for row in rows if row["part"] == "error"}
    assert errors["subquad float32"] == 0 < errors["rwkv fp32"] < 1e-4
    assert 1e-3 < errors["subquad int8"] < 0.2 and errors["subquad int8"] < errors["subquad int4"] < 0.5


@pytest.mark.thorough
def test_the_start_is_measured(scripts, tmp_path):
    scripts("startup").main(["--quick", "--out", str(tmp_path)])
    rows = {row["what"]: row for row in json.loads((tmp_path / "startup.json").read_text())["rows"]}
    ready, first = (rows[f"subquad generate: {moment}"]["milliseconds"] for moment in ("ready", "first token"))
    assert 0 < ready < first


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's numbers")
def test_tables_are_measured(scripts, capsys):
    scripts("deep_embed").main(["--quick", "--variants", "7b", "--contexts", "4", "--rounds", "1", "--tokens", "2"])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == [
        *("Goose", "Goose, in torch", "7b, tables as in checkpoints", "7b, merged", "7b, merged, mapped"),
    ]
    assert all(float(number) > 0 for row in rows for number in row[2:5])
    assert sum("6 rows of a token" in line for line in lines) == 2


@pytest.mark.thorough
def test_the_loss_of_int8_is_measured(scripts, tmp_path):
    scripts("quantised").main(["--quick", "--models", "finch-abc", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "quantised.json").read_text())["rows"]
    losses = {row["dtype"]: float(row["note"].split()[0]) for row in rows if row["part"] == "loss"}
    assert losses["int8"] != losses["float32"]
    assert all(abs(loss / losses["float32"] - 1) < (0.05 if way == "int4" else 0.01) for way, loss in losses.items())


@pytest.mark.thorough
def test_the_loss_of_stored_states_is_measured(scripts, monkeypatch, capsys):
    stored, corpus = scripts("stored_states"), scripts("abc_corpus")
    tunes = [f"X:1\nT:{letter}\nM:6/8\nL:1/8\nK:D\n" for letter in "ABCDEFGH"]
    monkeypatch.setattr(corpus, "load_corpus", lambda: corpus.Corpus([], tunes, {}))
    for name, value in {"MODELS": ("finch-abc",), "SIZE": 32, "TEXTS": 2, "LENGTH": 32}.items():
        monkeypatch.setattr(stored, name, value)
    mqar, tracking = stored.mqar, stored.tracking
    monkeypatch.setattr(mqar, "train", lambda options, *how, seed: (mqar.make(how[0], options, *how[1:]), {}))
    monkeypatch.setattr(tracking, "train", lambda *how: (tracking.make(*how[:-1], lr=1e-3), 0))
    monkeypatch.setattr(sys, "argv", ["stored_states.py"])
    stored.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "|  | stored | float32 | int8 | float16 | bfloat16 |" and len(lines) == 2 + 3 * 5
    (case,) = stored.repeats()
    right, bits = stored.measure(case, [32], stored.STORES["float32"])
    assert f"| finch-abc | once | {right:.1%} ({bits:.5f}) | " in lines[2]
    assert abs(stored.measure(case, [32], lambda model, cache: model.new_cache())[1] - bits) > 1e-3
    with torch.no_grad():
        logits = case.model(case.ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), case.labels.flatten())
    assert bits == pytest.approx(expected.item() / math.log(2), rel=1e-4)


@pytest.mark.thorough
def test_clients_of_a_prefix_cache_are_measured(scripts, monkeypatch, capsys):
    options = "--clients 3 --width 64 --layers 1 --turns 2 --role 48 --turn 16"
    monkeypatch.setattr(sys, "argv", ["prefix_cache.py", *options.split()])
    script = scripts("prefix_cache")
    monkeypatch.setattr(script.Rwkv6ForCausalLM, "make_prefix_cache", None)
    script.main()
    shares = [float(line.split("%")[0].split()[-1]) for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(shares) == 3 and all(30 < share < 90 for share in shares[:2]) and shares[2] == 100


@pytest.mark.thorough
def test_adapters_are_compared(scripts, tmp_path, monkeypatch):
    corpus = scripts("abc_corpus")
    tunes = [f"X:1\nT:A\nM:C\nL:1/8\nK:G\nG2{letter}2 a'z|^f/2 z4 (3DEF|]" for letter in "ABcdefg"]
    monkeypatch.setattr(corpus, "load_corpus", lambda: corpus.Corpus(tunes[2:], tunes[:2], {}))
    chosen = ["state tuning", "low ranks, rank 4"]
    scripts("adapters").main(["--quick", "--adapters", *chosen, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "adapters.json").read_text())["rows"]
    assert len({row["note"].split()[0] for row in rows}) == 2


# Everything on a GPU, in one run.


@pytest.fixture
def gpu(scripts, monkeypatch, tmp_path):
    """The script, with tiny tasks: `call(name=(step, code), ...)` runs them; the options follow the names."""
    module = scripts("gpu")
    monkeypatch.setattr(module, "PERIOD", 0.1)
    monkeypatch.setattr(module, "GRACE", 0)
    monkeypatch.setattr(module, "BESIDE", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def call(*options, **programs):
        made = [module.Task(name, step, ["-Sc", code], 0.2) for name, (step, code) in programs.items()]
        monkeypatch.setattr(module, "tasks", lambda out: made)
        with pytest.raises(SystemExit) as ended:
            module.main(["--out", str(tmp_path), *options])
        return ended.value.code

    call.seconds = lambda **limits: monkeypatch.setattr(module, "STEPS", limits)
    call.limits = lambda: module.STEPS
    call.record = lambda: json.loads((tmp_path / "gpu.json").read_text())
    call.report = lambda: (tmp_path / "RESULTS.md").read_text()
    yield call
    for number, handler in before.items():
        signal.signal(number, handler)


def stamped(name, seconds=0.0):
    """A program that leaves the times of its beginning and end."""
    return f"""import time; start = time.time(); time.sleep({seconds})
open({name!r}, "w").write(f"{{start}} {{time.time()}}")"""


def test_nine_minutes_are_enough(scripts):
    gpu = scripts("gpu")
    assert sum(gpu.STEPS.values()) == 540 and [*gpu.STEPS][:2] == ["kernels", "contract"]
    made = [*gpu.tasks(Path("out"))]
    assert [task.step for task in made] == sorted((task.step for task in made), key=[*gpu.STEPS].index)
    for task in made:
        assert ("LIMIT" in task.words) == (task.step not in ("kernels", "contract"))
        # What is compiled beside the tests leaves no rows, and ours is measured before the others.
        assert ("--out" in task.words) == (task.step in ("models", "operators"))
    assert [task.name for task in made if "--ours" in task.words and task.step == "models"] == ["models ours"]


def test_every_script_understands_its_options(scripts, monkeypatch):
    """Each command of `make gpu` is parsed by the script that it starts."""
    started = []

    def benchmark(name, options, measure):
        started.append((name, options.minutes, options.share))

    for name in ("benchmark", "models"):
        monkeypatch.setattr(scripts(name), "run_benchmark", benchmark)
    for task in scripts("gpu").tasks(Path("out")):
        script, *words = task.words
        words, name = ["0.5" if word == "LIMIT" else word for word in words], Path(script).stem
        if script == "-m":
            assert Path(words[-1]).is_dir()
        elif name == "models":
            scripts(name).main(words)
        else:
            scripts("benchmark").main(kind_of(scripts(name)), words)
    names = {"models", "wkv", "delta_wkv", "slot_memory"}
    assert {(name, share) for name, _, share in started} == {*itertools.product(names, (None, (1, 2), (2, 2)))}
    assert {minutes for _, minutes, _ in started} == {0.5}


def test_compilation_runs_beside_the_tests(gpu, tmp_path):
    gpu.seconds(kernels=20, contract=20, compile=20, models=20)
    steps = {"kernels": "kernels", "contract": "contract", "models": "models"}
    steps |= {"first": "compile", "second": "compile", "third": "compile"}
    ordered = sorted(steps, key=lambda name: [*gpu.limits()].index(steps[name]))
    assert gpu("--minutes", "1", **{name: (steps[name], stamped(str(tmp_path / name), 0.5)) for name in ordered}) == 0
    assert {about["end"] for about in gpu.record().values()} == {"done"} and gpu.report().count(": done (") == 6
    at = {name: [float(x) for x in (tmp_path / name).read_text().split()] for name in steps}
    # It does not wait for the tests, two commands run at a time, and it is over before anything is measured.
    together = [at[name] for name in ("kernels", "first", "second")]
    assert max(start for start, _ in together) < min(end for _, end in together)
    assert at["contract"][0] > at["kernels"][1] and at["third"][0] > min(at["first"][1], at["second"][1])
    assert at["models"][0] > max(end for name, (_, end) in at.items() if name != "models")


def test_a_command_that_hangs_or_fails_stops_nothing(gpu):
    """Commands of a step share its time, and what is left of it is the next one's."""
    gpu.seconds(kernels=0.5, models=0.5, operators=1)
    programs = {"kernels": ("kernels", ""), "slow": ("models", "import time; time.sleep(60)")}
    programs |= {"wrong": ("models", "exit('no')"), "right": ("operators", "import time; time.sleep(1)")}
    assert gpu("--minutes", "0.12", **programs) == 1
    ends = {name: about["end"] for name, about in gpu.record().items()}
    assert ends == {"kernels": "done", "slow": "not done in its time", "wrong": "exit status 1", "right": "done"}
    assert gpu.record()["slow"]["seconds"] < 4
    assert "- wrong: exit status 1 (" in gpu.report()
    # What is done is not done again.
    programs |= {"kernels": ("kernels", "exit('again')"), "slow": ("models", ""), "wrong": ("models", "")}
    assert gpu("--minutes", "0.5", "--resume", **programs) == 0


def test_a_run_that_is_cut_off_leaves_a_table_and_goes_on(gpu, scripts, tmp_path):
    gpu.seconds(kernels=30, compile=1, models=30)
    row = {"part": "read", "what": "finch first token", "implementation": "subquad", "milliseconds": 2.5}
    row |= {"versions": "torch 2, a card", "date": "2026-11-27", "command": "models.py --brief"}
    rows = f"""
import csv, time
with open({str(tmp_path / "models.csv")!r}, "w") as file:
    writer = csv.DictWriter(file, {scripts("measuring").FIELDS!r})
    writer.writeheader()
    writer.writerow({row!r})
print("[gw0] [ 50%] PASSED tests/a.py::test_a ")
print("[gw1] [100%] FAILED tests/a.py::test_b[x y] ", flush=True)
time.sleep(60)"""
    pid = tmp_path / "pid"
    waits = f"import os, time; print(os.getpid(), file=open({str(pid)!r}, 'w')); time.sleep(60)"
    programs = {"kernels": ("kernels", rows), "compiles": ("compile", waits), "models": ("models", "")}
    seen = []

    def cut_off():
        end = time.monotonic() + 20
        while time.monotonic() < end and not (pid.exists() and pid.read_text() and seen and "[x y]" in seen[-1]):
            time.sleep(0.05)
            seen.extend([gpu.report()] if (tmp_path / "RESULTS.md").exists() else [])
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=cut_off)
    thread.start()
    assert gpu("--minutes", "1", **programs) == 128 + signal.SIGTERM
    thread.join()
    for report in (seen[-1], gpu.report()):  # what SIGKILL would leave, and what SIGTERM leaves
        assert "| 2.5 |" in report and "1. torch 2, a card; 2026-11-27: `models.py --brief`" in report
        assert "kernels: 1 passed, 1 failed" in report and "- FAILED: tests/a.py::test_b[x y]" in report
        assert "- kernels: cut off" in report and "- compiles: cut off" in report
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    programs |= {"kernels": ("kernels", ""), "compiles": ("compile", "")}
    assert gpu("--minutes", "1", "--resume", **programs) == 0
    assert "| 2.5 |" in gpu.report() and {about["end"] for about in gpu.record().values()} == {"done"}


def test_what_is_compiled_ahead_is_not_tuned(scripts):
    """Each configuration of a share is called once, and the choice is not kept for other processes."""
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    measuring = scripts("measuring")
    real = autotuner.Autotuner.prune_configs

    def called(share):
        tuner = object.__new__(autotuner.Autotuner)
        configs = [autotuner.Config({"SIZE": n}) for n in (16, 32, 64, 128, 256)]
        given = {"arg_names": ["x"], "keys": ["x"], "configs": configs, "cache": {}, "early_config_prune": None}
        vars(tuner).update(given, perf_model=None, pre_hook=lambda *a, **k: None, post_hook=lambda *a, **k: None)
        calls = []
        vars(tuner).update(cache_results=True, fn=SimpleNamespace(run=lambda *a, **k: calls.append(k["SIZE"])))
        with measuring.tuning(SimpleNamespace(brief=True, share=share)):
            tuner.run(8)
        return calls[:-1], calls[-1]  # to compare, and then the best one

    assert [called((n, 2))[0] for n in (1, 2)] == [[16, 64, 256], [32, 128]]
    assert called((6, 7)) == ([], 16)
    assert autotuner.Autotuner.prune_configs is real


def test_the_llama_has_as_many_parameters(scripts):
    models, peers = scripts("models"), scripts("peers")
    for name in ("finch", "goose", "raven"):
        config = models.config_of(models.MODELS[name], SimpleNamespace(preset=None, sizes="cuda", share=(1, 2)))
        config.num_hidden_layers = 4
        with torch.device("meta"):
            ours = models.transformers.AutoModelForCausalLM.from_config(config)
            theirs = peers.llama(ours).model
        sizes = [sum(x.numel() for x in model.parameters()) for model in (ours, theirs)]
        assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
