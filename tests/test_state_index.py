"""The index of documents: what it finds, what it stores, and what it refuses. And its commands."""

import json
import shutil
import threading

import pytest
import torch
from retrieval_cases import NAMES, save_pair

import subquad
from subquad import Rwkv7RerankerForSequenceClassification, StateIndex
from subquad.modeling import state_file
from subquad.states import state_index
from subquad_cli import main
from subquad_cli.index import passages
from subquad_tokenizers import ByteTokenizer


END = 128
DOCUMENTS = {
    "cat": "A cat sat on a mat.",
    "dogs": "Two dogs ran after a third one,\n\nwhich was faster than both of them.",
    "x": "x",
    "end": "A text with <|embedding|> in it is read as it is.",
    "mat": "Mats are flat.",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The directories of an embedding model, of a reranker with it, and of another reranker."""
    folder = tmp_path_factory.mktemp("models")
    save_pair(folder / "other pair", ByteTokenizer(), END, seed=1)
    save_pair(folder, ByteTokenizer(), END, reranker_layers=[1, 0])
    for name, path in zip(("embedding", "reranker"), NAMES, strict=True):
        (folder / path).rename(folder / name)
    (folder / "other pair" / NAMES[1]).rename(folder / "other")
    return folder


@pytest.fixture(scope="module")
def read(models, tmp_path_factory):
    """An index of the documents, made by the embedding model."""
    directory = tmp_path_factory.mktemp("read") / "index"
    index = StateIndex.create(directory, models / "embedding")
    assert index.add(DOCUMENTS, batch_size=2) == len(DOCUMENTS)
    return directory


@pytest.fixture
def copied(read, tmp_path):
    return shutil.copytree(read, tmp_path / "index")


def encode(text):
    return ByteTokenizer()(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@torch.no_grad()
def by_hand(models, query):
    """Cosines and scores of all documents, each read alone as a whole."""
    model = Rwkv7RerankerForSequenceClassification.from_pretrained(models / "reranker").eval()

    def embed(text):
        found = model.embed(torch.tensor([[*encode(text), END]])).pooler_output
        return torch.nn.functional.normalize(found, dim=-1)[0]

    asked = embed(model.query_text(query))
    cosines = {name: float(asked @ embed(text)) for name, text in DOCUMENTS.items()}
    pairs = {name: model.document_text(text) + model.query_after_document(query) for name, text in DOCUMENTS.items()}
    scores = {name: float(model(torch.tensor([[*encode(x), END]])).logits.sigmoid()) for name, x in pairs.items()}
    return cosines, scores


def test_what_is_found(models, read):
    """As if every document were read alone, together with the query."""
    index = StateIndex.load(read, models / "reranker")
    cosines, scores = by_hand(models, "Which mat?")
    found = index.search("Which mat?")
    assert [match.id for match in found] == sorted(cosines, key=lambda name: -cosines[name])
    assert {match.id: match.score for match in found} == pytest.approx(cosines, abs=1e-5)
    assert found[0].text == DOCUMENTS[found[0].id]
    for batch_size in (1, 2, 16):
        ranked = index.rank("Which mat?", batch_size=batch_size)
        assert [match.id for match in ranked] == sorted(scores, key=lambda name: -scores[name])
        assert {match.id: match.score for match in ranked} == pytest.approx(scores, abs=1e-5)
    everything = index.rank("Which mat?", candidates=None)
    assert [match.id for match in everything] == [match.id for match in ranked]
    best = index.rank("Which mat?", 1, candidates=2)
    assert [best[0].id] == sorted((match.id for match in found[:2]), key=lambda name: -scores[name])[:1]
    assert len(index.rank("Which mat?", 4, candidates=2)) == 4
    # A query changes no states.
    assert index.score("Which mat?", ["x", "cat", "x"]) == pytest.approx([scores["x"], scores["cat"], scores["x"]])
    assert index.score("Which mat?", "cat") == pytest.approx([scores["cat"]])  # one name, not three letters
    with pytest.raises(ValueError, match="`ids` must have at least one name"):
        index.states_of([])


def test_documents_that_need_many_escapes(models, tmp_path, monkeypatch):
    """A file can be read again, however long the JSON of its texts is."""
    monkeypatch.setattr(state_file, "MOST_CHARACTERS", 8000)
    monkeypatch.setattr(state_index, "MOST_OF_A_DOCUMENT", 4000)
    monkeypatch.setattr(state_index, "FILE_CHARACTERS", 2000)
    index = StateIndex.create(tmp_path / "index", models / "embedding")
    documents = dict.fromkeys("abc", "猫" * 650)
    index.add(documents)
    assert len(list(index.directory.iterdir())) == 4
    assert StateIndex.load(index.directory, models / "embedding").text("c") == documents["c"]


def test_two_processes_that_change_an_index(models, copied, monkeypatch):
    """While one writes a file and the index, another one waits; then it refuses, and has written nothing."""
    first, second = (StateIndex.load(copied, models / "embedding") for _ in range(2))
    write, failed = state_index.write_state_file, []

    def refused():
        try:
            second.add({"new": "of the second"})
        except ValueError as error:
            failed.append(str(error))

    other = threading.Thread(target=refused)  # a thread with a handle of its own waits as a process does

    def writes_meanwhile(*arguments):
        if not other.ident:
            other.start()
            other.join(0.3)
        write(*arguments)

    monkeypatch.setattr(state_index, "write_state_file", writes_meanwhile)
    first.add({"new": "of the first"})
    other.join()
    assert len(failed) == 1 and "was changed by another process" in failed[0]
    again = StateIndex.load(copied, models / "embedding")
    again.check()
    assert again.text("new") == "of the first"


def test_an_index_without_a_reranker(models, read):
    index = StateIndex.load(read, models / "embedding")
    assert len(index.search("cat", 2)) == 2
    for call in (lambda: index.rank("cat"), lambda: index.score("cat", ["x"])):
        with pytest.raises(
            ValueError, match="is an embedding model alone: open the index with the directory of a rer"
        ):
            call()


def test_changes(models, copied):
    """Documents are skipped, replaced and removed; a file is deleted with its last document."""
    index = StateIndex.load(copied, models / "reranker")
    assert index.add(DOCUMENTS) == 0
    assert index.add({"x": "y", "new": "A new one."}) == 2
    assert index.text("x") == "y" and len(index) == 6
    assert sorted(path.name for path in copied.iterdir()) == [
        "index.json",
        "states-000001.safetensors",
        "states-000002.safetensors",
    ]
    again = StateIndex.load(copied, models / "reranker")
    assert {name: again.text(name) for name in again.ids} == {**DOCUMENTS, "x": "y", "new": "A new one."}
    assert again.score("y?", ["x", "cat"]) == pytest.approx(index.score("y?", ["x", "cat"]))
    again.check()
    again.remove("new")
    again.remove(["x"])
    assert not (copied / "states-000002.safetensors").exists()
    assert "x" not in again and len(StateIndex.load(copied, models / "reranker")) == 4
    with pytest.raises(KeyError, match="has no document 'x'"):
        again.remove(["cat", "x"])
    assert "cat" in again
    with pytest.raises(ValueError, match="was changed by another process; open the index again"):
        index.add({"z": "z"})
    again.remove(again.ids)
    assert [path.name for path in copied.iterdir()] == ["index.json"]
    assert again.search("x") == again.rank("x") == []


def test_documents_of_any_length(models, tmp_path):
    """Of a long one the end is read, after a warning. Files are written when they are full."""
    index = StateIndex.create(tmp_path / "index", models / "reranker")
    index.tokenizer.model_max_length = 20
    documents = {"long": "a" * 50 + "b" * 19, "short": "b" * 19}
    with pytest.warns(UserWarning, match="1 documents have more than 20 tokens"):
        index.add(documents)
    scores = {match.id: match.score for match in index.search("b")}
    assert scores["long"] == pytest.approx(scores["short"], abs=1e-5)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([("a", "x"), ("a", "y")], "has some names twice: a"),
        ({"a": " "}, "must be strings that are not empty, got 'a'"),
        ({"": "x"}, "must be strings"),
        ({1: "x"}, "must be strings"),
        ({"a": "b\ud800"}, "'a' is not valid Unicode"),
        ({"a": "\u732b" * 700_000}, "'a' has 4,200,005 characters as JSON, and may have 4,194,304"),
    ],
)
def test_wrong_documents(documents, message, models, copied):
    index = StateIndex.load(copied, models / "embedding")
    with pytest.raises(ValueError, match=message):
        index.add(documents)
    assert len(index) == len(DOCUMENTS)


@pytest.mark.parametrize("call", ["k", "candidates", "batch_size"])
def test_wrong_numbers(call, models, read):
    index = StateIndex.load(read, models / "reranker")
    with pytest.raises(ValueError, match=f"`{call}` must be a whole number of at least 1, got 0"):
        index.rank("x", **{call: 0})
    if call == "batch_size":
        for wrong in (-1, 2.5, "8"):
            with pytest.raises(ValueError, match=f"`batch_size` must be a whole number of at least 1, got {wrong!r}"):
                index.score("x", "cat", batch_size=wrong)


@pytest.mark.parametrize(("kind", "tolerance"), [("float16", 1e-3), ("int8", 2e-2)])
def test_narrow_states(kind, tolerance, models, read, tmp_path):
    """A copy in another dtype, and an index that is made in it, hold the same."""
    index = StateIndex.load(read, models / "reranker")
    expected = index.score("Which mat?", index.ids)
    index.save(tmp_path / "copy", kind)
    made = StateIndex.create(tmp_path / "made", models / "embedding", state_dtype=kind)
    made.add(DOCUMENTS, batch_size=2)
    for directory in (tmp_path / "copy", tmp_path / "made"):
        narrow = StateIndex.load(directory, models / "reranker")
        assert narrow.state_dtype == kind
        found = narrow.score("Which mat?", index.ids)
        assert found == pytest.approx(expected, abs=tolerance) and found != expected
        assert [match.id for match in narrow.search("x")] == [match.id for match in index.search("x")]
        assert narrow.nbytes < index.nbytes * 0.8
    with torch.no_grad():
        made.model.rwkv.blocks[0].ln1.weight.mul_(1e6)
    with pytest.raises(ValueError, match=f"'new': The state `attention_shift` is not finite in {kind}"):
        made.add({"new": "A new one."})
    with pytest.raises(ValueError, match="`state_dtype` must be one of .*, got 'float32'"):
        narrow.save(tmp_path / "wider", "float32")


def test_rounding_to_int8():
    """Each row of a head's state has its own scale; zeros stay zeros, and the largest number is exact."""
    x = torch.randn(2, 3, 4, 4) * torch.logspace(-3, 3, 4)[:, None]
    x[0, 0, 1] = 0
    stored = state_index._narrowed({"wkv": x, "attention_shift": x[:, 0, 0]}, torch.int8)
    assert stored["wkv"].dtype == torch.int8 and stored["wkv:scale"].shape == (2, 3, 4, 1)
    assert stored["attention_shift"].dtype == torch.float16
    found = state_index._widened(stored)["wkv"]
    assert ((found - x).abs() <= x.abs().amax(-1, keepdim=True) / 254 * 1.001).all()
    assert not found[0, 0, 1].any()
    with pytest.raises(ValueError, match="`wkv` is not finite in float16"):
        state_index._narrowed({"wkv": torch.full((1, 1, 2, 2), 1e6)}, torch.float16)
    with pytest.raises(ValueError, match="`wkv:scale` is not finite in int8"):
        state_index._narrowed({"wkv": torch.full((1, 1, 2, 2), torch.inf)}, torch.int8)


def test_interruptions(models, tmp_path, monkeypatch):
    """Whatever a process was doing when it ended: what was written before is there, and adding goes on."""
    monkeypatch.setattr(state_index, "FILE_DOCUMENTS", 2)
    whole = StateIndex.create(tmp_path / "whole", models / "reranker")
    whole.add(DOCUMENTS, batch_size=1)
    expected = whole.score("cat?", list(DOCUMENTS))
    write_file, write_json = state_index.write_state_file, state_index._write_json

    def fails(function, number):
        calls = iter(range(100))

        def run(*arguments, **options):
            if next(calls) == number:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return run

    for number in (0, 2):
        for name, function in (("write_state_file", write_file), ("_write_json", write_json)):
            directory = tmp_path / f"{name}-{number}"
            index = StateIndex.create(directory, models / "reranker")
            monkeypatch.setattr(state_index, name, fails(function, number))
            with pytest.raises(KeyboardInterrupt):
                index.add(DOCUMENTS, batch_size=1)
            monkeypatch.setattr(state_index, name, function)
            again = StateIndex.load(directory, models / "reranker")
            again.check()
            assert len(again) == 2 * number
            assert again.add(DOCUMENTS, batch_size=1) == len(DOCUMENTS) - 2 * number
            assert again.score("cat?", list(DOCUMENTS)) == pytest.approx(expected, abs=1e-5)
            assert len(list(directory.iterdir())) == 4


# --- refusals ---


def test_an_index_of_another_model(models, read, tmp_path, monkeypatch):
    """Refused before the model is loaded; both models are named."""
    monkeypatch.setattr(StateIndex, "__init__", None)
    with pytest.raises(ValueError, match="is an index of the embedding model embedding .*; given is other"):
        StateIndex.load(read, models / "other")
    goose = subquad.embedded_model("goose-abc")
    for call in (StateIndex.load, StateIndex.create):
        with pytest.raises(ValueError, match="is of type rwkv7; an index needs a model of type rwkv7_em"):
            call(read if call == StateIndex.load else tmp_path / "new", goose)
    with pytest.raises(ValueError, match="exists already and is not an empty directory"):
        StateIndex.create(read, models / "embedding")
    with pytest.raises(ValueError, match="is not an index: it has no index.json"):
        StateIndex.load(tmp_path, models / "embedding")
    with pytest.raises(ValueError, match="`state_dtype` must be one of float32, float16, int8, got 'int4'"):
        StateIndex.create(tmp_path / "new", models / "embedding", state_dtype="int4")


def test_a_file_of_another_model(models, copied, tmp_path):
    other = StateIndex.create(tmp_path / "other", models / "other")
    other.add(DOCUMENTS)
    shutil.copy(tmp_path / "other/states-000001.safetensors", copied)
    with pytest.raises(ValueError, match="states-000001.safetensors is not a file of this index: it belongs to"):
        StateIndex.load(copied, models / "reranker")


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../x.safetensors": []}},
        {"files": {"states-000001.safetensors": ["a"]}},
        {"files": []},
        {"model": {"name": "a"}},
        {"state_dtype": "int4"},
        {"next": "1"},
        {"subquad_index": 99},
    ],
    ids=str,
)
def test_a_damaged_index(change, models, copied):
    about = json.loads((copied / "index.json").read_text())
    (copied / "index.json").write_text(json.dumps(about | change))
    with pytest.raises(ValueError, match=r"index.json is (damaged|not an index that this version can read)"):
        StateIndex.load(copied, models / "reranker")


