"""
Files that are damaged, or made to do harm: whatever they hold, reading them ends well, or in an error of one sentence
that names the file. No code in them runs, and they take no more memory than a limit.

Each kind of damage has as many cases as the variable SUBQUAD_DAMAGES says; `make fuzz` runs many.
"""

import io
import os
import random
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import damage
import pytest
import torch
from cases import tiny_model
from chat_cases import save_model
from limited import limited, only_on_linux
from peft import LoraConfig, get_peft_model
from PIL import Image
from rwkv_files import write_trainer_file
from visual_cases import save_visual

import subquad
import subquad_cli as cli
from subquad import PrefixCache, StateTuningConfig, load_time_states, save_time_states
from subquad.hub import export as hub
from subquad_cli import chat
from subquad_conversion import ConversionError, convert
from subquad_tokenizers import ByteTokenizer, RwkvWorldTokenizerFast
from subquad_tokenizers.vocabulary import write_vocabulary


CASES = int(os.environ.get("SUBQUAD_DAMAGES", "2"))
LOADED = ("rwkv7", "rwkv6", "rwkv5", "avey", "raven", "gecko", "avey-b")
# Files that are named by an error themselves, not only by their directory.
STATES = ("text.state", "states.pth", "states.st", "states.safetensors")
NAMED = ("picture.png", "model.gguf", *STATES)
SAMPLE = list(range(40, 80))  # ids of a text
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
    load_tokenizer(root / "vocabulary", root)  # compiles the library: reading a damaged file starts no compiler
    save_model(root / "chat")
    states = ["--model", str(root / "chat"), "--max-new-tokens", "3", "--state-out", str(root / "chat" / "text.state")]
    assert cli.main(["generate", "ab", *states]) == 0
    for name in STATEFUL:
        model = subquad.REGISTRY[name].lm_class.from_pretrained(root / name)
        with torch.no_grad():
            cache = model(torch.tensor([SAMPLE]), use_cache=True).cache
        cache.save(root / name / "text.state")
    for method, config in (("int8", subquad.Int8Config()), ("int4", subquad.Int4Config())):
        path = root / f"rwkv7-{method}"
        subquad.Rwkv7ForCausalLM.from_pretrained(root / "rwkv7", quantization_config=config).save_pretrained(path)
    (root / "gguf").mkdir()
    convert(root / "trainer" / "model.pth", root / "gguf" / "model.gguf", to="gguf", progress=False)
    (root / "tuned").mkdir()
    for name in STATES[1:]:
        save_time_states(tuned(), root / "tuned" / name)
    read_prefixes(root / "prefixes")
    return root


def tuned():
    return get_peft_model(tiny_model("rwkv7", vocab_size=128), StateTuningConfig(task_type="CAUSAL_LM"))


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


def continue_text(path: Path, out: Path) -> None:
    model = subquad.REGISTRY[path.name].lm_class.from_pretrained(path)
    cache = type(model.new_cache()).load(path / "text.state", model.config)
    with torch.no_grad():
        model(torch.tensor([[65]] * max(cache.batch_size, 1)), cache=cache)


def converse(path: Path, out: Path) -> None:
    """In a terminal, where nothing ends a conversation."""
    lines = iter([f"/load {path / 'text.state'}", "Hi", "/quit"])
    sys.stdin = SimpleNamespace(isatty=lambda: True)
    sys.stderr = io.StringIO()
    chat.input = lambda prompt: next(lines)
    assert cli.main(["chat", str(path), "--max-new-tokens", "2"]) == 0
    # Numbers that are not those of a text may be too large to choose a token.
    expected = ("SafetensorError: ", "RuntimeError: probability tensor")
    notes = [line for line in sys.stderr.getvalue().splitlines() if not any(name in line for name in expected)]
    assert next(lines, None) is None and not [line for line in notes if "Error: " in line], notes


def load_states(path: Path, out: Path) -> None:
    model = tuned()
    for name in STATES[1:]:
        load_time_states(model, path / name)
        with torch.no_grad():
            model(torch.tensor([SAMPLE]))


def read_prefixes(path: Path, out: Path | None = None) -> None:
    """A damaged state is a miss: the text is read all the same."""
    torch.manual_seed(0)
    model, text = tiny_model("rwkv6", vocab_size=128), torch.tensor(SAMPLE)
    with torch.no_grad():
        prefixes = PrefixCache(directory=path)
        model(torch.tensor([[65]]), cache=prefixes.read(model, text))
        prefixes.flush()


