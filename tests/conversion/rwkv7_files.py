"""Random checkpoints of Goose (RWKV-7) in the layouts in which others save it."""

import math
import re

import torch


Tensors = dict[str, torch.Tensor]
UNUSED = tuple(f"blocks.0.att.v{i}" for i in range(3))


def trainer_tensors(
    *,
    layers: int = 2,
    heads: int = 3,
    head_size: int = 64,
    vocabulary: int = 100,
    intermediate: int = 320,
    ranks: tuple[int, int, int, int] = (11, 7, 5, 13),
    unused: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int | None = 0,
) -> Tensors:
    """
    What the trainer saves, with values large enough that no tensor is without effect.

    Args:
        seed: None for the default device, which may be the meta device.
        ranks: of decay, in-context learning rate, mixing of values and gate.
        unused: whether the first block has the tensors of the mixing of values, which nothing reads.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    d = heads * head_size

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def norm(name: str) -> Tensors:
        return {f"{name}.weight": uniform(d, low=0.5, high=1.5), f"{name}.bias": uniform(d, low=-0.3, high=0.3)}

    tensors = {"emb.weight": torch.randn(vocabulary, d, generator=generator)}
    for i in range(layers):
        block, att, ffn = f"blocks.{i}", f"blocks.{i}.att.", f"blocks.{i}.ffn."
        if i == 0:
            tensors |= norm(f"{block}.ln0")
        tensors |= norm(f"{block}.ln1") | norm(f"{block}.ln2")
        tensors |= {f"{att}x_{letter}": uniform(1, 1, d) for letter in "rwkvag"}
        for letter, rank in zip("wavg", ranks, strict=True):
            if letter != "g":
                tensors[f"{att}{letter}0"] = uniform(1, 1, d, low=-4.0 if letter == "w" else -1.0)
            tensors[f"{att}{letter}1"] = matrix(rank, d).T.contiguous()
            tensors[f"{att}{letter}2"] = matrix(d, rank).T.contiguous()
        tensors |= {f"{att}k_k": uniform(1, 1, d, low=0.5), f"{att}k_a": uniform(1, 1, d, low=0.5)}
        tensors[f"{att}r_k"] = uniform(heads, head_size, low=-1.0)
        tensors |= {f"{att}{name}.weight": matrix(d, d) for name in ("receptance", "key", "value", "output")}
        tensors |= norm(f"{att}ln_x")
        tensors[f"{ffn}x_k"] = uniform(1, 1, d)
        tensors |= {f"{ffn}key.weight": matrix(intermediate, d), f"{ffn}value.weight": matrix(d, intermediate)}
    tensors |= norm("ln_out")
    tensors["head.weight"] = matrix(vocabulary, d)
    return {name: x.to(dtype) for name, x in tensors.items() if unused or name not in UNUSED}


def hub_tensors(**sizes) -> Tensors:
    """The same under the names of the RWKV organisation's repositories."""
    source = trainer_tensors(**sizes)
    return {name if name == "head.weight" else f"rwkv7.{name}": x for name, x in source.items()}


def web_tensors(**sizes) -> Tensors:
    """For web-rwkv: low-rank matrices are transposed."""
    low_rank = re.compile(r"\.att\.[wavg][12]$")
    return {name: x.T if low_rank.search(name) else x for name, x in trainer_tensors(**sizes).items()}


def fla_tensors(**sizes) -> Tensors:
    """In the layout of flash-linear-attention."""
    return dict(_fla(name, x) for name, x in trainer_tensors(**sizes).items())


def rs_tensors(**sizes) -> Tensors:
    """In the layout of rwkv-rs."""
    source = trainer_tensors(**sizes)
    return {name if name == "head.weight" else f"model.{name}": x for name, x in source.items()}


def old_rs_tensors(**sizes) -> Tensors:
    """In its older layout."""
    return dict(_rs(name, x) for name, x in trainer_tensors(**sizes).items())


