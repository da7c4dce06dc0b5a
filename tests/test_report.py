"""The report: the numbers of each device, from phases made by hand, and how they are shown."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from rich.cells import cell_len

import evener
from evener import chart
from evener.devices import Device
from evener.errors import ModuleError
from evener.journal import BACKWARD, EXCHANGE, FORWARD, INFERENCE, Fault, Journal, Phase, Stretch
from evener.report import NUM_RECENT, NUM_SHOWN, DeviceReport, Report
from evener.table import WIDTH

FAULT = Fault(1, 3, "forward", "was ended by SIGKILL", "its 2 samples were computed", 0.25, 120.0)


def devices(num_devices=2, name="a CPU"):
    return [Device("cpu", i, (i,), 1024, name) for i in range(num_devices)]


def add(journal, *told):
    """Add a phase: all that it has, its stretches not in a tuple."""
    kind, call, start_s, end_s, shares, *stretches = told
    own = tuple(Stretch(*stretch) for stretch in stretches)
    journal.add(Phase(kind, call, shares, start_s, end_s, own))


def train(journal, call, start_s, *, shares=(6, 2), slower=1.0):
    """Train with a batch of 8: 4 seconds, and with 4 seconds of the user's in between.

    The first device does 6 samples in 1 + 2 seconds, the second one 2 samples in 0.5 + 1.5.
    """
    t = start_s
    add(
        *(journal, FORWARD, call, t, t + 1.5 * slower, shares),
        (0, EXCHANGE, t, t + 0.25 * slower),
        (0, FORWARD, t + 0.25 * slower, t + 1.25 * slower),
        (1, FORWARD, t + 0.5 * slower, t + 1.0 * slower),
    )
    t = start_s + 4.0 * slower
    add(
        *(journal, BACKWARD, call, t, t + 2.5 * slower, shares),
        (0, BACKWARD, t, t + 2.0 * slower),
        (1, BACKWARD, t, t + 1.5 * slower),
        (0, EXCHANGE, t + 2.0 * slower, t + 2.5 * slower),
    )


def infer(journal, call, start_s, *, shares=(1, 3)):
    """Infer 4 samples in 1 second: a half for each device's own work."""
    add(
        *(journal, INFERENCE, call, start_s, start_s + 1.0, shares),
        (0, INFERENCE, start_s, start_s + 0.5),
        (1, INFERENCE, start_s, start_s + 0.5),
    )


@pytest.fixture
def journal():
    """Four steps of training, each begun 8 seconds after the one before."""
    journal = Journal(2)
    for call in range(4):
        train(journal, call, 100.0 + 8 * call)
    journal.fault(FAULT)
    return journal


# ------------------------------------------------------------------ the numbers


def test_the_numbers_of_each_device(journal):
    report = Report(devices(), journal.snapshot())

    assert report.devices == (
        DeviceReport(
            label="cpu:0",
            name="a CPU",
            share=6,
            own_samples_per_s=2.0,  # 6 samples in 3 seconds
            now_samples_per_s=0.75,  # 6 samples in 8 seconds
            busy_s=12.0,
            exchange_s=3.0,
            waiting_s=1.0,
            utilisation=0.75,
            num_calls=4,
            num_samples=24,
            num_faults=0,
        ),
        DeviceReport(
            label="cpu:1",
            name="a CPU",
            share=2,
            own_samples_per_s=1.0,
            now_samples_per_s=0.25,
            busy_s=8.0,
            exchange_s=0.0,
            waiting_s=8.0,
            utilisation=0.5,
            num_calls=4,
            num_samples=8,
            num_faults=1,
        ),
    )
    assert report.shares == (6, 2)
    assert report.own_samples_per_s == 3.0
    assert report.now_samples_per_s == 1.0
    assert report.reached == 1 / 3
    assert (report.num_calls, report.lasted_s) == (4, 16.0)
    assert report.moments == tuple(journal.moments)


def test_before_the_first_call():
    report = Report(devices(), Journal(2))

    assert report.shares == (0, 0)
    assert report.devices[1] == DeviceReport(
        "cpu:1", "a CPU", 0, None, None, 0.0, 0.0, 0.0, None, 0, 0, 0
    )
    assert report.own_samples_per_s is None
    assert report.now_samples_per_s is None
    assert report.reached is None


def test_after_one_call_the_own_speed_is_known():
    journal = Journal(2)
    train(journal, 0, 0.0)
    report = Report(devices(), journal)

    assert [device.own_samples_per_s for device in report.devices] == [2.0, 1.0]
    assert [device.now_samples_per_s for device in report.devices] == [None, None]
    assert report.reached is None


def test_in_the_middle_of_a_step(journal):
    add(journal, FORWARD, 4, 132.0, 133.0, (4, 4), (0, FORWARD, 132.0, 133.0))
    report = Report(devices(), journal)

    assert report.shares == (4, 4)
    assert report.own_samples_per_s == 3.0
    assert report.now_samples_per_s == 1.0


