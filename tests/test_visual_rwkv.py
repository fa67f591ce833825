"""VisualRWKV against a plain implementation of it, and what it has beyond the contract."""

import contextlib
import copy
import itertools
import re

import pytest
import torch
import transformers
from cases import GREEDY, TOLERANCE, VISUAL, assert_same_states, each, random_ids, tiny_config, tiny_model
from huggingface_hub.errors import StrictDataclassClassValidationError
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    CLIPVisionConfig,
    CLIPVisionModel,
)
from visual_cases import CLIP, each_generation, tiny_visual_config, tiny_visual_model
from visual_cases import IMAGE_ID as IMAGE
from visual_rwkv_reference import image_features, visual_rwkv_logits

import subquad
from subquad import VisualRwkvConfig, VisualRwkvForConditionalGeneration
from subquad.modeling.versions import minor_version


# In float64. Eagle rounds its decays and what it mixes by to float32, whatever it is computed in.
EXACT = {"rwkv5": {"atol": 2e-6, "rtol": 0}, "rwkv6": {"atol": 1e-8, "rtol": 0}}
GRID_SIZES = (-1, 0, 1, 2, 4)  # of 4 x 4 patches


class Row:
    """
    A row of text and images. Its layout is a tuple of numbers of text tokens and of "image"s.

    Attributes:
        entries: token ids and images (3, 28, 28), in order.
        pixel_values: (images, 3, 28, 28).
    """

    def __init__(self, *layout, seed=0):
        text = iter(random_ids(99, seed=seed).tolist())
        draws = torch.Generator().manual_seed(seed)
        self.entries = []
        for part in layout:
            image = part == "image"
            self.entries += [torch.randn(3, 28, 28, generator=draws)] if image else itertools.islice(text, part)

    @property
    def pixel_values(self):
        images = [entry for entry in self.entries if isinstance(entry, torch.Tensor)]
        return torch.stack(images) if images else torch.zeros(0, 3, 28, 28)

    def ids(self, model):
        size = model.config.num_image_tokens
        return [i for x in self.entries for i in ([x] if isinstance(x, int) else [IMAGE] * size)]

    def inputs(self, model):
        return batch(model, self)


def batch(model, *rows, side="left"):
    """`input_ids`, `attention_mask` if rows have different lengths, and `pixel_values` if there are images."""
    ids, images = [row.ids(model) for row in rows], torch.cat([row.pixel_values for row in rows]).to(model.dtype)
    width = max(len(x) for x in ids)
    empty = [[0] * (width - len(x)) for x in ids]
    mask = [[1] * len(x) for x in ids]
    ids, mask = (
        torch.tensor([pad + x if side == "left" else x + pad for x, pad in zip(xs, empty, strict=True)])
        for xs in (ids, mask)
    )
    inputs = {"input_ids": ids}
    if not mask.all():
        inputs["attention_mask"] = mask
    return inputs | ({"pixel_values": images} if len(images) else {})


def published(model):
    """The tensors below the vision tower under the names of the published files."""
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        name = name.removeprefix("model.")
        for ours, theirs in (
            ("embeddings", "emb"),
            ("pre_ln", "ln0"),
            ("attention", "att"),
            ("feed_forward", "ffn"),
            ("head", "rwkv.head"),
        ):
            name = re.sub(rf"(^|\.){ours}\.", rf"\1{theirs}.", name)
        name = re.sub(r"(time_mix_[kvrg])\w+$", r"\1", name)
        if not name.startswith("vit."):
            tensors[name] = tensor
    return tensors


def tower_states(model, images):
    """The output of transformers' vision tower, in float64."""
    tower = CLIPVisionModel(model.config.vision_config).double().eval()
    tower.load_state_dict(model.model.vit.state_dict())
    with torch.no_grad():
        return tower(images.double()).last_hidden_state


