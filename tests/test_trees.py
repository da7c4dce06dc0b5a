"""Trees: taken apart, put together, and sent to a process that knows none of their types."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from evener.errors import EvenerError
from evener.trees import flatten, structure_from_bytes, structure_to_bytes, unflatten

Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024 - this kind too


class Pair(NamedTuple):
    one: Any
    two: Any = None


@dataclass
class Box:
    value: Any
    name: str = "box"


@dataclass(frozen=True)
class Frozen:
    value: Any
    other: Any = 0


@dataclass(slots=True)
class Slotted:
    value: Any
    other: Any = 0


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    value: Any


@dataclass
class Child(Box):
    more: Any = None


@dataclass
class Uninitialised:
    """One whose __init__ takes other arguments than it has fields."""

    value: Any
    double: Any = field(init=False)

    def __post_init__(self) -> None:
        self.double = self.value * 2


@dataclass
class Extended:
    """One that sets more on itself than its fields."""

    value: Any

    def __post_init__(self) -> None:
        self.size = len(self.value)


@dataclass
class Configuration:
    rate: float = 0.1
    sizes: tuple[int, ...] = (1, 2)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


TREES: list[Callable[[], Any]] = [
    lambda: ones(2),
    lambda: 3,
    lambda: None,
    lambda: (),
    list,
    dict,
    lambda: (ones(2), [ones(3), {"a": ones(1), "b": None}], "text"),
    lambda: {"z": 1, "a": 2},
    lambda: {2: ones(1), "two": ones(2)},
    lambda: OrderedDict(z=ones(1), a=ones(2)),
    lambda: defaultdict(list, a=[ones(1)]),
    lambda: deque([ones(1), 2], maxlen=4),
    lambda: Point(ones(1), 2),
    lambda: Pair(ones(1), Pair(2)),
    lambda: torch.return_types.max((ones(1), ones(2))),
    lambda: Box(ones(2)),
    lambda: Box([ones(2), {"a": 3}]),
    lambda: Box(Box(Frozen(ones(1), Slotted(ones(2))))),
    lambda: [Box(1), Box(ones(1)), 3, Box(2, "two")],
    lambda: Frozen(ones(2), (1, 2)),
    lambda: Slotted(ones(2)),
    lambda: FrozenSlotted(ones(2)),
    lambda: Child(ones(2), "child", Pair(ones(1))),
    lambda: Uninitialised(ones(2)),
    lambda: Extended(ones(2)),
    Configuration,
    lambda: {"config": Configuration(), "x": ones(2)},
]


def same(one: Any, other: Any) -> bool:
    """Whether two trees are equal in types, order, attributes and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and same([*one.values()], [*other.values()])
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        names = sorted({*getattr(one, "__dict__", {}), *one.__dataclass_fields__})
        return all(hasattr(other, name) for name in names) and same(
            [getattr(one, name) for name in names], [getattr(other, name) for name in names]
        )
    return bool(one == other)


@pytest.mark.parametrize("make", TREES)
def test_a_tree_is_put_together_as_it_was(make: Callable[[], Any]) -> None:
    tree = make()
    leaves, structure = flatten(tree)

    again = unflatten(structure, leaves)

    assert same(tree, again)
    assert flatten(again)[1] == structure


@pytest.mark.parametrize("make", TREES)
def test_tensors_are_always_leaves(make: Callable[[], Any]) -> None:
    leaves, structure = flatten(make())
    numbered = unflatten(
        structure, [i if isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(leaves)]
    )

    assert "tensor" not in repr(numbered)


def test_a_dataclass_without_a_tensor_stays_whole() -> None:
    configuration = Configuration()

    leaves, _ = flatten([configuration, Box(ones(1))])

    assert leaves[0] is configuration
    assert len(leaves) == 3


def test_a_dataclass_is_a_class_too_and_that_stays_whole() -> None:
    assert flatten([Box])[0] == [Box]


def test_a_field_that_was_deleted_stays_away() -> None:
    box = Slotted(ones(2))
    del box.other

    again = unflatten(*reversed(flatten(box)))

    assert not hasattr(again, "other")


