"""The exchange through host memory: who sums which part, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from evener.arena import Arena, Place, Region, lay_out, moved
from evener.exchange import host
from evener.exchange.host import add_own, add_up, segments

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


class EndlessError(Exception):
    """Parts without end."""


@pytest.fixture(autouse=True)
def an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that does not end would fill the memory before the time is up."""
    made: list[None] = []

    def counted(*args: Any) -> Place:
        made.append(None)
        if len(made) > 50_000:
            raise EndlessError
        return Place(*args)

    monkeypatch.setattr(host, "Place", counted)


# ------------------------------------------------------------------ segments


def covered(parts: Sequence[Sequence[Place]]) -> list[int]:
    """The bytes that the parts cover, in order of address, as often as they do."""
    return sorted(
        byte
        for part in parts
        for place in part
        for byte in range(place.offset, place.offset + place.num_bytes)
    )


def spread(places: Sequence[Place]) -> list[int]:
    return covered([places])


@pytest.mark.parametrize(
    ("shapes", "num_devices", "parts"),
    [
        ([(10,)], 1, [[(0, 10)]]),
        ([(10,)], 2, [[(0, 5)], [(20, 5)]]),
        ([(9,)], 2, [[(0, 5)], [(20, 4)]]),
        ([(2, 5)], 2, [[(0, 5)], [(20, 5)]]),
        # Two tensors with padding between them: 16 and 4 values from offset 0 and 64.
        ([(16,), (4,)], 2, [[(0, 10)], [(40, 6), (64, 4)]]),
        ([(4,), (4,), (4,)], 3, [[(0, 4)], [(64, 4)], [(128, 4)]]),
        ([(1,)], 3, [[(0, 1)], [], []]),
        ([()], 2, [[(0, 1)], []]),
        ([(0,), (3, 0)], 2, [[], []]),
        ([], 2, [[], []]),
    ],
)
def test_segments(
    shapes: list[tuple[int, ...]], num_devices: int, parts: list[list[tuple[int, int]]]
) -> None:
    places, _ = lay_out(torch.empty(shape) for shape in shapes)

    found = segments(places, num_devices)

    assert [[(place.offset, place.shape[0]) for place in part] for part in found] == parts


layouts = st.tuples(
    st.lists(
        st.tuples(
            st.sampled_from([*FLOATS, torch.uint8]),
            st.one_of(
                st.lists(st.integers(0, 5), max_size=3), st.lists(st.integers(0, 70), max_size=1)
            ),
        ),
        max_size=7,
    ),
    st.integers(1, 12),
)


@given(layouts)
@example(([(torch.uint8, [3])], 2))
@example(([(torch.bfloat16, [3])], 4))
@example(([(torch.float32, [1]), (torch.float32, [5])], 5))
@example(([(torch.float32, [11])], 5))
def test_segments_cover_each_value_once(
    layout: tuple[list[tuple[torch.dtype, list[int]]], int],
) -> None:
    tensors, num_devices = layout
    places, _ = lay_out(torch.empty(shape, dtype=dtype) for dtype, shape in tensors)

    parts = segments(places, num_devices)

    assert len(parts) == num_devices
    assert covered(parts) == spread(places)
    for part in parts:
        for place in part:
            (whole,) = [w for w in places if w.offset <= place.offset < w.offset + w.num_bytes]
            assert place.dtype == whole.dtype
            assert (place.offset - whole.offset) % place.dtype.itemsize == 0
            assert len(place.shape) == 1
            assert place.stride == (1,)


