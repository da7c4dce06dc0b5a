"""A run's results: as tables on the screen, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lost import PARTS, LostResult
from rich.console import Console

from harness import Spread
from tables import Rows, bullets, markdown, rich_table, section, write

TITLE = "Seconds lost by one death"
PARTS_TITLE = "Where they went"


@dataclass
class Results:
    """All that a run measured.

    Attributes:
        environment: what it was measured on, by name.
        settings: how it was measured, by name.
        lost: one for each contestant.
        failures: what could not be measured, and why.
    """

    environment: dict[str, str]
    settings: dict[str, str]
    lost: list[LostResult] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def warnings(self) -> list[str]:
        return [warning for result in self.lost for warning in result.warnings()]

    def print(self, console: Console) -> None:
        if self.lost:
            console.print(rich_table(TITLE, rows(self.lost)))
            console.print(rich_table(PARTS_TITLE, part_rows(self.lost)))
        for warning in self.warnings():
            console.print(f"WARNING: {warning}", style="yellow")
        for failure in self.failures:
            console.print(f"FAILED: {failure}", style="red", markup=False)

    def write(self, folder: Path) -> Path:
        """Writes the Markdown and the JSON file; returns the first one's path."""
        return write(folder, "recovery", self.environment, self.to_markdown(), self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "settings": self.settings,
            "lost": {result.title: result.to_json() for result in self.lost},
            "warnings": self.warnings(),
            "failures": self.failures,
        }

    def to_markdown(self) -> str:
        parts = ["# What one death costs", "## Result"]
        if self.lost:
            parts += [
                f"{TITLE}, against the same round without: median (lowest..highest).",
                markdown(rows(self.lost)),
                f"{PARTS_TITLE}, in seconds: median (lowest..highest).",
                markdown(part_rows(self.lost)),
            ]
        parts += [bullets(f"Warning: {warning}" for warning in self.warnings())]
        parts += [bullets(f"Failed: {failure.splitlines()[0]}" for failure in self.failures)]
        parts += [section("Environment", self.environment)]
        parts += [section("To Reproduce", self.settings)]
        return "\n\n".join(part for part in parts if part) + "\n"


def rows(lost: Sequence[LostResult]) -> Rows:
    """The heading and one row for each contestant."""
    heading = ["", "undisturbed, s", "lost, s", "steps repeated", "steps with one device less"]
    heading += ["model as undisturbed", "undisturbed ones alike"]
    found: Rows = [heading]
    for result in lost:
        same, same_undisturbed = result.as_undisturbed()
        num = len(result.rounds)
        num_others = sum(len(round_.undisturbed) for round_ in result.rounds) - 1
        row = [result.title, str(result.undisturbed_s()), str(result.lost_s())]
        row += [_whole(result.repeated()), _whole(result.not_full())]
        row += [f"{same} of {num}", f"{same_undisturbed} of {num_others}"]
        found.append(row)
    return found


def part_rows(lost: Sequence[LostResult]) -> Rows:
    """The heading and one row for each contestant."""
    found: Rows = [["", *PARTS.values(), "cost_s in evener's report"]]
    for result in lost:
        cost_s = result.cost_s()
        parts = [str(result.part_s(name)) for name in PARTS]
        found.append([result.title, *parts, "" if cost_s is None else str(cost_s)])
    return found


def _whole(spread: Spread) -> str:
    return f"{spread.median:g} ({spread.low:g}..{spread.high:g})"
