"""VisualRWKV with Goose and three towers: what the authors' code computed, and what it has beyond the contract."""

import json

import pytest
import torch
from cases import GREEDY, OF_TOWERS, TOLERANCE, VISUAL, padded
from golden_files import read_golden
from huggingface_hub.errors import StrictDataclassClassValidationError
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from visual_cases import tiny_visual_config, tiny_visual_model

from subquad import VisualRwkvConfig, VisualRwkvProcessor
from subquad_conversion import ConversionError, convert
from subquad_conversion.visual_rwkv7 import FORMAT
from subquad_tokenizers import RwkvWorldTokenizerFast


NAMES = {"pixel_values": "dino", "pixel_values_siglip": "siglip", "pixel_values_sam": "sam"}
CASE = VISUAL[2]


@pytest.fixture(scope="module")
def golden():
    return read_golden("visual_rwkv7")


def pixels_of(tensors):
    return {name: tensors[f"pixel_values.{tower}"] for name, tower in NAMES.items()}


@pytest.fixture(scope="module")
def converted(golden, tmp_path_factory):
    """The directory that `convert` makes of the trainer's file."""
    _, weights, sizes = golden
    folder = tmp_path_factory.mktemp("golden")
    torch.save(weights, folder / "trained.pth")
    heads = {tower: {"num_attention_heads": sizes[tower]["num_heads"]} for tower in ("dino", "siglip")}
    fields = {"image_token_id": sizes["image_token_id"], "vision_config": heads}
    (folder / "config.json").write_text(json.dumps(fields))
    convert(folder / "trained.pth", folder / "model", config=folder / "config.json", progress=False)
    return folder / "model"


def load(directory, **fields):
    model, loading = AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, **fields
    )
    assert not any(loading.values()), loading
    return model


# The authors' code.


@pytest.mark.fast
def test_golden_features_and_logits(golden, converted):
    tensors, pixels, model = golden[0], pixels_of(golden[0]), load(converted)
    with torch.no_grad():
        found = model.get_image_features(**pixels)
        torch.testing.assert_close(found.last_hidden_state, tensors["tower_features"], atol=2e-5, rtol=0)
        torch.testing.assert_close(found.pooler_output, tensors["image_features"], atol=2e-5, rtol=0)
        logits = model(tensors["input_ids"], **pixels).logits
        torch.testing.assert_close(logits, tensors["logits"], atol=5e-5, rtol=0)


def test_golden_pooling(golden, converted):
    tensors, pixels = golden[0], pixels_of(golden[0])
    fields = json.loads((converted / "config.json").read_text()) | {"grid_size": -1, "num_token_per_image": 4}
    assert VisualRwkvConfig.from_dict(fields).grid_size == 2
    model = load(converted, grid_size=2)
    assert model.config.num_image_tokens == 4
    with torch.no_grad():
        found = model.get_image_features(**pixels).pooler_output
        logits = model(tensors["pooled.input_ids"], **pixels).logits
    torch.testing.assert_close(found, tensors["pooled.image_features"], atol=2e-5, rtol=0)
    torch.testing.assert_close(logits, tensors["pooled.logits"], atol=5e-5, rtol=0)


