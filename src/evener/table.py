"""The table of a report, as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

#: Characters of a line.
WIDTH = 100


def text(headings: Sequence[str], rows: Iterable[Sequence[str]], footer: Sequence[str]) -> str:
    """Lay out a table for whoever prints it.

    There are no colours, whatever the terminal, and there is no HTML in a notebook.

    Args:
        headings: one for each column: a label, a name, then numbers.
        rows: their cells.
        footer: the last row.
    """
    from rich.box import SIMPLE  # noqa: PLC0415 - only who prints needs it
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, show_footer=True)
    shown.add_column(headings[0], footer[0], no_wrap=True)
    # Of all columns only this one may shrink: a number that is cut says something else.
    shown.add_column(headings[1], footer[1], overflow="ellipsis")
    for heading, last in zip(headings[2:], footer[2:], strict=True):
        shown.add_column(heading, last, justify="right", no_wrap=True)
    for label, name, *numbers in rows:
        shown.add_row(label, Text(name, no_wrap=True, overflow="ellipsis"), *numbers)
    console = Console(
        file=io.StringIO(),
        width=WIDTH,
        force_terminal=False,
        force_jupyter=False,
        color_system=None,
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as captured:
        console.print(shown)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join(line for line in lines if line)
