"""Dependence: submodules in which a sample's output depends on the other samples of the batch.

Each submodule is called twice on what it was given in a step on one device: on all of it, and on
the devices' parts of it one after the other. The parts of what comes out must be the same::

    whole step, recorded     x ──► layer ──► y
    again, in one process    x[:a] ──► layer ──► y'    x[a:] ──► layer ──► y"     y = y', y" ?

Where the batch lies in the tensors inside of a model is seen from a run on each part of the
inputs: it is the dimension that becomes shorter. Random numbers stand still meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.batches import Batch
from evener.distance import distance, largest
from evener.still import generators_kept, hooked, random_numbers_still
from evener.trees import flatten, summed, unflatten

#: What is wrong with an output: with those that have a batch, and with those that have none.
SAMPLES, SUM, MEAN = "samples", "sum", "mean"


@dataclass(frozen=True)
class Dependence:
    """A submodule that sees how a batch is cut.

    Attributes:
        path: where it is; empty for the module itself, in the code of its own forward.
        kind: its class.
        is_norm: whether it is a batch norm.
        what: ``"samples"``: outputs of samples depend on other samples; ``"sum"``: an output
            without a batch is a sum over samples; ``"mean"``: one is neither that nor their mean.
    """

    path: str
    kind: str
    is_norm: bool
    what: str


@dataclass
class _Called:
    """One call of a submodule."""

    inputs: list[Any]
    structure: Any
    outputs: list[Any]
    sums: set[int]


def dependent(
    copies: Callable[[], nn.Module],
    batch: Batch,
    parts: Sequence[tuple[int, int]],
    seed: int,
) -> list[Dependence]:
    """Find the submodules that see how a batch is cut.

    Args:
        copies: makes a copy of the module.
        batch: the inputs, in the copies' precision.
        parts: the devices' parts of the batch.
        seed: where Python's and NumPy's random numbers begin.

    Returns:
        The deepest ones: a module that contains one is not told.
    """
    size = batch.size or 0
    whole = _record(copies(), batch, (0, size), seed)
    cut = [_record(copies(), batch, part, seed) for part in parts]
    again = copies()
    found: dict[str, Dependence] = {}
    for (path, number), called in whole.items():
        pieces = [record[path, number] for record in cut if (path, number) in record]
        if path in found or len(pieces) < len(cut):
            continue
        each = again.get_submodule(path)
        what = _judge(each, called, pieces, [stop - start for start, stop in parts], seed)
        if what is not None:
            found[path] = Dependence(path, type(each).__name__, isinstance(each, _BatchNorm), what)
    return [
        dependence
        for path, dependence in found.items()
        if not any(other != path and other.startswith(f"{path}.".lstrip(".")) for other in found)
    ]


def _record(
    module: nn.Module, batch: Batch, part: tuple[int, int], seed: int
) -> dict[tuple[str, int], _Called]:
    """Run a module on a part of the batch, and note what each submodule was given and gave."""
    names = {id(each): name for name, each in module.named_modules()}
    counts: Counter[str] = Counter()
    stack: list[tuple[list[Any], Any]] = []
    calls: dict[tuple[str, int], _Called] = {}

    def begin(_module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves, structure = flatten((args, kwargs))
        stack.append(([_cloned(leaf) for leaf in leaves], structure))

    def end(each: nn.Module, _args: Any, _kwargs: Any, outputs: Any) -> None:
        leaves, structure = flatten(outputs)
        path = names[id(each)]
        cloned = [_cloned(leaf) for leaf in leaves]
        calls[path, counts[path]] = _Called(*stack.pop(), cloned, set(summed(structure)))
        counts[path] += 1

    leaves = [_cloned(leaf) for leaf in batch.piece(*part)]
    args, kwargs = unflatten(batch.structure, leaves)
    with (
        hooked(module, begin, end),
        torch.no_grad(),
        random_numbers_still(),
        generators_kept(seed),
    ):
        module(*args, **kwargs)
    return calls


def _cloned(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _judge(  # noqa: PLR0911 - each return is one thing that can be told
    module: nn.Module,
    called: _Called,
    pieces: Sequence[_Called],
    shares: Sequence[int],
    seed: int,
) -> str | None:
    """Call one submodule on all of its input and on the parts, and compare."""
    dims = [
        _dim(leaf, [piece.inputs[i : i + 1] for piece in pieces])
        for i, leaf in enumerate(called.inputs)
    ]
    if not any(isinstance(dim, int) for dim in dims) or "?" in dims:
        return None  # nothing to cut, or nobody knows where

    def run(leaves: list[Any]) -> list[Any]:
        args, kwargs = unflatten(called.structure, [_cloned(leaf) for leaf in leaves])
        with torch.no_grad(), random_numbers_still(), generators_kept(seed):
            outputs: list[Any] = flatten(module(*args, **kwargs))[0]
        return outputs

    try:
        whole = run(called.inputs)
        parts = [run(_part(called.inputs, dims, pieces, k)) for k in range(len(pieces))]
        if _differ(whole, called.outputs) or _differ(run(called.inputs), whole):
            return None  # it remembers something: what it does cannot be repeated
    except Exception:  # noqa: BLE001 - a part that it refuses says nothing
        return None
    for i, leaf in enumerate(whole):
        others = [part[i : i + 1] for part in parts]
        dim = _dim(leaf, others)
        if dim == "?":
            return SAMPLES
        if not isinstance(leaf, Tensor) or not all(others):
            continue
        joined = _joined(leaf, [one for (one,) in others], dim, shares, is_sum=i in called.sums)
        if joined is None or not _differ([joined], [leaf]):
            continue
        if dim is not None:
            return SAMPLES
        total = sum(one for (one,) in others)
        return MEAN if _differ([total], [leaf]) else SUM
    return None


def _joined(
    leaf: Tensor, parts: list[Tensor], dim: Any, shares: Sequence[int], *, is_sum: bool
) -> Tensor | None:
    """What the devices' outputs come to, as evener joins them; None where they must be equal."""
    if dim is not None:
        return torch.cat(parts, dim)
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return None
    scales = [1.0 if is_sum else share / sum(shares) for share in shares]
    terms = [part * scale for part, scale in zip(parts, scales, strict=True)]
    return torch.stack(terms).sum(0)


