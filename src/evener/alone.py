"""Alone: the plain call on the first device, where no other has a share. It is only timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from evener.journal import BACKWARD, FORWARD, INFERENCE
from evener.timing import Timing
from evener.trees import flatten

ResultT = TypeVar("ResultT")


def run_alone(call: Callable[[], ResultT], timing: Timing, *, grad: bool) -> ResultT:
    """Run the plain call.

    Its backward is the user's own. Its time is taken from where it enters the outputs to the end
    of all backward: that is what autograd can tell at the price of microseconds.

    Args:
        call: the call.
        timing: its stop watch.
        grad: whether a backward may follow.

    Returns:
        What the call returns.
    """
    timing.begin(FORWARD if grad else INFERENCE, [])
    with timing.own_piece():
        outputs = call()
    timing.end()
    if grad:
        _time_backward(outputs, timing)
    return outputs


def _time_backward(outputs: Any, timing: Timing) -> None:
    def begin(_gradients: Any) -> None:
        worked: list[tuple[int, float, float]] = []
        timing.begin(BACKWARD, worked)
        start_s = time.perf_counter()

        def end() -> None:
            worked.append((0, start_s, time.perf_counter()))
            timing.pieces()
            timing.end()

        torch.autograd.Variable._execution_engine.queue_callback(end)

    leaves = [outputs] if isinstance(outputs, Tensor) else flatten(outputs)[0]
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(begin)
            return
