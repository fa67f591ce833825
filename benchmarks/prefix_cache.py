"""
What a prefix cache saves: conversations of several users with one role, read turn by turn, in turns with and without
states; after a restart from files; with states in 8 bits; and as batches.

    python benchmarks/prefix_cache.py

prints a table: the share of tokens that are not read, the CPU time until the first token of an answer (median), and
the size of a state.

    python benchmarks/prefix_cache.py --clients 32

prints how long clients wait for the first token (median, and 95 % of the answers) if each of them, in a thread of its
own, sends its turns to one model with continuous batching, with and without a prefix cache. The next turn is sent as
soon as the answer of 8 tokens is there. The waits are CPU time of the whole process, so other programs do not matter.
The model has random weights.
"""

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from subquad import PrefixCache, Rwkv6Config, Rwkv6ForCausalLM


ANSWER = 8  # tokens of an answer to a client


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--width", type=int, default=512)
    add("--layers", type=int, default=8)
    add("--users", type=int, default=8)
    add("--turns", type=int, default=4)
    add("--role", type=int, default=512, help="tokens of the beginning that all users share")
    add("--turn", type=int, default=64, help="tokens that a turn adds")
    add("--clients", type=int, help="measure this number of clients at a time instead")
    return parser.parse_args()


def conversations(arguments: argparse.Namespace) -> list[list[torch.Tensor]]:
    """For every turn the texts of all users."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(1, 1000, shape, generator=generator)

    texts, turns = draw(arguments.role).expand(arguments.users, -1), []
    for _ in range(arguments.turns):
        texts = torch.cat((texts, draw(arguments.users, arguments.turn)), 1)
        turns.append(list(texts))
    return turns


@torch.no_grad()
def first_token(model: Rwkv6ForCausalLM, prefixes: PrefixCache | None, texts: torch.Tensor) -> float:
    """CPU seconds until the logits after the texts (rows, tokens) are there."""
    start = time.process_time()
    if prefixes is None:
        model(texts, logits_to_keep=1)
    else:
        cache = prefixes.read(model, texts[:, :-1], torch.ones_like(texts[:, :-1]))
        model(texts[:, -1:], cache=cache)
    return time.process_time() - start


def ask(manager, role: list[int], turns: list[list[int]]) -> list[float]:
    """The CPU seconds of this process, all clients together, while a client waits for the first token of each turn."""
    text, waits = role, []
    for turn in turns:
        text, start = text + turn, time.process_time()
        request = manager.add_request(text, max_new_tokens=ANSWER, eos_token_id=-1, streaming=True)
        outputs = manager.request_id_iter(request)
        next(outputs)
        waits.append(time.process_time() - start)
        *_, last = outputs
        text = text + last.generated_tokens
    return waits


def measure_clients(model: Rwkv6ForCausalLM, arguments: argparse.Namespace, directory: str) -> None:
    """Prints the table of the clients."""
    draw = torch.Generator().manual_seed(0)
    role = torch.randint(1, 1000, (arguments.role,), generator=draw).tolist()
    turns = torch.randint(1, 1000, (arguments.clients, arguments.turns, arguments.turn), generator=draw).tolist()
    ways = {
        "every text is read": None,
        "states in memory": PrefixCache(),
        "states in memory and files": PrefixCache(directory=directory),
        "after a restart, from files": PrefixCache(directory=directory),
    }
    print(f"{'':30} {'not read':>9} {'median':>9} {'95 %':>9} {'in all':>9}")
    for name, prefixes in ways.items():
        type(model).make_prefix_cache, cpu = lambda _, prefixes=prefixes: prefixes, time.process_time()
        vars(model).pop("own_prefix_cache", None)
        with (
            model.continuous_batching_context_manager(
                GenerationConfig(do_sample=False), continuous_batching_config=ContinuousBatchingConfig()
            ) as manager,
            ThreadPoolExecutor(arguments.clients) as pool,
        ):
            waits = [*chain.from_iterable(pool.map(lambda each: ask(manager, role, each), turns))]
        if prefixes is not None:
            prefixes.flush()
        saved = "" if prefixes is None else f"{1 - prefixes.tokens_read / prefixes.tokens_asked:.1%}"
        tail = statistics.quantiles(waits, n=20)[-1]
        print(
            f"{name:30} {saved:>9} {statistics.median(waits):>7.2f} s {tail:>7.2f} s "
            f"{time.process_time() - cpu:>7.1f} s",
            flush=True,
        )


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Rwkv6Config(
        vocab_size=1000, hidden_size=arguments.width, num_hidden_layers=arguments.layers, attention_hidden_size=None
    )
    model, turns = Rwkv6ForCausalLM(config).eval(), conversations(arguments)
    if arguments.clients is not None:
        with tempfile.TemporaryDirectory() as directory:
            measure_clients(model, arguments, directory)
        return
    with tempfile.TemporaryDirectory() as directory:
        ways = {
            "every text is read": None,
            "states in memory": PrefixCache(),
            "states in memory, 8 bits": PrefixCache(dtype="int8"),
            "states in memory and files": PrefixCache(directory=directory),
        }
        times = {name: [] for name in ways}
        for texts in turns:
            for text in texts:
                for name, prefixes in ways.items():
                    times[name].append(first_token(model, prefixes, text[None]))
        ways["states in memory and files"].flush()
        # The last turn again, each as the first text of a process.
        name = "after a restart, from files"
        times[name] = []
        for text in turns[-1]:
            ways[name] = PrefixCache(directory=directory)
            times[name].append(first_token(model, ways[name], text[None]))
    for name, prefixes in {"batches, every text is read": None, "batches, states in memory": PrefixCache()}.items():
        ways[name] = prefixes
        times[name] = [first_token(model, prefixes, torch.stack(texts)) / len(texts) for texts in turns]
    print(f"{'':30} {'not read':>9} {'first token':>12} {'a state':>9}")
    for name, prefixes in ways.items():
        saved, size = "", ""
        if prefixes is not None:
            saved = f"{1 - prefixes.tokens_read / prefixes.tokens_asked:.1%}"
            if prefixes.tokens_read:
                size = f"{prefixes.nbytes / len(prefixes) / 1e6:.2f} MB"
        print(f"{name:30} {saved:>9} {1000 * statistics.median(times[name]):>9.1f} ms {size:>9}")


if __name__ == "__main__":
    main()
