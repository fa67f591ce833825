"""Tokenizers in files of other programs: tokens that were added, what ends an answer, and what files cannot hold."""

import json
import shutil
from dataclasses import replace

import gguf
import pytest
import torch
from rwkv_files import write_trainer_file
from transformers import AddedToken, AutoTokenizer, GenerationConfig

import subquad
from subquad_cli import main
from subquad_conversion import ConversionError, convert
from subquad_conversion.gguf_files import find_ends, token_texts
from subquad_conversion.vocabularies import Vocabulary, tokenizer_of, vocabulary_of
from subquad_tokenizers import (
    WORLD_CHAT_TEMPLATE,
    WORLD_VOCAB_FILE,
    ByteTokenizer,
    RwkvWorldTokenizerFast,
    write_vocabulary,
)


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BASE = {"layers": 1, "heads": 1, "intermediate": 32, "dtype": torch.bfloat16}


def set_ends(directory, generation, config=None):
    """What the two configurations of a model say about the end of an answer."""
    GenerationConfig(eos_token_id=generation).save_pretrained(directory)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | ({} if config is None else {"eos_token_id": config})))


def finch(folder, vocabulary, **options):
    """A Finch, and the same after training on ChatML, with four tokens more."""
    tokenizer = RwkvWorldTokenizerFast(**options)
    tokenizer.save_pretrained(folder / "tokenizer")
    write_trainer_file(folder / "finch.pth", "rwkv6", **BASE, vocabulary=vocabulary)
    convert(folder / "finch.pth", folder / "finch", tokenizer=folder / "tokenizer", progress=False)
    directory, first = folder / "chatml", len(tokenizer)
    shutil.copytree(folder / "finch", directory)
    options |= {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "chat_template": CHATML}
    tokenizer = RwkvWorldTokenizerFast(**options)
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True, normalized=False), "<工具>"])
    tokenizer.save_pretrained(directory)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (first, first + 1)
    set_ends(directory, first, first)
    return folder / "finch", directory


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """With the World vocabulary."""
    return finch(tmp_path_factory.mktemp("world"), 65536)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """With a vocabulary of the same kind: a boundary, the bytes, a blank line (257) and a word; and 11 more places."""
    folder = tmp_path_factory.mktemp("small")
    write_vocabulary([*(bytes([code]) for code in range(256)), b"\n\n", b"User"], folder / "vocabulary.txt")
    return finch(folder, 270, vocab_file=str(folder / "vocabulary.txt"))


@pytest.fixture
def plain(small):
    return small[0]


@pytest.fixture
def chatml(small):
    return small[1]


@pytest.fixture
def copy(chatml, tmp_path):
    shutil.copytree(chatml, tmp_path / "copy")
    return tmp_path / "copy"


def header(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def ids_in(entries):
    names = ("bos", "eos", "eot", "eom", "padding")
    return {name: entries[key] for name in names if (key := f"tokenizer.ggml.{name}_token_id") in entries}


def test_added_tokens_are_in_a_gguf_file(chatml, tmp_path):
    report = convert(chatml, tmp_path / "out.gguf", to="gguf", progress=False)
    entries = header(tmp_path / "out.gguf")
    tokens, kinds = entries["tokenizer.ggml.tokens"], entries["tokenizer.ggml.token_type"]
    assert tokens[258:264] == ["User", "<|im_end|>", "<|pad|>", "<|im_start|>", "<工具>", "[PAD263]"]
    assert kinds[258:264] == [1, 3, 3, 3, 4, 5]  # normal, control, user defined, unused
    assert ids_in(entries) == {"bos": 0, "eos": 259, "eot": 259, "padding": 260}
    assert entries["tokenizer.chat_template"] == CHATML
    assert report.notes == ["the tokenizer was found beside the weights"]


def same_files(first, second):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (first / name).read_text() == (second / name).read_text(), name


def test_a_tokenizer_of_world_comes_back(world, tmp_path):
    convert(world[1], tmp_path / "out.gguf", to="gguf", progress=False)
    report = convert(tmp_path / "out.gguf", tmp_path / "back", progress=False)
    same_files(tmp_path / "back", world[1])
    assert report.tokenizer == "found in the file" and report.notes == ["the tokenizer was found in the file"]
    assert (report.config.eos_token_id, report.config.pad_token_id) == (65530, 65531)
    assert GenerationConfig.from_pretrained(tmp_path / "back").eos_token_id == 65530


def test_a_tokenizer_that_comes_back(chatml, tmp_path):
    """File by file, and the GGUF file that is written again."""
    convert(chatml, tmp_path / "out.gguf", to="gguf", progress=False)
    convert(tmp_path / "out.gguf", tmp_path / "back", progress=False)
    same_files(tmp_path / "back", chatml)
    for source in ("back", "out.gguf"):
        convert(tmp_path / source, tmp_path / "again.gguf", to="gguf", progress=False)
        assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "out.gguf").read_bytes()
        (tmp_path / "again.gguf").unlink()


