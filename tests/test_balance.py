"""The balance, on simulated machines: many devices, noise, drifts, stops, and no torch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from evener.balance import NUM_SIZES, Balancer
from evener.shares import Cost, share_by_cost
from evener.trials import REST


@dataclass
class Machine:
    """A machine of simulated devices, and what happened on it.

    Attributes:
        costs: what samples truly cost on each device.
        noise: the spread of single calls.
        stolen: how often a device loses a time slice, and how many times as long it then takes.
        lag_s: how late every device starts where there are several.
        beyond_s: what a call of several devices takes beyond its slowest.
    """

    costs: list[Cost]
    noise: float = 0.0
    stolen: tuple[float, float] = (0.0, 1.0)
    lag_s: float = 0.0
    beyond_s: float = 0.0
    seed: int = 0
    shares: list[tuple[int, ...]] = field(default_factory=list)
    reached: list[float] = field(default_factory=list)  # part of the ideal, call by call
    seconds: list[float] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.balancer = Balancer(len(self.costs))
        self.draw = random.Random(self.seed)  # noqa: S311 - a simulation

    def run(
        self, num_calls: int, batch: int, longer: Callable[[int], float] = lambda _: 1.0
    ) -> None:
        """Make calls; each sample of call k is `longer(k)` times as long as usual."""
        for call in range(num_calls):
            choice = self.balancer.choose(batch)
            shares = choice.shares
            assert sum(shares) == batch
            assert min(shares) >= 0
            self.left_out += choice.left_out
            busy = [
                cost.seconds(share) * longer(call) * self.luck()
                for cost, share in zip(self.costs, shares, strict=True)
            ]
            self.shares.append(shares)
            self.reached.append(self.ideal_s(batch) / self.true_s(shares))
            self.seconds.append(self.true_s(shares))
            if any(shares[1:]) or choice.measured:
                lags = [self.lag_s if any(shares[1:]) else 0.0] * len(shares)
                lasted = max(map(float.__add__, busy, lags)) + (
                    self.beyond_s if any(shares[1:]) else 0.0
                )
                self.balancer.observe(shares, busy, lags, lasted)

    def luck(self) -> float:
        often, times = self.stolen
        stolen = times if self.draw.random() < often else 1.0
        return math.exp(self.draw.gauss(0, self.noise)) * stolen

    def true_s(self, shares: tuple[int, ...]) -> float:
        slowest = max(cost.seconds(n) for cost, n in zip(self.costs, shares, strict=True))
        return slowest + (self.lag_s + self.beyond_s if any(shares[1:]) else 0.0)

    def ideal_s(self, batch: int) -> float:
        alone = (batch, *[0] * (len(self.costs) - 1))
        return min(self.true_s(share_by_cost(batch, self.costs)), self.true_s(alone))

    def change(self, device: int, times: float) -> None:
        cost = self.costs[device]
        self.costs[device] = Cost(cost.fixed_s * times, cost.per_sample_s * times)

    def lately(self, num_calls: int) -> float:
        """The part of the ideal that the latest calls have reached."""
        return num_calls / sum(1 / reached for reached in self.reached[-num_calls:])

    def num_changes(self) -> int:
        return sum(a != b for a, b in zip(self.shares, self.shares[1:], strict=False))


def machine(num_devices: int, seed: int, *, fixed: float = 0.0, **options: float) -> Machine:
    """Devices of speeds over two orders of magnitude; `fixed` is in samples."""
    draw = random.Random(seed)  # noqa: S311 - a simulation
    paces = [1e-3 * 100 ** draw.random() for _ in range(num_devices)]
    costs = [Cost(fixed * pace * draw.random(), pace) for pace in paces]
    return Machine(costs, seed=seed, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_devices", [2, 3, 8, 16, 64])
@pytest.mark.parametrize("fixed", [0.0, 20.0])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_within_eight_calls_the_ideal_is_near(
    num_devices: int, fixed: float, noise: float
) -> None:
    for seed in range(3):
        made = machine(num_devices, seed, fixed=fixed, noise=noise)

        made.run(8, 64 * num_devices)
        made.run(24, 64 * num_devices)

        assert made.lately(24) >= 0.95


@pytest.mark.parametrize("num_devices", [2, 4, 16])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("times", [2.0, 0.5, 1.3, 8.0])
def test_a_change_is_followed_within_ten_calls(
    num_devices: int, device: int, times: float
) -> None:
    for seed in range(3):
        made = machine(num_devices, seed, noise=0.02)
        made.run(30, 64 * num_devices)
        made.change(device, times)

        made.run(10, 64 * num_devices)
        made.run(20, 64 * num_devices)

        assert made.lately(20) >= 0.95


def test_a_device_that_stops_is_left_out_and_one_that_recovers_comes_back() -> None:
    made = Machine([Cost(0, 1.0), Cost(0, 2.0), Cost(0, 1.0)], noise=0.02)
    made.run(30, 240)
    made.change(1, 30.0)
    made.run(10, 240)
    made.run(20, 240)
    assert made.lately(20) >= 0.95

    made.change(1, 1 / 30)
    before = len(made.shares)
    made.run(4000, 240)
    first = next(i for i, shares in enumerate(made.shares[before:]) if shares[1] > 10)
    # From the first trial that shows it, ten calls.
    tried = next(i for i, shares in enumerate(made.shares[before:]) if shares[1] > 0)
    assert first - tried <= 10
    assert made.lately(50) >= 0.95


def test_a_slow_drift_is_followed() -> None:
    made = Machine([Cost(0, 1.0), Cost(0, 1.0), Cost(0, 1.0)], noise=0.02)
    made.run(20, 300)
    for _ in range(70):  # to twice as slow
        made.change(1, 1.01)
        made.run(1, 300)

    assert made.lately(70) >= 0.94


def test_one_stolen_time_slice_moves_nothing() -> None:
    made = Machine([Cost(0, 1.0), Cost(0, 2.0)])
    made.run(20, 90)
    before = made.shares[-1]

    made.change(1, 20.0)
    made.run(1, 90)
    made.change(1, 1 / 20)
    made.run(20, 90)

    assert set(made.shares[20:]) == {before}


def test_noise_alone_does_not_flap() -> None:
    for seed in range(5):
        made = Machine([Cost(0, 1.0), Cost(0, 2.0)], noise=0.05, stolen=(0.01, 5.0), seed=seed)
        made.run(40, 90)
        settled = made.num_changes()
        made.run(400, 90)

        assert made.num_changes() - settled <= 20
        assert made.lately(400) >= 0.96


def test_samples_that_are_longer_in_some_calls_do_not_matter() -> None:
    for seed in range(5):
        made = Machine([Cost(0, 1.0), Cost(0, 2.0)], noise=0.02, seed=seed)
        draw = random.Random(seed)  # noqa: S311 - a simulation
        made.run(60, 90, longer=lambda _, draw=draw: math.exp(draw.gauss(0, 0.4)))  # type: ignore[misc]

        assert made.lately(40) >= 0.9


def test_what_changes_for_all_does_not_change_the_shares() -> None:
    made = machine(4, 0, noise=0.02)
    made.run(30, 256)
    for times in (2.0, 0.5, 4.0):
        for device in range(4):
            made.change(device, times)
        made.run(30, 256)

    assert made.lately(90) >= 0.95


# ------------------------------------------------------------------ batch sizes


def test_another_batch_size_needs_no_new_search() -> None:
    made = Machine([Cost(0, 1.0), Cost(0, 3.0)])
    made.run(10, 64)
    for batch in (1, 2, 7, 63, 65, 1000):
        made.run(1, batch)
        assert made.reached[-1] > 0.9


def test_the_number_of_sizes_is_bounded() -> None:
    made = Machine([Cost(0, 1.0), Cost(0, 3.0)])
    for batch in range(1, 3 * NUM_SIZES):
        made.run(1, batch)

    assert len(made.balancer._sizes) == NUM_SIZES


def test_fewer_samples_than_devices_leave_nobody_out() -> None:
    made = Machine([Cost(0, 1.0)] * 4)
    made.run(50, 3)

    assert made.left_out == []
    made.run(10, 40)
    assert made.shares[-1] == (10, 10, 10, 10)


def test_caps_are_kept() -> None:
    balancer = Balancer(2, caps=(10, 100))
    for _ in range(20):
        shares = balancer.choose(50).shares
        assert shares[0] <= 10
        balancer.observe(shares, [share * 1.0 for share in shares], [0.0, 0.0], 40.0)
    assert shares == (10, 40)


# ------------------------------------------------------------------ alone


@pytest.mark.parametrize("part", ["beyond_s", "lag_s"])
def test_where_sharing_costs_more_than_it_brings_the_first_device_works_alone(part: str) -> None:
    made = Machine([Cost(0, 1.0), Cost(0, 1.0)], noise=0.01, **{part: 40.0})
    made.run(20, 64)
    assert made.shares[-1] == (64, 0)
    assert made.left_out == [1]

    made.run(4000, 64)

    alone_s = 64.0
    assert sum(made.seconds[20:]) <= 4000 * alone_s * 1.01
    assert sum(shares != (64, 0) for shares in made.shares[20:]) >= 1  # it is tried again


def test_a_device_that_is_late_every_fourth_call_is_not_worth_it() -> None:
    # Its median is that of the first device; only the mean tells.
    made = Machine([Cost(0, 1.0), Cost(0, 1.0)], noise=0.01)
    late = iter([0.0, 0.0, 0.0, 200.0] * 1000)
    for _ in range(120):
        choice = made.balancer.choose(64)
        shares = choice.shares
        made.shares.append(shares)
        busy = [share * 1.0 for share in shares]
        lag = next(late) if shares[1] else 0.0
        if shares[1] or choice.measured:
            made.balancer.observe(shares, busy, [0.0, lag], max(busy[0], busy[1] + lag))

    assert made.shares[-20:].count((64, 0)) >= 19


def test_a_device_alone_is_measured_now_and_then_only() -> None:
    made = Machine([Cost(0, 1.0), Cost(0, 1.0)], beyond_s=50.0)
    made.run(20, 64)
    choices = [made.balancer.choose(64) for _ in range(REST // 2)]

    assert {choice.shares for choice in choices} == {(64, 0)}
    assert not any(choice.measured for choice in choices)


def test_the_first_device_rests_if_it_is_too_slow() -> None:
    made = Machine([Cost(0, 500.0), Cost(0, 1.0), Cost(0, 1.0)])
    made.run(30, 64)

    assert made.shares[-1] == (0, 32, 32)
    assert made.left_out == [0]


def test_a_guess_changes_nothing_in_the_trials() -> None:
    made = Machine([Cost(0, 1.0), Cost(0, 1.0)], beyond_s=50.0)
    made.run(20, 64)
    before = list(made.balancer._trials.num_missed)

    assert made.balancer.guess(64).shares == (64, 0)

    assert made.balancer._trials.num_missed == before