def test_the_last_call_is_that_with_the_last_forward():
    journal = Journal(2)
    for kind, call, shares in [(FORWARD, 0, (1, 7)), (FORWARD, 1, (3, 5)), (BACKWARD, 0, (1, 7))]:
        add(journal, kind, call, 0.0, 1.0, shares)

    assert Report(devices(), journal).shares == (3, 5)


def test_pauses_are_no_part_of_the_speed(journal):
    infer(journal, 4, 140.0)
    infer(journal, 5, 150.0)
    for call in range(6, 9):
        train(journal, call, 1000.0 + 8 * call)  # after an evaluation
    for call in range(9, 12):
        train(journal, call, 5000.0 + 8 * call)  # after a pause

    report = Report(devices(), journal)

    assert [device.now_samples_per_s for device in report.devices] == [0.75, 0.25]
    assert [device.own_samples_per_s for device in report.devices] == [2.0, 1.0]


def test_inference_counts_where_nothing_was_trained():
    journal = Journal(2)
    for call in range(3):
        infer(journal, call, 2.0 * call)
    report = Report(devices(), journal)

    assert [device.own_samples_per_s for device in report.devices] == [2.0, 6.0]
    assert [device.now_samples_per_s for device in report.devices] == [0.5, 1.5]
    assert report.reached == 0.25


def test_the_speeds_are_those_of_the_recent_calls():
    journal = Journal(2)
    for call in range(50):
        train(journal, call, 64.0 * call, slower=8.0)
    assert Report(devices(), journal).own_samples_per_s == 3.0 / 8
    for call in range(50, 51 + NUM_RECENT):
        train(journal, call, 64.0 * 50 + 8 * (call - 50))
    report = Report(devices(), journal)

    assert report.own_samples_per_s == 3.0
    assert report.now_samples_per_s == 1.0


def test_a_device_that_no_longer_has_a_share_keeps_its_own_speed(journal):
    for call in range(4, 4 + 2 * NUM_RECENT):
        start_s = 100.0 + 8 * call
        add(journal, FORWARD, call, start_s, start_s + 1, (8, 0), (0, FORWARD, 0.0, 1.0))
        add(journal, BACKWARD, call, start_s + 1, start_s + 3, (8, 0), (0, BACKWARD, 0.0, 1.0))
    report = Report(devices(), journal)

    assert [device.own_samples_per_s for device in report.devices] == [4.0, 1.0]
    assert [device.now_samples_per_s for device in report.devices] == [1.0, 0.0]
    assert report.reached == 0.2


def test_a_device_that_never_had_a_share():
    journal = Journal(2)
    for call in range(3):
        add(journal, INFERENCE, call, call, call + 1, (4, 0), (0, INFERENCE, call, call + 1))
    report = Report(devices(), journal)

    assert [device.own_samples_per_s for device in report.devices] == [4.0, None]
    assert [device.now_samples_per_s for device in report.devices] == [4.0, 0.0]
    assert report.reached == 1.0


def test_a_clock_that_stands_still_divides_nothing_by_zero():
    journal = Journal(2)
    for call in range(3):
        add(journal, INFERENCE, call, 1.0, 1.0, (1, 1), (0, INFERENCE, 1.0, 1.0))
    report = Report(devices(), journal)

    assert report.own_samples_per_s is None
    assert report.now_samples_per_s is None
    assert report.devices[0].utilisation is None
    assert str(report)


def test_other_devices_than_those_of_the_journal_are_refused(journal):
    with pytest.raises(ValueError, match="zip"):
        Report(devices(1), journal)


def test_a_report_can_be_pickled(journal):
    report = Report(devices(), journal.snapshot())
    copy = pickle.loads(pickle.dumps(report))

    assert copy.devices == report.devices
    assert str(copy) == str(report)


# ------------------------------------------------------------------ the table


TABLE = """\
                             own        now  busy  exchange  waiting  busy
 device  name   share  samples/s  samples/s     s         s        s     %  calls  faults
 ────────────────────────────────────────────────────────────────────────────────────────
 cpu:0   a CPU      6          2       0.75  12.0       3.0      1.0    75      4       0
 cpu:1   a CPU      2          1       0.25   8.0       0.0      8.0    50      4       1
 ────────────────────────────────────────────────────────────────────────────────────────
 all                8          3          1  20.0       3.0      9.0    62      4       1
Now 1 samples/s: 33% of the 3 that the devices do in seconds of their own work.
Faults: 1; 250 ms lost.
  cpu:1, call 3, forward: was ended by SIGKILL; its 2 samples were computed (250 ms)"""


