"""The token shift as written in the paper, token by token: the reference for all tests."""

import torch


def token_shift_reference(
    x: torch.Tensor,
    state: torch.Tensor | None,
    mu: torch.Tensor,
    offset: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Equations 14, 15 (Finch) and, without an offset, 3 (Eagle) of arXiv:2404.05892, in the dtype of the inputs: see
    [`subquad_kernels.token_shift`].
    """
    previous = torch.zeros_like(x[:, 0]) if state is None else state
    tokens, offsets = [], None if offset is None else offset.unbind(2)
    for t, x_t in enumerate(x.unbind(1)):
        if starts is not None:
            previous = torch.where(starts[:, t, None], 0.0, previous)
        m = mu[:, None] if offset is None else mu[:, None] + offsets[t]
        tokens.append(x_t + (previous - x_t) * m)
        previous = x_t
    return torch.stack(tokens, dim=2)
