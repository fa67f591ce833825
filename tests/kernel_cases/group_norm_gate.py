"""The gated norm of the heads."""

import torch

from subquad_kernels import group_norm_gate

from . import BOTH, DEVICE, EAGER, KERNELS, Example, Operator


def make(
    leading=(2, 17),
    heads=3,
    size=8,
    dtype=torch.float32,
    x_dtype=torch.float32,
    weight_dtype=None,
    added=False,
    activation="silu",
):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    # A mean, and scales that differ from row to row, as the outputs of wkv have them.
    x = (3.0 + randn(*leading, heads, size)) * randn(*leading, heads, 1).exp()
    width = heads * size
    return {
        "x": x.to(x_dtype),
        "gate": randn(*leading, width).to(dtype),
        "weight": randn(width).to(weight_dtype or dtype),
        "bias": randn(width).to(weight_dtype or dtype),
        "eps": 1e-5 * 8**2,
        "added": randn(*leading, heads, size).to(x_dtype) if added else None,
        "activation": activation,
    }


SIZES = [(1, 2), (5, 3), (12, 64), (1, 100), (2, 128), (3, 200), (3, 256), (2, 600)]
EXAMPLES = {
    **{f"length {n}": Example({"leading": (2, n)}) for n in (1, 2, 15, 16, 17, 63, 64, 65)},
    "length 200": Example({"leading": (2, 200)}, EAGER),
    **{
        f"{heads} heads of {size}": Example({"leading": (2, 3), "heads": heads, "size": size}) for heads, size in SIZES
    },
    **{
        f"added, {activation}, {leading}": Example({"leading": leading, "added": True, "activation": activation})
        for activation in ("silu", None)
        for leading in ((2, 1), (2, 33), (0,))
    },
    "no activation": Example({"activation": None}),
    **{f"leading {shape}": Example({"leading": shape}) for shape in ((), (1,), (7,), (2, 3, 4), (0,))},
    **{
        f"{dtype}, {weight_dtype}, {x_dtype}": Example(
            {"leading": (2, 33), "dtype": dtype, "weight_dtype": weight_dtype, "x_dtype": x_dtype}, BOTH, tolerance
        )
        for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3))
        for weight_dtype in (None, torch.float32)
        for x_dtype in (torch.float32, dtype)
    },
    "added in bfloat16": Example(
        {"leading": (2, 33), "dtype": torch.bfloat16, "added": True, "activation": None}, BOTH, 8e-3
    ),
    **{
        f"long strips, {n}": Example(
            {"leading": (2, n)}, KERNELS, patches={"triton_kernels.multiprocessors": lambda x: 0}
        )
        for n in (15, 16, 17, 50)
    },
}

OPERATOR = Operator(
    group_norm_gate,
    make,
    EXAMPLES,
    calls=("length 1", "length 17", "leading (2, 3, 4)", "added, None, (2, 33)"),
    dtype=lambda arguments: arguments["gate"].dtype,
    wrong=[
        ({"x": torch.zeros(8)}, r"`x` must be \(..., heads >= 1, size >= 1\), got \(8,\)"),
        ({"x": torch.zeros(2, 17, 3, 0)}, r"`x` must be \(..., heads >= 1, size >= 1\), got \(2, 17, 3, 0\)"),
        ({"x": torch.zeros(2, 17, 3, 8, dtype=torch.int64)}, "`x` must be floating point, got torch.int64"),
        ({"gate": torch.zeros(2, 17, 3, 8)}, r"`gate` must have shape \(2, 17, 24\), got \(2, 17, 3, 8\)"),
        ({"weight": torch.zeros(3, 8)}, r"`weight` must have shape \(24,\), got \(3, 8\)"),
        ({"weight": torch.zeros(24, device="meta")}, "`weight` is on meta, `x` on "),
        ({"bias": torch.zeros(23)}, r"`bias` must have shape \(24,\), got \(23,\)"),
        ({"bias": torch.zeros(24, dtype=torch.int64)}, "`bias` must be floating point, got torch.int64"),
        ({"added": torch.zeros(2, 17, 24)}, r"`added` must have shape \(2, 17, 3, 8\), got \(2, 17, 24\)"),
        ({"activation": "relu"}, "`activation` must be 'silu' or None, got 'relu'"),
    ],
    caps=(
        *({"leading": (1, 3), "heads": heads, "size": size} for heads, size in ((1, 512), (1, 513), (64, 8), (65, 8))),
    ),
)
