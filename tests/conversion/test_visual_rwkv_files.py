"""VisualRWKV as it is published: a single file, the two files of an export, and a vision tower of its own."""

import json
from shutil import copyfile

import pytest
import torch
from PIL import Image
from rwkv_files import hub_tensors, reference_logits, tower, trainer_tensors, visual_tensors
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, AutoProcessor, CLIPConfig, CLIPModel

from subquad import VisualRwkvConfig, VisualRwkvForConditionalGeneration
from subquad_cli import main
from subquad_conversion import ConversionError, convert, recognise


EACH = pytest.mark.parametrize("model_type", ["rwkv5", "rwkv6"])
IMAGE = 99  # stands for an image in these small vocabularies


@pytest.fixture(scope="module")
def vision():
    return tower()


@pytest.fixture
def save(tmp_path):
    """Writes a file of tensors."""

    def write(name, tensors):
        torch.save(tensors, tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def make(tmp_path):
    """Converts into a directory of its own, with an id for images that the small vocabulary has."""

    def converted(source, dest, config=None, **options):
        file = tmp_path / f"{dest}.json"
        file.write_text(json.dumps({"image_token_id": IMAGE} | (config or {})))
        return convert(source, tmp_path / dest, config=file, progress=False, **options)

    return converted


def weights(report):
    return (report.directory / "model.safetensors").read_bytes()


def halves(tensors):
    """As the authors' export splits and names them."""
    text = {name.removeprefix("rwkv."): tensor for name, tensor in tensors.items() if name.startswith("rwkv.")}
    return text, {name: tensor for name, tensor in tensors.items() if not name.startswith("rwkv.")}


def without_tower(tensors):
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("vit.")}


def clip_directory(path, vision, level="vision_model.", **fields):
    """A tower alone, as releases of transformers with that level in its names save it."""
    path.mkdir()
    tensors = {f"{level}{name.removeprefix('vision_model.')}": t for name, t in vision.state_dict().items()}
    tensors[f"{level}embeddings.position_ids"] = torch.arange(17)[None]
    torch.save(tensors, path / "pytorch_model.bin")
    (path / "config.json").write_text(json.dumps(vision.config.to_dict() | fields))
    return path


