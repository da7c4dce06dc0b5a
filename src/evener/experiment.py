"""An experiment: the same step, from the same state, on one device and on a team.

One step on one device and one on the team are compared, and one on one device in another
precision, which tells what rounding is here. Where a difference is more than rounding, other
steps tell why::

    in the other precision     on the team: rounding goes away, a real difference does not
    random numbers held still  on both: what dropout does goes away
    the batch by parts         submodule by submodule, in one process (see ``dependence``)
    the whole batch            on a helper alone: whether its replica is the user's module
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.batches import Batch
from evener.causes import REPLICA, UNKNOWN, Cause, changed, of_dependences, of_random
from evener.dependence import Dependence, dependent
from evener.devices import Device
from evener.differences import DIFFERENT, RANDOM, Difference, apart_from_random, differences
from evener.dims import Dims
from evener.grid import cells_of
from evener.parallelize import BATCHNORM, parallelize, release
from evener.report import report
from evener.step import Named, Precision, Step
from evener.still import drawers, generators_kept
from evener.trees import flatten, unflatten
from evener.verification import Verification

_OWN = Precision()


class Experiment:
    """Runs the steps that are compared, and those that tell why they differ.

    Args:
        step: what is done in each of them.
        found: the devices of the team.
        options: of :func:`evener.parallelize`.
    """

    def __init__(self, step: Step, found: Sequence[Device], options: dict[str, Any]) -> None:
        self._step = step
        self._devices = found
        self._options = {**options, "devices": list(found)}
        self._grid: int | None = options.get("grid")
        self._shares: tuple[int, ...] = ()
        self._refused = ""
        self._refused_still = False
        self._other = Precision(_other_precision(step))

    def result(self) -> Verification:
        """Compare, and look for causes where something differs by more than rounding."""
        causes: list[Cause] = []
        paths = self._drawers()
        rows = self._compare()
        if paths:
            rows = self._apart_from_random(rows)
        elif _differ(rows):
            rows = self._compare_again(rows)
        if _differ(rows) and not self._refused_still:
            in_cells = self._grid is not None
            causes += of_dependences(self._dependences(), in_cells=in_cells)
            causes += changed(rows, causes, in_cells=in_cells)
        if paths and any(row.verdict in (RANDOM, DIFFERENT) for row in rows):
            root = type(self._step.module).__name__
            is_all = None if self._refused_still else not _differ(rows)
            causes.append(of_random(paths, root, is_all=is_all))
        elif _differ(rows) and not causes:
            causes.append(self._elsewhere())
        return Verification(
            tuple(rows),
            tuple(causes),
            tuple(self._devices),
            self._shares,
            self._other.real if self._one_other is not None else None,
            self._refused,
            self._grid,
        )

    def _compare(self, *, still: bool = False) -> list[Difference]:
        self._still = still
        self._one_own = self._one(_OWN)
        try:
            self._one_other: Named | None = self._one(self._other)
        except Exception as error:  # noqa: BLE001 - the module may be made for one precision only
            self._one_other = None
            self._refused = f"in {self._other.real} it raises {type(error).__name__}: {error}"
        self._team_own = self._team(_OWN)
        return differences(self._one_own, self._team_own, self._one_other)

    def _compare_again(self, rows: list[Difference]) -> list[Difference]:
        """Compare with what the team does in the other precision, if it can."""
        if self._one_other is None:
            return rows
        try:
            team_other = self._team(self._other)
        except Exception:  # noqa: BLE001 - as above
            return rows
        return differences(self._one_own, self._team_own, self._one_other, team_other)

    def _one(self, precision: Precision) -> Named:
        with _threads(len(self._devices[0].cores)):
            made = self._step.copy(precision, still=self._still)
            return self._step.run(made, precision, self._step.copy(precision, still=self._still))

    def _team(self, precision: Precision, shares: Sequence[float] | None = None) -> Named:
        step, options = self._step, dict(self._options)
        if shares is not None:
            options["shares"] = shares
        made = parallelize(step.copy(precision, still=self._still), **options)
        try:
            left = step.run(made, precision, step.copy(precision, still=self._still))
            if shares is None:
                self._shares = report(made).shares
        finally:
            release(made)
        return left

    def _drawers(self) -> list[str]:
        made, (args, kwargs) = self._step.copy(_OWN), self._step.inputs(_OWN)
        with generators_kept(self._step.seed):
            return drawers(made, lambda: made(*args, **kwargs))

    def _apart_from_random(self, rows: list[Difference]) -> list[Difference]:
        """Judge by what there is when no random numbers are drawn."""
        self._refused = ""
        try:
            still = self._compare(still=True)
            if _differ(still):
                still = self._compare_again(still)
        except Exception as error:  # noqa: BLE001 - a module that computes with a random number
            self._refused = f"held still, the module raises {type(error).__name__}: {error}"
            self._refused_still = True
            return rows
        return apart_from_random(rows, still)

    def _dependences(self) -> list[Dependence]:
        step, options = self._step, self._options
        precision = _OWN if self._one_other is None else self._other
        dims = Dims(options.get("in_dims", 0), options.get("out_dims", 0))
        leaves, structure = flatten((step.args, step.kwargs))
        args, kwargs = unflatten(
            structure,
            [precision.convert(x) if isinstance(x, Tensor) else x for x in leaves],
        )
        batch = Batch(args, kwargs, dims, step.module.forward)
        size = batch.size or 0
        sizes = cells_of(size, self._grid) if self._grid and size else self._shares
        pairs = zip(sizes, accumulate(sizes), strict=True)
        parts = [(stop - share, stop) for share, stop in pairs if share]
        if not batch.size or len(parts) < 2:  # noqa: PLR2004 - nothing was cut
            return []
        is_exact = (options.get("batchnorm") or BATCHNORM) == "exact" and self._grid is None

        def copies() -> nn.Module:
            made = step.copy(precision)
            for each in made.modules():
                if is_exact and isinstance(each, _BatchNorm):
                    each.eval()  # the team's is that of the whole batch
            return made

        return dependent(copies, batch, parts, step.seed)

    def _elsewhere(self) -> Cause:
        """What is to blame where neither the cut nor random numbers are."""
        last = [0.0] * (len(self._devices) - 1) + [1.0]
        rows = differences(self._one_own, self._team(_OWN, last), self._one_other)
        names = tuple(row.title for row in rows if row.verdict == DIFFERENT)
        if names:
            return Cause(
                REPLICA,
                names,
                f"a helper computes something else from the whole batch ({names[0]}), so its copy "
                "of the module is not yours: a global variable or an attribute of a class "
                "that changed, or a tensor that is not registered; make it an attribute or buffer",
            )
        return Cause(
            UNKNOWN,
            (),
            "not found: no submodule sees how the batch is cut, no random numbers are drawn, and "
            "a helper computes the same from the whole batch; please report it with this table",
        )


def _differ(rows: Sequence[Difference]) -> bool:
    return any(row.verdict == DIFFERENT for row in rows)


def _other_precision(step: Step) -> torch.dtype:
    """Float64, or float32 for what is in float64 already."""
    leaves = flatten((step.args, step.kwargs))[0]
    tensors = [*step.module.parameters(), *step.module.buffers(), *leaves]
    dtypes = {
        each.dtype.to_real()
        for each in tensors
        if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex())
    }
    return torch.float32 if dtypes == {torch.float64} else torch.float64


@contextmanager
def _threads(num: int) -> Iterator[None]:
    """One device computes with as many threads as the first of the team has cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, num))
    try:
        yield
    finally:
        torch.set_num_threads(before)
