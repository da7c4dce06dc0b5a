"""evener run: a program runs, and ends, as under python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import evener
from evener.errors import DeviceError, ProgramError
from evener.program import Program

#: What it prints depends on how it is started, and its end on its first argument.
SCRIPT = """
import atexit, os, pickle, signal, sys
import torch
from torch import nn
from torch.nn import DataParallel
import beside

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 2)

    def forward(self, x):
        return self.linear(x), torch.full((len(x),), os.getpid())

class Own(torch.nn.parallel.DataParallel):
    pass

atexit.register(lambda: print("exit:", pickle.loads(pickle.dumps(Net)).__qualname__))

def main():
    print(__name__, os.path.basename(__file__), sys.argv[1:], sys.path[0] == FOLDER)
    print(os.path.isabs(__file__), sys.modules["__main__"].Net is Net, beside.__name__)
    how = sys.argv[1]
    if how == "train":
        net = Own(Net(), [0, 1])
        print(isinstance(net, DataParallel), isinstance(net, torch.nn.DataParallel))
        torch.manual_seed(0)
        output, pids = net(torch.ones(4, 5))
        output.sum().backward()
        print(net.module.linear.bias.grad.tolist(), len(set(pids.tolist())))
        print("read", sys.stdin.read())
        sys.exit("said at the end")
    if how == "raise":
        raise ValueError("mine")
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    if how == "hook":
        sys.excepthook = lambda kind, value, trace: print("hook", kind.__name__)
        1 / 0

FOLDER = os.path.dirname(os.path.abspath(__file__))
if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "broken.py").write_text("def f(:\n    pass\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from torch.nn import DataParallel\n")
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys\nfrom . import DataParallel\nprint(__package__, __spec__.name, sys.argv[1:])\n"
        "print(DataParallel.__mro__[1].__module__)\nsys.exit(3)\n"
    )
    return tmp_path


def run(folder: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    source = str(Path(evener.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, "-m", "evener.cli", "run", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": source},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_script_trains_on_the_devices_and_ends_as_it_says(folder: Path) -> None:
    words = ("script.py", "train", "--devices", "none", "--", "-m")

    result = run(folder, "--devices", "cpu*2", *words, stdin="stdin")

    assert result.stdout.splitlines() == [
        "__main__ script.py ['train', '--devices', 'none', '--', '-m'] True",
        "True True beside",
        "True True",
        "[4.0, 4.0] 2",
        "read stdin",
        "exit: Net",
    ]
    lines = result.stderr.splitlines()
    assert lines[0] == "evener: Own of Net"
    assert sum("cpu:0" in line or "cpu:1" in line for line in lines) == 2
    assert lines[-1] == "said at the end"
    assert result.returncode == 1


def test_an_exception_has_the_traceback_of_the_program_alone(folder: Path) -> None:
    result = run(folder, "-m", "script", "raise", "--help")

    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: mine"
    assert [line.split(", ")[2] for line in lines if line.startswith("  File ")] == [
        "in <module>",
        "in main",
    ]
    assert all(str(folder / "script.py") in line for line in lines if line.startswith("  File "))
    assert result.stdout.splitlines()[0] == "__main__ script.py ['raise', '--help'] True"
    assert result.stdout.splitlines()[-1] == "exit: Net"
    assert result.returncode == 1


@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        (("script.py", "interrupt"), -2, "exit: Net", "KeyboardInterrupt"),
        (("script.py", "hook"), 1, "hook ZeroDivisionError\nexit: Net", ""),
        (("broken.py",), 1, "", "SyntaxError: invalid syntax"),
        (("-m", "package", "-x"), 3, "evener.dropin", "evener: the program used no torch.nn.Data"),
        (("-m", "nowhere.at.all"), 2, "", "evener: there is no module 'nowhere.at.all' to run"),
    ],
)
def test_a_program_ends_as_under_python(
    folder: Path, words: tuple[str, ...], code: int, out: str, err: str
) -> None:
    result = run(folder, *words)

    assert result.returncode == code, result.stderr
    assert result.stdout.strip().endswith(out)
    assert "/evener/" not in result.stderr
    assert (result.stderr.splitlines() or [""])[-1].startswith(err)


@pytest.mark.parametrize(
    ("words", "spec", "error", "message"),
    [
        (["no.py"], "auto", ProgramError, "no file 'no.py'; expected the path of a Python script"),
        (["/"], "auto", ProgramError, "no file '/'"),
        ([__file__], "cpu:99", DeviceError, "cpu:99"),
    ],
)
def test_what_cannot_be_run_is_known_before(
    words: list[str], spec: str, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        Program(words, spec, is_module=False)
