"""Gradients: from those of the joined outputs to those of the parameters and inputs.

Each helper writes the gradients of its piece into a region of its own, laid out like the
parameters; the main process has those of the first device in private memory. What is returned lies
over the arena: the first helper's region, to which all others are added (see ``exchange.host``).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evener import messages
from evener.arena import Place, Region, moved, put
from evener.batches import Cut
from evener.exchange import host
from evener.outputs import joined_in_arena
from evener.piece import Piece, Settings
from evener.team import Team


def own_gradients(
    piece: Piece,
    gradients: Sequence[Tensor | None],
    trainable: Sequence[Tensor],
    *,
    keep_graph: bool,
) -> list[Tensor | None]:
    """Run the backward of the main process's piece.

    Args:
        piece: the piece, after its forward.
        gradients: those of its outputs, or None.
        trainable: the shared tensors that require a gradient.
        keep_graph: whether another backward may follow.

    Returns:
        The gradients of the piece's inputs, then those of ``trainable``. No ``.grad`` is touched,
        and no hook of a trainable tensor runs: these are for the full gradient.
    """
    wanted = [*piece.inputs, *trainable]
    outputs, with_gradients = piece.roots(gradients)
    if not outputs or not wanted:
        return [None] * len(wanted)
    with _without_hooks(trainable):
        return list(
            torch.autograd.grad(
                outputs, wanted, with_gradients, retain_graph=keep_graph, allow_unused=True
            )
        )


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    hooked = [(tensor, tensor._backward_hooks) for tensor in tensors if tensor._backward_hooks]
    for tensor, _ in hooked:
        tensor._backward_hooks = None
    try:
        yield
    finally:
        for tensor, hooks in hooked:
            tensor._backward_hooks = hooks


# ------------------------------------------------------------------ of the inputs


class InputGradient:
    """The gradient of one input: each device writes its part of it.

    Args:
        team: the team.
        cut: who has which part of the batch.
        tensor: the input.
        dim: the dimension of the batch; None where every device got all of it.

    Attributes:
        places: where each device's part goes.
    """

    def __init__(self, team: Team, cut: Cut, tensor: Tensor, dim: int | None) -> None:
        self._whole = team.arena.whole
        self._rows: Tensor | None = None
        if dim is not None:
            self._rows, self.places = joined_in_arena(
                team.arena, cut, tensor.shape, tensor.dtype, dim
            )
        else:  # every device got it: their gradients are added up
            slots, self._region = put(team.arena, [tensor] * len(cut.parts))
            self.places = dict(zip(cut.parts, slots, strict=True))

    def join(self, own: Tensor | None, reached: dict[int, bool]) -> Tensor | None:
        """Join the parts.

        Args:
            own: the main process's part, or None.
            reached: for each helper whether it has written a part.
        """
        if self._rows is None:
            self._region.close()  # used again only when a region is next taken, after this
        if own is None and not any(reached.values()):
            return None
        parts = {device: self._whole.tensor(place) for device, place in self.places.items()}
        for device, part in parts.items():
            if device == 0 and own is not None:
                part.copy_(own)
            elif not reached.get(device):
                part.zero_()
        if self._rows is not None:
            return self._rows
        return torch.stack(list(parts.values())).sum(0)


# ------------------------------------------------------------------ of the shared tensors


class SharedGradients:
    """The gradients of the shared tensors: one region a helper, added up in the end.

    Args:
        team: the team.
        piece: the number of the call's pieces.
        layout: the places of the shared tensors from the start of a region.
        num_bytes: the size of such a region.

    Attributes:
        regions: the region of each device whose gradients are not in private memory here.
    """

    def __init__(
        self,
        team: Team,
        piece: int,
        layout: Sequence[Place],
        num_bytes: int,
    ) -> None:
        self._team = team
        self._piece = piece
        self._layout = layout
        self._num_bytes = num_bytes
        self.regions: dict[int, Region] = {}

    def region(self, device: int) -> Region:
        """The region of one device."""
        if device not in self.regions:
            self.regions[device] = self._team.arena.take(self._num_bytes)
        return self.regions[device]

    def add_up(
        self,
        wanted: Sequence[int],
        own: Sequence[Tensor | None],
        answers: dict[int, messages.Gradients],
    ) -> list[Tensor | None]:
        """Add up the gradients of all devices.

        Args:
            wanted: the numbers of the tensors that require a gradient.
            own: their gradients in the main process.
            answers: what each helper has written.

        Returns:
            For each wanted tensor its gradient; None where no device has one.
        """
        reduced = self._reduce(answers)
        sums: list[Tensor | None] = []
        pairs: tuple[list[Tensor], list[Tensor]] = ([], [])
        for number, mine in zip(wanted, own, strict=True):
            total: Tensor | None = None
            for device, answer in answers.items():
                if answer.present[number] and (total is None or number not in reduced):
                    theirs = self._tensor(device, number)
                    total = theirs if total is None else total.add_(theirs)
                if number in answer.others:
                    other = pickle.loads(answer.others[number])  # noqa: S301 - our own helper's
                    total = other if total is None else total + other
            if total is None or mine is None:
                total = mine if total is None else total
            elif total.layout == mine.layout == torch.strided:
                pairs[0].append(total)
                pairs[1].append(mine)
            else:
                total = total + mine
            sums.append(total)
        host.add_own(*pairs)
        return sums

    def close(self) -> None:
        """Let the memory be used again, as soon as nobody holds a sum."""
        for region in self.regions.values():
            region.close()

    def _tensor(self, device: int, number: int) -> Tensor:
        region = self.regions[device]
        (place,) = moved([self._layout[number]], region.offset)
        return region.tensor(place)

    def _reduce(self, answers: dict[int, messages.Gradients]) -> frozenset[int]:
        """Let the helpers add up among themselves what all of them have, if that pays.

        Returns:
            The numbers of the tensors whose sum is now in the first helper's region.
        """
        common = [
            number
            for number in range(len(self._layout))
            if all(answer.present[number] for answer in answers.values())
        ]
        places = [self._layout[number] for number in common]
        num_bytes = sum(place.num_bytes for place in places)
        helpers = [device for device in self.regions if device and self._team.present[device]]
        if len(answers) <= 1 or num_bytes < host.SCATTER_BYTES or not helpers:
            return frozenset()
        spans = [
            messages.Span(region.offset, region.num_bytes) for region in self.regions.values()
        ]
        segments = dict(zip(helpers, host.segments(places, len(helpers)), strict=True))
        for device, segment in segments.items():
            self._team.post(device, messages.Reduce(spans, segment))
        answered = self._team.collect(helpers)
        lost = [device for device in helpers if isinstance(answered[device], messages.Lost)]
        if lost:
            self._finish([segments[device] for device in lost])
        return frozenset(common)

    def _finish(self, lost: Sequence[list[Place]]) -> None:
        """Finish the sums of helpers that have died in them, the same numbers in the same order.

        They may have added something to the first region, nobody knows how far. So what was in it
        is computed once more.
        """
        first, *others = self.regions.values()
        again = self._team.arena.take(self._num_bytes)
        try:
            self._team.repeat_backward(next(iter(self.regions)), self._piece, again)
            for segment in lost:
                host.add_up([again, *others], segment)
                for place in segment:
                    (there,), (here,) = moved([place], first.offset), moved([place], again.offset)
                    first.tensor(there).copy_(again.tensor(here))
        finally:
            again.close()


# ------------------------------------------------------------------ with a grid


@dataclass
class GridBackward:
    """One backward of a call in cells.

    Attributes:
        gradients: for each device those of its cells' outputs.
        slots: for each device the regions in which it adds up.
        inputs: for each input that wants a gradient what joins it; None where all cells share it.
        settings: for the helpers.
        keep_graph: whether another backward may follow.
        held: regions that are read until all gradients are there.
        sums: for each device what it has added up, and the node of the tree that this is.
        own: the first device's part of each input's gradient, if it was computed here.
    """

    gradients: dict[int, list[Tensor | None]]
    slots: dict[int, list[Region]]
    inputs: list[InputGradient | None]
    settings: Settings
    keep_graph: bool
    held: list[Region] = field(default_factory=list)
    sums: dict[int, list[tuple[int, int, list[Tensor | None]]]] = field(default_factory=dict)
    own: list[Tensor | None] = field(default_factory=list)

    def regions(self) -> list[Region]:
        """All that it has taken."""
        return [*self.held, *(region for slots in self.slots.values() for region in slots)]
