"""parallelize and release: in place, one line, and nothing else changes for the user."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import evener
from bounds import LONG
from evener.errors import DeviceError, ModuleError, SharesError


class Net(nn.Module):
    """A small module with a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale

    def describe(self) -> str:
        return f"scale {self.scale}"


def num_helpers() -> int:
    return len(psutil.Process().children())


# ------------------------------------------------------------------ in place


def test_the_object_its_class_and_its_names_stay() -> None:
    model = Net()
    parameters = list(model.parameters())
    keys = list(model.state_dict())

    parallel = evener.parallelize(model, "cpu*2")
    model(torch.randn(3, 4))

    assert parallel is model
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"
    assert type(model).__qualname__ == Net.__qualname__
    assert model.describe() == "scale 2.0"
    assert list(model.state_dict()) == keys
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert repr(model) == repr(Net())
    evener.release(model)


def test_release_gives_the_plain_module_back() -> None:
    model = Net()
    plain = copy.deepcopy(model)
    evener.parallelize(model, "cpu*2")
    x = torch.randn(5, 4)
    model(x)

    released = evener.release(model)

    assert released is model
    assert type(model) is Net
    assert vars(model).keys() == vars(plain).keys()
    assert num_helpers() == 0
    assert torch.equal(model(x), plain(x))


def test_it_can_be_made_parallel_again() -> None:
    model = Net()
    x = torch.randn(5, 4)
    expected = model(x)
    for devices in ("cpu*2", "cpu*3", "cpu:0"):
        evener.parallelize(model, devices)

        torch.testing.assert_close(model(x), expected)
        evener.release(model)


def test_twice_is_an_error_that_says_so() -> None:
    model = evener.parallelize(Net(), "cpu*2")

    with pytest.raises(ModuleError, match=r"parallel already.*evener\.release"):
        evener.parallelize(model, "cpu*2")
    evener.release(model)


