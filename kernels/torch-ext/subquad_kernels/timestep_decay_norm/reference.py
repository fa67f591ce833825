"""Timestep decay normalization as written in the paper, token by token: the reference for all tests."""

import math

import torch


def timestep_decay_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    starts: torch.Tensor | None,
    real: torch.Tensor | None,
    groups: int,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Equations 3, 11 and 12 in the dtype of the inputs (the caller casts): see [`subquad_kernels.timestep_decay_norm`].
    """
    batch, length, width = x.shape
    if initial_state is None:
        initial_state = x.new_zeros(batch, 3, groups)
    m, v, n = initial_state.unbind(1)
    n = n.detach()

    def share(beta):
        """1 - β^n without a subtraction, which would leave only three digits in float32."""
        return -torch.expm1(n * math.log(beta)) if beta else torch.ones_like(n)

    rows = []
    for t in range(length):
        if starts is not None:
            m, v, n = (torch.where(starts[:, t, None], 0.0, value) for value in (m, v, n))
        x_t = x[:, t].view(batch, groups, width // groups)
        mu = x_t.mean(-1)
        variance = (x_t - mu[..., None]).square().mean(-1)
        counts = torch.ones_like(n, dtype=torch.bool) if real is None else real[:, t, None].expand(n.shape)
        m = torch.where(counts, beta1 * m + (1 - beta1) * mu, m)
        v = torch.where(counts, beta2 * v + (1 - beta2) * variance, v)
        n = n + counts

        seen = n > 0
        corrected_m = torch.where(seen, m / torch.where(seen, share(beta1), 1.0), 0.0)
        corrected_v = torch.where(seen, v / torch.where(seen, share(beta2), 1.0), 1.0)
        rows.append(((x_t - corrected_m[..., None]) / torch.sqrt(corrected_v + eps)[..., None]).flatten(1))
    out = torch.stack(rows, dim=1)
    if weight is not None:
        out = out * (weight + 1)
    if bias is not None:
        out = out + bias
    return out, torch.stack((m, v, n), dim=1)
