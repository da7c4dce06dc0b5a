"""Trials of devices without a share."""

from __future__ import annotations

from evener.trials import LEFT_OUT, NUM_REPEATS, REST, TRIAL_PART, Trials


def run(trials: Trials, num_calls: int, *, trial_s: float, is_s: float, surprise: float) -> int:
    """Let device 1 of two rest; returns how many trials there were."""
    num_trials = 0
    for _ in range(num_calls):
        trials.miss([1])
        due = trials.due([1])
        if due and trials.begin(due, trial_s, 1.0):
            num_trials += 1
            assert trials.end({0: 0.0, 1: surprise}, is_s)
        else:
            assert not trials.end({0: 0.0}, 1.0)
    return num_trials


def test_a_trial_that_costs_nothing_comes_after_a_rest() -> None:
    assert run(Trials(2), 10 * REST, trial_s=1.0, is_s=1.0, surprise=0.0) == 10


def test_trials_cost_less_than_their_part() -> None:
    for trial_s in (1.5, 3.0, 50.0):
        num_calls = 100_000
        num_trials = run(Trials(2), num_calls, trial_s=trial_s, is_s=trial_s, surprise=0.0)
        assert num_trials >= 1
        assert num_trials * (trial_s - 1) <= TRIAL_PART * num_calls * 1.1


def test_a_trial_that_costs_more_than_thought_is_paid_for_before_the_next() -> None:
    # Thought to cost nothing, it takes a hundred calls.
    num_trials = run(Trials(2), 100_000, trial_s=1.0, is_s=101.0, surprise=4.6)
    assert 1 <= num_trials <= 6


def test_a_device_that_is_faster_than_thought_is_tried_again_at_once() -> None:
    trials = Trials(2)
    done = []
    for _ in range(REST + 10):
        trials.miss([1])
        due = trials.due([1])
        is_trial = bool(due) and trials.begin(due, 1.0, 1.0)
        done.append(is_trial)
        trials.end({0: 0.0, 1: -0.7} if is_trial else {0: 0.0}, 1.0)

    first = done.index(True)
    assert done[first:] == [True] * (NUM_REPEATS + 1) + [False] * (len(done) - first - 3)


def test_each_device_is_said_once_to_be_left_out() -> None:
    trials = Trials(3)
    news = []
    for _ in range(2 * LEFT_OUT):
        trials.miss([1, 2])
        news.append(trials.news([1, 2]))

    assert news == [()] * (LEFT_OUT - 1) + [(1, 2)] + [()] * LEFT_OUT


def test_who_has_a_share_has_not_missed() -> None:
    trials = Trials(2)
    trials.miss([1])
    assert trials.num_missed == [0, 1]
    trials.end({0: 0.0, 1: 0.0}, 1.0)
    assert trials.num_missed == [0, 0]


def test_a_trial_of_a_call_that_failed_is_forgotten() -> None:
    trials = Trials(2)
    for _ in range(REST):
        trials.miss([1])
    assert trials.begin([1], 1.0, 1.0)

    trials.miss([1])

    assert not trials.end({0: 0.0}, 1.0)
