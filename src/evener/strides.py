"""Strides: what a device computes from lies in memory in the same way, whichever device it is.

A sum over numbers that lie side by side is made in another order than one over numbers that lie
apart, and has other bits. A part of a tensor, though, lies as the whole does where it is a view of
it, and densely where it was sent. So with a grid every device takes dense copies of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor as they lie in memory, the outermost first.

    Example:
        >>> order_of(torch.zeros(2, 3, 4)), order_of(torch.zeros(2, 3, 4).transpose(0, 2))
        ((0, 1, 2), (2, 1, 0))
    """
    dims = range(tensor.dim())
    if tensor.is_contiguous():
        return tuple(dims)
    stride = torch.empty_like(tensor, device="meta").stride()
    return tuple(sorted(dims, key=lambda dim: -stride[dim]))


def dense(tensor: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
    """A copy without gaps, at an address that is a multiple of a cache line.

    Args:
        tensor: what is copied, without its graph.
        order: the dimensions as they are to lie, the outermost first. Default: as in its shape.

    Example:
        >>> dense(torch.zeros(2, 3).T).stride(), dense(torch.zeros(2, 3), (1, 0)).stride()
        ((2, 1), (1, 2))
    """
    stride, step = [0] * tensor.dim(), 1
    for dim in reversed(range(tensor.dim()) if order is None else order):
        stride[dim] = step
        step *= max(1, tensor.shape[dim])
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself if it lies as a new one of its shape would, else a copy that does.

    Not what torch's own does: that lets a dimension of size one have any stride.
    """
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != step:
            return dense(tensor)
        step *= max(1, size)
    return tensor
