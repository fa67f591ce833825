import copy
import json
import pickle
import random
import shutil
import subprocess
import sys

import pytest
import tokenizers
import torch
from cases import small_world
from transformers import (
    AddedToken,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
)

from subquad_tokenizers import (
    WORLD_VOCAB_FILE,
    RwkvWorldTokenizer,
    RwkvWorldTokenizerFast,
    write_vocabulary,
)


BOUNDARY = "<|endoftext|>"


# Ids


def test_ids_equal_the_reference(world, reference, text):
    ids = reference.encode(text)
    assert world(text)["input_ids"] == ids
    assert world(text)["attention_mask"] == [1] * len(ids)
    assert world.encode(text) == ids
    assert world.decode(ids) == text
    tokens = world.tokenize(text)
    assert world.convert_tokens_to_ids(tokens) == ids
    assert world.convert_ids_to_tokens(ids) == tokens
    assert world.convert_tokens_to_string(tokens) == text


@pytest.mark.fast
def test_batch_equals_one_by_one(world, reference, texts):
    assert world(texts)["input_ids"] == [reference.encode(text) for text in texts]
    assert world.batch_decode(world(texts)["input_ids"]) == texts


def test_bytes(world, reference):
    rng = random.Random(0)
    for data in (b"", bytes(range(256)), rng.randbytes(50_000), bytearray(b"abc")):
        ids = world.encode_bytes(data)
        assert ids == reference.encodeBytes(data)
        assert world.decode_bytes(ids) == data
    assert world.encode_bytes(BOUNDARY.encode()) == reference.encode(BOUNDARY)
    assert world.decode_bytes([0, 66]) == b"<|endoftext|>A"
    assert world.decode_bytes([0, 66], skip_special_tokens=True) == b"A"


def test_vocabulary(world):
    vocabulary = world.get_vocab()
    assert sorted(vocabulary.values()) == list(range(65530))
    assert world.vocab_size == len(world) == 65530
    assert vocabulary[BOUNDARY] == 0 and vocabulary["Ġthe"] == world.encode(" the")[0]
    assert world.bos_token_id == world.eos_token_id == world.pad_token_id == 0
    assert world.unk_token is None
    assert world.convert_tokens_to_ids(["no such token", "Ġthe"]) == [None, vocabulary["Ġthe"]]


def test_ids_without_a_token_decode_to_nothing(world):
    assert world.decode([66, 65530, 65535, 100_000, 67]) == "AB"
    assert world.convert_ids_to_tokens(65535) is None


def test_invalid_utf8_decodes_to_replacement_characters(world):
    rng = random.Random(1)
    for data in (b"a\xffb", "é".encode()[:1], "🎉".encode()[:3], "🎉".encode()[1:], rng.randbytes(5000)):
        ids = world.encode_bytes(data)
        expected = data.decode("utf-8", errors="replace")
        assert "\ufffd" in expected
        assert world.decode(ids) == expected
        assert world.convert_tokens_to_string(world.convert_ids_to_tokens(ids)) == expected


# Special and added tokens


def test_boundary_in_text(world, reference):
    text = f"one{BOUNDARY}{BOUNDARY} two{BOUNDARY}"
    ids = [*reference.encode("one"), 0, 0, *reference.encode(" two"), 0]
    assert world.encode(text) == world(text)["input_ids"] == ids
    assert world.decode(ids) == text
    assert world.decode(ids, skip_special_tokens=True) == "one two"
    assert world.tokenize(text).count(BOUNDARY) == 3
    assert world.get_special_tokens_mask(ids, already_has_special_tokens=True) == [int(index == 0) for index in ids]


def test_split_special_tokens(world, reference):
    text = f"one{BOUNDARY}"
    assert world(text, split_special_tokens=True)["input_ids"] == reference.encode(text)
    assert world.encode(text, split_special_tokens=True) == reference.encode(text)
    assert world(text)["input_ids"][-1] == 0  # and this was for one call
    assert RwkvWorldTokenizerFast(split_special_tokens=True).encode(text) == reference.encode(text)


@pytest.mark.fast
@pytest.mark.parametrize(
    "added",
    [
        ["<tool>", "<tool>>", "two words", "größer"],
        [AddedToken("<tool>", lstrip=True, rstrip=True, special=True, normalized=False)],
    ],
)
def test_added_tokens(added, world):
    text = "a <tool>> b<tool> two words, größer <tool><tool> "
    tokenizer = copy.deepcopy(world)
    assert tokenizer.add_tokens(added) == len(added)
    # The ids that published models have embeddings for, but no tokens.
    assert tokenizer.convert_tokens_to_ids(str(added[0])) == 65530
    assert len(tokenizer) == 65530 + len(added) == tokenizer.vocab_size + len(added)
    ids = tokenizer.encode(text)
    assert ids == tokenizer([text, ""])["input_ids"][0] and 65530 in ids
    if len(added) > 1:
        assert tokenizer.convert_ids_to_tokens(ids).count("<tool>") == 3
        assert tokenizer.decode(ids) == text and tokenizer.decode_bytes(ids) == text.encode()
    assert len(world) == 65530


def test_end_of_turn_token_of_ones_own():
    tokenizer = RwkvWorldTokenizerFast(eos_token="<|im_end|>")
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (65530, 0, 0)
    assert tokenizer.encode("a<|im_end|>")[-1] == 65530


