"""The base class of all served models."""

import re
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedConfig
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    SupportsLoRA,
    SupportsMambaPrefixCaching,
    SupportsQuant,
)
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix
from vllm.sequence import IntermediateTensors

from subquad.hub.loading import NameMap
from subquad.hub.weight_files import complete_sizes
from subquad.models import REGISTRY

from .configuration import own_config
from .parallel import use_vllm_layers
from .states import Blocks, BlockSlots, BlockStates, StateSizes, StepTokens


@support_torch_compile
class ServedForCausalLM(nn.Module, HasInnerState, SupportsMambaPrefixCaching, SupportsLoRA, SupportsQuant):
    """
    A language model of ours in vLLM. It has the modules of our own class, with the names of the checkpoints, except
    for vLLM's linear layers and embeddings.
    """

    # Names of the states of a block, if it keeps any.
    state_names: tuple[str, ...]
    # Whether a step can be captured in CUDA graphs.
    captured = True
    # The name map of another package, if there are such files.
    name_map: NameMap | None = None

    @classmethod
    def state_sizes(cls, config: PreTrainedConfig, dtype: torch.dtype, processes: int) -> StateSizes:
        """The states of a block in one of `processes` tensor parallel processes, in the order of `state_names`."""
        raise NotImplementedError

    @classmethod
    def has_states(cls, config: PreTrainedConfig, block: int) -> bool:
        """Whether a block keeps states in slots."""
        return True

    def run(self, x: torch.Tensor, input_ids: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        """
        The blocks and the norm after them.

        Args:
            x: embeddings, (tokens, 1, width).
            input_ids: (tokens); None if the request has embeddings instead.
            positions: positions of the tokens in their texts, (tokens).

        Returns:
            as x.
        """
        raise NotImplementedError

    @classmethod
    def get_mamba_state_copy_func(cls):
        return (get_temporal_copy_spec,) * len(cls.state_names)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        model_config, processes = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
        self.config = config = own_config(model_config.hf_config, processes)
        complete_sizes(config, model_config.model)
        architecture = REGISTRY[config.model_type]
        with torch.device("meta"):
            model = architecture.load(architecture.heads["AutoModelForCausalLM"])(config)
        self.base_name, self.head_name = model.base_model_prefix, model.lm_head_name
        self.ignored = re.compile("|".join(model._keys_to_ignore_on_load_unexpected or ["(?!)"]))
        for name, child in model.named_children():
            self.add_module(name, child)
        head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, self.head_name),
        )
        self.set_submodule(self.head_name, head)
        base_prefix = maybe_prefix(prefix, self.base_name)
        use_vllm_layers(self.base, config.base_model_tp_plan, vllm_config, base_prefix)
        if config.tie_word_embeddings:
            self.set_submodule(self.head_name, head.tie_weights(self.base.get_input_embeddings()))
        self.logits_processor = LogitsProcessor(config.vocab_size)

        sizes = self.state_sizes(config, model_config.dtype, processes)
        blocks = range(config.num_hidden_layers)
        names = [f"{base_prefix}.{i}.states" if self.has_states(config, i) else None for i in blocks]
        self.states = [name and BlockStates(vllm_config, sizes, name, self.captured) for name in names]
        self.tokens, self.blocks = StepTokens(), Blocks([name and BlockSlots(name) for name in names])

    @property
    def base(self) -> nn.Module:
        """The model without its head."""
        return self.get_submodule(self.base_name)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.base.get_input_embeddings()(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The last hidden states (tokens, width) of a flat sequence of the tokens of all requests."""
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.run(x[:, None], input_ids, positions)[:, 0]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.get_submodule(self.head_name), hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads a checkpoint's tensors, which must include every weight; returns the loaded names."""
        tied = f"{self.head_name}." if self.config.tie_word_embeddings else None

        def named():
            for name, tensor in weights:
                parts = {name: None} if self.name_map is None else self.name_map.read_name(name)
                for own, take in parts.items():
                    if not (self.ignored.search(own) or (tied and own.startswith(tied))):
                        yield own, tensor if take is None else take(tensor)

        return AutoWeightsLoader(self).load_weights(named())


def part_of(heads: int, processes: int, split: bool) -> int:
    """The number of heads in a process, for a block whose heads are split among processes or not."""
    return heads // processes if split else heads
