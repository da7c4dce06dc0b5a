"""Neighbours: which processes there are, where, how nice, and that they are gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import evener
from evener.errors import DeviceError
from evener.neighbour import MIN_SPEED, WEIGHTS, Neighbour, nice_levels, parse_slow

CORES = sorted(os.sched_getaffinity(0))[:2]


def weight(level: int) -> int:
    return WEIGHTS[level + 20]


# ------------------------------------------------------------------ how nice


@pytest.mark.parametrize(
    ("speed", "levels"),
    [
        (0.5, (0,)),
        (0.25, (0, 0, 0)),
        (1 / 3, (0, 0)),
        (0.1, (0,) * 9),
        (0.02, (0,) * 49),
        (0.8, (6,)),  # a quarter of 1024 is wanted, 272 is nearest
        (0.4, (0, 3)),  # one and a half times: 1024 and 526
        (0.505, (0,)),  # 0.98 times: nearest is the whole
        (0.99, (19,)),
        (0.999, (19,)),  # less than the lightest, but not nothing
        (0.4999, (0,)),  # the 0.4 that is missing is nearer to nothing
    ],
)
def test_the_busy_processes_of_a_speed(speed: float, levels: tuple[int, ...]) -> None:
    assert nice_levels(speed) == levels


@pytest.mark.parametrize(
    ("own", "levels"), [(5, (5, 5, 5)), (-5, (-5, -5, -5)), (19, (19, 19, 19))]
)
def test_they_are_as_nice_as_who_is_slowed(own: int, levels: tuple[int, ...]) -> None:
    assert nice_levels(0.25, own) == levels


@given(st.floats(MIN_SPEED, 0.985))
def test_the_weights_leave_about_that_speed(speed: float) -> None:
    levels = nice_levels(speed)

    # Levels are a quarter apart, so what one process adds is right within an eighth.
    left = 1024 / (1024 + sum(map(weight, levels)))
    assert left == pytest.approx(speed, rel=0.06)
    assert levels == tuple(sorted(levels))
    assert all(level == 0 for level in levels[:-1])


@given(st.floats(MIN_SPEED, 1, exclude_max=True), st.integers(-20, 19))
def test_no_process_is_less_nice_than_who_is_slowed(speed: float, own: int) -> None:
    levels = nice_levels(speed, own)

    assert levels
    assert all(own <= level <= 19 for level in levels)


def test_each_level_weighs_a_quarter_more_than_the_next() -> None:
    assert len(WEIGHTS) == 40
    assert weight(0) == 1024
    for lighter, heavier in zip(WEIGHTS[1:], WEIGHTS, strict=False):
        assert heavier / lighter == pytest.approx(1.25, rel=0.06)


# ------------------------------------------------------------------ the processes


def test_the_processes_are_on_their_cores_and_as_nice_as_said() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with Neighbour(CORES, 0.4) as neighbour:
        processes = [psutil.Process(pid) for pid in neighbour.pids]

        there = sorted((p.cpu_affinity(), p.nice()) for p in processes)
        assert there == [([core], nice) for core in CORES for nice in nice_levels(0.4, own)]
        assert all(p.ppid() == os.getpid() for p in processes)
        assert all(os.getsid(p.pid) == os.getsid(0) for p in processes)


def test_a_core_that_is_named_twice_is_one() -> None:
    with Neighbour([CORES[0], CORES[0]], 0.5) as neighbour:
        assert neighbour.cores == (CORES[0],)
        assert len(neighbour.pids) == 1


def test_they_are_small_and_keep_busy() -> None:
    with Neighbour(CORES[-1:], 0.5) as neighbour:
        process = psutil.Process(*neighbour.pids)
        wait_until(lambda: sum(process.cpu_times()[:2]) > 0.1)

        assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
        assert process.num_threads() == 1
        assert process.memory_full_info().uss < 32e6


def test_ctrl_c_is_left_to_the_one_who_started_them() -> None:
    with Neighbour(CORES[-1:], 0.5) as neighbour:
        (pid,) = neighbour.pids

        wait_until(lambda: ignores(pid, signal.SIGINT))


def test_it_is_gone_at_the_end() -> None:
    with Neighbour(CORES[-1:], 0.25) as neighbour:
        pids = neighbour.pids

    assert not any(map(psutil.pid_exists, pids))
    assert neighbour.pids == ()


def test_it_is_gone_after_an_error() -> None:
    neighbour = Neighbour(CORES[-1:], 0.25)
    pids: list[int] = []

    def fail() -> None:
        with neighbour:
            pids.extend(neighbour.pids)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()

    assert len(pids) == 3
    assert not any(map(psutil.pid_exists, pids))


def test_it_comes_and_goes() -> None:
    neighbour = Neighbour(CORES[-1:], 0.5)
    assert neighbour.pids == ()
    with neighbour:
        first = neighbour.pids
    with neighbour:
        second = neighbour.pids
        neighbour.stop()
        assert neighbour.pids == ()
        neighbour.stop()
        neighbour.start()
        third = neighbour.pids
        neighbour.start()
        assert neighbour.pids == third

    assert [len(first), len(second), len(third)] == [1, 1, 1]
    assert neighbour.pids == ()


def test_one_that_has_died_is_no_trouble() -> None:
    with Neighbour(CORES[-1:], 0.25) as neighbour:
        psutil.Process(neighbour.pids[1]).kill()


def test_what_was_started_is_ended_where_the_rest_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tamed = []

    def refuse(which: int, pid: int, level: int) -> None:
        tamed.append(pid)
        if len(tamed) == 2:
            raise PermissionError("not allowed")

    monkeypatch.setattr(os, "setpriority", refuse)
    neighbour = Neighbour(CORES[-1:], 0.25)
    with pytest.raises(PermissionError):
        neighbour.start()

    assert not any(map(psutil.pid_exists, tamed))
    assert neighbour.pids == ()


PROGRAM = """
import json, os, sys, time
from evener.neighbour import Neighbour
os.nice(int(sys.argv[2]))
with Neighbour([int(sys.argv[1])], 0.4) as neighbour:
    nice = [os.getpriority(os.PRIO_PROCESS, pid) for pid in neighbour.pids]
    print(json.dumps([neighbour.pids, nice]), flush=True)
    time.sleep(float(sys.argv[3]))