def test_golden_answers_about_two_images(golden, converted):
    tensors, pixels, model = golden[0], pixels_of(golden[0]), load(converted)
    ids = tensors["two_images.input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(model(ids, **pixels).logits, tensors["two_images.logits"], atol=5e-5, rtol=0)
        # The authors put blank lines in front, up to a multiple of 16. They are tokens like any other.
        expected, stop = tensors["two_images.logits_left16"], golden[2]["stop_token_id"]
        before = torch.full((1, -ids.shape[1] % 16), stop)
        logits = model(torch.cat((before, ids), 1), **pixels).logits[:, before.shape[1] :]
        torch.testing.assert_close(logits[:, -expected.shape[1] :], expected, atol=5e-5, rtol=0)
    new = model.generate(ids, **pixels, max_new_tokens=8, **GREEDY)[0, ids.shape[1] :]
    assert torch.equal(new, tensors["two_images.greedy"])


def test_golden_pixels(golden, converted):
    tensors = golden[0]
    images, others = FORMAT.image_settings(VisualRwkvConfig.from_pretrained(converted), None)
    processor = VisualRwkvProcessor(images, RwkvWorldTokenizerFast(), 16, other_images=others)
    pictures = [Image.fromarray(tensors[f"image.{i}"].numpy()) for i in range(2)]
    inputs = processor(images=pictures, text="<image><image>", return_tensors="pt")
    for name, expected in pixels_of(tensors).items():
        torch.testing.assert_close(inputs[name], expected, atol=1e-6, rtol=0)


# Pooling to a grid that does not divide the patches.


@pytest.mark.parametrize("grid_size", [1, 2, 3])
def test_overlapping_means(grid_size):
    model = tiny_visual_model("rwkv7", grid_size=grid_size).double().model
    draws = torch.Generator().manual_seed(0)
    features = torch.randn(2, 9, model.config.vision_config.hidden_size, generator=draws, dtype=torch.double)
    grid = features.unflatten(1, (3, 3))
    means = []
    for row in range(grid_size):
        for column in range(grid_size):
            rows, columns = (slice(i * 3 // grid_size, -(-(i + 1) * 3 // grid_size)) for i in (row, column))
            means.append(grid[:, rows, columns].mean((1, 2)))
    f = torch.stack(means, 1)
    gate, out, norm = model.proj.gate.weight, model.proj.o_proj.weight, model.proj.ln_v
    x = (f / (1 + torch.exp(-(f @ gate.T)))) @ out.T
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(model.proj(features), x * norm.weight + norm.bias, atol=1e-10, rtol=0)


# Features that are computed once.


def test_features_of_each_image_are_computed_once():
    """`image_features` take the place of pixels, also without the towers."""
    model, text = CASE.model(), CASE.text(2, 20)
    pixels = {name: x for name, x in text.items() if name in NAMES}
    ids = text["input_ids"]
    with torch.no_grad():
        features = model.get_image_features(**pixels).pooler_output
        alone = [
            model.get_image_features(**{name: x[i : i + 1] for name, x in pixels.items()}).pooler_output
            for i in range(len(features))
        ]
        torch.testing.assert_close(torch.cat(alone), features, atol=1e-5, rtol=1e-5)
        expected = model(**text).logits
        ways = ({}, {"num_beams": 2}, {"cache_implementation": "static", "disable_compile": True})
        answers = [model.generate(**text, max_new_tokens=4, **GREEDY | way) for way in ways]
        model.model.vit.to("meta")  # no longer there
        assert model.device == ids.device
        torch.testing.assert_close(model(ids, image_features=features).logits, expected)
        for way, answer in zip(ways, answers, strict=True):
            found = model.generate(ids, image_features=features, max_new_tokens=4, **GREEDY | way)
            assert torch.equal(found, answer)
        left = padded([{"input_ids": ids[:1, :13]}, {"input_ids": ids[1:]}], "left")
        logits = model(**left, image_features=torch.cat((features[:2], features[3:]))).logits
        torch.testing.assert_close(logits[0, 7:], expected[0, :13], **TOLERANCE)
        torch.testing.assert_close(logits[1], expected[1], **TOLERANCE)
        with pytest.raises(ValueError, match=r"`image_features` holds 1 images of 4 features.* has 24 placeholders"):
            model(ids, image_features=features[:1])


def test_a_conversation_with_features():
    model, text = CASE.model(), CASE.text(1, 20)
    ids, pixels = text["input_ids"], {name: x for name, x in text.items() if name in NAMES}
    features = model.get_image_features(**pixels).pooler_output.detach()
    options = {"max_new_tokens": 3, "return_dict_in_generate": True, **GREEDY}
    first = model.generate(ids, image_features=features, **options)
    longer = torch.cat((first.sequences, ids), 1)  # the same images again
    expected = model.generate(longer, image_features=features.repeat(2, 1, 1), max_new_tokens=3, **GREEDY)
    for given in (features.repeat(2, 1, 1), features):
        found = model.generate(longer, image_features=given, cache=first.cache.clone(), max_new_tokens=3, **GREEDY)
        assert torch.equal(found, expected)


# Files.


def test_saving_and_loading(converted, golden, tmp_path):
    """A saved model has the tensors of the converted one, and DINOv2's token for hidden patches."""
    pixels, ids = pixels_of(golden[0]), golden[0]["input_ids"]
    model = load(converted)
    model.save_pretrained(tmp_path)
    source, written = load_file(converted / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert written.keys() - source.keys() == {"model.vit.dino.embeddings.mask_token"}
    assert not source.keys() - written.keys()
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path)(ids, **pixels).logits, model(ids, **pixels).logits)
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (converted, tmp_path))
    for tower in ("dino", "siglip", "sam"):
        one, other = (config["vision_config"][tower] for config in (first, second))
        assert one | {"dtype": None} == other | {"dtype": None}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_attention_of_the_towers(implementation, tmp_path):
    text = CASE.text(1, 13)
    CASE.model().save_pretrained(tmp_path)
    expected = CASE.model()(**text).logits
    model = load(tmp_path, attn_implementation=implementation)
    for tower in (model.model.vit.dino, model.model.vit.siglip, model.model.vit.sam):
        assert tower.config._attn_implementation == implementation
    kind = type(model.model.vit.sam.vision_encoder.layers[0].attn).__name__
    assert kind == ("SamVisionSdpaAttention" if implementation == "sdpa" else "SamVisionAttention")
    torch.testing.assert_close(model(**text).logits, expected, **TOLERANCE)


# Wrong input is refused by name, before any work.


def test_wrong_images():
    model, text = CASE.model(), CASE.text(1, 13)
    features = torch.zeros(2, 4, 48)
    for changed, message in (
        ({"pixel_values_sam": None}, "must be `pixel_values`, `pixel_values_siglip`, `pixel_values_sam`, got"),
        ({"image_features": features}, "must be `image_features`, got `pixel_values`"),
        ({"pixel_values_sam": torch.zeros(2, 3, 28, 24)}, r"`pixel_values_sam` must be \(images, 3, 24, 24\)"),
        ({"pixel_values_siglip": torch.zeros(1, 3, 12, 12)}, "2 in `pixel_values`, 1 in `pixel_values_siglip`"),
        ({"pixel_values": text["pixel_values_sam"]}, r"`pixel_values` must be \(images, 3, 21, 21\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**text | changed)
    only = dict.fromkeys(NAMES)
    with pytest.raises(ValueError, match=r"`image_features` must be \(images, 4, 48\), got \(2, 5, 48\)"):
        model(**text | only, image_features=torch.zeros(2, 5, 48))
    other = VISUAL[0].model()
    with pytest.raises(ValueError, match="must be `pixel_values`, got `pixel_values`, `pixel_values_sam`"):
        other(**VISUAL[0].text(1, 13), pixel_values_sam=text["pixel_values_sam"])


TOWERS = OF_TOWERS["vision_config"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({"grid_size": n}, f"`grid_size` must be -1, or from 1 to the 3 patches per side, got {n}")
            for n in (0, 4, -2)
        ),
        ({"num_token_per_image": 5}, "`num_token_per_image` must be the square of `grid_size` .* got 5"),
        ({"num_token_per_image": 4, "grid_size": 3}, r"the square of `grid_size` \(3\)"),
        ({"vision_config": TOWERS | {"sam": TOWERS["sam"] | {"image_size": 32}}}, "3, 3, 8 patches per side"),
        ({"vision_config": TOWERS | {"dino": TOWERS["dino"] | {"image_size": 28}}}, "4, 3, 6 patches per side"),
        (
            {"vision_config": TOWERS | {"siglip": TOWERS["siglip"] | {"hidden_act": "relu"}}},
            "`hidden_act` must be 'gelu'",
        ),
        (
            {"vision_config": TOWERS | {"siglip": TOWERS["siglip"] | {"num_hidden_layers": 1}}},
            "the last layer but one",
        ),
        (
            {"vision_config": {"model_type": "sam_vision_model"}},
            "must be clip_vision_model or visual_rwkv_towers, got",
        ),
    ],
)
def test_wrong_configuration(fields, message):
    with pytest.raises((ValueError, StrictDataclassClassValidationError), match=message):
        tiny_visual_config("rwkv7", **fields)


def test_towers_that_do_not_fit(golden, tmp_path):
    """Towers of another size, or none, are refused before anything is written."""
    weights = golden[1]
    gate = weights["proj.gate.weight"]
    narrow = weights | {"proj.gate.weight": gate[:-4, :-4].clone()}
    bare = {name: x for name, x in weights.items() if not name.startswith("vit.sam_")}
    for tensors, message in (
        (narrow, "proj.gate.weight reads 108 features of a patch, .*sam_featurizer.neck.0.weight has 8 x 4"),
        (bare, "lacks the vision towers SAM"),
    ):
        torch.save(tensors, tmp_path / "trained.pth")
        with pytest.raises(ConversionError, match=message):
            convert(tmp_path / "trained.pth", tmp_path / "model", progress=False)
        assert not (tmp_path / "model").exists()


def test_the_two_files_of_an_export(golden, converted, tmp_path):
    weights, fields = golden[1], converted.parent / "config.json"
    text = {name.removeprefix("rwkv."): x for name, x in weights.items() if name.startswith("rwkv.")}
    torch.save(text, tmp_path / "v070_rwkv.pth")
    torch.save({name: x for name, x in weights.items() if not name.startswith("rwkv.")}, tmp_path / "v070_visual.pth")
    for half in ("rwkv", "visual"):
        convert(tmp_path / f"v070_{half}.pth", tmp_path / half, config=fields, progress=False)
        expected = (converted / "model.safetensors").read_bytes()
        assert (tmp_path / half / "model.safetensors").read_bytes() == expected
