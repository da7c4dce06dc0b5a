"""One training from the first step to the last: `train.py TASK`, with the task as JSON.

With evener it is one process. Under `torchrun` it is one for each core, and each begins where the
latest checkpoint ends. What happens, and when, is written to a file, one line of JSON an event:

    began     this process is there; torch is not imported yet
    ready     the next thing is a step; `done` steps are behind it
    step      one more is done; `full`: every device was at work when it was over
    killed    somebody is ended in the next moment
    end       the `digest` of the trained model; evener's `faults`

`at_s` is the system's monotonic clock, the same for all processes.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from contenders import Training


class Log:
    """The file of events. What is written is there, whatever becomes of the process."""

    def __init__(self, path: str, rank: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._rank = rank

    def write(self, event: str, **told: Any) -> None:
        line = {"event": event, "rank": self._rank, "at_s": time.perf_counter(), **told}
        os.write(self._fd, json.dumps(line).encode() + b"\n")


class Killer:
    """Ends a process in the middle of the backward of one step, by SIGKILL.

    Args:
        backward: goes backward.
        victim: gives the process to end.
        step: how many steps are done before that one; None lets all live.
        log: is told just before.
    """

    def __init__(
        self,
        backward: Callable[[Tensor], Any],
        victim: Callable[[], int],
        step: int | None,
        log: Log,
    ) -> None:
        self._backward = backward
        self._victim = victim
        self._step = step
        self._log = log
        self._took_s: list[float] = []
        self.done = 0

    def backward(self, loss: Tensor) -> None:
        if self.done == self._step:
            self._step = None  # once
            middle_s = statistics.median(self._took_s) / 2
            threading.Timer(middle_s, self._kill, [self._victim()]).start()
        start_s = time.perf_counter()
        self._backward(loss)
        self._took_s.append(time.perf_counter() - start_s)

    def _kill(self, pid: int) -> None:
        self._log.write("killed")
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    task = json.loads(sys.argv[1])
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    log = Log(task["log"], rank)
    log.write("began")
    cores = task["cores"] if num_ranks == 1 else [task["cores"][rank]]
    # Before torch is imported, which sizes its thread pools by the cores it may use.
    os.sched_setaffinity(0, cores)

    from contenders import Place, Training  # noqa: PLC0415 (late, see above)

    place = Place(rank, num_ranks, len(cores))
    training = Training(task["contender"], task["workload"], place, loss_inside=False)
    if num_ranks > 1:
        _train_ranks(training, task, log, rank)
    else:
        _train_evener(training, task, log)
    training.setup.close()


def _train_evener(training: Training, task: dict[str, Any], log: Log) -> None:
    """Trains in one process; a helper is the one that is ended."""
    import evener  # noqa: PLC0415 (the peers run without it)
    from evener.pickling import STATE_NAME  # noqa: PLC0415
    from workloads import digest  # noqa: PLC0415 (late, see `main`)

    model = training.plain

    def team() -> Any:
        return vars(model)[STATE_NAME].way._run.team

    def victim() -> int:
        pid: int = team()._seats[1].member._process.pid
        return pid

    killer = Killer(training.setup.backward, victim, task["fatal"], log)
    training.setup = replace(training.setup, backward=killer.backward)
    log.write("ready", done=0)
    for _ in range(task["num_steps"]):
        training.step()
        killer.done += 1
        log.write("step", full=all(team().present))
    faults = [fault._asdict() for fault in evener.report(model).faults]
    log.write("end", digest=digest(model), faults=faults)


def _train_ranks(training: Training, task: dict[str, Any], log: Log, rank: int) -> None:
    """Trains in one of several processes, the last of which is the one that is ended, once."""
    import torch  # noqa: PLC0415 (late, see `main`)

    from workloads import digest  # noqa: PLC0415

    is_mortal = rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    fatal = task["fatal"] if is_mortal else None
    killer = Killer(training.setup.backward, os.getpid, fatal, log)
    training.setup = replace(training.setup, backward=killer.backward)
    model, optimizer = training.plain, training.setup.optimizer
    checkpoint = Path(task["checkpoint"])
    if checkpoint.exists():
        found = torch.load(checkpoint)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        killer.done = found["done"]
        training.skip(killer.done)
    log.write("ready", done=killer.done)
    while killer.done < task["num_steps"]:
        training.step()
        killer.done += 1
        if rank == 0 and killer.done % task["every"] == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            unfinished = checkpoint.with_suffix(".new")
            torch.save({"done": killer.done, **state}, unfinished)
            unfinished.replace(checkpoint)  # whole or not at all
        log.write("step", full=True)
    log.write("end", digest=digest(model), faults=[])


if __name__ == "__main__":
    main()
