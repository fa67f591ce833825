"""The dynamic layer of Avey-B."""

import torch

from subquad_kernels import dynamic_mixing

from . import BOTH, DEVICE, EAGER, KERNELS, Example, Operator


def make(
    windows=2,
    rows=7,
    features=40,
    width=17,
    dtype=torch.float32,
    normalization="l1",
    eps=1e-12,
    margin=0,
    apart=False,
    scale=1.0,
):
    """Where the cosines are summed, x is positive, as after ReLU². With a margin the features are columns of a wider
    tensor. `apart`: the rows of the two halves of a window have no feature in common."""
    x = torch.randn(windows, rows, features, generator=torch.Generator().manual_seed(0))
    if normalization == "sum":
        x[..., :width].square_()
    if apart:
        x[:, : rows // 2, : width // 2] = 0.0
        x[:, rows // 2 :, width // 2 : width] = 0.0
    x[:, ::2, :width] *= scale
    wide = torch.nn.functional.pad(x, (margin, margin)).to(DEVICE, dtype)
    features = wide[..., margin : margin + features] if margin else wide
    return {"features": features, "width": width, "normalization": normalization, "eps": eps}


def parts_of(arguments):
    width, size = arguments["width"], arguments["features"].shape[-1]
    return {"out": (width, size - 2 * width), "features": (width, width, size - 2 * width)}


# Windows, rows, features, width.
SIZES = ((2, 1, 2, 1), (3, 2, 35, 17), (3, 40, 80, 24), (1, 65, 40, 17), (1, 130, 128, 64))
NAMES = "windows", "rows", "features", "width"
EXAMPLES = {
    **{
        f"{normalization}, {sizes}": Example({**dict(zip(NAMES, sizes, strict=True)), "normalization": normalization})
        for normalization in ("l1", "sum")
        for sizes in SIZES
    },
    **{
        # Sums of cosines of both signs may be close to zero.
        f"float64, {normalization}, {sizes}": Example(
            {**dict(zip(NAMES, sizes, strict=True)), "normalization": normalization, "dtype": torch.float64},
            EAGER,
            1e-10,
        )
        for normalization in ("l1", "sum")
        for sizes in SIZES
    },
}
for kind in ("l1", "sum"):
    one = {"normalization": kind}
    EXAMPLES |= {
        f"margin, {kind}": Example({**one, "windows": 3, "margin": 3}),
        # Above the norms and the sums of some rows, and below those of others.
        f"large eps, {kind}": Example({**one, "eps": 1.3, "scale": 0.1}),
        f"eps of 1, float64, {kind}": Example({**one, "eps": 1.0, "scale": 9.0, "dtype": torch.float64}, EAGER, 1e-10),
        # A cosine of exactly zero has no sign.
        f"apart, {kind}": Example({**one, "rows": 20, "features": 80, "width": 24, "apart": True}),
        f"no windows, {kind}": Example({**one, "windows": 0}),
        f"a few windows and rows at a time, {kind}": Example(
            {**one, "windows": 5, "rows": 40, "features": 80, "width": 24},
            EAGER,
            patches={"eager.ROWS": 16, "eager.VALUES": 2 * 40 * 24},
        ),
    }
for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float16, 1e-3)):
    small = {"rows": 40, "normalization": "sum", "dtype": dtype}
    large = {"windows": 1, "rows": 130, "features": 200, "width": 64, "dtype": dtype}
    EXAMPLES |= {
        f"{dtype}, sum": Example(small, BOTH, tolerance),
        f"{dtype}, l1": Example(large, KERNELS, tolerance),
        f"{dtype}, l1, eager": Example(large, EAGER, 1e-2),  # a cosine may be rounded across zero
    }
# A program keeps only a part of such a window.
LONG = {"windows": 1, "rows": 300, "features": 32, "width": 16, "dtype": torch.bfloat16}
EXAMPLES["long windows"] = Example(LONG, tolerance=8e-3)

OPERATOR = Operator(
    dynamic_mixing,
    make,
    EXAMPLES,
    calls=("margin, l1", "margin, sum"),
    dtype=lambda arguments: arguments["features"].dtype,
    parts=parts_of,
    written=lambda arguments: {0: arguments["features"][..., arguments["width"] :]},
    in_place=("margin, l1", "margin, sum", "no windows, l1", "long windows"),
    lean=True,
    wrong=[
        ({"features": torch.zeros(7, 40)}, r"`features` must be \(windows, rows >= 1, features\), got \(7, 40\)"),
        ({"features": torch.zeros(2, 0, 40)}, r"`features` must be .*, got \(2, 0, 40\)"),
        ({"features": torch.zeros(2, 7, 40, dtype=torch.int64)}, "`features` must be floating point, got torch.int64"),
        ({"width": 21}, "`width` must be from 1 to 20, half of the features, got 21"),
        ({"width": 0}, "`width` must be from 1 to 20, half of the features, got 0"),
        ({"width": 17.0}, "`width` must be from 1 to 20, half of the features, got 17.0"),
        ({"normalization": "softmax"}, r"`normalization` must be one of \('l1', 'sum'\), got 'softmax'"),
        ({"eps": 0.0}, "`eps` must be at least 1e-20, got 0.0"),
        ({"eps": -1.0}, "`eps` must be at least 1e-20, got -1.0"),
        ({"eps": float("nan")}, "`eps` must be at least 1e-20, got nan"),
        (
            {"features": torch.zeros(40, 7, 2).transpose(0, 2), "inplace": True},
            r"`inplace=True`: the values of a row must lie side by side, .*; got strides \(1, 2, 14\)",
        ),
        (
            {"features": torch.zeros(1, 7, 40).expand(2, -1, -1), "inplace": True},
            r"`inplace=True`: .* each row in its own place; got strides \(0, 40, 1\)",
        ),
        (
            {"features": torch.ones(2, 7, 40, requires_grad=True), "inplace": True},
            "`inplace=True`: autograd has to record what `features` requires",
        ),
    ],
    caps=(
        *({"windows": 1, "rows": n, "width": 3, "features": 8} for n in (128, 129, 256, 257)),
        *({"width": n, "features": 2 * n + 3} for n in (64, 65, 256, 257)),
    ),
)
