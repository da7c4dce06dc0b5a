"""Lifelines: helpers end with the main process, whatever it or they are doing.

A lifeline is a pipe on which nothing is ever sent. The main process holds one end; the helper has
asked the system, with the other, to be killed when that closes::

    main process ══════ lifeline ══════ helper
         ✗ (however it ends)   ──────►  SIGKILL

The system closes it when the process ends, or becomes another program (``os.execv``), and kills
even a helper that is stopped, or that computes without letting its own threads run. The signal
for a parent's death would not do: it is for the death of the thread that has started the helper.
"""

from __future__ import annotations

import functools
import os
import weakref
from io import FileIO

_held: weakref.WeakSet[FileIO] = weakref.WeakSet()


@functools.cache
def _prepare() -> None:
    os.register_at_fork(after_in_child=_let_go)


def new() -> tuple[FileIO, int]:
    """A new lifeline: this process's end, and the descriptor of the helper's."""
    _prepare()
    theirs, ours = os.pipe()
    held = FileIO(ours, "wb")
    _held.add(held)
    return held, theirs


def _let_go() -> None:
    """In a process that the user has forked: it must not keep the helpers of the first alive."""
    for held in list(_held):
        held.close()
