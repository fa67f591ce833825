"""
Trains an Avey-B encoder on masked language modelling, from scratch, with the Trainer of transformers.

    python examples/train_avey_b_mlm.py --output avey-b-abc
    python examples/train_avey_b_mlm.py --output my-encoder --text my.txt --preset avey-b-base --bf16 --steps 10000

By default, a tiny model learns ABC tunes (`pip install "subquad[train]"`) in about three minutes on two CPU cores. The
output directory has the model and its tokenizer, ready for `pipeline("fill-mask", model=...)` and for
examples/retrieve.py.

The recipe follows appendix B of "Avey-B". Documents are concatenated and cut into rows of one length. A fifth of the
tokens are replaced by [MASK] and predicted. The optimizer is AdamW (betas 0.95 and 0.95, epsilon 1e-18, weight
decay 0.01), with gradients clipped at 1. The learning rate rises over a tenth of the steps and falls to zero along a
cosine.
"""

from __future__ import annotations

import argparse
import os
import random
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from abc_corpus import FOLDERS, load_corpus
from help_formatter import HelpFormatter
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    pipeline,
    set_seed,
)

from subquad import PRESETS, AveyBConfig, AveyBForMaskedLM
from subquad.training.optimizer import parameter_groups


# Appendix B: the published sizes read batches of 512K tokens.
TINY = {"d_embed": 128, "n_layers": 4, "chunk_size": 64, "k": 3, "vocabulary": 768}
PUBLISHED = {"chunk_size": 256, "k": 3, "vocabulary": 50368, "length": 2048, "batch_size": 256}
SIZES = {
    "tiny": TINY | {"length": 512, "batch_size": 4, "lr": 4e-3},
    "avey-b-base": PUBLISHED | PRESETS["avey-b-base"][1] | {"lr": 5e-4},
    "avey-b-large": PUBLISHED | PRESETS["avey-b-large"][1] | {"lr": 2.5e-4},
}
MASKED = 0.2
HELD_OUT = 20  # one of this many documents of a text is held out
SPECIAL = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="directory for the model; checkpoints go next to it")
    add("--text", type=Path, help="a UTF-8 text to train on, with blank lines between documents (default: tunes)")
    add("--folders", nargs="+", default=list(FOLDERS), help="folders of music21's corpus, if --text is not given")
    add("--tokenizer", help="directory of a tokenizer with [CLS], [SEP], [PAD] and [MASK] (default: train one)")
    add("--preset", choices=SIZES, default="tiny", help="size of the model; the options below override single values")
    add("--vocabulary", type=int, default=argparse.SUPPRESS, help="maximum vocabulary of the trained tokenizer")
    add("--d-embed", type=int, default=argparse.SUPPRESS, help="width of an embedding")
    add("--n-layers", type=int, default=argparse.SUPPRESS, help="number of layers")
    add("--chunk-size", type=int, default=argparse.SUPPRESS, help="tokens of a split")
    add("--k", type=int, default=argparse.SUPPRESS, help="splits that each split retrieves")
    add("--length", type=int, default=argparse.SUPPRESS, help="tokens of a row of concatenated documents")
    add("--batch-size", type=int, default=argparse.SUPPRESS, help="rows per step")
    add("--lr", type=float, default=argparse.SUPPRESS, help="peak of the learning rate")
    add("--accumulate", type=int, default=1, help="parts that the rows of a step are read in, to save memory")
    add("--steps", type=int, default=1500, help="steps to train for")
    add("--checkpoint-every", type=int, default=500, help="steps between two checkpoints")
    add("--resume", action="store_true", help="continue from the last checkpoint")
    add("--bf16", action="store_true", help="multiply in bfloat16, which is faster on many CPUs and all newer GPUs")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    add("--seed", type=int, default=0, help="seed of weights, order and masks")
    arguments = parser.parse_args()
    for name, value in SIZES[arguments.preset].items():
        vars(arguments).setdefault(name, value)
    if arguments.batch_size % arguments.accumulate:
        parser.error(f"--accumulate must divide the batch size, {arguments.batch_size}")
    return arguments


