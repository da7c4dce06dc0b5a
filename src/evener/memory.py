"""Memory: how its end shows, as an error or as the kernel's out-of-memory killer.

On an accelerator and under a limit of addresses an allocation fails, and torch raises one of
several errors. Under a limit of the control group (a container's, as a rule) no allocation fails;
the kernel ends a process when it touches what is not there, by SIGKILL. The group counts these,
and the machine counts all of them.
"""

from __future__ import annotations

import errno
from pathlib import Path

import torch

from evener.errors import EvenerError

#: How torch's allocators begin to say it where they raise nothing but a RuntimeError, and others.
_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    # How the loader of libraries says it, for what is imported at the first use.
    "failed to map segment from shared object",
    "Cannot allocate memory",
)


def is_memory_error(error: BaseException) -> bool:
    """Whether an error says that a device has no memory left for its work.

    Example:
        >>> is_memory_error(MemoryError()), is_memory_error(RuntimeError("shape mismatch"))
        (True, False)
    """
    if isinstance(error, EvenerError):  # no room in the arena: fewer samples here do not help
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (RuntimeError, ImportError)) and any(
        text in str(error) for text in _TEXTS
    )


class KillCount:
    """Counts whom the kernel has ended for want of memory in the control group of a process.

    Args:
        pid: the process.
        root: where the file system begins.
    """

    def __init__(self, pid: int, root: Path = Path("/")) -> None:
        self._pid = pid
        self._root = root
        self._counts: dict[Path, int] = {}
        self.renew()

    def renew(self) -> None:
        """Look anew for the group, and what it has counted so far.

        Now and then, while the process lives: of one that has ended the group is not known.
        """
        counts = {path: _count(path) for path in self._files()}
        self._counts = counts or self._counts

    def has_risen(self) -> bool:
        """Whether one was counted since it was last looked at."""
        return any(_count(path) > before for path, before in self._counts.items())

    def _files(self) -> list[Path]:
        try:
            lines = (self._root / f"proc/{self._pid}/cgroup").read_text().splitlines()
        except OSError:
            return []
        files = [self._root / "proc/vmstat"]
        base = self._root / "sys/fs/cgroup"
        for line in lines:
            number, controllers, folder = line.split(":", 2)
            inside = folder.lstrip("/")
            # A container sees its own group as the root, whatever it is called outside.
            if "memory" in controllers.split(","):
                files += [base / "memory" / f / "memory.oom_control" for f in (inside, "")]
            elif number == "0":
                files += [base / f / "memory.events" for f in (inside, "")]
        return files


def _count(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    pairs = [line.split() for line in lines]
    return sum(int(pair[1]) for pair in pairs if pair[:1] == ["oom_kill"])
