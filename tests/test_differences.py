from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from evener.differences import apart_from_random, count, differences, show

KEY = ("gradient", "weight")


def verdict(one: Any, team: Any, one_other: Any = None, team_other: Any = None) -> str:
    def named(value: Any) -> Any:
        return None if value is None else {KEY: value}

    (row,) = differences({KEY: one}, {KEY: team}, named(one_other), named(team_other))
    return row.verdict


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


ONE = tensor(1.0, 0.1)
EXACT = ONE.double() + 1e-8
#: So far from it, in float32, is a little more than twice the distance of two numbers at 1.
NEAR, FAR = tensor(1.0 + 3e-7, 0.1), tensor(1.0 + 1e-5, 0.1)


def test_the_same_bits_are_equal() -> None:
    assert verdict(ONE, ONE.clone()) == "equal"
    assert verdict(tensor(math.nan, math.inf), tensor(math.nan, math.inf)) == "equal"
    assert verdict(torch.empty(0), torch.empty(0)) == "equal"


def test_rounding_is_what_one_device_has_too() -> None:
    assert verdict(ONE, NEAR, EXACT) == "rounding"
    assert verdict(ONE, FAR, EXACT) == "different"
    assert verdict(ONE, FAR, ONE.double() + 5e-6) == "rounding"


def test_rounding_goes_away_in_float64() -> None:
    assert verdict(ONE, FAR, EXACT, EXACT + 1e-14) == "rounding"
    assert verdict(ONE, FAR, EXACT, EXACT + 1e-5) == "different"
    assert verdict(ONE, FAR, EXACT, EXACT + 1e-8) == "different"


def test_a_module_in_float64_is_measured_by_float32() -> None:
    one = ONE.double()

    assert verdict(one, one + 1e-15, one.float() + 1e-7) == "rounding"
    assert verdict(one, one + 1e-14, one.float(), one.float()) == "rounding"
    assert verdict(one, one + 1e-12, one.float() + 1e-7) == "different"
    assert verdict(one, one + 1e-12, one.float() + 1e-7, one.float() + 1e-3) == "rounding"
    assert verdict(one, one + 1e-9, one.float() + 1e-7, one.float() + 2e-7) == "different"


def test_without_another_precision_a_thousand_eps_are_rounding() -> None:
    assert verdict(ONE, FAR) == "rounding"
    assert verdict(ONE, tensor(1.001, 0.1)) == "different"


def test_a_gradient_that_is_zero_but_for_rounding() -> None:
    assert verdict(tensor(1e-9), tensor(-2e-9), tensor(2e-10).double()) == "rounding"
    assert verdict(tensor(0.0), tensor(1e-9), tensor(0.0).double()) == "different"


def test_whole_numbers_are_rounding_if_they_are_equal_in_float64() -> None:
    one, team = torch.tensor([1, 2]), torch.tensor([1, 3])

    assert verdict(one, team, one) == "different"
    assert verdict(one, team, one, one) == "rounding"
    assert verdict(one, team, one, team) == "different"


@pytest.mark.parametrize(
    ("one", "team", "note"),
    [
        (torch.ones(3, 2), torch.ones(2, 2), "shape (2, 2) for (3, 2)"),
        (torch.ones(2), torch.ones(2).double(), "torch.float64 for torch.float32"),
        (None, torch.ones(2), "a tensor (2,) for none"),
        (torch.ones(2), None, "none for a tensor (2,)"),
        (3, 4, "4 for 3"),
        ("a", "a", ""),
        (None, None, ""),
        (["a"] * 9, 1, "1 for ['a', 'a', 'a', '..."),
    ],
)
def test_what_is_not_numbers_is_told_in_words(one: Any, team: Any, note: str) -> None:
    (row,) = differences({KEY: one}, {KEY: team}, {KEY: one})

    assert row.note == note
    assert row.verdict == ("different" if note else "equal")


def test_what_only_one_of_them_has_left() -> None:
    rows = differences({KEY: ONE}, {("buffer", "b"): ONE}, None)

    assert [(row.title, row.note) for row in rows] == [
        ("gradient weight", "none for a tensor (2,)"),
        ("buffer b", "a tensor (2,) for none"),
    ]


def test_random_numbers_are_told_apart_by_the_step_without_them() -> None:
    def rows(*teams: torch.Tensor) -> list:
        one = {("output", str(i)): ONE for i in range(len(teams))}
        exact = dict.fromkeys(one, EXACT)
        return differences(one, {("output", str(i)): t for i, t in enumerate(teams)}, exact)

    far = tensor(2.0, 0.1)
    found = apart_from_random(rows(ONE, NEAR, far, far), rows(ONE, NEAR, NEAR, far))

    assert [row.verdict for row in found] == ["equal", "rounding", "random", "different"]


def test_the_table_begins_with_what_matters() -> None:
    one = {("output", ""): ONE, ("gradient", "a"): ONE, ("buffer", "b"): ONE, ("loss", ""): ONE}
    team = {**one, ("gradient", "a"): NEAR, ("buffer", "b"): tensor(1.0, 7.0)}
    rows = differences(one, team, dict.fromkeys(one, EXACT))
    lines = show(rows).splitlines()
    shown = [
        line.split()[0]
        for line in lines
        if line.endswith((" rounding", " different")) and line.split()[0] != "of"
    ]

    assert shown == ["buffer", "gradient"]
    assert count(rows) == "equal: 1 output, 1 loss; rounding: 1 gradient; different: 1 buffer"


def test_where_all_is_equal_the_outputs_are_shown() -> None:
    one = {("output", "['y']"): ONE, ("gradient", "a"): ONE}
    shown = show(differences(one, one, None))

    assert "['y']" in shown
    assert "gradient" not in shown
