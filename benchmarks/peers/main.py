"""Compares evener with one core, all threads, DDP, Accelerate and Fabric; see README.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # harness.py and its neighbours

from costs import measure_first_step, measure_memory, measure_one_device
from speed import measure_speed
from targets import DEFAULT_CONTENDERS, REFERENCE, WORKLOADS

import environment
from options import add_common, attempt, end_in_order, make_console, names
from results import Cost, Results
from start import CONTENDERS

QUESTIONS = ("speed", "first-step", "one-device", "memory")
PACKAGES = ("torch", "accelerate", "lightning-fabric")
MAX_CORES = 8


def main() -> int:
    """Runs what is asked for; returns 1 if anything could not be measured, else 0."""
    options = _options()
    cores = _cores(options.cores)
    console = make_console()
    results = Results(environment.describe(PACKAGES, len(cores)), _settings(options))
    end_in_order()

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
        what = f"speed on {workload}"
        results.speeds += attempt(what, measure_workload, console, results.failures)
    costs: dict[str, Callable[[], Cost]] = {
        "first-step": partial(measure_first_step, cores, num_rounds=options.rounds),
        "one-device": partial(measure_one_device, cores),
        "memory": partial(measure_memory, options.contenders, cores),
    }
    for question in [name for name in costs if name in questions]:
        for cost in attempt(question, costs[question], console, results.failures):
            results.costs[question] = cost

    results.print(console)
    if not options.no_write:
        console.print(f"written to {results.write(options.out)} and .json")
    return 1 if results.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=[*QUESTIONS, "all"], default="all")
    parser.add_argument("--workloads", type=names(WORKLOADS), default=WORKLOADS)
    parser.add_argument("--contenders", type=names(tuple(CONTENDERS)), default=DEFAULT_CONTENDERS)
    add_common(parser, rounds=7, turn_s=1.5)
    parser.add_argument("--cores", type=int, help="how many, a power of two; all up to 8")
    parser.add_argument(
        "--loss",
        choices=["outside", "inside"],
        default="outside",
        help="whether the loop or the module's forward computes the loss",
    )
    options = parser.parse_args()
    if REFERENCE not in options.contenders:
        options.contenders = (REFERENCE, *options.contenders)
    return options


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
