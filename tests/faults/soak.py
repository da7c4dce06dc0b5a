"""The soak: real training while its helpers are killed, stopped and short of memory at random.

In rounds, each from a seed of its own, until the time is over::

    round 1  fixed shares   undisturbed │ disturbed    every bit must be the same
    round 2  auto shares    undisturbed │ disturbed    the same up to rounding, in float64
    ...

The model is the textbook's ResNet-18 on its Fashion-MNIST. Afterwards nothing may be left: no
process, no descriptor, no mapping. The exit status is 0 if all was so::

    python tests/faults/soak.py --minutes 30
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import evener
from evener.errors import EvenerError, FaultWarning
from evener.textbook import fashion_mnist, main_job
from evener.textbook.record import Settings

DEVICES = "cpu*3"
SHARES = (2, 1, 1)
#: A helper that was stopped is given up after so many seconds.
TIMEOUT_S = 10.0
#: Without a step in so many seconds something hangs; it is said where, and the soak ends.
HANG_S = 120.0
#: Seconds from one disturbance to the next, on the average.
EVERY_S = 1.2
#: What the limit of addresses leaves a helper, in bytes: enough for one sample, not for all.
ROOM_BYTES = (1 << 16, 1 << 24)
#: So many samples more has one batch in so many.
LARGE, RARE = 128, 0.1
#: How much parameters and losses may differ after a round with measured shares.
TOLERANCE = 1e-8

KILLS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSEGV": signal.SIGSEGV}
#: What evener takes for the doing of the piece: one piece may end one helper so, not two.
OWN = ("SIGSEGV", "SIGSTOP")


@dataclass
class Tally:
    """What a soak has seen.

    Attributes:
        rounds: how many of each kind were compared.
        disturbed: what was done to helpers, by kind.
        faults: faults that evener has told of, by the first word about their cause.
        num_steps: steps of disturbed trainings that were finished.
        num_calls: calls of the module in them.
        num_lost: samples whose outputs did not come.
        largest: the largest relative difference, by the kind of round.
        wrong: what must not have been.
    """

    rounds: Counter[str] = field(default_factory=Counter)
    disturbed: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    num_calls: int = 0
    num_lost: int = 0
    largest: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Disturber(threading.Thread):
    """Disturbs the helpers of this process at random moments.

    Args:
        seed: decides the moments and the kinds.
        kinds: what it may do: names of signals, and ``"memory"``.
        tally: is told.
        every_s: seconds from one disturbance to the next, on the average.
    """

    def __init__(self, seed: int, kinds: Sequence[str], tally: Tally, every_s: float) -> None:
        super().__init__(name="disturber", daemon=True)
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._kinds = kinds
        self._tally = tally
        self._every_s = every_s
        self._main = psutil.Process()
        self._over = threading.Event()
        self._wait_for: tuple[int, str] | None = None
        self._limited: dict[int, float] = {}
        self.step = 0
        self._seen = (0, time.monotonic())

    def run(self) -> None:
        while not self._over.wait(self._random.expovariate(1 / self._every_s)):
            self._look_for_hang()
            self._lift_limits()
            helpers = self._main.children()
            if helpers:
                with contextlib.suppress(psutil.Error, OSError):  # it has just ended
                    self._disturb(self._random.choice(helpers))

    def finish(self) -> None:
        """Let it end; nothing is disturbed any more."""
        self._over.set()
        self.join()
        for pid in self._limited:
            with contextlib.suppress(OSError):
                _limit_addresses(pid, resource.RLIM_INFINITY)

    def _disturb(self, helper: psutil.Process) -> None:
        kind = self._random.choice(self._kinds)
        if kind in OWN:
            # The piece that one has hit may be done again by now; two for one would be too many.
            if self._wait_for is not None and self.step <= self._wait_for[0] + 1:
                return
            self._wait_for = (self.step, kind)
        if kind == "memory":
            size = helper.memory_info().vms
            if size < 1 << 28:  # it still loads its libraries
                return
            _limit_addresses(helper.pid, size + self._random.randrange(*ROOM_BYTES))
            self._limited[helper.pid] = time.monotonic() + self._random.uniform(0.5, 2.0)
        elif kind == "SIGSTOP":
            helper.send_signal(signal.SIGSTOP)
        else:
            helper.send_signal(KILLS[kind])
        self._tally.disturbed[kind] += 1

    def _lift_limits(self) -> None:
        for pid, end_s in list(self._limited.items()):
            if time.monotonic() > end_s:
                del self._limited[pid]
                with contextlib.suppress(OSError):
                    _limit_addresses(pid, resource.RLIM_INFINITY)

    def _look_for_hang(self) -> None:
        now_s = time.monotonic()
        if self.step != self._seen[0]:
            self._seen = (self.step, now_s)
        elif now_s > self._seen[1] + HANG_S:
            print(f"no step in {HANG_S:g} s: it hangs, here:", file=sys.stderr)
            faulthandler.dump_traceback()
            for child in self._main.children():
                child.kill()
            os._exit(3)


def _limit_addresses(pid: int, num_bytes: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_AS, (num_bytes, resource.RLIM_INFINITY))


# ------------------------------------------------------------------ one training


@dataclass
class Outcome:
    """What a training came to."""

    losses: list[float]
    tensors: dict[str, Tensor]


def batches(seed: int, num_steps: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of unequal size, the same for the same seed."""
    data = fashion_mnist.load("sample").train
    shuffler = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        size = int(torch.randint(17, 97, (), generator=shuffler))
        # Now and then one that a helper has no memory for yet.
        size += int(torch.rand((), generator=shuffler) < RARE) * LARGE
        chosen = torch.randint(len(data), (size,), generator=shuffler)
        pictures = data.images[chosen].to(dtype).div_(255).sub_(main_job.MEAN).div_(main_job.STD)
        yield pictures, data.labels[chosen]


