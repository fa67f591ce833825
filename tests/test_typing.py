"""Type checkers see the classes of the package, although imports stay lazy."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """\
import torch

from subquad import PRESETS, GeckoCache, RavenConfig, Rwkv6Config, Rwkv6ForCausalLM, VisualRwkvProcessor, preset_config

config = Rwkv6Config(hidden_size=64, num_hidden_layers=2, head_size=16)
model = Rwkv6ForCausalLM(config)
logits = model(torch.zeros(1, 3, dtype=torch.long)).logits
reveal_type(config)
reveal_type(model)
reveal_type(GeckoCache(config))
reveal_type(RavenConfig().num_slots)
reveal_type(VisualRwkvProcessor)
reveal_type(preset_config)
reveal_type(PRESETS)
Rwkv6Config(hidden_size="wide")
"""
# These take a minute to check, and none of the types below is theirs.
CONFIG = """\
[mypy]
follow_imports = silent
[mypy-torch.*,numpy.*,transformers.models.*]
follow_imports = skip
"""
EXPECTED = [
    "subquad.models.rwkv6.configuration_rwkv6.Rwkv6Config",
    "subquad.models.rwkv6.modeling_rwkv6.Rwkv6ForCausalLM",
    "subquad.models.gecko.cache_gecko.GeckoCache",
    "int | None",
    "-> subquad.models.visual_rwkv.processing_visual_rwkv.VisualRwkvProcessor",
    "def (name: str) -> transformers.configuration_utils.PreTrainedConfig",
    "dict[str, tuple[str, dict[str, Any]]]",
]


@pytest.mark.thorough
@pytest.mark.fast
def test_a_script_of_a_user(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    wings = [ROOT / "src", ROOT / "kernels" / "torch-ext", ROOT / "tokenizers", ROOT / "conversion"]
    environment = {**os.environ, "MYPYPATH": os.pathsep.join(map(str, wings))}
    command = [sys.executable, "-m", "mypy", f"--cache-dir={tmp_path}", "script.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    revealed = re.findall(r'Revealed type is "(.*)"', result.stdout)
    assert len(revealed) == len(EXPECTED), result.stdout + result.stderr
    for found, expected in zip(revealed, EXPECTED, strict=True):
        assert found.endswith(expected)
        assert found != "Any"
    # The one mistake in the script.
    assert re.findall(r"error: (.*)", result.stdout)[0].startswith('Argument "hidden_size" to "Rwkv6Config" has')
    assert "Found 1 error" in result.stdout
