"""
Context parallelism (section 3.2 of the Gecko paper): one long text on several devices. Each device reads a piece of it
and receives the cache of the text before from the device before. Its size does not depend on the length.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from ...modeling.layer_state import LayerState, States
from ...modeling.padding import Tokens
from .cache_gecko import GeckoCache


ONCE = "every forward pass needs a new ContextParallelCache."


class _Link:
    """Sends to the neighbours in a process group and receives from them: the next (1) and the one before (-1)."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.pending: list[tuple[dist.Work, torch.Tensor]] = []

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def send(self, step: int, *tensors: torch.Tensor) -> None:
        """Waits until earlier tensors have arrived, but does not wait for these."""
        self.wait()
        tensors = [x.detach().contiguous() for x in tensors]
        self.pending = [(dist.isend(x, group=self.group, group_dst=self.rank + step), x) for x in tensors]

    def wait(self) -> None:
        """Waits until everything has arrived. Without a wait, it may never arrive."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()

    def receive(self, step: int, *like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Fills tensors with what the neighbor sends."""
        for x in like:
            dist.recv(x, group=self.group, group_src=self.rank + step)
        return like


class _Receive(torch.autograd.Function):
    """States from the process before; their gradients go back to it."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, link: _Link, *like: torch.Tensor):
        ctx.link = link
        return link.receive(-1, *like)

    @staticmethod
    def backward(ctx, *grads):
        ctx.link.send(-1, *grads)
        ctx.link.wait()
        return None, None, *[None] * len(grads)


class _Send(torch.autograd.Function):
    """Returns x and sends states to the next process; their gradients come back from it."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, link: _Link, x: torch.Tensor, *states: torch.Tensor):
        ctx.link, ctx.like = link, [torch.empty_like(state, device="meta") for state in states]
        link.send(1, *states)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        like = [torch.empty_like(x, device=grad.device, memory_format=torch.contiguous_format) for x in ctx.like]
        return None, None, grad, *ctx.link.receive(1, *like)


class _Layer(LayerState):
    """States. States in `shapes` come from the process before and go to the next, in that order."""

    def __init__(self, link: _Link, shapes: dict[str, tuple[int, ...]]):
        super().__init__()
        self.link, self.shapes = link, shapes
        self.incoming: dict[str, torch.Tensor] | None = {} if link.is_first else None
        self.outgoing: dict[str, torch.Tensor] = {}
        self.x: torch.Tensor | None = None

    def expect(self, x: torch.Tensor) -> None:
        """Takes the batch size and device of the states, and the dtype of keys and values, from the piece x."""
        self.x = x.new_empty(len(x), 0)

    def dtype(self, name: str) -> torch.dtype:
        keys = name in ("keys", "values", "memory_keys")
        return self.x.dtype if keys else torch.promote_types(self.x.dtype, torch.float32)

    def anchor(self) -> torch.Tensor:
        """Makes autograd run the receiver's backward pass, because the other process waits for it."""
        return torch.zeros((), requires_grad=torch.is_grad_enabled())

    def get(self, name: str) -> torch.Tensor | None:
        if name not in self.shapes:
            return None
        if self.incoming is None:
            like = [self.x.new_empty(len(self.x), *shape, dtype=self.dtype(n)) for n, shape in self.shapes.items()]
            self.incoming = dict(zip(self.shapes, _Receive.apply(self.anchor(), self.link, *like), strict=True))
        return self.incoming.get(name)

    def can_modify(self, name: str, held: torch.Tensor) -> bool:
        return False

    def update_together(self, states: States, replay: Callable[..., States], *updates: torch.Tensor) -> None:
        self.outgoing.update(states)

    def end_block(self, x: torch.Tensor) -> torch.Tensor:
        """Sends the states. Their gradients come back in the backward pass of the x that is returned."""
        if self.link.is_last:
            return x
        states = [self.outgoing[name].to(self.dtype(name)) for name in self.shapes]
        return _Send.apply(self.anchor(), self.link, x, *states)


class _AfterBlocks(_Layer):
    """Document starts are known, and needed, before the first block."""

    def __init__(self, link: _Link, shapes: dict[str, tuple[int, ...]], window: int):
        super().__init__(link, shapes)
        self.window = window

    def get(self, name: str) -> torch.Tensor | None:
        if name != "begins":
            return super().get(name)
        [self.states[name]] = self.link.receive(-1, self.x.new_empty(len(self.x), self.window, dtype=torch.long))
        return self.states[name]

    def update_together(self, states: States, replay: Callable[..., States], *updates: torch.Tensor) -> None:
        super().update_together(states, replay, *updates)
        if "begins" in states and not self.link.is_last:
            self.link.send(1, states["begins"])


