"""The diary of bugs: what happened once, and must not again."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import evener
from evener.errors import BatchError, EvenerError, FaultWarning
from evener.mirror import Mirror


class Counting(nn.Module):
    """Its forward depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.linear(x) * self.step


@pytest.fixture
def model() -> Iterator[nn.Module]:
    module = evener.parallelize(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh()).double(), "cpu*2", shares="even"
    )
    yield module
    evener.release(module)


@pytest.mark.parametrize(
    ("devices", "shares", "batches"),
    [
        ("cpu*2", (1, 9), (20, 1, 20, 20)),
        ("cpu*3", "even", (6, 2, 1, 6, 2, 6)),
        ("cpu*3", (0, 1, 1), (6, 1, 2, 6)),
    ],
)
def test_what_forward_counts_is_the_same_on_devices_that_rested(
    devices: str, shares: object, batches: tuple[int, ...]
) -> None:
    """A device without a share kept its old count, and the user's module its, if it was first."""
    plain = Counting()
    model = evener.parallelize(copy.deepcopy(plain), devices, shares=shares)  # type: ignore[arg-type]
    for batch in batches:
        x = torch.randn(batch, 4)

        torch.testing.assert_close(model(x), plain(x))
        assert model.step == plain.step
    evener.release(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_module_does_not_wait_for_itself(
    model: nn.Module, reentrant: bool
) -> None:
    """Its hooks ran the module again inside the first device's backward."""
    data = torch.randn(6, 4, dtype=torch.float64)
    gradients = []
    for module in (model, copy.deepcopy(model)):
        x = data.clone().requires_grad_()
        checkpoint(module, x, use_reentrant=reentrant).square().sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in module.parameters())])
        module.zero_grad()

    torch.testing.assert_close(*gradients)


def test_ctrl_c_in_the_first_call_leaves_the_module_usable(tmp_path: Path) -> None:
    """The structure of the outputs came with an answer that nobody waited for any more."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, signal, threading, time, torch, evener
from torch import nn
class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.is_slow = True
    def forward(self, x):
        if self.is_slow:
            if evener_main_process == os.getpid():
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(2)
        return self.linear(x)
evener_main_process = os.getpid()
model = evener.parallelize(Slow(), "cpu*2", shares="even")
try:
    model(torch.ones(4, 4))
except KeyboardInterrupt:
    print("interrupted")
model.is_slow = False
print(tuple(model(torch.ones(4, 4)).shape))
"""
    )

    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=False
    )

    assert result.stdout.splitlines() == ["interrupted", "(4, 4)"], result.stderr


def test_a_tensor_or_an_array_changed_in_place_is_noticed() -> None:
    """Only attributes that were set anew were."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = torch.ones(2)
            self.table = np.ones(2, dtype="f")

        def forward(self, x: Tensor) -> Tensor:
            return x * self.temperature * torch.from_numpy(self.table)

    model = evener.parallelize(Scaled(), "cpu*2", shares="even")
    x = torch.ones(4, 2)
    model(x)
    model.temperature.fill_(3)
    model.table[:] = 5

    assert torch.equal(model(x), x * 15)
    evener.release(model)


def test_a_list_with_a_value_for_each_sample_is_warned_of() -> None:
    """It goes to every device as a whole, which may be meant, or silently wrong."""

    class Listed(nn.Module):
        def forward(self, x: Tensor, names: list[str]) -> Tensor:
            return x

    model = evener.parallelize(Listed(), "cpu*2", shares="even")
    x = torch.ones(3)

    with pytest.warns(UserWarning, match="a list of 3 values"):
        model(x, ["a", "b", "c"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, ("a", "b", "c"))
        model(x, ["a", "b"])
    evener.release(model)


def test_a_parameter_changed_before_backward_is_noticed_where_the_first_device_rests() -> None:
    """A helper's replica shares the memory of a parameter, not its count of changes."""
    model = evener.parallelize(nn.Linear(4, 3), "cpu*2", shares=(0, 1))
    loss = model(torch.ones(6, 4)).sum()
    with torch.no_grad():
        model.weight.mul_(2)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    evener.release(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own import
def test_forward_mode_and_function_transforms_are_refused(model: nn.Module) -> None:
    """A tangent was lost without a word."""
    x = torch.ones(4, 4, dtype=torch.float64)
    with forward_ad.dual_level(), pytest.raises(EvenerError, match="forward-mode"):
        model(forward_ad.make_dual(x, x))

    with pytest.raises(EvenerError, match=r"torch\.func"):
        torch.func.grad(lambda x: model(x).sum())(x)


def test_a_file_that_trains_when_imported_says_so(tmp_path: Path) -> None:
    """The helper imported it to have the class, and trained a second time."""
    (tmp_path / "trains.py").write_text(
        """
import torch, evener
from torch import nn
class Net(nn.Linear):
    pass
model = evener.parallelize(Net(4, 4), "cpu*2", shares="even")
model(torch.ones(4, 4))
"""
    )
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import trains"

    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )

    assert result.returncode == 1
    assert "trains when it is imported" in result.stderr.strip().splitlines()[-1]


def test_sparse_inputs_are_refused_by_name(model: nn.Module) -> None:
    with pytest.raises(BatchError, match=r"args\[0\] is a tensor of layout torch\.sparse_coo"):
        model(torch.eye(4, dtype=torch.float64).to_sparse())


