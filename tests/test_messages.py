"""Messages: all that the two sides say can be said with plain pickle."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import pickle
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from evener import messages
from evener.arena import Place
from evener.batches import TensorForm
from evener.failure import Failure
from evener.messages import Input, Output, Span, picklable, unpicklable
from evener.piece import Settings
from evener.watch import Update

PLACE = Place(64, torch.float32, (2, 3), (3, 1))
FORM = TensorForm((2, 3), torch.float32, differentiable=True)

EXAMPLES: list[Any] = [
    messages.Load(
        module=b"module",
        layout=[PLACE],
        shared=Span(0, 4096),
        parameters=[True],
        requires_grad=[False],
        buffers=[PLACE],
        sys_path=["/a"],
        folder=None,
    ),
    messages.Follow(Update(attributes=b"x", removed=[(0, "a")])),
    messages.Forward(
        piece=1,
        update=Update(buffers={0: PLACE}, requires_grad=[True]),
        structure=b"structure",
        leaves=[Input(PLACE, wanted=True), 3, "text"],
        span=Span(4096, 4096),
        seed=2**56 - 1,
        settings=Settings.current(),
        lead=False,
    ),
    messages.Write(piece=1, places=[None, PLACE]),
    messages.Backward(
        piece=1,
        gradients=[PLACE, None],
        target=Span(0, 4096),
        inputs=[PLACE],
        keep_graph=True,
        settings=Settings.current(),
    ),
    messages.Reduce(regions=[Span(0, 4096)], segment=[PLACE]),
    messages.Read(name="layers.0.weight", place=PLACE),
    messages.Done(),
    messages.Lost(),
    messages.Outputs(structure=None, leaves=[Output(FORM, bytearray(24)), Output(FORM, None), 1]),
    messages.Gradients(present=[True], inputs=[False], others={0: b"sparse"}),
    messages.Failure(exception=None, summary="ValueError: x", traceback="Traceback ..."),
    messages.Request(messages.Done(), [1, 2]),
    messages.Reply(messages.Done(), []),
]


def test_there_is_an_example_of_each_message() -> None:
    classes = {
        value
        for value in vars(messages).values()
        if inspect.isclass(value) and value.__module__ in (messages.__name__, Failure.__module__)
    }

    assert {*map(type, EXAMPLES), Span, Input, Output} == classes


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_travels(message: Any) -> None:
    assert pickle.loads(pickle.dumps(message, protocol=5)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_is_small(message: Any) -> None:
    """It waits in no buffer of a socket, so sending never waits for the other side."""
    assert len(pickle.dumps(message, protocol=5)) < 1000


def test_the_drawing_at_the_head_names_each_request_and_each_reply() -> None:
    drawn = re.findall(r"^      (\w+) .*──►|──► *$", messages.__doc__ or "", re.MULTILINE)
    answers = re.findall(r"◄── (\w+)", messages.__doc__ or "")
    classes = [type(message) for message in EXAMPLES if dataclasses.is_dataclass(message)]

    named = {*filter(None, drawn), *answers, "Follow", "Failure"}
    assert {cls.__name__ for cls in classes} == named


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "leaves",
    [
        [],
        [1, 2.5, 1j, True, None, "text", b"bytes"],
        [Input(PLACE, wanted=False), Output(FORM, None)],
    ],
)
def test_plain_leaves_travel_as_they_are(leaves: list[Any]) -> None:
    packed = picklable(tuple(leaves))

    assert packed == leaves
    assert unpicklable(pickle.loads(pickle.dumps(packed))) == leaves


@pytest.mark.parametrize(
    "leaf", [Level.LOW, Text("a"), (1, 2), torch.float32, slice(1, 2), torch.device("cpu"), Level]
)
def test_other_leaves_travel_in_their_own_way(leaf: Any) -> None:
    packed = picklable([1, leaf])

    assert isinstance(packed, bytes)
    assert unpicklable(packed) == [1, leaf]
    assert type(unpicklable(packed)[1]) is type(leaf)


def test_functions_and_classes_made_on_the_way_travel_too() -> None:
    class Local:
        value = 3

    double, kind, number = unpicklable(picklable([lambda x: x * 2, Local, torch.tensor(5)]))

    assert double(4) == 8
    assert kind.value == 3
    assert number.item() == 5


def test_leaves_of_kinds_that_another_interpreter_cannot_import_arrive(
    made_module: Callable[[str], ModuleType], run_python: Callable[..., str]
) -> None:
    module = made_module("class Options:\n    rate = 0.5\n\ndef double(x): return x * 2\n")
    packed = picklable([module.Options(), module.double])

    assert isinstance(packed, bytes)
    printed = run_python(
        """
import sys
from evener.messages import unpicklable
options, double = unpicklable(bytes.fromhex(sys.argv[1]))
print(double(options.rate))
""",
        packed.hex(),
    )
    assert printed == "1.0\n"


def test_a_failure_tells_of_an_error_and_brings_it_if_it_can_travel() -> None:
    class OddError(Exception):
        def __init__(self, one: int, other: int) -> None:
            super().__init__("odd")

    failures = [messages.Failure.of(error) for error in (ValueError("a word"), OddError(1, 2))]

    assert failures[0].summary == "ValueError: a word"
    assert failures[0].exception is not None
    assert isinstance(pickle.loads(failures[0].exception), ValueError)
    assert failures[1].exception is None
    assert failures[1].traceback.endswith("odd\n")
