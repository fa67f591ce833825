"""The published sizes of Avey and Avey-B; those of Eagle and Finch are held against a table in `test_rwkv.py`."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import subquad


# Appendix A of the paper: parameters as it writes them. Ours are counted, and below by formula.
APPENDIX_A = {
    "avey-0.1b": (153e6, 152_917_760),
    "avey-0.5b": (496e6, 495_768_320),
    "avey-1.5b": (1.52e9, 1_525_483_520),
}


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
