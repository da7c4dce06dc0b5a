"""The arena: the host memory that the processes of a team share.

One anonymous file (``memfd_create``), mapped by every process of the team at whatever address
it gets; a :class:`Place` says where in it a tensor lies, and means the same in each process::

    ┌──────────────┬────────────────┬─────────┬─────────┬───────────────
    │ parameters   │ gradients of 1 │ piece 1 │ outputs │ free ...
    └──────────────┴────────────────┴─────────┴─────────┴───────────────
    offset 0                          the file is sparse: what is not touched costs nothing

The file has no name, so nobody else can open it, nothing is left behind whatever ends the
processes, and the small ``/dev/shm`` of a container is no limit. It is reserved far larger than
it will be; memory is taken when it is first written, so the arena grows without a new mapping.

A :class:`Region` is a part of it that is taken. Tensors over a region may outlive their
purpose, for the user may keep them: ``torch.frombuffer`` makes each tensor hold the region's
``memoryview``, so that object's reference count tells whether one is left, and a closed region
is used again only when none is. ``frombuffer`` also gives each tensor a storage of its own size: a
checkpoint of arena tensors holds their values and not the whole arena.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evener.errors import ArenaError
from evener.topology import memory_limit_bytes

#: Tensors begin at a multiple of a cache line, which is also enough for every vector instruction.
ALIGN_BYTES = 64
#: Regions begin at a page, so that no two processes write to one.
PAGE_BYTES = mmap.PAGESIZE


class Place(NamedTuple):
    """Where in an arena a tensor lies: plain numbers, the same for each process."""

    offset: int  # bytes from the start of the arena
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements, in any order of dimensions

    @property
    def num_bytes(self) -> int:
        """The memory that the values take, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


