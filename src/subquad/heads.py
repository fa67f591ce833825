"""The heads that architectures share, as mixins."""

import torch
from torch import nn
from transformers.utils import can_return_tuple

from .arguments import checks_arguments
from .cache import RecurrentCache
from .versions import RecurrentCausalLMOutput, RecurrentClassifierOutput, cache_of, named_cache


class CausalLMHead:
    """
    Mixin: next-token logits on top of the model at `base_model_prefix`. The class names its projection, (width,
    vocabulary), in `lm_head_name`.
    """

    lm_head_name: str

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
            labels: (batch, length) ids to predict, shifted inside the model; -100 is ignored.
            logits_to_keep: the number of last tokens to compute logits for (0: all), or the indices of the tokens.

        Returns:
            loss if `labels` are given, logits (batch, kept, vocabulary), cache, hidden_states.
        """
        if isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise ValueError(f"`logits_to_keep` must be 0 or more, got {logits_to_keep}.")
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
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.get_output_embeddings()(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            vocabulary = self.config.get_text_config().vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocabulary, **kwargs)
        return RecurrentCausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **named_cache(cache_of(outputs)),
        )


class SequenceClassificationHead:
    """Mixin: class logits of a text, by `score` from its last token, on top of the model at `base_model_prefix`."""

    # Regression and multi-label losses are means whatever `num_items_in_batch` is; `Trainer` weighs them.
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

        Without `attention_mask`, a run of `pad_token_id` at either end of a row counts as padding. For other arguments
        see the base model.

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
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return RecurrentClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **named_cache(cache_of(outputs)),
        )
