"""The descriptor of VisualRWKV."""

from ..architecture import AdapterTargets, Architecture, Costs, Serving, Support
from ..rwkv5.architecture import RWKV5
from ..rwkv6.architecture import RWKV6
from ..rwkv7.architecture import RWKV7


TEXT = {architecture.model_type: architecture for architecture in (RWKV5, RWKV6, RWKV7)}
# The language models behind CLIP's ViT-L/14 for images of 336 x 336: section 10.2 of "Eagle and Finch" has the first
# two, the others were published later. Goose is behind three towers.
PUBLISHED = (
    *("eagle-1.5b", "eagle-3b", "finch-1.6b", "finch-3b", "finch-7b"),
    *("goose-0.1b", "goose-0.4b", "goose-1.5b"),
)
# Also the last parts of names in the text models but not in the towers or the projection.
OF_ATTENTION, OF_ATT = (
    [f"{mixer}.{name}" for name in architecture.adapter_targets.projections]
    for mixer, architecture in (("attention", RWKV5), ("att", RWKV7))
)


def describe(config) -> list[str]:
    sides = " and ".join(
        f"{side} x {side}" for side in dict.fromkeys(shape[1] for shape in config.image_shapes.values())
    )
    text = TEXT[config.text_config.model_type].describe(config.text_config)
    return [*text, f"images of {sides} in {config.num_image_tokens} tokens"]


def costs(config, parameters: int) -> Costs:
    """
    State and FLOPs of the language model for a token of the text. The towers and the projection, which only process
    images, count only as parameters.
    """
    text = TEXT[config.text_config.model_type]
    return text.costs(config.text_config, text.count_parameters(config.text_config))


VISUAL_RWKV = Architecture(
    model_type="visual_rwkv",
    folder="visual_rwkv",
    title="VisualRWKV",
    summary="CLIP's vision tower in front of Eagle or Finch, or three towers in front of Goose",
    config="VisualRwkvConfig",
    heads={
        "AutoModel": "VisualRwkvModel",
        "AutoModelForMultimodalLM": "VisualRwkvForConditionalGeneration",
        "AutoModelForImageTextToText": "VisualRwkvForConditionalGeneration",
    },
    processor="VisualRwkvProcessor",
    describe=describe,
    costs=costs,
    adapter_targets=AdapterTargets(
        projections=[
            *OF_ATTENTION,
            *("feed_forward.key", "feed_forward.receptance", "feed_forward.value"),
            *OF_ATT,
            *("ffn.key", "ffn.value"),
        ],
        **{
            name: list(dict.fromkeys(getattr(RWKV5.adapter_targets, name) + getattr(RWKV7.adapter_targets, name)))
            for name in ("scaled", "feed_forward", "norms")
        },
    ),
    recipe=RWKV5.recipe,  # section 10.2 has none of its own; the towers are frozen
    vllm=Serving(refusal="this plug-in has no processor of images for it"),
    support=Support(
        checkpoints="`.pth` of the trainer",
        parity="a plain implementation in float64; the authors' code (7.00)",
        state="constant",
        dtypes="yes (states in float32)",
        tensor_parallel="not tested",
        export="not tested",
        pipelines="image-text-to-text",
        serving="not tested",
        lm_eval="not tested",
        adapters="LoRA",
        trainers="`Trainer`",
        distributed="not tested",
        quantization="not tested",
    ),
    float_layers=("vit", "proj"),  # the frozen towers, and the projection of their output
    presets={
        f"visual-{name}": {"text_config": {"model_type": model_type, **text.presets[name]}}
        for model_type, text in TEXT.items()
        for name in text.presets
        if name in PUBLISHED
    },
)

__all__ = ["VISUAL_RWKV"]
