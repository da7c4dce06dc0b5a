"""The report: what each device of a parallel module did, as numbers, a table, a plot and a trace.

Two speeds of a device are told apart. Its *own* speed is that of its own work: samples by the
seconds in which it computes, as if nobody had to wait for anybody. Its speed *now* is what it
contributes: samples by the seconds of the clock from call to call, with the exchange, the waiting
and the user's own code between calls. The sum of the second by the sum of the first is the part
of the devices' strength that is reached::

    the clock     ├──── call ────┤ loss, optimizer, data ├──── call ────┤ ...
    own           ├─────────┤                            ├─────────┤
    now           ├──────────────────────────────────────┤

What a program does in its pauses, as for a checkpoint or to evaluate, does not count (see
:func:`evener.journal.intervals_s`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from evener import chart, table
from evener.errors import ModuleError
from evener.grid import told_grid
from evener.journal import Call, Fault, Journal, Moment, calls_of, intervals_s
from evener.pickling import STATE_NAME

if TYPE_CHECKING:
    from torch import nn

    from evener.devices import Device

#: How many of the latest calls the speeds are taken from.
NUM_RECENT = 100
#: How many of the latest faults are shown under the table.
NUM_SHOWN = 8
HEADINGS = (
    "device,name,share,own\nsamples/s,now\nsamples/s,busy\ns,exchange\ns,waiting\ns,busy\n%,"
    "calls,faults"
)


@dataclass(frozen=True)
class DeviceReport:
    """What one device did.

    Attributes:
        label: the device's label, such as ``"cpu:1"``.
        name: what its maker calls it.
        share: samples that it had of the last batch.
        own_samples_per_s: samples in a second of its own work, forward and backward if the module
            was trained recently, else inference. None if it had no share of such calls.
        now_samples_per_s: samples of the same calls in a second of the clock. None until there
            were two calls.
        busy_s: seconds of forward and backward since the team began.
        exchange_s: seconds in which it moved tensors.
        waiting_s: seconds of calls in which it had a share and did neither.
        utilisation: the part of the seconds of all calls in which it was busy; None before any.
        num_calls: calls in which it had a share.
        num_samples: samples that it had in them.
        num_faults: how often its helper was lost.
    """

    label: str
    name: str
    share: int
    own_samples_per_s: float | None
    now_samples_per_s: float | None
    busy_s: float
    exchange_s: float
    waiting_s: float
    utilisation: float | None
    num_calls: int
    num_samples: int
    num_faults: int


class Report:
    """What the devices of a parallel module did, up to when it was made; ``str`` is a table.

    Args:
        devices: the devices, in the order of the journal.
        journal: a snapshot: it must not change any more.

    Attributes:
        devices: one record for each device.
        shares: samples of each device in the last call; zeros before the first one.
        own_samples_per_s: sum of the devices' own speeds, as far as they are known; None if
            none is.
        now_samples_per_s: samples in a second of the clock, over the recent calls; None until
            there were two.
        reached: the second of these as a part of the first. It can be a little above 1: the
            speeds are measured, and not over the very same seconds.
        grid: into how many cells each batch is cut; None without a grid.
        num_calls: calls of the module.
        lasted_s: seconds of all calls, forward and backward.
        moments: calls of the whole past, thinned evenly, the oldest first.
        faults: what went wrong with devices, its cause and cost, the latest 256, the oldest first.
    """

    def __init__(self, devices: Sequence[Device], journal: Journal) -> None:
        self._phases = tuple(journal.phases)
        self.moments: tuple[Moment, ...] = tuple(journal.moments)
        self.faults: tuple[Fault, ...] = tuple(journal.faults)
        self.grid = journal.grid
        self.num_calls = journal.num_calls
        self.lasted_s = journal.lasted_s
        # Not the last phase: the last backward may be that of an earlier call.
        last = max(self._phases, key=lambda phase: phase.call, default=None)
        self.shares: tuple[int, ...] = last.shares if last else (0,) * len(devices)

        calls = calls_of(self._phases)
        recent = calls[-NUM_RECENT - 1 :]
        recent_s = sum(intervals_s(recent, self._phases))
        self.devices: tuple[DeviceReport, ...] = tuple(
            DeviceReport(
                label=device.label,
                name=device.name,
                share=self.shares[i],
                own_samples_per_s=_own_samples_per_s(calls, i),
                now_samples_per_s=(
                    sum(call.shares[i] for call in recent[:-1]) / recent_s if recent_s else None
                ),
                busy_s=total.busy_s,
                exchange_s=total.exchange_s,
                # Sums of differences: what should be nothing may be a little less.
                waiting_s=max(0.0, total.waiting_s),
                utilisation=total.busy_s / self.lasted_s if self.lasted_s else None,
                num_calls=total.num_calls,
                num_samples=total.num_samples,
                num_faults=total.num_faults,
            )
            for i, (device, total) in enumerate(zip(devices, journal.totals, strict=True))
        )
        self.own_samples_per_s = _sum(device.own_samples_per_s for device in self.devices)
        self.now_samples_per_s = _sum(device.now_samples_per_s for device in self.devices)
        self.reached: float | None = None
        if self.own_samples_per_s and self.now_samples_per_s is not None:
            self.reached = self.now_samples_per_s / self.own_samples_per_s

    def __repr__(self) -> str:
        return f"<Report of {len(self.devices)} devices after {self.num_calls} calls>"

    def __str__(self) -> str:
        all_of = {
            name: sum(getattr(device, name) for device in self.devices)
            for name in ("share", "busy_s", "exchange_s", "waiting_s", "num_samples", "num_faults")
        }
        seconds = self.lasted_s * len(self.devices)
        together = DeviceReport(
            label="all",
            name="",
            own_samples_per_s=self.own_samples_per_s,
            now_samples_per_s=self.now_samples_per_s,
            utilisation=all_of["busy_s"] / seconds if seconds else None,
            num_calls=self.num_calls,
            **all_of,
        )
        shown = table.text(HEADINGS.split(","), map(_cells, self.devices), _cells(together))
        grid = told_grid(self.grid, sum(self.shares))
        return "\n".join([shown, *grid, self._summary(), *self._told_faults()])

    def _summary(self) -> str:
        if not self.num_calls and len(self.devices) == 1 and self.grid is None:
            return "With one device the call is the plain call, of which nothing is recorded."
        if not self.num_calls:
            return "No call so far."
        if self.reached is None:
            return "What is reached of the devices' own speed is known after two calls of a kind."
        return (
            f"Now {_rate(self.now_samples_per_s)} samples/s: {self.reached:.0%} of the"
            f" {_rate(self.own_samples_per_s)} that the devices do in seconds of their own work."
        )

    def _told_faults(self) -> Iterator[str]:
        """Give a line for each of the latest faults, and what all of them have cost."""
        total = sum(device.num_faults for device in self.devices)
        if not total:
            return
        shown = self.faults[-NUM_SHOWN:]
        yield f"Faults: {total}; {_seconds(sum(fault.cost_s for fault in self.faults))} lost."
        if len(shown) < total:
            yield f"The latest {len(shown)}:"
        for fault in shown:
            when = f"call {fault.call}, {fault.phase}" if fault.call else fault.phase
            device = self.devices[fault.device].label
            yield f"  {device}, {when}: {fault.cause}; {fault.action} ({_seconds(fault.cost_s)})"

    def to_json(self) -> str:
        """Give everything in this report but the trace, as JSON.

        Returns:
            The text of an object whose keys are the attributes' names. Unknown numbers are null.
        """
        told = {
            "shares": self.shares,
            "own_samples_per_s": self.own_samples_per_s,
            "now_samples_per_s": self.now_samples_per_s,
            "reached": self.reached,
            "grid": self.grid,
            "num_calls": self.num_calls,
            "lasted_s": self.lasted_s,
            "devices": [asdict(device) for device in self.devices],
            "moments": [moment._asdict() for moment in self.moments],
            "faults": [fault._asdict() for fault in self.faults],
        }
        return json.dumps(_finite(told), allow_nan=False)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the shares and the seconds of each device over the calls.

        Training is drawn if there was any, else inference.

        Args:
            path: the file to write, of any type that matplotlib knows by its name: ``.png``,
                ``.svg``, ``.pdf`` and others. A name without an ending gets ``.png``.

        Raises:
            ImportError: if matplotlib is not installed.
            ValueError: if matplotlib knows no such type of file.
            OSError: if the file cannot be written.
        """
        chart.plot([device.label for device in self.devices], self.moments, path)

    def trace(self, path: str | PathLike[str]) -> None:
        """Write what the devices did in the latest calls, for https://ui.perfetto.dev.

        Each device is a row of events named forward, backward, inference, exchange and waiting;
        faults are marks in it. The file also loads into ``chrome://tracing``.

        Args:
            path: the file to write, in the `Trace Event Format
                <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>`_.

        Raises:
            OSError: if the file cannot be written.
        """
        chart.trace([device.label for device in self.devices], self._phases, path, self.faults)


