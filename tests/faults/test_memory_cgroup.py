"""Memory that ends: under a limit of addresses, and under one of a memory control group."""

from __future__ import annotations

import copy
import os
import resource
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

import evener
from evener.errors import FaultWarning

#: What one sample takes in the forward, in bytes.
SAMPLE_BYTES = 1 << 25
SIZE = 16


class Hungry(nn.Module):
    """Takes much memory for each sample, and gives it back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        large = torch.ones(len(x), SAMPLE_BYTES // 8, dtype=torch.float64)
        y = y * large[:, :1]
        return y + large[:, -1:] - 1


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    outputs = model(x)
    outputs.square().sum().backward()
    return [outputs.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def model() -> Iterator[Hungry]:
    model = evener.parallelize(Hungry(), "cpu*2", shares="even")
    model(torch.zeros(2, 4, dtype=torch.float64))  # starts the helper
    yield model
    evener.release(model)


def helper() -> psutil.Process:
    (child,) = psutil.Process().children()
    return child


def limit_addresses(room: int) -> None:
    child = helper()
    size = child.memory_info().vms + room
    resource.prlimit(child.pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def faults_of_step(model: nn.Module, x: Tensor) -> tuple[list[Tensor], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = step(model, x)
    return found, [str(each.message) for each in caught if each.category is FaultWarning]


def assert_survived(model: Hungry, faults: list[str], found: list[Tensor], x: Tensor) -> None:
    expected = step(copy.deepcopy(model), x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert len(faults) >= 1
    assert "cpu:1" in faults[0]
    assert "portions of" in faults[0]
    # How much fits changes a little, as memory falls into pieces: it may be halved once more.
    more = ["?"]
    for _ in range(3):
        if more:
            again, more = faults_of_step(model, x)
            torch.testing.assert_close(again, expected, rtol=1e-10, atol=1e-10)
    assert more == []
    shares = evener.report(model).shares
    assert shares[1] < SIZE // 2
    assert sum(shares) == SIZE


def test_where_addresses_end_a_piece_is_run_in_portions(model: Hungry) -> None:
    x = torch.randn(SIZE, 4, dtype=torch.float64)
    # A piece does not fit, half of one does, beside a thread's heap (64 MB) that may come.
    limit_addresses(15 * SAMPLE_BYTES // 2)

    found, faults = faults_of_step(model, x)

    assert_survived(model, faults, found, x)
    assert len(faults) == 1
    assert "had no memory for 8 samples" in faults[0]


def test_where_one_sample_does_not_fit_the_main_process_does_all(model: Hungry) -> None:
    limit_addresses(SAMPLE_BYTES // 8)

    for _ in range(2):  # a piece in portions of one; then a piece of one
        with pytest.warns(FaultWarning, match="cpu:1 had no memory for .*the main process"):
            model(torch.ones(SIZE, 4, dtype=torch.float64))

    model(torch.ones(SIZE, 4, dtype=torch.float64))
    assert evener.report(model).shares == (SIZE, 0)


# ------------------------------------------------------------------ a control group


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of our own, of either version; its limit is yet to be set."""
    base = Path("/sys/fs/cgroup")
    base = base / "memory" if (base / "memory").is_dir() else base
    folder = base / f"evener-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    if not any((folder / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
        folder.rmdir()
        pytest.skip("control groups have no limit of memory here")
    yield folder
    for _ in range(100):
        with suppress(OSError):  # one that is about to end is still in it
            folder.rmdir()
            break
        time.sleep(0.02)


def test_whom_the_system_ends_for_memory_gets_smaller_portions(model: Hungry, group: Path) -> None:
    x = torch.randn(SIZE, 4, dtype=torch.float64)
    (group / "cgroup.procs").write_text(str(helper().pid))
    name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    try:
        # What it had before is counted in its old group, if at all.
        (group / name).write_text(str(4 * SAMPLE_BYTES))
    except OSError as error:
        (group.parent / "cgroup.procs").write_text(str(helper().pid))
        pytest.skip(f"the limit cannot be set: {error}")
    time.sleep(1.1)  # evener looks for the group now and then
    model(torch.zeros(2, 4, dtype=torch.float64))

    found, faults = faults_of_step(model, x)

    assert_survived(model, faults, found, x)
    assert "out-of-memory killer" in faults[0]
