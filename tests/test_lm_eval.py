"""The scores of lm-evaluation-harness are those that the models themselves give, on the tasks of examples/lm_eval."""

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import CASES, tiny_model

import subquad
from subquad.hub import export as hub
from subquad_cli import main
from subquad_tokenizers import ByteTokenizer


pytest.importorskip("lm_eval")
pytest.importorskip("music21")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager


TASKS = Path(__file__).resolve().parents[1] / "examples" / "lm_eval"
DATA = {"folders": ["miscFolk"]}  # a few of the tunes
TOKENIZER = ByteTokenizer()
NEW_TOKENS = 8
MODELS = ["rwkv6", "rwkv7_deep_embed", "avey", "raven", "gecko"]
ROWS = 4  # of a batch
# The command of the harness, which would take seconds to look through the tasks that it brings.
HARNESS = """
import functools, runpy, lm_eval.tasks as tasks
tasks.TaskManager = functools.partial(tasks.TaskManager, include_defaults=False)
runpy.run_module("lm_eval", run_name="__main__")
"""


@pytest.fixture(scope="module")
def task_manager():
    return TaskManager(include_path=str(TASKS), metadata=DATA, include_defaults=False)


@torch.no_grad()
def log_likelihood(model, ids, scored, width=0):
    """Of the last `scored` ids, read in one pass; `width` is the length of the row if zeros follow."""
    row = torch.nn.functional.pad(torch.tensor(ids[:-1]), (0, max(0, width - len(ids) + 1)))
    logits = model(row[None]).logits[0, len(ids) - 1 - scored : len(ids) - 1].log_softmax(-1)
    return logits.gather(1, torch.tensor(ids[-scored:])[:, None]).sum().item()


@pytest.mark.quick_cases("rwkv6-*", "raven-4")
@pytest.mark.parametrize(("model_type", "batch_size"), [("rwkv6", 1), ("avey", 1), *((name, ROWS) for name in MODELS)])
def test_scores(model_type, batch_size, task_manager):
    """
    A log-likelihood is that of one pass over the question and the answer (but for its last token), which lets Avey
    see the answer's tokens in the same split. Batches are padded with zeros on the right, without a mask: for Avey
    these are tokens, for the others they come too late to matter.
    """
    model = tiny_model(model_type, vocab_size=128)
    lm = HFLM(model, tokenizer=TOKENIZER, batch_size=batch_size)
    samples = simple_evaluate(
        model=lm,
        tasks=["abc"],
        task_manager=task_manager,
        limit=2,
        log_samples=True,
        gen_kwargs={"do_sample": False, "max_gen_toks": NEW_TOKENS},
        bootstrap_iters=0,
    )["samples"]
    tunes, questions, headers = (samples[f"abc_{name}"] for name in ("tunes", "next_line", "continue"))
    padded = CASES[model_type].splits and batch_size > 1

    rows = [[0, *TOKENIZER(sample["arguments"][0][0]).input_ids] for sample in tunes]
    width = padded and max(map(len, rows)) - 1
    for row, sample in zip(rows, tunes, strict=True):
        expected = log_likelihood(model, row, len(row) - 1, width)
        assert sample["filtered_resps"] == [pytest.approx(expected, abs=1e-3)]

    # The longest come first, and every row of a batch has the length of its first.
    lengths = sorted({len(question + line) for sample in questions for question, line in sample["arguments"]})[::-1]
    assert len(lengths) == 2 * ROWS
    widths = {length: padded and lengths[n - n % ROWS] - 1 for n, length in enumerate(lengths)}
    for sample in questions:
        scores = [score for score, _ in sample["filtered_resps"]]
        for (question, line), score in zip(sample["arguments"], scores, strict=True):
            # White space before an answer counts as part of it.
            ids, scored = TOKENIZER(question + line).input_ids, len(question + line) - len(question.rstrip())
            assert score == pytest.approx(log_likelihood(model, ids, scored, widths[len(ids)]), abs=1e-3)
        assert sample["acc"] == (scores.index(max(scores)) == sample["doc"]["right"])

    assert len({len(sample["arguments"][0][0]) for sample in headers}) == 2
    for sample in headers:
        inputs = TOKENIZER(sample["arguments"][0][0], return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS)[0, inputs.input_ids.shape[1] :]
        text = TOKENIZER.decode(ids, skip_special_tokens=True)
        assert sample["filtered_resps"] == [text.split("\n\n")[0]]


