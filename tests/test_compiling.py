"""Compiling: each device compiles its own replica, however torch.compile was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evener
from bounds import LONG
from evener.compiling import Compiler, surrounding
from evener.pickling import COMPILE_NAME


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * self.scale


def telling(graph: Any, _inputs: Any) -> Any:
    """A compiler that tells of its work; helpers' prints arrive in the main process."""
    print("compiled")
    return graph.forward


def before(model: nn.Module) -> nn.Module:
    return evener.parallelize(torch.compile(model, backend=telling), "cpu*2", shares="even")  # type: ignore[type-var]


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=telling)
    return evener.parallelize(model, "cpu*2", shares="even")


def after(model: nn.Module) -> nn.Module:
    return torch.compile(evener.parallelize(model, "cpu*2", shares="even"), backend=telling)  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # Python 3.13.0
@pytest.mark.parametrize(
    "way", [before, *(pytest.param(way, marks=LONG) for way in (in_place, after))]
)
def test_each_device_compiles_its_replica_once(
    way: Callable[[nn.Module], nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Net().double()
    x = torch.randn(6, 3, dtype=torch.float64)
    (plain(x).square().sum()).backward()
    expected = [plain(x).detach(), *(p.grad.clone() for p in plain.parameters())]
    plain.zero_grad()
    try:
        model = way(plain)
        for _ in range(2):
            model.zero_grad()
            outputs = model(x)
            outputs.square().sum().backward()
        for one, other in zip(
            [outputs, *(p.grad for p in plain.parameters())], expected, strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)

        assert capsys.readouterr().out == "compiled\n" * 2

        plain.scale = 2.0  # what the user changes is followed
        torch.testing.assert_close(model(x), 2 * expected[0])
        if way is after:  # the module itself is not compiled
            capsys.readouterr()
            torch.testing.assert_close(plain(x), 2 * expected[0])
            assert capsys.readouterr().out == ""
            assert COMPILE_NAME not in vars(plain)
        evener.release(model if way is before else plain)
        assert not any(name.startswith("_evener") for name in vars(plain))
    finally:
        torch.compiler.reset()


def test_where_nothing_compiles_there_is_nothing_around() -> None:
    assert surrounding() is None


def test_a_forward_is_compiled_once_for_each_way() -> None:
    made: list[str] = []

    def way(name: str) -> Callable[..., Any]:
        def compile_(forward: Callable[..., Any]) -> Callable[..., Any]:
            made.append(name)
            return lambda *args: (name, forward(*args))

        return compile_

    module, compiler = nn.Identity(), Compiler()
    assert compiler.forward(module, module.forward) == module.forward
    for name in ("one", "other"):
        vars(module)[COMPILE_NAME] = way(name)
        for _ in range(2):
            assert compiler.forward(module, module.forward)(5) == (name, 5)
    assert made == ["one", "other"]


PROGRAM = """
import torch
from torch import nn
import evener

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
    def forward(self, x):
        return torch.relu(self.linear(x))

model = evener.parallelize(nn.Sequential(Block(), Block()), "cpu*2", shares="even")
x = torch.randn(4, 3)
compiled = torch.compile(model, backend="eager")(x)
assert torch.equal(compiled, model(x))
"""


def test_what_a_script_defines_is_compiled_in_the_helpers_too(
    run_python: Callable[..., str],
) -> None:
    """Functions of ``__main__`` arrive there without the module that torch's compiler asks."""
    run_python(PROGRAM)
