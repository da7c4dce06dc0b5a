"""The charts of a report: a plot of the whole past, and a trace of the latest calls.

The plot shows how the shares went over the calls, and what each device needed for its own. The
trace shows single calls on a line of time, one row for each device.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.journal import BACKWARD, INFERENCE, Fault, Moment, Phase, Stretch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot", "trace"]

WAITING = "waiting"  # what a device with a share does not account for

#: As many colours of matplotlib's are told apart easily.
NUM_COLORS = 10
#: Rows of the legend.
NUM_ROWS = 28
#: A call that takes so many times as long as most is not fully drawn: a first call that starts the
#: helpers can take as long as a hundred others.
MUCH_LONGER = 3


# ------------------------------------------------------------------ the plot


def plot(labels: Sequence[str], moments: Sequence[Moment], path: str | PathLike[str]) -> None:
    """Draw each device's part of the batch, and its busy seconds, over the calls.

    Training is drawn if there was any, else inference.

    Args:
        labels: those of the devices.
        moments: the calls.
        path: the file to write, of any type that matplotlib knows.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if matplotlib knows no such type of file.
        OSError: if the file cannot be written.
    """
    try:
        # Not pyplot: a figure of our own leaves the user's figures and choice of screen alone.
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise ImportError(
            "the plot of a report needs matplotlib; install it with: pip install 'evener[plot]'"
        ) from error

    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.set_ylabel("part of the batch")
    lower.set_ylabel("seconds")
    lower.set_xlabel("call")
    lower.grid(alpha=0.3)
    kind = BACKWARD if any(moment.kind == BACKWARD for moment in moments) else INFERENCE
    # In the order in which they began: the backward of the later of two may come first.
    moments = sorted(moment for moment in moments if moment.kind == kind)
    if moments:
        upper.set_title("training" if kind == BACKWARD else "inference", fontsize="medium")
        _draw(upper, lower, labels, moments)
        lines, names = lower.get_legend_handles_labels()
        num_columns = 1 + len(labels) // NUM_ROWS
        figure.legend(lines, names, loc="outside right upper", ncols=num_columns, fontsize="small")
    else:
        for axes in (upper, lower):
            axes.text(0.5, 0.5, "no whole call so far", ha="center", transform=axes.transAxes)
            axes.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=150)


def _draw(upper: Axes, lower: Axes, labels: Sequence[str], moments: Sequence[Moment]) -> None:
    from matplotlib import colormaps  # noqa: PLC0415 - see plot
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    colors: list[Any] = [f"C{i}" for i in range(len(labels))]
    if len(labels) > NUM_COLORS:
        colors = [colormaps["turbo"](i / (len(labels) - 1)) for i in range(len(labels))]

    # Each moment is drawn from its call to that of the next, as there may be others between.
    edges = [moment.call for moment in moments]
    edges.append(edges[-1] + (edges[-1] - edges[-2] if len(edges) > 1 else 1))
    parts = [
        [moment.shares[i] / (sum(moment.shares) or 1) for moment in (*moments, moments[-1])]
        for i in range(len(labels))
    ]
    upper.stackplot(edges, parts, colors=colors, step="post", linewidth=0)
    upper.set(xlim=(edges[0], edges[-1]), ylim=(0, 1))
    upper.xaxis.set_major_locator(MaxNLocator(integer=True))

    lasted_s = [moment.lasted_s for moment in moments]
    lower.stairs(lasted_s, edges, baseline=None, color="black", label="whole call")
    for i, (label, color) in enumerate(zip(labels, colors, strict=True)):
        busy_s = [moment.busy_s[i] for moment in moments]
        lower.stairs(busy_s, edges, baseline=None, color=color, label=label, linewidth=0.8)
    usual_s = statistics.median(lasted_s)
    drawn_s = [s for s in lasted_s if s <= MUCH_LONGER * usual_s]
    if max(drawn_s) > 0:
        lower.set_ylim(0, 1.1 * max(drawn_s))
    if len(drawn_s) < len(lasted_s):
        text = f"{len(lasted_s) - len(drawn_s)} not fully drawn, up to {max(lasted_s):.3g} s"
        lower.set_title(text, fontsize="small", loc="right")


# ------------------------------------------------------------------ the trace


def trace(
    labels: Sequence[str],
    phases: Sequence[Phase],
    path: str | PathLike[str],
    faults: Sequence[Fault] = (),
) -> None:
    """Write what each device did as a file in Google's `Trace Event Format`_.

    Args:
        labels: those of the devices.
        phases: the phases.
        path: the file to write.
        faults: what went wrong; what did since the first phase is marked.

    Raises:
        OSError: if the file cannot be written.

    .. _Trace Event Format:
        https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    events = [_metadata("process_name", 0, name="evener")]
    for device, label in enumerate(labels):
        events.append(_metadata("thread_name", device, name=label))
        events.append(_metadata("thread_sort_index", device, sort_index=device))
    origin_s = min((phase.start_s for phase in phases), default=0.0)
    for phase in phases:
        for device, kind, start_s, end_s in _rows(phase):
            # Rounded to whole nanoseconds before they are subtracted: the events of a row may
            # touch but must not overlap, or Perfetto leaves them out.
            start_ns, end_ns = (round(1e9 * (s - origin_s)) for s in (start_s, end_s))
            events.append(
                {
                    **_place(kind, "X", device),
                    "cat": phase.kind,
                    "ts": start_ns / 1e3,
                    "dur": (end_ns - start_ns) / 1e3,
                    "args": {"call": phase.call, "samples": phase.shares[device]},
                }
            )
    events += [
        {
            **_place(f"{fault.phase} fault", "i", fault.device),
            "s": "t",
            "ts": round(1e9 * (fault.at_s - origin_s)) / 1e3,
            "args": {"call": fault.call, "cause": fault.cause, "action": fault.action},
        }
        for fault in faults
        if fault.at_s >= origin_s
    ]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    Path(path).write_text(text, encoding="utf-8")


def _metadata(what: str, device: int, **args: str | int) -> dict[str, Any]:
    return {**_place(what, "M", device), "args": args}


def _place(name: str, phase: str, device: int) -> dict[str, Any]:
    # One process, a thread for each device; both are counted from one, as zero is the idle task.
    return {"name": name, "ph": phase, "pid": 1, "tid": device + 1}


def _rows(phase: Phase) -> Iterator[Stretch]:
    """Give the stretches of a phase, one device after the other, with those of waiting.

    Those of a device are in the order of time, and none begins before the one before has ended.
    """
    rows: list[list[Stretch]] = [[] for _ in phase.shares]
    for stretch in phase.stretches:
        rows[stretch.device].append(stretch)
    for device, (share, row) in enumerate(zip(phase.shares, rows, strict=True)):
        now_s = phase.start_s
        for _, kind, start_s, end_s in sorted(row, key=lambda stretch: stretch.start_s):
            if share and start_s > now_s:
                yield Stretch(device, WAITING, now_s, start_s)
            if end_s > now_s:
                yield Stretch(device, kind, max(start_s, now_s), end_s)
                now_s = end_s
        if share and phase.end_s > now_s:
            yield Stretch(device, WAITING, now_s, phase.end_s)
