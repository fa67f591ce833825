"""
Fine-tunes any causal model on prompts and completions with the SFTTrainer of TRL. The model learns to write a tune in
ABC notation in the metre and key of the prompt.

    python examples/finetune_sft.py --output tunes-to-order
    python examples/finetune_sft.py --output tunes-to-order --lora --packing --bf16 --gradient-checkpointing

By default it trains finch-abc, the small Finch that comes with the package, in about two minutes on a CPU core
(`pip install "subquad[train]"`, and "subquad[peft]" for --lora). Before and after the training, the model writes tunes
for held-out prompts. `--model` takes any directory with a causal model and its tokenizer. With --packing, the tunes of
a batch are packed into rows without padding: TRL passes the boundaries to the model, in which a document never sees
another one. The loss is the same.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from abc_corpus import FOLDERS, load_corpus
from help_formatter import HelpFormatter
from shared import model_directory, require
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from subquad.training.optimizer import parameter_groups


require("datasets", "trl", "accelerate", extra="train")

from datasets import Dataset  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="directory for the model")
    add("--model", type=model_directory, default="finch-abc", help="directory or embedded model, causal")
    add("--folders", nargs="+", default=list(FOLDERS), help="folders of music21's corpus")
    add(
        "--length",
        type=int,
        default=1152,
        help="maximum number of tokens of a prompt with its tune, or a packed row",
    )
    add("--lora", action="store_true", help="train low-rank adapters only, not the whole model")
    add("--rank", type=int, default=16, help="rank of the adapters")
    add("--lr", type=float, default=2e-3, help="peak of the learning rate")
    add("--batch-size", type=int, default=8, help="tunes, or packed rows, per step")
    add("--steps", type=int, default=120, help="steps to train for")
    add("--packing", action="store_true", help="pack several tunes into a row, without padding")
    add("--bf16", action="store_true", help="multiply in bfloat16, which is faster on many CPUs and all newer GPUs")
    add(
        "--gradient-checkpointing",
        action="store_true",
        help="recompute activations in the backward pass",
    )
    add("--orders", type=int, default=32, help="held-out prompts that are tried before and after training")
    add("--max-new-tokens", type=int, default=400, help="maximum number of new tokens")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    add("--seed", type=int, default=0, help="seed of adapters, order and sampling")
    return parser.parse_args()


def order(tune: str) -> dict[str, str]:
    """A prompt with a metre and a key, and a tune in them, from the third line of its header on."""
    lines = tune.split("\n")
    metre, key = lines[2].removeprefix("M:"), lines[4].removeprefix("K:")
    return {"prompt": f"% a tune in {metre} and {key}\n", "completion": "\n".join(lines[2:])}


def header(tune: str) -> list[str]:
    """Metre, unit of length and key."""
    return tune.split("\n")[:3]


@torch.no_grad()
def fill(model, tokenizer, prompts: list[str], max_new_tokens: int, seed: int) -> list[str]:
    """The text that the model generates after each prompt, with its own sampling defaults."""
    torch.manual_seed(seed)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    ids = model.eval().generate(**inputs, max_new_tokens=max_new_tokens)
    return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    set_seed(arguments.seed)
    train, held_out = load_corpus(tuple(arguments.folders))[:2]
    orders = [order(tune) for tune in held_out[: arguments.orders]]

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32")
    if arguments.lora:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(task_type="CAUSAL_LM", r=arguments.rank)
        model = get_peft_model(model, config)
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([order(tune) for tune in train]),
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {"params": parameter_groups(model, arguments.lr)}),
        args=SFTConfig(
            output_dir=str(arguments.output),
            save_strategy="no",
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch_size,
            max_length=arguments.length,
            packing=arguments.packing,
            lr_scheduler_type="cosine",
            warmup_steps=0.1,  # a share of all steps
            bf16=arguments.bf16,
            gradient_checkpointing=arguments.gradient_checkpointing,
            use_cpu=not torch.accelerator.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            logging_steps=10,
            report_to="none",
            seed=arguments.seed,
        ),
    )

    def show(model, when: str) -> None:
        prompts = [order["prompt"] for order in orders]
        tunes = fill(model, tokenizer, prompts, arguments.max_new_tokens, arguments.seed)
        filled = sum(header(tune) == header(order["completion"]) for tune, order in zip(tunes, orders, strict=True))
        print(f"\n{when} training, {filled} of {len(orders)} tunes have the right metre and key; the first is")
        print(f"{prompts[0]}{tunes[0]}")

    show(trainer.model, "before")
    trainer.train()
    model = trainer.model.merge_and_unload() if arguments.lora else trainer.model
    show(model, "after")
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
