"""One text on several processes equals the text on one."""

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from architectures import random_ids, tiny_config, tiny_model
from safetensors.torch import load_file, save_file

from subquad import ContextParallelCache, split_text


# Pieces shorter than a chunk of 8, not multiples of it, and longer than two; begin tokens are among the ids.
LENGTHS = (3, 11, 37, 83)


def text(length):
    return random_ids(2, length, seed=length)


CASES = [(length, fields) for length in LENGTHS for fields in ({}, {"bos_token_id": None})]


def read(length, fields, **inputs):
    """The logits, the loss and the gradients that a model has, by name."""
    model = tiny_model("gecko", **fields).double().train()
    inputs = inputs or {"input_ids": text(length), "labels": text(length)}
    out = model(**inputs)
    out.loss.backward()
    return {"logits": out.logits.detach(), "loss": out.loss.detach()} | {
        name: p.grad for name, p in model.named_parameters()
    }


def work(rank, size, port, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    results = {}
    for case, (length, fields) in enumerate(CASES):
        inputs, past = split_text(text(length), text(length)), ContextParallelCache(tiny_config("gecko", **fields))
        found = read(length, fields, **inputs, past_key_values=past)
        pieces = [None] * size
        dist.all_gather_object(pieces, found.pop("logits"))
        for x in found.values():
            dist.all_reduce(x)
        results |= {f"{case}.{name}": x for name, x in {**found, "logits": torch.cat(pieces, 1)}.items()}
    if rank == 0:
        save_file(results, path)

    model, ids = tiny_model("gecko").eval(), split_text(text(83))["input_ids"]
    past = ContextParallelCache(model.config)
    with torch.no_grad():
        logits = model(ids, past_key_values=past).logits
    dist.all_gather_object(pieces, logits)
    torch.testing.assert_close(torch.cat(pieces, 1), model(text(83)).logits, atol=1e-4, rtol=1e-4)

    with pytest.raises(ValueError, match="every forward pass needs a new ContextParallelCache"):
        model(ids, past_key_values=past)
    with pytest.raises(ValueError, match="every forward pass needs a new ContextParallelCache"):
        past.reset()
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    for refused in ({"attention_mask": mask}, {"position_ids": torch.zeros_like(ids)}):
        with pytest.raises(ValueError, match="a text on several devices has no"):
            model(ids, past_key_values=ContextParallelCache(model.config), **refused)
    with pytest.raises(ValueError, match=f"`input_ids` has 1 tokens, for {size} processes"):
        split_text(ids[:, :1])
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_several_processes(size, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (size, port, tmp_path / "results.safetensors"), nprocs=size)
    found = load_file(tmp_path / "results.safetensors")
    for case, (length, fields) in enumerate(CASES):
        for name, x in read(length, fields).items():
            tolerance = 1e-9 if name == "logits" else 1e-6  # transformers takes the loss in float32
            torch.testing.assert_close(found[f"{case}.{name}"], x, atol=tolerance, rtol=tolerance)