def test_a_tokenizer_without_added_tokens_comes_back(plain, tmp_path):
    convert(plain, tmp_path / "out.gguf", to="gguf", progress=False)
    assert ids_in(header(tmp_path / "out.gguf")) == {"bos": 0, "eos": 0, "eot": 257, "padding": 0}
    report = convert(tmp_path / "out.gguf", tmp_path / "back", progress=False)
    same_files(tmp_path / "back", plain)
    assert report.config.eos_token_id == 0
    assert any("a blank line (257) ends a turn; `generate` goes on" in note for note in report.notes)


def test_a_tokenizer_of_bytes_comes_back(tmp_path):
    convert(subquad.embedded_model("finch-abc"), tmp_path / "out.gguf", to="gguf", progress=False)
    convert(tmp_path / "out.gguf", tmp_path / "back", progress=False)
    assert type(AutoTokenizer.from_pretrained(tmp_path / "back")) is ByteTokenizer


@pytest.mark.parametrize(
    ("generation", "config", "expected", "note"),
    [
        ([259, 0], 259, {"eos": 259, "eot": 0}, None),
        ([0, 10], 0, {"eos": 0, "eot": 10}, "at 0, 10, as in the generation configuration; the tokenizer has 259"),
        ([261, 10, 0], 0, {"eos": 261, "eot": 10, "eom": 0}, "; the tokenizer has 259"),
        (259, 0, {"eos": 259, "eot": 259}, "at 259, as in the generation configuration; the configuration has 0"),
        (None, 0, {"eos": 0}, "ends at 0, as in the configuration; the tokenizer has 259"),
    ],
)
def test_the_generation_configuration_says_what_ends_an_answer(generation, config, expected, note, copy, tmp_path):
    set_ends(copy, generation, config)
    report = convert(copy, tmp_path / "out.gguf", to="gguf", progress=False)
    assert {n: i for n, i in ids_in(header(tmp_path / "out.gguf")).items() if n[0] == "e"} == expected
    notes = [each for each in report.notes if "ends at" in each]
    assert len(notes) == (note is not None) and all(note in each for each in notes)
    back = convert(tmp_path / "out.gguf", tmp_path / "back", progress=False)
    ends = sorted({*expected.values()})
    assert back.config.eos_token_id == (ends if len(ends) > 1 else ends[0])
    assert GenerationConfig.from_pretrained(tmp_path / "back").eos_token_id == back.config.eos_token_id


def test_what_ends_a_turn_of_world():
    """llama.cpp stops at a blank line if nothing but the end of a document is known to end an answer."""
    tokens, boundary = [b"<|endoftext|>", b"\n\n", b"a"], AddedToken("<|endoftext|>", special=True)
    plain = Vocabulary(tokens, {0: boundary}, {"eos": 0}, WORLD_CHAT_TEMPLATE)
    assert find_ends(plain, [0], 3) == {"eos": 0, "eot": 1}
    assert find_ends(plain, [2, 1, 0], 3) == {"eos": 0, "eot": 1, "eom": 2}
    assert find_ends(plain, [2], 3) == {"eos": 2, "eot": 2}
    assert find_ends(replace(plain, chat_template=CHATML), [0], 3) == {"eos": 0}
    assert find_ends(replace(plain, ids={}), [], 3) == {}


def test_where_a_chat_ends(world, tmp_path):
    """The ids are written for the turns of World, and those of a directory are kept."""

    def stops(directory):
        return getattr(GenerationConfig.from_pretrained(directory), "chat_stops", None)

    found = stops(world[0])
    assert (found["answer"], found["turns"], found["newline"]) == ([5585, 41693, 59], [[24281, 59], [40812, 59]], 11)
    assert 261 in found["blank"] and {261, 11, 28329} <= {*found["line"]}
    convert(world[1], tmp_path / "another template", progress=False)
    assert stops(tmp_path / "another template") is None
    shutil.copytree(world[0], tmp_path / "own")
    GenerationConfig(chat_stops={"answer": [1]}).save_pretrained(tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "copy", progress=False)
    assert stops(tmp_path / "copy") == {"answer": [1]}