def reference(model, row, tokens=(), **options):
    """Logits of a row, and of tokens after it, by the plain implementation."""
    states = iter(tower_states(model, row.pixel_values) if len(row.pixel_values) else ())
    entries = [entry if isinstance(entry, int) else next(states) for entry in row.entries]
    config = model.config
    options = {"grid_size": config.grid_size, "reading_order": config.reading_order, **options}
    generation = config.text_config.model_type
    return visual_rwkv_logits(published(model), generation, [*entries, *tokens], **options)


@contextlib.contextmanager
def images_read(model):
    """A list of how many images the tower reads, one entry a call."""
    calls = []
    hook = model.model.vit.register_forward_pre_hook(
        lambda _, inputs, named: calls.append(len(named.get("pixel_values", *inputs))), with_kwargs=True
    )
    yield calls
    hook.remove()


# The plain implementation.


@pytest.mark.fast
@each_generation
def test_image_features(generation):
    images = Row("image", "image").pixel_values.double()
    sizes = []
    for grid_size in GRID_SIZES:
        model = tiny_visual_model(generation, grid_size=grid_size).double()
        with torch.no_grad():
            features = model.get_image_features(images).pooler_output
            with pytest.raises(TypeError, match=r"get_image_features\(\) got .*`invented`"):
                model.get_image_features(images, invented=1)
        states, tensors = tower_states(model, images), published(model)
        expected = [torch.stack(image_features(tensors, generation, image, grid_size)[0]) for image in states]
        torch.testing.assert_close(features, torch.stack(expected), atol=1e-8, rtol=0)
        sizes.append(model.config.num_image_tokens)
        assert features.shape == (2, sizes[-1], 48)
    assert sizes == [17, 1, 1 if generation == "rwkv5" else 2, 5, 17]


LAYOUTS = {
    "text": (7,),
    "start": ("image", 5),
    "middle": (3, "image", 4),
    "end": (4, "image"),
    "alone": ("image",),
    "two": (2, "image", 3, "image", 1),
    "adjacent": (2, "image", "image", 3),
}


@pytest.mark.parametrize(
    ("generation", "reading_order"), [("rwkv5", "forward"), ("rwkv6", "alternate"), ("rwkv6", "forward")]
)
def test_logits(generation, reading_order):
    by_default = {"rwkv5": "forward", "rwkv6": "alternate"}[generation] == reading_order
    model = tiny_visual_model(generation, reading_order=None if by_default else reading_order)
    assert model.config.reading_order == reading_order
    expected = {}
    with torch.no_grad():
        for name, layout in LAYOUTS.items():
            row = Row(*layout)
            expected[name] = reference(model, row)
            torch.testing.assert_close(model(**row.inputs(model)).logits[0].double(), expected[name], **TOLERANCE)
        model.double()
        for name, layout in LAYOUTS.items():
            logits = model(**Row(*layout).inputs(model)).logits[0]
            torch.testing.assert_close(logits, expected[name], **EXACT[generation])
        # The orders are not the same, nor are the places of two images.
        other = {"forward": "alternate", "alternate": "forward"}[reading_order]
        row = Row(3, "image", 4)
        assert (reference(model, row, reading_order=other) - expected["middle"])[3:].abs().max() > 0.1
        inputs = Row(*LAYOUTS["adjacent"]).inputs(model)
        inputs["pixel_values"] = inputs["pixel_values"].flip(0)
        assert (model(**inputs).logits[0] - expected["adjacent"]).abs().max() > 0.1


@each_generation
def test_logits_of_every_grid(generation):
    row = Row(2, "image", 3, "image")
    for grid_size, order in ((2, "forward"), (2, "alternate"), (1, "alternate")):
        model = tiny_visual_model(generation, grid_size=grid_size, reading_order=order).double()
        with torch.no_grad():
            logits = model(**row.inputs(model)).logits[0]
        torch.testing.assert_close(logits, reference(model, row), **EXACT[generation])


