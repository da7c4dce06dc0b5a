"""What evener is to reach, and whether it did. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

CONTENDERS = {
    "one_core": "one core",
    "all_threads": "all threads",
    "ddp": "DDP",
    "ddp_tuned": "DDP tuned",
    "accelerate": "Accelerate",
    "fabric": "Fabric",
    "evener": "evener",
}
DEFAULT_CONTENDERS = tuple(name for name in CONTENDERS if name != "ddp_tuned")
REFERENCE = "one_core"
# They run one process for each core, each with its part of the batch.
PEERS = ("ddp", "ddp_tuned", "accelerate", "fabric")

# Speed against one core.
SPEED = {"smallmlp": 1.2, "mlp": 1.5, "resnet": 1.75, "lstm": 1.7, "encoder": 1.85}
WORKLOADS = tuple(SPEED)
# Speed against the fastest of the peers in the same round.
AGAINST_PEERS = {"smallmlp": 1.5, "mlp": 1.15, "resnet": 1.0, "lstm": 1.15, "encoder": 1.0}
FIRST_STEP_S = 2.5
ONE_DEVICE = 1.01
MEMORY = 0.75

# Batch norm sees the part of the batch that its process has, which changes the training a little.
BATCH_NORM = ("resnet",)
TOLERANCE = 1e-3
BATCH_NORM_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Verdict:
    """A measured figure beside what it is to be: at least or at most the target."""

    what: str
    value: float
    target: float
    at_least: bool

    @property
    def reached(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target

    def row(self) -> tuple[str, str, str, str]:
        bound = f"{'≥' if self.at_least else '≤'} {self.target:g}"
        return self.what, f"{self.value:.3f}", bound, "pass" if self.reached else "FAIL"
