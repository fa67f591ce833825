"""The complex moving average as written in the paper, token by token: the reference for all tests."""

import math

import torch


def cema_reference(
    x: torch.Tensor,
    alpha: torch.Tensor,
    delta: torch.Tensor,
    theta: torch.Tensor,
    gamma: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    real: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Equation 1 of "Gecko" in the dtype of the inputs (the caller casts): see [`subquad_kernels.cema`].
    """
    size = alpha.shape[1]
    a = alpha.sigmoid()
    n = torch.arange(1, size + 1, device=x.device, dtype=theta.dtype)
    angle = n * (2 * math.pi / size) * theta.sigmoid()[:, None]
    q = torch.polar(1 - a * delta.sigmoid(), angle)
    gamma = torch.complex(*gamma.unbind(-1))
    if real is not None:
        x = x.masked_fill(~real.unsqueeze(-1), 0.0)

    h = torch.zeros(x.shape[0], *alpha.shape, dtype=q.dtype, device=x.device)
    if initial_state is not None:
        h = torch.complex(*initial_state.unbind(-1))
    out = []
    for t, x_t in enumerate(x.unbind(1)):
        if starts is not None:
            h = torch.where(starts[:, t, None, None], 0.0, h)
        after = q * h + a * x_t[..., None]
        h = after if real is None else torch.where(real[:, t, None, None], after, h)
        out.append((gamma * h).sum(-1).real)
    out = torch.stack(out, dim=1)
    return out if real is None else out.masked_fill(~real.unsqueeze(-1), 0.0), torch.view_as_real(h)
