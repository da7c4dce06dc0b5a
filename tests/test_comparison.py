import importlib.util
import io
import json
import math

import pytest
from rich.console import Console

from evener.devices import Device
from evener.textbook import comparison
from evener.textbook.record import Epoch, Run, Step

DEVICES = tuple(Device("cpu", i, (i,), 1024, "a CPU") for i in range(2))


def made(devices, epoch_s, losses, *, accuracy=0.8, uses_batch_norm=True):
    steps = [Step(i * epoch_s, loss, 100, 100 / epoch_s) for i, loss in enumerate(losses, 1)]
    epochs = [Epoch(i, epoch_s, 100 / epoch_s, accuracy) for i in range(1, len(losses) + 1)]
    own = (50.0, 0.8) if len(devices) > 1 else (None, None)
    return Run(tuple(devices), 1.25, uses_batch_norm, steps, epochs, *own)


@pytest.fixture(scope="module", autouse=True)
def first_plot(tmp_path_factory):
    """The first plot of a process opens files of fonts, which matplotlib keeps open."""
    if importlib.util.find_spec("matplotlib"):
        run = made(DEVICES[:1], 4.0, [2.5])
        comparison.plot([run], tmp_path_factory.mktemp("plot") / "loss.png")


@pytest.fixture
def runs():
    return [made(DEVICES[:1], 4.0, [2.5, 1.0]), made(DEVICES, 2.5, [2.5, 1.25], accuracy=0.75)]


def shown(runs, width=120):
    """The rows of the table, and all that stands in it."""
    console = Console(file=io.StringIO(), width=width)
    console.print(comparison.table(runs))
    text = console.file.getvalue()
    rows = [
        [cell.strip() for cell in line.strip("│ ").split("│")]
        for line in text.splitlines()
        if "│" in line
    ]
    return rows, text


def test_the_table(runs):
    rows, text = shown(runs)
    assert rows == [
        ["cpu:0", "4.00", "25", "-", "-", "-", "0.800", "-"],
        ["cpu:0 + cpu:1", "2.50", "40", "1.60", "50", "80%", "0.750", "2.5e-01"],
    ]
    for word in ("devices", "epoch", "images/", "speed-", "own", "reached", "acc", "diff."):
        assert word in text


def test_nothing_of_the_table_is_cut_in_a_terminal_of_80_columns(runs):
    _, text = shown(runs, width=80)
    assert "…" not in text
    assert "2.5e-01" in text


def test_the_table_of_one_run(runs):
    rows, _ = shown(runs[1:])
    assert rows == [["cpu:0 + cpu:1", "2.50", "40", "-", "50", "80%", "0.750", "-"]]


def test_the_notes_say_what_the_table_does_not(runs):
    notes = " ".join(comparison.notes(runs))
    assert "median" in notes
    assert "Starting the helpers took 1.2 sec" in notes
    assert "same step" in notes
    assert "batch norm" in notes
    assert "not reached" in notes


def test_no_note_without_its_reason(runs):
    without = [made(DEVICES[:1], 4.0, [2.5]), made(DEVICES, 2.5, [2.5], uses_batch_norm=False)]
    assert "batch norm" not in " ".join(comparison.notes(without))
    alone = " ".join(comparison.notes(runs[:1]))
    assert "batch norm" not in alone
    assert "helpers" not in alone
    assert "reached" not in alone
    assert "difference" not in alone


def test_as_json(runs):
    report = json.loads(json.dumps(comparison.as_json(runs), allow_nan=False))
    assert report["speedup"] == 1.6
    assert report["largest_loss_difference"] == 0.25
    assert [len(run["devices"]) for run in report["runs"]] == [1, 2]
    alone = comparison.as_json(runs[:1])
    assert (alone["speedup"], alone["largest_loss_difference"]) == (None, None)


def test_as_json_of_a_diverged_run(runs):
    report = comparison.as_json([runs[0], made(DEVICES, 2.5, [2.5, math.nan])])
    assert report["largest_loss_difference"] is None
    assert "NaN" not in json.dumps(report, allow_nan=False)


def test_the_plot_is_a_png_and_leaves_pyplot_alone(runs, tmp_path):
    pytest.importorskip("matplotlib")
    comparison.plot(runs, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    comparison.plot([made(DEVICES[:1], 4.0, [math.nan, math.nan])], tmp_path / "nan.png")
