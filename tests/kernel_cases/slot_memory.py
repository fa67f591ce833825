"""The slot memory of Raven."""

import torch

from subquad_kernels import slot_memory, slot_memory_state

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


# How much of a slot a step takes away: of the few chosen slots of Raven, of all, of the oldest everything (so that
# slots are a window), anything, nothing, next to nothing, and sometimes everything.
DECAYS = ("routed", "dense", "window", "extreme", "none", "weak", "total")


def make_log_f(shape, decay, generator, dtype):
    length, slots = shape[1], shape[-1]
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    if decay == "routed":
        chosen = torch.rand(shape, generator=generator).topk(max(slots // 4, 1)).indices
        values = -torch.nn.functional.softplus(noise.gather(-1, chosen)) / 3
        return torch.zeros_like(noise).scatter(-1, chosen, values)
    if decay == "window":
        written = torch.arange(length)[:, None, None] % slots == torch.arange(slots)
        return torch.zeros_like(noise).masked_fill(written, -torch.inf)
    if decay == "extreme":
        return -1e-6 * (150e6 ** torch.rand(shape, generator=generator, dtype=torch.float64))
    if decay == "none":
        return torch.zeros_like(noise)
    if decay == "weak":  # 1 - exp(-1e-6) in float32 would be off by 5%
        return -1e-6 * (1 + torch.rand(shape, generator=generator, dtype=torch.float64))
    log_f = torch.nn.functional.logsigmoid(noise) / 8
    if decay == "total":
        log_f[:, 3::7, :, ::2] = -torch.inf
        log_f[:, length - 20 :, :, 1::2] = torch.finfo(dtype).min
    return log_f


def make(
    batch=2,
    length=5,
    heads=2,
    key=8,
    value=12,
    slots=12,
    decay="routed",
    documents=None,
    state=True,
    empty=False,
    dtype=torch.float32,
    float32=(),
):
    """`documents`: lengths of documents that are packed. `empty`: the state is zeros. `float32`: names of arguments
    that have this dtype."""
    generator = torch.Generator().manual_seed(0)
    if documents:
        batch, length = 1, sum(documents)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {
        "q": randn(batch, length, heads, key) * min(1, 4 / key**0.5),
        "k": randn(batch, length, heads, key),
        "v": randn(batch, length, heads, value),
        "log_f": make_log_f((batch, length, heads, slots), decay, generator, dtype),
        "initial_state": randn(len(documents or ()) or batch, heads, slots, key + value) * (not empty),
    }
    return placed(inputs, dtype, float32, state, documents)


SIZES = [(1, 1, 1), (3, 5, 2), (24, 16, 40), (16, 32, 64), (8, 130, 17), (70, 8, 5), (16, 16, 512)]
EXAMPLES = {
    "small": Example({"heads": 1}),
    "one token": Example({"length": 1, "heads": 1}),
    **{
        f"{decay}, {length}": Example({"length": length, "decay": decay}, EAGER)
        for length in (1, 2, 15, 16, 17, 63, 64, 65, 200)
        for decay in DECAYS[:5]
    },
    # Triton's interpreter is slow.
    **{
        f"{decay}, {length}, kernels": Example({"length": length, "decay": decay, "heads": 1}, KERNELS, tolerance)
        for length, decay, tolerance in (
            (1, "routed", 1e-5),
            (17, "dense", 1e-5),
            (65, "window", 1e-5),
            (65, "none", 1e-5),
            (130, "routed", 1e-5),
            (65, "extreme", 3e-5),  # differences of sums of log decays, which are rounded where they are large
        )
    },
    # All slots get almost the same, so that the gradient of the queries is a difference of almost equal numbers.
    "weak": Example({"length": 40, "decay": "weak", "empty": True}, tolerance=2e-5),
    "weak, one token": Example({"length": 1, "decay": "weak", "state": False}),
    **{
        f"no state{', documents' if documents else ''}, {length}": Example(
            {"length": length, "documents": documents, "state": False, "heads": 1}
        )
        for length, documents in ((1, None), (40, None), (22, (3, 0, 18, 1)))
    },
}
for key, value, slots in (*SIZES, (512, 16, 16), (16, 512, 16), (256, 256, 256)):
    given = {"batch": 1, "length": 40, "heads": 1, "key": key, "value": value, "slots": slots}
    EXAMPLES[f"sizes {key}, {value}, {slots}"] = Example(given, BOTH if (key, value, slots) in SIZES else EAGER)
for documents in ((3, 0, 64, 1, 17), (0, 5), (7, 0)):
    EXAMPLES[f"documents {documents}"] = Example({"documents": documents, "heads": 1})
# More slots than a program holds.
for slots, length, documents in ((513, 17, None), (600, None, (3, 0, 9)), (1024, 1, None)):
    given = {"batch": 1, "length": length, "heads": 1, "slots": slots, "documents": documents}
    EXAMPLES[f"{slots} slots"] = Example(given, KERNELS)
# What enters the segments of a sequence is found first.
for documents in (None, (3, 0, 67)):
    given = {"batch": 1, "length": 70, "heads": 1, "documents": documents}
    EXAMPLES[f"segments, {documents}"] = Example(given, KERNELS, patches={"triton_kernels.MIN_SEGMENT": 32})
# Rows that are computed apart: of 40 tokens one, of 20 two at a time.
for batch, length, state in ((2, 40, True), (3, 20, False)):
    given = {"batch": batch, "length": length, "heads": 1, "state": state}
    EXAMPLES[f"rows, {length}"] = Example(given, KERNELS, patches={"triton_kernels.MOST_TOKENS": 40})
for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3)):
    EXAMPLES[f"total, {dtype}"] = Example(
        {"length": 70, "heads": 1, "decay": "total", "dtype": dtype}, BOTH, tolerance
    )
