"""
Finds a tune by a few of its bars, in any key, with Avey-B in sentence-transformers.

    python examples/retrieve.py --model avey-b-abc --output avey-b-tunes
    python examples/retrieve.py --model avey-b-tunes --steps 0 --query "B2 BA|GABG|A2 AG|FDEF"

The encoder turns every tune of examples/abc_corpus.py into one vector, the mean of its hidden states, and likewise the
line to look for, transposed to another key. The answer is the tune with the nearest vector. The encoder is trained on
pairs of a line and its tune: it must find the tune in the batch (MultipleNegativesRankingLoss). Before and after, it
is measured on lines of held-out tunes, which it must find among all tunes.

`--model` is a directory made by examples/train_avey_b_mlm.py or by this example. Without it, training starts from a
tiny encoder with random weights. (`pip install "subquad[train]" sentence-transformers`; about two minutes on two CPU
cores.)
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from pathlib import Path

import torch
from abc_corpus import FOLDERS, load_corpus, transpose
from help_formatter import HelpFormatter
from shared import model_directory, require
from tqdm import trange
from train_avey_b_mlm import SIZES, train_tokenizer

from subquad import AveyBConfig, AveyBModel


require("sentence_transformers", extra="tools,train")

from sentence_transformers import SentenceTransformer  # noqa: E402
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402
from sentence_transformers.util import batch_to_device  # noqa: E402


WARMUP = 0.1  # section 5.1: the learning rate rises over a tenth of the steps, then falls linearly


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", type=model_directory, help="directory or embedded model, an encoder (default: a new tiny one)")
    add("--output", type=Path, help="directory to save the trained encoder to, for SentenceTransformer(...)")
    add("--query", help="bars in ABC notation to look for (default: lines of three held-out tunes)")
    add("--folders", nargs="+", default=list(FOLDERS), help="folders of music21's corpus")
    add("--steps", type=int, default=250, help="training steps; 0 measures only")
    add("--batch-size", type=int, default=32, help="pairs per step")
    add("--lr", type=float, default=4e-3, help="peak of the learning rate")
    add("--top-k", type=int, default=5, help="tunes to print for a query")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    add("--seed", type=int, default=0, help="seed of weights, pairs and keys")
    arguments = parser.parse_args()
    if arguments.model is not None and not os.path.isdir(arguments.model):
        parser.error(f"--model: {arguments.model} is not a directory")
    return arguments


def music(tune: str) -> str:
    """A tune without its number and title, which would identify it."""
    return tune.split("\n", 2)[2]


def title(tune: str) -> str:
    return tune.split("\n", 2)[1].removeprefix("T:")


def some_line(tune: str, generator: random.Random) -> str:
    """A line of the tune's notes, in a random key."""
    return generator.choice(transpose(tune, generator).strip().split("\n")[5:])


def load_encoder(path: Path | None, tunes: list[str]) -> SentenceTransformer:
    if path is not None and (path / "modules.json").exists():
        return SentenceTransformer(str(path))
    with tempfile.TemporaryDirectory() as new:
        if path is None:
            tokenizer = train_tokenizer([music(tune) for tune in tunes], SIZES["tiny"]["vocabulary"])
            sizes = {name: SIZES["tiny"][name] for name in ("d_embed", "n_layers", "chunk_size", "k")}
            AveyBModel(AveyBConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(new)
            tokenizer.save_pretrained(new)
        transformer = Transformer(new if path is None else str(path))
    return SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension(), "mean")])


def train(encoder: SentenceTransformer, tunes: list[str], arguments: argparse.Namespace) -> None:
    generator = random.Random(arguments.seed)
    ranking = MultipleNegativesRankingLoss(encoder)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=arguments.lr, weight_decay=0.01)
    rise = max(WARMUP * arguments.steps, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rise, (arguments.steps - step) / max(arguments.steps - rise, 1))
    )
    encoder.train()
    bar = trange(arguments.steps, unit="step")
    for _ in bar:
        batch = generator.sample(tunes, min(arguments.batch_size, len(tunes)))
        columns = [some_line(tune, generator) for tune in batch], [music(tune) for tune in batch]
        features = [batch_to_device(encoder.preprocess(texts), encoder.device) for texts in columns]
        loss = ranking(features, None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
    encoder.eval()


def measure(encoder: SentenceTransformer, lines: list[str], answers: list[int], index: torch.Tensor) -> str:
    """Recall at 1 and 10, and NDCG@10: the only relevant tune counts 1 / log2(1 + its rank)."""
    found = encoder.encode(lines, convert_to_tensor=True, normalize_embeddings=True) @ index.T
    ranks = 1 + (found > found.gather(1, torch.tensor(answers, device=found.device)[:, None])).sum(1)
    gain = torch.where(ranks <= 10, 1 / (1 + ranks).log2(), 0.0)
    first, ten = ((ranks <= n).float().mean() for n in (1, 10))
    return f"recall@1 {first:.1%}, recall@10 {ten:.1%}, NDCG@10 {gain.mean():.3f}"


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    corpus = load_corpus(tuple(arguments.folders))
    tunes = corpus.validation + corpus.train
    generator = random.Random(arguments.seed)
    lines = [some_line(tune, generator) for tune in corpus.validation]
    answers = list(range(len(lines)))
    encoder = load_encoder(arguments.model and Path(arguments.model), corpus.train)

    def build_index() -> torch.Tensor:
        return encoder.encode([music(tune) for tune in tunes], convert_to_tensor=True, normalize_embeddings=True)

    index = build_index()
    print(f"{len(lines)} lines of held-out tunes, each to be found among {len(tunes)} tunes")
    print(f"before training: {measure(encoder, lines, answers, index)}")
    if arguments.steps:
        train(encoder, corpus.train, arguments)
        index = build_index()
        print(f"after training:  {measure(encoder, lines, answers, index)}")
    if arguments.output is not None:
        encoder.save(str(arguments.output))

    for query, answer in [(arguments.query, None)] if arguments.query else list(zip(lines, answers, strict=True))[:3]:
        print(f"\n{query}" + ("" if answer is None else f"   (from {title(tunes[answer])})"))
        scores = encoder.encode([query], convert_to_tensor=True, normalize_embeddings=True)[0] @ index.T
        for score, best in zip(*(x.tolist() for x in scores.topk(min(arguments.top_k, len(tunes)))), strict=True):
            print(f"  {score:.3f}  {title(tunes[best])}")


if __name__ == "__main__":
    main()
