"""
The models that the shared tests run on, each with its inputs and with what differs between them. An architecture joins
the shared tests by one case.
"""

import copy
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import transformers
from flash_in_torch import flash_in_torch
from transformers import AttentionInterface, CLIPVisionConfig

import subquad
from subquad_tokenizers import RwkvWorldTokenizerFast, write_vocabulary


VOCABULARY = 97
# One id more than a text draws from.
IMAGE_ID = VOCABULARY
# Where the models and their inputs are: `make gpu` says "cuda".
DEVICE = os.environ.get("SUBQUAD_TEST_DEVICE", "cpu")
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


AttentionInterface.register("flash_attention_in_torch", flash_in_torch)


# The models that were made last, and torch's random state after each was made.
_MADE: dict[str, tuple[torch.nn.Module, torch.Tensor]] = {}


def made_once(make: Callable[..., torch.nn.Module], *arguments) -> torch.nn.Module:
    """
    What `make` returns for the arguments: a copy of the first one, which takes a fifth of the time. Tests that patch
    how models are made call `make` itself.
    """
    if torch.is_inference_mode_enabled():
        return make(*arguments)
    key = repr((make.__qualname__, *arguments, torch.get_default_device(), torch.get_default_dtype()))
    if key not in _MADE:
        if len(_MADE) == 128:
            del _MADE[next(iter(_MADE))]
        _MADE[key] = make(*arguments), torch.get_rng_state()
    model, random_state = _MADE[key]
    torch.manual_seed(0)  # of other devices
    torch.set_rng_state(random_state)
    return copy.deepcopy(model)


