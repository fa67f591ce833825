"""
Trains finch-abc, a small Finch (RWKV-6) that writes tunes in ABC notation, from scratch on a CPU.

    python examples/train_finch_abc.py --output finch-abc --minutes 30

The tunes come with the PyPI package music21 (`pip install "subquad[train]"`). The recipe is appendix G of "Eagle and
Finch" (arXiv:2404.05892), with a learning rate for a model this small. The output directory is ready for
`from_pretrained`: configuration, bfloat16 weights, generation settings, tokenizer and a model card that holds the
measured numbers.

On a machine that others use, too, set OMP_WAIT_POLICY=passive: threads that spin while they wait for each other lose
more than half of the speed there.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from pathlib import Path
from string import Template

import torch
import torch.nn.functional as F
from abc_check import find_fault
from abc_corpus import FOLDERS, MAX_BYTES, load_corpus, transpose
from tqdm import tqdm
from transformers import GenerationConfig

from subquad import Rwkv6Config, Rwkv6ForCausalLM
from subquad.cards import TEMPLATES
from subquad.training import parameter_groups
from subquad_tokenizers import ByteTokenizer


CARD = TEMPLATES / "finch_abc.md"
BOUNDARY = 0  # the id between two tunes
IGNORED = -100
WARMUP_STEPS = 10


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small Finch on ABC tunes.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, help="directory for the model; checkpoint and samples lie beside it")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="train for so long; the learning rate follows the clock")
    length.add_argument("--steps", type=int, help="train for so many steps")
    add("--resume", action="store_true", help="go on from the output directory's checkpoint")
    add("--folders", nargs="+", default=list(FOLDERS), help="folders of music21's corpus to train on")
    add("--hidden-size", type=int, default=160, help="model dimension")
    add("--layers", type=int, default=5, help="number of blocks")
    add("--head-size", type=int, default=32, help="width of a head")
    add("--lora-rank-tokenshift", type=int, default=16, help="rank of the token shift's maps")
    add("--lora-rank-decay", type=int, default=16, help="rank of the decay's map")
    add("--context", type=int, default=1024, help="bytes in a row of packed whole tunes")
    add("--batch-size", type=int, default=2, help="rows in a step")
    add("--lr", type=float, default=3e-3, help="maximum learning rate")
    add("--min-lr", type=float, default=1e-5, help="learning rate at the end")
    add("--weight-decay", type=float, default=0.1, help="decay of matrices and embeddings")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--validate-every", type=int, default=1000, help="steps between two validations")
    add("--checkpoint-every", type=int, default=500, help="steps between two checkpoints")
    add("--seeds", type=int, default=100, help="headers of the final evaluation that the model continues")
    add("--max-new-tokens", type=int, default=MAX_BYTES, help="sampling default that is saved with the model")
    add("--temperature", type=float, default=0.8, help="sampling default that is saved with the model")
    add("--top-p", type=float, default=0.95, help="sampling default that is saved with the model")
    add("--float32", action="store_true", help="multiply matrices in float32; bfloat16 otherwise")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    add("--seed", type=int, default=0, help="seed of weights, order and sampling")
    arguments = parser.parse_args()
    if arguments.context <= MAX_BYTES:
        parser.error(f"--context must be more than {MAX_BYTES}, the bytes of the longest tune")
    return arguments


def pack(tunes: list[str], context: int, generator: random.Random) -> torch.Tensor:
    """
    An epoch's rows, (rows, context): whole tunes in random order and keys, each followed by the boundary, -1 where a
    row is left empty. Half of the rows begin with a boundary, so that the model knows both beginnings.
    """
    open_rows: list[list[int]] = []
    full_rows: list[list[int]] = []
    for tune in generator.sample(tunes, len(tunes)):
        ids = [*transpose(tune, generator).encode("ascii"), BOUNDARY]
        row = next((row for row in open_rows if len(row) + len(ids) <= context), None)
        if row is None:
            row = [BOUNDARY] * generator.randrange(2)
            open_rows.append(row)
        row += ids
        if len(open_rows) > 16:  # a short window keeps the order random
            full_rows.append(open_rows.pop(0))
    rows = full_rows + open_rows
    generator.shuffle(rows)
    return torch.tensor([row + [-1] * (context - len(row)) for row in rows])


def schedule(step: int, progress: float, lowest: float) -> float:
    """Share of the peak that the learning rate has: ten steps from 20 %, then a cosine to the lowest share."""
    warmup = min(1.0, 0.2 + 0.8 * step / WARMUP_STEPS)
    return warmup * (lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def loss_of(model: torch.nn.Module, rows: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross entropy in nats over the bytes of the rows, -1 excepted."""
    logits = model(input_ids=rows.clamp(min=BOUNDARY), use_cache=False).logits
    targets = rows[:, 1:].masked_fill(rows[:, 1:] < 0, IGNORED)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction=reduction)


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, tunes: list[str], rows: int = 16) -> float:
    """Each tune by itself and with the boundary that ends it; the first byte, always an X, is given."""
    model.eval()
    ids = sorted((torch.tensor([*tune.encode("ascii"), BOUNDARY]) for tune in tunes), key=len)
    total = 0.0
    for start in range(0, len(ids), rows):
        batch = torch.nn.utils.rnn.pad_sequence(ids[start : start + rows], batch_first=True, padding_value=-1)
        total += loss_of(model, batch, reduction="sum").item()
    model.train()
    return total / math.log(2) / sum(len(tune) for tune in ids)


