"""What the methods of PEFT adapt where their configuration names no modules."""

from typing import NamedTuple


class Targets(NamedTuple):
    """
    The modules of an architecture, by the ends of their names.

    Attributes:
        projections: of mixers and feed-forward networks, for LoRA and nearly all other methods. Adapters on all of
            them come closest to training the whole model, as QLoRA found, and PEFT has all of RWKV-4's too. Left as
            they are: what tells where Raven writes and how fast it forgets, like the routers of mixtures of experts.
        scaled: what (IA)³ scales the output of: keys and values, or what is in their place.
        feed_forward: what (IA)³ scales the input of: the last projection of a feed-forward network.
        norms: for the tuning of norms.
    """

    projections: list[str]
    scaled: list[str]
    feed_forward: list[str]
    norms: list[str]


_RWKV = Targets(
    projections=["receptance", "key", "value", "gate", "output"],
    scaled=["attention.key", "attention.value"],
    feed_forward=["feed_forward.value"],
    norms=["pre_ln", "ln1", "ln_x", "ln2", "ln_out"],
)
TARGETS = {
    "rwkv5": _RWKV,
    "rwkv6": _RWKV,
    "visual_rwkv": _RWKV,  # the text model's; no name is one in the tower
    "avey": Targets(
        projections=["enricher", "fuser"],
        scaled=["enricher"],
        feed_forward=["fuser"],
        norms=["rms_norm", "ln_f"],
    ),
    "avey-b": Targets(
        projections=["enricher", "fuser"],
        scaled=["enricher"],
        feed_forward=["fuser"],
        norms=["norm", "ln_f"],
    ),
    "raven": Targets(
        projections=["q_proj", "k_proj", "v_proj", "o_gate_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        scaled=["k_proj", "v_proj"],
        feed_forward=["down_proj"],
        norms=["attn_norm", "q_norm", "k_norm", "o_norm", "g_norm", "mlp_norm", "norm"],
    ),
    "gecko": Targets(
        projections=["wz", "wv", "wr", "wh1", "wh2", "fc1", "fc2", "fc3"],
        scaled=["wz", "wv"],
        feed_forward=["fc2"],
        norms=["timenorm", "rmsnorm", "norm", "final_norm"],
    ),
}


def register() -> None:
    """Enters the targets into PEFT's tables, one a method."""
    from peft.utils import constants

    for name, table in vars(constants).items():
        if name.endswith("_TARGET_MODULES_MAPPING"):
            table.update({model_type: targets.projections for model_type, targets in TARGETS.items()})
    for model_type, targets in TARGETS.items():
        constants.TRANSFORMERS_MODELS_TO_LNTUNING_TARGET_MODULES_MAPPING[model_type] = targets.norms
        scaled = targets.scaled + targets.feed_forward
        constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING[model_type] = scaled
        constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING[model_type] = targets.feed_forward
