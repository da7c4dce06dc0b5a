"""The journal: what is noted of phases, what is kept of the past, and what is read from it."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.journal import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    INFERENCE,
    NUM_MOMENTS,
    NUM_PHASES,
    Call,
    Fault,
    Journal,
    Moment,
    Phase,
    Stretch,
    Total,
    calls_of,
    intervals_s,
)


def phase(kind, call, start_s, end_s, *, shares=(3, 1), stretches=()):
    return Phase(kind, call, shares, start_s, end_s, tuple(Stretch(*s) for s in stretches))


#: The picture at the head of the file, in seconds that are exact in binary.
PICTURE = phase(
    *(FORWARD, 0, 100.0, 108.0),
    stretches=[
        *[(0, EXCHANGE, 100.0, 101.0), (0, FORWARD, 101.0, 104.0), (0, EXCHANGE, 107.0, 108.0)],
        (1, FORWARD, 101.5, 107.0),
    ],
)


# ------------------------------------------------------------------ totals


def test_a_phase_is_work_exchange_and_waiting():
    journal = Journal(2)

    journal.add(PICTURE)

    assert journal.totals == [
        Total(busy_s=3.0, exchange_s=2.0, waiting_s=3.0, num_calls=1, num_samples=3),
        Total(busy_s=5.5, exchange_s=0.0, waiting_s=2.5, num_calls=1, num_samples=1),
    ]
    assert (journal.num_calls, journal.lasted_s) == (1, 8.0)
    assert list(journal.phases) == [PICTURE]


def test_a_backward_adds_seconds_but_neither_calls_nor_samples():
    journal = Journal(2)
    journal.add(PICTURE)

    journal.add(phase(BACKWARD, 0, 110.0, 114.0, stretches=[(0, BACKWARD, 110.0, 113.0)]))

    assert journal.totals == [
        Total(busy_s=6.0, exchange_s=2.0, waiting_s=4.0, num_calls=1, num_samples=3),
        Total(busy_s=5.5, exchange_s=0.0, waiting_s=6.5, num_calls=1, num_samples=1),
    ]
    assert (journal.num_calls, journal.lasted_s) == (1, 12.0)


def test_a_device_without_a_share_rests_and_does_not_wait():
    journal = Journal(3)
    done = [(0, EXCHANGE, 0.0, 1.0), (1, INFERENCE, 1.0, 3.0)]

    journal.add(phase(INFERENCE, 0, 0.0, 4.0, shares=(0, 4, 0), stretches=done))

    # The first one joined the others' outputs, and its waiting is not less than nothing.
    assert journal.totals == [
        Total(exchange_s=1.0),
        Total(busy_s=2.0, waiting_s=2.0, num_calls=1, num_samples=4),
        Total(),
    ]


def test_lost_helpers_are_counted():
    journal = Journal(2)

    faults = [Fault(1, call, FORWARD, "died", "done again", 0.5, 9.0) for call in (3, 5)]
    for fault in faults:
        journal.fault(fault)

    assert journal.totals == [Total(), Total(num_faults=2)]
    assert list(journal.faults) == faults


def test_shares_of_another_number_of_devices_are_refused():
    with pytest.raises(ValueError, match="zip"):
        Journal(3).add(PICTURE)


def test_a_snapshot_does_not_change():
    journal = Journal(2)
    journal.add(PICTURE)
    journal.add(phase(BACKWARD, 0, 110.0, 114.0))

    copy = journal.snapshot()
    for call in range(1, 2 * NUM_MOMENTS):
        journal.add(phase(INFERENCE, call, 120.0 + call, 120.5 + call))
    journal.fault(Fault(0, 1, FORWARD, "died", "done again", 0.5, 9.0))

    assert [len(copy.phases), len(copy.moments), copy.num_calls, copy.lasted_s] == [2, 1, 1, 12.0]
    assert [total.num_faults for total in copy.totals] == [0, 0]
    assert not copy.faults
    assert [total.num_calls for total in copy.totals] == [1, 1]


def test_threads_may_add_at_the_same_time():
    journal = Journal(2)
    threads = [
        threading.Thread(
            target=lambda first: [
                journal.add(phase(INFERENCE, first + i, 0.0, 1.0)) for i in range(500)
            ],
            args=(500 * number,),
        )
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (journal.num_calls, journal.lasted_s) == (2000, 2000.0)
    assert journal.totals[0] == Total(waiting_s=2000.0, num_calls=2000, num_samples=6000)


@st.composite
def some_phases(draw):
    """Phases of three devices; the stretches of a device lie in its phase and do not overlap."""
    phases, now = [], 0
    for call in range(draw(st.integers(1, 8))):
        length = draw(st.integers(1, 64))
        shares = tuple(draw(st.integers(0, 3)) for _ in range(3))
        kind = draw(st.sampled_from([INFERENCE, FORWARD, BACKWARD]))
        stretches = []
        for device in range(3):
            marks = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
            for start, end in zip(marks[::2], marks[1::2], strict=False):
                what = draw(st.sampled_from([EXCHANGE, kind]))
                stretches.append((device, what, now + start, now + end))
        phases.append(phase(kind, call, now, now + length, shares=shares, stretches=stretches))
        now += length + draw(st.integers(0, 9))
    return phases


@given(some_phases())
def test_work_exchange_and_waiting_are_the_phases_in_which_a_device_had_a_share(phases):
    journal = Journal(3)
    for each in phases:
        journal.add(each)

    for device, total in enumerate(journal.totals):
        resting = [p for p in phases if not p.shares[device]]
        rested_s = sum(s.end_s - s.start_s for p in resting for s in p.stretches if s[0] == device)
        present_s = sum(p.end_s - p.start_s for p in phases if p.shares[device])
        assert total.busy_s + total.exchange_s - rested_s + total.waiting_s == present_s
        assert total.waiting_s >= 0
    assert journal.lasted_s == sum(p.end_s - p.start_s for p in phases)


# ------------------------------------------------------------------ moments


def train(journal, call, start_s=0.0):
    journal.add(phase(FORWARD, call, start_s, start_s + 1, stretches=[(0, FORWARD, 0.0, 0.5)]))
    journal.add(
        phase(BACKWARD, call, start_s + 2, start_s + 4, stretches=[(0, BACKWARD, 0.0, 1.5)])
    )


def test_a_moment_is_a_forward_with_its_backward_or_an_inference():
    journal = Journal(2)
    journal.add(PICTURE)
    assert journal.moments == []

    done = [(1, BACKWARD, 110.0, 112.0), (1, EXCHANGE, 112.0, 113.0)]
    journal.add(phase(BACKWARD, 0, 110.0, 114.0, stretches=done))
    journal.add(phase(INFERENCE, 1, 120.0, 121.0, stretches=[(0, INFERENCE, 120.0, 120.5)]))

    assert journal.moments == [
        Moment(0, BACKWARD, 100.0, (3, 1), busy_s=(3.0, 7.5), lasted_s=12.0),
        Moment(1, INFERENCE, 120.0, (3, 1), busy_s=(0.5, 0.0), lasted_s=1.0),
    ]


def test_a_forward_without_a_backward_and_a_second_backward_are_no_moments():
    journal = Journal(2)
    journal.add(phase(FORWARD, 0, 0.0, 1.0))
    train(journal, 1)
    journal.add(phase(BACKWARD, 1, 9.0, 10.0))

    assert [moment.call for moment in journal.moments] == [1]


def test_backwards_may_come_in_another_order():
    journal = Journal(2)
    for kind, call in [(FORWARD, 0), (FORWARD, 1), (BACKWARD, 1), (BACKWARD, 0)]:
        journal.add(phase(kind, call, 0.0, 1.0))

    assert [moment.call for moment in journal.moments] == [1, 0]


def test_memory_is_bounded_and_the_past_is_thinned_evenly():
    journal = Journal(2)
    for call in range(20_000):
        train(journal, call)

    calls = [moment.call for moment in journal.moments]
    assert calls == list(range(0, 20_000, 32))
    assert NUM_MOMENTS / 2 <= len(calls) <= NUM_MOMENTS
    assert len(journal.phases) == NUM_PHASES
    assert journal.phases[-1].call == 19_999
    assert journal._forwards == {}
    assert journal.num_calls == 20_000


def test_memory_is_bounded_where_no_backward_comes():
    journal = Journal(2)
    for call in range(20_000):
        journal.add(phase(FORWARD, call, 0.0, 1.0))

    assert len(journal.phases) == NUM_PHASES
    assert len(journal._forwards) == NUM_PHASES
    journal.add(phase(BACKWARD, 19_999, 1.0, 2.0))
    assert [moment.call for moment in journal.moments] == [19_999]


@pytest.mark.parametrize("num_inferred", [1, 2, 7])
def test_each_kind_of_call_is_thinned_by_its_own_count(num_inferred):
    """If it were by the number of the call, all that is left could be of one kind."""
    journal = Journal(2)
    call = 0
    for _ in range(3000):
        train(journal, call)
        for other in range(call + 1, call + 1 + num_inferred):
            journal.add(phase(INFERENCE, other, 0.0, 1.0))
        call += 1 + num_inferred

    assert len(journal.moments) <= NUM_MOMENTS
    trained = [m.call // (1 + num_inferred) for m in journal.moments if m.kind == BACKWARD]
    step = trained[1]
    assert trained == list(range(0, 3000, step))
    inferred = [
        number
        for number, other in enumerate(n for n in range(call) if n % (1 + num_inferred))
        if other in {m.call for m in journal.moments if m.kind == INFERENCE}
    ]
    assert inferred == list(range(0, 3000 * num_inferred, inferred[1]))
    assert len(trained) > NUM_MOMENTS / 8
    assert len(inferred) > NUM_MOMENTS / 8


# ------------------------------------------------------------------ reading the phases


def test_the_calls_are_those_of_training_that_are_over():
    phases = [
        phase(BACKWARD, 0, 0.0, 1.0),  # its forward is no longer kept
        phase(FORWARD, 1, 2.0, 3.0, stretches=[(0, FORWARD, 2.0, 2.5), (1, EXCHANGE, 2.0, 3.0)]),
        phase(BACKWARD, 1, 4.0, 5.0, stretches=[(0, BACKWARD, 4.0, 4.25)]),
        phase(INFERENCE, 2, 6.0, 7.0),
        phase(FORWARD, 3, 8.0, 9.0),
        phase(FORWARD, 4, 10.0, 11.0),
        phase(BACKWARD, 4, 12.0, 13.0, stretches=[(1, BACKWARD, 12.0, 13.0)]),
        phase(BACKWARD, 4, 14.0, 15.0, stretches=[(1, BACKWARD, 14.0, 15.0)]),
    ]

    assert calls_of(phases) == [
        Call(1, 2.0, (3, 1), busy_s=(0.75, 0.0)),
        Call(4, 10.0, (3, 1), busy_s=(0.0, 2.0)),
    ]


def test_the_calls_are_those_of_inference_where_none_trains():
    phases = [
        phase(FORWARD, 0, 0.0, 1.0),
        phase(INFERENCE, 1, 2.0, 3.0, stretches=[(1, INFERENCE, 2.0, 2.5)]),
    ]

    assert calls_of(phases) == [Call(1, 2.0, (3, 1), busy_s=(0.0, 0.5))]
    assert calls_of([]) == []


def loop(rests, *, mixed=()):
    """Phases of a loop of calls of 1 second, after each so many seconds of the user's code."""
    phases, now = [], 0.0
    for number, rest in enumerate(rests):
        phases.append(phase(FORWARD, 2 * number, now, now + 0.25))
        phases.append(phase(BACKWARD, 2 * number, now + 0.25, now + 1.0))
        if number in mixed:
            phases.append(phase(INFERENCE, 2 * number + 1, now + 1.25, now + 1.5))
        now += 1.0 + rest
    phases.append(phase(FORWARD, 2 * len(rests), now, now + 0.25))
    phases.append(phase(BACKWARD, 2 * len(rests), now + 0.25, now + 1.0))
    return phases


