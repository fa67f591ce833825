"""What every architecture shares: checks, loading, generation, and the heads."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import GenerationConfig, PreTrainedConfig
from transformers.generation import GenerationMixin, GenerationMode
from transformers.integrations import use_kernel_forward_from_hub
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils import (
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    can_return_tuple,
    find_adapter_config_file,
    logging,
)
from transformers.utils.hub import cached_file, has_file

from subquad_kernels import linear

from .cache import RecurrentCache, check_cache
from .padding import Tokens, can_check, last_token


logger = logging.get_logger(__name__)


class Linear(nn.Linear):
    """`nn.Linear` by way of [`subquad_kernels.linear`]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class ReluSquared(torch.autograd.Function):
    """
    relu(x)², of which the result alone is kept for the backward pass: 2 relu(x) is twice its root. (In float16 squares
    of what is below 2e-4 vanish, and so does their gradient.)
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        y = x.relu().square_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return grad * y.sqrt().mul_(2)


def embed(
    embeddings: nn.Module,
    config: PreTrainedConfig,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
) -> torch.Tensor:
    """
    The embeddings that a call reads, (batch, length, width).

    Raises:
        ValueError: where not exactly one of the two is given, a shape does not fit, or an id is outside the
            vocabulary.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Exactly one of `input_ids` and `inputs_embeds` must be given.")
    width = config.hidden_size  # adapters wrap the embeddings, and have no such attribute
    if inputs_embeds is not None:
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != width or inputs_embeds.numel() == 0:
            shape = tuple(inputs_embeds.shape)
            raise ValueError(f"`inputs_embeds` must be (batch, length, {width}) with at least one token, got {shape}.")
        return inputs_embeds
    x = input_ids
    if x.dim() != 2 or x.numel() == 0:
        raise ValueError(f"`input_ids` must be (batch, length) with at least one token, got {tuple(x.shape)}.")
    if x.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`input_ids` must be int64 or int32, got {x.dtype}.")
    if can_check(x):
        low, high = torch.stack(torch.aminmax(x)).tolist()  # one wait for a GPU, not two
        if low < 0 or high >= config.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"`input_ids` holds {wrong}, but `vocab_size` is {config.vocab_size}.")
    return embeddings(input_ids)


def replaceable(*operators: Callable) -> list[Callable]:
    """
    Operators that the models of an architecture, all of them, take from a kernel repository once `use_kernels=True`
    asks for it and a mapping has their names; the package's own otherwise, and where `kernels` is not installed.
    """
    return [use_kernel_forward_from_hub(operator.__name__)(operator) for operator in operators]


class SafetensorsMixin:
    """Mixin before `PreTrainedModel`: weights come from safetensors files only, as unpickling others may run code."""

    def post_init(self) -> None:
        """
        As in transformers. In a model to be quantised the layers below the head are plain ones, as bitsandbytes'
        integration replaces no others, and would replace a head that no checkpoint has yet.
        """
        if getattr(self.config, "quantization_config", None) is not None:
            for module in self.base_model.modules():
                if type(module) is Linear:
                    module.__class__ = nn.Linear
        super().post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """
        As in transformers, with `use_safetensors=True`.

        Raises:
            ValueError: where the weights are in files that `subquad convert` makes safetensors of.
        """
        path = pretrained_model_name_or_path
        # transformers reads a file whatever `use_safetensors` says, and asks the Hub to convert others on the spot.
        if path is not None and os.path.isfile(path) and not os.fspath(path).endswith(".safetensors"):
            raise _needs_conversion(path, [path])
        if path is not None and (files := _instead_of_safetensors(path, kwargs)):
            raise _needs_conversion(path, files)
        return super().from_pretrained(path, *args, **kwargs | {"use_safetensors": True})


def pickled_weights(directory: str | os.PathLike) -> list[Path]:
    """The files of a model's weights that are not safetensors, other than what a Trainer keeps beside them."""
    files = (file for pattern in ("pytorch_model*.bin", "*.pth") for file in Path(directory).glob(pattern))
    return sorted(file for file in files if not file.name.startswith("rng_state"))


def _instead_of_safetensors(path: str | os.PathLike, kwargs: dict) -> list[Path]:
    """What a directory, or a repository on the Hub, has for weights where it has none in safetensors."""
    subfolder = kwargs.get("subfolder") or ""
    if os.path.isdir(path):
        directory = Path(path) / subfolder
        return [] if any(directory.glob("*.safetensors*")) else pickled_weights(directory)
    names = ("revision", "token", "cache_dir", "local_files_only")
    hub = {name: kwargs[name] for name in names if kwargs.get(name) is not None}

    def there(name):
        return has_file(path, f"{subfolder}/{name}" if subfolder else name, **hub)

    infix = f".{kwargs['variant']}" if kwargs.get("variant") else ""
    try:
        if there(f"model{infix}.safetensors") or there(f"model.safetensors.index{infix}.json"):
            return []
        return [Path("DIRECTORY") / name for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME) if there(name)]
    except (OSError, ValueError):  # transformers says what is wrong
        return []


