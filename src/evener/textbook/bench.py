"""The bench: how fast each device of this machine trains alone, and how fast all together.

The textbook's ResNet-18 learns random images. A machine's speed drifts by more than the
differences that one looks for, so nothing is measured alone and compared later: everybody takes a
turn in each round, each round begins with another one, and ratios are ratios within one round::

    round 1    cpu:0 alone │ cpu:1 alone │ even shares │ auto shares
    round 2    cpu:1 alone │ even shares │ auto shares │ cpu:0 alone

Alone means plain PyTorch, confined to the cores of that device. What is done together cannot be
faster than the devices' own speeds added up, but for caches, which a part of a batch fits better.

Devices can be slowed by neighbours (:mod:`evener.neighbour`), which stay throughout.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import evener
from evener.errors import DeviceError
from evener.neighbour import Neighbour
from evener.textbook import main_job
from evener.textbook.record import Settings, SettingsError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Bench", "Speed", "measure", "notes", "table"]

#: Steps of each contender that are not timed: before the first round, in which the helpers start
#: and the shares are found, and at the beginning of each turn, which brings data into the caches.
LEAD_IN, TURN_LEAD_IN = 16, 2
NUM_BATCHES = 16


@dataclass(frozen=True)
class Speed:
    """How fast one contender was.

    Attributes:
        who: how tables call it.
        images_per_s: images in a second, one number for each round.
    """

    who: str
    images_per_s: tuple[float, ...]


@dataclass(frozen=True)
class Bench:
    """What was measured.

    Attributes:
        devices: the labels of the devices.
        alone: each device alone, in their order.
        together: all devices together: with even shares, and with those that evener found.
        shares: images of a batch that each device had at the end, as evener found them.
    """

    devices: tuple[str, ...]
    alone: tuple[Speed, ...]
    together: tuple[Speed, ...]
    shares: tuple[int, ...]

    def against_first(self, speed: Speed) -> float:
        """A speed against that of the first device alone: the median over the rounds."""
        return _median_ratio(speed.images_per_s, self.alone[0].images_per_s)

    def part_of_sum(self, speed: Speed) -> float:
        """A speed against the sum of all devices' own speeds: the median over the rounds."""
        rounds = zip(*(device.images_per_s for device in self.alone), strict=True)
        return _median_ratio(speed.images_per_s, [sum(round_) for round_ in rounds])


def measure(
    devices: Sequence[evener.Device],
    settings: Settings,
    *,
    slow: Mapping[str, float] | None = None,
    num_rounds: int = 3,
    seconds: float = 1.0,
    on_turn: Callable[[str, int, int], None] | None = None,
) -> Bench:
    """Let each device alone, and all together, take turns in training.

    Args:
        devices: two CPU devices or more.
        settings: how to learn; everything but the number of epochs is read here.
        slow: the part of its speed that a neighbour leaves a device, by the device's label (see
            :func:`evener.neighbour.parse_slow`). Default: no neighbours.
        num_rounds: how often each takes a turn.
        seconds: how long a turn takes, and a step more.
        on_turn: told before each turn who takes it, how many turns are over, and how many there
            are in all; the steps before the first round are the first turns. Default: nobody is
            told.

    Returns:
        What was measured. Helpers and neighbours have ended, and threads and cores of this
        process are as they were before, also after an error.

    Raises:
        SettingsError: if a number is out of its range.
        DeviceError: if there are fewer than two devices, others than CPU devices, or ``slow``
            names one that is not among them.
        EvenerError: if a helper fails.
    """
    if num_rounds < 1:
        raise SettingsError(f"rounds={num_rounds}: expected 1 or more")
    if not (0 < seconds < math.inf):
        raise SettingsError(f"seconds={seconds}: expected a number above 0")
    labels = tuple(device.label for device in devices)
    if len(devices) < 2:  # noqa: PLR2004 - one device has nothing to share
        raise DeviceError(
            f"{', '.join(labels)}: expected two devices or more, to compare each alone with all "
            'together; "cpu*2" cuts the CPU into two, even where there is one core'
        )
    with contextlib.ExitStack() as stack:
        contenders = [_alone(device, settings) for device in devices]
        together = {shares: main_job.build(settings) for shares in ("even", "auto")}
        for shares, model in together.items():
            evener.parallelize(model, list(devices), shares=shares)
            stack.callback(evener.release, model)
            contenders.append(_Contender(f"evener {shares}", model, settings))
        for neighbour in _neighbours(devices, slow or {}):
            stack.enter_context(neighbour)
        # A device that is left out shows in the shares, and a warning would stand in the table.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings(
            "ignore", message=".* has no share of batches", category=UserWarning
        )
        speeds = _take_turns(contenders, num_rounds, seconds, on_turn)
        found = evener.report(together["auto"]).shares
    num = len(devices)
    return Bench(labels, tuple(speeds[:num]), tuple(speeds[num:]), found)


