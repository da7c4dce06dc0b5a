"""Known limits, each a strict xfail: when one is lifted, its test says so. See docs/guide.md."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import evener

FACTOR = 1.0


@pytest.mark.xfail(strict=True, reason="batch norm uses each device's own share")
def test_batch_norm_in_training_is_that_of_one_device() -> None:
    plain = nn.BatchNorm1d(3)
    model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares="even")
    x = torch.randn(8, 3)
    outputs = model(x)
    evener.release(model)

    torch.testing.assert_close(outputs, plain(x))


@pytest.mark.xfail(strict=True, reason="each device has its own seed")
def test_dropout_masks_are_those_of_one_device() -> None:
    plain = nn.Dropout()
    model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares="even")
    x = torch.ones(8, 64)
    outputs = model(x)
    evener.release(model)

    assert torch.equal(outputs, plain(x))


@pytest.mark.xfail(
    strict=True, reason="a helper changes its copy of its part", raises=AssertionError
)
def test_inputs_changed_in_place_are_changed_everywhere() -> None:
    model = evener.parallelize(nn.ReLU(inplace=True), "cpu*2", shares="even")
    x = -torch.ones(4)
    model(x)
    evener.release(model)

    assert x.tolist() == [0, 0, 0, 0]


@pytest.mark.xfail(strict=True, reason="a helper has the global variable as it was when sent")
def test_a_global_variable_that_changes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Global(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * FACTOR

    model = evener.parallelize(Global(), "cpu*2", shares="even")
    model(torch.ones(4))
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    outputs = model(torch.ones(4))
    evener.release(model)

    assert outputs.tolist() == [2, 2, 2, 2]


@pytest.mark.xfail(strict=True, reason="torch refuses it inside torch.autograd.grad")
def test_reentrant_checkpoints_work() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.layer, x * self.layer.bias, use_reentrant=True)

    model = evener.parallelize(Checkpointed(), "cpu*2", shares="even")
    try:
        model(torch.ones(4, 3)).sum().backward()
    finally:
        evener.release(model)


@pytest.mark.xfail(strict=True, reason="the helpers' graphs are in other processes")
def test_second_derivatives() -> None:
    model = evener.parallelize(nn.Linear(3, 1), "cpu*2", shares="even")
    x = torch.ones(4, 3, requires_grad=True)
    try:
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    finally:
        evener.release(model)
