"""Avey-B (the bidirectional reformulation of Avey, arXiv:2506.11305): ranker, layers, model, heads."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
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

from subquad_kernels import dynamic_mixing, matmul, maxsim, split_ranker, static_mixing
from subquad_kernels.tracing import can_read_values

from ...hub.saving import SavedPreTrainedModel
from ...modeling.arguments import checks_arguments
from ...modeling.layers import (
    Linear,
    chosen_states,
    labelled_loss,
    read_tokens,
    relu_squared,
    replaceable,
    zero_without_labels,
)
from .configuration_avey_b import AveyBConfig
from .loading_avey_b import load_scalar
from .positions_avey_b import Text, read_text


dynamic_mixing, split_ranker, static_mixing = replaceable(dynamic_mixing, split_ranker, static_mixing)


# Maximum number of rows that go through the layers together if no gradient is needed, so that memory does not grow
# with the text. Fewer on a CPU: their memory is reused instead of being mapped anew for every layer.
MAX_ROWS, MAX_ROWS_OF_CPU = 2**15, 2**11


class AveyBRanker(nn.Module):
    """Selects the splits that each split is read with (section 3.1), and makes windows from them (4.3)."""

    def __init__(self, config: AveyBConfig):
        super().__init__()
        self.config = config
        if config.compressor:
            size = config.chunk_size
            self.down_proj = nn.Parameter(torch.empty(size, (config.k + 1) * size))

    def retrieve(self, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The splits that each one retrieves, the best first, (texts * splits, k or fewer): their index among the splits
        of all texts, and their weights. Missing splits come first, with the weight 0.
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
            scores = maxsim(queries=splits, splits=splits, number=end, first=text.first)
            scores = scores.masked_fill(own, float("-inf"))
        index, weights, _ = split_ranker(
            queries=splits,
            splits=splits,
            k=most + 1,
            number=number,
            first=text.first,
            normalization=config.score_normalization,
            order="score",
            scores=scores,
        )
        index = index.where(index >= 0, number[..., None])  # the split itself, so that no text reads another's
        index = index + splits.shape[1] * torch.arange(texts, device=splits.device)[:, None, None]
        return index.flatten(0, 1), weights.flatten(0, 1)

    def forward(self, current: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """
        Windows (n, context_size, d_embed) for the splits `current` (n, chunk_size, d_embed) and the splits they
        retrieved, times their weights, `others` (n, k or fewer, chunk_size, d_embed).
        """
        rows = torch.cat((others, current[:, None]), dim=1).flatten(1, 2)
        if not self.config.compressor:
            return F.pad(rows, (0, 0, self.config.context_size - rows.shape[1], 0))
        weights = self.down_proj[:, -rows.shape[1] :]  # the rows of missing splits, on the left, are zero
        window = matmul(weights.expand(rows.shape[0], -1, -1), rows)  # equation 8
        return window + current if self.config.compressor_residual else window


@use_kernelized_func([dynamic_mixing, split_ranker, static_mixing])
class AveyBLayer(GradientCheckpointingLayer):
    """A layer of the neural processor (section 3.2), either static or dynamic (section 4.2)."""

    def __init__(self, config: AveyBConfig, dynamic: bool):
        super().__init__()
        self.config = config
        features, self.width = config.expansion_factor * config.d_embed, config.tail_size // 2
        self.norm = nn.RMSNorm(config.d_embed, eps=config.eps)
        self.enricher = Linear(config.d_embed, features)
        self.activation = F.gelu if config.hidden_act == "gelu" else relu_squared
        self.spatial_proj = None if dynamic else nn.Parameter(torch.empty(config.context_size, config.context_size))
        self.fuser = Linear(features - self.width, config.d_embed)
        # A scalar in files; a vector here, because FSDP cannot shard a tensor without dimensions.
        self.alpha = nn.Parameter(torch.empty(1)) if config.residual_gain else None
        self.register_load_state_dict_pre_hook(load_scalar)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Windows (n, context_size, d_embed)."""
        features = self.activation(self.enricher(self.norm(x)))  # equation 1
        inplace = not torch.is_grad_enabled()
        if self.spatial_proj is None:  # equations 5 to 7, and 2
            features = dynamic_mixing(
                features=features,
                width=self.width,
                normalization=self.config.similarity_norm,
                eps=self.config.eps,
                inplace=inplace,
            )
        else:  # equations 4 and 2
            features = static_mixing(features=features, v=self.spatial_proj, width=self.width, inplace=inplace)
        # Flat, because with three dimensions torch would add the bias in a separate pass.
        out = self.fuser(features.flatten(0, 1)).view(x.shape)  # equation 3
        return x + out if self.alpha is None else torch.addcmul(out, self.alpha, x)


