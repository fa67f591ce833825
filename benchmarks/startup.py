"""
The start of `subquad generate`: time and memory until a model is ready, and until its first token.

It runs in separate processes, in turn with others: one that imports torch, one that also maps the weights into memory
and reads a number from each page, and one that imports the base class of all models of transformers. "in a program" is
the same command in a process that may have other uses: there, imports of optional packages and garbage collection are
left unchanged.

The files are in the cache of the operating system. Times are medians of CPU time and of wall-clock time, from the
start of Python on. MB is the peak memory of a process, including weights that are mapped into memory.

examples:
  python benchmarks/startup.py --out build/bench
  python benchmarks/startup.py --model ./finch-1b6
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers


# For measuring as in the operators' benchmarks.
sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels" / "benchmarks"))

from measuring import OURS, Results, cpu_name, make_parser, run_benchmark, settle
from safetensors.torch import save_file

import subquad
from subquad.hub.info import EMBEDDED


PARTS = ("start",)


# Reads a number from each page.
READ = """
import torch
from pathlib import Path
from safetensors.torch import load_file
for path in Path(sys.argv[1]).glob("*.safetensors"):
    for x in load_file(path).values():
        x.view(-1).view(torch.uint8)[::4096].sum()
"""
GENERATE = """
from subquad_cli import main, start
def noted(*arguments, ready=start.ready):
    ready(*arguments)
    note()
start.ready = noted
command = ["generate", "In the beginning", "--greedy", "--max-new-tokens", "1", "--model", sys.argv[1]]
"""
OWN, SHARED = GENERATE + "sys.argv[1:] = command\nmain()", GENERATE + "main(command)"
WORK = {
    "import torch": "import torch",
    "import torch, read the weights": READ,
    "import transformers.modeling_utils": "import transformers.modeling_utils",
    "subquad generate": OWN,
    "subquad generate, in a program": SHARED,
}
# Around each of them: records CPU time and peak memory at the end, and on request.
AROUND = """
import json, os, sys, time
notes = []
def note():
    with open("/proc/self/status", encoding="ascii") as file:
        held = next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))
    notes.append((time.process_time(), time.time(), held))
{work}
note()
os.write(2, ("\\n" + json.dumps(notes)).encode())
"""


def run(work: str, model: Path) -> list[tuple[float, float, float]]:
    """Seconds of CPU time and of wall-clock time, and MB: once a model is ready, if there is one, and at the end."""
    begin = time.time()
    done = subprocess.run(
        [sys.executable, "-c", AROUND.format(work=work), str(model)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return [(cpu, now - begin, 1.024e-3 * kib) for cpu, now, kib in json.loads(done.stderr.splitlines()[-1])]


def make_model(folder: Path) -> Path:
    """A Finch of 1.6B parameters in bfloat16, with the World tokenizer. Its weights are random, of any size."""
    raw, made = folder / "raw", folder / "finch-1.6b"
    config = subquad.preset_config("finch-1.6b")
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = {name: torch.empty_like(x, dtype=torch.bfloat16, device="cpu") for name, x in model.state_dict().items()}
    config.save_pretrained(raw)
    save_file({name: x.normal_(std=0.02) for name, x in tensors.items()}, raw / "model.safetensors", {"format": "pt"})
    command = ["convert", str(raw), str(made), "--tokenizer", "rwkv-world"]
    subprocess.run([sys.executable, "-m", "subquad_cli", *command], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(raw)
    return made


def measure(results: Results, options: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or (EMBEDDED / "finch-abc" if options.quick else make_model(Path(folder)))
        weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e6
        found: dict[str, list[list[tuple[float, float, float]]]] = {name: [] for name in WORK}
        for _ in range(options.runs):
            for name, work in WORK.items():
                found[name].append(run(work, model))
    lines = [f"{model.name}, {weights:,.0f} MB of weights, {cpu_name()}"]
    lines += ["| | s of CPU time | s that pass | MB |", "| --- | --- | --- | --- |"]
    for name, runs in found.items():
        moments = ["ready", "first token"] if len(runs[0]) > 1 else [""]
        for moment, notes in zip(moments, zip(*runs, strict=True), strict=True):
            cpu, wall, peak = map(statistics.median, zip(*notes, strict=True))
            what = ": ".join(filter(None, (name, moment)))
            row = {"part": "start", "what": what, "implementation": OURS, "milliseconds": 1e3 * cpu}
            results.add(row | {"MiB": peak / 1.048576, "note": f"{wall:.2f} s pass"})
            lines.append(f"| {what} | {cpu:.2f} | {wall:.2f} | {peak:,.0f} |")
    return lines


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, PARTS, minutes=30)
    add = parser.add_argument
    add("--model", type=Path, help="a model directory with a tokenizer (default: a Finch of 1.6B, random weights)")
    add("--runs", type=int, default=5, help="default: 5")
    options = parser.parse_args(arguments)
    options.device = "cpu"
    settle(options)
    options.runs = 1 if options.quick else options.runs
    return options


def main(arguments: list[str] | None = None) -> None:
    run_benchmark("startup", parse(arguments), measure)


if __name__ == "__main__":
    main()
