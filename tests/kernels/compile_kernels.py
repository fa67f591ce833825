"""
Compiles every Triton kernel that the operators launch, for a GPU that this machine need not have.

Called as a program (Triton must not have been imported for its interpreter): `compile_kernels.py TARGET VARIANTS` runs
the operators on tensors without storage, and compiles launches instead of running them: "all", or of every kernel the
one with the "largest" tiles. It prints the resources that each takes as JSON.
"""

import json
import math
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction


TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


def source_of(kernel, arguments: dict) -> tuple[ASTSource, dict]:
    """The source that Triton would compile for these arguments of a launch, and its options."""
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
            signature[name], attributes[index] = f"*{TYPES[x.dtype]}", [["tt.divisibility", 16]]
        elif isinstance(x, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if x < 2**31 else "i64"
            if special and x % 16 == 0:
                attributes[index] = [["tt.divisibility", 16]]
    return ASTSource(kernel, {name: signature[name] for name in names}, constants, attributes), options


def misread_products(text: str) -> int:
    """
    The number of products in the intermediate code that sm_90 gets wrong. Where the columns of the second operand are
    adjacent in shared memory, a group of warps needs at least as many of them as are swizzled together; otherwise
    Triton's descriptor points outside of the operand. And each warp that has rows of its own needs 16 of them.
    """
    layouts = re.findall(r"^(#\S+) = .*nvmma_shared<{swizzlingByteWidth = (\d+), transposed = false", text, re.M)
    groups = re.findall(r"^(#\S+) = .*nvidia_mma<{.*warpsPerCTA = \[(\d+), (\d+)\]", text, re.M)
    swizzled, sizes = dict(layouts), {"f32": 4, "bf16": 2, "f16": 2}
    groups = {name: (int(rows), int(columns)) for name, rows, columns in groups}
    pattern = r"warp_group_dot .* \* !ttg\.memdesc<\d+x(\d+)x(\w+), (#\w+),.*-> tensor<(\d+)x.*, (#\w+)>"
    return sum(
        int(columns) // groups[result][1] * sizes[dtype] < int(swizzled.get(layout, 0))
        or int(rows) < 16 * groups[result][0]
        for columns, dtype, layout, rows, result in re.findall(pattern, text)
    )


def resources(compiled, target: GPUTarget) -> dict:
    """
    Shared memory of a program in bytes, registers of a thread, bytes or registers that did not fit, and products that
    would be wrong.
    """
    used = {"shared": compiled.metadata.shared, "misread": misread_products(compiled.asm["ttgir"])}
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        used["registers"] = int(re.search(r"\.vgpr_count:\s*(\d+)", text).group(1))
        used["spilled"] = int(re.search(r"\.vgpr_spill_count:\s*(\d+)", text).group(1))
        return used
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        used["registers"] = int(re.search(r"REG:(\d+)", text).group(1))
        used["spilled"] = int(re.search(r"STACK:(\d+)", text).group(1)) + int(re.search(r"LOCAL:(\d+)", text).group(1))
    return used


def launches() -> None:
    """Calls the operators in the variants that the models, or their users, run."""
    from subquad_kernels.cema import triton_kernels as cema
    from subquad_kernels.chunk_attention import triton_kernels as chunk_attention
    from subquad_kernels.contextualizer import triton_kernels as contextualizer
    from subquad_kernels.dynamic_mixing import triton_kernels as dynamic_mixing
    from subquad_kernels.group_norm_gate import triton_kernels as group_norm_gate
    from subquad_kernels.slot_memory import triton_kernels as slot_memory
    from subquad_kernels.slot_routing import triton_kernels as slot_routing
    from subquad_kernels.split_ranker import triton_kernels as split_ranker
    from subquad_kernels.static_mixing import triton_kernels as static_mixing
    from subquad_kernels.timestep_decay_norm import triton_kernels as timestep_decay_norm
    from subquad_kernels.timestep_decay_norm.strips import strip_size
    from subquad_kernels.token_shift import triton_kernels as token_shift
    from subquad_kernels.wkv import triton_kernels as wkv
    from subquad_kernels.wkv.masks import masks_for
    from subquad_kernels.working_memory import triton_kernels as working_memory

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    def run_wkv(dtype, heads, key=64, value=64, static=False, packed=False, decay_dtype=torch.float32):
        r, k, v = (empty(1, 4096, heads, size, dtype=dtype) for size in (key, key, value))
        log_w = empty(*((heads, key) if static else k.shape), dtype=decay_dtype)
        state, u = empty(4 if packed else 1, heads, key, value), empty(heads, key, dtype=dtype)
        cu_seqlens = empty(5, dtype=torch.int64) if packed else None
        masks = masks_for(r, k, v)
        inputs = r, k, v, log_w, u
        if dtype == torch.bfloat16 and key == 64 and not packed:
            wkv.wkv_triton(*inputs, None, cu_seqlens, masks, torch.float32)
        wkv.wkv_triton(*inputs, state, cu_seqlens, masks, torch.float32)
        if dtype != torch.float16:  # whose products are those of bfloat16
            wkv.wkv_triton_backward(empty(*v.shape), state, *inputs, state, cu_seqlens, masks, torch.float32)

    def run_contextualizer(dtype, windows, rows, queries, width, backward=True):
        wide, v = empty(windows, rows, 4 * width, dtype=dtype), empty(1024, 1024)[:512, :512]
        z, gate = wide[..., :width], wide[:, rows - queries :, width : 2 * width]
        prefix = empty(512, width, dtype=dtype) if rows < 512 else None
        if backward:  # which mixes as well, for the gradient of the gate
            grad = empty(windows, queries, width, dtype=dtype)
            contextualizer.contextualizer_triton_backward(grad, z, v, gate, prefix, queries)
        else:
            contextualizer.contextualizer_triton(z, v, gate, prefix, queries)

    def run_static_mixing(dtype, context, width, features):
        x, grad = empty(64, context, features, dtype=dtype), empty(64, context, features - width, dtype=dtype)
        v = empty(context, context)
        static_mixing.static_mixing_triton(x, v, width, grad[..., :width])
        static_mixing.static_mixing_triton_backward(grad, x, v, width)

    def run_dynamic_mixing(dtype, context, width, size, normalization):
        features, out = empty(64, context, size, dtype=dtype), empty(64, context, size - width, dtype=dtype)
        arguments = features, width, normalization, 1e-12
        dynamic_mixing.dynamic_mixing_triton(out[..., :width], *arguments)
        dynamic_mixing.dynamic_mixing_triton_backward(out, *arguments)

    def run_slot_routing(dtype, slots, topk, score, per_slot=False, biased=False):
        logits, bias = empty(1, 4096, 4, slots, dtype=dtype), empty(4, slots, dtype=dtype) if biased else None
        inputs = logits, empty(*logits.shape[: 4 if per_slot else 3]), topk, bias, score, 1.0
        slot_routing.slot_routing_triton(*inputs)
        slot_routing.slot_routing_triton_backward(empty(*logits.shape), *inputs)

    def run_slot_memory(
        dtype, batch, length, key=256, value=256, slots=256, documents=None, state=False, backward=True
    ):
        q, k, v = (empty(batch, length, 4, size, dtype=dtype) for size in (key, key, value))
        log_f, memory = empty(batch, length, 4, slots), empty(documents or batch, 4, slots, key + value)
        cu_seqlens = empty(documents + 1, dtype=torch.int64) if documents else None
        inputs = q, k, v, log_f, memory if state else None, cu_seqlens
        slot_memory.slot_memory_triton(*inputs)
        slot_memory.slot_memory_triton_state(*inputs[1:])
        if backward:
            slot_memory.slot_memory_triton_backward(v, memory, log_f, *inputs)

    def run_slot_memory_step(dtype):
        token, log_f, memory = empty(8, 4, 256, dtype=dtype), empty(8, 4, 256), empty(8, 4, 256, 512)
        for state in (None, memory):
            slot_memory.slot_memory_triton_step(token, token, token, log_f, state, memory)

    def run_timestep_decay_norm(dtype, length, width, groups, given=True, affine=True):
        x, weight = empty(2, length, width, dtype=dtype), empty(width, dtype=dtype) if affine else None
        state, starts, real = None, None, None
        if given:
            state, starts, real = empty(2, 3, groups), *(empty(n, length, dtype=torch.bool) for n in (1, 2))
        numbers = groups, 0.999, 0.9999
        inputs, strip = (x, weight, weight, state), strip_size(width, groups)
        _, final, entering = timestep_decay_norm.timestep_decay_norm_triton(
            *inputs, starts, real, *numbers, 1e-5, strip
        )
        timestep_decay_norm.timestep_decay_norm_triton_backward(
            x, final, *inputs, entering, starts, real, *numbers, 1e-5, strip
        )

    def run_cema(dtype, batch, length, width, size, more=False):
        x, state = empty(batch, length, width, dtype=dtype), empty(batch, width, size, 2)
        parameters = empty(width, size), empty(width, size), empty(width), empty(width, size, 2)
        flags = [empty(batch, length, dtype=torch.bool) if more else None for _ in range(2)]
        inputs = x, *parameters, state if more else None, *flags
        cema.cema_triton(*inputs)
        cema.cema_triton_backward(x, state, *inputs)
        flags = [empty(batch, dtype=torch.bool) if more else None for _ in range(2)]
        cema.cema_triton_step(x[:, 0], *parameters, state, state, *flags)

    def run_chunk_attention_step(dtype, batch):
        q, k, v = (empty(batch, 4, *size, dtype=dtype) for size in ((1, 256), (4096, 256), (4096, 2048)))
        chunk_attention.chunk_attention_triton_step(q, k, v, empty(batch, 4096, dtype=torch.bool))

    def run_working_memory(dtype, length, chunk_size, key=256, value=2048, more=True):
        q, k, v = (empty(2, 4, length, size, dtype=dtype) for size in (key, key, value))
        states, chunks = (empty(2, 4, key, value), empty(2, 4, key)), length // chunk_size
        leaving, reads = (empty(2, size, dtype=torch.int64) for size in (chunks, length))
        inputs = q, k, v, *(states if more else (None, None)), leaving, leaving, reads, chunk_size
        working_memory.working_memory_triton(*inputs)
        if more:
            working_memory.working_memory_triton_backward(v, *states, *inputs)
        one = [x[:, :1] for x in (leaving, leaving, reads)]
        working_memory.working_memory_triton_step(q[:, :, :1], k, v, *states, *one, chunk_size)

    walk, segments = 512, 4  # heads
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        run_wkv(dtype, walk)
        if dtype != torch.float16:
            run_wkv(dtype, segments, static=True)
        splits, number = empty(4, 128, 64, 768, dtype=dtype), empty(1, 128, dtype=torch.int64)
        token, one = empty(4, 1, 1, 768, dtype=dtype), empty(4, 1, dtype=torch.int64)
        split_ranker.maxsim_triton(token, splits, one, None)
        split_ranker.maxsim_triton(splits, splits, number, None)
        split_ranker.maxsim_triton(splits, splits, number, number)
        run_contextualizer(dtype, 1, 512, 512, 768, backward=False)
        if dtype == torch.float16:
            run_slot_memory(dtype, 8, 2048, key=16, value=16, slots=16, backward=False)
            continue  # what has no products only reads and writes it, as it does bfloat16

        run_slot_memory(dtype, 8, 2048, slots=512 if dtype == torch.bfloat16 else 256)
        for batch in (1, 64):
            tokens = [empty(batch, 32, 64, dtype=dtype) for _ in range(3)]
            state, gate, weight = (
                empty(batch, 32, 64, 64),
                empty(batch, 1, 2048, dtype=dtype),
                empty(2048, dtype=dtype),
            )
            for log_w in (empty(batch, 32, 64), empty(32, 64)):
                arguments = (*tokens, log_w, empty(32, 64, dtype=dtype), state, state)
                wkv.wkv_triton_step(*arguments, gate, weight, weight, 1e-5, dtype)
                wkv.wkv_triton_step(*arguments, None, None, None, 0.0, torch.float32)

        x, state = empty(4, 512, 2048, dtype=dtype), empty(4, 2048, dtype=dtype)
        starts = empty(4, 512, dtype=torch.bool)
        for n, offset, first, borders in ((1, False, None, None), (2, False, state, None), (5, True, state, starts)):
            mu = empty(n, 2048, dtype=dtype)
            given = empty(n, *x.shape, dtype=dtype) if offset else None
            token_shift.token_shift_triton(x, first, mu, given, borders)
            token_shift.token_shift_triton_backward(empty(n, *x.shape, dtype=dtype), x, first, mu, given, borders)
        heads, weight = empty(4, 512, 32, 64), empty(2048, dtype=dtype)
        group_norm_gate.group_norm_gate_triton(heads, x, weight, weight, 1e-5)
        group_norm_gate.group_norm_gate_triton_backward(x, heads, x, weight, weight, 1e-5)
        run_slot_memory_step(dtype)
        run_timestep_decay_norm(dtype, 4096, 4096, 64)
    run_timestep_decay_norm(torch.bfloat16, 1, 4096, 64)
    run_timestep_decay_norm(torch.bfloat16, 4096, 4096, 1, given=False)
    run_timestep_decay_norm(torch.bfloat16, 50, 960, 10, affine=False)
    run_timestep_decay_norm(torch.bfloat16, 4096, 256, 256, given=False)
    run_contextualizer(torch.bfloat16, 256, 512, 512, 768)
    run_contextualizer(torch.bfloat16, 256, 448, 50, 100)
    run_contextualizer(torch.float32, 256, 64, 64, 768)
    run_slot_memory(torch.bfloat16, 1, 65536, state=True)
    run_slot_memory(torch.bfloat16, 1, 2048, key=100, value=48, slots=40, documents=4, state=True)
    run_static_mixing(torch.bfloat16, 256, 768, 3072)
    run_static_mixing(torch.bfloat16, 250, 100, 403)
    run_static_mixing(torch.float32, 256, 768, 3072)
    run_dynamic_mixing(torch.bfloat16, 256, 768, 3072, "l1")
    run_dynamic_mixing(torch.bfloat16, 1024, 768, 3072, "sum")
    run_dynamic_mixing(torch.bfloat16, 250, 100, 403, "l1")
    run_dynamic_mixing(torch.float32, 1024, 768, 3072, "l1")
    run_slot_routing(torch.bfloat16, 256, 32, "sigmoid")
    run_slot_routing(torch.float32, 256, 32, "sigmoid", biased=True)
    run_slot_routing(torch.float32, 64, 64, "sigmoid")
    run_slot_routing(torch.float16, 16, 5, "softmax", per_slot=True)
    run_slot_routing(torch.float32, 1000, 64, "softmax", per_slot=True)
    run_cema(torch.bfloat16, 8, 4096, 2048, 16)
    run_cema(torch.float32, 1, 32768, 1000, 4, more=True)
    run_wkv(torch.bfloat16, segments, 100, 48, packed=True, decay_dtype=torch.bfloat16)
    run_wkv(torch.bfloat16, walk, 128, 128)
    run_chunk_attention_step(torch.bfloat16, 32)
    run_chunk_attention_step(torch.float32, 1)
    run_working_memory(torch.bfloat16, 32768, 2048)
    run_working_memory(torch.float32, 4096, 2048)
    run_working_memory(torch.float16, 100, 16, key=20, value=70, more=False)


def tile(source: ASTSource) -> int:
    """The product of the sizes that a variant is compiled with: registers and shared memory grow with it."""
    return math.prod(value for value in source.constants.values() if isinstance(value, int) and value > 0)


def main() -> None:
    target, which = TARGETS[sys.argv[1]], sys.argv[2]
    if target.backend == "hip":
        torch.version.hip = "7.0"
    variants = {}

    def record(kernel, *args, grid=None, warmup=False, **kwargs):
        names = [parameter.name for parameter in kernel.params]
        source, options = source_of(kernel, {**dict(zip(names, args, strict=False)), **kwargs})
        key = (kernel.__name__, str(source.signature), str(source.constants), str(source.attrs), str(options))
        variants.setdefault(key, (kernel, source, options))

    JITFunction.run = record
    launches()
    chosen = list(variants.values())
    if which == "largest":
        chosen.sort(key=lambda variant: tile(variant[1]))
        chosen = list({kernel: (kernel, source, options) for kernel, source, options in chosen}.values())
    results = []
    for kernel, source, options in chosen:
        names = [parameter.name for parameter in kernel.params]
        compiled = triton.compile(source, target=target, options=options)
        constants = {names[index[0]]: str(value) for index, value in source.constants.items()}
        results.append({"kernel": kernel.__name__, "constants": constants, **resources(compiled, target)})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
