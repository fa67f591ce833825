"""Avey ("Don't Pay Attention", arXiv:2506.11305): ranker, enricher, contextualizer, fuser, model, heads."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.integrations import use_kernelized_func
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple

from subquad_kernels import contextualizer, maxsim, split_ranker

from ...base import RecurrentPreTrainedModel
from ...generation import RecurrentGenerationMixin
from ...heads import CausalLMHead, SequenceClassificationHead
from ...layers import Linear, ReluSquared, replaceable
from ...padding import Tokens, can_read_values
from .cache_avey import AveyCache
from .configuration_avey import AveyConfig


contextualizer, split_ranker = replaceable(contextualizer, split_ranker)


# Rows that go through the blocks at a time where no gradient is needed: a long text has too many windows for memory.
MAX_ROWS = 2**16


@dataclass
class Text:
    """
    The tokens that a call can see, each text (a row of the batch, or a packed document) from the beginning of a split
    on.

    Attributes:
        splits: embeddings, zero where there is no token: (texts, splits, chunk_size, d_embed). Packed documents lie
            behind one another in a single one.
        place: place of each token of the call, (texts, tokens); padding has that of the last token before it, -1
            where there is none.
        first: number of the split that begins the document of each split, (1, splits); zero where None.
        fresh: whether Python knows the places: each text begins with this call, and has no padding.
    """

    splits: torch.Tensor
    place: torch.Tensor
    first: torch.Tensor | None
    fresh: bool


@dataclass
class Selection:
    """
    The splits of a call that are contextualised: those that hold the wanted tokens.

    Attributes:
        number: of each split in its text, int64 (texts, selected).
        current: their embeddings, (texts, selected, chunk_size, d_embed).
        begin, end: the tokens of such a split that are put out, where fewer will do than all.
        source: place of each wanted token among those put out, (texts or 1, wanted).
        run: the first and the last number, where they are the same in all texts and known to Python.
        retrieved: otherwise how many splits come before each, (texts, selected), where Python knows it.
    """

    number: torch.Tensor
    current: torch.Tensor
    begin: int
    end: int
    source: torch.Tensor
    run: tuple[int, int] | None
    retrieved: list[list[int]] | None


@dataclass
class Windows:
    """
    How the windows of a call (section 2.2) lie in one tensor of rows: first the rows that stand for missing splits,
    once for all windows, then group after group the windows that retrieved the same number of splits.

    Attributes:
        groups: number of windows of each group, and rows of such a window. These take the last places.
        places: places of a window, C; fewer where the last tokens of the current split are not there yet.
        kept: rows of each window, the last ones, that are put out.
        zero_rows: what each block's contextualizer gets for the rows of missing splits, where that is known.
        missing: number of such rows at the beginning of the tensor, where it is not.
    """

    groups: list[tuple[int, int]]
    places: int
    kept: int
    zero_rows: list[torch.Tensor] | None = None
    missing: int = 0
    seen: list[torch.Tensor] = field(default_factory=list)

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Rows (rows, width), without those of missing splits, as one tensor (windows, rows, width) a group."""
        sizes = [windows * rows for windows, rows in self.groups]
        parts = x[self.missing :].split(sizes)
        return [part.unflatten(0, group) for part, group in zip(parts, self.groups, strict=True)]

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        """The rows that are put out, (windows * kept, width), of all rows."""
        return torch.cat([part[:, -self.kept :].flatten(0, 1) for part in self.split(x)])


