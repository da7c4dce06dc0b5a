"""Slots: a device's sums in the tree."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from evener.cells import Strip
from evener.grid import Tree, num_slots
from evener.slots import Slots, add_gradients


def strip(start: int, stop: int, num: int) -> Strip:
    sizes = [1] * (stop - start)
    return Strip(start, sizes, sizes, num, num, [0], [(0,)])


def test_the_sums_of_any_devices_make_one_sum() -> None:
    num = 11
    cells = [[torch.randn(5), torch.randn(2, 2) if i % 3 else None] for i in range(num)]
    sparse = [
        torch.sparse_coo_tensor([[i % 4, 1]], [1.0, i / 7], (4,), check_invariants=True)
        for i in range(num)
    ]
    # As of an embedding that some cells also use in a product of matrices.
    mixed = [each.to_dense() if i % 3 == 1 else each for i, each in enumerate(sparse)]
    sums = []
    for stops in ([0, 11], [0, 3, 11], [0, 5, 6, 7, 11]):
        top: Tree[list[Tensor | None]] = Tree(num, add_gradients)
        for start, stop in pairwise(stops):
            memory = [
                [torch.full(shape, torch.nan) for shape in ((5,), (2, 2), (4,), (4,))]
                for _ in range(num_slots(start, stop, num))
            ]

            def at(slot: int, i: int, memory: list[list[Tensor]] = memory) -> Tensor:
                return memory[slot][i]

            slots = Slots(strip(start, stop, num), at)
            for i in range(start, stop):
                slots.push(i, [*cells[i], sparse[i], mixed[i]])
            for each in slots.sums:
                top.push(each.level, each.number, each.tensors(at))
        (root,) = top.nodes
        sums.append([each.to_dense() for each in root.value if each is not None])
    for other in sums[1:]:
        assert all(map(torch.equal, sums[0], other))
    torch.testing.assert_close(sums[0][0], torch.stack([cell[0] for cell in cells]).sum(0))
