"""How shares follow the devices' speeds: a training while neighbours come and go, as a plot."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # workloads.py and its neighbours

import torch

import evener
from evener.neighbour import Neighbour
from harness import BENCHMARKS
from workloads import WORKLOADS, cross_entropy, make_batches, make_model

WORKLOAD = "encoder"


@dataclass(frozen=True)
class Visit:
    """A neighbour's stay, from before step `first` to before step `end`."""

    first: int
    end: int
    speed: float


VISITS = (Visit(50, 110, 0.5), Visit(160, 220, 0.25))
NUM_STEPS = 270


def main() -> int:
    """Trains, draws and prints the shares in the middle of each stretch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results/shares_over_time.png")
    out: Path = parser.parse_args().out
    devices = evener.devices("cpu")[:2]
    if len(devices) < 2:
        raise SystemExit("two CPU devices are needed, a fast one and a slow one")
    model = make_model(WORKLOADS[WORKLOAD])
    evener.parallelize(model, devices, shares="auto")
    try:
        shares = train(model, devices[1], lambda: evener.report(model).shares)
    finally:
        evener.release(model)
    draw(shares, [device.label for device in devices], out)
    edges = [0, *(step for visit in VISITS for step in (visit.first, visit.end)), NUM_STEPS]
    for first, end in itertools.pairwise(edges):
        print(f"steps {first} to {end - 1}: at the end {shares[end - 1]}")
    print(f"written to {out}")
    return 0


def train(
    model: torch.nn.Module, slowed: evener.Device, read_shares: Callable[[], tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Takes the steps, with the visitors on one device's cores; returns the shares of each."""
    work = WORKLOADS[WORKLOAD]
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr, momentum=0.9)
    batches = itertools.cycle(make_batches(work))
    found = []
    with ExitStack() as there:
        for step in range(NUM_STEPS):
            for visit in VISITS:
                if step == visit.first:
                    there.enter_context(Neighbour(slowed.cores, visit.speed))
                if step == visit.end:
                    there.close()
            inputs, targets = next(batches)
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            found.append(read_shares())
    return found


def draw(shares: Sequence[tuple[int, ...]], labels: Sequence[str], path: Path) -> None:
    """Draws each device's share at each step, and when the visitors were there, as a PNG file."""
    # Not pyplot, which would choose a screen.
    from matplotlib.figure import Figure  # noqa: PLC0415 (slow to import)

    figure = Figure(figsize=(8.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for visit in VISITS:
        axes.axvspan(visit.first, visit.end, color="0.9", zorder=0)
        middle = (visit.first + visit.end) / 2
        text = f"neighbour on {labels[1]}:\nspeed {visit.speed:g}"
        place = {"ha": "center", "va": "top", "transform": axes.get_xaxis_transform()}
        axes.text(middle, 0.97, text, **place)
    for number, (label, of_device) in enumerate(
        zip(labels, zip(*shares, strict=True), strict=True)
    ):
        axes.step(range(len(shares)), of_device, where="post", color=f"C{number}", label=label)
    axes.set_xlim(0, len(shares))
    axes.set_ylim(0, 1.25 * max(map(sum, shares)))  # with room for the visitors' names
    axes.set_xlabel("step")
    axes.set_ylabel("samples of a batch")
    axes.set_title(f'{WORKLOAD}: shares="auto" while neighbours come and go')
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
