"""The time of a step in the explicit and in the transparent form, in alternation; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from targets import AGAINST_TRANSPARENT, JUDGED, PAIRS, REFERENCE

from harness import Spread
from rounds import Loads, Turns, take_rounds, warm_up
from start import CONTENDERS, check_same_training, hear_start, start_group
from tables import Verdict


@dataclass(frozen=True)
class FormsResult:
    """One workload: what every contender measured, round by round."""

    workload: str
    steps_per_s: dict[str, list[float]]
    loads: Loads

    def pairs(self) -> list[tuple[str, str]]:
        """The explicit forms that took part, each with its transparent one."""
        there = self.steps_per_s.keys()
        return [(own, other) for own, other in PAIRS.items() if {own, other} <= there]

    def against_one_core(self, name: str) -> Spread:
        """Speed against one core in the same round."""
        return _ratios(self.steps_per_s[name], self.steps_per_s[REFERENCE])

    def times(self, explicit: str, transparent: str) -> Spread:
        """The time of a step in one form against that in the other, in the same round."""
        return _ratios(self.steps_per_s[transparent], self.steps_per_s[explicit])

    def verdicts(self) -> list[Verdict]:
        found = []
        for explicit, transparent in self.pairs():
            if explicit != JUDGED:
                continue
            what = f"{self.workload}: step of {CONTENDERS[explicit]}"
            what += f" against {CONTENDERS[transparent]}"
            ratio = self.times(explicit, transparent).median
            found.append(Verdict(what, ratio, AGAINST_TRANSPARENT, at_least=False))
        return found

    def warnings(self) -> list[str]:
        """Why the figures may be wrong."""
        return [f"{self.workload}: {warning}" for warning in self.loads.warnings(CONTENDERS)]

    def to_json(self) -> dict[str, Any]:
        return {
            "steps_per_s": self.steps_per_s,
            "against_one_core": {
                name: self.against_one_core(name).to_json() for name in self.steps_per_s
            },
            "times": {
                explicit: self.times(explicit, other).to_json() for explicit, other in self.pairs()
            },
            **asdict(self.loads),
        }


def measure_forms(
    workload: str,
    contenders: Sequence[str],
    cores: Sequence[int],
    *,
    num_rounds: int,
    turn_s: float,
) -> FormsResult:
    """Starts, warms up and compares the contenders, then lets them take turns.

    Raises:
        ContenderError: if one of them fails or trains something else than the others.
    """
    starts, turns = {}, {}
    with ExitStack() as running:
        for name in contenders:
            group = running.enter_context(start_group(name, workload, cores))
            starts[CONTENDERS[name]] = hear_start(group)
            turns[name] = Turns(group, warm_up(group, turn_s / 2))
        check_same_training(workload, starts)
        take_rounds(list(turns.values()), num_rounds, turn_s)
    steps_per_s = {name: turn.steps_per_s for name, turn in turns.items()}
    return FormsResult(workload, steps_per_s, Loads.of(turns))


def _ratios(values: Sequence[float], references: Sequence[float]) -> Spread:
    return Spread.of([own / other for own, other in zip(values, references, strict=True)])