def _part(leaves: list[Any], dims: list[Any], pieces: Sequence[_Called], k: int) -> list[Any]:
    """The k-th device's part of each input."""
    made = []
    for i, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None:
            made.append(leaf)
            continue
        stops = list(accumulate(piece.inputs[i].shape[dim] for piece in pieces))
        start = stops[k - 1] if k else 0
        made.append(leaf.narrow(dim, start, stops[k] - start).contiguous())
    return made


def _dim(leaf: Any, parts: Sequence[Sequence[Any]]) -> Any:
    """The dimension in which tensors are parts of another; None: none; "?": cannot be told."""
    if not all(parts):
        return "?"
    shapes = [part[0].shape for part in parts if isinstance(part[0], Tensor)]
    if not isinstance(leaf, Tensor) or len(shapes) < len(parts):
        return None
    if all(shape == leaf.shape for shape in shapes):
        return None
    for dim in range(leaf.dim()):
        fits = all(
            len(shape) == leaf.dim()
            and [*shape[:dim], *shape[dim + 1 :]]
            == [
                *leaf.shape[:dim],
                *leaf.shape[dim + 1 :],
            ]
            for shape in shapes
        )
        if fits and sum(shape[dim] for shape in shapes) == leaf.shape[dim]:
            return dim
    return "?"


def _differ(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether tensors differ by more than rounding ever comes to."""
    for one, other in zip(some, others, strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            continue
        if one.shape != other.shape:
            return True
        floats = one.is_floating_point() or one.is_complex()
        limit = math.sqrt(torch.finfo(one.dtype).eps) if floats else 0.0
        if distance(one, other) > limit * largest(other):
            return True
    return False
