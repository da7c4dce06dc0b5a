"""Assignments: what each device is given, and what can no longer be given again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from evener import messages
from evener.assignment import Assignment
from evener.batches import Batch, Cut
from evener.devices import Device
from evener.errors import HelperDiedError
from evener.piece import Settings
from evener.run import Run
from evener.team import Team
from evener.trees import structure_from_bytes
from evener.work import Work


class Scene(NamedTuple):
    run: Run
    module: nn.Module

    def assign(self, x: Tensor, shares: tuple[int, int] = (2, 3)) -> Assignment:
        seeds = {0: 10, 1: 11}
        return Assignment(self.run, self.module, Batch((x,), {}), Cut(shares), seeds)

    def work(self, x: Tensor) -> Work:
        return self.assign(x).work(1, Settings.current())


@pytest.fixture
def scene() -> Iterator[Scene]:
    team = Team([Device("cpu", i, (0,), 1, "test") for i in range(2)], timeout_s=30.0)
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    run = Run(module, team)
    yield Scene(run, module)
    run.mirror.dissolve()
    team.stop()


def test_a_device_gets_its_part_and_can_get_it_again(scene: Scene) -> None:
    x = torch.randn(5, 3, requires_grad=True)
    assignment = scene.assign(x)

    work = assignment.work(1, Settings.current())

    forward = work.forward
    assert forward.piece == assignment.number == 1
    assert (forward.seed, forward.lead, forward.split) == (11, False, None)
    (given,) = messages.unpicklable(forward.leaves)
    assert given.wanted
    assert torch.equal(scene.run.team.arena.whole.tensor(given.place), x[2:].detach())
    assert forward.structure is not None
    assert structure_from_bytes(forward.structure) == work.structure
    load, update = work.load()
    assert isinstance(load, messages.Load)
    assert update.requires_grad == [True, True]
    assert assignment.work(0, Settings.current()).forward.lead


def test_the_structure_of_inputs_is_told_to_each_helper_once(scene: Scene) -> None:
    x = torch.randn(5, 3)

    first, second = scene.work(x), scene.work(x)
    scene.run.team._seats[1].generation += 1  # another helper sits there
    third = scene.work(x)

    assert first.forward.structure is not None
    assert second.forward.structure is None
    assert third.forward.structure is not None


def test_who_has_memory_for_fewer_is_given_portions(scene: Scene) -> None:
    scene.run.team.faults.limit(1, 2)

    work = scene.work(torch.randn(5, 3))

    assert work.forward.split is not None
    assert work.forward.split.shares == [1, 2]


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "parameters have changed in place": lambda m: m[0].weight.detach().zero_(),
    "the module's structure has changed": lambda m: m.append(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_too_much_cannot_be_done_again(scene: Scene, what: str) -> None:
    x = torch.randn(5, 3)
    assignment = scene.assign(x)
    work = assignment.work(1, Settings.current())
    assert not assignment.has_changed([0, 1])

    CHANGES[what](scene.module)
    scene.assign(x)  # the next call, which sees it

    with pytest.raises(HelperDiedError, match=f"{what} since the forward.*call the module again"):
        work.load()
    assert assignment.has_lost_structure() or assignment.has_changed([0])
