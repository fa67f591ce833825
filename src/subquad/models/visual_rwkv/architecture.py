"""The descriptor of VisualRWKV."""

from ..architecture import Architecture, Costs, Serving, Support
from ..rwkv5.architecture import RWKV5
from ..rwkv6.architecture import RWKV6


TEXT = {architecture.model_type: architecture for architecture in (RWKV5, RWKV6)}
# The language models behind CLIP's ViT-L/14 for images of 336 x 336: section 10.2 of "Eagle and Finch" has the first
# two, the others were published later.
PUBLISHED = ("eagle-1.5b", "eagle-3b", "finch-1.6b", "finch-3b", "finch-7b")


def describe(config) -> list[str]:
    side = config.vision_config.image_size
    text = TEXT[config.text_config.model_type].describe(config.text_config)
    return [*text, f"images of {side} x {side} in {config.num_image_tokens} tokens"]


def costs(config, parameters: int) -> Costs:
    """
    State and FLOPs of the language model for a token of the text. The tower and the projection, which only process
    images, count only as parameters.
    """
    text = TEXT[config.text_config.model_type]
    return text.costs(config.text_config, text.count_parameters(config.text_config))


VISUAL_RWKV = Architecture(
    model_type="visual_rwkv",
    folder="visual_rwkv",
    title="VisualRWKV",
    summary="a CLIP vision tower in front of Eagle or Finch",
    config="VisualRwkvConfig",
    heads={
        "AutoModel": "VisualRwkvModel",
        "AutoModelForMultimodalLM": "VisualRwkvForConditionalGeneration",
        "AutoModelForImageTextToText": "VisualRwkvForConditionalGeneration",
    },
    processor="VisualRwkvProcessor",
    describe=describe,
    costs=costs,
    adapter_targets=RWKV5.adapter_targets,  # of the text model; the tower has no modules of these names
    recipe=RWKV5.recipe,  # section 10.2 has none of its own; the tower is frozen
    vllm=Serving(refusal="this plug-in has no processor of images for it"),
    support=Support(
        checkpoints="`.pth` of the trainer",
        parity="a plain implementation in float64",
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
    float_layers=("vit", "proj"),  # the frozen tower, and the projection of its output
    presets={
        f"visual-{name}": {"text_config": {"model_type": model_type, **text.presets[name]}}
        for model_type, text in TEXT.items()
        for name in text.presets
        if name in PUBLISHED
    },
)

__all__ = ["VISUAL_RWKV"]
