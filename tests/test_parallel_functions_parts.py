"""Cutting nested inputs into parts, and joining nested outputs."""

from __future__ import annotations

import warnings
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from evener.errors import BatchError, DeviceError
from evener.parallel_functions import gather, parts, scatter, scatter_kwargs

Pair = namedtuple("Pair", ("left", "right"))  # noqa: PYI024 - users have these too


@dataclass
class Sample:
    x: Tensor
    name: str = "none"


@dataclass(frozen=True)
class Boxed:
    nest: dict[str, Any]


class Bag(dict[str, Any]):
    """A user's own kind of dict."""

    color = "red"


# ------------------------------------------------------------------ scatter


@given(size=st.integers(0, 20), num_devices=st.integers(1, 6), dim=st.sampled_from([0, 1, -1]))
def test_parts_are_near_equal_in_order_and_no_more_than_samples(
    size: int, num_devices: int, dim: int
) -> None:
    shape = [3, 3]
    shape[dim] = size
    x = torch.arange(3 * size).view(shape)

    found = scatter(x, f"cpu*{num_devices}", dim)

    sizes = [part.shape[dim] for part in found]
    assert type(found) is tuple
    assert len(found) == max(1, min(size, num_devices))
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat(found, dim), x)


def test_nests_of_all_kinds_are_cut_and_keep_their_kind() -> None:
    x = torch.arange(10.0).view(5, 2)
    nest = {
        "tuple": (x, [x, ()]),
        "pair": Pair(x, None),
        "ordered": OrderedDict(b=x, a=1),
        "default": defaultdict(list, x=x),
        "bag": Bag(x=x),
        "user": UserDict(x=x),
        "deque": deque([x]),
        "sample": Sample(x, "one"),
        "boxed": Boxed({"x": x}),
        "scalar": torch.tensor(3.0),
        "others": ["text", 7, 2.5, None, {}],
    }

    found = scatter(nest, "cpu*2")

    assert type(found) is list
    for part, rows in zip(found, (x[:3], x[3:]), strict=True):
        assert list(part) == list(nest)
        assert torch.equal(part["tuple"][0], rows)
        assert torch.equal(part["tuple"][1][0], rows)
        assert part["tuple"][1][1] == ()
        assert type(part["pair"]) is Pair
        assert torch.equal(part["pair"].left, rows)
        assert list(part["ordered"]) == ["b", "a"]
        assert type(part["ordered"]) is OrderedDict
        assert part["default"]["new"] == []
        assert type(part["bag"]) is Bag
        assert torch.equal(part["bag"]["x"], rows)
        assert torch.equal(part["user"]["x"], rows)
        assert torch.equal(part["deque"][0], rows)
        assert part["sample"].name == "one"
        assert torch.equal(part["sample"].x, rows)
        assert torch.equal(part["boxed"].nest["x"], rows)
        assert part["scalar"] is nest["scalar"]
        assert part["others"] == nest["others"]
    assert torch.equal(nest["bag"]["x"], x)


def test_what_has_no_tensor_goes_to_each_device_as_it_is() -> None:
    thing = object()

    found = scatter([thing, 1], "cpu*3")

    assert found == [[thing, 1]] * 3
    assert found[0] is not found[1]


def test_gradients_flow_back_through_parts_and_through_what_is_joined() -> None:
    x = torch.randn(4, 4, dtype=torch.double, requires_grad=True)

    first, second = scatter(x, "cpu*2")
    first.backward(torch.full_like(first, 2))

    assert torch.equal(x.grad, torch.tensor([2.0, 2, 0, 0]).double()[:, None].expand(4, 4))
    assert first.data_ptr() == x.data_ptr()
    assert torch.autograd.gradcheck(lambda x: scatter(x, "cpu*2"), (x,))
    assert torch.autograd.gradgradcheck(lambda x: gather(scatter(x, "cpu*2")).sin(), (x,))
    assert second.requires_grad