@each_generation
def test_gradients_of_the_plain_implementation(generation):
    model = tiny_visual_model(generation).double().train()
    model.model.vit.requires_grad_(False)
    row, draws = Row(2, "image", 2), torch.Generator().manual_seed(0)
    logits = model(**row.inputs(model)).logits[0]
    weights = torch.randn(logits.shape, generator=draws, dtype=torch.double)
    (logits * weights).sum().backward()
    found = {name: p.grad for name, p in published(model).items()}
    assert all(p.grad is None for p in model.model.vit.parameters())
    model.zero_grad()
    (reference(model, row) * weights).sum().backward()
    for name, p in published(model).items():
        assert found[name].any(), name
        assert (found[name] - p.grad).norm() < 1e-5 * p.grad.norm(), name


# Calls that continue a cache.


@pytest.mark.fast
@each_generation
def test_a_split_inside_an_image_is_refused(generation):
    model = tiny_visual_model(generation)
    inputs = Row(3, "image", 4).inputs(model)
    ids, images = inputs["input_ids"], inputs["pixel_values"]
    with torch.no_grad():
        cache = model(ids[:, :3]).cache
        before = cache.clone()
        with images_read(model) as calls:
            for stop in (4, 19):
                with pytest.raises(ValueError, match="`pixel_values` .*placeholders|placeholders of an image"):
                    model(ids[:, 3:stop], pixel_values=images, cache=cache)
        assert not calls and cache.get_seq_length() == 3
        assert_same_states(cache, before)


def test_crop_behind_images():
    """To the end of an image, and no further if every second block reads images backward."""
    model, after = tiny_visual_model("rwkv6", reading_order="alternate"), random_ids(1, 2)
    with torch.no_grad():
        # Also if the record begins inside an image.
        for row in (Row(3, "image", 6), Row(3, *["image"] * 32, 6)):
            inputs = row.inputs(model)
            ids = inputs.pop("input_ids")
            recorded = model.new_cache()
            recorded.activate_past_recording()
            model(ids, **inputs, cache=recorded)
            for removed in (1, 4, 6):
                cache = recorded.clone()
                cache.crop(-removed)
                kept = model(ids[:, :-removed], **inputs).cache
                assert cache.get_seq_length() == kept.get_seq_length()
                assert_same_states(cache, kept)
            with pytest.raises(ValueError, match="`tokens_to_remove` is -7, but the past of 6 tokens is recorded"):
                recorded.crop(-7)
            model(after, cache=recorded)  # which goes on to record
            recorded.crop(-8)
            assert_same_states(recorded, model(ids[:, :-6], **inputs).cache)
        inputs, recorded = batch(model, Row(3, "image", 6), Row(26)), model.new_cache()
        recorded.activate_past_recording()
        model(**inputs, cache=recorded)
        recorded.crop(-6)
        kept = {name: x[:, :-6] for name, x in inputs.items() if name != "pixel_values"}
        assert_same_states(recorded, model(**kept, pixel_values=inputs["pixel_values"]).cache)


# `generate`.


def test_placeholders_are_not_generated():
    model, row = tiny_visual_model("rwkv6"), Row(2, "image", 2)
    with torch.no_grad():
        model.head.weight[IMAGE] = 3 * model.head.weight.abs().max() * model.model.rwkv.ln_out.bias.sign()
        model.model.rwkv.ln_out.bias.mul_(30)
        assert model(**row.inputs(model)).logits[0, -1].argmax() == IMAGE
    ways = (
        {},
        {"do_sample": True},
        {"do_sample": True, "top_k": 1},
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 2},
    )
    for options in ways:
        out = model.generate(**row.inputs(model), max_new_tokens=4, **GREEDY | options)
        assert (out[:, -4:] != IMAGE).all()


def test_assistants_read_images_once():
    model, options = tiny_visual_model("rwkv6"), {"max_new_tokens": 12, **GREEDY}
    row = Row(3, "image", 2, "image", 2)
    row.entries += row.entries[-2:] * 3
    inputs, assistant = row.inputs(model), copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    with images_read(model) as calls, images_read(assistant) as assistant_calls:
        out = model.generate(**inputs, assistant_model=assistant, **options)
    assert calls == assistant_calls == [2]
    with images_read(model) as calls:
        assert torch.equal(model.generate(**inputs, prompt_lookup_num_tokens=3, **options), out)
    assert calls == [2]


