"""Compares evener with one core, all threads, DDP, Accelerate and Fabric; see README.md."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # harness.py and its neighbours

from costs import measure_first_step, measure_memory, measure_one_device
from speed import measure_speed
from targets import CONTENDERS, DEFAULT_CONTENDERS, REFERENCE, WORKLOADS

import environment
from harness import BENCHMARKS, ContenderError
from results import Cost, Results

QUESTIONS = ("speed", "first-step", "one-device", "memory")
PACKAGES = ("torch", "accelerate", "lightning-fabric")
MAX_CORES = 8

Measured = TypeVar("Measured")


def main() -> int:
    """Runs what is asked for; returns 1 if anything could not be measured, else 0."""
    options = _options()
    cores = _cores(options.cores)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    results = Results(environment.describe(PACKAGES, len(cores)), _settings(options))
    for signal_ in (signal.SIGTERM, signal.SIGHUP):
        # They end the workers as Ctrl-C does.
        signal.signal(signal_, lambda *_: sys.exit(1))

    def attempt(what: str, measure: Callable[[], Measured]) -> list[Measured]:
        console.print(f"{what} ...")
        try:
            return [measure()]
        except ContenderError as error:
            results.failures.append(f"{what}: {error}")
            console.print(results.failures[-1], style="red", markup=False)
            return []

    questions = QUESTIONS if options.what == "all" else (options.what,)
    for workload in options.workloads if "speed" in questions else ():
        measure_workload = partial(
            measure_speed,
            workload,
            options.contenders,
            cores,
            num_rounds=options.rounds,
            turn_s=options.turn_s,
            loss_inside=options.loss == "inside",
        )
        results.speeds += attempt(f"speed on {workload}", measure_workload)
    costs: dict[str, Callable[[], Cost]] = {
        "first-step": partial(measure_first_step, cores, num_rounds=options.rounds),
        "one-device": partial(measure_one_device, cores),
        "memory": partial(measure_memory, options.contenders, cores),
    }
    for question in [name for name in costs if name in questions]:
        for cost in attempt(question, costs[question]):
            results.costs[question] = cost

    results.print(console)
    if not options.no_write:
        console.print(f"written to {results.write(options.out)} and .json")
    return 1 if results.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=[*QUESTIONS, "all"], default="all")
    parser.add_argument("--workloads", type=_names(WORKLOADS), default=WORKLOADS)
    parser.add_argument("--contenders", type=_names(tuple(CONTENDERS)), default=DEFAULT_CONTENDERS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn-s", type=float, default=1.5, help="seconds of a turn")
    parser.add_argument("--cores", type=int, help="how many, a power of two; all up to 8")
    parser.add_argument(
        "--loss",
        choices=["outside", "inside"],
        default="outside",
        help="whether the loop or the module's forward computes the loss",
    )
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    if REFERENCE not in options.contenders:
        options.contenders = (REFERENCE, *options.contenders)
    return options


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; known: {', '.join(known)}"
            )
        return names

    return parse


def _cores(asked: int | None) -> list[int]:
    """The physical cores to use: a power of two of them, which divides every batch."""
    usable = environment.physical_cores()
    num = asked or min(len(usable), MAX_CORES)
    if not 2 <= num <= len(usable):
        raise SystemExit(f"2 to {len(usable)} cores can be compared here, not {num}")
    return usable[: 1 << (num.bit_length() - 1)]


def _settings(options: argparse.Namespace) -> dict[str, str]:
    return {
        "command": f"`python benchmarks/peers/main.py {' '.join(sys.argv[1:])}`",
        "rounds": str(options.rounds),
        "seconds of a turn": f"{options.turn_s:g}",
        "loss": f"{options.loss} of the module",
    }


if __name__ == "__main__":
    sys.exit(main())
