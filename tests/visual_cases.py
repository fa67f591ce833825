"""VisualRWKV models whose images have 17 placeholders (9 with Goose), and model directories with a processor."""

import pytest
import torch
from cases import CLIP, IMAGE_ID, RWKV, TOWERS, made_once, tiny_config
from transformers import CLIPImageProcessorPil, CLIPVisionConfig

from subquad import VisualRwkvConfig, VisualRwkvForConditionalGeneration, VisualRwkvProcessor
from subquad_tokenizers import ByteTokenizer, RwkvWorldTokenizerFast


each_generation = pytest.mark.parametrize("generation", RWKV)


def tiny_visual_config(generation, *, layers=4, text_fields=None, **fields):
    text = {"vocab_size": IMAGE_ID + 1, "num_hidden_layers": layers, **(text_fields or {})}
    vision = TOWERS if generation == "rwkv7" else CLIPVisionConfig(**CLIP)
    fields = {"vision_config": vision, "image_token_id": IMAGE_ID, **fields}
    return VisualRwkvConfig(text_config=tiny_config(generation, **text), **fields)


def tiny_visual_model(generation, seed=0, **fields):
    """A tiny model without zero or constant parameters, as [`cases.Case.model`] makes it."""
    return made_once(_make, generation, seed, fields)


def _make(generation, seed, fields):
    torch.manual_seed(seed)
    model = VisualRwkvForConditionalGeneration(tiny_visual_config(generation, **fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def make_processor(tokenizer=None, image_seq_length=5, towers=False, **kwargs):
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)
    if towers:
        sizes = (21, 12, 24)
        first, *others = ({"size": {"height": size, "width": size}} for size in sizes)
        images = CLIPImageProcessorPil(**first, do_center_crop=False)
        kwargs["other_images"] = dict(zip(("pixel_values_siglip", "pixel_values_sam"), others, strict=True))
    return VisualRwkvProcessor(images, tokenizer or RwkvWorldTokenizerFast(), image_seq_length, **kwargs)


def save_visual(path, generation="rwkv6", **fields):
    """A tiny model that reads bytes, and its processor."""
    model = tiny_visual_model(generation, image_token_id=128, text_fields={"vocab_size": 130}, **fields)
    model.save_pretrained(path)
    towers = generation == "rwkv7"
    processor = make_processor(ByteTokenizer(), model.config.num_image_tokens, towers)
    processor.save_pretrained(path)
    return model, processor
