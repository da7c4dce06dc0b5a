from __future__ import annotations

import math

import pytest
import torch

from evener.distance import distance, largest

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([], [], 0.0),
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([NAN, INF, 1.0], [NAN, INF, 1.0], 0.0),
        ([NAN], [1.0], INF),
        ([INF], [-INF], INF),
        ([1, 5], [1, 2], 3.0),
        ([True], [False], 1.0),
        ([2**62], [2**62 + 1], 1.0),
        ([1 + 1j], [1 - 1j], 2.0),
    ],
)
def test_the_largest_difference(one: list, other: list, expected: float) -> None:
    assert distance(torch.tensor(one), torch.tensor(other)) == expected


def test_the_largest_number_is_a_finite_one() -> None:
    assert largest(torch.tensor([1.0, -3.0, NAN, INF])) == 3.0
    assert largest(torch.tensor([])) == 0.0
    assert largest(torch.tensor([3 + 4j])) == 5.0
