"""The token shift."""

import torch

from subquad_kernels import token_shift

from . import BOTH, DEVICE, EAGER, KERNELS, Documents, Example, Operator, Pieces


# n, and which of the optional arguments are given.
VARIANTS = {
    "finch": (5, ("state", "offset")),
    "finch packed": (5, ("state", "offset", "starts")),
    "finch without state": (3, ("offset",)),
    "before the LoRA": (1, ("state",)),
    "channel mixing packed": (2, ("state", "starts")),
    "nothing": (1, ()),
}


def make(batch=2, length=17, width=37, variant="finch", bounds=None, rows=2, dtype=torch.float32, mixed=False):
    n, given = VARIANTS[variant]
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    starts = torch.rand(batch, length, generator=generator) < 0.2
    if bounds:
        starts = torch.zeros(rows, length, dtype=torch.bool)
        starts[:, list(bounds)] = True
    inputs = {
        "x": randn(batch, length, width),
        "state": randn(batch, width) if "state" in given else None,
        "mu": randn(n, width),
        "offset": randn(n, batch, length, width) if "offset" in given else None,
        "starts": starts.to(DEVICE) if bounds or "starts" in given else None,
    }
    if mixed:
        inputs |= {name: inputs[name].bfloat16() for name in ("state", "offset")}
    return inputs


PACKED = {"length": 50, "bounds": (3, 4, 34)}
EXAMPLES = {
    **{
        f"{variant}, {length}": Example({"variant": variant, "length": length})
        for variant in VARIANTS
        for length in ((1, 2, 15, 16, 17, 33, 65) if variant == "finch packed" else (1, 2, 33))
    },
    **{
        f"finch packed, {length}": Example({"variant": "finch packed", "length": length}, EAGER)
        for length in (63, 64, 130)
    },
    **{f"width {n}": Example({"length": 9, "width": n, "variant": "finch packed"}) for n in (1, 3, 64, 512, 600)},
    **{
        f"{dtype}, {length}": Example({"length": length, "variant": "finch packed", "dtype": dtype}, BOTH, tolerance)
        for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3))
        for length in (1, 65)
    },
    **{
        f"long strips, {length}": Example(
            {"length": length, "variant": "finch packed"},
            KERNELS,
            patches={"triton_kernels.multiprocessors": lambda x: 0},
        )
        for length in (31, 32, 33, 70)
    },
    "mixed": Example({"mixed": True}, BOTH, 8e-3),
    "documents": Example({**PACKED, "rows": 1}),
    "documents of each row": Example(PACKED),
}

OPERATOR = Operator(
    token_shift,
    make,
    EXAMPLES,
    calls=("finch packed, 17", "before the LoRA, 1", "nothing, 2", "channel mixing packed, 2"),
    exact=True,
    dtype=lambda arguments: arguments["x"].dtype,
    pieces=Pieces(
        {"x": 1, "offset": 2}, lambda arguments, y: {"state": arguments["x"][:, -1]}, 2, ((1, 1, 3), (3, 1, 30, 1, 30))
    ),
    documents=Documents(PACKED, (3, 1, 30, 16), lambda part, n: {"starts": None, **({"state": None} if n else {})}),
    wrong=[
        ({"x": torch.zeros(2, 17)}, r"`x` must be \(batch, length >= 1, width\), got \(2, 17\)"),
        ({"x": torch.zeros(2, 0, 37)}, r"`x` must be \(batch, length >= 1, width\), got \(2, 0, 37\)"),
        ({"x": torch.zeros(2, 17, 37, dtype=torch.int64)}, "`x` must be floating point, got torch.int64"),
        ({"state": torch.zeros(1, 37)}, r"`state` must have shape \(2, 37\), got \(1, 37\)"),
        ({"state": torch.zeros(2, 37, dtype=torch.int64)}, "`state` must be floating point, got torch.int64"),
        ({"mu": torch.zeros(37)}, r"`mu` must be \(n >= 1, 37\), got \(37,\)"),
        ({"mu": torch.zeros(5, 36)}, r"`mu` must be \(n >= 1, 37\), got \(5, 36\)"),
        ({"mu": torch.zeros(5, 37, device="meta")}, "`mu` is on meta, `x` on "),
        ({"offset": torch.zeros(2, 17, 37)}, r"`offset` must have shape \(5, 2, 17, 37\), got \(2, 17, 37\)"),
        ({"starts": torch.zeros(2, 17)}, r"`starts` must be bool of shape \(2, 17\) or \(1, 17\), got torch.float32"),
        ({"starts": torch.zeros(2, 16, dtype=torch.bool)}, r"`starts` must be bool .* \(2, 16\)"),
    ],
    caps=(*({"width": n} for n in (512, 513)),),
)
