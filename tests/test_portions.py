"""Portions: the parts of a piece, one after the other, give what the whole piece gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from evener.batches import Batch, Cut, TensorForm
from evener.dims import Dims
from evener.errors import BatchError
from evener.piece import Piece, run_backward
from evener.portions import Portions, Split, cut_gradients
from evener.trees import unflatten

SEED = 5


def split_of(batch: Batch, most: int) -> Split:
    assert batch.size is not None
    return Split(batch.size, most, batch.cut_dims, batch.dims)


def run(
    runner: Piece | Portions, module: nn.Module, gradients: list[Tensor | None]
) -> tuple[list[Any], list[Tensor | None]]:
    """Forward and backward; what came out, and the gradients of inputs and parameters."""
    runner.forward(module)
    outputs = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in runner.outputs]
    if isinstance(runner, Portions):
        runner.backward(module, gradients)
    else:
        run_backward(*runner.roots(gradients), keep_graph=False)
    wanted = [*runner.inputs, *module.parameters()]
    return outputs, [None if tensor.grad is None else tensor.grad.clone() for tensor in wanted]


def assert_like_the_whole(
    module: nn.Module, batch: Batch, most: int, gradients: list[Tensor | None]
) -> list[Any]:
    """Both ways give the same, and the same of it has no gradient; returns the outputs."""
    copies = [copy.deepcopy(module) for _ in range(2)]
    piece = Piece(batch.leaves, batch.wanted, batch.structure, SEED, grad=True)
    portions = Portions(
        batch.leaves,
        batch.wanted,
        batch.structure,
        SEED,
        grad=True,
        split=split_of(batch, most),
    )

    outputs, expected = run(piece, copies[0], gradients)
    found_outputs, found = run(portions, copies[1], gradients)

    for one, other in zip(found_outputs, outputs, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        else:
            assert one == other
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert any(gradient is not None for gradient in found)
    flows = [leaf.requires_grad for leaf in piece.outputs if isinstance(leaf, Tensor)]
    assert [leaf.requires_grad for leaf in portions.outputs if isinstance(leaf, Tensor)] == flows
    return found_outputs


def random(*shape: int, wanted: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=wanted)


class Several(nn.Module):
    """Outputs of each kind that a module may have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4).double()
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Any]:
        y = self.linear(x) * scale
        return {
            "wide": y,
            "more": (y.square().sum(1), x.argmax(1)),
            "loss": y.pow(3).mean(),
            "constant": x.detach() * 2,
            "text": "the same",
            "count": torch.tensor(7),
        }


# ------------------------------------------------------------------ like the whole piece


@pytest.mark.parametrize("most", [1, 2, 3, 6, 7])
def test_outputs_and_gradients_are_those_of_the_whole_piece(most: int) -> None:
    # The scale is for all samples, and is not cut.
    batch = Batch((random(7, 3, wanted=True), random(4, wanted=True)), {}, Dims((0, None)))
    gradients: list[Tensor | None] = [random(7, 4), random(7), None, random(), None]

    assert_like_the_whole(Several(), batch, most, gradients)


def test_an_output_without_a_gradient_has_none() -> None:
    batch = Batch((random(5, 3, wanted=True), random(5, 1, wanted=True)), {})
    gradients: list[Tensor | None] = [None, None, None, random(), None]

    assert_like_the_whole(Several(), batch, 2, gradients)


def test_without_any_gradient_nothing_has_one() -> None:
    batch = Batch((random(5, 3, wanted=True), random(5, 1)), {})
    module = Several()
    portions = Portions(
        batch.leaves, batch.wanted, batch.structure, SEED, grad=True, split=split_of(batch, 2)
    )

    _, found = run(portions, module, [None] * 5)

    assert found == [None] * 4


