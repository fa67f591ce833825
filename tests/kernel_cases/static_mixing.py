"""The static layer of Avey-B."""

import torch

from subquad_kernels import static_mixing

from . import ALL, BOTH, DEVICE, EAGER, KERNELS, Example, Operator
from .dynamic_mixing import parts_of


def make(
    windows=3,
    context=5,
    width=24,
    columns=80,
    dtype=torch.float32,
    v_dtype=torch.float32,
    contiguous=False,
    large=False,
):
    """Features in the middle of wider rows, and v as a part of a larger one. `large`: the sums are beyond what float16
    holds, the results are not."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(windows, context, columns + 5, generator=generator).to(DEVICE, dtype)
    v = torch.randn(context + 2, context + 5, generator=generator).to(DEVICE, v_dtype) / context**0.5
    inputs = {"features": wide[..., 2 : 2 + columns], "v": v[1 : context + 1, 3 : context + 3]}
    if large:
        inputs["features"][..., :width] *= 1000
        inputs["features"][..., width : 2 * width] *= 1e-3
        inputs["v"] = inputs["v"] * 100
    if contiguous:
        inputs = {name: x.contiguous() for name, x in inputs.items()}
    return {**inputs, "width": width}


# Windows, rows, width, columns of features: with a head that is empty, narrower than x, and wider.
SIZES = ((1, 1, 1, 2), (2, 1, 17, 40), (3, 2, 1, 3), (3, 40, 24, 80), (3, 130, 24, 60), (2, 130, 65, 130))
NAMES = "windows", "context", "width", "columns"
DTYPES = ((torch.float32, 1e-5), (torch.bfloat16, 8e-3), (torch.float16, 1e-3))
FLOAT64 = {"dtype": torch.float64, "v_dtype": torch.float64}
EXAMPLES = {
    **{str(sizes): Example(dict(zip(NAMES, sizes, strict=True))) for sizes in SIZES},
    "small": Example(),
    "no windows": Example({"windows": 0}),
    "float64": Example(FLOAT64, EAGER, 1e-12),
    "an empty head, float64": Example({**FLOAT64, "windows": 2, "width": 2, "columns": 4}, EAGER, 1e-12),
    "a few windows at a time": Example(
        {"windows": 7}, EAGER, patches={"eager.CACHED": 2 * 5 * 24, "eager.VALUES": 2 * 5 * 24}
    ),
}
for dtype, tolerance in DTYPES:
    # Whole tiles are read without masks, whether or not rows begin at multiples of 16 bytes.
    whole = {"windows": 2, "context": 128, "width": 128, "columns": 384, "dtype": dtype}
    EXAMPLES |= {
        f"{dtype}": Example({"context": 40, "dtype": dtype, "v_dtype": dtype}, ALL, tolerance),
        f"{dtype}, v float32": Example({"context": 40, "dtype": dtype}, BOTH, tolerance),
        f"{dtype}, whole tiles": Example(whole, KERNELS, tolerance),
        f"{dtype}, whole tiles, contiguous": Example({**whole, "contiguous": True}, KERNELS, tolerance),
    }
for processors in (1, 1000):
    # Strips that begin and end within a window: long ones for few processors, and short ones.
    EXAMPLES[f"{processors} processors"] = Example(
        {"windows": 7, "width": 70, "columns": 140},
        KERNELS,
        patches={"triton_kernels.multiprocessors": lambda x, n=processors: n},
    )

OPERATOR = Operator(
    static_mixing,
    make,
    EXAMPLES,
    calls=("small", "torch.float32"),
    dtype=lambda arguments: arguments["features"].dtype,
    parts=parts_of,
    written=lambda arguments: {0: arguments["features"][..., arguments["width"] :]},
    in_place=("small", "no windows", *(f"{dtype}" for dtype, _ in DTYPES)),
    lean=True,
    wrong=[
        ({"features": torch.zeros(5, 80)}, r"`features` must be \(windows, rows >= 1, features >= 2\), got \(5, 80\)"),
        ({"features": torch.zeros(2, 0, 80)}, r"`features` must be .*, got \(2, 0, 80\)"),
        ({"features": torch.zeros(2, 5, 1)}, r"`features` must be .*, got \(2, 5, 1\)"),
        ({"features": torch.zeros(2, 5, 80, dtype=torch.int64)}, "`features` must be floating point, got torch.int64"),
        ({"v": torch.zeros(4, 4)}, r"`v` must have shape \(5, 5\), got \(4, 4\)"),
        ({"v": torch.zeros(5, 6)}, r"`v` must have shape \(5, 5\), got \(5, 6\)"),
        ({"v": torch.zeros(5, 5, dtype=torch.bool)}, "`v` must be floating point, got torch.bool"),
        ({"v": torch.zeros(5, 5, device="meta")}, "`v` is on meta, `features` on "),
        ({"width": 0}, "`width` must be an integer from 1 to 40, half the columns of `features`, got 0"),
        ({"width": 41}, "`width` must be an integer from 1 to 40, half the columns of `features`, got 41"),
        ({"width": 24.0}, "`width` must be an integer from 1 to 40, half the columns of `features`, got 24.0"),
        ({"features": torch.zeros(2, 80, 5).mT, "inplace": True}, r"`inplace=True` needs .* strides \(400, 1, 5\)"),
        (
            {"features": torch.zeros(5, 80).expand(2, 5, 80), "inplace": True},
            r"`inplace=True` needs .* got strides \(0, 80, 1\)",
        ),
        *(
            (
                {name: torch.ones(*shape, requires_grad=True), "inplace": True},
                "`inplace=True` overwrites what the backward pass would need",
            )
            for name, shape in (("features", (3, 5, 80)), ("v", (5, 5)))
        ),
    ],
    caps=(
        *({"windows": 1, "context": n, "width": 3, "columns": 8} for n in (64, 65, 128, 129, 256, 257)),
        *({"windows": 1, "width": n, "columns": 2 * n + 2} for n in (64, 65, 128, 129)),
    ),
)
