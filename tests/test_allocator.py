"""The allocator: freed memory is kept, but where the user has decided otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from evener import allocator

PROGRAM = """
import resource, sys, torch
from evener import allocator
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    before = faults()
    for _ in range(20):
        torch.empty(12_000_000).fill_(1)
    return faults() - before
work()
plain = work()
print(allocator.keep_memory())
work()
kept = work()
allocator.return_memory()
returned = work()
print(plain > 10_000, kept < 1_000, returned > 10_000)
"""


@pytest.fixture(autouse=True)
def _untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name == "GLIBC_TUNABLES" or name.startswith("MALLOC_"):
            monkeypatch.delenv(name)


def test_kept_memory_has_no_page_faults_and_can_be_returned() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )

    assert result.stdout.split() == ["True", "True", "True", "True"]


def test_helpers_are_told_before_they_start() -> None:
    assert "glibc.malloc.hugetlb=1" in allocator.helper_environment()["GLIBC_TUNABLES"]


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_ARENA_MAX"])
def test_who_has_tuned_it_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "glibc.malloc.arena_max=1")

    assert allocator.helper_environment() == {}
    assert not allocator.keep_memory()