class AveyBPreTrainedModel(SavedPreTrainedModel):
    config: AveyBConfig
    config_class = AveyBConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["AveyBLayer"]
    _input_embed_layer = "embed"
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

    @checks_arguments
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        """
        Args:
            input_ids: (batch, length) token ids. There is no limit to the length.
            attention_mask: (batch, length), 0 for padding, which may be anywhere in a row.
            position_ids: (batch, length). They only show where packed documents begin: at a position that does not
                follow the one before. They are not read while a graph is traced: `torch.compile` and export need
                `cu_seqlens`.
            inputs_embeds: (batch, length, d_embed), instead of `input_ids`.
            cu_seqlens: (documents + 1), the boundaries of documents packed into one row; also as `cu_seq_lens_q`, its
                name in transformers' collators.

        Returns:
            last_hidden_state (batch, length, d_embed), and hidden_states (the embeddings and the output of every
            layer); both are zero for padding.

        Raises:
            ValueError: before any work, if an argument does not fit; the message names it.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x, tokens = read_tokens(
            self.config,
            self.get_input_embeddings(),
            input_ids,
            inputs_embeds,
            attention_mask,
            position_ids,
            cu_seqlens,
        )
        x = tokens.zero_padding(x)
        text = read_text(x, tokens, self.config.chunk_size)
        splits, retrieved = text.splits.flatten(0, 1), self.ranker.retrieve(text)

        layers = self.layers[: self.config.num_hidden_layers]
        outputs: list[list[torch.Tensor]] = [[] for _ in layers]
        step = self._windows_per_pass(splits)
        for current, index, weights in zip(*(part.split(step) for part in (splits, *retrieved)), strict=True):
            h = self.ranker(current, splits[index] * weights[..., None, None].to(splits.dtype))
            for layer, parts in zip(layers, outputs, strict=True):
                h = layer(h)
                if output_hidden_states or layer is layers[-1]:
                    parts.append(h[:, -self.config.chunk_size :].contiguous())

        hidden_states = [text.in_batch(parts) for parts in (outputs if output_hidden_states else outputs[-1:])]
        return BaseModelOutput(
            last_hidden_state=hidden_states[-1],
            hidden_states=chosen_states((x, *hidden_states), output_hidden_states),
        )

    def _windows_per_pass(self, splits: torch.Tensor) -> int:
        """Number of windows per pass through the layers. A traced graph would hold the layers once per pass."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return splits.shape[0]
        rows = MAX_ROWS_OF_CPU if splits.device.type == "cpu" else MAX_ROWS
        return max(rows // self.config.context_size, 1)


class AveyBForMaskedLM(AveyBPreTrainedModel):
    """Avey-B with a head that predicts masked tokens: the embeddings, unless they are not tied."""

    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: AveyBConfig):
        super().__init__(config)
        self.model = AveyBModel(config)
        self.ln_f = nn.RMSNorm(config.d_embed, eps=config.eps) if config.final_norm else None
        self.lm_head = Linear(config.d_embed, config.vocab_size, bias=False)
        self.post_init()

    @checks_arguments
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
            loss if `labels` are given, logits (batch, length, vocabulary), hidden_states.
        """
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, return_dict=True, **kwargs)
        x = outputs.last_hidden_state
        logits = self.lm_head(x if self.ln_f is None else self.ln_f(x))
        loss = labelled_loss(self, labels, logits=logits, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class AveyBForSequenceClassification(AveyBPreTrainedModel):
    """Avey-B with a classifier of texts, which reads the mean of their tokens."""

    accepts_loss_kwargs = False  # as in SequenceClassificationHead

    def __init__(self, config: AveyBConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        width = config.d_embed
        self.model = AveyBModel(config)
        # One module: PEFT finds the head to train by this name.
        self.classifier = nn.Sequential(
            *(Linear(width, 2 * width), nn.GELU(), Linear(2 * width, 2 * width), nn.GELU(), Linear(2 * width, width)),
            nn.Dropout(config.classifier_dropout),
            Linear(width, config.num_labels),
        )
        self.post_init()

    @checks_arguments
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
            labels: (batch) class ids, or regression targets, or (batch, classes) of a multi-label problem
                (`config.problem_type`). `position_ids` have no influence. Other arguments: see [`AveyBModel`].

        Returns:
            loss if `labels` are given, logits (batch, `num_labels`), hidden_states.
        """
        if kwargs.get("cu_seqlens") is not None:
            raise ValueError("`cu_seqlens`: a classifier reads one text per row, not packed documents.")
        outputs = self.model(input_ids, attention_mask, None, inputs_embeds, return_dict=True, **kwargs)
        x = outputs.last_hidden_state
        total = x.sum(1, dtype=torch.promote_types(x.dtype, torch.float32))  # padding is zero
        if attention_mask is None:
            mean = total / x.shape[1]
        else:
            real = (attention_mask[:, -x.shape[1] :] != 0).sum(1, keepdim=True)
            mean = total / real.clamp_min(1).to(x.device)
        logits = self.classifier(mean.to(x.dtype))
        loss = labelled_loss(self, labels, logits=logits, pooled_logits=logits, config=self.config, **kwargs)
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

    @checks_arguments
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
            loss if `labels` are given, logits (batch, length, `num_labels`), hidden_states.
        """
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, return_dict=True, **kwargs)
        logits = self.classifier(outputs.last_hidden_state)
        loss = labelled_loss(self, labels, logits=logits, config=self.config, **kwargs)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


def _check_answers(padding: torch.Tensor, **positions: torch.Tensor | None) -> None:
    """Raises a ValueError if a position (batch) points at padding (batch, length), whose logits are meaningless."""
    for name, found in positions.items():
        if found is None or not can_read_values(found):
            continue
        index = found.to(padding.device).reshape(-1, 1).clamp_min(0)  # as the loss does
        there = index < padding.shape[1]
        wrong = padding.gather(1, index * there) & there
        if wrong.any():
            row = wrong.int().argmax().item()
            raise ValueError(
                f"`{name}` of row {row} is {index[row].item()}, which is padding. An answer, or the token that means "
                "that there is none, must be in the text."
            )


class AveyBForQuestionAnswering(AveyBPreTrainedModel):
    """Avey-B with a head that finds where in a passage an answer begins and ends."""

    def __init__(self, config: AveyBConfig):
        super().__init__(config)
        self.model = AveyBModel(config)
        self.qa_outputs = Linear(config.d_embed, 2)
        self.post_init()

    @checks_arguments
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
            start_positions, end_positions: (batch) the first and the last token of the answer. If there is none, both
                point at a token outside the passage, such as CLS. Positions after the end are ignored.
                `position_ids` have no influence. Other arguments: see [`AveyBModel`].

        Returns:
            loss if both positions are given; start_logits and end_logits (batch, length), for padding the lowest
            number of their dtype; hidden_states.

        Raises:
            ValueError: if a position points at padding.
        """
        if kwargs.get("cu_seqlens") is not None:
            raise ValueError("`cu_seqlens`: an answer is looked for in one text per row, not in packed documents.")
        outputs = self.model(input_ids, attention_mask, None, inputs_embeds, return_dict=True, **kwargs)
        logits = self.qa_outputs(outputs.last_hidden_state)
        if attention_mask is not None:
            padding = (attention_mask[:, -logits.shape[1] :] == 0)[..., None].to(logits.device)
            logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
            _check_answers(padding[..., 0], start_positions=start_positions, end_positions=end_positions)
        start_logits, end_logits = logits.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
            last = torch.maximum(start_positions, end_positions)
            loss = zero_without_labels(loss, last.clamp_max(logits.shape[1]), logits.shape[1])
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
