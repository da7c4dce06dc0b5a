"""Slots: where a device adds up the gradients of its cells, in the tree of the grid.

A device with sixteen cells holds four sums at most, for those that are complete go on into one::

    cell 0 ──► slot 0     cell 1 is added to it     (0-1)
    cell 2 ──► slot 1     cell 3 is added to it     (2-3), and this to (0-1); slot 1 is free again
    cell 4 ──► slot 1     ...
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evener.cells import Strip
from evener.grid import Tree, num_slots


class Sum(NamedTuple):
    """What a message says of a sum of gradients."""

    level: int  # with number: its node of the tree
    number: int
    slot: int
    present: list[bool]  # for each gradient
    others: dict[int, bytes]  # those that are not in the slot (sparse ones), by their number

    def tensors(self, tensor_at: Callable[[int, int], Tensor]) -> list[Tensor | None]:
        """The gradients.

        Args:
            tensor_at: gives the memory in a slot for a gradient, by both their numbers.
        """
        return [
            pickle.loads(self.others[i])  # noqa: S301 - our own helper's
            if i in self.others
            else tensor_at(self.slot, i)
            if is_there
            else None
            for i, is_there in enumerate(self.present)
        ]


class Slots:
    """The sums of a device's gradients in the tree, each in a slot of memory.

    Args:
        strip: the device's cells.
        tensor_at: gives the memory in a slot for a gradient, by both their numbers.
    """

    def __init__(self, strip: Strip, tensor_at: Callable[[int, int], Tensor]) -> None:
        self._tensor_at = tensor_at
        self._free = list(range(num_slots(strip.start, strip.stop, strip.num_cells)))
        self._tree: Tree[_Sum] = Tree(strip.num_cells, self._add)

    @property
    def nodes(self) -> list[tuple[int, int, list[Tensor | None]]]:
        """(level, number) in the tree of each sum so far, and its gradients."""
        return [(node.level, node.number, node.value.gradients) for node in self._tree.nodes]

    @property
    def sums(self) -> list[Sum]:
        """The same, as a message tells it."""
        found = []
        for level, number, (slot, gradients) in self._tree.nodes:
            assert slot is not None  # noqa: S101 - only what was added to its left has none
            others = {
                i: pickle.dumps(each)
                for i, each in enumerate(gradients)
                if each is not None and not _is_dense(each)
            }
            found.append(Sum(level, number, slot, [g is not None for g in gradients], others))
        return found

    def push(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of a cell, which may be changed or freed afterwards."""
        if self._tree.has_left(0, number):
            self._tree.push(0, number, _Sum(None, _coalesced(gradients)))
            return
        slot = self._free.pop()
        sums = self._copied(slot, _coalesced(gradients), range(len(gradients)))
        self._tree.push(0, number, _Sum(slot, sums))

    def _add(self, left: _Sum, right: _Sum) -> _Sum:
        assert left.slot is not None  # noqa: S101 - only a right one has none
        # What was nothing, or sparse and so not in the slot, has its place there from now on.
        others = list(right.gradients)
        new = [
            i
            for i, (mine, theirs) in enumerate(zip(left.gradients, others, strict=True))
            if mine is None or (theirs is not None and _is_dense(theirs) and not _is_dense(mine))
        ]
        copied = self._copied(left.slot, others, new)
        for i in new:
            others[i], left.gradients[i] = left.gradients[i], copied[i]
        add_gradients(left.gradients, others)
        if right.slot is not None:
            self._free.append(right.slot)
        return left

    def _copied(
        self, slot: int, gradients: Sequence[Tensor | None], numbers: Sequence[int]
    ) -> list[Tensor | None]:
        found: list[Tensor | None] = [None] * len(gradients)
        pairs: tuple[list[Tensor], list[Tensor]] = ([], [])
        for i in numbers:
            gradient = found[i] = gradients[i]
            if gradient is not None and _is_dense(gradient):
                target = found[i] = self._tensor_at(slot, i)
                pairs[0].append(target)
                pairs[1].append(gradient)
        if pairs[0]:
            torch._foreach_copy_(*pairs)
        return found


class _Sum(NamedTuple):
    """The sum of the gradients of some cells; without a slot in memory that is not ours."""

    slot: int | None
    gradients: list[Tensor | None]


def add_gradients(
    left: list[Tensor | None], right: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Add gradients to others, in place where these are dense; what is None is nothing."""
    pairs: tuple[list[Tensor], list[Tensor]] = ([], [])
    for i, (mine, theirs) in enumerate(zip(left, right, strict=True)):
        if mine is None or theirs is None:
            left[i] = theirs if mine is None else mine
        elif _is_dense(mine) and _is_dense(theirs):
            pairs[0].append(mine)
            pairs[1].append(theirs)
        elif _is_dense(mine):
            mine.add_(theirs)
        else:
            left[i] = _coalesced([theirs + mine])[0]
    if pairs[0]:
        torch._foreach_add_(*pairs)
    return left


def _is_dense(gradient: Tensor) -> bool:
    return gradient.layout == torch.strided


def _coalesced(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [
        gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient
        for gradient in gradients
    ]
