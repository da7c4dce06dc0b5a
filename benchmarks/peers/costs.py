"""What evener costs besides: the first step, one device, memory. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from targets import FIRST_STEP_S, MEMORY, ONE_DEVICE

from harness import Group, Spread
from rounds import warm_up
from start import CONTENDERS, START_LIMIT_S, WORKER, hear_start, start_group
from tables import Verdict

FIRST_STEP_WORKLOADS = ("smallmlp", "mlp")
ONE_DEVICE_WORKLOAD = "smallmlp"
MEMORY_WORKLOAD = "mlp"
NUM_BLOCKS = 40
BLOCK_STEPS = 20


@dataclass(frozen=True)
class FirstStepResult:
    """Seconds to the end of the first step, by workload, and what `import torch` alone takes."""

    first_step_s: dict[str, Spread]
    import_torch_s: Spread

    def lines(self) -> list[str]:
        found = [f"first step, {name}: {s} s" for name, s in self.first_step_s.items()]
        return [*found, f"import torch in a new process: {self.import_torch_s} s"]

    def verdicts(self) -> list[Verdict]:
        return [
            Verdict(
                f"{name}: seconds to the end of the first step",
                s.median,
                FIRST_STEP_S,
                at_least=False,
            )
            for name, s in self.first_step_s.items()
        ]

    def to_json(self) -> dict[str, Any]:
        first = {name: spread.to_json() for name, spread in self.first_step_s.items()}
        return {"first_step_s": first, "import_torch_s": self.import_torch_s.to_json()}


@dataclass(frozen=True)
class OneDeviceResult:
    """A step's time of `parallelize(model, "cpu:0")` against that of the plain model."""

    ratio: Spread

    def lines(self) -> list[str]:
        r = self.ratio
        return [f"one device against plain: {r.median:.4f} ({r.low:.3f}..{r.high:.3f})"]

    def verdicts(self) -> list[Verdict]:
        what = f"{ONE_DEVICE_WORKLOAD}: step time on one device against plain"
        return [Verdict(what, self.ratio.median, ONE_DEVICE, at_least=False)]

    def to_json(self) -> dict[str, Any]:
        return {"ratio": self.ratio.to_json()}


@dataclass(frozen=True)
class Memory:
    """Memory of a contender's processes together while it trains.

    Attributes:
        num_processes: how many there are.
        import_bytes: of as many processes that have only imported torch, running beside them.
        peak_bytes: of the contender's beyond that, in the highest sample.
        median_bytes: the same in the middle one.
    """

    num_processes: int
    import_bytes: int
    peak_bytes: int
    median_bytes: int


@dataclass(frozen=True)
class MemoryResult:
    """Memory of evener and of DDP."""

    contenders: dict[str, Memory]

    def lines(self) -> list[str]:
        return [
            f"memory, {CONTENDERS[name]}: at most {m.peak_bytes / 1e6:.0f} MB, in the median"
            f" {m.median_bytes / 1e6:.0f} MB, beyond {m.num_processes} processes that import torch"
            for name, m in self.contenders.items()
        ]

    def verdicts(self) -> list[Verdict]:
        if not {"evener", "ddp"} <= self.contenders.keys():
            return []
        ratio = self.contenders["evener"].peak_bytes / self.contenders["ddp"].peak_bytes
        what = f"{MEMORY_WORKLOAD}: memory against DDP"
        return [Verdict(what, ratio, MEMORY, at_least=False)]

    def to_json(self) -> dict[str, Any]:
        return {name: asdict(memory) for name, memory in self.contenders.items()}


def measure_first_step(cores: Sequence[int], *, num_rounds: int) -> FirstStepResult:
    """Each figure in a new process, round after round."""
    import_s = []
    first_s: dict[str, list[float]] = {name: [] for name in FIRST_STEP_WORKLOADS}
    for _ in range(num_rounds):
        import_s.append(_ask_once({"role": "import"}, cores[:1])["seconds"])
        for name, seconds in first_s.items():
            answer = _ask_once({"role": "first-step", "workload": name}, cores)
            seconds.append(answer["seconds"])
    return FirstStepResult(
        {name: Spread.of(s) for name, s in first_s.items()}, Spread.of(import_s)
    )


def measure_one_device(cores: Sequence[int]) -> OneDeviceResult:
    """Plain and single-device training in one process, in alternating blocks."""
    task = {
        "role": "one-device",
        "workload": ONE_DEVICE_WORKLOAD,
        "num_blocks": NUM_BLOCKS,
        "num_steps": BLOCK_STEPS,
    }
    return OneDeviceResult(Spread.of(_ask_once(task, cores[:1])["ratios"]))


def measure_memory(contenders: Sequence[str], cores: Sequence[int]) -> MemoryResult:
    """One contender after the other."""
    compared = [name for name in ("ddp", "ddp_tuned", "evener") if name in contenders]
    return MemoryResult({name: _memory(name, cores) for name in compared})


def _memory(contender: str, cores: Sequence[int], seconds: float = 5.0) -> Memory:
    import_bytes: list[int] = []
    own_bytes: list[int] = []
    # Without checked steps: the comparison allocates memory that training does not.
    with start_group(contender, MEMORY_WORKLOAD, cores, num_checked=0) as group:
        hear_start(group)
        step_s = warm_up(group, 1.0)
        num = len(group.family())
        # The pages of torch's libraries are divided among all processes that have them mapped.
        # With these beside them the contender's processes count the same part of them as they
        # do, whatever else runs on the machine, and the difference is free of it.
        with Group("import torch", WORKER, [{"role": "import"}] * num, [cores] * num) as importers:
            importers.hear(START_LIMIT_S)

            def sample() -> None:
                import_bytes.append(importers.pss_bytes())
                own_bytes.append(group.pss_bytes() - import_bytes[-1])

            request = {"do": "run", "num_steps": max(2, round(seconds / step_s)), "num_lead_in": 0}
            group.ask(request, START_LIMIT_S, meanwhile=sample, every_s=0.01)
    median = round(statistics.median(own_bytes))
    return Memory(num, max(import_bytes), max(own_bytes), median)


def _ask_once(task: dict[str, Any], cores: Sequence[int]) -> dict[str, Any]:
    with Group(str(task["role"]), WORKER, [task], [cores]) as group:
        return group.hear(START_LIMIT_S)[0]
