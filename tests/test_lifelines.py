"""Lifelines: a closed pipe ends a process that listens to it, and a forked one holds none."""

from __future__ import annotations

import os
import select

from evener import lifelines


def is_closed(fd: int) -> bool:
    """Whether nobody holds the other end any more."""
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(0))


def test_the_other_end_learns_when_ours_is_closed() -> None:
    ours, theirs = lifelines.new()
    assert not is_closed(theirs)
    assert not os.get_inheritable(ours.fileno())

    ours.close()

    assert is_closed(theirs)
    os.close(theirs)


def test_a_forked_process_does_not_hold_on_to_it() -> None:
    ours, theirs = lifelines.new()
    go_read, go_write = os.pipe()
    child = os.fork()
    if not child:
        os.read(go_read, 1)  # it lives on, as a worker of a data loader does
        os._exit(0)
    try:
        ours.close()  # as when this process ends

        assert select.poll()
        poll = select.poll()
        poll.register(theirs, 0)
        assert poll.poll(10_000)
    finally:
        os.write(go_write, b"x")
        os.waitpid(child, 0)
        for fd in (theirs, go_read, go_write):
            os.close(fd)