def report(module: nn.Module) -> Report:
    """Report what the devices of a parallel module did, up to now.

    It may be asked for at any time; it takes milliseconds. Of one device nothing is recorded.

    Args:
        module: a module that :func:`evener.parallelize` returned, or a DataParallel around one.

    Returns:
        The report; ``print`` shows a table.

    Raises:
        ModuleError: if the module is not parallel.
    """
    module = getattr(module, "_orig_mod", module)  # torch.compile around it
    around = (module, getattr(module, "module", None))
    states = (getattr(one, "__dict__", {}).get(STATE_NAME) for one in around)
    state = next(filter(None, states), None)
    if state is None:
        raise ModuleError(
            f"this {type(module).__name__} is not parallel: there is nothing to report; "
            "evener.parallelize(module) makes it so"
        )
    return Report(state.devices, state.journal.snapshot())


# ------------------------------------------------------------------ numbers and text


def _own_samples_per_s(calls: Sequence[Call], device: int) -> float | None:
    """Give a device's speed in its latest calls with a share, without the slowest (a cold one)."""
    recent = [call for call in calls if call.shares[device]][-NUM_RECENT:]
    if len(recent) > 2:  # noqa: PLR2004 - of two, nobody knows which is the usual one
        recent.remove(max(recent, key=lambda call: call.busy_s[device] / call.shares[device]))
    busy_s = sum(call.busy_s[device] for call in recent)
    return sum(call.shares[device] for call in recent) / busy_s if busy_s > 0 else None


def _sum(numbers: Iterable[float | None]) -> float | None:
    """Sum what is known; None if nothing is."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _rate(per_s: float | None) -> str:
    if per_s is None:
        return "-"
    return f"{per_s:.0f}" if per_s >= 100 else f"{per_s:.3g}"  # noqa: PLR2004 - three digits


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _cells(device: DeviceReport) -> list[str]:
    """Give what the table says of a device."""
    return [
        device.label,
        device.name,
        str(device.share),
        _rate(device.own_samples_per_s),
        _rate(device.now_samples_per_s),
        *(f"{s:.1f}" for s in (device.busy_s, device.exchange_s, device.waiting_s)),
        "-" if device.utilisation is None else f"{100 * device.utilisation:.0f}",
        str(device.num_calls),
        str(device.num_faults),
    ]


def _finite(value: Any) -> Any:
    """Put None for what JSON has no word for: infinity and not-a-number."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
