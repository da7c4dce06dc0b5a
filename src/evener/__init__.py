"""evener: one line, and a plain PyTorch loop trains on every device of the machine."""

from evener import gluon
from evener.devices import Device, devices
from evener.dropin import DataParallel
from evener.errors import EvenerError
from evener.parallelize import parallelize, release
from evener.reductions import Mean, Sum
from evener.report import Report, report
from evener.verification import Verification
from evener.verify import verify

__all__ = [
    "DataParallel",
    "Device",
    "EvenerError",
    "Mean",
    "Report",
    "Sum",
    "Verification",
    "devices",
    "gluon",
    "parallelize",
    "release",
    "report",
    "verify",
]
