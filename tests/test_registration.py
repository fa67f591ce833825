"""`import subquad` makes the Auto classes know every architecture, whatever was imported before, and takes no time."""

import subprocess
import sys

import pytest


USE = """
import warnings
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
for model_type in ("rwkv5", "rwkv6"):
    config = AutoConfig.for_model(model_type, vocab_size=10, hidden_size=32, head_size=8, num_hidden_layers=1)
    for auto in (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification):
        model = auto.from_config(config)
        assert type(model).__module__ == f"subquad.models.{model_type}.modeling_{model_type}", type(model)
"""

# flash-linear-attention registers the same model type, in this way.
OTHER = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
class RWKV6Config(PreTrainedConfig):
    model_type = "rwkv6"
class RWKV6Model(PreTrainedModel):
    config_class = RWKV6Config
AutoConfig.register("rwkv6", RWKV6Config, exist_ok=True)
AutoModel.register(RWKV6Config, RWKV6Model, exist_ok=True)
AutoModelForCausalLM.register(RWKV6Config, RWKV6Model, exist_ok=True)
"""


def run(code: str) -> subprocess.CompletedProcess:
    result = subprocess.run([sys.executable, "-W", "always::UserWarning", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.parametrize(
    "order",
    [
        "import subquad",
        "from transformers import AutoModelForCausalLM; import subquad",
        "from transformers import AutoTokenizer; import subquad",
        "import subquad; from transformers import GenerationMixin",
        "import subquad; from transformers import PreTrainedModel",
        "import subquad; from transformers import AutoTokenizer, pipeline, Trainer",
        "import subquad; import peft",
        "from subquad import Rwkv6ForCausalLM",
        "from subquad.models.rwkv5.modeling_rwkv5 import Rwkv5ForCausalLM",
        "from subquad.cache import RecurrentCache",
        # Asking where a module is does not import it.
        "import subquad, importlib.util as u; u.find_spec('transformers.models.auto.modeling_auto')",
        "import subquad, importlib, transformers.models.auto; importlib.reload(subquad)",
    ],
)
def test_any_order_of_imports(order):
    assert "subquad replaces" not in run(order + USE).stderr


def test_subquad_wins_where_it_is_imported_last():
    stderr = run(OTHER + "import subquad" + USE).stderr
    assert stderr.count("subquad replaces the registration of rwkv6") == 1


def test_another_package_may_register_afterwards():
    result = run(
        "import subquad\n" + OTHER + "print(type(AutoConfig.for_model('rwkv6')).__name__)\n"
        "print(type(AutoConfig.for_model('rwkv5')).__name__)\nfrom subquad import Rwkv6ForCausalLM"
    )
    assert result.stdout.split() == ["RWKV6Config", "Rwkv5Config"]


def test_import_is_light():
    code = """
import sys, transformers
before = set(sys.modules)
import subquad
heavy = {"torch", "tokenizers", "safetensors", "triton"} & (set(sys.modules) - before)
assert not heavy, heavy
assert len(set(sys.modules) - before) < 10, set(sys.modules) - before
assert {"Rwkv6ForCausalLM", "RecurrentCache", "PRESETS"} <= set(dir(subquad))
"""
    run(code)


def test_every_export_is_there():
    import subquad

    for name in subquad.__all__:
        assert getattr(subquad, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        subquad.nothing


def test_walls():
    """The operators need torch alone, the tokenizers never need torch."""
    run("import sys, subquad_kernels; assert not {'transformers', 'subquad', 'triton'} & set(sys.modules)")
    run("import sys, subquad_tokenizers; assert not {'torch', 'subquad'} & set(sys.modules)")
