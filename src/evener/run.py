"""A run: what the calls of one module on one team have in common."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from evener import messages
from evener.mirror import Mirror
from evener.team import Team
from evener.timing import Timing
from evener.trees import Structure, structure_from_bytes


class Run:
    """What the calls of one module on one team have in common.

    Args:
        module: the user's module.
        team: the team.

    Attributes:
        team: the team.
        mirror: keeps the replicas equal to the module.
        num_calls: how many there were; the pieces of a call have its number.
        received: the structure of the outputs that each device sent last.
        sent: for each device which of its helpers was sent inputs last, and their structure.
        forwards: the timings of calls that have ended without a backward, the latest.
    """

    def __init__(self, module: nn.Module, team: Team) -> None:
        self.team = team
        self.mirror = Mirror(module, team)
        self.num_calls = 0
        self.received: dict[int, Structure] = {}
        self.sent: dict[int, tuple[int, Structure]] = {}
        self.forwards: deque[Timing] = deque(maxlen=8)

    def settle(self) -> None:
        """Receive what an interrupted call has left unanswered."""
        for device, answer in self.team.settle():
            if isinstance(answer, messages.Outputs):
                self.remember(device, answer)

    def remember(self, device: int, answer: messages.Outputs) -> None:
        """Keep the structure of a device's outputs, which is not sent again while it is the same.

        Also from an answer that nobody waits for any more.
        """
        if answer.structure is not None:
            self.received[device] = structure_from_bytes(answer.structure)


def labelled(name: str) -> AbstractContextManager[Any]:
    """Show a part of the work in the user's profile, if there is one."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(name)
    return nullcontext()
