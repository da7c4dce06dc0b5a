"""Batch norm over all devices is that of one device."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import evener
from evener.batchnorm import most_values, over_all, uses_statistics
from evener.errors import BranchError
from evener.textbook.resnet import ResNet18


class Sparse(nn.Module):
    """Normalises only samples that are above zero: a device may have one of these, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        kept = x[:, 0] > 0
        y = torch.zeros_like(x)
        y[kept] = self.norm(x[kept])
        return y


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layers, x, use_reentrant=False)


def steps(
    make: Callable[[], nn.Module], x: Tensor, shares: Any, *, num: int = 3, devices: str = "cpu*2"
) -> list[list[Tensor]]:
    """Outputs, gradients and buffers of some steps, plain and parallel."""
    plain = make().to(x.dtype)
    parallel = copy.deepcopy(plain)
    evener.parallelize(parallel, devices, shares=shares, batchnorm="exact")
    found = []
    for model in (plain, parallel):
        given = x.clone().requires_grad_()
        seen = []
        for i in range(num):
            model.zero_grad()
            outputs = model(given * (i + 1))
            (outputs * torch.arange(outputs.numel()).view_as(outputs).cos()).sum().backward()
            seen += [outputs.detach(), *(p.grad for p in model.parameters())]
        found.append([*seen, given.grad, *(b.clone() for b in model.buffers())])
    evener.release(parallel)
    return found


def assert_equal(found: list[list[Tensor]], tolerance: float = 1e-12) -> None:
    plain, parallel = found
    assert len(plain) == len(parallel)
    for one, other in zip(plain, parallel, strict=True):
        scale = tolerance * (1 + float(one.abs().max()))
        torch.testing.assert_close(other, one, rtol=0, atol=scale)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm1d(3),
    "cumulative": lambda: nn.BatchNorm1d(3, momentum=None),
    "no affine": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)),
    "no statistics": lambda: nn.BatchNorm1d(3, track_running_stats=False),
    "neither": lambda: nn.BatchNorm1d(3, affine=False, track_running_stats=False),
    "sync": lambda: nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)),
    "sparse": Sparse,
    "checkpointed": Checkpointed,
    "twice": lambda: nn.Sequential(*[nn.BatchNorm1d(3)] * 2, nn.Linear(3, 2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_one_device(name: str) -> None:
    x = torch.randn(7, 3, dtype=torch.float64)
    x[:6, 0] = x[:6, 0].abs() * torch.tensor([1, -1, 1, 1, -1, 1])
    x[6, 0] = -1.0  # the second device's only one

    assert_equal(steps(MODELS[name], x, (6, 1)))


@pytest.mark.parametrize("shares", [(1, 2, 3), (0, 1, 1), (1, 0, 6)])
def test_it_is_so_with_any_shares(shares: tuple[int, ...]) -> None:
    x = torch.randn(7, 3, 4, 5, dtype=torch.float64)

    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2))

    assert_equal(steps(make, x, shares, devices="cpu*3"))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-6), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)],
)
def test_it_is_so_in_other_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(8, 3, 4, 4).to(dtype).contiguous(memory_format=torch.channels_last)

    assert_equal(steps(lambda: nn.BatchNorm2d(3), x, (3, 1), num=1), tolerance)


def test_a_resnet_trains_for_fifty_steps_as_on_one_device() -> None:
    plain = ResNet18(width=4, num_classes=5).double()
    model = copy.deepcopy(plain)
    evener.parallelize(model, "cpu*2", shares=(5, 1), batchnorm="exact")
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (plain, model)
    ]
    for _ in range(50):
        x, target = torch.randn(13, 1, 12, 12).double(), torch.randint(0, 5, (13,))
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            functional.cross_entropy(each(x), target).backward()
            optimizer.step()
    for name, value in plain.state_dict().items():
        scale = 2e-12 * float(value.abs().max())
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=scale)
    evener.release(model)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and bool((x < 0).any()):
            raise LookupError("a bad sample")
        y: Tensor = self.one(x) if float(x[0, 0]) > 0 else x if self.fails else self.other(x)
        return y


def test_devices_that_go_different_ways_are_an_error_and_the_module_works_on() -> None:
    model = evener.parallelize(Branching(), "cpu*2", shares="even", batchnorm="exact")
    good = torch.rand(4, 2) + 1
    bad = good * torch.tensor([[1.0], [1], [-1], [-1]])

    with pytest.raises(BranchError, match=r"cpu:0 is in BatchNorm1d 'one', and cpu:1 .*'other'"):
        model(bad)

    plain = Branching()
    torch.testing.assert_close(model(good), plain(good))
    evener.release(model)


def test_an_error_on_one_device_ends_the_waiting_of_the_other() -> None:
    model = Branching()
    model.fails = True
    evener.parallelize(model, "cpu*2", shares="even", batchnorm="exact")
    good = torch.rand(4, 2) + 1

    for sign in ([1.0, 1, -1, -1], [-1.0, -1, 1, 1]):
        with pytest.raises(LookupError, match="a bad sample"):
            model(good * torch.tensor(sign)[:, None])
    model(good).sum().backward()
    evener.release(model)


def test_one_value_in_all_is_torchs_own_error() -> None:
    model = evener.parallelize(Sparse(), "cpu*2", shares="even", batchnorm="exact")

    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        model(torch.tensor([[1.0, 1, 1], [-1, 1, 1]]))
    evener.release(model)


def test_code_that_was_compiled_is_exact_too() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = copy.deepcopy(plain)
    model.compile(backend="eager")
    evener.parallelize(model, "cpu*2", shares=(3, 1), batchnorm="exact")
    x = torch.randn(8, 3)
    model.eval()
    model(x)
    model.train()

    torch.testing.assert_close(model(x), plain(x))
    assert "torch._dynamo" in sys.modules
    evener.release(model)


def test_frozen_layers_need_nobody() -> None:
    norm = nn.BatchNorm1d(3)

    assert uses_statistics(norm)
    assert not uses_statistics(norm.eval())
    assert uses_statistics(nn.BatchNorm1d(3, track_running_stats=False).eval())
    assert most_values(nn.Sequential(norm, nn.BatchNorm1d(5))) == 11


def test_without_a_gather_torchs_function_stays() -> None:
    before = functional.batch_norm

    with over_all(None, []):
        assert functional.batch_norm is before
