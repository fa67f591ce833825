"""The recurrence of Goose."""

import math

import torch

from subquad_kernels import delta_wkv, delta_wkv_state

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


# (weakest, strongest) log decay a step: mixed inside one head, almost none, the strongest of RWKV-7, and beyond it.
FLOOR = -math.exp(-0.5)
DECAYS = {"trained": (-1e-6, FLOOR), "weak": (-1e-6, -1e-6), "floor": (FLOOR, FLOOR), "extreme": (-1e-6, -5.0)}


def make(
    batch=2,
    length=5,
    heads=2,
    key=8,
    value=12,
    decay="trained",
    documents=None,
    state=True,
    dtype=torch.float32,
    float32=(),
    out_dtype=None,
    repeated=False,
    padding=(),
):
    """`documents`: lengths of documents that are packed. `float32`: names of arguments that have this dtype.
    `repeated`: every token has the same keys, and replaces all that they hold. `padding`: places of tokens that do
    nothing."""
    generator = torch.Generator().manual_seed(0)
    if documents:
        batch, length = 1, sum(documents)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = batch, length, heads
    weakest, strongest = (torch.tensor(-x, dtype=torch.float64).log() for x in DECAYS[decay])
    exponents = torch.rand(*tokens, key, generator=generator, dtype=torch.float64)
    inputs = {
        "r": randn(*tokens, key),
        "k": randn(*tokens, key),
        "v": randn(*tokens, value),
        "log_w": -torch.exp(weakest + (strongest - weakest) * exponents),
        "kappa": torch.nn.functional.normalize(randn(*tokens, key), dim=-1),
        "a": torch.rand(*tokens, key, generator=generator, dtype=torch.float64),
        "initial_state": randn(len(documents or ()) or batch, heads, value, key),
    }
    if repeated:
        inputs["kappa"] = inputs["kappa"][:, :1].expand_as(inputs["kappa"]).clone()
        inputs["k"] = inputs["kappa"].clone()
        inputs["a"].fill_(1)
    for name in ("k", "log_w", "kappa"):
        inputs[name][:, list(padding)] = 0
    return placed(inputs, dtype, float32, state, documents, out_dtype)


# The kernels walk a sequence from end to end, or find first what enters its segments.
SEGMENTS = {"triton_kernels.MIN_SEGMENT": 32}
# Every 32 tokens are a slab.
SLABS = {"slabs.TOKENS": 0, "slabs.LEAST": 32}
PACKED = [(70,), (3, 0, 64, 1, 37), (1, 1, 1), (0, 5), (7, 0)]
EXAMPLES = {
    "small": Example({"heads": 1}),
    "one token": Example({"length": 1, "heads": 1}),
}
for number, length in enumerate((1, 2, 15, 16, 17, 31, 32, 33, 65, 200)):
    for kind, decay in enumerate(DECAYS):
        given = {"length": length, "decay": decay, "heads": 1 if length > 64 else 2}
        # What the interpreter, which is slow, has time for: length 65 with every decay, the others with one each.
        kernels = length == 65 or kind == number % 4
        EXAMPLES[f"{decay}, {length}"] = Example(given, BOTH if kernels else EAGER)
        EXAMPLES[f"{decay}, {length}, float64"] = Example({**given, "dtype": torch.float64}, EAGER, 1e-11)
        if kind == number % 4 and length in (1, 16, 33, 65, 200):
            # Decays of both dtypes.
            float32 = ("log_w", "initial_state") if length % 2 else ("initial_state",)
            more = {"dtype": torch.bfloat16, "float32": float32}
            EXAMPLES[f"{decay}, {length}, bfloat16"] = Example({**given, **more}, KERNELS, 1e-2)
