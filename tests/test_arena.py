"""The arena: who gets which memory, when it is used again, and what a tensor over it is like."""

from __future__ import annotations

import gc
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from evener.arena import ALIGN_BYTES, PAGE_BYTES, Arena, Place, Region, lay_out, moved
from evener.errors import ArenaError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def small_arena(num_pages: int) -> Arena:
    """An arena that is soon full."""
    fd = os.memfd_create("evener")
    os.ftruncate(fd, num_pages * PAGE_BYTES)
    return Arena(fd)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


@pytest.fixture
def four_pages() -> Iterator[Arena]:
    made = small_arena(4)
    yield made
    made.close()


def floats(region: Region, count: int = 8) -> Tensor:
    return region.tensor(Place(region.offset, torch.float32, (count,), (1,)))


# ------------------------------------------------------------------ taking


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 10**7])
def test_a_region_has_the_size_asked_for_in_whole_pages(arena: Arena, num_bytes: int) -> None:
    region = arena.take(num_bytes)

    assert region.num_bytes >= max(1, num_bytes)
    assert region.num_bytes - num_bytes <= PAGE_BYTES
    assert region.num_bytes % PAGE_BYTES == 0
    assert region.offset % PAGE_BYTES == 0


def test_regions_do_not_overlap(arena: Arena) -> None:
    regions = [arena.take(num_bytes) for num_bytes in (5, 100_000, 0, 4096)]

    ends = [0] + [region.offset + region.num_bytes for region in regions]
    assert [region.offset for region in regions] == ends[:-1]


def test_more_than_there_is_is_an_error_with_the_numbers(four_pages: Arena) -> None:
    kept = four_pages.take(3 * PAGE_BYTES)

    with pytest.raises(
        ArenaError,
        match=f"no room for {2 * PAGE_BYTES} bytes more: {3 * PAGE_BYTES} of {4 * PAGE_BYTES} are",
    ):
        four_pages.take(2 * PAGE_BYTES)
    assert four_pages.take(PAGE_BYTES).offset == kept.num_bytes


def test_what_is_taken_costs_nothing_until_it_is_written(arena: Arena) -> None:
    region = arena.take(1 << 30)

    assert os.fstat(arena.fd).st_blocks == 0
    floats(region).fill_(1)
    assert os.fstat(arena.fd).st_blocks * 512 <= 1 << 21


def test_an_arena_is_larger_than_the_main_memory_and_has_no_name(arena: Arena) -> None:
    assert arena.size_bytes > os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
    assert os.fstat(arena.fd).st_nlink == 0
    assert not os.get_inheritable(arena.fd)


# ------------------------------------------------------------------ using again


def test_an_open_region_is_not_used_again(arena: Arena) -> None:
    first = arena.take(8)

    assert arena.take(8).offset != first.offset


def test_a_closed_region_is_used_again(arena: Arena) -> None:
    first = arena.take(8)
    first.close()

    assert arena.take(8).offset == first.offset


#: What the user may keep of a tensor.
KEEP: list[Callable[[Tensor], object]] = [
    lambda tensor: tensor,
    lambda tensor: tensor[3],
    lambda tensor: tensor.view(2, 4).t(),
    lambda tensor: tensor.detach(),
    lambda tensor: tensor.view(torch.int32),
    lambda tensor: tensor.numpy(),
    lambda tensor: memoryview(tensor.numpy()),
    lambda tensor: tensor.untyped_storage(),
    torch.nn.Parameter,
    # Saved for a backward.
    lambda tensor: tensor * torch.ones(8, requires_grad=True),
]


@pytest.mark.parametrize("keep", KEEP)
def test_a_closed_region_is_used_again_only_when_the_user_has_let_go(
    arena: Arena, keep: Callable[[Tensor], object]
) -> None:
    first = arena.take(32)
    offset = first.offset
    kept = keep(floats(first))
    first.close()

    assert first.in_use
    assert arena.take(32).offset != offset
    del kept
    assert not first.in_use
    assert arena.take(32).offset == offset


