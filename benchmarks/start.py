"""Starting contenders, and checking that all of them train the same. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import ContenderError, Group

# How the tables call them; what they are is in contenders.py.
CONTENDERS = {
    "one_core": "one core",
    "all_threads": "all threads",
    "ddp": "DDP",
    "ddp_tuned": "DDP tuned",
    "accelerate": "Accelerate",
    "fabric": "Fabric",
    "evener": "evener",
    "evener_even": "evener even",
    "evener_auto": "evener auto",
    "evener_grid4": "evener, grid of 4",
    "evener_grid16": "evener, grid of 16",
    "gluon_even": "gluon even",
    "gluon_auto": "gluon auto",
}
# They run one process for each core, each with its part of the batch.
PEERS = ("ddp", "ddp_tuned", "accelerate", "fabric")

WORKER = Path(__file__).with_name("worker.py")
START_LIMIT_S = 300.0
# Enough for momentum to matter; every step of every contender is compared.
NUM_CHECKED = 4
# Batch norm sees the part of the batch that its process has, which changes the training a little.
BATCH_NORM = ("resnet",)
TOLERANCE = 1e-3
BATCH_NORM_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Start:
    """What a contender trained in its first steps, for the comparison with the others."""

    losses: list[float]
    moved: float


def start_group(
    contender: str,
    workload: str,
    cores: Sequence[int],
    *,
    title: str | None = None,
    loss_inside: bool = False,
    num_checked: int = NUM_CHECKED,
) -> Group:
    """Starts a contender's processes on these cores: one in all, or one for each core.

    They begin with `num_checked` steps that `hear_start` tells of. The contender `one_core` runs
    on the first of the cores.
    """
    num_ranks = len(cores) if contender in PEERS else 1
    task = {
        "role": "train",
        "contender": contender,
        "workload": workload,
        "num_ranks": num_ranks,
        "num_checked": num_checked,
        "loss_inside": loss_inside,
    }
    tasks = [task | {"rank": rank} for rank in range(num_ranks)]
    if contender in PEERS:
        allowed = [[core] for core in cores]
    else:
        allowed = [list(cores[:1] if contender == "one_core" else cores)]
    return Group(title or CONTENDERS[contender], WORKER, tasks, allowed)


def hear_start(group: Group) -> Start:
    """The first losses over the whole batch: the mean over the processes' equal parts."""
    answers = group.hear(START_LIMIT_S)
    columns = zip(*(answer["losses"] for answer in answers), strict=True)
    return Start([sum(losses) / len(losses) for losses in columns], answers[0]["moved"])


def check_same_training(workload: str, starts: dict[str, Start]) -> None:
    """Compares every contender, by its title, with the first one.

    Raises:
        ContenderError: if a contender trained something else.
    """
    tolerance = BATCH_NORM_TOLERANCE if workload in BATCH_NORM else TOLERANCE
    (first, expected), *others = starts.items()
    for title, start in others:
        pairs = zip([*start.losses, start.moved], [*expected.losses, expected.moved], strict=True)
        # Not "any greater": a loss that is not a number is a difference, too.
        if not all(abs(own - other) <= tolerance * abs(other) for own, other in pairs):
            raise ContenderError(
                f"{title} trains something else than {first} on {workload}:"
                f" {start} against {expected}, with a relative tolerance of {tolerance:g}"
            )
