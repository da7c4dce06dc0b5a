"""A neighbour: other people's work on a device's cores, made on purpose.

Devices of one machine are rarely unequal when one would like to try unequal devices out. A
neighbour makes them so: busy processes on a device's cores, with which the scheduler shares
their time. Nothing pretends to be slow; the device is, as it is beside another program::

    core 1   │ours│busy│ours│busy│ours│busy ...      speed 0.5:  one busy process
    core 1   │ours│busy│busy│busy│ours│busy ...      speed 0.25: three

Linux gives each process on a core that wants to run a part of the time in proportion to its
weight, which its nice level decides: 1024 at nice 0, and about a quarter more with each level
less (sched(7), "The nice value"; ``sched_prio_to_weight`` in kernel/sched/core.c). One process of
ours on the core keeps the part ``speed`` if the weights of the others sum to

    own weight x (1/speed - 1)

so as many processes of our own nice level are started as fit into that, and one of a higher level
for the rest. That is the mean over many time slices (some milliseconds each) of a process that
always wants to run; one that waits a lot loses less, or waits longer for its turn. Caches and
memory are not contended for: the busy processes count in a register's worth of memory.

Where the kernel groups processes by session first (``kernel.sched_autogroup_enabled``, common on
desktops), nice levels count only within a session. So the busy processes stay in the session of
the process that starts them; a process of another session is slowed by another amount.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from evener.errors import DeviceError

if TYPE_CHECKING:
    from typing_extensions import Self

#: The weights of the nice levels -20 to 19 (kernel/sched/core.c: sched_prio_to_weight).
WEIGHTS = (
    *(88761, 71755, 56483, 46273, 36291, 29154, 23254, 18705, 14949, 11916),
    *(9548, 7620, 6100, 4904, 3906, 3121, 2501, 1991, 1586, 1277),
    *(1024, 820, 655, 526, 423, 335, 272, 215, 172, 137),
    *(110, 87, 70, 56, 45, 36, 29, 23, 18, 15),
)
_LOWEST, _HIGHEST = -20, 19
#: Below it, a core would get fifty processes and more.
MIN_SPEED = 0.02

# Ends when its parent has, however that ended: it is then another process's child. Ctrl-C in a
# terminal goes to it as well, and is its parent's to decide upon.
_PROGRAM = """\
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
while os.getppid() == int(sys.argv[1]):
    for _ in range(50_000):
        pass
"""


class Neighbour:
    """Slows whatever else runs on some cores, from ``start`` to ``stop``.

    As a context manager it starts at the beginning and stops at the end; it can come and go any
    number of times. Its processes also end when the process that started them ends, killed or
    not.

    Args:
        cores: the cores to be busy on, as the numbers that the system gives them.
        speed: what part of its own speed a process on one of these cores keeps, at least 0.02
            and below 1: 0.5 is one busy process on each core, 0.25 three.

    Attributes:
        cores: the cores, each once.
        speed: as given.

    Raises:
        DeviceError: if the speed is out of its range, there are no cores, or they are not among
            those that this process may use.

    Example:
        >>> core = min(os.sched_getaffinity(0))
        >>> with Neighbour([core], 0.25) as neighbour:
        ...     len(neighbour.pids)
        3
        >>> neighbour.pids
        ()
    """

    def __init__(self, cores: Sequence[int], speed: float) -> None:
        self.cores = tuple(dict.fromkeys(cores))
        self.speed = _checked(speed)
        self._processes: list[subprocess.Popen[bytes]] = []
        allowed = os.sched_getaffinity(0)
        if not self.cores:
            raise DeviceError(
                "a neighbour on no cores; expected one core or more, such as the cores of a CPU "
                "device (an accelerator has none, and cannot be slowed so)"
            )
        if not allowed.issuperset(self.cores):
            raise DeviceError(
                f"a neighbour on the cores {sorted(self.cores)}: expected cores among "
                f"{sorted(allowed)}, which this process may use"
            )

    @property
    def pids(self) -> tuple[int, ...]:
        """The busy processes; none while it is stopped."""
        return tuple(process.pid for process in self._processes)

    def start(self) -> None:
        """Begin to slow the cores; does nothing while it is doing so."""
        if self._processes:
            return
        levels = nice_levels(self.speed, os.getpriority(os.PRIO_PROCESS, 0))
        try:
            for core in self.cores:
                for level in levels:
                    process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
                        [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid())],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                    self._processes.append(process)
                    os.sched_setaffinity(process.pid, {core})
                    os.setpriority(os.PRIO_PROCESS, process.pid, level)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the busy processes; returns when they are gone."""
        for process in self._processes:
            process.kill()
        while self._processes:
            self._processes[-1].wait()
            self._processes.pop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def nice_levels(speed: float, own: int = 0) -> tuple[int, ...]:
    """Say which busy processes on a core leave one other process a part of its speed.

    Args:
        speed: the part, above 0 and below 1.
        own: the nice level of the process that is to be slowed. No busy process gets a lower
            one, which takes privileges. Default: 0.

    Returns:
        The nice level of each busy process, one or more: those of the level ``own``, then at most
        one other, whose weight is the nearest to what is missing.

    Example:
        >>> nice_levels(0.5), nice_levels(0.25), nice_levels(0.7)
        ((0,), (0, 0, 0), (4,))
    """
    own_weight = WEIGHTS[own - _LOWEST]
    num_equal, missing = divmod(own_weight * (1 / speed - 1), own_weight)
    equal = (own,) * int(num_equal)
    if equal and missing < WEIGHTS[-1] / 2:  # nearer to none at all
        return equal
    levels = range(own, _HIGHEST + 1)
    return (*equal, min(levels, key=lambda level: abs(WEIGHTS[level - _LOWEST] - missing)))


def parse_slow(text: str) -> dict[str, float]:
    """Read which devices are to be slowed, as the command line says it.

    Args:
        text: a device's label and the part of its speed that it is to keep, such as
            ``"cpu:1=0.5"``; several of them joined by commas.

    Returns:
        The speed of each device named.

    Raises:
        DeviceError: if it is not of this form, a speed is out of its range (see
            :class:`Neighbour`), or a device is named twice.

    Example:
        >>> parse_slow("cpu:1=0.5,cpu:0=0.25")
        {'cpu:1': 0.5, 'cpu:0': 0.25}
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z_]+:\d+)\s*=\s*(\S+)\s*", part.lower())
        if match is None:
            raise DeviceError(
                f"slow {part.strip()!r} is not understood; expected a device and a speed, such as "
                '"cpu:1=0.5" for half its speed, several of them joined by commas'
            )
        label, number = match.groups()
        if label in found:
            raise DeviceError(f"slow {text!r} names {label} twice; name each device once")
        try:
            found[label] = _checked(float(number))
        except ValueError as error:  # also a DeviceError
            raise DeviceError(
                f"slow {part.strip()!r}: expected a speed from {MIN_SPEED:g} to below 1, such as "
                "0.5 for half the speed"
            ) from error
    return found


def _checked(speed: float) -> float:
    if not (math.isfinite(speed) and MIN_SPEED <= speed < 1):
        raise DeviceError(
            f"a neighbour that leaves a speed of {speed!r}: expected {MIN_SPEED:g} to below 1, "
            "such as 0.5 for half the speed"
        )
    return speed
