"""Split: Gluon's rules, and notes that hold no longer than they are true."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from evener import gluon
from evener.errors import DeviceError, SharesError
from evener.gluon.split import Shard


@pytest.mark.parametrize(
    ("size", "options", "sizes"),
    [
        (6, {}, [2, 2, 2]),
        (0, {}, [0, 0, 0]),
        (8, {"even_split": False}, [3, 3, 2]),
        (2, {"even_split": False}, [1, 1, 0]),
        (7, {"shares": (0, 5, 2)}, [0, 5, 2]),
        (6, {"shares": [6, 0, 0]}, [6, 0, 0]),
        (0, {"shares": (0, 0, 0)}, [0, 0, 0]),
    ],
)
def test_a_batch_is_split_in_order_without_a_copy(
    size: int, options: dict[str, Any], sizes: list[int]
) -> None:
    data = torch.randn(size, 2)

    slices = gluon.split_data(data, 3, **options)

    assert [len(part) for part in slices] == sizes
    assert torch.equal(torch.cat(slices), data)
    assert {part.untyped_storage().data_ptr() for part in slices} == {data.data_ptr()}


@pytest.mark.parametrize("axis", [1, -1])
def test_another_axis_can_be_split(axis: int) -> None:
    data = torch.arange(12).view(3, 4)

    first, second = gluon.split_data(data, 2, axis)

    assert torch.equal(first, data[:, :2])
    assert torch.equal(second, data[:, 2:])


def test_what_can_be_made_a_tensor_is_split_too() -> None:
    assert [part.tolist() for part in gluon.split_data([1, 2, 3, 4], 2)] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("data", "arguments", "error", "message"),
    [
        (
            torch.zeros(5, 3),
            {"num_slice": 2},
            ValueError,
            r"shape \(5, 3\) cannot be evenly split into 2 slices along axis 0.*even_split=False",
        ),
        (torch.zeros(5), {"num_slice": 0}, ValueError, r"num_slice=0: expected one slice"),
        (
            torch.zeros(5),
            {"num_slice": 5, "batch_axis": 1},
            ValueError,
            r"shape \(5,\) has no axis 1.*batch_axis",
        ),
        (torch.tensor(1.0), {"num_slice": 1}, ValueError, r"shape \(\) has no axis 0"),
        *(
            (
                torch.zeros(5, 3),
                {"num_slice": 2, "shares": shares},
                SharesError,
                r"shares=.*\(5, 3\).*2 whole numbers.*sum is 5.*gluon\.shares\(net, 5\)",
            )
            for shares in [(5,), (2, 2), (6, -1), (2.5, 2.5)]
        ),
    ],
)
def test_what_cannot_be_split_is_told_with_the_way_out(
    data: Tensor, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        gluon.split_data(data, **arguments)


def test_one_shard_for_each_device_knows_its_batch() -> None:
    data = torch.randn(5, 2, requires_grad=True)

    shards = gluon.split_and_load(data, "cpu*2", even_split=False)

    notes = [Shard.of(shard) for shard in shards]
    assert [(note.index, note.rows) for note in notes] == [(0, slice(0, 3)), (1, slice(3, 5))]
    split = notes[0].split
    assert notes[1].split is split
    assert (split.shares, split.labels) == ((3, 2), ("cpu:0", "cpu:1"))
    assert split.source.data_ptr() == data.data_ptr()
    assert not split.source.requires_grad
    assert all(shard.requires_grad for shard in shards)


def test_devices_that_are_not_there_are_an_error() -> None:
    with pytest.raises(DeviceError, match="cpu:99"):
        gluon.split_and_load(torch.zeros(2), ["cpu:0", "cpu:99"])


def _saved(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


@pytest.mark.parametrize(
    "derive",
    [
        lambda x: x * 1,
        lambda x: x[:1],
        lambda x: x.detach(),
        lambda x: x.clone(),
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        _saved,
    ],
)
def test_what_is_made_of_a_shard_is_no_shard(derive: Callable[[Tensor], Tensor]) -> None:
    shard, _ = gluon.split_and_load(torch.randn(4, 2), "cpu*2")

    assert Shard.of(shard) is not None
    assert Shard.of(derive(shard)) is None


def test_a_shard_that_got_other_memory_or_another_form_is_none_any_more() -> None:
    first, second = gluon.split_and_load(torch.randn(4, 2), "cpu*2")
    first.data = torch.zeros(2, 2)
    second.t_()

    assert Shard.of(first) is None
    assert Shard.of(second) is None


def test_a_batch_goes_with_its_last_shard() -> None:
    gc.disable()
    try:
        first, second = gluon.split_and_load(torch.randn(4, 2), "cpu*2")
        note = Shard.of(first)
        assert note is not None
        split = weakref.ref(note.split)
        del first, note
        assert split() is not None
        del second
        assert split() is None
    finally:
        gc.enable()