@torch.no_grad()
def continue_headers(model, tokenizer, tunes: list[str], seed: int, rows: int = 25) -> list[str | None]:
    """What the model makes of each tune's header with its own sampling defaults; None where it did not end."""
    torch.manual_seed(seed)
    results: list[str | None] = []
    headers = ["\n".join(tune.split("\n")[:5]) + "\n" for tune in tunes]
    for start in range(0, len(headers), rows):
        inputs = tokenizer(headers[start : start + rows], return_tensors="pt", padding=True, padding_side="left")
        for row in model.generate(**inputs)[:, inputs["input_ids"].shape[1] :].tolist():
            body = bytes(row[: row.index(BOUNDARY)]).decode("ascii") if BOUNDARY in row else None
            results.append(None if body is None else headers[len(results)] + body)
    return results


def beside(output: Path, name: str) -> Path:
    """A file that belongs to the run and not to the model."""
    return output.with_name(f"{output.name}-{name}")


def save_atomically(state: dict, path: Path) -> None:
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def train(arguments: argparse.Namespace, model: torch.nn.Module, corpus) -> dict[str, float]:
    """Trains in place. Returns what the card wants to know: minutes, steps, bytes, bytes a second."""
    groups = parameter_groups(model, arguments.lr, arguments.weight_decay)
    peaks = [group["lr"] for group in groups]
    optimizer = torch.optim.AdamW(groups, fused=True)
    checkpoint = beside(arguments.output, "checkpoint.pt")
    at = {"step": 0, "epoch": 0, "batch": 0, "seconds": 0.0, "bytes": 0}
    if arguments.resume:
        if not checkpoint.exists():
            raise SystemExit(f"--resume: there is no {checkpoint}")
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        at = state["at"]
    budget = arguments.minutes * 60 if arguments.minutes else None
    bar = tqdm(total=round(budget) if budget else arguments.steps, unit="s" if budget else "step", smoothing=0.02)
    bar.update(round(at["seconds"]) if budget else at["step"])
    # About twice as fast where the CPU multiplies bfloat16.
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=not arguments.float32)
    smooth = None
    clock = time.monotonic()
    model.train()

    def epoch_of_batches():
        # The order depends on seed and epoch alone, so a resumed run sees the rows that it has not seen.
        rows = pack(corpus.train, arguments.context, random.Random(f"{arguments.seed} {at['epoch']}"))
        return rows[: len(rows) // arguments.batch_size * arguments.batch_size].split(arguments.batch_size)

    batches = epoch_of_batches()
    while (progress := at["seconds"] / budget if budget else at["step"] / arguments.steps) < 1:
        for batch in batches[at["batch"] :]:
            share = schedule(at["step"], progress, arguments.min_lr / arguments.lr)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = share * peak
            with mixed:
                loss = loss_of(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

            bits = loss.item() / math.log(2)
            if not math.isfinite(bits):
                raise RuntimeError(f"The loss became {bits} at step {at['step']}: lower --lr.")
            smooth = bits if smooth is None else 0.98 * smooth + 0.02 * bits
            now = time.monotonic()
            at["seconds"], clock = at["seconds"] + now - clock, now
            at["step"], at["batch"] = at["step"] + 1, at["batch"] + 1
            at["bytes"] += int((batch >= 0).sum())
            bar.update((min(round(at["seconds"]), bar.total) if budget else at["step"]) - bar.n)
            rate_now = at["bytes"] / at["seconds"]
            bar.set_postfix_str(f"step {at['step']}, {smooth:.3f} bits/byte, {rate_now:,.0f} bytes/s", refresh=False)

            if at["step"] % arguments.validate_every == 0:
                with mixed:
                    bits = bits_per_byte(model, corpus.validation)
                epoch = at["epoch"] + at["batch"] / len(batches)
                bar.write(f"step {at['step']}, epoch {epoch:.2f}: {bits:.4f} bits/byte")
            if at["step"] % arguments.checkpoint_every == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "at": at}
                save_atomically(state, checkpoint)
            progress = at["seconds"] / budget if budget else at["step"] / arguments.steps
            if progress >= 1:
                break
        else:
            at["epoch"], at["batch"] = at["epoch"] + 1, 0
            batches = epoch_of_batches()
    bar.close()
    save_atomically({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "at": at}, checkpoint)
    return {**at, "epochs": at["epoch"] + at["batch"] / len(batches)}


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    arguments.output.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(tuple(arguments.folders))
    tokenizer = ByteTokenizer()
    config = Rwkv6Config(
        vocab_size=128,
        context_length=arguments.context,
        hidden_size=arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        head_size=arguments.head_size,
        lora_rank_tokenshift=arguments.lora_rank_tokenshift,
        lora_rank_decay=arguments.lora_rank_decay,
        initializer_range=arguments.lr,
        bos_token_id=BOUNDARY,
        eos_token_id=BOUNDARY,
        pad_token_id=BOUNDARY,
    )
    model = Rwkv6ForCausalLM(config)
    sizes = [f"{len(tunes):,} tunes ({sum(map(len, tunes)):,} bytes)" for tunes in corpus[:2]]
    print(f"{model.num_parameters():,} parameters; {sizes[0]} to train on, {sizes[1]} to validate on")
    report = train(arguments, model, corpus)

    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=0,
        max_new_tokens=arguments.max_new_tokens,
        bos_token_id=BOUNDARY,
        eos_token_id=BOUNDARY,
        pad_token_id=BOUNDARY,
    )
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)

    # What is measured is what was saved, rounded to bfloat16 and read back.
    model = Rwkv6ForCausalLM.from_pretrained(arguments.output).eval()
    bits = bits_per_byte(model, corpus.validation)
    chosen = random.Random(arguments.seed).sample(corpus.validation, min(arguments.seeds, len(corpus.validation)))
    tunes = continue_headers(model, tokenizer, chosen, arguments.seed)
    faults = ["does not come to an end" if tune is None else find_fault(tune) for tune in tunes]
    samples = [f"% {fault or 'valid'}\n{tune or ''}\n" for tune, fault in zip(tunes, faults, strict=True)]
    beside(arguments.output, "samples.abc").write_text("".join(samples), encoding="ascii")
    first_valid = next((tune for tune, fault in zip(tunes, faults, strict=True) if fault is None), "(none)")
    numbers = {
        **vars(arguments),
        "parameters": f"{model.num_parameters():,}",
        "train_tunes": f"{len(corpus.train):,}",
        "train_bytes": f"{sum(map(len, corpus.train)):,}",
        "validation_tunes": f"{len(corpus.validation):,}",
        "validation_bytes": f"{sum(map(len, corpus.validation)):,}",
        "validation_bits": f"{bits:.3f}",
        "seeds": len(faults),
        "valid": faults.count(None),
        "steps": f"{report['step']:,}",
        "epochs": f"{report['epochs']:.1f}",
        "minutes": f"{report['seconds'] / 60:.0f}",
        "speed": f"{report['bytes'] / report['seconds']:,.0f}",
        "sample": first_valid.strip(),
    }
    card = Template(CARD.read_text(encoding="utf-8")).substitute(numbers)
    (arguments.output / "README.md").write_text(card, encoding="utf-8")
    print(f"validation: {bits:.4f} bits a byte; {faults.count(None)} of {len(faults)} headers became valid tunes")


if __name__ == "__main__":
    main()
