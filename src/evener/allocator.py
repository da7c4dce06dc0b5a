"""The allocator: how the C library keeps the memory that tensors give back.

Each training step allocates and frees the same large tensors. As it comes, glibc returns their
memory to the system each time and asks for it again, empty, page by page: a sixth of the time of a
convolutional network's step, and a third where outputs are large, goes into page faults. While a
team runs, its processes keep what they have freed. Helpers, which are told before they start, also
use large pages, which the processor finds faster.

Another allocator (jemalloc, tcmalloc, musl's) does not listen to this, and needs it less.
"""

from __future__ import annotations

import ctypes
import os

#: Parameters of mallopt(3): memory at the top of the heap beyond which it is returned ...
_TRIM_THRESHOLD = -1
#: ... and the size from which an allocation is a mapping of its own, returned when freed.
_MMAP_THRESHOLD = -3
#: The largest value that mallopt takes.
_KEEP_BYTES = 2**31 - 1
#: What glibc's own adaptation arrives at in a program that frees large blocks (mallopt(3)).
_ADAPTED_MMAP_BYTES = 32 << 20


def helper_environment() -> dict[str, str]:
    """The environment variables that tell a helper's C library, before it starts."""
    if _is_tuned_by_user():
        return {}
    tunables = {"hugetlb": 1, "mmap_threshold": 1 << 32, "trim_threshold": 1 << 32}
    return {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{k}={v}" for k, v in tunables.items())}


def keep_memory() -> bool:
    """Let this process keep what it frees.

    Returns:
        Whether it does: not where the user has tuned the allocator, or it is not glibc's.
    """
    return not _is_tuned_by_user() and _set(_KEEP_BYTES, _KEEP_BYTES)


def return_memory() -> None:
    """Let this process return what it frees, as a program does that trains without us."""
    if _set(_ADAPTED_MMAP_BYTES, 2 * _ADAPTED_MMAP_BYTES):
        ctypes.CDLL(None).malloc_trim(0)


def _set(mmap_bytes: int, trim_bytes: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, mmap_bytes) and mallopt(_TRIM_THRESHOLD, trim_bytes))


def _is_tuned_by_user() -> bool:
    return any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
