"""EmbeddingRWKV and its reranker: what the authors' code computed, padding, calls, training, other libraries."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import random_ids, tiny_model
from golden_files import read_golden
from huggingface_hub.errors import StrictDataclassError
from retrieval_cases import NAMES, save_pair
from safetensors.torch import load_file
from torch.nn.functional import binary_cross_entropy_with_logits, normalize
from transformers import AutoModel, AutoModelForSequenceClassification

from subquad import (
    RecurrentCache,
    Rwkv7EmbeddingConfig,
    Rwkv7EmbeddingModel,
    Rwkv7RerankerConfig,
    Rwkv7RerankerForSequenceClassification,
    Rwkv7RerankerModel,
    identify,
)
from subquad.hub.export import export
from subquad.models.rwkv7_embedding.retrieval_files import save_embedding_files, save_reranker_files
from subquad_tokenizers import ByteTokenizer, RwkvWorldTokenizerFast


END = 96  # the last id of the small vocabularies
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    **dict.fromkeys(("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"), 6),
    "end_token_id": END,
}
CLASSES = {
    "embedding": (Rwkv7EmbeddingModel, Rwkv7EmbeddingConfig),
    "reranker": (Rwkv7RerankerForSequenceClassification, Rwkv7RerankerConfig),
}
each_kind = pytest.mark.parametrize("kind", CLASSES)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def make(kind, seed=0, **fields):
    """A small model in which no parameter is zero or constant."""
    model_class, config_class = CLASSES[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**SIZES | fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def result(output):
    """Embeddings or scores."""
    return output.logits if "logits" in output else output.pooler_output


def text(length, seed=0):
    """Ids of a text that ends."""
    return torch.cat([random_ids(1, length - 1, seed=seed) % END, torch.tensor([[END]])], 1)


def padded(rows, side):
    """Texts as one batch with its mask; ids of padding are those that end texts."""
    width = max(row.shape[1] for row in rows) + 2
    ids, masks = [], []
    for row in rows:
        gap, length = width - row.shape[1], row.shape[1]
        first = {"left": gap, "right": 0, "between": 0}[side]
        places = torch.arange(length) + first
        if side == "between":
            places[length // 2 :] += gap
        masks.append(torch.zeros(1, width, dtype=torch.long).index_fill(1, places, 1))
        ids.append(torch.full((1, width), END).index_copy(1, places, row))
    return {"input_ids": torch.cat(ids), "attention_mask": torch.cat(masks)}


# --- what the authors' code computed ---


def golden(name, kind, dtype=torch.float32, **fields):
    tensors, weights, _ = read_golden(name)
    model_class, config_class = CLASSES[kind]
    sizes = {"vocab_size": 97, "hidden_size": 128, "num_hidden_layers": 2, "head_dim": 64, "end_token_id": 96}
    config = config_class(**sizes, **fields)
    weights = {name: x.float() for name, x in weights.items()}
    config.set_sizes_from_shapes({name: x.shape for name, x in weights.items()})
    model = model_class.from_pretrained(None, config=config, state_dict=weights)
    return tensors, model.to(dtype).eval()


@pytest.mark.fast
@torch.no_grad()
def test_embeddings_of_the_authors():
    tensors, model = golden("embedding_rwkv", "embedding")
    rows = [tensors[f"text.{number}.input_ids"][None] for number in range(3)]
    for task in ("cls", "sts", "retr"):
        for number, row in enumerate(rows):
            output = model(row, task=task)
            torch.testing.assert_close(output.pooler_output[0], tensors[f"embeddings.{task}"][number], **CLOSE)
            for i, layer in enumerate(output.cache.layers):
                shifts = tensors["state.shift"][i, :, number]
                torch.testing.assert_close(layer.states["wkv"][0], tensors["state.wkv"][i, number], **CLOSE)
                torch.testing.assert_close(layer.states["attention_shift"][0], shifts[0], **CLOSE)
                torch.testing.assert_close(layer.states["feed_forward_shift"][0], shifts[1], **CLOSE)
    assert torch.equal(model(rows[0]).pooler_output, model(rows[0], task="retr").pooler_output)
    ids, mask = tensors["padded.input_ids"], tensors["padded.attention_mask"]
    torch.testing.assert_close(model(ids, mask).pooler_output, tensors["embeddings.retr"], **CLOSE)
    read = model(ids, torch.ones_like(mask)).pooler_output  # as the authors do
    torch.testing.assert_close(read, tensors["embeddings_zeros_read.retr"], **CLOSE)
    assert (read - tensors["embeddings.retr"]).abs().max() > 0.01
    several = model(tensors["multi_eos.input_ids"][None]).pooler_output
    torch.testing.assert_close(several, tensors["multi_eos.embeddings.retr"], **CLOSE)


@pytest.mark.fast
@torch.no_grad()
def test_scores_of_the_authors():
    """Whole pairs, and queries after saved documents."""
    tensors, model = golden("reranker_rwkv", "reranker")
    for i in range(3):
        document = tensors[f"doc.{i}.input_ids"][None]
        cache = model.read(document).cache
        for number, layer in enumerate(cache.layers):
            torch.testing.assert_close(layer.states["wkv"][0], tensors[f"doc.{i}.wkv"][number], **CLOSE)
        for j in range(2):
            query = tensors[f"query.{j}.input_ids"][None]
            online, offline = model(torch.cat([document, query], 1)), model(query, cache=cache.clone())
            torch.testing.assert_close(online.logits[0, 0], tensors["logits_online"][i, j], **CLOSE)
            torch.testing.assert_close(offline.logits[0, 0], tensors["logits_offline"][i, j], **CLOSE)
            torch.testing.assert_close(online.logits[0, 0].sigmoid(), tensors["scores_online"][i, j], **CLOSE)


def score_by_hand(model, states):
    """The reranker's recurrence as it is written, in float64: one token, both shifts zero."""
    reader, config = model.reranker, model.config.reranker_config
    heads, size = config.num_heads, config.head_dim

    def norm(module, x):
        return torch.nn.functional.layer_norm(x, x.shape, module.weight, module.bias, module.eps)

    x, v_first = reader.emb.weight[0], None
    for number, (block, S) in enumerate(zip(reader.blocks, states, strict=True)):
        att, ffn = block.att, block.ffn
        x = norm(block.ln0, x) if number == 0 else x
        y = norm(block.ln1, x)
        mixed = {letter: y - y * getattr(att, f"x_{letter}").flatten() for letter in "rwkvag"}
        r, k, v = (layer.weight @ mixed[z] for layer, z in ((att.receptance, "r"), (att.key, "k"), (att.value, "v")))
        w = (-np.exp(-0.5) * (att.w0.flatten() + (mixed["w"] @ att.w1).tanh() @ att.w2).sigmoid()).exp()
        a = (att.a0.flatten() + mixed["a"] @ att.a1 @ att.a2).sigmoid()
        g = (mixed["g"] @ att.g1).sigmoid() @ att.g2
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * (att.v0.flatten() + mixed["v"] @ att.v1 @ att.v2).sigmoid()
        kappa = normalize((k * att.k_k.flatten()).view(heads, size), dim=-1)
        k = k * (1 + (a - 1) * att.k_a.flatten())
        r, w, k, v, a = (z.view(heads, size) for z in (r, w, k, v, a))
        removed = torch.einsum("hij,hj->hi", S, -kappa)
        S = S * w[:, None] + removed[..., None] * (a * kappa)[:, None] + v[..., None] * k[:, None]
        out = torch.einsum("hij,hj->hi", S, r)
        mean, variance = out.mean(-1, keepdim=True), out.var(-1, unbiased=False, keepdim=True)
        out = ((out - mean) / (variance + 64e-5 * size / 64).sqrt()).flatten() * att.ln_x.weight + att.ln_x.bias
        out = out + ((r * k * att.r_k).sum(-1, keepdim=True) * v).flatten()
        x = x + att.output.weight @ (out * g)
        y = norm(block.ln2, x)
        x = x + ffn.value.weight @ (ffn.key.weight @ (y - y * ffn.x_k.flatten())).relu().square()
    first, _, last = reader.head
    return last.weight @ (first.weight @ norm(reader.ln_out, x) + first.bias).tanh()


