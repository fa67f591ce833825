"""The published sizes of Avey; those of Eagle and Finch are held against the paper's table in `test_rwkv.py`."""

import pytest
import torch
from transformers import AutoModelForCausalLM

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