def _needs_conversion(path: str | os.PathLike, files: list[str | os.PathLike]) -> ValueError:
    names = ", ".join(sorted(os.path.basename(file) for file in files))
    source = files[0] if len(files) == 1 else os.path.dirname(files[0])
    return ValueError(
        f"{path}: the weights are in {names}, and only safetensors files are loaded, as unpickling others may run "
        f"code. `subquad convert {source} OUT` makes a directory that loads."
    )


class SelfContainedMixin:
    """Mixin before `PreTrainedModel`: what is pushed to the Hub loads where this package is not installed."""

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        *args,
        self_contained: bool = False,
        **kwargs,
    ) -> None:
        """
        As in transformers. With `self_contained` the code that the model needs goes along: the directory loads with
        `trust_remote_code=True` where this package is not installed, and without remote code where it is. What was
        loaded from such a directory is always saved so, because its configuration names the code. Of a model with an
        adapter the adapter alone is saved, as ever.
        """
        if self._brings_its_code():
            super().save_pretrained(save_directory, is_main_process, state_dict, push_to_hub, *args, **kwargs)
            return
        hub = {name: kwargs.pop(name) for name in _PUSH_ARGUMENTS if name in kwargs}
        super().save_pretrained(save_directory, is_main_process, state_dict, False, *args, **kwargs)
        if not is_main_process:
            return
        if self_contained or getattr(self.config, "auto_map", None) is not None:
            try:
                from subquad.hub import add_model_code
            except ImportError as error:
                raise ImportError("`self_contained=True` needs the package subquad.") from error
            add_model_code(save_directory)
        if push_to_hub:
            repo_id = hub.pop("repo_id", None) or os.path.basename(os.path.normpath(save_directory))
            self.push_to_hub(repo_id, source=save_directory, **hub)

    def push_to_hub(self, repo_id: str, **kwargs):
        """
        As in transformers, with its arguments. The code that the model needs goes along, a card where there is none,
        and the license of the code. The tokenizer has a `push_to_hub` of its own.

        Returns:
            the URL of the commit.
        """
        try:
            from subquad.push import push_model
        except ImportError:  # this file is a copy in a repository
            return super().push_to_hub(repo_id, **kwargs)
        if self._brings_its_code():
            return super().push_to_hub(repo_id, **kwargs)
        return push_model(self, repo_id, **kwargs)

    def _brings_its_code(self) -> bool:
        """
        Whether transformers itself takes along the code, of a model that was loaded with it, or no model is saved, of
        one with an adapter.
        """
        return self.is_remote_code() or getattr(self, "_hf_peft_config_loaded", False)


_PUSH_ARGUMENTS = (
    "repo_id",
    "token",
    "private",
    "commit_message",
    "commit_description",
    "create_pr",
    "revision",
    "tags",
)


