"""The example that trains VisualRWKV: its pictures, what each stage trains, and the directory it leaves."""

import json
import math
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import train_visual_rwkv as script
from transformers import AutoModelForCausalLM, CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, pipeline
from visual_shapes import COLOURS, SHAPES, VisualShapes, chance

from subquad import embedded_model


def run(monkeypatch, capsys, *arguments):
    """
    Runs the script in this process; returns what it prints, and of each stage the names of the parameters that it
    changes.
    """
    changed, train = {}, script.train

    def watch(model, parts, stage, *rest):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        loss = train(model, parts, stage, *rest)
        changed[stage] = {name for name, parameter in model.named_parameters() if not parameter.equal(before[name])}
        return loss

    threads = torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(script, "train", watch)
        patch.setattr(script, "VisualShapes", few)
        patch.setattr(sys, "argv", ["train_visual_rwkv", "--threads=1", "--batch-size=4", *map(str, arguments)])
        script.main()
    torch.set_num_threads(threads)
    return capsys.readouterr().out, changed


def few(number, *rest, **options):
    """For the vocabulary, and for what the questions' usual answers are, hundreds of scenes do as thousands do."""
    return VisualShapes(min(number, 400), *rest, **options)


def parts(names):
    return {name.removeprefix("model.").split(".")[0] for name in names}


def test_each_stage_trains_its_parts(tmp_path, monkeypatch, capsys):
    arguments = ["--out", tmp_path, "--steps", *[3] * 4, "--held-out", 20]
    out, changed = run(monkeypatch, capsys, *arguments)
    assert list(changed) == list(script.STAGES)
    assert {"tower.embeddings.class_embedding", "head.weight"} <= changed["tower"]
    assert parts(changed["language model"]) == {"rwkv", "head"}
    assert changed["stage 1"] == {"model.proj.weight"}
    assert parts(changed["stage 2"]) == {"proj", "rwkv", "head"}

    written = json.loads((tmp_path / "results.json").read_text())
    assert all(math.isfinite(loss) for loss in written["loss"].values()) and list(written["loss"]) == [*changed]
    rows = ["chance", "language model", "stage 1", "stage 2", "blank picture"]
    assert list(written["accuracy"]) == rows
    held_out = list(VisualShapes(20, 0, held_out=True))
    assert written["accuracy"]["chance"] == chance(few(10_000), held_out)
    assert f"{'chance':16}" + "".join(f"{x:8.1%}" for x in written["accuracy"]["chance"].values()) in out

    # What was saved is what was measured.
    ask = pipeline("image-text-to-text", model=str(tmp_path))
    assert ask.model.config.text_config.model_type == "rwkv5"
    for view, row in (("picture", "stage 2"), ("blank", "blank picture")):
        assert script.measure(ask.model, ask.processor, held_out, view) == written["accuracy"][row]
    reply = ask(text=script.converse(held_out[0], "picture", False), return_full_text=False, max_new_tokens=8)
    assert out.splitlines()[-3].endswith(f"{held_out[0].question}{reply[0]['generated_text']}")


def test_pretrained_parts(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    config = CLIPVisionConfig(**script.TOWER | {"image_size": 64, "patch_size": 16})
    tower, finch = CLIPVisionModel(config), AutoModelForCausalLM.from_pretrained(embedded_model("finch-abc"))
    tower.save_pretrained(tmp_path / "clip")
    CLIPImageProcessor(size={"shortest_edge": 64}, crop_size=64).save_pretrained(tmp_path / "clip")
    arguments = ["--vision-tower", tmp_path / "clip", "--language-model", embedded_model("finch-abc")]
    arguments += ["--out", tmp_path / "out", "--steps", 0, 0, 2, 2, "--grid-size", 2, "--reading-order", "forward"]
    _, changed = run(monkeypatch, capsys, *arguments, "--held-out", 8)
    assert list(changed) == ["stage 1", "stage 2"] and changed["stage 1"] == {"model.proj.weight"}

    model = script.VisualRwkvForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert (model.config.grid_size, model.config.num_image_tokens, model.config.reading_order) == (2, 5, "forward")
    assert all(weight.equal(model.model.vit.state_dict()[name]) for name, weight in tower.state_dict().items())
    # Trained a little, and still the Finch that was given; its vocabulary of ASCII has grown by the placeholder.
    kept, given = model.model.rwkv.embeddings.weight, finch.rwkv.embeddings.weight.float()
    assert len(given) == 128 and len(kept) == 129 and model.config.image_token_id == 128
    assert 0 < (kept[:128] - given).abs().max() < 0.05
    assert model.generation_config.eos_token_id == ord("\n")


@pytest.mark.fast
def test_labels_are_the_answers():
    tower = CLIPVisionModel(CLIPVisionConfig(**script.TOWER))
    image_processor = CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=56)
    arguments = SimpleNamespace(language_model=None, architecture="finch", grid_size=-1, reading_order=None)
    model, processor = script.assemble(tower, image_processor, arguments)
    assert model.config.text_config.model_type == "rwkv6"
    examples = list(VisualShapes(12))
    for view in ("picture", "blank", "text"):
        batch = script.collate(processor, view, examples)
        for ids, labels, example in zip(batch["input_ids"], batch["labels"], examples, strict=True):
            taught = labels != -100
            assert labels[taught].equal(ids[taught])
            assert processor.decode(labels[taught]) == f" {example.answer}\n\n"
            # `generate` reads what training reads before the answer.
            prompt = script.collate(processor, view, [example], answer=False)["input_ids"][0]
            assert ids[~taught][-len(prompt) :].equal(prompt)
            assert (prompt == model.config.image_token_id).sum() == (0 if view == "text" else 17)
            assert model.generation_config.eos_token_id == ids[-1]
            assert (example.description in processor.decode(prompt)) == (view == "text")
        if view == "blank":
            white = batch["pixel_values"]
            assert (white == white[:1, :, :1, :1]).all()

    labels = script.Probe(tower, image_processor).collate(examples)["labels"]
    for label, example in zip(labels, examples, strict=True):
        seen = Counter(tuple(row.nonzero().flatten().tolist()) for row in label[1:] if row.any())
        names = (*SHAPES, *COLOURS)
        assert seen == Counter((names.index(x.shape), names.index(x.colour)) for x in example.things)
        assert label[0].equal(label[1:].amax(0))
