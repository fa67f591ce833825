"""WKV of Eagle and Finch."""

import torch

from subquad_kernels import wkv, wkv_state

from . import (
    BOTH,
    EAGER,
    KERNELS,
    PLAIN,
    WRONG_BOUNDS,
    Documents,
    Example,
    Operator,
    Pieces,
    initial_state,
    own_state,
    placed,
)


# (weakest, strongest) log decay a step: mixed inside one head, almost none, almost total, and beyond any trained one.
DECAYS = {"trained": (-1e-6, -9.2), "weak": (-1e-6, -1e-6), "strong": (-9.2, -9.2), "extreme": (-1e-6, -150.0)}


def make(
    batch=2,
    length=5,
    heads=2,
    key=8,
    value=12,
    static=False,
    decay="trained",
    documents=None,
    state=True,
    dtype=torch.float32,
    float32=(),
    total=False,
    out_dtype=None,
):
    """`documents`: lengths of documents that are packed. `float32`: names of arguments that have this dtype.
    `total`: decays of 0."""
    generator = torch.Generator().manual_seed(0)
    if documents:
        batch, length = 1, sum(documents)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weakest, strongest = (torch.tensor(-x).log() for x in DECAYS[decay])
    shape = (heads, key) if static else (batch, length, heads, key)
    log_w = -torch.exp(weakest + (strongest - weakest) * torch.rand(shape, generator=generator))
    if total:
        log_w[:, ::7] = -torch.inf
        log_w[:, length - 20 :] = torch.finfo(dtype).min
    inputs = {
        "r": randn(batch, length, heads, key),
        "k": randn(batch, length, heads, key),
        "v": randn(batch, length, heads, value),
        "log_w": log_w,
        "u": randn(heads, key),
        "initial_state": randn(len(documents or ()) or batch, heads, key, value),
    }
    return placed(inputs, dtype, float32, state, documents, out_dtype)


# The kernels walk a sequence from end to end, or find first what enters its segments.
SEGMENTS = {"triton_kernels.MIN_SEGMENT": 32}
PACKED = [((70,), 0), ((3, 0, 64, 1, 37), 0), ((3, 0, 64, 1, 37), 1), ((1, 1, 1), 1), ((0, 5), 0), ((7, 0), 1)]
EXAMPLES = {
    "small": Example({"heads": 1}),
    "one token": Example({"length": 1, "heads": 1}),
    "static": Example({"heads": 1, "static": True}),
}
for number, length in enumerate((1, 2, 15, 16, 17, 63, 64, 65, 200)):
    for kind, decay in enumerate(DECAYS):
        given = {"length": length, "decay": decay, "static": (number + kind) % 2 == 1}
        # What the interpreter, which is slow, has time for: length 65 with every decay, the others with one each.
        kernels = length == 65 or kind == number % 4
        given["heads"] = 1 if length > 64 else 2
        EXAMPLES[f"{decay}, {length}"] = Example(given, BOTH if kernels else EAGER)
        EXAMPLES[f"{decay}, {length}, other"] = Example({**given, "static": not given["static"]}, EAGER)
        if kind == number % 4 and length in (1, 16, 63, 65, 200):
            # Decays of both dtypes.
            float32 = ("log_w", "initial_state") if length % 2 else ("initial_state",)
            more = {"dtype": torch.bfloat16, "float32": float32, "static": not given["static"]}
            EXAMPLES[f"{decay}, {length}, bfloat16"] = Example({**given, **more}, KERNELS, 8e-3)
for length in (1, 65):
    for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3), (torch.float64, 1e-12)):
        EXAMPLES[f"{dtype}, {length}"] = Example({"length": length, "dtype": dtype}, PLAIN, tolerance)
for length in (1, 17, 65):
    # The products are of numbers of 10 bits: in the interpreter, of 23.
    given = {"length": length, "dtype": torch.float16, "out_dtype": torch.float32}
    EXAMPLES[f"float16, {length}, out float32"] = Example(given, KERNELS, 2e-3)
for length, decay, static, dtype in [
    (63, "trained", True, torch.float32),
    (63, "strong", False, torch.bfloat16),
    (65, "strong", False, torch.float32),
    (65, "trained", True, torch.bfloat16),
    (130, "trained", False, torch.float32),
    (130, "strong", True, torch.bfloat16),
]:
    given = {"length": length, "heads": 1, "decay": decay, "static": static, "dtype": dtype}
    EXAMPLES[f"segments, {decay}, {length}, {dtype}"] = Example(
        given, KERNELS, 1e-5 if dtype == torch.float32 else 8e-3, SEGMENTS
    )
