"""A call: what it leaves with the helpers, and what ends it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from evener.batches import Batch, Cut
from evener.call import Call, Run
from evener.devices import Device
from evener.errors import HelperDiedError
from evener.piece import Settings
from evener.team import Team


@pytest.fixture
def run() -> Iterator[tuple[Run, nn.Module]]:
    team = Team([Device("cpu", i, (0,), 1, "test") for i in range(2)], timeout_s=30.0)
    module = nn.Linear(3, 2)
    made = Run(module, team)
    yield made, module
    made.mirror.dissolve()
    team.stop()


def new_call(run: Run, module: nn.Module, x: Tensor, shares: list[int]) -> Call:
    return Call(run, module, module.forward, Batch((x,), {}), Cut(shares), seeds=[0, 1])


def test_a_call_gives_outputs_and_gradients(run: tuple[Run, nn.Module]) -> None:
    x = torch.randn(5, 3, requires_grad=True)
    call = new_call(*run, x, [2, 3])

    call.forward(Settings.current())
    (tensor,) = call.outputs.tensors
    gradients = call.backward([torch.ones(5, 2)], keep_graph=False)

    torch.testing.assert_close(tensor, run[1](x).detach())
    expected = torch.autograd.grad(run[1](x).sum(), [x, *run[1].parameters()])
    torch.testing.assert_close(gradients, list(expected))


def test_a_second_backward_needs_a_kept_graph(run: tuple[Run, nn.Module]) -> None:
    call = new_call(*run, torch.randn(5, 3), [2, 3])
    call.forward(Settings.current())
    first = call.backward([torch.ones(5, 2)], keep_graph=True)

    second = call.backward([torch.ones(5, 2)], keep_graph=False)

    torch.testing.assert_close(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        call.backward([torch.ones(5, 2)], keep_graph=False)


def test_a_call_that_is_forgotten_frees_what_the_helpers_hold(
    run: tuple[Run, nn.Module],
) -> None:
    call = new_call(*run, torch.randn(5, 3), [2, 3])
    call.forward(Settings.current())
    assert len(run[0].team._members[0].regions) == 1

    del call
    gc.collect()
    for _ in range(2):  # the next message tells it, and its answer frees the region
        with torch.no_grad():
            new_call(*run, torch.randn(5, 3), [2, 3]).forward(Settings.current())

    assert len(run[0].team._members[0].regions) == 0


def test_memory_does_not_grow_with_the_number_of_calls(run: tuple[Run, nn.Module]) -> None:
    offsets = []
    for _ in range(6):
        call = new_call(*run, torch.randn(5, 3), [2, 3])
        call.forward(Settings.current())
        gradients = call.backward([torch.ones(5, 2)], keep_graph=False)
        offsets.append(max(region.offset for region in run[0].team.arena._taken))
        del call, gradients

    assert len(set(offsets[2:])) == 1


def test_stopped_helpers_have_lost_their_part_of_the_graph(run: tuple[Run, nn.Module]) -> None:
    call = new_call(*run, torch.randn(5, 3), [2, 3])
    call.forward(Settings.current())
    run[0].team.stop()

    with pytest.raises(HelperDiedError, match="call the module again"):
        call.backward([torch.ones(5, 2)], keep_graph=False)


def test_a_new_structure_ends_older_graphs(run: tuple[Run, nn.Module]) -> None:
    made, module = run
    call = new_call(made, module, torch.randn(5, 3), [2, 3])
    call.forward(Settings.current())
    module.bias = None
    new_call(made, module, torch.randn(5, 3), [2, 3])

    with pytest.raises(HelperDiedError, match="the module's structure changed"):
        call.backward([torch.ones(5, 2)], keep_graph=False)
