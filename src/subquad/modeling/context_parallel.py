"""
Context parallelism: one long text on several devices. Each device reads a piece of it, and every block receives the
states of the text before from the device before. Their size does not depend on the length.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from .cache import RecurrentCache
from .layer_state import LayerState, States
from .padding import Tokens


if TYPE_CHECKING:
    from transformers import PreTrainedModel


ONCE = "every forward pass needs a new cache from `context_parallel_cache`."


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


class LinkedLayer(LayerState):
    """
    States that come from the process before and go to the next.

    Args:
        shapes: the shape of each, without the batch, in the order in which they are sent.
        float32_names: those that are at least float32. The others have the dtype of the embeddings.
    """

    def __init__(self, link: _Link, shapes: dict[str, tuple[int, ...]], float32_names: tuple[str, ...]):
        super().__init__()
        self.link, self.shapes, self.float32_names = link, shapes, float32_names
        self.incoming: dict[str, torch.Tensor] | None = {} if link.is_first else None
        self.outgoing: dict[str, torch.Tensor] = {}
        self.x: torch.Tensor | None = None

    def dtype(self, name: str) -> torch.dtype:
        return torch.promote_types(self.x.dtype, torch.float32) if name in self.float32_names else self.x.dtype

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
        if self.link.is_last or not self.shapes:
            return x
        states = [self.outgoing[name].to(self.dtype(name)) for name in self.shapes]
        return _Send.apply(self.anchor(), self.link, x, *states)


class ContextParallelCache(RecurrentCache):
    """What [`context_parallel_cache`] makes: the caches of the pieces of one text, each on a process of a group."""

    is_recomputable = False

    def __init__(self, config: PreTrainedConfig, group: dist.ProcessGroup | None = None):
        super().__init__(config)
        self.link = _Link(group)
        self.layers = [
            LinkedLayer(self.link, self.link_shapes(config, number), self.float32_names)
            for number in range(len(self.layers))
        ]
        self.after_blocks = LinkedLayer(self.link, {}, self.float32_names)

    def link_shapes(
        self, config: PreTrainedConfig, number: int | None, names: tuple[str, ...] | None = None
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of a block's states, or of some of them, as they are sent."""
        shapes = self.state_shapes(config, number)
        return {
            name: tuple(self.size_of(name) if size is None else size for size in shape)
            for name, shape in shapes.items()
            if names is None or name in names
        }

    def size_of(self, name: str) -> int:
        """The size of a state that depends on the text."""
        raise ValueError(f"the state {name} grows with the text")

    def expect(self, x: torch.Tensor) -> None:
        """Takes the batch size, device and dtype of the states from the embeddings x (batch, length, width)."""
        for layer in self.all_layers:
            layer.x = x.new_empty(len(x), 0)

    def begin_call(self, tokens: Tokens) -> None:
        if tokens.mask is not None or tokens.cu_seqlens is not None:
            given = "`attention_mask`" if tokens.cu_seqlens is None else "`cu_seqlens` or `position_ids`"
            raise ValueError(f"{given}: a text on several devices has no padding and no packed documents.")
        if self.seen_tokens:
            raise ValueError(f"`cache`: {ONCE}")

    def begin_block(self, x: torch.Tensor) -> None:
        """Called with the input of a block."""
        if self.after_blocks.x is None:
            self.expect(x)

    def end_block(self, outputs: Any, layer: int) -> Any:
        """Called with the outputs of a block, (batch, length, width) the first of them; -1 is what follows them."""
        if isinstance(outputs, tuple):
            return self.all_layers[layer].end_block(outputs[0]), *outputs[1:]
        return self.all_layers[layer].end_block(outputs)

    def reset(self) -> None:
        raise ValueError(f"`reset`: {ONCE}")

    def advance(self, tokens: Tokens) -> None:
        self.seen_tokens += tokens.length
        self.link.wait()


def context_parallel_cache(model: "PreTrainedModel", group: dist.ProcessGroup | None = None) -> ContextParallelCache:
    """
    A cache with which an Eagle, Finch, Goose, RWKV-7a or Gecko reads one text in pieces on the processes of a group,
    one piece each. Passed as `cache`, it hands every block the states after the previous process's piece, and sends
    this process's states to the next. Gradients go back the same way, so the sum of all processes' gradients is the
    gradient of the whole text. While one process reads its piece in a block, the previous process is in the next
    block: with L blocks and R processes, a pass takes the time of L + R - 1 blocks.

    ```python
    inputs = split_text(input_ids, labels)  # every process has the whole text and takes its piece
    loss = model(**inputs, cache=context_parallel_cache(model)).loss
    loss.backward()
    ```

    The gradients must be summed over the processes. If they are averaged, as DistributedDataParallel does, multiply
    the loss by the number of processes.

    Every forward pass needs a new cache, and every process the same batch. Rows have neither padding nor boundaries of
    packed documents (for Gecko, BOS tokens separate documents). Pieces may have any length. Gradient checkpointing is
    not possible, because it reads a piece twice.

    Args:
        model: the model, without a wrapper such as DistributedDataParallel.
        group: the processes, in the order of their pieces. If None, all.

    Raises:
        ValueError: if the model cannot read a text in this way.
    """
    cache_class = getattr(model, "context_parallel_class", None)
    if cache_class is None or not issubclass(cache_class, model.cache_class):  # a subclass may need another cache
        raise ValueError(f"`model`: a {type(model).__name__} cannot read one text on several processes.")
    return cache_class(model.config, group)


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


__all__ = ["ContextParallelCache", "LinkedLayer", "context_parallel_cache", "split_text"]