def load_documents(path: Path | None, folders: list[str]) -> tuple[list[str], list[str]]:
    """Training documents and held-out documents."""
    if path is None:
        corpus = load_corpus(tuple(folders))
        return corpus.train, corpus.validation
    documents = re.split(r"\n\s*\n", path.read_text(encoding="utf-8").strip())
    if len(documents) < 2:
        raise SystemExit(f"--text: {path} must have two documents or more, separated by a blank line.")
    random.Random(0).shuffle(documents)  # the same split for every seed
    held_out = -(-len(documents) // HELD_OUT)
    return documents[held_out:], documents[:held_out]


def train_tokenizer(documents: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer like the published models'; each text becomes [CLS] text [SEP]."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # The mask includes the space before it, like the words that it replaces.
    special = [*SPECIAL.values(), AddedToken("[MASK]", lstrip=True, special=True)]
    if vocabulary < len(alphabet) + len(special):
        raise SystemExit(f"--vocabulary must be at least {len(alphabet) + len(special)}.")
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(documents, trainer)
    cls, sep = ((token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]"))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[cls, sep]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", **SPECIAL)


def pack(tokenizer, documents: list[str], length: int) -> list[dict]:
    """
    Rows of `length` tokens: the documents are concatenated and cut without regard to their boundaries, as in the
    paper. The last row is shorter. (To keep documents apart, pass `cu_seqlens` or restarting `position_ids`.)
    """
    ids = [token for row in tokenizer(documents, verbose=False)["input_ids"] for token in row]
    return [{"input_ids": ids[i : i + length]} for i in range(0, len(ids), length)]


def judge(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of every token in nats, and whether the most probable token is right: (rows, length, 2)."""
    loss = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
    return torch.stack((loss, (logits.argmax(-1) == labels).float()), dim=-1)


def average(prediction) -> dict[str, float]:
    """Loss and accuracy, averaged over the masked tokens."""
    loss, accuracy = prediction.predictions[prediction.label_ids != -100].mean(0).tolist()
    return {"masked_loss": loss, "accuracy": accuracy}


def hide_a_token(tokenizer, document: str) -> tuple[str, str]:
    """The document with a token in the middle masked, and the token's text."""
    offsets = tokenizer(document, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    begin, end = offsets[len(offsets) // 2]
    return document[:begin] + tokenizer.mask_token + document[end:], document[begin:end]


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    set_seed(arguments.seed)
    training, held_out = load_documents(arguments.text, arguments.folders)
    if arguments.tokenizer is None:
        tokenizer = train_tokenizer(training, arguments.vocabulary)
    else:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    random.Random(arguments.seed).shuffle(training)
    rows, held_out_rows = (pack(tokenizer, documents, arguments.length) for documents in (training, held_out))

    config = AveyBConfig(
        vocab_size=len(tokenizer),
        **{name: getattr(arguments, name) for name in ("d_embed", "n_layers", "chunk_size", "k")},
        **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad", "mask")},
    )
    model = AveyBForMaskedLM(config)
    print(
        f"{model.num_parameters():,} parameters; {len(training):,} documents in {len(rows):,} rows to train on, "
        f"{len(held_out):,} in {len(held_out_rows):,} held out"
    )

    masking = {"mlm_probability": MASKED, "mask_replace_prob": 1.0, "random_replace_prob": 0.0}
    mask = DataCollatorForLanguageModeling(tokenizer, **masking)
    # Masked only once, so that every evaluation predicts the same tokens.
    masked = DataCollatorForLanguageModeling(tokenizer, seed=arguments.seed, **masking)(held_out_rows)
    questions = [dict(zip(masked, values, strict=True)) for values in zip(*masked.values(), strict=True)]
    trainer = Trainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=rows,
        eval_dataset=questions,
        data_collator=lambda rows: default_data_collator(rows) if "labels" in rows[0] else mask(rows),
        preprocess_logits_for_metrics=judge,
        compute_metrics=average,
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {"params": parameter_groups(model, arguments.lr)}),
        args=TrainingArguments(
            output_dir=str(arguments.output.with_name(f"{arguments.output.name}-checkpoints")),
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch_size // arguments.accumulate,
            per_device_eval_batch_size=arguments.batch_size // arguments.accumulate,
            gradient_accumulation_steps=arguments.accumulate,
            lr_scheduler_type="cosine",
            warmup_steps=0.1,  # a share of all steps
            max_grad_norm=1.0,
            bf16=arguments.bf16,
            use_cpu=not torch.accelerator.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            logging_steps=50,
            save_steps=arguments.checkpoint_every,
            save_total_limit=2,
            report_to="none",
            seed=arguments.seed,
        ),
    )
    before = trainer.evaluate()
    trainer.train(resume_from_checkpoint=arguments.resume)
    after = trainer.evaluate()
    trainer.save_model(str(arguments.output))  # with the tokenizer

    for when, measured in (("before", before), ("after", after)):
        loss, accuracy = measured["eval_masked_loss"], measured["eval_accuracy"]
        print(f"held out, {when} training: loss {loss:.3f} a masked token, {accuracy:.1%} predicted correctly")
    text, hidden = hide_a_token(tokenizer, held_out[0])
    print(f"\n{text}\n[MASK] was {hidden!r}; {arguments.output} says")
    for guess in pipeline("fill-mask", model=str(arguments.output))(text):
        print(f"  {guess['score']:6.1%}  {tokenizer.decode([guess['token']])!r}")


if __name__ == "__main__":
    main()
