"""
What a prefix cache saves: conversations of several users with one role, read turn by turn, in turns with and without
states; after a restart from files; with states in 8 bits; and as batches.

    python benchmarks/prefix_cache.py

prints a table: the share of tokens that are not read, the CPU time until the first token of an answer (median), and
the size of a state. The model has random weights.
"""

import argparse
import statistics
import tempfile
import time

import torch

from subquad import PrefixCache, Rwkv6Config, Rwkv6ForCausalLM


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--width", type=int, default=512)
    add("--layers", type=int, default=8)
    add("--users", type=int, default=8)
    add("--turns", type=int, default=4)
    add("--role", type=int, default=512, help="tokens of the beginning that all users share")
    add("--turn", type=int, default=64, help="tokens that a turn adds")
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


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Rwkv6Config(
        vocab_size=1000, hidden_size=arguments.width, num_hidden_layers=arguments.layers, attention_hidden_size=None
    )
    model, turns = Rwkv6ForCausalLM(config).eval(), conversations(arguments)
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
