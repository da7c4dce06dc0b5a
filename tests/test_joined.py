"""The autograd function: what it refuses, and what it marks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import evener


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y.argmax(1)


def test_second_derivatives_are_refused_and_numbers_have_no_gradient() -> None:
    model = evener.parallelize(Two(), "cpu*2", shares="even")
    y, numbers = model(torch.randn(4, 2))
    assert y.requires_grad
    assert not numbers.requires_grad
    with pytest.raises(evener.EvenerError, match="create_graph"):
        torch.autograd.grad(y.sum(), list(model.parameters()), create_graph=True)
    evener.release(model)
