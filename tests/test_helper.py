"""A helper without its process: what it does with each message."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener import messages
from evener.arena import Arena, Region, lay_out, moved, put
from evener.helper import Helper
from evener.messages import INLINE_BYTES
from evener.piece import Settings
from evener.replica import shared_tensors, to_bytes
from evener.trees import flatten, structure_to_bytes
from evener.watch import Update


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.width = 1

    def forward(self, x: Tensor) -> Tensor:
        if self.width < 0:
            raise ValueError("a negative width")
        return self.linear(x).repeat(1, self.width)


class Scene:
    """A helper with a replica of a small module."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.module = Net()
        self.shared = shared_tensors(self.module)
        self.layout, self.num_bytes = lay_out(self.shared)
        region = self.arena.take(self.num_bytes)
        for place, tensor in zip(moved(self.layout, region.offset), self.shared, strict=True):
            region.tensor(place).copy_(tensor.detach())
        self.helper = Helper(self.arena)
        load = messages.Load(
            module=to_bytes(self.module, self.shared),
            layout=self.layout,
            shared=messages.Span(region.offset, region.num_bytes),
            parameters=[True, True],
            requires_grad=[True, True],
            buffers=[],
            sys_path=list(sys.path),
            folder=os.getcwd(),
        )
        assert isinstance(self.ask(load), messages.Done)

    def ask(self, message: Any, *dropped: int) -> Any:
        self.reply = self.helper.answer(messages.Request(message, list(dropped)))
        return self.reply.message

    def forward(self, piece: int, x: Tensor, *, grad: bool = True, **attributes: Any) -> Any:
        _, structure = flatten(((x,), {}))
        (place,), region = put(self.arena, [x])
        changed = {(0, name): value for name, value in attributes.items()}
        return self.ask(
            messages.Forward(
                piece=piece,
                update=Update(attributes=to_bytes(changed, self.shared) if changed else None),
                structure=structure_to_bytes(structure),
                leaves=[messages.Input(place, wanted=True)],
                span=messages.Span(region.offset, region.num_bytes),
                seed=0,
                settings=Settings.current()._replace(grad=grad),
                lead=False,
            )
        )

    def backward(self, piece: int, gradient: Tensor, *, keep: bool = False) -> tuple[Any, Region]:
        (place,), _ = put(self.arena, [gradient])
        target = self.arena.take(self.num_bytes)
        (to_input,), _ = put(self.arena, [torch.zeros(gradient.shape[0], 2)])
        answer = self.ask(
            messages.Backward(
                piece=piece,
                gradients=[place],
                target=messages.Span(target.offset, target.num_bytes),
                inputs=[to_input],
                keep_graph=keep,
                settings=Settings.current(),
            )
        )
        return answer, target


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    gc.unfreeze()
    made.arena.close()
    # The parameters' hooks hold the helper, which holds the parameters; in a helper process that
    # does not matter.
    vars(made.helper).clear()
    vars(made).clear()  # the fixture's value lives on for a while


def test_small_outputs_travel_with_their_values(scene: Scene) -> None:
    x = torch.randn(4, 2)

    answer = scene.forward(1, x)

    (output,) = answer.leaves
    values = torch.frombuffer(output.values, dtype=torch.float32).view(4, 3)
    assert torch.equal(values, scene.module(x).detach())
    assert output.form.differentiable


def test_large_outputs_are_written_where_they_are_wanted(scene: Scene) -> None:
    width = INLINE_BYTES // 12
    x = torch.randn(4, 2)

    answer = scene.forward(1, x, width=width)

    (output,) = answer.leaves
    assert output.values is None
    (place,), region = put(scene.arena, [torch.zeros(4, 3 * width)])
    assert isinstance(scene.ask(messages.Write(1, [place])), messages.Done)
    assert torch.equal(region.tensor(place), scene.module(x).detach().repeat(1, width))


def test_the_structure_of_outputs_travels_once(scene: Scene) -> None:
    assert scene.forward(1, torch.randn(4, 2)).structure is not None
    assert scene.forward(2, torch.randn(3, 2)).structure is None


def test_backward_writes_to_the_places_of_the_parameters(scene: Scene) -> None:
    x = torch.randn(4, 2)
    scene.forward(1, x)

    answer, target = scene.backward(1, torch.ones(4, 3))

    assert answer == messages.Gradients([True, True], [True])
    weight, bias = (target.tensor(place) for place in moved(scene.layout, target.offset))
    torch.testing.assert_close(weight, x.sum(0).expand(3, 2))
    assert torch.equal(bias, torch.full((3,), 4.0))


def test_inputs_are_free_when_nothing_reads_them(scene: Scene) -> None:
    scene.forward(1, torch.randn(4, 2))
    assert scene.reply.freed == []  # the graph needs them

    scene.backward(1, torch.ones(4, 3))
    assert scene.reply.freed == [1]

    scene.forward(2, torch.randn(4, 2), grad=False)
    assert scene.reply.freed == [2]


def test_a_dropped_piece_is_forgotten(scene: Scene) -> None:
    scene.forward(1, torch.randn(4, 2))

    scene.ask(messages.Follow(Update()), 1)

    assert scene.reply.freed == [1]
    answer, _ = scene.backward(1, torch.ones(4, 3))
    assert isinstance(answer, messages.Failure)


def test_a_kept_graph_can_be_used_again(scene: Scene) -> None:
    scene.forward(1, torch.randn(4, 2))

    results = [scene.backward(1, torch.ones(4, 3), keep=keep) for keep in (True, False)]

    for answer, _ in results:
        assert answer.present == [True, True]


def test_what_the_module_raises_is_the_answer(scene: Scene) -> None:
    answer = scene.forward(1, torch.randn(4, 2), width=-1)

    assert isinstance(answer, messages.Failure)
    assert answer.summary == "ValueError: a negative width"
    assert 'raise ValueError("a negative width")' in answer.traceback
    assert isinstance(scene.forward(2, torch.randn(4, 2), width=1), messages.Outputs)


def test_regions_are_summed(scene: Scene) -> None:
    regions = [scene.arena.take(40) for _ in range(3)]
    (place,), _ = lay_out([torch.zeros(10)])
    for i, region in enumerate(regions):
        region.tensor(place._replace(offset=region.offset)).fill_(10**i)

    scene.ask(messages.Reduce([messages.Span(r.offset, r.num_bytes) for r in regions], [place]))

    assert regions[0].tensor(place._replace(offset=regions[0].offset)).tolist() == [111.0] * 10


def test_a_parameter_is_read_as_the_replica_has_it(scene: Scene) -> None:
    scene.shared[0].data.fill_(7.0)  # the user's, which is not the replica's here
    (place,), region = put(scene.arena, [torch.zeros(3, 2)])

    assert isinstance(scene.ask(messages.Read("linear.weight", place)), messages.Done)

    assert torch.equal(region.tensor(place), scene.helper._module.linear.weight.detach())
    assert not bool((region.tensor(place) == 7).any())
    answer = scene.ask(messages.Read("linear.scale", place))
    assert isinstance(answer, messages.Failure)
    assert "has no attribute `scale`" in answer.summary