@pytest.mark.quick_cases("rwkv6", "avey")
@pytest.mark.parametrize("model_type", MODELS)
def test_scores_with_states(model_type, task_manager, monkeypatch):
    """The model class of with_states.py gives the scores of the harness's own, and reads far fewer tokens."""
    monkeypatch.syspath_prepend(TASKS)
    states = importlib.import_module("with_states")
    model = tiny_model(model_type, vocab_size=128)
    tokens = 0

    def count(module, args, kwargs):
        nonlocal tokens
        tokens += (args[0] if args else kwargs["input_ids"]).numel()

    model.base_model.register_forward_pre_hook(count, with_kwargs=True)

    def measure(lm):
        nonlocal tokens
        tokens = 0
        options = {"do_sample": False, "max_gen_toks": NEW_TOKENS}
        arguments = {"tasks": ["abc"], "task_manager": task_manager, "limit": 2, "gen_kwargs": options}
        samples = simple_evaluate(model=lm, log_samples=True, bootstrap_iters=0, **arguments)["samples"]
        return [x for task in sorted(samples) for row in samples[task] for x in row["filtered_resps"]], tokens

    expected, whole = measure(HFLM(model, tokenizer=TOKENIZER, batch_size=1))
    found, read = measure(states.StateLM(model, tokenizer=TOKENIZER))
    assert len(found) == len(expected) > 6
    for response, other in zip(found, expected, strict=True):
        if isinstance(other, tuple):  # a score, and whether it is what the model would have said
            assert response == (pytest.approx(other[0], abs=1e-3), other[1])
        else:
            assert response == (other if isinstance(other, str) else pytest.approx(other, abs=1e-3))
    assert read < 0.8 * whole


@pytest.mark.fast
def test_texts_that_begin_as_documents(tmp_path):
    """With id 0 in front, as in the evaluations of Goose's authors."""
    TOKENIZER.save_pretrained(tmp_path)
    model = tiny_model("rwkv7", vocab_size=128)
    lm = HFLM(model, tokenizer=str(tmp_path), add_bos_token=True)
    question, answer = "X:1\nK:D", "\n|:dBG"
    ((score, _),) = lm.loglikelihood([Instance("loglikelihood", {}, (question, answer), 0)])
    ids = [0, *TOKENIZER(question + answer).input_ids]
    assert score == pytest.approx(log_likelihood(model, ids, len(answer)), abs=1e-3)


@pytest.mark.thorough
def test_commands(tmp_path, monkeypatch, capsys):
    """The two commands that examples/lm_eval/abc.yaml names, on the embedded model."""
    path = subquad.embedded_model("finch-abc")
    hub.export(path, tmp_path / "repository")

    def arguments(directory, more, *options):
        yield from ("run", "--model", "hf", "--model_args", f"pretrained={directory},dtype=float32{more}", *options)
        yield from ("--include_path", str(TASKS), "--tasks", "abc", "--device", "cpu", "--limit", "1")
        yield from ("--metadata", json.dumps(DATA), "--output_path", str(tmp_path / "results"))

    def results():
        (file,) = (tmp_path / "results").rglob("results_*.json")
        measured = json.loads(file.read_text())["results"]
        file.unlink()
        names = {"tunes": "bits_per_byte", "next_line": "acc", "continue": "valid"}
        return {name: measured[f"abc_{name}"][f"{metric},none"] for name, metric in names.items()}

    command = [sys.executable, "-c", HARNESS, *arguments(tmp_path / "repository", ",trust_remote_code=True")]
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = results()
    assert 0.9 < expected["tunes"] < 1.8 and expected["next_line"] == expected["continue"] == 1

    monkeypatch.setattr(sys, "argv", ["subquad"])
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))
    with pytest.raises(SystemExit) as done:
        main(["run", "lm_eval", *arguments(path, ",max_length=600", "--batch_size", "auto", "--max_batch_size", "2")])
    assert not done.value.code
    assert results() == pytest.approx(expected, rel=1e-5)
    assert capsys.readouterr().out.lower().count("determined largest batch size: 2") == 3  # one a kind of task


@pytest.mark.fast
def test_errors_are_those_of_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["subquad"])
    with pytest.raises(SystemExit) as done:
        main(["run", "lm_eval", "run", "--config", "nowhere.yaml"])
    assert done.value.code == 1
    assert "Traceback" in (error := capsys.readouterr().err) and "nowhere.yaml" in error
