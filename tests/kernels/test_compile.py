"""Every kernel compiles for the GPUs that it is meant for, within their resources."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import TRITON

import subquad_kernels


# Shared memory of a program in bytes, registers of a thread, what of a thread may spill to memory, in bytes (CUDA) or
# registers (ROCm), and products that are misread. The kernels of wkv hold a state and half a dozen tiles, that of the
# contextualizer for the gradient of its weights three tiles. Nothing of other kernels may spill.
HEAVY = ("_gradient_kernel", "_chunk_kernel", "_weight_gradient_kernel")
# The kernels of Avey, which fit into the shared memory of consumer cards.
AVEY = (
    *("_cosine_kernel", "_mix_kernel", "_slope_kernel", "_row_gradient_kernel", "_weight_gradient_kernel"),
    *("_static_product_kernel", "_static_weight_kernel"),
)
# The kernels of slot_memory, and their limits by the dtype of their products.
SLOT_MEMORY = (*("_walk_kernel", "_slots_kernel", "_features_kernel", "_decay_kernel", "_far_writes_kernel"),)
SLOT_MEMORY_SPILLED = {
    "sm_80": {"bf16": 64, "fp32": 1152},
    "sm_90": {"bf16": 0, "fp32": 128},
    "gfx942": {"bf16": 0, "fp32": 0},
}
# The kernel of cema that has 16 states a thread, the sums of a gradient, and documents.
AVERAGE_SPILLED = {"sm_80": 192, "sm_90": 32, "gfx942": 0}
LIMITS = {
    "sm_80": {"shared": 163 * 1024, "registers": 255, "spilled": 1280, "misread": 0},
    "sm_90": {"shared": 227 * 1024, "registers": 255, "spilled": 704, "misread": 0},
    "gfx942": {"shared": 64 * 1024, "registers": 512, "spilled": 256, "misread": 0},
}


@TRITON
@pytest.mark.parametrize("target", LIMITS)
@pytest.mark.parametrize("variants", ["largest", pytest.param("all", marks=pytest.mark.slow)])
def test_kernels_compile(target, variants, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    program = Path(__file__).with_name("compile_kernels.py")
    run = subprocess.run([sys.executable, program, target, variants], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout)
    kernels = {result["kernel"] for result in results}
    assert (len(results) > 300) == (variants == "all")
    assert {"_chunk_kernel", "_state_kernel", "_pass_kernel", "_gradient_kernel", "_decode_kernel"} < kernels
    assert "_maxsim_kernel" in kernels
    assert {
        "_mix_kernel",
        "_row_gradient_kernel",
        "_weight_gradient_kernel",
        "_cosine_kernel",
        "_slope_kernel",
    } < kernels
    assert {"_static_product_kernel", "_static_weight_kernel"} < kernels
    assert {*SLOT_MEMORY, "_decay_sum_kernel", "_softmax_kernel", "_step_kernel", "_step_logits_kernel"} < kernels
    assert {"_routing_kernel", "_routing_gradient_kernel"} < kernels
    assert {"_coefficients_kernel", "_average_kernel", "_carry_kernel", "_rate_gradient_kernel"} < kernels
    assert {"_parameter_kernel", "_average_step_kernel"} < kernels
    assert {"_absorb_kernel", "_absorb_gradient_kernel", "_normalizer_gradient_kernel", "_readers_kernel"} < kernels
    assert {"_log_sum_kernel", "_weights_kernel", "_weights_gradient_kernel"} < kernels
    assert {"_prepare_step_kernel", "_absorb_step_kernel", "_scores_kernel", "_values_kernel"} < kernels
    assert {"_product_kernel", "_rows_kernel"} < kernels
    assert {"_added_kernel", "_added_gradient_kernel"} < kernels
    for result in results:
        limits = LIMITS[target]
        if result["kernel"] == "_weight_gradient_kernel" and result["constants"]["EVEN"] == "True":
            limits = {**limits, "spilled": 128}
        elif result["kernel"] in SLOT_MEMORY:
            limits = {**limits, "spilled": SLOT_MEMORY_SPILLED[target][result["constants"]["DOT"]]}
        elif result["kernel"] == "_average_kernel":
            limits = {**limits, "spilled": AVERAGE_SPILLED[target]}
        elif result["kernel"] == "_static_product_kernel" and result["constants"]["EVEN"] == "False":
            limits = {**limits, "spilled": 32}  # outside of its loop
        elif result["kernel"] == "_state_kernel":
            limits = {**limits, "spilled": 32}  # with products in float32, or heads of 128
        elif result["kernel"] == "_absorb_step_kernel":
            limits = {**limits, "spilled": 192}  # outside of its loop over tokens
        elif result["kernel"] not in HEAVY:
            limits = {**limits, "spilled": 0}
        if result["kernel"] in AVEY:
            limits = {**limits, "shared": min(limits["shared"], 99 * 1024)}
        assert all(result[name] <= limit for name, limit in limits.items()), result


def test_what_older_versions_of_triton_refuse_is_not_written():
    """A constant that `tl.cdiv` computes is a value of the program there, and a loop must not change its variable."""
    for path in Path(subquad_kernels.__path__[0]).rglob("triton_kernels.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            here = f"{path}, line {getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "tl.constexpr":
                assert "cdiv" not in ast.unparse(node.value), here
            if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
                names = [x for statement in node.body for x in ast.walk(statement) if isinstance(x, ast.Name)]
                assert not any(x.id == node.target.id and isinstance(x.ctx, ast.Store) for x in names), here
