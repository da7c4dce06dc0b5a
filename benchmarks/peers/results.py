"""A run's results: as a table on the screen, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from costs import FirstStepResult, MemoryResult, OneDeviceResult
from rich.console import Console
from speed import SpeedResult
from targets import REFERENCE

from start import CONTENDERS
from tables import (
    Rows,
    Verdict,
    bullets,
    markdown,
    rich_table,
    section,
    verdict_rows,
    verdicts_json,
    write,
)

Cost = FirstStepResult | OneDeviceResult | MemoryResult


@dataclass
class Results:
    """All that a run measured, in the order of measuring.

    Attributes:
        environment: what it was measured on, by name.
        settings: how it was measured, by name.
        speeds: one for each workload.
        costs: by the name of the question.
        failures: what could not be measured, and why.
    """

    environment: dict[str, str]
    settings: dict[str, str]
    speeds: list[SpeedResult] = field(default_factory=list)
    costs: dict[str, Cost] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def verdicts(self) -> list[Verdict]:
        measured: list[SpeedResult | Cost] = [*self.speeds, *self.costs.values()]
        return [verdict for result in measured for verdict in result.verdicts()]

    def warnings(self) -> list[str]:
        return [warning for speed in self.speeds for warning in speed.warnings()]

    def print(self, console: Console) -> None:
        if self.speeds:
            console.print(rich_table("Speed against one core", speed_rows(self.speeds)))
        for cost in self.costs.values():
            for line in cost.lines():
                console.print(line)
        if self.verdicts():
            console.print(rich_table("Targets", verdict_rows(self.verdicts())))
        for warning in self.warnings():
            console.print(f"WARNING: {warning}", style="yellow")
        for failure in self.failures:
            console.print(f"FAILED: {failure}", style="red", markup=False)

    def write(self, folder: Path) -> Path:
        """Writes the Markdown and the JSON file; returns the first one's path."""
        return write(folder, "peers", self.environment, self.to_markdown(), self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "settings": self.settings,
            "speed": {speed.workload: speed.to_json() for speed in self.speeds},
            **{name: cost.to_json() for name, cost in self.costs.items()},
            "targets": verdicts_json(self.verdicts()),
            "warnings": self.warnings(),
            "failures": self.failures,
        }

    def to_markdown(self) -> str:
        parts = ["# evener and its peers", "## Result"]
        if self.speeds:
            parts += [
                "Speed against one core in the same round: median (lowest..highest).",
                markdown(speed_rows(self.speeds)),
            ]
        parts += [bullets(line for cost in self.costs.values() for line in cost.lines())]
        if self.verdicts():
            parts += ["Targets:", markdown(verdict_rows(self.verdicts()))]
        parts += [bullets(f"Warning: {warning}" for warning in self.warnings())]
        parts += [bullets(f"Failed: {failure.splitlines()[0]}" for failure in self.failures)]
        parts += [section("Environment", self.environment)]
        parts += [section("To Reproduce", self.settings)]
        return "\n\n".join(part for part in parts if part) + "\n"


def speed_rows(speeds: Sequence[SpeedResult]) -> Rows:
    """The heading and one row for each workload."""
    names = [name for name in CONTENDERS if name in speeds[0].steps_per_s and name != REFERENCE]
    heading = ["workload", "one core, steps/s", *(CONTENDERS[name] for name in names)]
    rows: Rows = [[*heading, "evener against best peer"]]
    for speed in speeds:
        row = [speed.workload, speed.absolute(REFERENCE)]
        row += [str(speed.ratios(name, [REFERENCE])) for name in names]
        rows.append([*row, str(speed.against_best_peer() or "")])
    return rows
