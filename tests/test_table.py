"""The table of a report, as plain text; what it says is in ``test_report``."""

from __future__ import annotations

from evener.table import WIDTH, text

HEADINGS = ["device", "name", "share", "busy\ns"]


def test_a_name_is_cut_and_a_number_is_not() -> None:
    number = 30 * "7"

    lines = text(HEADINGS, [["cpu:0", 90 * "n", "3", number]], ["all", "", "3", number]).split(
        "\n"
    )

    assert max(map(len, lines)) <= WIDTH
    assert sum(number in line for line in lines) == 2
    assert "…" in lines[3]


def test_what_looks_like_markup_stays_as_it_is() -> None:
    lines = text(HEADINGS, [["cpu:0", "[bold]:smile:", "3", "1"]], ["all", "", "3", "1"]).split(
        "\n"
    )

    assert "[bold]:smile:" in lines[3]
    assert lines[0].split() == ["busy"]
    assert lines[1].split() == ["device", "name", "share", "s"]
