"""The benchmark of what one death costs: what it makes of the events of its trainings."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
NAMES = ("contestants", "lost", "results", "harness", "rounds", "tables", "environment")


@pytest.fixture(scope="module", autouse=True)
def found_there() -> Iterator[None]:
    """The benchmark's files are found, and forgotten afterwards: others have such names."""
    added = [str(BENCHMARKS / "recovery"), str(BENCHMARKS)]
    sys.path[:0] = added
    yield
    for path in added:
        sys.path.remove(path)
    for name in NAMES:
        sys.modules.pop(name, None)


def load(name: str) -> Any:
    return importlib.import_module(name)


def line(event: str, at_s: float, rank: int = 0, **told: Any) -> dict[str, Any]:
    return {"event": event, "rank": rank, "at_s": at_s, **told}


def steps(*ends_s: float, full: bool = True) -> list[dict[str, Any]]:
    return [line("step", at_s, full=full) for at_s in ends_s]


def end(at_s: float, digest: str = "a", *faults: dict[str, Any]) -> dict[str, Any]:
    return line("end", at_s, digest=digest, faults=list(faults))


def begin(began_s: float, ready_s: float, done: int = 0) -> list[dict[str, Any]]:
    return [line("began", began_s), line("ready", ready_s, done=done)]


UNDISTURBED = [*begin(0, 5), *steps(6, 7, 8, 9, 10), end(10)]
# Three steps, a checkpoint after the first two; it dies in the fourth.
RESTARTED = [
    *begin(0, 5),
    *steps(6, 7, 8),
    line("killed", 8.5, rank=1),
    *begin(10, 14, done=2),
    *steps(15, 16, 17),
    end(17),
]
FAULT = {"at_s": 8.875, "cost_s": 0.25}
DONE_AGAIN = [
    *begin(0, 5),
    *steps(6, 7, 8),
    line("killed", 8.5),
    *steps(9.5, full=False),
    *steps(10.5),
    end(10.5, "b", FAULT),
]


def test_the_step_is_half_of_every_interval_after_a_checkpoint() -> None:
    fatal_step = load("contestants").fatal_step

    assert fatal_step(120, (10, 50)) == 75
    assert fatal_step(40, (10, 50)) == 25
    assert fatal_step(40, (10,)) in (15, 25)
    with pytest.raises(ValueError, match="in 20 steps there is none"):
        fatal_step(20, (10, 50))


def test_an_undisturbed_run_is_timed_from_its_first_step() -> None:
    run = load("lost").Run.of(UNDISTURBED)

    assert (run.seconds, run.repeated, run.not_full, run.killed_s) == (4, 0, 0, None)


def test_a_restart_is_taken_apart() -> None:
    lost = load("lost")
    run = lost.Run.of(RESTARTED)
    round_ = lost.Round(run, [lost.Run.of(UNDISTURBED)])

    assert (run.seconds, run.repeated) == (11, 1)
    assert round_.lost_s == 7
    assert round_.parts() == {"noticed_s": 1.5, "start_s": 4, "again_s": 1, "rest_s": 0.5}


def test_what_evener_did_again_is_taken_apart() -> None:
    lost = load("lost")
    run = lost.Run.of(DONE_AGAIN)
    round_ = lost.Round(run, [lost.Run.of(UNDISTURBED)])

    assert (run.repeated, run.not_full) == (0, 1)
    assert round_.lost_s == 0.5
    assert round_.parts() == {
        "noticed_s": 0.125,
        "start_s": 0,
        "again_s": 0.25,
        "rest_s": 0.125,
    }


def test_a_cost_that_began_before_the_death_is_counted_from_the_death() -> None:
    run = load("lost").Run.of([*DONE_AGAIN[:-1], end(10.5, "b", {"at_s": 8.75, "cost_s": 1.0})])

    assert run.parts() == {"noticed_s": 0, "start_s": 0, "again_s": 0.25}


def test_a_training_without_an_end_is_an_error() -> None:
    lost = load("lost")

    with pytest.raises(load("harness").ContenderError, match="did not come to its end"):
        lost.Run.of(UNDISTURBED[:-1])


def test_models_are_compared_with_the_first_undisturbed_one() -> None:
    lost = load("lost")
    undisturbed, restarted = lost.Run.of(UNDISTURBED), lost.Run.of(RESTARTED)
    done_again = lost.Run.of(DONE_AGAIN)
    rounds = [
        lost.Round(restarted, [undisturbed, undisturbed]),
        lost.Round(done_again, [undisturbed, done_again]),
    ]

    assert lost.LostResult("both", rounds).as_undisturbed() == (1, 2)


def test_the_tables_have_a_row_for_each_contestant() -> None:
    lost, results = load("lost"), load("results")
    undisturbed = lost.Run.of(UNDISTURBED)
    both = [
        lost.LostResult("evener", [lost.Round(lost.Run.of(DONE_AGAIN), [undisturbed])]),
        lost.LostResult("DDP", [lost.Round(lost.Run.of(RESTARTED), [undisturbed])]),
    ]
    found = results.Results({"date": "today"}, {"rounds": "1"}, both)

    _, first, second = results.rows(both)
    assert first[2:] == ["0.50 (0.50..0.50)", "0 (0..0)", "1 (1..1)", "0 of 1", "0 of 0"]
    assert second[2:] == ["7.00 (7.00..7.00)", "1 (1..1)", "0 (0..0)", "1 of 1", "0 of 0"]
    assert [row[-1] for row in results.part_rows(both)[1:]] == ["0.25 (0.25..0.25)", ""]
    assert "| DDP |" in found.to_markdown()
    assert found.to_json()["lost"]["DDP"]["lost_s"]["median"] == 7
