"""What the explicit style is to reach. Imports no torch."""

WORKLOADS = ("resnet", "smallmlp")
REFERENCE = "one_core"
# The explicit form and the transparent form that has the same shares.
PAIRS = {"gluon_even": "evener_even", "gluon_auto": "evener_auto"}
# The time of a step against that of the transparent form, at most, where both devices work.
JUDGED = "gluon_even"
AGAINST_TRANSPARENT = 1.1
