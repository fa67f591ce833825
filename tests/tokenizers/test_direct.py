"""Calls by the compiled encoder: the same as by the tokenizers library, for all options and all added tokens."""

import copy
import gc
import itertools
import pickle
import random
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tokenizers
from datasets import Dataset
from transformers import AddedToken, BatchEncoding, PreTrainedTokenizerFast

from subquad_tokenizers import WORLD_VOCAB_FILE, RwkvWorldTokenizerFast, greedy, read_vocabulary, write_vocabulary
from subquad_tokenizers.direct import Direct, Encoding


needs_library = pytest.mark.skipif(
    greedy._COMPILED.get() is None and "no C compiler" in greedy._COMPILED.explain()[1],
    reason="there is no C compiler",
)
pytestmark = needs_library
BOUNDARY = "<|endoftext|>"
# Texts with the tokens of `ADDED`, whole, cut and next to each other, and characters of several tokens.
TEXTS = [
    "",
    "a",
    "The quick brown fox, 12345.\n\n",
    f"one{BOUNDARY}two {BOUNDARY}{BOUNDARY} three",
    "größer <tool> x<tool>> two words<tool>größer",
    "🎉👨‍👩‍👧‍👦 龘靐 a\u0301 \u200d\ufeff",
    f"{BOUNDARY[:-1]} <tool{BOUNDARY}> <<tool>> two  words",
    "日本語のテスト" * 9 + f" <end>{BOUNDARY}",
]
ADDED = [
    [],
    ["<tool>", "<tool>>", "two words", "größer"],
    [AddedToken("<tool>", special=True, normalized=False), "tool", AddedToken("<end>", normalized=False), "🎉"],
    [AddedToken("<tool>", lstrip=True, special=True), AddedToken("two", single_word=True), "quick"],
    # Words of the vocabulary, also as it writes them.
    ["the", " fox", AddedToken("one", special=True), "ĊĊ", "Ġtwo", "1234"],
    # More than are looked for one by one.
    [
        *"🎉龘<|>",
        "<tool>",
        "tool>",
        "two  words",
        AddedToken("größ", normalized=False),
        AddedToken("o", special=True),
        "ex",
    ],
]
# Longer tokens of the vocabulary here are those in these bytes.
LETTERS = "\n".join([*TEXTS, "some words and more", "one two three four five six"]).encode()
OPTIONS = {
    "padding": [False, True, "max_length"],
    "truncation": [False, True, "only_first"],
    "max_length": [None, 1, 5, 12],
    "padding_side": [None, "right"],
    "pad_to_multiple_of": [None, 4],
    "add_special_tokens": [True, False],
    "split_special_tokens": [False, True],
    "return_tensors": [None, "np"],
    "return_attention_mask": [None, False],
    "return_special_tokens_mask": [False, True],
    "return_offsets_mapping": [False, True],
    "return_length": [False, True],
}
# Options that only the library knows.
OTHER = {
    "stride": [0, 1],
    "return_overflowing_tokens": [False, True],
    "return_token_type_ids": [None, False, True],
}


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory):
    """A function that makes a tokenizer, and the same in a class that has transformers' own calls."""
    words = [
        token for token in read_vocabulary(WORLD_VOCAB_FILE) if len(token) < 3 or (len(token) > 3 and token in LETTERS)
    ]
    path = tmp_path_factory.mktemp("small") / "vocabulary.txt"
    write_vocabulary(words, path)

    def make(added=(), **settings):
        tokenizer = RwkvWorldTokenizerFast(vocab_file=str(path), **settings)
        tokenizer.add_tokens(list(added))
        names = ("bos_token", "eos_token", "pad_token", "padding_side", "truncation_side", "model_max_length")
        other = PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()),
            model_input_names=tokenizer.model_input_names,
            clean_up_tokenization_spaces=False,
            **{name: getattr(tokenizer, name) for name in names},
        )
        other.backend_tokenizer.post_processor = tokenizer.backend_tokenizer.post_processor
        return tokenizer, other

    return make


