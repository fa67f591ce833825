"""Prefix states leave the pool for host memory and files, and come back. The answers are those without a cache."""

import resource
import time
from pathlib import Path

import pytest
import torch
from engine import VOCABULARY, engine, expected, model_directory, outputs
from transformers import AutoModelForCausalLM
from vllm import LLM
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs

import subquad


BLOCK = 32


def offloading(**extra):
    """Options of an engine that offloads states to 64 MiB, or as much as is given."""
    extra = {"cpu_bytes_to_use": 2**26, **extra}
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    return {"enable_prefix_caching": True, "block_size": BLOCK, "kv_transfer_config": transfer}


class Conversations:
    """Conversations of random tokens, each of which goes on after all others have."""

    def __init__(self, number):
        self.random = torch.Generator().manual_seed(0)
        self.texts, self.kept = [[] for _ in range(number)], [0] * number

    def tokens(self):
        length = int(torch.randint(40, 100, (), generator=self.random))
        return torch.randint(3, VOCABULARY, (length,), generator=self.random).tolist()

    def turn(self, llm):
        """
        The next turn of every conversation: its requests, their answers, the numbers of prompt tokens that were not
        read again, and the largest possible ones. vLLM keeps a state at the last end of a block inside a prompt.
        """
        requests, kept = [(text + self.tokens(), 8) for text in self.texts], self.kept
        found = outputs(llm, requests)
        answers = [list(output.outputs[0].token_ids) for output in found]
        self.texts = [prompt + answer for (prompt, _), answer in zip(requests, answers, strict=True)]
        self.kept = [(len(prompt) - 1) // BLOCK * BLOCK for prompt, _ in requests]
        return requests, answers, [output.num_cached_tokens for output in found], kept


@pytest.mark.parametrize("name", ["rwkv6", "raven-window", pytest.param("gecko", marks=pytest.mark.slow)])
def test_more_conversations_than_slots(name, tmp_path):
    """The state that a turn left is there for the next one, although the pool has fewer slots."""
    model = model_directory(name, tmp_path)
    conversations = Conversations(12)
    with engine(model, num_gpu_blocks_override=12, **offloading()) as llm:
        turns = [conversations.turn(llm) for _ in range(2)]
    for requests, answers, cached, kept in turns:
        assert answers == expected(model, requests)
        assert cached == kept


def test_states_in_files(tmp_path):
    """
    Another engine goes on from them, but not from damaged ones, and one with other weights does not. Their size is
    limited.
    """
    model, directory = model_directory("rwkv6", tmp_path), tmp_path / "states"
    directory.mkdir()
    other = directory / "other.bin"
    other.write_bytes(bytes(2**17))

    def turn(limit=2**20):
        files = {"directory": str(directory), "directory_bytes": limit}
        with engine(model, num_gpu_blocks_override=8, kv_offloading_size=2**-12, **offloading(**files)) as llm:
            requests, answers, cached, kept = conversations.turn(llm)
        assert answers == expected(model, requests)
        assert sum(file.stat().st_size for file in directory.rglob("*.bin") if file != other) <= limit
        return cached, kept

    conversations = Conversations(8)
    turn()
    cached, kept = turn()
    assert cached == kept
    files = {file: file.read_bytes() for file in directory.rglob("*.bin") if file != other}
    for file, content in files.items():
        file.write_bytes(bytes((content[0] ^ 1,)) + content[1:])
    cached, _ = turn()
    assert sum(cached) == 0 and all(
        not file.exists() or file.read_bytes() == content for file, content in files.items()
    )
    cached, kept = turn(66_000)  # four states
    assert 0 < sum(cached) < sum(kept)
    changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        changed.get_output_embeddings().weight[0] += 1
    changed.save_pretrained(model)
    cached, kept = turn()
    assert sum(cached) == 0 < sum(kept)


@pytest.mark.parametrize(
    ("name", "options", "others"),
    [
        ("kv_connector_extra_config", {"cpu_gigabytes": 1}, {}),
        ("cpu_bytes_to_use", {"cpu_bytes_to_use": 0}, {}),
        ("cpu_bytes_to_use", {"cpu_bytes_to_use": "4"}, {}),
        ("directory_bytes", {"directory": "{files}", "directory_bytes": 0}, {}),
        ("directory_bytes", {"directory_bytes": 2**20}, {}),
        ("directory", {"directory": "{model}/config.json"}, {}),
        ("directory", {"directory": "{files}"}, {"enable_lora": True}),
        ("enable_prefix_caching", {}, {"enable_prefix_caching": False}),
        ("kv_offloading_size", {}, {"kv_offloading_size": 0.0}),
    ],
)
def test_refused_options(name, options, others, tmp_path):
    model = subquad.embedded_model("finch-abc")
    places = {"{files}": str(tmp_path), "{model}/config.json": str(model / "config.json")}
    options = {name: places.get(value, value) for name, value in options.items()}
    args = EngineArgs(model=str(model), dtype="float32", enforce_eager=True, **offloading(**options) | others)
    with pytest.raises(ValueError, match=f"`{name}` must"):
        args.create_engine_config()


@pytest.mark.parametrize("name", ["cpu_bytes_to_use", "directory_bytes"])
def test_room_for_no_state(name, tmp_path):
    """Only the engine knows the size of a state."""
    options = offloading(**{"directory": str(tmp_path), name: 4096})
    with pytest.raises(ValueError, match=f"`{name}` must be at least 69,632, the size of one state, got 4"):
        LLM(model=str(subquad.embedded_model("finch-abc")), dtype="float32", enforce_eager=True, **options)
    cleanup_dist_env_and_memory()


@pytest.mark.slow
def test_tensor_parallel(tmp_path):
    """Each process copies its part of the states."""
    model = model_directory("rwkv6", tmp_path)
    conversations = Conversations(12)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "num_gpu_blocks_override": 12}
    with engine(model, **options, **offloading()) as llm:
        turns = [conversations.turn(llm) for _ in range(2)]
    for requests, answers, cached, kept in turns:
        assert answers == expected(model, requests)
        assert cached == kept


@pytest.mark.slow
def test_hundreds_of_conversations(capsys):
    """500 of three turns, in 32 slots: without a cache, with the pool alone, and with offloading."""
    model = subquad.embedded_model("finch-abc")
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 33}  # one is for padding
    pool = {"enable_prefix_caching": True, "block_size": BLOCK}
    answers, hits = {}, {}
    for name, more in {"none": {}, "pool": pool, "offloading": offloading(cpu_bytes_to_use=2**28)}.items():
        conversations, memory, seconds, turns = Conversations(500), [], time.process_time(), []
        with engine(model, **options, **more) as llm:
            for _ in range(3):
                turns.append(conversations.turn(llm))
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                memory.append(pages * resource.getpagesize() // 2**20)
        seconds = time.process_time() - seconds
        answers[name] = [turn[1] for turn in turns]
        prompts = sum(len(prompt) for turn in turns for prompt, _ in turn[0])
        hits[name], kept = (sum(sum(turn[i]) for turn in turns) for i in (2, 3))
        with capsys.disabled():
            print(f"\n{name}: of {prompts:,} tokens of prompts, {hits[name]:,} of {kept:,} were not read again;")
            print(f"{seconds:.0f} seconds of CPU time; memory after each turn {memory} MiB")
    assert answers["offloading"] == answers["pool"] == answers["none"]
    assert hits["offloading"] == kept and hits["pool"] < kept / 10
    assert memory[-1] - memory[0] < 64
