"""Memory: errors that mean its end, and the kernel's count of those it has ended."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from evener.errors import ArenaError
from evener.memory import KillCount, is_memory_error


def test_what_the_allocator_raises_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)

    assert is_memory_error(caught.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("MPS backend out of memory"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (ImportError("mtrand.so: failed to map segment from shared object"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (ImportError("No module named 'x'"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("out of memory"), False),
        (ArenaError("no room"), False),
    ],
)
def test_which_errors_mean_it(error: BaseException, expected: bool) -> None:
    assert is_memory_error(error) is expected


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("4:memory:/box/one", "memory/box/one/memory.oom_control"),
        ("4:memory:/seen/from/outside", "memory/memory.oom_control"),
        ("0::/box", "box/memory.events"),
    ],
)
def test_the_kernels_count_of_the_processs_group(tmp_path: Path, group: str, file: str) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text(f"9:cpu:/\n{group}\n")
    path = tmp_path / "sys/fs/cgroup" / file
    path.parent.mkdir(parents=True)
    path.write_text("low 3\noom_kill 2\n")
    count = KillCount(7, tmp_path)
    assert not count.has_risen()

    (tmp_path / "proc/7/cgroup").unlink()  # it has ended
    path.write_text("low 3\noom_kill 3\n")
    count.renew()

    # What is no longer known stays as it was.
    assert count.has_risen()


def test_without_a_group_there_is_no_count(tmp_path: Path) -> None:
    count = KillCount(7, tmp_path)
    count.renew()

    assert not count.has_risen()
