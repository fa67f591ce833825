"""
What an adapter learns in a fixed number of steps: held-out loss of goose-abc (Goose, a million parameters) after
training on tunes in another notation, with the number of trainable parameters and the time.

"low ranks" are the maps of the decay, the learning rate, the values and the gate, which are parameters of the time
mixing (`target_parameters` of LoRA). Every adapter is trained with each learning rate and the first seed, and with the
best one of them and the other seeds. The tunes come from the package music21.

Tasks:
  spaced   a space after every note
  degrees  the degree in the key, 1 to 7, in place of a note's letter

examples:
  python benchmarks/adapters.py --out build/bench
  python benchmarks/adapters.py --tasks spaced --steps 50 --seeds 1
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path


# For measuring as in the operators' benchmarks, and for reading tunes as in the examples.
sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels" / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import torch
from measuring import OURS, Results, cpu_name, make_parser, run_benchmark, settle
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import subquad


MODEL = "goose-abc"
ROWS, LENGTH = 4, 256  # of a batch; longer tunes are cut off
LOW_RANKS = [f"att.{letter}{number}" for letter in "wavg" for number in (1, 2)]


def lora(rank: int, projections: bool, low_ranks: bool) -> LoraConfig:
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        task_type="CAUSAL_LM",
        target_modules=None if projections else [],
        target_parameters=LOW_RANKS if low_ranks else None,
    )


RATES = (0.005, 0.015, 0.045)
# Constructor of each adapter, and learning rates to try. The ranks make groups with similar numbers of parameters.
ADAPTERS: dict[str, tuple[Callable, tuple[float, ...]]] = {
    "state tuning": (lambda: subquad.StateTuningConfig(task_type="CAUSAL_LM"), (1.0, 3.0, 10.0)),
    "projections, rank 2": (lambda: lora(2, True, False), RATES),
    "both, rank 1": (lambda: lora(1, True, True), RATES),
    "low ranks, rank 4": (lambda: lora(4, False, True), RATES),
    "projections, rank 8": (lambda: lora(8, True, False), RATES),
    "both, rank 5": (lambda: lora(5, True, True), RATES),
    "both, rank 8": (lambda: lora(8, True, True), RATES),
    "low ranks, rank 15": (lambda: lora(15, False, True), RATES),
}


def degrees(tune: str) -> str:
    header, key, body = re.fullmatch(r"(.*?\nK:([A-G])[^\n]*\n)(.*)", tune, re.DOTALL).groups()

    def degree(match: re.Match) -> str:
        letter = match[0]
        return str((ord(letter.upper()) - ord(key)) % 7 + 1) + ("'" if letter.islower() else "")

    # A length gets a colon, so that it is not read as a degree.
    return header + re.sub(r"[A-Ga-g]", degree, re.sub(r"(?<=[A-Ga-gz,'])(\d)", r":\1", body))


def make_batch(tokenizer, texts: list[str]) -> dict[str, torch.Tensor]:
    texts = [text + tokenizer.eos_token for text in texts]
    rows = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=LENGTH)
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    return {"input_ids": rows["input_ids"], "attention_mask": rows["attention_mask"], "labels": labels}


@torch.no_grad()
def held_out_loss(model, found: list[dict[str, torch.Tensor]]) -> float:
    """Nats per token."""
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in found]
    losses = [model(**batch).loss.item() for batch in found]
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


def train(make, lr: float, seed: int, texts, held_out, tokenizer, steps: int) -> tuple[float, float, int]:
    """The held-out loss after training, seconds of CPU time for a step, and the number of parameters."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(subquad.embedded_model(MODEL), dtype=torch.float32)
    model = get_peft_model(model, make()).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr, weight_decay=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    order = torch.cat([torch.randperm(len(texts)) for _ in range(-(-ROWS * steps // len(texts)))])
    start = time.process_time()
    for step in range(steps):
        batch = make_batch(tokenizer, [texts[i] for i in order[ROWS * step : ROWS * (step + 1)]])
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    seconds = (time.process_time() - start) / steps
    return held_out_loss(model.eval(), held_out), seconds, sum(parameter.numel() for parameter in trained)


def measure(results: Results, options: argparse.Namespace) -> list[str]:
    try:
        from abc_corpus import load_corpus
        from state_tuning import spaced

        corpus = load_corpus()
    except (ImportError, SystemExit) as error:
        return [f"nothing is measured: {error}"]
    lines = [f"{options.steps} steps of {ROWS} tunes, {options.seeds} seeds, {cpu_name()}"]
    tokenizer = AutoTokenizer.from_pretrained(subquad.embedded_model(MODEL), padding_side="right")
    for task in options.tasks:
        write = {"spaced": spaced, "degrees": degrees}[task]
        texts = [write(tune) for tune in corpus.train[:256]]
        tunes = [write(tune) for tune in corpus.validation[: options.tunes]]
        held_out = [make_batch(tokenizer, tunes[start : start + ROWS]) for start in range(0, len(tunes), ROWS)]
        plain = AutoModelForCausalLM.from_pretrained(subquad.embedded_model(MODEL), dtype=torch.float32).eval()
        lines += [f"{task}: {held_out_loss(plain, held_out):.3f} before", "| adapter | parameters | lr | loss | ms |"]
        lines.append("| --- " * 5 + "|")
        for name in options.adapters:
            make, rates = ADAPTERS[name]
            run = [texts, held_out, tokenizer, options.steps]
            tried = {lr: train(make, lr, 0, *run) for lr in (rates[:1] if options.quick else rates)}
            best = min(tried, key=lambda lr: tried[lr][0])
            found = [tried[best], *(train(make, best, seed, *run) for seed in range(1, options.seeds))]
            losses, seconds, sizes = zip(*found, strict=True)
            spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
            note = f"{statistics.mean(losses):.3f}{spread}"
            ms = 1e3 * statistics.median(seconds)
            others = ", ".join(f"{lr:g}: {loss:.3f}" for lr, (loss, _, _) in tried.items())
            lines.append(f"| {name} | {sizes[0]:,} | {best:g} | {note} | {ms:.0f} |")
            row = {"part": "loss", "what": f"{task}, {name}", "implementation": OURS, "size": sizes[0]}
            results.add(row | {"milliseconds": ms, "note": f"{note} nats per byte; by learning rate: {others}"})
    return lines


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, ("loss",), minutes=30)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=("spaced", "degrees"), default=["spaced", "degrees"], help="default: both")
    add("--adapters", nargs="+", choices=ADAPTERS, default=list(ADAPTERS), metavar="ADAPTER", help="default: all")
    add("--steps", type=int, default=80, help="default: 80")
    add("--seeds", type=int, default=3, help="default: 3")
    add("--tunes", type=int, default=64, help="held-out tunes (default: 64)")
    options = parser.parse_args(arguments)
    options.device = "cpu"
    settle(options)
    if options.quick:
        options.tasks, options.steps, options.seeds, options.tunes = options.tasks[:1], 2, 1, 2
    return options


def main(arguments: list[str] | None = None) -> None:
    run_benchmark("adapters", parse(arguments), measure)


if __name__ == "__main__":
    main()
