"""One training: `train.py TASK`, with the task as JSON; prints the digest of what it trained.

A task has `workload`, `num_steps`, `devices` (how many), `shares`, `grid`; and, where a helper is
to die, `fatal`: how many steps are done when it is ended, in the middle of a backward. A training
may be in two processes: `stop` tells after how many steps the first writes `checkpoint` and ends,
`resume` that the second begins there. That is half of the steps, where in all trainings the random
numbers begin anew.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import evener
from evener.pickling import STATE_NAME
from workloads import WORKLOADS, cross_entropy, digest, make_batches, make_model

# So many groups of cores, whatever number of them is used: each has as many threads.
MOST_DEVICES = 4


def main() -> None:
    warnings.simplefilter("ignore", evener.errors.FaultWarning)  # counted below
    print(json.dumps(train(json.loads(sys.argv[1]))))


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Trains; returns the `digest`, and how many `faults` there were."""
    work = WORKLOADS[task["workload"]]
    batches = make_batches(work)
    model = make_model(work)
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr, momentum=0.9)
    devices = evener.devices(f"cpu*{MOST_DEVICES}")[: task["devices"]]
    torch.set_num_threads(len(devices[0].cores))  # also without a team
    evener.parallelize(model, devices, shares=task["shares"], grid=task["grid"])
    first = 0
    if task.get("resume"):
        found = torch.load(task["checkpoint"])
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["done"]
    stop = task.get("stop") or task["num_steps"]
    took_s: list[float] = []
    for step in range(first, stop):
        if step in (0, task["num_steps"] // 2):
            torch.manual_seed(step)
        inputs, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        if step == task.get("fatal"):
            threading.Timer(statistics.median(took_s) / 2, _kill, [model]).start()
        start_s = time.perf_counter()
        loss.backward()
        took_s.append(time.perf_counter() - start_s)
        optimizer.step()
    if task.get("stop"):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": stop}
        torch.save(state, task["checkpoint"])
    faults = len(evener.report(model).faults)
    answer = {"digest": digest(model), "faults": faults}
    evener.release(model)
    return answer


def _kill(model: nn.Module) -> None:
    seat = vars(model)[STATE_NAME].way._run.team._seats[1]
    os.kill(seat.member._process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
