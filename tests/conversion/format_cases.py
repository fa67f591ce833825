"""
One case for each source format: a small checkpoint as others save it. What every format promises is checked on all of
them in `test_formats.py`; a new format joins by one entry of `CASES`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import rwkv7_deep_embed_files
import rwkv7_files
import torch
import transformers
from rwkv_files import (
    fla_tensors,
    gguf_tensors,
    hub_tensors,
    tower,
    tower_tensors,
    trainer_tensors,
    visual_tensors,
    web_tensors,
)
from safetensors.torch import save_file

import subquad
from subquad import (
    AveyBConfig,
    AveyBForMaskedLM,
    AveyConfig,
    AveyForCausalLM,
    GeckoConfig,
    GeckoForCausalLM,
    RavenConfig,
    RavenForCausalLM,
)
from subquad_conversion import rwkv6_fla, rwkv6_gguf, rwkv7_gguf, visual_rwkv7
from subquad_conversion.formats import Format


Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        format: its short name.
        model_type: of the model that it becomes.
        make: returns the tensors under the source's names, and those to be written under ours, in the same order.
        block: how the names of its last block begin in the source, up to the number.
        embeddings, head: names of the source. A source without `head` ties it to the embeddings.
        sizes: what the tensors tell.
        described: what the command line says about the sizes.
        fields: fields of the configuration that no tensor tells.
        text: name of the field that holds the language model's configuration, if it is not the whole.
        again: the format of what is written, None if that is not a source format.
        twice: a tensor that has a second name in sources of this format, and this name.
        buffers: tensors that are read but not written.
        first_part: a name of the source to the first of ours, if the tensors are not in the same order.
    """

    format: str
    model_type: str
    make: Callable[[], tuple[Tensors, Tensors]]
    block: tuple[str, int]
    embeddings: str
    head: str | None
    sizes: dict[str, Any]
    described: str
    fields: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    again: str | None = None
    twice: tuple[str, str] | None = None
    buffers: Tensors = field(default_factory=dict)
    first_part: Callable[[str], str] | None = None

    @property
    def tensors(self) -> Tensors:
        return {**_made(self)[0], **self.buffers}

    @property
    def written(self) -> Tensors:
        """The tensors under our names."""
        return dict(_made(self)[1])

    @cached_property
    def ours(self) -> dict[str, str]:
        """A name of the source to ours, the first one if there are several."""
        source, written = _made(self)
        if self.first_part is not None:
            return {name: self.first_part(name) for name in source}
        return dict(zip(source, written, strict=True))

    @property
    def last_block(self) -> str:
        prefix, number = self.block
        return f"{prefix}{number}."

    def with_text(self, **fields: Any) -> dict[str, Any]:
        """The configuration fields, with others of the language model's."""
        if self.text is None:
            return self.fields | fields
        return self.fields | {self.text: self.fields.get(self.text, {}) | fields}

    def write_file(self, path: Path, tensors: Tensors | None = None) -> Path:
        tensors = self.tensors if tensors is None else tensors
        if path.suffix == ".safetensors":
            save_file({name: x.contiguous().clone() for name, x in tensors.items()}, path)
        else:
            torch.save(tensors, path)
        return path

    def write_directory(self, path: Path, tensors: Tensors | None = None, **fields: Any) -> Path:
        """A directory with a configuration that tells what no tensor does."""
        path.mkdir()
        self.write_file(path / "model.safetensors", tensors)
        config = {"model_type": self.model_type} | self.fields | fields
        (path / "config.json").write_text(json.dumps(config))
        return path


@cache
def _make(make: Callable[[], tuple[Tensors, Tensors]]) -> tuple[Tensors, Tensors]:
    return make()


def _made(case: Case) -> tuple[Tensors, Tensors]:
    return _make(case.make)


