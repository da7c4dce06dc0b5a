"""The record of a training: what it was asked to do, and what it did.

Numbers and no torch, so that the command line can show its options without waiting for it. A
clock runs while the model trains and stands while it is tested::

    with recorder.epoch():              the clock runs
        ...
        recorder.step(loss, 64)         one entry (seconds, loss) for each batch
    recorder.tested(accuracy)           the clock stands; the epoch is complete

All seconds in a record are seconds of that clock.
"""

from __future__ import annotations

import math
import statistics
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from evener.errors import EvenerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from evener.devices import Device

__all__ = ["Epoch", "Recorder", "Run", "Settings", "SettingsError", "Step", "finite_or_none"]

INITS = ("modern", "tutorial")
MAX_SEED = 2**63 - 1


class SettingsError(EvenerError, ValueError):
    """A setting that no training can have; the message says what is expected."""


@dataclass(frozen=True)
class Settings:
    """What a training is asked to do.

    The defaults reach a test accuracy near 0.8 on the sample, in about a minute on two cores
    for both runs of the comparison.

    Attributes:
        epochs: how often the training images are gone through.
        batch_size: images in a batch, on all devices together.
        lr: the learning rate of SGD.
        momentum: the momentum of SGD, 0 for none.
        width: channels of the first stage of the ResNet-18.
        init: initial weights, ``"modern"`` or ``"tutorial"`` (see ``resnet.py``).
        seed: decides the initial weights and the order of the images.

    Raises:
        SettingsError: if a number is out of its range or ``init`` is neither of the two.
    """

    epochs: int = 6
    batch_size: int = 64
    lr: float = 0.01
    momentum: float = 0.9
    width: int = 8
    init: str = "modern"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "width"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}={getattr(self, name)}: expected 1 or more")
        if not (0 < self.lr < math.inf):
            raise SettingsError(f"lr={self.lr}: expected a number above 0")
        if not (0 <= self.momentum < 1):
            raise SettingsError(f"momentum={self.momentum}: expected 0 or more, and less than 1")
        if not (0 <= self.seed <= MAX_SEED):
            raise SettingsError(f"seed={self.seed}: expected 0 to {MAX_SEED}")
        if self.init not in INITS:
            raise SettingsError(f"init={self.init!r}: expected {' or '.join(map(repr, INITS))}")


@dataclass(frozen=True)
class Step:
    """One batch.

    Attributes:
        seconds: when it was done, in seconds of training since the start.
        loss: the mean loss of the batch.
        num_images: images of this epoch so far.
        images_per_s: rate of this epoch so far.
        shares: images of a batch that each device has, as of lately; empty with one device.
    """

    seconds: float
    loss: float
    num_images: int
    images_per_s: float
    shares: tuple[int, ...] = ()


@dataclass(frozen=True)
class Epoch:
    """One epoch.

    Attributes:
        number: counted from 1.
        train_s: seconds of training, testing not counted.
        images_per_s: training images in a second.
        test_accuracy: part of the test images that were recognised, 0 to 1.
    """

    number: int
    train_s: float
    images_per_s: float
    test_accuracy: float


@dataclass
class Run:
    """One training from its first to its last step.

    Attributes:
        devices: on which devices, the main process's first.
        start_s: seconds from the parallel line to the end of a first call, which starts the
            helpers; not part of any epoch.
        uses_batch_norm: whether the model has batch norm.
        steps: one entry for each batch.
        epochs: one entry for each epoch.
        own_images_per_s: the sum of the devices' own speeds, images by the seconds of their own
            work; None with one device.
        reached: the part of it that was reached lately; None with one device.
    """

    devices: tuple[Device, ...]
    start_s: float = 0.0
    uses_batch_norm: bool = False
    steps: list[Step] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    own_images_per_s: float | None = None
    reached: float | None = None

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch: the median, which one disturbed epoch does not move."""
        return statistics.median(epoch.train_s for epoch in self.epochs)

    @property
    def images_per_s(self) -> float:
        """Training images in a second, in an epoch that takes ``epoch_s``."""
        return self.steps[-1].num_images / self.epoch_s

    @property
    def test_accuracy(self) -> float:
        """The accuracy after the last epoch."""
        return self.epochs[-1].test_accuracy

    def speedup_over(self, other: Run) -> float:
        """How many times as fast as the other run this one was."""
        return other.epoch_s / self.epoch_s

    def largest_loss_difference(self, other: Run) -> float:
        """The largest difference between the losses of the two runs at the same step.

        Not a number, if a loss is not one: a diverged training equals nothing.
        """
        pairs = zip(self.steps, other.steps, strict=True)
        differences = [abs(mine.loss - theirs.loss) for mine, theirs in pairs]
        return math.nan if any(map(math.isnan, differences)) else max(differences)

    def as_json(self) -> dict[str, Any]:
        """Give the run as plain lists and dicts; a loss that is not finite becomes None."""
        return {
            "devices": [{"label": device.label} | asdict(device) for device in self.devices],
            "start_s": self.start_s,
            "epoch_s": self.epoch_s,
            "images_per_s": self.images_per_s,
            "own_images_per_s": self.own_images_per_s,
            "reached": self.reached,
            "test_accuracy": self.test_accuracy,
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "steps": [
                {"seconds": step.seconds, "loss": finite_or_none(step.loss)} for step in self.steps
            ],
        }


def finite_or_none(number: float) -> float | None:
    """Give None for what JSON has no word for: infinity and not-a-number."""
    return number if math.isfinite(number) else None


class Recorder:
    """Fills a run while it happens, and tells a listener.

    Args:
        run: the record to fill.
        on_step: called after each batch, its time not counted. Default: nobody is told.
        on_epoch: called after each epoch and its test. Default: nobody is told.
    """

    def __init__(
        self,
        run: Run,
        on_step: Callable[[Step], None] | None = None,
        on_epoch: Callable[[Epoch], None] | None = None,
    ) -> None:
        self._run = run
        self._on_step = on_step
        self._on_epoch = on_epoch
        self._before_s = 0.0  # the clock at the start of this epoch
        self._epoch_s = 0.0  # what it has run since
        self._started_s = 0.0  # time of day from which it runs
        self._num_images = 0

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Let the clock run for the training part of an epoch."""
        self._before_s += self._epoch_s
        self._epoch_s = 0.0
        self._num_images = 0
        self._started_s = time.perf_counter()
        yield
        self._stop()

    def step(self, loss: float, num_images: int) -> None:
        """Note that a batch is done."""
        self._stop()
        self._num_images += num_images
        rate = self._num_images / self._epoch_s
        step = Step(self._before_s + self._epoch_s, loss, self._num_images, rate)
        self._run.steps.append(step)
        if self._on_step is not None:
            self._on_step(step)
        self._started_s = time.perf_counter()

    def tested(self, accuracy: float) -> None:
        """Note the test accuracy, which completes the epoch."""
        number = len(self._run.epochs) + 1
        rate = self._num_images / self._epoch_s
        epoch = Epoch(number, self._epoch_s, rate, accuracy)
        self._run.epochs.append(epoch)
        if self._on_epoch is not None:
            self._on_epoch(epoch)

    def _stop(self) -> None:
        self._epoch_s += time.perf_counter() - self._started_s