@pytest.mark.parametrize(
    "fields",
    [{}, {"reranker_layers": [2, 0]}, {"reranker_layers": [1]}, {"hidden_size": 16}, {"num_hidden_layers": 1}],
    ids=str,
)
@torch.no_grad()
def test_the_layers_that_the_reranker_reads(fields):
    """Also with a single head or layer."""
    model = make("reranker", **fields).double()
    ids = text(7)
    cache = model.read(ids).cache
    before = cache.clone()
    states = [cache.layers[layer].states["wkv"][0] for layer in model.config.read_layers]
    expected = score_by_hand(model, states)
    torch.testing.assert_close(model.score(cache)[0], expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(model(ids).logits[0], expected, atol=1e-10, rtol=1e-10)
    for name, state in cache.named_states().items():
        assert torch.equal(state, before.named_states()[name])


# --- calls ---


@pytest.mark.parametrize(
    ("kind", "side"),
    [("embedding", "left"), ("embedding", "between"), ("reranker", "right"), ("reranker", "between")],
)
def test_padding_changes_nothing(kind, side):
    """Results and gradients equal those of each text alone, also if padding has the id that ends texts."""
    model, rows = make(kind), [text(length, seed=length) for length in (2, 9, 14)]
    weights = torch.randn(3, 48)[:, : 1 if kind == "reranker" else 48]
    alone = torch.cat([result(model(row)) for row in rows])
    (alone * weights).sum().backward()
    expected = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    together = result(model(**padded(rows, side)))
    (together * weights).sum().backward()
    torch.testing.assert_close(together, alone, **CLOSE)
    assert len(expected) > 100
    for name, x in model.named_parameters():
        if x.grad is not None:
            torch.testing.assert_close(x.grad, expected[name], atol=2e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@each_kind
@torch.no_grad()
def test_calls_split_anywhere(kind):
    model, ids = make(kind), torch.cat([text(9), text(9, seed=1)])
    expected = result(model(ids))
    for cut in range(1, 9):
        first = model(ids[:, :cut])
        assert kind == "reranker" or first.pooler_output is None
        torch.testing.assert_close(result(model(ids[:, cut:], cache=first.cache)), expected, **CLOSE)
    cache = None
    for token in ids.split(1, 1):
        output = model(token, cache=cache)
        cache = output.cache
    torch.testing.assert_close(result(output), expected, **CLOSE)


@torch.no_grad()
def test_one_cache_for_both_models():
    """An embedding model reads a document, and a reranker with this model in it the query."""
    reranker, embedder = make("reranker"), make("embedding", seed=1)
    embedder.load_state_dict({name: x for name, x in reranker.state_dict().items() if "reranker" not in name})
    document, query = random_ids(2, 6) % END, torch.cat([text(4)] * 2)
    cache = embedder.read(document).cache
    found = reranker(query, cache=cache, use_cache=False)
    torch.testing.assert_close(found.logits, reranker(torch.cat([document, query], 1)).logits, **CLOSE)
    assert found.cache is None
    torch.testing.assert_close(
        reranker.embed(query, task="sts").pooler_output, embedder(query, task="sts").pooler_output
    )
    other = tiny_model("rwkv7")(document).cache
    with pytest.raises(ValueError, match="`cache` must be a Rwkv7EmbeddingCache.*got RecurrentCache"):
        reranker(query, cache=other)


@pytest.mark.fast
def test_wrong_calls():
    model, reranker, ids = make("embedding"), make("reranker"), text(5)
    with pytest.raises(ValueError, match="`task` must be one of cls, sts, retr, query, document, got 'rank'"):
        model(ids, task="rank")
    mixed = torch.cat([ids, random_ids(1, 5) % END])
    with pytest.raises(ValueError, match="`input_ids`, row 1: no real token has the id 96"):
        model(mixed)
    with pytest.raises(ValueError, match="row 0: no real token"):
        model(ids.repeat(2, 1), torch.tensor([[1, 1, 1, 1, 0], [1] * 5]))
    for name, value in (("cu_seqlens", torch.tensor([0, 2, 5])), ("position_ids", torch.arange(5)[None])):
        with pytest.raises(TypeError, match=f"unexpected keyword argument `{name}`"):
            model(ids, **{name: value})
        with pytest.raises(TypeError, match=f"unexpected keyword argument `{name}`"):
            reranker(ids, **{name: value})
    with pytest.raises(TypeError, match="`task`"):
        reranker(ids, task="sts")
    with pytest.raises(ValueError, match=r"`labels` must be \(1,\), one for each row, got \(2,\)"):
        reranker(ids, labels=torch.ones(2))
    for wrong in (2, -1, float("nan")):
        with pytest.raises(ValueError, match="`labels` must be from 0 to 1, got "):
            reranker(ids, labels=torch.tensor([wrong]))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("embedding", {"end_token_id": 97}, "`end_token_id` must be one of the 97 ids, got 97"),
        ("embedding", {"default_task": "rank"}, "`default_task` must be one of cls, sts, retr, got 'rank'"),
        ("embedding", {"tasks": []}, "`tasks` must be names"),
        ("embedding", {"tasks": ["a.b"]}, "`tasks` must be names"),
        ("embedding", {"tie_word_embeddings": True}, "`tie_word_embeddings` must be False"),
        ("embedding", {"hidden_size": 50}, "`hidden_size` .50. must be a multiple"),
        ("reranker", {"num_labels": 2}, "`num_labels` must be 1"),
        ("reranker", {"reranker_layers": [0, 3]}, "`reranker_layers` must be layers .* 0 to 2, got 3"),
        ("reranker", {"reranker_layers": [0], "reranker_config": {"num_hidden_layers": 2}}, "must have 2 numbers"),
        ("reranker", {"reranker_config": {"num_hidden_layers": 4}}, "`reranker_layers` must be layers"),
        ("reranker", {"reranker_config": {"hidden_size": 64}}, "`reranker_config`: its `hidden_size` must be 48"),
        ("reranker", {"reranker_config": {"layers": 2}}, "layers"),
    ],
)
def test_wrong_configurations(kind, fields, message):
    model_class, config_class = CLASSES[kind]
    with pytest.raises((StrictDataclassError, ValueError, TypeError), match=message), torch.device("meta"):
        model_class(config_class(**SIZES | fields))


