"""The mirror: one copy of the weights, and replicas that follow the user's module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from evener import messages
from evener.devices import Device
from evener.errors import ModuleError
from evener.mirror import Mirror
from evener.team import Team


def start() -> Team:
    return Team([Device("cpu", i, (0,), 1, "test") for i in range(2)], timeout_s=30.0)


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    made = start()
    yield made
    made.stop()


def count_loads(team: Team, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    posted: list[Any] = []
    post = team.post

    def spy(device: int, message: Any) -> None:
        posted.append(message)
        post(device, message)

    monkeypatch.setattr(team, "post", spy)
    return posted


def test_parameters_lie_in_the_arena_and_are_the_same_objects(team: Team) -> None:
    module = nn.Linear(3, 2)
    weight, values = module.weight, module.weight.detach().clone()

    mirror = Mirror(module, team)

    assert module.weight is weight
    assert torch.equal(weight, values)
    (first, *_), region = mirror.layout, mirror._regions[0]
    there = region.tensor(first._replace(offset=first.offset + region.offset))
    there.fill_(5)  # one copy: what is written there is the parameter
    assert torch.equal(weight.detach(), torch.full((2, 3), 5.0))
    del there
    mirror.dissolve()


def test_without_changes_there_is_nothing_to_tell(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    mirror = Mirror(module, team)
    mirror.refresh(module)
    posted = count_loads(team, monkeypatch)

    assert not mirror.refresh(module)
    assert posted == []
    mirror.dissolve()


def test_a_replaced_layer_is_sent_at_once(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    mirror = Mirror(module, team)
    posted = count_loads(team, monkeypatch)
    module[0] = nn.Linear(3, 4)

    mirror.refresh(module)

    assert [type(message) for message in posted] == [messages.Load]
    assert mirror.shared[0] is module[0].weight
    mirror.dissolve()


def test_a_parameter_is_read_from_a_helper(team: Team) -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    mirror = Mirror(module, team)
    with torch.no_grad():
        module[0].weight.fill_(5.0)

    values = mirror.read(1, "0.weight", module[0].weight)

    assert torch.equal(values, torch.full((2, 3), 5.0))
    with pytest.raises(AttributeError, match="no attribute `scale`"):
        mirror.read(1, "0.scale", module[0].weight)
    mirror.dissolve()


def test_what_was_dissolved_needs_no_arena() -> None:
    team = start()
    module = nn.Linear(3, 2)
    values = module.weight.detach().clone()
    mirror = Mirror(module, team)
    module(torch.ones(1, 3)).sum().backward()

    mirror.dissolve()
    del mirror
    team.stop()

    assert torch.equal(module.weight, values)
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, torch.ones(2, 3))


def test_a_tensor_elsewhere_is_an_error_with_the_way_out(team: Team) -> None:
    with pytest.raises(ModuleError, match=r"a tensor on meta.*cpu:0, cpu:1.*module\.cpu\(\)"):
        Mirror(nn.Linear(3, 2, device="meta"), team)


def test_a_module_that_cannot_be_sent_names_the_attribute(team: Team) -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    module[0].generator = (i for i in range(3))

    with pytest.raises(ModuleError, match=r"^0\.generator cannot be sent to a helper: .*gener"):
        Mirror(module, team)


def test_parameters_that_were_moved_are_moved_back_with_their_new_values(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Linear(3, 2)
    mirror = Mirror(module, team)
    place, layout = module.weight.data_ptr(), mirror.layout
    monkeypatch.setattr(team, "post", lambda *_: pytest.fail("the helpers were told"))

    module.weight.data = torch.full((2, 3), 5.0)
    assert not mirror.refresh(module)

    assert module.weight.data_ptr() == place
    assert torch.equal(module.weight, torch.full((2, 3), 5.0))
    assert mirror.layout is layout
    mirror.dissolve()


def test_parameters_of_another_dtype_are_sent_anew(team: Team) -> None:
    module = nn.Linear(3, 2)
    mirror = Mirror(module, team)
    layout = mirror.layout

    module.double()
    mirror.refresh(module)

    assert mirror.layout is not layout
    assert mirror.layout[0].dtype == torch.float64
    mirror.dissolve()
