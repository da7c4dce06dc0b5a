"""Who trains, and how each of them is started. Imports no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")
MAX_RESTARTS = 3


@dataclass(frozen=True)
class Contestant:
    """One way to train in spite of a death.

    Attributes:
        title: how the tables call it.
        contender: what it makes of a model, in contenders.py.
        every: steps from one checkpoint to the next; None for evener, which needs none.
    """

    title: str
    contender: str
    every: int | None = None

    def command(self, task: dict[str, object], num_ranks: int) -> list[str]:
        """The command of one run."""
        told = json.dumps({**task, "contender": self.contender, "every": self.every})
        program = [str(TRAIN), told]
        if self.every is None:
            return [sys.executable, *program]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--local-addr=127.0.0.1", f"--nproc-per-node={num_ranks}"]
        return [*torchrun, f"--max-restarts={MAX_RESTARTS}", *program]


def contestants(every: Sequence[int]) -> dict[str, Contestant]:
    """All of them, by the names that the command line knows."""
    evener = {
        "evener_even": Contestant("evener even", "evener_even"),
        "evener_auto": Contestant("evener auto", "evener_auto"),
    }
    ddp = {
        f"ddp_{steps}": Contestant(f"DDP, checkpoint every {steps} steps", "ddp", steps)
        for steps in every
    }
    return evener | ddp


def fatal_step(num_steps: int, every: Sequence[int]) -> int:
    """How many steps are done when one of the processes is ended.

    It is half an interval after a checkpoint, the average, whichever the interval is, and as near
    to the middle of the training as can be.

    Raises:
        ValueError: if there is no such step.

    >>> fatal_step(120, (10, 50))
    75
    """
    halves = [step for step in range(2, num_steps) if all(step % k == k // 2 for k in every)]
    if not halves:
        raise ValueError(
            f"in {num_steps} steps there is none that is half of each interval of {tuple(every)} "
            "steps behind a checkpoint: more steps, or other intervals"
        )
    return min(halves, key=lambda step: abs(step - num_steps / 2))
