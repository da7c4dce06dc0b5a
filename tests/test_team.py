"""The team: errors of the user's code, helpers that die, interrupts; nothing hangs or is left."""

from __future__ import annotations

import os
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
from evener.devices import Device
from evener.errors import HelperDiedError, HelperRaisedError, HelperStartError, RemoteTraceback
from evener.messages import Done, Failure
from evener.team import Team


class OddError(Exception):
    """An exception with a constructor that pickle does not know how to call."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


class Moody(nn.Module):
    """Does what ``mood`` says where its input is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.mood = "good"

    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0).any()):
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
        return BackwardMood.apply(self.linear(x), self.mood)


class BackwardMood(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mood):
        ctx.mood = mood
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if bool((gradient < 0).any()):
            if ctx.mood == "raise in backward":
                raise ValueError("a bad gradient")
            if ctx.mood == "kill in backward":
                os.kill(os.getpid(), signal.SIGKILL)
        return gradient, None


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


@pytest.mark.parametrize(
    ("mood", "cause"),
    [
        ("kill", r"SIGKILL \(often the system's out-of-memory killer\)"),
        ("segfault", "SIGSEGV"),
        ("hard exit", "exit code 9"),
    ],
)
def test_a_death_in_forward_names_device_and_cause(model: Moody, mood: str, cause: str) -> None:
    assert_works(model)
    model.mood = mood

    with pytest.raises(HelperDiedError, match=rf"helper of cpu:1 \(process \d+\) .*{cause}"):
        model(SECOND_IS_BAD)

    assert helpers() == []
    assert_works(model)


def test_a_death_in_backward(model: Moody) -> None:
    model.mood = "kill in backward"
    outputs = model(SECOND_IS_BAD)

    with pytest.raises(HelperDiedError, match=r"cpu:1.*SIGKILL"):
        outputs.backward(torch.tensor([[1.0, 1.0], [-1.0, 1.0]]))

    assert helpers() == []
    assert_works(model)


def test_a_death_between_two_calls(model: Moody) -> None:
    assert_works(model)
    helpers()[0].kill()

    with pytest.raises(HelperDiedError, match="SIGKILL"):
        model(SECOND_IS_BAD)

    assert_works(model)


def test_a_backward_after_the_helpers_were_stopped_says_so(model: Moody) -> None:
    outputs = model(SECOND_IS_BAD)
    helpers()[0].kill()
    with pytest.raises(HelperDiedError):
        model(SECOND_IS_BAD)

    with pytest.raises(HelperDiedError, match="call the module again before backward"):
        outputs.sum().backward()

    assert_works(model)


def test_a_helper_that_hangs_is_given_up_after_the_time_limit() -> None:
    module = evener.parallelize(Moody(), "cpu*2", shares="even", timeout_s=2.0)
    assert_works(module)
    module.mood = "sleep"

    with pytest.raises(HelperDiedError, match=r"cpu:1.*did not answer within 2 s"):
        module(SECOND_IS_BAD)

    assert helpers() == []
    assert_works(module)
    evener.release(module)


def test_a_stopped_helper_is_given_up_too() -> None:
    module = evener.parallelize(Moody(), "cpu*2", shares="even", timeout_s=2.0)
    assert_works(module)
    helpers()[0].suspend()

    with pytest.raises(HelperDiedError, match="did not answer"):
        module(SECOND_IS_BAD)

    assert helpers() == []
    evener.release(module)


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

    with pytest.raises(HelperStartError, match=r"cpu:1 did not start: ended with exit code 3"):
        Team([device(0), device(1)], timeout_s=20.0)

    assert helpers() == []


def test_the_user_program_keeps_its_signal_handlers_and_streams() -> None:
    before = signal.getsignal(signal.SIGINT)
    team = Team([device(0), device(1)], timeout_s=20.0)

    assert signal.getsignal(signal.SIGINT) is before
    team.stop()
