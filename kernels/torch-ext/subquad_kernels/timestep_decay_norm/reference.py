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
    x = torch.unflatten(x, -1, (groups, -1))
    mean = x.mean(-1)
    variance = (x - mean[..., None]).square().mean(-1)
    if initial_state is None:
        initial_state = x.new_zeros(len(x), 3, groups)
    m, v, n = initial_state.unbind(1)
    n = n.detach()

    states = []
    for t, (mean_t, variance_t) in enumerate(zip(mean.unbind(1), variance.unbind(1), strict=True)):
        if starts is not None:
            m, v, n = (torch.where(starts[:, t, None], 0.0, value) for value in (m, v, n))
        after = beta1 * m + (1 - beta1) * mean_t, beta2 * v + (1 - beta2) * variance_t, n + 1
        if real is not None:
            after = (torch.where(real[:, t, None], *pair) for pair in zip(after, (m, v, n), strict=True))
        m, v, n = after
        states.append(torch.stack((m, v, n), dim=1))
    state = states[-1]
    m, v, n = torch.stack(states, dim=1).unbind(2)
    n = n.detach()

    def share(beta):
        """1 - β^n without a subtraction, which would leave only three digits in float32."""
        return torch.where(n > 0, -torch.expm1(n * math.log(beta)) if beta else 1.0, 1.0)

    m = torch.where(n > 0, m / share(beta1), 0.0)
    v = torch.where(n > 0, v / share(beta2), 1.0)
    out = ((x - m[..., None]) / torch.sqrt(v + eps)[..., None]).flatten(2)
    if weight is not None:
        out = out * (weight + 1)
    if bias is not None:
        out = out + bias
    return out, state