def test_boundary_that_is_a_token():
    with pytest.raises(ValueError, match="'the' cannot be the name of id 0"):
        RwkvWorldTokenizerFast(added_tokens_decoder={0: AddedToken("the")})


# What a call can do


@pytest.mark.fast
def test_padding_and_truncation(world):
    batch = world(["one two three four", "one"], padding=True, return_tensors="pt")
    assert world.padding_side == "left"
    length = len(world.encode("one two three four"))
    assert batch["input_ids"].shape == (2, length)
    assert batch["input_ids"][1].tolist() == [0] * (length - 1) + world.encode("one")
    assert batch["attention_mask"][1].tolist() == [0] * (length - 1) + [1]
    right = world(["one two", "one"], padding="max_length", max_length=8, padding_side="right", return_tensors="np")
    assert right["input_ids"].shape == (2, 8) and right["input_ids"][1].tolist() == [*world.encode("one"), *[0] * 7]
    assert world(["one two three four", "one"], padding=True, pad_to_multiple_of=16)["input_ids"][0][0] == 0
    ids = world.encode("one two three four")
    other = copy.deepcopy(world)  # it keeps, and would save, how it truncated last
    assert other("one two three four", truncation=True, max_length=2)["input_ids"] == ids[:2]
    assert other.encode("one two three four", truncation=True, max_length=2) == ids[:2]
    collated = world.pad([{"input_ids": [1, 2]}, {"input_ids": [3]}], return_tensors="pt")
    assert collated["input_ids"].tolist() == [[1, 2], [0, 3]]


def test_pairs_words_and_targets(world):
    one, two = world.encode("one"), world.encode(" two")
    assert world("one", " two")["input_ids"] == one + two
    assert world(["one", "one"], [" two", "one"])["input_ids"] == [one + two, one + one]
    assert world([("one", " two")])["input_ids"] == [one + two]
    assert world([["one", " two"]])["input_ids"] == [one + two]
    assert world(["one", " two"], is_split_into_words=True)["input_ids"] == one + two
    assert world("one", text_target=" two")["labels"] == two
    for arguments, ids in ((("", ""), []), (("", "one"), one), (("one", ""), one), ((["", "one"],), [[], one])):
        assert world(*arguments)["input_ids"] == ids
    assert world("a", "b", return_special_tokens_mask=True)["special_tokens_mask"] == [0, 0]


def test_text_that_is_no_unicode(world):
    with pytest.raises((UnicodeEncodeError, TypeError)):
        world("\ud800")


@pytest.mark.parametrize("text", ["empty", "emoji", "thai", "code", "spaces", "unicode"], indirect=True)
def test_offsets(world, text):
    encoding = world(text, return_offsets_mapping=True)
    end = 0
    for index, (first, last) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
        token = world.decode(index)
        part = text[first:last]
        if "\ufffd" not in token or token == part:
            assert part == token
        else:  # a part of a character has the offsets of the character
            assert last > first
        assert first <= end <= last
        end = last
    assert end == len(text)


def test_offsets_of_parts_of_a_character(world):
    encoding = world("a🎉b", return_offsets_mapping=True)
    assert len(encoding["input_ids"]) == 5
    assert encoding["offset_mapping"] == [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)]
    assert [encoding.char_to_token(position) for position in range(3)] == [0, 1, 4]


# Files


