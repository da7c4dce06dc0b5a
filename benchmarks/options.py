"""What the programs that compare contenders have in common on the command line."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from harness import BENCHMARKS, ContenderError

Measured = TypeVar("Measured")


def add_common(parser: argparse.ArgumentParser, rounds: int, turn_s: float | None) -> None:
    """Adds the options on turns and results, with these defaults; None: there are no turns."""
    parser.add_argument("--rounds", type=int, default=rounds)
    if turn_s is not None:
        parser.add_argument("--turn-s", type=float, default=turn_s, help="seconds of a turn")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results")
    parser.add_argument("--no-write", action="store_true")


def names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A type of option: some of these names, joined by commas."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        unknown = [name for name in found if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; known: {', '.join(known)}"
            )
        return found

    return parse


def end_in_order() -> None:
    """Lets SIGTERM and SIGHUP end the workers as Ctrl-C does."""
    for signal_ in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_, lambda *_: sys.exit(1))


def make_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def attempt(
    what: str, measure: Callable[[], Measured], console: Console, failures: list[str]
) -> list[Measured]:
    """What was measured, in a list; or an empty list, and why among the failures."""
    console.print(f"{what} ...")
    try:
        return [measure()]
    except ContenderError as error:
        failures.append(f"{what}: {error}")
        console.print(failures[-1], style="red", markup=False)
        return []
