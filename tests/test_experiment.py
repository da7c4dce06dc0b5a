"""How a difference's cause is found, on models made to be different."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import evener
from evener.experiment import Experiment
from evener.step import Step
from evener.verification import Verification

X = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))


def result(module: nn.Module, x: torch.Tensor = X, loss: Any = None, **options) -> Verification:
    options.setdefault("shares", "even")
    step = Step(module, (x,), {}, loss, 3, True)
    return Experiment(step, evener.devices("cpu*2"), options).result()


def verdicts(found: Verification, kind: str) -> set[str]:
    return {row.verdict for row in found.rows if row.kind == kind}


def causes(found: Verification) -> list[tuple[str, tuple[str, ...]]]:
    return [(cause.kind, cause.where) for cause in found.causes]


class Center(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Own(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.function = function

    def forward(self, x):
        return self.function(self, self.linear(x))


def test_an_equal_model() -> None:
    found = result(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 5)))

    assert found.verdict in ("equal", "rounding")
    assert found.causes == ()
    assert found.shares == (5, 4)
    assert found.precision is torch.float64
    assert all(row.relative < 1e-6 for row in found.rows)
    assert {row.kind for row in found.rows} == {"output", "gradient"}


def test_a_layer_in_which_samples_depend_on_each_other() -> None:
    found = result(nn.Sequential(nn.Linear(6, 8), Center(), nn.Tanh(), nn.Linear(8, 5)))

    assert not found
    assert verdicts(found, "output") == {"different"}
    assert causes(found) == [("dependent", ("1",))]


@pytest.mark.parametrize(
    ("module", "where"),
    [
        (nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 5)), "1"),
        (Own(lambda _, y: nn.functional.dropout(y)), ""),
        (Own(lambda _, y: y + torch.randn(y.shape, dtype=y.dtype)), ""),
        (Own(lambda _, y: y * random.random()), ""),  # noqa: S311
    ],
)
def test_random_numbers_alone_are_told_as_such(module: nn.Module, where: str) -> None:
    found = result(module)

    assert found.verdict == "random"
    assert verdicts(found, "output") == {"random"}
    assert causes(found) == [("random", (where,))]


def test_dropout_inside_of_a_checkpoint() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    found = result(Checkpointed(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 5)))

    assert found.verdict == "random"


def test_random_numbers_hide_no_other_cause() -> None:
    found = result(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), Center(), nn.Linear(8, 5)))

    assert not found
    assert causes(found) == [("dependent", ("2",)), ("random", ("1",))]


def test_where_nothing_differs_random_numbers_are_no_cause() -> None:
    found = result(Own(lambda _, y: (torch.rand(3), y)[1]))

    assert found.verdict in ("equal", "rounding")
    assert found.causes == ()


def test_a_sum_and_another_mean() -> None:
    assert causes(result(Own(lambda _, y: y.sum()))) == [("average", ("",))]
    assert causes(result(Own(lambda _, y: y.max()))) == [("average", ("",))]
    assert result(Own(lambda _, y: evener.Sum(y.sum()))).verdict == "rounding"


def test_what_forward_changes() -> None:
    def function(self, y):
        self.last = y
        self.total += 1
        self.mean.mul_(0.9).add_(y.detach().mean(0))
        return y

    module = Own(function)
    module.total = 0
    module.register_buffer("mean", torch.zeros(5))
    found = result(module)

    assert causes(found) == [("changed", ("last",)), ("changed", ("mean",))]
    assert verdicts(found, "output") <= {"equal", "rounding"}
    (note,) = [row.note for row in found.rows if row.name == "last"]
    assert note == "shape (5, 5) for (9, 5)"
    assert [row.verdict for row in found.rows if row.name == "total"] == ["equal"]


def test_an_input_that_is_changed_in_place() -> None:
    class Doubling(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(2))

    assert causes(result(Doubling(6, 5))) == [("changed", ("args[0]",))]


class Elsewhere(nn.Linear):
    """It computes something else in another process."""

    def forward(self, x):
        return super().forward(x) * (os.getpid() % 7919)


def test_a_helper_that_computes_something_else() -> None:
    (cause,) = result(Elsewhere(6, 5)).causes

    assert cause.kind == "replica"
    assert "output" in cause.where


class Half(torch.autograd.Function):
    """Its backward sees how the batch is cut, its forward does not."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * len(gradient)


def test_what_is_not_found_is_said_to_be_unknown() -> None:
    found = result(Own(lambda _, y: Half.apply(y)))

    assert causes(found) == [("unknown", ())]
    assert "please report it" in str(found)


def test_a_difference_in_the_precision_of_the_module_only_is_rounding() -> None:
    # A sum that cancels: in float32 nothing of it is right, on one device or on many.
    found = result(Own(lambda _, y: (y.sum(1) + 1e8 - 1e8) * 1e3))

    assert found.verdict in ("equal", "rounding")


def test_a_module_for_one_precision_only() -> None:
    def function(self, y):
        if y.dtype is not torch.float32:
            raise TypeError("float32 only")
        return y

    fine = result(Own(function))
    wrong = result(Own(lambda self, y: Center()(function(self, y))))

    assert (fine.precision, fine.refused) == (
        None,
        "in torch.float64 it raises TypeError: float32 only",
    )
    assert fine.verdict in ("equal", "rounding")
    assert causes(wrong) == [("dependent", ("",))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype) -> None:
    fine = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 5)).to(dtype)
    wrong = nn.Sequential(nn.Linear(6, 32), Center(), nn.Linear(32, 5)).to(dtype)

    assert result(fine, X.to(dtype)).verdict in ("equal", "rounding")
    assert causes(result(wrong, X.to(dtype))) == [("dependent", ("1",))]


def test_a_module_that_cannot_be_held_still() -> None:
    def function(_, y):
        noise = torch.rand(3)
        if noise[0] == noise[1]:
            raise RuntimeError("these are no random numbers")
        return y * noise[0]

    found = result(Own(function))

    assert not found
    assert "held still, the module raises RuntimeError" in found.refused
    assert causes(found) == [("random", ("",))]


def test_threads_are_what_they_were() -> None:
    before = torch.get_num_threads()
    result(nn.Linear(6, 5))

    assert torch.get_num_threads() == before
