"""Outputs: what the devices returned becomes what one device returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from evener.arena import Arena, Place
from evener.batches import Cut, TensorForm
from evener.devices import Device
from evener.dims import Dims
from evener.errors import BatchError
from evener.messages import Output, Write
from evener.outputs import Outputs, joined_in_arena
from evener.reductions import Means
from evener.trees import flatten


class FakeTeam:
    """A team whose helpers hold given tensors and write them when they are told."""

    def __init__(self, arena: Arena, held: dict[int, list[Tensor]]) -> None:
        self.arena = arena
        self.devices = [Device("cpu", i, (0,), 1, "test") for i in range(4)]
        self.held = held
        self.written: list[int] = []

    def post(self, device: int, message: Any) -> None:
        assert isinstance(message, Write)
        for place, tensor in zip(message.places, self.held[device], strict=True):
            if place is not None:
                self.arena.whole.tensor(place).copy_(tensor)
                self.written.append(device)

    def collect(self, devices: list[int]) -> None:
        pass


def sent(tensor: Tensor, *, inline: bool) -> Output:
    form = TensorForm.of(tensor)
    if not inline:
        return Output(form, None)
    values = bytearray(tensor.nbytes)
    if values:
        torch.frombuffer(values, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
    return Output(form, values)


def joined(
    parts: dict[int, Tensor], shares: list[int], *, inline: bool, means_apart: bool = False
) -> Any:
    arena = Arena()
    _, structure = flatten(torch.zeros(1))
    team = FakeTeam(arena, {device: [tensor] for device, tensor in parts.items()})
    answers = {
        device: (structure, [tensor if device == 0 else sent(tensor, inline=inline)])
        for device, tensor in parts.items()
    }
    try:
        outputs = Outputs(team, 1, Cut(shares, means_apart=means_apart), Dims(), answers)  # type: ignore[arg-type]
        return outputs.tree(outputs.tensors)
    finally:
        arena.close()


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("shares", [[3, 2, 1], [0, 2, 3], [4, 0, 1]])
def test_tensors_are_concatenated_in_the_order_of_the_devices(
    shares: list[int], inline: bool
) -> None:
    whole = torch.randn(sum(shares), 2, 3)
    parts = dict(enumerate(whole.split(shares)))

    result = joined({i: part for i, part in parts.items() if shares[i]}, shares, inline=inline)

    assert torch.equal(result, whole)


def test_means_stay_apart_where_that_is_wanted() -> None:
    parts = {0: torch.tensor(1.0), 2: torch.tensor(4.0)}

    result = joined(parts, [3, 0, 1], inline=True, means_apart=True)

    assert isinstance(result, Means)
    assert result.values.tolist() == [1.0, 4.0]
    rows = {0: torch.ones(2, 1), 1: torch.zeros(1, 1)}
    assert joined(rows, [2, 1], inline=True, means_apart=True).tolist() == [[1.0], [1.0], [0.0]]


def test_a_mean_is_weighted_by_the_shares() -> None:
    parts = {0: torch.tensor(1.0), 1: torch.tensor(4.0)}

    assert joined(parts, [3, 1], inline=True).item() == 1.75


def test_values_that_agree_are_returned_once() -> None:
    arena = Arena()
    leaves, structure = flatten({"name": "x", "count": torch.tensor(3), "none": None})
    answers = {0: (structure, leaves), 1: (structure, list(leaves))}

    outputs = Outputs(FakeTeam(arena, {}), 1, Cut([1, 1]), Dims(), answers)  # type: ignore[arg-type]

    assert outputs.tensors == []
    assert outputs.tree([]) == {"name": "x", "count": torch.tensor(3), "none": None}
    arena.close()


def test_a_gradient_flows_if_it_flows_on_any_device() -> None:
    arena = Arena()
    _, structure = flatten(torch.zeros(1))
    answers = {
        0: (structure, [torch.ones(1)]),
        1: (structure, [Output(TensorForm((1,), torch.float32, True), bytearray(4))]),
    }

    outputs = Outputs(FakeTeam(arena, {}), 1, Cut([1, 1]), Dims(), answers)  # type: ignore[arg-type]

    assert [form.differentiable for form in outputs.forms] == [True]
    arena.close()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BatchError, match="only the dimension of the batch may differ"):
        joined({0: torch.zeros(1, 2), 1: torch.zeros(1, 3)}, [1, 1], inline=True)


def test_rows_over_the_arena_lie_one_behind_the_other() -> None:
    arena = Arena()

    tensor, rows = joined_in_arena(arena, Cut([2, 0, 3]), (5, 4), torch.float64)

    assert list(rows) == [0, 2]
    assert rows[2] == Place(rows[0].offset + 2 * 4 * 8, torch.float64, (3, 4), (4, 1))
    for device, place in rows.items():
        arena.whole.tensor(place).fill_(device)
    assert tensor[:, 0].tolist() == [0, 0, 2, 2, 2]
    arena.close()


def test_the_memory_of_an_output_is_used_again_when_nobody_holds_it() -> None:
    arena = Arena()
    places = [
        joined_in_arena(arena, Cut([1, 1]), (2, 5000), torch.float32)[1][0].offset
        for _ in range(3)
    ]
    held, _ = joined_in_arena(arena, Cut([1, 1]), (2, 5000), torch.float32)
    _, other = joined_in_arena(arena, Cut([1, 1]), (2, 5000), torch.float32)

    assert len(set(places)) == 1
    assert other[0].offset != places[0]
    del held
    arena.close()


def test_namespace_is_enough_for_a_team() -> None:
    """The class asks its team for an arena, labels and two verbs, and nothing else."""
    arena = Arena()
    team = SimpleNamespace(arena=arena, devices=[Device("cpu", 0, (0,), 1, "")], collect=list)
    leaves, structure = flatten([torch.ones(2, 1)])

    outputs = Outputs(team, 1, Cut([2]), Dims(), {0: (structure, leaves)})  # type: ignore[arg-type]

    assert torch.equal(outputs.tensors[0], torch.ones(2, 1))
    arena.close()
