"""Topology: what the system says of this machine's processors and memory.

Physical cores in the order in which the machine is built, what the process may use of them (its
cgroup's quotas), and how to cut them into equal groups. The functions that read take the root of
the file system, so that a test can show them any machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: More groups of cores than this cost more to keep in step than they bring.
MAX_GROUPS = 8


@dataclass(frozen=True, order=True)
class Core:
    """A physical core that this process may use, ordered as the machine is built."""

    node: int  # NUMA node
    cache: int  # the lowest CPU number that shares the last-level cache with it
    cpu: int  # the first of its hardware threads that this process may use


def read_cores(root: Path, allowed: Iterable[int]) -> list[Core]:
    """Read the physical cores of a machine from ``root/sys``, in the order of its topology.

    Args:
        root: the folder that holds ``sys``; ``/`` but for tests.
        allowed: the CPU numbers that the process may use.

    Returns:
        One entry for each physical core. What the system does not tell counts as one core a CPU,
        one cache and one node, so that the answer is never empty.
    """
    base = root / "sys/devices/system"
    nodes = {}
    for folder in (base / "node").glob("node[0-9]*"):
        for cpu in _parse_ranges(_read(folder / "cpulist")):
            nodes[cpu] = int(folder.name.removeprefix("node"))
    found: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(allowed):
        folder = base / f"cpu/cpu{cpu}"
        siblings = _parse_ranges(_read(folder / "topology/thread_siblings_list")) or [cpu]
        levels = {
            int(_read(index / "level") or 0): _parse_ranges(_read(index / "shared_cpu_list"))
            for index in (folder / "cache").glob("index[0-9]*")
        }
        # A level below the third belongs to one core: it groups nothing.
        last = max(levels, default=0)
        cache = min(levels[last], default=0) if last >= 3 else 0  # noqa: PLR2004
        found.setdefault(tuple(siblings), Core(nodes.get(cpu, 0), cache, cpu))
    return sorted(found.values())


def usable_cores(cores: Sequence[Core], quota: float) -> list[Core]:
    """Drop cores that a CPU quota does not pay for; a started core is not counted.

    Example:
        >>> len(usable_cores([Core(0, 0, cpu) for cpu in range(4)], quota=2.5))
        2
    """
    return list(cores)[: max(1, int(min(quota, len(cores))))]


def group_cores(cores: Sequence[Core], num_groups: int | None = None) -> list[tuple[int, ...]]:
    """Cut cores into equal groups.

    Args:
        cores: physical cores in the order of the topology, one or more.
        num_groups: how many groups. Default: one core each up to 8 cores; else one group for each
            shared cache, or NUMA node, where that gives 2 to 8 equal groups; else 8 equal groups.
            More groups than cores share cores in turn; cores that fill no group are left out.

    Returns:
        One tuple of CPU numbers a group.

    Example:
        >>> eight = [Core(0, 0 if cpu < 4 else 4, cpu) for cpu in range(8)]
        >>> group_cores(eight, 2)
        [(0, 1, 2, 3), (4, 5, 6, 7)]
        >>> group_cores(eight[:2], 3)
        [(0,), (1,), (0,)]
    """
    cpus = [core.cpu for core in cores]
    if num_groups is None:
        if len(cpus) <= MAX_GROUPS:
            return [(cpu,) for cpu in cpus]
        for key in (lambda core: (core.node, core.cache), lambda core: core.node):
            groups: dict[object, list[int]] = {}
            for core in cores:
                groups.setdefault(key(core), []).append(core.cpu)
            sizes = {len(group) for group in groups.values()}
            if 2 <= len(groups) <= MAX_GROUPS and len(sizes) == 1:  # noqa: PLR2004
                return [tuple(group) for group in groups.values()]
        num_groups = MAX_GROUPS
    if num_groups > len(cpus):
        return [(cpus[i % len(cpus)],) for i in range(num_groups)]
    size = len(cpus) // num_groups
    return [tuple(cpus[i * size : (i + 1) * size]) for i in range(num_groups)]


def cpu_quota(root: Path) -> float:
    """How many cores' time the process's cgroup, or one above it, may use; inf without a limit."""
    quota = float("inf")
    for folder in _cgroup_folders(root, "cpu"):
        # Version 2: "max 100000" or "150000 100000". Version 1: two files, -1 for no limit.
        words = _read(folder / "cpu.max").split() or [
            _read(folder / "cpu.cfs_quota_us"),
            _read(folder / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and all(re.fullmatch(r"\d+", word) for word in words):  # noqa: PLR2004
            quota = min(quota, int(words[0]) / max(1, int(words[1])))
    return quota


def memory_limit_bytes(root: Path) -> int:
    """The main memory in bytes, or the process's cgroup limit where that is lower."""
    match = re.search(r"MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"))
    limits = [int(match[1]) * 1024] if match else []
    for folder in _cgroup_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text.isdigit():
                limits.append(int(text))
    return min(limits, default=0)


def cpu_name(root: Path) -> str:
    """What the maker calls the CPU; ``"CPU"`` where the system does not tell."""
    match = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return re.sub(r"\s+", " ", match[1]).strip() if match else "CPU"


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The folders, innermost first, whose limits on a controller hold for this process."""
    folders = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controllers
            if not base.is_dir():
                base = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = base / path.lstrip("/")
        # In a container the path may be the host's and missing here: its parents still count.
        while True:
            folders.append(folder)
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return folders


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _parse_ranges(text: str) -> list[int]:
    """Read ``"0-2,5"`` as ``[0, 1, 2, 5]``."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers
