"""
Fine-tunes any architecture as a text classifier with the Trainer of transformers. The classifier recognises the metre
of a tune in ABC notation from its notes.

    python examples/finetune_classifier.py --output metre
    python examples/finetune_classifier.py --output metre --lora
    python examples/finetune_classifier.py --output metre --model avey-b-abc --bf16

By default it trains finch-abc, the small Finch that comes with the package, in about two minutes on a CPU core (`pip
install "subquad[train]"`, and "subquad[peft]" for --lora). `--model` takes any directory with a model and its
tokenizer. A causal model classifies by the hidden states of the last token; an encoder, such as the one from
examples/train_avey_b_mlm.py, by the mean of all tokens. The output directory is ready for
`pipeline("text-classification", model=...)`.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path

import torch
from abc_corpus import FOLDERS, load_corpus
from help_formatter import HelpFormatter
from shared import model_directory, require
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)

from subquad.training.optimizer import parameter_groups


SAME = {"C": "4/4", "C|": "2/2"}
RARE = 0.01  # metres with a smaller share of the tunes are left out


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="directory for the classifier")
    add("--model", type=model_directory, default="finch-abc", help="directory or embedded model, with a tokenizer")
    add("--folders", nargs="+", default=list(FOLDERS), help="folders of music21's corpus")
    add("--length", type=int, default=96, help="maximum number of tokens that are read of a tune")
    add("--lora", action="store_true", help="train low-rank adapters only, not the whole model")
    add("--rank", type=int, default=16, help="rank of the adapters")
    add("--lr", type=float, default=1e-3, help="peak of the learning rate")
    add("--batch-size", type=int, default=32, help="tunes per step")
    add("--epochs", type=float, default=1, help="number of passes over the tunes")
    add("--bf16", action="store_true", help="multiply in bfloat16, which is faster on many CPUs and all newer GPUs")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    add("--seed", type=int, default=0, help="seed of new weights and of the order")
    return parser.parse_args()


def split(tune: str) -> tuple[str, str]:
    """A tune without number, title and metre, and its metre. The title would help: a jig is in 6/8."""
    fields, rest = tune.split("\n")[:5], tune.split("\n")[5:]
    metre = next(field[2:] for field in fields if field.startswith("M:"))
    kept = [field for field in fields if not field.startswith(("X:", "T:", "M:"))]
    return "\n".join(kept + rest), SAME.get(metre, metre)


def main() -> None:
    arguments = parse_arguments()
    require("accelerate", "music21", *(["peft"] if arguments.lora else []), extra="train,peft")
    torch.set_num_threads(arguments.threads)
    set_seed(arguments.seed)
    train, held_out = ([split(tune) for tune in tunes] for tunes in load_corpus(tuple(arguments.folders))[:2])
    counts = Counter(metre for _, metre in train)
    metres = [metre for metre, count in counts.most_common() if count >= RARE * len(train)]

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    names = {"id2label": dict(enumerate(metres)), "label2id": {metre: i for i, metre in enumerate(metres)}}
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model, dtype="float32", **names)
    model.config.pad_token_id = tokenizer.pad_token_id
    if arguments.lora:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(task_type="SEQ_CLS", r=arguments.rank)
        model = get_peft_model(model, config)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{trainable:,} of {model.num_parameters():,} parameters learn to recognise {', '.join(metres)}")

    def encode(pairs):
        pairs = [(text, metre) for text, metre in pairs if metre in metres]
        ids = tokenizer([text for text, _ in pairs], truncation=True, max_length=arguments.length)["input_ids"]
        return [{"input_ids": row, "labels": metres.index(metre)} for row, (_, metre) in zip(ids, pairs, strict=True)]

    trainer = Trainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=encode(train),
        eval_dataset=encode(held_out),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda out: {"accuracy": (out.predictions.argmax(-1) == out.label_ids).mean().item()},
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {"params": parameter_groups(model, arguments.lr)}),
        args=TrainingArguments(
            output_dir=str(arguments.output),
            num_train_epochs=arguments.epochs,
            per_device_train_batch_size=arguments.batch_size,
            per_device_eval_batch_size=arguments.batch_size,
            train_sampling_strategy="group_by_length",
            lr_scheduler_type="cosine",
            warmup_steps=0.1,  # a share of all steps
            save_strategy="no",
            bf16=arguments.bf16,
            use_cpu=not torch.accelerator.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            logging_steps=20,
            report_to="none",
            seed=arguments.seed,
        ),
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    tunes = len(trainer.eval_dataset)
    baseline = sum(row["labels"] == 0 for row in trainer.eval_dataset) / tunes
    print(f"{tunes} tunes held out: {accuracy:.1%} right; always {metres[0]}: {baseline:.1%}")

    model = trainer.model.merge_and_unload() if arguments.lora else trainer.model
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    classify = pipeline("text-classification", model=str(arguments.output))
    for text, metre in held_out[:3]:
        answer = classify(text, truncation=True, max_length=arguments.length)[0]
        print(f"\n{text.strip()}\nis in {metre}; {arguments.output} says {answer['label']} ({answer['score']:.0%})")


if __name__ == "__main__":
    main()