@pytest.mark.parametrize(
    ("rests", "mixed", "expected"),
    [
        pytest.param([], (), [], id="one call has no next one"),
        pytest.param([0.5], (), [1.5], id="two calls"),
        pytest.param([0.5, 0.25, 0.5], (), [1.5, 1.25, 1.5], id="the user's code counts"),
        pytest.param([0.5, 60.0, 0.5], (), [1.5, 1.5, 1.5], id="a checkpoint does not"),
        pytest.param([0.5, 9.0, 0.5], (), [1.5, 10.0, 1.5], id="what is only slow does"),
        pytest.param(
            [0.5, 60.0] + 20 * [0.5] + [60.0],
            *((), [1.5, 61.0] + 20 * [1.5] + [61.0]),
            id="two pauses in 23 are no pauses",
        ),
        pytest.param(
            [0.5, 60.0] + 40 * [0.5] + [60.0], (), 43 * [1.5], id="two pauses in 43 are pauses"
        ),
        pytest.param([0.5, 3.0, 0.5], {1}, [1.5, 1.5, 1.5], id="an evaluation does not count"),
        pytest.param(
            [0.5, 99.0, 0.5, 0.5, 60.0], {1}, 5 * [1.5], id="an evaluation is no rare long rest"
        ),
        pytest.param([0.75, 0.5, 0.75], {1}, [1.75, 1.5, 1.75], id="a short one is not stretched"),
        pytest.param(
            [3.0, 2.0, 3.0], {0, 1, 2}, [4.0, 3.0, 4.0], id="inference in each step counts"
        ),
        pytest.param([0.5, 0.0, 0.0], (), [1.5, 1.0, 1.0], id="no code between"),
    ],
)
def test_the_intervals_from_call_to_call_are_without_pauses(rests, mixed, expected):
    phases = loop(rests, mixed=mixed)

    assert intervals_s(calls_of(phases), phases) == expected


def test_long_phases_are_no_pauses():
    """Two forwards, then two backwards, which lie in the interval of the second call."""
    phases, now = [], 0.0
    for call in range(0, 6, 2):
        phases += [phase(FORWARD, call, now, now + 1), phase(FORWARD, call + 1, now + 1, now + 2)]
        phases.append(phase(BACKWARD, call + 1, now + 2, now + 50))
        phases.append(phase(BACKWARD, call, now + 50, now + 98))
        now += 98.0

    assert intervals_s(calls_of(phases), phases) == [1.0, 97.0, 1.0, 97.0, 1.0]


def test_intervals_of_no_calls():
    assert intervals_s([], []) == []


@given(st.lists(st.integers(0, 100), min_size=1, max_size=30))
def test_an_interval_is_never_shorter_than_its_call_nor_longer_than_the_clock(rests):
    phases = loop([float(rest) for rest in rests])

    for interval_s, rest in zip(intervals_s(calls_of(phases), phases), rests, strict=True):
        assert 1.0 <= interval_s <= 1.0 + rest
