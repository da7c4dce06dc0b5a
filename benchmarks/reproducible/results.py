"""A run's results: as tables on the screen, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bits import GRID, BitsResult
from cost import GRIDS, NORMAL, ONE_CORE, CostResult
from rich.console import Console

from harness import Spread
from start import CONTENDERS
from tables import Rows, bullets, markdown, rich_table, section, write

BITS_TITLE = "SHA-256 of parameters and buffers after training"
COST_TITLE = "Speed against one core, and the time of a step with a grid against that without"


@dataclass
class Results:
    """All that a run measured, in the order of measuring.

    Attributes:
        environment: what it was measured on, by name.
        settings: how it was measured, by name.
        bits: one for each workload whose trainings were compared.
        costs: one for each workload that was timed.
        errors: what could not be measured, and why.
    """

    environment: dict[str, str]
    settings: dict[str, str]
    bits: list[BitsResult] = field(default_factory=list)
    costs: list[CostResult] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """What could not be measured, or is not as it is to be."""
        return self.errors + [failure for result in self.bits for failure in result.failures()]

    def warnings(self) -> list[str]:
        return [warning for result in self.costs for warning in result.warnings()]

    def print(self, console: Console) -> None:
        if self.bits:
            console.print(rich_table(BITS_TITLE, bits_rows(self.bits, length=16)))
        if self.costs:
            console.print(rich_table(COST_TITLE, cost_rows(self.costs)))
        for warning in self.warnings():
            console.print(f"WARNING: {warning}", style="yellow")
        for failure in self.failures:
            console.print(f"FAILED: {failure}", style="red", markup=False)

    def write(self, folder: Path) -> Path:
        """Writes the Markdown and the JSON file; returns the first one's path."""
        return write(folder, "reproducible", self.environment, self.to_markdown(), self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "settings": self.settings,
            "digests": {result.workload: result.digests for result in self.bits},
            "costs": {result.workload: result.to_json() for result in self.costs},
            "warnings": self.warnings(),
            "failures": self.failures,
        }

    def to_markdown(self) -> str:
        parts = ["# The same bits on any devices, and what that costs", "## Result"]
        if self.bits:
            parts += [
                f"{BITS_TITLE}, in {GRID} cells but for the last two rows:",
                markdown(bits_rows(self.bits)),
            ]
        if self.costs:
            parts += [
                f"{COST_TITLE}, in the same round: median (lowest..highest).",
                markdown(cost_rows(self.costs)),
            ]
        parts += [bullets(f"Warning: {warning}" for warning in self.warnings())]
        parts += [bullets(f"Failed: {failure.splitlines()[0]}" for failure in self.failures)]
        parts += [section("Environment", self.environment)]
        parts += [section("To Reproduce", self.settings)]
        return "\n\n".join(part for part in parts if part) + "\n"


def bits_rows(bits: Sequence[BitsResult], length: int | None = None) -> Rows:
    """The heading and one row for each training."""
    found: Rows = [["training", *(f"{each.workload}, {each.num_steps} steps" for each in bits)]]
    for title in bits[0].digests:
        found.append([title, *(each.digests[title][:length] for each in bits)])
    return found


def cost_rows(costs: Sequence[CostResult]) -> Rows:
    """The heading and one row for each workload."""
    heading = ["workload", f"{CONTENDERS[ONE_CORE]}, steps/s"]
    heading += [CONTENDERS[name] for name in (NORMAL, *GRIDS)]
    heading += [f"step of {CONTENDERS[grid]} / {CONTENDERS[NORMAL]}" for grid in GRIDS]
    found: Rows = [heading]
    for result in costs:
        row = [result.workload, str(Spread.of(result.steps_per_s[ONE_CORE]))]
        row += [str(result.against_one_core(name)) for name in (NORMAL, *GRIDS)]
        row += [str(result.time(grid)) for grid in GRIDS]
        found.append(row)
    return found
