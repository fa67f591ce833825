"""The router of Raven."""

import torch

from subquad_kernels import slot_routing

from . import ALL, DEVICE, PLAIN, Example, Operator


SCORES = ("sigmoid", "softmax")


def make(
    slots=16,
    length=7,
    heads=3,
    topk=5,
    per_slot=False,
    bias=False,
    score="sigmoid",
    scale=1.0,
    dtype=torch.float32,
    decay_dtype=None,
):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    log_decay = -randn(2, length, heads, *([slots] if per_slot else [])).exp()
    return {
        "logits": (2 * randn(2, length, heads, slots)).to(dtype),
        "log_decay": log_decay.to(decay_dtype or dtype),
        "topk": topk,
        "bias": randn(heads, slots).to(dtype) if bias else None,
        "score": score,
        "scale": scale,
    }


EXAMPLES = {
    **{
        f"{score} times {scale:g}{', per slot' if per_slot else ''}{', bias' if bias else ''}": Example(
            {"score": score, "scale": scale, "per_slot": per_slot, "bias": bias}
        )
        for score in SCORES
        for scale in (1.0, 4.0)
        for per_slot in (False, True)
        for bias in (False, True)
    },
    # One slot has the whole decay whatever its logit, so that the gradient of the logit is 0.
    **{
        f"{topk} of {slots}, {score}": Example(
            {
                "slots": slots,
                "topk": topk,
                "length": 2,
                "per_slot": slots == 40,
                "bias": slots % 8 == 0,
                "score": score,
            },
            floor=1.0 if topk == 1 else 1e-30,
        )
        for slots, topk in [(1, 1), (5, 1), (5, 4), (16, 5), (16, 16), (40, 13), (256, 32), (256, 255)]
        for score in SCORES
    },
    **{
        f"{topk} of 8": Example({"slots": 8, "length": 2, "topk": topk}, floor=1.0 if topk == 1 else 1e-30)
        for topk in range(1, 9)
    },
    **{
        f"{topk} of {slots}": Example({"slots": slots, "length": 1, "heads": 1, "topk": topk})
        for slots, topk in ((700, 40), (1500, 600))
    },
    "one token": Example({"length": 1, "bias": True}),
}
for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3), (torch.float64, 1e-12)):
    for bias in (False, True):
        given = {"slots": 64, "topk": 20, "bias": bias, "dtype": dtype}
        EXAMPLES[f"{dtype}{', bias' if bias else ''}"] = Example(
            given, PLAIN if dtype == torch.float64 else ALL, tolerance
        )
        if dtype != torch.float64:
            EXAMPLES[f"{dtype}, decay float32{', bias' if bias else ''}"] = Example(
                {**given, "decay_dtype": torch.float32}, ALL, tolerance
            )

OPERATOR = Operator(
    slot_routing,
    make,
    EXAMPLES,
    calls=("one token", "sigmoid times 1, per slot", "softmax times 4, bias"),
    dtype=lambda arguments: torch.promote_types(torch.float32, arguments["logits"].dtype),
    constants=("bias",),
    results=lambda out: (out, out != 0),
    exact=True,
    wrong=[
        (
            {"logits": torch.zeros(2, 7, 48)},
            r"`logits` must be \(batch, length, heads, slots >= 1\), got \(2, 7, 48\)",
        ),
        ({"logits": torch.zeros(2, 7, 3, 0)}, r"`logits` must be .*, got \(2, 7, 3, 0\)"),
        ({"logits": torch.zeros(2, 7, 3, 16, dtype=torch.int64)}, "`logits` must be floating point, got torch.int64"),
        ({"log_decay": torch.zeros(2, 7, 3, 1)}, r"`log_decay` must have shape \(2, 7, 3\) or \(2, 7, 3, 16\), got"),
        ({"log_decay": torch.zeros(2, 7, 3, dtype=torch.int64)}, "`log_decay` must be floating point"),
        ({"bias": torch.zeros(16)}, r"`bias` must have shape \(3, 16\), got \(16,\)"),
        ({"bias": torch.zeros(3, 16, device="meta")}, "`bias` is on meta, `logits` on "),
        ({"topk": 0}, "`topk` must be from 1 to 16, the number of slots, got 0"),
        ({"topk": 17}, "`topk` must be from 1 to 16, the number of slots, got 17"),
        ({"topk": 1.5}, "`topk` must be from 1 to 16, the number of slots, got 1.5"),
        ({"score": "tanh"}, "`score` must be one of .*, got 'tanh'"),
        ({"scale": 0.0}, "`scale` must be above 0 and finite, got 0.0"),
    ],
    caps=(
        *({"slots": n, "topk": 5, "length": 2} for n in (512, 513, 1024, 1025)),
        *({"slots": 64, "topk": n, "length": 2} for n in (32, 33, 64)),
    ),
)
