"""What the tests of faults share: programs in interpreters of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import evener

#: Until when everything has ended; more on a machine that is very busy.
END_S = 2.0 * float(os.environ.get("EVENER_TEST_SLACK", "1"))


@pytest.fixture
def start_program(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a script of the user's, in a session of its own; gives its process."""
    source = str(Path(evener.__file__).parents[1])
    started = []

    def start(program: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(program)
        process = subprocess.Popen(
            [sys.executable, script, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": source},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def output_of(
    start_program: Callable[..., subprocess.Popen[str]],
) -> Callable[..., str]:
    """Runs a script of the user's to its end, which is to be good; gives what it printed."""

    def run(program: str, *arguments: object, **options: Any) -> str:
        process = start_program(program, *arguments, **options)
        printed, errors = process.communicate(timeout=100)
        assert process.returncode == 0, printed + errors
        return printed

    return run


@pytest.fixture
def left_of() -> Callable[[Collection[int]], list[int]]:
    """Waits until processes have ended; gives those that have not."""

    def is_there(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def wait(pids: Collection[int]) -> list[int]:
        end_s = time.monotonic() + END_S
        while (left := [*filter(is_there, pids)]) and time.monotonic() < end_s:
            time.sleep(0.01)
        return left

    return wait


@pytest.fixture
def end_s() -> float:
    """Until when everything has ended, in seconds."""
    return END_S
