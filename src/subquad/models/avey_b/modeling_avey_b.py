"""Avey-B (the bidirectional reformulation of Avey, arXiv:2506.11305): ranker, layers, model, heads."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, MergeModulelist, WeightConverter
from transformers.integrations import use_kernelized_func
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from subquad_kernels import dynamic_mixing, maxsim, split_ranker, static_mixing

from ...layers import Linear, ReluSquared, embed, replaceable
from ...padding import Tokens, can_read_values
from ...saving import SavedPreTrainedModel
from .configuration_avey_b import AveyBConfig


dynamic_mixing, split_ranker, static_mixing = replaceable(dynamic_mixing, split_ranker, static_mixing)


# Rows that go through the layers at a time where no gradient is needed, so that memory does not grow with the text; on
# a CPU few, whose memory is used again and not mapped anew for every layer.
MAX_ROWS, MAX_ROWS_OF_CPU = 2**15, 2**11


@dataclass
class Text:
    """
    The tokens of a call in splits; each text (a row of the batch, or a packed document) begins with a split.

    Attributes:
        splits: embeddings, zero where there is no token: (texts, splits, chunk_size, d_embed). Texts of several
            lengths lie behind one another in a single one.
        place: place of each token of the call in all these rows, (batch * tokens); one behind the last for padding.
            None where the tokens lie as they do in the batch.
        first, end: number of the split that begins the text of each split, and of the one after its last, (1, splits);
            0 and the number of splits where None.
        longest: splits of the longest text, or more while a graph is traced.
    """

    splits: torch.Tensor
    place: torch.Tensor | None
    first: torch.Tensor | None
    end: torch.Tensor | None
    longest: int


class AveyBRanker(nn.Module):
    """Which splits each split is read with (section 3.1), and how they become a window for the layers (4.3)."""

    def __init__(self, config: AveyBConfig):
        super().__init__()
        self.config = config
        if config.compressor:
            size = config.chunk_size
            self.down_proj = nn.Parameter(torch.empty(size, (config.k + 1) * size))

    def retrieve(self, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The splits that each one retrieves, the best first: their places among the splits of all texts, and their
        weights, zero for those that are missing, on the left. (texts * splits, k or fewer) each.
        """
        config, splits = self.config, text.splits
        texts, number = splits.shape[0], torch.arange(splits.shape[1], device=splits.device)[None]
        most = min(config.k, text.longest - 1)
        if most < 1:
            return number.new_zeros(texts * splits.shape[1], 0), splits.new_zeros(texts * splits.shape[1], 0)
        scores = None
        if config.bidirectional_ranker:
            end = torch.full_like(number, splits.shape[1]) if text.end is None else text.end
            own = torch.eye(splits.shape[1], dtype=torch.bool, device=splits.device)
            scores = maxsim(splits, splits, end, text.first).masked_fill(own, float("-inf"))
        index, weights, _ = split_ranker(
            *(splits, splits, most + 1, number, text.first),
            normalization=config.score_normalization,
            order="score",
            scores=scores,
        )
        index = index.where(index >= 0, number[..., None])  # its own one, so that no text reads another's
        index = index + splits.shape[1] * torch.arange(texts, device=splits.device)[:, None, None]
        return index.flatten(0, 1), weights.flatten(0, 1)

    def forward(self, current: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """
        Windows (n, context_size, d_embed) for splits (n, chunk_size, d_embed) and those that each of them retrieved,
        weighted: (n, k or fewer, chunk_size, d_embed).
        """
        rows = torch.cat((others, current[:, None]), dim=1).flatten(1, 2)
        if not self.config.compressor:
            return F.pad(rows, (0, 0, self.config.context_size - rows.shape[1], 0))
        weights = self.down_proj[:, -rows.shape[1] :]  # what is missing on the left is zero
        window = torch.bmm(weights.expand(rows.shape[0], -1, -1), rows)  # equation 8
        return window + current if self.config.compressor_residual else window


class ScalarToVector(MergeModulelist):
    """
    `alpha`, a scalar in files and a vector of one element in a model. The base class says that it stacks what it is
    given: where transformers shards weights as it loads them, the scalar is one element, for one process.
    """

    def convert(
        self,
        input_dict: dict[str, list[torch.Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        model: PreTrainedModel,
        full_layer_name: str,
        **kwargs,
    ) -> dict[str, torch.Tensor]:
        (tensors,) = input_dict.values()
        if not tensors:  # another process has it
            alpha = model.get_parameter(full_layer_name)
            tensors = [torch.empty(0, dtype=alpha.dtype, device=alpha.device_mesh.device_type)]
        return {target_patterns[0]: tensors[0].reshape(-1)}  # a file may hold a vector, of a state dict

    @property
    def reverse_op(self) -> ConversionOps:
        return VectorToScalar()


class VectorToScalar(ConversionOps):
    """The other way round, to save it."""

    def convert(
        self,
        input_dict: dict[str, list[torch.Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs,
    ) -> dict[str, torch.Tensor]:
        ((vector,),) = input_dict.values()
        return {target_patterns[0]: vector.reshape(())}

    @property
    def reverse_op(self) -> ConversionOps:
        return ScalarToVector()


# Once more where a copy of this file, in a repository, is loaded too.
register_checkpoint_conversion_mapping(
    AveyBConfig.model_type, [WeightConverter(".alpha", ".alpha", [ScalarToVector()])], overwrite=True
)


def _load_scalar(layer: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, *args) -> None:
    """For `load_state_dict`, which a Trainer gives what `save_pretrained` wrote."""
    if (name := f"{prefix}alpha") in state_dict and state_dict[name].dim() == 0:
        state_dict[name] = state_dict[name][None]


@use_kernelized_func([dynamic_mixing, split_ranker, static_mixing])
class AveyBLayer(GradientCheckpointingLayer):
    """A layer of the neural processor (section 3.2), either static or dynamic (section 4.2)."""

    def __init__(self, config: AveyBConfig, dynamic: bool):
        super().__init__()
        self.config = config
        features, self.width = config.expansion_factor * config.d_embed, config.tail_size // 2
        self.norm = nn.RMSNorm(config.d_embed, eps=config.eps)
        self.enricher = Linear(config.d_embed, features)
        self.activation = F.gelu if config.hidden_act == "gelu" else ReluSquared.apply
        self.spatial_proj = None if dynamic else nn.Parameter(torch.empty(config.context_size, config.context_size))
        self.fuser = Linear(features - self.width, config.d_embed)
        # A scalar, as a vector of one element: FSDP shards nothing that has no axis.
        self.alpha = nn.Parameter(torch.empty(1)) if config.residual_gain else None
        self.register_load_state_dict_pre_hook(_load_scalar)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Windows (n, context_size, d_embed)."""
        features = self.activation(self.enricher(self.norm(x)))  # equation 1
        inplace = not torch.is_grad_enabled()
        if self.spatial_proj is None:  # equations 5 to 7
            norm, eps = self.config.similarity_norm, self.config.eps
            features = dynamic_mixing(features, self.width, normalization=norm, eps=eps, inplace=inplace)
        else:  # equation 4
            features = static_mixing(features, self.spatial_proj, self.width, inplace=inplace)
        # Flat, because torch adds the bias in a pass of its own to the product of a three-dimensional view.
        out = self.fuser(features.flatten(0, 1)).view(x.shape)  # equation 3
        return x + out if self.alpha is None else torch.addcmul(out, self.alpha, x)


class AveyBPreTrainedModel(SavedPreTrainedModel):
    config: AveyBConfig
    config_class = AveyBConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["AveyBLayer"]
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module is not getattr(self, "lm_head", None):
            init.kaiming_uniform_(module.weight, a=5**0.5)  # the default of nn.Linear
            if module.bias is not None:
                bound = module.in_features**-0.5
                init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, nn.Linear | nn.Embedding):
            init.xavier_normal_(module.weight)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, AveyBRanker) and self.config.compressor:
            init.xavier_normal_(module.down_proj)
        elif isinstance(module, AveyBLayer):
            if module.spatial_proj is not None:
                init.xavier_normal_(module.spatial_proj)
            if module.alpha is not None:
                init.ones_(module.alpha)


class AveyBModel(AveyBPreTrainedModel):
    """The ranker and the neural processor, without a head."""

    def __init__(self, config: AveyBConfig):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.d_embed)
        self.ranker = AveyBRanker(config)
        self.layers = nn.ModuleList(AveyBLayer(config, dynamic) for dynamic in config.dynamic_layers)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def set_input_embeddings(self, new_embeddings: nn.Embedding) -> None:
        self.embed = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        """
        Args:
            input_ids: (batch, length) token ids. There is no limit to the length.
            attention_mask: (batch, length), 0 where a token is padding, before or after a row's text.
            position_ids: (batch, length); read only to find where packed documents begin (a position that does not
                follow on the one before), and not while a graph is traced: `torch.compile` and export need
                `cu_seqlens`. They have no other influence.
            inputs_embeds: (batch, length, d_embed), in place of `input_ids`.
            cu_seqlens: (documents + 1), the borders of documents packed into one row; also as `cu_seq_lens_q`, the
                name that transformers' collators have for it.

        Returns:
            last_hidden_state (batch, length, d_embed) and hidden_states (embeddings and the output of every layer),
            where padding is zero.

        Raises:
            ValueError: before any work, where an argument does not fit; the message names it.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x = embed(self.get_input_embeddings(), self.config, input_ids, inputs_embeds)
        cu_seqlens = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
        batch, length, width = x.shape
        tokens = Tokens(batch, length, x.device, attention_mask, position_ids, cu_seqlens)
        embeddings = x = tokens.erase(x)
        ragged = tokens.mask is not None or tokens.cu_seqlens is not None
        text = self._read_ragged(x, tokens) if ragged else self._read(x)

        size, layers = self.config.chunk_size, self.layers[: self.config.num_hidden_layers]
        states: list[list[torch.Tensor]] = [[] for _ in layers]
        splits, retrieved = text.splits.flatten(0, 1), self.ranker.retrieve(text)
        rows = MAX_ROWS_OF_CPU if x.device.type == "cpu" else MAX_ROWS
        # A graph that is traced would hold the layers once for each step.
        whole = torch.is_grad_enabled() or torch.compiler.is_compiling()
        step = splits.shape[0] if whole else max(rows // self.config.context_size, 1)
        for current, index, weights in zip(*(x.split(step) for x in (splits, *retrieved)), strict=True):
            x = self.ranker(current, splits[index] * weights[..., None, None].to(splits.dtype))
            for layer, outputs in zip(layers, states, strict=True):
                x = layer(x)
                if output_hidden_states or layer is layers[-1]:
                    outputs.append(x[:, -size:].contiguous())

        hidden_states = []
        for parts in states if output_hidden_states else states[-1:]:
            x = torch.cat([part.flatten(0, 1) for part in parts])
            if text.place is None:
                x = x.view(batch, -1, width)[:, :length]
            else:
                x = F.pad(x, (0, 0, 0, 1))[text.place.to(x.device)].view(batch, length, width)
            hidden_states.append(x)
        return BaseModelOutput(
            last_hidden_state=hidden_states[-1],
            hidden_states=(embeddings, *hidden_states) if output_hidden_states else None,
        )

    def _read(self, x: torch.Tensor) -> Text:
        size = self.config.chunk_size
        splits = F.pad(x, (0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))
        return Text(splits, None, None, None, splits.shape[1])

    def _read_ragged(self, x: torch.Tensor, tokens: Tokens) -> Text:
        """Lays the rows without their padding, or the packed documents, behind one another."""
        size, device = self.config.chunk_size, x.device
        x = x.flatten(0, 1)
        if tokens.mask is not None:
            lengths = tokens.mask.sum(1)
            document = torch.arange(tokens.batch, device=device).repeat_interleave(tokens.length)
            offset = tokens.mask.cumsum(1).flatten() - 1
        else:
            borders, step = tokens.cu_seqlens.long(), torch.arange(x.shape[0], device=device)
            lengths = borders.diff()
            document = torch.searchsorted(borders[1:], step, right=True)
            offset = step - borders[document]
        numbers = -(-lengths // size)  # in splits
        ends = numbers.cumsum(0)
        begins = ends - numbers

        # While a graph is traced, as many splits as there are at most, whatever the lengths.
        splits, longest = (x.shape[0] + lengths.shape[0] * (size - 1)) // size, -(-tokens.length // size)
        if can_read_values(ends):
            splits, longest = torch.stack((ends[-1], numbers.max())).clamp_min(1).tolist()
        place = begins[document] * size + offset
        if tokens.mask is not None:
            place = place.where(tokens.mask.flatten(), splits * size)
        laid = x.new_zeros(splits * size + 1, x.shape[1]).index_copy(0, place, x)[:-1]
        number = torch.arange(splits, device=device)
        document = torch.searchsorted(ends, number, right=True).clamp_max(lengths.shape[0] - 1)
        return Text(laid.view(1, splits, size, -1), place, begins[None, document], ends[None, document], longest)


class AveyBForMaskedLM(AveyBPreTrainedModel):
    """Avey-B with the head that tells masked tokens: the embeddings themselves, unless they are not tied."""

    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: AveyBConfig):
        super().__init__(config)
        self.model = AveyBModel(config)
        self.ln_f = nn.RMSNorm(config.d_embed, eps=config.eps) if config.final_norm else None
        self.lm_head = Linear(config.d_embed, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        """
        Args:
            labels: (batch, length) ids to predict; -100 is ignored. Other arguments: see [`AveyBModel`].

        Returns:
            loss where `labels` are given, logits (batch, length, vocabulary), hidden_states.
        """
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, return_dict=True, **kwargs)
        x = outputs.last_hidden_state
        logits = self.lm_head(x if self.ln_f is None else self.ln_f(x))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class AveyBForSequenceClassification(AveyBPreTrainedModel):
    """Avey-B with a classifier of whole texts, which reads the mean of their tokens."""

    accepts_loss_kwargs = False  # as in SequenceClassificationHead

    def __init__(self, config: AveyBConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        width = config.d_embed
        self.model = AveyBModel(config)
        # All of it under the one name by which PEFT knows what is to be trained beside an adapter.
        self.classifier = nn.Sequential(
            *(Linear(width, 2 * width), nn.GELU(), Linear(2 * width, 2 * width), nn.GELU(), Linear(2 * width, width)),
            nn.Dropout(config.classifier_dropout),
            Linear(width, config.num_labels),
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        """
        Args:
            labels: (batch) class ids, or targets of a regression, or (batch, classes) of a multi-label problem
                (`config.problem_type`). `position_ids` have no influence. Other arguments: see [`AveyBModel`].

        Returns:
            loss where `labels` are given, logits (batch, `num_labels`), hidden_states.
        """
        if kwargs.get("cu_seqlens") is not None or kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError("`cu_seqlens`: a classifier reads one text a row, not packed documents.")
        outputs = self.model(input_ids, attention_mask, None, inputs_embeds, return_dict=True, **kwargs)
        x = outputs.last_hidden_state
        total = x.sum(1, dtype=torch.promote_types(x.dtype, torch.float32))  # padding is zero
        if attention_mask is None:
            mean = total / x.shape[1]
        else:
            real = (attention_mask[:, -x.shape[1] :] != 0).sum(1, keepdim=True)
            mean = total / real.clamp_min(1).to(x.device)
        logits = self.classifier(mean.to(x.dtype))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class AveyBForTokenClassification(AveyBPreTrainedModel):
    """Avey-B with a classifier of each token."""

    def __init__(self, config: AveyBConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = AveyBModel(config)
        self.classifier = nn.Sequential(
            *(Linear(config.d_embed, config.d_embed), nn.Tanh(), nn.Dropout(config.classifier_dropout)),
            Linear(config.d_embed, config.num_labels),
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs,
    ) -> TokenClassifierOutput:
        """
        Args:
            labels: (batch, length) class ids; -100 is ignored. Other arguments: see [`AveyBModel`].

        Returns:
            loss where `labels` are given, logits (batch, length, `num_labels`), hidden_states.
        """
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, return_dict=True, **kwargs)
        logits = self.classifier(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, config=self.config, **kwargs)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class AveyBForQuestionAnswering(AveyBPreTrainedModel):
    """Avey-B with the head that tells where in a passage an answer begins and ends."""

    def __init__(self, config: AveyBConfig):
        super().__init__(config)
        self.model = AveyBModel(config)
        self.qa_outputs = Linear(config.d_embed, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs,
    ) -> QuestionAnsweringModelOutput:
        """
        Args:
            start_positions, end_positions: (batch) the first and the last token of the answer. `position_ids` have no
                influence. Other arguments: see [`AveyBModel`].

        Returns:
            loss where both positions are given, start_logits and end_logits (batch, length), the lowest number of
            their dtype where a token is padding; hidden_states.
        """
        if kwargs.get("cu_seqlens") is not None or kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError("`cu_seqlens`: an answer is looked for in one text a row, not in packed documents.")
        outputs = self.model(input_ids, attention_mask, None, inputs_embeds, return_dict=True, **kwargs)
        logits = self.qa_outputs(outputs.last_hidden_state)
        if attention_mask is not None:
            padding = (attention_mask[:, -logits.shape[1] :] == 0)[..., None].to(logits.device)
            logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
        start_logits, end_logits = logits.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start_logits, end_logits=end_logits, hidden_states=outputs.hidden_states
        )


__all__ = [
    "AveyBForMaskedLM",
    "AveyBForQuestionAnswering",
    "AveyBForSequenceClassification",
    "AveyBForTokenClassification",
    "AveyBModel",
    "AveyBPreTrainedModel",
]
