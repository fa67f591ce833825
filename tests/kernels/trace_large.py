"""
Traces the kernels of an operator on tensors with more elements than 32 bits can count: `trace_large.py OPERATOR`.

A program, with TRITON_INTERPRET=1: the tensors have no storage, and loads from them are zeros. Of every grid a few
programs run. Prints what is found as JSON.
"""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import torch


sys.path.append(str(Path(__file__).parents[1]))

from interpreter import repair


repair()

import published  # noqa: E402
from tracing import corners, traced  # noqa: E402


def enlarged(case):
    """The case with so many rows, or if these are few by nature such a length, that a tensor is large enough."""
    elements = max(x.numel() for x in case.inputs(published.Empty()).values())
    factor = 5 * 2**29 // elements + 1
    larger = dataclasses.replace(case, batch=case.batch * factor)
    if max(x.numel() for x in larger.inputs(published.Empty()).values()) > elements:
        return larger
    return dataclasses.replace(case, length=case.length * factor)


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    kind = published.kind_of(module)
    elements = 0
    with traced("subquad_kernels", corners) as trace:
        for which in ("cuda", "step cuda"):
            for case in published.benchmark.cases_for(kind, which, dtype=torch.bfloat16, device="meta")[:1]:
                case = enlarged(case)
                inputs = published.call(case)
                elements = max(elements, *(x.numel() for x in inputs.values()))
    print(json.dumps({"elements": elements, "kernels": sorted(trace.kernels), "found": trace.found}))


if __name__ == "__main__":
    main()