def lay_out(tensors: Iterable[Tensor], start: int = 0) -> tuple[list[Place], int]:
    """Reckon places for tensors, one behind the other.

    The places keep the order of dimensions in memory (``channels_last`` stays what it is); gaps
    and overlaps, as of an expanded tensor, are not kept.

    Args:
        tensors: what is to be placed; only their form is looked at.
        start: the offset in bytes of the first.

    Returns:
        One place a tensor, and the offset behind the last.
    """
    places = []
    offset = start
    for tensor in tensors:
        if tensor.is_contiguous():
            stride = tensor.stride()
        else:
            stride = torch.empty_like(tensor, device="meta").stride()
        place = Place(offset, tensor.dtype, tuple(tensor.shape), tuple(stride))
        places.append(place)
        offset += -(-place.num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return places, offset


def moved(places: Sequence[Place], by: int) -> list[Place]:
    """The same places, ``by`` bytes further on."""
    return [place._replace(offset=place.offset + by) for place in places]


class Region:
    """A taken part of an arena.

    Attributes:
        offset: where it starts, bytes from the start of the arena.
        num_bytes: its size.
    """

    def __init__(self, mapping: mmap.mmap, offset: int, num_bytes: int) -> None:
        self.offset = offset
        self.num_bytes = num_bytes
        self.closed = False
        self._memory = memoryview(mapping)[offset : offset + num_bytes]
        self._idle_count = sys.getrefcount(self._memory)

    def tensor(self, place: Place) -> Tensor:
        """A tensor over the memory at a place inside this region; it keeps the region taken."""
        if math.prod(place.shape) == 0:
            return torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
        count = 1 + sum((n - 1) * step for n, step in zip(place.shape, place.stride, strict=True))
        tensor = torch.frombuffer(
            self._memory, dtype=place.dtype, count=count, offset=place.offset - self.offset
        )
        # Not as a view: autograd forbids some changes in place of a view.
        return tensor.set_(tensor.untyped_storage(), 0, place.shape, place.stride)

    @property
    def words(self) -> memoryview:
        """The memory as whole numbers of 64 bits."""
        return self._memory.cast("q")

    @property
    def in_use(self) -> bool:
        """Whether a tensor over this region is left in this process."""
        return sys.getrefcount(self._memory) > self._idle_count

    def close(self) -> None:
        """Say that the region may be used again, once no tensor over it is left."""
        self.closed = True


class Arena:
    """The memory that a team shares; regions are taken by the main process only.

    Args:
        fd: a descriptor of another process's arena, to map it here. Default: a new one.

    Attributes:
        fd: the descriptor of its file.
        size_bytes: the most it can become.

    Raises:
        ArenaError: if the system gives no such file or no room for it among the addresses.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            self.fd, self._mapping = _reserve()
        else:
            self.fd = fd
            try:
                self._mapping = mmap.mmap(fd, 0)
            except OSError as error:
                raise ArenaError(
                    f"the team's shared memory could not be mapped ({error}); see `ulimit -v`"
                ) from error
        self.size_bytes = len(self._mapping)
        # By offset. Never changed in place: an interrupt must find it whole, and what is free is
        # what is not in it.
        self._taken: list[Region] = []

    def take(self, num_bytes: int) -> Region:
        """Take a region: the first gap that is large enough.

        Args:
            num_bytes: at least as many bytes; what is in them is left from earlier use.

        Raises:
            ArenaError: if the arena has no such gap.
        """
        taken = self._still_taken()
        size = max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
        for i, (offset, gap) in enumerate(self._gaps(taken)):
            if gap >= size:
                region = Region(self._mapping, offset, size)
                self._taken = [*taken[:i], region, *taken[i:]]
                return region
        self._taken = taken
        raise ArenaError(
            f"the shared memory of the team has no room for {num_bytes} bytes more: "
            f"{sum(r.num_bytes for r in taken)} of {self.size_bytes} are taken; "
            "use a smaller batch, or keep fewer outputs alive"
        )

    def region(self, offset: int, num_bytes: int) -> Region:
        """A region that the main process took, seen from a helper."""
        return Region(self._mapping, offset, num_bytes)

    @property
    def whole(self) -> Region:
        """All of it, for tensors that are read or written and then forgotten."""
        return Region(self._mapping, 0, self.size_bytes)

    def close(self) -> None:
        """Give the memory back, but for regions of which the user still holds a tensor."""
        if self.fd >= 0:
            for offset, gap in self._gaps(self._still_taken()):
                if gap:
                    self._mapping.madvise(mmap.MADV_REMOVE, offset, gap)
            os.close(self.fd)
            self.fd = -1

    def _still_taken(self) -> list[Region]:
        return [region for region in self._taken if not region.closed or region.in_use]

    def _gaps(self, taken: Sequence[Region]) -> Iterator[tuple[int, int]]:
        """The gap before each region, and the one behind the last: offset and bytes."""
        end = 0
        for region in taken:
            yield end, region.offset - end
            end = region.offset + region.num_bytes
        yield end, self.size_bytes - end


def normal_mode() -> AbstractContextManager[Any]:
    """Out of the user's inference mode: what is made in it cannot be changed in place later.

    Not where there is none: an interrupt may keep torch's guard alive until it is collected, and
    it then sets gradients on or off as they were when it was made.
    """
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()


def put(arena: Arena, tensors: Sequence[Tensor]) -> tuple[list[Place], Region]:
    """Copy tensors into a new region.

    Returns:
        Their places, and the region.
    """
    places, num_bytes = lay_out(tensors)
    region = arena.take(num_bytes)
    places = moved(places, region.offset)
    # Inference mode would make the tensors over the region unfit for a later in-place change.
    with normal_mode(), torch.no_grad():
        for place, tensor in zip(places, tensors, strict=True):
            region.tensor(place).copy_(tensor)
    return places, region


def _reserve() -> tuple[int, mmap.mmap]:
    """Make the file as large as the system lets us, up to four times the main memory."""
    try:
        fd = os.memfd_create("evener", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        raise ArenaError(
            f"the system gives no shared memory (memfd_create: {error}); helpers need Linux"
        ) from error
    os.fchmod(fd, 0o600)  # nobody else gets at it anyway, but that should not be for others to say
    size = 4 * max(memory_limit_bytes(Path("/")), 1 << 28) // PAGE_BYTES * PAGE_BYTES
    smallest = 1 << 26
    while True:
        try:
            os.ftruncate(fd, size)
            return fd, mmap.mmap(fd, size)
        except (OSError, ValueError, OverflowError) as error:
            # A limit on addresses (ulimit -v) or on file sizes (ulimit -f): take what there is.
            size = size // 2 // PAGE_BYTES * PAGE_BYTES
            if size < smallest:
                os.close(fd)
                raise ArenaError(
                    f"the system gives this process no {2 * size} bytes of shared memory "
                    f"({error}); see `ulimit -v` and `ulimit -f`"
                ) from error