def test_values_that_do_not_alias_keep_nothing(arena: Arena) -> None:
    region = arena.take(32)
    tensor = floats(region).fill_(3)
    kept = [tensor.clone(), tensor + 1, tensor.tolist(), tensor.sum()]
    del tensor

    assert not region.in_use
    assert kept[2] == [3] * 8


def test_a_tensor_without_values_keeps_nothing(arena: Arena) -> None:
    region = arena.take(32)
    empty = region.tensor(Place(region.offset, torch.float32, (0, 3), (3, 1)))

    assert empty.shape == (0, 3)
    assert empty.stride() == (3, 1)
    assert not region.in_use


def test_neighbours_that_are_free_become_one(four_pages: Arena) -> None:
    regions = [four_pages.take(PAGE_BYTES) for _ in range(4)]
    for i in (2, 1):
        regions[i].close()

    assert four_pages.take(2 * PAGE_BYTES).offset == PAGE_BYTES


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3), (1, 3, 0, 2)])
def test_all_is_one_again_in_whatever_order_it_came_back(
    four_pages: Arena, order: tuple[int, ...]
) -> None:
    regions = [four_pages.take(PAGE_BYTES) for _ in range(4)]
    for i in order:
        regions[i].close()
        with pytest.raises(ArenaError):
            four_pages.take(5 * PAGE_BYTES)  # looks for what has come back

    assert four_pages.take(4 * PAGE_BYTES).offset == 0


def test_free_memory_that_is_not_in_one_piece_does_not_do(four_pages: Arena) -> None:
    regions = [four_pages.take(PAGE_BYTES) for _ in range(4)]
    for i in (0, 2):
        regions[i].close()

    with pytest.raises(ArenaError):
        four_pages.take(2 * PAGE_BYTES)
    assert four_pages.take(PAGE_BYTES).offset == 0


