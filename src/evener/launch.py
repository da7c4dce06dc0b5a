"""Launch: how the process of a helper is started.

It is our own interpreter with a short program, not a fork: a process with threads, as torch has
them, cannot be forked safely. It inherits three descriptors and nothing else of ours.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO

from evener import allocator, lifelines
from evener.channel import Channel
from evener.devices import Device
from evener.errors import HelperStartError

#: The first lines are for who ends the main process, or presses Ctrl-C, while torch is imported:
#: Ctrl-C is for the main process, which tells us. Of the rest see ``lifelines``; a pipe that was
#: closed before it was asked to tell tells nothing.
_PROGRAM = """\
import fcntl, json, os, select, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
lifeline = int(sys.argv[4])
try:
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
except OSError:
    pass
poll = select.poll()
poll.register(lifeline, 0)
if poll.poll(0):
    os._exit(0)
sys.path[:] = json.loads(sys.argv[1])
arguments = json.loads(sys.argv[2])
try:
    os.sched_setaffinity(0, arguments[3])  # sooner than imports, which would disturb the others
except OSError:
    pass  # they were taken away, or pinning is forbidden: then it is slower, not wrong
from evener.process import main
main(*arguments, spin_s=float(sys.argv[3]), lifeline_fd=lifeline)
"""


def launch(
    device: Device, arena_fd: int, spin_s: float
) -> tuple[subprocess.Popen[bytes], Channel, int, FileIO]:
    """Start the process of a helper.

    Args:
        device: the device that it drives.
        arena_fd: the descriptor of the team's arena.
        spin_s: how long it looks before it sleeps, and so does who waits for it.

    Returns:
        The process, the channel to it, a descriptor of it (-1 where the system has none), and
        our end of its lifeline.

    Raises:
        HelperStartError: if there is no process.
    """
    if not sys.executable:
        raise HelperStartError("helpers need a Python interpreter; sys.executable is empty")
    if getattr(sys, "frozen", False):  # the "interpreter" would be this program once more
        raise HelperStartError(
            "helpers need a Python interpreter, and a frozen program has none; set sys.executable "
            "to one that can import torch and evener, and delete sys.frozen"
        )
    arguments = [arena_fd, os.getpid(), list(device.cores), device.label]
    process = None
    with ExitStack() as theirs, ExitStack() as ours:
        try:
            sock, its_sock = socket.socketpair()
            ours.callback(sock.close)
            theirs.callback(its_sock.close)
            lifeline, its_fd = lifelines.new()
            ours.callback(lifeline.close)
            theirs.callback(os.close, its_fd)
            with _without_interrupts():
                process = subprocess.Popen(  # noqa: S603 - our own interpreter, our own program
                    [
                        sys.executable,
                        *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                        "-c",
                        _PROGRAM,
                        json.dumps(sys.path),
                        json.dumps([its_sock.fileno(), *arguments]),
                        str(spin_s),
                        str(its_fd),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(its_sock.fileno(), arena_fd, its_fd),
                    env={**os.environ, **_environment(device)},
                    cwd=_folder(),
                )
        except OSError as error:
            raise HelperStartError(
                f"the helper of {device.label} could not be started: {error}"
            ) from error
        except BaseException:  # an interrupt that has waited
            if process is not None:
                process.kill()
                process.wait()
            raise
        ours.pop_all()
    try:
        pidfd = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        pidfd = -1
    return process, Channel(sock, pidfd, spin_s), pidfd, lifeline


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let Ctrl-C wait: it must not fall between a process and our knowing of it.

    The process inherits this, so that Ctrl-C in a terminal does not reach it before it has said
    that it is not concerned.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _folder() -> str:
    """Where a helper starts: here, unless that was deleted, where libraries do not load."""
    with suppress(OSError):
        return os.getcwd()
    return "/"


def _environment(device: Device) -> dict[str, str]:
    """What a helper's process needs to hear before its libraries are loaded."""
    threads = str(max(1, len(device.cores)))
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        **allocator.helper_environment(),
    }
