"""Does a grid give the same bits on any devices, and what does it cost? See README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # harness.py and its neighbours

from bits import measure_bits, runs
from cost import measure_cost

import environment
from options import add_common, attempt, end_in_order, make_console, names
from results import Results

WORKLOADS = ("smallmlp", "mlp", "resnet", "lstm", "encoder")
MODELS = ("resnet", "dropout")
PARTS = ("bits", "cost")


def main() -> int:
    """Runs what is asked for; returns 1 if anything is not as it is to be, else 0."""
    options = _options()
    cores = environment.physical_cores()[:2]
    if len(cores) < 2:
        raise SystemExit("two physical cores are needed")
    console = make_console()
    settings = {
        "command": f"`python benchmarks/reproducible/main.py {' '.join(sys.argv[1:])}`",
        "rounds": str(options.rounds),
        "seconds of a turn": f"{options.turn_s:g}",
    }
    results = Results(environment.describe(("torch",), len(cores)), settings)
    end_in_order()

    for workload in options.models if "bits" in options.parts else ():
        compare = partial(measure_bits, workload, options.steps, runs(options.steps))
        results.bits += attempt(f"{workload}, bits", compare, console, results.errors)
    for workload in options.workloads if "cost" in options.parts else ():
        measure = partial(
            measure_cost, workload, cores, num_rounds=options.rounds, turn_s=options.turn_s
        )
        results.costs += attempt(f"{workload}, cost", measure, console, results.errors)

    results.print(console)
    if not options.no_write:
        console.print(f"written to {results.write(options.out)} and .json")
    return 1 if results.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=names(PARTS), default=PARTS)
    parser.add_argument("--steps", type=int, default=30, help="steps of a training")
    parser.add_argument("--models", type=names((*WORKLOADS, "dropout")), default=MODELS)
    parser.add_argument("--workloads", type=names(WORKLOADS), default=WORKLOADS)
    add_common(parser, rounds=9, turn_s=1.5)
    options = parser.parse_args()
    if options.steps < 4 or options.rounds < 1:
        parser.error("there are 4 steps at least, and 1 round")
    return options


if __name__ == "__main__":
    sys.exit(main())
