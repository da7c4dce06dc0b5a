"""What evener is to reach on unequal cores. Imports no torch."""

WORKLOADS = ("smallmlp", "mlp", "resnet", "lstm", "encoder")
SPEEDS = (0.5, 0.25)

# The speed of `shares="auto"` as a part of the ideal, with the slow core at half its speed.
HALF = 0.5
OF_IDEAL = {"resnet": 0.93, "encoder": 0.93, "lstm": 0.88, "mlp": 0.88}
# Its speed against the fast core alone, at all speeds and on all workloads: sharing with a slow
# device must not harm.
AGAINST_FAST = 0.97
