"""The pace of a device: what it makes of its calls."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.pace import WINDOW, ChangeTest, Pace, expected, proven_mean


def pace_of(calls: list[tuple[int, float]], usual_samples: float = 0.0) -> Pace:
    """A pace that has seen these calls, after a first one that does not count."""
    pace = Pace()
    pace.observe(1, 1000.0)
    for samples, seconds in calls:
        pace.observe(samples, seconds)
    pace.fit(usual_samples)
    return pace


def test_it_knows_nothing_before_the_second_call() -> None:
    pace = Pace()
    pace.observe(1, 1.0)
    pace.fit()

    assert pace.cost is None
    assert pace.seconds(10) == 0.0
    assert pace.surprise(10, 1.0) == 0.0


@given(st.floats(0, 10), st.floats(0.01, 10), st.integers(2, 100))
def test_a_line_is_found_where_the_samples_differ(
    fixed: float, per_sample: float, samples: int
) -> None:
    calls = [(n, fixed + per_sample * n) for n in (samples, 3 * samples, 9 * samples)] * 3

    pace = pace_of(calls)

    for n, seconds in calls:
        assert pace.seconds(n) == pytest.approx(seconds, rel=0.05)
    assert pace.noise < 0.05


@given(st.integers(10, 1000), st.floats(1e-6, 100), st.floats(0, 100))
def test_without_differences_the_fixed_part_is_the_usual_one(
    samples: int, seconds: float, usual: float
) -> None:
    pace = pace_of([(samples, seconds)] * 5, usual)

    assert pace.cost is not None
    assert pace.cost.seconds(samples) == pytest.approx(seconds)
    assert pace.cost.fixed_s == pytest.approx(usual * pace.cost.per_sample_s, rel=1e-3, abs=1e-12)


@given(st.integers(0, 19))
def test_one_outlier_moves_nothing(place: int) -> None:
    calls = [(10, 1.0)] * 20
    calls[place] = (10, 50.0)

    assert pace_of(calls).seconds(10) == pytest.approx(1.0)


def test_what_happens_every_fourth_time_counts() -> None:
    calls = [(10, 9.0 if i % 4 == 0 else 1.0) for i in range(WINDOW)]

    # In the mean 3 seconds; most calls took 1.
    pace = pace_of(calls)

    assert pace.cost is not None
    assert 2.0 < pace.cost.seconds(10) < 3.0
    assert abs(pace.surprise(10, 1.0)) < 0.01  # which is no sign of a change


def test_it_forgets() -> None:
    pace = pace_of([(10, 1.0)] * 10 + [(10, 2.0)] * 3)
    pace.forget(3)
    pace.fit()

    assert pace.num_calls == 3
    assert pace.seconds(10) == pytest.approx(2.0)


def test_it_remembers_a_window() -> None:
    assert pace_of([(10, 1.0)] * 1000).num_calls == WINDOW


# ------------------------------------------------------------------ changes


def test_one_surprise_is_no_change_and_two_are() -> None:
    test = ChangeTest()

    assert [test.weigh(5.0), test.weigh(0.0)] == [0, 0]
    assert [test.weigh(0.0) for _ in range(9)] == [0] * 9
    assert [test.weigh(0.7), test.weigh(0.7)] == [0, 2]


def test_a_small_change_is_found_later_with_its_beginning() -> None:
    test = ChangeTest()
    for _ in range(20):
        assert test.weigh(0.0) == 0

    found = [test.weigh(-0.2) for _ in range(6)]

    assert found == [0, 0, 3, 0, 0, 3]


def test_noise_is_no_change() -> None:
    found = 0
    draw = random.Random(0)  # noqa: S311 - a simulation
    for noise in (0.02, 0.1, 0.5):
        test = ChangeTest()
        found += sum(test.weigh(draw.gauss(0, noise)) > 0 for _ in range(300))

    assert found <= 3


# ------------------------------------------------------------------ means


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40))
def test_what_is_expected_lies_among_the_values(values: list[float]) -> None:
    for value in (proven_mean(values), expected(values)):
        assert 0 <= value <= max(values) * (1 + 1e-9)
    assert expected(values) >= min(values) * (1 - 1e-9)
    assert not math.isnan(expected(values))


def test_values_of_zero_are_expected_to_be_zero() -> None:
    assert expected([0.0] * 5) == 0.0