@pytest.fixture(scope="module", params=range(len(ADDED)))
def pair(request, make_pair):
    begin, end, left = {"add_bos_token": True}, {"add_eos_token": True}, {"truncation_side": "left"}
    return make_pair(ADDED[request.param], **[{}, begin, left, {}, begin | end, begin | left][request.param])


def outcome(call, *arguments, **options):
    """What a call returns, or the type of its error."""
    try:
        return call(*arguments, **options)
    except BaseException as error:  # an error of Rust is no `Exception`
        return type(error)


def plain(value):
    """Without arrays, also without those in ragged ones."""
    if isinstance(value, BatchEncoding):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | np.ndarray) else value


def read_all(encoding):
    """What can be read from an encoding."""
    attributes = ("ids", "type_ids", "tokens", "attention_mask", "special_tokens_mask", "offsets", "word_ids")
    found = {name: getattr(encoding, name) for name in (*attributes, "sequence_ids", "n_sequences")}
    for name in ("token_to_chars", "token_to_word", "token_to_sequence"):
        found[name] = [getattr(encoding, name)(index) for index in range(len(encoding.ids))]
    for name in ("char_to_token", "char_to_word", "word_to_tokens", "word_to_chars"):
        found[name] = [getattr(encoding, name)(index) for index in range(70)]
    return found | {"length": len(encoding)}


def assert_same(ours, others, encodings=True):
    assert type(ours) is type(others) or not isinstance(ours, type | dict), (ours, others)
    if isinstance(ours, type):
        assert ours is others
        return
    assert list(ours) == list(others) and plain(ours) == plain(others)
    assert ours.n_sequences == others.n_sequences and len(ours.encodings) == len(others.encodings)
    for one, other in zip(ours.encodings, others.encodings, strict=True) if encodings else ():
        assert read_all(one) == read_all(other)


@pytest.mark.parametrize("seed", range(3))
def test_every_call_gives_what_the_library_gives(seed, pair):
    tokenizer, other = pair
    rng = random.Random(seed)
    direct = 0
    for _ in range(120):
        options = {name: rng.choice(values) for name, values in OPTIONS.items()}
        options |= {name: rng.choice(values) for name, values in OTHER.items() if rng.random() < 0.1}
        texts = rng.choices(TEXTS, k=rng.randrange(1, 4))
        text = rng.choice([texts[0], texts, tuple(texts)])
        if isinstance(text, str) and rng.random() < 0.1:
            options["text_pair"] = texts[-1]
        ours, others = outcome(tokenizer, text, **options), outcome(other, text, **options)
        assert_same(ours, others)
        direct += not isinstance(ours, type) and isinstance(ours.encodings[0], Encoding)
        assert outcome(tokenizer.encode, texts[0], **options) is not None
        for name in ("truncation", "padding", "encode_special_tokens"):
            assert getattr(tokenizer.backend_tokenizer, name) == getattr(other.backend_tokenizer, name)
    assert direct > 30  # most options are those of a fast call


