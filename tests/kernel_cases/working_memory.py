"""The working memory of Gecko."""

import torch

from subquad_kernels import working_memory

from . import BOTH, DEVICE, EAGER, KERNELS, PLAIN, Example, Operator


STATES = "memory", "normalizer"


def make_inputs(batch, length, keys, heads, key, value, dtype, float32, state, seed):
    """As a model has them: with the heads next to the features."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {
        "q": randn(batch, length, heads, key).transpose(1, 2),
        "k": randn(batch, keys, heads, key).transpose(1, 2),
        "v": randn(batch, keys, heads, value).transpose(1, 2),
        "memory": randn(batch, heads, key, value),
        "normalizer": randn(batch, heads, key) + 1,
    }
    if not state:
        inputs |= dict.fromkeys(STATES)
    return {n: x if x is None else x.to(DEVICE, torch.float32 if n in float32 else dtype) for n, x in inputs.items()}


def make_random(batch, length, chunks, chunk_size, seed):
    """Random chunks, some of them missing, and tokens that read any version of the memory, or none."""
    generator = torch.Generator().manual_seed(seed)

    def draw(highest, *shape):
        return torch.randint(highest + 1, shape, generator=generator)

    leaving = torch.where(draw(3, batch, chunks) > 0, draw(4, batch, 1) + torch.arange(chunks) * chunk_size, -1)
    begins = torch.where(draw(1, batch, chunks) > 0, draw(chunk_size - 1, batch, chunks), -1)
    reads = []
    for _ in range(batch):
        row = [n for version in range(chunks + 1) for n in [-1] * draw(1) + [version] * draw(chunk_size)]
        row = row[draw(max(len(row) - length, 0)) :] + [-1] * length
        reads.append(row[:length])
    return make_rows(leaving, begins, reads, chunk_size)


def make_rows(leaving, begins, reads, chunk_size=4):
    rows = {"leaving": leaving, "begins": begins, "reads": reads}
    rows = {name: torch.as_tensor(x, dtype=torch.int64).to(DEVICE) for name, x in rows.items()}
    return {"chunk_size": chunk_size, **rows}


def make(
    batch=2,
    length=5,
    chunks=2,
    chunk_size=4,
    keys=None,
    heads=2,
    key=4,
    value=6,
    rows=None,
    state=True,
    scale=0,
    dtype=torch.float32,
    float32=(),
    seed=0,
):
    """`rows`: `leaving`, `begins` and `reads` of all rows; None means random ones. `scale`: keys are as large as that,
    or 60. `float32`: names of arguments that have this dtype."""
    if rows:
        batch, length = len(rows[2]), len(rows[2][0])
    keys = keys or chunks * chunk_size + 4
    inputs = make_inputs(batch, length, keys, heads, key, value, dtype, float32, state, seed)
    if scale:
        inputs["k"] = (inputs["k"] * scale).clamp(-60, 60)
        inputs["normalizer"] += inputs["k"][:, :, :4].logsumexp(2)  # nothing is overruled entirely
    if rows:
        return {**inputs, **make_rows(*rows, chunk_size)}
    return {**inputs, **make_random(batch, length, chunks, chunk_size, seed)}


# Single tokens: chunks that leave in some rows.
STEPS = [
    (((1,), (-1,), (0,)), ((-1,), (3,), (2,)), ((1,), (1,), (1,))),
    (((0,), (1,), (1,)), ((-1,), (-1,), (1,)), ((0,), (-1,), (1,))),
    (((-1,),) * 3, ((0,), (-1,), (2,)), ((0,), (-1,), (1,))),
]
EMPTY = ((1, 5, 9),), ((0, -1, 3),), ((-1, 1, 1, 1, 1, 2, 2, 3, 3),)
ONE_CHUNK = {"rows": (((2,),), ((-1,),), ((0, 0, 1, 1, 1),)), "keys": 6, "heads": 1}
NO_STATE = {"rows": (((2,),), ((0,),), ((-1, 1),)), "keys": 6, "heads": 1, "state": False}
EXAMPLES = {
    "small": Example(ONE_CHUNK),
    "no state, small": Example(NO_STATE),
    **{f"step {n}": Example({"rows": rows, "keys": 6}) for n, rows in enumerate(STEPS)},
    **{
        f"{length}, {chunks} chunks of {chunk_size}, seed {seed}": Example(
            {
                "batch": 3,
                "length": length,
                "chunks": chunks,
                "chunk_size": chunk_size,
                "seed": seed,
                "dtype": torch.float64,
            },
            EAGER,
            1e-12,
        )
        for seed in range(3)
        for length, chunks, chunk_size in [
            (1, 0, 4),
            (1, 1, 4),
            (1, 3, 2),
            (5, 1, 7),
            (16, 4, 4),
            (33, 5, 8),
            (13, 2, 32),
            (9, 0, 16),
            (6, 4, 1),
        ]
    },
    # Of numbers as large as 60, float32 knows the exponential to 4e-6.
    **{
        f"keys times {scale}": Example(
            {"rows": (((0, 4, 8),), ((-1, 2, -1),), ((1, 2, 3),)), "keys": 12, "heads": 1, "scale": scale},
            BOTH,
            2e-5,
        )
        for scale in (40, 1000)
    },
    "no state": Example({"rows": EMPTY, "keys": 17, "heads": 1, "state": False}),
    "no state, one token": Example({"rows": (((1,),), ((0,),), ((1,),)), "keys": 6, "state": False}),
    **{
        f"step, chunks of {size}": Example(
            {
                "rows": (((9,), (3,), (-1,)), ((size - 20,), (-1,), (-1,)), ((1,), (0,), (-1,))),
                "chunk_size": size,
                "keys": size + 10,
                "key": 20,
                "value": 70,
            }
        )
        for size in (257, 700)
    },
    "many": Example({"length": 9, "heads": 1, "keys": 12}),
}
for batch, length, chunks, chunk_size, heads, key, value, dtype, tolerance in [
    (2, 1, 0, 4, 1, 4, 6, torch.float32, 1e-5),
    (2, 9, 2, 5, 2, 20, 70, torch.float32, 1e-5),
    (1, 70, 2, 37, 1, 8, 12, torch.float32, 1e-5),
    (2, 13, 2, 8, 1, 16, 32, torch.float16, 4e-3),
    (2, 13, 2, 8, 1, 16, 32, torch.bfloat16, 2e-2),
]:
    given = {"batch": batch, "length": length, "chunks": chunks, "chunk_size": chunk_size, "heads": heads}
    given |= {"key": key, "value": value, "dtype": dtype, "float32": STATES}
    EXAMPLES[f"{length}, {chunks} chunks of {chunk_size}, {dtype}"] = Example(given, KERNELS, tolerance)
for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
    for length, chunks in ((1, 1), (17, 3)):
        given = {"length": length, "chunks": chunks, "keys": 20, "seed": 3, "dtype": dtype, "float32": STATES}
        EXAMPLES[f"{dtype}, {length}"] = Example(given, PLAIN, tolerance)

OPERATOR = Operator(
    working_memory,
    make,
    EXAMPLES,
    calls=("small", "step 0", "no state, small"),
    dtype=lambda arguments: arguments["v"].dtype,
    written=lambda arguments: {1: arguments["memory"], 2: arguments["normalizer"]},
    in_place=("step 0", "step 1", "step 2", "many"),
    wrong_values=tuple(
        (
            {"rows": (((1, 5),), ((0, 0),), ((0, 0, 1, 1, 2),)), "keys": 9},
            {name: torch.tensor([row])},
            message,
        )
        for name, row, message in [
            ("leaving", [2, 6], "`leaving` must be -1 or where"),
            ("leaving", [-2, 1], "`leaving` must be"),
            ("begins", [4, -1], "`begins` must be -1 or a token"),
            ("reads", [0, 0, 1, 1, 3], "`reads` must be -1 or up to"),
            ("reads", [1, 1, -1, 0, 0], "`reads` must .* rise"),
            ("reads", [1, 1, -1, 1, 2], "`reads` must .* rise"),
            ("reads", [1, 1, 1, 1, 1], "at most `chunk_size` of a number"),
        ]
    ),
    wrong=[
        ({"q": torch.zeros(2, 2, 5)}, r"`q` must be .*, got \(2, 2, 5\)"),
        ({"q": torch.zeros(2, 2, 5, 4, dtype=torch.int64)}, "`q` must be floating point, got torch.int64"),
        ({"k": torch.zeros(2, 2, 0, 4)}, r"`k` must be .*, got \(2, 2, 0, 4\)"),
        ({"k": torch.zeros(2, 2, 12, 5)}, r"`k` must have shape \(2, 2, 12, 4\), got \(2, 2, 12, 5\)"),
        ({"v": torch.zeros(2, 2, 11, 6)}, r"`v` must have shape .* got \(2, 2, 11, 6\)"),
        ({"v": torch.zeros(2, 2, 12, 6, device="meta")}, "`v` is on meta"),
        ({"memory": torch.zeros(2, 2, 6, 4)}, r"`memory` must have shape .* got \(2, 2, 6, 4\)"),
        ({"memory": None}, "`memory` and `normalizer` go together"),
        ({"normalizer": torch.zeros(2, 2, 6)}, r"`normalizer` must have shape .* got \(2, 2, 6\)"),
        ({"leaving": torch.zeros(2, dtype=torch.int64)}, r"`leaving` must be \(2, chunks\), got \(2,\)"),
        ({"leaving": torch.zeros(3, 2, dtype=torch.int64)}, r"`leaving` must have shape \(2, 2\), got \(3, 2\)"),
        ({"begins": torch.zeros(2, 1, dtype=torch.int64)}, r"`begins` must have shape .* got \(2, 1\)"),
        ({"begins": torch.zeros(2, 2, dtype=torch.int32)}, "`begins` must be int64, got torch.int32"),
        ({"reads": torch.zeros(2, 6, dtype=torch.int64)}, r"`reads` must have shape .* got \(2, 6\)"),
        ({"reads": torch.zeros(2, 5, dtype=torch.int64, device="meta")}, "`reads` is on meta"),
        ({"chunk_size": 0}, "`chunk_size` must be at least 1, got 0"),
        ({"inplace": True, "memory": None, "normalizer": None}, "`inplace` needs a float32, contiguous `memory`"),
        ({"inplace": True, "normalizer": torch.zeros(2, 2, 4, dtype=torch.float64)}, "contiguous `normalizer`"),
        ({"inplace": True, "memory": torch.zeros(2, 2, 6, 4).mT}, "`inplace` needs a float32, contiguous `memory`"),
        ({"inplace": True, "q": torch.zeros(2, 2, 5, 4, requires_grad=True)}, "`inplace` overwrites states"),
    ],
    caps=(
        *({"batch": 1, "heads": 1, "key": n, "length": 9} for n in (64, 65, 128, 129)),
        *({"batch": 1, "heads": 1, "value": n, "length": 9} for n in (64, 65, 128, 129)),
        *({"batch": 1, "heads": 1, "chunk_size": n, "length": 2 * n + 1} for n in (64, 65)),
    ),
)
