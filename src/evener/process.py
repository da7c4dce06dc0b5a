"""The process of a helper: how it begins, serves and ends.

It is started as a plain interpreter that runs :func:`main` (see ``launch``), and knows its main
process by three inherited descriptors alone: the channel's, the arena's, and a lifeline. It ends
when the channel closes or the main process ends, however that happens: the system kills it then,
and a thread of its own waits for the main process's descriptor, even while the user's module
computes.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading

import torch

from evener import messages
from evener.arena import Arena
from evener.channel import Channel, ChannelClosedError
from evener.helper import HELPER_VARIABLE, Helper
from evener.printing import redirect

#: The main process may rest as long as it likes between two calls.
_FOREVER_S = 1e9


def main(
    channel_fd: int,
    arena_fd: int,
    main_pid: int,
    cores: list[int],
    _label: str,
    *,
    spin_s: float,
    lifeline_fd: int,
) -> None:
    """Serve the main process until it ends or closes the channel.

    Args:
        channel_fd: the inherited descriptor of the channel's socket.
        arena_fd: the inherited descriptor of the arena.
        main_pid: the main process.
        cores: the CPU cores to compute on, one thread on each.
        _label: what the device is called, for whoever looks at the list of processes.
        spin_s: how long a wait looks before it sleeps.
        lifeline_fd: the inherited descriptor of a pipe that closes with the main process.
    """
    pid = os.getpid()
    os.environ[HELPER_VARIABLE] = str(pid)
    pidfd = _watch_main_process(main_pid, lifeline_fd)
    torch.set_num_threads(len(cores))
    helper = Helper(Arena(arena_fd))
    channel = Channel(socket.socket(fileno=channel_fd), pidfd, spin_s)
    flush = redirect(channel, _FOREVER_S)
    channel.send(messages.Reply(messages.Done(), []), _FOREVER_S)
    while True:
        try:
            reply = helper.answer(channel.receive(_FOREVER_S))
            if os.getpid() != pid:  # a process that the module has forked must not answer, too
                os._exit(1)
            flush()
            channel.send(reply, _FOREVER_S)
        except ChannelClosedError:
            sys.stdout.flush()
            sys.stderr.flush()
            # Not sys.exit: a thread that the user's module left behind must not keep us.
            os._exit(0)


def _watch_main_process(main_pid: int, lifeline_fd: int) -> int:
    """End this process as soon as the main process ends; returns its process descriptor, or -1.

    As a rule the system has done so already (see ``lifelines``), but a process that the user's
    program has forked in its own way may hold the other end of the lifeline.
    """
    try:
        pidfd = os.pidfd_open(main_pid)
    except (AttributeError, OSError):
        pidfd = -1
    if os.getppid() != main_pid:  # it ended before it could be watched
        os._exit(0)
    ends = select.poll()
    ends.register(lifeline_fd, 0)  # a hang-up is told without being asked for
    if pidfd >= 0:
        ends.register(pidfd, select.POLLIN)

    def watch() -> None:
        while not ends.poll(None if pidfd >= 0 else 500):
            if os.getppid() != main_pid:
                break
        os._exit(0)

    threading.Thread(target=watch, name="evener-watch", daemon=True).start()
    return pidfd
