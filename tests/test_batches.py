"""Batches: inputs cut by shares, and outputs that fit together or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evener.batches import Batch, Cut, TensorForm, check_outputs, is_joinable, narrow
from evener.dims import Dims
from evener.errors import BatchError
from evener.trees import Structure, flatten, unflatten


class Pair(NamedTuple):
    one: Any
    two: Any = None


@dataclass
class Box:
    value: Any


@dataclass(frozen=True)
class Frozen:
    value: Any


@dataclass
class Configuration:
    rate: float = 0.1


# ------------------------------------------------------------------ inputs


def test_a_batch_knows_its_size_and_cuts_what_has_one() -> None:
    x, mask = torch.arange(6.0).reshape(3, 2).requires_grad_(), torch.tensor([1, 0, 1])
    batch = Batch((x, 0.5), {"mask": mask, "scale": torch.tensor(2.0), "box": Box(x)})

    assert batch.size == 3
    assert batch.wanted == [True, False, False, False, True]
    args, kwargs = unflatten(batch.structure, batch.piece(1, 3))
    assert torch.equal(args[0], x[1:])
    assert args[1] == 0.5
    assert kwargs["mask"].tolist() == [0, 1]
    assert kwargs["scale"] is batch.leaves[3]
    assert torch.equal(kwargs["box"].value, x[1:])


def test_a_piece_is_made_of_views() -> None:
    x = torch.zeros(4, 2)

    (piece,) = Batch((x,), {}).piece(1, 3)
    piece += 1

    assert x.sum(1).tolist() == [0, 2, 2, 0]


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 3), (0, 3)])
def test_a_piece_may_be_empty_or_all(start: int, stop: int) -> None:
    (piece,) = Batch((torch.zeros(3, 2),), {}).piece(start, stop)

    assert piece.shape == (stop - start, 2)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, "a", None), {}), ((torch.tensor(1.0),), {"n": 3})]
)
def test_inputs_without_a_batch_have_no_size(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert Batch(args, kwargs).size is None


def test_an_empty_batch_has_the_size_zero() -> None:
    assert Batch((torch.zeros(0, 3),), {}).size == 0


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        (
            (torch.zeros(4, 2), torch.zeros(3)),
            {},
            r"args\[0\] has \(4, 2\) and args\[1\] has \(3,\)",
        ),
        (
            (torch.zeros(4),),
            {"mask": torch.zeros(5, 1)},
            r"args\[0\] has \(4,\) and kwargs\['mask'\] has \(5, 1\)",
        ),
        (
            ([torch.zeros(2), {"x": torch.zeros(1)}],),
            {},
            r"args\[0\]\[0\] has \(2,\) and args\[0\]\[1\]\['x'\] has \(1,\)",
        ),
        (
            (3, torch.zeros(0)),
            {"b": Pair(torch.zeros(1))},
            r"args\[1\] has \(0,\) and kwargs\['b'\].* has \(1,\)",
        ),
        ((Box(torch.zeros(4)), torch.zeros(2)), {}, r"\(4,\) and .* has \(2,\)"),
    ],
)
def test_inputs_of_two_sizes_are_refused_by_name(
    args: tuple[Any, ...], kwargs: dict[str, Any], says: str
) -> None:
    with pytest.raises(BatchError, match=says):
        Batch(args, kwargs)


@pytest.mark.parametrize(
    ("shares", "parts", "helpers", "lead"),
    [
        ((4,), {0: (0, 4)}, [], 0),
        ((3, 2), {0: (0, 3), 1: (3, 5)}, [1], 0),
        ((0, 5), {1: (0, 5)}, [1], 1),
        ((5, 0), {0: (0, 5)}, [], 0),
        ((1, 0, 2, 0), {0: (0, 1), 2: (1, 3)}, [2], 0),
        ((0, 0, 2, 1), {2: (0, 2), 3: (2, 3)}, [2, 3], 2),
    ],
)
def test_a_cut_tells_who_has_which_part(
    shares: tuple[int, ...], parts: dict[int, tuple[int, int]], helpers: list[int], lead: int
) -> None:
    cut = Cut(shares)

    assert (cut.size, cut.parts, cut.helpers, cut.lead) == (sum(shares), parts, helpers, lead)
    assert tuple(cut.share(device) for device in range(len(shares))) == shares


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
def test_the_parts_of_a_cut_are_the_batch_in_order(shares: list[int]) -> None:
    cut = Cut(shares)
    x = torch.arange(cut.size)

    assert torch.equal(torch.cat([x[start:stop] for start, stop in cut.parts.values()]), x)
    assert list(cut.parts) == sorted(cut.parts)


def test_a_part_can_be_viewed_as_the_whole_can() -> None:
    x = torch.arange(24.0).view(2, 4, 3)

    assert torch.equal(narrow(x, 1, 1, 3), x[:, 1:3])
    assert narrow(x, 1, 1, 3).is_contiguous()
    assert narrow(x, 0, 1, 2).data_ptr() == x[1].data_ptr()
    assert not narrow(x.transpose(0, 2), 1, 0, 2).is_contiguous()


def test_each_input_is_cut_where_its_batch_lies() -> None:
    steps, mask, labels = torch.zeros(7, 4, 2), torch.zeros(7, 7), torch.zeros(4)

    batch = Batch((steps, mask), {"labels": labels}, Dims((1, None)))

    assert batch.size == 4
    assert batch.cut_dims == [1, None, 0]
    assert [tuple(leaf.shape) for leaf in batch.piece(1, 4)] == [(7, 3, 2), (7, 7), (3,)]


def test_batch_sizes_that_differ_are_named_with_their_dimensions() -> None:
    with pytest.raises(BatchError, match=r"dimension 1 of the one and 0 of the other.*in_dims="):
        Batch((torch.zeros(3, 4), torch.zeros(3)), {}, Dims((1, 0)))


# ------------------------------------------------------------------ outputs


@pytest.mark.parametrize(
    ("tensor", "is_mean", "joinable"),
    [
        (torch.zeros(3), False, True),
        (torch.zeros(0, 2, dtype=torch.int64), False, True),
        (torch.tensor(1.0), True, True),
        (torch.tensor(1.0, dtype=torch.bfloat16), True, True),
        (torch.tensor(1j), True, True),
        (torch.tensor(1), False, False),
        (torch.tensor(True), False, False),
    ],
)
def test_the_form_of_a_tensor_tells_what_becomes_of_it(
    tensor: Tensor,
    is_mean: bool,
    joinable: bool,
) -> None:
    form = TensorForm.of(tensor)

    assert form == TensorForm(tuple(tensor.shape), tensor.dtype, differentiable=False)
    assert form.is_mean == is_mean
    assert is_joinable(tensor) == joinable


def test_a_form_tells_whether_gradients_flow() -> None:
    assert TensorForm.of(torch.zeros(2, requires_grad=True)).differentiable
    assert TensorForm.of(torch.zeros(2, requires_grad=True) * 2).differentiable
    assert not TensorForm.of(torch.zeros(2, requires_grad=True).detach()).differentiable


@pytest.mark.parametrize("other", [3, None, "text", [torch.zeros(2)]])
def test_only_tensors_are_joinable(other: Any) -> None:
    assert not is_joinable(other)


def answer(*leaves: Any) -> tuple[Structure, list[Any]]:
    """The outputs of a device that returned a tuple."""
    flat, structure = flatten(leaves)
    return structure, [TensorForm.of(leaf) if is_joinable(leaf) else leaf for leaf in flat]


def check(*answers: tuple[Structure, list[Any]]) -> None:
    """Check them as those of cpu:0 with 2 samples, cpu:1 with 3, cpu:2 with 4."""
    num = len(answers)
    check_outputs(answers, [2, 3, 4][:num], ["cpu:0", "cpu:1", "cpu:2"][:num], [0] * 9)


def test_outputs_that_fit_are_accepted() -> None:
    check(*(answer(torch.zeros(n, 5), torch.tensor(1.0), 3, None, "a") for n in (2, 3, 4)))


def test_one_device_has_only_itself_to_agree_with() -> None:
    check(answer(torch.zeros(2, 5), 3))
    with pytest.raises(BatchError, match=r"output 0 has the shape \(3, 5\) on cpu:0, .* is 2"):
        check(answer(torch.zeros(3, 5)))


def test_outputs_that_are_the_same_object_agree_whatever_their_equality_says() -> None:
    class Strange:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise TypeError

        def __reduce__(self) -> str:
            raise TypeError

    strange = Strange()

    check(answer(torch.zeros(2), strange), answer(torch.zeros(3), strange))
    with pytest.raises(BatchError, match="output 1 differs"):
        check(answer(torch.zeros(2), strange), answer(torch.zeros(3), Strange()))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3),
        lambda: [1, "a"],
        lambda: np.arange(3),
        Configuration,
        lambda: float("nan"),
    ],
)
def test_equal_values_agree(make: Callable[[], Any]) -> None:
    check(answer(torch.zeros(2), make()), answer(torch.zeros(3), make()))


def test_a_difference_in_differentiability_is_none() -> None:
    """A device whose part needed no parameter has nothing to give back."""
    check(answer(torch.zeros(2)), answer(torch.zeros(3, requires_grad=True)))


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        # Structure.
        (
            (answer(torch.zeros(2)), answer(torch.zeros(3), torch.zeros(3))),
            "(?s)differ in structure: .+ on cpu:0, .+ on cpu:1; a parallel module must return",
        ),
        (
            (answer(torch.zeros(2)), (flatten(3)[1], answer(torch.zeros(3))[1])),
            "differ in structure",
        ),
        (
            (answer(Box(torch.zeros(2))), answer(Frozen(torch.zeros(3)))),
            "differ in structure: .*Box.* on cpu:0, .*Frozen.* on cpu:1",
        ),
        # The first dimension.
        (
            (answer(torch.zeros(2, 5)), answer(torch.zeros(2, 5))),
            r"output 0 has the shape \(2, 5\) on cpu:1, whose share .* is 3; expected the batch",
        ),
        (
            (answer(torch.zeros(7, 2)), answer(torch.zeros(7, 3))),
            r"output 0 has the shape \(7, 2\) on cpu:0, whose share of the batch is 2",
        ),
        # The other dimensions.
        (
            (answer(3, torch.zeros(2, 5)), answer(3, torch.zeros(3, 6))),
            r"output 1 has the shape \(2, 5\) on cpu:0 and \(3, 6\) on cpu:1; .* pad",
        ),
        (
            (answer(torch.zeros(2)), answer(torch.zeros(3)), answer(torch.zeros(4, 1))),
            r"output 0 has the shape \(2,\) on cpu:0 and \(4, 1\) on cpu:2",
        ),
        # A mean on one, a batch on another.
        (
            (answer(torch.tensor(1.0)), answer(torch.zeros(3))),
            r"output 0 has the shape \(\) on cpu:0 and \(3,\) on cpu:1",
        ),
        (
            (answer(torch.zeros(2)), answer(torch.tensor(1.0))),
            r"output 0 has the shape \(2,\) on cpu:0 and \(\) on cpu:1",
        ),
        # Dtypes.
        (
            (answer(torch.zeros(2)), answer(torch.zeros(3).double())),
            r"output 0 has the dtype torch.float32 on cpu:0 and torch.float64 on cpu:1",
        ),
        (
            (answer(torch.tensor(1.0)), answer(torch.tensor(1.0).double())),
            "output 0 has the dtype",
        ),
        # Values that must agree.
        ((answer(3), answer(4)), "output 0 differs among the devices: 3 on cpu:0, 4 on cpu:1"),
        ((answer(3), answer(3), answer(5)), "3 on cpu:0, 5 on cpu:2"),
        ((answer(1), answer(1.0)), "1 on cpu:0, 1.0 on cpu:1"),
        ((answer(torch.tensor(1)), answer(torch.tensor(2))), r"tensor\(1\) on cpu:0, tensor\(2\)"),
        ((answer(torch.zeros(2)), answer(None)), "output 0 differs among the devices"),
        ((answer(None), answer(torch.zeros(3))), "output 0 differs among the devices"),
        ((answer(torch.tensor(1)), answer(torch.tensor(1.0))), "output 0 differs"),
        ((answer(np.arange(3)), answer(np.arange(4))), "output 0 differs"),
    ],
)
def test_outputs_that_do_not_fit_are_refused_by_number_and_device(
    answers: tuple[tuple[Structure, list[Any]], ...], says: str
) -> None:
    with pytest.raises(BatchError, match=says):
        check(*answers)
