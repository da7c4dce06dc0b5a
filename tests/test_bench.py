"""The bench: its turns, its figures, its command, and that it leaves the machine as it was."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

import evener
from bounds import LONG
from evener import cli
from evener.errors import DeviceError, EvenerError
from evener.textbook import bench, main_job
from evener.textbook.bench import Bench, Speed
from evener.textbook.record import Settings, SettingsError

TINY = Settings(batch_size=12, width=1)
QUICK = ("--devices", "cpu*2", "--batch-size", "12", "--width", "1", "--seconds", "0.01")
WHO = ["cpu:0 alone", "cpu:1 alone", "evener even", "evener auto"]

MADE = Bench(
    devices=("cpu:0", "cpu:1"),
    alone=(Speed("cpu:0 alone", (10.0, 20.0, 10.0)), Speed("cpu:1 alone", (5.0, 5.0, 5.0))),
    together=(
        Speed("evener even", (9.0, 10.0, 9.0)),
        Speed("evener auto", (15.0, 20.0, 12.0)),
    ),
    shares=(43, 21),
)


@pytest.fixture(scope="module", autouse=True)
def first_optimizer() -> None:
    """The first optimizer of a process sets an environment variable of torch's compiler."""
    torch.optim.SGD([torch.zeros(1)])


@pytest.fixture(autouse=True)
def is_as_before() -> Iterator[None]:
    before = os.sched_getaffinity(0), torch.get_num_threads()

    yield

    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before


@pytest.fixture
def call() -> Callable[..., Result]:
    return lambda *args: CliRunner().invoke(cli.app, ["bench", *args])


def busy() -> list[psutil.Process]:
    """The neighbours that this process has started."""
    children = psutil.Process().children()
    return [child for child in children if any("getppid" in word for word in child.cmdline())]


def ignores_ctrl_c(process: psutil.Process) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text()
    mask = re.search(r"^SigIgn:\s*(\w+)$", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) & 1 << (signal.SIGINT - 1))


# ------------------------------------------------------------------ figures


def test_ratios_are_medians_of_ratios_within_a_round() -> None:
    first, second = MADE.alone
    even, auto = MADE.together

    assert MADE.against_first(first) == 1
    assert MADE.against_first(second) == 0.5
    assert MADE.against_first(even) == 0.9
    assert MADE.against_first(auto) == 1.2  # of 1.5, 1.0, 1.2
    assert MADE.part_of_sum(auto) == 0.8  # of 1.0, 0.8, 0.8
    assert MADE.part_of_sum(first) == pytest.approx(2 / 3)


def test_the_table_has_a_row_for_each_contender() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(bench.table(MADE))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]

    heading = [cell.strip() for cell in re.split("[┃│]", lines[1])[1:-1]]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert heading == [
        "who",
        "images/sec",
        "spread",
        "against cpu:0",
        "part of the sum",
    ]
    assert rows == [
        ["cpu:0 alone", "10", "10..20", "1.00", "0.67"],
        ["cpu:1 alone", "5", "5..5", "0.50", "0.33"],
        ["evener even", "9", "9..10", "0.90", "0.60"],
        ["evener auto", "15", "12..20", "1.20", "0.80"],
    ]


def test_the_notes_tell_the_shares() -> None:
    first, *_ = bench.notes(MADE)

    assert first == "The auto shares at the end: cpu:0 43, cpu:1 21 of a batch of 64 images."


# ------------------------------------------------------------------ measuring


