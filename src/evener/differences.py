"""Differences: what one device and a team have left of the same step, tensor by tensor.

Which differences are rounding is measured, not guessed. Rounding has two marks; one is enough:

* it is not much larger than the rounding error of one device itself, which is the difference
  between its step and the same step in another precision (float64; for float64 modules float32,
  scaled by what one rounds less than the other);
* it goes away in float64 (and in float32 what is rounding in float64 grows): there the team
  differs from one device by less, in the proportion of the two precisions' roundings. A difference
  that is real stays. The limit is between both, at the geometric mean.

A difference that is none of them comes from somewhere else. Where the module refuses the other
precision, and in float64, of which float32 tells little, what is below ``1000 eps`` of a tensor's
largest value counts as rounding, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evener import table
from evener.batches import agree
from evener.distance import distance, largest
from evener.step import KINDS, Named

EQUAL, ROUNDING, RANDOM, DIFFERENT = "equal", "rounding", "random", "different"
#: So much larger than one device's own rounding error a difference may be.
FACTOR = 8.0
#: So many roundings it may be where one device's own error could not be measured, or not well.
NUM_ROUNDINGS = 1000.0
#: A sum of few terms may round well by chance: one device's error counts for as much at least.
LEAST_ROUNDINGS = 2.0
#: How many rows the table shows.
NUM_SHOWN = 12


@dataclass(frozen=True)
class Difference:
    """The difference of one tensor between one device and the team.

    Attributes:
        kind: ``"output"``, ``"loss"``, ``"gradient"``, ``"buffer"``; and where the step has
            changed them ``"parameter"``, ``"attribute"``, ``"input"``.
        name: which one: ``"['logits']"``, ``"layers.0.weight"``; empty for a single output.
        shape: its shape on one device; None if it is no tensor there.
        largest: the largest difference of two of its numbers.
        relative: the same, in parts of its largest number on one device.
        own: how much one device itself differs from the other precision at most, in parts of the
            largest number, scaled to this precision; None if that was not measured.
        verdict: ``"equal"``: bit for bit; ``"rounding"``; ``"random"``: it goes away when no
            random numbers are drawn; ``"different"``.
        note: what is different where it is not numbers: a shape, a dtype. Else empty.
    """

    kind: str
    name: str
    shape: tuple[int, ...] | None
    largest: float
    relative: float
    own: float | None
    verdict: str
    note: str = ""

    @property
    def title(self) -> str:
        """Kind and name."""
        return f"{self.kind} {self.name}" if self.name else self.kind


def differences(
    one: Named,
    team: Named,
    one_other: Named | None,
    team_other: Named | None = None,
) -> list[Difference]:
    """Compare what two steps have left.

    Args:
        one: on one device.
        team: on the team.
        one_other: on one device in the other precision; None if the module refuses it.
        team_other: on the team in the other precision. Default: was not tried.

    Returns:
        A row for each tensor, in the order of the kinds.
    """
    keys = sorted({**one, **team}, key=lambda key: KINDS.index(key[0]))
    return [_difference(key, one, team, one_other, team_other) for key in keys]


def _difference(
    key: tuple[str, str],
    one: Named,
    team: Named,
    one_other: Named | None,
    team_other: Named | None,
) -> Difference:
    missing = object()
    a, b = one.get(key, missing), team.get(key, missing)
    shape = tuple(a.shape) if isinstance(a, Tensor) else None
    note = _note(a, b, missing)
    if note or not isinstance(a, Tensor):
        verdict, size = (DIFFERENT, math.inf) if note else (EQUAL, 0.0)
        return Difference(*key, shape, size, size, None, verdict, note)
    apart, scale = distance(a, b), largest(a)
    relative = apart / scale if scale else (math.inf if apart else 0.0)
    own = _own_error(a, (one_other or {}).get(key))
    verdict = EQUAL
    if apart:
        again = _again(key, one_other, team_other)
        verdict = ROUNDING if _is_rounding(a, apart, scale, own, again) else DIFFERENT
    shown = None if own is None else own / scale if scale else 0.0
    return Difference(*key, shape, apart, relative, shown, verdict)


def _is_rounding(
    a: Tensor, apart: float, scale: float, own: float | None, again: float | None
) -> bool:
    eps = _eps(a)
    if not math.isfinite(apart):
        return False
    few = NUM_ROUNDINGS if own is None or eps == _EPS_64 else FACTOR * LEAST_ROUNDINGS
    if eps and apart <= max(few * eps * scale, FACTOR * (own or 0.0)):
        return True
    if again is None or not eps:  # whole numbers: argmax of two that were nearly equal
        return again == 0
    limit = max(apart, eps * scale)
    if eps > _EPS_64:
        return again <= math.sqrt(_EPS_64 / eps) * limit
    return again >= math.sqrt(_EPS_32 / eps) * limit


_EPS_32 = torch.finfo(torch.float32).eps
_EPS_64 = torch.finfo(torch.float64).eps


def _eps(tensor: Tensor) -> float:
    floats = tensor.is_floating_point() or tensor.is_complex()
    return torch.finfo(tensor.dtype).eps if floats else 0.0


def _own_error(a: Tensor, other: Any) -> float | None:
    if not isinstance(other, Tensor) or other.shape != a.shape or not _eps(a):
        return None if _eps(a) or other is None else 0.0
    return distance(a, other) * min(1.0, _eps(a) / _eps(other)) if _eps(other) else None


def _again(
    key: tuple[str, str], one_other: Named | None, team_other: Named | None
) -> float | None:
    """The difference in the other precision; None where there is none to be told."""
    a, b = (one_other or {}).get(key), (team_other or {}).get(key)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
        return None
    return distance(a, b)


def apart_from_random(rows: Sequence[Difference], still: Sequence[Difference]) -> list[Difference]:
    """Judge a step in which random numbers are drawn by the same one in which they are not.

    Its own rounding cannot be measured: in another precision other numbers are drawn.

    Args:
        rows: of the step.
        still: of the one without random numbers.
    """
    others = {(row.kind, row.name): row for row in still}
    made = []
    for row in rows:
        other = others.get((row.kind, row.name))
        if other is None or other.verdict == DIFFERENT or row.verdict == EQUAL:
            verdict = row.verdict if row.verdict == EQUAL else DIFFERENT
        else:
            is_alike = not row.note and row.relative <= FACTOR * max(
                other.own or 0.0, other.relative
            )
            verdict = ROUNDING if is_alike else RANDOM
        made.append(replace(row, own=other.own if other else None, verdict=verdict))
    return made


def _note(a: Any, b: Any, missing: object) -> str:
    """What makes numbers not comparable; empty where they are."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape:
            return f"shape {tuple(b.shape)} for {tuple(a.shape)}"
        return f"{b.dtype} for {a.dtype}" if a.dtype != b.dtype else ""
    if a is missing or b is missing or isinstance(a, Tensor) or isinstance(b, Tensor):
        return f"{_shown(b, missing)} for {_shown(a, missing)}"
    return "" if agree(a, b) else f"{_shown(b, missing)} for {_shown(a, missing)}"