def assert_same(tokenizer, other):
    text = f"Some wörds, 中文 🎉 <new>{BOUNDARY}\n\n  x"
    assert other(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert other.decode(other.encode(text)) == text
    assert len(other) == len(tokenizer) and other.vocab_size == tokenizer.vocab_size
    assert other.special_tokens_map == tokenizer.special_tokens_map
    assert other.all_special_ids == tokenizer.all_special_ids
    assert other.padding_side == tokenizer.padding_side
    assert other.chat_template == tokenizer.chat_template
    assert other.model_max_length == tokenizer.model_max_length


@pytest.mark.fast
@pytest.mark.parametrize("changed", [False, True], ids=["as made", "changed"])
def test_save_and_load(changed, tmp_path, world):
    tokenizer = copy.deepcopy(world) if changed else small_world(tmp_path)
    if changed:
        tokenizer.add_tokens(["<new>"])
        tokenizer.add_special_tokens({"eos_token": "<end>"})
        tokenizer.padding_side = "right"
        tokenizer.model_max_length = 4096
        tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    loaded = {
        RwkvWorldTokenizerFast: RwkvWorldTokenizerFast.from_pretrained(tmp_path),
        AutoTokenizer: AutoTokenizer.from_pretrained(tmp_path),
        PreTrainedTokenizerFast: PreTrainedTokenizerFast.from_pretrained(tmp_path),
    }
    assert type(loaded[AutoTokenizer]) is RwkvWorldTokenizerFast
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert backend.encode("a 中").ids == tokenizer.encode("a 中")
    # Other programs read the vocabulary only.
    (tmp_path / "tokenizer.json").unlink()
    if not changed:
        loaded["vocabulary only"] = RwkvWorldTokenizerFast.from_pretrained(tmp_path)
    for cls, other in loaded.items():
        assert isinstance(cls, str) or cls is AutoTokenizer or isinstance(other, cls)
        # The side is an attribute that only comes from what the class was made with.
        other.padding_side = tokenizer.padding_side
        assert_same(tokenizer, other)
        if changed:
            assert other.convert_tokens_to_ids(["<new>", "<end>", BOUNDARY]) == [65530, 65531, 0]
            assert other.eos_token_id == 65531
    loaded[RwkvWorldTokenizerFast].save_pretrained(tmp_path / "again")
    again = RwkvWorldTokenizerFast.from_pretrained(tmp_path / "again")
    again.padding_side = tokenizer.padding_side
    assert_same(tokenizer, again)


def test_directories_of_the_class_in_python(tmp_path):
    """Earlier versions had two classes. What either saved loads as the only one, whichever is asked for."""
    shutil.copy(WORLD_VOCAB_FILE, tmp_path)
    settings = {
        "added_tokens_decoder": {
            "0": {"content": BOUNDARY, "normalized": False, "special": True},
            "65530": {"content": "<new>", "normalized": True, "special": False},
            "65531": {"content": "<end>", "normalized": False, "special": True},
        },
        "backend": "custom",
        **{"bos_token": BOUNDARY, "eos_token": "<end>", "pad_token": BOUNDARY, "unk_token": None},
        "special_tokens_pattern": "bos",
        "tokenizer_class": "RwkvWorldTokenizer",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text('{"<end>": 65531, "<new>": 65530}')
    (tmp_path / "chat_template.jinja").write_text("{% generation %}{{ messages | select }}{% endgeneration %}")
    for cls in (AutoTokenizer, RwkvWorldTokenizer, RwkvWorldTokenizerFast):
        tokenizer = cls.from_pretrained(tmp_path, use_fast=False)
        assert type(tokenizer) is RwkvWorldTokenizerFast and tokenizer.is_fast
        assert tokenizer("a<new><end>").input_ids == [0, 98, 65530, 65531]
        assert tokenizer.eos_token_id == 65531 and tokenizer.chat_template.startswith("{% generation %}")


@pytest.mark.parametrize("text", ["用户：", "龘", "😀", "User:"])
def test_texts_that_end_an_answer(text, tmp_path):
    """A stop string may be several tokens, and parts of characters."""
    world = small_world(tmp_path)
    ids = world.encode(f"好的。{text}")
    stop = StopStringCriteria(world, [text])
    assert stop(torch.tensor([ids]), None).all() and not stop(torch.tensor([ids[:-1]]), None).any()


@pytest.fixture
def model_directory(tmp_path):
    """What a converted model has: a configuration and the vocabulary."""

    def make(model_type, **config):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
        shutil.copy(WORLD_VOCAB_FILE, tmp_path)
        return tmp_path

    return make


@pytest.mark.fast
def test_auto_tokenizer_of_a_model(model_directory, world):
    directory = model_directory("rwkv6")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert type(tokenizer) is RwkvWorldTokenizerFast
    assert_same(world, tokenizer)
    assert_same(world, RwkvWorldTokenizerFast.from_pretrained(directory))
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="right", eos_token="<end>")
    assert tokenizer.padding_side == "right" and tokenizer.eos_token_id == 65530


@pytest.mark.fast
@pytest.mark.parametrize(
    "name, file", [("Rwkv6Tokenizer", "rwkv_vocab_v20230424.txt"), ("Rwkv5Tokenizer", "vocab.txt")]
)
def test_published_repository(name, file, model_directory, world):
    """As on the Hub: the repository's own class, another spelling of id 0, perhaps another vocabulary file."""
    directory = model_directory("rwkv6")
    (directory / "rwkv_vocab_v20230424.txt").rename(directory / file)
    (directory / "added_tokens.json").write_text('{"<s>": 0}')
    special = {"bos_token": "<s>", "eos_token": "<s>", "unk_token": "<s>"}
    (directory / "special_tokens_map.json").write_text(json.dumps(special))
    auto_map = {"AutoTokenizer": [f"hf_rwkv_tokenizer.{name}", None]}
    settings = {"tokenizer_class": name, "auto_map": auto_map, "use_fast": False, "add_prefix_space": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | special))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert type(tokenizer) is RwkvWorldTokenizerFast
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert len(tokenizer) == 65530
    assert tokenizer.encode("a<s> b") == [*world.encode("a"), 0, *world.encode(" b")]
    if file.startswith("rwkv"):
        assert RwkvWorldTokenizerFast.from_pretrained(directory).encode("a<s> b") == tokenizer.encode("a<s> b")
    tokenizer.save_pretrained(directory / "again")
    again = AutoTokenizer.from_pretrained(directory / "again")
    assert again.encode("a<s> b") == tokenizer.encode("a<s> b") and again.pad_token_id == 0


