"""
Trains VisualRWKV to answer questions about pictures of shapes (examples/visual_shapes.py), by the two stages of "Eagle
and Finch" (section 10.2), with the Trainer of transformers.

    python examples/train_visual_rwkv.py --out visual-shapes --architecture finch
    python examples/train_visual_rwkv.py --out my-model --vision-tower clip-vit-large-patch14-336 \\
        --language-model finch-1b6 --lr 0 0 1e-3 2e-5 --batch-size 128

A vision tower turns the patches of a picture into features, a projection turns these into embeddings, and the language
model, Eagle or Finch, reads them together with the text. In stage 1 only the projection is trained; the tower and the
language model are frozen. So the projection learns to express pictures in words that the language model knows. In
stage 2 the language model is trained too, and the tower stays frozen. Only the answers have a loss.

Both stages need trained parts. The second command uses a trained CLIP and a trained Eagle or Finch: these are the
published stages, on other data. The first command does not need any files and takes less than ten minutes on a CPU
core (`pip install "subquad[train]"`). It begins with two stages that are not part of the recipe, in place of
pretraining:

  - tower: a small CLIP tower with a linear layer learns to recognise things and their places in a picture;
  - language model: a small Eagle or Finch learns to answer questions about scenes described in words.

So the tower has seen shapes but never words, and the language model has read about shapes but never seen them. Each
stage draws its own pictures, and none of them is held out. The accuracy is the share of right answers about held-out
pictures: of the language model with descriptions, after both stages, and after the last stage with blank pictures.
They are compared with chance: the most frequent answer of the training data to each question.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from help_formatter import HelpFormatter
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)
from visual_shapes import COLOURS, SHAPES, Example, VisualShapes, accuracy, chance

from subquad import VisualRwkvConfig, VisualRwkvForConditionalGeneration, VisualRwkvProcessor


STAGES = ("tower", "language model", "stage 1", "stage 2")
# Sizes of the parts to train if no trained ones are given.
TOWER = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6}
TOWER |= {"image_size": 56, "patch_size": 14}
TEXT = {"hidden_size": 96, "num_hidden_layers": 3, "head_size": 32, "initializer_range": 1e-2}
ARCHITECTURES = {
    "eagle": TEXT | {"model_type": "rwkv5"},
    "finch": TEXT | {"model_type": "rwkv6", "lora_rank_tokenshift": 8, "lora_rank_decay": 16},
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory for the model, its processor and results.json")
    add("--architecture", choices=ARCHITECTURES, default="eagle", help="architecture of the language model to train")
    add(
        "--reading-order",
        choices=("forward", "alternate"),
        help="reading order of the patches (default: the architecture's)",
    )
    add("--grid-size", type=int, default=-1, help="-1: all patches; n: averages of n x n squares; 0: class token only")
    add("--vision-tower", help="directory of a trained CLIP model (default: train a small tower)")
    add("--language-model", help="directory of a trained Eagle or Finch (default: train a small one)")
    add(
        "--steps",
        type=int,
        nargs=4,
        default=(1500, 2000, 600, 1600),
        metavar="N",
        help=f"steps of {', '.join(STAGES)}",
    )
    add(
        "--lr",
        type=float,
        nargs=4,
        default=(2e-3, 3e-3, 1e-2, 2e-3),
        metavar="LR",
        help="peak learning rates of these stages",
    )
    add("--batch-size", type=int, default=32, help="pictures per step")
    add("--held-out", type=int, default=1000, help="questions about held-out pictures")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    add("--seed", type=int, default=0, help="seed of weights and pictures")
    return parser.parse_args()


class Probe(nn.Module):
    """
    A linear layer on the tower's tokens. For each patch, it predicts the shapes and colours of the things with their
    centre in the patch; for the class token, of all things in the picture.
    """

    def __init__(self, tower: CLIPVisionModel, image_processor):
        super().__init__()
        self.tower, self.image_processor = tower, image_processor
        self.head = nn.Linear(tower.config.hidden_size, len(SHAPES) + len(COLOURS))

    def collate(self, examples: list[Example]) -> dict[str, torch.Tensor]:
        names, patch = (*SHAPES, *COLOURS), self.tower.config.patch_size
        side = self.tower.config.image_size // patch
        labels = torch.zeros(len(examples), 1 + side**2, len(names))
        for label, example in zip(labels, examples, strict=True):
            for thing in example.things:
                for name in (thing.shape, thing.colour):
                    label[[0, 1 + thing.y // patch * side + thing.x // patch], names.index(name)] = 1
        images = [example.image for example in examples]
        return {**self.image_processor(images, return_tensors="pt"), "labels": labels}

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.tower(pixel_values).last_hidden_state)
        return {"loss": F.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / len(labels)}


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in which each word of the conversations is one token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<pad>"], initial_alphabet=alphabet, show_progress=False)
    texts = (f"User: {e.description}\n{e.question}\n\nAssistant: {e.answer}\n\n" for e in VisualShapes(2000))
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")


def assemble(tower: CLIPVisionModel, image_processor, arguments: argparse.Namespace):
    """The model, with a new projection between the tower and a given or new language model, and its processor."""
    given = arguments.language_model
    tokenizer = AutoTokenizer.from_pretrained(given) if given else train_tokenizer()
    processor = VisualRwkvProcessor(image_processor, tokenizer)
    if given:
        language_model = AutoModelForCausalLM.from_pretrained(given, dtype="float32")
        if processor.image_token_id >= language_model.config.vocab_size:  # World's embeddings have room for it
            language_model.resize_token_embeddings(len(tokenizer))
    else:
        text_config = AutoConfig.for_model(**ARCHITECTURES[arguments.architecture], vocab_size=len(tokenizer))
        language_model = AutoModelForCausalLM.from_config(text_config)
    config = VisualRwkvConfig(
        vision_config=tower.config,
        text_config=language_model.config,
        image_token_id=processor.image_token_id,
        grid_size=arguments.grid_size,
        reading_order=arguments.reading_order,
    )
    processor.image_seq_length = config.num_image_tokens
    model = VisualRwkvForConditionalGeneration(config)
    model.model.vit, model.model.rwkv, model.head = tower, language_model.rwkv, language_model.head
    # An answer ends with a blank line.
    model.generation_config.eos_token_id = tokenizer("\n\n", add_special_tokens=False)["input_ids"][0]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, processor


def converse(example: Example, view: str, answer: bool) -> list[dict]:
    """A question about a picture, a blank picture or a description ("picture", "blank", "text"), maybe answered."""
    if view == "text":
        shown = {"type": "text", "text": f"{example.description}\n"}
    else:
        blank = Image.new("RGB", example.image.size, "white")
        shown = {"type": "image", "image": example.image if view == "picture" else blank}
    conversation = [{"role": "user", "content": [shown, {"type": "text", "text": example.question}]}]
    if answer:
        conversation.append({"role": "assistant", "content": [{"type": "text", "text": example.answer}]})
    return conversation


def collate(processor: VisualRwkvProcessor, view: str, examples: list[Example], answer: bool = True) -> dict:
    """The inputs of a batch, with labels for the answers only, or without answers for `generate`."""
    inputs = processor.apply_chat_template(
        [converse(example, view, answer) for example in examples],
        add_generation_prompt=not answer,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=answer,
        processor_kwargs={"padding": True, "padding_side": "left"},
    )
    if answer:
        inputs["labels"] = inputs["input_ids"].masked_fill(inputs.pop("assistant_masks") == 0, -100)
    return dict(inputs)


def train(model: nn.Module, parts: tuple[nn.Module, ...], stage: str, collator, size: int, arguments) -> float:
    """Trains only these parts of the model on pictures of `size` pixels; returns the average loss."""
    model.requires_grad_(False)
    for part in parts:
        part.requires_grad_(True)
    index = STAGES.index(stage)
    steps, seed = arguments.steps[index], arguments.seed * len(STAGES) + index  # other pictures in each stage
    options = TrainingArguments(
        output_dir=str(arguments.out),
        save_strategy="no",
        max_steps=steps,
        per_device_train_batch_size=arguments.batch_size,
        learning_rate=arguments.lr[index],
        lr_scheduler_type="cosine",
        warmup_steps=0.1,  # a share of all steps
        adam_beta2=0.99,
        remove_unused_columns=False,
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_steps=100,
        report_to="none",
        seed=seed,
    )
    pictures = VisualShapes(steps * arguments.batch_size, seed, size)
    trainer = Trainer(model=model, args=options, train_dataset=pictures, data_collator=collator)
    return trainer.train().training_loss


def measure(model, processor, examples: list[Example], view: str, batch_size: int = 50) -> dict[str, float]:
    """The share of right answers to each kind of question, with greedy decoding."""
    answers = []
    for begin in range(0, len(examples), batch_size):
        batch = collate(processor, view, examples[begin : begin + batch_size], answer=False)
        inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
        ids = model.eval().generate(**inputs, max_new_tokens=8, do_sample=False)
        answers += processor.post_process_image_text_to_text(ids[:, inputs["input_ids"].shape[1] :])
    return accuracy(examples, [text.strip() for text in answers])


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    set_seed(arguments.seed)
    losses = {}
    if arguments.vision_tower:
        tower = CLIPVisionModel.from_pretrained(arguments.vision_tower, dtype="float32")
        image_processor, size = AutoImageProcessor.from_pretrained(arguments.vision_tower), tower.config.image_size
    else:
        tower, size = CLIPVisionModel(CLIPVisionConfig(**TOWER)), TOWER["image_size"]
        image_processor = CLIPImageProcessor(size={"shortest_edge": size}, crop_size=size)
        probe = Probe(tower, image_processor)
        losses["tower"] = train(probe, (probe,), "tower", probe.collate, size, arguments)
    model, processor = assemble(tower, image_processor, arguments)

    held_out = list(VisualShapes(arguments.held_out, arguments.seed, size, held_out=True))
    results = {"chance": chance(VisualShapes(10_000, arguments.seed, size), held_out)}
    projection, language_model = (model.model.proj,), (model.model.rwkv, model.head)
    stages = [("stage 1", projection, "picture"), ("stage 2", projection + language_model, "picture")]
    if not arguments.language_model:
        stages.insert(0, ("language model", language_model, "text"))
    for stage, parts, view in stages:
        losses[stage] = train(model, parts, stage, partial(collate, processor, view), size, arguments)
        results[stage] = measure(model, processor, held_out, view)
    results["blank picture"] = measure(model, processor, held_out, "blank")

    model.save_pretrained(arguments.out)
    processor.save_pretrained(arguments.out)
    (arguments.out / "results.json").write_text(json.dumps({"accuracy": results, "loss": losses}, indent=2) + "\n")
    print(f"\n{'held out':16}" + "".join(f"{kind:>8}" for kind in results["chance"]))
    for row, measured in results.items():
        print(f"{row:16}" + "".join(f"{share:8.1%}" for share in measured.values()))

    ask = pipeline("image-text-to-text", model=str(arguments.out))
    for example in held_out[:3]:
        reply = ask(text=converse(example, "picture", answer=False), return_full_text=False, max_new_tokens=8)
        print(f"{example.description}: {example.question}{reply[0]['generated_text']}")


if __name__ == "__main__":
    main()
