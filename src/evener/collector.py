"""Collector: takes the gradients of a helper's shared tensors as soon as each is ready.

A hook moves each to its place in the arena while it is still in the core's cache, and leaves
``.grad`` empty. In a cell of a grid they stay as they came, for they are added up in a tree.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evener.arena import Place, Region


class Collector:
    """Collects the gradients of one backward after the other.

    Args:
        whole: the whole arena.

    Attributes:
        present: for each shared tensor whether its gradient is in its place.
        others: gradients that have no place in the arena (sparse ones), by number of the tensor.
    """

    def __init__(self, whole: Region) -> None:
        self._whole = whole
        self._targets: list[Place] | None = None
        self._loose: dict[int, Tensor] = {}
        self.present: list[bool] = []
        self.others: dict[int, bytes] = {}

    def hook(self, number: int) -> Callable[[Tensor], None]:
        """What a shared tensor calls when its ``.grad`` is ready."""
        # Not self: a graph holds tensors with their hooks where the garbage collector does not
        # look, and a guest would never go, with all of the arena.
        reference = weakref.ref(self)

        def collect(tensor: Tensor) -> None:
            this = reference()
            if this is not None:
                this._collect(number, tensor)

        return collect

    def begin(self, targets: Sequence[Place]) -> None:
        """A backward begins.

        Args:
            targets: where the gradient of each shared tensor goes.
        """
        self._targets = list(targets)
        self.present = [False] * len(targets)
        self.others = {}

    def begin_cell(self) -> None:
        """The backward of a cell begins: its gradients go nowhere, until :meth:`taken`."""
        self._targets = None
        self._loose = {}

    def taken(self, num: int) -> list[Tensor | None]:
        """The gradients of a cell, for so many shared tensors."""
        loose, self._loose = self._loose, {}
        return [loose.get(number) for number in range(num)]

    def _collect(self, number: int, tensor: Tensor) -> None:
        gradient = tensor.grad
        tensor.grad = None
        if gradient is None:
            return
        if self._targets is None:
            before = self._loose.get(number)
            self._loose[number] = gradient if before is None else before + gradient
            return
        if gradient.layout != torch.strided:
            total = gradient
            if number in self.others:
                total = pickle.loads(self.others[number]) + gradient  # noqa: S301 - our own
            self.others[number] = pickle.dumps(total.coalesce())
            return
        target = self._whole.tensor(self._targets[number])
        if self.present[number]:  # a checkpoint inside may reach it several times
            target.add_(gradient)
        else:
            target.copy_(gradient)
            self.present[number] = True