for length, decay, dtype in [
    (63, "trained", torch.float32),
    (63, "floor", torch.bfloat16),
    (65, "floor", torch.float32),
    (65, "trained", torch.bfloat16),
    (130, "trained", torch.float32),
    (130, "weak", torch.bfloat16),
]:
    given = {"length": length, "heads": 1, "decay": decay, "dtype": dtype}
    EXAMPLES[f"segments, {decay}, {length}, {dtype}"] = Example(
        given, KERNELS, 1e-5 if dtype == torch.float32 else 1e-2, SEGMENTS
    )
for length in (1, 65):
    for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3), (torch.float64, 1e-12)):
        EXAMPLES[f"{dtype}, {length}"] = Example({"length": length, "dtype": dtype}, PLAIN, tolerance)
EXAMPLES["the same keys"] = Example({"length": 70, "decay": "weak", "repeated": True})
EXAMPLES["the same keys, bfloat16"] = Example(
    {"length": 70, "decay": "weak", "repeated": True, "dtype": torch.bfloat16}, KERNELS, 1e-2
)
# A CPU computes few chunks together.
EXAMPLES["one chunk at a time"] = Example({"length": 100}, EAGER, patches={"eager.VALUES": 1})
for length in (32, 33, 65, 97):
    EXAMPLES[f"slabs, {length}"] = Example({"length": length, "decay": "extreme"}, patches=SLABS)
for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float16, 4e-3)):
    given = {"length": 70, "heads": 1, "dtype": dtype, "state": False, "out_dtype": torch.float32}
    EXAMPLES[f"slabs, {dtype}"] = Example(given, KERNELS, tolerance, SLABS)
EXAMPLES["slabs, segments"] = Example(
    {"length": 150, "heads": 1}, KERNELS, patches={"triton_kernels.MIN_SEGMENT": 16, **SLABS, "slabs.LEAST": 64}
)
for documents in ((3, 0, 64, 1, 37), (0, 70, 0, 1), (33, 31)):
    EXAMPLES[f"slabs, documents {documents}"] = Example(
        {"documents": documents, "heads": 1, "state": len(documents) > 2}, patches=SLABS
    )
EXAMPLES["slabs, documents, segments"] = Example(
    {"documents": (3, 0, 100, 1, 45), "heads": 1},
    KERNELS,
    patches={"triton_kernels.MIN_SEGMENT": 16, **SLABS, "slabs.LEAST": 20},
)
EXAMPLES["slabs, wide heads"] = Example({"length": 70, "heads": 1, "key": 130, "value": 20}, KERNELS, patches=SLABS)
EXAMPLES["padding"] = Example({"length": 40, "padding": (0, 1, 2, 17, 18, 39)})
for length in (1, 17, 65):
    # The products are of numbers of 10 bits: in the interpreter, of 23.
    given = {"length": length, "dtype": torch.float16, "out_dtype": torch.float32}
    EXAMPLES[f"float16, {length}, out float32"] = Example(given, KERNELS, 4e-3)
for number, (key, value) in enumerate([(1, 1), (3, 5), (8, 8), (16, 130), (64, 64), (100, 48), (128, 128), (16, 16)]):
    given = {"batch": 1, "length": 50, "heads": 1, "key": key, "value": value}
    EXAMPLES[f"keys of {key}, values of {value}"] = Example(given, EAGER)
    EXAMPLES[f"keys of {key}, values of {value}, kernels"] = Example(
        given, KERNELS, patches=SEGMENTS if number % 2 else {}
    )
# Of wide heads, `_pass_kernel` reads the state from memory.
for key, value, more in [
    (128, 20, {"length": 97, "state": False}),
    (200, 3, {"length": 131}),
    (256, 40, {"documents": (33, 0, 70, 1)}),
]:
    given = {"batch": 1, "heads": 1, "key": key, "value": value, **more}
    EXAMPLES[f"segments, keys of {key}"] = Example(given, KERNELS, patches=SEGMENTS)
    if key == 200:
        given = {**given, "dtype": torch.bfloat16, "float32": ("log_w", "initial_state")}
        EXAMPLES[f"segments, keys of {key}, bfloat16"] = Example(given, KERNELS, 1e-2, SEGMENTS)
