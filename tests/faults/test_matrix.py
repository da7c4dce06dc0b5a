"""The matrix: helpers fail in each phase, in each way, in each style of training.

After each fault the numbers are those of the same step without one, the user is told once, the
module works on, and a new helper comes. A test goes through the faults of one team, for helpers
take their time to start. With ``EVENER_LONG_TESTS=1`` every combination is tried.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from injector import CAUSES, FOLDER_VARIABLE, MEMORY, PHASES, SITE, Injector, Net
from torch import Tensor, nn

import evener
from bounds import LONG
from evener import gluon
from evener.errors import FaultWarning, HelperDiedError
from evener.pickling import STATE_NAME

#: Samples of a batch: with any shares the outputs of each device are too large for a message.
SIZE = 96
TIMEOUT_S = 4.0

Step = Callable[[Any, Tensor], dict[str, Tensor]]


# ------------------------------------------------------------------ ways of training


def loss_of(outputs: dict[str, Tensor]) -> Tensor:
    loss = outputs["last"].square().sum() / SIZE + outputs["mean"]
    return loss + outputs["large"].sin().sum() / SIZE


def one_line(net: Any, x: Tensor) -> dict[str, Tensor]:
    outputs = net(x)
    loss = loss_of(outputs)
    loss.backward()
    return {"loss": loss.detach(), **{n: each.detach() for n, each in outputs.items()}}


def with_input_gradient(net: Any, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    found = one_line(net, x)
    assert x.grad is not None
    return {**found, "x": x.grad}


def inference(net: Any, x: Tensor) -> dict[str, Tensor]:
    net.eval()
    with torch.no_grad():
        outputs: dict[str, Tensor] = net(x)
    net.train()
    return {name: each.clone() for name, each in outputs.items()}


def retained(net: Any, x: Tensor) -> dict[str, Tensor]:
    loss = loss_of(net(x))
    loss.backward(retain_graph=True)
    loss.backward()
    return {"loss": loss.detach()}


def two_forwards(net: Any, x: Tensor) -> dict[str, Tensor]:
    first, second = loss_of(net(x)), loss_of(net(x.flip(0) / 2))
    (first + 2 * second).backward()
    return {"first": first.detach(), "second": second.detach()}


def accumulated(net: Any, x: Tensor) -> dict[str, Tensor]:
    return {f"loss{i}": one_line(net, part)["loss"] for i, part in enumerate(x.split(SIZE // 2))}


def explicit(net: Any, x: Tensor) -> dict[str, Tensor]:
    shards = gluon.split_and_load(x, vars(net)[STATE_NAME].devices, even_split=False)
    losses = [loss_of(net(shard)) for shard in shards]
    for loss in losses:
        loss.backward()
    return {f"loss{i}": loss.detach() for i, loss in enumerate(losses)}


def drop_in(wrapped: Any, x: Tensor) -> dict[str, Tensor]:
    return one_line(wrapped, x)


WAYS: dict[str, Step] = {
    each.__name__: each
    for each in (
        one_line,
        with_input_gradient,
        inference,
        retained,
        two_forwards,
        accumulated,
        explicit,
        drop_in,
    )
}


# ------------------------------------------------------------------ a team under test


class Found(NamedTuple):
    """What a step came to."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


