"""Chunk attention: Gecko's causal attention to the previous and the current chunk."""

import torch

from ..backend import cast, choose_backend, of_widest, widest, without_autocast
from ..checks import check_tensors, needs_gradient
from ..state_pool import check_numbers
from .custom_ops import _chunk_attention, _chunk_attention_step
from .eager import chunk_attention_masked, chunk_attention_with_dropout
from .reference import chunk_attention_reference


BACKENDS = ("eager",)
STEP_BACKENDS = ("eager", "triton")


def chunk_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    chunk_size: int,
    *,
    aligned: bool = False,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> torch.Tensor:
    """
    Sliding chunk attention (section 3.2 and equation 13 of "Gecko"): a token sees the previous chunk, and its own
    chunk up to itself. Scores are not scaled.

        out_t = sum_j softmax_j(q_t · k_j) v_j,    first_t <= j <= S + t

    The first S keys and values are from earlier calls. Products have the dtype of v, to which q and k are cast; the
    softmax is float32 (float64); autocast has no effect. Only the inputs are kept for the backward pass, which
    recomputes the weights, unless there is dropout. Triton kernels exist only for a single token: values are several
    times as large as keys, so plain matrix products take nearly all of the time.

    Args:
        q: query, (B, H, T, K), T at least 1.
        k: key, (B, H, S + T, K).
        v: value, (B, H, S + T, V).
        first: the first key that a token sees, int64 (B, T) or (1, T): at most S + t, and one of the last 2 chunk_size
            keys up to it.
        chunk_size: C, the number of tokens of a chunk.
        aligned: whether the first token begins a chunk (then C divides S) and no token sees keys before the previous
            chunk: fewer scores are computed.
        dropout_p: the probability that a weight is dropped.
        backend: `"auto"` or `"eager"` (plain torch).

    Returns:
        out (B, H, T, V) in the dtype of v.

    Raises:
        ValueError: if a shape or a dtype does not fit, before any work. (Wrong values of `first` fail an assertion on
            the device, which avoids a synchronization.)
    """
    _check(q, k, v, first, chunk_size, aligned, dropout_p)
    backend = choose_backend("chunk_attention", backend, BACKENDS, v)
    # package only
    if backend == "reference":
        with without_autocast(v):
            return chunk_attention_reference(*cast(widest(v), q, k, v), first, dropout_p).to(v.dtype)
    q, k = cast(v.dtype, q, k)
    if dropout_p:
        with without_autocast(v):
            return chunk_attention_with_dropout(q, k, v, first, chunk_size, aligned, dropout_p)
    return _chunk_attention(q, k, v, first, chunk_size, aligned)


def chunk_attention_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    *,
    indices: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """
    [`chunk_attention`] of a single token to keys in any order, for example in a ring. Triton kernels read keys
    and values as they are; plain torch may first copy them, if heads are next to features in memory.

    Args:
        q: query, (B, H, 1, K).
        k: key, (B, H, W, K).
        v: value, (B, H, W, V).
        mask: bool (B, W) or (1, W), True for the keys that the token sees, at least one.
        indices: int64 (B). Then k (rings, H, W, K) and v (rings, H, W, V) are pools, and row n reads their keys and
            values indices[n]. Nothing may need a gradient.
        backend: `"auto"`, `"triton"` (where nothing needs a gradient) or `"eager"` (plain torch).

    Returns:
        out (B, H, 1, V) in the dtype of v.

    Raises:
        ValueError: if a shape or a dtype does not fit, before any work.
    """
    _check_tensors(q, k, v, indices)
    if q.shape[2] != 1:
        raise ValueError(f"`q` must be of a single token, got {tuple(q.shape)}.")
    if indices is not None and needs_gradient(q, k, v):
        raise ValueError("`indices` has no backward pass: call it under no_grad.")
    _check_rows("mask", mask, torch.bool, q, k.shape[2])
    chosen = choose_backend("chunk_attention_step", backend, STEP_BACKENDS, of_widest(q, k, v))
    if chosen in ("eager", "reference") or needs_gradient(q, k, v):
        with without_autocast(v):
            return chunk_attention_masked(q, k, v, mask, indices)
    return _chunk_attention_step(q, k, v, mask, indices, chosen)


def _check(q, k, v, first, chunk_size, aligned, dropout_p):
    _check_tensors(q, k, v)
    _check_rows("first", first, torch.int64, q, q.shape[2])
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {chunk_size}.")
    before = k.shape[2] - q.shape[2]
    if before < 0:
        raise ValueError(f"`k` must have a key for each of the {q.shape[2]} queries, got {k.shape[2]}.")
    if aligned and before % chunk_size:
        raise ValueError(f"`aligned` needs whole chunks of {chunk_size} keys before the queries, got {before} keys.")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"`dropout_p` must be between 0 and 1, got {dropout_p}.")


def _check_tensors(q, k, v, indices=None):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[2] == 0:
            raise ValueError(f"`{name}` must be (batch, heads, length >= 1, size), got {tuple(x.shape)}.")
    batch, heads, _, key_size = q.shape
    rows, keys = batch if indices is None else k.shape[0], k.shape[2]
    expected = {
        "q": (q, q.shape),
        "k": (k, (rows, heads, keys, key_size)),
        "v": (v, (rows, heads, keys, v.shape[3])),
    }
    check_tensors(expected, "q", q)
    if indices is not None:
        check_numbers(indices, batch, k, "k")


def _check_rows(name, x, dtype, q, size):
    if x.dim() != 2 or x.shape[0] not in (1, q.shape[0]) or x.shape[1] != size or x.dtype != dtype:
        raise ValueError(
            f"`{name}` must be {dtype} of shape {(q.shape[0], size)} or {(1, size)}, got {x.dtype} {tuple(x.shape)}."
        )
    if x.device != q.device:
        raise ValueError(f"`{name}` is on {x.device}, `q` on {q.device}.")