def make_models_once(known: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that plan many conversions of the same sizes."""
    shapes, made = known.shapes, {}

    def made_once(fields):
        key = json.dumps(fields, sort_keys=True)
        if key not in made:
            made[key] = shapes(fields)
        return dict(made[key])

    monkeypatch.setattr(known, "shapes", made_once)
    monkeypatch.setattr(known, "parts", cache(known.parts))


def save(path, tensors):
    """Writes a file of tensors; returns its path."""
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


def load_whole(directory, model_type="rwkv6", **options):
    """The language model of a directory, which holds all of its tensors and no others."""
    auto_class = getattr(transformers, subquad.lm_auto_class(model_type))
    model, loading = auto_class.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(loading.values()), loading
    return model


def notes_of(report):
    return [note for note in report.notes if "tokenizer" not in note]


def perturbed(model):
    """The model with parameters of which none is zero or constant."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def without_head(model, head: str = "lm_head.weight") -> Tensors:
    """A state dict under the names of published models, which have no head and no prefix."""
    weights = model.state_dict()
    return {name.removeprefix("model."): x.contiguous() for name, x in weights.items() if name != head}


# --- Eagle, Finch, VisualRWKV ---

RWKV = {"layers": 2, "heads": 3, "head_size": 4, "vocabulary": 20, "intermediate": 16, "ranks": (2, 5)}
RWKV_SIZES = {
    "vocab_size": 20,
    "hidden_size": 12,
    "attention_hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "head_size": 4,
}
SIZES_OF = {"rwkv5": RWKV_SIZES, "rwkv6": RWKV_SIZES | {"lora_rank_tokenshift": 2, "lora_rank_decay": 5}}


def trained_rwkv(model_type: str) -> Callable[[], tuple[Tensors, Tensors]]:
    return lambda: (trainer_tensors(model_type, **RWKV), hub_tensors(model_type, **RWKV))


def published_rwkv(model_type: str) -> Callable[[], tuple[Tensors, Tensors]]:
    return lambda: (hub_tensors(model_type, **RWKV),) * 2


def fla_rwkv() -> tuple[Tensors, Tensors]:
    return fla_tensors(**RWKV), hub_tensors("rwkv6", **RWKV)


def web_rwkv(model_type: str) -> Callable[[], tuple[Tensors, Tensors]]:
    return lambda: (web_tensors(model_type, **RWKV), hub_tensors(model_type, **RWKV))


def gguf_rwkv() -> tuple[Tensors, Tensors]:
    return gguf_tensors(**RWKV), hub_tensors("rwkv6", **RWKV)


def visual_rwkv(model_type: str) -> Callable[[], tuple[Tensors, Tensors]]:
    def make():
        source = visual_tensors(model_type, tower(64, layers=2), **RWKV)
        text = [n if n == "head.weight" else f"model.{n}" for n in hub_tensors(model_type, **RWKV)]
        rest = [f"model.{name}" for name in source if not name.startswith("rwkv.")]
        return source, dict(zip([*text, *rest], source.values(), strict=True))

    return make


VISION_SIZES = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_channels": 3,
    "patch_size": 4,
    "image_size": 16,
    "num_hidden_layers": 2,
}


def rwkv_cases(model_type: str, version: str, generation: str) -> list[Case]:
    described = "2 layers of 12, 3 heads of 4, vocabulary 20."
    return [
        Case(
            f"{model_type}-trainer",
            model_type,
            trained_rwkv(model_type),
            ("blocks.", 1),
            "emb.weight",
            "head.weight",
            SIZES_OF[model_type],
            f"{version}, trainer checkpoint: {described}",
            again=f"{model_type}-hub",
        ),
        Case(
            f"{model_type}-hub",
            model_type,
            published_rwkv(model_type),
            ("rwkv.blocks.", 1),
            "rwkv.embeddings.weight",
            "head.weight",
            SIZES_OF[model_type],
            f"{version}, Hub model: {described}",
            # The quirk of published files: the size of a head in the field for their number.
            fields={"num_attention_heads": 4},
            again=f"{model_type}-hub",
        ),
        Case(
            f"{model_type}-web",
            model_type,
            web_rwkv(model_type),
            ("blocks.", 1),
            "emb.weight",
            "head.weight",
            SIZES_OF[model_type],
            f"{version}, web-rwkv's layout: {described}",
            again=f"{model_type}-hub",
        ),
        Case(
            f"visual-{model_type}",
            "visual_rwkv",
            visual_rwkv(model_type),
            ("rwkv.blocks.", 1),
            "rwkv.emb.weight",
            "rwkv.head.weight",
            {
                "vision_config": VISION_SIZES,
                "text_config": SIZES_OF[model_type] | {"model_type": model_type},
            },
            f"{generation}: 2 layers of 12, 3 heads of 4, images of 16 x 16 in 17 tokens, vocabulary 20.",
            fields={"image_token_id": 19, "vision_config": {"num_attention_heads": 2, "hidden_act": "gelu"}},
            text="text_config",
            twice=("vit.vision_model.post_layernorm.weight", "vit.post_layernorm.weight"),
        ),
    ]