@EACH
def test_the_model(model_type, vision, save, make):
    """Every tensor has its place, and what is computed is what the published parts compute."""
    tensors = visual_tensors(model_type, vision)
    report = make(save("trained.pth", tensors), "model")
    assert report.recognised.format == f"visual-{model_type}" and report.tokenizer is None
    assert report.files == ["config.json", "generation_config.json", "model.safetensors"]
    assert report.parameters == report.recognised.parameters == sum(tensor.numel() for tensor in tensors.values())

    config = VisualRwkvConfig(
        vision_config=vision.config.to_dict(), text_config=report.config.text_config, image_token_id=IMAGE
    )
    expected = VisualRwkvForConditionalGeneration(config).eval()
    by_hand = {
        name if name == "head.weight" else f"model.{name}": tensor for name, tensor in hub_tensors(model_type).items()
    }
    by_hand |= {f"model.vit.{name}": tensor for name, tensor in vision.state_dict().items()}
    expected.load_state_dict(by_hand | {"model.proj.weight": tensors["proj.weight"]})

    model, loading = AutoModelForImageTextToText.from_pretrained(report.directory, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert type(model) is VisualRwkvForConditionalGeneration and model.config.image_token_id == IMAGE
    ids = torch.tensor([[5, *[IMAGE] * model.config.num_image_tokens, 6, 7, 8]])
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    text = [5, 6, 7, 8]
    with torch.no_grad():
        assert torch.equal(model(ids, pixels).logits, expected(ids, pixels).logits)
        logits = model(torch.tensor([text])).logits[0]
        features = vision(pixels).last_hidden_state @ tensors["proj.weight"].T
        ours = model.get_image_features(pixels).pooler_output
    torch.testing.assert_close(
        logits.double(), reference_logits(trainer_tensors(model_type), model_type, text, 8), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(ours if model_type == "rwkv5" else ours.roll(1, dims=1), features)


def test_a_world_model_gets_its_processor(vision, save, tmp_path):
    tensors = visual_tensors("rwkv6", vision, heads=1, intermediate=64, vocabulary=65536, dtype=torch.float16)
    report = convert(save("trained.pth", tensors), tmp_path / "model", max_shard_size="6MB", progress=False)
    assert report.tokenizer == "RWKV World" and report.dtype == "float16"
    assert {"processor_config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"} <= set(
        report.files
    )
    for assumed in ("`head_size_divisor`", "`num_attention_heads`", "`hidden_act`", "`grid_size`"):
        assert any(assumed in note for note in report.notes)

    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert model.generation_config.eos_token_id == [0, 261] and model.generation_config.pad_token_id == 0
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    assert processor.image_seq_length == model.config.num_image_tokens == 17
    question = [{"type": "image", "image": Image.new("RGB", (40, 30), "red")}, {"type": "text", "text": "What?"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert processor.decode(inputs["input_ids"][0]) == f"User: {'<image>' * 17}\nWhat?\n\nAssistant:"
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == 17
    assert inputs["pixel_values"].shape == (1, 3, 16, 16)
    assert model.generate(**inputs, max_new_tokens=2).shape[1] <= inputs["input_ids"].shape[1] + 2


@EACH
def test_the_two_files_of_an_export(model_type, vision, save, make, tmp_path):
    tensors = visual_tensors(model_type, vision, dtype=torch.float16)
    text, visual = halves(tensors)
    whole = make(save("whole.pth", tensors), "whole")
    first, second = save("v060_rwkv.pth", text), save("v060_visual.pth", visual)
    assert recognise(first) == recognise(second) == whole.recognised
    assert weights(make(first, "first")) == weights(make(second, "second")) == weights(whole)

    second.unlink()
    assert recognise(first).format == f"{model_type}-trainer"
    first.unlink()
    with pytest.raises(ConversionError, match=r"v060_visual\.pth holds only .*v060_rwkv\.pth, which is missing"):
        recognise(save("v060_visual.pth", visual))
    with pytest.raises(ConversionError, match=r"half\.pth holds only .*call this one <name>_visual\.pth"):
        recognise(save("half.pth", visual))
    # A whole model may be called like a half, and a half hold no tower.
    copyfile(tmp_path / "whole.pth", tmp_path / "my_rwkv.pth")
    save("my_visual.pth", visual)
    assert recognise(tmp_path / "my_rwkv.pth") == whole.recognised
    save("bare_rwkv.pth", text)
    bare = save("bare_visual.pth", without_tower(visual))
    clip = clip_directory(tmp_path / "clip", tower().half())
    assert weights(make(bare, "bare", vision_tower=clip)) == weights(whole)


def test_a_tower_of_either_age(vision, save, make):
    tensors = visual_tensors("rwkv6", vision)
    whole = make(save("older.pth", tensors), "older")
    newer = {name.replace("vision_model.", ""): tensor for name, tensor in tensors.items()}
    ids = {"vit.embeddings.position_ids": torch.arange(17.0)[None]}
    report = make(save("newer.pth", newer | ids), "newer")
    assert report.recognised == whole.recognised and weights(report) == weights(whole)
    with pytest.raises(ConversionError, match="are the same tensor"):
        recognise(save("both.pth", tensors | newer))


def test_a_tower_from_elsewhere(vision, save, make, tmp_path):
    tensors = visual_tensors("rwkv6", vision)
    whole = make(save("whole.pth", tensors), "whole")
    source = save("bare.pth", without_tower(tensors))
    with pytest.raises(ConversionError, match=r"no vision tower .*`vision_tower` \(--vision-tower"):
        make(source, "none")

    # A whole CLIP, whose configuration and image processor tell what no tensor does.
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    fields = vision.config.to_dict() | {"num_attention_heads": 4, "hidden_act": "gelu"}
    clip = CLIPModel(CLIPConfig(text_config=text | {"vocab_size": 49408}, vision_config=fields))
    clip.vision_model.load_state_dict(vision.state_dict())
    clip.save_pretrained(tmp_path / "clip")
    # As OpenAI's models have it.
    prepared = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 20, "crop_size": 16, "image_mean": [0, 0, 0]}
    (tmp_path / "clip/preprocessor_config.json").write_text(json.dumps(prepared))
    report = make(source, "clip-model", vision_tower=tmp_path / "clip", tokenizer=world_like(tmp_path / "tokenizer"))
    assert weights(report) == weights(whole)
    assert (report.config.vision_config.num_attention_heads, report.config.vision_config.hidden_act) == (4, "gelu")
    assert not any("vision tower" in note for note in report.notes)
    images = AutoProcessor.from_pretrained(report.directory).image_processor
    assert (images.size["shortest_edge"], images.crop_size["height"], [*images.image_mean]) == (20, 16, [0, 0, 0])
    assert json.loads((report.directory / "generation_config.json").read_text())["eos_token_id"] == [0]

    for level in ("vision_model.", ""):
        directory = clip_directory(tmp_path / f"tower{level}", vision, level, hidden_act="relu")
        report = make(source, f"out{level}", vision_tower=directory)
        assert weights(report) == weights(whole) and report.config.vision_config.hidden_act == "relu"
    report = make(source, "mine", {"vision_config": {"hidden_act": "tanh"}}, vision_tower=directory)
    assert report.config.vision_config.hidden_act == "tanh"


def world_like(directory):
    """A tokenizer that leaves the id `IMAGE` for images; no token of it is a blank line."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0} | {f"w{i}": i for i in range(1, IMAGE)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")), eos_token="<end>"
    )
    tokenizer.save_pretrained(directory)
    return directory


def test_a_tower_that_does_not_fit(vision, save, make, tmp_path):
    tensors = visual_tensors("rwkv5", vision)
    whole, bare = save("whole.pth", tensors), save("bare.pth", without_tower(tensors))
    finch = save("finch.pth", trainer_tensors("rwkv6"))
    good = clip_directory(tmp_path / "good", vision)
    other = clip_directory(tmp_path / "other", tower(64))
    no_config = clip_directory(tmp_path / "no-config", vision)
    (no_config / "config.json").unlink()
    bad_config = clip_directory(tmp_path / "bad-config", vision, num_attention_heads="many")
    (tmp_path / "text").mkdir()
    save_file({"text_model.x": torch.zeros(1)}, tmp_path / "text/model.safetensors")
    for source, clip, message in (
        (whole, good, "has a vision tower of its own: leave out `vision_tower`"),
        (finch, good, r"finch.pth is a language model without a projection of images\."),
        (bare, other, "proj.weight reads 128 features, the vision tower has 64"),
        (bare, no_config, "must be a directory with a config.json"),
        (bare, good / "pytorch_model.bin", "must be a directory with a config.json"),
        (bare, bad_config, "bad-config has no usable config.json: .*num_attention_heads"),
        (bare, tmp_path / "text", "text holds no vision tower of CLIP"),
        (bare, tmp_path / "nowhere", "nowhere does not exist"),
    ):
        with pytest.raises(ConversionError, match=message):
            make(source, "out", vision_tower=clip)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("added", "removed", "title"),
    [
        (["vit.vision_model.head.probe"], "vit.vision_model.embeddings.class", r"the tower SigLIP \(6\.1\)"),
        (["vit.embeddings.patch_embedding.bias"], "vit.vision_model.embeddings.class", r"the tower SigLIP \(6\.1\)"),
        (["vit.dino_featurizer.cls_token", "vit.sam_featurizer.pos_embed"], "vit.vision", "SigLIP, DINOv2 and SAM"),
        (["proj.gate.weight", "proj.o_proj.weight", "proj.ln_v.bias"], "proj.", "projection of several layers"),
        (["proj.0.weight", "proj.2.weight"], "proj.", "projection of several layers"),
        (["clip_projector.0.weight", "sam_projector.projector.weight"], "proj.", r"CLIP and SAM \(5\.4\)"),
        (["rwkv.blocks.0.tiny_att.q.weight"], "proj.", r"attends to the image \(5\.3\)"),
        (["rwkv.blocks.0.att.k_k", "rwkv.blocks.0.att.r_k"], "rwkv.blocks", "VisualRWKV-7"),
        (["rwkv.blocks.0.att.r_k", "proj.gate.weight", "vit.head.probe"], ("rwkv.", "vit.", "proj."), "7.01 or 7.02"),
        (["rwkv.blocks.0.att.r_k", "proj.gate.weight", "vtc.blocks.0.x"], ("rwkv.", "vit.", "proj."), "7.03 or 7.04"),
        (["rwkv.blocks.0.att.r_k", "vrwkv.emb.weight"], ("rwkv.", "vit.", "proj."), "7.10, without a vision tower"),
        (["rwkv.blocks.0.att.r_k", "rwkv.blocks.0.ffn_v.x_k"], ("rwkv.", "vit.", "proj."), "7.10"),
        (["rwkv.blocks.0.att.r_k", "vit.dino_featurizer.cls_token"], ("rwkv.", "vit."), "7 with a linear projection"),
        (
            ["proj.gate.weight", *(f"vit.{name}_featurizer.pos_embed" for name in ("dino", "siglip", "sam"))],
            ("vit.", "proj."),
            r"SigLIP, DINOv2 and SAM \(6\.1x, 6\.2x, HD, UHD\)",
        ),
        (["vit.trunk.weight"], ("vit.", "proj."), "part of a larger model such as VisualRWKV"),
        (["rwkv.blocks.0.att.time_first"], "rwkv.blocks.0.att.", "part of a larger model such as VisualRWKV"),
    ],
)
def test_other_variants_are_refused_by_name(added, removed, title, vision, save, tmp_path):
    tensors = {name: t for name, t in visual_tensors("rwkv6", vision, heads=1).items() if not name.startswith(removed)}
    source = save("trained.pth", tensors | {name: torch.zeros(2) for name in added})
    with pytest.raises(ConversionError, match=f"this is .*{title}.*, which is not supported") as error:
        convert(source, tmp_path / "out", progress=False)
    assert "VisualRWKV-6.0 (CLIP and Finch)" in str(error.value)


def test_a_damaged_part_is_named(vision, save):
    text, visual = halves(visual_tensors("rwkv5", vision))
    first, second = save("v050_rwkv.pth", text), save("v050_visual.pth", visual)
    second.write_bytes(second.read_bytes()[:5000])
    with pytest.raises(ConversionError, match=r"v050_visual\.pth"):
        recognise(first)


def test_what_no_tensor_tells(vision, save, make, tmp_path):
    source = save("trained.pth", visual_tensors("rwkv6", vision))
    config = {
        "model_type": "visual_rwkv",
        "architectures": ["Other"],
        "grid_size": 4,
        "reading_order": "forward",
        "text_config": {"num_hidden_layers": 7, "head_size_divisor": 4, "context_length": 77, "_private": 1},
        "vision_config": {"layer_norm_eps": 1e-3, "image_size": 32},
    }
    report = make(source, "config", config)
    written = VisualRwkvConfig.from_pretrained(report.directory)
    text, clip = written.text_config, written.vision_config
    assert (written.architectures, written.reading_order) == (["VisualRwkvForConditionalGeneration"], "forward")
    assert (written.grid_size, written.num_image_tokens, clip.layer_norm_eps, clip.image_size) == (4, 17, 1e-3, 16)
    assert (text.num_hidden_layers, text.head_size_divisor, text.context_length) == (2, 4, 77)
    assert {note for note in report.notes if "replaced" in note} == {
        "the configuration's `text_config.num_hidden_layers` of 7 was replaced by the tensors' 2",
        "the configuration's `vision_config.image_size` of 32 was replaced by the tensors' 16",
    }
    report = make(source, "options", config, grid_size=2, head_size_divisor=1)
    assert (report.config.grid_size, report.config.text_config.head_size_divisor) == (2, 1)
    assert (report.config.num_image_tokens, report.config.text_config.context_length) == (5, 77)

    for fields, options, message in (
        ({"image_token_id": 65530}, {}, "`image_token_id` must be one of the 100 ids"),
        ({"grid_size": 3}, {}, "`grid_size` must be -1, 0 or a divisor of the 4 patches"),
        ({}, {"grid_size": 5}, "`grid_size` must be -1, 0 or a divisor of the 4 patches"),
        ({"text_config": [1]}, {}, "`text_config` must hold an object, found a list"),
        ({"vision_config": {"num_attention_heads": 3}}, {}, "128 channels .* make no 3 heads"),
        ({"model_type": "rwkv6"}, {}, "for the model type 'rwkv6', the tensors are 'visual_rwkv'"),
        ({"image_token_id": 98}, {"tokenizer": world_like(tmp_path / "tokenizer")}, "<image> at the id 99, .* is 98"),
        ({"text_config": {"tie_word_embeddings": True}}, {}, r"rwkv\.emb\.weight and rwkv\.head\.weight differ"),
        ({"tie_word_embeddings": True}, {}, r"rwkv\.emb\.weight and rwkv\.head\.weight differ"),
    ):
        with pytest.raises(ConversionError, match=message):
            make(source, "wrong", fields, **options)
        assert not (tmp_path / "wrong").exists()
    with pytest.raises(ConversionError, match="`grid_size` does not apply to the model type rwkv6"):
        make(save("finch.pth", trainer_tensors("rwkv6")), "wrong", grid_size=2)


def test_a_tower_whose_heads_cannot_be_assumed(save):
    tensors = visual_tensors("rwkv6", tower(64))
    tensors |= {name: t[..., :40].contiguous() for name, t in tensors.items() if "class_embedding" in name}
    with pytest.raises(ConversionError, match="40 channels .* make no 0 heads; give `num_attention_heads`"):
        recognise(save("trained.pth", tensors | {"proj.weight": torch.zeros(192, 40)}))


def test_the_commands(vision, save, tmp_path, capsys):
    tensors = visual_tensors("rwkv6", vision, heads=1, intermediate=64, vocabulary=65531)
    source = save("bare.pth", without_tower(tensors))
    clip = clip_directory(tmp_path / "clip", vision)
    dest = str(tmp_path / "model")
    arguments = ["--vision-tower", str(clip), "--grid-size", "2", "--head-size-divisor", "1"]
    assert main(["convert", str(source), dest, *arguments]) == 0
    out = capsys.readouterr().out
    assert (
        "Recognised VisualRWKV-6.0 (CLIP and Finch): 2 layers of 64, 1 heads of 64, images of 16 x 16 in 5 tokens, "
        "vocabulary 65,531." in out
    )
    assert "Tokenizer: RWKV World." in out

    text = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("rwkv."))
    for name in (dest, str(save("whole.pth", tensors))):
        assert main(["info", name, "--json"]) == 0
        info = json.loads(capsys.readouterr().out)
        assert (info["model_type"], info["num_hidden_layers"], info["vocab_size"]) == ("visual_rwkv", 2, 65531)
        assert info["parameters"] == sum(tensor.numel() for tensor in tensors.values())
        assert info["state_elements"] == 66 * 64 * 2
        assert info["inference_flops"] == 2 * text + 6 * 2 * 64 * 64
    assert main(["info", str(source)]) == 1
    assert "--vision-tower" in capsys.readouterr().err
