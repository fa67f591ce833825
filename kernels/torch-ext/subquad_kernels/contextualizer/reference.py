"""The contextualizer as written in the paper, row by row: the reference for all tests."""

import torch


EPS = 1e-8


def contextualizer_reference(
    z: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    prefix: torch.Tensor | None,
    queries: int,
) -> torch.Tensor:
    """
    Equation 2 of the paper without its optional activation and bias, in the dtype of the inputs: see
    [`subquad_kernels.contextualizer`].
    """
    context, shared = v.shape[0], v.shape[0] - z.shape[1]
    if shared:
        z = torch.cat((prefix[:shared].expand(z.shape[0], -1, -1), z), dim=1)
    y = z / torch.sqrt(z.square().sum(-1, keepdim=True) + EPS)
    rows = []
    for row, v_row in zip(y[:, -queries:].unbind(1), v[-queries:].tril(context - queries), strict=True):
        cosines = (y * row[:, None]).sum(-1)
        rows.append(((v_row * cosines).unsqueeze(-1) * z).sum(1))
    out = torch.stack(rows, dim=1)
    return out if gate is None else gate * out
