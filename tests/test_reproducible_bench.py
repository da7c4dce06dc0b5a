"""The benchmark of the same bits: what it compares, and how it judges."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bounds import LONG

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
NAMES = ("bits", "cost", "results", "harness", "rounds", "start", "tables", "environment")


@pytest.fixture(scope="module", autouse=True)
def found_there() -> Iterator[None]:
    """The benchmark's files are found, and forgotten afterwards: others have such names."""
    added = [str(BENCHMARKS / "reproducible"), str(BENCHMARKS)]
    sys.path[:0] = added
    yield
    for path in added:
        sys.path.remove(path)
    for name in NAMES:
        sys.modules.pop(name, None)


def load(name: str) -> Any:
    return importlib.import_module(name)


def result(digests: dict[str, str]) -> Any:
    bits = load("bits")
    runs = {
        title: bits.Run(title, (), is_same=not title.startswith("without")) for title in digests
    }
    return bits.BitsResult("resnet", 30, runs, digests)


def test_all_with_a_grid_are_to_be_one_and_those_without_are_not() -> None:
    fine = {"one": "a", "two": "a", "without, one": "b", "without, two": "c"}

    assert result(fine).failures() == []
    assert result(fine | {"two": "d"}).failures() == [
        "resnet: 2 different results with a grid, not one"
    ]
    for blind in ({"without, two": "b"}, {"without, one": "a"}):
        (failure,) = result(fine | blind).failures()
        assert "without a grid no two" in failure


def test_the_tables() -> None:
    bits, results = load("bits"), load("results")
    cost, rounds = load("cost"), load("rounds")
    speeds = {
        "one_core": [1.0, 2.0, 1.0],
        "evener_auto": [2.0, 3.0, 2.0],
        "evener_grid4": [1.0, 3.0, 2.0],
        "evener_grid16": [1.0, 1.0, 1.0],
    }
    costs = [cost.CostResult("mlp", speeds, rounds.Loads({}, 0.5))]
    found = results.Results({"processor": "p"}, {}, [result({"one": "a" * 64})], costs, ["no"])

    text = found.to_markdown()
    assert f"| one | {'a' * 64} |" in text
    assert "| mlp | 1.00 (1.00..2.00) | 2.00 (1.50..2.00) |" in text
    assert "| 1.00 (1.00..2.00) | 2.00 (2.00..3.00) |" in text
    assert "Failed: no" in text
    assert "Failed: resnet" not in text
    assert "other programs kept 0.50 cores busy" in text
    assert bits.GRID == 16


@LONG
@pytest.mark.parametrize("workload", ["resnet", "dropout"])
def test_trainings_of_all_kinds_end_with_the_same_bits(workload: str) -> None:
    bits = load("bits")
    found = bits.measure_bits(workload, 30, bits.runs(30))

    assert len(found.of_same()) == 9
    assert not found.failures()
