"""Versions: every change of a dictionary is noticed, by count and by comparison."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from evener import versions
from evener.versions import Versions

WAYS = ["compared", *(["counted"] if versions.is_counted() else [])]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(versions, "is_counted", lambda: request.param == "counted")
    return str(request.param)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "set": lambda d: d.__setitem__("a", 2),
    "set to an equal float": lambda d: d.__setitem__("a", 1.0),
    "added": lambda d: d.__setitem__("c", 2),
    "removed": lambda d: d.pop("b"),
    "last one renamed": lambda d: d.__setitem__("c", d.pop("b")),
    "emptied": lambda d: d.clear(),
    "updated": lambda d: d.update(a=7),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_change_is_noticed_once(way: str, kind: type, change: str) -> None:
    dicts = [kind(a=1, b=[]) for _ in range(5)]
    watched = Versions(dicts)
    assert watched.changed() == []

    CHANGES[change](dicts[3])

    assert watched.changed() == [3]
    assert watched.changed() == []


def test_the_first_entry_of_an_empty_one_is_noticed(way: str) -> None:
    dicts: list[dict[str, int]] = [{}, {}, {}]
    watched = Versions(dicts)

    dicts[1]["a"] = 1
    dicts[2]["a"] = 1

    assert watched.changed() == [1, 2]


def test_attributes_that_are_set_are_noticed_and_reading_is_not(way: str) -> None:
    modules = [nn.Linear(2, 2) for _ in range(3)]
    watched = Versions([vars(module) for module in modules])

    assert repr(modules[0])
    assert modules[0].in_features == 2
    assert watched.changed() == []

    modules[1].in_features = 3
    assert watched.changed() == [1]

    modules[2].eval()
    assert watched.changed() == [2]


def test_they_are_held(way: str) -> None:
    watched = Versions([{"a": number} for number in range(1000)])
    gc.collect()
    assert [{"b": number} for number in range(1000)]

    assert watched.changed() == []


def test_none_at_all(way: str) -> None:
    assert Versions([]).changed() == []


@pytest.mark.skipif(
    sys.implementation.name != "cpython" or sys.version_info >= (3, 13),
    reason="later versions of CPython do not count",
)
def test_the_count_is_found_where_there_is_one() -> None:
    assert versions.is_counted()