# --- Goose ---

GOOSE = {"layers": 2, "heads": 3, "head_size": 4, "vocabulary": 20, "intermediate": 16, "ranks": (5, 2, 3, 7)}
# Some runtimes know no other size of heads.
WIDE_GOOSE = GOOSE | {"heads": 2, "head_size": 64}
GOOSE_RANKS = {"decay_low_rank_dim": 5, "a_low_rank_dim": 2, "v_low_rank_dim": 3, "gate_low_rank_dim": 7}


def goose_case(
    layout: str, what: str, block: str, embeddings: str, head: str, source: dict[str, Any] = GOOSE, **options
) -> Case:
    tensors = getattr(rwkv7_files, f"{layout.replace('-', '_')}_tensors")
    prefix = {"trainer": "", "web": "", "hub": "rwkv7.", "rs": "model."}.get(layout)
    unused = {} if prefix is None else {f"{prefix}{name}": torch.zeros(2, 2) for name in rwkv7_files.UNUSED}
    heads, head_size = source["heads"], source["head_size"]
    sizes = {
        "vocab_size": 20,
        "hidden_size": heads * head_size,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_heads": heads,
        "head_dim": head_size,
        **GOOSE_RANKS,
    }
    return Case(
        f"rwkv7-{layout}",
        "rwkv7",
        lambda: (tensors(**source), rwkv7_files.hub_tensors(**source)),
        (block, 1),
        embeddings,
        head,
        sizes,
        f"Goose (RWKV-7), {what}: 2 layers of {heads * head_size}, {heads} heads of {head_size}, vocabulary 20.",
        again="rwkv7-hub",
        buffers=options.pop("buffers", unused),
        **options,
    )


# The number of heads in published configurations of flash-linear-attention's layout is wrong.
FLA_FIELDS = {"num_heads": 32, "norm_eps": 1e-5, "attn": None, "value_dim": [12, 12], "fuse_norm": True}
RS_FIELDS = {"head_size": 4, "num_attention_heads": 3, "layer_norm_epsilon": 1e-5, "group_norm_epsilon": 4e-5}
GOOSE_CASES = (
    goose_case("trainer", "trainer checkpoint", "blocks.", "emb.weight", "head.weight"),
    goose_case("web", "web-rwkv's layout", "blocks.", "emb.weight", "head.weight", WIDE_GOOSE),
    goose_case("hub", "Hub model", "rwkv7.blocks.", "rwkv7.emb.weight", "head.weight"),
    goose_case(
        "fla",
        "flash-linear-attention's layout",
        "model.layers.",
        "model.embeddings.weight",
        "lm_head.weight",
        fields=FLA_FIELDS,
    ),
    goose_case("rs", "rwkv-rs's layout", "model.blocks.", "model.emb.weight", "head.weight", fields=RS_FIELDS),
    goose_case(
        "old-rs",
        "rwkv-rs's older layout",
        "model.layers.",
        "model.embed_tokens.weight",
        "lm_head.weight",
        fields=RS_FIELDS,
    ),
    goose_case(
        "gguf",
        "GGUF",
        "blk.",
        "token_embd.weight",
        "output.weight",
        WIDE_GOOSE,
        buffers={f"blk.0.time_mix_v{i}.weight": torch.zeros(2, 2) for i in (1, 2)},
        first_part=lambda name: next(iter(rwkv7_gguf.FORMAT.parts(name))),
    ),
)


