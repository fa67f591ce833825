"""
Measures serving with vLLM. Each part writes a record, for the figures of `docs/figures.py`.

    python examples/serving/benchmark.py servers    # vLLM's server and `transformers serve`, by number of clients
    python examples/serving/benchmark.py batches    # `vllm.LLM` and `generate_batch` beside left-padded `generate`
    python examples/serving/benchmark.py soak       # the memory of vLLM's server under thousands of requests

The models are `finch-abc` and models with random weights of 12 layers of width 512; --model takes others. Run it in an
environment with vLLM (`make .venv-vllm/.installed`). The two sides of a comparison take turns in one run.
"""

import argparse
import asyncio
import contextlib
import datetime
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import torch
import transformers
from clients import HEADER, Question, measure, server, vllm_command
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from subquad.hub.info import embedded_models
from subquad.hub.new_files import replacing
from subquad_tokenizers import ByteTokenizer


RECORDS = Path(__file__).parent / "records"
# Models with random weights, of 12 layers of width 512.
RANDOM = {
    "finch-12x512": {"model_type": "rwkv6", "hidden_size": 512, "num_hidden_layers": 12},
    "raven-12x512": {"model_type": "raven", "hidden_size": 512, "num_hidden_layers": 12, "num_slots": 256},
    "gecko-12x512": {
        "model_type": "gecko",
        "model_dim": 512,
        "num_layers": 12,
        "z_dim": 128,
        "value_dim": 1024,
        "ffn_hidden_dim": 1024,
        "chunk_size": 512,
    },
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("part", choices=PARTS)
    add("--model", default="finch-abc", help=f"directory, embedded model, {', '.join(RANDOM)} (default: finch-abc)")
    add("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="numbers of clients (default: 1 to 32)")
    add("--tokens", type=int, default=128, help="tokens of an answer (default: 128)")
    add("--rounds", type=int, default=3, help="how often batches are measured (default: 3)")
    add("--requests", type=int, default=2000, help="requests of the soak, one after the other (default: 2000)")
    add("--waiting", type=int, default=1000, help="requests that wait in the soak beside 64 others (default: 1000)")
    add("--records", type=Path, default=RECORDS, help="folder of the records (default: beside this file)")
    return parser.parse_args()


def find_model(name: str, folder: str) -> str:
    """The directory of a model; models with random weights are made in a folder."""
    if name not in RANDOM:
        return str(embedded_models().get(name, name))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**RANDOM[name], vocab_size=512))
    model.save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    return folder