# --- training ---


@each_kind
def test_training_with_checkpointing(kind):
    model, ids = make(kind).train(), torch.cat([text(9), text(9, seed=1)])
    labels = {"labels": torch.tensor([1.0, 0.0])} if kind == "reranker" else {}
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        output = model(ids, **labels)
        assert output.cache is None
        loss = output.loss if labels else output.pooler_output.square().sum()
        loss.backward()
        gradients.append({name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None})
        model.zero_grad()
    if labels:
        expected = binary_cross_entropy_with_logits(output.logits[:, 0], labels["labels"])
        torch.testing.assert_close(output.loss, expected)
        # All of the model but the heads takes part, and of the last layers only what reaches their states.
        assert {"reranker.emb.weight", "reranker.head.2.weight", "rwkv.emb.weight"} <= gradients[0].keys()
    for name, x in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], x, atol=1e-5, rtol=1e-4)


@each_kind
def test_new_weights(kind):
    """A new model has finite weights of the published rules; heads are not zero."""
    model_class, config_class = CLASSES[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES))
    assert all(x.isfinite().all() for x in model.parameters())
    assert torch.all(model.rwkv.blocks[0].att.k_a == 1.02) and model.head["retr_head"].fc1.weight.std() > 0.05
    if kind == "reranker":
        assert torch.all(model.reranker.blocks[0].att.k_a == 1.02) and model.reranker.head[0].weight.std() > 0.05


