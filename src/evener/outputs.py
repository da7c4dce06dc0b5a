"""Outputs: joining what the devices returned into what one device returns.

Small tensors have come with the message. Large ones are still in the helpers: the joined tensor is
made over the arena, and each helper writes its rows straight to where the user will read::

    joined over the arena   │ rows of device 0 │ rows of device 1 │ rows of device 2 │
                              copied here        Write ─► helper     Write ─► helper

Its memory is used again when the user no longer holds the tensor (see ``arena``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evener import messages
from evener.arena import Arena, Place, lay_out
from evener.batches import Cut, TensorForm, check_outputs, is_joinable
from evener.team import Team
from evener.trees import Structure, unflatten

#: Stand among the leaves for a joined tensor, and for one of means that stay apart.
_JOINED, _APART = object(), object()


class Means:
    """An output that is a mean over each device's own part, where these stay apart.

    Args:
        values: (devices that work,), in order.

    Attributes:
        values: the same.
    """

    def __init__(self, values: Tensor) -> None:  # not a dataclass, which would be taken apart
        self.values = values


class Outputs:
    """The joined outputs of a call.

    Args:
        team: the team.
        piece: the number of the call's pieces.
        cut: who has which part of the batch.
        answers: for each device that works the structure and the leaves of its outputs; tensors
            of the main process as they are, those of helpers as ``messages.Output``.

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
        answers: dict[int, tuple[Structure, list[Any]]],
    ) -> None:
        self._team = team
        self._cut = cut
        self.tensors: list[Tensor] = []
        self.forms: list[TensorForm] = []
        self._structure = answers[cut.lead][0]
        self._leaves: list[Any] = []
        check_outputs(
            [
                (structure, [_form(leaf) for leaf in leaves])
                for structure, leaves in answers.values()
            ],
            [cut.share(device) for device in answers],
            [team.devices[device].label for device in answers],
        )
        writes: dict[int, list[Place | None]] = {device: [] for device in cut.helpers}
        for parts in zip(*(leaves for _, leaves in answers.values()), strict=True):
            if not isinstance(_form(parts[0]), TensorForm):
                self._leaves.append(parts[0])
                continue
            tensor, rows = self._join(dict(zip(answers, parts, strict=True)))
            flows = any(_form(part).differentiable for part in parts)
            is_apart = cut.means_apart and _form(parts[0]).is_mean
            shape = () if is_apart else tuple(tensor.shape)
            self.forms.append(TensorForm(shape, tensor.dtype, flows))
            self.tensors.append(tensor)
            self._leaves.append(_APART if is_apart else _JOINED)
            for device, places in writes.items():
                places.append(rows.get(device))
        self._write(piece, writes)

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

    def _join(self, parts: dict[int, Any]) -> tuple[Tensor, dict[int, Place]]:
        """Join one tensor; the places are where helpers still have to write their rows."""
        first = _form(next(iter(parts.values())))
        if first.is_mean and self._cut.means_apart:
            return torch.stack([_values(part) for part in parts.values()]), {}
        if first.is_mean:
            total = torch.zeros((), dtype=first.dtype)
            for device, part in parts.items():
                total += _values(part) * (self._cut.share(device) / self._cut.size)
            return total, {}
        if not any(_is_large(part) for part in parts.values()):
            return torch.cat([_values(part) for part in parts.values()]), {}
        shape = (self._cut.size, *first.shape[1:])
        tensor, rows = joined_in_arena(self._team.arena, self._cut, shape, first.dtype)
        for device, part in parts.items():
            if not _is_large(part):
                start, stop = self._cut.parts[device]
                tensor[start:stop].copy_(_values(part))
                del rows[device]
        return tensor, rows

    def _write(self, piece: int, writes: dict[int, list[Place | None]]) -> None:
        """Let the helpers write their large outputs."""
        writing = [device for device, places in writes.items() if any(places)]
        for device in writing:
            self._team.post(device, messages.Write(piece, writes[device]))
        self._team.collect(writing)


def joined_in_arena(
    arena: Arena, cut: Cut, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, dict[int, Place]]:
    """A tensor over the arena, whose memory is free when nobody holds it.

    Returns:
        The tensor, its values not set, and the place of each device's rows in it.
    """
    (place,), num_bytes = lay_out([torch.empty(shape, dtype=dtype, device="meta")])
    region = arena.take(num_bytes)
    place = place._replace(offset=region.offset)
    tensor = region.tensor(place)
    region.close()
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    return tensor, {
        device: place._replace(
            offset=place.offset + start * row_bytes, shape=(stop - start, *shape[1:])
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
