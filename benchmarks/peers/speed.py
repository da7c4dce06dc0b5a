"""Steps per second of every contender on a workload, in alternation. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from targets import (
    AGAINST_PEERS,
    BATCH_NORM,
    BATCH_NORM_TOLERANCE,
    CONTENDERS,
    PEERS,
    REFERENCE,
    SPEED,
    TOLERANCE,
    Verdict,
)

from harness import ContenderError, Group, Spread
from rounds import Turns, take_rounds, warm_up

WORKER = Path(__file__).with_name("worker.py")
# Enough for momentum to matter; every step of every contender is compared.
NUM_CHECKED = 4
START_LIMIT_S = 300.0
# More than this and the figures of a workload are not to be trusted.
MAX_IDLE_CORES = 0.05
MAX_FOREIGN_CORES = 0.1


@dataclass(frozen=True)
class Start:
    """What a contender trained in its first steps, for the comparison with the others."""

    losses: list[float]
    moved: float


@dataclass(frozen=True)
class SpeedResult:
    """One workload: what every contender measured, round by round."""

    workload: str
    steps_per_s: dict[str, list[float]]
    starts: dict[str, Start]
    idle_cores: dict[str, float]
    foreign_cores: float

    def ratios(self, contender: str, references: Sequence[str]) -> Spread:
        """Speed against the fastest of the references in the same round."""
        rounds = zip(
            self.steps_per_s[contender],
            *(self.steps_per_s[name] for name in references),
            strict=True,
        )
        return Spread.of([own / max(others) for own, *others in rounds])

    def against_best_peer(self) -> Spread | None:
        """The speed of evener against the fastest peer of each round, if all took part."""
        peers = [name for name in PEERS if name in self.steps_per_s]
        complete = {"evener", *PEERS} - {"ddp_tuned"} <= self.steps_per_s.keys()
        return self.ratios("evener", peers) if complete else None

    def absolute(self, contender: str) -> str:
        """Steps per second: median, lowest and highest."""
        return str(Spread.of(self.steps_per_s[contender]))

    def verdicts(self) -> list[Verdict]:
        """What can be said of the contenders that took part."""
        found = []
        if {"evener", REFERENCE} <= self.steps_per_s.keys():
            ratio = self.ratios("evener", [REFERENCE]).median
            what = f"{self.workload}: speed against one core"
            found.append(Verdict(what, ratio, SPEED[self.workload], at_least=True))
        best = self.against_best_peer()
        if best is not None:
            what = f"{self.workload}: speed against the best peer"
            found.append(Verdict(what, best.median, AGAINST_PEERS[self.workload], at_least=True))
        return found

    def warnings(self) -> list[str]:
        """Why the figures may be wrong."""
        found = [
            f"{self.workload}: {CONTENDERS[name]} kept {cores:.2f} cores busy while others ran"
            for name, cores in self.idle_cores.items()
            if cores > MAX_IDLE_CORES
        ]
        if self.foreign_cores > MAX_FOREIGN_CORES:
            cores = self.foreign_cores
            found.append(f"{self.workload}: other programs kept {cores:.2f} cores busy")
        return found

    def to_json(self) -> dict[str, Any]:
        ratios = {name: self.ratios(name, [REFERENCE]).to_json() for name in self.steps_per_s}
        best = self.against_best_peer()
        if best is not None:
            ratios["evener_against_best_peer"] = best.to_json()
        return {
            "steps_per_s": self.steps_per_s,
            "ratios": ratios,
            "first_losses": {n: start.losses for n, start in self.starts.items()},
            "moved": {n: start.moved for n, start in self.starts.items()},
            "idle_cores": self.idle_cores,
            "foreign_cores": self.foreign_cores,
        }


def start_group(
    contender: str,
    workload: str,
    cores: Sequence[int],
    *,
    loss_inside: bool = False,
    num_checked: int = NUM_CHECKED,
) -> Group:
    """Starts a contender's processes on these cores: one in all, or one for each core.

    They begin with `num_checked` steps that `hear_start` tells of.
    """
    num_ranks = len(cores) if contender in PEERS else 1
    task = {
        "role": "train",
        "contender": contender,
        "workload": workload,
        "num_ranks": num_ranks,
        "num_checked": num_checked,
        "loss_inside": loss_inside,
    }
    tasks = [task | {"rank": rank} for rank in range(num_ranks)]
    if contender in PEERS:
        allowed = [[core] for core in cores]
    else:
        allowed = [list(cores[:1] if contender == REFERENCE else cores)]
    return Group(CONTENDERS[contender], WORKER, tasks, allowed)


def hear_start(group: Group) -> Start:
    """The first losses over the whole batch: the mean over the processes' equal parts."""
    answers = group.hear(START_LIMIT_S)
    columns = zip(*(answer["losses"] for answer in answers), strict=True)
    return Start([sum(losses) / len(losses) for losses in columns], answers[0]["moved"])


def check_same_training(workload: str, starts: dict[str, Start]) -> None:
    """Compares every contender with the first one.

    Raises:
        ContenderError: if a contender trained something else.
    """
    tolerance = BATCH_NORM_TOLERANCE if workload in BATCH_NORM else TOLERANCE
    (first, expected), *others = starts.items()
    for name, start in others:
        pairs = zip([*start.losses, start.moved], [*expected.losses, expected.moved], strict=True)
        # Not "any greater": a loss that is not a number is a difference, too.
        if not all(abs(own - other) <= tolerance * abs(other) for own, other in pairs):
            raise ContenderError(
                f"{CONTENDERS[name]} trains something else than {CONTENDERS[first]} on {workload}:"
                f" {start} against {expected}, with a relative tolerance of {tolerance:g}"
            )


def measure_speed(
    workload: str,
    contenders: Sequence[str],
    cores: Sequence[int],
    *,
    num_rounds: int,
    turn_s: float,
    loss_inside: bool,
) -> SpeedResult:
    """Starts, warms up and compares the contenders, then lets them take turns.

    Raises:
        ContenderError: if one of them fails or trains something else than the others.
    """
    starts: dict[str, Start] = {}
    turns: dict[str, Turns] = {}
    with ExitStack() as running:
        for name in contenders:
            group = start_group(name, workload, cores, loss_inside=loss_inside)
            running.enter_context(group)
            starts[name] = hear_start(group)
            turns[name] = Turns(group, warm_up(group, turn_s / 2))
        check_same_training(workload, starts)
        take_rounds(list(turns.values()), num_rounds, turn_s)
    idle = {n: sum(t.idle_cores) / len(t.idle_cores) for n, t in turns.items() if t.idle_cores}
    foreign = [cores for turn in turns.values() for cores in turn.foreign_cores]
    return SpeedResult(
        workload,
        {name: turn.steps_per_s for name, turn in turns.items()},
        starts,
        idle,
        Spread.of(foreign).median,
    )