for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3)):
    given = {"length": 70, "heads": 1, "dtype": dtype, "total": True}
    EXAMPLES[f"total, {dtype}"] = Example(given, BOTH, tolerance)
    EXAMPLES[f"total, {dtype}, segments"] = Example(given, KERNELS, tolerance, SEGMENTS)
for number, (key, value) in enumerate([(1, 1), (3, 5), (8, 8), (16, 130), (64, 64), (100, 48), (128, 128)]):
    given = {"batch": 1, "length": 50, "heads": 1, "key": key, "value": value}
    EXAMPLES[f"keys of {key}, values of {value}"] = Example(given, EAGER)
    EXAMPLES[f"keys of {key}, values of {value}, kernels"] = Example(
        given, KERNELS, patches=SEGMENTS if number % 2 else {}
    )
for documents, static in PACKED:
    given = {"documents": documents, "heads": 1, "static": bool(static)}
    EXAMPLES[f"documents {documents}, {static}"] = Example(given)
    if sum(documents) < 32:
        continue
    EXAMPLES[f"documents {documents}, {static}, segments"] = Example(given, KERNELS, patches=SEGMENTS)
for length in (1, 70):
    EXAMPLES[f"no state, {length}"] = Example({"length": length, "heads": 1, "state": False})
EXAMPLES["no state, segments"] = Example({"length": 70, "heads": 1, "state": False}, KERNELS, patches=SEGMENTS)

OPERATOR = Operator(
    wkv,
    make,
    EXAMPLES,
    calls=("small", "one token", "static", "documents (7, 0), 1"),
    dtype=lambda arguments: arguments.get("out_dtype") or arguments["v"].dtype,
    written=initial_state,
    in_place=("small", "one token"),
    pieces=Pieces(
        {"r": 1, "k": 1, "v": 1, "log_w": 1}, lengths=((1, 1, 3), (3, 1, 70, 1), (64, 9)), sizes={"heads": 1}
    ),
    documents=Documents({"documents": (3, 0, 9, 1)}, (3, 0, 9, 1), own_state),
    state=lambda arguments, backend: wkv_state(
        arguments.get("initial_state"), *(arguments[name] for name in ("k", "v", "log_w")), backend=backend
    ),
    states=("small", "one token", "no state, 1"),
    wrong_values=WRONG_BOUNDS,
    wrong=[
        ({"r": torch.zeros(2, 5, 2, 7)}, r"`r` must have shape \(2, 5, 2, 8\), got \(2, 5, 2, 7\)"),
        ({"k": torch.zeros(2, 0, 2, 8)}, r"`k` must be .*, got \(2, 0, 2, 8\)"),
        ({"v": torch.zeros(2, 4, 2, 12)}, r"`v` must have shape .* got \(2, 4, 2, 12\)"),
        ({"v": torch.tensor(1.0)}, r"`v` must be .*, got \(\)"),
        ({"u": torch.zeros(2, 9)}, r"`u` must have shape .* got \(2, 9\)"),
        ({"log_w": torch.zeros(2, 5, 1, 8)}, r"`log_w` must have shape .* got \(2, 5, 1, 8\)"),
        ({"initial_state": torch.zeros(3, 2, 8, 12)}, r"`initial_state` must have shape .* got \(3, 2, 8, 12\)"),
        ({"u": torch.zeros(2, 8, dtype=torch.int64)}, "`u` must be floating point, got torch.int64"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "`cu_seqlens` describes one packed row, got a batch of 2"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "`cu_seqlens` must be int32 or int64 .* got torch.float32"),
        ({"inplace": True, "initial_state": torch.zeros(2, 2, 8, 12).double()}, "`inplace` needs a float32"),
        ({"inplace": True, "u": torch.zeros(2, 8, requires_grad=True)}, "`inplace` overwrites a state"),
    ],
    caps=(
        *({"batch": 1, "heads": 1, "key": n, "value": 3} for n in (64, 65, 128, 129, 256, 257)),
        *({"batch": 1, "heads": 1, "key": 3, "value": n} for n in (64, 65, 128, 129)),
        *({"batch": 1, "heads": 1, "length": n} for n in (32, 33)),
    ),
)
