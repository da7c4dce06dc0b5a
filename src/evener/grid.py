"""The grid: a batch in cells that do not depend on the devices, and their sum in one order.

A sum of floats has other bits in another order, and so has a product of matrices with another
number of rows. So for the same bits on any devices the batch is cut into cells of fixed sizes,
each device takes neighbouring cells and computes them one by one, and what comes out is added up
in a tree over the numbers of the cells, whoever had them. No torch::

    cells      0   1   2   3   4   5   6        device 0 has 0 to 4, device 1 has 5 and 6
               └─┬─┘   └─┬─┘   └─┬─┘   │
                 └───┬───┘       └──┬──┘        device 0 gives the sums (0-3) and (4), device 1
                     └──────┬───────┘           gives (5) and (6); the main process adds the rest

(Pairwise summation: Higham, "The accuracy of floating point summation", 1993.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from evener.shares import share_out

T = TypeVar("T")


def cells_of(batch: int, grid: int) -> list[int]:
    """The samples of each cell, as equal as can be; fewer cells where there are fewer samples.

    Example:
        >>> cells_of(10, 4), cells_of(2, 4)
        ([2, 3, 2, 3], [1, 1])
    """
    num = min(batch, grid)
    return [batch * (j + 1) // num - batch * j // num for j in range(num)]


def told_grid(grid: int | None, batch: int) -> list[str]:
    """What a report says of the grid, by the samples of the last batch: a line, if any.

    Example:
        >>> told_grid(16, 33)
        ['Each batch is cut into 16 cells, the last one into 16 of up to 3 samples.']
    """
    if grid is None:
        return []
    sizes = cells_of(batch, grid) if batch else []
    last = f", the last one into {len(sizes)} of up to {max(sizes)} samples" if sizes else ""
    return [f"Each batch is cut into {grid} cells{last}."]


def cells_for(shares: Sequence[int], num_cells: int) -> tuple[int, ...]:
    """How many cells each device gets: its share in samples, rounded to whole cells.

    Example:
        >>> cells_for((20, 12), 8), cells_for((0, 31, 1), 4)
        ((5, 3), (0, 4, 0))
    """
    return share_out(num_cells, shares)


class Node(NamedTuple, Generic[T]):
    """The sum of the cells from ``number * 2**level`` to before ``(number + 1) * 2**level``."""

    level: int
    number: int
    value: T


class Tree(Generic[T]):
    """Adds up what comes from cells, in an order that does not depend on who brings it.

    Args:
        num_cells: cells of the whole batch.
        add: gives the sum of a left and a right node's values.

    Attributes:
        nodes: the sums so far, from left to right; in the end, of a whole batch, one.

    Example:
        >>> tree = Tree(5, lambda left, right: f"({left}+{right})")
        >>> for number in range(5):
        ...     tree.push(0, number, str(number))
        >>> [node.value for node in tree.nodes]
        ['(((0+1)+(2+3))+4)']
    """

    def __init__(self, num_cells: int, add: Callable[[T, T], T]) -> None:
        self._num_cells = num_cells
        self._add = add
        self.nodes: list[Node[T]] = []

    def push(self, level: int, number: int, value: T) -> None:
        """Add the node to the right of all that were added so far."""
        while (1 << level) < self._num_cells:
            if number % 2:
                if not self.has_left(level, number):
                    break
                value = self._add(self.nodes.pop().value, value)
            elif (number + 1) << level < self._num_cells:
                break  # its right neighbour is to come
            level, number = level + 1, number // 2
        self.nodes.append(Node(level, number, value))

    def has_left(self, level: int, number: int) -> bool:
        """Whether a node, if it were pushed now, would be added to its left neighbour at once."""
        left = self.nodes[-1] if self.nodes else None
        return bool(number % 2 and left and (left.level, left.number) == (level, number - 1))


def num_slots(start: int, stop: int, num_cells: int) -> int:
    """How many sums a device with the cells from start to stop holds at a time, at most.

    A cell that is added to its left neighbour at once needs no slot of its own.

    Example:
        >>> num_slots(0, 16, 16), num_slots(1, 16, 16), num_slots(3, 4, 16)
        (4, 6, 1)
    """
    held = most = 0

    def add(left: int, right: int) -> int:
        nonlocal held
        held -= right
        return left

    tree = Tree(num_cells, add)
    for number in range(start, stop):
        own = int(not tree.has_left(0, number))
        held += own
        most = max(most, held)
        tree.push(0, number, own)
    return most
