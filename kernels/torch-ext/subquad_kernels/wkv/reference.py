"""The WKV recurrence as the paper writes it: the oracle of every test."""

import itertools

import torch


def document_bounds(cu_seqlens: torch.Tensor | None, length: int) -> list[int]:
    """
    The borders of the documents as numbers.

    Raises:
        ValueError: where they do not rise from 0 to `length`.
    """
    bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length or sorted(bounds) != bounds:
        raise ValueError(f"`cu_seqlens` must rise from 0 to {length}, got {bounds}.")
    return bounds


def wkv_reference(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Equations 8, 9 (Eagle) and 21, 22 (Finch) of arXiv:2404.05892, one step after the other, in the dtype of the inputs
    (the caller casts). Arguments, shapes and results are those of [`subquad_kernels.wkv`].
    """
    batch, length, heads, key_size = k.shape
    w = log_w.expand(batch, length, heads, key_size).exp()
    documents = [(b, 0, length) for b in range(batch)]
    if cu_seqlens is not None:
        documents = [(0, *borders) for borders in itertools.pairwise(document_bounds(cu_seqlens, length))]

    out, states = torch.zeros_like(v), []
    for n, (b, start, stop) in enumerate(documents):
        s = v.new_zeros(heads, key_size, v.shape[-1]) if initial_state is None else initial_state[n]
        rows = []
        for t in range(start, stop):
            kv = k[b, t, :, :, None] * v[b, t, :, None, :]
            rows.append((r[b, t, :, None, :] @ (s + u[:, :, None] * kv))[:, 0])
            s = w[b, t, :, :, None] * s + kv
        if rows:
            out = out.index_put((torch.tensor(b), torch.arange(start, stop)), torch.stack(rows))
        states.append(s)
    return out, torch.stack(states)
