"""
The models that models.py compares ours with: the published algorithms of Avey and Avey-B in ordinary torch, models of
flash-linear-attention, and a ModernBERT and a Llama of transformers. And the package `rwkv`, which cpu.py compares a
Finch or a Goose with.

Each peer is made from one of our models and has some of these methods:

    all_tokens(ids)             the last hidden states of all tokens
    first_token(ids)            logits (B, 1, V) after a prompt
    logits(ids)                 of all tokens
    loss(ids, labels)
    stepper(ids, start)         a function of t that reads token `start + t`
    generate(ids, tokens)       greedily
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from contextualizer import plain_contextualizer
from dynamic_mixing import plain_dynamic
from measuring import FLA, PLAIN, load_fla
from split_ranker import plain_scores, unit
from static_mixing import plain_static
from torch import Tensor, nn


MODERNBERT, LLAMA = "ModernBERT", "Llama"
MODERNBERT_SIZES = {
    768: {},
    1024: {"hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16},
}


# The published algorithms.


class Plain(nn.Module):
    """An algorithm as its authors describe it, with the tensor names of its checkpoints."""

    compiled_parts: dict[str, dict[str, Any]] = {}

    def __init__(self, config):
        super().__init__()
        self.config = config

    def compiled(self):
        for name, how in self.compiled_parts.items():
            setattr(self, name, torch.compile(getattr(self, name), **how))
        return self

    def window(self, x: Tensor, y: Tensor, i: int) -> Tensor:
        """Split i of x (B, M, S, D), after its retrieved ones; y holds the unit vectors. (B, C, D)."""
        rows, most = x[:, i], self.retrieved
        if retrieved := min(i, most):
            index, weights = self.choose(*plain_scores(y[:, i], y[:, :i]).topk(retrieved))
            others = x[torch.arange(len(x), device=x.device)[:, None], index] * weights[..., None, None]
            rows = torch.cat((others.flatten(1, 2), rows), 1)
        return F.pad(rows, (0, 0, (most + 1) * self.config.chunk_size - rows.shape[1], 0))

    def splits(self, ids: Tensor) -> Tensor:
        size = self.config.chunk_size
        return F.pad(self.embed_ids(ids), (0, 0, 0, -ids.shape[1] % size)).unflatten(1, (-1, size))

    def all_tokens(self, ids: Tensor) -> Tensor:
        x = self.splits(ids)
        y = unit(x)
        windows = torch.stack([self.window(x, y, i) for i in range(x.shape[1])], 1)
        return self.process(windows.flatten(0, 1)).view(len(ids), -1, x.shape[-1])[:, : ids.shape[1]]


class PlainAveyBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, features = config.d_embed, config.expansion_factor * config.d_embed
        self.sizes = [config.tail_size // 2, config.tail_size // 2, features - config.tail_size]
        self.rms_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.ctxt = nn.ModuleDict(
            {
                "enricher": nn.Linear(width, features),
                "contextualizer": nn.ParameterDict({"spatial_proj": torch.empty(2 * [config.extended_len])}),
                "fuser": nn.Linear(features - self.sizes[0], width),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        tail, gate, head = F.relu(self.ctxt["enricher"](self.rms_norm(x))).square().split(self.sizes, -1)
        mixed = plain_contextualizer(tail, self.ctxt["contextualizer"]["spatial_proj"], gate)
        return x + self.ctxt["fuser"](torch.cat((mixed, head), -1))


class PlainAvey(Plain):
    """All rows of every window go through all blocks, and a new token is ranked and contextualised without a cache."""

    compiled_parts = {"process": {"mode": "reduce-overhead", "fullgraph": True, "dynamic": False}}

    def __init__(self, config):
        super().__init__(config)
        self.retrieved = config.k - 1
        self.wte = nn.Embedding(config.vocab_size, config.d_embed)
        self.blocks = nn.ModuleList(PlainAveyBlock(config) for _ in range(config.n_blocks))
        self.ln_f = nn.RMSNorm(config.d_embed, eps=config.rms_norm_eps)

    def embed_ids(self, ids: Tensor) -> Tensor:
        return self.wte(ids)

    def choose(self, scores: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        index, order = index.sort()
        weights = scores.gather(1, order)
        return index, weights / (weights[:, :1] + 1e-8)

    def process(self, windows: Tensor) -> Tensor:
        """The blocks on windows (W, C, D): the rows of their current splits, (W, S, D)."""
        for block in self.blocks:
            windows = block(windows)
        return self.ln_f(windows[:, -self.config.chunk_size :])

    def logits(self, ids: Tensor) -> Tensor:
        return F.linear(self.all_tokens(ids), self.wte.weight)

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(ids)[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())

    def first_token(self, ids: Tensor) -> Tensor:
        x = self.splits(ids)
        rows = self.process(self.window(x, unit(x), x.shape[1] - 1))
        return F.linear(rows[:, (ids.shape[1] - 1) % self.config.chunk_size, None], self.wte.weight)

    def stepper(self, ids: Tensor, start: int) -> Callable[[int], Tensor]:
        return lambda t: self.first_token(ids[:, : start + t + 1])


class PlainAveyBLayer(nn.Module):
    def __init__(self, config, dynamic: bool):
        super().__init__()
        width, features = config.d_embed, config.expansion_factor * config.d_embed
        self.config, self.width = config, config.tail_size // 2
        self.norm = nn.RMSNorm(width, eps=config.eps)
        self.enricher = nn.Linear(width, features)
        self.spatial_proj = None if dynamic else nn.Parameter(torch.empty(2 * [config.chunk_size]))
        self.fuser = nn.Linear(features - self.width, width)
        self.alpha = nn.Parameter(torch.empty(())) if config.residual_gain else None

    def forward(self, x: Tensor) -> Tensor:
        features = self.enricher(self.norm(x))
        features = F.gelu(features) if self.config.hidden_act == "gelu" else F.relu(features).square()
        if self.spatial_proj is None:
            features = plain_dynamic(features, self.width, self.config.similarity_norm, self.config.eps)
        else:
            features = plain_static(features, self.spatial_proj, self.width)
        out = self.fuser(features)
        return x + out if self.alpha is None else out + self.alpha * x


class PlainAveyB(Plain):
    """The windows of all splits are in memory together, and one product compresses them."""

    compiled_parts = {"window": {"dynamic": True}, "process": {"dynamic": True}}

    def __init__(self, config):
        super().__init__(config)
        size = config.chunk_size
        self.retrieved = config.k
        self.embed = nn.Embedding(config.vocab_size, config.d_embed)
        self.ranker = nn.ParameterDict({"down_proj": torch.empty(size, (config.k + 1) * size)})
        self.layers = nn.ModuleList(PlainAveyBLayer(config, dynamic) for dynamic in config.dynamic_layers)
        self.ln_f = nn.RMSNorm(config.d_embed, eps=config.eps) if config.final_norm else nn.Identity()

    def embed_ids(self, ids: Tensor) -> Tensor:
        return self.embed(ids)

    def choose(self, scores: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return index, scores / (scores[:, -1:] + 1e-8)

    def process(self, windows: Tensor) -> Tensor:
        """Windows (W, (k + 1) * S, D), compressed and through the layers: (W, S, D)."""
        x = self.ranker["down_proj"] @ windows + windows[:, -self.config.chunk_size :]
        for layer in self.layers:
            x = layer(x)
        return x

    def logits(self, ids: Tensor) -> Tensor:
        return F.linear(self.ln_f(self.all_tokens(ids)), self.embed.weight)

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(ids).float().flatten(0, 1), labels.flatten())


def plain(kind: type[Plain]) -> Callable[[nn.Module], Plain]:
    """Makes a peer with the weights of a model."""

    def make(model: nn.Module) -> Plain:
        weights = {name.removeprefix("model."): x for name, x in model.state_dict().items() if "lm_head" not in name}
        with torch.device(model.device):
            peer = kind(model.config).to(model.dtype)
        peer.load_state_dict(weights, assign=True)
        return peer.requires_grad_().eval()

    return make


# Others.


class Transformers:
    """A model with the interface of transformers, as ours have it."""

    def __init__(self, model: nn.Module):
        self.model = model

    def all_tokens(self, ids: Tensor) -> Tensor:
        return self.model.base_model(ids).last_hidden_state


class TransformersCausal(Transformers):
    def all_tokens(self, ids: Tensor) -> Tensor:
        return self.model.base_model(ids, use_cache=False).last_hidden_state

    def first_token(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, logits_to_keep=1, use_cache=True).logits

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=labels).loss

    def generate(self, ids: Tensor, tokens: int, **how: Any) -> Tensor:
        how |= {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": tokens}
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **how)[:, ids.shape[1] :]


def modernbert(model: nn.Module) -> Transformers:
    """A ModernBERT of the same width and vocabulary, with torch's scaled dot product attention."""
    from transformers import ModernBertConfig, ModernBertModel

    width, vocabulary = model.config.hidden_size, model.config.vocab_size
    sizes = MODERNBERT_SIZES.get(width)
    if sizes is None:
        sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    config = ModernBertConfig(vocab_size=vocabulary, max_position_embeddings=2**17, **sizes)
    config._attn_implementation = "sdpa"
    with torch.device(model.device):
        return Transformers(ModernBertModel(config).to(model.dtype).eval())


