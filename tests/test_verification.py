from __future__ import annotations

import pytest
import torch

import evener
from evener import Verification
from evener.causes import Cause
from evener.differences import Difference


def verification(*verdicts: str, causes=(), shares=(5, 4), precision=torch.float64, refused=""):
    rows = tuple(
        Difference("gradient", str(i), (2, 3), 0.5, 0.25, 1e-7, verdict)
        for i, verdict in enumerate(verdicts)
    )
    return Verification(rows, causes, tuple(evener.devices("cpu*2")), shares, precision, refused)


@pytest.mark.parametrize(
    ("verdicts", "verdict", "is_fine", "sentence"),
    [
        ((), "equal", True, "Equal, bit for bit."),
        (("equal",), "equal", True, "Equal, bit for bit."),
        (("equal", "rounding"), "rounding", True, "Equal up to rounding."),
        (("random", "rounding"), "random", True, "Equal up to rounding, but for random numbers."),
        (("different", "random"), "different", False, "Different by more than rounding."),
    ],
)
def test_the_worst_row_decides(verdicts, verdict, is_fine, sentence) -> None:
    found = verification(*verdicts)

    assert found.verdict == verdict
    assert bool(found) is is_fine
    assert sentence in str(found).splitlines()
    assert repr(found) == f"<Verification of {len(verdicts)} tensors: {verdict}>"


def test_the_text_says_what_was_compared() -> None:
    text = str(verification("different", causes=(Cause("dependent", ("a",), "a: the cause"),)))

    assert "cpu:0 (5 samples), cpu:1 (4 samples)" in text
    assert "2x3" in text
    assert text.splitlines()[-1] == "* a: the cause"
    assert "1000 eps" not in text
    assert "Only one device" not in text


def test_the_text_says_what_was_not_tried() -> None:
    text = str(verification("equal", shares=(1, 0), precision=None, refused="it raises Error: x"))

    assert "1000 eps were allowed: it raises Error: x" in text
    assert "Only one device had samples" in text
