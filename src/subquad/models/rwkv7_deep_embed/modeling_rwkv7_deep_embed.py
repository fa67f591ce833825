"""
RWKV-7a and RWKV-7b: Goose whose channel mixing has a factor from a table of the tokens (DeepEmbed), and in RWKV-7b one
head of softmax attention beside each time mixing (DeepEmbedAttention). No paper describes them; the equations are
those of the published demos.
"""

import math
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.utils.output_capturing import capture_outputs

from subquad_kernels import low_rank, matmul

from ...modeling.arguments import checks_arguments
from ...modeling.cache import RecurrentCache
from ...modeling.layers import LayerNorm, Linear, token_shift, wide_dtype, widen
from ...modeling.padding import last_token
from ...modeling.protocols import NO_STATE, BlockState
from ...modeling.tensor_parallel import local_part, times_own_columns
from ...modeling.versions import RecurrentModelOutput
from ..rwkv7.modeling_rwkv7 import (
    Rwkv7Block,
    Rwkv7ChannelMixing,
    Rwkv7ForCausalLM,
    Rwkv7ForSequenceClassification,
    Rwkv7Model,
    Rwkv7PreTrainedModel,
    projection,
)
from .cache_rwkv7_deep_embed import Rwkv7DeepEmbedCache
from .configuration_rwkv7_deep_embed import Rwkv7DeepEmbedConfig
from .positions_rwkv7_deep_embed import DeepEmbedTokens, find_reach


# The largest number of scores that attention computes at a time without gradients: 64 MB in float32.
MOST_SCORES = 1 << 24
# Number of ids whose rows are merged at a time.
MERGED_AT_ONCE = 4096