for documents in PACKED:
    EXAMPLES[f"documents {documents}"] = Example({"documents": documents, "heads": 1})
for documents in PACKED[:2]:
    EXAMPLES[f"documents {documents}, segments"] = Example(
        {"documents": documents, "heads": 1}, KERNELS, patches=SEGMENTS
    )
for length in (1, 70):
    EXAMPLES[f"no state, {length}"] = Example({"length": length, "heads": 1, "state": False})
EXAMPLES["no state, segments"] = Example({"length": 70, "heads": 1, "state": False}, KERNELS, patches=SEGMENTS)

OPERATOR = Operator(
    delta_wkv,
    make,
    EXAMPLES,
    calls=("small", "one token", "documents (7, 0)"),
    dtype=lambda arguments: arguments.get("out_dtype") or arguments["v"].dtype,
    written=initial_state,
    in_place=("small", "one token"),
    pieces=Pieces(
        dict.fromkeys(("r", "k", "v", "log_w", "kappa", "a"), 1),
        lengths=((1, 1, 3), (3, 1, 70, 1), (64, 9)),
        sizes={"heads": 1},
    ),
    documents=Documents({"documents": (3, 0, 9, 1)}, (3, 0, 9, 1), own_state),
    state=lambda arguments, backend: delta_wkv_state(
        arguments.get("initial_state"),
        *(arguments[name] for name in ("k", "v", "log_w", "kappa", "a")),
        backend=backend,
    ),
    states=("small", "one token", "no state, 1"),
    wrong_values=WRONG_BOUNDS,
    wrong=[
        ({"r": torch.zeros(2, 5, 2, 7)}, r"`r` must have shape \(2, 5, 2, 8\), got \(2, 5, 2, 7\)"),
        ({"k": torch.zeros(2, 0, 2, 8)}, r"`k` must be .*, got \(2, 0, 2, 8\)"),
        ({"v": torch.zeros(2, 4, 2, 12)}, r"`v` must have shape .* got \(2, 4, 2, 12\)"),
        ({"v": torch.tensor(1.0)}, r"`v` must be .*, got \(\)"),
        ({"a": torch.zeros(2, 8)}, r"`a` must have shape .* got \(2, 8\)"),
        ({"kappa": torch.zeros(2, 5, 2, 9)}, r"`kappa` must have shape .* got \(2, 5, 2, 9\)"),
        ({"log_w": torch.zeros(2, 5, 1, 8)}, r"`log_w` must have shape .* got \(2, 5, 1, 8\)"),
        ({"initial_state": torch.zeros(3, 2, 12, 8)}, r"`initial_state` must have shape .* got \(3, 2, 12, 8\)"),
        ({"initial_state": torch.zeros(2, 2, 8, 12)}, r"`initial_state` must have shape .* got \(2, 2, 8, 12\)"),
        ({"a": torch.zeros(2, 5, 2, 8, dtype=torch.int64)}, "`a` must be floating point, got torch.int64"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "`cu_seqlens` describes one packed row, got a batch of 2"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "`cu_seqlens` must be int32 or int64 .* got torch.float32"),
        ({"inplace": True, "initial_state": torch.zeros(2, 2, 12, 8).double()}, "`inplace` needs a float32"),
        ({"inplace": True, "a": torch.zeros(2, 5, 2, 8, requires_grad=True)}, "`inplace` overwrites a state"),
    ],
    caps=(
        *({"batch": 1, "heads": 1, "key": n, "value": 3} for n in (32, 33, 64, 65, 128, 129, 256, 257)),
        *({"batch": 1, "heads": 1, "key": 3, "value": n} for n in (64, 65, 128, 129, 256)),
        *({"batch": 1, "heads": 1, "length": n} for n in (16, 17, 32, 33)),
    ),
)
