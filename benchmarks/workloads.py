"""The five workloads: model, synthetic batches, loss and learning rate of each.

They are chosen to be hard in different ways: `smallmlp` has almost nothing to share out, `mlp`
has many weights for little work, `resnet` has convolutions and batch norm, `lstm` a long chain
of small steps and a large output, `encoder` is the friendly case. (`dropout` is that one with
dropout, for who compares bits and not contenders.)

Inputs are noise and labels are random: speed does not depend on what is learned. There are
several distinct batches, so that no contender profits from data that stays in its cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]

NUM_BATCHES = 16
SEED = 1


@dataclass(frozen=True)
class Workload:
    """What one workload trains.

    Attributes:
        make_model: builds the model from torch's global seed.
        make_batch: `(generator) -> (inputs, targets)` with the batch as the first dimension.
        lr: learning rate; so small that thousands of steps on the few batches do not end at a
            loss of zero, where gradients become denormal numbers, which are slow.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]
    lr: float


class Perceptron(nn.Sequential):
    """Linear layers with ReLU between them."""

    def __init__(self, *widths: int) -> None:
        layers: list[nn.Module] = []
        for num_in, num_out in pairwise(widths):
            layers += [nn.Linear(num_in, num_out), nn.ReLU()]
        super().__init__(*layers[:-1])


class LanguageModel(nn.Module):
    """A recurrent language model: tokens `(batch, steps)` to `(batch, steps, num_tokens)`."""

    def __init__(self, num_tokens: int, width: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        self.lstm = nn.LSTM(width, hidden, num_layers, batch_first=True)
        self.head = nn.Linear(hidden, num_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        scores: Tensor = self.head(hidden)
        return scores


class Encoder(nn.Module):
    """A transformer encoder: tokens `(batch, steps)` to `(batch, num_tokens)`.

    As a rule without dropout: its random numbers would differ with the number of processes, and
    then the contenders' losses could not be compared.
    """

    def __init__(self, num_tokens: int, width: int, num_layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=dropout, batch_first=True
        )
        # Nested tensors speed up padded inference only, and warn when they cannot be used.
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embedding(tokens)).mean(dim=1))
        return scores


class WithLoss(nn.Module):
    """A model whose forward takes the targets as well and returns the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.model(inputs), targets)


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean over all targets, of which there may be one or several a sample."""
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def summed_cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """The sum over all targets, for those who divide later."""
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum")


def make_batches(workload: Workload, rank: int = 0, num_ranks: int = 1) -> list[Batch]:
    """The batches, or one rank's equal part of each of them, the same in every process."""
    generator = torch.Generator().manual_seed(SEED)
    return [
        (inputs.chunk(num_ranks)[rank].clone(), targets.chunk(num_ranks)[rank].clone())
        for inputs, targets in (workload.make_batch(generator) for _ in range(NUM_BATCHES))
    ]


def make_model(workload: Workload) -> nn.Module:
    """The model with the same initial weights in every process."""
    torch.manual_seed(SEED)
    return workload.make_model()


def digest(model: nn.Module) -> str:
    """Tells two trained models apart if they differ in one bit of a parameter or buffer."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def _resnet() -> nn.Module:
    # Imported late: the other workloads measure the peers without a line of evener.
    from evener.textbook.resnet import ResNet18  # noqa: PLC0415

    return ResNet18(width=16)


def _noise(*shape: int, num_classes: int) -> Callable[[torch.Generator], Batch]:
    def make_batch(generator: torch.Generator) -> Batch:
        inputs = torch.randn(shape, generator=generator)
        return inputs, torch.randint(num_classes, shape[:1], generator=generator)

    return make_batch


def _tokens(
    *shape: int, num_tokens: int, target_shape: tuple[int, ...]
) -> Callable[[torch.Generator], Batch]:
    def make_batch(generator: torch.Generator) -> Batch:
        inputs = torch.randint(num_tokens, shape, generator=generator)
        return inputs, torch.randint(num_tokens, target_shape, generator=generator)

    return make_batch


WORKLOADS = {
    "smallmlp": Workload(
        make_model=lambda: Perceptron(784, 256, 256, 10),
        make_batch=_noise(256, 784, num_classes=10),
        lr=0.001,
    ),
    "mlp": Workload(
        make_model=lambda: Perceptron(784, 2048, 2048, 2048, 10),
        make_batch=_noise(256, 784, num_classes=10),
        lr=0.001,
    ),
    "resnet": Workload(
        make_model=_resnet,
        make_batch=_noise(128, 1, 28, 28, num_classes=10),
        lr=0.01,
    ),
    "lstm": Workload(
        make_model=lambda: LanguageModel(5000, 128, 256, num_layers=2),
        make_batch=_tokens(64, 32, num_tokens=5000, target_shape=(64, 32)),
        lr=0.1,
    ),
    "encoder": Workload(
        make_model=lambda: Encoder(1000, 128, num_layers=4),
        make_batch=_tokens(64, 32, num_tokens=1000, target_shape=(64,)),
        lr=0.01,
    ),
    "dropout": Workload(
        make_model=lambda: Encoder(1000, 128, num_layers=4, dropout=0.1),
        make_batch=_tokens(64, 32, num_tokens=1000, target_shape=(64,)),
        lr=0.01,
    ),
}
