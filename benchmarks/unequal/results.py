"""A run's results: as a table on the screen, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from slowed import AUTO, FAST, SLOW, TITLES, SlowedResult

from harness import Spread
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

TITLE = "Speed against the fast core alone"


@dataclass
class Results:
    """All that a run measured, in the order of measuring.

    Attributes:
        environment: what it was measured on, by name.
        settings: how it was measured, by name.
        slowed: one for each workload and speed.
        failures: what could not be measured, and why.
    """

    environment: dict[str, str]
    settings: dict[str, str]
    slowed: list[SlowedResult] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def verdicts(self) -> list[Verdict]:
        return [verdict for result in self.slowed for verdict in result.verdicts()]

    def warnings(self) -> list[str]:
        return [warning for result in self.slowed for warning in result.warnings()]

    def print(self, console: Console) -> None:
        if self.slowed:
            console.print(rich_table(TITLE, rows(self.slowed)))
        if self.verdicts():
            console.print(rich_table("Targets", verdict_rows(self.verdicts())))
        for warning in self.warnings():
            console.print(f"WARNING: {warning}", style="yellow")
        for failure in self.failures:
            console.print(f"FAILED: {failure}", style="red", markup=False)

    def write(self, folder: Path) -> Path:
        """Writes the Markdown and the JSON file; returns the first one's path."""
        return write(folder, "unequal", self.environment, self.to_markdown(), self.to_json())

    def to_json(self) -> dict[str, Any]:
        slowed: dict[str, dict[str, Any]] = {}
        for result in self.slowed:
            slowed.setdefault(result.workload, {})[f"{result.speed:g}"] = result.to_json()
        return {
            "environment": self.environment,
            "settings": self.settings,
            "slowed": slowed,
            "targets": verdicts_json(self.verdicts()),
            "warnings": self.warnings(),
            "failures": self.failures,
        }

    def to_markdown(self) -> str:
        parts = ["# evener on unequal cores", "## Result"]
        if self.slowed:
            parts += [
                f"{TITLE} in the same round: median (lowest..highest).",
                "The ideal is the fast core's speed and the slow core's, each alone, added up.",
                markdown(rows(self.slowed)),
            ]
        if self.verdicts():
            parts += ["Targets:", markdown(verdict_rows(self.verdicts()))]
        parts += [bullets(f"Warning: {warning}" for warning in self.warnings())]
        parts += [bullets(f"Failed: {failure.splitlines()[0]}" for failure in self.failures)]
        parts += [section("Environment", self.environment)]
        parts += [section("To Reproduce", self.settings)]
        return "\n\n".join(part for part in parts if part) + "\n"


def rows(slowed: Sequence[SlowedResult]) -> Rows:
    """The heading and one row for each workload and speed."""
    names = [name for name in TITLES if name in slowed[0].steps_per_s and name not in (FAST, SLOW)]
    heading = ["workload", "slow core at", "the fast core, steps/s", TITLES[SLOW]]
    heading += [*(TITLES[name] for name in names), "ideal"]
    if AUTO in names:
        heading.append(f"{TITLES[AUTO]}, part of the ideal")
    found: Rows = [heading]
    for result in slowed:
        row = [result.workload, f"{result.speed:g}", str(Spread.of(result.steps_per_s[FAST]))]
        columns = [*(result.steps_per_s[name] for name in (SLOW, *names)), result.ideal]
        row += [str(result.against_fast(column)) for column in columns]
        if AUTO in names:
            row.append(str(result.of_ideal(AUTO)))
        found.append(row)
    return found
