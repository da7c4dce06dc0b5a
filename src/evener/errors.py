"""The exceptions of evener.

Every one says what was given, what was expected and the way out::

    EvenerError
     ├── DeviceError (ValueError)           a device spec that names what is not there
     ├── SharesError (ValueError)           shares that cannot be cut by
     ├── BatchError (ValueError)            inputs or outputs that cannot be cut or joined
     ├── ModuleError (ValueError)           a module that cannot be made parallel, or already is
     ├── ProgramError (ValueError)          a program that `evener run` cannot find
     ├── ArenaError (MemoryError)           no room for the shared memory of a team
     ├── SampleTooLargeError (MemoryError)  a device has no memory for a single sample
     ├── BranchError (RuntimeError)         devices that must meet have gone different ways
     ├── GatherBrokenError (RuntimeError)   another device has failed; the user sees its error
     ├── NotOnDeviceError (RuntimeError)    a parameter that was never on the device
     ├── StaleGradientError (RuntimeError)  gradients of a step that are missing, or too old
     └── TeamError (RuntimeError)           a helper could not do its part
          ├── HelperStartError              it did not start
          ├── HelperDiedError               it died, and its work cannot be done elsewhere
          └── HelperRaisedError             it raised something that cannot be sent as it is

A fault that is survived is no error but a :class:`FaultWarning`.

What the user's own module raises is not in this list: it arrives in the main process with its
own type, and carries a :class:`RemoteTraceback` as its cause.
"""


class EvenerError(Exception):
    """The base of all errors that evener itself raises."""


class DeviceError(EvenerError, ValueError):
    """A device spec that is not understood, or names devices that are not there."""


class SharesError(EvenerError, ValueError):
    """Shares that cannot be used: wrong number, negative, or all zero."""


class BatchError(EvenerError, ValueError):
    """Inputs that cannot be cut, or outputs that cannot be joined, along the batch."""


class ModuleError(EvenerError, ValueError):
    """A module that cannot be made parallel, is parallel already, or is not."""


class ProgramError(EvenerError, ValueError):
    """A program that cannot be run because there is none."""


class ArenaError(EvenerError, MemoryError):
    """The shared memory of a team could not be had."""


class SampleTooLargeError(EvenerError, MemoryError):
    """A device has no memory for a single sample; the cause is what it raised."""


class BranchError(EvenerError, RuntimeError):
    """Devices that have to meet, for a mean over all of them, have gone different ways."""


class GatherBrokenError(EvenerError, RuntimeError):
    """Another device has failed, so this one waits in vain; the user sees the other's error."""


class NotOnDeviceError(EvenerError, RuntimeError):
    """A parameter is read, or used, on a device that it was never put on."""


class StaleGradientError(EvenerError, RuntimeError):
    """Gradients are missing, or belong to parameters that have changed since."""


class TeamError(EvenerError, RuntimeError):
    """The base of what can go wrong with helpers."""


class HelperStartError(TeamError):
    """A helper did not start."""


class HelperDiedError(TeamError):
    """A helper ended, or stopped answering, and its work cannot be done again elsewhere."""


class FaultWarning(UserWarning):
    """A device failed, and what it had to do was done nevertheless."""


class HelperRaisedError(TeamError):
    """The module raised an exception in a helper that cannot be sent to the main process."""


class RemoteTraceback(Exception):  # noqa: N818 - it is where an error happened, not an error
    """Where in a helper an exception was raised; the ``__cause__`` of that exception.

    The same device as in :mod:`concurrent.futures`: a traceback cannot travel between
    processes, its text can.
    """

    def __init__(self, device: str, text: str) -> None:
        self.device = device
        self.text = text
        super().__init__(device, text)

    def __str__(self) -> str:
        return f'in the helper of {self.device}:\n"""\n{self.text.rstrip()}\n"""'
