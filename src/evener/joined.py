"""Joined: the autograd function that joins the main process's graph with those of the devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evener.call import Call
from evener.errors import EvenerError
from evener.piece import Settings
from evener.run import labelled


class Joined(torch.autograd.Function):
    """Joins the main process's graph with those of the devices."""

    @staticmethod
    def forward(
        ctx: Any, way: Any, call: Call, settings: Settings, *_inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the call's forward; ``inputs`` are those of its graph."""
        ctx.way, ctx.call = way, call
        ctx.set_materialize_grads(False)
        with labelled("evener: forward"):
            call.forward(settings)
        tensors, forms = call.outputs.tensors, call.outputs.forms
        call.outputs.tensors = []  # they are the user's now; to hold them would keep their memory
        pairs = zip(tensors, forms, strict=True)
        ctx.mark_non_differentiable(*(t for t, form in pairs if not form.differentiable))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the call's backward, given the gradients of the joined outputs."""
        if torch.is_grad_enabled():
            raise EvenerError(
                "create_graph=True through a parallel module is not possible: its devices' graphs "
                "are in several processes; evener.release(module) for second derivatives"
            )
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        return (None, None, None, *ctx.way.backward(ctx.call, gradients, keep_graph=keep_graph))
