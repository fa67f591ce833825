"""
Trains or fine-tunes a language model of any architecture, on one device or on many. The command that starts the script
decides how the processes share the work:

    python examples/distributed/train.py --output out
    torchrun --nproc-per-node 8 examples/distributed/train.py --output out
    accelerate launch --config_file examples/distributed/fsdp2.yaml examples/distributed/train.py --output out
    accelerate launch --config_file examples/distributed/zero3.yaml examples/distributed/train.py --output out

torchrun trains copies of the model (DDP): every process has all weights, gradients and both moments of AdamW, in
float32 16 bytes per parameter. If that is too much, FSDP2 and DeepSpeed's ZeRO-3 give each process a share of them,
and gather the weights of one block at a time while it runs. The activations of long rows need memory too:
`--gradient-checkpointing` only keeps those between blocks. (accelerate supports FSDP on accelerators only; on CPUs the
third command trains copies.)

Each process reads `--batch-size` rows at a time, so a step reads processes * batch size * `--accumulate` rows. As long
as this number is the same, the training is the same for any number of processes and any way of sharing.

By default, a tiny model learns ABC tunes (`pip install "subquad[train]"`). `--model` continues from a directory. The
output directory has the whole model, ready for `from_pretrained`. Checkpoints go next to it; with FSDP2 and ZeRO-3,
each process writes its share. `--resume` continues from the last checkpoint. With FSDP2, the number of
processes may then be different.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, Trainer, TrainingArguments, set_seed

from subquad import lm_auto_class
from subquad_tokenizers import ByteTokenizer


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared import model_directory, require


TINY = {
    "rwkv5": {"hidden_size": 128, "num_hidden_layers": 4, "head_size": 32},
    "rwkv6": {"hidden_size": 128, "num_hidden_layers": 4, "head_size": 32},
    "rwkv7": {"hidden_size": 128, "num_hidden_layers": 4, "head_dim": 32},
    "avey": {"d_embed": 128, "n_blocks": 4, "chunk_size": 32, "k": 4},
    "avey-b": {"d_embed": 128, "n_layers": 4, "chunk_size": 32, "k": 3},
    "raven": {"hidden_size": 128, "num_hidden_layers": 4, "num_heads": 2, "num_slots": 32, "topk": 8},
    "gecko": {"model_dim": 128, "num_layers": 4, "num_heads": 2, "z_dim": 64, "value_dim": 256, "chunk_size": 64}
    | {"ffn_hidden_dim": 384, "bos_token_id": 0},
}
MASKED = 0.2  # share of the tokens that an encoder predicts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="directory for the model; checkpoints go next to it")
    add("--model", type=model_directory, help="directory or embedded model to continue from (default: a tiny one)")
    add("--architecture", choices=TINY, default="rwkv6", help="architecture of the tiny model")
    add("--text", type=Path, help="a UTF-8 text to train on (default: tunes)")
    add("--length", type=int, default=256, help="tokens of a row")
    add("--batch-size", type=int, default=4, help="rows that a process reads at a time")
    add("--accumulate", type=int, default=1, help="number of such batches per step")
    add("--steps", type=int, default=200, help="steps to train for")
    add("--lr", type=float, default=1e-3, help="peak of the learning rate")
    add("--log-every", type=int, default=50, help="steps between two lines of losses")
    add("--checkpoint-every", type=int, default=100, help="steps between two checkpoints")
    add("--resume", action="store_true", help="continue from the last checkpoint")
    add("--gradient-checkpointing", action="store_true", help="recompute each block in the backward pass")
    add("--bf16", action="store_true", help="multiply in bfloat16")
    add("--seed", type=int, default=0, help="seed of weights, order and masks")
    arguments = parser.parse_args()
    require("accelerate", *(["music21"] if arguments.text is None else []), extra="train")
    return arguments


def load_rows(path: Path | None, tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """The tokens of all texts, concatenated and cut into rows (rows, length). The rest at the end is dropped."""
    if path is None:
        from abc_corpus import load_corpus

        texts = load_corpus().train
    else:
        texts = [path.read_text(encoding="utf-8")]
    texts = [text + (tokenizer.eos_token or "") for text in texts]
    ids = torch.tensor([token for row in tokenizer(texts, verbose=False)["input_ids"] for token in row])
    if ids.shape[0] < length:
        raise SystemExit(f"the text has {ids.shape[0]} tokens, fewer than a row (--length {length})")
    return ids[: ids.shape[0] // length * length].view(-1, length)


def with_labels(rows: torch.Tensor, mask_token_id: int | None, seed: int) -> list[dict[str, torch.Tensor]]:
    """
    Inputs and labels of a causal model or, with a `mask_token_id`, of an encoder, which predicts masked tokens.
    """
    labels = rows
    if mask_token_id is not None:
        masked = torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed)) < MASKED
        rows, labels = rows.masked_fill(masked, mask_token_id), rows.masked_fill(~masked, -100)
    return [{"input_ids": x, "labels": y} for x, y in zip(rows, labels, strict=True)]


def main() -> None:
    arguments = parse_arguments()
    on_cpu, deepspeed = not torch.accelerator.is_available(), os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    # These come before the model, because they make ZeRO-3 shard it while it is created.
    training_arguments = TrainingArguments(
        output_dir=str(arguments.output.with_name(f"{arguments.output.name}-checkpoints")),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        gradient_accumulation_steps=arguments.accumulate,
        gradient_checkpointing=arguments.gradient_checkpointing or None,
        learning_rate=arguments.lr,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,  # a share of all steps
        bf16=arguments.bf16,
        logging_steps=arguments.log_every,
        save_steps=arguments.checkpoint_every,
        save_total_limit=2,
        report_to="none",
        seed=arguments.seed,
        use_cpu=on_cpu and not deepspeed,  # otherwise accelerate ignores DeepSpeed
        ddp_backend="gloo" if on_cpu and deepspeed else None,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    if arguments.model is None:
        tokenizer = ByteTokenizer(mask_token="\x7f")
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "pad", "mask")}
        fields = TINY[arguments.architecture] | {"vocab_size": len(tokenizer)} | ids
        config = AutoConfig.for_model(arguments.architecture, **fields)
    else:
        tokenizer, config = (cls.from_pretrained(arguments.model) for cls in (AutoTokenizer, AutoConfig))
    auto_class = getattr(transformers, lm_auto_class(config.model_type))
    encoder = auto_class is transformers.AutoModelForMaskedLM
    set_seed(arguments.seed)  # every process makes the same weights
    model = auto_class.from_config(config) if arguments.model is None else auto_class.from_pretrained(arguments.model)
    rows = load_rows(arguments.text, tokenizer, arguments.length)
    trainer = Trainer(
        model=model,
        processing_class=tokenizer,
        args=training_arguments,
        train_dataset=with_labels(rows, tokenizer.mask_token_id if encoder else None, arguments.seed),
    )
    trainer.train(resume_from_checkpoint=arguments.resume)
    if trainer.is_fsdp_enabled:  # checkpoints are sharded, but the model is saved as a whole
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(arguments.output))


if __name__ == "__main__":
    main()
