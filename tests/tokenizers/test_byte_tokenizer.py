import copy
import pickle

import pytest
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from subquad_tokenizers import ByteTokenizer


TUNE = "X:1\nT:The Kesh\nM:6/8\nL:1/8\nK:G\n|:~G3 GAB|~A3 ABd|edd gdd|edB dBA:|\n%%MIDI program 1\\\t^c_d=e'"


@pytest.fixture(scope="module")
def tokenizer():
    return ByteTokenizer()


def test_ids_are_ascii_codes(tokenizer):
    everything = "".join(map(chr, range(128)))
    assert tokenizer.encode(everything) == list(range(128))
    assert tokenizer.decode(range(128)) == everything
    assert tokenizer.decode(list(range(128)), skip_special_tokens=True) == everything[1:]
    assert tokenizer.encode(TUNE) == list(TUNE.encode("ascii"))
    assert tokenizer.decode(tokenizer.encode(TUNE)) == TUNE
    assert tokenizer.encode("") == []
    assert tokenizer.vocab_size == len(tokenizer) == 128
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == 0


@pytest.mark.parametrize(
    "text, spelling",
    [
        ("Éamonn Ó Súilleabháin", "Eamonn O Suilleabhain"),
        ("O’Carolan’s “Concerto” – 1¾", "O'Carolan's \"Concerto\" - 13/4"),
        ("B♭ F♯ e♮…", "Bb F# e=..."),
        ("Så länge, Ærø, Łódź, Straße, ﬁne", "Sa lange, AEro, Lodz, Strasse, fine"),
        ("ǿ Ǽ", "o AE"),
        ("𝄞中文\u00a0a", "??? a"),
    ],
)
def test_other_characters(tokenizer, text, spelling):
    assert tokenizer.decode(tokenizer.encode(text)) == spelling


def test_every_character_has_a_spelling(tokenizer):
    for start in range(0, 0x110000, 0x1000):
        text = "".join(map(chr, range(start, start + 0x1000)))
        if not 0xD000 < start + 0x1000 <= 0xE000:
            assert max(tokenizer.encode(text), default=0) < 128


def test_offsets(tokenizer):
    encoding = tokenizer("é½x", return_offsets_mapping=True)
    assert tokenizer.decode(encoding["input_ids"]) == "e1/2x"
    assert encoding["offset_mapping"] == [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)]


@pytest.mark.fast
def test_batch(tokenizer):
    batch = tokenizer(["AB", "A"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[65, 66], [0, 65]]
    assert batch["attention_mask"].tolist() == [[1, 1], [0, 1]]
    assert tokenizer("ABC", truncation=True, max_length=2)["input_ids"] == [65, 66]


def test_documents(tokenizer):
    assert tokenizer.encode("\0AB\0C") == [0, 65, 66, 0, 67]
    assert tokenizer.encode("\0A", split_special_tokens=True) == [0, 65]


@pytest.mark.fast
def test_save_and_load(tmp_path):
    tokenizer = ByteTokenizer()  # one that has never truncated a text, as its file would truncate, too
    tokenizer.save_pretrained(tmp_path)
    loaded = [
        ByteTokenizer.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
        PreTrainedTokenizerFast.from_pretrained(tmp_path),
        pickle.loads(pickle.dumps(tokenizer)),
        copy.deepcopy(tokenizer),
    ]
    assert [type(other) for other in loaded] == [ByteTokenizer, ByteTokenizer, PreTrainedTokenizerFast] + (
        [ByteTokenizer] * 2
    )
    for other in loaded:
        assert other.encode("\0é " + TUNE) == tokenizer.encode("\0é " + TUNE)
        assert other.decode(other.encode(TUNE)) == TUNE
        assert (len(other), other.pad_token_id, other.eos_token_id, other.bos_token_id) == (128, 0, 0, 0)
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TUNE).ids == tokenizer.encode(TUNE)


def test_of_a_music_model(tokenizer, tmp_path):
    """The class in tokenizer_config.json goes before the one of the model's configuration."""
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "rwkv6", "vocab_size": 128}')
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is ByteTokenizer


@pytest.mark.fast
def test_added_tokens_survive(tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.save_pretrained(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    assert other.eos_token_id == 128 and other.encode("A<end>") == [65, 128]
    assert other.decode([65, 128, 66]) == "A<end>B"
