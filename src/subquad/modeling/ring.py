"""Rings: buffers that hold the last `window` tokens of each row, the token at position p in row p % window."""

import torch

from .layer_state import LayerState
from .padding import expand_to
from .positions import TokenPositions


def with_capacity(x: torch.Tensor, entries: int) -> torch.Tensor:
    """x (batch, room, ...) with zeros for `entries` more entries."""
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, entries))


def entries_at(
    held: torch.Tensor, x: torch.Tensor, wanted: torch.Tensor, position: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    """
    The entries at the positions `wanted` (batch, n) of each row: from the call's tokens x (batch, tokens, ...) at the
    positions `position` (batch, tokens), which never decrease, or else from `held` (batch, n, ...). `real` (batch,
    tokens) is False for tokens that do not count.
    """
    before = position[:, :1] + 1 - real[:, :1].long()  # number of earlier tokens in the row
    brought = (wanted >= before) & (wanted <= position[:, -1:])
    index = torch.searchsorted(position.contiguous(), wanted.contiguous())  # of equal positions the first is real
    index = expand_to(index.clamp_max(x.shape[1] - 1), x).expand(-1, -1, *x.shape[2:])
    return torch.where(expand_to(brought, x), x.gather(1, index).to(held.dtype), held)


def restart(layer: LayerState, name: str, x: torch.Tensor, positions: TokenPositions, room: int) -> None:
    """Stores x (batch, length, ...) of each row's last packed document by position in a state (batch, room, ...)."""
    held, wanted = layer.get(name), torch.arange(room, device=x.device)[None]
    held = x[:, :0] if held is None else held
    held = with_capacity(held, room - held.shape[1])
    held = entries_at(held, x, wanted.expand(x.shape[0], -1), positions.kept_position, positions.kept)
    layer.replace({name: held.masked_fill(expand_to(wanted > positions.kept_position[:, -1:], x), 0.0)})


def ring_state(
    ring: torch.Tensor | None, x: torch.Tensor, position: torch.Tensor, real: torch.Tensor, window: int
) -> torch.Tensor:
    """
    The ring (batch, window, ...) after the tokens x (batch, tokens, ...) of [`entries_at`]. Slots without a token are
    zero.
    """
    last = position[:, -1:]
    if ring is None:
        ring = x.new_zeros(x.shape[0], window, *x.shape[2:])
    elif ring.shape[1] < window:  # a smaller ring that was never full: its tokens stay where they are
        ring = with_capacity(ring, window - ring.shape[1])
    wanted = last - (last - torch.arange(window, device=x.device)) % window
    return entries_at(ring, x, wanted, position, real).masked_fill(expand_to(wanted < 0, x), 0)


def write_to_ring(
    layer: LayerState,
    name: str,
    ring: torch.Tensor | None,
    x: torch.Tensor,
    positions: TokenPositions,
    window: int,
) -> torch.Tensor:
    """
    [`ring_state`] after a call's tokens. It may modify the layer's state of that name in place if nothing else needs
    it. A few tokens change only their own slots.
    """
    position, real = positions.kept_position, positions.kept
    few = positions.all_real and x.shape[1] <= window
    if ring is None or ring.shape[1] < window or not (few or x.shape[1] == 1):
        return ring_state(ring, x, position, real, window)
    index = expand_to(position % window, x).expand_as(x)
    rows = x.to(ring.dtype)
    if not positions.all_real:
        rows = torch.where(expand_to(real, x), rows, ring.gather(1, index))
    inplace = not layer.record_past and layer.can_modify(name, ring)
    return ring.scatter_(1, index, rows) if inplace else ring.scatter(1, index, rows)
