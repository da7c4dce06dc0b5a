"""Assignment: what is given to each device in a call, and what it takes to have it done again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from evener import messages
from evener.arena import put
from evener.batches import Batch, Cut
from evener.cells import Strip
from evener.contents import count_of_changes
from evener.errors import HelperDiedError
from evener.piece import Settings
from evener.portions import Split
from evener.run import Run
from evener.trees import structure_to_bytes
from evener.update import Update
from evener.work import Work


class Assignment:
    """The pieces of a call, cut and not yet given out.

    Args:
        run: what the call has in common with others.
        module: the user's module.
        batch: the inputs.
        cut: who has which part of them.
        seeds: a seed for each device that works.
        strips: the cells of each device that works. Default: the batch has no grid.

    Attributes:
        number: that of the pieces.
        update: what every helper has to be told.
    """

    def __init__(
        self,
        run: Run,
        module: nn.Module,
        batch: Batch,
        cut: Cut,
        seeds: Mapping[int, int],
        *,
        strips: Mapping[int, Strip] | None = None,
    ) -> None:
        self._run = run
        self._module = module
        self._batch = batch
        self._cut = cut
        self._seeds = seeds
        self._strips = strips or {}
        run.num_calls += 1
        self.number = run.num_calls
        self.update = run.mirror.refresh(module, everything=cut.lead != 0 or bool(strips))
        self._layout = run.mirror.layout
        self._state = run.mirror.state
        self._versions = [tensor._version for tensor in run.mirror.shared]
        self._before = self._after = self._counts()

    def has_lost_structure(self) -> bool:
        """Whether the module has another structure since."""
        return self._layout is not self._run.mirror.layout

    def check_repeatable(self) -> None:
        """See that a forward can be made again.

        Raises:
            HelperDiedError: if the module's structure, parameters or inputs have changed since.
        """
        self._check_module()
        if self._counts() != self._after:
            raise _lost("inputs have changed in place")

    def has_changed(self, numbers: list[int]) -> bool:
        """Whether some of the shared tensors were changed in place since."""
        shared = self._run.mirror.shared
        return any(shared[i]._version != self._versions[i] for i in numbers)

    def has_changed_inputs(self) -> bool:
        """Whether inputs were changed in place since, by the first device's piece or the user."""
        return self._counts() != self._before

    def end_forward(self) -> None:
        """The forward is over; inputs that change in place from now on are changed by the user."""
        self._after = self._counts()

    def work(self, device: int, settings: Settings) -> Work:
        """A device's work; its part of the inputs is put into the arena."""
        run, batch = self._run, self._batch
        share = self._cut.share(device)
        split = Split(share, share, batch.cut_dims, batch.dims)
        if share > (most := run.team.faults.caps[device]) > 0:
            split.most = int(most)
        leaves = batch.piece(*self._cut.parts[device])
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places, region = put(run.team.arena, tensors)
        run.team.keep(device, self.number, region)
        rest = iter(places)
        described = [
            messages.Input(next(rest), want) if isinstance(leaf, Tensor) else leaf
            for leaf, want in zip(leaves, batch.wanted, strict=True)
        ]
        knows = (run.team.generation(device), batch.structure)
        is_new = run.sent.get(device) != knows
        run.sent[device] = knows
        forward = messages.Forward(
            piece=self.number,
            update=self.update,
            structure=structure_to_bytes(batch.structure) if is_new else None,
            leaves=messages.picklable(described),
            span=messages.Span(region.offset, region.num_bytes),
            seed=self._seeds[device],
            settings=settings,
            lead=device == self._cut.lead,
            split=split if split.most < share else None,
            strip=self._strips.get(device),
        )
        renew = partial(self._renew, tensors, list(map(region.tensor, places)))
        return Work(forward, batch.structure, split, self._load, renew)

    def _load(self) -> tuple[messages.Load, Update]:
        """What makes a replica as the module was before the call."""
        self._check_module()
        return self._run.mirror.load(self._module, self._state)

    def _check_module(self) -> None:
        if self.has_lost_structure():
            raise _lost("the module's structure has changed")
        if self.has_changed(list(range(len(self._versions)))):
            raise _lost("parameters have changed in place")

    def _renew(self, given: list[Tensor], kept: list[Tensor], *, is_over: bool) -> None:
        """Put a device's inputs into the arena anew: a forward may have changed them in place."""
        if is_over and self._counts() != self._after:
            raise _lost("inputs have changed in place")
        with torch.no_grad():
            for tensor, copy in zip(given, kept, strict=True):
                copy.copy_(tensor)

    def _counts(self) -> list[int]:
        tensors = [leaf for leaf in self._batch.leaves if isinstance(leaf, Tensor)]
        return list(map(count_of_changes, tensors))


def _lost(what: str) -> HelperDiedError:
    return HelperDiedError(
        f"the part of the graph that a helper held is lost with it, and {what} since the "
        "forward, so it cannot be computed again; call the module again before backward"
    )
