from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import evener
from evener.errors import ModuleError
from evener.step import Precision, Step, copied

OWN, DOUBLE = Precision(), Precision(torch.float64)


def step_of(module: nn.Module, *args: Any, loss: Any = None, grad: bool = True, **kwargs) -> Step:
    return Step(module, args, kwargs, loss, 7, grad)


def left(step: Step, precision: Precision = OWN) -> dict:
    return step.run(step.copy(precision), precision, step.copy(precision))


class Keeper(nn.Module):
    """It changes whatever a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.tensor(0))
        self.count = 0
        self.config = {"seen": [1]}
        self.untouched = "word"

    def forward(self, x, *, offset=None):
        self.steps += 1
        self.count += 1
        self.config["seen"].append(2)
        with torch.no_grad():
            self.frozen.add_(1)
        y = self.linear(x)
        if offset is not None:
            offset.mul_(2)
            y = y + offset
        return {"y": y, "n": 3}


def test_what_a_step_leaves() -> None:
    x, offset = torch.randn(4, 2, requires_grad=True), torch.ones(4, 1)
    module = Keeper()
    step = step_of(module, x, loss=lambda out: out["y"].sum(), offset=offset)
    found = left(step)

    assert set(found) == {
        ("output", "['y']"),
        ("output", "['n']"),
        ("loss", ""),
        ("gradient", "args[0]"),
        ("gradient", "linear.weight"),
        ("gradient", "linear.bias"),
        ("gradient", "unused"),
        ("parameter", "frozen"),
        ("buffer", "steps"),
        ("attribute", "count"),
        ("attribute", "config['seen'][1]"),
        ("input", "kwargs['offset']"),
    }
    assert found["gradient", "unused"] is None
    torch.testing.assert_close(found["gradient", "linear.bias"], torch.full((3,), 4.0))
    assert found["attribute", "count"] == 1


def test_neither_module_nor_inputs_nor_generators_change() -> None:
    torch.manual_seed(0)
    x, offset = torch.randn(4, 2, requires_grad=True), torch.ones(4, 1)
    module = nn.Sequential(Keeper())
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    inner = module[0]
    step = step_of(inner, x, offset=offset)
    left(step)
    left(step, DOUBLE)

    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert (inner.count, inner.config) == (0, {"seen": [1]})
    assert (x.grad, inner.linear.weight.grad) == (None, None)
    assert torch.equal(offset, torch.ones(4, 1))
    assert torch.equal(random, torch.get_rng_state())
    assert torch.get_default_dtype() is torch.float32


def test_two_copies_take_the_same_step() -> None:
    step = step_of(nn.Sequential(nn.Linear(2, 3), nn.Dropout()), torch.randn(4, 2))
    one, other = left(step), left(step)

    assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_step_in_float64_is_the_same_one() -> None:
    step = step_of(nn.Linear(2, 3), torch.randn(4, 2))
    one, exact = left(step), left(step, DOUBLE)

    for key, value in exact.items():
        assert value.dtype is torch.float64
        torch.testing.assert_close(value.float(), one[key])


def test_targets_of_a_loss_may_be_in_the_modules_precision() -> None:
    target = torch.randn(4, 3)

    def loss(out):
        assert out.dtype is target.dtype
        return functional.mse_loss(out, target)

    found = left(step_of(nn.Linear(2, 3), torch.randn(4, 2), loss=loss), DOUBLE)

    assert found["gradient", "weight"].dtype is torch.float64


@pytest.mark.parametrize("returned", [torch.ones(2), 1.0, None])
def test_a_loss_is_one_number(returned: Any) -> None:
    with pytest.raises(ValueError, match="expected a tensor with one number"):
        left(step_of(nn.Linear(2, 3), torch.randn(4, 2), loss=lambda _: returned))


def test_without_a_loss_one_number_is_the_loss_itself() -> None:
    class Loss(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean()

    found = left(step_of(Loss(2, 1), torch.ones(4, 2)))

    torch.testing.assert_close(found["gradient", "bias"], torch.ones(1))


def test_without_a_loss_each_output_counts() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64)

        def forward(self, x):
            return self.one(x), self.two(x.to(torch.complex64)), x.long()

    found = left(step_of(Two(), torch.randn(4, 2)))

    assert found["gradient", "one.weight"].abs().min() > 0
    assert found["gradient", "two.weight"].abs().min() > 0


def test_there_may_be_no_backward() -> None:
    x = torch.randn(4, 2, requires_grad=True)

    assert [kind for kind, _ in left(step_of(nn.ReLU(), torch.ones(2)))] == ["output"]
    with torch.no_grad():
        found = left(step_of(nn.Linear(2, 3), x, grad=False))
    assert found["gradient", "weight"] is None
    with torch.inference_mode():
        assert ("output", "") in left(step_of(nn.Linear(2, 3), torch.ones(4, 2), grad=False))


def test_autocast_holds_for_the_modules_own_precision() -> None:
    step = step_of(nn.Linear(2, 3), torch.randn(4, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert left(step)["output", ""].dtype is torch.bfloat16
        assert left(step, DOUBLE)["output", ""].dtype is torch.float64


def test_a_lazy_module_is_as_after_its_first_call() -> None:
    module = nn.LazyLinear(3)
    step = step_of(module, torch.randn(4, 2))
    one, other = left(step), left(step)

    assert torch.equal(one["output", ""], other["output", ""])
    assert isinstance(module, nn.LazyLinear)


def test_what_an_earlier_forward_has_kept_is_no_hindrance() -> None:
    class Memory(nn.Linear):
        def forward(self, x):
            self.last = [super().forward(x)]
            return self.last[0]

    module = Memory(2, 3)
    module(torch.ones(1, 2))

    assert torch.equal(copied(module).last[0], module.last[0])


def test_a_lock_may_be_left_out_of_pickles() -> None:
    class Locked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 3)
            self.lock = threading.Lock()

        def __getstate__(self):
            return {name: value for name, value in vars(self).items() if name != "lock"}

    class Stuck(Locked):
        __getstate__ = object.__getstate__ if hasattr(object, "__getstate__") else vars

    assert torch.equal(copied(Locked()).bias, copied(Locked()).bias) is False
    with pytest.raises(ModuleError, match="can be neither copied nor pickled"):
        copied(Stuck())


def test_a_copy_of_a_parallel_module_is_plain_and_has_no_gradients() -> None:
    module = evener.parallelize(nn.Linear(2, 3), "cpu*2", shares="even")
    module(torch.ones(2, 2)).sum().backward()
    made = step_of(module, torch.ones(2, 2)).copy(OWN)
    evener.release(module)

    assert type(made) is nn.Linear
    assert made.weight.grad is None
    assert torch.equal(made.weight, module.weight)
    assert module.weight.grad is not None
