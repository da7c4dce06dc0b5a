"""Causes: why a team's step is not that of one device, in words.

No cause is guessed from a name: each was found by trying (see :mod:`evener.experiment`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evener.dependence import SAMPLES, SUM, Dependence
from evener.differences import DIFFERENT, Difference

#: The kinds of causes.
RANDOM, DEPENDENT, AVERAGE, CHANGED = "random", "dependent", "average", "changed"
REPLICA, UNKNOWN = "replica", "unknown"


@dataclass(frozen=True)
class Cause:
    """Why something differs.

    Attributes:
        kind: ``"random"``: random numbers are drawn; ``"dependent"``: a layer in which samples
            depend on each other; ``"average"``: an output without a batch that is no mean over
            samples; ``"changed"``: something that the module changes in its forward;
            ``"replica"``: the module is another one in a helper; ``"unknown"``.
        where: the paths of the submodules, or the names of what is changed.
        text: what it is, and the way out.
    """

    kind: str
    where: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return self.text


# ------------------------------------------------------------------ random numbers


def of_random(paths: Sequence[str], root: str, *, is_all: bool | None) -> Cause:
    """The cause where random numbers are drawn.

    Args:
        paths: the submodules that draw.
        root: the class of the module itself.
        is_all: whether everything is equal without them; None if nobody knows.
    """
    told = {
        True: "with random numbers held still everything is equal",
        False: "not the only cause",
        None: "whether there are other causes cannot be told, for without them it fails",
    }[is_all]
    return Cause(
        RANDOM,
        tuple(paths),
        f"random numbers are drawn in {_listed(paths, root)}: each device draws its own (dropout "
        f"masks and the like), as no two runs with other seeds are equal; {told}",
    )


# ------------------------------------------------------------------ how a batch is cut


def of_dependences(
    dependences: Sequence[Dependence], *, in_cells: bool = False
) -> Iterator[Cause]:
    """A cause for those submodules of which the same is to be told.

    Args:
        dependences: what was found.
        in_cells: whether the batch has a grid. Default: no.
    """
    groups: dict[tuple[bool, str], list[Dependence]] = {}
    for each in dependences:
        groups.setdefault((each.is_norm, each.what), []).append(each)
    for (is_norm, what), group in groups.items():
        who = ", ".join(_few([_called(each) for each in group]))
        yield Cause(
            DEPENDENT if what == SAMPLES else AVERAGE,
            tuple(each.path for each in group),
            f"{who}: {_told(is_norm, what, in_cells)}",
        )


def _told(is_norm: bool, what: str, in_cells: bool) -> str:  # noqa: FBT001 - from a key
    if what == SAMPLES and is_norm and in_cells:
        return (
            "batch norm in training takes mean and variance of each cell of the grid, not of the "
            "whole batch; a smaller grid= makes larger cells, or leave it out"
        )
    if what == SAMPLES and is_norm:
        return (
            "batch norm in training takes mean and variance of each device's own share, not of "
            'the whole batch; give batchnorm="exact"'
        )
    if what == SAMPLES:
        return (
            "the output for a sample depends on the other samples of the batch, and each device "
            "sees only its part; compute that outside of the module, on the whole batch"
        )
    if what == SUM:
        return (
            "an output without a batch is a sum over the batch, and the devices' are joined as a "
            "mean weighted by samples; return evener.Sum(total), or the mean"
        )
    return (
        "an output without a batch is no mean over samples, and the devices' are joined as one; "
        "return evener.Mean(total, weight) if it is a mean over something else"
    )


# ------------------------------------------------------------------ what forward changes

_CHANGED = {
    "attribute": "forward sets it; the module keeps the first device's, made from its part of the "
    "batch. Return it from forward, or compute it outside",
    "buffer": "forward changes it; the module keeps the first device's, made from its part of the "
    "batch",
    "input": "forward changes this input in place, and only the first device's part is yours. "
    "Return the result instead",
    "parameter": "forward changes this parameter in place; all devices do so at the same time. "
    "Change it outside of forward",
}


_CHANGED_IN_CELLS = {
    "attribute": "forward sets it; the module keeps that of the first cell of the grid. Return it "
    "from forward, or compute it outside",
    "buffer": "forward changes it; the module keeps what all cells of the grid have changed, each "
    "weighted by its samples (the first cell's, if it is not of floats)",
}


def changed(
    rows: Sequence[Difference], known: Sequence[Cause], *, in_cells: bool = False
) -> Iterator[Cause]:
    """The causes that rows show by themselves: what forward itself changes.

    Args:
        rows: all rows.
        known: causes found before: the buffers of these modules are told by them.
        in_cells: whether the batch has a grid. Default: no.
    """
    covered = {path for cause in known if cause.kind == DEPENDENT for path in cause.where}
    for kind, text in (_CHANGED | (_CHANGED_IN_CELLS if in_cells else {})).items():
        names = [
            row.name
            for row in rows
            if row.kind == kind
            and row.verdict == DIFFERENT
            and not (kind == "buffer" and row.name.rpartition(".")[0] in covered)
        ]
        if names:
            yield Cause(CHANGED, tuple(names), f"{kind} {', '.join(_few(names))}: {text}")


# ------------------------------------------------------------------ text


def _called(dependence: Dependence) -> str:
    if dependence.path:
        return f"{dependence.path} ({dependence.kind})"
    return f"the code of {dependence.kind}.forward itself"


def _listed(paths: Sequence[str], root: str) -> str:
    return ", ".join(_few([path or f"{root}.forward itself" for path in paths]))


def _few(names: Sequence[str], num: int = 4) -> list[str]:
    more = [f"{len(names) - num} more"] if len(names) > num else []
    return [*names[:num], *more]
