"""Does the explicit style keep up with the one line? See README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # harness.py and its neighbours

from forms import measure_forms
from targets import PAIRS, REFERENCE, WORKLOADS

import environment
from options import add_common, attempt, end_in_order, make_console, names
from results import Results

KNOWN_WORKLOADS = ("smallmlp", "mlp", "resnet", "lstm", "encoder")
CONTENDERS = (REFERENCE, *(name for pair in PAIRS.items() for name in reversed(pair)))


def main() -> int:
    """Runs what is asked for; returns 1 if anything could not be measured, else 0."""
    options = _options()
    cores = environment.physical_cores()[:2]
    if len(cores) < 2:
        raise SystemExit("two physical cores are needed")
    console = make_console()
    settings = {
        "command": f"`python benchmarks/gluon/main.py {' '.join(sys.argv[1:])}`",
        "rounds": str(options.rounds),
        "seconds of a turn": f"{options.turn_s:g}",
    }
    results = Results(environment.describe(("torch",), len(cores)), settings)
    end_in_order()

    for workload in options.workloads:
        measure = partial(
            measure_forms,
            workload,
            options.contenders,
            cores,
            num_rounds=options.rounds,
            turn_s=options.turn_s,
        )
        results.forms += attempt(workload, measure, console, results.failures)

    results.print(console)
    if not options.no_write:
        console.print(f"written to {results.write(options.out)} and .json")
    return 1 if results.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", type=names(KNOWN_WORKLOADS), default=WORKLOADS)
    parser.add_argument("--contenders", type=names(CONTENDERS), default=CONTENDERS)
    add_common(parser, rounds=9, turn_s=1.5)
    options = parser.parse_args()
    if REFERENCE not in options.contenders:
        options.contenders = (REFERENCE, *options.contenders)
    return options


if __name__ == "__main__":
    sys.exit(main())
