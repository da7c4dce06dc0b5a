"""The comparison: what runs of one training on different devices say together.

The first run is what the others are compared with. All runs must have had the same settings: then
they saw the same batches, and the losses of a step are losses of the same images.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from evener.textbook.record import finite_or_none

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.table import Table

    from evener.textbook.record import Run

__all__ = ["as_json", "notes", "plot", "table"]


def table(runs: Sequence[Run]) -> Table:
    """Give one row for each run, for a terminal."""
    from rich.table import Table  # noqa: PLC0415 - only who prints needs it

    shown = Table("devices")
    # In lines of their own, so that all fits a terminal of 80 columns.
    for heading in (
        *("sec/\nepoch", "images/\nsec", "speed-\nup", "own\nspeeds", "reached"),
        *("test\nacc", "largest\nloss\ndiff."),
    ):
        shown.add_column(heading, justify="right")
    for run in runs:
        compared = run is not runs[0]
        shown.add_row(
            " + ".join(device.label for device in run.devices),
            f"{run.epoch_s:.2f}",
            f"{run.images_per_s:.0f}",
            f"{run.speedup_over(runs[0]):.2f}" if compared else "-",
            "-" if run.own_images_per_s is None else f"{run.own_images_per_s:.0f}",
            "-" if run.reached is None else f"{run.reached:.0%}",
            f"{run.test_accuracy:.3f}",
            f"{run.largest_loss_difference(runs[0]):.1e}" if compared else "-",
        )
    return shown


def notes(runs: Sequence[Run]) -> Iterator[str]:
    """Say what the reader of the table must know, one sentence or two each."""
    last = runs[-1]
    yield "Seconds are those of the median epoch, testing not counted."
    if len(last.devices) > 1:
        yield f"Starting the helpers took {last.start_s:.1f} sec, also not counted."
    if last.reached is not None:
        yield (
            "The own speed of a device is images by the seconds of its own forward and backward: "
            "what is not reached is the loss, the optimizer, the exchange and the waiting."
        )
    if len(runs) > 1:
        yield "The loss difference is that between the two runs at the same step."
    if len(runs) > 1 and last.uses_batch_norm:
        yield (
            "The model has batch norm, and each device takes mean and variance of its own share of"
            " a batch: the losses of the two runs differ by more than rounding."
        )


def as_json(runs: Sequence[Run]) -> dict[str, Any]:
    """Give the runs, and the last one compared with the first, as plain lists and dicts."""
    first, last = runs[0], runs[-1]
    compared = len(runs) > 1
    return {
        "runs": [run.as_json() for run in runs],
        "speedup": last.speedup_over(first) if compared else None,
        "largest_loss_difference": (
            finite_or_none(last.largest_loss_difference(first)) if compared else None
        ),
    }


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draw loss against time for each run, as a PNG file.

    Each loss is a thin line, their mean over the last batches a thick one.

    Args:
        runs: complete runs.
        path: the file to write.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    # Not pyplot: a figure of our own leaves the user's figures and the choice of screen alone.
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to import

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for number, run in enumerate(runs):
        seconds = [step.seconds for step in run.steps]
        losses = [step.loss for step in run.steps]
        window = max(1, len(losses) // (4 * len(run.epochs)))
        means = [
            statistics.fmean(losses[max(0, end - window) : end])
            for end in range(1, len(losses) + 1)
        ]
        label = " + ".join(device.label for device in run.devices)
        axes.plot(seconds, losses, color=f"C{number}", alpha=0.25, linewidth=0.8)
        axes.plot(seconds, means, color=f"C{number}", linewidth=1.8, label=label)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
