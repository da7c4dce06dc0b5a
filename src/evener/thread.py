"""The user's thread: what a call changes in it, and gives back.

A plain ``finally`` gives back what an error interrupts, but Ctrl-C may come into the ``finally``
itself. So what would be felt long afterwards is given back once more, at the end of the call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch


class Mark:
    """Marks the time in which a thread is inside of a block."""

    def __init__(self) -> None:
        self.thread: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether this thread is inside."""
        return self.thread == threading.get_ident()

    @contextmanager
    def marked(self) -> Iterator[None]:
        """The block."""
        before, self.thread = self.thread, threading.get_ident()
        try:
            yield
        finally:
            self.thread = before


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block from a seed; torch's CPU generator is afterwards what it was before."""
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Keep this thread on the cores of a device, for the time of a call.

    Only for that time: a process that the user starts in between, such as a data loader's worker,
    inherits where its parent may run.
    """
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # pinning may be forbidden: slower, not wrong
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


@contextmanager
def restored(mark: Mark) -> Iterator[None]:
    """Leave this thread as it was, also where an interrupt comes into what restores it inside.

    A ``no_grad`` that is interrupted at its end, for example, leaves gradients off.

    Args:
        mark: is to be what it was, too.
    """
    grad, thread, cores = torch.is_grad_enabled(), mark.thread, os.sched_getaffinity(0)
    try:
        yield
    finally:
        torch._C._set_grad_enabled(grad)
        mark.thread = thread
        if os.sched_getaffinity(0) != cores:
            with suppress(OSError):
                os.sched_setaffinity(0, cores)