"""


def test_who_is_nice_himself_gets_neighbours_as_nice(run_python: Callable[..., str]) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)

    _, nice = json.loads(run_python(PROGRAM, CORES[-1], 5, 0))

    assert tuple(nice) == nice_levels(0.4, own + 5)


def test_it_ends_when_its_parent_is_killed() -> None:
    source = str(Path(evener.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(CORES[-1]), "0", "100"],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        pids, _ = json.loads(parent.stdout.readline())
        assert len(pids) == 2
        assert all(map(psutil.pid_exists, pids))
        parent.kill()

    wait_until(lambda: not any(map(is_running, pids)))


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("speed", [0, -0.5, 1, 1.5, 0.019, float("nan"), float("inf")])
def test_a_speed_that_cannot_be(speed: float) -> None:
    with pytest.raises(DeviceError, match=r"speed of .*: expected 0\.02 to below 1"):
        Neighbour(CORES[:1], speed)


def test_no_cores() -> None:
    with pytest.raises(DeviceError, match="on no cores; expected one core or more"):
        Neighbour([], 0.5)


def test_cores_that_are_not_ours() -> None:
    with pytest.raises(DeviceError, match=rf"cores \[{CORES[0]}, 100000\]: expected cores among"):
        Neighbour([100000, CORES[0]], 0.5)


# ------------------------------------------------------------------ the command line's form


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu:1=0.5", {"cpu:1": 0.5}),
        ("cpu:1=0.5,cpu:0=0.25", {"cpu:1": 0.5, "cpu:0": 0.25}),
        (" CPU:1 = .5 , cpu:10=5e-1 ", {"cpu:1": 0.5, "cpu:10": 0.5}),
    ],
)
def test_slow_is_read(text: str, expected: dict[str, float]) -> None:
    assert parse_slow(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"slow '' is not understood; expected a device and a speed, such as \"cpu:1=0.5\""),
        ("cpu:1", "slow 'cpu:1' is not understood"),
        ("cpu:1=", "slow 'cpu:1=' is not understood"),
        ("cpu=0.5", "slow 'cpu=0.5' is not understood"),
        ("cpu:1=0.5,", "slow '' is not understood"),
        ("0.5", "slow '0.5' is not understood"),
        ("cpu:1=half", r"slow 'cpu:1=half': expected a speed from 0\.02 to below 1"),
        ("cpu:1=1", "slow 'cpu:1=1': expected a speed"),
        ("cpu:0=0.5,cpu:1=-2", "slow 'cpu:1=-2': expected a speed"),
        ("cpu:1=nan", "slow 'cpu:1=nan': expected a speed"),
        ("cpu:1=0.5,cpu:1=0.25", "names cpu:1 twice"),
    ],
)
def test_slow_that_is_not_understood(text: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        parse_slow(text)


# ------------------------------------------------------------------ waiting


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # whoever it is left to reaps
    except psutil.NoSuchProcess:
        return False


def ignores(pid: int, which: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in lines if line.startswith("SigIgn:"))
    return bool(int(mask, 16) & 1 << (which - 1))


def wait_until(is_so: Callable[[], bool], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)
