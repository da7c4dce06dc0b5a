"""Recovery from too little memory: portions, limits, and who else does it (deaths: test_team)."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evener
from evener.errors import FaultWarning, SampleTooLargeError


class Greedy(nn.Module):
    """Has memory for ``most`` samples in a process, by turns of ``where`` and ``phase``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.most = 100
        self.where = "everywhere"
        self.phase = "forward"

    def forward(self, x: Tensor) -> Tensor:
        here = "main" if "EVENER_HELPER" not in os.environ else "helper"
        is_too_much = len(x) > self.most and self.where in ("everywhere", here)
        if is_too_much and self.phase == "forward":
            raise MemoryError(f"no memory for {len(x)}")
        y = torch.tanh(self.linear(x))
        return TooMuch.apply(y) if is_too_much else y


class TooMuch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.fixture
def parallel() -> Any:
    torch.manual_seed(0)
    model = evener.parallelize(Greedy().double(), "cpu*2", shares="even")
    yield model
    evener.release(model)


def step_of(model: nn.Module, batch: int = 16) -> list[Tensor]:
    x = torch.randn(batch, 3, dtype=torch.float64, requires_grad=True)
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def assert_right(parallel: nn.Module, step: Callable[..., list[Tensor]] = step_of) -> None:
    """A step is that of the plain module, which has all the memory that it wants."""
    plain = copy.deepcopy(parallel)
    plain.most = 100
    torch.manual_seed(1)
    expected = step(plain)
    torch.manual_seed(1)
    for one, other in zip(step(parallel), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_helper_without_memory_goes_on_in_portions_and_gets_no_more_afterwards(
    parallel: Greedy, phase: str
) -> None:
    parallel.most, parallel.where, parallel.phase = 3, "helper", phase

    with pytest.warns(
        FaultWarning, match=rf"cpu:1 had no memory for 8 samples .* {phase}"
    ) as all_:
        assert_right(parallel)

    assert len(all_) == 1
    (fault,) = evener.report(parallel).faults
    assert fault.action == (
        "it computed them in portions of 2; it gets no more than 2 from now on"
    )
    assert_right(parallel)  # and in silence
    assert evener.report(parallel).shares == (14, 2)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_main_process_too(parallel: Greedy, phase: str) -> None:
    parallel.most, parallel.where, parallel.phase = 4, "main", phase

    with pytest.warns(FaultWarning, match="cpu:0 had no memory for 8 samples"):
        assert_right(parallel)

    assert_right(parallel)
    assert evener.report(parallel).shares == (4, 12)


def test_where_all_are_too_small_all_go_on_in_portions(parallel: Greedy) -> None:
    parallel.most = 2

    with pytest.warns(FaultWarning) as told:
        assert_right(parallel)
    assert len(told) == 2

    assert_right(parallel)
    assert sum(evener.report(parallel).shares) == 16


def test_a_helper_without_memory_for_one_sample_is_left_out(parallel: Greedy) -> None:
    parallel.most, parallel.where = 0, "helper"

    with pytest.warns(
        FaultWarning, match="the main process computed them; it gets no more than 1"
    ):
        assert_right(parallel)
    with pytest.warns(FaultWarning, match="no memory for 1 samples .*; it is left out"):
        assert_right(parallel)

    assert_right(parallel)
    assert evener.report(parallel).shares == (16, 0)


def test_where_one_sample_fits_nowhere_the_error_says_so_and_the_module_works_on(
    parallel: Greedy,
) -> None:
    parallel.most = 0

    with pytest.raises(SampleTooLargeError, match=r"one sample does not fit .* no memory for 1"):
        step_of(parallel)

    assert all(p.grad is None for p in parallel.parameters())
    parallel.most = 100
    assert_right(parallel)


@pytest.mark.parametrize("grad", [True, False])
def test_large_outputs_of_the_first_device_are_written_too(grad: bool) -> None:
    """They do not fit into a message, so who has run the portions must be told to write them."""

    class Wide(Greedy):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y.repeat(1, 2000), y.mean(0).repeat(5000), evener.Sum(y.sum(0).repeat(5000))

    torch.manual_seed(0)
    plain = Wide().double()
    model = copy.deepcopy(plain)
    evener.parallelize(model, "cpu*2", shares="even", out_dims=(0, None, 0))
    model.most, model.where = 2, "main"
    x = torch.randn(16, 3, dtype=torch.float64)

    with torch.set_grad_enabled(grad), pytest.warns(FaultWarning):
        rows, mean, total = model(x)
    evener.release(model)

    expected = plain(x)
    torch.testing.assert_close(rows, expected[0])
    torch.testing.assert_close(mean, expected[1])
    torch.testing.assert_close(total, expected[2].total)
