"""
Damage to files of models: each function damages one file in place, in a way that `chance` chooses. It is what a
failing program or transfer may cause, or what somebody may do to cause harm.
"""

import copy
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image, TiffImagePlugin

from subquad.modeling.state_file import read_state_file, write_state_file


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 399\n"
# Whatever opens a file of this name has run code.
EXECUTED = "executed"
NAMES = (
    "..",
    "../x",
    "/etc/passwd",
    "a\nb",
    "x.bin",
    "model.safetensors",
    "",
    "é",
    "\\\\host\\x",
    "\x1b[2J",
    "a" * 300,
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [None], {"a": 1}, "", "x", "1", "relu", "\x00", "../x"),
    *(-1, 0, 1, 2, 3, 7, 64, 255, 2**31 - 1, 2**31, 2**63, 10**12, 10**30, 10**400),
    *(0.5, -0.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")),
)
TEXTS = (b"", b"null", b"[]", b"3", b'"text"', b"{}", b"{", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe{}", LFS)
FIELDS: tuple[tuple[str, Any], ...] = (
    *(("model_type", name) for name in ("llama", "rwkv5", "rwkv7", "avey", "bert", "", None, ["rwkv6"], "unheard-of")),
    *(("architectures", value) for value in (None, [], ["LlamaForCausalLM"], "Rwkv6ForCausalLM", [3], {})),
    *(("dtype", value) for value in ("int8", "float7", "float16", 3, None, "os.system")),
    ("auto_map", {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M", "AutoTokenizer": ["code.T", None]}),
    ("custom_pipelines", {"x": {"impl": "code.P"}}),
    ("transformers_weights", "../x.safetensors"),
    ("transformers_weights", "adapter_model.bin"),
    ("quantization_config", {"quant_method": "gptq", "bits": 4}),
    ("quantization_config", {"quant_method": "x"}),
    ("quantization_config", 3),
    ("_attn_implementation", "somebody/kernel"),
    ("attn_implementation", "flash_attention_2"),
    ("torchscript", "x"),
    ("id2label", {"0": 3}),
    ("id2label", 3),
    ("num_labels", -3),
    ("rope_scaling", "x"),
    ("generation_config", {}),
    ("hf_token", "hf_secret"),
    ("fusion_config", {"x": 1}),
    ("base_model_name_or_path", 3),
    ("tokenizer_class", "Unheard"),
    ("chat_template", "{% for x in range(10**9) %}{% endfor %}{{ ''.__class__.__mro__ }}{"),
)


def any_bytes(path: Path, chance: Random) -> None:
    """Cuts, flips, inserts or replaces bytes."""
    data = bytearray(path.read_bytes())
    way = chance.randrange(6)
    place = chance.randrange(len(data)) if data else 0
    if way == 0:
        data = data[:place]
    elif way == 1:
        for _ in range(chance.choice((1, 1, 3, 30))):
            data[chance.randrange(len(data))] = chance.randrange(256)
    elif way == 2:
        data[place:place] = chance.randbytes(chance.choice((1, 8, 100)))
    elif way == 3:
        del data[place : place + chance.choice((1, 8, 100, 4000))]
    elif way == 4:
        data = chance.randbytes(chance.choice((1, 7, 8, 9, 100, 5000)))
    else:
        data = chance.choice(TEXTS)
    path.write_bytes(bytes(data))


def json_fields(path: Path, chance: Random) -> None:
    """Replaces, adds or removes fields of a JSON file, or all of it."""
    if chance.random() < 0.15:
        path.write_bytes(chance.choice(TEXTS))
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if chance.random() < 0.2:
            name, value = chance.choice(FIELDS)
            content[name] = value
            continue
        parent = content
        while True:
            keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
            if not keys:
                break
            key = chance.choice(keys[:60])
            if isinstance(parent[key], dict | list) and parent[key] and chance.random() < 0.8:
                parent = parent[key]
                continue
            if chance.random() < 0.15:
                del parent[key]
            else:
                parent[key] = copy.deepcopy(chance.choice(VALUES))
            break
    path.write_text(json.dumps(content), encoding="utf-8")


def safetensors_header(path: Path, chance: Random) -> None:
    """Changes what the header says: names, dtypes, shapes, places, or its own length."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    if chance.random() < 0.15:
        wrong = chance.choice((0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1))
        path.write_bytes(struct.pack("<Q", wrong) + data[8:])
        return
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    for _ in range(chance.choice((1, 1, 2))):
        name = chance.choice(names)
        if name not in header or not isinstance(header[name], dict):
            continue
        way = chance.randrange(8)
        entry = header[name]
        if way == 0:
            entry["dtype"] = chance.choice(("I8", "U8", "F8_E4M3", "BOOL", "F32", "BF16", "F64", "C64", "x", None, 3))
        elif way == 1:
            shapes = ([], [0], [-1], [2**63], [2**32, 2**32], "x", None, [1.5], [10**12], [1] * 100)
            entry["shape"] = chance.choice((*shapes, list(reversed(entry.get("shape") or []))))
        elif way == 2:
            entry["data_offsets"] = chance.choice(
                ([0, 0], [0, 2**63], [8, 4], [-1, 4], None, "x", [0], [0, len(body)])
            )
        elif way == 3:
            header[chance.choice(NAMES)] = header.pop(name)
        elif way == 4:
            del header[name]
        elif way == 5:
            header[name] = chance.choice(VALUES)
        elif way == 6:
            header["__metadata__"] = chance.choice((None, 3, {"format": "tf"}, {"a": 3}, []))
        else:
            header[name + ".extra"] = copy.deepcopy(entry)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def tensors(path: Path, chance: Random) -> None:
    """Writes a well-formed file with other tensors: some are missing, of another shape, dtype or value, or more."""
    from safetensors.torch import load_file, save_file

    states = load_file(path)
    for _ in range(chance.choice((1, 1, 2, 5))):
        name = chance.choice(list(states))
        x = states[name]
        way = chance.randrange(8)
        if way == 0 and len(states) > 1:
            del states[name]
        elif way == 1:
            states[name] = chance.choice(
                (x.flatten(), x[None], x[:0], x.repeat(2, *[1] * (x.dim() - 1)) if x.dim() else x)
            )
        elif way == 2:
            kinds = (torch.int8, torch.bool, torch.int64, torch.float64, torch.float8_e4m3fn, torch.complex64)
            states[name] = x.to(chance.choice(kinds))
        elif way == 3 and x.is_floating_point():
            numbers = (float("nan"), float("inf"), -float("inf"), torch.finfo(x.dtype).max)
            states[name] = torch.full_like(x, chance.choice(numbers))
        elif way == 4:
            states[chance.choice(NAMES) or "x"] = states.pop(name)
        elif way == 5:
            states[f"more.{name}"] = x.clone()
        elif way == 6:
            states[name.replace("0", "999999999")] = x.clone()
        elif x.numel() and x.is_floating_point():
            x.view(-1)[chance.randrange(x.numel())] = float("nan")
    save_file({name: x.contiguous() for name, x in states.items()}, path, {"format": "pt"})


def states(path: Path, chance: Random) -> None:
    """Writes a file of states with a right checksum, whatever it holds."""
    from safetensors.torch import load_file

    held, about = read_state_file(path)
    way = chance.randrange(4)
    if way < 3:
        for _ in range(chance.choice((1, 1, 2))):
            parent = about
            while isinstance(inner := parent[chance.choice(list(parent))], dict) and inner and chance.random() < 0.8:
                parent = inner
            value = copy.deepcopy(chance.choice((*VALUES, 2**24, 3 * 10**8, 9 * 10**18)))
            parent[chance.choice([*parent, "x"])] = value
    if way > 1:
        tensors(path, chance)
        held = load_file(path)
    try:
        write_state_file(path, held, about)
    except (ValueError, TypeError):  # an integer that JSON has no digits for
        any_bytes(path, chance)


def literals(path: Path, chance: Random) -> None:
    """Puts other literals of Python, ids and lengths into a vocabulary."""
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    odd = [str(value) for value in VALUES[:30]] + [
        "{{}}",
        "'\\ud800'",
        "b'é'",
        "f'{1}'",
        "''",
        "\0",
        "'a' 'b'",
        "x:=1",
    ]
    odd += ["[" * 3000, "(" * 90 + ")" * 90, "-" * 5000 + "1", "9" * 5000, f"[{'0,' * 10**6}]", f"'{'x' * 10**6}'"]
    for _ in range(chance.choice((1, 1, 3))):
        place = chance.randrange(len(lines))
        number, _, rest = lines[place].partition(" ")
        literal, _, length = rest.rpartition(" ")
        fields = [number, literal, length]
        fields[chance.randrange(3)] = chance.choice(odd)
        lines[place] = " ".join(fields)
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")


def gguf(path: Path, chance: Random) -> None:
    """Changes numbers in the header, or puts entries, lists and tensors into it."""
    data = path.read_bytes()
    way = chance.randrange(4)
    if way == 0:
        place = chance.choice((4, 8, 16, *range(24, 4000, 4)))
        number = chance.choice((0, 1, 255, 2**20, 2**31, 2**32 - 1)).to_bytes(4, "little")
        data = data[:place] + number + data[place + 4 :]
    elif way == 1:
        kind, size = chance.choice(((0, 1), (8, 8), (9, 12), (12, 8), (7, 1), (99, 0)))
        number = chance.choice((0, 1, 10**4, 10**6))
        name = chance.choice((b"a", b"tokenizer.ggml.tokens", b"general.architecture", b"tokenizer.ggml.token_type"))
        said = chance.choice((number, number, number, 2**62))
        added = struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", 9, kind, said) + bytes(size * number)
        (fields,) = struct.unpack_from("<Q", data, 16)
        data = data[:16] + struct.pack("<Q", fields + 1) + added + data[24:]
    elif way == 2:
        number = chance.choice((1, 100, 10**5))
        added = b"".join(
            struct.pack("<Q", 6) + b"%6d" % n + struct.pack("<IQIQ", 1, 2**10, chance.choice((0, 8)), 0)
            for n in range(number)
        )
        data = b"GGUF" + struct.pack("<IQQ", 3, number, 0) + added + data[-20000:]
    else:
        any_bytes(path, chance)
        return
    path.write_bytes(data)


def index(path: Path, chance: Random) -> None:
    """Lets an index name other files, or other tensors."""
    content = json.loads(path.read_text())
    name = chance.choice(list(content["weight_map"]))
    way = chance.randrange(4)
    if way == 0:
        content["weight_map"][name] = chance.choice((*NAMES, *VALUES))
    elif way == 1:
        content["weight_map"][chance.choice(NAMES)] = content["weight_map"].pop(name)
    elif way == 2:
        content["weight_map"] = chance.choice(VALUES)
    else:
        content["metadata"] = chance.choice(VALUES)
    path.write_text(json.dumps(content))


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def pytorch(path: Path, chance: Random) -> None:
    """Writes another PyTorch file: code, other objects, views that claim more than they have, other containers."""
    states = torch.load(path, weights_only=True)
    name = chance.choice(list(states))
    way = chance.randrange(14)
    marker = str(path.parent / EXECUTED)
    if way == 0:
        calls = (
            (os.mkdir, marker),
            (open, marker, "w"),
            (exec, f"open({marker!r}, 'w')"),
            (os.system, f"touch {marker}"),
        )
        states[name] = Payload(*chance.choice(calls))
    elif way == 1:
        states[name] = torch.zeros(1).expand(chance.choice((10**3, 10**7, 10**10)), 64)
    elif way == 2:
        states = {key: torch.zeros(1000, 100) for key in states} | {"all": states}
    elif way == 3:
        states[name] = chance.choice(
            (None, 3, "x", [1], {"a": states[name]}, np.zeros(3), torch.float32, states[name].half())
        )
    elif way == 4:
        states = chance.choice(
            ([], [states], {"model": states}, states[name], 3, None, OrderedDict(), {1: states[name]})
        )
    elif way == 5:
        states[name] = chance.choice(
            (states[name].to_sparse(), states[name].to("meta"), states[name].bool(), states[name].flip(0))
        )
    elif way == 6:
        states = {key: torch.full_like(x, float("nan")) for key, x in states.items()}
    elif way == 7:
        states[chance.choice((*NAMES, 3, None))] = states.pop(name)
    if way == 8:
        torch.save(states, path, _use_new_zipfile_serialization=False)
        if chance.random() < 0.7:
            any_bytes(path, chance)
    elif way == 9:
        calls = (
            Payload(os.mkdir, marker),
            Payload(exec, f"open({marker!r}, 'w')"),
            states,
            [states],
            os.system,
        )
        path.write_bytes(pickle.dumps(chance.choice(calls), protocol=chance.choice((2, 4, 5))))
    elif way == 10:
        members = zipfile.ZipFile(path)
        content = {member.filename: members.read(member) for member in members.infolist()}
        with zipfile.ZipFile(path, "w", chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for member, data in content.items():
                if chance.random() < 0.9:
                    archive.writestr(member, data[: chance.choice((len(data), len(data), 7))])
    elif way in (11, 12, 13):
        torch.save(states, path)
        any_bytes(path, chance)
    else:
        torch.save(states, path)


def image(path: Path, chance: Random) -> None:
    """Writes a picture of another kind, or a damaged one."""
    way = chance.randrange(6)
    size = chance.choice(((1, 1), (1, 900), (900, 1), (28, 28), (33, 70)))
    if way == 0:
        mode, kind = chance.choice(
            [(mode, "PNG") for mode in ("1", "L", "P", "LA", "RGBA", "I;16")]
            + [(mode, "TIFF") for mode in ("CMYK", "YCbCr", "I", "F", "PA")]
        )
        Image.new(mode, size).save(path, kind)
    elif way == 1:
        Image.new("RGB", size).save(path, chance.choice(("JPEG", "GIF", "BMP", "WEBP", "PPM", "TIFF")))
        any_bytes(path, chance)
    elif way == 2:  # a header that claims to be huge
        Image.new("RGB", (8, 8)).save(path, "PNG")
        data = bytearray(path.read_bytes())
        data[16:24] = struct.pack(">II", *chance.choice(((0, 0), (10**5, 10**5), (2**31 - 1, 1), (20000, 20000))))
        path.write_bytes(bytes(data))
    elif way == 3:
        path.write_bytes(chance.choice(TEXTS))
    elif way == 4:
        frames = [Image.new("P", size, n) for n in range(3)]
        frames[0].save(path, "GIF", save_all=True, append_images=frames[1:])
    else:
        information = TiffImagePlugin.ImageFileDirectory_v2()
        information[274] = chance.choice((0, 5, 8, 99))
        Image.new("RGB", size).save(path, "TIFF", tiffinfo=information)
        if chance.random() < 0.5:
            any_bytes(path, chance)
