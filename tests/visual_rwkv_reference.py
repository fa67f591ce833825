"""
VisualRWKV (section 10.2 of "Eagle and Finch") for one row, token by token in float64: the oracle of the model's tests.

A row is a list of token ids and images, an image being what the vision tower puts out for it: (1 + side * side, vision
width), the class token first. Tensors have the names of the published files; `generation` is "rwkv5" for those with
Eagle (v5.0), "rwkv6" for those with Finch (v6.0). Every token is one vector, and the equations are those of the paper.
"""

import torch
import torch.nn.functional as F


Vector = torch.Tensor
Tensors = dict[str, torch.Tensor]


def pooled_patches(patches: list[Vector], n: int) -> list[Vector]:
    """Means over the windows of side x side patches that make n x n of them."""
    side = int(len(patches) ** 0.5)
    window = side // n
    pooled = []
    for top in range(0, side, window):
        for left in range(0, side, window):
            total = torch.zeros_like(patches[0])
            for row in range(top, top + window):
                for column in range(left, left + window):
                    total = total + patches[row * side + column]
            pooled.append(total / window**2)
    return pooled


def image_features(p: Tensors, generation: str, image: torch.Tensor, grid_size: int) -> tuple[list[Vector], slice]:
    """An image's tokens, projected, and which of them are patches."""
    class_token, *patches = image.double()
    if generation == "rwkv5" and grid_size == 1:
        features, place = [image.double().mean(0)], slice(0, 1)
    else:
        if grid_size == 0:
            patches = []
        elif grid_size > 0:
            patches = pooled_patches(patches, grid_size)
        if generation == "rwkv5":
            features, place = [class_token, *patches], slice(1, 1 + len(patches))
        else:
            features, place = [*patches, class_token], slice(0, len(patches))
    return [p["proj.weight"] @ x for x in features], place


def layer_norm(p: Tensors, name: str, x: Vector) -> Vector:
    return F.layer_norm(x, x.shape, p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)


def lerp(generation: str, x: Vector, previous: Vector, mu: torch.Tensor) -> Vector:
    """Equation 3. The stored mu of Eagle weighs the token itself, that of Finch the one before."""
    mu = mu.flatten()
    return x * mu + previous * (1 - mu) if generation == "rwkv5" else x + (previous - x) * mu


def time_mixing(p: Tensors, generation: str, att: str, tokens: list[Vector], divisor: int) -> list[Vector]:
    """Equations 4 to 9 of Eagle, 14 to 22 of Finch."""
    heads, head_size = p[f"{att}.time_faaaa"].shape
    u = p[f"{att}.time_faaaa"][:, :, None]
    state, previous = u.new_zeros(heads, head_size, head_size), torch.zeros_like(tokens[0])
    outputs = []
    for x in tokens:
        if generation == "rwkv5":
            mixed = {name: lerp(generation, x, previous, p[f"{att}.time_mix_{name}"]) for name in "rkvg"}
            omega = p[f"{att}.time_decay"]
        else:
            low = lerp(generation, x, previous, p[f"{att}.time_maa_x"]) @ p[f"{att}.time_maa_w1"]
            mixed = {}
            for name, a, b in zip("wkvrg", low.tanh().chunk(5), p[f"{att}.time_maa_w2"], strict=True):
                mixed[name] = lerp(generation, x, previous, p[f"{att}.time_maa_{name}"].flatten() + a @ b)
            offset = (mixed["w"] @ p[f"{att}.time_decay_w1"]).tanh() @ p[f"{att}.time_decay_w2"]
            omega = p[f"{att}.time_decay"].flatten() + offset
        w = torch.exp(-torch.exp(omega)).view(heads, head_size, 1)
        r = (p[f"{att}.receptance.weight"] @ mixed["r"]).view(heads, 1, head_size)
        k = (p[f"{att}.key.weight"] @ mixed["k"]).view(heads, head_size, 1)
        v = (p[f"{att}.value.weight"] @ mixed["v"]).view(heads, 1, head_size)
        g = p[f"{att}.gate.weight"] @ mixed["g"]
        wkv = state + u * (k @ v)
        state = w * state + k @ v
        normed = [F.layer_norm(head, head.shape, eps=1e-5 * divisor**2) for head in (r @ wkv)[:, 0]]
        normed = torch.cat(normed) * p[f"{att}.ln_x.weight"] + p[f"{att}.ln_x.bias"]
        outputs.append(p[f"{att}.output.weight"] @ (F.silu(g) * normed))
        previous = x
    return outputs


def channel_mixing(p: Tensors, generation: str, ffn: str, tokens: list[Vector]) -> list[Vector]:
    """Equations 10 to 13."""
    mix = "time_mix" if generation == "rwkv5" else "time_maa"
    previous, outputs = torch.zeros_like(tokens[0]), []
    for x in tokens:
        r = p[f"{ffn}.receptance.weight"] @ lerp(generation, x, previous, p[f"{ffn}.{mix}_r"])
        k = p[f"{ffn}.key.weight"] @ lerp(generation, x, previous, p[f"{ffn}.{mix}_k"])
        v = p[f"{ffn}.value.weight"] @ k.relu().square()
        outputs.append(r.sigmoid() * v)
        previous = x
    return outputs


def block(p: Tensors, generation: str, i: int, tokens: list[Vector], divisor: int) -> list[Vector]:
    name = f"rwkv.blocks.{i}"
    normed = [layer_norm(p, f"{name}.ln1", x) for x in tokens]
    mixed = time_mixing(p, generation, f"{name}.att", normed, divisor)
    tokens = [x + y for x, y in zip(tokens, mixed, strict=True)]
    normed = [layer_norm(p, f"{name}.ln2", x) for x in tokens]
    mixed = channel_mixing(p, generation, f"{name}.ffn", normed)
    return [x + y for x, y in zip(tokens, mixed, strict=True)]


def visual_rwkv_logits(
    tensors: Tensors,
    generation: str,
    row: list[int | torch.Tensor],
    grid_size: int = -1,
    reading_order: str | None = None,
    divisor: int = 8,
) -> torch.Tensor:
    """
    Logits of every position of a row, (positions, vocabulary).

    Args:
        reading_order: "forward", or "alternate": odd blocks read the patches of each image backwards. None: as the
            generation was trained.
        divisor: `head_size_divisor`, of the norm over the heads.
    """
    p = {name: tensor.double() for name, tensor in tensors.items()}
    alternate = (reading_order or {"rwkv5": "forward", "rwkv6": "alternate"}[generation]) == "alternate"
    tokens, images = [], []
    for entry in row:
        if isinstance(entry, int):
            tokens.append(p["rwkv.emb.weight"][entry])
        else:
            features, place = image_features(p, generation, entry, grid_size)
            images.append(slice(len(tokens) + place.start, len(tokens) + place.stop))
            tokens += features

    tokens = [layer_norm(p, "rwkv.blocks.0.ln0", x) for x in tokens]
    for i in range(1 + max(int(name.split(".")[2]) for name in p if name.startswith("rwkv.blocks."))):
        backwards = images if alternate and i % 2 == 1 else []
        for image in backwards:
            tokens[image] = tokens[image][::-1]
        tokens = block(p, generation, i, tokens, divisor)
        for image in backwards:
            tokens[image] = tokens[image][::-1]
    return torch.stack([p["rwkv.head.weight"] @ layer_norm(p, "rwkv.ln_out", x) for x in tokens])
