"""Steps per second of every contender beside a neighbour on one core. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from targets import AGAINST_FAST, HALF, OF_IDEAL

from harness import Group, Spread
from rounds import Loads, Turns, run_steps, take_rounds, warm_up
from start import (
    CONTENDERS,
    START_LIMIT_S,
    WORKER,
    Start,
    check_same_training,
    hear_start,
    start_group,
)
from tables import Verdict

FAST, SLOW, AUTO = "fast", "slow", "evener_auto"
# The first two are one core alone, each its own.
TITLES = {FAST: "the fast core", SLOW: "the slow core"} | {
    name: title for name, title in CONTENDERS.items() if name != "one_core"
}
# A slow core that is by more than this part faster or slower than asked for is told.
MAX_OFF = 0.15


@dataclass(frozen=True)
class SlowedResult:
    """One workload beside one neighbour: what every contender measured, round by round."""

    workload: str
    speed: float
    steps_per_s: dict[str, list[float]]
    loads: Loads

    @property
    def ideal(self) -> list[float]:
        """The steps per second of both cores alone, added up, of each round."""
        return [f + s for f, s in zip(self.steps_per_s[FAST], self.steps_per_s[SLOW], strict=True)]

    def against_fast(self, steps_per_s: Sequence[float]) -> Spread:
        """Speeds against that of the fast core in the same round."""
        return _ratios(steps_per_s, self.steps_per_s[FAST])

    def of_ideal(self, name: str) -> Spread:
        """A contender's speed as a part of the ideal of the same round."""
        return _ratios(self.steps_per_s[name], self.ideal)

    def verdicts(self) -> list[Verdict]:
        if AUTO not in self.steps_per_s:
            return []
        where = f"{self.workload}, slow core at {self.speed:g}: {TITLES[AUTO]}"
        ratio = self.against_fast(self.steps_per_s[AUTO]).median
        found = [Verdict(f"{where} against the fast core", ratio, AGAINST_FAST, at_least=True)]
        if self.speed == HALF and self.workload in OF_IDEAL:
            part, target = self.of_ideal(AUTO).median, OF_IDEAL[self.workload]
            found.append(Verdict(f"{where}, part of the ideal", part, target, at_least=True))
        return found

    def warnings(self) -> list[str]:
        """Why the figures may be wrong."""
        found = self.loads.warnings(TITLES)
        is_at = self.against_fast(self.steps_per_s[SLOW]).median
        if abs(is_at / self.speed - 1) > MAX_OFF:
            found.append(f"the slow core has {is_at:.2f} of the fast core's speed")
        return [f"{self.workload}, slow core at {self.speed:g}: {warning}" for warning in found]

    def to_json(self) -> dict[str, Any]:
        return {
            "steps_per_s": self.steps_per_s,
            "ideal": self.ideal,
            "against_fast": {
                name: self.against_fast(own).to_json() for name, own in self.steps_per_s.items()
            },
            "of_ideal": {name: self.of_ideal(name).to_json() for name in self.steps_per_s},
            **asdict(self.loads),
        }


def measure_slowed(
    workload: str,
    contenders: Sequence[str],
    cores: Sequence[int],
    speeds: Sequence[float],
    *,
    num_rounds: int,
    turn_s: float,
    num_settling: int,
) -> list[SlowedResult]:
    """Lets the contenders take turns beside one neighbour after the other.

    All start and warm up on two equal cores. Then, for each of the speeds, a neighbour comes to
    the second core, and everybody first takes some steps that are not timed.

    Args:
        workload: what they train.
        contenders: their names, those of both cores alone among them.
        cores: the fast one and the slow one.
        speeds: what the neighbour leaves of the slow core's speed, one neighbour for each.
        num_rounds: how many rounds for each of the speeds.
        turn_s: how long a turn takes.
        num_settling: how many steps are not timed after a neighbour has come.

    Raises:
        ContenderError: if one of them fails or trains something else than the others.
    """
    groups: dict[str, Group] = {}
    starts: dict[str, Start] = {}
    found = []
    with ExitStack() as running:
        for name in contenders:
            groups[name] = running.enter_context(_start(name, workload, cores))
            starts[TITLES[name]] = hear_start(groups[name])
            warm_up(groups[name], turn_s / 2)
        check_same_training(workload, starts)
        task = {"role": "neighbour"}
        neighbour = running.enter_context(Group("the neighbour", WORKER, [task], [cores[1:]]))
        neighbour.hear(START_LIMIT_S)
        for speed in speeds:
            neighbour.ask({"speed": speed}, START_LIMIT_S)
            turns = {
                name: Turns(group, 1 / run_steps(group, num_settling), beside=[neighbour])
                for name, group in groups.items()
            }
            take_rounds(list(turns.values()), num_rounds, turn_s)
            steps_per_s = {name: turn.steps_per_s for name, turn in turns.items()}
            found.append(SlowedResult(workload, speed, steps_per_s, Loads.of(turns)))
    return found


def _start(name: str, workload: str, cores: Sequence[int]) -> Group:
    if name in (FAST, SLOW):
        alone = cores[:1] if name == FAST else cores[1:]
        return start_group("one_core", workload, alone, title=TITLES[name])
    return start_group(name, workload, cores)


def _ratios(values: Sequence[float], references: Sequence[float]) -> Spread:
    return Spread.of([own / other for own, other in zip(values, references, strict=True)])