class Rwkv7Table(nn.Embedding):
    """
    A row of numbers for each token id.

    Attributes:
        mapped: whether the rows are read from a file, which is mapped into memory. The table then stays where it is
            and as it is, when the model is moved or cast.
    """

    mapped = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ids (batch, length), on the device of the ids."""
        return F.embedding(ids.to(self.weight.device), self.weight).to(ids.device)

    def _apply(self, *args, **kwargs):
        return self if self.mapped else super()._apply(*args, **kwargs)


def table_of(config: Rwkv7DeepEmbedConfig, width: int) -> tuple[Rwkv7Table, Linear | None]:
    """A table, and the layer that computes the rest of its rows from x0; None if the table is merged."""
    of_x0 = None if config.merged_tables else projection(config.hidden_size, width, gain=1.0)
    return Rwkv7Table(config.vocab_size, width), of_x0


def look_up(table: Rwkv7Table, of_x0: Linear | None, ids: torch.Tensor, x0: torch.Tensor) -> torch.Tensor:
    """The rows of ids (batch, length), (batch, length, width). For x0 (batch, length, hidden_size) see the block."""
    rows = table(ids).to(x0.dtype)
    return rows if of_x0 is None else rows + of_x0(x0)


def merged_rows(
    rows: torch.Tensor, weight: torch.Tensor, embeddings: torch.Tensor, ln0: dict[str, torch.Tensor], eps: float
) -> torch.Tensor:
    """
    Rows of a table (ids, width) with the product of a weight (width, hidden_size) and x0, at least in float32. x0 is
    the norm of the embeddings (ids, hidden_size), with the parameters `weight` and `bias` of `ln0`.
    """
    dtype = wide_dtype(rows)
    norm = {name: x.to(dtype) for name, x in ln0.items()}
    x0 = F.layer_norm(embeddings.to(dtype), embeddings.shape[-1:], **norm, eps=eps)
    return torch.addmm(rows.to(dtype), x0, weight.to(dtype).T)


class Rwkv7DeepEmbedChannelMixing(Rwkv7ChannelMixing):
    """Goose's channel mixing, with a factor on its inner activation from each token's row of a table."""

    tables = ("s_emb",)

    def __init__(self, config: Rwkv7DeepEmbedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.rank = config.deep_embed_rank
        self.s_emb, self.s_emb_x = table_of(config, self.rank**2)
        self.s0 = nn.Parameter(torch.empty(1, 1, config.intermediate_size))
        self.s1 = nn.Parameter(torch.empty(config.hidden_size, self.rank))
        self.s2 = nn.Parameter(torch.empty(self.rank, config.intermediate_size))

    def matrices(self, ids: torch.Tensor, x0: torch.Tensor) -> torch.Tensor:
        """The rows of ids (batch, length) as matrices (batch, length, rank, rank)."""
        return torch.unflatten(look_up(self.s_emb, self.s_emb_x, ids, x0), -1, (self.rank, self.rank))

    def forward(
        self, x: torch.Tensor, x0: torch.Tensor, inputs: DeepEmbedTokens, state: BlockState = NO_STATE
    ) -> torch.Tensor:
        """x and x0 (batch, length, hidden_size); the output has the same shape."""
        e = matmul(x, self.s1).unsqueeze(-2) @ self.matrices(inputs.input_ids, x0)
        factor = times_own_columns(e.squeeze(-2), self.s2) + local_part(self.s0)
        return self.value(self.activate(x, inputs.tokens, state) * factor)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, cap: float) -> torch.Tensor:
    """
    Softmax attention whose scores are capped: q (batch, length, size), k (batch, keys, size), v (batch, keys, width)
    and a mask (batch or 1, length, keys), True where a query sees a key. Returns (batch, length, width).
    """
    # All of it at least in float32, which is also faster on a CPU: in 16 bits each number of keys is compiled anew.
    keys, values = k.to(wide_dtype(k)).mT, v.to(wide_dtype(v))

    def attend_from(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = (q.to(keys.dtype) @ keys).mul(1 / (cap * math.sqrt(q.shape[-1]))).tanh().mul(cap)
        return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values).to(v.dtype)

    if torch.compiler.is_compiling() or q.shape[0] * q.shape[1] * k.shape[1] <= MOST_SCORES:
        return attend_from(q, mask)
    size = max(1, MOST_SCORES // (q.shape[0] * k.shape[1]))
    return torch.cat([attend_from(*part) for part in zip(q.split(size, 1), mask.split(size, 1), strict=True)], dim=1)


class Rwkv7DeepEmbedDea(nn.Module):
    """
    DeepEmbedAttention (DEA): one causal head, whose keys and values are scaled by each token's rows of two tables.
    transformers would expect a class that is named `Attention` to have several implementations.
    """

    tables = ("k_emb", "v_emb")

    def __init__(self, config: Rwkv7DeepEmbedConfig):
        super().__init__()
        width, size, rank = config.hidden_size, config.dea_size, config.dea_rank
        self.sizes, self.cap = (size, size, width), config.dea_soft_cap
        self.qq = projection(width, size, gain=1.0, wide=True)
        self.k1, self.k2 = nn.Parameter(torch.empty(width, rank)), nn.Parameter(torch.empty(rank, size))
        self.v1, self.v2 = nn.Parameter(torch.empty(width, rank)), nn.Parameter(torch.empty(rank, width))
        self.k_emb, self.k_emb_x = table_of(config, size)
        self.v_emb, self.v_emb_x = table_of(config, width)
        self.x_q, self.x_k = nn.Parameter(torch.empty(1, 1, size)), nn.Parameter(torch.empty(1, 1, size))
        self.x_v = nn.Parameter(torch.empty(1, 1, width))
        self.lnq, self.lnk = LayerNorm(size, eps=config.norm_eps), LayerNorm(size, eps=config.norm_eps)
        self.lnv = LayerNorm(width, eps=config.norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        x0: torch.Tensor,
        inputs: DeepEmbedTokens,
        cache: Rwkv7DeepEmbedCache | None,
        state: BlockState,
    ) -> torch.Tensor:
        """x, the residual stream, and x0 (batch, length, hidden_size); the output has the same shape."""
        tokens, reach = inputs.tokens, inputs.reach
        # Nothing normalises the stream: in float16 the products need its range.
        k1, k2, v1, v2 = (weight.to(x.dtype) for weight in (self.k1, self.k2, self.v1, self.v2))
        q = self.qq(x)
        k = low_rank(x, k1, k2) * look_up(self.k_emb, self.k_emb_x, inputs.input_ids, x0)
        v = low_rank(x, v1, v2, outer="tanh") * look_up(self.v_emb, self.v_emb_x, inputs.input_ids, x0)

        # The token shift follows the products with the tables, and comes before the norms.
        qkv, last = torch.cat((q, k, v), dim=-1), state.get("qkv_shift")
        last = None if last is None else last.to(qkv.dtype)
        qkv = tokens.forward_fill(qkv, last)
        before = tokens.token_before(qkv, last)
        mu = torch.cat((self.x_q, self.x_k, self.x_v), dim=-1)[0]
        q, k, v = token_shift(qkv, state=before, mu=mu, starts=tokens.starts)[0].split(self.sizes, -1)
        state.update_with("qkv_shift", last_token, qkv.to(wide_dtype(qkv)))

        q, k, v = self.lnq(q), self.lnk(k), self.lnv(v)
        k = reach.remember(cache, state, "keys", k).to(q.dtype)
        v = reach.remember(cache, state, "values", v).to(q.dtype)
        return attend(q, k, v, reach.mask, self.cap)


class Rwkv7DeepEmbedBlock(Rwkv7Block):
    channel_mixing_class = Rwkv7DeepEmbedChannelMixing

    def __init__(self, config: Rwkv7DeepEmbedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.qkv = None if config.dea_size is None else Rwkv7DeepEmbedDea(config)

    def forward(
        self,
        x: torch.Tensor,
        v_first: torch.Tensor | None,
        x0: torch.Tensor | None,
        inputs: DeepEmbedTokens,
        cache: RecurrentCache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The output, `v_first` as in [`Rwkv7Block`], and x0: the normalised embeddings, which all blocks read."""
        state = NO_STATE if cache is None else cache.layers[self.layer_idx]
        if self.layer_idx == 0:
            x0 = self.ln0(x)
            x = widen(x0)
        out, v_first = self.att(self.ln1(x), inputs.tokens, v_first, state)
        if self.qkv is not None:
            out = out + self.qkv(x, x0, inputs, cache, state)
        x = x + out
        return x + self.ffn(self.ln2(x), x0, inputs, state), v_first, x0


