"""Random checkpoints of RWKV-7a and RWKV-7b under the trainer's names, and under ours."""

import rwkv7_files
import torch


Tensors = dict[str, torch.Tensor]


def trainer_tensors(
    *,
    attention: bool,
    rank: int = 4,
    size: int = 6,
    low: int = 3,
    layers: int = 2,
    heads: int = 3,
    head_size: int = 64,
    vocabulary: int = 100,
    intermediate: int = 320,
    seed: int | None = 0,
    **options,
) -> Tensors:
    """
    What the trainer saves, with values large enough that no tensor is without effect.

    Args:
        attention: whether it is an RWKV-7b.
        rank, size, low: the rank of DeepEmbed, the width of queries and keys, and the rank of the maps to keys.
    """
    goose = {"layers": layers, "heads": heads, "head_size": head_size, "vocabulary": vocabulary}
    tensors = rwkv7_files.trainer_tensors(**goose, intermediate=intermediate, seed=seed, **options)
    generator = None if seed is None else torch.Generator().manual_seed(seed + 1)
    d, dtype = heads * head_size, tensors["emb.weight"].dtype

    def draw(*shape: int, scale: float | None = None) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * (scale or shape[-1] ** -0.5)).to(dtype)

    def norm(width: int) -> Tensors:
        return {"weight": 1 + draw(width, scale=0.2), "bias": draw(width, scale=0.2)}

    for i in range(layers):
        ffn, qkv = f"blocks.{i}.ffn.", f"blocks.{i}.qkv."
        tensors |= {
            f"{ffn}s_emb.weight": draw(vocabulary, rank**2, scale=0.5),
            f"{ffn}s_emb_x.weight": draw(rank**2, d),
            f"{ffn}s0": 1 + draw(1, 1, intermediate, scale=0.3),
            f"{ffn}s1": draw(d, rank, scale=d**-0.5),
            f"{ffn}s2": draw(rank, intermediate, scale=rank**-0.5),
        }
        if not attention:
            continue
        tensors[f"{qkv}qq.weight"] = draw(size, d)
        for letter, width in (("k", size), ("v", d)):
            tensors[f"{qkv}{letter}1"] = draw(d, low, scale=d**-0.5)
            tensors[f"{qkv}{letter}2"] = draw(low, width, scale=1.0)
            tensors[f"{qkv}{letter}_emb.weight"] = draw(vocabulary, width, scale=0.5)
            tensors[f"{qkv}{letter}_emb_x.weight"] = draw(width, d)
        for letter, width in (("q", size), ("k", size), ("v", d)):
            tensors[f"{qkv}x_{letter}"] = draw(1, 1, width, scale=0.5)
            tensors |= {f"{qkv}ln{letter}.{name}": x for name, x in norm(width).items()}
    return tensors


def hub_tensors(**sizes) -> Tensors:
    """The same under our names."""
    source = trainer_tensors(**sizes)
    return {name if name == "head.weight" else f"rwkv7.{name}": x for name, x in source.items()}