def test_the_batch_may_lie_in_another_dimension() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(3, 2).double()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            steps, last = self.gru(x)
            return steps, last.transpose(0, 1)

    batch = Batch((random(4, 7, 3, wanted=True),), {}, Dims(1, (1, 0)))

    assert_like_the_whole(Transposed(), batch, 3, [random(4, 7, 2), random(7, 1, 2)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_an_output_without_a_batch_is_a_mean(dtype: torch.dtype) -> None:
    class Statistics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).square().mean(0).to(dtype)

    batch = Batch((random(7, 3, wanted=True),), {}, Dims(0, None))

    assert_like_the_whole(Statistics(), batch, 2, [random(3).to(dtype)])


class Recurrent(nn.Module):
    """Takes a padded batch, and returns sequences of unequal lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 2, batch_first=True).double()

    def forward(self, x: Tensor, lengths: Tensor) -> PackedSequence:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output: PackedSequence = self.lstm(packed)[0]
        return output


def test_ragged_outputs_are_padded_to_the_longest() -> None:
    x, lengths = random(5, 6, 3, wanted=True), torch.tensor([2, 1, 6, 3, 4])
    batch = Batch((x, lengths), {})

    padded, given_lengths = assert_like_the_whole(Recurrent(), batch, 2, [random(5, 6, 2), None])

    # The longest of the first portion is a third as long as that of the second.
    assert padded.shape == (5, 6, 2)
    assert torch.equal(given_lengths, lengths)


def test_attention_with_a_mask_for_all() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True).double()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            output: Tensor = self.attention(x, x, x, attn_mask=mask)[0]
            return output

    mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    batch = Batch((random(6, 5, 4, wanted=True), mask), {}, Dims((0, None)))

    assert_like_the_whole(Attention(), batch, 4, [random(6, 5, 4)])


def test_a_module_that_changes_its_input_in_place() -> None:
    """Forward runs twice, and finds what it found the first time."""

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.linear(x.mul_(2))
            return output

    x = random(5, 3)
    expected_batch, batch = Batch((x.clone(),), {}), Batch((x.clone(),), {})
    module = Doubling()
    same = copy.deepcopy(module)
    gradient = random(5, 2)

    _, expected = run(
        Piece(expected_batch.leaves, [False], batch.structure, SEED, grad=True), module, [gradient]
    )
    _, found = run(
        Portions(
            batch.leaves, [False], batch.structure, SEED, grad=True, split=split_of(batch, 2)
        ),
        same,
        [gradient],
    )

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------ random numbers


def test_dropout_is_the_same_in_both_forwards_and_differs_among_portions() -> None:
    batch = Batch((torch.ones(6, 50, dtype=torch.float64, requires_grad=True),), {})
    dropout = nn.Dropout(0.5)
    portions = Portions(
        batch.leaves, batch.wanted, batch.structure, SEED, grad=True, split=split_of(batch, 2)
    )
    before = torch.get_rng_state()

    portions.forward(dropout)
    (output,) = portions.outputs
    portions.backward(dropout, [torch.ones(6, 50, dtype=torch.float64)])

    # The gradient of what was dropped is zero, of what was kept it is two.
    assert torch.equal(portions.inputs[0].grad, output)
    masks = [output[start : start + 2] for start in (0, 2, 4)]
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_draws_the_same() -> None:
    batch = Batch((torch.ones(6, 50),), {})

    def output(seed: int) -> Tensor:
        split = split_of(batch, 4)
        portions = Portions(
            batch.leaves, batch.wanted, batch.structure, seed, grad=False, split=split
        )
        portions.forward(nn.Dropout(0.5))
        found: Tensor = portions.outputs[0]
        return found

    assert torch.equal(output(1), output(1))
    assert not torch.equal(output(1), output(2))


# ------------------------------------------------------------------ graphs and structures


def test_no_graph_is_left_after_forward() -> None:
    batch = Batch((random(6, 3, wanted=True), random(6, 1)), {})
    portions = Portions(
        batch.leaves, batch.wanted, batch.structure, SEED, grad=True, split=split_of(batch, 2)
    )

    structure = portions.forward(Several())

    tensors = [leaf for leaf in portions.outputs if isinstance(leaf, Tensor)]
    assert all(tensor.grad_fn is None for tensor in tensors)
    assert [tensor.requires_grad for tensor in tensors] == [True, True, False, True, False, False]
    assert unflatten(structure, portions.outputs)["text"] == "the same"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_inference_it_is_a_forward_alone(mode: Callable[[], Any]) -> None:
    batch = Batch((random(5, 3), random(5, 1)), {})
    module = Several()
    with mode():
        portions = Portions(
            batch.leaves,
            batch.wanted,
            batch.structure,
            SEED,
            grad=False,
            split=split_of(batch, 2),
        )
        portions.forward(module)

        torch.testing.assert_close(portions.outputs[0], module(*batch.leaves)["wide"])
    assert portions.inputs == []
    assert not any(leaf.requires_grad for leaf in portions.outputs if isinstance(leaf, Tensor))


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (lambda x: x if len(x) > 1 else (x,), "differ in structure.*portion 0.*portion 1"),
        (lambda x: x[:1], r"on portion 1, whose share of the batch is 2"),
        (lambda x: x[:, : len(x)], "only the dimension of the batch may differ"),
        (lambda x: (x, len(x)), "output 1 differs among the devices: 1 on portion 0, 2 on por"),
        (lambda x: (x, torch.tensor(len(x))), "output 1 differs among"),
    ],
)
def test_outputs_that_cannot_be_joined_are_an_error(module: Any, says: str) -> None:
    batch = Batch((random(5, 3),), {})
    portions = Portions(
        batch.leaves, batch.wanted, batch.structure, SEED, grad=False, split=split_of(batch, 2)
    )

    with pytest.raises(BatchError, match=says):
        portions.forward(module)


def test_numbers_without_a_batch_must_be_the_same() -> None:
    """As for devices: of these there is no mean."""
    batch = Batch((random(5, 3),), {}, Dims(0, None))
    portions = Portions(
        batch.leaves, batch.wanted, batch.structure, SEED, grad=False, split=split_of(batch, 2)
    )
    portions.forward(lambda _x: torch.tensor([1, 2]))
    assert portions.outputs[0].tolist() == [1, 2]

    with pytest.raises(BatchError, match="without a batch differs"):
        portions.forward(lambda x: x.argmax(0))


# ------------------------------------------------------------------ how it is split


@given(st.integers(1, 300), st.integers(1, 300))
def test_portions_are_as_few_and_as_equal_as_can_be(size: int, most: int) -> None:
    shares = Split(size, most, [0], Dims()).shares

    assert sum(shares) == size
    assert max(shares) <= most
    assert max(shares) - min(shares) <= 1
    assert len(shares) == -(-size // most)


# ------------------------------------------------------------------ gradients of a part


def test_each_part_gets_its_rows_and_its_part_of_a_mean() -> None:
    cut = Cut((3, 0, 1))
    forms = [
        TensorForm((4, 2), torch.float64, differentiable=True),
        TensorForm((2, 4), torch.float64, differentiable=True, dim=1),
        TensorForm((), torch.float64, differentiable=True),
        TensorForm((4, 5), torch.float64, differentiable=True, lengths={0: 5, 2: 2}),
        TensorForm((4,), torch.float64, differentiable=True),
    ]
    rows, columns, ragged = random(4, 2), random(2, 4), random(4, 5)
    gradients = [rows, columns, torch.tensor(8.0), ragged, None]

    for part, start, stop, length, weight in [(0, 0, 3, 5, 6.0), (2, 3, 4, 2, 2.0)]:
        found = cut_gradients(gradients, forms, cut, part)

        assert found[0] is not None
        assert torch.equal(found[0], rows[start:stop])
        assert found[1] is not None
        assert torch.equal(found[1], columns[:, start:stop])
        assert found[2] == weight
        assert found[3] is not None
        assert torch.equal(found[3], ragged[start:stop, :length])
        assert found[4] is None


def test_of_means_that_stay_apart_each_device_has_its_own() -> None:
    cut = Cut((3, 0, 1), means_apart=True)
    forms = [TensorForm((), torch.float64, differentiable=True)]

    found = [cut_gradients([torch.tensor([5.0, 6.0])], forms, cut, part) for part in (0, 2)]

    assert found == [[5.0], [6.0]]