@dataclass(frozen=True)
class Case:
    """
    A tiny model and its inputs.

    Attributes:
        name: the name in pytest's ids.
        model_type: the architecture.
        fields: the fields of the tiny configuration; those of the text configuration, if there are two.
        top_fields: the fields of the configuration that has a text configuration in it, if there are two.
        trained: the name of the embedded model that takes the place of a tiny one, or None.
        causal: whether the model generates text.
        images: whether the inputs have images.
        bos_below: ids below this one become the BOS token (1), so that a text has many documents.
        quiet: fields with which two runs in training mode are the same.
        dropout: fields with which training is random.
        optimizer: the options of AdamW in the paper.
        not_decayed: a pattern of the matrices without weight decay.
        twice_the_rate: a pattern of the parameters with twice the learning rate.
        wide: fields with which every linear layer reads a multiple of 64 numbers.
        tunable: fields of models that have a state to be trained.
        heads: whether the configuration has a number of heads and an intermediate size.
        attention: the names of the attention implementations that the model knows.
        window: the attention window of the only layer with softmax attention, or None.
        float32_states: the states that are float32 in every dtype.
        growing: whether the state grows with the text.
        embeddings: whether the model reads embeddings in place of ids.
        splits: whether a token's result depends on tokens of its split, also later ones of the same call.
        scalar: a tensor that is a vector in the model and a scalar in its files.
        rows_apart: whether what the linear layers read has the rows of the batch.
        context: fields that limit the context to 1024 tokens, for models that can tell it.
        export_least: the least length of a program of `torch.export` for any length.
        layer_kinds: the number of layers with which there is one of each kind.
        state_sizes: the elements of the cache of one row after 1, 5 and 200 tokens, from the configuration.
        decode_graphs: the largest number of graphs that ten steps of decoding are compiled to.
        dead: a pattern of the parameters that have no gradient, whatever the input.
        wrong: wrong fields, and the error message of each.
        implementation: the attention implementation, if it is not the default.
        other_type: the name of a case whose caches are not this model's.
        linear: the names of the linear layers that adapters are put on.
    """

    name: str
    model_type: str
    fields: dict = field(default_factory=dict)
    top_fields: dict | None = None
    trained: str | None = None
    causal: bool = True
    images: bool = False
    bos_below: int = 0
    quiet: dict = field(default_factory=dict)
    dropout: dict = field(default_factory=dict)
    optimizer: dict = field(default_factory=dict)
    not_decayed: str = "^$"
    twice_the_rate: str = "^$"
    wide: dict = field(default_factory=dict)
    tunable: tuple[dict, ...] = ()
    heads: bool = True
    attention: tuple[str, ...] = ("eager",)
    window: int | None = None
    float32_states: tuple[str, ...] = ()
    growing: bool = False
    embeddings: bool = True
    splits: bool = False
    scalar: str | None = None
    rows_apart: bool = True
    context: dict = field(default_factory=dict)
    export_least: int = 2
    layer_kinds: int = 1
    state_sizes: Callable[[Any], list[int]] | None = None
    decode_graphs: int = 2
    dead: str = "^$"
    wrong: tuple[tuple[dict, str], ...] = ()
    implementation: str | None = None
    other_type: str = "rwkv5"
    linear: tuple[str, ...] = ()

    @property
    def new_ids(self) -> int:
        """The ids below this one can be generated: all but the placeholder of images."""
        return IMAGE_ID if self.images else 10**6

    @property
    def vocabulary(self) -> int:
        return VOCABULARY + self.images

    @property
    def lm_class(self) -> str:
        """The Auto class of the model that is trained on text alone, or on text and images."""
        return subquad.lm_auto_class(self.model_type)

    @property
    def auto_classes(self) -> list[str]:
        """The Auto classes of all classes."""
        heads = subquad.ARCHITECTURES[self.model_type][2]
        return list({name: auto_class for auto_class, name in heads.items()}.values())

    def model_class(self, auto_class: str | None = None):
        """The class behind an Auto class; behind [`lm_class`] if None."""
        return getattr(subquad, subquad.ARCHITECTURES[self.model_type][2][auto_class or self.lm_class])

    def config(self, **fields):
        """The tiny configuration with other fields. Those of the text configuration are given as if it were alone."""
        config_class = getattr(subquad, subquad.ARCHITECTURES[self.model_type][1])
        top = self.top_fields
        if top is not None:
            own = {*top, "tie_word_embeddings", "reading_order", "image_token_id"}
            top = {**top, **{name: fields.pop(name) for name in own & fields.keys()}}
        fields = {"vocab_size": self.vocabulary, **self.fields, **fields}
        if fields.get("num_hidden_layers") == 1 and "attn" in fields:
            fields["attn"] = None
        if top is None:
            return config_class(**fields)
        text = CASES[top["text_config"]].config(**fields)
        return config_class(**{**top, "text_config": text})

    def model(self, auto_class: str | None = None, seed: int = 0, **fields):
        """
        A model in evaluation mode. No parameter of a tiny one is zero or constant, so that each takes part in every
        comparison.
        """
        return made_once(Case._make, self, auto_class, seed, fields)

    def _make(self, auto_class, seed, fields):
        if self.trained:
            path = subquad.embedded_model(self.trained)
            model = self.model_class().from_pretrained(path, dtype=torch.float32, **fields).eval().to(DEVICE)
            # Its own defaults sample, and end a tune.
            model.generation_config = transformers.GenerationConfig(pad_token_id=0)
            return model
        torch.manual_seed(seed)
        # The same numbers for every device.
        with torch.no_grad(), torch.device("meta" if torch.get_default_device().type == "meta" else "cpu"):
            model = self.model_class(auto_class)(copy.deepcopy(self.config(**fields))).eval()
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        if self.implementation:
            model.config._attn_implementation_internal = self.implementation  # the setter looks for its kernels
        return model if model.device.type == "meta" else model.to(DEVICE)

    def ids(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Random ids without padding and without images."""
        ids = random_ids(*shape, seed=seed)
        return ids.masked_fill(ids < self.bos_below, 1)

    def text(self, rows: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
        """
        The inputs of a call: ids (rows, length); and images, if the model reads them, at other positions in every row.
        The first 20 tokens hold all of them, some next to each other, as far as there is room.
        """
        ids = self.ids(rows, length, seed=seed)
        if not self.images:
            return {"input_ids": ids}
        config = self.config()
        shapes, size, count = config.image_shapes, config.num_image_tokens, 0
        for row in range(rows):
            begin = (seed + row) % 3 if length > size + 2 else 0
            for start in (begin, begin + size, begin + 13):
                if start + size <= length:
                    ids[row, start : start + size] = IMAGE_ID
                    count += 1
        draws = torch.Generator().manual_seed(seed)
        images = {name: torch.randn(count, *shape, generator=draws, device="cpu") for name, shape in shapes.items()}
        return _with_images(ids, {name: x.to(DEVICE) for name, x in images.items()})


# Inputs: dictionaries of what a model's `forward` takes. Those of images have a row for each image.

Images = dict[str, torch.Tensor]


def _image_tokens(text: dict[str, torch.Tensor]) -> int:
    """The number of placeholders of an image in a text with images; 1 if there are none."""
    given = next(iter(_images(text).values()), ())
    return int((text["input_ids"] == IMAGE_ID).sum()) // len(given) if len(given) else 1


def _with_images(ids: torch.Tensor, images: Images) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, **{name: x for name, x in images.items() if len(x)}}


def _images(text: dict[str, torch.Tensor]) -> Images:
    return {name: x for name, x in text.items() if name.startswith("pixel_values")}


def _all_images(texts) -> Images:
    """The images of all texts, one after the other."""
    found = [images for text in texts if (images := _images(text))]
    return {name: torch.cat([images[name] for images in found]) for name in (found[0] if found else ())}


def _rows(text: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Every row alone."""
    ids = text["input_ids"]
    size = _image_tokens(text)
    counts = [int((row == IMAGE_ID).sum()) // size for row in ids]
    images = {name: x.split(counts) for name, x in _images(text).items()}
    return [_with_images(ids[n : n + 1], {name: x[n] for name, x in images.items()}) for n in range(len(ids))]


def batch(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Texts of the same length as the rows of one."""
    return _with_images(torch.cat([row["input_ids"] for row in rows]), _all_images(rows))


def pick(text: dict[str, torch.Tensor], *rows: int) -> dict[str, torch.Tensor]:
    """Some rows."""
    alone = _rows(text)
    return batch([alone[n] for n in rows])


def cut(text: dict[str, torch.Tensor], start: int, stop: int | None = None) -> dict[str, torch.Tensor]:
    """The tokens from `start` to `stop`, and their images."""
    parts, size = [], _image_tokens(text)
    for row in _rows(text):
        ids = row["input_ids"]
        first, last = (int((ids[:, :end] == IMAGE_ID).sum()) // size for end in (start, stop))
        parts.append(_with_images(ids[:, start:stop], {name: x[first:last] for name, x in _images(row).items()}))
    return batch(parts)


def join(*texts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One text after another, row by row."""
    rows = []
    for parts in zip(*map(_rows, texts), strict=True):
        rows.append(_with_images(torch.cat([part["input_ids"] for part in parts], 1), _all_images(parts)))
    return batch(rows)


def split(text: dict[str, torch.Tensor], sizes) -> list[tuple[int, int]]:
    """Start and stop of pieces of these sizes; pieces that meet inside an image become one."""
    ids, size = text["input_ids"], _image_tokens(text)
    stops = list(itertools.accumulate(sizes))
    inside = [stop for stop in stops if ((ids[:, :stop] == IMAGE_ID).sum(1) % size).any() and stop < ids.shape[1]]
    return list(itertools.pairwise([0, *(stop for stop in stops if stop not in inside)]))


def padded(texts, side: str, value: int = 0, more: int = 0) -> dict[str, torch.Tensor]:
    """
    Texts of one row each as one batch with its mask, and `more` padding than is needed. It is on the left, on the
    right, or "anywhere": at random places, but not in an image.
    """
    width = max(text["input_ids"].shape[1] for text in texts) + more
    rows, masks = [], []
    for text in texts:
        ids = text["input_ids"]
        places = _places(ids, width - ids.shape[1], side, _image_tokens(text))
        masks.append(ids.new_zeros(1, width).index_fill(1, places, 1))
        row = torch.full_like(masks[-1], value).index_copy(1, places, ids)
        rows.append(_with_images(row, _images(text)))
    return {**batch(rows), "attention_mask": torch.cat(masks)}


def _places(ids: torch.Tensor, gap: int, side: str, size: int) -> torch.Tensor:
    """Where the tokens of a row are, once there are `gap` tokens of padding. An image has `size` placeholders."""
    length = ids.shape[1]
    # The tokens that padding may come before; the last one is the end of the text.
    before = {"left": [0], "right": [length]}.get(side) or [
        n for n in range(length + 1) if (ids[0, :n] == IMAGE_ID).sum() % size == 0
    ]
    drawn = torch.randint(len(before), (gap,), generator=torch.Generator().manual_seed(gap), device="cpu")
    padding = torch.tensor(before, device="cpu")[drawn].bincount(minlength=length + 1)[:length].cumsum(0)
    return (torch.arange(length, device="cpu") + padding).to(ids.device)


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(DEVICE)


# The cases.

AT_LEAST_ONE = "`{}` must be at least 1, got 0"


def _rwkv(model_type: str, other_type: str, **fields) -> Case:
    sizes = {"hidden_size": 48, "head_size": 16, "num_hidden_layers": 3, "intermediate_size": 64}
    return Case(
        model_type,
        model_type,
        {**sizes, **fields},
        optimizer={"betas": (0.9, 0.99), "weight_decay": 0.001},
        not_decayed=r"\.time_",
        twice_the_rate=r"time_decay$",
        wide={"hidden_size": 64, "intermediate_size": 64},
        tunable=({},),
        context={"context_length": 1024},
        export_least=3,
        float32_states=("wkv",),
        other_type=other_type,
        state_sizes=lambda c: [c.num_hidden_layers * (2 * c.hidden_size + c.attention_hidden_size * c.head_size)] * 3,
        linear=("key", "value", "receptance", "gate", "output"),
        wrong=(
            ({"num_hidden_layers": 0}, AT_LEAST_ONE.format("num_hidden_layers")),
            ({"hidden_size": 50, "head_size": 16}, "`attention_hidden_size`"),
            ({"num_attention_heads": 5, "head_size": 16}, "`num_attention_heads`"),
        ),
    )


def _slots_and_window(config) -> list[int]:
    """Two slot memories, and the keys and values of one head in a window."""
    slots = config.num_heads * config.num_slots * (config.head_k_dim + config.head_v_dim)
    window = 2 * config.attn["window_size"] * config.hidden_size // config.attn["num_heads"]
    return [2 * slots + window] * 3


def _moments_and_chunks(c) -> list[int]:
    """Moments, CEMA, two chunks, the memory and its normalizer."""
    moments, ema = 3 * c.timenorm_num_groups, 2 * c.model_dim * c.cema_ndim
    chunks, memory = 2 * c.chunk_size * (2 * c.z_dim + c.value_dim), c.z_dim * c.value_dim // c.num_heads + c.z_dim
    return [c.num_layers * (moments + ema + chunks + memory)] * 3


def _embeddings_and_scores(c) -> list[int]:
    """The embeddings with room for 1, 1 and 32 splits, their scores, and the length."""
    return [n * (c.chunk_size * c.d_embed + 1) + 1 for n in (1, 1, 32)]


PROPORTION = "`context_proportion` must be above 0 and at most 1.*, got {}"
AVEY = Case(
    "avey",
    "avey",
    {"d_embed": 48, "n_blocks": 3, "chunk_size": 8, "k": 4},
    heads=False,
    optimizer={"betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.1},
    wide={"d_embed": 64},
    growing=True,
    splits=True,
    rows_apart=False,
    layer_kinds=2,
    float32_states=("sums",),
    state_sizes=_embeddings_and_scores,
    # Once for a given number of tokens read, once for any; and both again when the room for embeddings grows.
    decode_graphs=4,
    linear=("enricher", "fuser"),
    wrong=(
        ({"n_blocks": 0}, AT_LEAST_ONE.format("n_blocks")),
        ({"n_layers": 3}, r"`n_layers` must be None, got 3: it is a field of Avey-B"),
        ({"chunk_size": 0}, AT_LEAST_ONE.format("chunk_size")),
        ({"k": -1}, "`k` must be at least 1, got -1"),
        ({"context_proportion": 0.0}, PROPORTION.format("0.0")),
        ({"context_proportion": 1.5}, PROPORTION.format("1.5")),
        ({"context_proportion": float("nan")}, "`context_proportion` must be above 0 .*, got nan"),
        ({"rms_norm_eps": -1.0}, "`rms_norm_eps` must be above 0 and finite, got -1.0"),
        ({"extended_len": 33}, r"`extended_len` \(33\) must be `k` \(4\) times `chunk_size` \(8\)"),
        ({"score_normalization": "sum"}, "`score_normalization` must be 'first' or 'max', got 'sum'"),
    ),
)
# A hybrid: attention over a window between two slot memories.
RAVEN = Case(
    "raven",
    "raven",
    {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_heads": 3,
        "num_slots": 12,
        "topk": 5,
        "use_output_gate": True,
        "intermediate_size": 64,
        "attn": {"layers": [1], "num_heads": 3, "num_kv_heads": 1, "window_size": 9, "qkv_bias": True},
    },
    quiet={"add_gumbel_noise": False},
    optimizer={"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    wide={
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 64,
        "add_gumbel_noise": False,
        "attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 9, "qkv_bias": True},
    },
    # With one key and value head for three others, too: its state has all of them.
    tunable=({}, {"num_kv_heads": 1}),
    layer_kinds=2,
    attention=("eager", "sdpa"),
    window=9,
    float32_states=("slots",),
    state_sizes=_slots_and_window,
    linear=("q_proj", "k_proj", "v_proj", "o_proj", "r_proj", "gate_proj", "up_proj", "down_proj"),
)
# One of the ids is the BOS token, which begins documents.
GECKO = Case(
    "gecko",
    "gecko",
    {
        "model_dim": 48,
        "num_layers": 3,
        "num_heads": 3,
        "z_dim": 24,
        "value_dim": 72,
        "ffn_hidden_dim": 64,
        "cema_ndim": 4,
        "chunk_size": 8,
        "timenorm_num_groups": 4,
        "num_rope_heads": 2,
    },
    dropout=dict.fromkeys(("dropout", "hidden_dropout", "attention_dropout"), 0.1),
    optimizer={"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    not_decayed=r"\.cema\.|\.mega\.(gamma|beta)$",
    wide={"model_dim": 64, "num_heads": 4, "z_dim": 64, "value_dim": 64, "timenorm_num_groups": 4},
    float32_states=("timenorm", "cema", "memory", "normalizer"),
    state_sizes=_moments_and_chunks,
    linear=("wz", "wv", "wr", "wh1", "wh2", "fc1", "fc2", "fc3"),
)
AVEY_B = Case(
    "avey-b",
    "avey-b",
    {"d_embed": 48, "n_layers": 3, "chunk_size": 8},
    causal=False,
    heads=False,
    scalar="model.layers.0.alpha",
    optimizer={"betas": (0.95, 0.95), "eps": 1e-18, "weight_decay": 0.01},
    wide={"d_embed": 64},
    splits=True,
    rows_apart=False,
    linear=("enricher", "fuser"),
)
EAGLE = _rwkv("rwkv5", "rwkv6")
FINCH = _rwkv("rwkv6", "rwkv5", lora_rank_tokenshift=4, lora_rank_decay=8)

GOOSE = Case(
    "rwkv7",
    "rwkv7",
    {
        "hidden_size": 48,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "decay_low_rank_dim": 6,
        "a_low_rank_dim": 5,
        "v_low_rank_dim": 4,
        "gate_low_rank_dim": 8,
    },
    optimizer={"betas": (0.9, 0.99), "eps": 1e-18, "weight_decay": 0.1},
    not_decayed=r"\.(x_[rwkvag]|[wav]0|[wavg][12]|k_[ka]|r_k)$",
    twice_the_rate=r"\.w0$",
    export_least=3,
    wide={"hidden_size": 64, "intermediate_size": 64},
    tunable=({},),
    float32_states=("wkv",),
    layer_kinds=2,
    state_sizes=lambda c: [c.num_hidden_layers * c.hidden_size * (2 + c.head_dim)] * 3,
    linear=("key", "value", "receptance", "output"),
    wrong=(
        ({"num_hidden_layers": 0}, AT_LEAST_ONE.format("num_hidden_layers")),
        ({"gate_low_rank_dim": 0}, AT_LEAST_ONE.format("gate_low_rank_dim")),
        ({"hidden_size": 50}, r"`hidden_size` \(50\) must be a multiple of `head_dim` \(16\)"),
        ({"attn": {"layers": [1]}}, "`attn` must be None, got .*softmax attention"),
        ({"norm_first": False}, "`norm_first` must be True, got False"),
        ({"embedding_layer_norm_fused": True}, "`embedding_layer_norm_fused` must be False, got True"),
        ({"attention_hidden_size": 96}, "`attention_hidden_size` must be 48, got 96"),
        ({"value_dim": [48, 96, 48]}, r"`value_dim` must be 48, got \[48, 96, 48\]"),
    ),
)


def _constant_and_keys(c) -> list[int]:
    """Goose's states, and of attention query, key and value of the last token, keys and values for 64 or 256."""
    entry = c.dea_size + c.hidden_size
    constant = c.num_hidden_layers * (c.hidden_size * (2 + c.head_dim) + c.dea_size + entry)
    return [constant + c.num_hidden_layers * entry * room for room in (64, 64, 256)]


# RWKV-7b, which has all that RWKV-7a has.
DEEP_EMBED = replace(
    GOOSE,
    name="rwkv7_deep_embed",
    model_type="rwkv7_deep_embed",
    fields={**GOOSE.fields, "deep_embed_rank": 4, "dea_size": 16, "dea_rank": 5, "dea_soft_cap": 4.0},
    not_decayed=GOOSE.not_decayed.replace("(", r"(s[012]|[kv][12]|x_q|", 1),
    float32_states=("wkv", "qkv_shift"),
    growing=True,
    embeddings=False,
    state_sizes=_constant_and_keys,
    linear=(*GOOSE.linear, "qq", "s_emb_x", "k_emb_x", "v_emb_x"),
    wrong=(
        *GOOSE.wrong[:2],
        ({"deep_embed_rank": 0}, AT_LEAST_ONE.format("deep_embed_rank")),
        ({"dea_size": 0}, AT_LEAST_ONE.format("dea_size")),
        ({"dea_soft_cap": 0.0}, "`dea_soft_cap` must be above 0 and finite, got 0.0"),
    ),
)

CLIP = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
# Of the three towers. SAM's grid of 6 x 6 has padding in its windows of 4 x 4.
TOWERS = {
    "model_type": "visual_rwkv_towers",
    "dino": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 21,
        "patch_size": 7,
        "num_register_tokens": 2,
        "mlp_ratio": 2,
    },
    "siglip": {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 12,
        "patch_size": 4,
    },
    "sam": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 24,
        "patch_size": 4,
        "mlp_dim": 24,
        "window_size": 4,
        "global_attn_indexes": [1],
        "output_channels": 4,
    },
}


# The tower's last norm is that of CLIP's own pooled output; one bias of all keys changes nothing in a softmax.
OF_CLIP = {"vision_config": CLIPVisionConfig(**CLIP), "dead": r"vit\..*(post_layernorm|k_proj\.bias)"}
# The last layer of two towers is not read.
OF_TOWERS = {
    "vision_config": TOWERS,
    "dead": r"vit\.(dino|siglip)\.(.*\.k_proj\.bias|.*\.layers?\.1\.|.*layernorm\.|.*mask_token|.*\.key\.bias)",
}


def _visual(text: Case, vision: dict = OF_CLIP, **top_fields) -> Case:
    top = {
        "text_config": text.name,
        "vision_config": vision["vision_config"],
        "image_token_id": IMAGE_ID,
        "grid_size": 2,
        **top_fields,
    }
    return Case(
        f"visual-{text.name}" + "".join(f"-{value}" for value in top_fields.values()),
        "visual_rwkv",
        text.fields,
        top,
        images=True,
        float32_states=text.float32_states,
        other_type=text.other_type,
        state_sizes=text.state_sizes,
        dead=vision["dead"],
        wrong=text.wrong,
    )


def _variant(base: Case, name: str, **fields) -> Case:
    return replace(base, name=f"{base.name}-{name}", fields={**base.fields, **fields}, state_sizes=None)


BASE = (EAGLE, FINCH, GOOSE, DEEP_EMBED, AVEY, RAVEN, GECKO, AVEY_B)
# Every second block of the Finch case reads images backward.
VISUAL = (_visual(EAGLE), _visual(FINCH), _visual(GOOSE, OF_TOWERS))

WHOLE_TEXT = {"layers": [1], "num_heads": 3, "num_kv_heads": 1, "use_rope": False}
TWO_KINDS = [{"layers": [1], "num_heads": 2, "window_size": 9, "rope_theta": 500.0}, {**WHOLE_TEXT, "layers": [2]}]
RAVEN_PURE = replace(_variant(RAVEN, "pure", attn=None), layer_kinds=1)
RAVEN_FULL = _variant(RAVEN, "full", attn=WHOLE_TEXT)
RAVEN_BOTH = replace(_variant(RAVEN, "both", attn=TWO_KINDS, num_hidden_layers=4), layer_kinds=3)
DEEP_EMBED_A = replace(_variant(DEEP_EMBED, "a", dea_size=None), growing=False, float32_states=("wkv",))
RAVEN_SWA = replace(_variant(RAVEN, "swa", attn=None, router="swa"), layer_kinds=1)
# Other fields, or other inputs, than those of an architecture's case.
VARIANTS = (
    DEEP_EMBED_A,
    _variant(DEEP_EMBED, "merged", num_hidden_layers=1, merged_tables=True),
    RAVEN_BOTH,
    RAVEN_SWA,
    _variant(RAVEN, "rotary-memory", attn=None, use_rope=True),
    _variant(GECKO, "chunk-1", num_layers=1, chunk_size=1, bos_token_id=None),
    _variant(GECKO, "chunk-64", num_layers=1, chunk_size=64, num_rope_heads=0),
    replace(_variant(GECKO, "many-bos", num_layers=1, chunk_size=3), bos_below=12),
)
# These read otherwise, but generate and keep a state as their base does.
READERS = (
    _visual(EAGLE, reading_order="alternate"),
    _visual(FINCH, reading_order="forward"),
    replace(RAVEN_BOTH, name="raven-both-flash", implementation="flash_attention_in_torch"),
)
# The models that come with the package: the same promises hold for trained weights.
TRAINED = tuple(
    replace(base, name=name, trained=name)
    for name, base in {
        "eagle-abc": EAGLE,
        "finch-abc": FINCH,
        "goose-abc": GOOSE,
        "avey-abc": AVEY,
        "raven-abc": RAVEN,
        "gecko-abc": GECKO,
        "avey-b-abc": AVEY_B,
    }.items()
)
CASES = {case.name: case for case in (*BASE, *VISUAL, *VARIANTS, RAVEN_FULL, RAVEN_PURE, *READERS, *TRAINED)}


def each(*cases: Case):
    """Parametrises a test by the argument `case`."""
    return pytest.mark.parametrize("case", [pytest.param(x, id=x.name) for x in cases])


def each_with(name: str, values, cases, few, others):
    """
    Parametrises a test by a case and another argument: `cases` with all of its values, which may be `pytest.param`s,
    and `others` with a few of them.
    """
    known = [x if hasattr(x, "marks") else pytest.param(x, id=str(n)) for n, x in enumerate(values)]
    chosen = [known[values.index(x)] for x in few]
    return pytest.mark.parametrize(
        ("case", name),
        [
            pytest.param(case, *x.values, id=f"{case.name}-{x.id or x.values[0]}", marks=x.marks)
            for case, x in [*itertools.product(cases, known), *itertools.product(others, chosen)]
        ],
    )


TEXT = tuple(case for case in BASE if case.causal)
GENERATING = (*TEXT, VISUAL[1])
TRAINED_GENERATING = tuple(case for case in TRAINED if case.causal)
each_case = each(*GENERATING)
each_text_case = each(*TEXT)
each_case_of_embeddings = each(*(case for case in GENERATING if case.embeddings))
each_case_and_variant = each(*GENERATING, *VARIANTS)
# One of each layout of states.
each_cache = each(*GENERATING, RAVEN_BOTH, CASES["gecko-many-bos"])
each_case_and_reader = each(*GENERATING, *VARIANTS, *READERS)
each_model_case = each(*BASE, *VISUAL[1:])
each_text_model_case = each(*BASE)
# One architecture of each kind: the others of a family are alike.
KINDS = (FINCH, GOOSE, AVEY, RAVEN, GECKO)
each_kind = each(*KINDS, VISUAL[1])
each_kind_of_text = each(*KINDS)
# All that have a class, and with it files, of their own.
each_kind_of_model = each(*KINDS, DEEP_EMBED, AVEY_B, VISUAL[2])
each_kind_of_text_model = each(*KINDS, DEEP_EMBED, AVEY_B)


def each_with_side(cases, others=()):
    """`cases` with padding on the left, on the right and anywhere, and `others` with padding anywhere."""
    sides = [pytest.param(side, id=side) for side in ("left", "right", "anywhere")]
    return each_with("side", sides, cases, sides[2:], others)


# The same by name, for tests of one architecture.

ENCODERS = {case.name: case.fields for case in BASE if not case.causal}
CAUSAL = {case.name: case.fields for case in BASE if case.causal}
LINEAR = {case.name: list(case.linear) for case in BASE}
RWKV = ("rwkv5", "rwkv6")
each_model = pytest.mark.parametrize("model_type", CAUSAL | ENCODERS)
each_causal = pytest.mark.parametrize("model_type", CAUSAL)
each_head = pytest.mark.parametrize(
    ("model_type", "auto_class"),
    [(name, auto_class) for name in CAUSAL | ENCODERS for auto_class in subquad.ARCHITECTURES[name][2]],
)
each_rwkv = pytest.mark.parametrize("model_type", RWKV)


def tiny_config(name: str, **fields):
    return CASES[name].config(**fields)


def lm_class(name: str) -> str:
    return CASES[name].lm_class


def model_class(name: str, auto_class: str | None = None):
    return CASES[name].model_class(auto_class)


def tiny_model(name: str, auto_class: str | None = None, seed: int = 0, **fields):
    return CASES[name].model(auto_class, seed, **fields)


LIVELY = {"eagle": "rwkv5", "finch": "rwkv6", "goose": "rwkv7", "goose-7a": "rwkv7_deep_embed"}


def lively(name: str, **sizes):
    """Two layers of such a model, in which every parameter matters, also those that are zero at first."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 128, "num_hidden_layers": 2, **sizes}
    architecture = LIVELY.get(name, name)
    config_class = getattr(subquad, subquad.ARCHITECTURES[architecture][1])
    model = model_class(architecture)(config_class(**sizes)).eval()
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.5 if x.shape[:-1].numel() < 4 else x.shape[-1] ** -0.5)
    return model


def small_world(directory, **options):
    """A tokenizer of the kind of World, with a vocabulary of bytes and some words that it writes there."""
    path = directory / "rwkv_vocab_v20230424.txt"
    words = b"\n\n", b"User", b"Assistant", b"Hello", b" 1", b"one", b"two"
    write_vocabulary([*(bytes([byte]) for byte in range(256)), *words], path)
    return RwkvWorldTokenizerFast(str(path), **options)


# What several tests need of a case.


def each_class(case, **fields):
    """The Auto class and a tiny model of every class of an architecture."""
    for auto_class in case.auto_classes:
        yield auto_class, case.model(auto_class, **fields)


def labels_of(model, auto_class, ids):
    """Labels for any head, none for a base model."""
    if auto_class == "AutoModel":
        return {}
    if auto_class == "AutoModelForQuestionAnswering":
        return {"start_positions": torch.full((len(ids),), 1), "end_positions": torch.full((len(ids),), 3)}
    if auto_class == "AutoModelForSequenceClassification":
        return {"labels": torch.arange(len(ids)) % model.config.num_labels}
    if auto_class == "AutoModelForTokenClassification":
        return {"labels": ids % model.config.num_labels}
    return {"labels": ids.masked_fill(ids == IMAGE_ID, -100)}


def texts(case, *lengths):
    """One row of each length."""
    return [case.text(1, n, seed=n) for n in lengths]


def half_padded(case, length, padding):
    """Two rows; the first begins with padding."""
    return padded([case.text(1, length - padding), case.text(1, length, seed=1)], "left")


# Comparisons.


def gradients(case, model):
    """Clones of the gradients by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if not re.search(case.dead, name)}


def assert_all_close(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def summed_loss(model, inputs, **options):
    """The loss of one text, summed, and the number of its labels; images have none."""
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE_ID, -100)
    labels[:, 0] = -100
    return model(**inputs, labels=labels, num_items_in_batch=1, **options).loss.item(), (labels != -100).sum().item()


def _filled_up(x: torch.Tensor, shape: list[int]) -> torch.Tensor:
    more = [n for size, room in zip(x.shape[::-1], shape[::-1], strict=True) for n in (0, room - size)]
    return torch.nn.functional.pad(x, more)


def assert_same_states(cache, expected) -> None:
    """Two caches hold the same. If one of them has more room, the rest of it is zero."""
    for layer, layer_expected in zip(cache.all_layers, expected.all_layers, strict=True):
        assert layer.states.keys() == layer_expected.states.keys()
        for name, state in layer.states.items():
            other = layer_expected.states[name]
            if name in ("embeddings", "sums", "keys", "values", "memory_keys"):
                room = [max(sizes) for sizes in zip(state.shape, other.shape, strict=True)]
                state, other = (_filled_up(x, room) for x in (state, other))
            torch.testing.assert_close(state, other, atol=1e-4, rtol=1e-4)
