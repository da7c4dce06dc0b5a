"""Gradients: cut for the devices, and added up for the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.arena import Arena, lay_out, moved
from evener.batches import Cut, TensorForm
from evener.exchange import host
from evener.gradients import InputGradient, SharedGradients, own_gradients
from evener.messages import Done, Gradients, Reduce
from evener.piece import Piece
from evener.portions import cut_gradients
from evener.trees import flatten


class FakeTeam:
    """A team whose helpers sum a segment when they are told."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.num_reduced = 0
        self.present = [True] * 4

    def post(self, device: int, message: Any) -> None:
        assert isinstance(message, Reduce)
        host.add_up([self.arena.region(*span) for span in message.regions], message.segment)
        self.num_reduced += 1

    def collect(self, devices: list[int]) -> dict[int, Done]:
        return {device: Done() for device in devices}


def form(*shape: int) -> TensorForm:
    return TensorForm(shape, torch.float32, differentiable=True)


def test_a_batch_is_cut_and_a_mean_is_weighted() -> None:
    cut = Cut([3, 1])
    gradient, mean = torch.arange(8.0).view(4, 2), torch.tensor(2.0)

    parts = cut_gradients([gradient, None, mean], [form(4, 2), form(4), form()], cut, 0)

    assert torch.equal(parts[0], gradient[:3])
    assert parts[1] is None
    assert parts[2].item() == 1.5


def test_of_means_that_stay_apart_each_device_gets_its_own() -> None:
    cut = Cut([3, 0, 1], means_apart=True)
    means = torch.tensor([2.0, 5.0])

    parts = [cut_gradients([means], [form()], cut, device)[0] for device in (0, 2)]

    assert [part.item() for part in parts if part is not None] == [2.0, 5.0]


def piece_of(module: nn.Module, x: Tensor) -> Piece:
    leaves, structure = flatten(((x,), {}))
    piece = Piece(leaves, [x.requires_grad], structure, 0, grad=True)
    piece.forward(module)
    return piece


def test_the_first_devices_backward_touches_neither_grad_nor_hooks() -> None:
    module = nn.Linear(2, 1)
    calls: list[str] = []
    module.weight.register_hook(lambda gradient: calls.append("weight"))
    piece = piece_of(module, torch.ones(3, 2, requires_grad=True))

    x_grad, weight_grad, bias_grad = own_gradients(
        piece, [torch.ones(3, 1)], list(module.parameters()), keep_graph=False
    )

    assert torch.equal(x_grad, module.weight.detach().expand(3, 2))
    assert torch.equal(weight_grad, torch.full((1, 2), 3.0))
    assert torch.equal(bias_grad, torch.tensor([3.0]))
    assert module.weight.grad is None
    assert calls == []
    module(torch.ones(1, 2)).sum().backward()
    assert calls == ["weight"]


def test_without_a_gradient_there_is_nothing_to_do() -> None:
    module = nn.Linear(2, 1)
    piece = piece_of(module, torch.ones(3, 2))

    result = own_gradients(piece, [None], list(module.parameters()), keep_graph=False)

    assert result == [None, None]


@pytest.mark.parametrize("reached", [True, False])
def test_the_gradient_of_an_input_is_joined_by_rows(reached: bool) -> None:
    arena = Arena()
    x = torch.zeros(4, 2)
    gradient = InputGradient(FakeTeam(arena), Cut([3, 1]), x, 0)  # type: ignore[arg-type]
    arena.whole.tensor(gradient.places[1]).fill_(7)

    result = gradient.join(torch.ones(3, 2), {1: reached})

    assert result is not None
    assert result[:, 0].tolist() == [1, 1, 1, 7 if reached else 0]
    del result, gradient
    arena.close()


def test_the_gradient_of_a_shared_input_is_a_sum() -> None:
    arena = Arena()
    gradient = InputGradient(FakeTeam(arena), Cut([3, 1]), torch.zeros(()), None)  # type: ignore[arg-type]
    arena.whole.tensor(gradient.places[1]).fill_(7)

    assert gradient.join(torch.tensor(1.0), {1: True}).item() == 8
    arena.close()


def test_an_input_that_no_device_reached_has_no_gradient() -> None:
    arena = Arena()
    gradient = InputGradient(FakeTeam(arena), Cut([3, 1]), torch.zeros(4), 0)  # type: ignore[arg-type]

    assert gradient.join(None, {1: False}) is None
    del gradient
    arena.close()


@pytest.mark.parametrize("num_helpers", [1, 2, 3])
@pytest.mark.parametrize("size", [5, 100_000])  # summed here, and by the helpers
def test_gradients_are_summed_and_what_nobody_has_is_none(num_helpers: int, size: int) -> None:
    arena = Arena()
    team = FakeTeam(arena)
    likes = [torch.zeros(size), torch.zeros(3), torch.zeros(2, 2), torch.zeros(4)]
    layout, num_bytes = lay_out(likes)
    shared = SharedGradients(team, 1, layout, num_bytes)  # type: ignore[arg-type]
    values: dict[int, list[Tensor]] = {}
    answers = {}
    for device in range(1, num_helpers + 1):
        region = shared.region(device)
        values[device] = [torch.randn_like(like) for like in likes]
        for place, value in zip(moved(layout, region.offset), values[device], strict=True):
            region.tensor(place).copy_(value)
        # All have the first, the first helper alone has the second, nobody has the others.
        answers[device] = Gradients([True, device == 1, False, False], [])
    own = [torch.randn(size), None, torch.ones(2, 2), None]

    sums = shared.add_up([0, 1, 2, 3], own, answers)

    expected = sum(values[device][0] for device in answers) + own[0]
    torch.testing.assert_close(sums[0], expected)
    assert torch.equal(sums[1], values[1][1])
    assert sums[2] is own[2]
    assert sums[3] is None
    assert team.num_reduced == (num_helpers if num_helpers > 1 and size > 5 else 0)
    shared.close()
    del sums, expected
    arena.close()