class Rwkv7DeepEmbedPreTrainedModel(Rwkv7PreTrainedModel):
    config: Rwkv7DeepEmbedConfig
    config_class = Rwkv7DeepEmbedConfig
    _no_split_modules = ["Rwkv7DeepEmbedBlock"]
    _can_record_outputs = {"hidden_states": Rwkv7DeepEmbedBlock}

    @property
    def cache_class(self) -> type[RecurrentCache]:
        return RecurrentCache if self.config.dea_size is None else Rwkv7DeepEmbedCache

    @property
    def uncapturable(self) -> str | None:
        apart = any(table.weight.device != self.device for table in self._tables().values())
        return "rows of the tables are copied from another device, by ids that Python must know." if apart else None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """
        The initialisation of published models is not known. Here a new model computes what a Goose with the same
        other parameters does: the factor is 1, and attention adds 0. Both learn from the first step on.
        """
        super()._init_weights(module)
        if isinstance(module, Rwkv7Table):
            init.zeros_(module.weight)
        elif isinstance(module, Rwkv7DeepEmbedChannelMixing):
            init.ones_(module.s0)
            init.orthogonal_(module.s1)
            init.zeros_(module.s2)
        elif isinstance(module, Rwkv7DeepEmbedDea):
            for weight in (module.k1, module.k2, module.v1, module.v2):
                init.orthogonal_(weight)
            for weight in (module.x_q, module.x_k, module.x_v, module.lnv.weight):
                init.zeros_(weight)

    def _tables(self) -> dict[str, Rwkv7Table]:
        """All tables by name. Adapters or integer layers may have taken their place."""
        owners = {name: module for name, module in self.named_modules() if hasattr(module, "tables")}
        return {f"{name}.{table}": getattr(owner, table) for name, owner in owners.items() for table in owner.tables}

    def _plain_tables(self, action: str) -> dict[str, Rwkv7Table]:
        """
        Raises:
            ValueError: if a table is no plain one, or is mapped from a file.
        """
        tables = self._tables()
        for name, table in tables.items():
            if type(table) is not Rwkv7Table:
                raise ValueError(f"`{name}` is of class {type(table).__name__}: only plain tables can be {action}.")
            if table.mapped:
                raise ValueError(f"`{name}` is mapped from a file, and cannot be {action}. Load the model again.")
        return tables

    def _resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in transformers, tables included: rows of new ids are the mean of the others."""
        tables = self._plain_tables("resized")
        embeddings = super()._resize_token_embeddings(new_num_tokens, *args, **kwargs)
        number = embeddings.weight.shape[0]
        for table in tables.values():
            rows, more = table.weight.detach(), number - table.num_embeddings
            if more > 0:
                mean = rows.mean(0, keepdim=True, dtype=wide_dtype(rows)).to(rows.dtype)
                rows = torch.cat((rows, mean.expand(more, -1)))
            table.weight = nn.Parameter(rows[:number].clone(), table.weight.requires_grad)
            table.num_embeddings = number
        return embeddings

    @torch.no_grad()
    def merge_tables(self) -> None:
        """
        Adds to the rows of all tables what is computed from the token's embedding, for inference: per token, block and
        table a lookup takes the place of a product. Merged tables cannot be split again, so train and convert the
        model as it was. `save_pretrained` saves them, and such a directory loads as any other.

        Raises:
            ValueError: if they are merged already, offloaded or mapped from a file, or if another layer, such as an
                adapter or an integer layer, has taken the place of a table, a product or the embeddings.
        """
        if self.config.merged_tables:
            raise ValueError("The tables are merged already.")
        tables = self._plain_tables("merged")
        products = {name: self.get_submodule(f"{name}_x") for name in tables}
        for name, layer in products.items():
            if type(layer) not in (Linear, nn.Linear):
                raise ValueError(
                    f"`{name}_x` is of class {type(layer).__name__}: tables are merged with plain weights only."
                )
            if tables[name].weight.is_meta or layer.weight.is_meta:
                raise ValueError(f"`{name}` is not in memory. Merge the tables of a model that is not offloaded.")
        embeddings, ln0 = self.get_input_embeddings(), self.base_model.blocks[0].ln0
        if type(embeddings) is not nn.Embedding:
            raise ValueError(
                f"The embeddings are of class {type(embeddings).__name__}: only plain ones can be merged."
            )
        for name, table in tables.items():
            device, eps = table.weight.device, ln0.eps
            weight, norm = products[name].weight.to(device), {x: p.to(device) for x, p in ln0.named_parameters()}
            for rows, x in zip(*(y.split(MERGED_AT_ONCE) for y in (table.weight, embeddings.weight)), strict=True):
                rows.copy_(merged_rows(rows, weight, x.to(device), norm, eps))
            module, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(module), f"{leaf}_x", None)
        self.config.merged_tables = True

    # package only
    def map_tables(self, directory: str | os.PathLike) -> None:
        """
        Reads the rows of all tables from the files of a model directory from now on, which are mapped into memory: the
        tables take no memory of their own, and stay on the CPU wherever the model is. They are not trained.

        Args:
            directory: the directory of this model, saved with the same tables, merged or not. Its files must not be
                overwritten while the model is used.

        Raises:
            ValueError: if there is no such directory, or it lacks a table, or has another one: 256 rows of each are
                compared. Or if an adapter or an integer layer has taken the place of a table.
        """
        from ...hub.weight_files import find_weights, open_weights

        if not os.path.isdir(directory):
            raise ValueError(f"`directory` must exist, got {os.fspath(directory)!r}.")
        prefix = "" if self.base_model is not self else f"{self.base_model_prefix}."
        tables = {f"{prefix}{name}.weight": table for name, table in self._plain_tables("mapped").items()}
        stored = {}
        for path in find_weights(directory):
            with open_weights(path) as file:
                stored |= {name: file.get_tensor(name) for name in tables.keys() & file.keys()}
        for name, table in tables.items():
            held, rows = table.weight, torch.arange(0, table.num_embeddings, -(-table.num_embeddings // 256))
            if (other := stored.get(name)) is None:
                raise ValueError(f"{directory} has no tensor {name}.")
            if other.shape != held.shape or not torch.equal(
                held[rows.to(held.device)].cpu(), other[rows].to(held.dtype)
            ):
                raise ValueError(f"{directory}: {name} differs from the model's. Save the model there first.")
        for name, table in tables.items():
            table.weight, table.mapped = nn.Parameter(stored[name], requires_grad=False), True


class Rwkv7DeepEmbedModel(Rwkv7DeepEmbedPreTrainedModel, Rwkv7Model):
    """The blocks of RWKV-7a or 7b, without a head."""

    block_class = Rwkv7DeepEmbedBlock

    @checks_arguments
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: RecurrentCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs,
    ) -> RecurrentModelOutput:
        """
        As [`Rwkv7Model`], from ids alone.

        Args:
            inputs_embeds: refused, because every block looks up the rows of the tokens by their ids.

        Raises:
            ValueError: before any work, if an argument does not fit; the message names it.
        """
        if inputs_embeds is not None and input_ids is None:
            raise ValueError(
                f"`inputs_embeds`: {type(self).__name__} looks up rows of tables by token ids in every block, and "
                "embeddings do not determine them. Give `input_ids`; soft prompts are not possible."
            )
        x, tokens, cache, use_cache = self.start_forward(
            input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, cache, use_cache, **kwargs
        )
        reach = None if self.config.dea_size is None else find_reach(x, tokens, cache)
        inputs = DeepEmbedTokens(tokens, input_ids.to(x.device), reach)
        if reach is not None and cache is not None:
            cache.count_tokens(reach.positions)
        v_first = x0 = None
        for block in self.blocks[: self.config.num_hidden_layers]:
            x, v_first, x0 = block(x, v_first, x0, inputs, cache)
        return self.finish_forward(self.ln_out(x), tokens, cache, use_cache)


class Rwkv7DeepEmbedForCausalLM(Rwkv7DeepEmbedPreTrainedModel, Rwkv7ForCausalLM):
    """RWKV-7a or 7b with a language modeling head."""

    model_class = Rwkv7DeepEmbedModel


class Rwkv7DeepEmbedForSequenceClassification(Rwkv7DeepEmbedPreTrainedModel, Rwkv7ForSequenceClassification):
    """RWKV-7a or 7b with a linear classifier on the last token."""

    model_class = Rwkv7DeepEmbedModel


__all__ = [
    "Rwkv7DeepEmbedForCausalLM",
    "Rwkv7DeepEmbedForSequenceClassification",
    "Rwkv7DeepEmbedModel",
    "Rwkv7DeepEmbedPreTrainedModel",
]
