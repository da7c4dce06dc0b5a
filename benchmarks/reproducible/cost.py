"""The time of a step in the cells of a grid, against that without one. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from harness import Spread
from rounds import Loads, Turns, take_rounds, warm_up
from start import BATCH_NORM, CONTENDERS, check_same_training, hear_start, start_group

ONE_CORE, NORMAL = "one_core", "evener_auto"
GRIDS = ("evener_grid4", "evener_grid16")


@dataclass(frozen=True)
class CostResult:
    """One workload: what every contender measured, round by round."""

    workload: str
    steps_per_s: dict[str, list[float]]
    loads: Loads

    def against_one_core(self, name: str) -> Spread:
        """Speed against one core in the same round."""
        return _ratios(self.steps_per_s[name], self.steps_per_s[ONE_CORE])

    def time(self, grid: str) -> Spread:
        """The time of a step with a grid against that without, in the same round."""
        return _ratios(self.steps_per_s[NORMAL], self.steps_per_s[grid])

    def warnings(self) -> list[str]:
        """Why the figures may be wrong."""
        return [f"{self.workload}: {warning}" for warning in self.loads.warnings(CONTENDERS)]

    def to_json(self) -> dict[str, Any]:
        return {
            "steps_per_s": self.steps_per_s,
            "against_one_core": {
                name: self.against_one_core(name).to_json() for name in self.steps_per_s
            },
            "time": {grid: self.time(grid).to_json() for grid in GRIDS},
            **asdict(self.loads),
        }


def measure_cost(
    workload: str, cores: Sequence[int], *, num_rounds: int, turn_s: float
) -> CostResult:
    """Starts, warms up and compares the contenders, then lets them take turns.

    Raises:
        ContenderError: if one of them fails or trains something else than the others.
    """
    starts, turns = {}, {}
    with ExitStack() as running:
        for name in (ONE_CORE, NORMAL, *GRIDS):
            group = running.enter_context(start_group(name, workload, cores))
            starts[CONTENDERS[name]] = hear_start(group)
            turns[name] = Turns(group, warm_up(group, turn_s / 2))
        if workload not in BATCH_NORM:  # which is of each cell: another training
            check_same_training(workload, starts)
        take_rounds(list(turns.values()), num_rounds, turn_s)
    steps_per_s = {name: turn.steps_per_s for name, turn in turns.items()}
    return CostResult(workload, steps_per_s, Loads.of(turns))


def _ratios(values: Sequence[float], references: Sequence[float]) -> Spread:
    return Spread.of([own / other for own, other in zip(values, references, strict=True)])
