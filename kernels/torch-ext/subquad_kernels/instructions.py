"""Instructions of this CPU for products of numbers."""

import functools
import platform
from pathlib import Path

import torch


def has_avx512() -> bool:
    """Whether torch uses AVX-512."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """
    Whether this CPU has instructions for products of a 16-bit dtype, which oneDNN then uses: AVX512_BF16, AVX512_FP16
    or AMX on x86, BF16 or FP16 on ARM. Without them torch computes these products about five times slower than float32
    products.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return False
    if dtype == torch.bfloat16 and has_avx512():  # `_is_mkldnn_bf16_supported` means any kind of AVX-512
        return any(getattr(torch.cpu, f"_is_{x}_supported", bool)() for x in ("avx512_bf16", "amx_tile"))
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())


@functools.cache
def multiplies_slowly(dtype: torch.dtype) -> bool:
    """
    Whether these instructions are slower than float32 instructions: AVX512_BF16 on an Intel CPU without AMX, or in a
    virtual machine that hides AMX. (AMD's are nearly twice as fast.)
    """
    if dtype != torch.bfloat16 or getattr(torch.cpu, "_is_amx_tile_supported", bool)():
        return False
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "GenuineIntel" in platform.processor()