@pytest.mark.parametrize(("kind", "dtype"), [("embedding", torch.bfloat16), ("reranker", torch.float16)])
@torch.no_grad()
def test_half_precision(kind, dtype):
    model, ids = make(kind), text(20)
    expected = result(model(ids))
    output = copy.deepcopy(model).to(dtype)(ids)
    assert result(output).dtype == dtype
    assert all(layer.states["wkv"].dtype == torch.float32 for layer in output.cache.layers)
    assert torch.cosine_similarity(result(output).float(), expected).item() > 0.99


@pytest.mark.thorough
@each_kind
@torch.no_grad()
def test_compiled(kind):
    model, ids = make(kind), torch.cat([text(9), text(9, seed=1)])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(result(compiled(ids, use_cache=False)), result(model(ids)), **CLOSE)


# --- files ---


@each_kind
def test_saved_and_loaded(kind, tmp_path):
    model, ids = make(kind), text(6)
    model.save_pretrained(tmp_path / "model")
    auto_class = AutoModelForSequenceClassification if kind == "reranker" else AutoModel
    loaded = auto_class.from_pretrained(tmp_path / "model")
    assert type(loaded) is type(model)
    torch.testing.assert_close(result(loaded(ids)), result(model(ids)), **CLOSE)
    if kind == "reranker":
        embedder = AutoModel.from_pretrained(tmp_path / "model")
        assert type(embedder) is Rwkv7RerankerModel
        torch.testing.assert_close(embedder(ids).pooler_output, model.embed(ids).pooler_output, **CLOSE)


