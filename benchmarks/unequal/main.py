"""How well do two unequal cores train together? One has a neighbour; see README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # harness.py and its neighbours

from slowed import FAST, SLOW, TITLES, measure_slowed
from targets import SPEEDS, WORKLOADS

import environment
from options import add_common, attempt, end_in_order, make_console, names
from results import Results

PACKAGES = ("torch", "accelerate", "lightning-fabric")
DEFAULT_CONTENDERS = (FAST, SLOW, "ddp", "accelerate", "fabric", "evener_even", "evener_auto")
# After so many steps everybody, and what evener measures itself, is to have got used to a new
# neighbour.
NUM_SETTLING = 12


def main() -> int:
    """Runs what is asked for; returns 1 if anything could not be measured, else 0."""
    options = _options()
    cores = environment.physical_cores()[:2]
    if len(cores) < 2:
        raise SystemExit("two physical cores are needed, a fast one and a slow one")
    console = make_console()
    described = environment.describe(PACKAGES, len(cores))
    results = Results(described | {"autogroups": _autogroups()}, _settings(options))
    end_in_order()

    for workload in options.workloads:
        measure = partial(
            measure_slowed,
            workload,
            options.contenders,
            cores,
            options.speeds,
            num_rounds=options.rounds,
            turn_s=options.turn_s,
            num_settling=options.settling,
        )
        for found in attempt(workload, measure, console, results.failures):
            results.slowed += found

    results.print(console)
    if not options.no_write:
        console.print(f"written to {results.write(options.out)} and .json")
    return 1 if results.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", type=names(WORKLOADS), default=WORKLOADS)
    parser.add_argument("--speeds", type=_speeds, default=SPEEDS, help="such as 0.5,0.25")
    parser.add_argument("--contenders", type=names(tuple(TITLES)), default=DEFAULT_CONTENDERS)
    parser.add_argument(
        "--settling",
        type=int,
        default=NUM_SETTLING,
        help="steps that are not timed after a neighbour has come",
    )
    add_common(parser, rounds=7, turn_s=1.5)
    options = parser.parse_args()
    alone = [name for name in (FAST, SLOW) if name not in options.contenders]
    options.contenders = (*alone, *options.contenders)
    return options


def _speeds(text: str) -> tuple[float, ...]:
    try:
        speeds = tuple(map(float, text.split(",")))
    except ValueError:
        speeds = ()
    # The limits of evener.neighbour, which cannot be imported here without torch.
    if not speeds or not all(0.02 <= speed < 1 for speed in speeds):
        raise argparse.ArgumentTypeError(f"{text}: expected numbers from 0.02 to below 1")
    return speeds


def _settings(options: argparse.Namespace) -> dict[str, str]:
    return {
        "command": f"`python benchmarks/unequal/main.py {' '.join(sys.argv[1:])}`",
        "rounds": str(options.rounds),
        "seconds of a turn": f"{options.turn_s:g}",
        "steps not timed after a neighbour has come": str(options.settling),
    }


def _autogroups() -> str:
    """Whether the kernel groups processes by session, which makes the neighbour's part another."""
    path = Path("/proc/sys/kernel/sched_autogroup_enabled")
    return "on" if path.exists() and path.read_text().strip() == "1" else "off"


if __name__ == "__main__":
    sys.exit(main())