class Trial:
    """A module on several devices whose helpers fail."""

    def __init__(
        self,
        folder: Path,
        num: int,
        way: str,
        shares: Any,
        restarts: int = 100,
        *,
        is_random: bool = True,
    ) -> None:
        # Dropout and batch norm see how a batch is cut, into shares or into portions.
        self.is_exact = shares != "auto" and is_random
        self.injector = Injector(folder)
        self._way = WAYS[way]
        net = Net(self.injector, is_random=self.is_exact)
        self.net = net if self.is_exact else net.double()
        self.x = torch.randn(SIZE, 8, dtype=torch.float32 if self.is_exact else torch.float64)
        devices = f"cpu*{num}"
        self.called: nn.Module = self.net
        if way == "explicit":
            gluon.initialize(self.net, None, devices, timeout_s=TIMEOUT_S, restarts=restarts)
        elif way == "drop_in":
            self.called = evener.DataParallel(self.net, devices, shares=shares)
        else:
            evener.parallelize(
                self.net,
                devices,
                shares=shares,
                batchnorm="exact",
                timeout_s=TIMEOUT_S,
                restarts=restarts,
            )
        self.num_helpers = num - 1
        self._seeds = itertools.count(1000)

    def step(self, seed: int) -> Found:
        """One step from the state that the module has."""
        torch.manual_seed(seed)
        self.net.zero_grad()
        outputs = self._way(self.called, self.x)
        return Found(
            outputs,
            {
                n: p.grad if p.grad is None else p.grad.clone()
                for n, p in self.net.named_parameters()
            },
            {name: each.clone() for name, each in self.net.named_buffers()},
        )

    def expected(self, seed: int) -> Found:
        """The same step undisturbed; the module is afterwards as it was."""
        before = copy.deepcopy(dict(self.net.named_buffers()))
        found = self.step(seed)
        with torch.no_grad():
            for name, buffer in self.net.named_buffers():
                buffer.copy_(before[name])
        self.rest()
        return found

    def rest(self) -> None:
        """A call that changes nothing, from another seed: equal seeds draw on."""
        torch.manual_seed(next(self._seeds))
        buffers = {name: each.clone() for name, each in self.net.named_buffers()}
        self.net.eval()
        with torch.no_grad():
            self.called(self.x)
            for name, buffer in self.net.named_buffers():
                buffer.copy_(buffers[name])
        self.net.train()

    def await_all(self) -> None:
        """Call until all devices have a helper that works."""
        end_s = time.monotonic() + 60
        while not all(vars(self.net)[STATE_NAME].way._run.team.present):
            self.rest()
            assert time.monotonic() < end_s, "no new helper came"
            time.sleep(0.05)

    def assert_same(self, found: Found, expected: Found, *, is_exact: bool) -> None:
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                if value is None:
                    assert ours[name] is None
                elif is_exact:
                    assert torch.equal(ours[name], value), name
                else:
                    scale = {"rtol": 1e-10, "atol": 1e-10}
                    torch.testing.assert_close(ours[name], value, **scale)

    def try_fault(self, device: str, phase: str, kind: str) -> None:
        """One step with a fault: the same numbers, one warning, a new helper."""
        self.await_all()
        expected = self.expected(7)
        before = evener.report(self.net)
        pids = {child.pid for child in psutil.Process().children()}
        self.injector.fail_at(device, 0, phase, kind)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = self.step(7)
            if phase == "idle":
                time.sleep(0.1)  # it ends behind its answer
                self.rest()
            self.await_all()
        assert self.injector.has_fired
        faults = [str(each.message) for each in caught if each.category is FaultWarning]
        assert len(faults) == 1, faults
        assert device in faults[0]
        assert CAUSES[kind] in faults[0]
        self.assert_same(found, expected, is_exact=self.is_exact and kind not in MEMORY)
        number = int(device.removeprefix("cpu:"))
        after = evener.report(self.net)
        assert after.devices[number].num_faults == before.devices[number].num_faults + 1
        fault = vars(self.net)[STATE_NAME].journal.faults[-1]
        assert (fault.device, fault.phase) == (
            number,
            phase.split(maxsplit=1)[0],
        ) or phase == "idle"
        now = {child.pid for child in psutil.Process().children()}
        assert len(now) == self.num_helpers
        assert len(now - pids) == (kind not in MEMORY)
        self.injector.disarm()
        self.assert_same(self.expected(8), self.expected(8), is_exact=self.is_exact)

    def close(self) -> None:
        evener.release(self.net)


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    made: list[Trial] = []

    def make(*args: Any, **kwargs: Any) -> Trial:
        made.append(Trial(tmp_path, *args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()
    made.clear()
    for _ in range(3):  # what has a finalizer needs two rounds
        gc.collect()


# ------------------------------------------------------------------ the matrix

#: What CI tries, team by team: devices, way, shares, and faults as (device, phase, kind).
Fault = tuple[str, str, str]
COVER: list[tuple[int, str, Any, list[Fault]]] = [
    (
        2,
        "one_line",
        "even",
        [
            ("cpu:1", "forward before", "SIGKILL"),
            ("cpu:1", "forward", "SIGSEGV"),
            ("cpu:1", "output before", "SIGKILL"),
            ("cpu:1", "backward", "SIGTERM"),
            ("cpu:1", "idle", "SIGKILL"),
        ],
    ),
    (
        3,
        "with_input_gradient",
        (2, 1, 3),
        [
            ("cpu:2", "exchange before", "SIGKILL"),
            ("cpu:1", "exchange after", "SIGSEGV"),
        ],
    ),
    (4, "accumulated", (1, 2, 1, 2), [("cpu:3", "backward after", "exit")]),
    (2, "inference", "even", [("cpu:1", "output after", "deadlock")]),
    (2, "retained", "even", [("cpu:1", "backward", "SIGKILL")]),
    (2, "two_forwards", (1, 2), [("cpu:1", "forward", "exit")]),
    (2, "explicit", "auto", [("cpu:1", "backward", "SIGKILL")]),
    (2, "drop_in", "even", [("cpu:1", "backward before", "SIGTERM")]),
]
PHASES_AND_KINDS = [
    (phase, kind)
    for phase in PHASES
    if phase not in ("start", "load")
    for kind in CAUSES
    if kind not in MEMORY
]


@pytest.mark.parametrize(
    ("num", "way", "shares", "faults"), COVER, ids=[f"{c[1]}-{c[0]}-{c[2]}" for c in COVER]
)
def test_a_fault_changes_no_number(
    trial: Callable[..., Trial], num: int, way: str, shares: Any, faults: list[Fault]
) -> None:
    tried = trial(num, way, shares)
    tried.rest()
    for fault in faults:
        tried.try_fault(*fault)


@pytest.mark.parametrize("way", ["with_input_gradient", "two_forwards"])
def test_what_there_is_no_memory_for_is_done_in_portions(
    trial: Callable[..., Trial], way: str
) -> None:
    tried = trial(2, way, "even", is_random=False)
    tried.rest()
    tried.try_fault("cpu:1", "forward", "MemoryError")
    tried.try_fault("cpu:1", "backward", "allocator")


@LONG
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shares", ["even", "auto"])
@pytest.mark.parametrize("way", [name for name in WAYS if name != "drop_in"])
@pytest.mark.parametrize("num", [2, 3, 4])
def test_every_fault_changes_no_number(
    trial: Callable[..., Trial], num: int, way: str, shares: Any
) -> None:
    tried = trial(num, way, shares, restarts=1000)
    tried.rest()
    for phase, kind in PHASES_AND_KINDS:
        has_it = not phase.startswith("exchange") or num > 2
        is_in_it = way != "inference" or phase.split()[0] in ("forward", "output", "idle")
        if has_it and is_in_it:
            tried.try_fault(f"cpu:{num - 1}", phase, kind)


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGTERM"])
def test_a_helper_that_is_ended_at_its_start_gets_another_try(
    trial: Callable[..., Trial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tried = trial(2, "one_line", "even")
    (tmp_path / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    tried.injector.fail_at("cpu:1", 0, "start", kind)

    with pytest.warns(FaultWarning, match=rf"cpu:1 .*{kind}.*new helper starts"):
        tried.rest()

    assert tried.injector.has_fired
    tried.await_all()


def test_after_its_restarts_a_device_is_left_out_and_the_main_process_is_alone(
    trial: Callable[..., Trial],
) -> None:
    tried = trial(2, "one_line", "even", restarts=0)
    tried.rest()
    expected = tried.expected(7)
    tried.injector.fail_at("cpu:1", 0, "forward", "SIGKILL")

    with pytest.warns(FaultWarning, match=r"cpu:1 .*SIGKILL.*restarts=0.*left out"):
        found = tried.step(7)

    tried.assert_same(found, expected, is_exact=True)
    tried.step(8)
    assert evener.report(tried.net).shares == (SIZE, 0)
    assert psutil.Process().children() == []


@LONG  # what CI tries of it is in test_team.py
def test_a_piece_that_ends_two_helpers_is_an_error_and_the_module_works_on(
    trial: Callable[..., Trial],
) -> None:
    tried = trial(2, "one_line", "even")
    tried.rest()
    tried.injector.fail_at("cpu:1", 0, "forward", "exit", times=2)

    with pytest.raises(HelperDiedError, match=r"has ended two helpers of cpu:1"):
        tried.step(7)

    assert tried.injector.has_fired
    assert all(p.grad is None for p in tried.net.parameters())
    # Behind an error the warnings wait for the next call, so that none hides the other.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tried.await_all()
    faults = [str(each.message) for each in caught if each.category is FaultWarning]
    assert len(faults) == 2
    assert "the call is lost" in faults[1]
    tried.assert_same(tried.expected(8), tried.expected(8), is_exact=True)


class Raises(nn.Module):
    """Raises where a sample is negative: on the second device only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise LookupError("a bad sample")
        y: Tensor = self.linear(x)
        return y


def test_an_error_of_the_users_code_is_no_fault() -> None:
    model = evener.parallelize(Raises(), "cpu*2", shares="even")
    good, bad = torch.ones(4, 2), torch.tensor([[1.0, 1.0], [1, 1], [-1, 1], [1, 1]])
    model(good).sum().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with pytest.raises(LookupError, match="a bad sample") as caught:
        model(bad)

    assert "cpu:1" in str(caught.value.__cause__)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    assert [each.num_faults for each in evener.report(model).devices] == [0, 0]
    evener.release(model)
