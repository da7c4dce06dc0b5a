"""A verification: what came out of a comparison of one step on one device and on a team."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from evener.causes import Cause
from evener.devices import Device
from evener.differences import DIFFERENT, EQUAL, RANDOM, ROUNDING, Difference, count, show


@dataclass(frozen=True)
class Verification:
    """What one step on a team leaves, compared with the same step on one device.

    ``str`` is a table. It is true where nothing differs by more than rounding, or by more than
    the random numbers that each device draws itself: ``assert evener.verify(model, x)``.

    Attributes:
        rows: a row for each tensor: outputs, loss, gradients, buffers, and what forward changes.
        causes: why something differs by more than rounding, as far as it was found.
        devices: the devices of the team.
        shares: the samples of each.
        precision: in which dtype rounding was measured; None where the module refuses it.
        refused: why it did. Else empty.
        grid: into how many cells the batch was cut; None without a grid.
    """

    rows: tuple[Difference, ...]
    causes: tuple[Cause, ...]
    devices: tuple[Device, ...]
    shares: tuple[int, ...]
    precision: torch.dtype | None
    refused: str = ""
    grid: int | None = None

    @property
    def verdict(self) -> str:
        """The worst of the rows': ``"equal"``, ``"rounding"``, ``"random"`` or ``"different"``."""
        found = {row.verdict for row in self.rows}
        return next((v for v in (DIFFERENT, RANDOM, ROUNDING) if v in found), EQUAL)

    def __bool__(self) -> bool:
        return self.verdict != DIFFERENT

    def __repr__(self) -> str:
        return f"<Verification of {len(self.rows)} tensors: {self.verdict}>"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        team = ", ".join(
            f"{device.label} ({share} samples)"
            for device, share in zip(self.devices, self.shares, strict=True)
        )
        cells = "" if self.grid is None else f" in {self.grid} cells"
        yield f"One step on one device, and on {team}{cells}, from the same state."
        yield show(self.rows)
        yield f"{count(self.rows)}."
        if self.precision is None:
            reason = f": {self.refused}" if self.refused else ""
            yield f"Rounding was not measured, 1000 eps were allowed{reason}"
        is_shared = sum(share > 0 for share in self.shares) > 1 or self.grid is not None
        if not is_shared:
            yield "Only one device had samples, so nothing was shared: give a larger batch."
        yield {
            EQUAL: "Equal, bit for bit.",
            ROUNDING: "Equal up to rounding.",
            RANDOM: "Equal up to rounding, but for random numbers.",
            DIFFERENT: "Different by more than rounding.",
        }[self.verdict]
        for cause in self.causes:
            yield f"* {cause}"
