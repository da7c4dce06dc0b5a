"""How many seconds does one death cost, against a restart from a checkpoint? See README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # harness.py and its neighbours

from contestants import contestants, fatal_step
from lost import measure_lost

import environment
from options import add_common, attempt, end_in_order, make_console
from results import Results

WORKLOADS = ("smallmlp", "mlp", "resnet", "lstm", "encoder")


def main() -> int:
    """Runs what is asked for; returns 1 if anything could not be measured, else 0."""
    options = _options()
    cores = environment.physical_cores()[:2]
    if len(cores) < 2:
        raise SystemExit("two physical cores are needed")
    console = make_console()
    try:
        fatal = fatal_step(options.steps, options.every)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    settings = {
        "command": f"`python benchmarks/recovery/main.py {' '.join(sys.argv[1:])}`",
        "workload": options.workload,
        "steps": str(options.steps),
        "steps before the death": str(fatal),
        "rounds": str(options.rounds),
        "undisturbed runs in a round": str(options.undisturbed),
    }
    results = Results(environment.describe(("torch",), len(cores)), settings)
    end_in_order()

    measure = partial(
        measure_lost,
        list(contestants(options.every).values()),
        {"workload": options.workload, "num_steps": options.steps, "fatal": fatal},
        cores,
        num_rounds=options.rounds,
        num_undisturbed=options.undisturbed,
        limit_s=options.limit_s,
    )
    for found in attempt(options.workload, measure, console, results.failures):
        results.lost += found

    results.print(console)
    if not options.no_write:
        console.print(f"written to {results.write(options.out)} and .json")
    return 1 if results.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, default="encoder")
    parser.add_argument("--steps", type=int, default=120, help="steps of a training")
    parser.add_argument(
        "--every",
        type=lambda text: tuple(int(part) for part in text.split(",")),
        default=(10, 50),
        help="steps from one checkpoint to the next, joined by commas",
    )
    parser.add_argument("--undisturbed", type=int, default=2, help="such runs in a round")
    parser.add_argument("--limit-s", type=float, default=600, help="seconds of a run at most")
    add_common(parser, rounds=5, turn_s=None)
    options = parser.parse_args()
    if min(*options.every, options.rounds, options.undisturbed) < 1:
        parser.error("intervals, rounds and undisturbed runs are at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
