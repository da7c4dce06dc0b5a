"""A call in cells: what it makes of buffers, and of too little memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evener
from evener.errors import FaultWarning

DEVICES = evener.devices("cpu*4")


def parallel(make: Callable[[], nn.Module], num: int, shares: Any) -> nn.Module:
    torch.manual_seed(0)
    return evener.parallelize(make(), DEVICES[:num], shares=shares, grid=8)


def sum_of(tensors: Sequence[Tensor | None]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(b"" if tensor is None else tensor.detach().numpy().tobytes())
    return found.hexdigest()


def test_running_statistics_are_those_of_all_cells_and_count_one_batch() -> None:
    class Masked(nn.BatchNorm1d):
        def __init__(self) -> None:
            super().__init__(4, dtype=torch.float64)
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    model = parallel(Masked, 3, (2, 1, 1))
    x = torch.randn(24, 4, dtype=torch.float64)
    model(x)
    state = model.state_dict()
    assert state["num_batches_tracked"] == 1
    torch.testing.assert_close(state["running_mean"], 0.1 * x.mean(0))
    variance = torch.stack([x[i : i + 3].var(0) for i in range(0, 24, 3)]).mean(0)
    torch.testing.assert_close(state["running_var"], 0.9 + 0.1 * variance)
    assert state["mask"].tolist() == [0.0, -torch.inf]
    evener.release(model)


def test_the_users_buffers_stay_the_same_objects() -> None:
    model = parallel(lambda: nn.BatchNorm1d(4), 1, "auto")
    mean = model.running_mean
    assert mean is not None
    model(torch.randn(24, 4))
    assert model.running_mean is mean
    assert mean.abs().sum() > 0
    evener.release(model)


def test_too_little_memory_changes_no_bit() -> None:
    class Token:
        num_alive = 0

        def __init__(self) -> None:
            Token.num_alive += 1

        def __del__(self) -> None:
            Token.num_alive -= 1

    class Graph(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.token = Token()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    class Greedy(nn.Module):
        """Has memory for two graphs in a process."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.drop = nn.Dropout(0.5)
            self.norm = nn.BatchNorm1d(2)
            self.is_short = False

        def forward(self, x: Tensor) -> Tensor:
            if self.is_short and Token.num_alive == 2:
                raise MemoryError("no memory for so many graphs")
            return Graph.apply(torch.tanh(self.norm(self.drop(self.linear(x)))))

    def step(model: nn.Module) -> str:
        torch.manual_seed(1)
        x = torch.randn(16, 3, requires_grad=True)
        model(x).square().sum().backward()
        return sum_of([x.grad, *(p.grad for p in model.parameters()), *model.buffers()])

    model = parallel(Greedy, 2, "even")
    whole = step(model)
    evener.release(model)
    model = parallel(Greedy, 2, "even")
    model.is_short = True
    with pytest.warns(FaultWarning, match="had no memory") as told:
        assert step(model) == whole
    assert len(told) == 2
    evener.release(model)
