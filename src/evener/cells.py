"""Cells: a device's part of a batch, computed in the cells of a grid, one after the other.

Each cell is a :class:`Piece` with a seed of its own and copies of its inputs, so what it gives
does not depend on who computes it, with which others (see :mod:`evener.grid`)::

    forward    │ cell 3 │ cell 4 │ cell 5 │        outputs of each cell, not joined
    backward   │ cell 3 │ cell 4 │ cell 5 │        gradients of each cell, added up in the tree

Where the graphs of all cells are too much for the device's memory, no graph outlives its cell, as
for :mod:`evener.portions`; the numbers stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evener.arena import normal_mode
from evener.batches import is_joinable, narrow
from evener.errors import BatchError
from evener.grid import Node, Tree
from evener.keeper import Changes, Keeper, add_changes
from evener.piece import Piece
from evener.strides import dense
from evener.trees import Structure


@dataclass
class Strip:
    """The cells of one device.

    Attributes:
        start: the number of the first.
        sizes: the samples of each.
        seeds: what the random numbers of each start from.
        num_cells: cells of the whole batch.
        batch: samples of the whole batch.
        cut_dims: for each leaf of the inputs the dimension that is cut, or None.
        orders: for each leaf that is a tensor its dimensions as they lie in memory.
    """

    start: int
    sizes: list[int]
    seeds: list[int]
    num_cells: int
    batch: int
    cut_dims: list[int | None]
    orders: Sequence[tuple[int, ...] | None]

    @property
    def stop(self) -> int:
        """The number behind that of the last."""
        return self.start + len(self.sizes)


class Cells(Piece):
    """The cells of a device; to it they are like a :class:`Piece`.

    Args:
        leaves: the leaves of the device's inputs.
        wanted: for each leaf whether a gradient with respect to it is wanted.
        structure: their structure.
        strip: which cells.
        module: the module that the forward belongs to.
        grad: whether a backward may follow.
        is_frugal: whether graphs are not kept.

    Attributes:
        strip: as given.
        outputs: after :meth:`forward`, the leaves of the first cell's outputs, then those of the
            next, and so on.
        changes: what the forward would have changed in the module's buffers, added up in the tree.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        wanted: Sequence[bool],
        structure: Structure,
        strip: Strip,
        module: nn.Module,
        *,
        grad: bool,
        is_frugal: bool,
    ) -> None:
        super().__init__(leaves, wanted, structure, strip.seeds[0], grad=grad)
        self._wanted = list(wanted)
        self.strip = strip
        self._module = module
        self._is_frugal = is_frugal
        self._kept: list[Piece] = []
        #: Numbers of the leaves that all cells share.
        self._common = [
            i
            for i, (leaf, want, dim) in enumerate(zip(leaves, wanted, strip.cut_dims, strict=True))
            if not isinstance(leaf, Tensor) or (dim is None and not want)
        ]
        self._given = list(leaves)
        with normal_mode(), torch.no_grad():
            for i in self._common:
                if isinstance(leaves[i], Tensor):
                    self._given[i] = dense(leaves[i], strip.orders[i])
        self.changes: list[Node[Changes]] = []

    def forward(self, function: Callable[..., Any]) -> Structure:
        """Run the module's forward on one cell after the other.

        Returns:
            The structure of the outputs of one cell.

        Raises:
            BatchError: if cells differ in the structure of their outputs, or change an input in
                place that all of them share, or are too small for batch norm.
            ModuleError: see :meth:`Keeper.end`.
        """
        strip = self.strip
        tree: Tree[Changes] = Tree(strip.num_cells, add_changes)
        structure: Structure | None = None
        common = self._changes_of_common()
        keeper = Keeper(self._module)
        try:
            for number, cell in self._cells():
                keeper.begin()
                with _explained(strip.sizes[number - strip.start], strip):
                    its = cell.forward(function)
                weight = strip.sizes[number - strip.start] / strip.batch
                tree.push(0, number, keeper.end(weight, is_first=number == 0))
                if common != self._changes_of_common():
                    raise BatchError(
                        "forward changes in place an input that is not cut along the batch; with "
                        "grid= the next cell would see it; clone it in forward first"
                    )
                if structure is not None and its != structure:
                    raise BatchError(
                        f"the outputs of the cells differ in structure: {structure} of cell "
                        f"{strip.start}, {its} of cell {number}; a parallel module must return "
                        "the same structure for every part of a batch"
                    )
                structure = its
                if self._is_frugal:
                    self.outputs += map(_without_graph, cell.outputs)
                else:
                    self.outputs += cell.outputs
                    self._kept.append(cell)
        finally:
            keeper.restore()
        self.changes = tree.nodes
        assert structure is not None  # noqa: S101 - there is one cell or more
        return structure

    def backward(
        self, function: Callable[..., Any], gradients: Sequence[Tensor | None]
    ) -> Iterator[tuple[int, Piece, list[Tensor | None]]]:
        """Make each cell ready for its backward, one after the other.

        Args:
            function: the module's forward, for where no graph was kept.
            gradients: one for each joinable tensor among ``outputs``, or None.

        Yields:
            The number of a cell, the cell after its forward, and the gradients of its outputs.
        """
        for leaf in self.inputs:
            leaf.grad = None
        rest = iter(gradients)
        if not self._is_frugal:
            for number, cell in enumerate(self._kept, self.strip.start):
                yield number, cell, [next(rest) for leaf in cell.outputs if is_joinable(leaf)]
            return
        keeper = Keeper(self._module)
        try:
            for number, cell in self._cells():
                keeper.begin()
                cell.forward(function)
                keeper.end(0.0, is_first=False)
                yield number, cell, [next(rest) for leaf in cell.outputs if is_joinable(leaf)]
        finally:
            keeper.restore()

    def keep_inputs(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Put the gradients of a cell's inputs where they belong in those of ``inputs``.

        Returns:
            For each input that is not cut its gradient, which has to be added up.
        """
        start = sum(self.strip.sizes[: number - self.strip.start])
        size = self.strip.sizes[number - self.strip.start]
        common: list[Tensor | None] = []
        for whole, dim, gradient in zip(self.inputs, self._input_dims(), gradients, strict=True):
            if dim is None:
                common.append(gradient)
            elif gradient is not None:
                if whole.grad is None:
                    whole.grad = torch.zeros_like(whole)
                whole.grad.narrow(dim, start, size).copy_(gradient)
        return common

    def _input_dims(self) -> list[int | None]:
        pairs = zip(self._leaves, self.strip.cut_dims, strict=True)
        return [d for leaf, d in pairs if isinstance(leaf, Tensor) and leaf.requires_grad]

    def _cells(self) -> Iterator[tuple[int, Piece]]:
        strip, start = self.strip, 0
        for number, (size, seed) in enumerate(
            zip(strip.sizes, strip.seeds, strict=True), strip.start
        ):
            with normal_mode(), torch.no_grad():
                leaves = [
                    leaf
                    if i in self._common
                    else dense(
                        leaf if dim is None else narrow(leaf, dim, start, start + size), order
                    )
                    for i, (leaf, dim, order) in enumerate(
                        zip(self._given, strip.cut_dims, strip.orders, strict=True)
                    )
                ]
            yield number, Piece(leaves, self._wanted, self._structure, seed, grad=self.grad)
            start += size

    def _changes_of_common(self) -> list[int]:
        """Counts how often what all cells share was changed in place."""
        leaves = [self._given[i] for i in self._common]
        return [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]


@contextmanager
def _explained(size: int, strip: Strip) -> Iterator[None]:
    """Say what torch does not know where batch norm refuses a cell of one sample."""
    try:
        yield
    except ValueError as error:
        if size > 1 or "more than 1 value per channel" not in str(error):
            raise
        raise BatchError(
            f"batch norm in training needs two samples a cell, and a batch of {strip.batch} in "
            f"{strip.num_cells} cells has cells of one; give grid={max(1, strip.batch // 2)} or "
            "less, or batches that are larger (drop_last=True of the DataLoader)"
        ) from error


def _without_graph(leaf: Any) -> Any:
    """The values of an output; whether a gradient can flow back through it stays known."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)