class RecurrentModelMixin(SafetensorsMixin, SelfContainedMixin):
    """What the base class of every model with a state adds to `PreTrainedModel`."""

    cache_class: type[RecurrentCache] = RecurrentCache

    def __init__(self, config: PreTrainedConfig, *args, **kwargs):
        config.validate_architecture()  # its fields may have been set since it was made
        super().__init__(config, *args, **kwargs)

    def new_cache(self, static: bool = False, max_cache_len: int | None = None) -> RecurrentCache:
        """
        An empty cache for this model.

        Args:
            static: see [`RecurrentCache`].
            max_cache_len: number of tokens that a static cache must have room for. A recurrent state has no limit.
        """
        return RecurrentCache(self.config, static)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs):
        """As in transformers; sizes that published configurations lack are read from the checkpoint's tensors."""
        path = pretrained_model_name_or_path
        if path is not None and hasattr(cls.config_class, "set_sizes_from_shapes"):
            hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if kwargs.get(name) is not None}
            source = _adapted_model(os.fspath(path), hub)
            if isinstance(config, PreTrainedConfig):
                config = copy.deepcopy(config)
            else:
                # A configuration would keep it, and "auto" is no dtype there.
                dtype = {name: kwargs.pop(name) for name in ("dtype", "torch_dtype") if name in kwargs}
                rest = {name: value for name, value in kwargs.items() if name not in hub}
                config, rest = cls.config_class.from_pretrained(
                    config or source, return_unused_kwargs=True, **hub, **rest
                )
                kwargs = {**hub, **dtype, **rest}
            config.set_sizes_from_shapes(_checkpoint_shapes(source, kwargs.get("variant"), hub))
        return super().from_pretrained(path, *args, config=config, **kwargs)

    def read_inputs(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        past_key_values: RecurrentCache | None,
        use_cache: bool | None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, Tokens, RecurrentCache | None, bool]:
        """
        What every forward pass begins with: the checks of its arguments, before any work. `cu_seq_lens_q` is the name
        that transformers' collators have for `cu_seqlens`; other arguments are ignored.

        Returns:
            the embeddings (batch, length, width), which of them are real and where documents begin, the cache to fill,
            if any, and whether to return it.
        """
        cu_seqlens = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        use_cache, past_key_values = self._without_cache_if_checkpointing(use_cache, past_key_values)
        x = embed(self.get_input_embeddings(), self.config, input_ids, inputs_embeds)
        tokens = Tokens(*x.shape[:2], x.device, attention_mask, position_ids, cu_seqlens)
        if past_key_values is not None:
            check_cache(past_key_values, self.config, tokens, self.cache_class)
        elif use_cache:
            past_key_values = self.new_cache()
        return x, tokens, past_key_values, use_cache

    @staticmethod
    def fill_output(x: torch.Tensor, tokens: Tokens, past_key_values: RecurrentCache | None) -> torch.Tensor:
        """
        The output of all blocks, (batch, length, width), in which padding repeats the last real token before it, also
        where an earlier call read that; it is zero where there is none.
        """
        if past_key_values is None:
            return tokens.fill(x, None)
        x = tokens.fill(x, past_key_values.after_blocks.get("output"))
        past_key_values.after_blocks.update("output", last_token(None, x), last_token, x)
        return x

    def make_output(
        self,
        x: torch.Tensor,
        tokens: Tokens,
        past_key_values: RecurrentCache | None,
        use_cache: bool,
        hidden_states: tuple[torch.Tensor, ...] | None,
    ) -> BaseModelOutputWithPast:
        """
        What the forward pass of a model ends with that keeps nothing but recurrent states: its output, x (batch,
        length, width), takes the last one's place among the hidden states, and the cache counts the tokens.
        """
        x = self.fill_output(x, tokens, past_key_values)
        if past_key_values is not None:
            past_key_values.advance(x.shape[1])
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=hidden_states and (*hidden_states[:-1], x),
        )

    def _without_cache_if_checkpointing(self, use_cache: bool, past_key_values: RecurrentCache | None):
        """
        A block that is run again in the backward pass would read its tokens into the state twice.

        Raises:
            ValueError: where a cache was given all the same.
        """
        if not (self.training and (use_cache or past_key_values is not None)):
            return use_cache, past_key_values
        if not any(getattr(module, "gradient_checkpointing", False) for module in self.modules()):
            return use_cache, past_key_values
        if past_key_values is not None:
            raise ValueError("`past_key_values` cannot be continued in training with gradient checkpointing.")
        logger.warning_once("`use_cache=True` is incompatible with gradient checkpointing: no cache is returned.")
        return False, None


_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def _adapted_model(path: str, hub: dict) -> str:
    """The model that an adapter's directory was trained on; every other path as it is."""
    adapter = find_adapter_config_file(
        path, **{name: value for name, value in hub.items() if name != "force_download"}
    )
    if adapter is None:
        return path
    with open(adapter, encoding="utf-8") as file:
        return json.load(file)["base_model_name_or_path"]


