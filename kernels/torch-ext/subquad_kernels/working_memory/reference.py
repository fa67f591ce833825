"""The working memory of Gecko as written in the paper: the reference for all tests."""

import torch


def working_memory_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    memory: torch.Tensor | None,
    normalizer: torch.Tensor | None,
    leaving: torch.Tensor,
    begins: torch.Tensor,
    reads: torch.Tensor,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    [`subquad_kernels.working_memory`] row by row, chunk by chunk and token by token, in the dtype of the inputs (the
    caller casts).
    """
    batch, heads, length, key_size = q.shape
    outs, memories, normalizers = [], [], []
    for b in range(batch):
        m = v.new_zeros(heads, key_size, v.shape[-1]) if memory is None else memory[b]
        z = k.new_zeros(heads, key_size) if normalizer is None else normalizer[b]
        versions = [m]
        for start, begin in zip(leaving[b].tolist(), begins[b].tolist(), strict=True):
            if start >= 0:
                if begin >= 0:
                    m, z = torch.zeros_like(m), torch.full_like(z, -torch.inf)
                counted = slice(start + max(begin, 0), start + chunk_size)
                keys, values = k[b, :, counted], v[b, :, counted]
                z_before, z = z, torch.logaddexp(z, keys.logsumexp(1))  # 17, 18: w and z are kept as logarithms
                phi = (keys - z.unsqueeze(1)).exp()  # 20
                kept = (z_before - z).exp().unsqueeze(-1)
                m = kept * m + phi.mT @ (values - keys.softmax(-1) @ m)  # 23
            versions.append(m)
        out = [v.new_zeros(heads, v.shape[-1])] * length
        for t, version in enumerate(reads[b].tolist()):
            if version >= 0:
                out[t] = (q[b, :, t, None].softmax(-1) @ versions[version])[:, 0]  # 27
        outs.append(torch.stack(out, 1))
        memories.append(m)
        normalizers.append(z)
    return torch.stack(outs), torch.stack(memories), torch.stack(normalizers)
