"""Trainings that are to end with the same bits, and some that are not. Imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ContenderError, worker_environment

TRAIN = Path(__file__).with_name("train.py")
LIMIT_S = 600.0
GRID = 16


@dataclass(frozen=True)
class Run:
    """One training, in one or more processes.

    Attributes:
        title: how the table calls it.
        tasks: for each process what `train.py` is told beside the workload and the steps.
        faults: how many helpers are to die.
        is_same: whether it is to end with the bits of all others of which this is true.
    """

    title: str
    tasks: tuple[dict[str, Any], ...]
    faults: int = 0
    is_same: bool = True


def runs(num_steps: int) -> list[Run]:
    """All trainings that are compared."""
    middle = num_steps // 2

    def task(devices: int, shares: Any = "auto", grid: int | None = GRID, **more: Any) -> Any:
        return {"devices": devices, "shares": shares, "grid": grid, **more}

    return [
        *(Run(f"{n} device{'s' * (n > 1)}", (task(n),)) for n in (1, 2, 3, 4)),
        Run("2 devices, once more", (task(2),)),
        Run("4 devices, shares 13 : 1 : 1 : 1", (task(4, [13, 1, 1, 1]),)),
        Run("3 devices, shares 0 : 1 : 5", (task(3, [0, 1, 5]),)),
        Run("3 devices, a helper killed in a backward", (task(3, "even", fatal=middle),), 1),
        Run(
            f"2 devices for {middle} steps, then 3 in a new process",
            (task(2, stop=middle), task(3, resume=True)),
        ),
        Run("without a grid, 1 device", (task(1, grid=None),), is_same=False),
        Run("without a grid, 2 devices", (task(2, "even", grid=None),), is_same=False),
    ]


@dataclass
class BitsResult:
    """One workload: the digest of each training.

    Attributes:
        workload: its name.
        num_steps: of each training.
        runs: the trainings, by their titles.
        digests: of each.
    """

    workload: str
    num_steps: int
    runs: dict[str, Run] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def of_same(self) -> list[str]:
        """The digests that are to be one."""
        return [digest for title, digest in self.digests.items() if self.runs[title].is_same]

    def failures(self) -> list[str]:
        """What is not as it is to be: one digest with a grid, and others without."""
        same = set(self.of_same())
        others = {digest for title, digest in self.digests.items() if not self.runs[title].is_same}
        found = []
        if len(same) != 1:
            found.append(f"{self.workload}: {len(same)} different results with a grid, not one")
        if len(others) != sum(not run.is_same for run in self.runs.values()) or others & same:
            found.append(f"{self.workload}: without a grid no two results were to be the same")
        return found


def measure_bits(workload: str, num_steps: int, wanted: Sequence[Run]) -> BitsResult:
    """Does the trainings one after the other.

    Raises:
        ContenderError: if one fails, or if not as many helpers died as were to.
    """
    result = BitsResult(workload, num_steps, {run.title: run for run in wanted})
    for run in wanted:
        with tempfile.TemporaryDirectory() as folder:
            common = {
                "workload": workload,
                "num_steps": num_steps,
                "checkpoint": str(Path(folder) / "state.pt"),
            }
            answers = [_answer(run.title, common | task) for task in run.tasks]
        faults = sum(answer["faults"] for answer in answers)
        if faults != run.faults:
            raise ContenderError(f"{run.title}: {faults} faults, not {run.faults}")
        result.digests[run.title] = answers[-1]["digest"]
    return result


def _answer(title: str, task: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, str(TRAIN), json.dumps(task)]
    environment = worker_environment(0, 1, 0)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        raise ContenderError(f"{title} failed: {error.stderr[-3000:].strip()}") from None
    except subprocess.TimeoutExpired:
        raise ContenderError(f"{title} took more than {LIMIT_S:.0f} s") from None
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
