"""The published sizes, as data: preset name to model type and configuration fields."""

from typing import Any


PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    # Table 10 of "Eagle and Finch" (arXiv:2404.05892); finch-7b was published later.
    "eagle-0.4b": ("rwkv5", {"hidden_size": 1024, "num_hidden_layers": 24}),
    "eagle-1.5b": ("rwkv5", {"hidden_size": 2048, "num_hidden_layers": 24, "initializer_range": 3e-4}),
    "eagle-3b": ("rwkv5", {"hidden_size": 2560, "num_hidden_layers": 32, "initializer_range": 2e-4}),
    "eagle-7b": ("rwkv5", {"hidden_size": 4096, "num_hidden_layers": 32, "initializer_range": 1.5e-4}),
    "finch-1.6b": ("rwkv6", {"hidden_size": 2048, "num_hidden_layers": 24, "initializer_range": 3e-4}),
    "finch-3b": ("rwkv6", {"hidden_size": 2560, "num_hidden_layers": 32, "initializer_range": 2e-4}),
    "finch-7b": (
        "rwkv6",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "initializer_range": 1.5e-4,
            "lora_rank_tokenshift": 64,
            "lora_rank_decay": 128,
        },
    ),
    # Appendix A of "Don't Pay Attention" (arXiv:2506.11305).
    "avey-0.1b": ("avey", {"d_embed": 768, "n_blocks": 26}),
    "avey-0.5b": ("avey", {"d_embed": 768, "n_blocks": 104}),
    "avey-1.5b": ("avey", {"d_embed": 2048, "n_blocks": 48}),
    # The published models of "Avey-B"; its table 3 has their numbers of parameters.
    "avey-b-base": ("avey-b", {"d_embed": 768, "n_layers": 30}),
    "avey-b-large": ("avey-b", {"d_embed": 1024, "n_layers": 46}),
    # Table 2 of "Raven: High-Recall Sequence Modeling with Sparse Memory Routing". The sizes of the larger one are
    # derived: the paper has only the numbers of parameters, of Raven and of SWA, and the size of the state.
    "raven-0.4b": ("raven", {"hidden_size": 1024, "num_hidden_layers": 24, "num_slots": 256, "use_output_gate": True}),
    "raven-0.8b": (
        "raven",
        {
            "hidden_size": 1536,
            "num_hidden_layers": 21,
            "num_heads": 6,
            "num_slots": 256,
            "use_output_gate": True,
            "router_scale": 4,
        },
    ),
    # Section 4.1 of "GECKO" has depth, width, chunk and vocabulary of the larger one, the authors' code the rest. The
    # smaller one is derived: the paper has its depth, width, vocabulary and 1.3B parameters. In both z_dim is d / 4,
    # value_dim 2 d, and a head has 256 channels of z_dim; for ffn_hidden_dim 3 d is the multiple of d with which the
    # parameters, heads not tied, come closest. Its tokenizer is OLMo's, in which 50279 ends a text; the authors' code
    # adds the token that begins one.
    "gecko-1b": (
        "gecko",
        {
            "model_dim": 2048,
            "num_layers": 16,
            "num_heads": 2,
            "z_dim": 512,
            "value_dim": 4096,
            "ffn_hidden_dim": 6144,
            "vocab_size": 50304,
            "bos_token_id": 50280,
            "eos_token_id": 50279,
        },
    ),
    "gecko-7b": ("gecko", {}),
    # Section 10.1 of "Eagle and Finch": bytes of ABC notation.
    "eagle-music": (
        "rwkv5",
        {"hidden_size": 512, "num_hidden_layers": 24, "vocab_size": 128, "context_length": 1024},
    ),
}
# VisualRWKV puts CLIP's ViT-L/14, for images of 336 x 336, before one of these: section 10.2 of "Eagle and Finch" has
# the first two, the others were published later.
for _name in ("eagle-1.5b", "eagle-3b", "finch-1.6b", "finch-3b", "finch-7b"):
    _model_type, _fields = PRESETS[_name]
    PRESETS[f"visual-{_name}"] = ("visual_rwkv", {"text_config": {"model_type": _model_type, **_fields}})


def preset_config(name: str):
    """
    The configuration object of a preset.

    Raises:
        ValueError: where no preset has that name; the message lists those that exist.
    """
    if name not in PRESETS:
        raise ValueError(f"There is no preset {name!r}; the presets are {', '.join(PRESETS)}.")
    import subquad

    model_type, fields = PRESETS[name]
    return getattr(subquad, subquad.ARCHITECTURES[model_type][1])(**fields)