def test_a_dataclass_that_is_a_dict_keeps_its_content() -> None:
    """As the outputs of Hugging Face's models are, where they are not registered."""

    @dataclass
    class Output(OrderedDict[str, Any]):
        logits: Any = None

        def __post_init__(self) -> None:
            self["logits"] = self.logits

    output = Output(ones(2))
    leaves, structure = flatten(output)

    again = unflatten(
        structure, [leaf * 3 if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    )

    assert type(again) is Output
    assert again.logits.tolist() == [3, 3]
    assert again["logits"].tolist() == [3, 3]


def test_a_dataclass_that_contains_itself_stays_whole_or_says_so() -> None:
    box = Box(ones(1))
    box.value = [box.value, box]

    try:
        leaves, _ = flatten(box)
    except EvenerError:
        return

    assert leaves


def test_structures_differ_where_trees_do() -> None:
    trees = [make() for make in TREES]

    for i, one in enumerate(trees):
        for j, other in enumerate(trees):
            if i != j and type(one) is not type(other):
                assert flatten(one)[1] != flatten(other)[1] or not flatten(one)[1].records


def test_a_box_of_another_name_is_another_leaf_not_another_structure() -> None:
    one, other = flatten(Box(ones(1), "one")), flatten(Box(ones(1), "other"))

    assert one[1] == other[1]
    assert one[0][1] == "one"


class Bag:
    """A user's own container."""

    def __init__(self, *things: Any) -> None:
        self.things = things


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    # Newer versions of torch can take back a registration, older ones cannot.
    for registry in ("SUPPORTED_NODES", "SUPPORTED_SERIALIZED_TYPES"):
        monkeypatch.setattr(pytree, registry, getattr(pytree, registry).copy())


def test_registered_types_are_taken_apart(own_registry: None) -> None:
    pytree.register_pytree_node(
        Bag, lambda bag: (list(bag.things), len(bag.things)), lambda things, _: Bag(*things)
    )
    leaves, structure = flatten([Bag(ones(2), Box(ones(1))), 7])

    again = unflatten(structure, leaves)

    assert len(leaves) == 4
    assert torch.equal(again[0].things[1].value, ones(1))


trees = st.recursive(
    st.one_of(st.integers(), st.none(), st.text(max_size=3), st.builds(ones, st.integers(0, 3))),
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.lists(below, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), below, max_size=3),
        st.dictionaries(st.text(max_size=2), below, max_size=3).map(OrderedDict),
        st.builds(Pair, below, below),
        st.builds(Box, below),
        st.builds(Frozen, below, below),
        st.builds(Slotted, below, below),
    ),
    max_leaves=12,
)


@given(trees)
def test_any_tree_survives_also_as_bytes(tree: Any) -> None:
    leaves, structure = flatten(tree)
    arrived = structure_from_bytes(structure_to_bytes(structure))

    assert arrived == structure
    assert same(tree, unflatten(arrived, leaves))


# ------------------------------------------------------------------ in another interpreter

#: What a user's own file might be: its types exist nowhere else.
SOURCE = """
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any
import torch
from torch.utils import _pytree as pytree

Point = namedtuple("Point", ["x", "y"])

@dataclass(frozen=True)
class Inner:
    value: Any
    note: str = "inner"

@dataclass
class Outer:
    inner: Inner
    points: list[Point]

class Bag:
    def __init__(self, *things):
        self.things = things

def register():
    pytree.register_pytree_node(
        Bag, lambda bag: (list(bag.things), None), lambda things, _: Bag(*things)
    )

def tree():
    t = torch.ones(1)
    outer = Outer(Inner(t), [Point(t, 1)])
    return {"outer": outer, "bag": Bag(t, OrderedDict(b=t, a=2)), "n": None}
"""

#: Writes the bytes of such a structure.
SEND = """
import sys
from evener.trees import flatten, structure_to_bytes

register()
sys.stdout.write(structure_to_bytes(flatten(tree())[1]).hex())
"""

#: What the other process does with the bytes.
RECEIVE = """
import sys
from evener.trees import flatten, structure_from_bytes, unflatten

data = bytes.fromhex(sys.argv[1])
tree = unflatten(structure_from_bytes(data), range(8))
one, more = tree["bag"].things
print(tree["outer"].inner, tree["outer"].points, (one, *more.values()), tree["n"])
structure_from_bytes(data)  # a second time: what is known stays
print(len(flatten(tree)[0]), list(more))
"""


def assert_received(printed: str) -> None:
    assert printed.splitlines() == [
        "Inner(value=0, note=1) [Point(x=2, y=3)] (4, 5, 6) 7",
        "5 ['b', 'a']",
    ]


def test_a_structure_of_types_of_main_arrives(run_python: Callable[..., str]) -> None:
    assert_received(run_python(RECEIVE, run_python(SOURCE + SEND)))


def test_a_structure_of_types_that_another_interpreter_cannot_import_arrives(
    run_python: Callable[..., str],
    made_module: Callable[[str], ModuleType],
    own_registry: None,
) -> None:
    module = made_module(SOURCE)
    module.register()

    data = structure_to_bytes(flatten(module.tree())[1])

    assert_received(run_python(RECEIVE, data.hex()))
