"""
The published sizes of Avey, Avey-B, Raven, Gecko and VisualRWKV; a table in `test_rwkv.py` has those of Eagle and
Finch.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM

import subquad


# Appendix A of the paper: parameters as it writes them. Ours are counted, and below by formula.
APPENDIX_A = {
    "avey-0.1b": (153e6, 152_917_760),
    "avey-0.5b": (496e6, 495_768_320),
    "avey-1.5b": (1.52e9, 1_525_483_520),
}


@pytest.mark.fast
@pytest.mark.parametrize("preset", APPENDIX_A)
def test_published_sizes_of_avey(preset):
    config = subquad.preset_config(preset)
    published, parameters = APPENDIX_A[preset]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert parameters == pytest.approx(published, rel=5e-3)

    d, m, rows = config.d_embed, 4 * config.d_embed, 8 * 64
    tail = m // 2
    enricher, fuser = m * d + m, (m - tail + tail // 2) * d + d
    assert parameters == 50304 * d + config.n_blocks * (d + enricher + rows * rows + fuser) + d


# Table 3 of the paper, in the same way.
TABLE_3 = {"avey-b-base": (165e6, 163_929_118), "avey-b-large": (391e6, 391_270_446)}


@pytest.mark.parametrize("preset", TABLE_3)
def test_published_sizes_of_avey_b(preset):
    config = subquad.preset_config(preset)
    published, parameters = TABLE_3[preset]
    with torch.device("meta"):
        model = AutoModelForMaskedLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert parameters == pytest.approx(published, rel=1e-2)

    d, m = config.d_embed, 4 * config.d_embed
    # The norm, the enricher, the fuser, which reads three quarters of the features, and the residual's gain.
    layer = d + (m * d + m) + (3 * m // 4 * d + d) + 1
    static, compressor = 256 * 256, 256 * 4 * 256
    assert parameters == 50368 * d + compressor + config.n_layers * layer + config.n_layers // 2 * static


# Table 2 of the paper: parameters and elements of state in millions; ours are counted, and below by formula.
TABLE_2 = {"raven-0.4b": (424, 12.5, 424_316_096), "raven-0.8b": (792, 16.5, 792_212_988)}


def count(config, auto_class=AutoModelForCausalLM):
    with torch.device("meta"):
        model = auto_class.from_config(config)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("preset", TABLE_2)
def test_published_sizes_of_raven(preset):
    config = subquad.preset_config(preset)
    published, state, parameters = TABLE_2[preset]
    assert count(config) == parameters
    assert round(parameters / 1e6) == published

    d, heads, layers = config.hidden_size, config.num_heads, config.num_hidden_layers
    # The MLP has 8 d / 3 channels, rounded up to a multiple of 256.
    mlp = 3 * d * {1024: 2816, 1536: 4096}[d]
    # Queries, keys, values, gate and output; router; decay; the norms of queries, keys and outputs.
    memory = 5 * d * d + heads * 256 * d + heads * (d + 2) + 3 * d // heads
    assert parameters == 2 * 32000 * d + layers * (memory + mlp + 2 * d) + d
    elements = 2 * heads * 256 * (d // heads) * layers
    assert elements / 1e6 == pytest.approx(state, rel=1e-2)


def test_the_derived_sizes_of_raven():
    """They are those of sliding window attention in the paper, too: 693M without router, decay and gate."""
    fields = {**subquad.PRESETS["raven-0.8b"][1], "router": "swa", "use_output_gate": False}
    assert round(count(subquad.RavenConfig(**fields)) / 1e6) == 693


# Section 4.1 of the paper: blocks, width and vocabulary, and the parameters as table 1 writes them. Ours are counted.
SECTION_4_1 = {"gecko-1b": (16, 2048, 50304, 1.3e9, 1_299_099_648), "gecko-7b": (32, 4096, 32000, 7e9, 7_385_817_088)}


@pytest.mark.parametrize("preset", SECTION_4_1)
def test_published_sizes_of_gecko(preset):
    config = subquad.preset_config(preset)
    layers, d, vocabulary, published, parameters = SECTION_4_1[preset]
    assert (config.num_layers, config.model_dim, config.vocab_size) == (layers, d, vocabulary)
    assert config.z_dim // config.num_heads == 256
    assert count(config) == parameters
    assert parameters == pytest.approx(published, rel=6e-2)

    z, v, n = d // 4, 2 * d, 16
    # Projections and outputs with biases, all but one; CEMA; what makes queries and keys of the shared representation.
    mega = d * (z + 2 * v + d) + z + 2 * v + d + v * d + d * (4 * n + 1) + 8 * z
    # Two norms have weights and biases, one has weights only.
    assert parameters == 2 * vocabulary * d + layers * (mega + 3 * d * config.ffn_hidden_dim + 5 * d) + 2 * d


def test_the_derived_sizes_of_gecko():
    """No other multiple of the width comes as close to 1.3B parameters."""
    fields = subquad.PRESETS["gecko-1b"][1]
    d = fields["model_dim"]
    distance = {k: abs(count(subquad.GeckoConfig(**fields | {"ffn_hidden_dim": k * d})) - 1.3e9) for k in (2, 3, 4)}
    assert min(distance, key=distance.get) * d == fields["ffn_hidden_dim"]


@pytest.mark.parametrize("text", ["eagle-1.5b", "eagle-3b", "finch-1.6b", "finch-3b", "finch-7b"])
def test_sizes_of_visual_rwkv(text):
    config, text_config = subquad.preset_config(f"visual-{text}"), subquad.preset_config(text)
    assert config.text_config.to_dict() == text_config.to_dict()
    d, layer = 1024, 4 * (1024 * 1024 + 1024) + 2 * 1024 * 4096 + 5 * 1024 + 4 * 1024
    tower = d + 3 * 14 * 14 * d + (24 * 24 + 1) * d + 24 * layer + 4 * d  # ViT-L/14, with a norm before and one after
    expected = tower + d * text_config.hidden_size + count(text_config)
    assert count(config, AutoModelForImageTextToText) == expected
    assert config.num_image_tokens == 577 and config.vision_config.image_size == 336
