"""The data way with a grid: the same bits for any devices, shares and faults.

As the data way, but the devices take whole cells of a grid that does not depend on them (see
:mod:`evener.grid`), one device too, and nothing is ever the plain call of the first device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from evener.batches import Batch, Cut
from evener.call import Call
from evener.cells import Strip
from evener.data_parallel import DataWay
from evener.devices import Device
from evener.dims import Dims
from evener.errors import DeviceError, ModuleError, SharesError
from evener.grid import cells_for, cells_of
from evener.grid_call import GridCall
from evener.pickling import COMPILE_NAME
from evener.policies import Policy
from evener.run import Run
from evener.shares import Choice
from evener.strides import order_of
from evener.timing import Timing
from evener.together import Together


class GridWay(DataWay):
    """Runs the calls of one module on several devices, in the cells of a grid.

    Args:
        devices: one or more, all of them CPU devices with as many cores.
        policies: as for :class:`DataWay`.
        timeout_s: as for :class:`DataWay`.
        restarts: as for :class:`DataWay`.
        dims: as for :class:`DataWay`.
        grid: into how many cells a batch is cut.

    Raises:
        DeviceError: if the devices have different numbers of cores.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        policies: tuple[Policy, Policy],
        timeout_s: float | None,
        restarts: int,
        *,
        dims: Dims | None = None,
        grid: int,
    ) -> None:
        num_cores = {device.label: len(device.cores) for device in devices}
        if len(set(num_cores.values())) > 1:
            told = ", ".join(f"{label} has {num}" for label, num in num_cores.items())
            raise DeviceError(
                f"grid={grid} needs devices with as many cores each, for the number of threads "
                f'changes the bits: {told}; give groups that are equal, such as "cpu*2", or leave '
                "grid= out"
            )
        super().__init__(devices, policies, timeout_s, restarts, dims)
        self.journal.grid = grid
        self._grid = grid

    def call(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        shares: Sequence[int] | None = None,
    ) -> Any:
        """As :meth:`DataWay.call`.

        Raises:
            ModuleError: if the module is compiled.
            SharesError: if shares are given.
        """
        if shares is not None:
            raise SharesError(
                f"shares={tuple(shares)!r} for a call of a module with grid={self._grid}, whose "
                "batches are cut in one way only; evener.release(module), and leave grid= out"
            )
        if not self.is_plain(module):
            _refuse_compiled(module)
        return super().call(module, forward, args, kwargs)

    def backward(
        self, call: Call | Together, gradients: Sequence[Tensor | None], *, keep_graph: bool
    ) -> list[Tensor | None]:
        """As :meth:`DataWay.backward`."""
        num_threads, torch_threads = len(self._devices[0].cores), torch.get_num_threads()
        if torch_threads != num_threads:  # the user's, since the forward
            torch.set_num_threads(num_threads)
        try:
            return super().backward(call, gradients, keep_graph=keep_graph)
        finally:
            if torch_threads != num_threads:
                torch.set_num_threads(torch_threads)

    def _choose(self, batch: int, *, grad: bool, level: int = 7) -> Choice:
        choice = super()._choose(batch, grad=grad, level=level + 1)
        if not batch:
            return choice
        sizes = cells_of(batch, self._grid)
        stops = [0, *accumulate(cells_for(choice.shares, len(sizes)))]
        return choice._replace(shares=tuple(sum(sizes[i:j]) for i, j in pairwise(stops)))

    def _is_alone(self, choice: Choice, *, grad: bool) -> bool:  # noqa: ARG002
        return not sum(choice.shares)

    def _new_call(
        self,
        run: Run,
        module: nn.Module,
        function: Callable[..., Any],
        batch: Batch,
        rest: tuple[Cut, Callable[[int], int], Timing],
    ) -> Call:
        cut, seed, timing = rest
        sizes = cells_of(cut.size, self._grid)
        orders = [order_of(leaf) if isinstance(leaf, Tensor) else None for leaf in batch.leaves]
        starts = [0, *accumulate(sizes)]
        strips = {}
        for device, (start, stop) in cut.parts.items():
            first, behind = starts.index(start), starts.index(stop)
            seeds = [seed(number) for number in range(first, behind)]
            strips[device] = Strip(
                start=first,
                sizes=sizes[first:behind],
                seeds=seeds,
                num_cells=len(sizes),
                batch=cut.size,
                cut_dims=batch.cut_dims,
                orders=orders,
            )
        return GridCall(run, module, function, batch, cut, strips=strips, timing=timing)


def _refuse_compiled(module: nn.Module) -> None:
    is_compiled = vars(module).get(COMPILE_NAME) is not None
    for each in module.modules():
        compiled = getattr(each, "_compiled_call_impl", None) is not None
        if is_compiled or compiled or type(each).__name__ == "OptimizedModule":
            raise ModuleError(
                "torch.compile and grid= do not go together: what it makes of a module depends on "
                "the sizes that a device has seen before, and so do the bits; leave one of them "
                "out"
            )
