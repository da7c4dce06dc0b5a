"""The exchange through host memory: sums of gradients that lie in the arena.

Each helper has written its gradients to a region of its own, all regions laid out alike; the main
process has its own in private memory. With one helper the main process adds its own into the
helper's region, and that region *is* the sum. With more, the helpers first reduce among
themselves, each one segment of all regions into the first. (A reduce-scatter; what would be the
gather costs nothing, since the memory is shared.) ::

    region of 1   a1 │ b1 │ c1        helper 1: a1 += a2 += a3
    region of 2   a2 │ b2 │ c2        helper 2: b1 += b2 += b3     all at once
    region of 3   a3 │ b3 │ c3        helper 3: c1 += c2 += c3
                                      then main: region of 1 += its own

The order of addition is that of the devices, whatever their speed: the same pieces give the same
sum, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from evener.arena import Place, Region

#: Below this size the messages cost more than the helpers' cores bring.
SCATTER_BYTES = 1 << 18
#: A segment is summed in blocks that stay in a core's cache while the regions are added up.
_BLOCK_BYTES = 1 << 18


def segments(places: Sequence[Place], num_devices: int) -> list[list[Place]]:
    """Cut the memory of some places into parts of nearly equal size.

    Args:
        places: which gradients are to be summed, relative to the start of a region.
        num_devices: how many devices share the work.

    Returns:
        For each device the flat places it sums; together they cover every value once.

    Example:
        >>> place = Place(0, torch.float32, (10,), (1,))
        >>> [[(p.offset, p.shape) for p in part] for part in segments([place], 2)]
        [[(0, (5,))], [(20, (5,))]]
    """
    total = sum(place.num_bytes for place in places)
    parts: list[list[Place]] = [[] for _ in range(num_devices)]
    done = owner = 0  # bytes given out, and who gets the next
    for place in places:
        count, size = math.prod(place.shape), place.dtype.itemsize
        start = 0
        while start < count:
            end = total * (owner + 1) // num_devices  # of the owner's part, in bytes
            if done >= end:
                owner += 1
                continue
            length = min(count - start, -(-(end - done) // size))
            offset = place.offset + start * size
            parts[owner].append(Place(offset, place.dtype, (length,), (1,)))
            start += length
            done += length * size
    return parts


def add_up(regions: Sequence[Region], segment: Sequence[Place]) -> None:
    """Add the values of the later regions, in order, into the first, at some flat places."""
    for place in segment:
        tensors = [
            region.tensor(place._replace(offset=place.offset + region.offset))
            for region in regions
        ]
        step = max(1, _BLOCK_BYTES // place.dtype.itemsize)
        for start in range(0, place.shape[0], step):
            target = tensors[0][start : start + step]
            for tensor in tensors[1:]:
                target += tensor[start : start + step]


def add_own(sums: list[Tensor], own: list[Tensor]) -> None:
    """Add the main process's gradients into tensors over a region, all in one operation."""
    if sums:  # it refuses empty lists
        torch._foreach_add_(sums, own)
