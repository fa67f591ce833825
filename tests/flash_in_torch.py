"""Flash attention, whose kernels need a GPU: an implementation in torch that checks what it is given."""

import itertools

import torch


def flash_in_torch(module, query, key, value, attention_mask, scaling, sliding_window=None, **kwargs):
    """What transformers' function for flash attention does with these arguments, in plain torch."""
    assert attention_mask is None
    q_ends = kwargs.get("cu_seq_lens_q", torch.tensor([0, query.shape[2]]))
    k_ends = kwargs.get("cu_seq_lens_k", torch.tensor([0, key.shape[2]]))
    assert q_ends[-1] == query.shape[2]
    assert k_ends[-1] == key.shape[2]
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    outs = []
    for (a, b), (c, d) in zip(itertools.pairwise(q_ends), itertools.pairwise(k_ends), strict=True):
        assert b - a <= kwargs.get("max_length_q", b - a)
        assert d - c <= kwargs.get("max_length_k", d - c)
        distance = torch.arange(d - c - (b - a), d - c)[:, None] - torch.arange(d - c)
        seen = (distance >= 0) & (distance < (sliding_window or d - c + 1))
        scores = (query[:, :, a:b] @ key[:, :, c:d].mT * scaling).masked_fill(~seen, -torch.inf)
        outs.append((scores.softmax(-1) @ value[:, :, c:d]).transpose(1, 2))
    return torch.cat(outs, 1), None
