"""The attention of Gecko in chunks."""

import torch

from subquad_kernels import chunk_attention

from . import DEVICE, EAGER, Example, Operator


CHUNK = 16


def make_inputs(batch, length, before=0, heads=2, key=5, value=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for name, tokens, size in (("q", length, key), ("k", before + length, key), ("v", before + length, value)):
        x = torch.randn(batch, heads, tokens, size, generator=generator, dtype=torch.float64)
        inputs[name] = x.to(DEVICE, dtype)
    return inputs


def make(batch=2, length=5, before=0, kind="aligned", chunk_size=CHUNK, one_row=False, dtype=torch.float64, **sizes):
    """`before`: tokens of earlier calls. `kind`: see `make_first`. `one_row`: the first keys serve all rows. More
    `sizes` are those of `make_inputs`."""
    first = make_first(1 if one_row else batch, length, before, chunk_size, kind)
    return {**make_inputs(batch, length, before, dtype=dtype, **sizes), **first, "chunk_size": chunk_size}


def make_first(batch, length, before=0, chunk_size=CHUNK, kind="aligned"):
    """The first keys that tokens see, and whether these are `aligned`."""
    token = before + torch.arange(length).repeat(batch, 1)
    if kind == "sliding":  # as far as any token may see
        first = token - 2 * chunk_size + 1
    elif kind == "rows":  # the chunks of every row begin elsewhere, as those of left-padded rows do
        offset = 3 + 5 * torch.arange(batch)[:, None]
        first = (token + offset) // chunk_size * chunk_size - chunk_size - offset
    else:
        first = (token - before) // chunk_size * chunk_size - chunk_size + before
    if kind == "documents":
        bounds = before + torch.tensor([0, 3, 4, CHUNK, 3 * CHUNK + 1])
        document = torch.searchsorted(bounds, token, right=True) - 1
        first = torch.where(document < 0, first, torch.maximum(first, bounds[document]))
    aligned = kind in ("aligned", "documents")
    return {"first": first.clamp(min=0).to(DEVICE), "aligned": aligned}


# Tokens of a call, and of the calls before it.
SIZES = [(1, 0), (1, 2 * CHUNK), (7, 0), (CHUNK, 0), (CHUNK, CHUNK), (33, 2 * CHUNK), (201, 0), (201, 2 * CHUNK)]
EXAMPLES = {
    **{
        f"{kind}, {length} after {before}": Example({"length": length, "before": before, "kind": kind}, EAGER, 1e-12)
        for kind in ("aligned", "sliding", "rows", "documents")
        for length, before in SIZES
    },
    # No whole chunks before.
    **{
        f"{kind}, {length} after {before}": Example({"length": length, "before": before, "kind": kind}, EAGER, 1e-12)
        for kind in ("sliding", "rows")
        for length, before in ((1, 3), (5, 2 * CHUNK + 5), (90, CHUNK - 1))
    },
    # Blocks are of 75 tokens on a CPU, of 512 on a GPU.
    **{
        f"{kind}, long chunks": Example(
            {"batch": 1, "heads": 1, "length": 1100, "kind": kind, "chunk_size": 300}, EAGER, 1e-12
        )
        for kind in ("aligned", "rows")
    },
    # Several chunks of a head are computed together.
    **{
        f"{kind}, many chunks, {length} after {before}": Example(
            {"heads": 1, "length": length, "before": before, "kind": kind, "chunk_size": 64},
            EAGER,
            1e-12,
            {"eager.SCORES": 64 * 2 * 64 * 4},
        )
        for kind in ("aligned", "documents")
        for length, before in ((300, 0), (512, 0), (450, 128))
    },
    **{
        f"chunks of {size}": Example({"length": 70, "before": 2 * size, "chunk_size": size}, EAGER, 1e-12)
        for size in (1, 3)
    },
    **{
        f"{kind}, {dtype}": Example(
            {"length": 150, "before": 2 * CHUNK, "key": 8, "value": 32, "kind": kind, "dtype": dtype}, EAGER, tolerance
        )
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.5e-2))
        for kind in ("aligned", "sliding")
    },
    "one row of first": Example({"batch": 3, "length": 90, "one_row": True}, EAGER, 1e-12),
    "float32": Example({"length": 90, "dtype": torch.float32}, EAGER, 1e-6),
}

OPERATOR = Operator(
    chunk_attention,
    make,
    EXAMPLES,
    calls=("aligned, 7 after 0", "rows, 5 after 37", "float32"),
    dtype=lambda arguments: arguments["v"].dtype,
    kernels=False,
    base={"before": 4, "chunk_size": 4},
    wrong=[
        ({"q": torch.zeros(2, 5, 5)}, r"`q` must be \(batch, heads, length >= 1, size\), got \(2, 5, 5\)"),
        ({"q": torch.zeros(2, 2, 0, 5)}, r"`q` must be .*, got \(2, 2, 0, 5\)"),
        ({"q": torch.zeros(2, 2, 10, 5), "first": torch.zeros(1, 10, dtype=torch.int64)}, "`k` must have a key"),
        ({"q": torch.zeros(2, 2, 5, 5, dtype=torch.int64)}, "`q` must be floating point, got torch.int64"),
        ({"k": torch.zeros(2, 2, 9, 6)}, r"`k` must have shape \(2, 2, 9, 5\), got \(2, 2, 9, 6\)"),
        ({"v": torch.zeros(2, 2, 8, 7)}, r"`v` must have shape \(2, 2, 9, 7\), got \(2, 2, 8, 7\)"),
        ({"v": torch.zeros(2, 1, 9, 7)}, r"`v` must have shape .* got \(2, 1, 9, 7\)"),
        ({"v": torch.zeros(2, 2, 9, 7, device="meta")}, "`v` is on meta"),
        ({"first": torch.zeros(5, dtype=torch.int64)}, r"`first` must be .* \(5,\)"),
        ({"first": torch.zeros(3, 5, dtype=torch.int64)}, r"`first` must be torch.int64 of shape \(2, 5\)"),
        ({"first": torch.zeros(2, 9, dtype=torch.int64)}, r"`first` must be .* \(2, 9\)"),
        ({"first": torch.zeros(2, 5)}, "`first` must be torch.int64 of shape .* got torch.float32"),
        ({"first": torch.zeros(1, 5, dtype=torch.int64, device="meta")}, "`first` is on meta"),
        ({"chunk_size": 0}, "`chunk_size` must be at least 1, got 0"),
        ({"chunk_size": 3}, "`aligned` needs whole chunks of 3 keys before the queries, got 4 keys"),
        ({"dropout_p": 1.5}, "`dropout_p` must be between 0 and 1, got 1.5"),
    ],
)
