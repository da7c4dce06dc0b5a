"""Seconds lost by one death: trainings with and without one, in alternation; no torch."""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from contestants import Contestant

from harness import ContenderError, Spread, Worker, free_port, worker_environment
from rounds import Loads, busy_s

#: torchrun's processes use its own store by default, in which those that start again find the
#: addresses of the dead, and gloo fails to connect. With this they get a new store each time.
TORCHRUN_SETTINGS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
#: The parts of what is lost, as far as they can be told apart, and how the tables call them.
PARTS = {
    "noticed_s": "until noticed",
    "start_s": "starting again",
    "again_s": "doing again",
    "rest_s": "the rest",
}


@dataclass(frozen=True)
class Life:
    """What the first process did between a start and its end.

    Attributes:
        began_s: when it was there.
        ready_s: when its first step began.
        done: steps that were behind it then.
        steps_s: when each of its steps was over.
    """

    began_s: float
    ready_s: float
    done: int
    steps_s: list[float]


@dataclass(frozen=True)
class Run:
    """One training, from the events that `train.py` wrote.

    Attributes:
        lives: of the first process: one, or one more for each restart.
        killed_s: when somebody was ended; None if nobody was.
        not_full: steps that ended with fewer devices than there are.
        digest: of the trained model.
        faults: what evener reports.
        foreign_cores: cores that were busy with something else.
    """

    lives: list[Life]
    killed_s: float | None
    not_full: int
    digest: str
    faults: list[dict[str, Any]]
    foreign_cores: float = 0.0

    @classmethod
    def of(cls, events: Sequence[dict[str, Any]], foreign_cores: float = 0.0) -> Run:
        """Reads the events, which are in the order of time for each process.

        Raises:
            ContenderError: if the training has no end, or had none of its steps.
        """
        lives: list[Life] = []
        not_full, end = 0, None
        for event in (event for event in events if event["rank"] == 0):
            if event["event"] == "began":
                began_s = event["at_s"]
            elif event["event"] == "ready":
                lives.append(Life(began_s, event["at_s"], event["done"], []))
            elif event["event"] == "step":
                lives[-1].steps_s.append(event["at_s"])
                not_full += not event["full"]
            elif event["event"] == "end":
                end = event
        if end is None or not lives[0].steps_s or not lives[-1].steps_s:
            raise ContenderError("the training did not come to its end")
        killed_s = next((e["at_s"] for e in events if e["event"] == "killed"), None)
        return cls(lives, killed_s, not_full, end["digest"], end["faults"], foreign_cores)

    @property
    def seconds(self) -> float:
        """From the end of the very first step, when all are warm, to the end of the last."""
        return self.lives[-1].steps_s[-1] - self.lives[0].steps_s[0]

    @property
    def repeated(self) -> int:
        """Steps that were done, and were done a second time."""
        pairs = zip(self.lives, self.lives[1:], strict=False)
        return sum(old.done + len(old.steps_s) - new.done for old, new in pairs)

    def parts(self) -> dict[str, float]:
        """Where the seconds after the death went, as far as they can be told apart.

        Of a restart: until the new process is there, until it begins its first step, and until it
        is as far as the old one was. Of evener: until a call sees the death, and what the report
        calls the cost of the fault; the new helper starts in the background.
        """
        assert self.killed_s is not None
        if len(self.lives) > 1:
            old, new = self.lives[:2]
            again = old.done + len(old.steps_s) - new.done
            over_s = new.steps_s[again - 1] if again else new.ready_s
            return {
                "noticed_s": new.began_s - self.killed_s,
                "start_s": new.ready_s - new.began_s,
                "again_s": over_s - new.ready_s,
            }
        fault = self.faults[0]
        # Not before the death, if what it took to wait in vain is a part of the cost.
        noticed_s = max(self.killed_s, fault["at_s"] - fault["cost_s"])
        return {
            "noticed_s": noticed_s - self.killed_s,
            "start_s": 0.0,
            "again_s": fault["at_s"] - noticed_s,
        }


@dataclass(frozen=True)
class Round:
    """The runs of one contestant in one round."""

    disturbed: Run
    undisturbed: list[Run]

    @property
    def undisturbed_s(self) -> float:
        return statistics.median(run.seconds for run in self.undisturbed)

    @property
    def lost_s(self) -> float:
        return self.disturbed.seconds - self.undisturbed_s

    def parts(self) -> dict[str, float]:
        """What is lost, taken apart; see `PARTS`."""
        known = self.disturbed.parts()
        return {**known, "rest_s": self.lost_s - sum(known.values())}

    def to_json(self) -> dict[str, Any]:
        return {
            "disturbed_s": self.disturbed.seconds,
            "undisturbed_s": [run.seconds for run in self.undisturbed],
            "lost_s": self.lost_s,
            **self.parts(),
            "repeated": self.disturbed.repeated,
            "not_full": self.disturbed.not_full,
            "faults": self.disturbed.faults,
        }


