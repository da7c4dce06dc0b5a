"""Shares: exact tables first, then what holds for all batches and speeds."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evener.errors import SharesError
from evener.shares import Choice, Cost, FixedShares, share_by_cost, share_out, weights_of

batches = st.integers(0, 100_000)
#: From the smallest number that a float can be to the largest.
speeds = st.lists(
    st.one_of(
        st.just(0.0),
        st.floats(0, sys.float_info.max, allow_subnormal=True),
        st.floats(0.01, 100),
        st.integers(0, 10),
    ),
    min_size=1,
    max_size=9,
).filter(any)
#: Ratios of these are exact enough to be compared with fractions.
tame_speeds = st.lists(st.integers(0, 1000), min_size=1, max_size=9).filter(any)


# ------------------------------------------------------------------ tables


@pytest.mark.parametrize(
    ("batch", "speeds", "shares"),
    [
        # One device.
        (7, (1,), (7,)),
        (0, (3,), (0,)),
        # Equal devices: the earlier ones get what is left over.
        (8, (1, 1), (4, 4)),
        (9, (1, 1), (5, 4)),
        (1, (1, 1), (1, 0)),
        (10, (1, 1, 1), (4, 3, 3)),
        (11, (1, 1, 1), (4, 4, 3)),
        (3, (1, 1, 1, 1), (1, 1, 1, 0)),
        # Unequal devices: quotas 7.5 and 2.5, 6.67 and 3.33, 5.71 and 2.86 and 1.43.
        (10, (3, 1), (8, 2)),
        # Equal fractions, as here, go to the faster device, in whatever order they stand.
        (10, (1, 3), (2, 8)),
        (10, (2, 1), (7, 3)),
        (10, (4, 2, 1), (6, 3, 1)),
        # The largest fraction first, not the largest share: quotas 5.1, 2.4, 2.5.
        (10, (51, 24, 25), (5, 2, 3)),
        # Zero speeds rest, even where samples are left over.
        (5, (0, 1), (0, 5)),
        (5, (1, 0, 1), (3, 0, 2)),
        (1, (0, 0, 2), (0, 0, 1)),
        (0, (1, 0), (0, 0)),
        # Far apart in speed.
        (100, (1e-12, 1), (0, 100)),
        (4, (1e308, 1e308), (2, 2)),
        (4, (5e-324, 5e-324), (2, 2)),
        (3, (1e308, 5e-324), (3, 0)),
        # Measured speeds, images per second.
        (256, (1032.7, 517.3), (171, 85)),
        (512, (0.5, 0.25, 0.25), (256, 128, 128)),
    ],
)
def test_share_out(batch: int, speeds: Sequence[float], shares: tuple[int, ...]) -> None:
    assert share_out(batch, speeds) == shares


@pytest.mark.parametrize(
    ("batch", "speeds", "says"),
    [
        (-1, (1, 1), "not -1"),
        (4, (), "no devices"),
        (4, (1, -2), r"-2 in \(1, -2\)"),
        (4, (0, 0.0), "at least one"),
        (4, (1, math.nan), "nan"),
        (4, (1, math.inf), "inf"),
        (4, (-math.inf, 1), "-inf"),
        # Larger than any float.
        (4, (10**400, 1), "10000"),
    ],
)
def test_share_out_refuses(batch: int, speeds: Sequence[float], says: str) -> None:
    with pytest.raises(SharesError, match=says):
        share_out(batch, speeds)


@pytest.mark.parametrize(
    ("shares", "num_devices", "weights"),
    [
        ("even", 1, (1.0,)),
        ("even", 3, (1.0, 1.0, 1.0)),
        ((3, 1), 2, (3.0, 1.0)),
        ([0, 0.5], 2, (0.0, 0.5)),
        ((5,), 1, (5.0,)),
    ],
)
def test_weights_of(shares: Any, num_devices: int, weights: tuple[float, ...]) -> None:
    assert weights_of(shares, num_devices) == weights


@pytest.mark.parametrize(
    ("shares", "num_devices", "says"),
    [
        ("evn", 2, r"'evn' is not known; give \"auto\", \"even\", or one number a device"),
        ("", 2, "is not known"),
        ((3, 1), 3, r"\(3, 1\) has 2 numbers for 3 devices"),
        ((3, 1), 1, "has 2 numbers for 1 devices"),
        ((), 2, "has 0 numbers for 2 devices"),
        ((1, -1), 2, "-1.0"),
        ((0, 0), 2, "at least one device"),
        ((1, math.nan), 2, "nan"),
        ((1, math.inf), 2, "inf"),
        ((10**400, 1), 2, "expected"),
        (3, 2, 'shares=3: expected "auto", "even"'),
        (None, 2, "shares=None: expected"),
        ((1, None), 2, "expected"),
        (("a", "b"), 2, "expected"),
    ],
)
def test_weights_of_refuses(shares: Any, num_devices: int, says: str) -> None:
    with pytest.raises(SharesError, match=says):
        weights_of(shares, num_devices)


# ------------------------------------------------------------------ what holds for all


@given(batches, speeds)
@example(99_999, [1.0] * 9)
@example(1, [1e-300, 1.0])
def test_shares_sum_to_the_batch_and_none_is_negative(batch: int, speeds: list[float]) -> None:
    shares = share_out(batch, speeds)

    assert len(shares) == len(speeds)
    assert sum(shares) == batch
    assert min(shares) >= 0
    assert all(type(share) is int for share in shares)


@given(batches, speeds)
def test_who_does_not_run_gets_nothing(batch: int, speeds: list[float]) -> None:
    shares = share_out(batch, speeds)

    assert all(share == 0 for share, speed in zip(shares, speeds, strict=True) if speed == 0)


@given(batches, speeds)
@example(14, [math.nextafter(0.6, 0), 0.6, 12.6])  # where the quotas are equal, after rounding
@example(2, [1, 3])
def test_a_faster_device_never_gets_less(batch: int, speeds: list[float]) -> None:
    pairs = sorted(zip(speeds, share_out(batch, speeds), strict=True), key=lambda pair: pair[0])

    for (slow, less), (fast, more) in pairwise(pairs):
        assert less <= more or slow == fast


@given(batches, speeds)
def test_equal_devices_differ_by_one_sample_at_most_and_the_earlier_gets_it(
    batch: int, speeds: list[float]
) -> None:
    by_speed: dict[float, list[int]] = {}
    for speed, share in zip(speeds, share_out(batch, speeds), strict=True):
        by_speed.setdefault(speed, []).append(share)

    for shares in by_speed.values():
        assert shares == sorted(shares, reverse=True)
        assert shares[0] - shares[-1] <= 1


@given(batches, tame_speeds)
def test_no_share_is_a_whole_sample_away_from_its_quota(batch: int, speeds: list[int]) -> None:
    quotas = [Fraction(batch * speed, sum(speeds)) for speed in speeds]

    for share, quota in zip(share_out(batch, speeds), quotas, strict=True):
        assert abs(share - quota) < 1


@given(batches, tame_speeds)
def test_what_divides_evenly_is_divided_exactly(batch: int, speeds: list[int]) -> None:
    assert share_out(batch * sum(speeds), speeds) == tuple(batch * speed for speed in speeds)


@given(batches, speeds.map(lambda numbers: sorted(set(numbers))), st.randoms())
def test_unequal_devices_in_another_order_get_the_same(
    batch: int, different: list[float], random: Any
) -> None:
    shuffled = random.sample(different, len(different))

    assert dict(zip(shuffled, share_out(batch, shuffled), strict=True)) == dict(
        zip(different, share_out(batch, different), strict=True)
    )


@given(batches, tame_speeds, st.one_of(st.integers(1, 10**6), st.integers(-300, 300)))
def test_only_the_ratio_of_speeds_counts(batch: int, speeds: list[int], unit: int) -> None:
    # By a whole number, or by a power of two: the products are exact.
    scale = unit if unit > 0 else 2.0**unit

    assert share_out(batch, [speed * scale for speed in speeds]) == share_out(batch, speeds)


@given(batches, st.integers(1, 12))
def test_even_shares_are_as_even_as_can_be(batch: int, num_devices: int) -> None:
    shares = share_out(batch, weights_of("even", num_devices) or ())

    each, left = divmod(batch, num_devices)
    assert shares == (each + 1,) * left + (each,) * (num_devices - left)


# ------------------------------------------------------------------ by cost


@pytest.mark.parametrize(
    ("batch", "costs", "caps", "shares"),
    [
        (0, [(0, 1), (0, 1)], None, (0, 0)),
        (10, [(0, 1)], None, (10,)),
        (10, [(0, 1), (0, 1)], None, (5, 5)),
        (9, [(0, 1), (0, 2)], None, (6, 3)),
        # The fixed part counts only where there are samples ...
        (9, [(0, 1), (8, 1)], None, (9, 0)),
        (11, [(0, 1), (8, 1)], None, (10, 1)),
        # ... and a sample that would be late is better kept.
        (3, [(0, 1), (0, 100)], None, (3, 0)),
        (9, [(0, 1), (0, 2)], (4, 9), (4, 5)),
        (9, [(0, 1), (0, 2)], (0, math.inf), (0, 9)),
        (9, [(0, 1), (0, 2)], (4, 5), (4, 5)),
        # As in the picture: two hundred times as fast.
        (201, [(0, 200), (0, 1)], None, (1, 200)),
    ],
)
def test_share_by_cost(
    batch: int,
    costs: list[tuple[float, float]],
    caps: tuple[float, ...] | None,
    shares: tuple[int, ...],
) -> None:
    assert share_by_cost(batch, [Cost(*cost) for cost in costs], caps) == shares


@pytest.mark.parametrize(
    ("batch", "costs", "caps", "says"),
    [
        (-1, [(0, 1)], None, "not -1"),
        (1, [(0, 0)], None, "above zero a sample"),
        (1, [(-1, 1)], None, "zero or more"),
        (1, [(0, math.nan)], None, "nan"),
        (1, [(math.inf, 1)], None, "inf"),
        (9, [(0, 1), (0, 1)], (4, 4), r"9 samples for devices that can have \(4, 4\)"),
    ],
)
def test_share_by_cost_refuses(
    batch: int, costs: list[tuple[float, float]], caps: Any, says: str
) -> None:
    with pytest.raises(SharesError, match=says):
        share_by_cost(batch, [Cost(*cost) for cost in costs], caps)


seconds = st.one_of(st.floats(1e-7, 1e3), st.integers(1, 4).map(float))
costs = st.builds(Cost, st.one_of(st.just(0.0), seconds), seconds)


def slowest(devices: Sequence[Cost], shares: Sequence[int]) -> float:
    return max(cost.seconds(share) for cost, share in zip(devices, shares, strict=True))


@given(st.integers(0, 12), st.lists(st.tuples(costs, st.integers(0, 12)), min_size=1, max_size=3))
def test_no_other_shares_are_done_earlier(batch: int, devices: list[tuple[Cost, int]]) -> None:
    its_costs = [cost for cost, _ in devices]
    caps = [cap for _, cap in devices]
    if sum(caps) < batch:
        return

    shares = share_by_cost(batch, its_costs, caps)

    others = product(*(range(min(batch, cap) + 1) for cap in caps))
    best = min(slowest(its_costs, other) for other in others if sum(other) == batch)
    assert sum(shares) == batch
    assert all(0 <= share <= cap for share, cap in zip(shares, caps, strict=True))
    assert slowest(its_costs, shares) <= best * (1 + 1e-9)


@given(batches, st.lists(costs, min_size=1, max_size=64))
def test_no_sample_can_be_moved_to_be_done_earlier(batch: int, devices: list[Cost]) -> None:
    shares = share_by_cost(batch, devices)

    assert sum(shares) == batch
    assert min(shares) >= 0
    done = slowest(devices, shares)
    for cost, share in zip(devices, shares, strict=True):
        assert cost.seconds(share + 1) >= done * (1 - 1e-9)


def test_fixed_shares_learn_nothing() -> None:
    policy = FixedShares((3, 1))

    policy.observe((3, 1), (1.0, 9.0), (0.0, 0.0), 9.0)

    assert policy.choose(8) == policy.guess(8) == Choice((6, 2), measured=False)