@pytest.mark.parametrize(
    "environment",
    [{}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}, {"COLUMNS": "20"}, {"TERM": "dumb"}],
)
def test_the_table(journal, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert str(Report(devices(), journal)) == TABLE
    assert repr(Report(devices(), journal)) == "<Report of 2 devices after 4 calls>"


def test_many_faults_are_counted_and_the_latest_are_shown(journal):
    for call in range(4, 30):
        journal.fault(FAULT._replace(call=call, cost_s=2.0))
    report = Report(devices(), journal)
    lines = str(report).splitlines()

    assert report.faults[0] == FAULT
    assert len(report.faults) == 27
    assert lines[-2 - NUM_SHOWN] == "Faults: 27; 52.2 s lost."
    assert lines[-1 - NUM_SHOWN] == f"The latest {NUM_SHOWN}:"
    assert lines[-1].startswith("  cpu:1, call 29, forward: was ended")


def test_the_table_before_the_first_call():
    lines = str(Report(devices(), Journal(2))).splitlines()

    assert " ".join(lines[3].split()) == "cpu:0 a CPU 0 - - 0.0 0.0 0.0 - 0 0"
    assert lines[-1] == "No call so far."


def test_the_table_after_one_call():
    journal = Journal(1)
    add(journal, INFERENCE, 0, 0.0, 1.0, (4,), (0, INFERENCE, 0.0, 0.5))
    lines = str(Report(devices(1), journal)).splitlines()

    assert " ".join(lines[3].split()) == "cpu:0 a CPU 4 8 - 0.5 0.0 0.5 50 1 0"
    assert "known after two calls" in lines[-1]


@pytest.mark.parametrize("num_devices", [1, 2, 16, 64])
@pytest.mark.parametrize("name", ["x", "[bold]a :smile: name[/bold] " * 9, 99 * "名", 200 * "x"])
def test_the_table_has_a_line_for_each_device_however_long_its_name(num_devices, name):
    journal = Journal(num_devices)
    for call in range(3):
        busy = [(i, INFERENCE, 1e5 * call, 1e5 * call + 9e4) for i in range(num_devices)]
        shares = (1000,) * num_devices
        add(journal, INFERENCE, call, 1e5 * call, 1e5 * call + 9.9e4, shares, *busy)
    lines = str(Report(devices(num_devices, name), journal)).splitlines()

    rows = lines[3 : 3 + num_devices]
    assert [row.split()[0] for row in rows] == [f"cpu:{i}" for i in range(num_devices)]
    assert {tuple(row.split()[-9:]) for row in rows} == {
        ("1000", "0.0111", "0.01", "270000.0", "0.0", "27000.0", "91", "3", "0")
    }
    assert len(lines) == 3 + num_devices + 3
    assert max(map(cell_len, lines)) <= WIDTH
    assert all((name.strip() in row) == (name == "x") for row in rows)
    assert all(("…" in row) == (name != "x") for row in rows)


# ------------------------------------------------------------------ the files


def test_the_json(journal):
    report = Report(devices(), journal)
    told = json.loads(report.to_json())

    assert told == {
        "shares": [6, 2],
        "own_samples_per_s": 3.0,
        "now_samples_per_s": 1.0,
        "reached": 1 / 3,
        "grid": None,
        "num_calls": 4,
        "lasted_s": 16.0,
        "devices": told["devices"],
        "moments": [
            {
                "call": call,
                "kind": "backward",
                "start_s": 100.0 + 8 * call,
                "shares": [6, 2],
                "busy_s": [3.0, 2.0],
                "lasted_s": 4.0,
            }
            for call in range(4)
        ],
        "faults": [FAULT._asdict()],
    }
    assert [DeviceReport(**device) for device in told["devices"]] == list(report.devices)


def test_the_json_has_null_for_what_is_no_number():
    journal = Journal(1)
    add(journal, INFERENCE, 0, 0.0, float("inf"), (1,), (0, INFERENCE, 0.0, float("nan")))

    def refuse(word):
        raise AssertionError(word)

    told = json.loads(Report(devices(1), journal).to_json(), parse_constant=refuse)

    assert told["lasted_s"] is None
    assert told["reached"] is None
    assert told["moments"][0]["busy_s"] == [None]
    assert json.loads(Report(devices(1), Journal(1)).to_json())["moments"] == []


def test_the_trace(journal, tmp_path):
    path = tmp_path / "trace.json"
    Report(devices(), journal).trace(path)
    events = json.loads(path.read_text())["traceEvents"]

    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["cpu:0", "cpu:1"]
    seconds = {
        (event["tid"], event["name"]): sum(
            e["dur"] for e in events if (e["tid"], e["name"]) == (event["tid"], event["name"])
        )
        / 1e6
        for event in events
        if event["ph"] == "X"
    }
    assert seconds == {
        (1, "forward"): 4.0,
        (1, "backward"): 8.0,
        (1, "exchange"): 3.0,
        (1, "waiting"): 1.0,
        (2, "forward"): 2.0,
        (2, "backward"): 6.0,
        (2, "waiting"): 8.0,
    }


def test_the_plot(journal, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(chart, "plot", lambda *arguments: told.append(arguments))
    Report(devices(), journal).plot(tmp_path / "a.png")

    assert told == [(["cpu:0", "cpu:1"], tuple(journal.moments), tmp_path / "a.png")]


def test_one_device_says_that_nothing_is_recorded() -> None:
    assert "nothing is recorded" in str(Report(devices(1), Journal(1)))


@pytest.mark.parametrize("wrong", [3, "model", None, torch.nn.Linear(2, 2)])
def test_what_is_not_parallel_has_no_report(wrong: object) -> None:
    with pytest.raises(ModuleError, match="is not parallel: there is nothing to report"):
        evener.report(wrong)  # type: ignore[arg-type]