GENERATE = command("generate", "ab", "--model", "PATH", "--max-new-tokens", "2")
DESCRIBE = command("generate", "ab", "--model", "PATH", "--max-new-tokens", "2", "--image", "PATH/picture.png")
INFO = command("info", "PATH")
EXPORT = command("export", "PATH", "OUT")
CONVERT = command("convert", "PATH", "OUT")
CONTINUE = command("generate", "ab", "--model", "PATH", "--max-new-tokens", "2", "--state-in", "PATH/text.state")
CONVERT_GGUF, GGUF_INFO = command("convert", "PATH/model.gguf", "OUT"), command("info", "PATH/model.gguf")
# What was read of a text, or trained for its beginning.
STATEFUL = ("rwkv7", "avey", "raven", "gecko")
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
    "literals": (("vocabulary",), ("rwkv_vocab_v20230424.txt",), damage.literals, (load_tokenizer,)),
    "states": (STATEFUL, ("text.state",), damage.states, (continue_text,)),
    "bytes of states": (STATEFUL, ("text.state",), damage.any_bytes, (continue_text,)),
    "header of states": (STATEFUL, ("text.state",), damage.safetensors_header, (continue_text,)),
    "session": (("chat",), ("text.state",), damage.states, (CONTINUE, converse)),
    "bytes of a session": (("chat",), ("text.state",), damage.any_bytes, (CONTINUE, converse)),
    "prefixes": (("prefixes",), ("*.state",), damage.states, (read_prefixes,)),
    "bytes of prefixes": (("prefixes",), ("*.state",), damage.any_bytes, (read_prefixes,)),
    "first states": (("tuned",), STATES[2:], damage.tensors, (load_states,)),
    "first states of PyTorch": (("tuned",), STATES[1:2], damage.pytorch, (load_states,)),
    "bytes of first states": (("tuned",), STATES[1:], damage.any_bytes, (load_states,)),
    "GGUF": (("gguf",), ("model.gguf",), damage.gguf, (CONVERT_GGUF, GGUF_INFO)),
    "bytes of GGUF": (("gguf",), ("model.gguf",), damage.any_bytes, (CONVERT_GGUF, GGUF_INFO)),
    "quantised": (("rwkv7-int8", "rwkv7-int4"), ("model.safetensors",), damage.tensors, (load,)),
    "header of quantised": (("rwkv7-int8", "rwkv7-int4"), ("model.safetensors",), damage.safetensors_header, (load,)),
    "image": (("visual",), ("picture.png",), damage.image, (DESCRIBE,)),
}


@only_on_linux
@pytest.mark.parametrize("kind", KINDS)
def test_damage(kind, sound, tmp_path, capsys):
    models, files, damaging, readers = KINDS[kind]
    most = 0
    for number in range(CASES):
        chance = random.Random(f"{kind} {number}")
        path, out = tmp_path / str(number) / chance.choice(models), tmp_path / str(number) / "out"
        shutil.copytree(sound / path.name, path)
        damaged = chance.choice([file for name in files for file in sorted(path.glob(name))])
        damaging(damaged, chance)
        reader = chance.choice(readers)
        what = f"{kind} {number}: {reader.__name__} of {damaged}"
        try:
            _, memory = limited(partial(read_damaged, reader, path, damaged, out, capsys))
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error
        most = max(most, memory)
        assert not (path / damage.EXECUTED).exists(), what
        assert not [name for name in os.listdir(path.parent) if name.startswith(".subquad")], what
        shutil.rmtree(path.parent)
    if log := os.environ.get("SUBQUAD_DAMAGES_LOG"):
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{kind}: {CASES} files, at most {most / 1e6:.0f} MB\n")


def read_damaged(reader, path: Path, damaged: Path, out: Path, capsys) -> None:
    """
    Reading ends well, or in an error of one sentence that names the file. No pickle is read by Python's own module,
    which runs what it says.
    """

    def watch(event, arguments):
        if event in ("pickle.find_class", "os.system", "subprocess.Popen"):
            raise AssertionError(f"{event} {arguments}")

    sys.addaudithook(watch)
    capsys.readouterr()
    try:
        reader(path, out)
    except (ValueError, OSError, RuntimeError, CommandError) as error:
        # transformers raises the third while it loads weights that do not fit.
        assert not isinstance(error, RuntimeError) or reader in (load, read_again, hub.export), error
        line = str(error)
        if isinstance(error, CommandError):
            lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
            assert len(lines) == 1 and lines[0].startswith("subquad "), lines
            line = lines[0]
        if reader in (convert_file, convert_directory):  # whoever calls it knows the file
            assert isinstance(error, ConversionError)
            line = f"{path}: {line}"
        named = damaged if damaged.name in NAMED else path
        assert str(named) in line and len(line) < 3000, f"{type(error).__name__}: {line}"
        assert not out.exists()
