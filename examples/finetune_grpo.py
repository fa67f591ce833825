"""
Teaches a model by reward alone to write bars of the right length, with the GRPOTrainer of TRL and LoRA.

    python examples/finetune_grpo.py --output strict

By default it trains finch-abc, the small Finch that comes with the package, in about three minutes on a CPU core
(`pip install "subquad[train,peft]"`). The reward is the share of the bars of a tune that are exactly as long as its
metre requires. The prompts are headers in all metres of the package's tunes, and the tunes are sampled at a
temperature at which the model makes mistakes. TRL generates with continuous batching, so no tune waits for the longest
one: its state is a row, and the next tune takes over the row.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from abc_check import AbcError, parse_tune
from help_formatter import HelpFormatter
from shared import model_directory, require
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, set_seed


require("datasets", "trl", "accelerate", "peft", extra="train,peft")

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


METRES = ("2/4", "3/4", "4/4", "6/8", "9/8")
KEYS = ("C", "D", "G", "A", "Am", "Em")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="directory for the model")
    add("--model", type=model_directory, default="finch-abc", help="directory or embedded model, causal")
    add("--steps", type=int, default=40, help="steps to train for")
    add("--prompts", type=int, default=4, help="prompts of a step")
    add("--tunes", type=int, default=8, help="tunes for each prompt, which are compared with each other")
    add("--max-new-tokens", type=int, default=96, help="maximum number of tokens of a tune")
    add("--temperature", type=float, default=1.2, help="temperature of the tunes")
    add("--rank", type=int, default=16, help="rank of the adapters")
    add("--lr", type=float, default=2e-3, help="learning rate")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    add("--seed", type=int, default=0, help="seed of adapters, order and sampling")
    return parser.parse_args()


def header(metre: str, key: str) -> str:
    return f"X:1\nT:Reel\nM:{metre}\nL:1/8\nK:{key}\n"


def reward(prompts: list[str], completions: list[str], **kwargs) -> list[float]:
    """The share of the bars of each tune that have the length of its metre; its last bar may be cut off."""
    return [share_of_full_bars(prompt + tune) for prompt, tune in zip(prompts, completions, strict=True)]


def share_of_full_bars(text: str) -> float:
    """The share of the inner bars of a tune that have the length of its metre; 0 if the text is not a tune."""
    try:
        tune = parse_tune(text[: text.rindex("|") + 1])
    except (AbcError, ValueError):  # no bar line
        return 0.0
    inner = [bar for bar in tune.bars if bar.is_inner]
    return sum(bar.time == tune.metre.time for bar in inner) / max(len(inner), 4)


def mean_reward(model, tokenizer, prompts: list[str], arguments: argparse.Namespace) -> float:
    """The mean reward of tunes for all prompts, generated together."""
    options = {"max_new_tokens": arguments.max_new_tokens, "eos_token_id": tokenizer.eos_token_id}
    options |= {"do_sample": True, "temperature": arguments.temperature, "top_k": 0, "top_p": 1.0}
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    answers = model.generate_batch(ids, GenerationConfig(**options), seed=arguments.seed)
    tunes = tokenizer.batch_decode([x.generated_tokens for x in answers.values()], skip_special_tokens=True)
    return sum(reward(prompts, tunes)) / len(prompts)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    set_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32")
    prompts = [header(metre, key) for metre in METRES for key in KEYS]
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=arguments.rank, target_modules="all-linear"),
        args=GRPOConfig(
            output_dir=str(arguments.output),
            save_strategy="no",
            use_transformers_continuous_batching=True,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.prompts * arguments.tunes,
            num_generations=arguments.tunes,
            max_completion_length=arguments.max_new_tokens,
            temperature=arguments.temperature,
            learning_rate=arguments.lr,
            lr_scheduler_type="constant",
            bf16=False,
            use_cpu=not torch.accelerator.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            logging_steps=5,
            report_to="none",
            seed=arguments.seed,
        ),
    )
    every = prompts * 4
    before = mean_reward(trainer.model, tokenizer, every, arguments)
    print(f"before training, the mean reward is {before:.2f}")
    trainer.train()
    after = mean_reward(trainer.model, tokenizer, every, arguments)
    print(f"after training, the mean reward is {after:.2f}")
    model = trainer.model.merge_and_unload()
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
