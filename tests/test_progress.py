"""The progress that the command line shows."""

from __future__ import annotations

import io
from typing import Any, cast

from rich.console import Console

from evener.textbook.progress import download_bar, training_bar
from evener.textbook.record import Epoch, Settings, Step


class Data:
    train = range(128)


def shown(*, terminal: bool, shares: tuple[int, ...]) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, color_system=None)
    with training_bar(console, cast("Any", Data()), Settings(epochs=2)) as (on_step, on_epoch):
        on_step(Step(1.0, 2.5, 64, 64.0, shares))
        on_epoch(Epoch(1, 2.0, 64.0, 0.75))
        on_step(Step(3.0, 1.25, 64, 64.0, shares))
    return file.getvalue()


def test_a_terminal_shows_the_live_shares() -> None:
    text = shown(terminal=True, shares=(43, 21))

    assert "epoch 2/2" in text
    assert "loss 1.250" in text
    assert "shares 43 + 21" in text


def test_one_device_has_no_shares() -> None:
    assert "shares" not in shown(terminal=True, shares=())


def test_without_a_terminal_there_is_a_line_for_each_epoch() -> None:
    text = shown(terminal=False, shares=(43, 21))

    assert text.splitlines()[0] == "epoch 1: 2.0 sec, 64 images/sec, test acc 0.75"
    assert "shares" not in text


def test_the_bar_of_a_download() -> None:
    file = io.StringIO()
    with download_bar(Console(file=file, force_terminal=True, width=80)) as on_bytes:
        on_bytes("train.gz", 5, 10)
        on_bytes("train.gz", 10, 10)

    assert "train.gz" in file.getvalue()
    assert "10/10 bytes" in file.getvalue()


def test_no_bars_in_a_pipe() -> None:
    pipe = Console(file=io.StringIO())
    bar = training_bar(pipe, cast("Any", Data()), Settings())
    with bar as (on_step, _), download_bar(pipe):
        on_step(Step(1.0, 0.512, 10, 123.4))

    assert cast("io.StringIO", pipe.file).getvalue() == ""
