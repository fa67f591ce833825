"""Configuration of Raven."""

import math
from typing import Any

from huggingface_hub.dataclasses import strict

from ...modeling.configuration_checks import CheckedConfig, check_configuration
from ...modeling.layer_types import layer_types_property
from ...modeling.tensor_parallel import divides_heads, plan_heads, plan_property
from ...modeling.versions import CACHE_NAMES


CHOICES = {
    "router": ("raven", "gsa", "swa"),
    "router_type": ("lin", "mlp"),
    "router_score": ("sigmoid", "softmax"),
    "decay_type": ("Mamba2", "GLA"),
    "feature_map": ("swish", "relu"),
    "hidden_act": ("swish", "silu"),
}
# The fields of `attn` and their defaults.
ATTENTION = {
    "layers": None,
    "num_heads": None,
    "num_kv_heads": None,
    "window_size": None,
    "qkv_bias": False,
    "use_rope": True,
    "rope_theta": 10000.0,
}


@strict
class RavenConfig(CheckedConfig):
    r"""
    Configuration of a Raven model ("Raven: High-Recall Sequence Modeling with Sparse Memory Routing"), with the field
    names of the published `config.json` files, some of which spell `expand_k` and `expand_v` as `exapnd_k` and
    `exapnd_v`.

    Args:
        vocab_size: number of token ids.
        hidden_size: width of the model, d.
        num_hidden_layers: number of blocks.
        num_heads: heads of a block, each with a memory of its own.
        num_kv_heads: heads of keys, values and routers, each shared by `num_heads / num_kv_heads` heads of queries;
            `num_heads` if None.
        num_slots: slots of a head's memory, M; the size of a head's keys if None.
        topk: slots that a token is written to, K.
        expand_k: width of all heads' queries (and keys), as a multiple of the model's width.
        expand_v: width of all heads' values, as a multiple of the model's width.
        feature_map: activation of queries and keys: `"swish"` (SiLU) or `"relu"`.
        use_output_gate: whether each head's output is normalized separately and gated (section 6.1).
        decay_type: `"Mamba2"`, a decay for each head (equation 19), or `"GLA"`, one for each slot.
        gate_logit_normalizer: divisor of the log decays of `"GLA"`, the temperature.
        router: choice of a token's slots (table 1). `"raven"`: the `topk` slots that a learned router scores highest;
            `"gsa"`: all slots, as in Gated Slot Attention, with the decay of `"GLA"`; `"swa"`: one after the other,
            each overwritten, as in sliding window attention over `num_slots` tokens.
        router_type: `"lin"`, a linear projection, or `"mlp"`, two with a GELU between them (section 6.2.3).
        router_score: `"sigmoid"` (equation 20) or `"softmax"` (equation 22).
        router_scale: divisor of the router's weights, the paper's alpha: 1 at 400M, 4 at 800M.
        bias_rmm: whether a bias takes part in the choice of slots, not in their weights; training leaves it alone.
        add_gumbel_noise: whether training adds Gumbel noise to the router's logits (equation 23).
        use_rope, rope_theta: rotary embeddings of the queries and keys of slot memories.
        attn: layers with softmax attention instead of slot memories; None if there are none: `layers` (their
            numbers), `num_heads`, `num_kv_heads`, `window_size` (None: no limit), `qkv_bias`, `use_rope` (False:
            NoPE), `rope_theta`; or a list of such dictionaries.
        hidden_ratio, intermediate_size: width of the MLP; if None, two thirds of `hidden_ratio * hidden_size`,
            rounded up to a multiple of 256.
        hidden_act: `"swish"`, the activation of values, outputs, gates and MLP.
        norm_eps: epsilon of every norm.
        initializer_range: standard deviation of the weights of a new model.
    """

    model_type = "raven"
    attribute_map = {"num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads"}
    keys_to_ignore_at_inference = list(CACHE_NAMES)
    base_model_fsdp_plan = {
        "embeddings": "free_full_weight",
        "layers.*": "free_full_weight",
        "norm": "keep_full_weight",
    }

    # Of flash-linear-attention.
    ignored_fields = (
        "attn_mode",
        "conv_bias",
        "conv_size",
        "fuse_cross_entropy",
        "fuse_linear_cross_entropy",
        "fuse_norm",
        "fuse_swiglu",
        "max_position_embeddings",
        "share_conv_kernel",
        "use_l2warp",
    )

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_heads: int = 4
    num_kv_heads: int | None = None
    num_slots: int | None = 64
    topk: int = 32
    expand_k: float | int = 1
    expand_v: float | int = 1
    feature_map: str = "swish"
    use_output_gate: bool = False
    decay_type: str = "Mamba2"
    gate_logit_normalizer: float | int = 8
    router: str = "raven"
    router_type: str = "lin"
    router_score: str = "sigmoid"
    router_scale: float | int = 1
    bias_rmm: bool = False
    add_gumbel_noise: bool = True
    use_rope: bool = False
    rope_theta: float | int = 10000.0
    attn: dict[str, Any] | list[dict[str, Any]] | None = None
    hidden_ratio: float | int | None = 4
    intermediate_size: int | None = None
    hidden_act: str = "swish"
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True

    def __post_init__(self, **kwargs):
        for name in ("expand_k", "expand_v"):
            misspelled = f"exapnd_{name[-1]}"
            if misspelled in kwargs:
                value = kwargs.pop(misspelled)
                if getattr(self, name) not in (1, value):
                    raise ValueError(f"`{name}` ({getattr(self, name)}) and `{misspelled}` ({value}) differ.")
                setattr(self, name, value)
        self._complete()
        super().__post_init__(**kwargs)

    @property
    def only_values(self) -> dict[str, tuple[tuple[Any, ...], str]]:
        """As in [`CheckedConfig`]. Other models of flash-linear-attention have these fields."""
        return super().only_values | {
            "attnres_block_size": ((None, 0), "residual attention is not supported"),
            "clamp_max": ((None,), "decays are not clamped"),
            "clamp_min": ((None,), "decays are not clamped"),
            "elementwise_affine": ((True,), "norms without weights are not supported"),
            "use_norm": ((True,), "outputs without a norm are not supported"),
            "use_short_conv": ((False,), "convolutions are not supported"),
        }

    def _complete(self) -> None:
        """Fills in fields that depend on others."""
        if self.num_kv_heads is None:
            self.num_kv_heads = self.num_heads
        if self.num_slots is None and self.num_heads > 0:
            self.num_slots = self.head_k_dim
            self.topk = min(self.topk, self.num_slots)
        if self.intermediate_size is None and self.hidden_ratio is not None:
            self.intermediate_size = -(-int(self.hidden_size * self.hidden_ratio * 2 / 3) // 256) * 256
        if isinstance(self.attn, dict):
            self.attn = _complete(self.attn)
        elif self.attn is not None:
            self.attn = [_complete(spec) for spec in self.attn]

    @plan_property
    def base_model_tp_plan(self) -> dict[str, str]:
        """
        How tensor parallel processes share the model: by heads, if their number divides the number of heads of every
        layer and nothing reads all heads: outputs without a gate have one norm, a router of two layers is not split.
        """
        raven, lone = self.router == "raven", self.router != "raven" or self.router_type == "lin"
        mamba, gla = (self.router != "swa" and self.decay_type == name for name in ("Mamba2", "GLA"))
        into = {"q_proj": True, "k_proj": True, "v_proj": True, "o_gate_proj": self.use_output_gate}
        into |= {"a_proj": mamba, "f_proj": gla, "r_proj": raven and lone}
        own = {"A_log": mamba, "dt_bias": mamba, "r_bias": raven and self.bias_rmm}
        parameters = {f"{name}_norm": "replicated_with_grad_allreduce" for name in "qko"}
        parameters |= {name: "colwise" for name, there in own.items() if there}
        heads = [spec[name] for spec in self.attention_specs for name in ("num_heads", "num_kv_heads")]
        split = divides_heads(self, self.num_heads, self.num_kv_heads, *heads) and self.use_output_gate and lone
        return {
            "embeddings": "embedding_rowwise",
            **plan_heads("layers.*.attn", [name for name in into if into[name]], "o_proj", parameters, split),
            "layers.*.mlp.gate_proj": "colwise",
            "layers.*.mlp.up_proj": "colwise",
            "layers.*.mlp.down_proj": "rowwise",
        }

    @property
    def key_dim(self) -> int:
        """Width of the queries of all heads."""
        return round(self.hidden_size * self.expand_k)

    @property
    def value_dim(self) -> int:
        """Width of the values of all heads."""
        return round(self.hidden_size * self.expand_v)

    @property
    def head_k_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.key_dim // self.num_heads

    @property
    def head_v_dim(self) -> int:
        """Width of a head's values."""
        return self.value_dim // self.num_heads

    def attention(self, layer_idx: int) -> dict[str, Any] | None:
        """The entry of `attn` for a layer that is softmax attention, None for a slot memory."""
        return next((spec for spec in self.attention_specs if layer_idx in spec["layers"]), None)

    @property
    def attention_specs(self) -> list[dict[str, Any]]:
        """The entries of `attn` that have layers."""
        specs = [self.attn] if isinstance(self.attn, dict) else self.attn or []
        return [spec for spec in specs if spec["layers"] != []]

    @layer_types_property
    def layer_types(self) -> list[str]:
        """Layer types reported to transformers. Attention over a window counts as linear, like a slot memory."""
        whole = [layer for spec in self.attention_specs if spec["window_size"] is None for layer in spec["layers"]]
        return ["full_attention" if i in whole else "linear_attention" for i in range(self.num_hidden_layers)]

    def validate_architecture(self):
        """Raises a ValueError if sizes or variants do not fit together, before any tensor is created."""
        check_configuration(self, ("hidden_size", "num_hidden_layers", "num_heads", "vocab_size"))
        for name in ("expand_k", "expand_v"):
            width = self.hidden_size * getattr(self, name)
            if not 0 < width < math.inf or abs(width - round(width)) > 1e-6 or round(width) % self.num_heads:
                raise ValueError(
                    f"`{name}` ({getattr(self, name)}) times `hidden_size` ({self.hidden_size}) must be a multiple of "
                    f"`num_heads` ({self.num_heads})."
                )
        self._complete()
        sizes = ("num_kv_heads", "num_slots", "topk", "intermediate_size")
        positive = ("router_scale", "gate_logit_normalizer", "norm_eps", "rope_theta", "initializer_range")
        check_configuration(self, sizes, positive)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {getattr(self, name)!r}.")
        if self.router == "raven" and self.topk > self.num_slots:
            raise ValueError(f"`topk` must be at most `num_slots` ({self.num_slots}), got {self.topk}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"`num_heads` ({self.num_heads}) must be a multiple of `num_kv_heads` ({self.num_kv_heads})."
            )
        if self.use_rope and self.head_k_dim % 2:
            raise ValueError(f"`use_rope` needs heads of an even size, got {self.head_k_dim}.")
        if self.router == "gsa" and self.decay_type != "GLA":
            raise ValueError(f"`router` 'gsa' needs `decay_type` 'GLA', got {self.decay_type!r}.")
        taken = []
        for spec in self.attention_specs:
            self._validate_attention(spec)
            taken += spec["layers"]
        for layer in taken:
            if taken.count(layer) > 1:
                raise ValueError(f"`attn` has layer {layer} twice.")

    def _validate_attention(self, spec: dict[str, Any]):
        if unknown := sorted(set(spec) - set(ATTENTION)):
            raise ValueError(f"`attn` may have {', '.join(ATTENTION)}; got {', '.join(unknown)}.")
        layers, heads, kv_heads, window = (
            spec[name] for name in ("layers", "num_heads", "num_kv_heads", "window_size")
        )
        if not isinstance(layers, list) or any(
            type(i) is not int or not 0 <= i < self.num_hidden_layers for i in layers
        ):
            raise ValueError(
                f"`attn['layers']` must be a list of numbers from 0 to {self.num_hidden_layers - 1}, got {layers}."
            )
        if type(heads) is not int or heads < 1 or self.hidden_size % heads:
            raise ValueError(f"`attn['num_heads']` must divide `hidden_size` ({self.hidden_size}), got {heads}.")
        if type(kv_heads) is not int or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"`attn['num_kv_heads']` must divide `attn['num_heads']` ({heads}), got {kv_heads}.")
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(f"`attn['window_size']` must be at least 1, or None, got {window}.")
        for name in ("qkv_bias", "use_rope"):
            if type(spec[name]) is not bool:
                raise ValueError(f"`attn[{name!r}]` must be true or false, got {spec[name]!r}.")
        if spec["use_rope"]:
            if self.hidden_size // heads % 2:
                raise ValueError(f"`attn['use_rope']` needs heads of an even size, got {self.hidden_size // heads}.")
            theta = spec["rope_theta"]
            if type(theta) not in (int, float) or not 0 < theta < math.inf:
                raise ValueError(f"`attn['rope_theta']` must be above 0 and finite, got {theta!r}.")


def _complete(spec: dict[str, Any]) -> dict[str, Any]:
    """An entry of `attn` with every field."""
    spec = {**ATTENTION, **spec}
    if isinstance(spec["layers"], tuple):
        spec["layers"] = list(spec["layers"])
    if spec["num_kv_heads"] is None:
        spec["num_kv_heads"] = spec["num_heads"]
    return spec


__all__ = ["RavenConfig"]