class AveyContextualizer(nn.Module):
    """Section 2.2.2: cosine similarities of the embeddings, times a learned matrix, weigh their sum."""

    def __init__(self, config: AveyConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.spatial_proj = nn.Parameter(torch.empty(config.extended_len, config.extended_len))

    def forward(self, z: torch.Tensor, gate: torch.Tensor, windows: Windows, last: bool) -> torch.Tensor:
        """
        Equation 2 for the halves of the tail, (rows, m_t / 2) each. The last block puts out the kept rows alone, and
        is given their gates alone.
        """
        v = self.spatial_proj[: windows.places, : windows.places]
        if windows.zero_rows is None:
            zero_rows = z[: windows.missing]
            if not torch.is_grad_enabled():
                windows.seen.append(zero_rows.clone())
        else:
            zero_rows = windows.zero_rows[self.layer_idx].to(z.device)

        out, missing = [], windows.missing
        queries = windows.kept if last else None
        if last:
            gates = gate.split([n * windows.kept for n, _ in windows.groups])
            gates = [part.unflatten(0, (-1, windows.kept)) for part in gates]
        else:
            gates = windows.split(gate)
            if missing:
                out.append(contextualizer(z[None, :missing], v[:missing, :missing], gate[None, :missing]))
        for rows, gate_rows in zip(windows.split(z), gates, strict=True):
            before = zero_rows[: windows.places - rows.shape[1]] if rows.shape[1] < windows.places else None
            out.append(contextualizer(rows, v, gate_rows, before, queries))
        return torch.cat([x.flatten(0, 1) for x in out])


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
        tail, gate, head = ReluSquared.apply(self.enricher(x)).split(self.sizes, dim=-1)  # equation 1
        if last:
            gate, head = windows.keep(gate), windows.keep(head)
        return self.fuser(torch.cat((self.contextualizer(tail, gate, windows, last), head), dim=-1))  # equation 3


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
    cache_class = AveyCache

    def new_cache(self, static: bool = False, max_cache_len: int | None = None) -> AveyCache:
        """An empty [`AveyCache`] for this model."""
        return AveyCache(self.config, static, max_cache_len)

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

    def get_input_embeddings(self) -> nn.Embedding:
        return self.wte

    def set_input_embeddings(self, new_embeddings: nn.Embedding) -> None:
        self.wte = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: AveyCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """
        The weights of the splits that a split retrieves depend on all of its tokens, so what a token gets depends on
        the tokens of its own split that follow it in the same call. A call gives its tokens what one call with the
        whole text up to its end would give them; a cache that records the past (for assisted decoding) gives each
        token what a call that ends with it would.

        Args:
            input_ids: (batch, length) token ids.
            attention_mask: (batch, length), 0 where a token is padding, before or after a row's text; with a cache it
                may also cover the tokens of earlier calls.
            position_ids: (batch, length); read only to find where packed documents begin (a position that does not
                follow on the one before), and not while a graph is traced: `torch.compile` and export need
                `cu_seqlens`. They have no other influence.
            past_key_values: what was kept of earlier tokens, updated in place.
            inputs_embeds: (batch, length, d_embed), in place of `input_ids`.
            use_cache: whether to return the cache; `config.use_cache` where None, but not in training.
            cu_seqlens: (documents + 1), the borders of documents packed into one row; also as `cu_seq_lens_q`.
            logits_to_keep: compute that many last tokens only, which saves the windows of all other splits (0: all).
                Packed documents and hidden states are computed whole.

        Returns:
            last_hidden_state (batch, length or `logits_to_keep`, d_embed), where padding after a text repeats its last
            token and padding before it is zero; past_key_values; hidden_states (embeddings and the output of every
            block, the last one normalised).

        Raises:
            ValueError: before any work, where an argument does not fit; the message names it.
        """
        if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise ValueError(f"`logits_to_keep` must be a number of tokens, 0 or more, got {logits_to_keep}.")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x, tokens, past_key_values, use_cache = self.read_inputs(
            input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, past_key_values, use_cache, **kwargs
        )
        packed = tokens.cu_seqlens is not None
        kept = x.shape[1] if packed or output_hidden_states or logits_to_keep == 0 else min(logits_to_keep, x.shape[1])
        text = self._read_documents(x, tokens, past_key_values) if packed else self._read(x, tokens, past_key_values)
        wanted = kept * x.shape[0] // text.splits.shape[0]  # of each text
        hidden_states = self._process(text, wanted, tokens, past_key_values, output_hidden_states)
        hidden_states = [h.view(x.shape[0], kept, -1) for h in hidden_states]
        last = self.ln_f(hidden_states[-1])
        if tokens.mask is not None:
            last = last.masked_fill((text.place[:, -kept:] < 0)[..., None].to(last.device), 0.0)
        return BaseModelOutputWithPast(
            last_hidden_state=last,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(x, *hidden_states[:-1], last) if output_hidden_states else None,
        )

    def _read(self, x: torch.Tensor, tokens: Tokens, cache: AveyCache | None) -> Text:
        """Lays every row from its first token on, whatever padding it has, behind what the cache holds of it."""
        size, fresh = self.config.chunk_size, tokens.mask is None
        place = torch.arange(x.shape[1], device=x.device)[None] if fresh else tokens.mask.cumsum(1) - 1
        x = tokens.erase(x)
        if cache is not None:
            fresh = fresh and not cache.is_initialized
            place = cache.lengths(x)[:, None] + place
            room = cache.room_for(x.shape[1])
            embeddings = cache.append(cache.after_blocks, "embeddings", x, place, room).to(x.dtype)
        else:
            embeddings = F.pad(x, (0, 0, 0, -x.shape[1] % size))
            if not fresh:
                source = place.clamp_min(0)[..., None].expand_as(x)
                embeddings = torch.zeros_like(embeddings).scatter_add(1, source, x)
        return Text(embeddings.unflatten(1, (-1, size)), place.expand(x.shape[0], -1), None, fresh)

    def _read_documents(self, x: torch.Tensor, tokens: Tokens, cache: AveyCache | None) -> Text:
        """Lays packed documents behind one another, each from the beginning of a split on."""
        size, device = self.config.chunk_size, x.device
        held = lengths = None
        documents = tokens.cu_seqlens.shape[0] - 1
        extra = torch.zeros(documents, dtype=torch.long, device=device)
        if cache is not None and cache.is_initialized:  # the first document of every row goes on
            held, lengths = cache.after_blocks.states["embeddings"], cache.lengths(x)
            extra[tokens.first] = lengths
        read, room = (0, 0) if cache is None else (cache.get_seq_length(), cache.room_for(x.shape[1]))

        rows, x = x.shape[0], x.flatten(0, 1)
        borders = tokens.cu_seqlens.long()
        sizes = borders.diff() + extra
        ends = (-(-sizes // size)).cumsum(0)  # in splits
        begins = ends - -(-sizes // size)
        steps = torch.arange(x.shape[0], device=device)
        document = torch.searchsorted(borders[1:], steps, right=True)
        place = begins[document] * size + extra[document] + steps - borders[document]

        # While a graph is traced, as many splits as there are at most, whatever the lengths of the documents.
        splits = (x.shape[0] + rows * read + documents * (size - 1)) // size
        if can_read_values(ends):
            splits = int(ends[-1])
        embeddings = x.new_zeros(splits * size, x.shape[1])
        embeddings = embeddings.scatter_add(0, place[:, None].expand_as(x), x)
        if held is not None:
            steps = torch.arange(held.shape[1], device=device)
            source = (begins[tokens.first, None] * size + steps).where(steps < lengths[:, None], 0)
            source = source.flatten()[:, None].expand(-1, x.shape[1])
            embeddings = embeddings.scatter_add(0, source, held.flatten(0, 1).to(x.dtype))
        number = torch.arange(splits, device=device)
        first = begins[torch.searchsorted(ends, number, right=True).clamp_max(documents - 1)]
        if cache is not None:
            begin, lengths = begins[tokens.last, None] * size, sizes[tokens.last]
            steps = torch.arange(room, device=device)
            kept = embeddings[(begin + steps).clamp_max(splits * size - 1)]
            cache.replace(kept * (steps < lengths[:, None])[..., None], lengths, tokens.length)
        return Text(embeddings.view(1, splits, size, -1), place[None], first[None], False)

    def _select(self, text: Text, kept: int, one_by_one: bool) -> Selection:
        """The splits that hold the `kept` last tokens of every text."""
        size, splits, place = self.config.chunk_size, text.splits, text.place[:, -kept:]
        device = splits.device
        rows = torch.arange(splits.shape[0], device=device)[:, None]
        offset = place.clamp_min(0) % size
        begin, end, run, retrieved = 0, size, None, None
        if text.fresh and not one_by_one:
            low, high = text.place.shape[1] - kept, text.place.shape[1] - 1
            first, last = low // size, high // size
            number = torch.arange(first, last + 1, device=device)[None]
            current, run = splits[:, first : last + 1], (first, last)
            if first == last:
                begin, end = low % size, high % size + 1
            source = place - first * size - begin
        elif text.first is not None:
            number = torch.arange(splits.shape[1], device=device)[None]
            current, source = splits, place
            if can_read_values(number):
                retrieved = (number - text.first).tolist()
        else:
            number = place.clamp_min(0) // size
            if not one_by_one:
                # The last tokens of a text lie in one split more than they would fill, or in two more.
                span = (kept + size - 2) // size + 1
                if can_read_values(number):
                    span = int((number[:, -1] - number[:, 0]).max()) + 1
                number = (number[:, :1] + torch.arange(span, device=device)).clamp_max(splits.shape[1] - 1)
            current = splits[rows, number]
            if one_by_one:
                current = current * (torch.arange(size, device=device) <= offset[..., None])[..., None]
            if can_read_values(number):
                retrieved = number.tolist()
                if one_by_one or number.shape[1] == 1:
                    begin, end = int(offset.min()), int(offset.max()) + 1
            window = torch.arange(kept, device=device) if one_by_one else place.clamp_min(0) // size - number[:, :1]
            source = window * (end - begin) + offset - begin
        return Selection(number.expand(splits.shape[0], -1), current, begin, end, source, run, retrieved)

    def _rank(self, text: Text, selection: Selection, tokens: Tokens, cache: AveyCache | None):
        """Section 2.1: number and weight of the splits that each selected one retrieves, (texts, selected, k - 1)."""
        size, splits, number, scores = self.config.chunk_size, text.splits, selection.number, None
        rows = torch.arange(splits.shape[0], device=splits.device)
        sums = None if cache is None or text.first is not None else cache.after_blocks.get("sums")
        if sums is not None and text.place.shape[1] == 1:
            # The token that is new adds its own maxima to those of the tokens before it in its split.
            token = splits.flatten(1, 2)[rows[:, None], text.place.clamp_min(0)]
            begins = text.place % size == 0
            if tokens.mask is not None:
                token, begins = tokens.erase(token), begins & tokens.mask
            sums = F.pad(sums, (0, splits.shape[1] - sums.shape[1])).masked_fill(begins, 0.0)
            scores = sums[:, None] + maxsim(token[:, None], splits, number)
        index, weights, scores = split_ranker(
            *(selection.current, splits, self.config.k, number, text.first),
            normalization=self.config.score_normalization,
            scores=scores,
        )
        if cache is not None:
            # Of the split that holds the last token of each row.
            if text.first is None:
                scores = scores[rows, (selection.source[:, -1] // (selection.end - selection.begin))]
            else:
                last = text.place.view(tokens.batch, -1)[:, -1] // size
                begin = text.first[0, last]
                local = torch.arange(splits.shape[1], device=splits.device)
                scores = scores[0, last[:, None], (begin[:, None] + local).clamp_max(splits.shape[1] - 1)]
                scores = scores.masked_fill(local >= (last - begin)[:, None], float("-inf"))
            cache.rank(scores)
            if text.first is None:
                real = tokens.mask
                cache.count(torch.ones_like(text.place, dtype=torch.bool) if real is None else real)
                cache.advance(text.place.shape[1])
        return index, weights

    def _groups(self, selection: Selection) -> dict[int, torch.Tensor]:
        """Number of retrieved splits to the selected ones that retrieve so many; all may where that is not known."""
        device, most, groups = selection.number.device, self.config.k - 1, {}
        texts, selected = selection.number.shape
        places = torch.arange(texts * selected, device=device).view(texts, selected)
        if selection.run is not None:
            first, last = selection.run
            for n in range(most):
                if first <= n <= last:
                    groups[n] = places[:, n - first]
            if last >= most:
                groups[most] = places[:, max(most - first, 0) :].flatten()
        elif selection.retrieved is not None:
            retrieved = [min(n, most) for row in selection.retrieved for n in row]
            for n in sorted(set(retrieved)):
                groups[n] = places.flatten()[torch.tensor([m == n for m in retrieved], device=device)]
        else:
            groups[most] = places.flatten()
        return groups

    def _process(
        self, text: Text, kept: int, tokens: Tokens, cache: AveyCache | None, all_states: bool
    ) -> list[torch.Tensor]:
        """
        Section 2.2.

        Returns:
            what the last block makes of the `kept` last tokens, (texts, kept, d_embed), before the final norm; where
            `all_states`, what the other blocks make of them before it.
        """
        size, most, width = self.config.chunk_size, self.config.k - 1, text.splits.shape[-1]
        selection = self._select(text, kept, cache is not None and cache.after_blocks.record_past)
        index, weights = self._rank(text, selection, tokens, cache)
        index, weights, current = (x.flatten(0, 1) for x in (index, weights, selection.current))
        texts, selected = selection.number.shape
        row = torch.arange(texts, device=index.device).repeat_interleave(selected)

        def rows_of(retrieved: int) -> int:
            return retrieved * size + selection.end

        def window(retrieved: int, chosen: torch.Tensor) -> torch.Tensor:
            places = slice(most - retrieved, None)
            others = text.splits[row[chosen, None], index[chosen, places].clamp_min(0)]
            others = others * weights[chosen, places, None, None].to(others.dtype)
            rows = torch.cat((others, current[chosen, None]), 1).flatten(1, 2)
            return rows[:, : rows_of(retrieved)].flatten(0, 1)

        groups = self._groups(selection)
        constant = not torch.is_grad_enabled()
        keeps = cache is not None and constant
        zero_rows = cache.zero_rows if keeps else None
        missing = 0
        if zero_rows is None and min(groups) < most:
            missing = size * (most if keeps else most - min(groups))

        blocks = self.blocks[: self.config.num_hidden_layers]
        states: list[list[torch.Tensor]] = [[] for _ in blocks]
        for chunk in _chunks(groups, rows_of, MAX_ROWS if constant else sys.maxsize):
            x = torch.cat([text.splits.new_zeros(missing, width), *(window(*group) for group in chunk)])
            windows = Windows(
                groups=[(chosen.shape[0], rows_of(retrieved)) for retrieved, chosen in chunk],
                places=rows_of(most),
                kept=selection.end - selection.begin,
                zero_rows=zero_rows,
                missing=missing,
            )
            for block, outputs in zip(blocks, states, strict=True):
                last = block is blocks[-1]
                x = block(x, windows, last=last)
                if last or all_states:
                    outputs.append(x if last else windows.keep(x))
            if missing:
                zero_rows, missing = windows.seen, 0
        if keeps:
            cache.zero_rows = zero_rows

        order = torch.cat(list(groups.values())).argsort()
        source = selection.source.expand(texts, -1)[..., None].expand(-1, -1, width)
        results = []
        for parts in states if all_states else states[-1:]:
            x = torch.cat(parts)  # where the block lies that made it
            x = x.unflatten(0, (texts * selected, -1))[order.to(x.device)].view(texts, -1, width)
            results.append(x.gather(1, source.to(x.device)))
        return results


def _chunks(groups: dict[int, torch.Tensor], rows_of: Callable[[int], int], limit: int):
    """Cuts groups of windows, so that no more than about `limit` rows are in a list of them."""
    chunk, room = [], limit
    for retrieved, chosen in groups.items():
        while chosen.shape[0]:
            fits = room // rows_of(retrieved)
            if chunk and fits < 1:
                yield chunk
                chunk, room = [], limit
                continue
            chunk.append((retrieved, chosen[: max(fits, 1)]))
            room -= chunk[-1][1].shape[0] * rows_of(retrieved)
            chosen = chosen[max(fits, 1) :]
    yield chunk


class AveyForCausalLM(CausalLMHead, AveyPreTrainedModel, RecurrentGenerationMixin):
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