@LONG
def test_everybody_takes_turns_alone_on_its_cores_beside_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One measurement for all that it promises: each starts helpers, which takes seconds."""
    devices = evener.devices("cpu*2")
    turns: list[tuple[str, int, int]] = []
    neighbours: list[list[tuple[list[int], int]]] = []
    confined: list[tuple[str, tuple[int, ...], set[int]]] = []
    confined_to = main_job.confined_to

    @contextlib.contextmanager
    def spy(cores: tuple[int, ...]) -> Iterator[None]:
        with confined_to(cores):
            confined.append((turns[-1][0], cores, os.sched_getaffinity(0)))
            yield

    def on_turn(*turn: Any) -> None:
        turns.append(turn)
        neighbours.append([(p.cpu_affinity(), p.pid) for p in busy()])
        # A device that is left out shows in the table; the warning is no news there.
        warnings.warn("cpu:1 has no share of batches of 12 samples", stacklevel=2)

    monkeypatch.setattr(main_job, "confined_to", spy)
    found = bench.measure(
        devices, TINY, slow={"cpu:1": 0.25}, num_rounds=2, seconds=0.01, on_turn=on_turn
    )

    assert [who for who, _, _ in turns] == [*WHO, *WHO, *WHO[1:], WHO[0]]
    assert [(i, num) for _, i, num in turns] == [(i, 12) for i in range(12)]
    assert [speed.who for speed in (*found.alone, *found.together)] == WHO
    assert all(len(speed.images_per_s) == 2 for speed in (*found.alone, *found.together))
    assert all(rate > 0 for speed in found.alone for rate in speed.images_per_s)
    assert found.devices == ("cpu:0", "cpu:1")
    assert len(found.shares) == 2
    assert sum(found.shares) == 12

    one, two = [(f"{d.label} alone", d.cores, set(d.cores)) for d in devices]
    # Once in the lead-in; in a turn once for its own lead-in, once for what is timed.
    assert confined == [one, two, one, one, two, two, two, two, one, one]

    assert [cores for cores, _ in neighbours[0]] == [list(devices[1].cores)] * 3
    assert neighbours == [neighbours[0]] * 12
    assert busy() == []


def test_everybody_gets_the_same_batches() -> None:
    one, other = bench._random_batches(TINY), bench._random_batches(TINY)

    assert len(one) == bench.NUM_BATCHES
    assert one[0][0].shape == (12, 1, 28, 28)
    assert one[0][1].shape == (12,)
    for (x, y), (x_too, y_too) in zip(one, other, strict=True):
        assert torch.equal(x, x_too)
        assert torch.equal(y, y_too)
    assert not torch.equal(one[0][0], one[1][0])


def test_an_error_leaves_nothing() -> None:
    def fail(_who: str, num_done: int, _num: int) -> None:
        if num_done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.measure(
            evener.devices("cpu*2"),
            TINY,
            slow={"cpu:0": 0.5},
            num_rounds=1,
            seconds=0.01,
            on_turn=fail,
        )

    assert psutil.Process().children() == []


@pytest.mark.parametrize(
    ("spec", "options", "kind", "message"),
    [
        ("cpu*2", {"num_rounds": 0}, SettingsError, "rounds=0: expected 1 or more"),
        ("cpu*2", {"seconds": 0.0}, SettingsError, r"seconds=0\.0: expected a number above 0"),
        ("cpu*2", {"seconds": float("nan")}, SettingsError, "seconds=nan"),
        ("cpu:0", {}, DeviceError, r'cpu:0: expected two devices or more.*"cpu\*2"'),
        ("cpu*2", {"slow": {"cpu:7": 0.5}}, DeviceError, "slow names cpu:7; .*: cpu:0, cpu:1"),
        ("cpu*2", {"slow": {"cpu:0": 2}}, DeviceError, "speed of 2"),
    ],
)
def test_what_cannot_be_measured(
    spec: str, options: Any, kind: type[EvenerError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        bench.measure(evener.devices(spec), TINY, **options)


# ------------------------------------------------------------------ the command


def test_bench_prints_a_table(call: Callable[..., Result]) -> None:
    result = call(*QUICK, "--rounds", "1", "--slow", "cpu:1=0.5")

    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"comparing: cpu:0 \(.*\), cpu:1 \(.*\)", lines[0])
    assert lines[1] == "a neighbour leaves cpu:1 0.5 of its speed"
    for word in (*WHO, "images/sec", "part of the sum", "The auto shares at the end: cpu:0 "):
        assert word in result.stdout


def test_bench_shows_in_a_terminal_whose_turn_it_is(
    call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any, on_turn: Callable[[str, int, int], None], **__: Any) -> Bench:
        on_turn("somebody", 6, 12)
        return MADE

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = call(*QUICK).stdout

    assert "somebody" in shown
    assert "50%" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--devices", "cpu:0"), "expected two devices or more"),
        (("--devices", "gpu"), "there is no device 'gpu'"),
        (("--slow", "cpu:1"), "slow 'cpu:1' is not understood"),
        (("--slow", "cpu:1=2"), "expected a speed from 0.02 to below 1"),
        (("--devices", "cpu*2", "--slow", "cpu:5=0.5"), "slow names cpu:5; expected"),
        (("--devices", "cpu*2", "--rounds", "0"), "rounds=0: expected 1 or more"),
        (("--devices", "cpu*2", "--seconds", "-1"), "seconds=-1.0: expected"),
        (("--batch-size", "0"), "batch_size=0: expected 1 or more"),
        (("--width", "x"), "--width"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_a_bad_option_is_one_line(
    call: Callable[..., Result], options: tuple[str, ...], message: str
) -> None:
    result = call(*options)

    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("evener: ")
    assert message in line


@LONG
def test_ctrl_c_is_one_line_and_leaves_no_process() -> None:
    source = str(Path(evener.__file__).parents[1])
    options = ("--slow", "cpu:1=0.25", "--rounds", "1000000")
    with subprocess.Popen(
        [sys.executable, "-m", "evener.cli", "bench", *QUICK, *options],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        main = psutil.Process(program.pid)
        # Two helpers and three neighbours, for whom Ctrl-C is nothing once they have started.
        while sum(map(ignores_ctrl_c, started := main.children(recursive=True))) < 5:
            assert program.poll() is None, program.communicate()
            time.sleep(0.02)
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to all of them
        _, stderr = program.communicate(timeout=60)

    assert stderr == "evener: interrupted\n"
    assert program.returncode == 130
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []
