"""The command line: what it prints, what it refuses, and with which exit code."""

import gc
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import peft
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)
from transformers.generation import GenerationMixin
from visual_cases import save_visual

import subquad
import subquad_cli as cli
from subquad.hub.info import describe, describe_preset
from subquad_cli import start
from subquad_cli.answers import character_streamer
from subquad_cli.common import find_model, load_reader
from subquad_cli.generate import ABC_HEADER
from subquad_tokenizers import WORLD_CHAT_TEMPLATE, ByteTokenizer


SUBQUAD = [sys.executable, "-m", "subquad_cli"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A small Finch over bytes, with weights that make some bytes likelier than others."""
    path = tmp_path_factory.mktemp("models") / "small"
    tokenizer = ByteTokenizer()
    config = AutoConfig.for_model("rwkv6", vocab_size=128, hidden_size=32, head_size=16, num_hidden_layers=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.head.weight.mul_(4)
    model.save_pretrained(path, max_shard_size="20KB")
    tokenizer.save_pretrained(path)
    return path


def generate(capsys, *arguments):
    assert cli.main(["generate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def fails(capsys, code, *arguments):
    """Runs a command that fails, and returns the one line that it says about it."""
    capsys.readouterr()
    try:
        assert cli.main([str(argument) for argument in arguments]) == code
        usage = ""
    except SystemExit as exit_:
        assert exit_.code == code
        usage = r"usage: .*\n(?: .*\n)*"  # argparse puts it first
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = re.sub(rf"\A{usage}", "", captured.err).splitlines()
    # When bitsandbytes is first imported, it prints the kernels that it looks for.
    lines = [line for line in lines if "kernels-community" not in line]
    assert len(lines) == 1, captured.err
    line = lines[0]
    assert line.startswith(f"subquad {arguments[0]}: error: ")
    return line


def read_help(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main([*arguments, "--help"])
    assert exit_.value.code == 0
    return capsys.readouterr().out


@pytest.mark.fast
@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_a_command_teaches(command, capsys):
    """Its examples parse, so no option in them is misspelled or missing."""
    text = read_help(capsys, command)
    assert re.search(r"^  --debug ", text, re.MULTILINE)
    examples = text.partition("\nexamples:\n")[2].partition("\n\n")[0].replace("\\\n", " ").splitlines()
    calls = [call for line in examples for call in re.split(r"&&|\|", line) if f"subquad {command} " in call]
    assert len(calls) >= len(examples) > 1
    for call in calls:
        arguments = shlex.split(call.replace("$'", "'"))
        arguments = arguments[: arguments.index("<")] if "<" in arguments else arguments
        assert cli.build_parser().parse_args(arguments[1:]).command == command


def test_help_and_presets_import_nothing_heavy():
    code = """
import contextlib, sys
from subquad_cli import main
for words in (["--version"], ["convert", "--help"], ["info"], ["info", "finch-1.6b"]):
    with contextlib.suppress(SystemExit):
        main(words)
heavy = {"torch", "transformers", "tokenizers", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(f"subquad {subquad.__version__}\nusage: ")
    assert process.stdout.count("finch-1.6b") > 1


# --- info ---


def test_info_agrees_with_the_paper(capsys):
    """Table 10 of "Eagle and Finch"; tests/models/test_presets.py has its other numbers."""
    assert cli.main(["info", "finch-3b", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["state_bytes"] == 4 * info["state_elements"]
    assert info["state_elements_per_token"] is info["state_bytes_per_token"] is None
    assert [f"{info[name]:.2e}" for name in ("inference_flops", "training_flops")] == ["6.23e+09", "1.87e+10"]
    assert cli.main(["info", "finch-3b"]) == 0
    text = capsys.readouterr().out
    for number in ("3.10e+09", "5,406,720 elements", "6.23e+09 FLOPs", "1.87e+10 FLOPs"):
        assert number in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_info_of_a_directory(dtype, directory, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    # Published files hold the size of a head in this field, and lack the other.
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 16, "head_size": None}))
    assert cli.main(["info", str(tmp_path), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (info["parameters"], info["dtype"], info["num_attention_heads"]) == (parameters, dtype, 2)
    assert info["weight_bytes"] == parameters * model.dtype.itemsize
    assert info["state_elements"] == 2 * (2 * 32 + 32 * 16)
    assert info["state_bytes"] == 2 * (2 * 32 * model.dtype.itemsize + 32 * 16 * 4)
    assert info["inference_flops"] == 2 * parameters + 6 * 2 * 32 * 16


def test_a_hub_that_cannot_be_reached_is_asked_once(capsys, monkeypatch):
    asked = []

    def model_info(self, name, **options):
        asked.append(name)
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    line = fails(capsys, 1, "generate", "x", "--model", "nobody/nothing")
    assert "nobody/nothing is not a directory, and the Hub cannot be reached: no route" in line
    assert asked == ["nobody/nothing"]


def test_a_directory_comes_before_names(directory, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("finch-abc", "finch-1.6b"):
        (tmp_path / name).symlink_to(directory)
        assert find_model(name) == name
        assert describe(name).hidden_size == 32
    arguments = ["X:1\nK:D\n", "--greedy", "--max-new-tokens", 12, "--model"]
    assert generate(capsys, *arguments, "finch-abc") == generate(capsys, *arguments, directory)


@pytest.mark.parametrize("name", subquad.PRESETS)
def test_the_numbers_of_a_preset_are_those_of_its_model(name):
    assert describe(name) == describe_preset(name), "run `python -m subquad.hub.info`"


@pytest.mark.parametrize(
    ("name", "state", "transformer"),
    [  # a constant state; embeddings of every token
        ("finch-1.6b", "12.98 MB", "19.66 GB"),
        ("avey-abc", "51.2 MB", "256 MB"),
    ],
)
def test_info_at_a_length(name, state, transformer, capsys):
    assert cli.main(["info", name, "--length", "100000"]) == 0
    shown = capsys.readouterr().out
    assert f"{state} after 100,000 tokens; {transformer} in a transformer" in shown
    assert cli.main(["info", name, "--json", "--length", "100000"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    info = describe(name)
    assert numbers["length"] == 100000
    assert numbers["state_bytes_at_length"] == info.state_bytes_after(100000)
    assert numbers["transformer_bytes_at_length"] == info.transformer_bytes_after(100000)


def test_info_without_a_state(capsys):
    line = fails(capsys, 2, "info", "avey-b-abc", "--length", "5")
    assert line.endswith("--length: avey-b-abc keeps no state from token to token.")
    assert fails(capsys, 2, "info", "--length", "5").endswith("--length needs NAME.")


def test_info_of_a_directory_without_a_model(tmp_path, capsys):
    line = fails(capsys, 1, "info", tmp_path)
    assert f"{tmp_path} has no usable config.json (" in line and "has none of model.safetensors" in line


@pytest.mark.parametrize("config", [None, "{", '{"model_type": "unheard-of"}'])
def test_info_of_a_directory_without_a_usable_configuration(config, directory, tmp_path, capsys):
    for path in directory.glob("model*"):
        (tmp_path / path.name).symlink_to(path)
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    if config == "{":
        assert "not valid JSON" in fails(capsys, 1, "info", tmp_path)
        return
    expected, found = [], []
    for path, numbers in ((directory, expected), (tmp_path, found)):
        assert cli.main(["info", str(path), "--json"]) == 0
        numbers.append(json.loads(capsys.readouterr().out) | {"name": "", "source": ""})
    assert found == expected


def test_info_of_a_quantised_directory(tmp_path, capsys):
    config = AutoConfig.for_model("rwkv6", vocab_size=128, hidden_size=32, head_size=16, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    tensors = {
        "a": torch.zeros(70, dtype=torch.uint8),
        "b": torch.zeros(10, dtype=torch.int32),
        "c": torch.zeros(5, dtype=torch.float8_e4m3fn),
        "d": torch.zeros(3, dtype=torch.bool),
        "e": torch.zeros(2, dtype=torch.int64),
        "f": torch.zeros(20),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert cli.main(["info", str(tmp_path), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["parameters"], info["dtype"]) == (110, "U8")
    assert info["weight_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert info["state_bytes"] == 4 * info["state_elements"]


@pytest.fixture
def foreign(directory, tmp_path):
    """A model directory that wants its own code to be run."""
    marker = tmp_path / "executed"
    path = tmp_path / "foreign"
    path.mkdir()
    for file in directory.glob("model*"):
        (path / file.name).symlink_to(file)
    auto_map = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M", "AutoTokenizer": ["code.T", None]}
    (path / "code.py").write_text(f"open({str(marker)!r}, 'w')")
    (path / "config.json").write_text(json.dumps({"model_type": "unheard-of", "auto_map": auto_map}))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T", "auto_map": auto_map}))
    return SimpleNamespace(path=path, marker=marker)


@pytest.mark.parametrize(
    ("known", "message"), [(False, "`model_type` is 'unheard-of'"), (True, "the tokenizer cannot be read")]
)
def test_no_code_of_a_model_is_run(known, message, directory, foreign, capsys, monkeypatch):
    """Nor is anybody asked whether it may be."""
    if known:
        fields = [json.loads((path / "config.json").read_text()) for path in (foreign.path, directory)]
        (foreign.path / "config.json").write_text(json.dumps(fields[0] | fields[1]))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    assert message in fails(capsys, 1, "generate", "x", "--model", foreign.path)
    assert cli.main(["info", str(foreign.path)]) == 0
    assert not foreign.marker.exists()


# --- convert ---


def test_convert_failures_are_one_line(directory, tmp_path, capsys, monkeypatch):
    line = fails(capsys, 1, "convert", tmp_path / "nothing.pth", tmp_path / "out")
    assert line == f"subquad convert: error: {tmp_path / 'nothing.pth'} does not exist."
    (tmp_path / "bad.pth").write_bytes(b"PK\x03\x04 and no more")
    assert "bad.pth" in fails(capsys, 1, "convert", tmp_path / "bad.pth", tmp_path / "out")
    assert "exists already" in fails(capsys, 1, "convert", directory, directory)
    with pytest.raises(ValueError, match="does not exist"):
        cli.main(["convert", str(tmp_path / "nothing.pth"), str(tmp_path / "out"), "--debug"])
    monkeypatch.setenv("SUBQUAD_DEBUG", "1")
    with pytest.raises(ValueError, match="does not exist"):
        cli.main(["convert", str(tmp_path / "nothing.pth"), str(tmp_path / "out")])


@pytest.mark.parametrize(
    "arguments", [["--dtype", "int8"], ["--head-size-divisor", "0"], ["--max-shard-size", "large"]]
)
def test_convert_arguments(arguments, directory, tmp_path, capsys):
    assert arguments[1] in fails(capsys, 2, "convert", directory, tmp_path / "out", *arguments)


def test_convert_speaks_of_options(directory, tmp_path, capsys):
    for options, message in (
        (["--grid-size", 2], f"{directory}: --grid-size does not apply to the model type rwkv6."),
        (["--merge-tables"], f"{directory}: --merge-tables does not apply to the model type rwkv6."),
        (["--lora-alpha", 2], f"--lora-alpha needs --base, the model that the adapter {directory} was trained on."),
        (["--tokenizer", "no"], "--tokenizer must be auto, rwkv-world, bytes, none or a directory; got 'no'."),
    ):
        assert fails(capsys, 2, "convert", directory, tmp_path / "out", *options).endswith(message)
    (tmp_path / "config.json").write_text('{"model_type": "rwkv6", "head_size_divisor": "many"}')
    # A field of a file is not an option.
    line = fails(capsys, 1, "convert", directory, tmp_path / "out", "--config", tmp_path / "config.json")
    assert "head_size_divisor" in line and "--head" not in line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_conversion_leaves_nothing(number, directory, tmp_path, monkeypatch):
    from subquad_conversion.checkpoint import Checkpoint

    monkeypatch.setattr(Checkpoint, "read", lambda *_: os.kill(os.getpid(), number))
    before = signal.signal(number, lambda *_: pytest.fail("not caught"))
    own = signal.getsignal(number)
    try:
        with pytest.raises(SystemExit) as exit_:
            cli.main(["convert", str(directory), str(tmp_path / "out")])
        assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)
    assert exit_.value.code == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_must_not_be_hung_up_on(directory, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("subquad_conversion.convert", lambda *_, **__: seen.append(signal.getsignal(signal.SIGHUP)))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(AttributeError):  # there is no report to print
            cli.main(["convert", str(directory), str(tmp_path / "out"), "--debug"])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == [signal.SIG_IGN]


def test_a_conversion_in_a_thread(directory, tmp_path, capsys):
    codes = []
    arguments = ["convert", str(directory), str(tmp_path / "out")]
    thread = threading.Thread(target=lambda: codes.append(cli.main(arguments)))
    thread.start()
    thread.join()
    assert codes == [0]


def test_convert_heeds_the_size_of_a_shard(directory, tmp_path, capsys):
    arguments = ["convert", str(directory), str(tmp_path / "out"), "--max-shard-size", "30KB"]
    assert cli.main(arguments) == 0
    assert len(sizes := [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]) > 1
    assert max(sizes) < 35_000


# --- generate ---


def test_a_plain_model_needs_no_optional_packages(directory, capsys):
    code = f"""
import gc, sys
from subquad_cli import main
sys.argv = ["subquad", "generate", "abc", "--model", {str(directory)!r}, "--seed", "3", "--max-new-tokens", "12"]
assert main() == 0
assert gc.isenabled()
print([name for name in ("accelerate", "peft", "scipy", "sklearn", "torchao") if sys.modules.get(name)])
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = generate(capsys, "abc", "--model", directory, "--seed", 3, "--max-new-tokens", 12)
    assert process.stdout == expected + "[]\n"


def test_optional_packages_are_left_alone_where_they_may_be_needed(directory, tmp_path):
    assert start.is_plain(directory) and not start.is_plain("owner/name")
    config = json.loads((directory / "config.json").read_text())
    for quantised, plain in (
        (None, True),
        ({"quant_method": "subquad_int8"}, True),
        ({"quant_method": "subquad_int4"}, True),
        ({"quant_method": "torchao"}, False),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
        assert start.is_plain(tmp_path) is plain
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert not start.is_plain(tmp_path)
    before = dict(sys.modules)
    start.begin(SimpleNamespace(own_process=False), directory)
    assert sys.modules == before and gc.isenabled()


def test_generate_continues_the_prompt(directory, capsys):
    arguments = ["X:1\nK:D\n", "--model", directory, "--max-new-tokens", 20]
    first = generate(capsys, *arguments, "--seed", 3)
    assert first.startswith("X:1\nK:D\n") and len(first) > len("X:1\nK:D\n")
    assert generate(capsys, *arguments, "--seed", 3) == first
    assert generate(capsys, *arguments, "--seed", 4) != first
    greedy = generate(capsys, *arguments, "--greedy")
    assert generate(capsys, *arguments, "--greedy", "--dtype", "float32", "--device", "cpu") == greedy
    assert generate(capsys, *arguments, "--top-k", 1) == greedy
    generate(capsys, *arguments, "--temperature", 0.5, "--top-p", 0.9)


@pytest.fixture
def asked(monkeypatch):
    """What `model.generate` is called with."""
    seen = SimpleNamespace()

    def record(self, **kwargs):
        vars(seen).update(kwargs, model=self)
        return kwargs["input_ids"]

    monkeypatch.setattr(GenerationMixin, "generate", record)
    return seen


def test_generate_passes_its_arguments_on(directory, asked, capsys):
    arguments = ["--temperature", 0.5, "--top-p", 0.9, "--top-k", 7, "--max-new-tokens", 11, "--dtype", "bfloat16"]
    generate(capsys, "x", "--model", directory, *arguments)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.max_new_tokens) == (0.5, 0.9, 7, 11)
    assert asked.do_sample is True and asked.model.dtype == torch.bfloat16
    vars(asked).clear()
    generate(capsys, "x", "--model", directory, "--greedy")
    assert asked.do_sample is False and asked.model.dtype == torch.float32
    assert not {"temperature", "top_p", "top_k", "stop_strings", "logits_processor"} & vars(asked).keys()
    for arguments, expected in (
        (["--presence-penalty", 0.4, "--frequency-penalty", -0.1, "--penalty-decay", 0.9], (0.4, -0.1, 0.9)),
        (["--frequency-penalty", 0.2, "--greedy"], (0.0, 0.2, 0.996)),
    ):
        generate(capsys, "X:1", "--model", directory, *arguments)
        (found,) = asked.logits_processor
        assert (found.presence, found.frequency, found.decay) == expected
        assert found.prompt_length == asked.input_ids.shape[1]


@pytest.mark.parametrize("prompt", ["caf\udce9", "-"])
def test_a_prompt_that_is_not_utf_8(prompt, directory, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    line = fails(capsys, 2, "generate", prompt, "--model", directory)
    assert line == "subquad generate: error: the prompt is not UTF-8."


def test_a_model_without_a_tokenizer(directory, tmp_path, capsys, monkeypatch):
    """What is said about it can be done about it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    for file in directory.glob("*"):
        if not file.name.startswith("tokenizer"):
            (tmp_path / "bare" / file.name).write_bytes(file.read_bytes())
    arguments = ["abc", "--model", "bare", "--greedy", "--max-new-tokens", 3]
    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
        line = fails(capsys, 1, "generate", *arguments)
    assert line.startswith("subquad generate: error: bare has no tokenizer; `subquad convert bare OUT --tokenizer ")
    command = line.split("`")[1].replace("OUT", "whole").replace("CHOICE", "bytes")
    assert cli.main(shlex.split(command)[1:]) == 0
    capsys.readouterr()
    arguments[2] = "whole"
    assert generate(capsys, *arguments).startswith("abc")


def test_an_adapter_takes_the_tokenizer_of_its_model(directory, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(directory)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("tokenizer*"))
    arguments = ["X:1\nK:D\n", "--greedy", "--max-new-tokens", 12]
    tokens = adapted.generate(**ByteTokenizer()(arguments[0], return_tensors="pt"), max_new_tokens=12, do_sample=False)
    expected = ByteTokenizer().decode(tokens[0], skip_special_tokens=True)
    assert generate(capsys, *arguments, "--model", tmp_path / "adapter") == expected + "\n"
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "its own"
    tokenizer.save_pretrained(tmp_path / "adapter")
    assert load_reader(AutoTokenizer, "adapter", tmp_path / "adapter").chat_template == "its own"


def test_generate_reads_standard_input(directory, capsys, monkeypatch):
    arguments = ["--model", directory, "--greedy", "--max-new-tokens", 5]
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert generate(capsys, "-", *arguments) == generate(capsys, "from a pipe\n", *arguments)


def test_generate_from_the_embedded_model(directory, tmp_path, capsys, monkeypatch):
    (tmp_path / "finch-abc").symlink_to(directory)
    monkeypatch.setattr("subquad.hub.info.EMBEDDED", tmp_path)
    assert generate(capsys, "--max-new-tokens", 5).startswith(ABC_HEADER)
    assert cli.main(["info", "finch-abc"]) == 0


def test_generate_prints_every_token_and_no_half_characters(capsys):
    class Bytes:
        def decode(self, ids, **kwargs):
            return bytes(ids).decode("utf-8", errors="replace")

    streamer = character_streamer(Bytes(), skip_prompt=False)
    printed = []
    for byte in "a é\n€".encode():
        streamer.put(torch.tensor([byte]))
        printed.append(capsys.readouterr().out)
    assert printed == ["a", " ", "", "é", "\n", "", "", "€"]
    streamer.put(torch.tensor([0xE2]))
    streamer.end()
    assert capsys.readouterr().out == "\ufffd\n"

    # What may be the end of an answer waits until it is certain.
    streamer = character_streamer(Bytes(), skip_prompt=True, opening="<", end="\n\nUser:")
    streamer.put(torch.tensor([65]))
    printed = []
    for part in ("b>", "\n", "\nU", "p\n", "\n\nUse", "r: x"):
        streamer.put(torch.tensor(list(part.encode())))
        printed.append(capsys.readouterr().out)
    streamer.end()
    assert printed == ["<b>", "", "", "\n\nUp", "\n", ""] and capsys.readouterr().out == "\n"
    streamer.put(torch.tensor([65]))
    streamer.put(torch.tensor([97, 10]))
    streamer.end()
    assert capsys.readouterr().out == "a\n\n"


def test_generate_chat(directory, tmp_path, capsys):
    assert "does not have a chat template" in fails(capsys, 2, "generate", "Hi", "--model", directory, "--chat")
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(tmp_path)
    tokenizer = ByteTokenizer()
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n\n' if m.role == 'user' else END }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.chat_template = template.replace("END", "''")
    tokenizer.save_pretrained(tmp_path)
    arguments = ["--model", tmp_path, "--greedy", "--max-new-tokens", 8]
    prompt = "user: Hi\n\nassistant:"
    answer = generate(capsys, prompt, *arguments).removeprefix(prompt)
    assert generate(capsys, "Hi", "--chat", *arguments) == answer

    # The template tells how an answer ends.
    end = next(character for character in answer[3:] if not character.isspace())
    tokenizer.chat_template = template.replace("END", repr(end))
    tokenizer.save_pretrained(tmp_path)
    assert generate(capsys, "Hi", "--chat", *arguments) == answer[: answer.index(end)] + "\n"
    message = f"{tmp_path} cannot be told whether to think; leave out --think and --no-think."
    assert fails(capsys, 2, "generate", "Hi", "--chat", "--think", *arguments).endswith(message)


def save_chat_model(directory, path, chat_template):
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(path)
    ByteTokenizer(chat_template=chat_template).save_pretrained(path)


def test_generate_answers_in_a_turn_of_world(directory, tmp_path, asked, capsys):
    """A blank line may be in an answer, so it ends where the user's next message begins."""
    save_chat_model(directory, tmp_path, WORLD_CHAT_TEMPLATE)
    begins = {(): "", ("--think",): " <think", ("--no-think",): " <think></think"}
    for options, begin in begins.items():
        generate(capsys, "Hi\n\nyou", "--chat", "--model", tmp_path, *options)
        assert asked.stop_strings == ["\n\nUser:"]
        assert asked.tokenizer.decode(asked.input_ids[0]) == f"User: Hi\nyou\n\nAssistant:{begin}"
        asked.streamer.put(asked.input_ids)
        for character in ">x\n\nUser:":
            asked.streamer.put(torch.tensor([ord(character)]))
        assert capsys.readouterr().out == {("--think",): "<think>x", ("--no-think",): "x"}.get(options, ">x")


def test_generate_ends_an_answer_at_a_special_token(directory, tmp_path, asked, capsys):
    """A template of another kind, which thinks unless it is told not to."""
    template = (
        "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}"
        "<assistant>\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
    )
    save_chat_model(directory, tmp_path, template)
    for option, begin in (("--think", ""), ("--no-think", "<think></think>")):
        generate(capsys, "Hi", "--chat", option, "--model", tmp_path)
        assert asked.stop_strings == ["<end>"]
        assert asked.tokenizer.decode(asked.input_ids[0]) == f"<user>\nHi<end>\n<assistant>\n{begin}"


def test_generate_about_an_image(directory, tmp_path, capsys):
    model, processor = save_visual(tmp_path / "visual")
    image, other = (Image.new("RGB", (40, 30), colour) for colour in ("red", "blue"))
    image.save(tmp_path / "red.png")
    other.save(tmp_path / "blue.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    arguments = ["--model", tmp_path / "visual", "--greedy", "--max-new-tokens", 8]
    red, blue = (["--image", tmp_path / f"{name}.png"] for name in ("red", "blue"))
    inputs = processor(images=[image, other], text="User: <image>\n<image>\nWhat?\n\nAssistant:", return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert generate(capsys, "What?", *red, *blue, *arguments) == processor.decode(tokens) + "\n"
    assert generate(capsys, "What?", *red, *arguments) != generate(capsys, "What?", *blue, *arguments)
    assert generate(capsys, "What?", *arguments).startswith("What?")  # text alone

    line = fails(capsys, 2, "generate", "What?", *red)
    assert line.endswith("finch-abc is of type rwkv6, which does not read images; leave out --image.")
    assert "PROMPT is missing" in fails(capsys, 2, "generate", *red)
    absent = ["--image", tmp_path / "absent.png"]
    assert "absent.png is not a file" in fails(capsys, 2, "generate", "What?", *absent, *arguments)
    broken = ["--image", tmp_path / "broken.png"]
    assert "broken.png" in fails(capsys, 1, "generate", "What?", *broken, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--max-new-tokens", "0"], "--max-new-tokens: must be a whole number of at least 1, got '0'"),
        (["x", "--temperature", "0"], "--temperature: must be a number above 0, got '0'"),
        (["x", "--temperature", "nan"], "--temperature"),
        (["x", "--top-p", "1.5"], "--top-p: must be above 0 and at most 1, got '1.5'"),
        (["x", "--seed", "-1"], "--seed"),
        (["x", "--seed", str(2**32)], "--seed"),
        (["x", "--dtype", "int8"], "--dtype"),
        (["x", "--greedy", "--top-k", "3"], "--greedy does not sample"),
        (["x", "--greedy", "--seed", "3"], "--greedy does not sample"),
        (["x", "--presence-penalty", "inf"], "--presence-penalty: must be a number, got 'inf'"),
        (["x", "--penalty-decay", "1.1"], "--penalty-decay: must be from 0 to 1, got '1.1'"),
        (["x", "--penalty-decay", "0.9"], "--penalty-decay needs --presence-penalty or --frequency-penalty."),
        (["x", "--force"], "--force replaces a file: it needs --midi, --score or --state-out."),
        (["x", "--temp", "3"], "unrecognized arguments: --temp 3. Did you mean "),
        (["x", "--num-beams", "3"], "unrecognized arguments: --num-beams 3."),
        (["x", "--no-think"], "--think and --no-think are options of --chat."),
        (["--model", "{directory}"], "PROMPT is missing"),
        (["x", "--model", "finch-3b"], "finch-3b is a preset, which is sizes without weights"),
        (["x", "--model", "{directory}/config.json"], "`subquad convert` makes a model directory from it"),
        (["x", "--model", "{directory}", "--device", "abacus"], "device 'abacus' cannot be used"),
        (["x", "--model", "{directory}", "--device", "meta"], "device 'meta' cannot be used"),
        (["x", "--model", "{directory}", "--device", "cuda:99"], "device 'cuda:99' cannot be used"),
        (["x", "--model", "./finch-9b"], "./finch-9b is not a directory, and cannot be the OWNER/NAME of a model"),
        (
            ["x", "--model", "finch-abd"],
            "'finch-abd' is not an embedded model, not a directory and not the OWNER/NAME",
        ),
    ],
)
def test_generate_arguments(arguments, message, directory, capsys):
    arguments = [argument.format(directory=directory) for argument in arguments]
    assert message in fails(capsys, 2, "generate", *arguments)


def test_an_encoder_does_not_generate(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "avey-b"}')
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: pytest.fail("work was done"))
    line = fails(capsys, 2, "generate", "x", "--model", tmp_path)
    assert line == f"subquad generate: error: {tmp_path} is of type avey-b, an encoder, which does not generate text."


def test_generate_failures_are_one_line(tmp_path, capsys):
    assert "has no `config.json`" in fails(capsys, 1, "generate", "x", "--model", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "rwkv6"}')
    line = fails(capsys, 1, "generate", "x", "--model", tmp_path)
    assert line.startswith(f"subquad generate: error: {tmp_path} has no tokenizer; ")


def test_interruption(monkeypatch, capsys):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("subquad.hub.info.describe", interrupt)
    assert cli.main(["info", "finch-3b"]) == 130
    assert capsys.readouterr().err == "\n"


def test_a_reader_that_goes_away():
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.run([*SUBQUAD, "info", "finch-1.6b"], stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (process.returncode, process.stderr) == (141, "")
