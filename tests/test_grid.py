"""The grid: arithmetic."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from evener.grid import Tree, cells_for, cells_of, num_slots


@given(st.integers(1, 200), st.integers(1, 40))
def test_cells_are_near_equal_and_cover_the_batch(batch: int, grid: int) -> None:
    sizes = cells_of(batch, grid)
    assert sum(sizes) == batch
    assert len(sizes) == min(batch, grid)
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any), st.integers(1, 40))
def test_who_has_no_share_has_no_cell(shares: list[int], num_cells: int) -> None:
    cells = cells_for(shares, num_cells)
    assert sum(cells) == num_cells
    assert all(not cell for cell, share in zip(cells, shares, strict=True) if not share)


@given(st.integers(1, 40), st.lists(st.integers(0, 40), max_size=4))
def test_the_tree_does_not_depend_on_who_adds_up_what(num_cells: int, stops: list[int]) -> None:
    def add(left: str, right: str) -> str:
        return f"({left}+{right})"

    whole: Tree[str] = Tree(num_cells, add)
    for number in range(num_cells):
        whole.push(0, number, str(number))
    ends = [0, *sorted(min(stop, num_cells) for stop in stops), num_cells]
    top: Tree[str] = Tree(num_cells, add)
    for start, stop in pairwise(ends):
        own: Tree[str] = Tree(num_cells, add)
        for number in range(start, stop):
            own.push(0, number, str(number))
        assert len(own.nodes) <= num_slots(start, stop, num_cells) <= 2 * num_cells.bit_length()
        for node in own.nodes:
            top.push(*node)
    assert top.nodes == whole.nodes
    assert len(top.nodes) == 1
