"""The contextualizer of Avey."""

import torch

from subquad_kernels import contextualizer

from . import BOTH, DEVICE, EAGER, KERNELS, Example, Operator


def make(
    windows=2,
    rows=5,
    context=7,
    prefix=4,
    queries=None,
    width=17,
    dtype=torch.float32,
    v_dtype=torch.float32,
    prefix_dtype=None,
    gated=True,
    contiguous=False,
    scale=1.0,
    prefix_scale=1.0,
):
    """z and gate are columns of a wider tensor, v is a part of a larger one."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    wide = randn(windows, rows, 2 * width + 3).to(dtype)
    v = randn(context + 2, context + 5)[1 : context + 1, 3 : context + 3] / context**0.5
    inputs = {
        "z": wide[..., 2 : 2 + width] * scale if scale != 1.0 else wide[..., 2 : 2 + width],
        "v": v.to(v_dtype),
    }
    if gated:
        inputs["gate"] = wide[:, rows - (queries or rows) :, -width:]
    if prefix is not None:
        inputs["prefix"] = (randn(prefix, width) * prefix_scale).to(prefix_dtype or dtype)
    if contiguous:
        inputs = {name: x.contiguous() for name, x in inputs.items()}
    return {**inputs, "queries": queries}


# Windows, rows of z, rows of a window, rows of the prefix, queries, width.
NAMES = "windows", "rows", "context", "prefix", "queries", "width"
SIZES = (
    (2, 1, 1, None, None, 1),
    (9, 2, 2, None, 1, 17),
    (1, 17, 17, 3, None, 17),
    (3, 2, 17, 15, None, 1),
    (2, 64, 64, None, None, 64),
    (2, 65, 65, None, 64, 100),
    (1, 1, 65, 70, 1, 17),
    (2, 66, 130, 64, None, 64),
    (3, 70, 130, 130, 3, 17),
    (2, 130, 130, None, 130, 64),
    (3, 66, 300, 240, None, 17),
    (1, 300, 300, None, 70, 64),
)
HALF = ((2, 17, 24, 7, 5, 17), (1, 130, 130, None, None, 128), (3, 71, 140, 69, 66, 64))


def sizes_of(sizes, **more):
    return {**dict(zip(NAMES, sizes, strict=True)), **more}


def processors(n):
    return {"triton_kernels.multiprocessors": lambda x: n}


EXAMPLES = {
    "small": Example(),
    "queries": Example({"queries": 3}),
    "plain": Example({"context": 5, "prefix": None, "gated": False}),
    "no windows": Example({"windows": 0, "queries": 5}),
    "float64": Example({"dtype": torch.float64, "v_dtype": torch.float64}, EAGER, 1e-12),
    "small, float64": Example(sizes_of((2, 3, 4, 2, 2, 3), dtype=torch.float64, v_dtype=torch.float64), EAGER, 1e-12),
    "prefix of another dtype": Example({"prefix_dtype": torch.float64}),
    "contiguous": Example(sizes_of((2, 30, 70, 64, None, 64), dtype=torch.bfloat16, contiguous=True), BOTH, 8e-3),
    # The products of rows are beyond what float16 holds; the results are not.
    "large float16": Example(
        sizes_of((1, 10, 12, 2, None, 64), dtype=torch.float16, scale=300, prefix_scale=300), BOTH, 1e-3
    ),
}
for sizes in SIZES:
    # Where a row has one value, the gradient of its direction is the difference of equal numbers.
    tolerance, given = 1e-5 if sizes[-1] > 1 else 1e-4, sizes_of(sizes, gated=sizes[0] != 2)
    EXAMPLES[f"{sizes}"] = Example(given, BOTH, tolerance)
# Otherwise, as for many processors, the work is cut into small blocks and short strips.
for sizes in (SIZES[0], SIZES[5], SIZES[8], SIZES[9], SIZES[10]):
    given = sizes_of(sizes, gated=sizes[0] != 2)
    EXAMPLES[f"{sizes}, one processor"] = Example(given, KERNELS, 1e-5 if sizes[-1] > 1 else 1e-4, processors(1))
for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
    for sizes in HALF:
        EXAMPLES[f"{dtype}, {sizes}"] = Example(sizes_of(sizes, dtype=dtype), BOTH, tolerance)
    EXAMPLES[f"{dtype}, {HALF[2]}, v too"] = Example(sizes_of(HALF[2], dtype=dtype, v_dtype=dtype), BOTH, tolerance)
for scale in (1e-4, 1e3):
    for prefix_scale in (1.0, scale):
        EXAMPLES[f"times {scale}, prefix times {prefix_scale}"] = Example(
            sizes_of((2, 66, 70, 4, None, 64), scale=scale, prefix_scale=prefix_scale),
            BOTH if prefix_scale == scale else EAGER,
        )
for queries in (None, 66):
    EXAMPLES[f"a few windows at a time, {queries} queries"] = Example(
        sizes_of((5, 66, 70, 4, queries, 17)), EAGER, patches={"eager.VALUES": 2 * 70 * 64}
    )
for n in (1, 1000):
    EXAMPLES[f"long windows, {n} processors"] = Example(
        sizes_of((1, 40, 600, 560, None, 16), dtype=torch.bfloat16), KERNELS, 8e-3, processors(n)
    )

OPERATOR = Operator(
    contextualizer,
    make,
    EXAMPLES,
    calls=("small", "queries", "plain"),
    dtype=lambda arguments: arguments["z"].dtype,
    lean=True,
    wrong=[
        ({"z": torch.zeros(5, 17)}, r"`z` must be \(windows, rows >= 1, width >= 1\), got \(5, 17\)"),
        ({"z": torch.zeros(2, 0, 17)}, r"`z` must be \(windows, rows >= 1, width >= 1\), got \(2, 0, 17\)"),
        ({"z": torch.zeros(2, 5, 17, dtype=torch.int64)}, "`z` must be floating point, got torch.int64"),
        ({"v": torch.zeros(4, 4)}, r"`v` must be \(context, context\) with context >= 5, got \(4, 4\)"),
        ({"v": torch.zeros(7, 8)}, r"`v` must be \(context, context\) with context >= 5, got \(7, 8\)"),
        ({"v": torch.zeros(7, 7, dtype=torch.bool)}, "`v` must be floating point, got torch.bool"),
        ({"v": torch.zeros(7, 7, device="meta")}, "`v` is on meta, `z` on "),
        ({"gate": torch.zeros(2, 4, 17)}, r"`gate` must have shape \(2, 5, 17\), got \(2, 4, 17\)"),
        ({"queries": 3}, r"`gate` must have shape \(2, 3, 17\), got \(2, 5, 17\)"),
        ({"queries": 0}, "`queries` must be from 1 to 5, the rows of `z`, got 0"),
        ({"queries": 6}, "`queries` must be from 1 to 5, the rows of `z`, got 6"),
        ({"prefix": None}, "`prefix` must hold the first 2 of 7 rows, of which `z` has 5; got None"),
        ({"prefix": torch.zeros(1, 17)}, r"`prefix` must be \(rows >= 2, 17\), got \(1, 17\)"),
        ({"prefix": torch.zeros(2, 16)}, r"`prefix` must be \(rows >= 2, 17\), got \(2, 16\)"),
    ],
    caps=(
        *({"windows": 1, "rows": n, "context": n, "prefix": None, "width": 8} for n in (64, 65)),
        *({"windows": 1, "rows": 3, "context": n, "prefix": n - 3, "width": 8} for n in (512, 513)),
        *({"width": n} for n in (64, 65, 256, 257)),
    ),
)