def measure_servers(arguments: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """For each number of clients, one request of each of them to one server and then to the others."""
    more = ["--dtype", "float32", "--max-num-seqs", "32", "--max-model-len", "4096", "--generation-config", "vllm"]
    own = [sys.executable, "-m", "subquad_cli", "run", "transformers", "serve", model, "--dtype", "float32"]
    rows = []
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:  # they start at the same time
        commands = (vllm_command(model, *more), own, [*own, "--no-continuous-batching"])
        vllm, together, single = pool.map(lambda command: stack.enter_context(server(command)), commands)
        question = Question(HEADER, arguments.tokens, of_transformers=True)
        sides = {
            "vLLM": (vllm, Question(HEADER, arguments.tokens)),
            "transformers serve": (together, question),
            "transformers serve, one after the other": (single, question),
        }
        for (url, _), question in sides.values():
            measure(url, model, 2, 1, question)  # the first requests take longer
        for clients in arguments.clients:
            for name, ((url, process), question) in sides.items():
                before = cpu_seconds(process.pid)
                seconds, answers = measure(url, model, clients, 1, question)
                tokens = sum(answer.tokens for answer in answers)
                first, whole = ([getattr(answer, field) for answer in answers] for field in ("first", "whole"))
                row = {
                    "server": name,
                    "clients": clients,
                    "tokens": tokens,
                    "tokens_per_second": tokens / seconds,
                    "tokens_per_cpu_second": tokens / (cpu_seconds(process.pid) - before),
                    "first_token_median_seconds": statistics.median(first),
                    "answer_median_seconds": statistics.median(whole),
                    "answer_longest_seconds": max(whole),
                }
                rows.append(show(row))
    return rows


def measure_batches(arguments: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """
    Answers of one length, which is the best case for `generate`, and of lengths that differ by a factor of 16, for 32
    and for 128 requests. `generate` gets batches of 32 in the order of the requests. Only requested tokens count.
    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    torch.set_num_threads(1)
    from vllm import LLM, SamplingParams, TokensPrompt

    longest = 2 * arguments.tokens
    llm = LLM(model, dtype="float32", max_num_seqs=32, max_model_len=2048, max_num_batched_tokens=2048)
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.set_num_threads(1)
    draw = random.Random(0)

    def requests(number: int, mixed: bool) -> list[tuple[list[int], int]]:
        lengths = [longest // 16, longest, *(draw.randint(longest // 16, longest) for _ in range(number - 2))]
        draw.shuffle(lengths)
        prompts = [[draw.randint(3, 127) for _ in range(draw.randint(32, 128))] for _ in range(number)]
        return [(prompt, n if mixed else arguments.tokens) for prompt, n in zip(prompts, lengths, strict=True)]

    def by_vllm(cases):
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in cases]
        options = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in cases]
        outputs = llm.generate(prompts, options, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [n for _, n in cases]

    def by_generate(cases):
        for start in range(0, len(cases), 32):
            part = cases[start : start + 32]
            width = max(len(prompt) for prompt, _ in part)
            rows = [[0] * (width - len(prompt)) + prompt for prompt, _ in part]
            mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in part]
            new = max(n for _, n in part)
            options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
            own.generate(torch.tensor(rows), attention_mask=torch.tensor(mask), **options)

    def by_generate_batch(cases):
        greedy = GenerationConfig(do_sample=False)
        config = ContinuousBatchingConfig(max_requests_per_batch=32, max_batch_tokens=2048)
        with own.continuous_batching_context_manager(greedy, continuous_batching_config=config) as manager:
            for prompt, n in cases:
                manager.add_request(prompt, max_new_tokens=n, eos_token_id=-1)
            outputs = [manager.get_result() for _ in cases]
        assert sorted(len(output.generated_tokens) for output in outputs) == sorted(n for _, n in cases)

    sides = {"vllm.LLM": by_vllm, "generate_batch": by_generate_batch, "generate": by_generate}
    found = []
    for number, mixed in ((32, False), (32, True), (128, True)):
        cases = requests(number, mixed)
        tokens = sum(n for _, n in cases)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name, side in sides.items():
                times[name].append(time_of(side, cases))
        row = {"requests": number, "answers": f"{longest // 16} to {longest}" if mixed else str(arguments.tokens)}
        for name, values in times.items():
            wall, cpu = (tokens / statistics.median(column) for column in zip(*values, strict=True))
            row |= {f"{name}, tokens_per_second": wall, f"{name}, tokens_per_cpu_second": cpu}
        for name in ("vllm.LLM", "generate_batch"):
            pairs = zip(times[name], times["generate"], strict=True)
            row[f"{name}, ratio"] = statistics.median(b[1] / a[1] for a, b in pairs)  # of processor time
        found.append(show(row))
    return found


def measure_soak(arguments: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """
    The memory of all processes of a server, while it answers thousands of short requests of various lengths, and while
    a thousand are waiting.
    """
    more = ["--dtype", "float32", "--max-num-seqs", "64", "--max-model-len", "4096"]
    draw = random.Random(0)
    with server(vllm_command(model, *more)) as (url, process):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=None, max_retries=0)
        rows = [show({"phase": "start", "answered": 0, "mebibytes": mebibytes(process.pid)})]

        async def ask(tokens: int) -> None:
            prompt = [draw.randint(3, 127) for _ in range(draw.randint(1, 200))]
            options = {"temperature": 0, "extra_body": {"ignore_eos": True}}
            await client.completions.create(model=model, prompt=prompt, max_tokens=tokens, **options)

        async def one_after_the_other() -> None:
            """Sixteen clients, with short answers."""
            left = iter(range(arguments.requests))
            answered = 0

            async def work():
                nonlocal answered
                for _ in left:
                    await ask(draw.randint(1, 8))
                    answered += 1
                    if answered % (arguments.requests // 20) == 0:
                        rows.append(
                            show({"phase": "short", "answered": answered, "mebibytes": mebibytes(process.pid)})
                        )

            await asyncio.gather(*(work() for _ in range(16)))

        async def all_at_once() -> None:
            """So many requests that most of them wait."""
            number = arguments.waiting + 64
            tasks = [asyncio.create_task(ask(32)) for _ in range(number)]
            while left := sum(not task.done() for task in tasks):
                rows.append(show({"phase": "waiting", "answered": number - left, "mebibytes": mebibytes(process.pid)}))
                await asyncio.wait(tasks, timeout=5)
            await asyncio.gather(*tasks)
            rows.append(show({"phase": "waiting", "answered": number, "mebibytes": mebibytes(process.pid)}))

        asyncio.run(one_after_the_other())
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=None, max_retries=0)
        asyncio.run(all_at_once())
    return rows


PARTS = {"servers": measure_servers, "batches": measure_batches, "soak": measure_soak}


def processes(pid: int) -> list[psutil.Process]:
    """A process and its descendants."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process and its descendants."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes(pid)))


def mebibytes(pid: int) -> float:
    """Their private memory."""
    return sum(process.memory_full_info().uss for process in processes(pid)) / 2**20


def time_of(function: Callable, cases: list) -> tuple[float, float]:
    """The time of a call with these requests: wall-clock seconds, and this process's CPU seconds."""
    gc.collect()
    begin = time.perf_counter(), time.process_time()
    function(cases)
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def show(row: dict[str, Any]) -> dict[str, Any]:
    """Prints a row, with rounded numbers."""
    row = {
        name: round(value, 3 if value < 100 else 1) if isinstance(value, float) else value
        for name, value in row.items()
    }
    print(json.dumps(row), flush=True)
    return row


def cpu_name() -> str:
    """The processor, and its relevant instructions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = [
        flag
        for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
        if flag in fields.get("flags", "").split()
    ]
    return f"{fields.get('model name', 'unknown')}, {os.cpu_count()} cores, {' '.join(flags)}"


def main() -> None:
    arguments = parse_arguments()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        rows = PARTS[arguments.part](arguments, find_model(arguments.model, folder))
    words = sys.argv[1:]
    if "--records" in words:  # the location of the record does not matter
        start = words.index("--records")
        del words[start : start + 2]
    record = {
        "part": arguments.part,
        "model": arguments.model,
        "command": f"python examples/serving/benchmark.py {' '.join(words)}",
        "date": datetime.date.today().isoformat(),
        "processor": cpu_name(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "vllm": vllm.__version__,
        },
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "OMP_"))},
        "rows": rows,
    }
    arguments.records.mkdir(parents=True, exist_ok=True)
    path = arguments.records / f"{arguments.part}-{arguments.model}.json"
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
