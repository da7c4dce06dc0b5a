"""A run: it remembers what is not sent again."""

from __future__ import annotations

from torch import nn

from evener import messages
from evener.devices import Device
from evener.run import Run
from evener.team import Team
from evener.trees import flatten, structure_to_bytes


def test_the_structure_of_outputs_is_remembered_until_another_one_comes() -> None:
    team = Team([Device("cpu", i, (0,), 1, "test") for i in range(2)], timeout_s=30.0)
    run = Run(nn.Linear(1, 1), team)
    one, other = flatten((0, 0))[1], flatten({"a": 0})[1]

    run.remember(1, messages.Outputs(structure_to_bytes(one), []))
    run.remember(1, messages.Outputs(None, []))
    assert run.received[1] == one

    run.remember(1, messages.Outputs(structure_to_bytes(other), []))
    assert run.received[1] == other

    team.post(1, messages.Write(5, []))  # of a piece that is not there
    run.settle()
    assert team.is_running
    run.mirror.dissolve()
    team.stop()