def _shown(value: Any, missing: object) -> str:
    if value is missing or value is None:
        return "none"
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 20 else f"{text[:17]}..."  # noqa: PLR2004 - a cell


# ------------------------------------------------------------------ the table


def show(rows: Sequence[Difference]) -> str:
    """A table of the largest differences; those that matter most come first."""
    rank = {DIFFERENT: 0, RANDOM: 1, ROUNDING: 2, EQUAL: 3}
    ordered = sorted(rows, key=lambda row: (rank[row.verdict], -row.relative))
    shown = [row for row in ordered if row.verdict != EQUAL][:NUM_SHOWN]
    shown = shown or [row for row in ordered if row.kind in ("output", "loss")][:NUM_SHOWN]
    headings = ["", "of", "shape", "largest\ndifference", "of the\nlargest\nvalue"]
    headings += ["rounding\nof one\ndevice", "verdict"]
    cells = [
        [
            row.kind,
            f"{row.name}: {row.note}".lstrip(": ") if row.note else row.name or "-",
            "x".join(map(str, row.shape)) if row.shape else "",
            "-" if row.note else f"{row.largest:.1e}",
            "-" if row.note else f"{row.relative:.1e}",
            "-" if row.own is None else f"{row.own:.1e}",
            row.verdict,
        ]
        for row in shown
    ]
    return table.text(headings, cells, [""] * len(headings))


def count(rows: Iterable[Difference]) -> str:
    """How many tensors there are of each kind and each verdict, in a line."""
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        of_kind = counts.setdefault(row.verdict, {})
        of_kind[row.kind] = of_kind.get(row.kind, 0) + 1
    return "; ".join(
        f"{verdict}: {_listed(counts[verdict])}"
        for verdict in (EQUAL, ROUNDING, RANDOM, DIFFERENT)
        if verdict in counts
    )


def _listed(of_kind: Mapping[str, int]) -> str:
    plural = {"loss": "losses"}
    return ", ".join(
        f"{n} {kind}" if n == 1 else f"{n} {plural.get(kind, kind + 's')}"
        for kind, n in of_kind.items()
    )
