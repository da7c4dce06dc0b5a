"""Portions: a piece that is too large for a device, run one part after the other.

The graph of a piece takes most of its memory, and that of all portions together takes as much. So
no graph outlives its portion: forward runs for the outputs alone, and backward runs each portion's
forward once more, just before its backward::

    forward    │ forward 1 │ forward 2 │                          outputs joined, graphs dropped
    backward   │ forward 1 │ backward 1 │ forward 2 │ backward 2 │  gradients added up

(This is checkpointing: Chen et al., "Training deep nets with sublinear memory cost", 2016.) Each
portion has its own seed, made from the piece's, so both forwards draw the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evener.batches import Cut, TensorForm, check_outputs, is_joinable, narrow
from evener.dims import Dims
from evener.errors import BatchError
from evener.piece import Piece, run_backward, seed_of_piece
from evener.trees import Structure, ragged, summed


def cut_gradients(
    gradients: Sequence[Tensor | None], forms: Sequence[TensorForm], cut: Cut, part: int
) -> list[Tensor | None]:
    """The gradients of one part's outputs; that of a mean is weighted as the mean was.

    Args:
        gradients: those of the joined tensors, or None.
        forms: the forms of the joined tensors.
        cut: which part of the batch each device has, or each portion.
        part: whose part is wanted.
    """
    start, stop = cut.parts[part]
    position = list(cut.parts).index(part)

    def of(gradient: Tensor, form: TensorForm) -> Tensor:
        if form.is_summed:  # one row for each part, or one for all of them
            return gradient if len(gradient) == 1 else gradient[position : position + 1]
        if form.is_mean:
            return (
                gradient[position] if cut.means_apart else gradient * ((stop - start) / cut.size)
            )
        piece = narrow(gradient, form.dim or 0, start, stop)
        return piece if form.lengths is None else piece[:, : form.lengths[part]]

    return [
        None if gradient is None else of(gradient, form)
        for gradient, form in zip(gradients, forms, strict=True)
    ]


@dataclass
class Split:
    """How a piece is split.

    Attributes:
        size: samples of the piece.
        most: samples of a portion, at most.
        cut_dims: for each leaf of the inputs the dimension that is cut, or None.
        dims: where the batch lies in the outputs.
    """

    size: int
    most: int
    cut_dims: list[int | None]
    dims: Dims

    @property
    def shares(self) -> list[int]:
        """The samples of each portion, as equal as can be."""
        num = -(-self.size // self.most)
        return [(self.size * (i + 1)) // num - (self.size * i) // num for i in range(num)]


class Portions(Piece):
    """A piece that is run in portions; to its device it is like a :class:`Piece`.

    Args:
        leaves: the leaves of its inputs.
        wanted: for each leaf whether a gradient with respect to it is wanted.
        structure: their structure.
        seed: what its random numbers start from.
        grad: whether a backward may follow.
        split: how it is split.

    Attributes:
        grad: whether a backward may follow.
        outputs: the leaves of the joined outputs, after :meth:`forward`.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        wanted: Sequence[bool],
        structure: Structure,
        seed: int,
        *,
        grad: bool,
        split: Split,
    ) -> None:
        super().__init__(leaves, wanted, structure, seed, grad=grad)
        self._wanted = list(wanted)
        self._split = split
        self._cut = Cut(split.shares)

    def forward(self, function: Callable[..., Any]) -> Structure:
        """Run the module's forward on one portion after the other.

        Returns:
            The structure of the outputs; their leaves are in ``outputs``, without a graph.
        """
        answers = []
        for piece in self._pieces():
            structure = piece.forward(function)
            answers.append((structure, [_without_graph(leaf) for leaf in piece.outputs]))
        structure = answers[0][0]
        self.outputs = self._joined(structure, answers)
        return structure

    def backward(self, function: Callable[..., Any], gradients: Sequence[Tensor | None]) -> None:
        """Run forward and backward of one portion after the other.

        Afterwards the gradients of ``inputs`` are in their ``grad``, and those of parameters have
        been added up where these keep them.

        Args:
            function: the module's forward, in the state in which the piece's forward began.
            gradients: one for each joinable tensor among the joined outputs, or None.
        """
        for number, piece in enumerate(self._pieces()):
            structure = piece.forward(function)
            forms = self._forms(number, structure, piece.outputs)
            roots = piece.roots(cut_gradients(gradients, forms, self._cut, number))
            if roots[0]:
                run_backward(*roots, keep_graph=False)
            self._add_inputs(number, piece)

    def _pieces(self) -> Iterator[Piece]:
        for number, (start, stop) in self._cut.parts.items():
            leaves = [
                _own_part(leaf, dim, start, stop) if isinstance(leaf, Tensor) else leaf
                for leaf, dim in zip(self._leaves, self._split.cut_dims, strict=True)
            ]
            seed = seed_of_piece(self._seed, number, 0)
            yield Piece(leaves, self._wanted, self._structure, seed, grad=self.grad)

    def _forms(self, number: int, structure: Structure, leaves: Sequence[Any]) -> list[TensorForm]:
        dims = self._split.dims.of_outputs(leaves, structure)
        uneven, one_each = ragged(structure), summed(structure)
        return [
            TensorForm(
                tuple(leaf.shape),
                leaf.dtype,
                leaf.requires_grad,
                dim,
                {number: leaf.shape[1]} if i in uneven else None,
                i in one_each,
            )
            for i, (leaf, dim) in enumerate(zip(leaves, dims, strict=True))
            if is_joinable(leaf)
        ]

    def _add_inputs(self, number: int, piece: Piece) -> None:
        """Add the gradients of a portion's inputs to those of the piece's."""
        start, stop = self._cut.parts[number]
        dims = [
            dim
            for leaf, dim in zip(self._leaves, self._split.cut_dims, strict=True)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        for whole, part, dim in zip(self.inputs, piece.inputs, dims, strict=True):
            if part.grad is None:
                continue
            if whole.grad is None:
                whole.grad = torch.zeros_like(whole)
            place = whole.grad if dim is None else whole.grad.narrow(dim, start, stop - start)
            place += part.grad

    def _joined(
        self, structure: Structure, answers: Sequence[tuple[Structure, list[Any]]]
    ) -> list[Any]:
        forms = [
            (each, [TensorForm.of(leaf) if is_joinable(leaf) else leaf for leaf in leaves])
            for each, leaves in answers
        ]
        dims = self._split.dims.of_outputs(forms[0][1], structure)
        labels = [f"portion {number}" for number in self._cut.parts]
        check_outputs(forms, self._split.shares, labels, dims)
        uneven, one_each = ragged(structure), summed(structure)
        columns = zip(*(leaves for _, leaves in answers), strict=True)
        return [
            self._join(list(parts), dim, is_uneven=i in uneven, is_summed=i in one_each)
            if is_joinable(parts[0])
            else parts[0]
            for i, (parts, dim) in enumerate(zip(columns, dims, strict=True))
        ]

    def _join(
        self, parts: list[Tensor], dim: int | None, *, is_uneven: bool, is_summed: bool
    ) -> Tensor:
        flows = any(part.requires_grad for part in parts)
        with torch.no_grad():
            if is_summed:
                joined = torch.cat(parts).sum(0, keepdim=True, dtype=parts[0].dtype)
            elif dim is not None and is_uneven:
                joined = torch.nn.utils.rnn.pad_sequence(
                    [row for part in parts for row in part], batch_first=True
                )
            elif dim is not None:
                joined = torch.cat(parts, dim)
            elif parts[0].is_floating_point() or parts[0].is_complex():
                joined = torch.zeros_like(parts[0])
                for part, share in zip(parts, self._split.shares, strict=True):
                    joined += part * (share / self._split.size)
            else:
                joined = parts[0]
                for number, part in enumerate(parts):
                    if not torch.equal(part, joined):
                        raise BatchError(
                            f"an output without a batch differs among the portions: {joined} in "
                            f"portion 0, {part} in portion {number}; return it with the batch in "
                            "one of its dimensions"
                        )
        return joined.detach().requires_grad_(flows)


def _own_part(leaf: Tensor, dim: int | None, start: int, stop: int) -> Tensor:
    """A copy: a module may change its inputs in place, and will be run on them once more."""
    leaf = leaf.detach()
    return (leaf if dim is None else narrow(leaf, dim, start, stop)).clone()


def _without_graph(leaf: Any) -> Any:
    """The values of an output; whether a gradient can flow back through it stays known."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)
