"""Messages: leaves travel as they are where pickle sends them well, else as bytes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from evener.arena import Place
from evener.messages import Input, Output, picklable, unpicklable

PLACE = Place(0, torch.float32, (2,), (1,))


@pytest.mark.parametrize(
    "leaves",
    [
        [],
        [1, 2.5, 1j, True, "word", b"bytes", None],
        [Input(PLACE, wanted=True), 3],
        [Output(form=None, values=bytearray(b"xy"))],  # type: ignore[arg-type]
    ],
)
def test_plain_leaves_travel_as_they_are(leaves: list[Any]) -> None:
    assert picklable(leaves) == leaves
    assert unpicklable(pickle.loads(pickle.dumps(picklable(leaves)))) == leaves


def test_a_lambda_travels_as_bytes() -> None:
    sent = picklable([lambda x: x + 1, 2])

    assert isinstance(sent, bytes)
    function, number = unpicklable(sent)
    assert (function(1), number) == (2, 2)


def test_a_subclass_of_a_plain_kind_keeps_its_class() -> None:
    class Level(int):
        pass

    sent = picklable([Level(3)])

    assert isinstance(sent, bytes)
    assert type(unpicklable(sent)[0]).__name__ == "Level"