@pytest.mark.fast
@each_generation
@pytest.mark.parametrize("questions", [((4,), (4,)), (("image", 2), (19,)), (("image", 1, "image"), (9, "image", 9))])
def test_a_conversation(generation, questions):
    model, options = tiny_visual_model(generation), {"max_new_tokens": 4, **GREEDY}
    begun = Row(2, "image", 2, seed=0), Row("image", 4, "image", seed=1)
    asked = [Row(*question, seed=2 + n) for n, question in enumerate(questions)]

    def ask(rows, more):
        """The second answer, from the cache of the first one and from the whole conversation in one call."""
        first = batch(model, *rows)
        answered = model.generate(**first, return_dict_in_generate=True, **options)
        cache, new = answered.cache, batch(model, *more)
        ids = torch.cat((answered.sequences, new["input_ids"]), 1)
        mask = torch.ones_like(ids)
        mask[:, : first["input_ids"].shape[1]] = first.get("attention_mask", torch.tensor(1))
        inputs = {"input_ids": ids, "attention_mask": mask}
        # As a processor orders them: all images of a row, then those of the next one.
        images = torch.cat([row.pixel_values for pair in zip(rows, more, strict=True) for row in pair])
        expected = model.generate(**inputs, pixel_values=images, **options)
        for given in (images, new.get("pixel_values")):
            with images_read(model) as calls:
                out = model.generate(**inputs, pixel_values=given, cache=cache.clone(), **options)
            assert torch.equal(out, expected)
            assert sum(calls) == len(new.get("pixel_values", ()))

    ask(begun, asked)
    for row, question in zip(begun, asked, strict=True):
        ask([row], [question])


def test_chunks_of_a_prompt_with_images_are_refused():
    model = tiny_visual_model("rwkv6")
    with images_read(model) as calls, pytest.raises(ValueError, match="prefill_chunk_size|`pixel_values`"):
        model.generate(**Row(3, "image", 4).inputs(model), prefill_chunk_size=7, max_new_tokens=4, **GREEDY)
    assert not calls


# Training.


def labels_of(model, ids):
    return ids.masked_fill((ids == IMAGE) | (ids == 0), -100)


@each(*VISUAL[1:])
@pytest.mark.parametrize("adapter", [LoraConfig(), subquad.StateTuningConfig()])
def test_adapters(case, adapter):
    """By default the text model is adapted, and not the towers."""
    if case is VISUAL[2] and isinstance(adapter, LoraConfig) and minor_version(transformers.__version__) < (5, 18):
        pytest.skip("DINOv2 has layers of the names that LoRA adapts by default")
    model, inputs = case.model(), case.text(1, 13)
    adapted = get_peft_model(model, copy.deepcopy(adapter))
    names = adapted.base_model.targeted_module_names
    assert names and all(name.startswith("model.rwkv.blocks.") for name in names)
    adapted.train()(**inputs, labels=labels_of(model, inputs["input_ids"])).loss.backward()
    learning = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert learning and not any(p.grad is None for p in learning.values())
    assert all("model.rwkv.blocks." in name for name in learning)


# Files.


