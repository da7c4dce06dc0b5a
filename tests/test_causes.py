from __future__ import annotations

import pytest

from evener.causes import changed, of_dependences, of_random
from evener.dependence import Dependence
from evener.differences import Difference


def row(kind: str, name: str, verdict: str = "different") -> Difference:
    return Difference(kind, name, (1,), 1.0, 1.0, None, verdict)


def test_who_draws_is_named_and_whether_that_is_all() -> None:
    few = of_random(["layers.0.drop", ""], "Net", is_all=True)
    many = of_random([f"drop{i}" for i in range(9)], "Net", is_all=False)

    assert few.where == ("layers.0.drop", "")
    assert "in layers.0.drop, Net.forward itself:" in str(few)
    assert "everything is equal" in str(few)
    assert "drop3, 5 more:" in str(many)
    assert "not the only cause" in str(many)
    assert "cannot be told" in str(of_random(["a"], "Net", is_all=None))


def test_layers_of_which_the_same_is_told_are_told_once() -> None:
    causes = list(
        of_dependences(
            [
                Dependence("bn1", "BatchNorm2d", is_norm=True, what="samples"),
                Dependence("center", "Center", is_norm=False, what="samples"),
                Dependence("bn2", "BatchNorm2d", is_norm=True, what="samples"),
                Dependence("", "Net", is_norm=False, what="sum"),
            ]
        )
    )

    assert [(cause.kind, cause.where) for cause in causes] == [
        ("dependent", ("bn1", "bn2")),
        ("dependent", ("center",)),
        ("average", ("",)),
    ]
    assert str(causes[0]).startswith("bn1 (BatchNorm2d), bn2 (BatchNorm2d): batch norm")
    assert str(causes[2]).startswith("the code of Net.forward itself: ")


@pytest.mark.parametrize(
    ("is_norm", "what", "words"),
    [
        (True, "samples", 'batchnorm="exact"'),
        (False, "samples", "outside of the module"),
        (False, "sum", "evener.Sum(total)"),
        (False, "mean", "evener.Mean(total, weight)"),
    ],
)
def test_a_cause_names_the_way_out(is_norm: bool, what: str, words: str) -> None:
    (cause,) = of_dependences([Dependence("a", "A", is_norm, what)])

    assert words in str(cause)


def test_what_forward_changes_is_told_by_kind() -> None:
    rows = [
        row("attribute", "count"),
        row("attribute", "same", "equal"),
        row("buffer", "bn.running_mean"),
        row("buffer", "own.mean"),
        row("input", "args[0]"),
        row("parameter", "embed.weight"),
        row("gradient", "embed.weight"),
    ]
    known = list(of_dependences([Dependence("bn", "B", is_norm=True, what="samples")]))
    causes = list(changed(rows, known))

    assert [cause.where for cause in causes] == [
        ("count",),
        ("own.mean",),
        ("args[0]",),
        ("embed.weight",),
    ]
    assert {cause.kind for cause in causes} == {"changed"}