def _checkpoint_shapes(path: str, variant: str | None, hub: dict) -> dict[str, tuple[int, ...]]:
    """Shapes of the first block's tensors, read from safetensors headers; empty where there is no such file."""
    hub = {**hub, "_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}
    infix = f".{variant}" if variant else ""
    files = []
    if (single := cached_file(path, f"model{infix}.safetensors", **hub)) is not None:
        files = [single]
    elif (index := cached_file(path, f"model.safetensors.index{infix}.json", **hub)) is not None:
        with open(index, encoding="utf-8") as file:
            weight_map = json.load(file)["weight_map"]
        shards = sorted({shard for name, shard in weight_map.items() if ".blocks.0." in name})
        files = [cached_file(path, shard, **hub) for shard in shards]
    shapes = {}
    for name in files:
        with safe_open(name, framework="pt") as file:
            for key in file.keys():
                if ".blocks.0." in key:
                    shapes[key] = tuple(file.get_slice(key).get_shape())
    return shapes


class RecurrentGenerationMixin(GenerationMixin):
    """`generate` with a [`RecurrentCache`]."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # transformers decides by the class name and takes every "rwkv" for its RWKV-4, which has no cache object.
        return True

    @property
    def init_continuous_batching(self):
        """
        Not there, by which `transformers serve` tells a model that it cannot batch continuously: a recurrent state has
        no pages. It answers one request after the other then.
        """
        raise AttributeError(self.generate_batch.__doc__)

    def generate_batch(self, *args, **kwargs):
        """Continuous batching is made of pages of keys and values, which a recurrent state has not: use `generate`."""
        raise ValueError(self.generate_batch.__doc__)

    continuous_batching_context_manager = generate_batch

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict,
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ):
        implementation = generation_config.cache_implementation
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            if isinstance(cache := model_kwargs.get("past_key_values"), RecurrentCache):
                cache.reserve(max_cache_length)
        elif implementation in (None, "dynamic", "static"):
            max_cache_len = max(max_cache_length, generation_config.max_cache_len or 1)
            model_kwargs["past_key_values"] = self.new_cache(implementation == "static", max_cache_len)
            if generation_config.is_assistant:
                model_kwargs["past_key_values"].activate_past_recording()
        else:
            raise ValueError(f"`cache_implementation` {implementation!r} does not apply to a recurrent state.")

        cache = model_kwargs.get("past_key_values")
        unallocated = cache is not None and cache.is_compileable and not cache.is_initialized
        if generation_config.prefill_chunk_size and unallocated:
            # transformers compiles the reading of chunks as well, and what a compiled call allocates does not last.
            rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
            self.base_model(torch.zeros(rows, 1, dtype=torch.long, device=self.device), past_key_values=cache)
            cache.reset()

    @staticmethod
    def create_masks_for_generate(inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs):
        """
        What transformers asks for where the decoding step may be compiled: there, a mask over the tokens of earlier
        calls, one longer at every step, would be compiled again and again.
        """
        if attention_mask is None:
            return None
        # A clone, because a slice's strides grow with the mask.
        return attention_mask[:, -inputs_embeds.shape[1] :].clone(memory_format=torch.contiguous_format)


class CausalLMHead:
    """
    Mixin: next-token logits over the model at `base_model_prefix`; the class names its projection, (width,
    vocabulary), in `lm_head_name`.
    """

    lm_head_name: str

    def get_output_embeddings(self) -> nn.Module:
        return self.get_submodule(self.lm_head_name)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.set_submodule(self.lm_head_name, new_embeddings)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: RecurrentCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """
        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, output_hidden_states,
                cu_seqlens: see the base model.
            labels: (batch, length) ids to predict, shifted inside; -100 is ignored.
            logits_to_keep: logits of that many last tokens only (0: of all), or of the tokens at these indices.

        Returns:
            loss where `labels` are given, logits (batch, kept, vocabulary), past_key_values, hidden_states.
        """
        if isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise ValueError(f"`logits_to_keep` must be 0 or more, got {logits_to_keep}.")
        outputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cu_seqlens=cu_seqlens,
            logits_to_keep=logits_to_keep if isinstance(logits_to_keep, int) else 0,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.get_output_embeddings()(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            vocabulary = self.config.get_text_config().vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocabulary, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class SequenceClassificationHead:
    """Mixin: class logits of a text, read from its last token by `score`, over the model at `base_model_prefix`."""

    # The losses of regressions and of several labels are means whatever `num_items_in_batch`; `Trainer` weighs them.
    accepts_loss_kwargs = False

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: RecurrentCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> SequenceClassifierOutputWithPast:
        """
        Args:
            labels: (batch) class ids, or targets of a regression, or (batch, classes) of a multi-label problem
                (`config.problem_type`).

        Without `attention_mask`, a run of `pad_token_id` at either end of a row counts as padding. Other arguments:
        see the base model.

        Returns:
            loss where `labels` are given, logits (batch, `num_labels`), past_key_values, hidden_states.
        """
        if kwargs.get("cu_seqlens") is not None or kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError("`cu_seqlens`: a classifier reads one text a row, not packed documents.")
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            real = (input_ids != self.config.pad_token_id).int()
            attention_mask = real.cummax(1).values & real.flip(1).cummax(1).values.flip(1)
        outputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            **kwargs | {"logits_to_keep": 1, "return_dict": True},
        )
        # The base model repeats a row's last real token to its end.
        logits = self.score(outputs.last_hidden_state[:, -1])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
