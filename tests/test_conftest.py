"""The police of the tests is tested too: in a session of its own, with this conftest."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

import evener

CONFTEST = Path(__file__).with_name("conftest.py")

#: Each test leaves what its name says. What would outlast the session ends by itself.
LEAKS = """
import gc, os, socket, subprocess, threading, time
from pathlib import Path
import pytest
import torch
from evener.arena import Arena, Place

kept = []
is_over = threading.Event()


def test_process():
    kept.append(subprocess.Popen(["sleep", "60"]))


def test_process_that_nobody_waited_for():
    kept.append(subprocess.Popen(["true"]))


def test_orphan_of_a_process_that_has_ended():
    subprocess.run(["sh", "-c", "sleep 60 >/dev/null 2>&1 &"], check=True)


def test_thread():
    threading.Thread(target=is_over.wait, name="weaver").start()


def test_daemon_thread():
    threading.Thread(target=is_over.wait, name="ghost", daemon=True).start()


def test_file_descriptor():
    kept.append(os.open("/dev/null", os.O_RDONLY))


def test_second_file_descriptor_of_the_same_file():
    kept.append(os.open("/dev/null", os.O_RDONLY))


def test_socket():
    kept.append(socket.socketpair())


def test_arena():
    arena = Arena()
    kept.append(arena.take(4).tensor(Place(0, torch.float32, (1,), (1,))))
    arena.close()


def test_environment_variable():
    os.environ["LEFT_OVER"] = "1"


def test_removed_environment_variable():
    del os.environ["STANDING"]


def test_thread_count():
    torch.set_num_threads(torch.get_num_threads() + 1)


def test_dtype():
    torch.set_default_dtype(torch.float64)


def test_grad_mode():
    torch.set_grad_enabled(False)


def test_file():
    Path("left.txt").write_text("")


def test_working_directory(tmp_path):
    os.chdir(tmp_path)


def test_clean():
    assert torch.initial_seed() == 0
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert "LEFT_OVER" not in os.environ
    assert os.environ["STANDING"] == "1"


def test_clean_with_everything_put_away(tmp_path, monkeypatch):
    monkeypatch.setenv("LEFT_OVER", "1")
    monkeypatch.chdir(tmp_path)
    Path("put_away.txt").write_text("")
    subprocess.run(["true"], check=True)
    with socket.socket():
        pass


def test_clean_because_the_thread_ends_soon():
    threading.Thread(target=time.sleep, args=(0.1,)).start()


def test_clean_because_the_garbage_collector_finds_it():
    arena = Arena()
    arena.me = arena
    os.close(arena.fd)


@pytest.fixture
def arena():
    arena = Arena()
    yield arena
    arena.close()


def test_clean_when_a_fixture_has_put_it_away(arena):
    arena.take(4)


def test_failed_is_not_told_what_its_traceback_holds():
    arena = Arena()
    os.close(arena.fd)
    assert arena is None


def test_last():
    is_over.set()
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join()
"""

#: What each of them is told, as a regular expression.
TOLD = {
    "test_process": r"process \d+ \((sleeping|running)\): sleep 60",
    "test_process_that_nobody_waited_for": r"process \d+ \(zombie\): true",
    "test_orphan_of_a_process_that_has_ended": r"process \d+ \((sleeping|running)\): sleep 60",
    "test_thread": r"thread 'weaver'",
    "test_daemon_thread": r"thread 'ghost' \(daemon\)",
    "test_file_descriptor": r"file descriptor of /dev/null",
    "test_second_file_descriptor_of_the_same_file": r"file descriptor of /dev/null",
    "test_socket": r"file descriptor of socket:\[\d+\]; file descriptor of socket:\[\d+\]",
    "test_arena": r"file descriptor of /memfd:evener .*; mapping of an arena \(inode \d+\)",
    "test_environment_variable": r"environment: LEFT_OVER='1', was None",
    "test_removed_environment_variable": r"environment: STANDING=None, was '1'",
    "test_thread_count": r"torch thread count: \d+, was \d+",
    "test_dtype": r"default dtype: torch.float64, was torch.float32",
    "test_grad_mode": r"grad mode: False, was True",
    "test_file": r"file 'left.txt' in the working directory",
    "test_working_directory": r"working directory: .*, was .*",
}


def test_each_leak_is_told_and_nothing_else(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("STANDING", "1")
    monkeypatch.setenv("COLUMNS", "400")  # the summary is cut to the width of the terminal
    conftest = CONFTEST.read_text()
    pytester.makeconftest(conftest.replace("GRACE_S = 2.0", "GRACE_S = 0.4"))
    pytester.makepyfile(LEAKS)

    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rEf")

    line = re.compile(r"^ERROR \S+::(\w+) - Failed: left behind: (.*)$", re.MULTILINE)
    told = dict(line.findall(result.stdout.str()))
    names = re.findall(r"^def (test_\w+)", LEAKS, re.MULTILINE)
    result.assert_outcomes(passed=len(names) - 1, failed=1, errors=len(TOLD))
    assert told.keys() == TOLD.keys()
    for name, pattern in TOLD.items():
        assert re.fullmatch(pattern, told[name]), f"{name}: {told[name]}"
    assert "GRACE_S = 2.0" in conftest


def test_the_header_names_torch_and_the_devices(request: pytest.FixtureRequest) -> None:
    (header,) = [
        text
        for text in request.config.hook.pytest_report_header(
            config=request.config, start_path=CONFTEST.parent, startdir=None
        )
        if isinstance(text, str) and text.startswith("torch ")
    ]

    assert torch.__version__ in header
    for device in evener.devices("all"):
        assert device.label in header