def test_texts_one_by_one(pair):
    tokenizer, other = pair
    for text, special, split in itertools.product(TEXTS, (True, False), (True, False)):
        options = {"add_special_tokens": special, "split_special_tokens": split}
        assert tokenizer.encode(text, **options) == other.encode(text, **options)
        assert tokenizer.encode(text, None, special) == other.encode(text, None, special)
        ids = other.encode(text, **options)
        assert tokenizer.tokenize(text) == other.tokenize(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == other.decode(ids, skip_special_tokens=skip)


def test_decoding(pair):
    tokenizer, other = pair
    rng = random.Random(0)
    size = len(other)
    rows = [
        [rng.choice([0, 1, 50, 200, 240, size - 1, size, 2**32 - 1, rng.randrange(size)]) for _ in range(9)]
        for _ in range(20)
    ]
    arrays = np.array(rows)
    for skip in (False, True):
        for ids in (
            rows[0],
            rows,
            [rows[0], []],
            [],
            arrays,
            arrays[0],
            tuple(rows[1]),
            rows[0][0],
            arrays[0, 0],
            True,
        ):
            assert tokenizer.decode(ids, skip) == other.decode(ids, skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == other.decode(ids, skip_special_tokens=skip)
        for ids in (rows, [], arrays, [rows[0], []]):
            assert tokenizer.batch_decode(ids, skip) == other.batch_decode(ids, skip)
            assert tokenizer.batch_decode(ids, skip, True) == other.batch_decode(ids, skip, True)
        assert tokenizer.decode({"input_ids": [1]}, skip) == other.decode({"input_ids": [1]}, skip)
    for wrong in ([-1], -1, [1.5], [2**32], ["a"], [[1], [-1]], [[[1]]], [[1], ["a"]], None):
        ours, others = outcome(tokenizer.decode, wrong), outcome(other.decode, wrong)
        assert ours is others or {ours, others} <= {TypeError, OverflowError, ValueError}, (wrong, ours, others)
    with pytest.raises(TypeError, match="unexpected"):
        tokenizer.decode([1], clean=True)


def test_random_texts_with_pieces_of_added_tokens(pair):
    tokenizer, other = pair
    rng = random.Random(0)
    parts = [
        BOUNDARY,
        "<",
        "tool",
        ">",
        "<tool>",
        "größer",
        "two words",
        " ",
        "two",
        "the",
        "Ġtwo",
        "ĊĊ",
        "é",
        "🎉",
        "1234",
    ]
    texts = ["".join(rng.choices(parts, k=rng.randrange(12))) for _ in range(200)]
    for split in (False, True):
        options = {"split_special_tokens": split, "return_offsets_mapping": True}
        assert_same(tokenizer(texts, **options), other(texts, **options), encodings=False)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_as_long_as_its_text(side, make_pair):
    """One token is cut off, and one is put before the text."""
    tokenizer, other = make_pair(truncation_side=side, add_bos_token=True)
    text = "one two three four"
    length = len(tokenizer.encode(text, add_special_tokens=False))
    options = {"truncation": True, "max_length": length, "return_offsets_mapping": True}
    assert len(tokenizer(text, **options).input_ids) == length
    assert_same(tokenizer(text, **options), other(text, **options))


def test_what_is_no_text(pair):
    tokenizer, other = pair
    for text in (
        "\ud800",
        ["a", "\ud800"],
        [],
        [""],
        ["a", 3],
        ("a", "b"),
        [["a", "b"]],
        [("a", "b"), "c"],
        b"a",
        3,
        None,
    ):
        ours, others = outcome(tokenizer, text), outcome(other, text)
        if "\ud800" in str(text).encode("unicode_escape").decode() or ours is UnicodeEncodeError:
            assert isinstance(ours, type) and isinstance(others, type)
        else:
            assert_same(ours, others)
    for options in ({"is_split_into_words": True}, {"return_tensors": "np", "padding": True}):
        assert_same(outcome(tokenizer, ["a b", "c"], **options), outcome(other, ["a b", "c"], **options))
    with pytest.raises(TypeError, match="paddin"):
        tokenizer("a", paddin=None)


def test_a_text_longer_than_the_model_allows(caplog, make_pair):
    tokenizer, _ = make_pair(model_max_length=3)
    assert len(tokenizer("one two three four five six").input_ids) > 3
    assert "longer than the specified maximum" in caplog.text
    assert len(tokenizer("one two three four five six", truncation=True).input_ids) == 3


def changes():
    def add(tokenizer):
        tokenizer.backend_tokenizer.add_tokens(["<tool>"])

    def add_known(tokenizer):
        tokenizer.add_tokens([AddedToken("words", special=True)])

    def normalize(tokenizer):
        parts = [tokenizers.normalizers.Lowercase(), tokenizer.backend_tokenizer.normalizer]
        tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.Sequence(parts)

    def split(tokenizer):
        tokenizer.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()

    def begin(tokenizer):
        template = [("$A", 0), (BOUNDARY, 0), (BOUNDARY, 0)]
        single = " ".join(f"{name}:{kind}" for name, kind in template)
        processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=[(BOUNDARY, 0)])
        tokenizer.backend_tokenizer.post_processor = processor

    def twice(tokenizer):
        tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A:0 $A:0")

    def decode(tokenizer):
        tokenizer.backend_tokenizer.decoder = tokenizers.decoders.Fuse()

    def replace(tokenizer):
        model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
        tokenizer._tokenizer = tokenizers.Tokenizer(model)

    def flag(tokenizer):
        tokenizer.add_bos_token = True

    return [add, add_known, normalize, split, begin, twice, decode, replace, flag]


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_a_changed_backend_is_noticed(change, make_pair):
    tokenizer, other = make_pair()
    text = f"Two words <tool> and{BOUNDARY} more"
    assert_same(tokenizer(text), other(text))
    for each in (tokenizer, other):
        change(each)
    assert_same(tokenizer(text), other(text))
    assert tokenizer.encode(text) == other.encode(text)
    for skip in (False, True):
        assert tokenizer.decode([0, 33, 300], skip) == other.decode([0, 33, 300], skip)


def test_another_vocabulary_and_pipeline(tmp_path):
    """Files of other tokenizers do what is in them, and ids with gaps are not counted anew."""
    vocabulary = {"?": 0, "a": 5, "b": 7}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = RwkvWorldTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert tokenizer("a b").input_ids == [5, 7] and not tokenizer._get_direct()._encodes
    assert tokenizer.decode([5, 7]) == "a b"


# Copies, processes and threads


def test_a_tokenizer_that_was_used_is_pickled_as_before(make_pair):
    tokenizer, _ = make_pair()
    before = pickle.dumps(tokenizer)
    ids = tokenizer("some words").input_ids
    assert tokenizer.decode(ids) == "some words"
    assert pickle.dumps(tokenizer) == before
    for again in (pickle.loads(before), copy.deepcopy(tokenizer), copy.copy(tokenizer)):
        assert again("some words").input_ids == ids and again._encoder is tokenizer._encoder


def test_an_encoding_is_pickled(make_pair):
    tokenizer, other = make_pair(ADDED[1])
    texts = TEXTS[2:5]
    ours = pickle.loads(pickle.dumps(tokenizer(texts, padding=True)))
    others = other(texts, padding=True)
    assert plain(ours) == plain(others)
    assert [*map(read_all, ours.encodings)] == [*map(read_all, others.encodings)]
    assert len(pickle.dumps(ours)) < 20_000


def test_results_are_freed_at_once(make_pair):
    """Without the garbage collector, which may not run for a long time."""
    tokenizer, _ = make_pair()
    encoded = tokenizer(["a", "b"], return_offsets_mapping=True)
    encoded.word_ids(1), encoded.char_to_token(0, 0)
    seen = weakref.ref(encoded.encodings[0])
    gc.disable()
    try:
        del encoded
        assert seen() is None
    finally:
        gc.enable()


def test_a_map_of_several_processes(texts, make_pair):
    tokenizer, _ = make_pair()
    texts = [text[:500] for text in texts] * 2
    data = Dataset.from_dict({"text": texts})
    for num_proc in (None, 2):
        mapped = data.map(lambda row: tokenizer(row["text"]), batched=True, batch_size=8, num_proc=num_proc)
        assert mapped["input_ids"][:] == tokenizer(texts).input_ids


def test_threads(texts, make_pair):
    tokenizer, other = make_pair()
    expected = other(texts).input_ids
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda _: tokenizer(texts).input_ids, range(12)):
            assert found == expected


def test_direct_calls_are_taken(make_pair):
    """What this file compares is not the library with itself."""
    tokenizer, _ = make_pair()
    assert isinstance(tokenizer._get_direct(), Direct) and tokenizer._get_direct()._encodes
    assert isinstance(tokenizer(["a", "b"], padding=True).encodings[1], Encoding)
    assert tokenizer(["a", "b"]).encodings[-1].ids == tokenizer("b").input_ids
    assert [each.ids for each in tokenizer(["a", "b", "c"])[1:]] == [
        tokenizer("b").input_ids,
        tokenizer("c").input_ids,
    ]