@dataclass
class LostResult:
    """What one contestant measured, round by round."""

    title: str
    rounds: list[Round] = field(default_factory=list)

    def lost_s(self) -> Spread:
        return Spread.of([round_.lost_s for round_ in self.rounds])

    def undisturbed_s(self) -> Spread:
        return Spread.of([round_.undisturbed_s for round_ in self.rounds])

    def part_s(self, name: str) -> Spread:
        return Spread.of([round_.parts()[name] for round_ in self.rounds])

    def repeated(self) -> Spread:
        return Spread.of([round_.disturbed.repeated for round_ in self.rounds])

    def not_full(self) -> Spread:
        return Spread.of([round_.disturbed.not_full for round_ in self.rounds])

    def cost_s(self) -> Spread | None:
        """What evener reports as the cost of the fault; None for those without a report."""
        costs = [sum(f["cost_s"] for f in round_.disturbed.faults) for round_ in self.rounds]
        return Spread.of(costs) if any(costs) else None

    def as_undisturbed(self) -> tuple[int, int]:
        """How many disturbed runs trained, bit for bit, the model of the first undisturbed one.

        The second number is how many of the undisturbed ones did, the first not counted.
        """
        expected, *others = [run.digest for round_ in self.rounds for run in round_.undisturbed]
        disturbed = [round_.disturbed.digest for round_ in self.rounds]
        return disturbed.count(expected), others.count(expected)

    def warnings(self) -> list[str]:
        """Why the figures may be wrong."""
        runs = [run for round_ in self.rounds for run in [round_.disturbed, *round_.undisturbed]]
        foreign = Spread.of([run.foreign_cores for run in runs]).median
        found = [f"{self.title}: {warning}" for warning in Loads({}, foreign).warnings({})]
        for number, round_ in enumerate(self.rounds, 1):
            if any(len(run.lives) > 1 or run.faults for run in round_.undisturbed):
                found.append(f"{self.title}: somebody died in an undisturbed run, round {number}")
        return found

    def to_json(self) -> dict[str, Any]:
        same, same_undisturbed = self.as_undisturbed()
        cost_s = self.cost_s()
        return {
            "lost_s": self.lost_s().to_json(),
            "undisturbed_s": self.undisturbed_s().to_json(),
            "parts": {name: self.part_s(name).to_json() for name in PARTS},
            "cost_s": cost_s and cost_s.to_json(),
            "repeated": asdict(self.repeated()),
            "not_full": asdict(self.not_full()),
            "as_undisturbed": same,
            "undisturbed_as_undisturbed": same_undisturbed,
            "rounds": [round_.to_json() for round_ in self.rounds],
        }


def measure_lost(
    known: Sequence[Contestant],
    task: dict[str, Any],
    cores: Sequence[int],
    *,
    num_rounds: int,
    num_undisturbed: int,
    limit_s: float,
) -> list[LostResult]:
    """Lets the contestants train in turns, each round beginning with another one.

    Of the undisturbed runs of a round one half comes before the disturbed one, the other behind
    it, so that a machine that gets slower or faster does so for both.

    Args:
        known: the contestants.
        task: what they are told, without how it ends.
        cores: what they may use.
        num_rounds: how many rounds.
        num_undisturbed: runs without a death in each round.
        limit_s: seconds after which a run is an error.

    Raises:
        ContenderError: if a run fails, or nobody dies in a disturbed one.
    """
    results = [LostResult(contestant.title) for contestant in known]
    pairs = list(zip(known, results, strict=True))
    before = num_undisturbed // 2
    for number in range(num_rounds):
        first = number % len(pairs)
        for contestant, result in [*pairs[first:], *pairs[:first]]:
            runs = []
            for turn in range(num_undisturbed + 1):
                fatal = task["fatal"] if turn == before else None
                runs.append(run(contestant, {**task, "fatal": fatal}, cores, limit_s))
            disturbed = runs.pop(before)
            if disturbed.killed_s is None or not (disturbed.faults or len(disturbed.lives) > 1):
                raise ContenderError(f"{contestant.title}: nobody noticed that somebody died")
            result.rounds.append(Round(disturbed, runs))
    return results


def run(contestant: Contestant, task: dict[str, Any], cores: Sequence[int], limit_s: float) -> Run:
    """One training in processes of its own.

    Raises:
        ContenderError: if it fails, takes longer than `limit_s`, or leaves a process behind.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        log = Path(folder) / "log"
        told = {"log": str(log), "checkpoint": str(Path(folder) / "checkpoint.pt")}
        command = contestant.command({**task, **told, "cores": list(cores)}, len(cores))
        start_s, others_s = time.perf_counter(), _others_s()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env=worker_environment(0, 1, free_port()) | TORCHRUN_SETTINGS,
            start_new_session=True,
        )
        worker = Worker(process, errors)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ContenderError(
                f"{contestant.title} was not done within {limit_s:.0f} s. Its last words:\n"
                f"{worker.last_words()}"
            ) from None
        finally:
            left = worker.family()
            for one in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()
        if process.returncode:
            raise ContenderError(f"{contestant.title} failed:\n{worker.last_words()}")
        if left:
            raise ContenderError(f"{contestant.title} left {len(left)} processes behind")
        foreign_cores = (_others_s() - others_s) / (time.perf_counter() - start_s)
        events = [json.loads(line) for line in log.read_text().splitlines()]
        return Run.of(events, foreign_cores)


def _others_s() -> float:
    """Seconds of processor time that others than this program's past children have used."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return busy_s() - children.ru_utime - children.ru_stime
