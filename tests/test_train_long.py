"""examples/train_long.py: rows carry their states from step to step, and a resumed training continues them."""

import itertools
import shutil
import sys

import pytest
import torch
import train_long
from cases import CASES, each
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback, TrainingArguments

from subquad.modeling.versions import CACHE_NAME


PIECE, ROWS = 8, 2
# Documents of one token, of a piece, of several pieces, and others that begin inside a piece.
LENGTHS = (1, 8, 35, 9, 3, 1, 24, 6, 17, 40)


def documents(case):
    return [case.ids(1, n, seed=n)[0].tolist() for n in LENGTHS]


class Record(TrainerCallback):
    """The gradients of every step."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


def make(case, path, lr, **settings):
    record, model = Record(), case.model(**case.quiet)
    arguments = TrainingArguments(
        str(path),
        per_device_train_batch_size=ROWS,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        max_grad_norm=0,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", **settings},
    )
    trainer = train_long.StateCarryingTrainer(
        model,
        arguments,
        train_dataset=train_long.Pieces(documents(case), ROWS, PIECE),
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": lr}),
        callbacks=[record],
    )
    return trainer, record


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def parts(trainer, row, step):
    """The parts of documents in a piece: ids of the document before the part, and of the part."""
    ids, positions, _ = (x.flatten() for x in trainer.train_dataset.pieces[row])
    piece = range(step * PIECE, (step + 1) * PIECE)
    begins = [n for n in piece if n == piece[0] or positions[n] == 0]
    for begin, end in itertools.pairwise([*begins, piece[-1] + 1]):
        start = begin - int(positions[begin])
        yield ids[None, start:begin], ids[None, begin:end], trainer.train_dataset.pieces[row][2].flatten()[begin:end]


@pytest.mark.quick_cases("rwkv7", "gecko")
@each(*(CASES[name] for name in ("rwkv6", "rwkv7", "raven", "gecko")))
def test_pieces_are_one_text(case, tmp_path):
    """The losses are those of whole documents, and the gradients end where pieces begin."""
    trainer, record = make(case, tmp_path, lr=0.0, num_train_epochs=2, gradient_checkpointing=True)
    trainer.train()
    model, found = trainer.model.eval(), losses(trainer)
    steps = trainer.train_dataset.steps
    assert len(found) == len(record.gradients) == 2 * steps > 10
    assert found[:steps] == pytest.approx(found[steps:], abs=1e-3)  # they are rounded; the second epoch begins anew
    for step in range(steps):
        model.zero_grad()
        whole, total, count = 0.0, 0.0, 0
        for before, part, following in (x for row in range(ROWS) for x in parts(trainer, row, step)):
            cache = None
            with torch.no_grad():
                logits = model(torch.cat((before, part), 1)).logits[0, before.shape[1] :]
                whole += cross_entropy(logits, following, reduction="sum")
                if before.shape[1]:
                    cache = model(before, use_cache=True)[CACHE_NAME]
            logits = model(part, **{CACHE_NAME: cache}).logits[0]
            total = total + cross_entropy(logits, following, reduction="sum")
            count += int((following != -100).sum())
        assert found[step] == pytest.approx(float(whole / count), abs=1e-3)
        (total / count).backward()
        expected = {name: model.get_parameter(name).grad for name in record.gradients[step]}
        torch.testing.assert_close(record.gradients[step], expected, atol=2e-5, rtol=1e-3)


def test_resumed_training(tmp_path):
    """It continues in the middle of documents, with the states of its rows."""
    case, settings = CASES["rwkv7"], {"max_steps": 9, "save_strategy": "steps", "save_steps": 4}
    whole = make(case, tmp_path / "whole", lr=0.5, **settings)[0]
    whole.train()
    shutil.rmtree(tmp_path / "whole" / "checkpoint-9")
    fourth, eighth = (str(tmp_path / "whole" / f"checkpoint-{n}") for n in (4, 8))
    for checkpoint in (True, fourth):
        again = make(case, tmp_path / "whole", lr=0.5, **settings)[0]
        again.train(resume_from_checkpoint=checkpoint)
        shutil.rmtree(tmp_path / "whole" / "checkpoint-9")
        assert losses(again) == losses(whole)
        for name, parameter in again.model.named_parameters():
            assert torch.equal(parameter, whole.model.get_parameter(name)), name
    shutil.copy(f"{eighth}/states-0.safetensors", fourth)  # of other tokens: the states do matter
    again.train(resume_from_checkpoint=fourth)
    assert losses(again)[:4] == losses(whole)[:4] and losses(again)[4] != losses(whole)[4]
    (tmp_path / "whole" / "checkpoint-4" / "states-0.safetensors").unlink()
    with pytest.raises(ValueError, match=r"states-0.safetensors cannot be read"):
        again.train(resume_from_checkpoint=fourth)
    with pytest.raises(ValueError, match="has no checkpoint"):
        make(case, tmp_path / "other", lr=0.5, **settings)[0].train(resume_from_checkpoint=True)


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="AveyForCausalLM grows with the text"):
        make(CASES["avey"], tmp_path, lr=0.0)
    with pytest.raises(ValueError, match="144 tokens, too few for 4 rows of 99"):
        train_long.Pieces(documents(CASES["rwkv7"]), 4, 99)


@pytest.mark.thorough
def test_the_example(tmp_path, capsys, monkeypatch):
    tunes = train_long.load_corpus(("miscFolk",)).train
    monkeypatch.setattr(train_long, "load_corpus", lambda folders: (tunes[4:], tunes[:4]))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)

    def run(*arguments):
        given = ["--output", tmp_path / "out", "--checkpoint-every", 2, *arguments]
        monkeypatch.setattr(sys, "argv", ["train_long", *map(str, given)])
        train_long.main()
        return capsys.readouterr().out.splitlines()[-1]

    whole = run("--steps", 4)
    (tmp_path / "out" / "checkpoint-4").rename(tmp_path / "later")
    assert run("--steps", 4, "--resume") == whole and "bits per byte" in whole
    assert run("--steps", 4, "--cut") != whole
