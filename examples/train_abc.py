"""
Trains a small model of any architecture to write tunes in ABC notation, from scratch on a CPU. The embedded models of
the package were made this way.

    python examples/train_abc.py finch --output finch-abc

The tunes come with the PyPI package music21 (`pip install "subquad[train]"`). With the same seed, all architectures
read the same rows in the same order. The schedule follows appendix G of "Eagle and Finch" (arXiv:2404.05892), with a
learning rate for models of this size. Adam's betas and epsilon follow each architecture's paper. Avey-B, an
encoder, learns to predict masked bytes. "transformer" is a Llama to compare with.

The output directory is ready for `from_pretrained`. It has the configuration, bfloat16 weights, generation settings,
the tokenizer, and a model card with the measured numbers.

On a machine with other users, set OMP_WAIT_POLICY=passive: there, threads that spin while they wait for each other
lose more than half of the speed.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from string import Template

import torch
import torch.nn.functional as F
from abc_check import find_fault
from abc_corpus import FOLDERS, MAX_BYTES, load_corpus, transpose
from evaluation.baselines import without
from evaluation.models import ENCODERS, NAMES, is_encoder, make_config, make_model, make_optimizer
from evaluation.recipes import COMMON, begin, names_of_recipes, recipes_of
from evaluation.runs import hardware
from help_formatter import HelpFormatter
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from subquad.hub.cards import TEMPLATES
from subquad.hub.new_files import replacing
from subquad_tokenizers import ByteTokenizer


BOUNDARY = 0  # the id between two tunes
MASK = 1  # a character that does not occur in tunes
MASKED = 0.2  # share of the bytes that an encoder must predict


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("architecture", choices=NAMES, help="what to train")
    add(
        "--output",
        type=Path,
        required=True,
        help="directory for the model; checkpoint and samples go next to it",
    )
    add(
        "--recipe",
        choices=names_of_recipes(),
        default=COMMON,
        help="a recipe of examples/evaluation/recipes.py instead of the common settings",
    )
    add("--steps", type=int, default=3000, help="steps to train for")
    add("--resume", action="store_true", help="continue from the checkpoint of the output directory")
    add("--folders", nargs="+", default=list(FOLDERS), help="folders of music21's corpus to train on")
    add("--width", type=int, default=128, help="width of the model")
    add("--layers", type=int, default=4, help="number of layers; Avey and Avey-B, whose layers are smaller, get more")
    add("--context", type=int, default=1024, help="bytes of a row of packed tunes")
    add("--batch-size", type=int, default=2, help="rows per step")
    add("--lr", type=float, default=3e-3, help="maximum learning rate")
    add("--min-lr", type=float, default=1e-5, help="learning rate at the end")
    add("--warmup", type=int, default=100, help="steps until the learning rate reaches its maximum")
    add("--weight-decay", type=float, default=0.1, help="decay of matrices and embeddings")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--validate-every", type=int, default=1000, help="steps between two validations")
    add("--checkpoint-every", type=int, default=500, help="steps between two checkpoints")
    add("--seeds", type=int, default=100, help="number of headers to continue in the final evaluation")
    add("--max-new-tokens", type=int, default=MAX_BYTES, help="sampling default that is saved with the model")
    add("--temperature", type=float, default=0.8, help="sampling default that is saved with the model")
    add("--top-p", type=float, default=0.95, help="sampling default that is saved with the model")
    add("--float32", action="store_true", help="multiply matrices in float32 instead of bfloat16")
    add("--threads", type=int, default=1, help="CPU threads; a second one hardly helps models of this size")
    add("--seed", type=int, default=0, help="seed of weights, order, masks and sampling")
    arguments = parser.parse_args()
    if arguments.context <= MAX_BYTES:
        parser.error(f"--context must be more than {MAX_BYTES}, the bytes of the longest tune")
    recipes = recipes_of(arguments.architecture)
    if arguments.recipe not in recipes:
        known = ", ".join(recipes)
        parser.error(f"--recipe: the recipes of {arguments.architecture} are {known}, got {arguments.recipe!r}")
    recipe = recipes[arguments.recipe]
    if recipe.options:
        options = ", ".join(f"{name} = {value}" for name, value in recipe.options.items())
        parser.error(f"--recipe {arguments.recipe} is for needles: it has the options {options}")
    return arguments


def transposed(tune: str, context: int, generator: random.Random) -> str:
    """The tune in a random key, or in its own if it would then be too long for a row of `context` bytes."""
    moved = transpose(tune, generator)
    return moved if len(moved) < context else tune  # notes in another octave have marks


def pack(tunes: list[str], context: int, generator: random.Random) -> torch.Tensor:
    """
    The rows of an epoch, (rows, context): whole tunes in random order and keys, each followed by the boundary, and -1
    at the empty end of a row. Half of the rows begin with a boundary, so that the model learns both beginnings.
    """
    open_rows: list[list[int]] = []
    full_rows: list[list[int]] = []
    for tune in generator.sample(tunes, len(tunes)):
        ids = [*transposed(tune, context, generator).encode("ascii"), BOUNDARY]
        row = next((row for row in open_rows if len(row) + len(ids) <= context), None)
        if row is None:
            row = [BOUNDARY] * min(generator.randrange(2), context - len(ids))
            open_rows.append(row)
        row += ids
        if len(open_rows) > 16:  # a short window keeps the order random
            full_rows.append(open_rows.pop(0))
    rows = full_rows + open_rows
    generator.shuffle(rows)
    return torch.tensor([row + [-1] * (context - len(row)) for row in rows])


def schedule(step: int, steps: int, warmup: int, lowest: float) -> float:
    """Learning rate as a share of its peak: it rises from 20 %, then follows a cosine down to the lowest share."""
    rise = min(1.0, 0.2 + 0.8 * step / max(warmup, 1))
    return rise * (lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def predict(
    model: PreTrainedModel, rows: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Logits (bytes, vocabulary) and ids (bytes) of the predicted bytes of the rows, without -1. A causal model predicts
    each byte from earlier ones; an encoder predicts the bytes that `generator` masks from all others.
    """
    ids, there = rows.clamp(min=BOUNDARY), rows >= 0
    encoder = is_encoder(model.config)
    # Without a mask, an encoder and the last split of an Avey would see the padding. Training causal models is faster
    # without one.
    mask = there.long() if encoder or not model.training else None
    if encoder:
        hidden = there & (torch.rand(rows.shape, generator=generator).to(rows.device) < MASKED)
        ids = ids.masked_fill(hidden, MASK)
        return model(input_ids=ids, attention_mask=mask).logits[hidden], rows[hidden]
    there = there[:, 1:]
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return logits[:, :-1][there], rows[:, 1:][there]


