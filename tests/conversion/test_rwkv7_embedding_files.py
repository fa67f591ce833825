"""EmbeddingRWKV as it is published: the file of an embedding model, and that of a reranker."""

import json

import pytest
import torch
from golden_files import read_golden
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import subquad
from subquad import Rwkv7RerankerConfig, Rwkv7RerankerForSequenceClassification
from subquad_cli import main
from subquad_conversion import ConversionError, convert, recognise


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The authors' two files, with parts of the trainer's module that nothing needs."""
    folder = tmp_path_factory.mktemp("published")
    tensors, weights, _ = read_golden("reranker_rwkv")
    images = {"vit.layer.weight": torch.zeros(2, 2), "proj.gate.weight": torch.zeros(2, 2)}
    reranker = {name: x for name, x in weights.items() if name.startswith("reranker.")}
    embedder = {name: x for name, x in weights.items() if name not in reranker}
    torch.save(embedder | images, folder / "embedding.pth")
    torch.save(reranker | images, folder / "reranker.pth")
    torch.save(reranker | {"reranker_layer_idx": [1, 0]}, folder / "chosen.pth")
    plain = {name.removeprefix("reranker."): x for name, x in reranker.items()}
    torch.save(plain, folder / "plain.pth")
    plain["reranker.token.weight"] = plain.pop("emb.weight")
    older = {f"reranker.{name.removeprefix('reranker.')}": x for name, x in plain.items()}
    torch.save(older, folder / "older.pth")
    torch.save({"ranking_head.0.weight": torch.zeros(4096)} | reranker | embedder, folder / "products.pth")
    bare = {name.removeprefix("rwkv."): x for name, x in embedder.items() if name.startswith("rwkv.")}
    torch.save(bare, folder / "bare.pth")
    (folder / "end.json").write_text(json.dumps({"end_token_id": 96}))
    return folder, tensors


def make(folder, source, dest, **options):
    return convert(folder / source, dest, config=folder / "end.json", progress=False, **options)


@torch.no_grad()
def test_the_models(published, tmp_path):
    folder, tensors = published
    assert recognise(folder / "embedding.pth").format == "rwkv7-embedding"
    report = make(folder, "embedding.pth", tmp_path / "embedding")
    assert report.files == ["config.json", "model.safetensors"] and report.dtype == "bfloat16"
    assert "2 tensors of images (vit., proj.) were left out" in report.notes
    embedder = AutoModel.from_pretrained(tmp_path / "embedding", dtype=torch.float32).eval()
    for number, source in enumerate(("reranker.pth", "plain.pth", "older.pth")):
        report = make(folder, source, tmp_path / str(number), base=folder / "embedding.pth")
        assert report.recognised.format == "rwkv7-reranker"
        assert subquad.identify(tmp_path / str(number)).digest == subquad.identify(tmp_path / "embedding").digest
    # From a directory, whose configuration comes along.
    convert(folder / "reranker.pth", tmp_path / "joined", base=tmp_path / "embedding", progress=False)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "joined", dtype=torch.float32).eval()
    other = AutoModelForSequenceClassification.from_pretrained(tmp_path / "1", dtype=torch.float32).eval()
    for i in range(3):
        document = tensors[f"doc.{i}.input_ids"][None]
        for j in range(2):
            query = tensors[f"query.{j}.input_ids"][None]
            pair, expected = torch.cat([document, query], 1), tensors["logits_online"][i, j]
            torch.testing.assert_close(model(pair).logits[0, 0], expected, atol=1e-5, rtol=1e-5)
            assert torch.equal(other(pair).logits, model(pair).logits)
            read = model(query, cache=embedder.read(document).cache).logits[0, 0]
            torch.testing.assert_close(read, expected, atol=1e-5, rtol=1e-5)
    chosen = make(folder, "chosen.pth", tmp_path / "chosen", base=folder / "embedding.pth")
    assert chosen.config.reranker_layers == [1, 0]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "chosen", dtype=torch.float32).eval()
    assert (model(pair).logits - other(pair).logits).abs() > 1e-3


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (
            "reranker.pth",
            {},
            "is a reranker, which only works with the embedding model that it was trained w",
        ),
        (
            "reranker.pth",
            {"base": "plain.pth"},
            "`base` must be the embedding model of the reranker; .*plain.pth",
        ),
        (
            "reranker.pth",
            {"base": "embedding.pth", "lora_alpha": 1.0},
            "`lora_alpha` is for an adapter, and .*none",
        ),
        ("embedding.pth", {"base": "embedding.pth"}, "`base` is for an adapter, and .*embedding.pth is none"),
        ("products.pth", {}, "this is EmbeddingRWKV's reranker by products of states, which is not supported"),
        ("bare.pth", {}, "missing: head.weight"),
        ("embedding.pth", {"to": "pth"}, "only our own directory is possible"),
    ],
)
def test_refused(source, options, message, published, tmp_path):
    folder, _ = published
    options = {name: folder / x if name == "base" else x for name, x in options.items()}
    dest = tmp_path / ("model.pth" if "to" in options else "model")
    with pytest.raises(ConversionError, match=message):
        convert(folder / source, dest, progress=False, **options)
    assert not dest.exists()


def test_a_reranker_of_another_size(published, tmp_path):
    folder, _ = published
    small = Rwkv7RerankerConfig(vocab_size=97, end_token_id=96, hidden_size=64, head_dim=64, num_hidden_layers=2)
    weights = Rwkv7RerankerForSequenceClassification(small).state_dict()
    torch.save({name: x for name, x in weights.items() if "reranker" not in name}, tmp_path / "small.pth")
    with pytest.raises(ConversionError, match="`reranker_config`: its `hidden_size` must be 64, got 128"):
        make(folder, "reranker.pth", tmp_path / "model", base=tmp_path / "small.pth")


def test_a_world_model(tmp_path, capsys):
    """It gets a tokenizer whose texts end with the id 65535, and the files of sentence-transformers."""
    torch.manual_seed(0)
    model = Rwkv7RerankerForSequenceClassification(
        Rwkv7RerankerConfig(hidden_size=16, head_dim=16, num_hidden_layers=1, intermediate_size=32)
    )
    weights = model.state_dict()
    own = {name: x for name, x in weights.items() if name.startswith("reranker.")}
    torch.save({name: x for name, x in weights.items() if name not in own}, tmp_path / "embedding.pth")
    torch.save(own, tmp_path / "reranker.pth")
    assert main(["convert", str(tmp_path / "embedding.pth"), str(tmp_path / "embedding")]) == 0
    base = ["--base", str(tmp_path / "embedding")]
    assert main(["convert", str(tmp_path / "reranker.pth"), str(tmp_path / "reranker"), *base]) == 0
    assert "a reranker of 1 layers" in capsys.readouterr().out
    assert (tmp_path / "embedding/modules.json").is_file() and not (tmp_path / "reranker/modules.json").exists()
    for name, ends in (("embedding", True), ("reranker", False)):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert (tokenizer("Hello")["input_ids"][-1] == 65535) == ends
        assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.model_max_length) == (65536, 65535, 2048)
        assert (tokenizer.chat_template is None) == ends
        assert not (tmp_path / name / "generation_config.json").exists()
    pair = [{"role": "query", "content": "Q?"}, {"role": "document", "content": "D."}]
    text = tokenizer.apply_chat_template(pair, tokenize=False)
    instruction = "Given a query, retrieve documents that answer the query"
    assert text == f"Instruct: {instruction}\nDocument: D.\nQuery: Q?{tokenizer.eos_token}"
    with pytest.raises(Exception, match="The roles are document and query, got user"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Q?"}], tokenize=False)
