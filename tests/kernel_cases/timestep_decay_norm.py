"""Timestep decay normalization of Gecko."""

import torch

from subquad_kernels import timestep_decay_norm

from . import BOTH, DEVICE, EAGER, KERNELS, Documents, Example, Operator, Pieces, first_state, initial_state


# Which of the optional arguments are given.
VARIANTS = {
    "training": ("weight", "bias"),
    "decoding": ("weight", "bias", "initial_state"),
    "packed": ("weight", "bias", "initial_state", "starts"),
    "padded": ("weight", "bias", "initial_state", "real"),
    "all": ("weight", "bias", "initial_state", "starts", "real"),
    "no affine": ("initial_state", "starts"),
    "no bias": ("weight",),
}


def make(
    batch=2,
    length=17,
    width=48,
    groups=4,
    given="all",
    bounds=None,
    rows=2,
    beta=(0.9, 0.99),
    eps=1e-5,
    dtype=torch.float32,
    float32=(),
):
    """Tensors that all differ from row to row and from group to group; documents begin anywhere, or at `bounds`
    in so many `rows`. `float32`: names of arguments that have this dtype."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    state = torch.stack((randn(batch, groups), 1 + rand(batch, groups)), 1)
    count = torch.full((batch, 1, groups), 3.0)
    inputs = {
        "x": (randn(batch, length, width) + 1) * (0.5 * randn(batch, length, 1)).exp(),
        "weight": randn(width),
        "bias": randn(width),
        "initial_state": torch.cat((state * (1 - torch.tensor([0.9, 0.99]) ** 3)[:, None], count), 1),
    }
    inputs = {name: x.to(DEVICE, torch.float32 if name in float32 else dtype) for name, x in inputs.items()}
    inputs["starts"] = (rand(batch, length) < 0.1).to(DEVICE)
    inputs["real"] = (rand(batch, length) < 0.8).to(DEVICE)
    inputs = {name: x if name in (*VARIANTS[given], "x") else None for name, x in inputs.items()}
    if bounds is not None:
        inputs["starts"] = torch.zeros(rows, length, dtype=torch.bool, device=DEVICE)
        inputs["starts"][:, list(bounds)] = True
    return {**inputs, "groups": groups, "beta1": beta[0], "beta2": beta[1], "eps": eps}


LENGTHS = (1, 2, 17, 64, 65, 200)
# Otherwise the interpreter would run hundreds of programs, one after the other.
FEW = {} if DEVICE == "cuda" else {"triton_kernels.multiprocessors": lambda x: 0}
PACKED = {"length": 70, "given": "decoding", "bounds": (3, 4, 68)}


def example(backends=BOTH, tolerance=1e-5, patches=FEW, **sizes):
    return Example(sizes, backends, tolerance, patches)


EXAMPLES = {
    "all, 1": example(batch=1, length=1, width=16),
    "no bias, 3": example(batch=1, length=3, width=16, given="no bias", patches={**FEW, "strips.LONGEST": 2}),
    "all, 3": example(batch=1, length=3, width=16, patches={**FEW, "strips.LONGEST": 2}),
    **{f"{given}, {n}": example(EAGER, length=n, given=given) for given in VARIANTS for n in LENGTHS if n != 1},
    **{f"{given}, {n}": example(EAGER, length=n, given=given) for given in VARIANTS for n in (1,) if given != "all"},
    **{f"{n}, kernels": example(KERNELS, length=n) for n in LENGTHS},
    **{f"{given}, kernels": example(KERNELS, batch=1, length=65, given=given) for given in VARIANTS if given != "all"},
    **{
        f"{groups} groups of {width}, {n}": example(batch=1, length=n, width=width, groups=groups)
        for width, groups in ((32, 1), (96, 8))
        for n in (1, 17, 65)
    },
    **{
        f"{longest} tokens a strip": example(
            KERNELS,
            batch=1,
            length=length,
            patches={
                **FEW,
                "triton_kernels.PASSED": 4,
                "strips.LONGEST": longest,
                "strips.LARGEST": largest,
            },
        )
        for length, longest, largest in [(19, 1, 4096), (40, 64, 64)]
    },
    **{
        f"few groups a program, {n}": example(
            KERNELS, batch=1, length=n, width=36, groups=12, patches={"triton_kernels.multiprocessors": lambda x: 6}
        )
        for n in (1, 70)
    },
    # Their variance is 0, and what is left of a token small.
    **{f"groups of one channel, {n}": example(BOTH, 2e-5, length=n, groups=48, eps=0.1) for n in (1, 17)},
    **{
        f"{dtype}, {n}": example(BOTH, tolerance, batch=1, length=n, dtype=dtype)
        for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3))
        for n in (1, 65)
    },
    **{f"float64, {n}": example(EAGER, 1e-12, length=n, dtype=torch.float64) for n in (1, 65)},
    "mixed": example(BOTH, 8e-3, dtype=torch.bfloat16, float32=("initial_state", "weight")),
    **{
        f"beta {beta}, {n}": example(BOTH, 2e-5, batch=1, length=n, given="training", beta=(beta, beta))
        for beta in (0.0, 0.999, 0.9999, 1 - 1e-9)
        for n in (1, 70)
    },
    "documents": example(**PACKED, rows=1),
    "documents of each row": example(**PACKED),
    "a document begins with the call": example(**{**PACKED, "bounds": (0, 3, 4, 68)}),
}


OPERATOR = Operator(
    timestep_decay_norm,
    make,
    EXAMPLES,
    calls=("all, 1", "no bias, 3", "all, 3"),
    dtype=lambda arguments: arguments["x"].dtype,
    written=initial_state,
    in_place=("all, 1", "all, 3", "documents"),
    exact=True,
    pieces=Pieces({"x": 1, "starts": 1, "real": 1}, lengths=((1, 1, 3), (3, 1, 70, 1))),
    documents=Documents(PACKED, (3, 1, 64, 2), first_state),
    wrong=[
        ({"x": torch.zeros(2, 17)}, r"`x` must be \(batch, length >= 1, width >= 1\), got \(2, 17\)"),
        ({"x": torch.zeros(2, 0, 48)}, r"`x` must be \(batch, length >= 1, width >= 1\), got \(2, 0, 48\)"),
        ({"x": torch.zeros(2, 17, 48, dtype=torch.int64)}, "`x` must be floating point, got torch.int64"),
        ({"groups": 5}, "`groups` must divide 48, the width of `x`, got 5"),
        ({"groups": 0}, "`groups` must divide 48, the width of `x`, got 0"),
        ({"beta1": 1.0}, "`beta1` must be from 0 to below 1, got 1.0"),
        ({"beta2": -0.1}, "`beta2` must be from 0 to below 1, got -0.1"),
        ({"weight": torch.zeros(47)}, r"`weight` must have shape \(48,\), got \(47,\)"),
        ({"bias": torch.zeros(48, dtype=torch.int64)}, "`bias` must be floating point, got torch.int64"),
        ({"bias": torch.zeros(48, device="meta")}, "`bias` is on meta, `x` on "),
        ({"initial_state": torch.zeros(2, 9)}, r"`initial_state` must have shape \(2, 3, 4\), got \(2, 9\)"),
        ({"starts": torch.zeros(2, 17)}, r"`starts` must be bool of shape \(2, 17\) or \(1, 17\), got torch.float32"),
        ({"starts": torch.zeros(3, 17, dtype=torch.bool)}, r"`starts` must be bool .* torch.bool \(3, 17\)"),
        ({"real": torch.zeros(1, 17, dtype=torch.bool)}, r"`real` must be bool of shape \(2, 17\), got .* \(1, 17\)"),
        ({"real": torch.ones(2, 17, dtype=torch.bool, device="meta")}, "`real` is on meta, `x` on "),
        ({"inplace": True, "initial_state": None}, "`inplace` needs a float32, contiguous `initial_state`"),
        ({"inplace": True, "x": torch.zeros(2, 17, 48, requires_grad=True)}, "`inplace` overwrites a state"),
    ],
    caps=(
        *({"batch": 1, "length": 3, "width": 2 * n, "groups": n} for n in (16, 17)),
        *({"batch": 1, "length": 3, "width": n, "groups": 1} for n in (4096, 4097)),
        *({"batch": 1, "width": 8, "groups": 2, "length": n} for n in (64, 65)),
    ),
)
