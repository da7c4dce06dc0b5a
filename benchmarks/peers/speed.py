"""Steps per second of every contender on a workload, in alternation. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from targets import AGAINST_PEERS, REFERENCE, SPEED

from harness import Spread
from rounds import Loads, Turns, take_rounds, warm_up
from start import CONTENDERS, PEERS, Start, check_same_training, hear_start, start_group
from tables import Verdict


@dataclass(frozen=True)
class SpeedResult:
    """One workload: what every contender measured, round by round."""

    workload: str
    steps_per_s: dict[str, list[float]]
    starts: dict[str, Start]
    loads: Loads

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
        titles = {name: CONTENDERS[name] for name in self.steps_per_s}
        return [f"{self.workload}: {warning}" for warning in self.loads.warnings(titles)]

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
            **asdict(self.loads),
        }


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
        check_same_training(workload, {CONTENDERS[name]: start for name, start in starts.items()})
        take_rounds(list(turns.values()), num_rounds, turn_s)
    steps_per_s = {name: turn.steps_per_s for name, turn in turns.items()}
    return SpeedResult(workload, steps_per_s, starts, Loads.of(turns))
