"""
Files that are damaged, or made to do harm: whatever they hold, reading them ends well, or in an error of one sentence
that names the file. No code in them runs, and they take no more memory than a limit.

Each kind of damage has as many cases as the variable SUBQUAD_DAMAGES says; `make fuzz` runs many.
"""

import os
import random
import resource
import shutil
import sys
import time
from pathlib import Path

import damage
import pytest
import torch
from cases import tiny_model
from peft import LoraConfig, get_peft_model
from PIL import Image
from rwkv_files import write_trainer_file
from visual_cases import save_visual

import subquad
from subquad import cli, hub
from subquad_conversion import ConversionError, convert
from subquad_tokenizers import ByteTokenizer, RwkvWorldTokenizerFast
from subquad_tokenizers.vocabulary import write_vocabulary


CASES = int(os.environ.get("SUBQUAD_DAMAGES", "20"))
# Bytes that a case may add to what the process has mapped, and seconds of one core that it may take.
MEMORY, SECONDS = 3 * 2**30, 20
LOADED = ("rwkv7", "rwkv6", "rwkv5", "avey", "raven", "gecko", "avey-b")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is one of Linux")
JSON = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Small models that load, by name."""
    root = tmp_path_factory.mktemp("sound")
    for name in LOADED:
        model = tiny_model(name, vocab_size=128)
        model.save_pretrained(root / name)
        model.save_pretrained(root / f"{name}-shards", max_shard_size="100KB")
        for path in (root / name, root / f"{name}-shards"):
            ByteTokenizer().save_pretrained(path)
    save_visual(root / "visual")
    (root / "trainer").mkdir()
    write_trainer_file(root / "trainer" / "model.pth", "rwkv6", heads=1, head_size=16, intermediate=32, vocabulary=128)
    Image.new("RGB", (40, 30), (200, 30, 30)).save(root / "visual" / "picture.png")
    adapter = get_peft_model(tiny_model("rwkv6", vocab_size=128), LoraConfig(r=2))
    adapter.peft_config["default"].base_model_name_or_path = str(root / "rwkv6")
    adapter.save_pretrained(root / "adapter")
    ByteTokenizer().save_pretrained(root / "adapter")
    write_vocabulary([bytes([byte]) for byte in range(256)] + [b"ab", "é".encode()], root / "vocabulary.txt")
    RwkvWorldTokenizerFast(str(root / "vocabulary.txt")).save_pretrained(root / "vocabulary")
    return root


@pytest.fixture(scope="module", autouse=True)
def limits():
    """A limit on memory; and no pickle is read by Python's own module, which runs what it says."""
    watching = [True]

    def watch(event, arguments):
        if watching and event in ("pickle.find_class", "os.system", "subprocess.Popen"):
            raise AssertionError(f"{event} {arguments}")

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, before[1]))
    sys.addaudithook(watch)
    yield
    watching.clear()
    resource.setrlimit(resource.RLIMIT_AS, before)


def load(path: Path, out: Path) -> None:
    """Loads with the class that the undamaged model has; a model that loads also runs."""
    name = next(name for name in sorted(LOADED, key=len, reverse=True) if path.name.startswith(name))
    model = subquad.REGISTRY[name].lm_class.from_pretrained(path)
    with torch.no_grad():
        model(torch.tensor([[65, 66, 67]]))


def command(*arguments):
    """Runs a command, which fails as commands do: one line on standard error, and an exit code."""

    def run(path: Path, out: Path) -> None:
        code = cli.main([word.replace("PATH", str(path)).replace("OUT", str(out)) for word in arguments])
        assert code in (0, 1, 2)
        if code:
            raise CommandError(code)

    run.__name__ = arguments[0]
    return run


class CommandError(Exception):
    """A command that failed."""


def read_again(path: Path, out: Path) -> None:
    hub.export(path, out)
    load(path, out)


def convert_file(path: Path, out: Path) -> None:
    convert(path / "model.pth", out, progress=False)


