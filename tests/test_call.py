"""A call: what it leaves with the helpers, and what ends it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from evener.batches import Batch, Cut
from evener.call import Call
from evener.devices import Device
from evener.errors import HelperDiedError
from evener.journal import BACKWARD, EXCHANGE, FORWARD, INFERENCE, Journal
from evener.piece import Settings
from evener.run import Run
from evener.team import Team
from evener.timing import Timing


@pytest.fixture
def run() -> Iterator[tuple[Run, nn.Module]]:
    team = Team([Device("cpu", i, (0,), 1, "test") for i in range(2)], timeout_s=30.0)
    module = nn.Linear(3, 2)
    made = Run(module, team)
    yield made, module
    made.mirror.dissolve()
    team.stop()


def new_call(run: Run, module: nn.Module, x: Tensor, shares: list[int]) -> Call:
    timing = Timing(Journal(2), 1, shares)
    return Call(
        run,
        module,
        module.forward,
        Batch((x,), {}),
        Cut(shares),
        seeds={0: 0, 1: 1},
        timing=timing,
    )


def test_a_call_gives_outputs_and_gradients(run: tuple[Run, nn.Module]) -> None:
    x = torch.randn(5, 3, requires_grad=True)
    call = new_call(*run, x, [2, 3])

    call.forward(Settings.current())
    (tensor,) = call.outputs.tensors
    gradients = call.backward([torch.ones(5, 2)], keep_graph=False)

    torch.testing.assert_close(tensor, run[1](x).detach())
    expected = torch.autograd.grad(run[1](x).sum(), [x, *run[1].parameters()])
    torch.testing.assert_close(gradients, list(expected))


def test_a_second_backward_needs_a_kept_graph(run: tuple[Run, nn.Module]) -> None:
    call = new_call(*run, torch.randn(5, 3), [2, 3])
    call.forward(Settings.current())
    first = call.backward([torch.ones(5, 2)], keep_graph=True)

    second = call.backward([torch.ones(5, 2)], keep_graph=False)

    torch.testing.assert_close(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        call.backward([torch.ones(5, 2)], keep_graph=False)


def test_a_call_that_is_forgotten_frees_what_the_helpers_hold(
    run: tuple[Run, nn.Module],
) -> None:
    call = new_call(*run, torch.randn(5, 3), [2, 3])
    call.forward(Settings.current())
    assert len(run[0].team._seats[1].regions) == 1

    del call
    gc.collect()
    for _ in range(2):  # the next message tells it, and its answer frees the region
        with torch.no_grad():
            new_call(*run, torch.randn(5, 3), [2, 3]).forward(Settings.current())

    assert len(run[0].team._seats[1].regions) == 0


def test_memory_does_not_grow_with_the_number_of_calls(run: tuple[Run, nn.Module]) -> None:
    offsets = []
    for _ in range(6):
        call = new_call(*run, torch.randn(5, 3), [2, 3])
        call.forward(Settings.current())
        gradients = call.backward([torch.ones(5, 2)], keep_graph=False)
        offsets.append(max(region.offset for region in run[0].team.arena._taken))
        del call, gradients

    assert len(set(offsets[2:])) == 1


def test_stopped_helpers_have_lost_their_part_of_the_graph(run: tuple[Run, nn.Module]) -> None:
    call = new_call(*run, torch.randn(5, 3), [2, 3])
    call.forward(Settings.current())
    run[0].team.stop()

    with pytest.raises(HelperDiedError, match="call the module again"):
        call.backward([torch.ones(5, 2)], keep_graph=False)


def test_a_new_structure_ends_older_graphs(run: tuple[Run, nn.Module]) -> None:
    made, module = run
    call = new_call(made, module, torch.randn(5, 3), [2, 3])
    call.forward(Settings.current())
    module.bias = None
    new_call(made, module, torch.randn(5, 3), [2, 3])

    with pytest.raises(HelperDiedError, match="the module's structure changed"):
        call.backward([torch.ones(5, 2)], keep_graph=False)


def test_a_call_times_what_each_device_does(run: tuple[Run, nn.Module]) -> None:
    made, module = run
    journal = Journal(2)
    batch = Batch((torch.randn(5, 3),), {})
    timing = Timing(journal, 7, (2, 3))
    call = Call(
        made, module, module.forward, batch, Cut([2, 3]), seeds={0: 0, 1: 1}, timing=timing
    )

    call.forward(Settings.current())
    call.backward([torch.ones(5, 2)], keep_graph=False)

    assert [(phase.kind, phase.call, phase.shares) for phase in journal.phases] == [
        (FORWARD, 7, (2, 3)),
        (BACKWARD, 7, (2, 3)),
    ]
    for phase in journal.phases:
        kinds = [(stretch.device, stretch.kind) for stretch in phase.stretches]
        assert sorted(kinds) == sorted(
            [(0, EXCHANGE), (0, phase.kind), (1, phase.kind), (0, EXCHANGE)]
        )
        for stretch in phase.stretches:  # one clock for both processes
            assert phase.start_s <= stretch.start_s <= stretch.end_s <= phase.end_s
    assert timing.num_phases == 2
    assert all(timing.busy_s)
    assert all(timing.lags_s)
    assert timing.lasted_s >= max(map(float.__add__, timing.busy_s, timing.lags_s))


def test_what_is_sent_before_a_call_is_no_piece_of_it(run: tuple[Run, nn.Module]) -> None:
    made, module = run
    module.bias = None  # another structure: the helpers get a new replica
    timing = Timing(Journal(2), 1, (2, 3))
    batch = Batch((torch.randn(5, 3),), {})

    call = Call(
        made, module, module.forward, batch, Cut([2, 3]), seeds={0: 0, 1: 1}, timing=timing
    )
    call.forward(Settings.current())

    assert [stretch.kind for stretch in timing._stretches].count(FORWARD) == 2


def test_a_call_without_gradients_is_one_phase(run: tuple[Run, nn.Module]) -> None:
    made, module = run
    journal = Journal(2)
    batch = Batch((torch.randn(5, 3),), {})
    timing = Timing(journal, 1, (0, 5))
    call = Call(
        made, module, module.forward, batch, Cut([0, 5]), seeds={0: 0, 1: 1}, timing=timing
    )

    with torch.no_grad():
        call.forward(Settings.current())

    (phase,) = journal.phases
    assert phase.kind == INFERENCE
    assert journal.totals[0].num_calls == 0
    assert journal.totals[1].num_samples == 5


def test_a_call_whose_outputs_are_forgotten_was_a_forward(run: tuple[Run, nn.Module]) -> None:
    made, module = run
    call = new_call(made, module, torch.randn(5, 3), [2, 3])
    call.forward(Settings.current())

    del call
    gc.collect()

    (timing,) = made.forwards
    assert timing.shares == (2, 3)
