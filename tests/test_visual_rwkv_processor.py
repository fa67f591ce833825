"""The processor of VisualRWKV, and its pipeline."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedTokenizerFast, pipeline
from visual_cases import make_processor, save_visual

from subquad import VisualRwkvForConditionalGeneration, VisualRwkvProcessor
from subquad.hub import export as hub
from subquad_tokenizers import ByteTokenizer, RwkvWorldTokenizerFast


QUESTION = "What is it?"
IMAGE = {"type": "image", "image": Image.new("RGB", (40, 30), (200, 30, 30))}
TEXT = {"type": "text", "text": QUESTION}


@pytest.mark.fast
def test_placeholders():
    processor = make_processor(RwkvWorldTokenizerFast())
    assert processor.image_token_id == 65530  # the first id that World leaves
    text, images = f"User: <image>\n{QUESTION}\n\nAssistant:", [IMAGE["image"]] * 3
    inputs = processor(images=images, text=[text, "A", f"<image><image>{QUESTION}"], padding=True, return_tensors="pt")
    rows = [row[mask.bool()] for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    plain = RwkvWorldTokenizerFast()
    assert rows[0].tolist() == plain("User: ").input_ids + [65530] * 5 + plain(f"\n{QUESTION}\n\nAssistant:").input_ids
    assert rows[1].tolist() == plain("A").input_ids
    assert rows[2].tolist() == [65530] * 10 + plain(QUESTION).input_ids
    assert not inputs["attention_mask"][1, 0]  # padding comes before a text
    assert inputs["pixel_values"].shape == (3, 3, 28, 28)
    assert set(processor(text="A")) == {"input_ids", "attention_mask"}


@pytest.mark.fast
def test_greyscale_images_of_16_bits(tmp_path):
    """They keep their values; PIL would make nearly all of them white."""
    grey = np.linspace(0, 255, 28 * 28).reshape(28, 28).round().astype(np.uint8)
    fine = Image.fromarray(grey.astype(np.uint16) * 257)
    fine.save(tmp_path / "fine.png")
    assert fine.mode == "I;16"
    processor = make_processor(ByteTokenizer())

    def pixels(image):
        return processor(images=image, text="<image>", return_tensors="pt")["pixel_values"]

    expected = pixels(Image.fromarray(grey).convert("RGB"))
    for image in (fine, str(tmp_path / "fine.png"), grey.astype(np.uint16)[..., None].repeat(3, -1) * 257, [fine]):
        torch.testing.assert_close(pixels(image), expected)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("parts", "prompt"),
    [
        ([IMAGE, TEXT], f"User: <image>\n{QUESTION}\n\nAssistant:"),
        ([TEXT, IMAGE], f"User: {QUESTION}\n<image>\n\nAssistant:"),
        ([TEXT, IMAGE, TEXT], f"User: {QUESTION}\n<image>\n{QUESTION}\n\nAssistant:"),
        ([IMAGE, IMAGE, TEXT], f"User: <image>\n<image>\n{QUESTION}\n\nAssistant:"),
        ([TEXT, TEXT], f"User: {QUESTION}{QUESTION}\n\nAssistant:"),
        ([IMAGE, {"type": "text", "text": "A \n \n B\r\n"}], "User: <image>\nA\n B\n\nAssistant:"),
    ],
)
def test_the_layouts_of_training(parts, prompt):
    messages = [{"role": "user", "content": parts}]
    processor = make_processor()
    assert processor.apply_chat_template(messages, add_generation_prompt=True) == prompt
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs, images = processor.apply_chat_template(messages, **options), parts.count(IMAGE)
    expected = processor(images=[IMAGE["image"]] * images or None, text=prompt, return_tensors="pt")
    assert set(inputs) == set(expected)
    assert all(torch.equal(inputs[name], expected[name]) for name in expected)
    # The turns of a conversation: a blank line ends each.
    messages += [{"role": "assistant", "content": "A house."}, {"role": "user", "content": "Why?"}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert text == f"{prompt} A house.\n\nUser: Why?\n\nAssistant:"


@pytest.mark.fast
def test_images_come_first_with_three_towers():
    processor = make_processor(towers=True)
    for parts in ([IMAGE, IMAGE, TEXT], [TEXT, IMAGE, IMAGE], [IMAGE, TEXT, IMAGE], f"{QUESTION}\n\n<image> <image>"):
        messages = [{"role": "user", "content": parts}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        assert text == f"User: <image>\n<image>\n{QUESTION}\n\nAssistant:"
    messages += [{"role": "assistant", "content": "A\n\nB"}, {"role": "user", "content": [TEXT]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert text.endswith(f"\n\nAssistant: A\n\nB\n\nUser: {QUESTION}\n\nAssistant:")


def test_answers_that_are_continued_or_trained_on():
    processor = make_processor()
    text = {"role": "user", "content": [TEXT]}
    for begun in ("", "One:\n\n1. ", "```\n"):
        answer = {"role": "assistant", "content": [{"type": "text", "text": begun}]}
        prompt = processor.apply_chat_template([text, answer], continue_final_message=True)
        assert prompt == f"User: {QUESTION}\n\nAssistant:{' ' if begun else ''}{begun}"
    chat = [text, {"role": "assistant", "content": [{"type": "text", "text": "A house.\n\nRed."}]}]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "return_assistant_tokens_mask": True}
    inputs = processor.apply_chat_template(chat, **options)
    ids, mask = inputs["input_ids"][0], torch.as_tensor(inputs["assistant_masks"])[0].bool()
    assert processor.decode(ids[mask]) == " A house.\n\nRed.\n\n"


def test_errors(tmp_path):
    processor = make_processor()
    (tmp_path / "broken.png").write_bytes(b"no image")
    image = IMAGE["image"]
    for arguments, message in (
        ({"images": [image, image], "text": "<image>"}, "`text` has 1 <image> for 2 `images`"),
        ({"images": [image], "text": "A"}, "`text` has 0 <image> for 1 `images`"),
        ({"images": [[image], [image]], "text": ["A", "<image><image>"]}, re.escape("has [0, 2] <image> for [1, 1]")),
        ({"text": ["A", "<image>"]}, "`text` has 1 <image> for 0 `images`"),
        ({"images": str(tmp_path / "absent.png"), "text": "<image>"}, "absent.png"),
        ({"images": str(tmp_path / "broken.png"), "text": "<image>"}, "broken.png"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            processor(**arguments)
    for message, error in (
        ({"role": "tool", "content": "A"}, "The role tool is none of"),
        ({"role": "user", "content": [{"type": "audio"}]}, "The type audio is none of"),
    ):
        with pytest.raises(Exception, match=error):
            processor.apply_chat_template([message])
    question = {"role": "user", "content": "A"}
    weather = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with pytest.raises(Exception, match="not trained with tools; leave out `tools`"):
        processor.apply_chat_template([question], tools=[weather])
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    with pytest.raises(Exception, match="not trained with tools; leave out `tool_calls`"):
        processor.apply_chat_template([question, call])
    with pytest.raises(ValueError, match="`image_seq_length` must be a whole number of at least 1, got 0"):
        make_processor(image_seq_length=0)


@pytest.mark.parametrize("generation", ["rwkv6", "rwkv7"])
def test_a_directory_answers(generation, tmp_path):
    model, processor = save_visual(tmp_path, generation)
    pipe = pipeline("image-text-to-text", str(tmp_path), device="cpu")
    assert type(pipe.model) is VisualRwkvForConditionalGeneration and type(pipe.processor) is VisualRwkvProcessor
    assert type(pipe.tokenizer) is ByteTokenizer
    assert pipe.processor.image_seq_length == model.config.num_image_tokens == (9 if generation == "rwkv7" else 17)
    chat = [{"role": "user", "content": [IMAGE, TEXT]}]
    options = {"max_new_tokens": 6, "do_sample": False}
    inputs = processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    new = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
    (answer,) = processor.post_process_image_text_to_text(new)
    (result,) = pipe(chat, return_full_text=False, generate_kwargs=options)
    assert result["generated_text"] == answer and len(answer) > 3
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True)
    (result,) = pipe(images=IMAGE["image"], text=prompt, generate_kwargs=options)
    assert result["generated_text"] == prompt + answer
    other = processor(images=Image.effect_noise((40, 30), 250), text=prompt, return_tensors="pt")
    assert (model(**other).logits[:, -1] - model(**inputs).logits[:, -1]).abs().max() > 0.01
    (result,) = pipe(text="User: A\n\nAssistant:", generate_kwargs=options)
    assert result["generated_text"].startswith("User: A\n\nAssistant:")


def test_a_blank_line_ends_an_answer():
    processor = make_processor()
    ids = processor.tokenizer(["User: A\n\nAssistant: A house.\n\n", " B"]).input_ids
    assert processor.post_process_image_text_to_text(ids) == ["User: A\n\nAssistant: A house.", " B"]


def test_a_repository(tmp_path):
    """Its processor is saved with its code, with the model or by itself, and the installed class loads it."""
    model, processor = save_visual(tmp_path / "source")
    hub.export(tmp_path / "source", tmp_path / "exported")
    model.save_pretrained(tmp_path / "saved", self_contained=True)
    processor.save_pretrained(tmp_path / "saved", self_contained=True)
    reference = "processing_visual_rwkv.VisualRwkvProcessor"
    for name in ("exported", "saved"):
        directory = tmp_path / name
        assert json.loads((directory / "config.json").read_text())["auto_map"]["AutoProcessor"] == reference
        assert json.loads((directory / "processor_config.json").read_text())["auto_map"]["AutoProcessor"] == reference
        assert (directory / "processing_visual_rwkv.py").is_file()
        loaded = AutoProcessor.from_pretrained(directory)
        assert type(loaded) is VisualRwkvProcessor and loaded.to_dict().keys() >= {"image_seq_length"}
        assert loaded.chat_template == processor.chat_template and loaded.image_seq_length == 17
        assert type(AutoModelForImageTextToText.from_pretrained(directory)) is type(model)
        # The processor fits a model with another field.
        coarse = AutoModelForImageTextToText.from_pretrained(directory, grid_size=2)
        assert coarse.config.num_image_tokens == 5
        assert AutoProcessor.from_pretrained(directory, image_seq_length=5).image_seq_length == 5
    # The code is the same both ways.
    for path in (tmp_path / "exported").glob("*.py"):
        assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes()
    # What was loaded from such a directory, and what goes beside such a model, is saved so; and nothing else.
    AutoProcessor.from_pretrained(tmp_path / "saved").save_pretrained(tmp_path / "again")
    model.save_pretrained(tmp_path / "beside", self_contained=True)
    processor.save_pretrained(tmp_path / "beside")
    for name in ("again", "beside"):
        assert json.loads((tmp_path / name / "processor_config.json").read_text())["auto_map"]["AutoProcessor"]
        assert "AutoTokenizer" in json.loads((tmp_path / name / "tokenizer_config.json").read_text())["auto_map"]
        assert (tmp_path / name / "processing_visual_rwkv.py").is_file()
    processor.save_pretrained(tmp_path / "plain")
    assert not list((tmp_path / "plain").glob("*.py"))
    assert not any("auto_map" in path.read_text() for path in (tmp_path / "plain").glob("*.json"))
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card and 'pipeline("image-text-to-text"' in card


@pytest.mark.parametrize("ours", [True, False])
def test_saving_with_the_code(ours, tmp_path):
    """Code follows a processor from directory to directory, also with a foreign tokenizer, and changes no object."""
    tokenizer = ByteTokenizer()
    processor = make_processor(tokenizer if ours else PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer))
    parts = (processor, processor.image_processor, processor.tokenizer)
    before = [set(vars(part)) for part in parts], dict(processor.tokenizer.init_kwargs)
    processor.save_pretrained(tmp_path / "first", self_contained=True)
    assert ([set(vars(part)) for part in parts], processor.tokenizer.init_kwargs) == before
    for old, new in (("first", "second"), ("second", "third")):
        AutoProcessor.from_pretrained(tmp_path / old).save_pretrained(tmp_path / new)
    directories = [tmp_path / name for name in ("first", "second", "third")]
    files, *others = ({path.name: path.read_bytes() for path in each.glob("*.py")} for each in directories)
    assert others == [files, files] and "processing_visual_rwkv.py" in files
    assert ("tokenization_bytes.py" in files) == ours
    for directory in directories:
        assert "AutoProcessor" in json.loads((directory / "processor_config.json").read_text())["auto_map"]