@given(layouts)
def test_segments_are_of_nearly_equal_size(
    layout: tuple[list[tuple[torch.dtype, list[int]]], int],
) -> None:
    tensors, num_devices = layout
    places, _ = lay_out(torch.empty(shape, dtype=dtype) for dtype, shape in tensors)

    sizes = [sum(place.num_bytes for place in part) for part in segments(places, num_devices)]

    largest_value = max((place.dtype.itemsize for place in places), default=0)
    equal = sum(place.num_bytes for place in places) / num_devices
    assert all(abs(size - equal) <= 2 * largest_value for size in sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_segments_end_for_each_size_and_number_of_devices(dtype: torch.dtype) -> None:
    for num_devices in range(1, 17):
        for count in range(1, 100):
            (place,), _ = lay_out([torch.empty(count, dtype=dtype, device="meta")])

            parts = segments([place], num_devices)

            assert sum(p.shape[0] for part in parts for p in part) == count


# ------------------------------------------------------------------ sums


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


def filled(arena: Arena, tensors: Sequence[Tensor]) -> tuple[Region, list[Place]]:
    places, num_bytes = lay_out(tensors)
    region = arena.take(num_bytes)
    for place, tensor in zip(moved(places, region.offset), tensors, strict=True):
        region.tensor(place).copy_(tensor)
    return region, places


def read(region: Region, places: Sequence[Place]) -> list[Tensor]:
    return [region.tensor(place).clone() for place in moved(places, region.offset)]


def in_order(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_regions", [1, 2, 3, 5])
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_the_first_region_becomes_the_sum_of_all_bit_for_bit(
    arena: Arena, dtype: torch.dtype, num_regions: int, num_devices: int
) -> None:
    shapes = [(3, 4), (100,), (), (0,), (7,)]
    values = [[torch.randn(s).to(dtype) for s in shapes] for _ in range(num_regions)]
    filled_regions = [filled(arena, tensors) for tensors in values]
    regions, places = [region for region, _ in filled_regions], filled_regions[0][1]

    for segment in segments(places, num_devices):
        add_up(regions, segment)

    for i, sums in enumerate(read(regions[0], places)):
        assert torch.equal(sums, in_order([tensors[i] for tensors in values]))
    for region, tensors in zip(regions[1:], values[1:], strict=True):
        assert all(map(torch.equal, read(region, places), tensors))


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_large_tensors_are_summed_whole(arena: Arena, num_devices: int) -> None:
    """They are summed in blocks: all of each, and its end."""
    values = [[torch.randn(300, 1001)] for _ in range(3)]
    filled_regions = [filled(arena, tensors) for tensors in values]
    regions, places = [region for region, _ in filled_regions], filled_regions[0][1]

    for segment in reversed(segments(places, num_devices)):
        add_up(regions, segment)

    assert torch.equal(read(regions[0], places)[0], in_order([t for (t,) in values]))


def test_values_are_summed_by_memory_whatever_the_order_of_dimensions(arena: Arena) -> None:
    values = [
        [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(4, 3).t()]
        for _ in range(2)
    ]
    filled_regions = [filled(arena, tensors) for tensors in values]
    regions, places = [region for region, _ in filled_regions], filled_regions[0][1]

    for segment in segments(places, 2):
        add_up(regions, segment)

    for i, sums in enumerate(read(regions[0], places)):
        assert torch.equal(sums, values[0][i] + values[1][i])


def test_the_order_of_addition_is_that_of_the_regions(arena: Arena) -> None:
    # In float32 the sum of these depends on the order.
    values = [[torch.tensor([1e8])], [torch.tensor([-1e8])], [torch.tensor([1.0])]]

    def total(order: Sequence[int]) -> float:
        filled_regions = [filled(arena, values[i]) for i in order]
        regions, places = [region for region, _ in filled_regions], filled_regions[0][1]
        for segment in segments(places, 2):
            add_up(regions, segment)
        return float(read(regions[0], places)[0])

    assert total((0, 1, 2)) == 1
    assert total((0, 2, 1)) == 0


def test_only_the_places_of_a_segment_are_touched(arena: Arena) -> None:
    one, places = filled(arena, [torch.ones(4), torch.ones(4)])
    other, _ = filled(arena, [torch.ones(4), torch.ones(4)])

    add_up([one, other], segments(places, 2)[1])

    assert [tensor.tolist() for tensor in read(one, places)] == [[1] * 4, [2] * 4]


def test_the_own_gradients_are_added_last(arena: Arena) -> None:
    sums = [torch.ones(3), torch.zeros(2, 2)]
    own = [torch.full((3,), 2.0), torch.ones(2, 2)]

    add_own(sums, own)

    assert [tensor.tolist() for tensor in sums] == [[3] * 3, [[1, 1], [1, 1]]]
    assert own[0].tolist() == [2] * 3
    add_own([], [])


def test_a_block_is_a_whole_number_of_values() -> None:
    assert all(host._BLOCK_BYTES % dtype.itemsize == 0 for dtype in [*FLOATS, torch.complex128])
    assert math.log2(host._BLOCK_BYTES).is_integer()
