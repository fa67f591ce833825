"""`subquad rank`"""

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from .arguments import add_dtype_and_device, positive_int
from .common import find_model, naming_options, read_prompt, usable_device


SUMMARY = "rank the documents of an index for a query"
DESCRIPTION = """\
Rank the documents of an index that `subquad index` made.

The documents with the most similar embeddings are found first. Then the reranker scores these from their saved states:
it reads only the query. A line of the output has the score, from 0 to 1, the id and the beginning of the text.

examples:
  subquad rank "How is a model converted?" --index docs.index --model ./reranker-0.1b
  subquad rank "How is a model converted?" --index docs.index --model ./reranker-0.1b --json -k 3
"""
SHOWN = 70  # characters of a text


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("query", metavar="QUERY", help="the query; `-` reads it from standard input")
    add("--index", required=True, metavar="DIR", help="directory of the index")
    add("--model", required=True, metavar="MODEL", help="directory of the reranker of the index's embedding model")
    add("-k", type=positive_int, default=10, metavar="N", help="number of documents to show (default: 10)")
    add(
        "--candidates",
        type=positive_int,
        default=100,
        metavar="N",
        help="number of documents that the reranker scores, at least those of -k (default: 100)",
    )
    add("--json", action="store_true", help="print one JSON object for each document, with its whole text")
    add_dtype_and_device(parser)


def run(args: Namespace) -> None:
    model = find_model(args.model)
    query = read_prompt(args.query)
    device = usable_device(args.device)

    from subquad.states.state_index import StateIndex

    with naming_options("k", "candidates"):
        index = StateIndex.load(args.index, model, dtype=args.dtype).to(device)
        found = index.rank(query, args.k, candidates=args.candidates, progress=sys.stderr.isatty())
    for match in found:
        if args.json:
            print(json.dumps(asdict(match), ensure_ascii=False))
        else:
            print(f"{match.score:.4f}  {match.id}  {' '.join(match.text.split())[:SHOWN]}")
