"""
Trains a small EmbeddingRWKV and its reranker to find a tune by one of its lines, and compares both with BM25.

    python examples/train_embedding_rwkv.py --output tunes

The embedding model starts from goose-abc, which writes tunes. It learns to find the tune of a line among the tunes of
the batch. It also goes on predicting the bytes of a line after its tune, and so learns to compare the two.
Then it is frozen, and the reranker learns from its states after pairs of a tune and a line. Pairs are read once and
used for several steps. At last all tunes are read into an index.

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
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from abc_corpus import FOLDERS, load_corpus, transpose
from help_formatter import HelpFormatter
from shared import require
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize
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
SCALE = 20.0  # of cosines in the loss
LONGEST = 200  # characters of a tune in training
KEPT, STEPS_A_BATCH = 40, 5  # batches whose states are kept; steps of the reranker for each that is read
RANKED = 20  # tunes that the reranker scores for a held-out line


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="directory for the models and the index; must not exist")
    add("--folders", nargs="+", default=list(FOLDERS), help="folders of music21's corpus")
    add("--steps", type=int, default=150, help="training steps of the embedding model")
    add("--reranker-steps", type=int, default=900, help="training steps of the reranker")
    add("--batch-size", type=int, default=12, help="tunes in a step, and lines, one of each")
    add("--other-key", type=float, default=0.7, help="share of lines in another key")
    add("--lr", type=float, default=1.5e-3, help="peak of the learning rate")
    add("--tunes", type=int, default=105, help="tunes in the index besides the held-out ones")
    add("--lines", type=int, default=60, help="held-out lines to measure with")
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


def new_models() -> tuple[Rwkv7EmbeddingModel, Rwkv7RerankerForSequenceClassification, torch.nn.Linear]:
    """
    An embedding model with the blocks of goose-abc, whose embeddings get a row for the token that ends texts; a
    reranker with the same modules and a random reader of states; and the head with which goose-abc predicts bytes.
    """
    goose = AutoModelForCausalLM.from_pretrained(subquad.embedded_model(START), dtype=torch.float32)
    fields = {name: value for name, value in goose.config.to_diff_dict().items() if name.endswith(("_dim", "_size"))}
    fields |= {"num_hidden_layers": goose.config.num_hidden_layers, "vocab_size": END + 1, "end_token_id": END}
    fields |= {"tasks": ["retr"], "instruction": INSTRUCTION}
    model = Rwkv7EmbeddingModel(Rwkv7EmbeddingConfig(**fields))
    blocks = goose.rwkv7.state_dict()
    blocks["emb.weight"] = torch.cat([blocks["emb.weight"], blocks["emb.weight"].mean(0, keepdim=True)])
    model.rwkv.load_state_dict(blocks)
    reranker = Rwkv7RerankerForSequenceClassification(Rwkv7RerankerConfig(**fields)).eval()
    reranker.rwkv, reranker.head = model.rwkv, model.head
    return model, reranker, goose.head


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


def draw(
    tunes: list[str], arguments: argparse.Namespace, cosines: torch.Tensor | None = None
) -> Iterator[tuple[list[str], list[str]]]:
    """Batches of tunes, those nearest to one of them if there are cosines, and of a line of each."""
    generator, count = random.Random(arguments.seed), arguments.batch_size
    while True:
        if cosines is None:
            batch = generator.sample(tunes, count)
        else:
            batch = [tunes[n] for n in cosines[generator.randrange(len(tunes))].topk(count).indices]
        yield batch, [some_line(tune, generator, generator.random() < arguments.other_key) for tune in batch]


def read_pairs(model, tunes: list[str], lines: list[str], repeats: int, tokenizer: ByteTokenizer):
    """The model's output for each line after a tune, and the ids of the lines; each tune has `repeats` lines."""
    documents = pad([model.document_text(music(tune)) for tune in tunes], tokenizer, end=False)
    states = model.read(**documents, use_cache=True).cache
    states.batch_repeat_interleave(repeats)
    queries = pad([model.query_after_document(line) for line in lines], tokenizer)
    return model.read(**queries, cache=states, use_cache=True), queries["input_ids"]


def embed(model, texts: list[str], tokenizer: ByteTokenizer) -> torch.Tensor:
    return normalize(model.embed(**pad(texts, tokenizer)).pooler_output, dim=-1)


def compare(model, tunes: list[str], lines: list[str], tokenizer: ByteTokenizer) -> torch.Tensor:
    """The loss of the embeddings: each line must be nearer to its tune than to the others."""
    found = embed(model, [model.query_text(line) for line in lines], tokenizer)
    answers = embed(model, [music(tune) for tune in tunes], tokenizer)
    return cross_entropy(SCALE * found @ answers.T, torch.arange(len(lines)))


def predict(
    model, head: torch.nn.Linear, tunes: list[str], lines: list[str], tokenizer: ByteTokenizer
) -> torch.Tensor:
    """The loss of the bytes of each line, which are predicted after its tune."""
    outputs, ids = read_pairs(model, tunes, lines, 1, tokenizer)
    targets = ids[:, 1:].masked_fill((ids[:, 1:] == END) | (ids[:, 1:] == 0), -100)
    return cross_entropy(head(outputs.last_hidden_state[:, :-1]).flatten(0, 1), targets.flatten())


