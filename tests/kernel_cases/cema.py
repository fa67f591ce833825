"""The complex moving average of Gecko."""

import torch

from subquad_kernels import cema

from . import DEVICE, EAGER, KERNELS, PLAIN, Documents, Example, Operator, Pieces, first_state, initial_state


FLAGS = ("none", "starts", "one row of starts", "left", "right", "both", "holes")
# Shares a and d of which 1 - ad is |q|: anything between, 1 - 1e-6, nearly 0, and 0 and 1 to the last bit.
DECAYS = {"mixed": None, "slow": -6.9, "fast": 6.9, "extreme": 100.0}


def make(
    batch=2,
    length=5,
    width=8,
    size=4,
    decay="mixed",
    flags="none",
    bounds=None,
    state=True,
    dtype=torch.float32,
    float32=(),
):
    """`float32`: names of arguments that have this dtype."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    level = DECAYS[decay]
    inputs = {
        "x": randn(batch, length, width),
        "alpha": randn(width, size) if level is None else torch.full_like(randn(width, size), level),
        "delta": randn(width, size) if level is None else torch.full_like(randn(width, size), level),
        "theta": randn(width) * 2,
        "gamma": randn(width, size, 2),
        "initial_state": randn(batch, width, size, 2),
    }
    if decay == "extreme":
        inputs["alpha"][::2] *= -1
    inputs = {name: x.to(DEVICE, torch.float32 if name in float32 else dtype) for name, x in inputs.items()}
    if not state:
        inputs["initial_state"] = None
    if bounds:
        starts = torch.zeros(1, length, dtype=torch.bool)
        starts[:, list(bounds)] = True
        return {**inputs, "starts": starts.to(DEVICE)}
    return {**inputs, **make_flags(flags, batch, length)}


def make_flags(kind, batch, length):
    generator = torch.Generator().manual_seed(length)
    position = torch.arange(length)
    left = position >= torch.tensor([length // 3, 0, length])[:batch, None]
    right = position < torch.tensor([length - length // 2, length, 1])[:batch, None]
    starts = torch.rand(batch, length, generator=generator) < 0.06
    starts[-1, 0] = True
    holes = torch.rand(batch, length, generator=generator) < 0.6
    flags = {
        "none": {},
        "starts": {"starts": starts},
        "one row of starts": {"starts": starts[-1:]},
        "left": {"real": left},
        "right": {"real": right},
        "both": {"real": left & right, "starts": starts},
        "holes": {"real": holes, "starts": starts},
    }[kind]
    return {name: x.to(DEVICE) for name, x in flags.items()}


EXAMPLES = {
    "small": Example({"size": 2}),
    "flags": Example({"size": 2, "flags": "both"}),
    "padded": Example({"length": 21, "size": 2, "flags": "right"}),
    "one token": Example({"length": 1, "size": 2, "flags": "left"}),
    "no state": Example({"length": 20, "size": 2, "state": False}),
    "no state, one token": Example({"length": 1, "size": 2, "state": False}),
    "documents": Example({"length": 22, "size": 2, "bounds": (3, 4, 20)}),
    "fast": Example({"batch": 1, "length": 50, "size": 2, "decay": "fast"}),
    "extreme": Example({"batch": 1, "length": 50, "size": 2, "decay": "extreme"}),
}
for length, width, size, slow in [
    (1, 8, 4, 0),
    (2, 8, 1, 1),
    (17, 12, 16, 0),
    (64, 8, 4, 1),
    (65, 48, 4, 0),
    (200, 8, 4, 1),
]:
    for number, flags in enumerate(FLAGS):
        decay, dtype, tolerance = (("mixed", torch.float64, 1e-11), ("slow", torch.float32, 2e-5))[(slow + number) % 2]
        given = {"batch": 3, "length": length, "width": width, "size": size}
        given |= {"decay": decay, "dtype": dtype, "flags": flags}
        EXAMPLES[f"{flags}, {length}"] = Example(given, EAGER, tolerance)
for length, width, size, decay, flags, dtype, tolerance in [
    (1, 8, 4, "mixed", "left", torch.float32, 1e-5),
    (2, 70, 1, "slow", "one row of starts", torch.float32, 1e-5),
    (67, 8, 5, "mixed", "none", torch.float32, 1e-5),
    (6, 8, 16, "mixed", "none", torch.bfloat16, 8e-3),
    (66, 8, 1, "mixed", "both", torch.float16, 1e-3),
]:
    given = {"length": length, "width": width, "size": size, "decay": decay, "flags": flags, "dtype": dtype}
    EXAMPLES[f"{flags}, {length}, {dtype}, kernels"] = Example(
        {**given, "float32": ("initial_state",)}, KERNELS, tolerance
    )
for length in (1, 70):
    for dtype in (torch.bfloat16, torch.float16):
        given = {"length": length, "dtype": dtype, "float32": ("initial_state",)}
        EXAMPLES[f"{dtype}, {length}"] = Example(given, PLAIN, 8e-3)
# What enters the segments of a long row is found first.
for given in (
    {"batch": 1, "length": 150, "size": 2, "decay": "slow", "state": False},
    {"length": 90, "size": 2, "flags": "holes"},
):
    EXAMPLES[f"segments, {given['length']}"] = Example(given, KERNELS, patches={"triton_kernels.MIN_SEGMENT": 64})


OPERATOR = Operator(
    cema,
    make,
    EXAMPLES,
    calls=("small", "flags", "one token"),
    dtype=lambda arguments: arguments["x"].dtype,
    written=initial_state,
    in_place=("small", "flags", "one token", "fast"),
    pieces=Pieces(
        {"x": 1, "starts": 1, "real": 1}, lengths=((1, 1, 3), (33, 1, 4)), sizes={"size": 2, "flags": "both"}
    ),
    documents=Documents({"length": 22, "size": 2, "bounds": (3, 4, 20)}, (3, 1, 16, 2), first_state),
    wrong=[
        ({"x": torch.zeros(2, 8)}, r"`x` must be .*, got \(2, 8\)"),
        ({"x": torch.zeros(2, 0, 8)}, r"`x` must be .*, got \(2, 0, 8\)"),
        ({"x": torch.zeros(2, 5, 8, dtype=torch.int64)}, "`x` must be floating point, got torch.int64"),
        ({"alpha": torch.zeros(8)}, r"`alpha` must be .*, got \(8,\)"),
        ({"alpha": torch.zeros(9, 4)}, r"`alpha` must have shape \(8, 4\), got \(9, 4\)"),
        ({"delta": torch.zeros(8, 5)}, r"`delta` must have shape .* got \(8, 5\)"),
        ({"theta": torch.zeros(8, 4)}, r"`theta` must have shape .* got \(8, 4\)"),
        ({"gamma": torch.zeros(8, 4)}, r"`gamma` must have shape .* got \(8, 4\)"),
        ({"gamma": torch.zeros(8, 4, 2, device="meta")}, "`gamma` is on meta"),
        (
            {"initial_state": torch.zeros(2, 8, 4, dtype=torch.complex64)},
            r"`initial_state` must have shape .* \(2, 8, 4\)",
        ),
        ({"starts": torch.zeros(2, 5)}, "`starts` must be bool, got torch.float32"),
        ({"starts": torch.zeros(3, 5, dtype=torch.bool)}, r"`starts` must have shape \(2, 5\), got \(3, 5\)"),
        ({"real": torch.zeros(1, 5, dtype=torch.bool)}, r"`real` must have shape .* got \(1, 5\)"),
        ({"inplace": True, "initial_state": None}, "`inplace` needs a float32"),
        ({"inplace": True, "x": torch.zeros(2, 5, 8, requires_grad=True)}, "`inplace` overwrites a state"),
    ],
    caps=({"size": 16, "width": 2}, {"size": 17, "width": 2}, {"width": 64}, {"width": 65, "length": 65}),
)
