"""The ranker of Avey."""

import torch

from subquad_kernels import split_ranker

from . import BOTH, DEVICE, EAGER, Example, Operator


NORMALIZATIONS = ("first", "max", "min")
ORDERS = ("sequence", "score")
INT = torch.int64


def make(
    batch=2,
    current=5,
    per_query=3,
    total=6,
    per_split=4,
    size=7,
    k=4,
    number=None,
    first=None,
    normalization="first",
    order="sequence",
    dtype=torch.float32,
):
    """Vectors that are more alike than not, so that no score is near zero. `number` and `first` may be rows."""
    generator = torch.Generator().manual_seed(0)

    def vectors(*shape):
        return (0.5 + torch.randn(*shape, size, generator=generator)).to(DEVICE, dtype)

    inputs = {
        "queries": vectors(batch, current, per_query),
        "splits": vectors(batch, total, per_split),
        "number": torch.randint(0, total + 1, (batch, current), generator=generator).to(DEVICE),
        "k": k,
        "normalization": normalization,
        "order": order,
    }
    if number is not None:
        inputs["number"] = torch.tensor(number, device=DEVICE)
    if first is not None:
        inputs["first"] = torch.tensor(first, device=DEVICE)
    return inputs


def results(index, weights, scores):
    """Of what a token does not see the score is minus infinity, in both."""
    seen = scores.isfinite()
    return weights, index, scores.detach().where(seen, 0.0), seen


def vectors(inputs):
    """The arguments of `maxsim` among them."""
    return {name: x for name, x in inputs.items() if name in ("queries", "splits", "number", "first")}


FIRST = ((0, 0, 0, 3, 3, 5), (0, 1, 1, 1, 1, 1))
PACKED = {"current": 6, "number": (tuple(range(6)),), "k": 3}
EXAMPLES = {
    "small": Example(),
    "one query": Example({"per_query": 1, "normalization": "min", "order": "score"}),
    "documents": Example({**PACKED, "first": FIRST, "normalization": "max"}),
    "documents, one query": Example({**PACKED, "first": FIRST, "per_query": 1}),
    "documents, one row": Example({**PACKED, "first": FIRST[:1]}),
    "documents, one row, one query": Example({**PACKED, "first": FIRST[:1], "per_query": 1}),
    "float64": Example({"dtype": torch.float64}, EAGER, 1e-12),
    "no rows": Example({"batch": 0, "k": 3}),
    "no queries": Example({"current": 0, "k": 3}),
    "alone": Example({"k": 1}),
}
for normalization in NORMALIZATIONS:
    for order in ORDERS:
        options = {"normalization": normalization, "order": order}
        for k in (3, 12) if order == "score" else (4, 7):
            given = {"current": 7, "k": k, "number": (tuple(range(7)), (0, 6, 1, 5, 2, 4, 3)), **options}
            EXAMPLES[f"{k}, {normalization}, {order}"] = Example(given)
        EXAMPLES[f"of two, {normalization}, {order}"] = Example({"per_query": 1, "total": 2, "k": 12, **options})
for dtype in (torch.bfloat16, torch.float16):
    for per_query in (1, 8):
        given = {"per_query": per_query, "per_split": 8, "size": 100, "dtype": dtype}
        EXAMPLES[f"{dtype}, {per_query} a query"] = Example(given, BOTH, 8e-3)

for per_split in (1, 3, 8, 17, 64):
    for per_query in {1, per_split}:
        for number, (total, size) in enumerate(((1, 100), (2, 17), (9, 1), (6, 64))):
            given = {"current": 3, "per_query": per_query, "total": total, "per_split": per_split, "size": size}
            EXAMPLES[f"{per_query} with {total} x {per_split} of {size}"] = Example(
                {**given, "k": 1}, BOTH if (number + per_split + (per_query > 1)) % 2 else EAGER
            )
for per_query, per_split in [(2, 130), (1, 130), (5, 1), (16, 3), (17, 8), (70, 64)]:
    given = {"current": 2, "per_query": per_query, "total": 3, "per_split": per_split}
    EXAMPLES[f"{per_query} with 3 x {per_split}"] = Example({**given, "k": 1})

OPERATOR = Operator(
    split_ranker,
    make,
    EXAMPLES,
    calls=("small", "documents", "one query"),
    # Whatever the dtype of the arguments.
    dtype=lambda arguments: torch.promote_types(arguments["queries"].dtype, torch.float32),
    results=results,
    exact=True,
    plain_reference=False,
    wrong=[
        ({"queries": torch.zeros(2, 5, 7)}, r"`queries` must be \(B, T, Q, D\), .*, got \(2, 5, 7\)"),
        ({"queries": torch.zeros(2, 5, 0, 7)}, r"the last two at least 1, got \(2, 5, 0, 7\)"),
        ({"queries": torch.zeros(2, 5, 3, 7, dtype=INT)}, "`queries` must be floating point, got torch.int64"),
        ({"splits": torch.zeros(2, 24, 7)}, r"`splits` must be \(B, M, S, D\), .*, got \(2, 24, 7\)"),
        ({"splits": torch.zeros(2, 6, 0, 7)}, r"the last two at least 1, got \(2, 6, 0, 7\)"),
        ({"splits": torch.zeros(2, 6, 4, 8)}, r"`splits` must have shape \(2, M, S, 7\), got \(2, 6, 4, 8\)"),
        ({"splits": torch.zeros(1, 6, 4, 7)}, r"`splits` must have shape \(2, M, S, 7\), got \(1, 6, 4, 7\)"),
        (
            {"splits": torch.zeros(2, 6, 4, 7).half()},
            "`splits` must be torch.float32 as `queries` are, got torch.float16",
        ),
        ({"splits": torch.zeros(2, 6, 4, 7, device="meta")}, "`splits` is on meta, `queries` on "),
        ({"number": torch.zeros(5, dtype=INT)}, r"`number` must have shape \(2, 5\) or \(1, 5\), got \(5,\)"),
        ({"number": torch.zeros(2, 5)}, "`number` must be int64, got torch.float32"),
        ({"first": torch.zeros(2, 6, dtype=INT)}, r"`first` must have shape \(2, 5\) or \(1, 5\), got \(2, 6\)"),
        ({"first": torch.zeros(2, 5, dtype=INT, device="meta")}, "`first` is on meta, `queries` on "),
        ({"k": 0}, "`k` must be at least 1, got 0"),
        ({"normalization": "sum"}, "`normalization` must be one of first, max, min, got 'sum'"),
        ({"order": "place"}, "`order` must be one of sequence, score, got 'place'"),
        ({"scores": torch.zeros(2, 5, 5)}, r"`scores` must have shape \(2, 5, 6\), got \(2, 5, 5\)"),
        ({"scores": torch.zeros(2, 5, 6).half()}, "`scores` must be torch.float32, got torch.float16"),
        ({"scores": torch.zeros(2, 5, 6, device="meta")}, "`scores` is on meta, `queries` on "),
    ],
    caps=(
        *({"per_query": n} for n in (16, 17, 64, 65)),
        *({"per_split": n} for n in (64, 65, 128, 129)),
        *({"size": n} for n in (32, 33, 64, 65)),
        *({"per_query": 1, "size": n} for n in (128, 129)),
    ),
)
