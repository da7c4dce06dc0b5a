"""Turns and rounds: how fast each of several running contenders trains, in alternation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from harness import Group, Spread

# A share of the steps of a turn, untimed, brings a contender's data back into the caches and
# its threads and helpers out of their sleep.
LEAD_IN = 0.1
SETTLE_S = 0.05
MIN_STEPS = 2
LIMIT_S = 300.0
# More than this and the figures are not to be trusted.
MAX_IDLE_CORES = 0.05
MAX_FOREIGN_CORES = 0.1


@dataclass
class Turns:
    """One contender's measurements.

    Attributes:
        group: its processes.
        step_s: how long a step took lately; sets the number of steps in its next turn.
        steps_per_s: what each round measured.
        idle_cores: cores that it kept busy while it waited for each of its turns.
        foreign_cores: cores that were busy with something else during each of its turns.
        beside: what is busy on purpose during its turns, and not foreign.
    """

    group: Group
    step_s: float
    steps_per_s: list[float] = field(default_factory=list)
    idle_cores: list[float] = field(default_factory=list)
    foreign_cores: list[float] = field(default_factory=list)
    beside: Sequence[Group] = ()
    _asleep: tuple[float, float] | None = None

    def num_steps(self, turn_s: float) -> int:
        return max(MIN_STEPS, round(turn_s / self.step_s))

    def take(self, turn_s: float) -> None:
        """One turn of about `turn_s` seconds."""
        cpu_s, clock_s, foreign_s = self.group.cpu_s(), time.monotonic(), self._foreign_s()
        if self._asleep is not None:
            slept_cpu_s, slept_clock_s = self._asleep
            self.idle_cores.append((cpu_s - slept_cpu_s) / (clock_s - slept_clock_s))
        self.steps_per_s.append(run_steps(self.group, self.num_steps(turn_s)))
        self.step_s = 1 / self.steps_per_s[-1]
        self.foreign_cores.append((self._foreign_s() - foreign_s) / (time.monotonic() - clock_s))
        # Threads that spin for a moment after their work get that moment.
        time.sleep(SETTLE_S)
        self._asleep = self.group.cpu_s(), time.monotonic()

    def _foreign_s(self) -> float:
        """Seconds of processor time that others than this contender have used so far."""
        return busy_s() - sum(group.cpu_s() for group in [self.group, *self.beside])


@dataclass(frozen=True)
class Loads:
    """What was busy that should not have been, and may have spoilt the figures.

    Attributes:
        idle_cores: cores that each contender kept busy while it waited, by its name: the mean.
        foreign_cores: cores that other programs kept busy during the turns: the median.
    """

    idle_cores: dict[str, float]
    foreign_cores: float

    @classmethod
    def of(cls, turns: Mapping[str, Turns]) -> Loads:
        """Of contenders that have taken their turns."""
        idle = {n: sum(t.idle_cores) / len(t.idle_cores) for n, t in turns.items() if t.idle_cores}
        foreign = [cores for turn in turns.values() for cores in turn.foreign_cores]
        return cls(idle, Spread.of(foreign).median)

    def warnings(self, titles: Mapping[str, str]) -> list[str]:
        """Why the figures may be wrong, with the contenders' titles by their names."""
        found = [
            f"{titles[name]} kept {cores:.2f} cores busy while others ran"
            for name, cores in self.idle_cores.items()
            if cores > MAX_IDLE_CORES
        ]
        if self.foreign_cores > MAX_FOREIGN_CORES:
            found.append(f"other programs kept {self.foreign_cores:.2f} cores busy")
        return found


def run_steps(group: Group, num_steps: int) -> float:
    """Runs that many timed steps in all processes of the group; returns steps per second."""
    num_lead_in = max(1, round(num_steps * LEAD_IN))
    request = {"do": "run", "num_steps": num_steps, "num_lead_in": num_lead_in}
    return num_steps / max(float(a["seconds"]) for a in group.ask(request, LIMIT_S))


def warm_up(group: Group, warm_up_s: float) -> float:
    """Runs ever more steps until some took `warm_up_s`; returns the seconds of a step."""
    num_steps = MIN_STEPS
    while True:
        step_s = 1 / run_steps(group, num_steps)
        if num_steps * step_s >= warm_up_s:
            return step_s
        num_steps = max(2 * num_steps, round(warm_up_s / step_s) + 1)


def take_rounds(contenders: Sequence[Turns], num_rounds: int, turn_s: float) -> None:
    """Lets each contender take one turn a round, each round beginning with another one."""
    for round_ in range(num_rounds):
        first = round_ % len(contenders)
        for turns in [*contenders[first:], *contenders[:first]]:
            turns.take(turn_s)


def busy_s() -> float:
    """Seconds of processor time that the whole machine has used, waiting left out."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
