"""Outputs: joining what the devices returned into what one device returns.

Small tensors have come with the message. Large ones are still in the helpers: the joined tensor is
made over the arena, and each helper writes its rows straight to where the user will read::

    joined over the arena   │ rows of device 0 │ rows of device 1 │ rows of device 2 │
                              copied here        Write ─► helper     Write ─► helper

Its memory is used again when the user no longer holds the tensor (see ``arena``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evener import messages
from evener.arena import Arena, Place, lay_out
from evener.batches import Cut, TensorForm, check_outputs, is_joinable
from evener.dims import Dims
from evener.errors import BatchError
from evener.reductions import Means
from evener.strides import contiguous
from evener.team import Team
from evener.trees import Structure, ragged, summed, unflatten

#: Stand among the leaves for a joined tensor, and for one of means that stay apart.
_JOINED, _APART = object(), object()


class Outputs:
    """The joined outputs of a call.

    Args:
        team: the team.
        piece: the number of the call's pieces.
        cut: who has which part of the batch.
        dims: where the batch lies in the outputs.
        answers: for each device that works the structure and the leaves of its outputs; tensors
            of the main process as they are, those of helpers as ``messages.Output``.
        owners: where the batch has a grid: all of this is for each cell, and these are their
            devices. Default: it is for each device.

    Attributes:
        tensors: the joined tensors.
        forms: their forms; ``differentiable`` is whether a gradient can flow back on any device.

    Raises:
        BatchError: if the outputs do not fit together.
    """

    def __init__(
        self,
        team: Team,
        piece: int,
        cut: Cut,
        dims: Dims,
        answers: dict[int, tuple[Structure, list[Any]]],
        *,
        owners: Mapping[int, int] | None = None,
    ) -> None:
        self._team = team
        self._cut = cut
        self._owners = owners
        self.tensors: list[Tensor] = []
        self.forms: list[TensorForm] = []
        self._structure, leaves = answers[cut.lead]
        self._dims = dims.of_outputs([_form(leaf) for leaf in leaves], self._structure)
        self._leaves: list[Any] = []
        check_outputs(
            [
                (structure, [_form(leaf) for leaf in leaves])
                for structure, leaves in answers.values()
            ],
            [cut.share(device) for device in answers],
            [self._label(device) for device in answers],
            self._dims,
        )
        uneven, one_each = ragged(self._structure), summed(self._structure)
        #: For what is summed each device has one row.
        self._rows = Cut([int(part in answers) for part in range(max(answers) + 1)])
        #: Tensors that are joined when the helpers have written their parts.
        self._later: list[tuple[int, Callable[[], Tensor]]] = []
        # The first device's large outputs too, where they were made in portions.
        writes: dict[int, list[Place | None]] = {
            device: [] for device, (_, leaves) in answers.items() if any(map(_is_large, leaves))
        }
        columns = zip(*(leaves for _, leaves in answers.values()), strict=True)
        for i, (dim, parts) in enumerate(zip(self._dims, columns, strict=True)):
            if not isinstance(_form(parts[0]), TensorForm):
                self._leaves.append(parts[0])
                continue
            by_device = dict(zip(answers, parts, strict=True))
            part_cut = self._rows if i in one_each else cut
            join = self._join_without_batch if dim is None else partial(self._join, part_cut, dim)
            lengths = {d: _form(part).shape[1] for d, part in by_device.items() if i in uneven}
            if len(set(lengths.values())) > 1:
                join = partial(self._join_uneven, lengths)
            tensor, rows = join(by_device)
            if owners is not None:  # what follows has the bits of how it lies in memory
                tensor = contiguous(tensor)
            flows = any(_form(part).differentiable for part in parts)
            self.forms.append(
                TensorForm(
                    tuple(tensor.shape), tensor.dtype, flows, dim, lengths or None, i in one_each
                )
            )
            is_apart = cut.means_apart and (self.forms[-1].is_mean or i in one_each)
            self.tensors.append(tensor)
            self._leaves.append(_APART if is_apart else _JOINED)
            for device, places in writes.items():
                places.append(rows.get(device))
        self._write(piece, writes)
        for number, finish in self._later:
            self.tensors[number] = finish()

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """What the module returns, with these in the places of the joined tensors.

        Means that stay apart are a :class:`Means`.
        """
        rest = iter(tensors)
        leaves = [
            next(rest) if leaf is _JOINED else Means(next(rest)) if leaf is _APART else leaf
            for leaf in self._leaves
        ]
        return unflatten(self._structure, leaves)

    def _join(self, cut: Cut, dim: int, parts: dict[int, Any]) -> tuple[Tensor, dict[int, Place]]:
        """Join one tensor; the places are where helpers still have to write their rows."""
        if not any(_is_large(part) for part in parts.values()):
            return torch.cat([_values(part) for part in parts.values()], dim), {}
        first = _form(next(iter(parts.values())))
        shape = [*first.shape]
        shape[dim] = cut.size
        tensor, rows = joined_in_arena(self._team.arena, cut, shape, first.dtype, dim)
        for device, part in parts.items():
            if not _is_large(part):
                start, stop = cut.parts[device]
                tensor.narrow(dim, start, stop - start).copy_(_values(part))
                del rows[device]
        return tensor, rows

    def _join_uneven(
        self, lengths: dict[int, int], parts: dict[int, Any]
    ) -> tuple[Tensor, dict[int, Place]]:
        """Join one tensor whose parts differ in length too: what is missing is zero."""
        first = _form(next(iter(parts.values())))
        shape = (self._cut.size, max(lengths.values()), *first.shape[2:])
        tensor, rows = joined_in_arena(self._team.arena, self._cut, shape, first.dtype)
        tensor.zero_()
        for device, part in parts.items():
            if _is_large(part):
                place, length = rows[device], lengths[device]
                shape = (place.shape[0], length, *place.shape[2:])
                rows[device] = place._replace(shape=shape)
            else:
                start, stop = self._cut.parts[device]
                tensor[start:stop, : lengths[device]].copy_(_values(part))
                del rows[device]
        return tensor, rows

    def _join_without_batch(self, parts: dict[int, Any]) -> tuple[Tensor, dict[int, Place]]:
        """Join one tensor that is a mean over the batch, or the same on every device."""
        if not any(_is_large(part) for part in parts.values()):
            return self._mean({device: _values(part) for device, part in parts.items()}), {}
        first = _form(next(iter(parts.values())))
        shape = [len(parts), *first.shape]
        slots, rows = joined_in_arena(self._team.arena, self._rows, shape, first.dtype)
        by_device = dict(zip(parts, slots, strict=True))
        for device, part in parts.items():
            rows[device] = rows[device]._replace(
                shape=rows[device].shape[1:], stride=rows[device].stride[1:]
            )
            if not _is_large(part):
                by_device[device].copy_(_values(part))
                del rows[device]
        self._later.append((len(self.tensors), partial(self._mean, by_device)))
        return slots[0], rows

    def _mean(self, parts: dict[int, Tensor]) -> Tensor:
        """The mean weighted by shares (or all means); of what has none, the one value of all."""
        first = next(iter(parts.values()))
        if first.is_floating_point() or first.is_complex():
            if self._cut.means_apart:
                return torch.stack(list(parts.values()))
            total = torch.zeros_like(first)
            for device, part in parts.items():
                total += part * (self._cut.share(device) / self._cut.size)
            return total
        for device, part in parts.items():
            if not torch.equal(part, first):
                labels = [self._label(d) for d in (next(iter(parts)), device)]
                raise BatchError(
                    f"an output without a batch differs among the devices: {first} on "
                    f"{labels[0]}, {part} on {labels[1]}; return it with the batch in one of "
                    "its dimensions"
                )
        return first.clone()

    def _write(self, piece: int, writes: dict[int, list[Place | None]]) -> None:
        """Let those who have large outputs write them; also the first device, in portions."""
        by_device: dict[int, list[Place | None]] = {}
        for part, places in writes.items():
            by_device.setdefault(self._owner(part), []).extend(places)
        writing = [device for device, places in by_device.items() if any(places)]
        for device in writing:
            self._team.post(device, messages.Write(piece, by_device[device]))
        self._team.collect(writing)

    def _owner(self, part: int) -> int:
        return part if self._owners is None else self._owners[part]

    def _label(self, part: int) -> str:
        label = self._team.devices[self._owner(part)].label
        return label if self._owners is None else f"cell {part} ({label})"


def joined_in_arena(
    arena: Arena, cut: Cut, shape: Sequence[int], dtype: torch.dtype, dim: int = 0
) -> tuple[Tensor, dict[int, Place]]:
    """A tensor over the arena, whose memory is free when nobody holds it.

    Returns:
        The tensor, its values not set, and the place of each device's part of it along ``dim``.
    """
    (place,), num_bytes = lay_out([torch.empty(*shape, dtype=dtype, device="meta")])
    region = arena.take(num_bytes)
    place = place._replace(offset=region.offset)
    tensor = region.tensor(place)
    region.close()
    row_bytes = place.stride[dim] * dtype.itemsize
    return tensor, {
        device: place._replace(
            offset=place.offset + start * row_bytes,
            shape=(*shape[:dim], stop - start, *shape[dim + 1 :]),
        )
        for device, (start, stop) in cut.parts.items()
    }


def _form(leaf: Any) -> Any:
    """What the check of outputs sees of a leaf, wherever it lies."""
    if isinstance(leaf, messages.Output):
        return leaf.form
    return TensorForm.of(leaf) if is_joinable(leaf) else leaf


def _is_large(part: Tensor | messages.Output) -> bool:
    return isinstance(part, messages.Output) and part.values is None


def _values(part: Tensor | messages.Output) -> Tensor:
    """The values of a part of an output, without its graph."""
    if isinstance(part, Tensor):
        return part.detach()
    if not part.values:
        return torch.empty(part.form.shape, dtype=part.form.dtype)
    return torch.frombuffer(part.values, dtype=part.form.dtype).view(part.form.shape)