def visual_goose() -> tuple[Tensors, Tensors]:
    theirs, ours = tower_tensors()
    text = rwkv7_files.trainer_tensors(**GOOSE)
    source = {f"rwkv.{name}": x for name, x in text.items()} | theirs
    written = {name if name == "head.weight" else f"model.rwkv.{name}": x for name, x in text.items()} | ours
    generator = torch.Generator().manual_seed(5)
    for name, shape in (("o_proj.weight", (12, 96)), ("ln_v.weight", (12,)), ("ln_v.bias", (12,))):
        source[f"proj.{name}"] = written[f"model.proj.{name}"] = torch.randn(shape, generator=generator)
    return source, written


VISUAL_GOOSE_CASE = Case(
    "visual-rwkv7",
    "visual_rwkv",
    visual_goose,
    ("rwkv.blocks.", 1),
    "rwkv.emb.weight",
    "rwkv.head.weight",
    {
        "vision_config": {
            "model_type": "visual_rwkv_towers",
            "dino": {
                "model_type": "dinov2_with_registers",
                "hidden_size": 32,
                "num_channels": 3,
                "patch_size": 7,
                "num_register_tokens": 2,
                "num_hidden_layers": 2,
                "image_size": 14,
                "mlp_ratio": 2,
            },
            "siglip": {
                "model_type": "siglip_vision_model",
                "hidden_size": 48,
                "num_channels": 3,
                "patch_size": 4,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "image_size": 8,
            },
            "sam": {
                "model_type": "sam_vision_model",
                "hidden_size": 24,
                "num_channels": 3,
                "patch_size": 4,
                "mlp_dim": 36,
                "output_channels": 4,
                "num_hidden_layers": 2,
                "image_size": 16,
                "num_attention_heads": 2,
                "window_size": 3,
                "global_attn_indexes": [1],
            },
        },
        "text_config": {
            "model_type": "rwkv7",
            "vocab_size": 20,
            "hidden_size": 12,
            "num_heads": 3,
            "head_dim": 4,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            **GOOSE_RANKS,
        },
    },
    "VisualRWKV-7.00 (DINOv2, SigLIP, SAM and Goose): 2 layers of 12, 3 heads of 4, images of 14 x 14 and 8 x 8 and "
    "16 x 16 in 4 tokens, vocabulary 20.",
    fields={
        "image_token_id": 19,
        "vision_config": {"dino": {"num_attention_heads": 2}, "siglip": {"num_attention_heads": 3}},
    },
    text="text_config",
    buffers={f"rwkv.{name}": torch.zeros(2, 2) for name in rwkv7_files.UNUSED}
    | {f"vit.siglip_featurizer.attn_pool.{name}": torch.zeros(2, 2) for name in ("latent", "mlp.fc1.weight")},
    first_part=lambda name: next(iter(visual_rwkv7.FORMAT.parts(name))),
)


def deep_embed_case(layout: str, what: str, attention: bool) -> Case:
    """An RWKV-7a, or an RWKV-7b with attention."""
    tensors = getattr(rwkv7_deep_embed_files, f"{layout}_tensors")
    source = GOOSE | {"attention": attention, "rank": 4, "size": 6, "low": 3}
    attends = {"dea_size": 6, "dea_rank": 3} if attention else {"dea_size": None}
    goose = next(case for case in GOOSE_CASES if case.format == f"rwkv7-{layout}")
    variant = "RWKV-7b, with one head of attention of size 6" if attention else "RWKV-7a"
    return Case(
        f"rwkv7-deep-embed-{layout}",
        "rwkv7_deep_embed",
        lambda: (tensors(**source), rwkv7_deep_embed_files.hub_tensors(**source)),
        goose.block,
        goose.embeddings,
        goose.head,
        goose.sizes | {"deep_embed_rank": 4, "merged_tables": False} | attends,
        f"Goose with DeepEmbed (RWKV-7a, 7b), {what}: 2 layers of 12, {variant}, 3 heads of 4, vocabulary 20.",
        fields={"dea_size": 6} if attention else {},
        again="rwkv7-deep-embed-hub",
        buffers=goose.buffers,
    )


DEEP_EMBED_CASES = {
    "rwkv7a-trainer": deep_embed_case("trainer", "trainer checkpoint", False),
    "rwkv7-deep-embed-trainer": deep_embed_case("trainer", "trainer checkpoint", True),
    "rwkv7-deep-embed-hub": deep_embed_case("hub", "our directory", True),
}