def losses_of(model: PreTrainedModel, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Cross entropies in nats of the bytes that [`predict`] predicts."""
    logits, targets = predict(model, rows, generator)
    return F.cross_entropy(logits.float(), targets, reduction="none")


def single_tunes(tunes: list[str], rows: int = 16) -> Iterator[torch.Tensor]:
    """Batches of ids, (rows, length): a tune a row with the boundary at its end, by length, and -1 after it."""
    ids = sorted((torch.tensor([*tune.encode("ascii"), BOUNDARY]) for tune in tunes), key=len)
    for start in range(0, len(ids), rows):
        yield torch.nn.utils.rnn.pad_sequence(ids[start : start + rows], batch_first=True, padding_value=-1)


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, tunes: list[str], rows: int = 16) -> float:
    """
    Loss of the tunes, each read alone with the boundary at its end. The first byte, always an X, is not predicted.
    """
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(0)  # the same masks every time
    losses = [losses_of(model, batch, generator) for batch in single_tunes(tunes, rows)]
    model.train(was_training)
    return torch.cat(losses).mean().item() / math.log(2)


@torch.no_grad()
def continue_headers(model, tokenizer, tunes: list[str], seed: int, rows: int = 25) -> list[str | None]:
    """The headers of the tunes, continued with the model's sampling defaults; None if the boundary was not reached."""
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
    """The path of a file that belongs to the run and not to the model: it is next to the output directory."""
    return output.with_name(f"{output.name}-{name}")


def save_atomically(state: dict, path: Path) -> None:
    with replacing(path) as temporary:
        torch.save(state, temporary)


def train(arguments: argparse.Namespace, model: torch.nn.Module, corpus) -> dict[str, float]:
    """Trains the model in place. Returns the numbers for the card: epochs, seconds, bytes."""
    optimizer = make_optimizer(model, arguments.lr, arguments.weight_decay)
    peaks = [group["lr"] for group in optimizer.param_groups]
    checkpoint = beside(arguments.output, "checkpoint.pt")
    at = {"step": 0, "epoch": 0, "batch": 0, "seconds": 0.0, "bytes": 0}
    if arguments.resume:
        if not checkpoint.exists():
            raise SystemExit(f"--resume: {checkpoint} does not exist")
        state = torch.load(checkpoint, weights_only=True)
        if (recipe := state.get("recipe", COMMON)) != arguments.recipe:
            raise SystemExit(f"--resume: {checkpoint} has the recipe {recipe}, not {arguments.recipe}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        at = state["at"]
    bar = tqdm(initial=at["step"], total=arguments.steps, unit="step", smoothing=0.02, desc=arguments.architecture)
    # About twice as fast if the CPU can multiply bfloat16.
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=not arguments.float32)
    smooth = None
    clock = time.process_time()
    model.train()

    def epoch_of_batches():
        # The order only depends on seed and epoch, so a resumed run reads the remaining rows of the epoch.
        rows = pack(corpus.train, arguments.context, random.Random(f"{arguments.seed} {at['epoch']}"))
        return rows[: len(rows) // arguments.batch_size * arguments.batch_size].split(arguments.batch_size)

    def state_of():
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return {**states, "at": at, "recipe": arguments.recipe}

    batches = epoch_of_batches()
    while at["step"] < arguments.steps:
        for batch in batches[at["batch"] :]:
            share = schedule(at["step"], arguments.steps, arguments.warmup, arguments.min_lr / arguments.lr)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = share * peak
            with mixed:
                generator = torch.Generator().manual_seed(arguments.seed * 2**32 + at["step"])
                loss = losses_of(model, batch, generator).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

            bits = loss.item() / math.log(2)
            if not math.isfinite(bits):
                raise RuntimeError(f"The loss became {bits} at step {at['step']}: lower --lr.")
            smooth = bits if smooth is None else 0.98 * smooth + 0.02 * bits
            now = time.process_time()  # without the time of other programs
            at["seconds"], clock = at["seconds"] + (now - clock) / arguments.threads, now
            at["step"], at["batch"] = at["step"] + 1, at["batch"] + 1
            at["bytes"] += int((batch >= 0).sum())
            bar.update()
            bar.set_postfix_str(f"{smooth:.3f} bits/byte, {at['bytes'] / at['seconds']:,.0f} bytes/s", refresh=False)

            if at["step"] % arguments.validate_every == 0:
                with mixed:
                    bits = bits_per_byte(model, corpus.validation)
                epoch = at["epoch"] + at["batch"] / len(batches)
                bar.write(f"step {at['step']}, epoch {epoch:.2f}: {bits:.4f} bits/byte")
            if at["step"] % arguments.checkpoint_every == 0:
                save_atomically(state_of(), checkpoint)
            if at["step"] >= arguments.steps:
                break
        else:
            at["epoch"], at["batch"] = at["epoch"] + 1, 0
            batches = epoch_of_batches()
    bar.close()
    save_atomically(state_of(), checkpoint)
    return {**at, "epochs": at["epoch"] + at["batch"] / len(batches)}


@torch.no_grad()
def fill_masks(model: PreTrainedModel, tunes: list[str], seed: int) -> tuple[list[str], float]:
    """Tunes in which an encoder has predicted a masked share of the bytes, and the share of correct predictions."""
    generator = torch.Generator().manual_seed(seed)
    results, right = [], []
    for tune in tunes:
        ids = torch.tensor([[*tune.encode("ascii")]])
        hidden = torch.rand(ids.shape, generator=generator) < MASKED
        hidden[:, 0] = False
        filled = torch.where(hidden, model(input_ids=ids.masked_fill(hidden, MASK)).logits.argmax(-1), ids)
        right.append(filled[hidden] == ids[hidden])
        results.append(bytes(filled[0].tolist()).decode("ascii"))
    return results, torch.cat(right).float().mean().item()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    arguments.output.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(tuple(arguments.folders))
    encoder = arguments.architecture in ENCODERS
    tokenizer = ByteTokenizer(mask_token=chr(MASK)) if encoder else ByteTokenizer()
    ids = {"bos_token_id": BOUNDARY, "eos_token_id": BOUNDARY, "pad_token_id": BOUNDARY}
    recipe = recipes_of(arguments.architecture)[arguments.recipe]
    config = make_config(
        arguments.architecture,
        vocabulary=128,
        width=arguments.width,
        layers=arguments.layers,
        context=arguments.context,
        lr=arguments.lr,
        **ids,
        **({"mask_token_id": MASK} if encoder else {}),
        **recipe.config,
    )
    model = without(recipe.without, make_model(config))
    begin(model, recipe)
    sizes = [f"{len(tunes):,} tunes ({sum(map(len, tunes)):,} bytes)" for tunes in corpus[:2]]
    print(f"{model.num_parameters():,} parameters; {sizes[0]} to train on, {sizes[1]} to validate on")
    report = train(arguments, model, corpus)

    if not encoder:
        model.generation_config = GenerationConfig(
            do_sample=True,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            top_k=0,
            max_new_tokens=arguments.max_new_tokens,
            **ids,
        )
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    # The model still loads in float32: most CPUs do not multiply bfloat16, and take up to seven times as long.
    model.config.dtype = torch.float32
    model.config.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)

    # The measurements are for the saved weights, rounded to bfloat16.
    model = type(model).from_pretrained(arguments.output, dtype=torch.float32).eval()
    bits = bits_per_byte(model, corpus.validation)
    chosen = random.Random(arguments.seed).sample(corpus.validation, min(arguments.seeds, len(corpus.validation)))
    accuracy = None
    if encoder:
        tunes, accuracy = fill_masks(model, chosen, arguments.seed)
    else:
        tunes = continue_headers(model, tokenizer, chosen, arguments.seed)
    faults = ["does not end" if tune is None else find_fault(tune) for tune in tunes]
    samples = [f"% {fault or 'valid'}\n{tune or ''}\n" for tune, fault in zip(tunes, faults, strict=True)]
    beside(arguments.output, "samples.abc").write_text("".join(samples), encoding="ascii")
    first_valid = next((tune for tune, fault in zip(tunes, faults, strict=True) if fault is None), "(none)")
    command = ["python examples/train_abc.py", *sys.argv[1:]]
    numbers = {
        **vars(arguments),
        "title": NAMES[arguments.architecture],
        "name": f"{arguments.architecture}-abc",
        "model_type": model.config.model_type,
        "command": " ".join(word for word in command if word != "--resume"),
        "hardware": hardware(),
        "parameters": f"{model.num_parameters():,}",
        "train_tunes": f"{len(corpus.train):,}",
        "train_bytes": f"{sum(map(len, corpus.train)):,}",
        "validation_tunes": f"{len(corpus.validation):,}",
        "validation_bytes": f"{sum(map(len, corpus.validation)):,}",
        "validation_bits": f"{bits:.3f}",
        "accuracy": f"{accuracy:.1%}" if encoder else "",
        "seeds": len(faults),
        "valid": faults.count(None),
        "steps": f"{report['step']:,}",
        "epochs": f"{report['epochs']:.1f}",
        "bytes": f"{report['bytes']:,}",
        "minutes": f"{report['seconds'] / 60:.0f}",
        "speed": f"{report['bytes'] / report['seconds']:,.0f}",
        "sample": first_valid.strip(),
    }
    numbers["data"] = (TEMPLATES / "abc_data.md").read_text(encoding="utf-8").strip()
    template = TEMPLATES / ("abc_encoder.md" if encoder else "abc.md")
    # Substitute twice, because the section about the data contains numbers too.
    card = Template(Template(template.read_text(encoding="utf-8")).safe_substitute(numbers)).substitute(numbers)
    (arguments.output / "README.md").write_text(card, encoding="utf-8")
    made = "filled tunes are valid" if encoder else "headers became valid tunes"
    print(f"validation: {bits:.4f} bits a byte; {faults.count(None)} of {len(faults)} {made}")


if __name__ == "__main__":
    main()