def test_release_of_a_plain_module_is_an_error() -> None:
    with pytest.raises(ModuleError, match=r"not parallel"):
        evener.release(Net())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"devices": "cpu:7"}, DeviceError, "this machine has cpu:0"),
        ({"devices": "cpu*2", "shares": (1, 2, 3)}, SharesError, "3 numbers for 2 devices"),
        ({"devices": "cpu*2", "shares": "fast"}, SharesError, "'fast' is not known"),
        ({"devices": "cpu*2", "shares": (0, 0)}, SharesError, "above zero"),
        ({"devices": "cpu*2", "how": "pipe"}, ValueError, "how='pipe'"),
        ({"devices": "cpu*2", "timeout_s": 0}, ValueError, "above zero"),
    ],
)
def test_wrong_arguments_leave_the_module_plain(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = Net()

    with pytest.raises(error, match=message):
        evener.parallelize(model, **arguments)

    assert type(model) is Net


def test_only_modules_are_taken() -> None:
    with pytest.raises(ModuleError, match=r"expected an nn\.Module, not function"):
        evener.parallelize(lambda x: x)  # type: ignore[type-var]


def test_torchscript_is_refused_with_the_way_out() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(nn.Linear(2, 2))

    with pytest.raises(ModuleError, match="TorchScript"):
        evener.parallelize(script, "cpu*2")


def test_with_one_device_the_call_is_the_plain_call() -> None:
    model = evener.parallelize(Net(), "cpu:0")

    assert "forward" not in vars(type(model))
    assert type(model).forward is Net.forward
    assert model(torch.randn(2, 4)).grad_fn is not None
    assert num_helpers() == 0
    evener.release(model)


def test_helpers_start_at_the_first_call() -> None:
    model = evener.parallelize(Net(), "cpu*3")

    assert num_helpers() == 0
    model(torch.randn(2, 4))
    assert num_helpers() == 2
    evener.release(model)


def test_a_forward_set_on_the_instance_is_the_one_that_runs() -> None:
    model = Net()
    model.forward = lambda x: x * 10  # type: ignore[method-assign]
    evener.parallelize(model, "cpu*2")
    x = torch.arange(6.0).reshape(3, 2)

    assert torch.equal(model(x), x * 10)
    evener.release(model)
    assert torch.equal(model(x), x * 10)


# ------------------------------------------------------------------ copies and checkpoints


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copy_is_a_plain_module(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = evener.parallelize(nn.Sequential(nn.Linear(4, 3)), "cpu*2")
    x = torch.randn(3, 4)
    expected = model(x)

    other = copied(model)

    assert type(other) is nn.Sequential
    torch.testing.assert_close(other(x), expected)
    evener.release(model)


def size_of_checkpoint(model: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


def test_a_checkpoint_is_as_large_as_a_plain_one_and_loads_into_a_plain_module() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
    plain_bytes = size_of_checkpoint(model)
    evener.parallelize(model, "cpu*2")
    model(torch.randn(4, 32)).sum().backward()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))

    plain.load_state_dict(torch.load(file))

    assert size_of_checkpoint(model) == plain_bytes
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    evener.release(model)


def test_a_checkpoint_loads_into_a_parallel_module() -> None:
    model, other = Net(), Net()
    evener.parallelize(model, "cpu*2")
    x = torch.randn(6, 4)
    model(x)
    for assign in (False, True):
        other.linear.weight.data.normal_()
        model.load_state_dict(other.state_dict(), assign=assign)

        torch.testing.assert_close(model(x), other(x))
    evener.release(model)


# ------------------------------------------------------------------ the end


def test_helpers_end_with_the_module() -> None:
    model = evener.parallelize(Net(), "cpu*2")
    model(torch.randn(3, 4))
    gone = weakref.ref(model)
    assert num_helpers() == 1

    del model
    gc.collect()

    assert gone() is None
    assert num_helpers() == 0


def test_a_graph_keeps_the_module_until_its_backward() -> None:
    weight = nn.Parameter(torch.ones(2, 2))

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    loss = evener.parallelize(Holder(), "cpu*2")(torch.ones(3, 2)).sum()
    gc.collect()

    loss.backward()

    assert torch.equal(weight.grad, torch.full((2, 2), 3.0))
    del loss
    gc.collect()
    assert num_helpers() == 0


ENDINGS = {
    "return": "",
    "exception": "raise ValueError('on purpose')",
    "exit": "sys.exit(3)",
    "hard exit": "os._exit(3)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "terminate": "os.kill(os.getpid(), signal.SIGTERM)",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "exec": "os.execv(sys.executable, [sys.executable, '-c', 'pass'])",
    "in a call": "model.linear.register_forward_hook(lambda *_: os._exit(4)); model(x)",
}


@LONG  # what CI tries of it is in faults/test_main_process.py
def test_helpers_end_with_the_process_however_it_ends(tmp_path: Path) -> None:
    """One program that forks itself, before it has a team, once for each ending."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import os, signal, sys, time
import psutil, torch, evener
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
    def forward(self, x):
        return self.linear(x)
endings = {ENDINGS!r}
mine = next((name for name in endings if os.fork() == 0), None)
if mine is None:
    for _ in endings:
        os.wait()
    sys.exit()
model = evener.parallelize(Net(), "cpu*2")
x = torch.randn(5, 4)
model(x)
(helper,) = psutil.Process().children()
print(f"{{mine}}: {{helper.pid}}", flush=True)
exec(endings[mine])
"""
    )

    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100, check=False
    )

    lines = dict(line.split(": ") for line in result.stdout.splitlines())
    assert sorted(lines) == sorted(ENDINGS), result.stderr
    pids = [int(pid) for pid in lines.values()]
    helpers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(helpers, timeout=5)
    assert alive == []


def test_a_notebook_cell_or_a_piped_program_needs_no_main_guard() -> None:
    program = """
import torch, evener
from torch import nn
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)
    def forward(self, x):
        return helper_function(self.linear(x))
def helper_function(x):
    return x.abs()
model = evener.parallelize(Cell(), "cpu*2")
model(torch.ones(4, 2)).sum().backward()
print(sorted(name for name, p in model.named_parameters() if p.grad is not None))
"""

    result = subprocess.run(
        [sys.executable, "-"],
        input=program,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert result.stdout == "['linear.bias', 'linear.weight']\n"
    assert result.stderr == ""


def test_paths_and_folder_are_those_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a forward imports, and the files it opens, are found in a helper too."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "found_only_here.py").write_text("FACTOR = 7\n")
    (tmp_path / "factor.txt").write_text("3")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.chdir(tmp_path)

    class Reader(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            import found_only_here  # noqa: PLC0415 - what is tested

            return x * found_only_here.FACTOR * int(Path("factor.txt").read_text())

    model = evener.parallelize(Reader(), "cpu*2")

    assert torch.equal(model(torch.ones(4)), torch.full((4,), 21.0))
    evener.release(model)
    sys.modules.pop("found_only_here")


def test_another_word_for_batch_norm_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"is not known.*exact.*local"):
        evener.parallelize(nn.Linear(2, 2), "cpu:0", batchnorm="global")
