"""
Measures what a reranker's query costs: after stored states of the documents, and with the documents read again.

    python examples/measure_ranking.py --preset goose-reranker-0.1b --tokens 100 400

A model of the preset has random weights, which costs the same. The documents are random words; each query ranks all of
them. `CrossEncoder.predict` reads them again, with padding only where their lengths differ; `StateIndex.score` reads
the query after their states, from files that the system has in memory. Times are CPU seconds of the process with one
thread, the median of the repetitions, which take turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from sentence_transformers import CrossEncoder

import subquad
from subquad import Rwkv7RerankerForSequenceClassification, StateIndex
from subquad.models.rwkv7_embedding.retrieval_files import save_reranker_files
from subquad_tokenizers import RwkvWorldTokenizerFast


WORDS = [
    "state",
    "token",
    "model",
    "text",
    "head",
    "layer",
    "block",
    "query",
    "index",
    "file",
    "time",
    "word",
    "page",
    "line",
    "book",
    "tree",
]
QUERY = "Which of the pages is about a tree and a book?"
STATE_DTYPES = ("float32", "float16", "int8")


def make_model(preset: str, directory: Path) -> None:
    """Random weights, in which no projection is zero."""
    torch.manual_seed(0)
    model = Rwkv7RerankerForSequenceClassification(subquad.preset_config(preset))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2 and not parameter.any():
                parameter.normal_(std=0.02)
    model.save_pretrained(directory)
    save_reranker_files(directory, RwkvWorldTokenizerFast(), model.config)


def cpu_seconds(function: Callable) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="goose-reranker-0.1b", help="preset of a reranker")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[100, 400], help="words of a document")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "reranker"
        make_model(args.preset, model)
        encoder = CrossEncoder(str(model), device="cpu")
        for tokens in args.tokens:
            documents = {str(i): " ".join(draw.choices(WORDS, k=tokens)) for i in range(args.documents)}
            path = Path(folder) / f"index-{tokens}"
            index = StateIndex.create(path / "float32", model)
            reading = cpu_seconds(partial(index.add, documents))
            pairs = [(QUERY, text) for text in documents.values()]
            calls = {"read again": partial(encoder.predict, pairs)}
            for kind in STATE_DTYPES:
                if kind != "float32":
                    index.save(path / kind, kind)
                opened = StateIndex.load(path / kind, model)
                opened.check()
                calls[f"states in {kind}"] = partial(opened.score, QUERY, opened.ids)
            times = {name: [] for name in calls}
            for _ in range(args.repeats):
                for name, call in calls.items():
                    times[name].append(cpu_seconds(call))
            medians = {name: statistics.median(each) for name, each in times.items()}
            print(f"{args.documents} documents of {tokens} words; indexing took {reading:.1f} s")
            for name, seconds in medians.items():
                ratio = medians["read again"] / seconds
                print(f"  {name:18} {seconds:7.2f} s a query, {1 / seconds:6.2f} queries a second, {ratio:5.1f} x")


if __name__ == "__main__":
    main()
