"""One text on several processes equals the text on one."""

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import random_ids, tiny_model
from safetensors.torch import load_file, save_file

from subquad import context_parallel_cache, split_text


# Imported once, and not by each process.
mp.get_context("forkserver").set_forkserver_preload(["torch", "transformers.trainer"])
SIZES = (2, 4)
# Pieces shorter than a chunk of 8, not multiples of it, and longer than two; BOS tokens are among the ids.
LENGTHS = (4, 37, 53)


def text(length):
    return random_ids(2, length, seed=length)


CASES = [("gecko", n, {"num_layers": 2}) for n in LENGTHS] + [("gecko", 37, {"num_layers": 2, "bos_token_id": None})]
CASES += [("rwkv5", 37, {}), ("rwkv6", 4, {}), ("rwkv7", 4, {}), ("rwkv7", 37, {})]
CASES += [("rwkv7_deep_embed", 37, {"dea_size": None})]


def cases_of(size):
    """All with most processes, every second one with fewer."""
    return list(enumerate(CASES))[:: 1 if size == max(SIZES) else 2]


def make(name, fields):
    return tiny_model(name, **fields).double().train()


def read(model, length, **inputs):
    """The logits, the loss and the gradients of a model, by name."""
    inputs = inputs or {"input_ids": text(length), "labels": text(length)}
    out = model(**inputs)
    out.loss.backward()
    return {"logits": out.logits.detach(), "loss": out.loss.detach()} | {
        # A decay has none in a piece of one token without a next piece.
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


def work(rank, port, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=max(SIZES))
    results = {}
    for size in SIZES:
        group = dist.new_group(range(size)) if size < max(SIZES) else None
        if rank < size:
            compare(size, group, results)
    if rank == 0:
        save_file(results, path)
    dist.destroy_process_group()


def compare(size, group, results):
    def joined(logits):
        pieces = [None] * size
        dist.all_gather_object(pieces, logits, group=group)
        return torch.cat(pieces, 1)

    for case, (name, length, fields) in cases_of(size):
        inputs, model = split_text(text(length), text(length), group=group), make(name, fields)
        found = read(model, length, **inputs, cache=context_parallel_cache(model, group))
        logits = joined(found.pop("logits"))
        for x in found.values():
            dist.all_reduce(x, group=group)
        results |= {f"{size}.{case}.{name}": x for name, x in {**found, "logits": logits}.items()}

    if size == max(SIZES):
        return
    for name in ("gecko", "rwkv7"):
        model, ids = tiny_model(name).eval(), split_text(text(53), group=group)["input_ids"]
        past = context_parallel_cache(model, group)
        with torch.no_grad():
            logits = joined(model(ids, cache=past).logits)
        torch.testing.assert_close(logits, model(text(53)).logits, atol=1e-4, rtol=1e-4)

        with pytest.raises(ValueError, match="every forward pass needs a new cache"):
            model(ids, cache=past)
        with pytest.raises(ValueError, match="every forward pass needs a new cache"):
            past.reset()
        mask = torch.ones_like(ids)
        mask[:, 0] = 0
        for refused in ({"attention_mask": mask}, {"position_ids": torch.zeros_like(ids)}):
            with pytest.raises(ValueError, match="a text on several devices has no"):
                model(ids, cache=context_parallel_cache(model, group), **refused)
        model.train().gradient_checkpointing_enable()
        with pytest.raises(ValueError, match="gets states from another process"):
            model(ids, cache=context_parallel_cache(model, group))
    with pytest.raises(ValueError, match=f"`input_ids` has 1 tokens, for {size} processes"):
        split_text(ids[:, :1], group=group)
    for name in ("avey", "rwkv7_deep_embed"):  # the second is RWKV-7b, whose attention reads the whole text
        with pytest.raises(ValueError, match="ForCausalLM cannot read one text on several processes"):
            context_parallel_cache(tiny_model(name), group)


def test_several_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = port, tmp_path / "results.safetensors"
    mp.start_processes(work, arguments, max(SIZES), start_method="forkserver")
    found = load_file(tmp_path / "results.safetensors")
    for case, (kind, length, fields) in enumerate(CASES):
        for name, x in read(make(kind, fields), length).items():
            tolerance = 1e-9 if name == "logits" else 1e-6  # transformers takes the loss in float32
            for size in SIZES[case % 2 :]:
                torch.testing.assert_close(found[f"{size}.{case}.{name}"], x, atol=tolerance, rtol=tolerance)