def llama(model: nn.Module) -> TransformersCausal:
    """A Llama of the same width, depth and vocabulary, and with as many parameters, as near as its MLP allows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    names = ("hidden_size", "num_hidden_layers", "vocab_size")
    width, depth, vocabulary = (getattr(model.config, name) for name in names)
    heads = max(1, width // 64)
    groups = heads // 4 if heads % 4 == 0 else heads
    attention = 2 * width**2 * (1 + groups / heads)
    parameters = sum(x.numel() for x in model.parameters()) - 2 * vocabulary * width
    step = 64 if width >= 512 else 1
    inner = max(step, step * round((parameters / depth - attention) / (3 * width * step)))
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "vocab_size": vocabulary, "intermediate_size": inner}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": groups, "max_position_embeddings": 2**17}
    config = LlamaConfig(**sizes, tie_word_embeddings=False)
    config._attn_implementation = "sdpa"
    with torch.device(model.device):
        return TransformersCausal(LlamaForCausalLM(config).to(model.dtype).eval())


def fla_rwkv6(model: nn.Module) -> TransformersCausal | None:
    """A Finch of flash-linear-attention of the same sizes, with its own weights."""
    fla = load_fla("fla.models.rwkv6", model.device.type)
    if fla is None:
        return None
    sizes = {name: getattr(model.config, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    config = fla.RWKV6Config(num_heads=model.config.num_attention_heads, expand_k=1.0, **sizes)
    with torch.device(model.device):
        return TransformersCausal(fla.RWKV6ForCausalLM(config).to(model.dtype).eval())


def fla_rwkv7(model: nn.Module) -> TransformersCausal | None:
    """A Goose of flash-linear-attention of the same sizes, with its own weights."""
    fla = load_fla("fla.models.rwkv7", model.device.type)
    if fla is None:
        return None
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "intermediate_size")
    names += ("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")
    config = fla.RWKV7Config(**{name: getattr(model.config, name) for name in names})
    with torch.device(model.device):
        return TransformersCausal(fla.RWKV7ForCausalLM(config).to(model.dtype).eval())


def fla_raven(model: nn.Module) -> TransformersCausal | None:
    """A Raven of flash-linear-attention of the same sizes, with the same weights."""
    fla = load_fla("fla.models.raven", model.device.type)
    if fla is None:
        return None
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "hidden_act", "norm_eps")
    names += ("num_heads", "num_kv_heads", "num_slots", "topk", "expand_k", "expand_v", "feature_map")
    names += ("use_output_gate", "decay_type", "bias_rmm", "add_gumbel_noise", "router_score", "router_type")
    config = fla.RavenConfig(**{name: getattr(model.config, name) for name in names})
    with torch.device(model.device):
        peer = fla.RavenForCausalLM(config).to(model.dtype).eval()
    peer.load_state_dict(model.state_dict())
    return TransformersCausal(peer)


# Parts of the names in our checkpoints and, if they differ, in those of the trainer.
RENAMED = {
    r"^rwkv7?\.": "",
    r"^embeddings": "emb",
    "attention": "att",
    "feed_forward": "ffn",
    "pre_ln": "ln0",
    r"time_mix_([kvrg])\w+": r"time_mix_\1",
}


def rwkv(model: nn.Module) -> Any:
    """The PyPI package `rwkv` (strategy "cpu fp32") with the same weights, or None if it cannot be imported."""
    os.environ.setdefault("RWKV_JIT_ON", "0")
    # The package chooses RWKV-7 or the versions before it when it is imported.
    os.environ["RWKV_V7_ON"] = "1" if model.config.model_type == "rwkv7" else "0"
    sys.modules.pop("rwkv.model", None)
    try:
        from rwkv.model import RWKV as Package
    except ImportError as error:
        print(f"rwkv is left out: {error}")
        return None
    finally:
        sys.modules.pop("rwkv.model", None)
    tensors = {}
    for name, x in model.state_dict().items():
        for pattern, replacement in RENAMED.items():
            name = re.sub(pattern, replacement, name)
        tensors[name] = x
    with tempfile.TemporaryDirectory() as folder:
        torch.save(tensors, Path(folder, "model.pth"))
        with contextlib.redirect_stdout(None):
            return Package(str(Path(folder, "model")), strategy="cpu fp32")


PEERS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "rwkv6": {FLA: fla_rwkv6, LLAMA: llama},
    "rwkv7": {FLA: fla_rwkv7, LLAMA: llama},
    "avey": {PLAIN: plain(PlainAvey)},
    "avey-b": {PLAIN: plain(PlainAveyB), MODERNBERT: modernbert},
    "raven": {FLA: fla_raven, LLAMA: llama},
}


# Floors: the operations of the matrix products that every implementation needs.


def avey_products(config: Any, length: int, last_only: bool = False) -> tuple[int, int]:
    """
    Operations of a forward pass over `length` tokens, or of the part that its last token needs, and the ranker's
    share. The rows for missing splits are the same in every window.
    """
    size, most, width = config.chunk_size, config.k - 1, config.d_embed
    splits = -(-length // size)
    chosen = [splits - 1] if last_only else range(splits)
    kept = 1 if last_only else length
    rows, pairs = 0, 0
    for i in chosen:
        ends = (length - 1) % size + 1 if i == splits - 1 else size
        own = min(i, most) * size + ends
        end = most * size + ends
        rows += own
        pairs += (end * (end + 1) - (end - own) * (end - own + 1)) // 2
    half = config.tail_size // 2
    weights = width * (2 * config.expansion_factor * width - half)
    blocks = 2 * weights * ((config.n_blocks - 1) * rows + kept) + 4 * half * config.n_blocks * pairs
    ranker = 2 * width * size**2 * sum(chosen)
    return blocks + ranker + 2 * kept * width * config.vocab_size, ranker


def avey_b_products(config: Any, length: int, last_only: bool = False) -> tuple[int, int]:
    """
    Operations of a forward pass with its head, and the ranker's share. The rows after the text fill its last split:
    their results are mixed with the others.
    """
    size, width, half = config.chunk_size, config.d_embed, config.tail_size // 2
    splits = -(-length // size)
    weights = width * (2 * config.expansion_factor * width - half)
    mixing = [2 * size**2 * half + dynamic * size * (size + 1) * half for dynamic in config.dynamic_layers]
    layers = splits * sum(2 * weights * size + products for products in mixing)
    compressor = 2 * size**2 * width * sum(min(i, config.k) + 1 for i in range(splits))
    ranker = size**2 * width * splits * (splits - 1)
    return layers + compressor + ranker + 2 * length * width * config.vocab_size, ranker


# Other models multiply each token with all weights.
PRODUCTS = {"avey": avey_products, "avey-b": avey_b_products}
