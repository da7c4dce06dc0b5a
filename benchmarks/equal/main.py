"""Says how much a step on a team differs from that of one device, with evener.verify."""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment
import evener
from tables import markdown, section, write
from workloads import WORKLOADS, cross_entropy, make_batches, make_model

NAMES = {
    "smallmlp": "MLP, 0.3 M parameters",
    "mlp": "MLP, 10 M parameters",
    "resnet": "ResNet-18, exact batch norm",
    "lstm": "LSTM, 5000 words",
    "encoder": "transformer encoder",
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
TEAMS: tuple[tuple[str, Any], ...] = (("cpu*2", "even"), ("cpu*4", (5, 1, 3, 2)))
HEADING = [
    *("model", "precision", "shares", "outputs", "loss", "gradients: median", "largest"),
    *("one device's own rounding", "verdict"),
]


def measure(name: str, dtype: torch.dtype, team: tuple[str, Any], batchnorm: str) -> list[str]:
    inputs, targets = make_batches(WORKLOADS[name])[0]
    devices, shares = team
    with contextlib.redirect_stdout(io.StringIO()):
        found = evener.verify(
            make_model(WORKLOADS[name]).to(dtype),
            inputs.to(dtype) if inputs.is_floating_point() else inputs,
            loss=lambda scores: cross_entropy(scores, targets),
            devices=devices,
            shares=shares,
            batchnorm=batchnorm,
        )
    of = {
        kind: [row.relative for row in found.rows if row.kind == kind]
        for kind in ("output", "loss", "gradient")
    }
    own = max(row.own or 0.0 for row in found.rows if row.kind == "gradient")
    numbers = [max(of["output"]), max(of["loss"]), statistics.median(of["gradient"])]
    numbers += [max(of["gradient"]), own]
    return [
        NAMES[name] if batchnorm == "exact" else "ResNet-18, local batch norm",
        str(dtype).removeprefix("torch."),
        " + ".join(map(str, found.shares)),
        *(f"{number:.0e}" if number else "0" for number in numbers),
        found.verdict,
    ]


def main() -> None:
    rows = [
        measure(name, dtype, team, "exact") for name in NAMES for dtype in DTYPES for team in TEAMS
    ]
    rows += [measure("resnet", torch.float32, team, "local") for team in TEAMS]
    described = environment.describe(("torch",), len(evener.devices("cpu")))
    lines = [
        "# How equal a step on a team is to that of one device",
        "",
        "Largest differences, in parts of each tensor's largest value.",
        "",
        markdown([HEADING, *rows]),
        "",
        section("Environment", described),
        "",
    ]
    text = "\n".join(lines)
    print(text)
    folder = Path(__file__).resolve().parents[1] / "results"
    data = {
        "environment": described,
        "measured": [dict(zip(HEADING, row, strict=True)) for row in rows],
    }
    write(folder, "equal", described, text, data)


if __name__ == "__main__":
    main()
