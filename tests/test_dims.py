"""Dims: where the batch lies, as the user says it."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener import parallelize, release
from evener.dims import Dims
from evener.errors import BatchError
from evener.trees import flatten

x, y = torch.zeros(2, 3, 4), torch.zeros(3)


def of_inputs(in_dims: Any, *args: Any, forward: Any = None, **kwargs: Any) -> list[int | None]:
    leaves, structure = flatten((args, kwargs))
    return Dims(in_dims).of_inputs(args, kwargs, leaves, structure, forward)


def forward(a: Any, b: Any, *rest: Any, mask: Any = None) -> None:
    pass


@pytest.mark.parametrize(
    ("in_dims", "args", "kwargs", "expected"),
    [
        (0, (x, y), {"z": x}, [0, 0, 0]),
        (0, (torch.tensor(1.0), 5, x), {}, [None, None, 0]),
        (1, (x,), {"z": x}, [1, 1]),
        (-1, (x, y), {}, [2, 0]),
        (None, (x, y), {}, [None, None]),
        ((0, None), (x, y), {}, [0, None]),
        ([1, 0], (x, y), {"z": x}, [1, 0, 0]),
        ((0, (1, None)), (x, (x, y)), {}, [0, 1, None]),
        ((0, 1), (x, {"a": x, "b": [x, 5]}), {}, [0, 1, 1, None]),
        ((0, {"a": 1, "b": None}), (x, {"a": x, "b": [x, x]}), {}, [0, 1, None, None]),
        ({"mask": None}, (x, x), {"mask": x}, [0, 0, None]),
        ({"b": 1, "rest": None}, (x, x, x, x), {}, [0, 1, None, None]),
        ({"b": (None, 1)}, (x, (x, x)), {}, [0, None, 1]),
    ],
)
def test_the_dimensions_of_inputs(
    in_dims: Any, args: Any, kwargs: dict[str, Any], expected: list[int | None]
) -> None:
    assert of_inputs(in_dims, *args, forward=forward, **kwargs) == expected


@pytest.mark.parametrize(
    ("in_dims", "message"),
    [
        ((0,), r"in_dims=\(0,\) does not fit the inputs, 2 positional"),
        ((0, (1, 1)), r"does not fit the inputs"),
        ((3, 0), r"batch of input 0 is in dimension 3, and its shape is \(2, 3, 4\)"),
        ({"c": 1}, r"names 'c', and forward has the arguments a, b"),
    ],
)
def test_dimensions_that_do_not_fit_the_inputs_are_told(in_dims: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        of_inputs(in_dims, x, y, forward=forward)


@pytest.mark.parametrize("dims", ["0", 1.0, True, (0, "a"), {"a": 0.5}])
@pytest.mark.parametrize("name", ["in_dims", "out_dims"])
def test_what_is_no_dimension_is_refused_at_once(name: str, dims: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}=.*expected the number of the batch's dimension"):
        parallelize(nn.Linear(1, 1), "cpu*2", **{name: dims})


Pair = namedtuple("Pair", "one other")  # noqa: PYI024


@dataclass
class Answer:
    scores: Any
    states: Any


@pytest.mark.parametrize(
    ("out_dims", "outputs", "expected"),
    [
        (0, (x, torch.tensor(1.0), "a"), [0, None, None]),
        (1, (x, {"a": x}), [1, 1]),
        ((0, (1, None)), (x, (x, x)), [0, 1, None]),
        (Pair(0, 1), Pair(x, x), [0, 1]),
        ({"a": None, "b": 2}, {"a": x, "b": x}, [None, 2]),
        ((1, 0), (Answer(x, [x, x]), x), [1, 1, 1, 0]),
    ],
)
def test_the_dimensions_of_outputs(
    out_dims: Any, outputs: Any, expected: list[int | None]
) -> None:
    leaves, structure = flatten(outputs)

    assert Dims(0, out_dims).of_outputs(leaves, structure) == expected


def test_dimensions_that_do_not_fit_the_outputs_are_told() -> None:
    leaves, structure = flatten((x, y))
    with pytest.raises(BatchError, match=r"out_dims=\(0, 0, 0\) does not fit the outputs"):
        Dims(0, (0, 0, 0)).of_outputs(leaves, structure)
    with pytest.raises(BatchError, match="output 1 is in dimension 1, and its shape is"):
        Dims(0, 1).of_outputs(leaves, structure)


# ------------------------------------------------------------------ in a call


class Recurrent(nn.Module):
    """Time first, states that come and go, a mask that belongs to no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2)
        self.linear = nn.Linear(4, 5)
        self.table = nn.Parameter(torch.randn(100, 100))

    def forward(
        self, steps: Tensor, states: tuple[Tensor, Tensor], *, mask: Tensor
    ) -> dict[str, Any]:
        hidden, states = self.lstm(steps.view(-1, *steps.shape[1:]), states)
        return {
            "scores": self.linear(hidden * mask[:, None, None]),
            "states": states,
            "decay": (self.linear.weight.square(), self.table.square()),
            "length": (torch.arange(steps.shape[0]), torch.arange(10_000)),
        }


IN_DIMS = {"steps": 1, "states": 1, "mask": None}
OUT_DIMS = {"scores": 1, "states": (1, 1), "decay": None, "length": None}


def run(model: nn.Module, length: int, batch: int) -> list[Tensor]:
    """Outputs, and gradients of parameters and inputs, of one step."""
    torch.manual_seed(batch)
    like = {"dtype": torch.float64, "requires_grad": True}
    steps = torch.randn(length, batch, 3, **like)  # type: ignore[call-overload]
    states = tuple(torch.randn(2, batch, 4, **like) for _ in range(2))  # type: ignore[call-overload]
    mask = torch.rand(length, **like)  # type: ignore[call-overload]
    model.zero_grad()
    out = model(steps, states, mask=mask)
    loss = out["scores"].square().mean() + out["states"][0].sum()
    loss = loss + sum(decay.sum() for decay in out["decay"])
    loss.backward()
    found = [*flatten(out)[0], *(p.grad for p in model.parameters())]
    return [value.detach().clone() for value in [*found, steps.grad, states[0].grad, mask.grad]]


def test_batches_in_any_dimension_are_as_on_one_device() -> None:
    model = Recurrent().double()
    sizes = [(6, 7), (6, 1), (700, 5)]  # small outputs travel otherwise than large ones
    plain = [run(model, *size) for size in sizes]
    parallelize(model, "cpu*3", shares=(3, 1, 2), in_dims=IN_DIMS, out_dims=OUT_DIMS)

    for size, expected in zip(sizes, plain, strict=True):
        for one, other in zip(run(model, *size), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
    release(model)


class Unequal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.full((2,), int(x[0]))


def test_an_output_that_has_no_batch_must_be_the_same_everywhere() -> None:
    model = parallelize(Unequal(), "cpu*2", shares="even", out_dims=None)

    assert torch.equal(model(torch.zeros(4)), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(
        BatchError, match=r"differs among the devices: tensor\(\[0, 0\]\) on cpu:0"
    ):
        model(torch.arange(4))
    release(model)


def test_whether_the_batch_is_first_everywhere() -> None:
    assert Dims().is_first
    assert not Dims(in_dims=(0, None)).is_first
    assert not Dims(out_dims=1).is_first
