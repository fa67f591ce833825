"""Checks of arguments that operators share. Each raises a ValueError that names the argument, before any work."""

import torch


def check_sequences(**tensors: torch.Tensor) -> None:
    """Checks the tensors that determine the shapes of the others."""
    for name, x in tensors.items():
        if x.dim() != 4 or x.shape[1] == 0:
            raise ValueError(f"`{name}` must be (batch, length >= 1, heads, size), got {tuple(x.shape)}.")


def check_tensors(
    expected: dict[str, tuple[torch.Tensor | None, tuple[int, ...]]],
    first: str,
    beside: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> None:
    """
    Checks that each tensor that is not None has its shape and `dtype` (floating point if None), and is on the device
    of `beside`, the argument called `first`.
    """
    device = beside.device
    for name, (x, shape) in expected.items():
        if x is None:
            continue
        if x.shape != shape:
            raise ValueError(f"`{name}` must have shape {tuple(shape)}, got {tuple(x.shape)}.")
        if not (x.dtype.is_floating_point if dtype is None else x.dtype == dtype):
            wanted = "floating point" if dtype is None else str(dtype).removeprefix("torch.")
            raise ValueError(f"`{name}` must be {wanted}, got {x.dtype}.")
        if x.device != device:
            raise ValueError(f"`{name}` is on {x.device}, `{first}` on {device}.")


def check_stored(
    name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """
    Checks a tensor whose memory is read directly: dtype, shape, contiguity, and the device unless it is None.

    Raises:
        ValueError: with the tensor's name, and the actual and the expected properties.
    """
    if x.dtype == dtype and x.shape == shape and x.is_contiguous() and (device is None or x.device == device):
        return
    found = [str(x.dtype).removeprefix("torch."), str(tuple(x.shape)), *([] if device is None else [f"on {x.device}"])]
    found += [] if x.is_contiguous() else ["not contiguous"]
    wanted = f"{str(dtype).removeprefix('torch.')} {tuple(shape)}{'' if device is None else f' on {device}'}"
    raise ValueError(f"`{name}` must be {wanted} and contiguous, got {' '.join(found)}.")


def check_flags(name: str, flags: torch.Tensor | None, shapes: list[tuple[int, int]], x: torch.Tensor) -> None:
    """Checks that the flags of tokens are bool, have one of the shapes, and are on the device of x."""
    if flags is None:
        return
    if flags.dtype != torch.bool or tuple(flags.shape) not in shapes:
        wanted = " or ".join(dict.fromkeys(map(str, shapes)))
        raise ValueError(f"`{name}` must be bool of shape {wanted}, got {flags.dtype} {tuple(flags.shape)}.")
    if flags.device != x.device:
        raise ValueError(f"`{name}` is on {flags.device}, `x` on {x.device}.")


def check_inplace(initial_state: torch.Tensor | None, *others: torch.Tensor) -> None:
    """Checks that the state may be overwritten."""
    if initial_state is None or initial_state.dtype != torch.float32 or not initial_state.is_contiguous():
        raise ValueError("`inplace` needs a float32, contiguous `initial_state` to write the state to.")
    if needs_gradient(initial_state, *others):
        raise ValueError("`inplace` overwrites a state that the backward pass needs: call it under no_grad.")


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
