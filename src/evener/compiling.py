"""Compiling: ``torch.compile`` around a parallel module compiles the replica of each device.

What is compiled is each device's own forward; the sharing of the work stays plain Python::

    torch.compile(parallel)(x) ──► dynamo ──► our forward, not compiled: cut, send, join
                                                │ with the same backend and options
                    the first device's forward ◄┴► the helpers' forwards: compiled

torch does not tell a function how the code around it is compiled, but a frame on the stack knows.
A module that was compiled before it became parallel needs none of this: it is sent with what
compiles it, as torch pickles it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from evener.pickling import COMPILE_NAME


def surrounding() -> Any:
    """What compiles the code around the caller: torch's ``OptimizeContext``, or None."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    kind = getattr(frames, "OptimizeContext", None)
    frame = sys._getframe(1) if kind else None
    while frame is not None:
        if frame.f_code.co_filename == frames.__file__:  # type: ignore[union-attr]
            context = frame.f_locals.get("self")
            if isinstance(context, kind):  # type: ignore[arg-type]
                return context
        frame = frame.f_back
    return None


class Compiler:
    """Compiles the forward of one replica, once for each way of compiling."""

    def __init__(self) -> None:
        self._context: Any = None
        self._forward: Callable[..., Any] | None = None

    def forward(self, module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The forward to run.

        Args:
            module: a replica; one of its attributes tells how it is compiled, if it is.
            plain: its own forward, bound.
        """
        context = vars(module).get(COMPILE_NAME)
        if context is None:
            return plain
        if context is not self._context or self._forward is None:
            # A function of its own: of a module's method torch would compile the module.
            def forward(*args: Any, **kwargs: Any) -> Any:
                return plain(*args, **kwargs)

            # torch's compiler counts by code how often it compiled: each module has its own.
            forward.__code__ = forward.__code__.replace()
            self._context, self._forward = context, context(forward)
        return self._forward
