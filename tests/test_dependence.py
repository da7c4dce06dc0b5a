from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

import evener
from evener.batches import Batch
from evener.dependence import dependent
from evener.dims import Dims


def find(module: nn.Module, *args, parts=((0, 4), (4, 7)), in_dims=0) -> dict[str, str]:
    """The submodules that see how a batch of seven is cut."""
    batch = Batch(args, {}, Dims(in_dims))
    found = dependent(lambda: copy.deepcopy(module), batch, parts, 0)
    return {each.path: each.what for each in found}


class Center(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Own(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


X = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(3, 4),
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Softmax(-1)),
        nn.Sequential(nn.Linear(3, 4), nn.Dropout()),
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(),
        Own(lambda y: y.mean()),
        Own(lambda y: (y, y.mean(), "word", None, len("word"))),
        Own(lambda y: evener.Mean(y.sum(), y.numel())),
        Own(lambda y: evener.Sum(y.sum())),
        Own(lambda y: y * random.random()),  # noqa: S311
        Own(lambda y: y + torch.randn_like(y)),
        Own(lambda y: y.repeat_interleave(2, 0)),
    ],
)
def test_where_samples_are_independent_nothing_is_found(module: nn.Module) -> None:
    assert find(module, X) == {}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Sequential(nn.Linear(3, 4), Center(), nn.Tanh()), {"1": "samples"}),
        (
            nn.Sequential(Center(), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))),
            {"0": "samples", "1.1": "samples"},
        ),
        (nn.Sequential(nn.Linear(3, 4), nn.Softmax(0)), {"1": "samples"}),
        (Own(lambda y: y / y.norm()), {"": "samples"}),
        (Own(lambda y: y @ y.T), {"": "samples"}),
        (Own(lambda y: y.sort(0).values), {"": "samples"}),
        (Own(lambda y: y.sum()), {"": "sum"}),
        (Own(lambda y: y.max()), {"": "mean"}),
        (Own(lambda y: y.sum() / (y > 0).sum()), {"": "mean"}),
        (nn.Sequential(nn.Linear(3, 4), nn.Dropout(), Center()), {"2": "samples"}),
    ],
)
def test_the_deepest_submodules_are_found(module: nn.Module, expected: dict) -> None:
    assert find(module, X) == expected


def test_three_parts_and_a_batch_in_another_dimension() -> None:
    class Steps(nn.Module):
        def forward(self, x):  # (steps, batch, features)
            return x - x.mean(1, keepdim=True)

    inputs = torch.randn(2, 7, 3)

    assert find(Steps(), inputs, parts=((0, 1), (1, 3), (3, 7)), in_dims=1) == {"": "samples"}
    assert find(nn.LSTM(3, 4), inputs, in_dims=1) == {}


def test_flattened_batches_are_cut_where_they_become_shorter() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 4), Center())

        def forward(self, x):
            return self.inner(x.flatten(0, 1))

    assert find(Flat(), torch.randn(7, 5, 3)) == {"inner.1": "samples"}


def test_a_module_that_remembers_is_not_judged() -> None:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = None

        def forward(self, x):
            before, self.last = self.last, x
            return x if before is None else x + len(before)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = Memory()

        def forward(self, x):
            return self.memory(self.memory(x)) * 0

    assert "memory" not in find(Twice(), X)


def test_each_call_of_a_submodule_counts() -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Own(lambda y: y)
            self.inner.linear = nn.Linear(4, 4)
            self.inner.forward = self.some

        def some(self, x):
            return x - x.mean(0) if x.dim() == 3 else x

        def forward(self, x):
            return self.inner(self.inner(x)[:, None])

    assert list(find(Thrice(), X)) == ["inner"]


def test_the_modules_generators_stay() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), Center())
    before = torch.get_rng_state()
    find(module, X)

    assert torch.equal(before, torch.get_rng_state())
