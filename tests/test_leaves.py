from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils import _pytree as pytree

from evener.leaves import alike, named_attributes, named_leaves


class Pair(NamedTuple):
    one: int
    two: list


@dataclass
class Record:
    logits: int
    rest: list


class Registered:
    def __init__(self, value: int) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (1, {"": 1}),
        ((1, 2), {"[0]": 1, "[1]": 2}),
        (OrderedDict(a={"b": 3}), {"['a']['b']": 3}),
        (Pair(1, [2]), {".one": 1, ".two[0]": 2}),
        (Record(1, [2, 3]), {".logits": 1, ".rest[0]": 2, ".rest[1]": 3}),
        ([], {}),
    ],
)
def test_leaves_have_the_names_that_a_user_writes(tree, expected) -> None:
    assert dict(named_leaves(tree)) == expected


def test_a_registered_type_is_taken_apart() -> None:
    pytree.register_pytree_node(Registered, lambda r: ([r.value], None), lambda v, _: v)
    try:
        assert list(named_leaves([Registered(7)], "x")) == [("x[0]<0>", 7)]
    finally:
        pytree._deregister_pytree_node(Registered)


def test_a_packed_sequence_is_a_named_tuple() -> None:
    packed = pack_padded_sequence(torch.zeros(3, 2, 4), torch.tensor([3, 1]))

    assert [name for name, _ in named_leaves(packed)][:2] == [".data", ".batch_sizes"]


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.count = 3
        self.config = SimpleNamespace(rate=0.5, names=["a"])
        self.function = print
        self.config.itself = self.config


def test_attributes_go_down_to_what_can_be_compared() -> None:
    found = dict(named_attributes(Module()))

    assert found["count"] == 3
    assert found["config.rate"] == 0.5
    assert found["config.names[0]"] == "a"
    assert found["inner.in_features"] == 1
    assert not [name for name in found if "function" in name or "training" in name]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2).double(), False),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), True),
        (torch.ones(2), None, False),
    ],
)
def test_alike_is_bit_for_bit(one, other, expected) -> None:
    assert alike(one, other) is expected


def test_arrays_are_compared() -> None:
    numpy = pytest.importorskip("numpy")

    assert alike(numpy.ones(2), numpy.ones(2))
    assert not alike(numpy.ones(2), numpy.zeros(2))