def test_a_reranker_has_the_identity_of_its_embedding_model(tmp_path):
    reranker, embedder = make("reranker"), make("embedding")
    own = {name: x for name, x in reranker.state_dict().items() if not name.startswith("reranker.")}
    embedder.load_state_dict(own)
    reranker.save_pretrained(tmp_path / "reranker", max_shard_size="100KB")
    embedder.save_pretrained(tmp_path / "embedder")
    assert identify(tmp_path / "reranker").digest == identify(tmp_path / "embedder").digest
    with torch.no_grad():
        reranker.reranker.emb.weight.add_(1)
    reranker.save_pretrained(tmp_path / "trained")
    assert identify(tmp_path / "trained").digest == identify(tmp_path / "embedder").digest
    for change in ("instruction", "weights"):
        if change == "instruction":
            embedder.config.instruction = "another"
        else:
            embedder.config.instruction = Rwkv7EmbeddingConfig.instruction
            with torch.no_grad():
                embedder.head["sts_head"].fc1.weight[0, 0] += 1
        embedder.save_pretrained(tmp_path / change)
        assert identify(tmp_path / change).digest != identify(tmp_path / "trained").digest


BARE = """
import sys
for name in ("subquad", "subquad_kernels", "subquad_tokenizers", "subquad_native"):
    sys.modules[name] = None
import torch
from transformers import AutoModel, AutoModelForSequenceClassification
from safetensors.torch import save_file
ids = torch.tensor([[5, 6, 7, 96]])
embedder = AutoModel.from_pretrained(sys.argv[1] + "/embedding-hub", trust_remote_code=True)
reranker = AutoModelForSequenceClassification.from_pretrained(sys.argv[1] + "/reranker-hub", trust_remote_code=True)
found = {"embedding": embedder(ids, task="sts").pooler_output, "reranker": reranker(ids).logits}
save_file({name: x.detach() for name, x in found.items()}, sys.argv[1] + "/found.safetensors")
"""


@pytest.mark.thorough
def test_repositories_load_without_the_package(tmp_path):
    expected = {}
    for kind in CLASSES:
        model, ids = make(kind), torch.tensor([[5, 6, 7, 96]])
        model.save_pretrained(tmp_path / kind)
        (tmp_path / kind / "modules.json").write_text("[]")
        files = export(tmp_path / kind, tmp_path / f"{kind}-hub")
        assert "modules.json" in files
        expected[kind] = model(ids).logits if kind == "reranker" else model(ids, task="sts").pooler_output
        card = (tmp_path / f"{kind}-hub" / "README.md").read_text()
        assert "State-Centric Retrieval" in card
        assert f"pipeline_tag: {'text-ranking' if kind == 'reranker' else 'sentence-similarity'}" in card
    subprocess.run([sys.executable, "-c", BARE, str(tmp_path)], check=True, capture_output=True)
    for name, x in load_file(tmp_path / "found.safetensors").items():
        torch.testing.assert_close(x, expected[name].detach(), **CLOSE)