@pytest.mark.parametrize("whole", [False, True], ids=["vocabulary", "tokenizer.json"])
def test_a_blank_line_is_no_special_token(whole, model_directory, world):
    """As in repositories of Goose whose EOS token it is: an added token with the id 65530, which no model has seen."""
    directory = model_directory("rwkv7")
    settings = {
        "tokenizer_class": "RwkvTokenizer",
        "auto_map": {"AutoTokenizer": ["hf_rwkv_tokenizer.RwkvTokenizer", None]},
        **dict.fromkeys(("bos_token", "unk_token", "pad_token"), "<|rwkv_tokenizer_end_of_text|>"),
        "eos_token": "\n\n",
        "added_tokens_decoder": {
            "0": {"content": "<|rwkv_tokenizer_end_of_text|>", "special": True},
            "65530": {"content": "\n\n", "special": True},
        },
    }
    if whole:
        tokenizer = RwkvWorldTokenizerFast(eos_token="<|end|>")
        assert tokenizer.eos_token_id == 65530
        tokenizer.save_pretrained(directory)
        text = (directory / "tokenizer.json").read_text(encoding="utf-8").replace('"<|end|>"', '"\\n\\n"')
        (directory / "tokenizer.json").write_text(text, encoding="utf-8")
        settings = {"tokenizer_class": "RwkvWorldTokenizerFast", "eos_token": "\n\n"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "User: a\n\nAssistant:"
    assert tokenizer.encode(text) == world.encode(text) and 261 in tokenizer.encode(text)
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 0 and len(tokenizer) == 65530
    if not whole:
        assert RwkvWorldTokenizerFast.from_pretrained(directory).encode(text) == world.encode(text)


def test_directory_without_vocabulary(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "rwkv6", "vocab_size": 128}')
    for cls in (RwkvWorldTokenizerFast, AutoTokenizer):
        with pytest.raises(ValueError, match=r"has no rwkv_vocab_v20230424\.txt"):
            cls.from_pretrained(tmp_path)


def test_damaged_vocabulary(model_directory):
    directory = model_directory("rwkv6")
    lines = (directory / "rwkv_vocab_v20230424.txt").read_text(encoding="utf-8").split("\n")
    lines[299] = lines[299].replace(" ", "  ")
    (directory / "rwkv_vocab_v20230424.txt").write_text("\n".join(lines), encoding="utf-8")
    for cls in (RwkvWorldTokenizerFast, AutoTokenizer):
        with pytest.raises(ValueError, match=r"rwkv_vocab_v20230424\.txt, line 300"):
            cls.from_pretrained(directory)


def test_small_vocabulary_of_ones_own(tmp_path):
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"abcd", b"]-[", b"^-\\", "é".encode()]
    write_vocabulary(tokens, tmp_path / "small.txt")
    tokenizer = RwkvWorldTokenizerFast(vocab_file=str(tmp_path / "small.txt"))
    assert tokenizer.vocab_size == 262
    ids = tokenizer.encode("abcabcd]-[^-\\é(")
    assert ids == [257, 100, 258, 259, 260, 261, 41] == tokenizer.encode_bytes("abcabcd]-[^-\\é(".encode())
    assert tokenizer.decode(ids) == "abcabcd]-[^-\\é("


