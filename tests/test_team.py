"""The team: errors of the user's code, helpers that die, interrupts; nothing hangs or is left."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

import evener
from bounds import LONG
from evener.devices import Device
from evener.errors import (
    FaultWarning,
    HelperDiedError,
    HelperRaisedError,
    HelperStartError,
    RemoteTraceback,
)
from evener.messages import Done, Failure
from evener.team import Team


class OddError(Exception):
    """An exception with a constructor that pickle does not know how to call."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


def may_happen(mood: str, once: str | None) -> bool:
    """Whether a mood may show; one that ends the process not in the main process."""
    is_backward = mood.endswith("in backward")
    if (
        mood.startswith(("kill", "segfault", "hard", "sleep"))
        and "EVENER_HELPER" not in os.environ
    ):
        return False
    if once is None or is_backward != (sys._getframe(1).f_code.co_name == "backward"):
        return True
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Moody(nn.Module):
    """Does what ``mood`` says where its input is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.mood = "good"
        self.once: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0).any()) and may_happen(self.mood, self.once):
            if self.mood == "raise":
                raise KeyError("a bad sample")
            if self.mood == "odd":
                raise OddError(7, why="on purpose")
            if self.mood == "local":

                class LocalError(RuntimeError):
                    pass

                raise LocalError("made here")
            if self.mood == "exit":
                sys.exit(5)
            if self.mood == "hard exit":
                os._exit(9)
            if self.mood == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.mood == "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.mood == "sleep":
                time.sleep(60)
        return BackwardMood.apply(self.linear(x), self.mood, self.once)


class BackwardMood(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mood, once):
        ctx.mood, ctx.once = mood, once
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if bool((gradient < 0).any()) and may_happen(ctx.mood, ctx.once):
            if ctx.mood == "raise in backward":
                raise ValueError("a bad gradient")
            if ctx.mood == "kill in backward":
                os.kill(os.getpid(), signal.SIGKILL)
        return gradient, None, None


#: Positive for the first device, negative for the second: its mood shows.
SECOND_IS_BAD = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
FIRST_IS_BAD = -SECOND_IS_BAD


@pytest.fixture
def model() -> Iterator[Moody]:
    module = evener.parallelize(Moody(), "cpu*2", shares="even", timeout_s=20.0)
    yield module
    evener.release(module)


def assert_works(model: Moody) -> None:
    """A whole step is right, whatever went before."""
    model.mood = "good"
    model.zero_grad()
    model(SECOND_IS_BAD * 2).sum().backward()

    assert model.linear.bias.grad.tolist() == [2.0, 2.0]


def helpers() -> list[psutil.Process]:
    return psutil.Process().children()


# ------------------------------------------------------------------ errors of the user's code


@pytest.mark.parametrize("x", [SECOND_IS_BAD, FIRST_IS_BAD, -SECOND_IS_BAD.abs()])
def test_an_exception_in_forward_has_its_type_and_the_module_works_on(
    model: Moody, x: Tensor
) -> None:
    assert_works(model)
    model.mood = "raise"

    with pytest.raises(KeyError, match="a bad sample"):
        model(x)

    assert_works(model)


def test_an_exception_of_a_helper_shows_the_line_of_the_user(model: Moody) -> None:
    model.mood = "raise"

    with pytest.raises(KeyError) as caught:
        model(SECOND_IS_BAD)

    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert 'raise KeyError("a bad sample")' in str(cause)
    assert "cpu:1" in str(cause)


def test_an_exception_in_a_helpers_backward(model: Moody) -> None:
    assert_works(model)
    model.mood = "raise in backward"
    model.zero_grad()
    outputs = model(SECOND_IS_BAD)

    with pytest.raises(ValueError, match="a bad gradient") as caught:
        outputs.backward(torch.tensor([[1.0, 1.0], [-1.0, 1.0]]))

    assert "cpu:1" in str(caught.value.__cause__)
    assert model.linear.bias.grad is None
    assert_works(model)


def test_an_exception_in_the_first_devices_backward(model: Moody) -> None:
    model.mood = "raise in backward"
    outputs = model(SECOND_IS_BAD)

    with pytest.raises(ValueError, match="a bad gradient"):
        outputs.backward(torch.tensor([[-1.0, 1.0], [1.0, 1.0]]))

    assert model.linear.bias.grad is None
    assert_works(model)


def test_an_exception_that_cannot_be_sent_is_told(model: Moody) -> None:
    model.mood = "odd"

    with pytest.raises(HelperRaisedError, match=r"on cpu:1: .*OddError: 7: on purpose"):
        model(SECOND_IS_BAD)

    assert_works(model)


def test_an_exception_of_a_class_made_in_the_helper(model: Moody) -> None:
    model.mood = "local"

    with pytest.raises(RuntimeError, match="made here") as caught:
        model(SECOND_IS_BAD)

    assert type(caught.value).__name__ == "LocalError"
    assert_works(model)


def test_sys_exit_in_a_helper_is_the_users_exit(model: Moody) -> None:
    model.mood = "exit"

    with pytest.raises(SystemExit) as caught:
        model(SECOND_IS_BAD)

    assert caught.value.code == 5
    assert_works(model)


# ------------------------------------------------------------------ helpers that die

DOUBLED = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])


def step_of(model: nn.Module) -> list[Tensor]:
    """The outputs and the gradients of a step in which the second device is in its mood."""
    model.zero_grad()
    outputs = model(SECOND_IS_BAD)
    outputs.backward(DOUBLED)
    return [outputs.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(
    ("mood", "told"),
    [
        ("kill", "was ended by SIGKILL .* in the forward .* computed by the main process"),
        ("segfault", "was ended by SIGSEGV in the forward .* computed by a new helper"),
        ("hard exit", "ended with exit code 9 in the forward .* computed by a new helper"),
        ("kill in backward", "was ended by SIGKILL .* in the backward .* by the main process"),
    ],
)
def test_a_death_is_survived_and_told(model: Moody, tmp_path: Path, mood: str, told: str) -> None:
    expected = step_of(model)
    model.mood, model.once = mood, str(tmp_path / "once")

    with pytest.warns(
        FaultWarning, match=rf"the helper of cpu:1 \(process \d+\) {told}"
    ) as caught:
        found = step_of(model)

    assert len(caught) == 1
    assert caught[0].filename == __file__
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert_works(model)
    (fault,) = evener.report(model).faults
    assert fault.device == 1
    assert fault.cost_s > 0


def test_a_piece_that_ends_two_helpers_is_an_error(model: Moody) -> None:
    """The third time it would be this process."""
    assert_works(model)
    model.mood = "segfault"
    model.zero_grad()

    with (
        pytest.warns(FaultWarning, match="SIGSEGV"),
        pytest.raises(HelperDiedError, match=r"has ended two helpers of cpu:1.*SIGSEGV"),
    ):
        model(SECOND_IS_BAD)

    assert model.linear.bias.grad is None
    assert_works(model)


def test_a_death_between_two_calls(model: Moody) -> None:
    assert_works(model)
    (helper,) = helpers()
    helper.kill()
    pidfd = os.pidfd_open(helper.pid)
    select.select([pidfd], [], [])
    os.close(pidfd)

    with pytest.warns(
        FaultWarning, match="SIGKILL.*between two calls; nothing was lost; a new helper starts"
    ):
        assert_works(model)


def test_after_too_many_deaths_a_device_is_left_out() -> None:
    model = evener.parallelize(Moody(), "cpu*3", shares="even", restarts=0)
    assert_works(model)
    for number in (1, 2):
        helpers()[0].kill()
        with pytest.warns(FaultWarning, match=r"no new helper \(restarts=0\) and is left out"):
            assert_works(model)
        assert len(helpers()) == 2 - number

    assert_works(model)  # the main process alone
    evener.release(model)


@pytest.mark.parametrize("stopped", [True, pytest.param(False, marks=LONG)])
def test_a_helper_that_hangs_is_given_up_after_the_time_limit(
    tmp_path: Path, *, stopped: bool
) -> None:
    model = evener.parallelize(Moody(), "cpu*2", shares="even", timeout_s=4.0)
    expected = step_of(model)
    if stopped:
        helpers()[0].suspend()
    else:
        model.mood, model.once = "sleep", str(tmp_path / "once")

    with pytest.warns(FaultWarning, match=r"cpu:1.*did not answer within 4 s") as caught:
        found = step_of(model)

    assert len(caught) == 1
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert_works(model)
    evener.release(model)


# ------------------------------------------------------------------ interrupts


def test_ctrl_c_in_a_call_is_prompt_and_the_module_works_on(tmp_path: Path) -> None:
    """In a terminal Ctrl-C reaches the helpers too; only the main process may act on it."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, signal, threading, time
