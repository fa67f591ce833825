"""The token shift in plain torch."""

import torch


def _previous(x, state, starts):
    if state is None:
        state = torch.zeros_like(x[:, 0])
    previous = state.unsqueeze(1)
    if x.shape[1] > 1:
        previous = torch.cat((previous, x[:, :-1]), dim=1)
    return previous if starts is None else previous.masked_fill(starts.unsqueeze(-1), 0.0)


def token_shift_eager(
    x: torch.Tensor,
    state: torch.Tensor | None,
    mu: torch.Tensor,
    offset: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> torch.Tensor:
    """Computes [`subquad_kernels.token_shift`] in the widest dtype of the inputs."""
    delta = _previous(x, state, starts) - x
    m = mu.view(-1, 1, 1, x.shape[-1])
    if offset is None:
        return torch.addcmul(x, delta, m).to(x.dtype)
    m = m + offset
    reusable = m.dtype == x.dtype and not torch.is_grad_enabled()
    return torch.addcmul(x, delta, m, out=m if reusable else None).to(x.dtype)


def token_shift_eager_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    state: torch.Tensor | None,
    mu: torch.Tensor,
    offset: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Gradients of x, state, mu and offset, if given, computed in float32 (float64 if x is)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    grad = grad.to(dtype)
    m = mu[:, None, None].to(dtype)
    if offset is not None:
        m = m + offset
    grad_m = grad * (_previous(x, state, starts).to(dtype) - x)
    grad_previous = (grad * m).sum(0)
    grad_x = grad.sum(0) - grad_previous
    if starts is not None:
        grad_previous = grad_previous.masked_fill(starts.unsqueeze(-1), 0.0)
    grad_x[:, :-1] += grad_previous[:, 1:]

    grad_mu = grad_m.sum((1, 2))
    grads = [grad_x, grad_mu] if state is None else [grad_x, grad_previous[:, 0], grad_mu]
    return grads if offset is None else [*grads, grad_m]