def test_import_is_light():
    program = (
        "import sys, subquad_tokenizers; subquad_tokenizers.read_vocabulary, subquad_tokenizers.GreedyEncoder\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.fast
def test_pickle_and_deepcopy(world):
    for other in (pickle.loads(pickle.dumps(world)), copy.deepcopy(world)):
        assert_same(world, other)
        other.add_tokens(["<new>"])
        assert other.encode("<new>") == [65530] and world.encode("<new>") != [65530]


# Chat


def call(**function):
    return {"role": "assistant", "tool_calls": [{"function": function}]}


def test_chat_template_of_odd_messages(world):
    render = world.apply_chat_template
    assert render([{"role": "user", "content": ""}], tokenize=False) == "User:\n\n"
    assert render([{"role": "assistant", "content": None}], tokenize=False) == "Assistant:\n\n"
    for result in ({"a": 1}, [1, "é"], ["a", "b"], [{"a": 1}], 3):  # of a tool
        text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
        assert render([{"role": "tool", "content": result}], tokenize=False) == f"User: Function output:\n{text}\n\n"
    for message, error in (
        ({"role": "judge", "content": "x"}, "The role judge is none of system, user, assistant and tool"),
        ({"role": "user", "content": [{"type": "image"}]}, "The type image is not text"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}, {"text": "y"}]}, 'A part .*:"y".* no type'),
        ({"role": "user", "content": {"a": 1}}, 'The content {"a":1} is neither a text nor a list of texts'),
        ({"role": "user", "content": 3}, "The content 3 is neither"),
        (call(arguments={}), r'The call {"function":{"arguments":{}}} has no name'),
        (call(name=3), "has no name"),
        (call(name="f", arguments=[1]), r"The arguments of the call .*\[1\].* are neither an object nor a string"),
    ):
        with pytest.raises(Exception, match=error):
            render([message], tokenize=False)
    for texts in (["a", " b"], [{"type": "text", "text": "a"}, " b"]):
        assert render([{"role": "user", "content": texts}], tokenize=False) == "User: a b\n\n"
    batch = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b c d"}]]
    encoded = render(batch, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
    assert encoded["input_ids"].shape == encoded["attention_mask"].shape
    assert encoded["input_ids"][0, 0] == 0


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def schema(name, description, **properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties][:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SYSTEM = {"role": "system", "content": "Be brief."}
WEATHER = schema("weather", "Tells <it>.", city={"type": "string"}, unit={"enum": ["C", "F"]})
TIME = schema("time", "Tells it.", at={"type": ["string", "null"]})
ASKED = {
    **assistant(None),
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": [1, 2]}}}
    ],
}
RESULT = {"role": "tool", "content": {"sky": "blue", "wind": None}}
LISTED = (
    "System: Tools:\n[\n"
    '{"name":"weather","description":"Tells <it>.","arguments":{"city":{"type":"string"},"unit":{"enum":["C","F"]}}},'
    "\n"
    '{"name":"time","description":"Tells it.","arguments":{"at":{"type":["string","null"]}}}\n'
    "]\nReturn only a JSON function call.\n\n"
)
SIGNATURES = (
    'System: Tools:\n- weather(city: string, unit?: "C" | "F")\n- time(at: string | null)\n'
    "Return only a JSON function call.\n\n"
)
ASKING = 'User: Why?\n\nAssistant: ```json\n{"name":"weather","arguments":{"city":"Oslo","days":[1,2]}}\n```\n\n'
BEGUN = [5585, 41693, 59]  # `Assistant:`
OFFICIAL = {
    "one turn": ([user("Why?")], {}, "User: Why?\n\nAssistant:", BEGUN),
    "turns": (
        [user("Why?"), assistant("So.\n\nThus."), user("And?")],
        {},
        "User: Why?\n\nAssistant: So.\n\nThus.\n\nUser: And?\n\nAssistant:",
        BEGUN,
    ),
    "a system's": ([SYSTEM, user("Why?")], {}, "System: Be brief.\n\nUser: Why?\n\nAssistant:", BEGUN),
    "think": ([user("Why?")], {"thinking": True}, "User: Why?\n\nAssistant: <think", [*BEGUN, 295, 35762]),
    "think a bit": (
        [user("Why? (think a bit)")],
        {"enable_thinking": True},
        "User: Why? (think a bit)\n\nAssistant: <think",
        [*BEGUN, 295, 35762],
    ),
    "no thoughts": (
        [user("Why?")],
        {"thinking": False},
        "User: Why?\n\nAssistant: <think></think",
        [*BEGUN, 295, 35762, 5439, 35762],
    ),
    "no thoughts, in 2025": (
        [user("Why?")],
        {"enable_thinking": False, "style": "2025"},
        "User: Why?\n\nAssistant: <think>\n</think",
        [*BEGUN, 295, 35762, 63, 11, 754, 35762],
    ),
    "tools": (
        [user("Why?")],
        {"tools": [WEATHER, TIME]},
        f"{LISTED}User: Why?\n\nAssistant: ```json",
        [*BEGUN, 21214, 26060],
    ),
    "signatures": (
        [user("Why?")],
        {"tools": [WEATHER, TIME], "tool_style": "signatures", "thinking": False},
        f"{SIGNATURES}User: Why?\n\nAssistant: ```json",
        [*BEGUN, 21214, 26060],
    ),
    "tools and thoughts": (
        [user("Why?")],
        {"tools": [WEATHER, TIME], "thinking": True},
        f"{LISTED}User: Why?\n\nAssistant: <think",
        [*BEGUN, 295, 35762],
    ),
    "a result": (
        [user("Why?"), ASKED, RESULT],
        {"tools": [WEATHER, TIME]},
        f'{LISTED}{ASKING}User: Function output:\n{{"sky":"blue","wind":null}}\n\nAssistant: ```json',
        [*BEGUN, 21214, 26060],
    ),
    "clean texts": (
        [
            {"role": "system", "content": "\nBe\r\n\r\nbrief. "},
            user(" Why\n\n\nso?\n"),
            assistant("A\r\n\r\n\nB"),
            user("C"),
        ],
        {},
        "System: Be\nbrief.\n\nUser: Why\nso?\n\nAssistant: A\r\n\r\n\nB\n\nUser: C\n\nAssistant:",
        BEGUN,
    ),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", OFFICIAL)
def test_official_prompts(name, world, reference):
    messages, options, expected, last = OFFICIAL[name]
    assert world.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options) == expected
    ids = world.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
    assert ids == reference.encode(expected) and ids[-len(last) :] == last


def test_chat_template_of_thoughts(world):
    for options, error in (
        ({"thinking": "a bit"}, '`thinking` is "a bit", which is none of true, false and null'),
        ({"enable_thinking": []}, r"`thinking` is \[\], which is none"),
        ({"style": "g1"}, '`style` is "g1", which is neither "2026" nor "2025"'),
        ({"tool_style": "xml"}, '`tool_style` is "xml", which is neither "json" nor "signatures"'),
    ):
        with pytest.raises(Exception, match=error):
            world.apply_chat_template([user("Why?")], tokenize=False, **options)
    # A name that is not known would be rendered as the text.
    several = RwkvWorldTokenizerFast(
        chat_template={"default": world.chat_template, "short": "{{ messages[0].content }}"}
    )
    assert several.apply_chat_template([user("Why?")], chat_template="short", tokenize=False) == "Why?"
    assert several.response_template is not None and several.stop_strings
    for tokenizer, names in ((several, "'default', 'short'"), (world, "no named ones")):
        with pytest.raises(ValueError, match=f"`chat_template` 'g1' is neither .* the tokenizer has {names}"):
            tokenizer.apply_chat_template([user("Why?")], chat_template="g1")


@pytest.mark.parametrize("text", ["", "Sure: ", "```python\n", "Sure:\n\n1.", "def f():\n    "])
def test_an_answer_that_is_continued(text, tmp_path):
    """The prompt ends with the beginning of the answer as it is given, also without this package."""
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    world = small_world(tmp_path)
    world.save_pretrained(tmp_path)
    for tokenizer in (world, PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True)
        assert prompt == f"User: Hi\n\nAssistant:{' ' if text else ''}{text}"
        chat[1]["content"] = [{"type": "text", "text": text}]
    thought = [chat[0], {"role": "assistant", "content": "", "reasoning_content": f"One.\n\n{text}"}]
    prompt = world.apply_chat_template(thought, tokenize=False, continue_final_message="reasoning_content")
    assert prompt == f"User: Hi\n\nAssistant: <think>One.\n\n{text}"


def test_chat_template_of_tools(world):
    def add(a: int, b: list[str] = ()):
        """
        Adds.

        Args:
            a: One.
            b: Another.
        """

    def render(messages, *tools, **options):
        return world.apply_chat_template(messages, tools=tools, tokenize=False, **options)

    turns = [user("1 + 2?"), call(name="add", arguments={"a": 1, "b": 2}), assistant("It is 3.")]
    turns[1]["content"] = "I ask."
    rest = 'User: 1 + 2?\n\nAssistant: I ask.\n```json\n{"name":"add","arguments":{"a":1,"b":2}}\n```\n\n'
    rest += "Assistant: It is 3.\n\n"
    arguments = '{"a":{"type":"integer","description":"One."},'
    arguments += '"b":{"type":"array","items":{"type":"string"},"description":"Another."}}'
    tools = f'Tools:\n[\n{{"name":"add","description":"Adds.","arguments":{arguments}}}\n]\n'
    tools += "Return only a JSON function call.\n\n"
    assert render(turns, add) == f"System: {tools}{rest}"
    assert render([SYSTEM, *turns], add) == f"System: Be brief.\n{tools}{rest}"
    assert world.apply_chat_template([SYSTEM, *turns], tokenize=False) == f"System: Be brief.\n\n{rest}"
    bare = {"name": "now"}
    assert '\n[\n{"name":"now","arguments":{}}\n]\n' in render(turns, bare)
    assert "\n- now()\n- add(a: integer, b?: array)\n" in render(turns, bare, add, tool_style="signatures")
    for tool in ({}, {"function": {}}, {"name": 3}, {"name": "f", "parameters": {"a": {"type": "string"}}}):
        with pytest.raises(Exception, match="The tool {.*} is not a JSON schema of a function"):
            render(turns, tool)
    for parameters in ([], ["a"], {"properties": ["a"]}):
        if parameters:
            with pytest.raises(Exception, match="is not a JSON schema"):
                render(turns, {"name": "f", "parameters": parameters})


@pytest.mark.parametrize("kind", ["as made", "saved", "of an earlier version"])
def test_assistant_mask(kind, tmp_path):
    """Files have the marks of an assistant's turn in comments, or not, as earlier versions and others write them."""
    world = small_world(tmp_path)
    world.save_pretrained(tmp_path)
    if kind == "of an earlier version":
        template = (tmp_path / "chat_template.jinja").read_text(encoding="utf-8")
        template = template.replace("{#- {% generation %} -#}", "{%- generation -%}")
        template = template.replace("{#- {% endgeneration %} -#}", "{%- endgeneration -%}")
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = world if kind == "as made" else AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    encoded = tokenizer.apply_chat_template(messages * 2, return_dict=True, return_assistant_tokens_mask=True)
    answer = [index for index, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert world.decode(answer) == " Hello there\n\n" * 2
    assert encoded["input_ids"] == tokenizer.apply_chat_template(messages * 2, return_dict=False)


CALL = '```json\n{"name":"add","arguments":{"a":{"b":2}}}\n```'
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": {"b": 2}}}}]
TURNED = '{"arguments": {"a": {"b": 2}}, "id": "c}1", "name": "add"}'
NUMBERED = '{ "name" : "add", "arguments":{"a":{"b":2}},"id":[1, -2.5e3, null] }'


@pytest.mark.fast
@pytest.mark.parametrize(
    ("thinking", "answer", "message"),
    [
        (None, " Hello.\n\nHow are you?\n\nUser: Well", {"content": "Hello.\n\nHow are you?"}),
        (None, " Hello.\n\nSystem:", {"content": "Hello."}),
        (None, " Hello, User: you.\n\n", {"content": "Hello, User: you."}),
        (None, " A <think>.</think>" + BOUNDARY, {"content": "A <think>.</think>"}),
        (None, BOUNDARY, {}),
        (True, ">First.\n\nThen.</think>\n\nSo.", {"reasoning_content": "First.\n\nThen.", "content": "So."}),
        (True, ">First.\n\nUser:", {"reasoning_content": "First."}),
        (True, ">\nFirst. \n</think>\nSo. " + BOUNDARY, {"reasoning_content": "\nFirst. \n", "content": "\nSo. "}),
        (False, ">\n\nSo." + BOUNDARY, {"reasoning_content": "", "content": "So."}),
        (False, ">\n\nUser:", {"reasoning_content": ""}),
        (None, f" I ask.\n{CALL}\n\nUser:", {"content": "I ask.", "tool_calls": CALLS}),
        (None, f" {CALL}\n{CALL}\nWait.{BOUNDARY}", {"content": "Wait.", "tool_calls": CALLS * 2}),
        (None, f" ```json\n{TURNED}\n```\n\n", {"tool_calls": CALLS}),
        (None, f" ```json\n{NUMBERED}\n\nUser:", {"tool_calls": CALLS}),
        (None, f" <tool_call>\n{NUMBERED}\n</tool_call>{BOUNDARY}", {"tool_calls": CALLS}),
        (None, f" So:\n**Tool Call:**\n{CALL}\n\nUser:", {"content": "So:", "tool_calls": CALLS}),
        (None, f" **Tool Call:** {TURNED}", {"tool_calls": CALLS}),
        (None, f" I ask.\n{TURNED}\n{NUMBERED}", {"content": "I ask.", "tool_calls": CALLS * 2}),
        (None, f" ```json\n[{TURNED},\n {NUMBERED}]\n``", {"tool_calls": CALLS * 2}),
        ("call", f"\n{NUMBERED}\n```\n\nUser:", {"tool_calls": CALLS}),
        ("call", f"\n{TURNED}\n{NUMBERED}\n```", {"tool_calls": CALLS * 2}),
        ("call", '\n{"a": 1}\n```\n\nUser:', {"content": '```json\n{"a": 1}\n```'}),
        *(
            (None, f" {text}\n\nUser:", {"content": text})  # which is no call
            for text in (
                CALL[:-8],
                '```json\n{"a": 1}\n```',
                '```json\n{"name": "add", "arguments": {"a": 01}}\n```',
                '```json\n{"name": "add", "arguments": "{}"}\n```',
                '```json\n{"name": "add", "arguments": {}, "name": 3}\n```',
                f"It is {TURNED} there.",
            )
        ),
    ],
)
def test_responses(world, thinking, answer, message):
    """The answer to a prompt as a message, read at once or letter by letter."""
    options = {None: {}, "call": {"tools": [WEATHER]}}.get(thinking, {"thinking": thinking})
    chat = [{"role": "user", "content": "Assistant: <think>"}]
    prompt = world.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options)
    message = {"role": "assistant", "reasoning_content": None, **message}
    assert world.parse_response(answer, prefix=prompt) == message
    assert world.parse_response(world.encode(answer), prefix=world.encode(prompt)) == message
    assert letter_by_letter(world, answer, prompt) == message


def test_a_call_is_streamed_when_it_is_complete(world):
    parser = world.get_response_parser(prefix="Assistant: ```json")
    text, seen = f"\n{NUMBERED}\n{TURNED}\n", []
    for count, letter in enumerate(text, 1):
        seen += [(count, event["type"]) for event in parser.feed(letter) if event["type"] == "region_close"]
    assert seen == [(len(f"\n{NUMBERED}\n{{"), "region_close")]
    assert parser.finalize()[0]["tool_calls"] == CALLS * 2


def letter_by_letter(world, answer, prompt):
    parser = world.get_response_parser(prefix=prompt)
    for letter in answer:
        parser.feed(letter)
    return parser.finalize()[0]


def dump(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize(
    ("thinking", "answer"),
    [
        (None, f" I ask.\n{CALL}\n\n"),
        (None, f" {CALL}\n{CALL.replace('2', '[1.5,null,true]')}\n\n"),
        (None, f" {CALL.replace('2', json.dumps('<é> & x' + chr(10), ensure_ascii=False))}\n\n"),
        (None, ' ```json\n{"name":"now","arguments":{}}\n```\n\n'),
        (None, " Two lines:\n\n1. one\n\n    code\n\n"),
        (None, "\n\n  Two lines:\n\n1. one\n\n"),
        (True, f">First.\n\nThen.</think>\nI ask.\n{CALL}\n\n"),
        (True, ">First.</think>\nSo.\n\n"),
        (True, "> \nFirst.\n\n</think>\n\n\n So.\n\n"),
        (True, f">First.</think>\n{CALL}\n\n"),
        (True, f">First.</think>\n\n{CALL}\n\n"),
        (True, "></think>\n\nSo.\n\n"),
        (False, ">\n\nSo.\n\n"),
        (False, "> So.\n\n"),
        (False, f">\n{CALL}\n\n"),
        (None, " <think></think>\n\nSo.\n\n"),
        (None, f" I ask: \n\n\n{CALL}\n{CALL}\n\n"),
        (None, " A  \n\n B  \n\n"),
        ("call", CALL.removeprefix("```json") + "\n\n"),
        ("2025", ">\n\nSo.\n\n"),
    ],
)
def test_a_response_goes_on(thinking, answer, world):
    """The message of a response makes the same turn as the model wrote, with the arguments of calls in either form."""
    chat = [{"role": "user", "content": "1 + 2?"}]
    odd = {None: {}, "call": {"tools": [WEATHER]}, "2025": {"thinking": False, "style": "2025"}}
    options = odd.get(thinking, {"thinking": thinking})
    prompt = world.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options)
    message = world.parse_response(answer, prefix=prompt)
    assert letter_by_letter(world, answer, prompt) == message
    turns, options["tools"] = [*chat, message], options.get("tools")
    assert world.apply_chat_template(turns, tokenize=False, **options) == prompt + answer
    for call in message.get("tool_calls", []):
        call["function"]["arguments"] = dump(call["function"]["arguments"])
    assert world.apply_chat_template(turns, tokenize=False, **options) == prompt + answer
    # As tokens, so that the states of the earlier turns are found again.
    ids = world.apply_chat_template([*turns, user("And?")], return_dict=False, **options)
    generated = world.encode(prompt) + world.encode(answer)
    assert ids[: len(generated)] == generated


def test_arguments_of_a_call_as_they_are_written(world):
    """OpenAI's messages have them as a string, which is not encoded again."""
    calls = [{"type": "function", "function": {"name": "add", "arguments": text}} for text in ('{"a":1,  "b":2}', "")]
    text = world.apply_chat_template([{"role": "assistant", "content": None, "tool_calls": calls}], tokenize=False)
    written = ('{"name":"add","arguments":{"a":1,  "b":2}}', '{"name":"add","arguments":{}}')
    assert text == "Assistant: " + "\n".join(f"```json\n{call}\n```" for call in written) + "\n\n"


def test_response_template_of_other_files(tmp_path):
    """It belongs to the turns of World, is saved, and knows the spelling of id 0."""
    assert small_world(tmp_path, chat_template=None).response_template is None
    assert small_world(tmp_path, chat_template="{{ messages[0].content }}").response_template is None
    assert small_world(tmp_path, response_template={}).response_template == {}
    small_world(tmp_path, added_tokens_decoder={0: AddedToken("<s>")}).save_pretrained(tmp_path)
    loaded = RwkvWorldTokenizerFast.from_pretrained(tmp_path)
    assert loaded.parse_response(" <s", prefix="Assistant:")["content"] == "<s"
    assert loaded.parse_response(" x<s>", prefix="Assistant:")["content"] == "x"


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (True, True)])
def test_what_is_added_to_a_text_is_saved(bos, eos, tmp_path):
    cls = RwkvWorldTokenizerFast
    plain, tokenizer = small_world(tmp_path), small_world(tmp_path, add_bos_token=bos, add_eos_token=eos)
    tokenizer.save_pretrained(tmp_path)
    one, two = plain("one").input_ids, plain("two").input_ids
    begin, end = [0] * bos, [0] * eos
    for other in (tokenizer, cls.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert (other.add_bos_token, other.add_eos_token) == (bos, eos)
        assert other("one").input_ids == [*begin, *one, *end]
        pair = other("one", "two", return_special_tokens_mask=True)
        assert pair.input_ids == [*begin, *one, *end, *begin, *two, *end]
        assert pair.special_tokens_mask == [int(index == 0) for index in pair.input_ids]
        assert other("one", add_special_tokens=False).input_ids == one
        assert other("").input_ids == [*begin, *end]
        assert other.apply_chat_template([user("Hi")], return_dict=False)[0] != 0
    changed = cls.from_pretrained(tmp_path)
    changed.add_bos_token, changed.add_eos_token = not bos, not eos
    assert changed("one").input_ids == [*([0] * (not bos)), *one, *([0] * (not eos))]
    changed.save_pretrained(tmp_path / "changed")
    assert cls.from_pretrained(tmp_path / "changed")("one").input_ids == changed("one").input_ids
    assert cls.from_pretrained(tmp_path, add_bos_token=False, add_eos_token=False)("one").input_ids == one


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}])
def test_added_tokens_that_take_spaces(flags, tmp_path):
    texts = ("a <m> b", "<m>", "a<m>b", "  <m>  <m> ", "\n<m>\n", "a <n> <m>")
    tokenizer = small_world(tmp_path)
    tokenizer.add_tokens([AddedToken("<m>", **flags), "<n>"])
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer(list(texts)).input_ids
    assert RwkvWorldTokenizerFast.from_pretrained(tmp_path)(list(texts)).input_ids == ids
    assert tokenizer.decode(ids[0]) == f"a{'' if 'lstrip' in flags else ' '}<m>{'' if 'rstrip' in flags else ' '}b"
    spaces = sum("strip" in flag for flag in flags)
    assert len(ids[4]) == 3 - spaces and len(ids[5]) == (4 if "lstrip" in flags else 5)


# Streams


class Pieces(TextStreamer):
    def __init__(self, tokenizer, **kwargs):
        super().__init__(tokenizer, **kwargs)
        self.pieces = []

    def on_finalized_text(self, text, stream_end=False):
        self.pieces.append(text)


@pytest.mark.parametrize("text", ["emoji", "hindi", "unicode"], indirect=True)
def test_streaming_never_shows_half_a_character(world, text):
    streamer = Pieces(world)
    for index in world.encode(text)[:3000]:
        streamer.put(torch.tensor([index]))
    streamer.end()
    shown = "".join(streamer.pieces)
    if len(world.encode(text)) <= 3000:
        assert shown == text
    assert shown.count("\ufffd") <= text.count("\ufffd") + 3  # what was cut off at the end


@pytest.mark.fast
def test_streaming_byte_by_byte(world):
    text = "Wörter 中文 🎉👍🏽 and\nmore 🇫🇷"
    streamer = TextIteratorStreamer(world, skip_prompt=True, skip_special_tokens=True)
    streamer.put(torch.tensor([[1, 2, 3]]))
    for byte in text.encode():
        streamer.put(torch.tensor([byte + 1]))
    streamer.put(torch.tensor([0]))
    streamer.end()
    pieces = list(streamer)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 5