def gguf_tensors(**sizes) -> Tensors:
    """In GGUF, with the axes in the order of numpy."""
    source = trainer_tensors(**sizes)
    names = {"emb": "token_embd", "head": "output", "ln_out": "output_norm"}
    tensors = {}
    for name, x in source.items():
        if not name.startswith("blocks."):
            top, part = name.split(".")
            tensors[f"{names[top]}.{part}"] = x
            continue
        _, layer, rest = name.split(".", 2)
        block, shift = f"blk.{layer}.", re.fullmatch(r"att\.x_([rwkvag])", rest)
        if rest.startswith("ln0."):
            tensors[f"token_embd_norm.{rest[4:]}"] = x
        elif rest.startswith(("ln1.", "ln2.")):
            tensors[f"{block}attn_norm{'_2' if rest[2] == '2' else ''}.{rest[4:]}"] = x
        elif rest.startswith("att.ln_x."):
            tensors[f"{block}time_mix_ln.{rest[9:]}"] = x
        elif shift:
            if shift[1] == "r":
                all_shifts = [source[f"blocks.{layer}.att.x_{letter}"] for letter in "rwkvag"]
                tensors[f"{block}time_mix_lerp_fused.weight"] = torch.stack(all_shifts)
        elif rest == "ffn.x_k":
            tensors[f"{block}channel_mix_lerp_k.weight"] = x.flatten()
        else:
            part, leaf = rest.removesuffix(".weight").split(".")
            low_rank, matrix = re.fullmatch("[wavg][12]", leaf), rest.endswith(".weight")
            x = x.T.contiguous() if low_rank else x if matrix else x.flatten()
            tensors[f"{block}{'time' if part == 'att' else 'channel'}_mix_{leaf}.weight"] = x
    return tensors


NORMS = {"ln1": "attn_norm", "ln2": "ffn_norm", "ln0": "pre_norm"}
TOP = {
    "emb.weight": "model.embeddings.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}


def _fla(name: str, x: torch.Tensor) -> tuple[str, torch.Tensor]:
    if name in TOP:
        return TOP[name], x
    _, layer, part, leaf = name.split(".", 3)
    prefix = f"model.layers.{layer}."
    if part in NORMS:
        return f"{prefix}{NORMS[part]}.{leaf}", x
    if part == "ffn":
        return f"{prefix}ffn.{leaf}", x.flatten() if leaf == "x_k" else x
    if low_rank := re.fullmatch(r"([wavg])([012])", leaf):
        end = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[low_rank[2]]
        return f"{prefix}attn.{low_rank[1]}_lora.lora.{end}", x.flatten() if low_rank[2] == "0" else x.T
    if leaf in ("k_k", "k_a"):
        return f"{prefix}attn.{leaf}", x.flatten()
    module, _, rest = leaf.partition(".")
    module = {"ln_x": "g_norm", **{word: f"{word[0]}_proj" for word in PROJECTIONS}}.get(module, module)
    return f"{prefix}attn.{module}{'.' * bool(rest)}{rest}", x


PROJECTIONS = ("receptance", "key", "value", "output")


def _rs(name: str, x: torch.Tensor) -> tuple[str, torch.Tensor]:
    theirs, _ = _fla(name, x)
    if name == "emb.weight":
        return "model.embed_tokens.weight", x
    if ".ln0." in name:
        return f"model.embedding_norm.{name.rpartition('.')[2]}", x
    for fla, rs in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"), (".ffn.", ".mlp.")):
        theirs = theirs.replace(fla, rs)
    leaf = name.rpartition(".")[2]
    if ".att." in name and leaf not in ("weight", "bias"):
        theirs = f"model.layers.{name.split('.')[1]}.linear_attn.{leaf}"
    vector = x.dim() == 3
    return theirs.replace(".attn.", ".linear_attn."), x.flatten() if vector else x