@pytest.mark.parametrize(("generation", "tied"), [("rwkv5", False), ("rwkv6", True)])
def test_saving_and_loading(generation, tied, tmp_path):
    model, row = tiny_visual_model(generation, grid_size=2, tie_word_embeddings=tied), Row(2, "image", 3)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    text = tiny_model(generation, num_hidden_layers=4).state_dict()
    expected = {f"model.{name}" for name in text if name.startswith("rwkv.")} | {"model.proj.weight"}
    assert {name for name in tensors if ".vit." not in name} == expected | (set() if tied else {"head.weight"})

    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is VisualRwkvConfig and config.num_image_tokens == 5
    assert {**config.to_dict(), "_name_or_path": ""} == {**model.config.to_dict(), "_name_or_path": ""}
    # Published files have one level more in the names of the tower, which stays when they are saved again.
    level = "model.vit.vision_model."
    tensors = {name.replace("model.vit.", level): x for name, x in tensors.items() if level not in name} or tensors
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    loaded.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()
    inputs = row.inputs(model)
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)
    base, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and type(base) is subquad.VisualRwkvModel
    torch.testing.assert_close(base(**inputs).last_hidden_state, model.model(**inputs).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    _, info = type(model).from_pretrained(tmp_path / "base", output_loading_info=True)
    assert info["missing_keys"] == (set() if tied else {"head.weight"})


# Wrong input is refused by name, before any work.

ONE, TWO = torch.zeros(1, 3, 28, 28), torch.zeros(2, 3, 28, 28)
WHOLE = [IMAGE] * 17
COUNTS = f"`pixel_values` holds {{}} images of 17 features.* has {{}} placeholders of the id {IMAGE}"
BROKEN = rf"The 17 placeholders of an image \(id {IMAGE}\) must follow one another in one row"


# Ids, images, other arguments, and what is said.
WRONG = [
    ([[1, *WHOLE, 2]], TWO, {}, COUNTS.format(2, 17)),
    ([[1, *WHOLE, *WHOLE]], ONE, {}, COUNTS.format(1, 34)),
    ([[1, *WHOLE[:-1], 2]], ONE, {}, COUNTS.format(1, 16)),
    ([[1, 2]], ONE, {}, COUNTS.format(1, 0)),
    ([[1, *WHOLE, 2]], None, {}, COUNTS.format(0, 17)),
    ([[IMAGE]], None, {}, COUNTS.format(0, 1)),
    ([[1, *WHOLE[:5], 2, *WHOLE[5:]]], ONE, {}, BROKEN),
    ([[*WHOLE[:5], 1, *WHOLE, *WHOLE[5:]]], TWO, {}, BROKEN),
    ([[*WHOLE, 1], [1, *WHOLE]], TWO, {"attention_mask": [[1] * 18, [0] * 2 + [1] * 16]}, BROKEN),
    ([[*WHOLE, 1], [1, *WHOLE]], TWO, {"attention_mask": [[0] * 17 + [1], [1] * 18]}, BROKEN),
    ([[*WHOLE[:9], 1, 2], [*WHOLE[:8], 1, 2, 3]], ONE, {}, r"rows have \[9, 8\]"),
    ([[1, *WHOLE, *WHOLE]], TWO, {"cu_seqlens": [0, 15, 35]}, BROKEN),
    ([[1, *WHOLE]], torch.zeros(1, 3, 27, 28), {}, r"`pixel_values` must be \(images, 3, 28, 28\).*27, 28"),
    ([[1, *WHOLE]], torch.zeros(1, 1, 28, 28), {}, r"`pixel_values` must be \(images, 3, 28, 28\).*1, 28"),
    ([[1, *WHOLE]], torch.zeros(1, 1, 3, 28, 28), {}, r"`pixel_values` must be \(images, 3, 28, 28\)"),
    ([[1, *WHOLE]], torch.zeros(3, 28, 28), {}, r"`pixel_values` must be \(images, 3, 28, 28\)"),
    ([[1, IMAGE + 1]], None, {}, f"`input_ids` holds {IMAGE + 1}, but `vocab_size` is {IMAGE + 1}"),
]


@pytest.mark.parametrize(("generation", "reading_order"), [("rwkv5", "alternate"), ("rwkv6", "forward")])
def test_wrong_images(generation, reading_order):
    model = tiny_visual_model(generation, layers=2, reading_order=reading_order)
    with images_read(model) as calls:
        for ids, images, given, message in WRONG:
            given = {name: torch.tensor(value) for name, value in given.items()}
            with pytest.raises(ValueError, match=message):
                model(torch.tensor(ids), pixel_values=images, **given)
        for options in ({}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
            with pytest.raises(ValueError, match="`pixel_values` holds 2 images"):
                model.generate(torch.tensor([[1, *WHOLE]]), pixel_values=TWO, max_new_tokens=2, **GREEDY | options)
    assert not calls


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"grid_size": n}, f"`grid_size` must be .* 4 patches per side, got {n}") for n in (3, 8, -2)),
        ({"reading_order": "backward"}, "`reading_order` must be 'forward' or 'alternate', got 'backward'"),
        ({"image_token_id": IMAGE + 1}, f"`image_token_id` must be .*, got {IMAGE + 1}"),
        ({"image_token_id": -1}, "`image_token_id` must be .*, got -1"),
        ({"vision_config": {**CLIP, "patch_size": 9}}, "`image_size` 28 must be a multiple of `patch_size` 9"),
        ({"vision_config": tiny_config("rwkv6")}, "`vision_config`.* must be clip_vision_model or .*, got 'rwkv6'"),
        ({"text_fields": {"hidden_size": 50}}, "`attention_hidden_size`"),
    ],
)
def test_wrong_configuration(fields, message):
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        tiny_visual_config("rwkv6", **fields)
    # A field that is set later is looked at before any tensor is made.
    ((name, value),) = fields.items()
    if name != "text_fields":
        config = tiny_visual_config("rwkv6")
        setattr(config, name, CLIPVisionConfig(**value) if isinstance(value, dict) else value)
        with pytest.raises(ValueError, match=message):
            VisualRwkvForConditionalGeneration(config)


