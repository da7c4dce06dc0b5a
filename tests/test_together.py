"""Calls that are made again as a whole; the matrix of faults tries each kind of death."""

from __future__ import annotations

import copy
import gc
import os
import signal

import psutil
import pytest
import torch
from torch import Tensor, nn

import evener
from evener.errors import FaultWarning
from evener.helper import HELPER_VARIABLE


class Short(nn.Module):
    """Has no memory, or the main process none, for more than so many samples, now and then."""

    def __init__(self, where: str = "") -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.where = where
        self.num = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num += 1
        y: Tensor = self.norm(x)
        is_helper = os.environ.get(HELPER_VARIABLE) == str(os.getpid())
        if len(x) > 3 and self.where == ("helper" if is_helper else "main"):
            raise MemoryError("on purpose")
        return y


@pytest.mark.parametrize("where", ["main", "helper"])
def test_a_batch_is_cut_anew_where_a_device_has_no_memory(where: str) -> None:
    plain = Short().double()
    model = copy.deepcopy(plain)
    model.where = where
    evener.parallelize(model, "cpu*2", shares="even", batchnorm="exact")
    x = torch.randn(8, 3, dtype=torch.float64)
    weights = torch.randn(8, 3, dtype=torch.float64)

    with pytest.warns(FaultWarning, match=r"had no memory for 4 samples .* cut anew"):
        outputs = model(x) if where == "helper" else model(x[:7])
    rows = len(outputs)
    (outputs * weights[:rows]).sum().backward()
    expected = plain(x[:rows])
    (expected * weights[:rows]).sum().backward()

    torch.testing.assert_close(outputs, expected)
    assert model.num == 1
    assert int(model.norm.num_batches_tracked) == 1
    torch.testing.assert_close(model.norm.running_var, plain.norm.running_var)
    torch.testing.assert_close(model.norm.weight.grad, plain.norm.weight.grad)
    evener.release(model)


def test_a_helper_that_ends_between_forward_and_backward_changes_nothing() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    model = copy.deepcopy(plain)
    evener.parallelize(model, "cpu*2", shares=(2, 1), batchnorm="exact")
    x = torch.randn(9, 3, dtype=torch.float64)
    outputs = model(x)
    (child,) = psutil.Process().children()
    os.kill(child.pid, signal.SIGKILL)
    later = model[1].running_mean.clone()

    with pytest.warns(FaultWarning, match="SIGKILL"):
        outputs.square().sum().backward()
    plain(x).square().sum().backward()

    assert torch.equal(model[1].running_mean, later)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)
    evener.release(model)
    for _ in range(3):  # what has a finalizer needs two rounds
        gc.collect()