for length, decay in [(1, "routed"), (17, "extreme"), (65, "routed")]:
    # Of the routed decays float32 is what the model has.
    float32 = ("log_f", "initial_state") if decay == "routed" else ("initial_state",)
    given = {"length": length, "decay": decay, "dtype": torch.bfloat16, "float32": float32}
    EXAMPLES[f"bfloat16, {decay}, {length}"] = Example(given, KERNELS, 2e-2)
for length in (1, 65):
    # The products are of numbers of 10 bits: in the interpreter, of 23.
    EXAMPLES[f"float16, {length}"] = Example({"length": length, "dtype": torch.float16}, KERNELS, 4e-3)
    for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3), (torch.float64, 1e-12)):
        EXAMPLES[f"{dtype}, {length}"] = Example({"length": length, "dtype": dtype}, PLAIN, tolerance)
TINY = {"heads": 1, "key": 2, "value": 3, "slots": 3, "decay": "dense", "dtype": torch.float64}
EXAMPLES["tiny, float64"] = Example(TINY, EAGER, 1e-12)
EXAMPLES["tiny, float64, documents"] = Example({**TINY, "documents": (1, 4)}, EAGER, 1e-12)

OPERATOR = Operator(
    slot_memory,
    make,
    EXAMPLES,
    calls=("small", "one token", "documents (7, 0)"),
    dtype=lambda arguments: arguments["v"].dtype,
    written=initial_state,
    in_place=("small", "one token", "routed, 17", "1024 slots", "window, 1", "extreme, 1"),
    pieces=Pieces(
        {"q": 1, "k": 1, "v": 1, "log_f": 1}, lengths=((1, 1, 3), (3, 1, 30, 1), (64, 6)), sizes={"heads": 1}
    ),
    documents=Documents({"documents": (3, 0, 9, 1)}, (3, 0, 9, 1), own_state),
    state=lambda arguments, backend: slot_memory_state(
        arguments.get("initial_state"), *(arguments[name] for name in ("k", "v", "log_f")), backend=backend
    ),
    states=("small", "one token", "no state, 1", "rows, 40"),
    wrong_values=WRONG_BOUNDS,
    wrong=[
        ({"q": torch.zeros(2, 5, 2, 7)}, r"`q` must have shape \(2, 5, 2, 8\), got \(2, 5, 2, 7\)"),
        ({"k": torch.zeros(2, 0, 2, 8)}, r"`k` must be .*, got \(2, 0, 2, 8\)"),
        ({"v": torch.zeros(2, 4, 2, 12)}, r"`v` must have shape .* got \(2, 4, 2, 12\)"),
        ({"v": torch.tensor(1.0)}, r"`v` must be .*, got \(\)"),
        ({"log_f": torch.zeros(2, 12)}, r"`log_f` must be .*, got \(2, 12\)"),
        ({"log_f": torch.zeros(2, 5, 1, 12)}, r"`log_f` must have shape .* got \(2, 5, 1, 12\)"),
        ({"log_f": torch.zeros(2, 5, 2, 11)}, r"`initial_state` must have shape \(2, 2, 11, 20\)"),
        ({"initial_state": torch.zeros(3, 2, 12, 20)}, r"`initial_state` must have shape .* got \(3, 2, 12, 20\)"),
        ({"q": torch.zeros(2, 5, 2, 8, dtype=torch.int64)}, "`q` must be floating point, got torch.int64"),
        ({"log_f": torch.zeros(2, 5, 2, 12, device="meta")}, "`log_f` is on meta"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "`cu_seqlens` describes one packed row, got a batch of 2"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "`cu_seqlens` must be int32 or int64 .* got torch.float32"),
        ({"inplace": True, "initial_state": None}, "`inplace` needs a float32"),
        ({"inplace": True, "initial_state": torch.zeros(2, 2, 12, 20).double()}, "`inplace` needs a float32"),
        ({"inplace": True, "initial_state": torch.zeros(2, 2, 20, 12).mT}, "`inplace` needs a float32, contiguous"),
        ({"inplace": True, "q": torch.zeros(2, 5, 2, 8, requires_grad=True)}, "`inplace` overwrites a state"),
    ],
    caps=(
        *({"batch": 1, "heads": 1, "slots": n} for n in (64, 65, 128, 129, 512, 513)),
        *({"batch": 1, "heads": 1, "key": n, "value": 3, "length": 65} for n in (64, 65, 128, 129)),
        *({"batch": 1, "heads": 1, "key": 3, "value": n} for n in (64, 65, 128, 129)),
    ),
)
