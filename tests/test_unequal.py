"""Devices that are really unequal: neighbours, a quota, cores that two devices share.

How much a device gets depends on the machine, and is not asserted; what is asserted holds by a
wide margin. In every case the training is that of one device.
"""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import evener
from evener.neighbour import Neighbour
from evener.pickling import STATE_NAME

CORES = sorted(os.sched_getaffinity(0))
BATCH = 256

pytestmark = [
    pytest.mark.quiet,
    pytest.mark.skipif(len(CORES) < 2, reason="needs two cores"),
]


class Training:
    """A parallel module and its plain twin; both learn the same batches."""

    def __init__(self, devices: object) -> None:
        torch.manual_seed(0)
        self.plain = nn.Sequential(
            nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 5)
        ).double()
        self.module = copy.deepcopy(self.plain)
        evener.parallelize(self.module, devices)  # type: ignore[arg-type]
        self.shares: list[tuple[int, ...]] = []

    def run(self, num_steps: int) -> list[float]:
        """Train; returns the second device's part of each batch."""
        for _ in range(num_steps):
            x, y = torch.randn(BATCH, 64).double(), torch.randint(0, 5, (BATCH,))
            losses = [self.step(module, x, y) for module in (self.module, self.plain)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-9)
            self.shares.append(evener.report(self.module).shares)
        return [shares[1] / BATCH for shares in self.shares[-num_steps:]]

    @staticmethod
    def step(module: nn.Module, x: Tensor, y: Tensor) -> float:
        module.zero_grad()
        loss = functional.cross_entropy(module(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
        return float(loss.detach())

    def end(self) -> None:
        evener.release(self.module)
        pairs = zip(self.module.parameters(), self.plain.parameters(), strict=True)
        for mine, other in pairs:
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


@pytest.fixture
def two_cores() -> Iterator[None]:
    """The first two cores only, so that the second device has one core everywhere."""
    os.sched_setaffinity(0, CORES[:2])
    yield
    os.sched_setaffinity(0, CORES)


@pytest.mark.usefixtures("two_cores")
def test_the_shares_follow_a_neighbour_that_comes_and_goes() -> None:
    training = Training("cpu*2")

    training.run(15)
    with Neighbour(CORES[1:2], 0.15):
        with_neighbour = statistics.median(training.run(30)[12:])
    # Gone: it gets more than it had, as soon as it is tried again.
    num_after = 0
    while max(training.run(10)) <= with_neighbour:
        num_after += 10
        assert num_after < 600

    assert with_neighbour < 0.35
    report = evener.report(training.module)
    assert report.num_calls == len(training.shares)
    own = [device.own_samples_per_s for device in report.devices]
    assert all(speed for speed in own)
    training.end()


@pytest.mark.usefixtures("two_cores")
def test_the_first_device_can_be_the_slow_one() -> None:
    training = Training("cpu*2")

    with Neighbour(CORES[:1], 0.15):
        parts = training.run(30)[12:]

    assert statistics.median(parts) > 0.55
    training.end()


def test_devices_may_share_cores() -> None:
    first, second = evener.devices("cpu*2")[:2]
    devices = [
        evener.Device("cpu", 0, tuple(CORES[:1]), first.memory_bytes, first.name),
        evener.Device("cpu", 1, tuple(CORES[:2]), second.memory_bytes, second.name),
    ]
    training = Training(devices)

    training.run(12)

    assert all(sum(shares) == BATCH for shares in training.shares)
    training.end()


CGROUP = Path("/sys/fs/cgroup/cpu")


@contextlib.contextmanager
def quota(pid: int, part: float) -> Iterator[None]:
    """Let a process have that part of one core at most."""
    group = CGROUP / f"evener-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("10000")
        (group / "cpu.cfs_quota_us").write_text(str(int(part * 10000)))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):  # it may have ended
            (CGROUP / "cgroup.procs").write_text(str(pid))
        group.rmdir()


@pytest.mark.skipif(
    not os.access(CGROUP / "cgroup.procs", os.W_OK)
    or not (CGROUP / "cpu.cfs_quota_us").parent.exists(),
    reason="needs root and version 1 of cgroups",
)
@pytest.mark.usefixtures("two_cores")
def test_a_device_with_a_quota_gets_less() -> None:
    training = Training("cpu*2")
    training.run(10)
    team = vars(training.module)[STATE_NAME].way._run.team

    with quota(team._seats[1].member.pid, 0.2):
        parts = training.run(30)[12:]
        training.end()

    assert statistics.median(parts) < 0.4