# --- Avey, Avey-B ---

AVEY = {"vocab_size": 30, "d_embed": 8, "n_blocks": 2, "chunk_size": 4, "k": 2, "expansion_factor": 2}
AVEY_B = {"vocab_size": 30, "d_embed": 8, "n_layers": 4, "chunk_size": 4, "k": 2, "expansion_factor": 2}
AVEY_B_VARIANTS = {
    "hub": {"residual_gain": True, "final_norm": False, "compressor": True},
    "paper": {
        "hidden_act": "relu2",
        "similarity_norm": "sum",
        "residual_gain": False,
        "final_norm": True,
        "compressor": True,
    },
}


def avey() -> tuple[Tensors, Tensors]:
    weights = without_head(perturbed(AveyForCausalLM(AveyConfig(**AVEY))))
    return weights, weights


def avey_b(variant: str) -> Tensors:
    weights = without_head(perturbed(AveyBForMaskedLM(AveyBConfig(**AVEY_B | AVEY_B_VARIANTS[variant]))))
    return {name: x[0] if name.endswith(".alpha") else x for name, x in weights.items()}  # published as scalars


def avey_b_hub() -> tuple[Tensors, Tensors]:
    weights = avey_b("hub")
    return weights, weights


def avey_b_paper() -> tuple[Tensors, Tensors]:
    """Under the names of the paper's code."""
    source, weights = {}, avey_b("paper")
    for name, x in weights.items():
        for ours, theirs in (
            (".norm.", ".rms_norm."),
            (".enricher.", ".ctxt.enricher."),
            (".spatial_proj", ".ctxt.contextualizer.spatial_proj"),
            (".fuser.", ".ctxt.fuser."),
            ("embed.", "embeddings."),
        ):
            name = name.replace(ours, theirs)
        source[name if name == "ln_f.weight" else f"base_avey_model.{name}"] = x
    return source, weights


# --- Raven, Gecko ---

RAVEN = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_slots": 6,
    "topk": 2,
    "intermediate_size": 24,
}
# Of a hybrid: layers of softmax attention in a window, and over the whole text.
WINDOW = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 5, "qkv_bias": True, "use_rope": False}
WHOLE = {"layers": [2], "num_heads": 2, "num_kv_heads": 2, "window_size": None, "rope_theta": 500.0}
RAVEN_VARIANTS = {
    "plain": {},
    "hybrid": {"router_type": "mlp", "bias_rmm": True, "decay_type": "GLA", "use_output_gate": True, "attn": WINDOW},
}
GECKO = {
    "vocab_size": 30,
    "model_dim": 16,
    "num_layers": 3,
    "num_heads": 2,
    "z_dim": 8,
    "value_dim": 12,
    "ffn_hidden_dim": 20,
    "cema_ndim": 3,
    "chunk_size": 4,
    "timenorm_num_groups": 4,
}
# Fields that no weight tells and that no model can do without.
GECKO_UNTOLD = {name: GECKO[name] for name in ("num_heads", "chunk_size", "timenorm_num_groups")}


def tiny_raven(**fields) -> RavenForCausalLM:
    return perturbed(RavenForCausalLM(RavenConfig(**RAVEN | fields)))


def tiny_gecko(**fields) -> GeckoForCausalLM:
    return perturbed(GeckoForCausalLM(GeckoConfig(**GECKO | fields)))


def gecko_buffers(config) -> Tensors:
    """What the authors' code saves beside the weights."""
    buffers = {}
    norms = [f"layers.{i}.mega.timenorm" for i in range(config.num_layers)]
    for norm in [*norms, "output.final_norm"]:
        buffers[f"{norm}.prior_count"] = torch.tensor(0)
        buffers |= {f"{norm}.prior_{name}": torch.zeros(config.timenorm_num_groups) for name in ("mean", "var")}
    pairs = config.z_dim // config.num_heads // 2
    return buffers | {"rope.freqs": config.rope_base ** (torch.arange(pairs) / -pairs)}