# ------------------------------------------------------------------ what a new user found


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        # Both torch.backends.mkldnn and torch.ops are objects in a module's place.
        relu = torch.ops.aten.relu if torch.backends.mkldnn.is_available() else torch.relu
        return self.drop(relu(self.linear(x)))


@pytest.fixture(scope="module")
def drops() -> Iterator[nn.Module]:
    module = evener.parallelize(Drops(), "cpu*2", shares="even")
    module(torch.ones(4, 4))
    yield module
    evener.release(module)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_dropout_is_refused_and_without_dropout_is_right(
    drops: nn.Module, use_reentrant: bool
) -> None:
    """Its second run would draw other masks: gradients would silently be wrong."""
    x = torch.randn(6, 4, requires_grad=True)

    def run() -> Tensor:
        return checkpoint(lambda z: drops(z) ** 2, x, use_reentrant=use_reentrant).sum()

    with pytest.raises(EvenerError, match="use the checkpoint inside the module"):
        run().backward()
    drops.eval()
    run().backward()
    expected = torch.autograd.grad((drops(x) ** 2).sum(), x)
    torch.testing.assert_close(x.grad, *expected)
    drops.train()


def test_a_forward_that_is_wrapped_afterwards_wraps_the_whole_call(drops: nn.Module) -> None:
    drops.eval()
    x = torch.randn(6, 4)
    plain, before = drops(x), drops.forward
    drops.forward = lambda *args: 2 * before(*args)
    torch.testing.assert_close(drops(x), 2 * plain)
    drops.linear = nn.Linear(4, 4)  # the helpers get a new copy
    after = drops(x)
    del drops.forward
    torch.testing.assert_close(after, 2 * drops(x))
    drops.train()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated:DeprecationWarning")
def test_tracing_is_refused_with_the_way_out(drops: nn.Module) -> None:
    with pytest.raises(EvenerError, match=r"cannot be traced; evener\.release"):
        torch.jit.trace(drops, torch.ones(4, 4))


def test_a_layer_of_another_class_is_noticed(drops: nn.Module) -> None:
    class Negative(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).abs()

    drops.eval()
    x = torch.randn(6, 4)
    drops(x)
    drops.linear.__class__ = Negative
    expected = torch.relu(functional.linear(x, drops.linear.weight, drops.linear.bias).abs())
    torch.testing.assert_close(drops(x), expected)
    drops.train()


def test_what_a_users_signal_handler_raises_is_the_users(drops: nn.Module) -> None:
    def handler(*_: object) -> None:
        raise TimeoutError("mine")

    before = signal.signal(signal.SIGALRM, handler)
    main_pid = os.getpid()
    slow = drops.linear.register_forward_hook(
        lambda *_: time.sleep(0.5 if os.getpid() != main_pid else 0)
    )
    drops(torch.ones(4, 4))
    signal.setitimer(signal.ITIMER_REAL, 0.2)  # while the main process waits for the helper
    try:
        with pytest.raises(TimeoutError, match="mine"):
            drops(torch.ones(4, 4))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        slow.remove()
    assert drops(torch.ones(4, 4)).shape == (4, 4)


def test_what_is_not_registered_is_warned_of() -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.teachers = [nn.Linear(2, 2)]
            self.prompt = torch.ones(2, requires_grad=True)
            self.known = [self.linear, self.linear.weight]

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    model = evener.parallelize(Hides(), "cpu*2", shares="even")
    with pytest.warns(UserWarning, match="holds a") as caught:
        model(torch.ones(4, 2))
    evener.release(model)

    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    assert "Hides.teachers holds a Linear that is not registered" in texts[0]
    assert "Hides.prompt holds a tensor that wants a gradient" in texts[1]


class Doubling(nn.Module):
    """Changes its input in place, and ends a helper once, in forward or after it."""

    def __init__(self, once: Path) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.once = str(once)
        self.dies = False

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        if self.dies and "EVENER_HELPER" in os.environ and not os.path.exists(self.once):  # noqa: PTH110
            open(self.once, "w").close()  # noqa: PTH123
            os.kill(os.getpid(), signal.SIGKILL)
        return self.linear(x)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_piece_that_has_changed_its_inputs_is_done_again_with_what_was_given(
    tmp_path: Path, phase: str
) -> None:
    plain = Doubling(tmp_path / "once").double()
    model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares="even")
    x = torch.randn(7, 3, dtype=torch.float64)
    expected = plain(x.clone())
    expected.square().sum().backward()
    model(x.clone())
    model.dies = phase == "forward"

    def step() -> Tensor:
        outputs: Tensor = model(x.clone())
        if phase == "backward":
            for helper in psutil.Process().children():
                helper.kill()
        outputs.square().sum().backward()
        return outputs

    with pytest.warns(FaultWarning, match=phase):
        outputs = step()

    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-14)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)
    evener.release(model)


def test_an_interrupt_in_what_restores_a_thread_leaves_it_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients stayed off where Ctrl-C came into the end of a ``no_grad``."""
    plain = nn.Linear(2, 2)
    model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares="even")
    x = torch.ones(4, 2)
    model(x)
    cores = os.sched_getaffinity(0)

    def interrupted(*_: Any, **__: Any) -> Any:
        torch._C._set_grad_enabled(False)
        os.sched_setaffinity(0, {min(cores)})
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "refresh", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(x)

    assert torch.is_grad_enabled()
    assert os.sched_getaffinity(0) == cores
    assert torch.equal(model(x), plain(x))
    evener.release(model)
