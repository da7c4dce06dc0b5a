"""Modules called in threads, with the settings of the caller."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from evener.errors import BatchError
from evener.parallel_functions import parallel_apply, threads


class Does(nn.Module):
    """Calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def applied(function: Any, num: int = 2) -> list[Any]:
    return parallel_apply([Does(function)] * num, [()] * num, devices=[0] * num)


def test_inputs_are_arguments_or_the_only_argument() -> None:
    modules = [nn.Linear(3, 2), nn.Linear(3, 2)]
    xs = [torch.randn(2, 3), torch.randn(4, 3)]
    expected = [module(x) for module, x in zip(modules, xs, strict=True)]

    for inputs in (xs, [(x,) for x in xs], [[x] for x in xs]):
        for devices in (None, "cpu*2", [0, 0]):
            found = parallel_apply(modules, inputs, None, devices)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)


def test_keyword_arguments_are_each_modules_own() -> None:
    module = Does(lambda *args, **kwargs: (args, kwargs))

    found = parallel_apply([module] * 2, [1, None], [{"a": 1}, {"b": 2}], "cpu*2")

    assert found == [((1,), {"a": 1}), ((None,), {"b": 2})]
    assert parallel_apply([], []) == []


def test_each_module_has_a_thread_and_all_run_at_once() -> None:
    barrier = threading.Barrier(3, timeout=60)

    names = applied(lambda: (barrier.wait(), threading.get_ident())[1], 3)

    assert len(set(names)) == 3
    assert threading.get_ident() not in names
    assert applied(threading.get_ident, 1) == [threading.get_ident()]


def test_the_settings_are_those_of_the_caller() -> None:
    def settings() -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
        )

    for context in (
        torch.enable_grad(),
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.float16),
    ):
        with context:
            expected = settings()
            assert applied(settings) == [expected, expected]
    x = torch.randn(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = parallel_apply([nn.Linear(3, 2)] * 2, [x, x])
    assert [output.dtype for output in found] == [torch.bfloat16] * 2


class TwoArgumentsError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ValueError("mine"), ValueError),
        (KeyError("mine"), KeyError),
        (TwoArgumentsError(1, 2), RuntimeError),
        (SystemExit("mine"), SystemExit),
    ],
)
def test_an_exception_keeps_its_type_and_names_the_replica(raised: Any, kind: Any) -> None:
    def fail(i: int) -> int:
        if i == 1:
            raise raised
        return i

    with pytest.raises(kind) as caught:
        parallel_apply([Does(fail)] * 2, [0, 1], None, "cpu*2")

    text = str(caught.value)
    assert text.startswith(f"Caught {type(raised).__name__} in replica 1 on device cpu:1.\n")
    assert "Original Traceback" in text
    assert "raise raised" in text


def test_an_exception_of_the_only_module_is_told_alike() -> None:
    with pytest.raises(ZeroDivisionError, match=r"in replica 0 on device cpu:0\.\nOriginal"):
        applied(lambda: 1 / 0, 1)
    with pytest.raises(KeyboardInterrupt):
        applied(lambda: (_ for _ in ()).throw(KeyboardInterrupt), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], None, None), "1 inputs for 2 modules"),
        (([1, 2], [{}], None), "1 kwargs_tup for 2 modules"),
        (([1, 2], None, "cpu*3"), "3 devices for 2 modules"),
    ],
)
def test_a_wrong_number_of_anything_is_an_error(arguments: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        parallel_apply([nn.Identity()] * 2, *arguments)


def test_on_accelerators_torchs_own_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_torchs_parallel_apply", lambda *given: given[1:])
    x = torch.ones(2, device="meta")

    assert parallel_apply([nn.Identity()], [x]) == ([x], [{}], None)
    monkeypatch.setattr(threads, "on_cpu", lambda places: False)
    assert parallel_apply([nn.Identity()], [1], None, [0]) == ([1], [{}], [torch.device("cpu:0")])
