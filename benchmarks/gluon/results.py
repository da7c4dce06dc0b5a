"""A run's results: as a table on the screen, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forms import FormsResult
from rich.console import Console
from targets import PAIRS, REFERENCE

from harness import Spread
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

TITLE = "Speed against one core, and the time of a step in the explicit form"


@dataclass
class Results:
    """All that a run measured, in the order of measuring.

    Attributes:
        environment: what it was measured on, by name.
        settings: how it was measured, by name.
        forms: one for each workload.
        failures: what could not be measured, and why.
    """

    environment: dict[str, str]
    settings: dict[str, str]
    forms: list[FormsResult] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def verdicts(self) -> list[Verdict]:
        return [verdict for result in self.forms for verdict in result.verdicts()]

    def warnings(self) -> list[str]:
        return [warning for result in self.forms for warning in result.warnings()]

    def print(self, console: Console) -> None:
        if self.forms:
            console.print(rich_table(TITLE, rows(self.forms)))
        if self.verdicts():
            console.print(rich_table("Targets", verdict_rows(self.verdicts())))
        for warning in self.warnings():
            console.print(f"WARNING: {warning}", style="yellow")
        for failure in self.failures:
            console.print(f"FAILED: {failure}", style="red", markup=False)

    def write(self, folder: Path) -> Path:
        """Writes the Markdown and the JSON file; returns the first one's path."""
        return write(folder, "gluon", self.environment, self.to_markdown(), self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "settings": self.settings,
            "forms": {result.workload: result.to_json() for result in self.forms},
            "targets": verdicts_json(self.verdicts()),
            "warnings": self.warnings(),
            "failures": self.failures,
        }

    def to_markdown(self) -> str:
        parts = ["# evener's explicit style", "## Result"]
        if self.forms:
            parts += [
                f"{TITLE}, in the same round: median (lowest..highest).",
                markdown(rows(self.forms)),
            ]
        if self.verdicts():
            parts += ["Targets:", markdown(verdict_rows(self.verdicts()))]
        parts += [bullets(f"Warning: {warning}" for warning in self.warnings())]
        parts += [bullets(f"Failed: {failure.splitlines()[0]}" for failure in self.failures)]
        parts += [section("Environment", self.environment)]
        parts += [section("To Reproduce", self.settings)]
        return "\n\n".join(part for part in parts if part) + "\n"


def rows(forms: Sequence[FormsResult]) -> Rows:
    """The heading and one row for each workload."""
    names = [name for name in CONTENDERS if name in forms[0].steps_per_s and name != REFERENCE]
    pairs = [(own, other) for own, other in PAIRS.items() if {own, other} <= {*names}]
    heading = ["workload", f"{CONTENDERS[REFERENCE]}, steps/s"]
    heading += [CONTENDERS[name] for name in names]
    heading += [f"step of {CONTENDERS[own]} / {CONTENDERS[other]}" for own, other in pairs]
    found: Rows = [heading]
    for result in forms:
        row = [result.workload, str(Spread.of(result.steps_per_s[REFERENCE]))]
        row += [str(result.against_one_core(name)) for name in names]
        row += [str(result.times(own, other)) for own, other in pairs]
        found.append(row)
    return found
