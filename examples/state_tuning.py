"""
Tunes the initial state of a recurrent model, or, for comparison, a prompt with as many numbers.

    pip install "subquad[train,peft]"
    python examples/state_tuning.py --output spaced
    python examples/state_tuning.py --output spaced-prompt --method prompt
    python examples/state_tuning.py --output my-style --model my-model --text my.txt --steps 500

The weights of the model stay unchanged. An adapter of PEFT (`StateTuningConfig`) trains the initial state of every
layer. A tuned prompt (PEFT's `PromptTuningConfig`) consists of vectors in front of every text; for a model without
attention, it is the closest equivalent of a tuned prefix.

By default, finch-abc learns from 256 tunes to write a space after every note. Before, it writes the notes of a beat
together.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import torch
from abc_corpus import load_corpus
from help_formatter import HelpFormatter
from shared import model_directory, require
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
    set_seed,
)


require("peft", "music21", extra="train,peft")

from peft import PromptTuningConfig, get_peft_model  # noqa: E402

from subquad import StateTuningConfig  # noqa: E402


LEARNING_RATES = {"state": 0.1, "prompt": 0.3}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="directory for the adapter")
    add("--model", default="finch-abc", help="directory of a causal model, or the name of an embedded one")
    add("--text", type=Path, help="a UTF-8 text to learn from, with blank lines between examples (default: tunes)")
    add("--method", choices=("state", "prompt"), default="state", help="what is tuned")
    add("--prompt-tokens", type=int, help="length of a tuned prompt (default: as many numbers as the states have)")
    add("--examples", type=int, default=256, help="maximum number of examples to train on")
    add("--steps", type=int, default=200, help="steps to train for")
    add("--batch-size", type=int, default=8, help="examples per step")
    add("--lr", type=float, help=f"peak of the learning rate (default: {LEARNING_RATES})")
    add("--prompt", help="text to continue at the end (default: the beginning of a held-out example)")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    add("--seed", type=int, default=0, help="seed of the order and of the sampling")
    return parser.parse_args()


def spaced(tune: str) -> str:
    """The same tune with a space after every note."""
    header, body = re.fullmatch(r"(.*?\nK:[^\n]*\n)(.*)", tune, re.DOTALL).groups()
    return header + re.sub(r" +", " ", re.sub(r"([A-Ga-g][,']*[\d/]*)", r"\1 ", body))


def load_examples(path: Path | None) -> tuple[list[str], list[str]]:
    """Training examples and held-out examples."""
    if path is None:
        corpus = load_corpus()
        return [spaced(tune) for tune in corpus.train], [spaced(tune) for tune in corpus.validation]
    examples = re.split(r"\n\s*\n", path.read_text(encoding="utf-8").strip())
    if len(examples) < 2:
        raise SystemExit(f"--text: {path} must have two examples or more, separated by a blank line.")
    held_out = -(-len(examples) // 10)
    return examples[held_out:], examples[:held_out]


def adapt(model: torch.nn.Module, method: str, prompt_tokens: int | None) -> torch.nn.Module:
    adapted = get_peft_model(model, StateTuningConfig(task_type="CAUSAL_LM"))
    if method == "state":
        return adapted
    size = adapted.get_nb_trainable_parameters()[0]
    tokens = prompt_tokens or max(1, size // model.config.hidden_size)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=tokens)
    return get_peft_model(adapted.unload(), config)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    train, held_out = load_examples(arguments.text)
    path = model_directory(arguments.model)
    # Padding on the left would separate a tuned prompt from the text.
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="right")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    set_seed(arguments.seed)

    def rows(texts: list[str]) -> list[dict[str, list[int]]]:
        ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
        return [{"input_ids": row, "labels": row} for row in ids]

    adapted = adapt(model, arguments.method, arguments.prompt_tokens)
    trainer = Trainer(
        adapted,
        TrainingArguments(
            output_dir=arguments.output,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=arguments.lr or LEARNING_RATES[arguments.method],
            lr_scheduler_type="cosine",
            save_strategy="no",
            report_to=[],
            seed=arguments.seed,
        ),
        train_dataset=rows(train[: arguments.examples]),
        eval_dataset=rows(held_out),
        data_collator=DataCollatorForSeq2Seq(tokenizer),  # pads the labels with -100
    )
    with adapted.disable_adapter():
        before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    adapted.save_pretrained(arguments.output)
    size = adapted.get_nb_trainable_parameters()[0]
    print(f"{arguments.method}: {size:,} numbers, held-out loss {before:.3f} before, {after:.3f} after")

    prompt = arguments.prompt or "\n".join(held_out[0].splitlines()[:5]) + "\n"
    inputs = tokenizer(prompt, return_tensors="pt")
    set_seed(arguments.seed)
    print(tokenizer.decode(adapted.eval().generate(**inputs)[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