def test_another_text_model_is_refused():
    refused = (ValueError, StrictDataclassClassValidationError)
    for text in (tiny_config("raven"), {"model_type": "raven"}, {"model_type": "llama"}):
        with pytest.raises(refused, match="`text_config`.* `model_type` must be rwkv5, .* got '(raven|llama)'"):
            VisualRwkvConfig(text_config=text)


# What transformers asks of every class.


def test_attributes():
    model = tiny_visual_model("rwkv6")
    assert model.base_model is model.model and model.can_generate()
    assert model.get_encoder("image") is model.model.vit and model.get_decoder() is model.model.rwkv
    assert model.get_input_embeddings() is model.model.rwkv.embeddings
    assert model.get_output_embeddings() is model.head
    assert (model.main_input_name, set(model.input_modalities)) == ("input_ids", {"image", "text"})


def test_the_attention_of_the_tower(tmp_path):
    model, row = tiny_visual_model("rwkv6"), Row(2, "image", 3)
    inputs = row.inputs(model)
    model.save_pretrained(tmp_path)
    expected_logits = model(**inputs).logits
    for implementation in ("eager", "sdpa"):
        loaded = type(model).from_pretrained(tmp_path, attn_implementation=implementation)
        assert loaded.model.vit.config._attn_implementation == implementation
        torch.testing.assert_close(loaded(**inputs).logits, expected_logits, **TOLERANCE)
        other = "sdpa" if implementation == "eager" else "eager"
        for chosen in (other, {"vision_config": implementation}):
            loaded.set_attn_implementation(chosen)
            expected = chosen if isinstance(chosen, str) else implementation
            assert loaded.model.vit.config._attn_implementation == expected
            assert loaded.model.vit.encoder.layers[0].self_attn.config._attn_implementation == expected
            torch.testing.assert_close(loaded(**inputs).logits, expected_logits, **TOLERANCE)


@pytest.mark.parametrize(("case", "dtype"), [(VISUAL[1], torch.bfloat16), (VISUAL[2], torch.float16)])
def test_a_tower_of_another_dtype(case, dtype):
    model, inputs = case.model(), case.text(2, 20)
    with torch.no_grad():
        expected = model(**inputs).logits
        model.model.vit.to(dtype)
        out = model(**inputs).logits
    assert out.dtype == torch.float32 and 0 < (out - expected).norm() < 0.1 * expected.norm()


def test_placeholders_are_no_labels():
    model, row = tiny_visual_model("rwkv6"), Row(2, "image", 5)
    inputs = row.inputs(model)
    losses = [model(**inputs, labels=x).loss for x in (inputs["input_ids"], labels_of(model, inputs["input_ids"]))]
    assert torch.equal(*losses)