def train(
    seed: int, kind: str, num_steps: int, tally: Tally, disturber: Disturber | None
) -> Outcome:
    """Train from a seed, with fixed shares or measured ones."""
    is_fixed = kind == "fixed"
    dtype = torch.float32 if is_fixed else torch.float64
    model: nn.Module = main_job.build(Settings(seed=seed, width=8)).to(dtype)
    # With measured shares each device has other samples each time, and batch norm would see them.
    model.train(is_fixed)
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    shares: Any = SHARES if is_fixed else "auto"
    evener.parallelize(model, DEVICES, shares=shares, timeout_s=TIMEOUT_S, restarts=1_000_000)
    losses = []
    try:
        for number, (pictures, labels) in enumerate(batches(seed, num_steps, dtype)):
            optimizer.zero_grad()
            outputs = model(pictures)
            loss = nn.functional.cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if disturber is None:
                continue
            if number == 0:
                disturber.start()
            disturber.step = number + 1
            tally.num_steps += 1
            tally.num_calls += 1
            tally.num_lost += len(labels) - len(outputs)
    finally:
        if disturber is not None and disturber.is_alive():
            disturber.finish()
        evener.release(model)
    return Outcome(losses, {name: t.clone() for name, t in model.state_dict().items()})


def difference(one: Outcome, other: Outcome) -> float:
    """The largest relative difference of two trainings; 0 where every bit is the same."""
    found = 0.0
    pairs = [(one.tensors[name], other.tensors[name]) for name in one.tensors]
    pairs.append((torch.tensor(one.losses), torch.tensor(other.losses)))
    for a, b in pairs:
        if not torch.equal(a, b):
            scale = max(float(a.double().abs().max()), 1e-30)
            away = float((a.double() - b.double()).abs().max()) / scale
            found = max(found, away if away == away else float("inf"))  # noqa: PLR0124 - not a number
    return found


# ------------------------------------------------------------------ rounds


def left_behind(before: Counter[str]) -> list[str]:
    """What a round has left: processes, descriptors, mappings of an arena."""
    left: list[str] = []
    for _ in range(100):
        gc.collect()
        left = [f"process {child.pid}" for child in psutil.Process().children()]
        left += (held() - before).elements()
        if not left:
            break
        time.sleep(0.02)
    return left