@pytest.mark.parametrize(
    ("inputs", "dim", "message"),
    [
        ((torch.ones(5, 2), torch.ones(1, 2)), 0, r"shape \(5, 2\) gives 2 parts .* \(1, 2\) gi"),
        (torch.ones(5), 1, r"shape \(5,\) cannot be cut along dimension 1; expected -1 to 0"),
        (torch.eye(2).to_sparse(), 0, r"layout torch.sparse_coo cannot be cut"),
    ],
)
def test_what_cannot_be_cut_is_an_error(inputs: Any, dim: int, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        scatter(inputs, "cpu*2", dim)


def test_devices_that_are_not_there_are_an_error() -> None:
    with pytest.raises(DeviceError, match="no device number 77"):
        scatter(torch.ones(2), [0, 77])


# ------------------------------------------------------------------ scatter_kwargs


def test_positional_and_keyword_arguments_are_cut_alike() -> None:
    x = torch.arange(5)

    inputs, kwargs = scatter_kwargs((x, 7), {"y": x, "unused": []}, "cpu*2")

    assert [part[0].tolist() for part in inputs] == [[0, 1, 2], [3, 4]]
    assert [part["y"].tolist() for part in kwargs] == [[0, 1, 2], [3, 4]]
    assert [part[1] for part in inputs] == [7, 7]
    assert [part["unused"] for part in kwargs] == [[], []]


@pytest.mark.parametrize("empty", [(), None])
def test_only_some_arguments_or_none_at_all(empty: Any) -> None:
    x = torch.arange(5)

    assert scatter_kwargs(empty, {}, "cpu*2") == scatter_kwargs(empty, None, "cpu*2") == ((), ())
    inputs, kwargs = scatter_kwargs(empty, {"x": x}, "cpu*2")
    assert (inputs, len(kwargs)) == (((), ()), 2)
    inputs, kwargs = scatter_kwargs((x,), None, "cpu*2")
    assert (len(inputs), kwargs) == (2, ({}, {}))
    inputs, kwargs = scatter_kwargs((x[:1],), {"mode": "a"}, "cpu*4")
    assert (len(inputs), kwargs) == (1, ({"mode": "a"},))


# ------------------------------------------------------------------ gather


def test_nests_of_all_kinds_are_joined() -> None:
    x = torch.arange(10.0).view(5, 2)
    outputs = [
        {
            "x": [rows, (rows.sin(), None)],
            "pair": Pair(rows, "same"),
            "sample": Sample(rows),
            "bag": Bag(y=rows),
            "number": 3,
            "nan": float("nan"),
            "ints": rows.long(),
            "complex": rows * 1j,
        }
        for rows in (x[:3], x[3:])
    ]

    found = gather(outputs, 0)

    assert list(found) == list(outputs[0])
    assert torch.equal(found["x"][0], x)
    assert torch.equal(found["x"][1][0], x.sin())
    assert found["x"][1][1] is None
    assert torch.equal(found["pair"].left, x)
    assert found["pair"].right == "same"
    assert torch.equal(found["sample"].x, x)
    assert type(found["bag"]) is Bag
    assert found["number"] == 3
    assert torch.equal(found["ints"], x.long())
    assert torch.equal(found["complex"], x * 1j)


@pytest.mark.parametrize("lengths", [(5, 3, 3), (2, 4, 1), (1,)])
def test_packed_sequences_are_cut_and_joined_by_sequences(lengths: tuple[int, ...]) -> None:
    is_sorted = list(lengths) == sorted(lengths, reverse=True)
    each = [torch.randn(length, 2, requires_grad=True) for length in lengths]
    whole = pack_sequence(each, enforce_sorted=is_sorted)

    found = scatter((whole, torch.ones(4, len(lengths))), "cpu*2", 1)
    joined = gather([packed for packed, _ in found])

    sizes = [len(unpack_sequence(packed)) for packed, _ in found]
    assert sizes == ([2, 1] if len(lengths) == 3 else [1])
    assert [rest.shape for _, rest in found] == [(4, size) for size in sizes]
    for one, other in zip(unpack_sequence(joined), each, strict=True):
        assert torch.equal(one, other)
    joined.data.sum().backward()
    assert all(torch.equal(one.grad, torch.ones_like(one)) for one in each)


def test_dicts_are_joined_by_their_keys_not_by_their_order() -> None:
    one, two = torch.zeros(1), torch.ones(1)

    found = gather([{"a": one, "b": two}, {"b": one, "a": two}])

    assert {key: value.tolist() for key, value in found.items()} == {"a": [0, 1], "b": [1, 0]}


def test_zero_dim_outputs_become_a_vector_with_torchs_warning() -> None:
    outputs = [torch.tensor(float(i), requires_grad=True) for i in range(3)]

    with pytest.warns(
        UserWarning, match="gather along dimension 0, but all input tensors were sc"
    ):
        found = gather(outputs)
    found.backward(torch.tensor([1.0, 2, 3]))

    assert found.tolist() == [0, 1, 2]
    assert [float(output.grad) for output in outputs if output.grad is not None] == [1, 2, 3]


def test_another_dimension_is_joined() -> None:
    assert gather([torch.ones(2, 3), torch.ones(2, 1)], "cpu", dim=1).shape == (2, 4)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([], "no output to join"),
        ([{"a": 1}, {"a": 1, "b": 2}], r"not nested alike.*\['a'\] from the first.*\['a', 'b'\]"),
        ([[1, 2], [1]], "not nested alike"),
        ([(1,), [1]], "not nested alike on all replicas: tuple .* list"),
        (
            [{"n": [1]}, {"n": [2]}],
            r"the output\['n'\]\[0\] differs .* 1 from the first, 2 from re",
        ),
        ([torch.ones(1), 3], "differs among|not nested alike"),
        ([None, torch.ones(1)], "differs among"),
        (
            [torch.ones(1, 2), torch.ones(1, 3)],
            r"along dimension 0: the shapes are \(1, 2\), \(1, 3",
        ),
    ],
)
def test_what_does_not_fit_together_is_an_error(outputs: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        gather(outputs)


# ------------------------------------------------------------------ accelerators


def test_on_accelerators_torchs_own_functions_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("scatter", "scatter_kwargs", "gather"):
        monkeypatch.setattr(parts, f"_torchs_{name}", lambda *given, name=name: (name, *given[1:]))
    monkeypatch.setattr(parts, "on_cpu", lambda places: False)

    assert scatter(1, "cpu:0", 2) == ("scatter", [torch.device("cpu:0")], 2)
    assert scatter_kwargs((1,), {}, "cpu:0", 2) == (
        "scatter_kwargs",
        {},
        [torch.device("cpu:0")],
        2,
    )
    with warnings.catch_warnings():
        assert gather([{"x": torch.ones(2, device="meta")}], 1, 2) == ("gather", 1, 2)
