"""
The descriptor of an architecture: all that the tools of this package need.

Each folder in `models/` has an `architecture.py` with one [`Architecture`]; `models/__init__.py` collects them. The
tools (registration, presets, adapters, optimizer recipes, `subquad info`, model cards, state tuning, the tables of the
README) iterate over that registry, so no tool names an architecture. A modeling file never imports its descriptor, and
a descriptor imports neither torch nor transformers: it names classes, and [`Architecture.load`] imports them.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

MODELS = Path(__file__).parent
# The Auto classes of models that generate text: causal, and one that also reads images.
GENERATING = ("AutoModelForCausalLM", "AutoModelForImageTextToText")
# The Auto class of a whole model is the first of these that it has. Rerankers and embedding models have the last two.
LM_AUTO_CLASSES = (*GENERATING, "AutoModelForMaskedLM", "AutoModelForSequenceClassification", "AutoModel")


@dataclass(frozen=True)
class AdapterTargets:
    """
    The modules that PEFT's methods adapt by default, as the last parts of their names.

    Attributes:
        projections: the linear layers of mixers and feed-forward networks, for LoRA and nearly all other methods.
            Adapters on all of them come closest to full training, as QLoRA found, and PEFT lists all of RWKV-4's too.
            Raven's router and decay are left out, like the routers of mixtures of experts. So are the low-rank
            maps of Finch and Goose, which add little (docs/how-to/fine-tune.md has the measurement).
        scaled: layers whose output (IA)³ scales: keys and values, or what takes their place.
        feed_forward: layers whose input (IA)³ scales: the last projection of a feed-forward network.
        norms: layers for the tuning of norms.
    """

    projections: list[str]
    scaled: list[str]
    feed_forward: list[str]
    norms: list[str]


@dataclass(frozen=True)
class OptimizerRecipe:
    """
    The optimizer settings of a paper.

    Attributes:
        weight_decay: for matrices: the weights of linear layers and embeddings, and those named in `matrices`. All
            other parameters (biases, norms, decays, mixing coefficients, moving averages) have none.
        betas, eps: Adam's; None if the paper does not give them.
        matrices: names of parameters that are matrices but do not belong to a linear layer.
        rates: parameter name to the factor on its learning rate.
        peak, warmup, decay: of the learning rate in pretraining, as text. They belong to a run, so set them in
            `TrainingArguments`.
    """

    weight_decay: float
    betas: tuple[float, float] | None = None
    eps: float | None = None
    matrices: tuple[str, ...] = ()
    rates: dict[str, float] = field(default_factory=dict)
    peak: str = ""
    warmup: str = ""
    decay: str = ""


@dataclass(frozen=True)
class TunableState:
    """
    A recurrent state whose initial value state tuning can train.

    Attributes:
        module: class name of the recurrence.
        name: name of its state in the cache.
        shape: the state's shape without the batch, given the configuration (of the language model).
        scale: size of the largest numbers in a trained state. The trained parameter is multiplied by it, so that the
            usual learning rates of adapters fit.
        transposed: whether files of other packages (`time_state`) hold its transpose; None if there are no such files.
    """

    module: str
    name: str
    shape: "Callable[[PreTrainedConfig], tuple[int, ...]]"
    scale: float
    transposed: bool | None = None


@dataclass(frozen=True)
class FusedModel:
    """
    The parts of a model, by their names in [`subquad_kernels.c.fused_blocks.FusedBlock`] and among
    [`subquad_kernels.fused_step.BLOCKS`].

    Attributes:
        kind: kind of block.
        blocks, first_norm, last_norm: their paths in the base model. Some have no first norm.
        classes: path in a block, "" for the block itself, to the name of the class whose `forward` these
            replace.
        layers: name to the path of a linear layer in a block, such as `"attention.key"`.
        norms: name to the path of a norm with a weight and a bias, or of one with a weight alone.
        parameters: name to the path of a parameter.
        options: a block's other arguments, such as its number of heads. It raises a ValueError if a block computes
            something else than these do.
        optional: names of layers, norms and parameters that some blocks do not have.
        states: names of a block's states, in the order in which the blocks take them.
        start: of models whose cache or blocks need more than x, `start(base model, x, input_ids, tokens, cache)`,
            with the output x of the embeddings or the first norm. It returns the input of the first block, the
            positions for the cache or None, tensors by name for the blocks, and what the last norm takes besides the
            output of the blocks.
    """

    kind: str
    blocks: str
    first_norm: str | None
    last_norm: str
    classes: dict[str, str]
    layers: dict[str, str]
    norms: dict[str, str]
    parameters: dict[str, str]
    options: "Callable[[nn.Module], dict[str, Any]]"
    optional: tuple[str, ...] = ()
    states: tuple[str, ...] = ("attention_shift", "feed_forward_shift", "wkv")
    start: "Callable[..., tuple[Any, Any, dict[str, Any], tuple]] | None" = None


@dataclass(frozen=True)
class Costs:
    """
    Costs of a token; see [`subquad.hub.info.ModelInfo`] for the units. None if a number does not apply.

    Attributes:
        fixed_state: elements that are always float32, and elements in the model's dtype, kept between two tokens
            independent of the length of the text.
        growing_state: elements, in the model's dtype, kept for every token of the text.
        inference_flops, training_flops: floating-point operations for one token.
    """

    inference_flops: int | None = None
    training_flops: int | None = None
    fixed_state: tuple[int, int] | None = None
    growing_state: int | None = None


@dataclass(frozen=True)
class Support:
    """
    Supported features of an architecture, as cells of the README's tables.

    Attributes:
        checkpoints: the files that load or convert.
        parity: the reference that the logits match to 1e-4.
        state: growth of the state with the text.
        dtypes: the cell for float32, bfloat16 and float16.
        tensor_parallel: what tensor parallelism splits.
        pipelines: the pipelines that were tested.
        export: what `torch.export` and ONNX can express.
        adapters: PEFT.
        serving: `transformers serve`.
        lm_eval: lm-eval.
        trainers: `Trainer`, accelerate and TRL.
        distributed: data parallelism.
        quantization: torchao and bitsandbytes.
        state_tuning: "yes", or why there is none.
    """

    checkpoints: str
    parity: str
    state: str
    dtypes: str
    tensor_parallel: str
    export: str
    pipelines: str = "generation, classification, features"
    serving: str = "yes"
    lm_eval: str = "yes"
    adapters: str = "yes"
    trainers: str = "yes"
    distributed: str = "yes"
    quantization: str = "yes"
    state_tuning: str = "yes"


@dataclass(frozen=True)
class Serving:
    """
    How vLLM serves an architecture.

    Attributes:
        path: `"MODULE:CLASS"` of the class in `subquad_vllm` that runs it; None if vLLM cannot serve it.
        hybrid: the same for models with softmax attention in some blocks.
        refusal: why vLLM cannot serve it.
    """

    path: str | None = None
    hybrid: str | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Embedder:
    """
    The embedding model that a model has in it or is. Its embeddings and states depend on nothing else of the model.

    Attributes:
        weights: beginnings of the names of its weights.
        fields: the configuration's fields that it depends on, besides sizes.
    """

    weights: tuple[str, ...]
    fields: tuple[str, ...]


@dataclass(frozen=True)
class Architecture:
    """
    One architecture.

    Attributes:
        model_type: the `model_type` of its configurations.
        folder: its folder in `models/`, which also ends the names of its modules: `modeling_FOLDER.py`.
        title: display name.
        summary: one line about it.
        config: name of the configuration class.
        heads: Auto class to model class, by name.
        describe: the sizes that characterise a configuration, for the report of `subquad convert`.
        costs: state size and FLOPs, given a configuration and its number of parameters.
        adapter_targets: see [`AdapterTargets`].
        recipe: see [`OptimizerRecipe`].
        support: see [`Support`].
        presets: name of a published size to its configuration fields.
        exports: other public names to the modules in the folder that define them, such as the cache.
        other_types: other values of `model_type` that other packages write for this model. If transformers also has a
            model of such a type, the fields by which the files differ.
        processor: name of the class behind `AutoProcessor`, for models that read images.
        tunable_state: see [`TunableState`]; None if state tuning cannot train the state.
        onnx: the exported functions that ONNX can express: "prefill", "decode".
        float_layers: the linear layers that stay in floating point if the others get 8-bit weights, as parts of their
            names: routers, and layers that compute decays.
        other_names: the module in the folder whose import makes `from_pretrained` read other packages' tensor names;
            None if there is none.
        fused: see [`FusedModel`]; None if no step computes such blocks as a whole.
        vllm: see [`Serving`].
        inspection: the module in the folder that shows the memory's content after a text, for `subquad
            inspect-memory`; None if there is none.
        embedder: see [`Embedder`]; None if the model makes no embeddings of texts.
        files: patterns of further files in its directories, which its repositories have too.
    """

    model_type: str
    folder: str
    title: str
    summary: str
    config: str
    heads: dict[str, str]
    describe: "Callable[[PreTrainedConfig], list[str]]"
    costs: "Callable[[PreTrainedConfig, int], Costs]"
    adapter_targets: AdapterTargets
    recipe: OptimizerRecipe
    support: Support
    vllm: Serving
    presets: dict[str, dict[str, Any]] = field(default_factory=dict)
    exports: dict[str, str] = field(default_factory=dict)
    other_types: dict[str, dict[str, Any]] = field(default_factory=dict)
    processor: str | None = None
    tunable_state: TunableState | None = None
    onnx: tuple[str, ...] = ()
    other_names: str | None = None
    fused: FusedModel | None = None
    inspection: str | None = None
    embedder: Embedder | None = None
    files: tuple[str, ...] = ()
    float_layers: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """The import path of the folder."""
        return f"subquad.models.{self.folder}"

    @property
    def card(self) -> Path:
        """The text about the architecture for model cards."""
        return MODELS / self.folder / "card.md"

    @cached_property
    def public_names(self) -> dict[str, str]:
        """Every public class and function to the module that defines it."""
        names = {self.config: f"configuration_{self.folder}"}
        names |= dict.fromkeys(self.heads.values(), f"modeling_{self.folder}")
        if self.processor:
            names[self.processor] = f"processing_{self.folder}"
        return {name: f"{self.package}.{module}" for name, module in (names | self.exports).items()}

    def path(self, name: str) -> str:
        """The import path of one of the public names."""
        return f"{self.public_names[name]}.{name}"

    @property
    def lm_auto_class(self) -> str:
        """Name of the Auto class of the language model; of a model without one, of the whole model."""
        return next(name for name in LM_AUTO_CLASSES if name in self.heads)

    @property
    def is_encoder(self) -> bool:
        """Whether the language model fills masks and generates no text."""
        return self.lm_auto_class == "AutoModelForMaskedLM"

    @property
    def generates(self) -> bool:
        """Whether the model generates text."""
        return self.lm_auto_class in GENERATING

    def load(self, name: str) -> Any:
        """One of the public names, imported."""
        return getattr(importlib.import_module(self.public_names[name]), name)

    def load_inspection(self) -> ModuleType:
        """The module `inspection`, imported."""
        return importlib.import_module(f"{self.package}.{self.inspection}")

    @property
    def config_class(self) -> "type[PreTrainedConfig]":
        """The configuration class, imported."""
        return self.load(self.config)

    @property
    def lm_class(self) -> type:
        """The class of the language model, imported."""
        return self.load(self.heads[self.lm_auto_class])

    def count_parameters(self, config: "PreTrainedConfig") -> int:
        """Number of parameters of the language model of a configuration, which is made on the meta device."""
        import torch

        with torch.device("meta"):
            model = self.lm_class(config)
        return sum(parameter.numel() for parameter in model.parameters())


__all__ = ["AdapterTargets", "Architecture", "Costs", "OptimizerRecipe", "Support", "TunableState"]