def test_what_llama_cpp_has_to_be_told(copy, tmp_path):
    GenerationConfig(eos_token_id=259, stop_strings=["\n\nUser:"]).save_pretrained(copy)
    report = convert(copy, tmp_path / "out.gguf", to="gguf", progress=False)
    assert any("`stop_strings` ['\\n\\nUser:']" in note for note in report.notes)


def test_a_tokenizer_that_begins_every_text(copy, tmp_path):
    AutoTokenizer.from_pretrained(copy, add_bos_token=True).save_pretrained(copy)
    report = convert(copy, tmp_path / "out.gguf", to="gguf", progress=False)
    assert any("the tokenizer puts BOS around every text" in note for note in report.notes)
    convert(tmp_path / "out.gguf", tmp_path / "back", progress=False)
    assert AutoTokenizer.from_pretrained(tmp_path / "back").add_bos_token is True


# --- what GGUF cannot hold ---


BYTES = vocabulary_of(ByteTokenizer())


def with_tokens(*tokens):
    return Vocabulary(BYTES.tokens, {**BYTES.added, **dict(enumerate(tokens, 128))}, BYTES.ids)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (
            AddedToken("<a>", lstrip=True),
            r"the token '<a>' \(id 128\), which is searched for together with spaces",
        ),
        (
            AddedToken("<a>", rstrip=True),
            r"the token '<a>' \(id 128\), which is searched for together with spaces",
        ),
        (AddedToken("a", single_word=True), r"the token 'a' \(id 128\), which is only found as a word of its own"),
        (AddedToken("<\\a>"), r"\(id 128\), which has a backslash"),
        (AddedToken("b"), "The token 'b' has the ids 98 and 128; llama.cpp refuses such files"),
    ],
)
def test_tokens_that_gguf_cannot_hold(token, message):
    with pytest.raises(ConversionError, match=message):
        token_texts(with_tokens(token), 140)


def test_more_tokens_than_the_model_has():
    token_texts(with_tokens(AddedToken("<a>"), AddedToken("<b>")), 130)
    with pytest.raises(ConversionError, match="The tokenizer has 130 ids, the model a vocabulary of 129"):
        token_texts(with_tokens(AddedToken("<a>"), AddedToken("<b>")), 129)


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ([0, 1, 2, 3], r"`eos_token_id` is \[0, 1, 2, 3\]; GGUF has room for 3"),
        ([128], "`eos_token_id` has 128, which is no id of a vocabulary of 128"),
        ([-1], "`eos_token_id` has -1"),
        (["x"], "`eos_token_id` has 'x'"),
    ],
)
def test_ends_that_gguf_cannot_hold(stops, message):
    with pytest.raises(ConversionError, match=message):
        find_ends(BYTES, stops, 128)