def raven_case(variant: str) -> Case:
    fields = RAVEN_VARIANTS[variant]
    lin = {"use_output_gate": False, "decay_type": "Mamba2", "router": "raven", "router_type": "lin"}
    memory = "3 layers of 16, 4 heads of 4 with 6 slots"
    softmax = ", softmax attention in 1 of the layers" if "attn" in fields else ""
    return Case(
        "raven",
        "raven",
        lambda: (dict(tiny_raven(**fields).state_dict()),) * 2,
        ("model.layers.", 2),
        "model.embeddings.weight",
        "lm_head.weight",
        RAVEN | lin | {"bias_rmm": False, "expand_k": 1, "expand_v": 1} | fields,
        f"Raven, published model or training checkpoint: {memory}{softmax}, vocabulary 30.",
        fields={"topk": 2} | fields,
        again="raven",
    )


def gecko() -> tuple[Tensors, Tensors]:
    weights = dict(tiny_gecko(rescale_nffn=True).state_dict())
    return {name.removeprefix("model."): x for name, x in weights.items()}, weights


# --- EmbeddingRWKV ---


def embedding_rwkv(reranker: bool = False) -> tuple[Tensors, Tensors]:
    """An embedding model, and its reranker as if both were in one file."""
    blocks = rwkv7_files.trainer_tensors(**GOOSE)
    del blocks["head.weight"]
    tensors = {f"rwkv.{name}": x for name, x in blocks.items()}
    width = GOOSE["heads"] * GOOSE["head_size"]
    draw = torch.Generator().manual_seed(1)
    for task in ("cls", "retr", "sts"):
        for name in ("fc1.weight", "fc2.weight"):
            tensors[f"head.{task}_head.{name}"] = torch.randn(width, width, generator=draw)
        tensors |= {f"head.{task}_head.norm.{name}": torch.randn(width, generator=draw) for name in ("weight", "bias")}
    if reranker:
        own = rwkv7_files.trainer_tensors(**GOOSE | {"vocabulary": 1, "ranks": (4, 3, 2, 6), "seed": 2})
        del own["head.weight"]
        own |= {
            "head.0.weight": torch.randn(width, width, generator=draw),
            "head.0.bias": torch.randn(width, generator=draw),
            "head.2.weight": torch.randn(1, width, generator=draw),
        }
        tensors |= {f"reranker.{name}": x for name, x in own.items()}
    return tensors, dict(tensors)


def embedding_case(
    kind: str, title: str, make: Callable[[], tuple[Tensors, Tensors]], more: str, unused: tuple[str, ...]
) -> Case:
    fields = {"num_hidden_layers": 2, "num_heads": 3, "head_dim": 4, "hidden_size": 12, "intermediate_size": 16}
    return Case(
        f"rwkv7-{kind}",
        f"rwkv7_{kind}",
        make,
        ("rwkv.blocks.", 1),
        "rwkv.emb.weight",
        None,
        {"vocab_size": 20, **fields, **GOOSE_RANKS, "tasks": ["cls", "retr", "sts"], "eos_token_id": 19},
        f"{title}: 2 layers of 12, 3 heads of 4{more}, vocabulary 20.",
        fields={"end_token_id": 19},
        again=f"rwkv7-{kind}",
        buffers={f"{prefix}{name}": torch.zeros(2, 2) for prefix in unused for name in rwkv7_files.UNUSED},
    )


EMBEDDING_CASES = (
    embedding_case("embedding", "EmbeddingRWKV, trainer checkpoint", embedding_rwkv, "", unused=("rwkv.",)),
    embedding_case(
        "reranker",
        "EmbeddingRWKV's reranker with its embedding model, trainer checkpoints",
        lambda: embedding_rwkv(reranker=True),
        ", a reranker of 2 layers",
        unused=("rwkv.", "reranker."),
    ),
)