# --- sentence-transformers ---


@pytest.fixture(scope="module", params=[RwkvWorldTokenizerFast, ByteTokenizer])
def pair(request, tmp_path_factory):
    """An embedding model and its reranker, in directories with their tokenizers."""
    pytest.importorskip("sentence_transformers")
    folder, tokenizer = tmp_path_factory.mktemp("pair"), request.param()
    end = 128 if request.param is ByteTokenizer else 65535
    return folder, *save_pair(folder, tokenizer, end), (tokenizer, end)


def encode(plain, text):
    tokenizer, end = plain
    return torch.tensor([[*tokenizer(text, add_special_tokens=False)["input_ids"], end]])


@torch.no_grad()
def test_sentence_transformer(pair, tmp_path):
    """Stock modules give the embeddings of each text alone, of any task, before and after `save`."""
    from sentence_transformers import SentenceTransformer

    folder, model, _, plain = pair
    texts = ["A cat.", "Two cats sat on the mat, and a third one watched them.", "x"]
    SentenceTransformer(str(folder / NAMES[0])).save(str(tmp_path / "saved"))
    for path in (folder / NAMES[0], tmp_path / "saved"):
        encoder = SentenceTransformer(str(path))
        assert encoder.max_seq_length == 2048 and encoder.get_embedding_dimension() == 32
        for task in (None, "retr", "sts", "cls"):
            found = encoder.encode(texts, batch_size=3, **({"task": task} if task else {}))
            for text, embedding in zip(texts, found, strict=True):
                expected = normalize(model(encode(plain, text), task=task).pooler_output, dim=-1)[0]
                torch.testing.assert_close(torch.tensor(embedding), expected, **CLOSE)
        asked = model(encode(plain, model.query_text("cats?"))).pooler_output
        query = torch.tensor(encoder.encode_query("cats?"))
        torch.testing.assert_close(query, normalize(asked, dim=-1)[0], **CLOSE)
        assert np.abs(encoder.encode_document("x") - encoder.encode("x")).max() < 1e-6
        with pytest.raises(ValueError, match="`task` must be one of"):
            encoder.encode("x", task="rank")


@torch.no_grad()
def test_cross_encoder(pair, tmp_path):
    """Pairs of any length in one batch, `rank`, and texts that are too long, of which the end is read."""
    from sentence_transformers import CrossEncoder

    folder, _, model, plain = pair
    documents = ["A cat.", "Two cats\n\nsat on the mat.\n", 'Dogs\' "food" {{ x }}']
    CrossEncoder(str(folder / NAMES[1])).save(str(tmp_path / "saved"))
    for path in (folder / NAMES[1], tmp_path / "saved"):
        encoder = CrossEncoder(str(path))
        expected = [
            model(encode(plain, model.document_text(text) + model.query_after_document("cats?"))).logits.sigmoid()
            for text in documents
        ]
        found = encoder.predict([("cats?", text) for text in documents])
        torch.testing.assert_close(torch.tensor(found), torch.cat(expected)[:, 0], **CLOSE)
        ranked = [entry["corpus_id"] for entry in encoder.rank("cats?", documents)]
        assert ranked == np.argsort(-found).tolist()
    ids = encoder[0].preprocess([("cats?", "word " * 3000)])["input_ids"]
    assert ids.shape == (1, 2048)
    assert torch.equal(ids[:, -5:], encode(plain, "word " * 9 + "\n" + model.query_after_document("cats?"))[:, -5:])


@torch.no_grad()
def test_a_pair_has_the_ids_of_its_parts(pair):
    """So a query may continue from the states of a document."""
    _, _, model, plain = pair
    for document in ("A cat.", "A cat.\n", "A cat.\n\n\n", " ", "tab\t"):
        first, second = model.document_text(document), model.query_after_document("Where?")
        parts = torch.cat([encode(plain, first)[:, :-1], encode(plain, second)], 1)
        assert torch.equal(parts, encode(plain, first + second))


