"""Split: a batch in parts, one for each device, and how a part knows its siblings.

:func:`split_and_load` gives plain tensors, views of the batch. Each carries a note, a
:class:`Shard`, that says which part of which batch it is::

    batch   │ shard 0 │ shard 1 │ shard 2 │     views; nothing is copied
                  │         │         │
                  └─────────┼─────────┘ notes
                          Split              the batch, the parts, the devices

So a network that is given one shard finds the whole batch, and can compute all parts at once (see
``explicit``). The note is of that tensor object alone: what is derived from a shard, or copied, or
given other memory, is no shard.

Source: ``split_data`` and ``split_and_load`` of ``mxnet.gluon.utils``, and what their arguments
mean. Shares that are not even are ours.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from evener.devices import DevicesSpec
from evener.devices import devices as _devices
from evener.errors import SharesError

#: The attribute of a tensor where its note is.
_NOTE = "_evener_shard"


class Split:
    """A batch that was split among devices.

    Args:
        source: the batch.
        shares: how much of it each device has.
        labels: the labels of the devices.
        batch_axis: the dimension that was cut.

    Attributes:
        source: the same memory, without a graph.
        shares: how much of it each device has.
        labels: the labels of the devices.
        batch_axis: the dimension that was cut.
        rounds: what a network keeps for the shards that it has not been given yet.
    """

    def __init__(
        self, source: Tensor, shares: Sequence[int], labels: Sequence[str], batch_axis: int
    ) -> None:
        self.source = source.detach()
        self.shares = tuple(shares)
        self.labels = tuple(labels)
        self.batch_axis = batch_axis
        self.rounds: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class Shard:
    """The note on a tensor that it is a shard.

    Args:
        split: of which batch.
        index: the how many-th.
        tensor: the tensor.

    Attributes:
        split: of which batch.
        index: the how many-th.
    """

    __slots__ = ("_form", "index", "split")

    def __init__(self, split: Split, index: int, tensor: Tensor) -> None:
        self.split = split
        self.index = index
        self._form = _form(tensor)
        setattr(tensor, _NOTE, self)

    @property
    def rows(self) -> slice:
        """Which part of the batch it is."""
        start = sum(self.split.shares[: self.index])
        return slice(start, start + self.split.shares[self.index])

    @staticmethod
    def of(tensor: Tensor) -> Shard | None:
        """The note of a tensor; None if it has none, or is no longer the part that it was."""
        note = getattr(tensor, _NOTE, None)
        if not isinstance(note, Shard) or note._form != _form(tensor):
            return None
        return note

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a tensor, or a tensor in a file, is no shard: its note is something empty."""
        return OrderedDict, ()  # of a type that torch.load accepts


def split_data(
    data: Any,
    num_slice: int,
    batch_axis: int = 0,
    even_split: bool = True,  # noqa: FBT001, FBT002 - Gluon's own signature
    shares: Sequence[int] | None = None,
) -> list[Tensor]:
    """Split a batch into slices.

    Args:
        data: a tensor (..., batch, ...), or what ``torch.as_tensor`` makes one of.
        num_slice: how many slices, one or more.
        batch_axis: the dimension to cut. Default: the first.
        even_split: whether all slices must have the same size. If not, they are near-equal, the
            larger ones first; there may be more slices than samples, the last are then empty.
        shares: the samples of each slice, such as from :func:`evener.gluon.shares`; zero is
            allowed. ``even_split`` then does not matter. Default: even or near-equal.

    Returns:
        The slices in order: views of ``data``, as many as ``num_slice``.

    Raises:
        ValueError: if the batch cannot be cut evenly and ``even_split`` is true, ``num_slice`` is
            below one, or ``data`` has no such dimension.
        SharesError: if ``shares`` are not ``num_slice`` whole numbers of zero or more whose sum is
            the batch size.

    Example:
        >>> x = torch.arange(10).view(5, 2)
        >>> [len(part) for part in split_data(x, 2, even_split=False)]
        [3, 2]
        >>> [len(part) for part in split_data(x, 2, shares=(4, 1))]
        [4, 1]
    """
    tensor, sizes, axis = _plan(data, num_slice, batch_axis, shares, even_split=even_split)
    return _cut(tensor, sizes, axis)