CASES = {
    **{case.format: case for case in rwkv_cases("rwkv5", "Eagle (RWKV-5.2)", "VisualRWKV-5.0 (CLIP and Eagle)")},
    **{case.format: case for case in rwkv_cases("rwkv6", "Finch (RWKV-6.0)", "VisualRWKV-6.0 (CLIP and Finch)")},
    "rwkv6-fla": Case(
        "rwkv6-fla",
        "rwkv6",
        fla_rwkv,
        ("model.layers.", 1),
        "model.embeddings.weight",
        "lm_head.weight",
        SIZES_OF["rwkv6"],
        "Finch (RWKV-6.0), flash-linear-attention's layout: 2 layers of 12, 3 heads of 4, vocabulary 20.",
        fields={"proj_low_rank_dim": 2, "gate_low_rank_dim": 5, "num_heads": 3, "norm_eps": 1e-5},
        again="rwkv6-hub",
        first_part=lambda name: next(iter(rwkv6_fla.FORMAT.parts(name))),
    ),
    "rwkv6-gguf": Case(
        "rwkv6-gguf",
        "rwkv6",
        gguf_rwkv,
        ("blk.", 1),
        "token_embd.weight",
        "output.weight",
        SIZES_OF["rwkv6"],
        "Finch (RWKV-6.0), GGUF: 2 layers of 12, 3 heads of 4, vocabulary 20.",
        again="rwkv6-hub",
        first_part=lambda name: next(iter(rwkv6_gguf.FORMAT.parts(name))),
    ),
    **{case.format: case for case in GOOSE_CASES},
    "visual-rwkv7": VISUAL_GOOSE_CASE,
    **DEEP_EMBED_CASES,
    **{case.format: case for case in EMBEDDING_CASES},
    "avey": Case(
        "avey",
        "avey",
        avey,
        ("blocks.", 1),
        "wte.weight",
        None,
        AVEY | {"extended_len": 8, "context_proportion": 0.5},
        "Avey, published model or training checkpoint: 2 layers of 8, windows of 2 splits of 4, vocabulary 30.",
        fields={"chunk_size": 4},
        again="avey",
        twice=("wte.weight", "model.wte.weight"),
    ),
    "avey-b-hub": Case(
        "avey-b-hub",
        "avey-b",
        avey_b_hub,
        ("layers.", 3),
        "embed.weight",
        None,
        AVEY_B | {"context_proportion": 0.5, "layer_pattern": "interleaved"} | AVEY_B_VARIANTS["hub"],
        "Avey-B, published model or training checkpoint: 4 layers of 8, splits of 4, each read with 2 others, "
        "vocabulary 30.",
        again="avey-b-hub",
        twice=("embed.weight", "model.embed.weight"),
    ),
    "avey-b-paper": Case(
        "avey-b-paper",
        "avey-b",
        avey_b_paper,
        ("base_avey_model.layers.", 3),
        "base_avey_model.embeddings.weight",
        None,
        AVEY_B | {"context_proportion": 0.5, "layer_pattern": "interleaved"} | AVEY_B_VARIANTS["paper"],
        "Avey-B, the paper's variant: 4 layers of 8, splits of 4, each read with 2 others, vocabulary 30.",
        again="avey-b-hub",
        twice=("base_avey_model.embeddings.weight", "embeddings.weight"),
    ),
    "raven": raven_case("plain"),
    "raven-hybrid": raven_case("hybrid"),
    "gecko": Case(
        "gecko",
        "gecko",
        gecko,
        ("layers.", 2),
        "embed.weight",
        "output.output.weight",
        GECKO | {"norm_affine": True, "swiglu": True, "rescale_nffn": True, "share_emb": False},
        "Gecko, published model or training checkpoint: 3 layers of 16, 2 heads, chunks of 4, vocabulary 30.",
        fields={"chunk_size": 4},
        again="gecko",
        twice=("embed.weight", "model.embed.weight"),
        buffers=gecko_buffers(GeckoConfig(**GECKO)),
    ),
}

each_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
# The first case of each model type and language model: for what no layout changes.
_FIRST = {(x.model_type, x.text and x.sizes[x.text]["model_type"]): x for x in reversed(CASES.values())}
each_type = pytest.mark.parametrize("case", _FIRST.values(), ids=lambda case: case.format)
# Without the models that have no vocabulary head.
each_type_with_head = pytest.mark.parametrize(
    "case", [x for x in _FIRST.values() if x not in EMBEDDING_CASES], ids=lambda case: case.format
)