BARE_TOOLS = """
import re, sys
for name in ("subquad", "subquad_kernels", "subquad_tokenizers", "subquad_native"):
    sys.modules[name] = None
for path in sys.argv[1:]:
    card = open(path + "/README.md", encoding="utf-8").read()
    exec(re.search("```python\\n(.*?)```", card, re.DOTALL)[1])
print(float(query @ documents[0]))
"""


@pytest.mark.thorough
def test_the_code_of_cards(pair, tmp_path):
    """In an environment without this package, sentence-transformers loads the repositories as their cards show."""
    folder, embedder, _, plain = pair
    paths = [str(tmp_path / name) for name in NAMES]
    for name in NAMES:
        export(folder / name, tmp_path / name)
    command = [sys.executable, "-c", BARE_TOOLS, *paths]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        texts = embedder.query_text("Where is the Eiffel tower?"), "The Eiffel tower is in Paris."
        query, document = (normalize(embedder(encode(plain, text)).pooler_output)[0] for text in texts)
    assert float(done.stdout.splitlines()[-1]) == pytest.approx(float(query @ document), abs=1e-5)


def test_files_of_other_modules(tmp_path):
    """A repository has the modules that sentence-transformers saves beside the model, and nothing from elsewhere."""
    save_pair(tmp_path, ByteTokenizer(), 128)
    source, module = tmp_path / NAMES[1], tmp_path / NAMES[1] / "2_Dense"
    for path in (module / "config.json", module / "model.safetensors", source / "notes/a.json"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.name)
    files = export(source, tmp_path / "hub")
    assert {"2_Dense/config.json", "2_Dense/model.safetensors"} <= set(files) and "notes/a.json" not in files
    assert (tmp_path / "hub/2_Dense/config.json").read_text() == "config.json"
    (tmp_path / "secret.json").write_text("{}")
    (module / "secret.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ValueError, match=r"2_Dense/secret\.json is a link to .*, outside of the model's directory"):
        export(source, tmp_path / "linked")


def test_an_instruction_of_any_text(tmp_path):
    instruction = 'START BETWEEN {x} "\\" \n\U0001f600 {{ y }}'
    config = Rwkv7EmbeddingConfig(**SIZES | {"vocab_size": 129, "end_token_id": 128}, instruction=instruction)
    save_reranker_files(tmp_path, ByteTokenizer(), config)
    pair = [{"role": "query", "content": "q"}, {"role": "document", "content": "d"}]
    text = ByteTokenizer.from_pretrained(tmp_path).apply_chat_template(pair, tokenize=False)
    assert text == f"Instruct: {instruction}\nDocument: d\nQuery: q<|embedding|>"


def test_tokenizers_that_do_not_fit(tmp_path):
    config = Rwkv7EmbeddingConfig(**SIZES)
    with pytest.raises(ValueError, match="The tokenizer has 128 tokens: the id 96 is not free"):
        save_embedding_files(tmp_path, ByteTokenizer(), config)
    assert not any(tmp_path.iterdir())


@torch.no_grad()
def test_lora(tmp_path):
    """PEFT finds the layers by the model's type."""
    peft = pytest.importorskip("peft")
    model, ids = make("reranker"), text(6)
    expected = model(ids).logits
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, init_lora_weights=False))
    assert not torch.allclose(adapted(ids).logits, expected)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path)
    torch.testing.assert_close(again(ids).logits, adapted(ids).logits)


def test_the_cache_is_a_recurrent_one(tmp_path):
    model = make("embedding")
    cache = model.read(text(5)).cache
    assert isinstance(cache, RecurrentCache)
    cache.save(tmp_path / "states.safetensors")
    loaded = type(cache).load(tmp_path / "states.safetensors", make("reranker").config)
    assert all(torch.equal(x, cache.named_states()[name]) for name, x in loaded.named_states().items())


@pytest.mark.parametrize("wrong", [None, 5, ["cats?"]])
def test_a_query_is_a_string(wrong):
    """Otherwise its representation would be searched for."""
    model = make("embedding")
    for name, texts in (
        ("query", (model.query_text, model.query_after_document)),
        ("document", [model.document_text]),
    ):
        for text in texts:
            with pytest.raises(ValueError, match=f"`{name}` must be a string, got"):
                text(wrong)
