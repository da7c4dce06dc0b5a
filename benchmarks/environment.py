"""What a result was measured on: processor, cores, versions, commit."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import psutil

from harness import REPOSITORY


def physical_cores() -> list[int]:
    """One processor number for each physical core that this process may use."""
    cores: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(cores.values())


def cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def commit() -> str:
    """The commit of this checkout, with `-dirty` if anything but results differs from it."""
    try:
        dirty = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
        return _git("rev-parse", "--short=12", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    git = shutil.which("git") or "git"
    command = [git, "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def describe(packages: tuple[str, ...], num_cores: int) -> dict[str, str]:
    """The lines of a result's "Environment"."""
    memory_gib = psutil.virtual_memory().total / 2**30
    return {
        "date": datetime.now(tz=timezone.utc).date().isoformat(),
        "commit": commit(),
        "processor": cpu_name(),
        "cores": f"{num_cores} used of {len(physical_cores())} usable",
        "memory": f"{memory_gib:.0f} GiB",
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def slug(text: str) -> str:
    """The text as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
