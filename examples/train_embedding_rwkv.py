"""
Trains a small EmbeddingRWKV and its reranker to find a tune by one of its lines, and compares both with BM25.

    python examples/train_embedding_rwkv.py --output tunes

Both start from goose-abc, which writes tunes. First the embedding model learns to find the tune of a line among the
tunes of the batch. Then both are trained together: the reranker learns to tell the right tune from those that the
embeddings confuse with it. (The authors freeze the embedding model then.) At last all tunes are read once into an
index. The reranker learns slowly: with the default number of steps it is little better than chance.

The lines of held-out tunes are looked for among all tunes, in their own key and in another one, in which hardly a note
is the same. `tunes` then holds the two models and the index:

    SentenceTransformer("tunes/embedding"), CrossEncoder("tunes/reranker")
    subquad rank "B2 BA|GABG|A2 AG|FDEF|" --index tunes/index --model tunes/reranker

(`pip install "subquad[tools,train]"`; a quarter of an hour on one CPU core.)
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from abc_corpus import FOLDERS, load_corpus, transpose
from help_formatter import HelpFormatter
from shared import require
from tqdm import trange
from transformers import AutoModelForCausalLM

import subquad
from subquad import (
    Rwkv7EmbeddingConfig,
    Rwkv7EmbeddingModel,
    Rwkv7RerankerConfig,
    Rwkv7RerankerForSequenceClassification,
    StateIndex,
)
from subquad.models.rwkv7_embedding.retrieval_files import save_embedding_files, save_reranker_files
from subquad_tokenizers import ByteTokenizer


require("rank_bm25", "music21", extra="tools,train")

from rank_bm25 import BM25Okapi  # noqa: E402


START = "goose-abc"
END = 128  # the id behind those of the byte tokenizer
INSTRUCTION = "Find the tune"
# Fields of the reranker's blocks that are the embedding model's.
SIZES = (
    *("num_hidden_layers", "intermediate_size"),
    *("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"),
)
SCALE = 20.0  # of cosines in the loss
LONGEST = 200  # characters of a tune in training
RANKED = 20  # tunes that the reranker scores for a held-out line


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="directory for the models and the index; must not exist")
    add("--folders", nargs="+", default=list(FOLDERS), help="folders of music21's corpus")
    add("--steps", type=int, default=60, help="training steps of the embedding model")
    add("--reranker-steps", type=int, default=60, help="training steps of both together")
    add("--batch-size", type=int, default=12, help="lines in a step")
    add("--lr", type=float, default=1.5e-3, help="peak of the learning rate")
    add("--tunes", type=int, default=105, help="tunes in the index besides the held-out ones")
    add("--lines", type=int, default=40, help="held-out lines to measure with")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    add("--seed", type=int, default=0, help="seed of weights, pairs and keys")
    arguments = parser.parse_args()
    if arguments.output.exists():
        parser.error(f"--output: {arguments.output} exists already")
    return arguments


def music(tune: str) -> str:
    """A tune without its number and title, which would identify it."""
    return tune.split("\n", 2)[2]


def some_line(tune: str, generator: random.Random, other_key: bool) -> str:
    """A line of the tune's notes."""
    return generator.choice((transpose(tune, generator) if other_key else tune).strip().split("\n")[5:])


def new_embedding_model() -> Rwkv7EmbeddingModel:
    """The blocks of goose-abc, whose embeddings get a row for the token that ends texts, and new heads."""
    goose = AutoModelForCausalLM.from_pretrained(subquad.embedded_model(START), dtype=torch.float32)
    fields = {name: value for name, value in goose.config.to_diff_dict().items() if name.endswith(("_dim", "_size"))}
    fields |= {"num_hidden_layers": goose.config.num_hidden_layers, "vocab_size": END + 1, "end_token_id": END}
    model = Rwkv7EmbeddingModel(Rwkv7EmbeddingConfig(**fields, tasks=["retr"], instruction=INSTRUCTION))
    blocks = goose.rwkv7.state_dict()
    blocks["emb.weight"] = torch.cat([blocks["emb.weight"], blocks["emb.weight"].mean(0, keepdim=True)])
    model.rwkv.load_state_dict(blocks)
    return model


def pad(texts: list[str], tokenizer: ByteTokenizer, end: bool = True) -> dict[str, torch.Tensor]:
    """Texts as one batch, with the token that ends texts unless a query follows."""
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] + [END] * end for text in texts]
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    }


def make_optimizer(parameters, arguments: argparse.Namespace, steps: int):
    optimizer = torch.optim.AdamW(parameters, lr=arguments.lr, betas=(0.9, 0.99), weight_decay=0.01)
    rise = max(0.1 * steps, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rise, (steps - step) / max(steps - rise, 1))
    )
    return optimizer, schedule


def step_of(loss: torch.Tensor, optimizer, schedule) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


def compare(model, tunes: list[str], lines: list[str], tokenizer: ByteTokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines of lines and tunes, and the loss: each line must be nearer to its tune than to the others."""
    found, answers = (
        torch.nn.functional.normalize(model.embed(**pad(texts, tokenizer)).pooler_output, dim=-1)
        for texts in ([model.query_text(line) for line in lines], [music(tune) for tune in tunes])
    )
    cosines = found @ answers.T
    return cosines, torch.nn.functional.cross_entropy(SCALE * cosines, torch.arange(len(lines)))


def judge(model, tunes: list[str], lines: list[str], cosines: torch.Tensor, tokenizer: ByteTokenizer) -> torch.Tensor:
    """The reranker's loss: each line with its tune, and with one of those that its embedding confuses with it."""
    count = len(lines)
    documents = pad([model.document_text(music(tune)) for tune in tunes], tokenizer, end=False)
    states = model.read(**documents, use_cache=True).cache
    weights = (SCALE / 2 * cosines.detach()).fill_diagonal_(-torch.inf).softmax(1)
    others = torch.multinomial(weights, 1)[:, 0]
    states.batch_select_indices(torch.cat([torch.arange(count), others]))
    queries = pad([model.query_after_document(line) for line in lines] * 2, tokenizer)
    labels = torch.cat([torch.ones(count), torch.zeros(count)])
    return model(**queries, cache=states, labels=labels).loss


def train(model, tunes: list[str], arguments: argparse.Namespace, steps: int) -> None:
    """Trains an embedding model, or a reranker together with its embedding model."""
    generator, tokenizer = random.Random(arguments.seed), ByteTokenizer()
    tunes = [tune for tune in tunes if len(tune) < LONGEST]
    optimizer, schedule = make_optimizer(model.parameters(), arguments, steps)
    model.train()
    bar = trange(steps, unit="step", desc=type(model).__name__)
    for _ in bar:
        batch = generator.sample(tunes, min(arguments.batch_size, len(tunes)))
        lines = [some_line(tune, generator, other_key=generator.random() < 0.7) for tune in batch]
        cosines, loss = compare(model, batch, lines, tokenizer)
        text = f"loss {loss.item():.3f}"
        if hasattr(model, "reranker"):
            judged = judge(model, batch, lines, cosines, tokenizer)
            loss, text = loss + judged, f"{text}, of the reranker {judged.item():.3f}"
        step_of(loss, optimizer, schedule)
        bar.set_postfix_str(text, refresh=False)
    model.eval()


def new_reranker(embedder: Rwkv7EmbeddingModel) -> Rwkv7RerankerForSequenceClassification:
    """A reranker behind the embedding model, whose blocks start as that model's, and its token as the end token."""
    fields = embedder.config.to_diff_dict()
    for name in ("model_type", "architectures", "dtype", "transformers_version", "id2label", "label2id"):
        fields.pop(name, None)
    own = {name: getattr(embedder.config, name) for name in SIZES}
    reranker = Rwkv7RerankerForSequenceClassification(Rwkv7RerankerConfig(**fields, reranker_config=own))
    weights = embedder.state_dict()
    start = {name.replace("rwkv.", "reranker.", 1): x for name, x in weights.items() if name.startswith("rwkv.")}
    start["reranker.emb.weight"] = start["reranker.emb.weight"][END:]
    reranker.load_state_dict({**weights, **start}, strict=False)
    return reranker


def recall(ranks: list[int]) -> str:
    """Shares of lines whose tune is the first, or among the first ten; and the mean of 1 / rank, up to rank 10."""
    ranks = np.array(ranks)
    reciprocal = np.where(ranks <= 10, 1 / ranks, 0).mean()
    return f"recall@1 {(ranks <= 1).mean():.1%}, recall@10 {(ranks <= 10).mean():.1%}, MRR@10 {reciprocal:.3f}"


def words(text: str) -> list[str]:
    """Bars and groups of notes, for BM25."""
    return re.findall(r"[^\s|:\]\[]+", text)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    corpus, output = load_corpus(tuple(arguments.folders)), arguments.output
    known = random.Random(arguments.seed).sample(corpus.train, min(arguments.tunes, len(corpus.train)))
    tunes = known + corpus.validation
    documents = {str(number): music(tune) for number, tune in enumerate(tunes)}
    held_out = random.Random(arguments.seed).sample(
        range(len(known), len(tunes)), min(arguments.lines, len(corpus.validation))
    )

    model = new_embedding_model()
    train(model, corpus.train, arguments, arguments.steps)
    reranker = new_reranker(model)
    train(reranker, corpus.train, arguments, arguments.reranker_steps)
    model.load_state_dict({name: x for name, x in reranker.state_dict().items() if not name.startswith("reranker.")})
    model.save_pretrained(output / "embedding")
    save_embedding_files(output / "embedding", ByteTokenizer(), model.config)
    reranker.save_pretrained(output / "reranker")
    save_reranker_files(output / "reranker", ByteTokenizer(), reranker.config)

    index = StateIndex.create(output / "index", output / "reranker")
    start = perf_counter()
    index.add(documents, batch_size=16, progress=True)
    print(f"{len(index)} tunes read in {perf_counter() - start:.0f} s, {index.nbytes / 1e6:.0f} MB")
    narrow = {}
    for kind in ("float16", "int8"):
        index.save(output / f"index-{kind}", kind)
        narrow[kind] = StateIndex.load(output / f"index-{kind}", output / "reranker")

    bm25 = BM25Okapi([words(text) for text in documents.values()])
    for other_key in (False, True):
        generator = random.Random(arguments.seed)
        lines = [some_line(tunes[number], generator, other_key) for number in held_out]
        print(f"{len(lines)} lines in {'another' if other_key else 'their own'} key, among {len(tunes)} tunes")
        scores = [bm25.get_scores(words(line)) for line in lines]
        print(f"  BM25:      {recall([int((s >= s[n]).sum()) for s, n in zip(scores, held_out, strict=True)])}")
        found = [[match.id for match in index.search(line, RANKED)] for line in lines]
        print(f"  embedding: {recall([rank_of(str(n), names) for n, names in zip(held_out, found, strict=True)])}")
        for kind, each in {"float32": index, **narrow}.items():
            start, ranks = perf_counter(), []
            for number, line in zip(held_out, lines, strict=True):
                ranks.append(rank_of(str(number), [match.id for match in each.rank(line, RANKED, candidates=RANKED)]))
            seconds = (perf_counter() - start) / len(lines)
            print(f"  reranker, states in {kind}: {recall(ranks)}, {seconds:.2f} s a line")
    shutil.rmtree(output / "index-float16")
    shutil.rmtree(output / "index-int8")


def rank_of(name: str, names: list[str]) -> int:
    return names.index(name) + 1 if name in names else 10**6


if __name__ == "__main__":
    main()
