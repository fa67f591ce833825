"""Avey ("Don't Pay Attention", arXiv:2506.11305): contextualizer, neural processor, block, ranker and model, heads."""

import torch
from torch import nn
from transformers import initialization as init
from transformers.integrations import use_kernelized_func
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import can_return_tuple

from subquad_kernels import contextualizer, maxsim, split_ranker

from ...decoding.generation import RecurrentGenerationMixin
from ...modeling.arguments import checks_arguments
from ...modeling.base import RecurrentPreTrainedModel
from ...modeling.heads import CausalLMHead, SequenceClassificationHead
from ...modeling.layers import Linear, chosen_states, relu_squared, replaceable
from ...modeling.padding import Tokens
from ...modeling.versions import RecurrentModelOutput, named_cache
from .cache_avey import AveyCache
from .configuration_avey import AveyConfig
from .positions_avey import Selection, Text, Windows, read_text


contextualizer, split_ranker = replaceable(contextualizer, split_ranker)


class AveyContextualizer(nn.Module):
    """Section 2.2.2: the cosine similarities of the embeddings, times a learned matrix, weight their sum."""

    def __init__(self, config: AveyConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.spatial_proj = nn.Parameter(torch.empty(config.extended_len, config.extended_len))

    def forward(self, tail: torch.Tensor, gate: torch.Tensor, windows: Windows, last: bool) -> torch.Tensor:
        """
        Equation 2 for the halves of the tail, (rows, m_t / 2) each. The last block returns only the rows that are
        needed, and gets only their gates.
        """
        v, out = self.spatial_proj, []
        for z, gates, before, size in windows.parts(tail, gate, self.layer_idx, last):
            x = contextualizer(z=z, v=v[:size, :size], gate=gates, prefix=before, queries=gates.shape[1])
            out.append(x.flatten(0, 1))
        return torch.cat(out)


class AveyNeuralProcessor(nn.Module):
    """Section 2.2: enricher, contextualizer and fuser."""

    def __init__(self, config: AveyConfig, layer_idx: int):
        super().__init__()
        features, tail = config.expansion_factor * config.d_embed, config.tail_size
        self.sizes = [tail // 2, tail // 2, features - tail]
        self.enricher = Linear(config.d_embed, features)
        self.contextualizer = AveyContextualizer(config, layer_idx)
        self.fuser = Linear(features - tail // 2, config.d_embed)

    def forward(self, x: torch.Tensor, windows: Windows, last: bool) -> torch.Tensor:
        """x (rows, d_embed); the last block returns only the rows that are needed."""
        tail, gate, head = relu_squared(self.enricher(x)).split(self.sizes, dim=-1)  # equation 1
        if last:
            gate, head = windows.keep(gate), windows.keep(head)
        mixed = self.contextualizer(tail, gate, windows, last)  # equation 2
        return self.fuser(torch.cat((mixed, head), dim=-1))  # equation 3


@use_kernelized_func([contextualizer, split_ranker])
class AveyBlock(GradientCheckpointingLayer):
    def __init__(self, config: AveyConfig, layer_idx: int):
        super().__init__()
        self.rms_norm = nn.RMSNorm(config.d_embed, eps=config.rms_norm_eps)
        self.ctxt = AveyNeuralProcessor(config, layer_idx)

    def forward(self, x: torch.Tensor, windows: Windows, last: bool = False) -> torch.Tensor:
        out = self.ctxt(self.rms_norm(x), windows, last)
        return (windows.keep(x) if last else x) + out


class AveyPreTrainedModel(RecurrentPreTrainedModel):
    config: AveyConfig
    config_class = AveyConfig
    base_model_prefix = "model"
    _no_split_modules = ["AveyBlock"]
    _input_embed_layer = "wte"
    cache_class = AveyCache
    uncapturable = "Avey ranks the splits of a text when one of them ends, and not at every token."

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module is not getattr(self, "lm_head", None):
            init.kaiming_uniform_(module.weight, a=5**0.5)  # the default of nn.Linear
            if module.bias is not None:
                bound = module.in_features**-0.5
                init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, nn.Linear | nn.Embedding):
            init.xavier_normal_(module.weight)
        elif isinstance(module, AveyContextualizer):
            init.xavier_normal_(module.spatial_proj)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)


class AveyModel(AveyPreTrainedModel):
    """The ranker and the neural processor, without a head."""

    def __init__(self, config: AveyConfig):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.d_embed)
        self.blocks = nn.ModuleList(AveyBlock(config, layer_idx) for layer_idx in range(config.n_blocks))
        self.ln_f = nn.RMSNorm(config.d_embed, eps=config.rms_norm_eps)
        self.post_init()

    @checks_arguments
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: AveyCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs,
    ) -> RecurrentModelOutput:
        """
        The weights of the splits that a split retrieves depend on all of its tokens. So the output of a token depends
        on the later tokens of its own split in the same call. A call gives the same outputs as one call with the whole
        text up to its end. With a cache that records the past (for assisted decoding), each token's output is as in a
        call that ends with it.

        Args:
            input_ids: (batch, length) token ids.
            attention_mask: (batch, length), 0 for padding, which may be anywhere in a row. With a cache it may also
                cover the tokens of earlier calls.
            position_ids: (batch, length). They only show where packed documents begin: at a position that does not
                follow the one before. Exports, and compiled calls with a cache, do not read them;
                `torch.compile(fullgraph=True)` needs `cu_seqlens`.
            cache: the embeddings of earlier tokens, updated in place; also as `past_key_values`.
            inputs_embeds: (batch, length, d_embed), instead of `input_ids`.
            use_cache: whether to return the cache. If None, `config.use_cache`, but not in training.
            cu_seqlens: (documents + 1), the boundaries of documents packed into one row; also as `cu_seq_lens_q`.
            logits_to_keep: the number of last tokens to compute (0: all), without the windows of all other splits.
                With packed documents or hidden states, all are computed.

        Returns:
            last_hidden_state (batch, length or `logits_to_keep`, d_embed), in which padding repeats the last real
            token before it, or is zero if there is none; cache; hidden_states (the embeddings and the output of every
            block, the last one normalised).

        Raises:
            ValueError: before any work, if an argument does not fit; the message names it.
        """
        if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise ValueError(f"`logits_to_keep` must be a number of tokens, 0 or more, got {logits_to_keep}.")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x, tokens, cache, use_cache = self.start_forward(
            input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, cache, use_cache, **kwargs
        )
        batch, length, _ = x.shape
        whole = tokens.cu_seqlens is not None or output_hidden_states or logits_to_keep == 0
        kept = length if whole else min(logits_to_keep, length)
        text = read_text(x, tokens, cache, self.config.chunk_size)
        selection = text.select(
            wanted=kept * batch // text.splits.shape[0],
            one_by_one=cache is not None and cache.records_past,
            most=self.config.k - 1,
        )
        index, weights, scores = self.rank(text, selection, tokens, cache)
        if cache is not None:
            cache.keep_scores(text.last_scores(scores, selection, tokens))
            if text.first is None:  # otherwise `read_text` has counted the tokens
                cache.count(torch.ones_like(text.position, dtype=torch.bool) if tokens.mask is None else tokens.mask)
                if text.known is not None:
                    cache.know_lengths(text.known[:, -1] + 1)
                cache.advance(tokens)

        blocks = self.blocks[: self.config.num_hidden_layers]
        outputs: list[list[torch.Tensor]] = [[] for _ in blocks]
        for windows in selection.windows(cache):
            zero_rows = x.new_zeros(windows.missing, x.shape[-1])
            h = torch.cat([zero_rows, *self.read_together(text, windows, index, weights)])
            for block, parts in zip(blocks, outputs, strict=True):
                is_last = block is blocks[-1]
                h = block(h, windows, last=is_last)
                if is_last or output_hidden_states:
                    parts.append(h if is_last else windows.keep(h))

        if not output_hidden_states:
            outputs = outputs[-1:]
        hidden_states = [selection.tokens(parts).view(batch, kept, -1) for parts in outputs]
        last = self.ln_f(hidden_states[-1])
        if tokens.mask is not None:
            last = last.masked_fill((text.position[:, -kept:] < 0)[..., None].to(last.device), 0.0)
        return RecurrentModelOutput(
            last_hidden_state=last,
            hidden_states=chosen_states((x, *hidden_states[:-1], last), output_hidden_states),
            **named_cache(cache if use_cache else None),
        )

    def rank(
        self, text: Text, selection: Selection, tokens: Tokens, cache: AveyCache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Section 2.1: the splits that each selected split retrieves, and their weights, (windows, k - 1) each; and the
        scores of all splits. Unlike the paper's k, that of the configuration counts the current split.
        """
        scores = None
        sums = None if cache is None or text.first is not None else cache.after_blocks.get("sums")
        if sums is not None and text.position.shape[1] == 1:
            # The new token adds its maxima to the sums over the earlier tokens of its split.
            token, sums = text.new_token(sums, tokens)
            scores = sums + maxsim(queries=token, splits=text.splits, number=selection.number)
        index, weights, scores = split_ranker(
            queries=selection.current,
            splits=text.splits,
            k=self.config.k,
            number=selection.number,
            first=text.first,
            normalization=self.config.score_normalization,
            scores=scores,
        )
        return index.flatten(0, 1), weights.flatten(0, 1), scores

    def read_together(
        self, text: Text, windows: Windows, index: torch.Tensor, weights: torch.Tensor
    ) -> list[torch.Tensor]:
        """
        Section 2.1: the rows of windows, (rows, d_embed) for each group. A window holds the splits that a split
        retrieves, times their weights, and then the split itself.
        """
        groups, selection, selected = [], windows.selection, windows.selection.number.shape[1]
        for retrieved, chosen in windows.groups:
            columns, row = slice(index.shape[1] - retrieved, None), chosen // selected
            others = text.splits[row[:, None], index[chosen, columns].clamp_min(0)]
            others = others * weights[chosen, columns, None, None].to(others.dtype)
            current = selection.current[row, chosen % selected]
            rows = torch.cat((others, current[:, None]), dim=1).flatten(1, 2)
            groups.append(rows[:, : selection.rows(retrieved)].flatten(0, 1))
        return groups


class AveyForCausalLM(CausalLMHead, RecurrentGenerationMixin, AveyPreTrainedModel):
    """Avey with the head that predicts the next token: the embeddings themselves, unless they are not tied."""

    lm_head_name = "lm_head"
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _tied_weights_keys = {"lm_head.weight": "model.wte.weight"}

    def __init__(self, config: AveyConfig):
        super().__init__(config)
        self.model = AveyModel(config)
        self.lm_head = Linear(config.d_embed, config.vocab_size, bias=False)
        self.post_init()


class AveyForSequenceClassification(SequenceClassificationHead, AveyPreTrainedModel):
    """Avey with a linear classifier on the last token."""

    def __init__(self, config: AveyConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = AveyModel(config)
        self.score = Linear(config.d_embed, config.num_labels, bias=False)
        self.post_init()


__all__ = ["AveyForCausalLM", "AveyForSequenceClassification", "AveyModel", "AveyPreTrainedModel"]
