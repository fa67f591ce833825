"""
Generates text with a model whose weights are split over several processes, each with a GPU of its own if there are
any.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --model ./finch-7b --dtype bfloat16 --prompt "Once upon"

With `from_pretrained(..., distributed_config=DistributedConfig(tp_size=n))`, every process loads its own part of the
weights, by the plan in the model's configuration: usually some of the heads, with their recurrent states, and some
columns or rows of the other linear layers. In every block the processes exchange their results, so that all continue
with the same numbers. They must be given the same text and, for sampling, the same seed. Such a model can also be
trained, with the groups of `subquad.training.optimizer.parameter_groups`, because optimizers and gradient clipping
do not accept split and whole parameters in one group. `save_pretrained`, called in every process, writes one whole
model.

The example also works without torchrun, in one process, and on CPUs.
"""

from __future__ import annotations

import argparse
import os

import torch
from help_formatter import HelpFormatter
from shared import model_directory
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.distributed import DistributedConfig
from transformers.utils import logging


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", default="finch-abc", help="directory of a causal model, or the name of an embedded one")
    add("--prompt", default="X:1\nT:", help="the text to continue")
    add("--max-new-tokens", type=int, default=200, help="maximum number of new tokens")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="dtype of the weights")
    add("--seed", type=int, help="sample with this seed (default: take the most likely token)")
    return parser.parse_args()


def share(model: torch.nn.Module) -> float:
    """The share of the weights in this process."""
    own = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    return own / model.num_parameters()


def main() -> None:
    arguments = parse_arguments()
    # torchrun sets the rank of every process and the number of processes.
    rank, processes = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    if rank > 0:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    path = model_directory(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    distributed = DistributedConfig(tp_size=processes)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=arguments.dtype, distributed_config=distributed)
    if processes == 1 and torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())

    inputs = tokenizer(arguments.prompt, return_tensors="pt").to(model.device)
    sample = arguments.seed is not None
    if sample:
        set_seed(arguments.seed)
    ids = model.generate(**inputs, max_new_tokens=arguments.max_new_tokens, do_sample=sample)
    if rank == 0:
        print(tokenizer.decode(ids[0], skip_special_tokens=True))
        print(f"\n{processes} processes; this one has {share(model):.0%} of the weights, on {model.device}.")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
