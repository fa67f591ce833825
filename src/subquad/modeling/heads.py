"""The heads that architectures share, as mixins."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple, logging

from subquad_kernels.tracing import can_read_values

from .arguments import checks_arguments
from .cache import RecurrentCache
from .layers import check_inputs, labelled_loss, zero_without_labels
from .padding import find_predicting
from .versions import RecurrentCausalLMOutput, RecurrentClassifierOutput, cache_of, named_cache


logger = logging.get_logger(__name__)
MISCOUNTED = (
    "There are labels that no token predicts. If `num_items_in_batch` counts them, as Trainer's does, the loss is "
    'slightly smaller than without them. Pad on the right in training (`tokenizer.padding_side = "right"`), and '
    "give the first tokens of packed texts and the placeholders of images the label -100."
)


def predicted_labels(
    labels: torch.Tensor | None,
    arguments: dict[str, Any],
    shape: tuple[int, int],
    predicting: torch.Tensor | None,
    unpredicted_id: int | None = None,
) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """
    The labels, and the other arguments of a loss, without the labels that no token predicts.

    `Trainer` counts them all in `num_items_in_batch`, because it does not know about padding. If it counts only this
    batch, they are subtracted. If it counts several batches, or the labels stay outside the model, there is a warning.

    Args:
        labels: (batch, length), not yet shifted; None if there are none.
        arguments: of the loss, maybe with `shift_labels` and `num_items_in_batch`.
        shape: batch and length of the logits.
        predicting: which tokens predict the next one, bool (batch, length); None if all do.
        unpredicted_id: a label that no token ever predicts.

    Raises:
        ValueError: if labels have another shape.
    """
    items, shifted = arguments.get("num_items_in_batch"), arguments.get("shift_labels")
    for name, x in (("labels", labels), ("shift_labels", shifted)):
        if x is not None and tuple(x.shape) != tuple(shape):
            raise ValueError(f"`{name}` must be {tuple(shape)}, as the logits, got {tuple(x.shape)}.")
    if predicting is None and (unpredicted_id is None or labels is None):
        return labels, arguments
    miscounted = None if predicting is None else ~predicting[:, 0]
    if labels is not None:
        ignored = -100 if arguments.get("ignore_index") is None else arguments["ignore_index"]
        targets = pad(labels[:, 1:], (0, 1), value=ignored) if shifted is None else shifted
        predicted = targets if unpredicted_id is None else targets.masked_fill(targets == unpredicted_id, ignored)
        if predicting is not None:
            predicted = predicted.masked_fill(~predicting.to(predicted.device), ignored)
        if shifted is None:
            labels = pad(predicted[:, :-1], (1, 0), value=ignored)
        else:
            arguments = arguments | {"shift_labels": predicted}
        if items is not None:
            items = torch.as_tensor(items, device=labels.device)
            counted, count = (targets != ignored).sum(), (predicted != ignored).sum()
            arguments = arguments | {"num_items_in_batch": torch.where(items == counted, count.clamp_min(1), items)}
            miscounted = (items != counted) & (items != count) & (count < counted)
    if items is not None and can_read_values(miscounted) and bool(miscounted.any()):
        logger.warning_once(MISCOUNTED)
    return labels, arguments


class CausalLMHead:
    """
    Mixin: next-token logits on top of the model at `base_model_prefix`. The class names its projection, (width,
    vocabulary), in `lm_head_name`.
    """

    lm_head_name: str

    def post_init(self) -> None:
        super().post_init()
        # For label smoothing, `Trainer` shifts the labels of the classes in this table. Its keys are the model types
        # of transformers, without VisualRWKV, subclasses, and classes loaded from a repository.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[type(self).__name__] = type(self).__name__

    @property
    def unpredicted_id(self) -> int | None:
        """The id of tokens that the model reads, but never predicts."""
        return None

    def get_output_embeddings(self) -> nn.Module:
        return self.get_submodule(self.lm_head_name)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.set_submodule(self.lm_head_name, new_embeddings)

    @checks_arguments
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: RecurrentCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs,
    ) -> RecurrentCausalLMOutput:
        """
        Args:
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, cu_seqlens: see the
                base model.
            labels: (batch, kept) ids to predict, shifted inside the model; -100 is ignored, and so is the label of a
                token that no real token of its document precedes in this call. Behind padding, a token is predicted
                from the last real one before it. If `shift_labels`, already shifted, are given too, they are used
                instead.
            logits_to_keep: the number of last tokens to compute logits for (0: all), or the indices of the tokens.

        Returns:
            loss if `labels` are given (0 if none counts); logits (batch, kept, vocabulary), cache,
            hidden_states.
        """
        if isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise ValueError(f"`logits_to_keep` must be 0 or more, got {logits_to_keep}.")
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if labels is not None or kwargs.get("num_items_in_batch") is not None:
            x = check_inputs(self.config.get_text_config(), input_ids, inputs_embeds)
            predicting = find_predicting(*x.shape[:2], x.device, attention_mask, position_ids, cu_seqlens)
            predicting = None if predicting is None else predicting[:, kept]
            shape = x[:, kept].shape[:2]
            labels, kwargs = predicted_labels(labels, kwargs, shape, predicting, self.unpredicted_id)
        outputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            logits_to_keep=logits_to_keep if isinstance(logits_to_keep, int) else 0,
            return_dict=True,
            **kwargs,
        )
        logits = self.get_output_embeddings()(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            vocabulary = self.config.get_text_config().vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocabulary, **kwargs)
            targets = labels[:, 1:] if kwargs.get("shift_labels") is None else kwargs["shift_labels"]
            loss = zero_without_labels(loss, targets, kwargs.get("ignore_index"))
        return RecurrentCausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **named_cache(cache_of(outputs)),
        )


class SequenceClassificationHead:
    """Mixin: class logits of a text, by `score` from its last token, on top of the model at `base_model_prefix`."""

    # Regression and multi-label losses ignore `num_items_in_batch` and are means; `Trainer` weights them.
    accepts_loss_kwargs = False

    @checks_arguments
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: RecurrentCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> RecurrentClassifierOutput:
        """
        Args:
            labels: (batch) class ids or regression targets, or (batch, classes) targets of a multi-label problem, see
                `config.problem_type`.

        Without `attention_mask`, a run of `pad_token_id` at either end of a row counts as padding. For the other
        arguments see the base model.

        Returns:
            loss if `labels` are given, logits (batch, `num_labels`), cache, hidden_states.
        """
        if kwargs.get("cu_seqlens") is not None:
            raise ValueError("`cu_seqlens`: a classifier reads one text per row, not packed documents.")
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            real = (input_ids != self.config.pad_token_id).int()
            attention_mask = real.cummax(1).values & real.flip(1).cummax(1).values.flip(1)
        outputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs | {"logits_to_keep": 1, "return_dict": True},
        )
        # The base model repeats a row's last real token to its end.
        logits = self.score(outputs.last_hidden_state[:, -1])
        loss = labelled_loss(self, labels, logits=logits, pooled_logits=logits, config=self.config, **kwargs)
        return RecurrentClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **named_cache(cache_of(outputs)),
        )