def convert_directory(path: Path, out: Path) -> None:
    convert(path, out, progress=False)


def load_tokenizer(path: Path, out: Path) -> None:
    RwkvWorldTokenizerFast.from_pretrained(path)("ab é")


GENERATE = command("generate", "ab", "--model", "PATH", "--max-new-tokens", "2")
DESCRIBE = command("generate", "ab", "--model", "PATH", "--max-new-tokens", "2", "--image", "PATH/picture.png")
INFO = command("info", "PATH")
EXPORT = command("export", "PATH", "OUT")
CONVERT = command("convert", "PATH", "OUT")
# Kind of damage: what it is done to, which of its files, how, and who reads them.
KINDS = {
    "configuration": (LOADED, ("config.json",), damage.json_fields, (load, hub.export, INFO, GENERATE, CONVERT)),
    "visual configuration": (
        ("visual",),
        ("config.json", "processor_config.json"),
        damage.json_fields,
        (EXPORT, DESCRIBE),
    ),
    "other settings": (("rwkv6", "avey"), JSON[1:], damage.json_fields, (hub.export, GENERATE, convert_directory)),
    "bytes of settings": (("rwkv6", "raven"), JSON, damage.any_bytes, (EXPORT, GENERATE, INFO, CONVERT)),
    "header": (LOADED, ("model.safetensors",), damage.safetensors_header, (load, hub.export, INFO, convert_directory)),
    "bytes of weights": (LOADED, ("model.safetensors",), damage.any_bytes, (load, hub.export, INFO, CONVERT)),
    "tensors": (LOADED, ("model.safetensors",), damage.tensors, (load, hub.export, convert_directory, GENERATE)),
    "index": (
        [f"{name}-shards" for name in LOADED],
        ("model.safetensors.index.json",),
        damage.index,
        (load, hub.export, INFO, CONVERT),
    ),
    "trainer's file": (
        ("trainer",),
        ("model.pth",),
        damage.pytorch,
        (convert_file, command("info", "PATH/model.pth")),
    ),
    "adapter": (("adapter",), ("adapter_config.json", "adapter_model.safetensors"), damage.any_bytes, (GENERATE,)),
    "adapter's settings": (("adapter",), ("adapter_config.json",), damage.json_fields, (GENERATE,)),
    "vocabulary": (("vocabulary",), ("rwkv_vocab_v20230424.txt",), damage.any_bytes, (load_tokenizer,)),
    "image": (("visual",), ("picture.png",), damage.image, (DESCRIBE,)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_damage(kind, sound, tmp_path, capsys):
    models, files, damaging, readers = KINDS[kind]
    for number in range(CASES):
        chance = random.Random(f"{kind} {number}")
        path, out = tmp_path / str(number) / chance.choice(models), tmp_path / str(number) / "out"
        shutil.copytree(sound / path.name, path)
        damaged = path / chance.choice([name for name in files if (path / name).exists()])
        damaging(damaged, chance)
        reader = chance.choice(readers)
        what = f"{kind} {number}: {reader.__name__} of {damaged}"
        start = time.process_time()
        capsys.readouterr()
        try:
            reader(path, out)
        except (ValueError, OSError, RuntimeError, CommandError) as error:
            line = str(error)
            if isinstance(error, CommandError):
                lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
                assert len(lines) == 1 and lines[0].startswith("subquad "), (what, lines)
                line = lines[0]
            if reader in (convert_file, convert_directory):  # whoever calls it knows the file
                assert isinstance(error, ConversionError), what
                line = f"{path}: {line}"
            assert str(damaged if kind == "image" else path) in line and len(line) < 3000, (
                f"{what}: {type(error).__name__}: {line}"
            )
            assert not out.exists(), what
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        assert not (path / damage.EXECUTED).exists(), what
        assert not [name for name in os.listdir(path.parent) if name.startswith(".subquad")], what
        assert time.process_time() - start < SECONDS, what
        shutil.rmtree(path.parent)
