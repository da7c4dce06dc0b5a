"""Pickling: what another interpreter could not import travels by value."""

from __future__ import annotations

import importlib.util
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import evener
from evener.pickling import dumps

SOURCE = "class Thing:\n    def __init__(self, value):\n        self.value = value\n"


def load_by_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


def test_an_object_of_a_file_loaded_by_path_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python: Callable[..., str]
) -> None:
    module = load_by_path(tmp_path / "a_lonely_file.py", monkeypatch)

    data = dumps([module.Thing(3)])

    printed = run_python(
        f"import pickle; print(pickle.loads(bytes.fromhex({data.hex()!r}))[0].value)"
    )
    assert printed.strip() == "3"
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_code_keeps_its_file_for_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python: Callable[..., str]
) -> None:
    module = load_by_path(tmp_path / "a_lonely_file.py", monkeypatch)

    data = dumps(module.Thing)

    printed = run_python(
        f"import pickle; thing = pickle.loads(bytes.fromhex({data.hex()!r}))\n"
        "print(thing.__init__.__code__.co_filename)"
    )
    assert printed.strip() == str(tmp_path / "a_lonely_file.py")


def test_what_can_be_imported_travels_by_name() -> None:
    assert b"OrderedDict" in dumps(__import__("collections").OrderedDict)
    assert len(dumps(nn.Linear)) < 100


def test_tensors_with_a_number_travel_as_the_number() -> None:
    tensor = torch.zeros(10_000)

    assert len(dumps([tensor, tensor], {id(tensor): 7})) < 100


@pytest.mark.parametrize(
    "parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm]
)
def test_parametrized_modules_travel(parametrize: Callable[[nn.Module], nn.Module]) -> None:
    module = nn.Sequential(parametrize(nn.Linear(3, 2)))
    x = torch.randn(4, 3)
    module.eval()

    other = pickle.loads(dumps(module))

    assert torch.equal(other(x), module(x))


def test_a_parametrized_module_trains_in_parallel() -> None:
    module = parametrizations.weight_norm(nn.Linear(3, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    module(x).square().sum().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    evener.parallelize(module, "cpu*2", shares="even")

    module(x).square().sum().backward()

    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    evener.release(module)