def test_nothing_is_written_for_a_token_that_gguf_cannot_hold(copy, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.add_tokens([AddedToken("<x>", lstrip=True)])
    tokenizer.save_pretrained(copy)
    assert main(["convert", str(copy), str(tmp_path / "out.gguf"), "--to", "gguf"]) != 0
    assert "GGUF cannot hold the token '<x>' (id 263)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_ids_with_gaps_keep_their_places():
    """llama.cpp's converter may leave places between them."""
    gap = {128: AddedToken("[PAD128]", normalized=True), 129: AddedToken("<a>", special=True, normalized=False)}
    vocabulary = Vocabulary(BYTES.tokens, {**BYTES.added, **gap}, {"eos": 129})
    tokenizer = tokenizer_of(vocabulary)
    assert tokenizer.eos_token_id == 129 and tokenizer("a<a>").input_ids == [97, 129]
    texts, kinds = token_texts(vocabulary_of(tokenizer), 131)
    assert texts[128:] == ["[PAD128]", "<a>", "[PAD130]"] and kinds[128:] == [5, 3, 5]
    with pytest.raises(ConversionError, match="'<a>' has the id 129 in the tokenizer's files, and 128"):
        tokenizer_of(Vocabulary(BYTES.tokens, {**BYTES.added, 129: gap[129]}, {}))


# --- other files and directories ---


def test_files_without_a_tokenizer_say_what_is_lost(world, chatml, tmp_path):
    notes = convert(world[1], tmp_path / "out.pth", to="pth", progress=False).notes
    (note,) = (note for note in notes if "tokenizer" in note)
    assert "the source's is not the plain one of RWKV World: '<|im_end|>' has the id 65530, '<|pad|>' has" in note
    notes = convert(world[0], tmp_path / "plain.st", to="st", progress=False).notes
    assert not any("tokenizer" in note for note in notes)
    convert(chatml, tmp_path / "out.gguf", to="gguf", progress=False)
    notes = convert(tmp_path / "out.gguf", tmp_path / "again.st", to="st", progress=False).notes
    assert any("the source's is not the plain one of RWKV World: its vocabulary is another" in note for note in notes)


@pytest.mark.parametrize("to", ["directory", "hub", "fla"])
def test_directories_keep_the_tokenizer(to, chatml, tmp_path):
    convert(chatml, tmp_path / "out", to=to, progress=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("<|im_start|>a<|im_end|>").input_ids == [261, 98, 259]
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 259
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 259


def test_a_tokenizer_with_code_of_its_own_keeps_its_tokens(world, tmp_path):
    """As others publish them: a class that is not run, and the World vocabulary."""
    shutil.copytree(world[0], tmp_path / "source", ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    shutil.copy(WORLD_VOCAB_FILE, tmp_path / "source")
    tokens = {0: "<s>", 65530: "<|im_end|>"}
    settings = {
        "tokenizer_class": "RwkvTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_rwkv7.RwkvTokenizer", None]},
        "added_tokens_decoder": {i: {"content": text, "special": True} for i, text in tokens.items()},
        "eos_token": "<|im_end|>",
        "bos_token": "<s>",
        "chat_template": CHATML,
    }
    (tmp_path / "source/tokenizer_config.json").write_text(json.dumps(settings))
    convert(tmp_path / "source", tmp_path / "out", progress=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a<|im_end|>").input_ids == [98, 65530] and tokenizer.eos_token_id == 65530
    assert tokenizer.chat_template == CHATML

    settings["added_tokens_decoder"][65533] = {"content": "<gap>", "special": True}
    (tmp_path / "source/tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConversionError, match="'<gap>' has the id 65533 in the tokenizer's files, and 65531 in"):
        convert(tmp_path / "source", tmp_path / "other", progress=False)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
def test_the_template_of_a_tokenizer_with_code_of_its_own(place, world, tmp_path):
    """It is what the model was trained with, also if the plain World tokenizer takes the place of the code."""
    shutil.copytree(world[0], tmp_path / "source", ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    settings = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}Assistant:"
    if place.endswith("jinja"):
        (tmp_path / "source" / place).write_text(template)
    else:
        settings["chat_template"] = template
    (tmp_path / "source/tokenizer_config.json").write_text(json.dumps(settings))
    convert(tmp_path / "source", tmp_path / "out", progress=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == template and tokenizer.response_template is not None


def test_named_templates_come_along(copy, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.chat_template = {"default": CHATML, "training": WORLD_CHAT_TEMPLATE}
    tokenizer.save_pretrained(copy)
    convert(copy, tmp_path / "out", progress=False)
    convert(copy, tmp_path / "out.gguf", to="gguf", progress=False)
    convert(tmp_path / "out.gguf", tmp_path / "back", progress=False)
    for directory in ("out", "back"):
        assert AutoTokenizer.from_pretrained(tmp_path / directory).chat_template == tokenizer.chat_template


def test_a_tokenizer_of_another_kind(chatml, tmp_path):
    """It is not replaced by one that the size of the vocabulary suggests."""
    convert(chatml, tmp_path / "out.gguf", to="gguf", progress=False)
    data = (tmp_path / "out.gguf").read_bytes()
    at = data.index(b"tokenizer.ggml.model") + len(b"tokenizer.ggml.model") + 12
    assert data[at : at + 4] == b"rwkv"
    (tmp_path / "other.gguf").write_bytes(data[:at] + b"gpt2" + data[at + 4 :])
    with pytest.raises(ConversionError, match="a tokenizer of the type 'gpt2', which is not read"):
        convert(tmp_path / "other.gguf", tmp_path / "model", progress=False)
    assert convert(tmp_path / "other.gguf", tmp_path / "model", tokenizer="none", progress=False).tokenizer is None
    notes = convert(tmp_path / "other.gguf", tmp_path / "other.st", to="st", progress=False).notes
    assert any("the source's is not the plain one of RWKV World: " in note and "'gpt2'" in note for note in notes)
    at = data.index(b"tokenizer.ggml.eos_token_id") + len(b"tokenizer.ggml.eos_token_id") + 4
    (tmp_path / "bad.gguf").write_bytes(data[:at] + (270).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ConversionError, match="bad.gguf has a damaged tokenizer: 270 tokens, 270 types"):
        convert(tmp_path / "bad.gguf", tmp_path / "other", progress=False)