def split_and_load(
    data: Any,
    devices: DevicesSpec,
    batch_axis: int = 0,
    even_split: bool = True,  # noqa: FBT001, FBT002 - Gluon's own signature
    shares: Sequence[int] | None = None,
) -> list[Tensor]:
    """Split a batch into one shard for each device.

    A network that :func:`evener.gluon.initialize` has put on the devices computes each shard on
    its own device, all at the same time. CPU devices read the same memory, so nothing is copied.

    Args:
        data: as for :func:`split_data`.
        devices: as for :func:`evener.devices`. In a loop give the list that it returns; to find
            out what a word such as ``"cpu"`` means takes a millisecond.
        batch_axis: as for :func:`split_data`. A network takes only shards of the first dimension.
        even_split: as for :func:`split_data`.
        shares: as for :func:`split_data`. Give inputs and labels the same.

    Returns:
        One shard a device, in their order: plain tensors, views of ``data``.

    Raises:
        ValueError: as :func:`split_data`.
        DeviceError: if ``devices`` names what is not there.

    Example:
        >>> xs = split_and_load(torch.zeros(6, 2), "cpu*2", shares=(4, 2))
        >>> [tuple(x.shape) for x in xs]
        [(4, 2), (2, 2)]
    """
    labels = [device.label for device in _devices(devices)]
    tensor, sizes, axis = _plan(data, len(labels), batch_axis, shares, even_split=even_split)
    shards = _cut(tensor, sizes, axis)
    split = Split(tensor, sizes, labels, axis)
    for index, shard in enumerate(shards):
        Shard(split, index, shard)
    return shards


def has_batch(leaf: Any) -> bool:
    """Whether an argument of a network can be a shard: a tensor with a dimension."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _plan(
    data: Any, num_slice: int, axis: int, shares: Sequence[int] | None, *, even_split: bool
) -> tuple[Tensor, list[int], int]:
    """The data as a tensor, the size of each slice, and the dimension from the front."""
    tensor = torch.as_tensor(data)
    shape = tuple(tensor.shape)
    if num_slice < 1:
        raise ValueError(f"num_slice={num_slice}: expected one slice or more")
    if not -tensor.dim() <= axis < tensor.dim():
        raise ValueError(
            f"data with shape {shape} has no axis {axis} to split; "
            "give a tensor with a batch dimension, and its number as batch_axis"
        )
    axis %= tensor.dim()
    size = shape[axis]
    if shares is not None:
        sizes = [*shares]
        if (
            len(sizes) != num_slice
            or any(not isinstance(share, int) or share < 0 for share in sizes)
            or sum(sizes) != size
        ):
            raise SharesError(
                f"shares={tuple(shares)!r} for data with shape {shape}: expected {num_slice} "
                f"whole numbers of zero or more whose sum is {size}, the size of axis {axis}; "
                f"evener.gluon.shares(net, {size}) gives such"
            )
        return tensor, sizes, axis
    if even_split and size % num_slice:
        raise ValueError(
            f"data with shape {shape} cannot be evenly split into {num_slice} slices along axis "
            f"{axis}; use a batch size that is a multiple of {num_slice}, or give "
            "even_split=False for near-equal slices"
        )
    share, num_larger = divmod(size, num_slice)
    return tensor, [share + (i < num_larger) for i in range(num_slice)], axis


def _cut(tensor: Tensor, sizes: Sequence[int], axis: int) -> list[Tensor]:
    bounds = pairwise(accumulate(sizes, initial=0))
    return [tensor.narrow(axis, start, stop - start) for start, stop in bounds]


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
