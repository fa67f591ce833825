"""
Compiles the Triton kernels for GPUs that this machine need not have, and counts what they take.

A program, because Triton must not have been imported for its interpreter:

    python tests/kernels/compile_kernels.py sm_90                the figures of today, as JSON
    python tests/kernels/compile_kernels.py --write              the same of every target, into budgets.csv
    python tests/kernels/compile_kernels.py sm_90 --all          of every variant
    python tests/kernels/compile_kernels.py --operators wkv --write

A variant is what Triton compiles for one kind of arguments of a kernel. Of every kernel, and of each precision of its
products, the variant with the largest tiles is compiled.
"""

import argparse
import csv
import json
import math
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import published
import torch
import triton
from assembly import loops, misread_products, unwritten_registers
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import subquad_kernels.backend
import subquad_kernels.fused_step.triton_kernels


BUDGETS = Path(__file__).with_name("budgets.csv")
# Shared memory of a program in bytes; registers of a thread, and what of them did not fit: bytes (CUDA) or registers
# (ROCm); barriers in one turn of a loop, and instructions in loops that load less than 16 bytes a thread from memory;
# products (or registers) that would be wrong; whether the compiler refuses it.
FIGURES = ("shared", "registers", "spilled", "barriers", "narrow", "misread", "refused")
OPERATORS = sorted({path.parent.name for path in Path(subquad_kernels.__path__[0]).glob("*/triton_kernels.py")})
OPERATORS += ["segments", "tiles"]
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Target:
    """A GPU, and the most shared memory of a program in KiB."""

    gpu: GPUTarget
    shared: int

    @property
    def is_hip(self) -> bool:
        return self.gpu.backend == "hip"


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163),
    "sm_89": Target(GPUTarget("cuda", 89, 32), 99),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227),
    "sm_120": Target(GPUTarget("cuda", 120, 32), 99),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64),
    "gfx1100": Target(GPUTarget("hip", "gfx1100", 32), 64),
}