class ContextParallelCache(GeckoCache):
    """
    Makes a Gecko read one text in pieces on the processes of a group, one piece each. Passed as `cache`, it hands
    every block the states after the previous process's piece, and sends this process's states to the next. Gradients
    go back the same way, so the sum of all processes' gradients is the gradient of the whole text. While one process
    reads its piece in a block, the previous process is in the next block.

    ```python
    inputs = split_text(input_ids, labels)  # every process has the whole text and takes its piece
    loss = model(**inputs, cache=ContextParallelCache(model.config)).loss
    loss.backward()
    ```

    The gradients must be summed over the processes. If they are averaged, as DistributedDataParallel does, multiply
    the loss by the number of processes.

    Every forward pass needs a new cache, and every process the same batch. Rows have neither padding nor boundaries of
    packed documents (BOS tokens separate documents). Pieces may have any length. Gradient checkpointing is not
    possible, because it reads a piece twice.

    Args:
        config: configuration of the model.
        group: the processes, in the order of their pieces. If None, all.
    """

    def __init__(self, config: PreTrainedConfig, group: dist.ProcessGroup | None = None):
        super().__init__(config)
        self.link = _Link(group)
        shapes = {
            name: tuple(self.window if size is None else size for size in shape)
            for name, shape in self.state_shapes(config, 0).items()
        }
        self.layers = [_Layer(self.link, shapes) for _ in range(config.num_layers)]
        self.after_blocks = _AfterBlocks(self.link, {"timenorm": shapes["timenorm"]}, self.window)

    is_recomputable = False

    def begin_call(self, tokens: Tokens) -> None:
        if tokens.mask is not None or tokens.cu_seqlens is not None:
            given = "`attention_mask`" if tokens.cu_seqlens is None else "`cu_seqlens` or `position_ids`"
            raise ValueError(f"{given}: a text on several devices has no padding and no packed documents.")
        if self.seen_tokens:
            raise ValueError(f"`cache`: {ONCE}")

    def lengths(self, x: torch.Tensor) -> torch.Tensor:
        """Number of tokens before this process's piece x (batch, length, model_dim): int64 (batch)."""
        for layer in self.all_layers:
            layer.expect(x)
        lengths = torch.zeros(len(x), dtype=torch.long, device=x.device)
        if not self.link.is_first:
            self.link.receive(-1, lengths)
        if not self.link.is_last:
            self.link.send(1, lengths + x.shape[1])
        return lengths

    def reset(self) -> None:
        raise ValueError(f"`reset`: {ONCE}")

    def ring_size(self, tokens: int) -> int:
        return self.window

    @property
    def held_tokens(self) -> int:
        return self.window

    @property
    def is_initialized(self) -> bool:
        return not self.link.is_first

    def end_block(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        return self.all_layers[layer].end_block(x)

    def advance(self, tokens: Tokens) -> None:
        self.seen_tokens += tokens.length
        self.link.wait()


def split_text(
    input_ids: torch.Tensor, labels: torch.Tensor | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, torch.Tensor]:
    """
    This process's piece of a text.

    Args:
        input_ids: (batch, length), at least one token for every process.
        labels: (batch, length) ids to predict, not yet shifted; -100 is ignored.
        group: the processes, in the order of their pieces. If None, all.

    Returns:
        arguments of the causal model: `input_ids` and, if `labels` are given, `labels`, `shift_labels` (the label of a
        piece's last token is in the next piece) and `num_items_in_batch`, so that the losses of all processes add up
        to the mean over the whole text.

    Raises:
        ValueError: if there are fewer tokens than processes.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if input_ids.shape[1] < size:
        raise ValueError(f"`input_ids` has {input_ids.shape[1]} tokens, for {size} processes.")
    inputs = {"input_ids": input_ids.tensor_split(size, dim=1)[rank]}
    if labels is not None:
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        for name, x in (("labels", labels), ("shift_labels", shifted)):
            inputs[name] = x.tensor_split(size, dim=1)[rank].contiguous()
        inputs["num_items_in_batch"] = (shifted != -100).sum()
    return inputs


__all__ = ["ContextParallelCache", "split_text"]