def test_damaged_states(models, copied):
    """A changed number is found when it is read."""
    file = copied / "states-000001.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 64
    file.write_bytes(data)
    index = StateIndex.load(copied, models / "reranker")
    with pytest.raises(ValueError, match="states-000001.safetensors is damaged or was changed: row"):
        index.rank("cat")
    with pytest.raises(ValueError, match="is damaged or was changed"):
        index.check()
    data[-5] ^= 64
    for place in (data.index(b"A cat sat"), len(data) // 2, 8 + int.from_bytes(data[:8], "little")):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ValueError, match=r"states-000001\.safetensors is damaged or was changed"):
            StateIndex.load(copied, models / "embedding").check()
    file.write_bytes(data[:-100])
    with pytest.raises(ValueError, match=r"states-000001\.safetensors"):
        StateIndex.load(copied, models / "reranker")


# --- commands ---


def run(capsys, *arguments, status=0):
    assert main(list(map(str, arguments))) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_commands(models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text("# Cats\n\nThey sit on mats.\n\n" + "Dogs run. " * 10)
    (tmp_path / "docs/b.txt").write_text("x")
    (tmp_path / "docs/c.png").write_bytes(b"\0")
    (tmp_path / "docs/d.txt").mkdir()
    (tmp_path / "more.jsonl").write_text('{"id": "#1", "text": "A\u2028line."}\n\n{"id": "#2", "text": "Another."}\n')
    index = ["index", "docs", "more.jsonl", "--model", models / "embedding", "--out", "i", "--passage", "60"]
    out = run(capsys, *index, "--device", "cpu")
    assert out.startswith("5 read, 0 unchanged, 0 removed; i has 5 documents, ") and out.endswith(" in float16.\n")
    (tmp_path / "docs/a.md").write_text("# Cats\n\nThey sit on chairs.")
    assert run(capsys, *index).startswith("1 read, 3 unchanged, 1 removed; i has 4 documents")
    rank = ["rank", "Which mats?", "--index", "i", "--model", models / "reranker"]
    lines = run(capsys, *rank, "-k", 3).splitlines()
    assert len(lines) == 3 and all(0 <= float(line.split()[0]) <= 1 for line in lines)
    found = [json.loads(line) for line in run(capsys, *rank, "--json").strip().split("\n")]
    assert [entry["id"] for entry in found[:3]] == [line.split()[1] for line in lines]
    assert {entry["id"] for entry in found} == {"docs/a.md#1", "docs/b.txt#1", "#1", "#2"}
    assert next(entry["text"] for entry in found if "a.md" in entry["id"]) == "# Cats\n\nThey sit on chairs."

    # Files that are empty or gone have no passages in the index either. Ids of lines are no passages of one file.
    (tmp_path / "docs/a.md").write_text("\n")
    (tmp_path / "docs/b.txt").rename("b.txt")
    (tmp_path / "more.jsonl").write_text('{"id": "#2", "text": "Another."}')
    assert run(capsys, *index).startswith("0 read, 1 unchanged, 2 removed; i has 2 documents")
    assert run(capsys, "index", "b.txt", *index[3:]).startswith("1 read, 0 unchanged, 0 removed; i has 3 documents")

    assert "given is other" in run(capsys, "rank", "x", "--index", "i", "--model", models / "other", status=1)
    assert "embedding model alone" in run(
        capsys, "rank", "x", "--index", "i", "--model", models / "embedding", status=1
    )
    assert "--state-dtype: i has states in float16" in run(capsys, *index, "--state-dtype", "int8", status=2)
    assert "nothing does not exist" in run(capsys, "index", "nothing", *index[3:], status=2)
    (tmp_path / "bad.jsonl").write_text('\n{"id": "one"}\n')
    assert "bad.jsonl, line 2: it must be an object" in run(capsys, "index", "bad.jsonl", *index[3:], status=1)
    assert "the id '#2' occurs twice" in run(capsys, "index", "more.jsonl", "more.jsonl", *index[3:], status=2)
    assert "c.png is none of .md" in run(capsys, "index", "docs/c.png", *index[3:], status=2)
    assert "does not generate text" in run(capsys, "generate", "x", "--model", models / "reranker", status=2)


def test_passages(tmp_path):
    def split(text, length):
        return [passage for _, passage in passages(tmp_path / "a.md", text, length)]

    assert split("a\n\n\n\nb\n\n cc \n\ndddd", 4) == ["a\n\nb", "cc", "dddd"]
    assert split("aaaaaa\n\nb", 4) == ["aaaaaa", "b"]
    assert split("\n\n", 4) == [] and split("a", 1) == ["a"]
    assert split("a\n\nb", 100) == split("a\n \t\nb", 100) == ["a\n\nb"]