def train_embedding(model, head: torch.nn.Linear, tunes: list[str], arguments: argparse.Namespace) -> None:
    tokenizer, batches = ByteTokenizer(), draw(tunes, arguments)
    optimizer, schedule = make_optimizer([*model.parameters(), *head.parameters()], arguments, arguments.steps)
    model.train()
    bar = trange(arguments.steps, unit="step", desc="embedding")
    for _ in bar:
        batch = next(batches)
        nearest, bytes_ = compare(model, *batch, tokenizer), predict(model, head, *batch, tokenizer)
        step_of(nearest + bytes_, optimizer, schedule)
        bar.set_postfix_str(f"loss {nearest.item():.3f}, of bytes {bytes_.item():.3f}", refresh=False)
    model.eval()


def train_reranker(model, tunes: list[str], arguments: argparse.Namespace) -> None:
    """
    For each line the score of its tune must be the highest of the batch, and the only positive one. The other tunes
    are those that the embeddings confuse with one of them.
    """
    generator, tokenizer, count = random.Random(arguments.seed), ByteTokenizer(), arguments.batch_size
    with torch.no_grad():
        parts = [tunes[start : start + 16] for start in range(0, len(tunes), 16)]
        embeddings = torch.cat([embed(model, list(map(music, part)), tokenizer) for part in parts])
    batches, kept = draw(tunes, arguments, embeddings @ embeddings.T), deque(maxlen=KEPT)
    optimizer, schedule = make_optimizer([*model.reranker.parameters()], arguments, arguments.reranker_steps)
    bar = trange(arguments.reranker_steps, unit="step", desc="reranker")
    for step in bar:
        if step % STEPS_A_BATCH == 0:
            batch, lines = next(batches)
            with torch.no_grad():
                kept.append(read_pairs(model, batch, lines * count, count, tokenizer)[0].cache)
        scores = model.score(generator.choice(kept)).view(count, count).T
        loss = cross_entropy(scores, torch.arange(count)) + binary_cross_entropy_with_logits(scores, torch.eye(count))
        step_of(loss, optimizer, schedule)
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)


def recall(scores: Iterable[np.ndarray], found: Iterable[list[str]], answers: list[str]) -> str:
    """Shares of lines whose tune is the first, or among the first ten; and the mean of 1 / rank, up to rank 10."""
    ranks = [
        (each >= each[names.index(answer)]).sum() if answer in names else np.inf
        for each, names, answer in zip(scores, found, answers, strict=True)
    ]
    ranks = np.array(ranks)
    reciprocal = np.where(ranks <= 10, 1 / ranks, 0).mean()
    return f"recall@1 {(ranks <= 1).mean():.1%}, recall@10 {(ranks <= 10).mean():.1%}, MRR@10 {reciprocal:.3f}"


def order(scores: np.ndarray) -> np.ndarray:
    """Which of two tunes has the higher score for a line, for all pairs: (lines, pairs) from (lines, tunes)."""
    i, j = np.triu_indices(scores.shape[1], 1)
    return scores[:, i] > scores[:, j]


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

    model, reranker, head = new_models()
    short = [tune for tune in corpus.train if len(tune) < LONGEST]
    if len(short) < arguments.batch_size:
        raise SystemExit(
            f"--batch-size {arguments.batch_size}: {len(short)} tunes have less than {LONGEST} characters"
        )
    train_embedding(model, head, short, arguments)
    train_reranker(reranker, short, arguments)
    model.save_pretrained(output / "embedding")
    save_embedding_files(output / "embedding", ByteTokenizer(), model.config)
    reranker.save_pretrained(output / "reranker")
    save_reranker_files(output / "reranker", ByteTokenizer(), reranker.config)

    index = StateIndex.create(output / "index", output / "reranker")
    index.add(documents, batch_size=16, progress=True)
    indexes = {"float32": index}
    for kind in ("float16", "int8"):
        index.save(output / f"index-{kind}", kind)
        indexes[kind] = StateIndex.load(output / f"index-{kind}", output / "reranker")

    bm25, answers = BM25Okapi([words(text) for text in documents.values()]), list(map(str, held_out))
    for other_key in (False, True):
        generator = random.Random(arguments.seed)
        lines = [some_line(tunes[number], generator, other_key) for number in held_out]
        print(f"{len(lines)} lines in {'another' if other_key else 'their own'} key, among {len(tunes)} tunes")
        scores = [bm25.get_scores(words(line)) for line in lines]
        print(f"  BM25: {recall(scores, [list(documents)] * len(lines), answers)}")
        matches = [index.search(line, RANKED) for line in lines]
        found = [[match.id for match in each] for each in matches]
        scores = [np.array([match.score for match in each]) for each in matches]
        print(f"  embedding: {recall(scores, found, answers)}")
        scores = {}
        for kind, each in indexes.items():
            scores[kind] = np.array([each.score(line, names) for line, names in zip(lines, found, strict=True)])
            same = (order(scores[kind]) == order(scores["float32"])).mean()
            print(f"  reranker, {kind} states: {recall(scores[kind], found, answers)}, {same:.2%} of pairs in order")
    shutil.rmtree(output / "index-float16")
    shutil.rmtree(output / "index-int8")


if __name__ == "__main__":
    main()