import torch, evener
from torch import nn
class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seconds = 0.0
    def forward(self, x):
        end = time.monotonic() + self.seconds * float(x[0, 0] < 0)
        while time.monotonic() < end:
            time.sleep(0.01)
        return self.linear(x)
model = evener.parallelize(Slow(), "cpu*2", shares="even")
x = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
expected = model(x)
for sign in (1, -1):  # the helper is slow, then the main process
    model.seconds = 3.0
    threading.Timer(0.5, os.killpg, (0, signal.SIGINT)).start()
    start = time.monotonic()
    try:
        model(x * sign)
    except KeyboardInterrupt:
        assert time.monotonic() - start < 2.5
        print("interrupted")
    model.seconds = 0.0
    assert torch.equal(model(x), expected)
print("works on")
"""
    )

    result = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        start_new_session=True,
    )

    assert result.stdout.split("\n")[:3] == ["interrupted", "interrupted", "works on"], (
        result.stderr
    )


# ------------------------------------------------------------------ the team by itself


def device(index: int) -> Device:
    return Device("cpu", index, (0,), 1, "test")


def test_a_helper_answers_what_it_does_not_know_with_a_failure() -> None:
    team = Team([device(0), device(1)], timeout_s=20.0)

    team.post(1, Done())
    answer = team.receive(1)

    assert isinstance(answer, Failure)
    team.stop()
    assert helpers() == []
    team.stop()


def test_a_helper_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")

    with pytest.raises(HelperStartError, match=r"helper of cpu:1 could not be started"):
        Team([device(0), device(1)], timeout_s=20.0)


def test_an_interpreter_that_ends_at_once_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))

    with pytest.raises(HelperStartError, match=r"cpu:1 did not start: it ended with exit code 3"):
        Team([device(0), device(1)], timeout_s=20.0)

    assert helpers() == []


def test_the_user_program_keeps_its_signal_handlers_and_streams() -> None:
    before = signal.getsignal(signal.SIGINT)
    team = Team([device(0), device(1)], timeout_s=20.0)

    assert signal.getsignal(signal.SIGINT) is before
    team.stop()