def table(bench: Bench) -> Table:
    """Give one row for each contender, for a terminal."""
    from rich.table import Table  # noqa: PLC0415 - only who prints needs it

    shown = Table("who")
    headings = ("images/sec", "spread", f"against {bench.devices[0]}", "part of the sum")
    for heading in headings:
        shown.add_column(heading, justify="right")
    for speed in (*bench.alone, *bench.together):
        rates = speed.images_per_s
        shown.add_row(
            speed.who,
            f"{statistics.median(rates):.0f}",
            f"{min(rates):.0f}..{max(rates):.0f}",
            f"{bench.against_first(speed):.2f}",
            f"{bench.part_of_sum(speed):.2f}",
        )
    return shown


def notes(bench: Bench) -> Iterator[str]:
    """Say what the reader of the table must know, one sentence or two each."""
    pairs = zip(bench.devices, bench.shares, strict=True)
    shares = ", ".join(f"{label} {share}" for label, share in pairs)
    yield f"The auto shares at the end: {shares} of a batch of {sum(bench.shares)} images."
    yield (
        "Figures are medians over the rounds. The sum is that of all devices' own speeds, each "
        "alone; both ratios compare turns of one round."
    )


# ------------------------------------------------------------------ the turns


class _Contender:
    """A training that goes on whenever it is its turn."""

    def __init__(
        self,
        who: str,
        model: nn.Module,
        settings: Settings,
        place: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.who = who
        self._model = model
        self._place = place
        self._batch_size = settings.batch_size
        self._batches = itertools.cycle(_random_batches(settings))
        self._criterion = nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(
            model.parameters(), lr=settings.lr, momentum=settings.momentum
        )

    def lead_in(self, num_steps: int) -> None:
        """Train for some steps that nobody times."""
        with self._place():
            for _ in range(num_steps):
                self._step()

    def turn(self, seconds: float) -> float:
        """Train for so long; returns images in a second."""
        self.lead_in(TURN_LEAD_IN)
        with self._place():
            start_s, num_steps, took_s = time.perf_counter(), 0, 0.0
            while took_s < seconds:
                self._step()
                num_steps, took_s = num_steps + 1, time.perf_counter() - start_s
        return num_steps * self._batch_size / took_s

    def _step(self) -> None:
        pictures, labels = next(self._batches)
        self._optimizer.zero_grad()
        self._criterion(self._model(pictures), labels).backward()
        self._optimizer.step()


def _alone(device: evener.Device, settings: Settings) -> _Contender:
    def place() -> contextlib.AbstractContextManager[None]:
        return main_job.confined_to(device.cores)

    return _Contender(f"{device.label} alone", main_job.build(settings), settings, place)


def _random_batches(settings: Settings) -> list[tuple[Tensor, Tensor]]:
    """The same ones for everybody."""
    generator = torch.Generator().manual_seed(settings.seed)
    num = settings.batch_size
    return [
        (
            torch.randn((num, 1, 28, 28), generator=generator),
            torch.randint(10, (num,), generator=generator),
        )
        for _ in range(NUM_BATCHES)
    ]


def _take_turns(
    contenders: Sequence[_Contender],
    num_rounds: int,
    seconds: float,
    on_turn: Callable[[str, int, int], None] | None,
) -> list[Speed]:
    rates: dict[str, list[float]] = {contender.who: [] for contender in contenders}
    num_turns = (1 + num_rounds) * len(contenders)
    for i in range(num_turns):
        round_, place = divmod(i, len(contenders))
        contender = contenders[(round_ - 1 + place if round_ else place) % len(contenders)]
        if on_turn is not None:
            on_turn(contender.who, i, num_turns)
        if round_ == 0:
            contender.lead_in(LEAD_IN)
        else:
            rates[contender.who].append(contender.turn(seconds))
    return [Speed(who, tuple(own)) for who, own in rates.items()]


def _neighbours(
    devices: Sequence[evener.Device], slow: Mapping[str, float]
) -> Iterator[Neighbour]:
    labels = [device.label for device in devices]
    unknown = [label for label in slow if label not in labels]
    if unknown:
        raise DeviceError(
            f"slow names {', '.join(unknown)}; expected some of the devices: {', '.join(labels)}"
        )
    for device in devices:
        if device.label in slow:
            yield Neighbour(device.cores, slow[device.label])


def _median_ratio(values: Sequence[float], references: Sequence[float]) -> float:
    pairs = zip(values, references, strict=True)
    return statistics.median(own / other for own, other in pairs)
