"""Pending: gradients that wait for those of the other shards.

The backward of one shard's loss alone would keep one device busy. So its gradients are kept until
those of the other shards have come, and one joint backward runs on all devices::

    losses[0].backward()   kept                     ┐
    losses[1].backward()   the last: joint backward ┴──► .grad of the parameters

In plain PyTorch ``.grad`` would have its part after each of them. Who clears the gradients in
between means to clear that part too, so this must be seen. It is seen at one parameter, the
smallest: where it has no gradient yet it gets one of zeros, as a mark.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from evener.errors import StaleGradientError


class Waiting(Protocol):
    """Something that has gradients to wait with."""

    def run(self) -> None:
        """Run the backward of what has come."""

    def drop(self) -> None:
        """Forget what has come."""


class Pending:
    """The gradients of one network that wait.

    Attributes:
        lock: held while outputs are handed out, and while gradients come back: shards may be
            computed by several threads.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._waiting: dict[Waiting, None] = {}
        self._mark: _Mark | None = None
        self._parameters: list[tuple[nn.Parameter, int]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, waiting: Waiting, parameters: Iterable[nn.Parameter]) -> None:
        """Something has gradients now, and waits with them.

        Args:
            waiting: what.
            parameters: those of the network.
        """
        if not self._waiting:
            trainable = [p for p in parameters if p.requires_grad]
            self._parameters = [(p, p._version) for p in trainable]
            if trainable:
                self._mark = _Mark(min(trainable, key=Tensor.numel))
        self._waiting[waiting] = None

    def remove(self, waiting: Waiting) -> None:
        """It waits no longer."""
        self._waiting.pop(waiting, None)
        if not self._waiting:
            if self._mark is not None:
                self._mark.remove()
            self._mark = None
            self._parameters = []

    def ran(self) -> None:
        """A backward has added to the gradients; that is no sign of anything."""
        if self._mark is not None:
            self._mark.renew()

    def forget_if_cleared(self) -> None:
        """Forget all that waits if the user has cleared the gradients since."""
        if self._mark is not None and self._mark.was_cleared():
            for waiting in list(self._waiting):
                waiting.drop()

    def flush(self) -> None:
        """Run the backward of all that waits.

        Raises:
            StaleGradientError: if the parameters have changed meanwhile. What waited is forgotten.
        """
        self.forget_if_cleared()
        if not self._waiting:
            return
        if any(p._version != version for p, version in self._parameters):
            for waiting in list(self._waiting):
                waiting.drop()
            raise StaleGradientError(
                "the parameters were changed while the gradients of some shards were waiting for "
                "those of the others: these gradients are lost; call backward on the loss of each "
                "shard before the optimizer's step, or step with evener.gluon.Trainer, which does "
                "not wait"
            )
        for waiting in list(self._waiting):
            waiting.run()


class _Mark:
    """Tells whether a parameter's gradient was cleared."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._made: tuple[Tensor, int] | None = None
        if parameter.grad is None:
            parameter.grad = zeros = torch.zeros_like(parameter)
            self._made = (zeros, zeros._version)
        self.renew()

    def renew(self) -> None:
        """Take the gradient as it is."""
        self._gradient = self._parameter.grad
        self._version = 0 if self._gradient is None else self._gradient._version

    def was_cleared(self) -> bool:
        gradient = self._parameter.grad
        if gradient is None or gradient is not self._gradient:
            return True
        if gradient._version == self._version or gradient.layout != torch.strided:
            return False
        return not bool(gradient.any())

    def remove(self) -> None:
        """Where a mark is all that there is, there is no gradient."""
        if self._made is None:
            return
        zeros, version = self._made
        if self._parameter.grad is zeros and zeros._version == version:
            self._parameter.grad = None