def held() -> Counter[str]:
    """What this process has open and what of arenas it has mapped, by what it leads to."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the list itself
            target = str(link.readlink())
            if not target.startswith("/proc/"):
                found[f"descriptor of {target.partition('[')[0]}"] += 1
    maps = Path("/proc/self/maps").read_text().split("\n")
    found["mapping of an arena"] = sum("/memfd:evener" in line for line in maps)
    return found


def one_round(seed: int, kind: str, num_steps: int, every_s: float, tally: Tally) -> None:
    """Train undisturbed and disturbed, and compare."""
    warnings.simplefilter("ignore", UserWarning)
    expected = train(seed, kind, num_steps, tally, None)
    before = held()
    # What has run short of memory is computed in portions: the same up to rounding.
    kinds = [*KILLS, *KILLS, "SIGSTOP"] if kind == "fixed" else [*KILLS, "SIGSTOP", "memory"]
    disturber = Disturber(seed, kinds, tally, every_s)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = train(seed, kind, num_steps, tally, disturber)
        except EvenerError as error:
            tally.wrong.append(f"round {seed} ({kind}): {type(error).__name__}: {error}")
            return
    for each in caught:
        if issubclass(each.category, FaultWarning):
            tally.faults[cause_of(str(each.message))] += 1
    tally.rounds[kind] += 1
    away = difference(expected, found)
    tally.largest[kind] = max(tally.largest.get(kind, 0.0), away)
    if away > (0.0 if kind == "fixed" else TOLERANCE):
        tally.wrong.append(f"round {seed} ({kind}): results differ by {away:.1e}")
    left = left_behind(before)
    if left:
        tally.wrong.append(f"round {seed} ({kind}) left behind: {', '.join(left)}")


def cause_of(text: str) -> str:
    """What a warning says of the cause, for counting."""
    known = ("SIGKILL", "SIGTERM", "SIGSEGV", "did not answer", "had no memory", "exit code")
    return next((word for word in known if word in text), text)


def soak(seconds: float, *, seed: int = 0, num_steps: int = 80, every_s: float = EVERY_S) -> Tally:
    """Disturb trainings for so many seconds; at least one of each kind.

    Args:
        seconds: how long.
        seed: that of the first round.
        num_steps: of each training.
        every_s: seconds from one disturbance to the next, on the average.
    """
    tally = Tally()
    start_s = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("soak", total=seconds)
        number = 0
        while time.monotonic() < start_s + seconds or number < 2:
            kind = ("fixed", "auto")[number % 2]
            one_round(seed + number, kind, num_steps, every_s, tally)
            number += 1
            progress.update(
                task,
                completed=time.monotonic() - start_s,
                description=f"{number} rounds, {sum(tally.faults.values())} faults survived, "
                f"{len(tally.wrong)} wrong",
            )
    return tally


def as_table(tally: Tally, seconds: float) -> Table:
    """The report."""
    table = Table(title=f"soak of {seconds / 60:.1f} minutes", show_header=False)
    rows: dict[str, Any] = {
        "rounds": ", ".join(f"{num} {kind}" for kind, num in tally.rounds.items()),
        "steps finished while disturbed": tally.num_steps,
        "calls finished while disturbed": tally.num_calls,
        "disturbances": _listed(tally.disturbed),
        "faults survived": _listed(tally.faults),
        "lost samples": tally.num_lost,
        "largest difference, fixed shares": tally.largest.get("fixed", "-"),
        "largest difference, auto shares": tally.largest.get("auto", "-"),
        "hangs": 0,  # else it had ended
        "wrong": "\n".join(tally.wrong) or "nothing",
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _listed(counts: Counter[str]) -> str:
    kinds = ", ".join(f"{num} {kind}" for kind, num in counts.most_common())
    return f"{sum(counts.values())} ({kinds})"


def main() -> int:
    """Run it from the command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=80, help="steps of each training")
    options = parser.parse_args()
    start_s = time.monotonic()
    tally = soak(60 * options.minutes, seed=options.seed, num_steps=options.steps)
    Console(width=100).print(as_table(tally, time.monotonic() - start_s))
    return 1 if tally.wrong or tally.num_lost else 0


if __name__ == "__main__":
    sys.exit(main())
