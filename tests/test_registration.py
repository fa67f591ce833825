"""`import subquad` makes the Auto classes know every architecture, whatever was imported before, and takes no time."""

import json
import os
import subprocess
import sys

import pytest
from byte_level_bpe import END, TEXT, write_byte_level_bpe
from transformers import AutoTokenizer

import subquad


USE = """
import transformers, subquad
RWKV = {"hidden_size": 32, "head_size": 8, "num_hidden_layers": 1}
FIELDS = {
    "rwkv5": RWKV,
    "rwkv6": RWKV,
    "rwkv7": RWKV,
    "rwkv7_deep_embed": {"deep_embed_rank": 4, "dea_size": 8, "dea_rank": 4, **RWKV},
    "rwkv7_embedding": {"end_token_id": 9, **RWKV},
    "rwkv7_reranker": {"end_token_id": 9, **RWKV},
    "avey": {"d_embed": 32, "n_blocks": 1, "chunk_size": 4, "k": 2},
    "avey-b": {"d_embed": 32, "n_layers": 1, "chunk_size": 4},
    "raven": {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "num_slots": 8, "topk": 2},
    "gecko": {"model_dim": 64, "num_layers": 1, "num_heads": 2, "z_dim": 8, "value_dim": 8, "ffn_hidden_dim": 8},
    "visual_rwkv": {
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64},
        "text_config": {"model_type": "rwkv6", "vocab_size": 10, **RWKV},
        "image_token_id": 9,
    },
}
for model_type, (folder, _, heads) in subquad.ARCHITECTURES.items():
    size = {} if model_type == "visual_rwkv" else {"vocab_size": 10}
    config = transformers.AutoConfig.for_model(model_type, **size, **FIELDS[model_type])
    assert type(config) in transformers.models.auto.tokenization_auto.TOKENIZER_MAPPING
    for auto, head in heads.items():
        model = getattr(transformers, auto).from_config(config)
        assert type(model) is getattr(subquad, head) and type(model).__module__.startswith(folder), type(model)
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


# Runs each program that it is given in a fork of itself: what transformers needs of others is imported once.
SERVER = """
import contextlib, gc, importlib, json, os, sys
for name in (
    "accelerate", "httpx", "huggingface_hub.hf_api", "jinja2", "PIL.Image", "scipy.optimize", "tokenizers",
    "torch._dynamo", "torch._inductor.decomposition", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes", "torchao.quantization", "triton.language",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.disable()  # a search of all that is imported, in a process that soon ends

def watch(event, arguments):
    assert event not in ("socket.getaddrinfo", "socket.connect"), arguments

sys.addaudithook(watch)
assert not {"transformers", "subquad", "subquad_kernels", "subquad_tokenizers"} & set(sys.modules)
for line in sys.stdin:
    if os.fork() == 0:
        os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(2, 1)
        exec(json.loads(line), {"__name__": "__main__"})
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)  # without taking apart all that is imported
    print(os.wait()[1], flush=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    errors = tmp_path_factory.mktemp("server") / "stderr"
    command = [sys.executable, "-W", "always::UserWarning", "-c", SERVER, errors]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:

        def run(code: str) -> str:
            print(json.dumps(code), file=process.stdin, flush=True)
            status = process.stdout.readline()
            assert status == "0\n", errors.read_text()
            return errors.read_text()

        yield run


@pytest.mark.quick_cases("import subquad", "from subquad import Rwkv6ForCausalLM", "*AutoProcessor")
@pytest.mark.parametrize(
    "order",
    [
        "import subquad",
        # Making the models imports the table of tokenizers.
        "from transformers import AttentionInterface, CLIPVisionConfig; import subquad",
        "import subquad; from transformers import GenerationMixin",
        "from subquad import Rwkv6ForCausalLM",
        "from subquad.models.avey_b.modeling_avey_b import AveyBModel",
        "from subquad import VisualRwkvProcessor",
        "import subquad; subquad.preset_config('visual-finch-1.6b')",
        # Making this class imports the tables, which are then complete before it is.
        "import subquad; from transformers import CLIPVisionModel",
        "import subquad; from transformers import AutoProcessor",
        # Finding a module does not import it.
        "import subquad, importlib.util as u; u.find_spec('transformers.models.auto.modeling_auto')",
        "import subquad, importlib, transformers.models.auto; importlib.reload(subquad)",
    ],
)
def test_any_order_of_imports(order, server):
    assert "subquad replaces" not in server(order + USE)


IMPORTS = {
    "subquad": "import subquad",
    "tokenizers": "from subquad_tokenizers import RwkvWorldTokenizerFast; import subquad_tokenizers.published",
    "transformers": "from transformers import AutoModel, AutoTokenizer",
    "peft": "import peft",
}
CHECK = """
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as lora
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer
from transformers.models.auto import processing_auto, tokenization_auto
import subquad, subquad_tokenizers

config = AutoConfig.for_model("rwkv6")
assert type(config) is subquad.Rwkv6Config
assert type(config) in AutoModelForCausalLM._model_mapping
assert subquad.VisualRwkvConfig in processing_auto.PROCESSOR_MAPPING
assert tokenization_auto.TOKENIZER_MAPPING[type(config)] is subquad_tokenizers.RwkvWorldTokenizerFast
for name in ("RwkvWorldTokenizer", "RwkvWorldTokenizerFast", "Rwkv6Tokenizer"):
    named = tokenization_auto.tokenizer_class_from_name(name)
    assert issubclass(named, subquad_tokenizers.RwkvWorldTokenizerFast), named
tokenizer = AutoTokenizer.from_pretrained(subquad.embedded_model("finch-abc"))
assert type(tokenizer) is subquad_tokenizers.ByteTokenizer and tokenizer.padding_side == "left"
assert lora["rwkv6"] and PEFT_TYPE_TO_CONFIG_MAPPING["STATE_TUNING"] is subquad.StateTuningConfig
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "order",
    [  # Any three of them are in each of their six orders.
        "subquad tokenizers transformers peft",
        "subquad peft transformers tokenizers",
        "tokenizers peft subquad transformers",
        "transformers tokenizers subquad peft",
        "transformers peft subquad tokenizers",
        "peft tokenizers transformers subquad",
    ],
)
def test_orders_of_packages(order, server):
    server("\n".join([*map(IMPORTS.get, order.split()), CHECK]))


def test_an_interrupted_import_can_be_repeated(server):
    """Again and again, each time after another interruption."""
    server(f"""
import sys
left = {{
    "subquad_tokenizers.auto", "subquad.training.adapters", "subquad.training.state_tuning",
    "transformers.models.auto.tokenization_auto", "transformers.models.auto.modeling_auto", "peft.mapping",
}}
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name in left:
            left.remove(name)
            raise KeyboardInterrupt
import subquad
sys.meta_path.insert(0, Interrupt())
for number in range(len(left), -1, -1):
    assert len(left) == number
    try:
        exec("from transformers import AutoModel, AutoTokenizer; import peft")
    except KeyboardInterrupt:
        continue
    assert not number, left
{CHECK}""")


def test_subquad_wins_where_it_is_imported_last(server):
    assert server(OTHER + "import subquad" + USE).count("subquad replaces the registration of rwkv6") == 1


def test_another_package_may_register_afterwards(server):
    names = ", ".join(f"type(AutoConfig.for_model('{name}')).__name__" for name in ("rwkv6", "rwkv5"))
    code = f"import subquad\n{OTHER}print({names})\nfrom subquad import Rwkv6ForCausalLM"
    assert "RWKV6Config Rwkv5Config\n" in server(code)


@pytest.mark.parametrize(
    "imported", ["", "from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer"]
)
def test_import_is_light(imported, server):
    code = f"""
import sys, transformers
{imported}
before = set(sys.modules)
import subquad
new = set(sys.modules) - before
heavy = {{name for name in new if not name.startswith("subquad") or "configuration" in name or "modeling" in name}}
assert not heavy, heavy
assert not {{"Rwkv6ForCausalLM", "RecurrentCache", "PRESETS"}} - set(dir(subquad))
"""
    server(code)


@pytest.mark.fast
def test_every_export_is_there():
    for name in subquad.__all__:
        assert getattr(subquad, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        subquad.nothing


@pytest.mark.parametrize(
    "tokenizer_class", [None, "PreTrainedTokenizerFast", "TokenizersBackend", "GPT2TokenizerFast"]
)
def test_avey_has_the_tokenizer_beside_it(tokenizer_class, tmp_path):
    subquad.preset_config("avey-0.1b").save_pretrained(tmp_path)
    expected = write_byte_level_bpe(tmp_path, tokenizer_class=tokenizer_class).encode(TEXT).ids
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer).__module__.startswith("transformers.")  # and not a World tokenizer
    assert tokenizer(TEXT)["input_ids"] == expected
    assert tokenizer.decode(expected) == TEXT
    assert tokenizer(END)["input_ids"] == [tokenizer.eos_token_id] == [0]


def test_no_network(server):
    """Neither the import of the package nor loading from the disk looks up any host: the server refuses it."""
    server("""
import subquad
from transformers import AutoModelForCausalLM, AutoTokenizer
path = subquad.embedded_model("finch-abc")
AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
""")
