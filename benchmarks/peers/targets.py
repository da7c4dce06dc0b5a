"""What evener is to reach against its peers. Imports no torch."""

DEFAULT_CONTENDERS = (
    "one_core",
    "all_threads",
    "ddp",
    "accelerate",
    "fabric",
    "evener",
)
REFERENCE = "one_core"

# Speed against one core.
SPEED = {"smallmlp": 1.2, "mlp": 1.5, "resnet": 1.75, "lstm": 1.7, "encoder": 1.85}
WORKLOADS = tuple(SPEED)
# Speed against the fastest of the peers in the same round.
AGAINST_PEERS = {"smallmlp": 1.5, "mlp": 1.15, "resnet": 1.0, "lstm": 1.15, "encoder": 1.0}
FIRST_STEP_S = 2.5
ONE_DEVICE = 1.01
MEMORY = 0.75
