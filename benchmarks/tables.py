"""Tables of results, on the screen and as Markdown, and what was reached."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from environment import slug

Rows = list[Sequence[str]]


@dataclass(frozen=True)
class Verdict:
    """A measured figure beside what it is to be: at least or at most the target."""

    what: str
    value: float
    target: float
    at_least: bool

    @property
    def reached(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target

    def row(self) -> tuple[str, str, str, str]:
        bound = f"{'≥' if self.at_least else '≤'} {self.target:g}"
        return self.what, f"{self.value:.3f}", bound, "pass" if self.reached else "FAIL"


def verdict_rows(verdicts: Sequence[Verdict]) -> Rows:
    return [["what", "measured", "target", "verdict"], *(v.row() for v in verdicts)]


def verdicts_json(verdicts: Sequence[Verdict]) -> list[dict[str, str]]:
    heading, *rows = verdict_rows(verdicts)
    return [dict(zip(heading, row, strict=True)) for row in rows]


def rich_table(title: str, rows: Rows) -> Table:
    table = Table(*rows[0], title=title)
    for row in rows[1:]:
        table.add_row(*row)
    return table


def markdown(rows: Rows) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def section(title: str, facts: Mapping[str, object]) -> str:
    """A heading, and a line for each fact."""
    return f"## {title}\n\n" + bullets(f"{name}: {fact}" for name, fact in facts.items())


def write(
    folder: Path, question: str, environment: dict[str, str], text: str, data: dict[str, Any]
) -> Path:
    """Writes a Markdown and a JSON file, named by machine and day; returns the first one's path.

    Args:
        folder: where; made if need be.
        question: what was measured, the beginning of the names.
        environment: what it was measured on, as `environment.describe` says it.
        text: the Markdown.
        data: what goes into the JSON file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processor = slug(f"{environment['processor']} {environment['cores'].split()[0]}")
    path = folder / f"{question}_{processor}cores_{environment['date']}.md"
    path.write_text(text)
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    return path
