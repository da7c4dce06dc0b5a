"""The plain call of the first device: what it computes, and what is noted of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from evener.alone import run_alone
from evener.journal import BACKWARD, FORWARD, INFERENCE, Journal


@pytest.fixture
def journal() -> Journal:
    return Journal(2)


def run(journal: Journal, outputs: Any, *, grad: bool = True) -> Any:
    found, seconds = run_alone(lambda: outputs, journal, 1, (4, 0), grad=grad)
    assert seconds >= 0
    return found


def kinds(journal: Journal) -> list[str]:
    return [phase.kind for phase in journal.phases]


def test_a_forward_and_its_backward_are_noted(journal: Journal) -> None:
    x = torch.randn(4, requires_grad=True)

    out = run(journal, x * 2)
    assert kinds(journal) == [FORWARD]
    out.sum().backward()

    assert kinds(journal) == [FORWARD, BACKWARD]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 4
    backward = journal.phases[1]
    assert backward.shares == (4, 0)
    assert [(stretch.device, stretch.kind) for stretch in backward.stretches] == [(0, BACKWARD)]


@pytest.mark.parametrize("pack", [lambda t: {"out": [None, t]}, lambda t: (3, t), lambda t: t])
def test_the_outputs_may_be_any_tree(journal: Journal, pack: Any) -> None:
    x = torch.randn(4, requires_grad=True)
    tensor = x * 2
    outputs = pack(tensor)

    assert run(journal, outputs) is outputs
    tensor.sum().backward()

    assert kinds(journal) == [FORWARD, BACKWARD]


@pytest.mark.parametrize("outputs", [None, 3.0, torch.ones(4), torch.ones(4, requires_grad=True)])
def test_outputs_without_a_graph_have_no_backward(journal: Journal, outputs: Any) -> None:
    assert run(journal, outputs) is outputs
    assert kinds(journal) == [FORWARD]


def test_inference(journal: Journal) -> None:
    run(journal, torch.ones(4), grad=False)
    assert kinds(journal) == [INFERENCE]


def test_every_backward_is_noted_and_a_second_derivative_works(journal: Journal) -> None:
    x = torch.randn(4, requires_grad=True)
    out = run(journal, x**3)

    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)

    torch.testing.assert_close(second, 6 * x)
    assert kinds(journal)[:2] == [FORWARD, BACKWARD]


def test_a_backward_that_fails_is_not_noted(journal: Journal) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise ValueError("no")

    x = torch.randn(4, requires_grad=True)
    out = run(journal, Failing.apply(x))  # type: ignore[no-untyped-call]

    with pytest.raises(ValueError, match="no"):
        out.sum().backward()
    assert kinds(journal) == [FORWARD]


def test_what_the_call_raises_is_raised(journal: Journal) -> None:
    with pytest.raises(ZeroDivisionError):
        run_alone(lambda: 1 / 0, journal, 1, (4, 0), grad=True)
    assert kinds(journal) == []
