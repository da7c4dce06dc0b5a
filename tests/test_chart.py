"""The charts of a report: what is in the trace's file, and what is drawn."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener import chart
from evener.journal import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    INFERENCE,
    Fault,
    Moment,
    Phase,
    Stretch,
)

has_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)

#: The picture at the head of journal.py; the third device has no share.
PICTURE = Phase(
    FORWARD,
    7,
    (3, 1, 0),
    100.0,
    100.008,
    (
        Stretch(0, EXCHANGE, 100.0, 100.001),
        Stretch(1, FORWARD, 100.0015, 100.007),
        Stretch(0, FORWARD, 100.001, 100.004),
        Stretch(0, EXCHANGE, 100.007, 100.008),
    ),
)
LABELS = ["cpu:0", "cpu:1", "cpu:2"]


def moment(call, *, kind=BACKWARD, shares=(3, 1), busy_s=(0.5, 0.25), lasted_s=1.0):
    return Moment(call, kind, float(call), shares, busy_s, lasted_s)


# ------------------------------------------------------------------ the trace


def traced(tmp_path, phases, labels=LABELS):
    path = tmp_path / "trace.json"
    chart.trace(labels, phases, path)
    return json.loads(path.read_text())


def test_the_trace_of_one_phase(tmp_path):
    told = traced(tmp_path, [PICTURE])

    def event(device, name, ts, dur):
        args = {"call": 7, "samples": (3, 1)[device]}
        place = {"name": name, "ph": "X", "pid": 1, "tid": device + 1}
        return {**place, "cat": "forward", "ts": ts, "dur": dur, "args": args}

    assert told.keys() == {"traceEvents", "displayTimeUnit"}
    assert told["displayTimeUnit"] == "ms"
    assert [e for e in told["traceEvents"] if e["ph"] == "X"] == [
        event(0, "exchange", 0.0, 1000.0),
        event(0, "forward", 1000.0, 3000.0),
        event(0, "waiting", 4000.0, 3000.0),
        event(0, "exchange", 7000.0, 1000.0),
        event(1, "waiting", 0.0, 1500.0),
        event(1, "forward", 1500.0, 5500.0),
        event(1, "waiting", 7000.0, 1000.0),
    ]


def test_the_rows_of_a_trace_are_the_devices(tmp_path):
    told = traced(tmp_path, [])

    names = {
        (e["name"], e["pid"], e["tid"]): e["args"] for e in told["traceEvents"] if e["ph"] == "M"
    }
    assert len(names) == len(told["traceEvents"])
    assert names == {
        ("process_name", 1, 1): {"name": "evener"},
        ("thread_name", 1, 1): {"name": "cpu:0"},
        ("thread_name", 1, 2): {"name": "cpu:1"},
        ("thread_name", 1, 3): {"name": "cpu:2"},
        ("thread_sort_index", 1, 1): {"sort_index": 0},
        ("thread_sort_index", 1, 2): {"sort_index": 1},
        ("thread_sort_index", 1, 3): {"sort_index": 2},
    }


def test_faults_are_marks_in_a_trace(tmp_path):
    at_s = PICTURE.start_s + 0.5
    faults = [Fault(1, 3, "forward", "died", "done again", 0.1, s) for s in (at_s, at_s - 1.0)]
    path = tmp_path / "trace.json"
    chart.trace(LABELS, [PICTURE], path, faults)

    marks = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "i"]
    assert [(mark["name"], mark["tid"], mark["ts"]) for mark in marks] == [
        ("forward fault", 2, 500_000.0)  # that of before is not in the picture
    ]
    assert marks[0]["args"]["cause"] == "died"


def test_a_trace_that_cannot_be_written(tmp_path):
    with pytest.raises(FileNotFoundError):
        chart.trace(LABELS, [PICTURE], tmp_path / "no such folder" / "trace.json")


@st.composite
def some_phases(draw):
    """One phase after the other; the stretches lie anywhere, also beyond it and on each other."""
    now_s, phases = draw(st.floats(0, 1e6)), []
    for call in range(draw(st.integers(1, 4))):
        length_s = draw(st.floats(0, 2))
        stretches = []
        for device in range(2):
            for _ in range(draw(st.integers(0, 3))):
                start_s = now_s + draw(st.floats(0, 1)) * length_s
                end_s = start_s + draw(st.floats(0, 1)) * length_s
                kind = draw(st.sampled_from([EXCHANGE, INFERENCE]))
                stretches.append(Stretch(device, kind, start_s, end_s))
        shares = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
        phases.append(Phase(INFERENCE, call, shares, now_s, now_s + length_s, tuple(stretches)))
        now_s += 2 * length_s + draw(st.floats(0, 1))
    return phases


@given(some_phases())
def test_the_events_of_a_row_do_not_overlap_and_fill_the_phases(tmp_path_factory, phases):
    told = traced(tmp_path_factory.mktemp("trace"), phases, LABELS[:2])

    rows = defaultdict(list)
    for event in told["traceEvents"]:
        if event["ph"] == "X":
            start_ns, num_ns = round(1e3 * event["ts"]), round(1e3 * event["dur"])
            assert (start_ns / 1e3, num_ns / 1e3) == (event["ts"], event["dur"])
            rows[event["tid"] - 1].append((start_ns, start_ns + num_ns, event))
    for device in range(2):
        ends = [end_ns for _, end_ns, _ in rows[device]]
        starts = [start_ns for start_ns, _, _ in rows[device]]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        for phase in phases:
            own = [r for r in rows[device] if r[2]["args"]["call"] == phase.call]
            stretches = [s for s in phase.stretches if s.device == device]
            if phase.shares[device] and all(s.end_s <= phase.end_s for s in stretches):
                filled_s = sum(end_ns - start_ns for start_ns, end_ns, _ in own) / 1e9
                assert filled_s == pytest.approx(phase.end_s - phase.start_s, abs=2e-9)
            if not phase.shares[device]:
                assert "waiting" not in {event["name"] for _, _, event in own}


# ------------------------------------------------------------------ the plot


@pytest.fixture(scope="module", autouse=True)
def first_plot(tmp_path_factory):
    """The first plot of a process opens files of fonts, which matplotlib keeps open."""
    if importlib.util.find_spec("matplotlib"):
        chart.plot(["cpu:0", "cpu:1"], [moment(0)], tmp_path_factory.mktemp("plot") / "a.png")


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Gives the two panels of a plot instead of writing it."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    figures = []
    monkeypatch.setattr(figure, "savefig", lambda self, path, dpi: figures.append(self))

    def draw(moments, labels=("cpu:0", "cpu:1")):
        chart.plot(labels, moments, tmp_path / "a.png")
        return figures[-1].axes

    return draw


def steps(axes):
    return {patch.get_label(): patch.get_data() for patch in axes.patches}


@has_matplotlib
def test_the_seconds_are_drawn_from_call_to_call(drawn):
    moments = [
        moment(0),
        moment(4, busy_s=(0.25, 0.75), lasted_s=1.5),
        moment(8, busy_s=(0.5, 0.5), lasted_s=2.0),
    ]

    _, lower = drawn(moments)

    edges = [0, 4, 8, 12]
    assert {name: (list(d.values), list(d.edges)) for name, d in steps(lower).items()} == {
        "whole call": ([1.0, 1.5, 2.0], edges),
        "cpu:0": ([0.5, 0.25, 0.5], edges),
        "cpu:1": ([0.25, 0.75, 0.5], edges),
    }
    assert lower.get_ylim() == (0, pytest.approx(2.2))
    assert (lower.get_xlabel(), lower.get_ylabel()) == ("call", "seconds")


@has_matplotlib
def test_the_shares_are_drawn_on_each_other_as_parts_of_the_batch(drawn):
    upper, _ = drawn([moment(0, shares=(3, 1)), moment(1, shares=(1, 1))])

    areas = [
        {tuple(corner) for corner in area.get_paths()[0].vertices.tolist()}
        for area in upper.collections
    ]
    assert len(areas) == 2
    assert {(0, 0.0), (0, 0.75), (1, 0.75), (1, 0.5), (2, 0.5)} <= areas[0]
    assert {(0, 0.75), (0, 1.0), (1, 0.75), (1, 0.5), (2, 0.5), (2, 1.0)} <= areas[1]
    assert upper.get_ylim() == (0, 1)


@has_matplotlib
def test_training_is_drawn_if_there_is_any(drawn):
    moments = [moment(0, kind=INFERENCE), moment(1), moment(2, kind=INFERENCE), moment(3)]

    upper, lower = drawn(moments)
    assert upper.get_title() == "training"
    assert list(steps(lower)["cpu:0"].edges) == [1, 3, 5]

    upper, lower = drawn(moments[::2])
    assert upper.get_title() == "inference"
    assert list(steps(lower)["cpu:0"].edges) == [0, 2, 4]


@has_matplotlib
def test_calls_whose_backwards_came_in_another_order(drawn):
    _, lower = drawn([moment(1, lasted_s=2.0), moment(0, lasted_s=1.0)])

    assert list(steps(lower)["whole call"].values) == [1.0, 2.0]


@has_matplotlib
def test_a_call_that_takes_much_longer_is_cut_and_told(drawn):
    _, lower = drawn([moment(0, lasted_s=60.0), *(moment(i) for i in range(1, 9))])

    assert lower.get_ylim() == (0, pytest.approx(1.1))
    assert lower.get_title(loc="right") == "1 not fully drawn, up to 60 s"


@has_matplotlib
def test_nothing_to_draw_is_told(drawn):
    for axes in drawn([]):
        assert [text.get_text() for text in axes.texts] == ["no whole call so far"]


@has_matplotlib
@pytest.mark.parametrize("num_devices", [1, 10, 11, 64])
def test_every_device_has_its_colour_and_its_name(drawn, num_devices):
    labels = [f"cpu:{i}" for i in range(num_devices)]
    shares, busy_s = (1,) * num_devices, (0.5,) * num_devices
    upper, lower = drawn([moment(i, shares=shares, busy_s=busy_s) for i in range(3)], labels)

    (legend,) = upper.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["whole call", *labels]
    colors = [tuple(area.get_facecolor()[0]) for area in upper.collections]
    assert len(set(colors)) == num_devices
    assert colors == [patch.get_edgecolor() for patch in lower.patches[1:]]


@has_matplotlib
@pytest.mark.parametrize(
    ("name", "head"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")]
)
@pytest.mark.parametrize(
    "moments",
    [
        pytest.param([], id="none"),
        pytest.param([moment(0)], id="one"),
        pytest.param([moment(0, shares=(0, 0), busy_s=(0.0, 0.0), lasted_s=0.0)], id="zeros"),
        pytest.param([moment(i) for i in range(0, 2048, 2)], id="many"),
    ],
)
def test_the_type_of_the_file_is_that_of_its_name(tmp_path, name, head, moments):
    chart.plot(LABELS[:2], moments, tmp_path / name)
    chart.plot(LABELS[:2], moments, str(tmp_path / name))

    assert (tmp_path / name).read_bytes().startswith(head)


@has_matplotlib
def test_a_plot_that_cannot_be_written(tmp_path):
    with pytest.raises(FileNotFoundError):
        chart.plot(LABELS[:2], [moment(0)], tmp_path / "no such folder" / "a.png")
    with pytest.raises(ValueError, match=r"'abc' is not supported .*png"):
        chart.plot(LABELS[:2], [moment(0)], tmp_path / "a.abc")


def test_a_plot_without_matplotlib_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(ImportError, match=r"pip install 'evener\[plot\]'"):
        chart.plot(LABELS[:2], [moment(0)], tmp_path / "a.png")