@dataclass
class Variant:
    kernel: Any
    source: ASTSource
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The operator and its kernel. Some kernels are shared."""
        return f"{self.kernel.__module__.split('.')[1]}.{self.kernel.__name__}"

    @property
    def precision(self) -> str:
        return "half" if any(x in ("*bf16", "*fp16") for x in self.source.signature.values()) else "single"

    @property
    def key(self) -> str:
        return f"{self.name} {self.source.signature} {self.source.constants} {self.source.attrs} {self.options}"

    @property
    def tile(self) -> tuple[int, int]:
        """The product of the sizes that it is compiled with: registers and shared memory grow with it. What is 1 may
        have spared it a loop."""
        sizes = [x for x in self.source.constants.values() if type(x) is int]
        return math.prod(x for x in sizes if x > 0), -sizes.count(1)


def variant_of(kernel: Any, arguments: dict[str, Any]) -> Variant:
    """What Triton would compile for these arguments of a launch."""
    signature, constants, attributes, options = {}, {}, {}, {}
    names = [parameter.name for parameter in kernel.params]
    for name, x in arguments.items():
        if name not in names:
            options[name] = x
            continue
        index = (names.index(name),)
        parameter = kernel.params[index[0]]
        special = type(x) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or x is None or (special and x == 1):
            signature[name], constants[index] = "constexpr", x
        elif isinstance(x, torch.Tensor):
            signature[name] = f"*{TYPES[x.dtype]}"
            if x.storage_offset() * x.element_size() % 16 == 0:
                attributes[index] = [["tt.divisibility", 16]]
        elif isinstance(x, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if x < 2**31 else "i64"
            if special and x % 16 == 0:
                attributes[index] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, {name: signature[name] for name in names}, constants, attributes)
    return Variant(kernel, source, options)


def variants_for(target: Target, models: bool = True, small: bool = False) -> list[Variant]:
    """Everything that is launched on a target at published sizes, by the benchmarks and the models."""
    torch.version.hip = "7.0" if target.is_hip else None
    subquad_kernels.backend._shared_memory = lambda device: target.shared * 1024
    subquad_kernels.fused_step.triton_kernels._overlaps = lambda device: not target.is_hip and target.gpu.arch >= 90
    found = (variant_of(kernel, arguments) for kernel, arguments in published.launches(models, small))
    return list({variant.key: variant for variant in found}.values())


def largest(variants: list[Variant]) -> list[Variant]:
    """Of every kernel and precision."""
    ordered = sorted(variants, key=lambda variant: variant.tile)
    return list({(variant.name, variant.precision): variant for variant in ordered}.values())


# What was compiled.


def figures(compiled: Any, target: Target) -> dict[str, int]:
    """By the names of FIGURES."""
    used = {"shared": compiled.metadata.shared, "misread": misread_products(compiled.asm["ttgir"]), "refused": 0}
    if target.is_hip:
        text = compiled.asm["amdgcn"]
        used["registers"] = int(re.search(r"\.vgpr_count:\s*(\d+)", text)[1])
        used["spilled"] = int(re.search(r"\.vgpr_spill_count:\s*(\d+)", text)[1])
        bodies = loops(text.splitlines(), r"(\.LBB\w+):", r"s_c?branch\w*\s+(\.LBB\w+)")
        barrier, narrow = r"\bs_barrier\b", r"\b(global|buffer)_load_(?!dwordx4|b128)"
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
            assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used["misread"] += len(unwritten_registers(assembly))
        used["registers"] = int(re.search(r"REG:(\d+)", text)[1])
        used["spilled"] = int(re.search(r"STACK:(\d+)", text)[1]) + int(re.search(r"LOCAL:(\d+)", text)[1])
        bodies = loops(compiled.asm["ptx"].splitlines(), r"(\$L__BB\w+):", r"\bbra\S*\s+(\$L__BB\w+)")
        barrier = r"\bbar(rier)?\.sync"
        narrow = (
            r"\bld\.global\S*?(?<!\.v4)(?<!\.v8)\.[bsuf](8|16|32)\b|\bld\.global\S*?(?<!\.v2)(?<!\.v4)\.[bsuf]64\b"
        )
    for name, pattern in (("barriers", barrier), ("narrow", narrow)):
        used[name] = max((sum(bool(re.search(pattern, line)) for line in body) for body in bodies), default=0)
    return used


def compiled_figures(variant: Variant, target: Target) -> dict[str, int]:
    try:
        return figures(triton.compile(variant.source, target=target.gpu, options=variant.options), target)
    except Exception as error:
        print(f"{variant.key}: {error}", file=sys.stderr)
        return dict.fromkeys(FIGURES, 0) | {"refused": 1}


def measure(name: str, operators: list[str], models: bool, small: bool, everything: bool) -> list[dict[str, Any]]:
    """The rows of the table for one target and some operators: of each kernel and precision the largest figures."""
    target = TARGETS[name]
    variants = [
        variant for variant in variants_for(target, models, small) if variant.name.partition(".")[0] in operators
    ]
    variants = variants if everything else largest(variants)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    with ProcessPoolExecutor(2, initializer=_share, initargs=(variants, target)) as pool:
        for variant, used in zip(variants, pool.map(_compile, range(len(variants))), strict=True):
            key = variant.name, variant.precision
            before = rows.get(key, {})
            largest_yet = {field: max(used[field], before.get(field, 0)) for field in FIGURES}
            rows[key] = {"target": name, "kernel": variant.name, "precision": variant.precision, **largest_yet}
    return [rows[key] for key in sorted(rows)]


_shared: tuple[list[Variant], Target]


def _share(variants: list[Variant], target: Target) -> None:
    global _shared
    _shared = variants, target


def _compile(n: int) -> dict[str, int]:
    variants, target = _shared
    return compiled_figures(variants[n], target)


def read_budgets() -> list[dict[str, Any]]:
    if not BUDGETS.exists():
        return []
    with open(BUDGETS, newline="", encoding="utf-8") as file:
        return [{name: int(x) if name in FIGURES else x for name, x in row.items()} for row in csv.DictReader(file)]


def write_budgets(target: str, operators: list[str], rows: list[dict[str, Any]]) -> None:
    """Replaces the rows of some operators."""
    kept = [
        row for row in read_budgets() if row["target"] != target or row["kernel"].partition(".")[0] not in operators
    ]
    order = list(TARGETS)
    rows = sorted(
        [*kept, *(row for row in rows if row["target"] == target)],
        key=lambda row: (order.index(row["target"]), row["kernel"], row["precision"]),
    )
    with open(BUDGETS, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ("target", "kernel", "precision", *FIGURES), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--operators", nargs="+", default=OPERATORS, help="default: all")
    parser.add_argument("--without-models", action="store_true", help="compile what the benchmarks launch")
    parser.add_argument("--small", action="store_true", help="with --all: compile also what the tests launch")
    parser.add_argument("--all", action="store_true", help="compile every variant")
    parser.add_argument("--write", action="store_true", help="replace the rows of these targets in budgets.csv")
    options = parser.parse_args()
    targets = options.targets or list(TARGETS)
    rows = []
    for target in targets:
        rows += measure(target, options.operators, not options.without_models, options.small, options.all)
        if options.write:
            write_budgets(target, options.operators, rows)
    if not options.write:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
