"""The roster: helpers that die are noticed and replaced in the background, not for ever."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from evener import messages
from evener.arena import Arena
from evener.channel import ChannelClosedError
from evener.devices import Device
from evener.errors import FaultWarning, HelperStartError
from evener.faults import Faults
from evener.journal import Journal
from evener.member import Member
from evener.roster import Roster
from evener.seat import Seat

pytestmark = pytest.mark.filterwarnings("ignore::evener.errors.FaultWarning")

DEVICES = [Device("cpu", i, (0,), 1, "test") for i in range(2)]


class Scene:
    """A roster of one helper."""

    def __init__(self, restarts: int) -> None:
        self.arena = Arena()
        self.faults = Faults(DEVICES, Journal(2), restarts)
        self.roster = Roster(DEVICES, self.arena, self.faults, None, [])
        self.seat: Seat = self.roster.seats[1]

    def member(self) -> Member:
        assert self.seat.member is not None
        return self.seat.member

    def kill(self) -> None:
        """End the helper, and wait until the system says so."""
        member = self.member()
        os.kill(member.pid, signal.SIGKILL)
        select.select([member.pidfd], [], [])

    def coming(self) -> Member:
        """The helper that comes, when it has something to say."""
        assert self.seat.coming is not None
        select.select([self.seat.coming.channel._socket], [], [])
        return self.seat.coming


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = Scene(getattr(request, "param", 3))
    yield scene
    scene.roster.stop()
    scene.arena.close()
    assert not psutil.Process().children()


def test_a_helper_that_dies_idle_is_noticed_and_another_comes_step_by_step(scene: Scene) -> None:
    first = scene.member()
    assert (first.stage, scene.seat.generation) == ("seated", 1)
    scene.kill()

    scene.roster.tend()

    assert scene.seat.member is None
    (fault,) = scene.faults._journal.faults
    assert (fault.device, fault.phase) == (1, "idle")
    assert fault.action == "nothing was lost; a new helper starts (restart 1 of 3)"
    second = scene.coming()
    assert second.stage == "starting"
    scene.roster.tend()
    assert second.stage == "there"
    scene.roster.tend()  # it waits for the module
    assert scene.seat.coming is second

    second.stage = "rehearsing"
    second.send(messages.Follow(messages.Update()))
    scene.coming()
    scene.roster.tend()

    assert scene.member() is second
    assert (second.stage, scene.seat.generation, scene.seat.coming) == ("seated", 2, None)


def test_who_cannot_wait_gets_it_as_soon_as_it_is_there(scene: Scene) -> None:
    first = scene.member()
    scene.kill()
    scene.roster.bury(scene.seat, ChannelClosedError())

    assert scene.roster.await_coming(scene.seat) is scene.member() is not first
    assert scene.roster.await_coming(scene.seat) is None  # no other one comes


def test_one_that_dies_while_it_starts_is_replaced_too(scene: Scene) -> None:
    scene.kill()
    scene.roster.tend()
    assert scene.seat.coming is not None
    os.kill(scene.seat.coming.pid, signal.SIGKILL)
    scene.coming()

    scene.roster.tend()

    assert [fault.phase for fault in scene.faults._journal.faults] == ["idle", "start"]
    assert scene.coming().stage == "starting"


@pytest.mark.parametrize("scene", [0], indirect=True)
def test_after_the_last_restart_nobody_comes(scene: Scene) -> None:
    scene.kill()
    scene.roster.tend()
    scene.roster.tend()

    assert (scene.seat.member, scene.seat.coming) == (None, None)
    (fault,) = scene.faults._journal.faults
    assert fault.action.endswith("the device gets no new helper (restarts=0) and is left out")
    with pytest.warns(FaultWarning, match=r"restarts=0"):
        scene.faults.tell()


def test_one_that_cannot_be_spoken_with_is_no_fault(scene: Scene) -> None:
    """A message to it was interrupted halfway."""
    scene.roster.dismiss(scene.seat)

    assert scene.seat.member is None
    assert scene.seat.coming is not None
    assert scene.faults.num == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_first_helper_that_a_signal_ends_while_it_starts_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    """A crash was an error, though another helper may well start."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nkill -{number.value} $$\n")
    program.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr("sys.executable", str(program))
        start = Roster._replace

        def replace(roster: Roster, seat: Seat) -> None:
            patched.undo()
            start(roster, seat)

        monkeypatch.setattr(Roster, "_replace", replace)
        scene = Scene(restarts=3)

    (fault,) = scene.faults._journal.faults
    assert fault.phase == "start"
    assert fault.action == "nothing was lost; a new helper starts (restart 1 of 3)"
    assert scene.roster.await_coming(scene.seat) is scene.member()
    scene.roster.stop()
    scene.arena.close()


def test_a_new_team_whose_helper_does_not_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    arena, faults = Arena(), Faults(DEVICES, Journal(2), 3)

    with pytest.raises(HelperStartError, match="cpu:1 did not start: it ended with exit code 1"):
        Roster(DEVICES, arena, faults, None, [])

    arena.close()
    assert not psutil.Process().children()