class Allocator(RuleBasedStateMachine):
    """Takes, writes, closes and forgets in any order; each live tensor keeps what was written."""

    NUM_PAGES = 12

    regions = Bundle("regions")

    def __init__(self) -> None:
        super().__init__()
        self.arena = small_arena(self.NUM_PAGES)
        self.open: list[Region] = []
        self.tensors: list[tuple[Region, Tensor, int]] = []
        self.number = 0

    @rule(target=regions, num_pages=st.integers(1, 5))
    def take(self, num_pages: int) -> Region | None:
        live = self.live()
        largest, end = 0, 0
        for start, stop in [*sorted(live), (self.NUM_PAGES * PAGE_BYTES,) * 2]:
            largest, end = max(largest, start - end), max(end, stop)
        if num_pages * PAGE_BYTES > largest:
            with pytest.raises(ArenaError):
                self.arena.take(num_pages * PAGE_BYTES)
            return None
        region = self.arena.take(num_pages * PAGE_BYTES)

        for start, stop in live:
            assert region.offset + region.num_bytes <= start or stop <= region.offset
        self.open.append(region)
        return region

    @rule(region=regions)
    def write(self, region: Region | None) -> None:
        if region in self.open:
            self.number += 1
            place = Place(region.offset, torch.int64, (region.num_bytes // 8,), (1,))
            self.tensors = [item for item in self.tensors if item[0] is not region]
            self.tensors.append((region, region.tensor(place).fill_(self.number), self.number))

    @rule(region=consumes(regions))
    def close(self, region: Region | None) -> None:
        if region is not None:
            region.close()
            self.open.remove(region)

    @precondition(lambda self: self.tensors)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.tensors.pop(data.draw(st.integers(0, len(self.tensors) - 1)))

    @invariant()
    def values_are_what_was_written(self) -> None:
        assert all(bool((tensor == number).all()) for _, tensor, number in self.tensors)

    def live(self) -> list[tuple[int, int]]:
        regions = {id(r): r for r in [*self.open, *(region for region, _, _ in self.tensors)]}
        return [(r.offset, r.offset + r.num_bytes) for r in regions.values()]

    def teardown(self) -> None:
        for region in self.open:
            region.close()
        self.tensors.clear()

        assert self.arena.take(self.NUM_PAGES * PAGE_BYTES).offset == 0
        self.arena.close()


def test_no_two_live_regions_overlap_whatever_happens() -> None:
    run_state_machine_as_test(
        Allocator, settings=settings(max_examples=60, stateful_step_count=40)
    )


# ------------------------------------------------------------------ laying out


def test_places_are_aligned_and_one_behind_the_other() -> None:
    tensors = [torch.empty(3), torch.empty(16), torch.empty(17), torch.empty(()), torch.empty(2)]

    places, end = lay_out(tensors)

    assert [place.offset for place in places] == [0, 64, 128, 256, 320]
    assert end == 384
    assert [place.num_bytes for place in places] == [12, 64, 68, 4, 8]


def test_places_may_start_anywhere_and_can_be_moved() -> None:
    places, end = lay_out([torch.empty(3), torch.empty(5)], start=640)

    assert [place.offset for place in places] == [640, 704]
    assert end == 768
    assert moved(lay_out([torch.empty(3), torch.empty(5)])[0], 640) == places


def test_nothing_takes_nothing() -> None:
    assert lay_out([]) == ([], 0)
    (place,), end = lay_out([torch.empty(0, 3)])
    assert (place.num_bytes, end) == (0, 0)


#: Tensors whose dimensions lie in another order than they are counted, or not densely.
FORMS: list[Callable[[], Tensor]] = [
    lambda: torch.randn(2, 3, 4, 5),
    lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    lambda: torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    lambda: torch.randn(4, 5).t(),
    lambda: torch.randn(2, 3, 4).permute(1, 2, 0),
    lambda: torch.randn(8, 6)[::2, 1:4],
    lambda: torch.randn(3, 1).expand(3, 4),
    lambda: torch.randn(()).expand(2, 2),
    lambda: torch.randn(()),
    lambda: torch.randn(0, 3),
    lambda: torch.randn(1, 3).as_strided((1, 3), (100, 1)),
    lambda: torch.randn(3, 4, dtype=torch.complex64).mH,
    lambda: torch.randn(2, 3, requires_grad=True),
]


@pytest.mark.parametrize("form", FORMS)
def test_values_and_order_of_dimensions_survive(arena: Arena, form: Callable[[], Tensor]) -> None:
    tensor = form()
    (place,), num_bytes = lay_out([tensor])
    region = arena.take(num_bytes)

    there = region.tensor(place._replace(offset=region.offset)).copy_(tensor.detach())

    assert torch.equal(there, tensor)
    assert there.dtype == tensor.dtype
    dense = torch.empty_like(tensor)
    if tensor.numel() and min(tensor.stride(), default=1) and 1 not in tensor.shape:
        assert there.stride() == dense.stride()
    for memory_format in (torch.channels_last, torch.channels_last_3d):
        if tensor.dim() == (4 if memory_format is torch.channels_last else 5):
            assert there.is_contiguous(memory_format=memory_format) == tensor.is_contiguous(
                memory_format=memory_format
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_a_place(arena: Arena, dtype: torch.dtype) -> None:
    tensor = torch.arange(-3, 14).to(dtype)
    (place,), num_bytes = lay_out([tensor])
    region = arena.take(num_bytes)

    there = region.tensor(place._replace(offset=region.offset)).copy_(tensor)

    assert there.dtype == dtype
    assert torch.equal(there, tensor)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3))))
def test_places_never_overlap(forms: list[tuple[torch.dtype, list[int]]]) -> None:
    places, end = lay_out(torch.empty(shape, dtype=dtype) for dtype, shape in forms)

    for place, following in zip(places, [*(p.offset for p in places[1:]), end], strict=False):
        assert place.offset % ALIGN_BYTES == 0
        assert place.offset + place.num_bytes <= following < place.offset + place.num_bytes + 64


# ------------------------------------------------------------------ what a tensor over it is like


def test_a_checkpoint_of_an_arena_tensor_is_as_large_as_of_a_plain_one(arena: Arena) -> None:
    plain = torch.randn(100, 10)
    region = arena.take(1 << 20)
    there = region.tensor(Place(region.offset + 4096, torch.float32, (100, 10), (10, 1)))
    there.copy_(plain)

    def saved(tensor: Tensor) -> bytes:
        file = io.BytesIO()
        torch.save({"weight": tensor}, file)
        return file.getvalue()

    assert len(saved(there)) == len(saved(plain))
    loaded = torch.load(io.BytesIO(saved(there)))["weight"]
    assert torch.equal(loaded, plain)
    assert there.untyped_storage().nbytes() == plain.untyped_storage().nbytes()


