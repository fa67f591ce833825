"""
Random checkpoints under the trainer's names, and what they compute, step by step in float64; and those of VisualRWKV,
with a vision tower in front.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import CLIPVisionConfig, CLIPVisionModel


MIXES = {"rwkv5": "kvrg", "rwkv6": "xwkvrg"}


def trainer_tensors(
    model_type: str,
    *,
    layers: int = 2,
    heads: int = 3,
    head_size: int = 64,
    vocabulary: int = 100,
    intermediate: int = 320,
    ranks: tuple[int, int] = (7, 11),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """
    What a trainer of RWKV-5.2 or 6.0 saves, with values large enough that no tensor is without effect.
    """
    generator = torch.Generator().manual_seed(seed)
    d = heads * head_size

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": uniform(d, low=0.5, high=1.5), f"{name}.bias": uniform(d, low=-0.3, high=0.3)}

    tensors = {"emb.weight": torch.randn(vocabulary, d, generator=generator)}
    for i in range(layers):
        block = f"blocks.{i}"
        if i == 0:
            tensors |= norm(f"{block}.ln0")
        tensors |= norm(f"{block}.ln1") | norm(f"{block}.ln2")
        att, ffn = f"{block}.att.", f"{block}.ffn."
        mix = "time_mix_" if model_type == "rwkv5" else "time_maa_"
        tensors |= {f"{att}{mix}{name}": uniform(1, 1, d) for name in MIXES[model_type]}
        tensors |= {f"{ffn}{mix}{name}": uniform(1, 1, d) for name in "kr"}
        tensors[f"{att}time_faaaa"] = uniform(heads, head_size, low=-1)
        if model_type == "rwkv5":
            tensors[f"{att}time_decay"] = uniform(heads, head_size, low=-6, high=1)
        else:
            r, s = ranks
            tensors[f"{att}time_decay"] = uniform(1, 1, d, low=-6, high=1)
            tensors[f"{att}time_maa_w1"] = matrix(5 * r, d).T.contiguous()
            tensors[f"{att}time_maa_w2"] = torch.randn(5, r, d, generator=generator) / math.sqrt(r)
            tensors[f"{att}time_decay_w1"] = matrix(s, d).T.contiguous()
            tensors[f"{att}time_decay_w2"] = matrix(d, s).T.contiguous()
        tensors |= {f"{att}{name}.weight": matrix(d, d) for name in ("receptance", "key", "value", "gate", "output")}
        tensors |= norm(f"{att}ln_x")
        tensors[f"{ffn}key.weight"] = matrix(intermediate, d)
        tensors[f"{ffn}receptance.weight"] = matrix(d, d)
        tensors[f"{ffn}value.weight"] = matrix(d, intermediate)
    tensors |= norm("ln_out")
    tensors["head.weight"] = matrix(vocabulary, d)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def write_trainer_file(path: Path, model_type: str, **sizes) -> dict[str, torch.Tensor]:
    """Saves [`trainer_tensors`] and returns them."""
    tensors = trainer_tensors(model_type, **sizes)
    torch.save(tensors, path)
    return tensors


def hub_tensors(model_type: str, **sizes) -> dict[str, torch.Tensor]:
    """The same under the names of the published Hub models."""
    renamed = {}
    for name, tensor in trainer_tensors(model_type, **sizes).items():
        for old, new in (("ln0", "pre_ln"), (".att.", ".attention."), (".ffn.", ".feed_forward.")):
            name = name.replace(old, new)
        for letter, word in (("k", "key"), ("v", "value"), ("r", "receptance"), ("g", "gate")):
            if name.endswith(f"time_mix_{letter}"):
                name = name.removesuffix(letter) + word
        name = name.replace("emb.weight", "embeddings.weight")
        renamed[name if name == "head.weight" else f"rwkv.{name}"] = tensor
    return renamed


def fla_tensors(**sizes) -> dict[str, torch.Tensor]:
    """Finch in the layout of flash-linear-attention: five token shifts in the order r, w, k, v, g."""
    source, ranks, order = trainer_tensors("rwkv6", **sizes), sizes["ranks"], [3, 0, 1, 2, 4]
    tensors = {"model.embeddings.weight": source["emb.weight"]}
    for i in range(sizes["layers"]):
        theirs, block = f"model.layers.{i}.", f"blocks.{i}."
        att, ffn = f"{block}att.", f"{block}ffn."
        norms = {"ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att.ln_x": "attn.g_norm"}
        for ours, name in norms.items():
            if f"{block}{ours}.weight" in source:
                tensors |= {f"{theirs}{name}.{part}": source[f"{block}{ours}.{part}"] for part in ("weight", "bias")}
        down = source[f"{att}time_maa_w1"].T.unflatten(0, (5, ranks[0]))[order]
        up = source[f"{att}time_maa_w2"][order]
        tensors |= {
            f"{theirs}attn.x_proj.0.mu": source[f"{att}time_maa_x"].flatten(),
            f"{theirs}attn.x_proj.0.linear.weight": down.flatten(0, 1),
            f"{theirs}attn.x_proj.2.weight": up.permute(2, 0, 1).flatten(1),
            f"{theirs}attn.x_bias": torch.stack([source[f"{att}time_maa_{x}"].flatten() for x in "rwkvg"]),
            f"{theirs}attn.w_proj.linear.lora.0.weight": source[f"{att}time_decay_w1"].T,
            f"{theirs}attn.w_proj.linear.lora.2.weight": source[f"{att}time_decay_w2"].T,
            f"{theirs}attn.w_proj.linear.lora.2.bias": source[f"{att}time_decay"].flatten(),
            f"{theirs}attn.bonus": source[f"{att}time_faaaa"],
            f"{theirs}attn.o_proj.weight": source[f"{att}output.weight"],
            f"{theirs}ffn.value.weight": source[f"{ffn}value.weight"],
        }
        for name in ("receptance", "key", "value", "gate"):
            tensors[f"{theirs}attn.{name[0]}_proj.linear.weight"] = source[f"{att}{name}.weight"]
        for name in ("key", "receptance"):
            tensors[f"{theirs}ffn.{name}.mu"] = source[f"{ffn}time_maa_{name[0]}"].flatten()
            tensors[f"{theirs}ffn.{name}.linear.weight"] = source[f"{ffn}{name}.weight"]
    tensors |= {f"model.norm.{part}": source[f"ln_out.{part}"] for part in ("weight", "bias")}
    tensors["lm_head.weight"] = source["head.weight"]
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def web_tensors(model_type: str, **sizes) -> dict[str, torch.Tensor]:
    """For web-rwkv: some tensors have other names, and low-rank matrices are transposed."""
    renamed = {}
    for name, tensor in trainer_tensors(model_type, **sizes).items():
        name = name.replace("time_faaaa", "time_first").replace("time_maa", "time_mix")
        low_rank = name.endswith(("time_mix_w1", "time_mix_w2", "time_decay_w1", "time_decay_w2"))
        renamed[name] = tensor.mT.contiguous() if low_rank else tensor
    return renamed


def gguf_tensors(**sizes) -> dict[str, torch.Tensor]:
    """Finch in GGUF, with the axes in the order of numpy."""
    source = trainer_tensors("rwkv6", **sizes)
    tensors = {"token_embd.weight": source["emb.weight"]}
    tensors |= {f"token_embd_norm.{part}": source[f"blocks.0.ln0.{part}"] for part in ("weight", "bias")}
    for i in range(sizes["layers"]):
        theirs, block = f"blk.{i}.", f"blocks.{i}."
        att, ffn, mix, channel = f"{block}att.", f"{block}ffn.", f"{theirs}time_mix_", f"{theirs}channel_mix_"
        for ours, name in (("ln1", "attn_norm"), ("ln2", "attn_norm_2"), ("att.ln_x", "time_mix_ln")):
            tensors |= {f"{theirs}{name}.{part}": source[f"{block}{ours}.{part}"] for part in ("weight", "bias")}
        fused = [source[f"{att}time_maa_{x}"] for x in "wkvrg"]
        tensors |= {
            f"{mix}w1.weight": source[f"{att}time_maa_w1"].T,
            f"{mix}w2.weight": source[f"{att}time_maa_w2"].permute(0, 2, 1),
            f"{mix}lerp_x.weight": source[f"{att}time_maa_x"].flatten(),
            f"{mix}lerp_fused.weight": torch.stack(fused),
            f"{mix}first.weight": source[f"{att}time_faaaa"],
            f"{mix}decay.weight": source[f"{att}time_decay"].flatten(),
            f"{mix}decay_w1.weight": source[f"{att}time_decay_w1"].T,
            f"{mix}decay_w2.weight": source[f"{att}time_decay_w2"].T,
        }
        for name in ("receptance", "key", "value", "gate", "output"):
            tensors[f"{mix}{name}.weight"] = source[f"{att}{name}.weight"]
        tensors |= {f"{channel}lerp_{x}.weight": source[f"{ffn}time_maa_{x}"].flatten() for x in "kr"}
        tensors |= {
            f"{channel}{name}.weight": source[f"{ffn}{name}.weight"] for name in ("receptance", "key", "value")
        }
    tensors |= {f"output_norm.{part}": source[f"ln_out.{part}"] for part in ("weight", "bias")}
    tensors["output.weight"] = source["head.weight"]
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def tower(width: int = 128, *, patch_size: int = 4, side: int = 4, layers: int = 2, seed: int = 1) -> CLIPVisionModel:
    """A vision tower of which no tensor is without effect."""
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        image_size=side * patch_size,
        patch_size=patch_size,
    )
    model = CLIPVisionModel(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 8 + (parameter.dim() == 1)
    return model.eval()


def visual_tensors(model_type: str, vision: CLIPVisionModel, **sizes) -> dict[str, torch.Tensor]:
    """What the trainer of VisualRWKV saves, on Eagle (5.0) or Finch (6.0)."""
    text = trainer_tensors(model_type, **sizes)
    tensors = {f"rwkv.{name}": tensor for name, tensor in text.items()}
    for name, tensor in vision.state_dict().items():
        tensors[f"vit.vision_model.{name.removeprefix('vision_model.')}"] = tensor
    generator = torch.Generator().manual_seed(2)
    width, d = vision.config.hidden_size, text["emb.weight"].shape[1]
    tensors["proj.weight"] = torch.randn(d, width, generator=generator) / math.sqrt(width)
    dtype = text["emb.weight"].dtype
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def tower_tensors(seed: int = 3) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """
    Small towers of VisualRWKV-7 and its gate, under the names of their trainer and under ours. DINOv2 has a width of
    32 for images of 14 x 14, SigLIP of 48 for 8 x 8, and SAM of 24 for 16 x 16.
    """
    generator = torch.Generator().manual_seed(seed)
    theirs, ours = {}, {}

    def add(name: str, our_name: str, *shape: int) -> torch.Tensor:
        x = theirs[name] = torch.randn(shape, generator=generator) / 4
        if our_name:
            ours[our_name] = x
        return x

    def linear(name: str, our_name: str, rows: int, columns: int) -> None:
        add(f"{name}.weight", f"{our_name}.weight", rows, columns)
        add(f"{name}.bias", f"{our_name}.bias", rows)

    def norm(name: str, our_name: str, width: int) -> None:
        for part in ("weight", "bias"):
            add(f"{name}.{part}", f"{our_name}.{part}", width)

    def attention(name: str, our_names: list[str], width: int) -> None:
        for part, shape in (("weight", (3 * width, width)), ("bias", (3 * width,))):
            x = add(f"{name}.{part}", "", *shape)
            for i, our_name in enumerate(our_names):
                ours[f"{our_name}.{part}"] = x[i * width : (i + 1) * width].clone()

    def patches(name: str, our_name: str, width: int, size: int) -> None:
        add(f"{name}.weight", f"{our_name}.weight", width, 3, size, size)
        add(f"{name}.bias", f"{our_name}.bias", width)

    dino, model = "vit.dino_featurizer.", "model.vit.dino."
    add(f"{dino}cls_token", f"{model}embeddings.cls_token", 1, 1, 32)
    add(f"{dino}reg_token", f"{model}embeddings.register_tokens", 1, 2, 32)
    positions = add(f"{dino}pos_embed", "", 1, 4, 32)
    ours[f"{model}embeddings.position_embeddings"] = torch.cat((torch.zeros(1, 1, 32), positions), 1)
    patches(f"{dino}patch_embed.proj", f"{model}embeddings.patch_embeddings.projection", 32, 7)
    for i in range(2):
        block, layer = f"{dino}blocks.{i}.", f"{model}encoder.layer.{i}."
        norm(f"{block}norm1", f"{layer}norm1", 32)
        attention(f"{block}attn.qkv", [f"{layer}attention.attention.{x}" for x in ("query", "key", "value")], 32)
        linear(f"{block}attn.proj", f"{layer}attention.output.dense", 32, 32)
        norm(f"{block}norm2", f"{layer}norm2", 32)
        linear(f"{block}mlp.fc1", f"{layer}mlp.fc1", 64, 32)
        linear(f"{block}mlp.fc2", f"{layer}mlp.fc2", 32, 64)
        for n in (1, 2):
            add(f"{block}ls{n}.gamma", f"{layer}layer_scale{n}.lambda1", 32)
    norm(f"{dino}norm", f"{model}layernorm", 32)

    siglip, model = "vit.siglip_featurizer.", "model.vit.siglip."
    ours[f"{model}embeddings.position_embedding.weight"] = add(f"{siglip}pos_embed", "", 1, 4, 48)[0].clone()
    patches(f"{siglip}patch_embed.proj", f"{model}embeddings.patch_embedding", 48, 4)
    for i in range(2):
        block, layer = f"{siglip}blocks.{i}.", f"{model}encoder.layers.{i}."
        norm(f"{block}norm1", f"{layer}layer_norm1", 48)
        attention(f"{block}attn.qkv", [f"{layer}self_attn.{x}_proj" for x in "qkv"], 48)
        linear(f"{block}attn.proj", f"{layer}self_attn.out_proj", 48, 48)
        norm(f"{block}norm2", f"{layer}layer_norm2", 48)
        linear(f"{block}mlp.fc1", f"{layer}mlp.fc1", 40, 48)
        linear(f"{block}mlp.fc2", f"{layer}mlp.fc2", 48, 40)
    norm(f"{siglip}norm", f"{model}post_layernorm", 48)

    sam, model = "vit.sam_featurizer.", "model.vit.sam.vision_encoder."
    add(f"{sam}pos_embed", f"{model}pos_embed", 1, 4, 4, 24)
    patches(f"{sam}patch_embed.proj", f"{model}patch_embed.projection", 24, 4)
    for i, positions in enumerate((5, 7)):  # windows of 3 x 3, and the whole image
        block, layer = f"{sam}blocks.{i}.", f"{model}layers.{i}."
        norm(f"{block}norm1", f"{layer}layer_norm1", 24)
        for axis in "hw":
            add(f"{block}attn.rel_pos_{axis}", f"{layer}attn.rel_pos_{axis}", positions, 12)
        linear(f"{block}attn.qkv", f"{layer}attn.qkv", 72, 24)
        linear(f"{block}attn.proj", f"{layer}attn.proj", 24, 24)
        norm(f"{block}norm2", f"{layer}layer_norm2", 24)
        linear(f"{block}mlp.lin1", f"{layer}mlp.lin1", 36, 24)
        linear(f"{block}mlp.lin2", f"{layer}mlp.lin2", 24, 36)
    add(f"{sam}neck.0.weight", f"{model}neck.conv1.weight", 4, 24, 1, 1)
    norm(f"{sam}neck.1", f"{model}neck.layer_norm1", 4)
    add(f"{sam}neck.2.weight", f"{model}neck.conv2.weight", 4, 4, 3, 3)
    norm(f"{sam}neck.3", f"{model}neck.layer_norm2", 4)
    add("proj.gate.weight", "model.proj.gate.weight", 96, 96)
    return theirs, ours


def reference_logits(
    tensors: dict[str, torch.Tensor], model_type: str, ids: list[int], head_size_divisor: int
) -> torch.Tensor:
    """
    Logits (tokens, vocabulary) by equations (3) to (22) of "Eagle and Finch", one token after the other. The stored mu
    of RWKV-5 weighs the present token, that of RWKV-6 the previous one.
    """
    p = {name: tensor.double() for name, tensor in tensors.items()}
    heads, head_size = p["blocks.0.att.time_faaaa"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in p if name.startswith("blocks."))
    d = heads * head_size
    zeros = torch.zeros(d, dtype=torch.double)
    shifts = [[zeros, zeros] for _ in range(layers)]
    states = [torch.zeros(heads, head_size, head_size, dtype=torch.double) for _ in range(layers)]
    v5 = model_type == "rwkv5"

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (d,), p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)

    def lerp(x: torch.Tensor, previous: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
        mu = mu.flatten()
        return x * mu + previous * (1 - mu) if v5 else x + (previous - x) * mu

    def time_mixing(x: torch.Tensor, i: int) -> torch.Tensor:
        att = f"blocks.{i}.att."
        previous, shifts[i][0] = shifts[i][0], x
        if v5:
            mixed = {name: lerp(x, previous, p[f"{att}time_mix_{name}"]) for name in "rkvg"}
            decay = p[f"{att}time_decay"]
        else:
            low = lerp(x, previous, p[f"{att}time_maa_x"]) @ p[f"{att}time_maa_w1"]
            low = low.tanh().view(5, -1)
            mixed = {
                name: lerp(x, previous, p[f"{att}time_maa_{name}"].flatten() + low[j] @ p[f"{att}time_maa_w2"][j])
                for j, name in enumerate("wkvrg")
            }
            lora = (mixed["w"] @ p[f"{att}time_decay_w1"]).tanh() @ p[f"{att}time_decay_w2"]
            decay = (p[f"{att}time_decay"].flatten() + lora).view(heads, head_size)
        words = {"r": "receptance", "k": "key", "v": "value", "g": "gate"}
        r, k, v, g = (p[f"{att}{words[name]}.weight"] @ mixed[name] for name in "rkvg")
        r, k, v = (vector.view(heads, head_size) for vector in (r, k, v))
        kv = k[:, :, None] * v[:, None, :]
        out = torch.einsum("hi,hij->hj", r, states[i] + p[f"{att}time_faaaa"][:, :, None] * kv)
        states[i] = decay.exp().neg().exp()[:, :, None] * states[i] + kv
        out = F.group_norm(
            out.view(1, d), heads, p[f"{att}ln_x.weight"], p[f"{att}ln_x.bias"], 1e-5 * head_size_divisor**2
        )
        return p[f"{att}output.weight"] @ (out[0] * F.silu(g))

    def channel_mixing(x: torch.Tensor, i: int) -> torch.Tensor:
        ffn = f"blocks.{i}.ffn."
        mix = "time_mix_" if v5 else "time_maa_"
        previous, shifts[i][1] = shifts[i][1], x
        r = p[f"{ffn}receptance.weight"] @ lerp(x, previous, p[f"{ffn}{mix}r"])
        k = p[f"{ffn}key.weight"] @ lerp(x, previous, p[f"{ffn}{mix}k"])
        return r.sigmoid() * (p[f"{ffn}value.weight"] @ k.relu().square())

    logits = []
    for token in ids:
        x = norm(p["emb.weight"][token], "blocks.0.ln0")
        for i in range(layers):
            x = x + time_mixing(norm(x, f"blocks.{i}.ln1"), i)
            x = x + channel_mixing(norm(x, f"blocks.{i}.ln2"), i)
        logits.append(p["head.weight"] @ norm(x, "ln_out"))
    return torch.stack(logits)
