"""Contents: a change inside an attribute is noticed, however deep (see also test_watch)."""

from __future__ import annotations

import threading
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evener.contents import MAX_PARTS, Contents, can_change, same


@dataclass
class Config:
    rates: dict[str, Any] = field(default_factory=lambda: {"a": [0.1]})
    inner: Any = None


def make() -> dict[str, Any]:
    return {
        "list": [1, [2, (3, {"deep": [4]})]],
        "set": {1, 2},
        "config": Config(inner=Config()),
        "ordered": OrderedDict(a=1),
        "user": UserDict(a=[1]),
        "tensor": torch.zeros(2),
        "array": np.zeros(2),
        "other": [5],
    }


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "item": ("list", lambda a: a["list"].__setitem__(0, 7)),
    "item to an equal float": ("list", lambda a: a["list"].__setitem__(0, 1.0)),
    "deep": ("list", lambda a: a["list"][1][1][1]["deep"].append(5)),
    "set": ("set", lambda a: a["set"].add(3)),
    "field": ("config", lambda a: setattr(a["config"], "inner", None)),
    "field of a field": ("config", lambda a: setattr(a["config"].inner, "inner", 1)),
    "list in a dict of a field": ("config", lambda a: a["config"].inner.rates["a"].append(1)),
    "ordered dict": ("ordered", lambda a: a["ordered"].update(a=2)),
    "dict of a library": ("user", lambda a: a["user"]["a"].append(2)),
    "tensor": ("tensor", lambda a: a["tensor"].add_(1)),
    "array": ("array", lambda a: a["array"].fill(1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_once_and_only_where_it_is(change: str) -> None:
    attributes = make()
    contents = Contents(attributes)
    assert contents.changed() == set()
    key, act = CHANGES[change]

    act(attributes)

    assert contents.changed() == {key}
    assert contents.changed() == set()


def test_what_is_set_to_the_same_is_no_change() -> None:
    attributes = make()
    contents = Contents(attributes)

    attributes["config"].inner = attributes["config"].inner
    attributes["ordered"]["a"] = 1
    attributes["list"][0] = 1

    assert contents.changed() == set()


def test_two_attributes_that_hold_the_same_list_are_both_named() -> None:
    shared = [1]
    contents = Contents({"one": shared, "other": (shared,)})

    shared.append(2)

    assert contents.changed() == {"one", "other"}


def test_what_contains_itself_and_what_cannot_be_looked_into() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    contents = Contents(
        {"loop": loop, "lock": threading.Lock(), "deque": deque([1]), "range": range(3)}
    )
    assert contents.changed() == set()

    loop[0] = 2

    assert contents.changed() == {"loop"}


def test_a_very_large_attribute_costs_no_more_than_a_limit() -> None:
    large = [[i] for i in range(3 * MAX_PARTS)]
    contents = Contents({"large": large})

    large.append([0])  # the list itself is looked at

    assert contents.changed() == {"large"}


def test_modules_are_looked_after_elsewhere() -> None:
    layer = nn.Linear(1, 1)
    contents = Contents({"hidden": [layer], "object": SimpleNamespace(layer=layer)})

    layer.in_features = 5

    assert contents.changed() == set()


@pytest.mark.parametrize("value", [1, 1.0, "a", None, True, torch.tanh, nn.ReLU, b"", 1j])
def test_what_cannot_change(value: Any) -> None:
    assert not can_change(value)


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (1, True), ([1], (1,)), ({"a": 1}, {"a": 1.0})]
)
def test_equal_values_of_two_types_are_not_the_same(one: Any, other: Any) -> None:
    assert not same(one, other)
    assert same(one, type(one)(one))