def test_a_tensor_is_not_a_view_of_another(arena: Arena) -> None:
    # Autograd refuses to let a view that a function returned be changed in place.
    tensor = floats(arena.take(32))

    assert not tensor._is_view()


def test_two_tensors_over_one_place_are_one_memory(arena: Arena) -> None:
    region = arena.take(32)
    floats(region).fill_(1)
    floats(region)[2:4] = 5

    assert floats(region).tolist() == [1, 1, 5, 5, 1, 1, 1, 1]
    assert floats(arena.region(region.offset, 32)).tolist() == floats(region).tolist()
    assert arena.whole.tensor(Place(region.offset + 8, torch.float32, (1,), (1,))).item() == 5


def test_a_tensor_outlives_the_arena() -> None:
    arena = Arena()
    tensor = floats(arena.take(32)).fill_(7)
    arena.close()
    del arena
    gc.collect()

    assert tensor.tolist() == [7] * 8
    assert "/memfd:evener" in Path("/proc/self/maps").read_text()
    del tensor
    gc.collect()
    assert "/memfd:evener" not in Path("/proc/self/maps").read_text()


def test_closing_twice_closes_once() -> None:
    arena = Arena()
    arena.close()
    with open(os.devnull) as other:  # may get the same number  # noqa: PTH123
        arena.close()

        assert other.read() == ""


# ------------------------------------------------------------------ several processes


def test_another_process_sees_and_writes_the_same_memory(
    arena: Arena, run_python: Callable[..., str]
) -> None:
    first, second = arena.take(32), arena.take(32)
    floats(first).copy_(torch.arange(8.0))
    floats(second).zero_()

    printed = run_python(
        """
import sys
import torch
from evener.arena import Arena, Place

fd, first, second = map(int, sys.argv[1:])
arena = Arena(fd)
read = arena.region(first, 32).tensor(Place(first, torch.float32, (2, 4), (1, 2)))
arena.whole.tensor(Place(second, torch.float32, (8,), (1,))).fill_(read.sum())
print(read.tolist(), arena.size_bytes)
""",
        arena.fd,
        first.offset,
        second.offset,
        pass_fds=[arena.fd],
    )

    assert printed.strip() == f"[[0.0, 2.0, 4.0, 6.0], [1.0, 3.0, 5.0, 7.0]] {arena.size_bytes}"
    assert floats(second).tolist() == [28] * 8


def test_limits_of_the_system_make_it_smaller_and_then_an_error(
    run_python: Callable[..., str],
) -> None:
    """With `ulimit -v` and `ulimit -f`, as clusters set them."""
    printed = run_python(
        """
import json, os, re, resource
from evener.arena import Arena
from evener.errors import ArenaError

def limited(kind, soft, make=Arena):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        arena = make()
        size = arena.size_bytes
        arena.close()
        return size
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(kind, before)

def used():
    return int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

whole = Arena()
files = len(os.listdir("/proc/self/fd"))
print(json.dumps([
    limited(resource.RLIMIT_AS, used() + (1 << 31)),
    limited(resource.RLIMIT_AS, used() + (1 << 25)),
    limited(resource.RLIMIT_FSIZE, 1 << 30),
    limited(resource.RLIMIT_FSIZE, 1 << 20),
    limited(resource.RLIMIT_AS, used() + (1 << 31), lambda: Arena(whole.fd)),
    len(os.listdir("/proc/self/fd")) - files,
]))
"""
    )

    addresses, few_addresses, file, small_file, attached, left_open = json.loads(printed)
    assert 1 << 28 <= addresses <= 1 << 31
    assert few_addresses.startswith("ArenaError: the system gives this process no ")
    assert "ulimit -v" in few_addresses
    assert 1 << 28 <= file <= 1 << 30
    assert small_file.startswith("ArenaError: ")
    assert "ulimit -f" in small_file
    assert attached.startswith("ArenaError: ")
    assert left_open == 0
