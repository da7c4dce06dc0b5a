"""Times how long it takes to notice that nothing changed in a module."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment
from evener.replica import shared_tensors
from evener.textbook.resnet import ResNet18
from evener.versions import is_counted
from evener.watch import Watch
from tables import section, write

NUM_ROUNDS = 100


def convolutional(num_blocks: int) -> nn.Module:
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.Dropout(0.1),
            )
            for _ in range(num_blocks)
        )
    )


def transformer(num_layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-18": (lambda: ResNet18(width=16, num_classes=10), (32, 1, 28, 28)),
    "100 blocks of convolution, norm, ReLU, dropout": (lambda: convolutional(100), (16, 8, 8, 8)),
    "transformer of 45 layers": (lambda: transformer(45), (4, 16, 32)),
}


def timed(watch: Watch) -> float:
    """Microseconds of what a call does: a look before it, and one after the forward."""
    start = time.perf_counter()
    assert not watch.is_stale()
    assert not watch.has_moved()
    assert not watch.update()
    watch.accept()
    return (time.perf_counter() - start) * 1e6


def spread(values: list[float]) -> str:
    deciles = statistics.quantiles(values, n=10)
    return f"{statistics.median(values):.0f} ({deciles[0]:.0f}..{deciles[-1]:.0f})"


def measure(name: str) -> dict[str, Any]:
    make, shape = MODULES[name]
    module = make()
    watch = Watch(module, shared_tensors(module))
    x = torch.randn(shape)
    warm = [timed(watch) for _ in range(NUM_ROUNDS)]
    training, steps = [], []
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        while time.perf_counter() - start < 0.01:
            module(x).square().mean().backward()
        steps.append((time.perf_counter() - start) * 1e3)
        training.append(timed(watch))
    return {
        "module": name,
        "submodules": len(list(module.modules())),
        "parameters": len(list(module.parameters())),
        "buffers": len(list(module.buffers())),
        "warm_us": warm,
        "training_us": training,
        "steps_ms": steps,
    }


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    described = environment.describe(("torch",), 1)
    described["dictionaries"] = "counted" if is_counted() else "compared"
    found = [measure(name) for name in MODULES]
    rows = [
        f"| {each['module']} | {each['submodules']} | {each['parameters']} | {each['buffers']} "
        f"| {spread(each['warm_us'])} | {spread(each['training_us'])} "
        f"| {spread(each['steps_ms'])} |"
        for each in found
    ]
    lines = [
        "# Noticing that nothing changed",
        "",
        "Median (tenth..ninetieth percentile) of 100.",
        "",
        "| module | submodules | parameters | buffers | warm, us | in training, us | step, ms |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
        section("Environment", described),
        "",
    ]
    text = "\n".join(lines)
    print(text)
    folder = Path(__file__).resolve().parents[1] / "results"
    write(folder, "noticing", described, text, {"environment": described, "measured": found})


if __name__ == "__main__":
    main()
