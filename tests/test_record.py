import json
import math

import pytest

from evener.devices import Device
from evener.errors import EvenerError
from evener.textbook import record
from evener.textbook.record import Recorder, Run, Settings, SettingsError

DEVICE = Device("cpu", 0, (0,), 1024, "a CPU")


class FakeClock:
    """Stands in for the time module: moves only when it is told to."""

    def __init__(self):
        self.now_s = 100.0

    def perf_counter(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(record, "time", clock)
    return clock


def fill(recorder, clock, losses, step_s, accuracy):
    with recorder.epoch():
        for loss in losses:
            clock.now_s += step_s
            recorder.step(loss, 10)
    clock.now_s += 1000  # a test, which is not counted
    recorder.tested(accuracy)


def test_the_clock_runs_in_training_only(clock):
    run = Run((DEVICE,))
    recorder = Recorder(run)
    fill(recorder, clock, [3.0, 2.0], 1.0, 0.5)
    fill(recorder, clock, [1.5, 1.0], 2.0, 0.75)
    assert [(s.seconds, s.loss) for s in run.steps] == [(1, 3.0), (2, 2.0), (4, 1.5), (6, 1.0)]
    assert [s.num_images for s in run.steps] == [10, 20, 10, 20]
    assert [s.images_per_s for s in run.steps] == [10, 10, 5, 5]
    assert [(e.number, e.train_s, e.images_per_s, e.test_accuracy) for e in run.epochs] == [
        (1, 2, 10, 0.5),
        (2, 4, 5, 0.75),
    ]


def test_listeners_are_told_and_their_time_is_not_counted(clock):
    told = []

    def slow(event):
        told.append(event)
        clock.now_s += 50

    run = Run((DEVICE,))
    fill(Recorder(run, on_step=slow, on_epoch=slow), clock, [3.0, 2.0], 1.0, 0.5)
    assert told == [*run.steps, *run.epochs]
    assert run.epochs[0].train_s == 2


def test_what_a_run_says_in_all(clock):
    slow, fast = Run((DEVICE,)), Run((DEVICE, DEVICE))
    for run, seconds in ((slow, (3.0, 3.0, 90.0)), (fast, (1.0, 2.0, 2.0))):
        recorder = Recorder(run)
        for step_s in seconds:
            fill(recorder, clock, [2.0, 1.0 + step_s / 100], step_s, step_s / 100)
    assert slow.epoch_s == 6
    assert slow.images_per_s == pytest.approx(20 / 6)
    assert fast.speedup_over(slow) == pytest.approx(1.5)
    assert fast.test_accuracy == 0.02
    assert fast.largest_loss_difference(slow) == pytest.approx(0.88)


def test_runs_of_different_length_are_not_compared(clock):
    one, two = Run((DEVICE,)), Run((DEVICE,))
    fill(Recorder(one), clock, [1.0], 1.0, 0.5)
    fill(Recorder(two), clock, [1.0, 2.0], 1.0, 0.5)
    with pytest.raises(ValueError, match="shorter"):
        two.largest_loss_difference(one)


@pytest.mark.parametrize("losses", [[math.nan, 1.0], [1.0, math.nan]])
def test_a_diverged_run_equals_nothing(clock, losses):
    one, two = Run((DEVICE,)), Run((DEVICE,))
    fill(Recorder(one), clock, losses, 1.0, 0.5)
    fill(Recorder(two), clock, [1.0, 1.0], 1.0, 0.5)
    assert math.isnan(one.largest_loss_difference(two))
    assert math.isnan(one.largest_loss_difference(one))


def test_a_run_as_json(clock):
    run = Run((DEVICE,), start_s=1.5)
    fill(Recorder(run), clock, [math.inf, 2.0], 1.0, 0.5)
    assert json.loads(json.dumps(run.as_json(), allow_nan=False)) == {
        "devices": [
            {
                "label": "cpu:0",
                "kind": "cpu",
                "index": 0,
                "cores": [0],
                "memory_bytes": 1024,
                "name": "a CPU",
            }
        ],
        "start_s": 1.5,
        "epoch_s": 2.0,
        "images_per_s": 10.0,
        "own_images_per_s": None,
        "reached": None,
        "test_accuracy": 0.5,
        "epochs": [{"number": 1, "train_s": 2.0, "images_per_s": 10.0, "test_accuracy": 0.5}],
        "steps": [{"seconds": 1.0, "loss": None}, {"seconds": 2.0, "loss": 2.0}],
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "epochs=0: expected 1 or more"),
        ({"batch_size": -1}, "batch_size=-1: expected 1 or more"),
        ({"width": 0}, "width=0: expected 1 or more"),
        ({"lr": 0.0}, "lr=0.0: expected a number above 0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"lr": math.inf}, "lr=inf"),
        ({"momentum": 1.0}, "momentum=1.0: expected 0 or more, and less than 1"),
        ({"momentum": math.nan}, "momentum=nan"),
        ({"init": "zeros"}, "init='zeros': expected 'modern' or 'tutorial'"),
        ({"seed": -1}, "seed=-1: expected 0 to"),
    ],
)
def test_settings_that_no_training_can_have(wrong, message):
    with pytest.raises(SettingsError, match=message) as caught:
        Settings(**wrong)
    assert isinstance(caught.value, EvenerError)


def test_the_default_settings_and_those_of_the_tutorial():
    Settings()
    Settings(10, 256, 0.1, 0.0, 64, "tutorial")
    Settings(10, 512, 0.2, 0.0, 64, "tutorial")
