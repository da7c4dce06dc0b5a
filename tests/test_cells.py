"""Cells: each is a piece of its own, with or without its graph kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from evener.batches import Batch
from evener.cells import Cells, Strip
from evener.errors import BatchError
from evener.piece import Piece, run_backward

STRIP = Strip(
    start=2, sizes=[2, 3], seeds=[5, 6], num_cells=4, batch=10, cut_dims=[0], orders=[(0, 1)]
)


def cells_of(x: Tensor, module: nn.Module, *, is_frugal: bool) -> Cells:
    batch = Batch((x,), {})
    return Cells(
        batch.leaves,
        batch.wanted,
        batch.structure,
        STRIP,
        module,
        grad=True,
        is_frugal=is_frugal,
    )


@pytest.mark.parametrize("is_frugal", [False, True])
def test_each_cell_is_a_piece_with_its_seed(is_frugal: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    x = torch.randn(5, 3, requires_grad=True)
    cells = cells_of(x, module, is_frugal=is_frugal)
    cells.forward(module)
    ones = [torch.ones(2, 2), torch.ones(3, 2)]
    found = []
    for number, cell, gradients in cells.backward(module, ones):
        run_backward(*cell.roots(gradients), keep_graph=False)
        cells.keep_inputs(number, [leaf.grad for leaf in cell.inputs])
        found.append([p.grad.clone() for p in module.parameters()])
        module.zero_grad()

    for i, (start, stop) in enumerate([(0, 2), (2, 5)]):
        batch = Batch((x[start:stop].detach().requires_grad_(),), {})
        piece = Piece(batch.leaves, batch.wanted, batch.structure, STRIP.seeds[i], grad=True)
        piece.forward(module)
        assert torch.equal(cells.outputs[i], piece.outputs[0])
        run_backward(*piece.roots([ones[i]]), keep_graph=False)
        for mine, parameter in zip(found[i], module.parameters(), strict=True):
            assert torch.equal(mine, parameter.grad)
        assert torch.equal(cells.inputs[0].grad[start:stop], piece.inputs[0].grad)
        module.zero_grad()


def test_cells_must_return_one_structure() -> None:
    def forward(x: Tensor) -> object:
        return x if len(x) == 2 else (x, x)

    cells = cells_of(torch.randn(5, 3), nn.Module(), is_frugal=False)
    with pytest.raises(BatchError, match="differ in structure"):
        cells.forward(forward)
