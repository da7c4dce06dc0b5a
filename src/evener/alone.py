"""Alone: the plain call on the first device, where no other has a share. It is only timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evener.journal import BACKWARD, FORWARD, INFERENCE, Journal, Phase, Stretch
from evener.reductions import Means
from evener.trees import derived, flatten, summed, unflatten


def run_alone(
    call: Callable[[], Any],
    journal: Journal,
    number: int,
    shares: Sequence[int],
    *,
    grad: bool,
    means_apart: bool = False,
) -> tuple[Any, float]:
    """Run the plain call.

    Its backward is the user's own. Its time is taken from where it enters the outputs to the end
    of all backward: that is what autograd can tell at the price of microseconds.

    Args:
        call: the call.
        journal: is told what the first device did.
        number: of the call.
        shares: all samples for the first device.
        grad: whether a backward may follow.
        means_apart: as for :func:`settled`.

    Returns:
        What the call returns, settled, and how many seconds it took.
    """
    kind = FORWARD if grad else INFERENCE
    start_s = time.perf_counter()
    outputs = settled(call(), means_apart=means_apart)
    end_s = time.perf_counter()
    stretches = (Stretch(0, kind, start_s, end_s),)
    shares = tuple(shares)
    journal.add(Phase(kind, number, shares, start_s, end_s, stretches))
    if grad:
        leaves = [outputs] if isinstance(outputs, Tensor) else flatten(outputs)[0]
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(_Backward(journal, number, shares))
                break
    return outputs, end_s - start_s


def settled(tree: Any, *, means_apart: bool = False) -> Any:
    """Outputs of one device that has all of a batch, as a team joins them: without reductions.

    Args:
        tree: the outputs.
        means_apart: whether means and sums become a :class:`~evener.reductions.Means` of one.
    """
    if type(tree) is Tensor:
        return tree
    leaves, structure = flatten(tree)
    numbers = summed(structure)
    if not numbers and not derived(structure):
        return tree
    apart = numbers if means_apart else ()
    return unflatten(
        structure, [Means(leaf) if i in apart else leaf for i, leaf in enumerate(leaves)]
    )


class _Backward:
    """Notes a backward: a hook where it begins, and what it leaves with autograd for the end."""

    __slots__ = ("journal", "number", "shares", "start_s")

    def __init__(self, journal: Journal, number: int, shares: tuple[int, ...]) -> None:
        self.journal = journal
        self.number = number
        self.shares = shares
        self.start_s = 0.0

    def __call__(self, _gradients: Any) -> None:
        self.start_s = time.perf_counter()
        torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        start_s, end_s = self.start_s, time.perf_counter()
        stretches = (Stretch(0, BACKWARD, start_s, end_s),)
        self.journal.add(Phase(BACKWARD, self.number, self.shares, start_s, end_s, stretches))
