"""Pieces: the settings, the seed and the graph of one device's part of a call."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evener.piece import (
    Piece,
    Settings,
    current_flags,
    run_backward,
    seed_of_piece,
    set_flags,
)
from evener.trees import flatten, unflatten

# ------------------------------------------------------------------ settings


@pytest.fixture
def settings_restored() -> Iterator[None]:
    """Set back what `applied` leaves in force."""
    before = Settings.current()
    yield
    set_flags(before.flags)


def test_settings_of_a_program_that_set_nothing() -> None:
    settings = Settings.current()

    assert (settings.grad, settings.inference) == (True, False)
    assert settings.autocast == (False, torch.bfloat16, True)
    assert settings.flags[:3] == (torch.float32, "highest", (False, False))


SETTINGS: list[Callable[[], Any]] = [
    torch.no_grad,
    torch.enable_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu"),
    lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    lambda: torch.autocast("cpu", enabled=False),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_are_the_same_where_they_are_applied(setting: Callable[[], Any]) -> None:
    with setting():
        settings = Settings.current()
    before = Settings.current()

    with pickle.loads(pickle.dumps(settings)).applied():
        if settings.autocast[0]:
            assert Settings.current() == settings
        else:  # what autocast would do if it were on does not count
            assert Settings.current()._replace(autocast=settings.autocast) == settings
    assert Settings.current() == before


def test_settings_end_also_with_an_exception() -> None:
    with torch.inference_mode(), torch.autocast("cpu"):
        settings = Settings.current()
    before = Settings.current()

    with pytest.raises(KeyError), settings.applied():
        raise KeyError

    assert Settings.current() == before


FLAGS: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "precision of matrix products": lambda: torch.set_float32_matmul_precision("medium"),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "deterministic, or a warning": lambda: torch.use_deterministic_algorithms(
        True, warn_only=True
    ),
    "anomalies": lambda: torch.set_anomaly_enabled(True),
    "anomalies without not-a-numbers": lambda: torch.set_anomaly_enabled(True, check_nan=False),
    "no oneDNN": lambda: torch.backends.mkldnn.set_flags(False),
    "deterministic oneDNN": lambda: torch.backends.mkldnn.set_flags(True, True),
    "no flash attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "no memory-efficient attention": lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "no plain attention": lambda: torch.backends.cuda.enable_math_sdp(False),
    "denormal numbers are zero": lambda: torch.set_flush_denormal(True),
    "checks of sparse tensors": torch.sparse.check_sparse_tensor_invariants.enable,
}


@pytest.mark.usefixtures("settings_restored")
@pytest.mark.parametrize("flag", FLAGS)
def test_flags_are_followed(flag: str) -> None:
    before = current_flags()
    FLAGS[flag]()
    changed = current_flags()
    assert changed != before

    set_flags(before)
    assert current_flags() == before
    with Settings.current()._replace(flags=pickle.loads(pickle.dumps(changed))).applied():
        assert current_flags() == changed


# ------------------------------------------------------------------ seeds


def test_a_seed_depends_on_the_three_numbers_alone() -> None:
    # Not on the process, its hash seed or the platform.
    assert seed_of_piece(0, 0, 0) == 44399164426931582


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**9), st.integers(0, 63))
def test_a_seed_is_one_that_every_generator_takes(seed: int, call: int, device: int) -> None:
    number = seed_of_piece(seed, call, device)

    assert 0 <= number < 2**56
    torch.Generator().manual_seed(number)


def test_each_piece_has_a_seed_of_its_own() -> None:
    triples = [(s, c, d) for s in (0, 1, 10, 11, 101) for c in range(30) for d in range(12)]

    assert len({seed_of_piece(*triple) for triple in triples}) == len(triples)


def test_drawing_a_seed_draws_from_no_generator() -> None:
    state = torch.get_rng_state()

    seed_of_piece(torch.initial_seed(), 3, 1)

    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------ forward


def piece_of(*args: Any, grad: bool = True, seed: int = 0, **kwargs: Any) -> Piece:
    leaves, structure = flatten((args, kwargs))
    wanted = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
    return Piece(leaves, wanted, structure, seed, grad=grad)


def test_the_function_gets_the_inputs_as_they_were_given() -> None:
    seen: list[Any] = []

    def function(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((args, kwargs))
        return args[0]

    x, y = torch.zeros(2), torch.ones(2, requires_grad=True)
    piece_of(x, [1, None], y=y, name="a").forward(function)

    ((args, kwargs),) = seen
    assert args[0] is not x
    assert args[0].data_ptr() == x.data_ptr()
    assert args[1] == [1, None]
    assert kwargs["name"] == "a"
    assert kwargs["y"].requires_grad
    assert kwargs["y"].data_ptr() == y.data_ptr()


def test_the_outputs_are_the_leaves_and_their_structure_is_returned() -> None:
    piece = piece_of(torch.arange(3.0))

    structure = piece.forward(lambda x: {"double": x * 2, "more": (x.sum(), "text")})

    assert [str(leaf) for leaf in piece.outputs] == ["tensor([0., 2., 4.])", "tensor(3.)", "text"]
    assert unflatten(structure, "abc") == {"double": "a", "more": ("b", "c")}


def test_a_piece_has_the_same_random_numbers_wherever_and_whenever_it_runs() -> None:
    x = torch.ones(100)
    piece, again, other = piece_of(x, seed=3), piece_of(x, seed=3), piece_of(x, seed=4)
    state = torch.get_rng_state()
    for each in (piece, other, again):
        each.forward(nn.Dropout(0.5))

    assert torch.equal(piece.outputs[0], again.outputs[0])
    assert not torch.equal(piece.outputs[0], other.outputs[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_piece_can_be_run_again() -> None:
    piece = piece_of(torch.ones(100), seed=3)

    piece.forward(nn.Dropout(0.5))
    first = piece.outputs
    piece.forward(nn.Dropout(0.5))

    assert torch.equal(piece.outputs[0], first[0])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("outside", [torch.no_grad, torch.enable_grad])
def test_only_the_piece_decides_whether_there_is_a_graph(
    grad: bool,
    outside: Callable[[], Any],
) -> None:
    x = torch.ones(2, requires_grad=True)
    piece = piece_of(x, grad=grad)

    with outside():
        piece.forward(lambda x: x * 2)

    assert piece.outputs[0].requires_grad == grad
    assert len(piece.inputs) == grad


def test_in_inference_mode_there_is_no_graph_and_no_complaint() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        piece = piece_of(x, torch.ones(2), grad=False)
        piece.forward(lambda x, y: x + y)

        assert piece.outputs[0].tolist() == [2, 2]
        assert piece.outputs[0].is_inference()


def test_a_failing_function_leaves_no_outputs() -> None:
    piece = piece_of(torch.ones(2))

    with pytest.raises(KeyError):
        piece.forward(lambda x: {}[x])

    assert piece.outputs == []


# ------------------------------------------------------------------ backward


def test_the_graph_ends_at_the_piece() -> None:
    x = torch.ones(3, requires_grad=True)
    weight = torch.full((3,), 2.0, requires_grad=True)
    piece = piece_of(x * 1, torch.ones(3))
    piece.forward(lambda x, y: (x * weight, y))

    outputs, gradients = piece.roots([torch.tensor([1.0, 2, 3]), None])
    torch.autograd.backward(outputs, gradients)

    assert x.grad is None
    assert [tensor.grad.tolist() for tensor in piece.inputs] == [[2, 4, 6]]
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 2, 3]


def test_a_backward_starts_where_there_is_a_graph_and_a_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    piece = piece_of(x)
    piece.forward(
        lambda x: {
            "with": x * 2,
            "without gradient": x * 3,
            "without graph": x.detach(),
            "not joinable": torch.tensor(3),
            "no tensor": "text",
            "mean": x.mean(),
        }
    )
    one, mean = torch.ones(3), torch.tensor(1.0)

    outputs, gradients = piece.roots([one, None, one, mean])

    assert outputs == [piece.outputs[0], piece.outputs[5]]
    assert gradients == [one, mean]


def test_each_joinable_output_needs_its_gradient() -> None:
    piece = piece_of(torch.ones(3, requires_grad=True))
    piece.forward(lambda x: (x * 2, x * 3))

    with pytest.raises(ValueError, match="zip"):
        piece.roots([None])


def test_a_tensor_given_twice_has_two_gradients_and_one_returned_twice_has_their_sum() -> None:
    x = torch.ones(2, requires_grad=True)
    piece = piece_of(x, x)

    def function(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        out = one * 3 + other * 5
        return out, out

    piece.forward(function)
    torch.autograd.backward(*piece.roots([torch.ones(2), torch.full((2,), 10.0)]))

    assert [tensor.grad.tolist() for tensor in piece.inputs] == [[33, 33], [55, 55]]


def test_an_input_that_is_returned_gets_the_gradient_itself() -> None:
    piece = piece_of(torch.ones(2, requires_grad=True))
    piece.forward(lambda x: x)

    torch.autograd.backward(*piece.roots([torch.tensor([3.0, 4.0])]))

    assert piece.inputs[0].grad.tolist() == [3, 4]


def test_a_function_may_change_its_input_in_place_as_it_may_without_us() -> None:
    """Many models begin with an activation in place, behind another model that is trained too."""
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    piece = piece_of(x * 1)

    piece.forward(lambda x: nn.functional.relu(x, inplace=True) * 3)
    torch.autograd.backward(*piece.roots([torch.ones(2)]))

    assert piece.inputs[0].grad.tolist() == [0, 3]


def test_integers_have_no_gradient() -> None:
    piece = piece_of(torch.tensor([1, 2]), torch.tensor([True, False]))
    piece.forward(lambda numbers, flags: (numbers * 2, flags))

    assert piece.inputs == []
    assert piece.roots([None, None]) == ([], [])


def test_run_backward_is_that_of_torch() -> None:
    x = torch.randn(3, requires_grad=True)
    out, gradient = x.square(), torch.randn(3)

    run_backward([out], [gradient], keep_graph=True)
    run_backward([out], [gradient], keep_graph=False)

    assert x.grad is not None
    torch.testing.assert_close(x.grad, 4 * x.detach() * gradient)
    with pytest.raises(RuntimeError, match="second time"):
        run_backward([out], [gradient], keep_graph=False)
