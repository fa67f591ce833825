"""Information for vLLM about a model before it is built, and refusals."""

from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedConfig
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.models.config import MambaModelConfig
from vllm.platforms import current_platform
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from subquad.models import REGISTRY

from .served import hybrid_name


# Tokens of a request, prompt and answer, without `--max-model-len`. The states have no limit, but vLLM keeps a
# buffer of this length for every request.
DEFAULT_LENGTH = 32768
# Methods tested on a CPU. Most others fail late there, or leave the linear layers unchanged.
QUANTIZATION_ON_CPU = ("compressed-tensors", "gptq", "awq")


def own_config(config: PreTrainedConfig, processes: int = 1) -> PreTrainedConfig:
    """
    A copy of a configuration as an instance of our class, even if the repository brought its own, and for tensor
    parallelism in that many processes.
    """
    config = REGISTRY[config.model_type].config_class.from_dict(config.to_dict())
    if processes > 1:
        config.distributed_config = SimpleNamespace(tp_size=processes)  # what the plans of our configurations read
    return config


def attention_styles(plan: dict[str, str]) -> set[str]:
    """The styles in which a tensor parallel plan splits the queries of attention layers."""
    return {style for name, style in plan.items() if name.endswith(".attn.q_proj")}


class ServedConvertor(ModelArchConfigConvertorBase):
    """Reads the sizes in a configuration of ours."""

    def derive_max_model_len_and_key(self) -> tuple[float, str | None]:
        """No limit: `context_length` is the length of the training sequences, and a state has no limit."""
        return float("inf"), None

    def get_architectures(self) -> list[str]:
        """The names of our classes: other packages spell some differently, and some files have none."""
        heads = REGISTRY[self.hf_config.model_type].heads
        ours = {name.lower(): name for name in heads.values()}
        names = super().get_architectures() or [heads["AutoModelForCausalLM"]]
        names = [ours.get(name.lower(), name) for name in names]
        if self.attention:
            names = [hybrid_name(name) for name in names]
        self.hf_config.architectures = names  # vLLM reads them in two places
        return names

    def get_head_size(self) -> int:
        return self.hf_config.hidden_size // self.attention["num_heads"] if self.attention else super().get_head_size()

    def get_total_num_attention_heads(self) -> int:
        return self.attention["num_heads"] if self.attention else super().get_total_num_attention_heads()

    def get_total_num_kv_heads(self) -> int:
        return self.attention["num_kv_heads"] if self.attention else super().get_total_num_kv_heads()

    @property
    def attention(self) -> dict[str, Any] | None:
        """The sizes of the layers with softmax attention, which vLLM requires to be equal in all of them."""
        specs = getattr(own_config(self.hf_config), "attention_specs", None)
        if not specs:
            return None
        for name in ("num_heads", "num_kv_heads"):
            values = [spec[name] for spec in specs]
            if len(set(values)) > 1:
                raise ValueError(f"`attn[{name!r}]` must be the same in all layers, got {values}.")
        return specs[0]


class RefusedConvertor(ModelArchConfigConvertorBase):
    """Raises an error for a model that vLLM cannot serve."""

    def convert(self, supports_multimodal: bool = True):
        model_type = self.hf_config.model_type
        raise ValueError(f"vLLM cannot serve a model of type {model_type!r}: {REGISTRY[model_type].vllm.refusal}.")


class ServedConfig(MambaModelConfig):
    """Checks and completes vLLM's settings for a model of ours."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        if model_config.original_max_model_len in (None, -1):
            trained = getattr(model_config.hf_config, "max_position_embeddings", None) or 0
            model_config.max_model_len = max(trained, DEFAULT_LENGTH)
        in_file = getattr(model_config.hf_config, "quantization_config", None) or {}
        method = model_config.quantization or in_file.get("quant_method")
        method = method and method.removeprefix("auto_")  # vLLM's names for the same methods
        if method == "awq" and not in_file.get("modules_to_not_convert"):
            raise ValueError(
                "`modules_to_not_convert` must be in the `quantization_config` of a model of AWQ: the names of the "
                "linear layers that are not quantised. Otherwise vLLM takes many others for such layers."
            )
        if current_platform.is_cpu() and method not in (None, *QUANTIZATION_ON_CPU):
            allowed = " or ".join(repr(name) for name in QUANTIZATION_ON_CPU)
            raise ValueError(f"`quantization` must be {allowed} on a CPU, got {method!r}.")

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if vllm_config.speculative_config is not None:
            raise ValueError("`speculative_config` is not supported: a state cannot go back to before a draft.")
        parallel = vllm_config.parallel_config
        for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise ValueError(f"`{name}` must be 1, got {getattr(parallel, name)}.")
        config, processes = vllm_config.model_config.hf_config, parallel.tensor_parallel_size
        plan = own_config(config, processes).base_model_tp_plan
        if processes > 1 and vllm_config.model_config.is_hybrid and "colwise" not in attention_styles(plan):
            raise ValueError(
                f"`tensor_parallel_size` must be 1, got {processes}: the heads of this model cannot be split, and "
                "vLLM keeps keys and values of softmax attention only of heads that are."
            )
        super().verify_and_update_config(vllm_config)
        if vllm_config.kv_transfer_config or vllm_config.cache_config.kv_offloading_size is not None:
            from .offloading import complete_offloading  # much of vLLM, which other servers do not need

            complete_offloading(vllm_config)
