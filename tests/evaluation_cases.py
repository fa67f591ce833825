"""What the tests of `examples/evaluation` share."""

import json

import torch
from examples.evaluation import TASKS
from examples.evaluation.__main__ import main


# Options with which a task takes seconds.
READING = "--width 32 --layers 1 --window 64 --train-length 48 --digits 2 --steps 2 --tokens 96 --texts 1 --lengths 48"
TINY = {
    "needle": f"{READING} --architectures finch transformer",
    "trials": f"{READING} --recipes common sparse mixed",
    "ablations": f"{READING} --seeds 0 --recall-steps 2 --recall-length 64",
    "mqar": "--words 4 --tokens-per-pair 4 --lengths 8 --widths 32 --test-rows 16 --seeds 0 --steps 5 --tokens 32 "
    "--validate-every 3 --lrs 1e-3 1e-2",
    "tracking": "--train-length 6 --length 8 --width 32 --layers 1 --rows 4 --test-rows 3 --steps 2 --seeds 0 "
    "--problems parity A5",
    "pairs": "--keys 8 --train-length 64 --length 128 --window 16 --width 32 --layers 1 --steps 3 --tokens 64 "
    "--test-rows 4 --architectures gecko eagle",
    "encoders": "--width 32 --layers 2 --context 128 --rows 2 --steps 2 --tuning-steps 2 --train-length 64 "
    "--lengths 64 128 --shortest 48 --texts 1 --digits 3 --tokens 128 --retrieval-steps 2 --seeds 0",
    "speed": "--width 32 --layers 2 --window 16 --tokens 3 --seconds 0",
}


def run(patch, out, task, *options):
    """Calls a task with its tiny options and others, and returns its record. No other task is imported."""
    for name in TASKS.keys() - {task}:
        patch.delitem(TASKS, name)
    main([task, "--out", str(out), "--threads", "1", *TINY.get(task, "").split(), *options])
    return json.loads((out / f"{task}.json").read_text(encoding="utf-8"))


@torch.no_grad()
def perturbed(model, scale):
    """The model in evaluation mode, with parameters of which none is zero or constant."""
    for parameter in model.parameters():
        parameter.add_(scale * torch.randn_like(parameter))
    return model.eval()
