"""Printing: what helpers print arrives whole and in order, also at a death."""

from __future__ import annotations

import io
import os
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evener
from evener.channel import ChannelClosedError
from evener.printing import MAX_LINE, Printed, Printer


def test_whole_lines_are_sent_and_the_rest_at_a_flush() -> None:
    sent: list[Any] = []
    printer = Printer("stdout", sent.append)

    print("a", 1, file=printer)
    print("b", end="", file=printer)
    assert sent == [Printed("stdout", "a 1\n")]

    printer.flush()
    printer.flush()
    assert sent[1:] == [Printed("stdout", "b")]

    print("50 %", end="\r", file=printer)
    print("x" * (MAX_LINE + 1), end="", file=printer)
    assert [len(message.text) for message in sent[2:]] == [5, MAX_LINE + 1]
    with pytest.raises(TypeError, match="must be str, not bytes"):
        printer.write(b"x")  # type: ignore[arg-type]


def test_where_nobody_listens_it_prints_as_always(capsys: pytest.CaptureFixture[str]) -> None:
    def send(_message: Any) -> None:
        raise ChannelClosedError

    print("last words", file=Printer("stderr", send))

    assert capsys.readouterr().err == "last words\n"


def test_it_is_a_stream_as_programs_expect(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer("stdout", lambda _: None)

    assert isinstance(printer, io.TextIOBase)
    assert printer.writable()
    assert not printer.isatty()
    assert printer.encoding.lower().replace("-", "") == "utf8"
    assert isinstance(printer.errors, str)
    assert printer.buffer is sys.stdout.buffer


class Talker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.dies = False

    def forward(self, x: Tensor) -> Tensor:
        print("inside", tuple(x.shape))
        print("not ended", len(x), end=";")
        print("to stderr", len(x), file=sys.stderr)
        out: Tensor = self.linear(x)
        out.register_hook(lambda g: print("backward", len(g)))
        if len(x) == 3:
            warnings.warn(f"odd {len(x)}", stacklevel=1)
        if len(x) == 5:
            print("many\n" * 100_000, end="")
        if len(x) == 7:
            thread = threading.Thread(target=print, args=("from a thread",))
            thread.start()
            thread.join()
        if self.dies and len(x) == 2:
            print("dying")
            os._exit(3)
        return out


def test_prints_arrive_in_the_order_of_the_devices_and_none_is_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    model = evener.parallelize(Talker(), "cpu*3", shares=(4, 2, 1), timeout_s=30)

    model(torch.ones(7, 2)).sum().backward()
    printed = capsys.readouterr()
    assert printed.out == (
        "inside (4, 2)\nnot ended 4;inside (2, 2)\nnot ended 2;inside (1, 2)\nnot ended 1;"
        "backward 4\nbackward 2\nbackward 1\n"
    )
    assert printed.err == "to stderr 4\nto stderr 2\nto stderr 1\n"

    model(torch.ones(17, 2))  # 10, 5, 2: more than a channel holds
    printed = capsys.readouterr()
    assert printed.out.count("many\n") == 100_000
    assert printed.out.index("inside (10, 2)") < printed.out.index("inside (5, 2)")
    assert printed.out.endswith("inside (2, 2)\nnot ended 2;")

    model(torch.ones(11, 2))  # 6, 3, 2
    assert "UserWarning: odd 3" in capsys.readouterr().err

    model(torch.ones(25, 2))  # 14, 7, 4
    assert "from a thread\n" in capsys.readouterr().out

    model.dies = True
    with pytest.raises(evener.EvenerError, match=r"cpu:1.*ended with exit code 3"):
        model(torch.ones(7, 2))
    assert "dying\n" in capsys.readouterr().out
    evener.release(model)


def test_a_users_own_stream_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    own = io.StringIO()
    before, sys.stdout = sys.stdout, own
    try:
        Printed("stdout", "x\n").show()
    finally:
        sys.stdout = before
    Printed("stdout", "y\n").show()

    assert own.getvalue() == "x\n"
    assert capsys.readouterr().out == "y\n"
