"""The published sizes: every preset is made, and its parameters and numbers of state are counted."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import subquad
from subquad.hub.info import describe


# Parameters as they are counted, or as a paper rounds them, and numbers of state, or None if the paper has none.
PUBLISHED = {
    # Table 10 of "Eagle and Finch".
    "eagle-0.4b": (4.62e8, 1_622_016),
    "eagle-1.5b": (1.58e9, 3_244_032),
    "eagle-3b": (3.06e9, 5_406_720),
    "eagle-7b": (7.52e9, 8_650_752),
    "finch-1.6b": (1.60e9, 3_244_032),
    "finch-3b": (3.10e9, 5_406_720),
    # The published files of Goose: parameters that are read.
    "goose-0.1b": (191_034_624, 608_256),
    "goose-0.4b": (450_767_872, 1_622_016),
    "goose-1.5b": (1_527_404_544, 3_244_032),
    "goose-2.9b": (2_947_735_040, 5_406_720),
    "goose-7.2b": (7_199_141_888, 8_650_752),
    "goose-13.3b": (13_269_245_952, 16_490_496),
    "goose-pile-168m": (167_638_272, 608_256),
    "goose-pile-421m": (421_145_600, 1_622_016),
    "goose-pile-1.47b": (1_465_014_272, 3_244_032),
    # Shapes of the published files; the paper has 144M, 389M and 1.4B, and 90M, 317M and 1.3B for rerankers alone.
    "goose-embedding-0.1b": (144_246_528, 608_256),
    "goose-embedding-0.4b": (389_956_608, 1_622_016),
    "goose-embedding-1.4b": (1_418_364_928, 3_244_032),
    "goose-reranker-0.1b": (144_246_528 + 90_963_456, 608_256),
    "goose-reranker-0.4b": (389_956_608 + 317_601_792, 1_622_016),
    "goose-reranker-1.4b": (1_418_364_928 + 1_263_169_536, 3_244_032),
    # Appendix A of "Avey": 153M, 496M and 1.52B.
    "avey-0.1b": (152_917_760, None),
    "avey-0.5b": (495_768_320, None),
    "avey-1.5b": (1_525_483_520, None),
    # Table 3 of the paper on Avey-B: 165M and 391M.
    "avey-b-base": (163_929_118, None),
    "avey-b-large": (391_270_446, None),
    # Table 2 of the paper on Raven: 424M and 792M, and states of 12.5M and 16.5M numbers.
    "raven-0.4b": (424_316_096, 12_582_912),
    "raven-0.8b": (792_212_988, 16_515_072),
    # Table 1 of the paper on Gecko: 1.3B and 7B.
    "gecko-1b": (1_299_099_648, None),
    "gecko-7b": (7_385_817_088, None),
}


@pytest.fixture(autouse=True)
def no_numbers(monkeypatch):
    """Models on meta have none to be initialised."""
    monkeypatch.setattr(transformers.PreTrainedModel, "initialize_weights", lambda self: None)
    for layer in (torch.nn.Linear, torch.nn.Embedding):
        monkeypatch.setattr(layer, "reset_parameters", lambda self: None)


def count(config, auto_class=AutoModelForCausalLM):
    with torch.device("meta"):
        return auto_class.from_config(config).num_parameters()


@pytest.mark.quick_cases("*-0.[14]b", "*-168m", "*-base", "gecko-1b")
@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_sizes(preset):
    parameters, elements = PUBLISHED[preset]
    config = subquad.preset_config(preset)
    auto_class = getattr(transformers, subquad.lm_auto_class(config.model_type))
    with torch.device("meta"):
        model = auto_class.from_config(config)
    found, description = model.num_parameters(), describe(preset)
    assert found == parameters if isinstance(parameters, int) else f"{found:.2e}" == f"{parameters:.2e}"
    assert description.parameters == found
    if elements is not None:
        cache = model(torch.zeros(1, 2, dtype=torch.long, device="meta"), use_cache=True).cache
        assert cache.num_elements == elements == description.state_elements


def test_the_derived_sizes_of_raven():
    """They are those of sliding window attention in the paper, too: 693M without router, decay and gate."""
    fields = {**subquad.PRESETS["raven-0.8b"][1], "router": "swa", "use_output_gate": False}
    assert round(count(subquad.RavenConfig(**fields)) / 1e6) == 693


@pytest.mark.parametrize("text", ["eagle-1.5b", "eagle-3b", "finch-1.6b", "finch-3b", "finch-7b"])
def test_sizes_of_visual_rwkv(text):
    config, text_config = subquad.preset_config(f"visual-{text}"), subquad.preset_config(text)
    assert config.text_config.to_dict() == text_config.to_dict()
    d, layer = 1024, 4 * (1024 * 1024 + 1024) + 2 * 1024 * 4096 + 5 * 1024 + 4 * 1024
    tower = d + 3 * 14 * 14 * d + (24 * 24 + 1) * d + 24 * layer + 4 * d  # ViT-L/14, with a norm before and one after
    expected = tower + d * text_config.hidden_size + count(text_config)
    assert count(config, AutoModelForImageTextToText) == expected
    assert config.num_image_tokens == 577 and config.vision_config.image_size == 336


# Of the published files: the numbers of parameters with all tensors that something reads or not, except Goose's first
# `v0`, `v1` and `v2`.
@pytest.mark.parametrize(
    ("text", "parameters"),
    [("goose-0.1b", 1_025_987_520), ("goose-0.4b", 1_286_540_480), ("goose-1.5b", 2_366_456_000)],
)
def test_sizes_with_three_towers(text, parameters):
    config = subquad.preset_config(f"visual-{text}")
    w, mlp = 1152, 4304
    # SigLIP's attention and MLP for a pooled output are only in the files; DINOv2's position of the class token and
    # token for hidden patches are only here.
    pooling = w + 4 * (w * w + w) + 2 * w + 2 * w * mlp + mlp + w
    assert count(config, AutoModelForImageTextToText) + pooling - 2 * 1024 == parameters
    assert config.num_image_tokens == 1024 and describe(f"visual-{text}").parameters == parameters - pooling + 2048


@pytest.mark.parametrize(
    ("find", "kind"), [(subquad.embedded_model, "embedded model"), (subquad.preset_config, "preset")]
)
def test_an_unknown_name_is_an_error(find, kind):
    with pytest.raises(ValueError, match=f"There is no {kind} 'finch'; the {kind}s are "):
        find("finch")
