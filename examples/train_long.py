"""
Trains a causal model on documents of any length with the Trainer of transformers, a piece at a time.

    python examples/train_long.py --output tunes
    python examples/train_long.py --output tunes --resume

Every row of the batch is a stream of documents, one after the other, and a step reads its next piece. The model begins
a piece with the state after the piece before, so it knows the whole document, but gradients end at the beginning of
the piece (truncated back-propagation). A document that begins starts from an empty state. Memory depends on the length
of a piece, not of a document. The states are a part of each checkpoint, so a resumed training continues in the middle
of its documents.

By default it fine-tunes finch-abc, the small Finch that comes with the package, on tunes
(`pip install "subquad[train]"`). `--model` takes any directory with a causal model and its tokenizer whose state has a
constant size. With --cut every piece begins with an empty state, to compare.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from abc_corpus import FOLDERS, load_corpus
from help_formatter import HelpFormatter
from shared import model_directory, require
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from subquad.training.optimizer import parameter_groups


require("accelerate", extra="train")

from train_abc import bits_per_byte  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="directory for the model and the checkpoints")
    add("--model", type=model_directory, default="finch-abc", help="directory or embedded model, causal")
    add("--fresh", action="store_true", help="begin with random weights")
    add("--folders", nargs="+", default=list(FOLDERS), help="folders of music21's corpus")
    add("--shortest", type=int, default=0, help="least number of characters of a tune")
    add("--piece", type=int, default=128, help="tokens of a row in a step")
    add("--batch-size", type=int, default=8, help="rows of each process")
    add("--steps", type=int, default=200, help="steps to train for")
    add("--lr", type=float, default=1e-3, help="peak of the learning rate")
    add("--cut", action="store_true", help="begin every piece with an empty state")
    add("--gradient-checkpointing", action="store_true", help="recompute activations in the backward pass")
    add("--checkpoint-every", type=int, default=100, help="steps between two checkpoints")
    add("--resume", action="store_true", help="continue from the last checkpoint of the output directory")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    add("--seed", type=int, default=0, help="seed of random weights and of the order of tunes")
    return parser.parse_args()


class Pieces(torch.utils.data.Dataset):
    """
    Documents as pieces of equal length. Item i is row i % rows of step i // rows.

    Args:
        documents: the ids of each document.
        rows: the rows of all processes together.
        length: tokens of a piece.

    Raises:
        ValueError: if a row has less than one piece.
    """

    def __init__(self, documents: list[list[int]], rows: int, length: int):
        streams: list[list[list[int]]] = [[] for _ in range(rows)]
        sizes = [0] * rows
        for ids in documents:
            shortest = sizes.index(min(sizes))
            streams[shortest].append(ids)
            sizes[shortest] += len(ids)
        # Every step has all rows, so the ends of the longer rows are left out.
        self.rows, self.steps = rows, min(sizes) // length
        if not self.steps:
            raise ValueError(f"`documents` have {sum(sizes)} tokens, too few for {rows} rows of {length}.")
        self.pieces = []
        for stream in streams:
            ids = torch.tensor([each for document in stream for each in document])
            positions = torch.cat([torch.arange(len(document)) for document in stream])
            following = torch.cat((ids[1:], ids.new_tensor([-100])))
            following[:-1].masked_fill_(positions[1:] == 0, -100)  # another document
            self.pieces.append([x[: self.steps * length].view(-1, length) for x in (ids, positions, following)])

    def __len__(self) -> int:
        return self.steps * self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        step, row = divmod(index, self.rows)
        if step >= self.steps:
            raise IndexError(index)
        ids, positions, following = (x[step] for x in self.pieces[row])
        # The label of a piece's last token is in the next piece, so labels are shifted here.
        return {"input_ids": ids, "position_ids": positions, "labels": ids, "shift_labels": following}


class StateCarryingTrainer(Trainer):
    """
    A Trainer for [`Pieces`], whose rows keep their states from step to step.

    Args:
        cut: whether every piece begins with an empty state instead.

    Raises:
        ValueError: if the state of the model grows with the text.
    """

    def __init__(self, *args, cut: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.cut, self.cache = cut, None
        if self.model.new_cache().grows:
            raise ValueError(f"The state of this {type(self.model).__name__} grows with the text without a limit.")

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch=None):
        if self.cut or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.cache is not None:  # inside a piece, positions that restart begin a document
            self.cache.reset_rows(inputs["position_ids"][:, 0] == 0)
        inputs = {**inputs, "cache": self.cache, "use_cache": True}
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.cache = outputs.cache.detach()
        return (loss, outputs) if return_outputs else loss

    def states_of(self, checkpoint: str | os.PathLike) -> Path:
        """The file with the states of this process's rows in a checkpoint."""
        return Path(checkpoint, f"states-{self.args.process_index}.safetensors")

    def _save_checkpoint(self, *args, **kwargs) -> None:
        if self.cache is not None:
            directory = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            directory.mkdir(parents=True, exist_ok=True)
            self.cache.save(self.states_of(directory))
        super()._save_checkpoint(*args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        self.cache = None
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"`resume_from_checkpoint`: {self.args.output_dir} has no checkpoint.")
        if resume_from_checkpoint and not self.cut:
            model, path = self.model, self.states_of(resume_from_checkpoint)
            self.cache = type(model.new_cache()).load(path, model.config, self.args.device)
        return super().train(resume_from_checkpoint or None, **kwargs)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    set_seed(arguments.seed)
    train, held_out = load_corpus(tuple(arguments.folders))[:2]
    train, held_out = ([tune for tune in tunes if len(tune) >= arguments.shortest] for tunes in (train, held_out))

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if arguments.fresh:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.model), dtype="float32")
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32")
    settings = TrainingArguments(
        output_dir=str(arguments.output),
        save_strategy="steps",
        save_steps=arguments.checkpoint_every,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        train_sampling_strategy="sequential",  # the pieces of a document follow each other
        remove_unused_columns=False,  # `shift_labels` among them
        learning_rate=arguments.lr,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,  # a share of all steps
        gradient_checkpointing=arguments.gradient_checkpointing,
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_steps=10,
        report_to="none",
        seed=arguments.seed,
    )
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(arguments.seed)).tolist()
    end = [tokenizer.eos_token_id]
    trainer = StateCarryingTrainer(
        model,
        settings,
        train_dataset=Pieces(
            [tokenizer.encode(train[n]) + end for n in order],
            arguments.batch_size * settings.world_size,
            arguments.piece,
        ),
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {"params": parameter_groups(model, arguments.lr)}),
        cut=arguments.cut,
    )
    trainer.train(resume_from_checkpoint=arguments.resume)
    print(f"held-out tunes, each read as a whole: {bits_per_byte(trainer.model, held_out):.4f} bits per byte")
    trainer.save_model()
    tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
