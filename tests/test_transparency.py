"""The headline test: a parallel module trains exactly as the plain one.

In float64, so that rounding is the only difference: a batch cut in another way is summed in
another order. The tolerance is relative to the largest value of each tensor.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import evener
from evener.pickling import STATE_NAME
from evener.policies import Policies
from evener.shares import Choice, share_out
from evener.textbook.resnet import ResNet18

#: A step of these models in float64 sums some thousand terms; 1e-16 each, in another order.
TOLERANCE = 1e-12

Loss = Callable[[Any, Tensor], Tensor]


def cross_entropy(outputs: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, target)


class Task(NamedTuple):
    """A model, a loss, and what makes inputs and targets for a batch size."""

    model: nn.Module
    inputs: Callable[[int], tuple[Any, ...]]
    loss: Loss = cross_entropy


def classes(batch: int) -> Tensor:
    return torch.randint(0, 5, (batch,))


# ------------------------------------------------------------------ the models


def mlp() -> Task:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
    return Task(model, lambda batch: (torch.randn(batch, 6),))


def resnet() -> Task:
    model = ResNet18(width=4, num_classes=5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            # Batch norm uses each device's own share for now; without it all else must be equal.
            module.eval()
            module.train = lambda mode=True: None  # type: ignore[assignment, method-assign, misc]
    return Task(model, lambda batch: (torch.randn(batch, 1, 12, 12),))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 7, num_layers=2, batch_first=True)
        self.out = nn.Linear(7, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(words))[0])


def lstm() -> Task:
    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(outputs[:, -1], target) + outputs.square().sum() * 1e-3

    return Task(Recurrent(), lambda batch: (torch.randint(0, 11, (batch, 4)),), loss)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.encoder(self.embed(words)).mean(1))


def encoder() -> Task:
    return Task(Encoder(), lambda batch: (torch.randint(0, 11, (batch, 4)),))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(13, 6, mode="mean")
        self.out = nn.Linear(6, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.bag(words))


def embedding_bag() -> Task:
    return Task(Bag(), lambda batch: (torch.randint(0, 13, (batch, 3)),))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 5)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embed(words).mean(1))))


def tied_weights() -> Task:
    return Task(Tied(), lambda batch: (torch.randint(0, 5, (batch, 4)),))


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor  # a 0-dim mean over the batch
    name: str = "answer"


class Rich(nn.Module):
    """A dict in, a dataclass inside a dict out, and the loss computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 9)
        self.two = nn.Linear(9, 5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: dict[str, Tensor], *, scale: float = 1.0) -> dict[str, Any]:
        self.steps += 1
        hidden = torch.relu(self.one(batch["x"]))
        logits = self.two(hidden) * scale
        penalty = hidden.square().mean()
        return {"hidden": hidden, "answer": Answer(logits, penalty), "count": 3, "none": None}


def dict_and_dataclass() -> Task:
    def loss(outputs: dict[str, Any], target: Tensor) -> Tensor:
        answer = outputs["answer"]

        assert (answer.name, outputs["count"], outputs["none"]) == ("answer", 3, None)
        return functional.cross_entropy(answer.logits, target) + 0.5 * answer.loss

    return Task(Rich(), lambda batch: ({"x": torch.randn(batch, 6)},), loss)


class CausalLM(nn.Module):
    """Returns the mean over the tokens that are not padding, and its total for accumulation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 11)

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        inputs, targets = words[:, :-1], words[:, 1:]
        hidden = self.embed(inputs)
        future = torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool).triu(1)
        hidden = hidden + self.attend(hidden, hidden, hidden, attn_mask=future)[0]
        losses = functional.cross_entropy(
            self.out(hidden).transpose(1, 2), targets, ignore_index=0, reduction="none"
        )
        total, weight = losses.sum(), (targets != 0).sum()
        return {
            "loss": evener.Mean(total, weight),
            "total": evener.Sum(total),
            "num_tokens": evener.Sum(weight),
        }


def texts(batch: int) -> Tensor:
    """Very uneven: every fourth text has 9 words, the others two or three; 0 is padding."""
    words = torch.randint(1, 11, (batch, 9))
    for i, text in enumerate(words):
        text[9 if i % 4 == 0 else 2 + i % 2 :] = 0
    return words


def causal_lm() -> Task:
    def loss(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
        assert outputs["num_tokens"].dtype is torch.int64
        return outputs["loss"] + 0.01 * outputs["total"]

    return Task(CausalLM(), lambda batch: (texts(batch),), loss)


TASKS = [mlp, resnet, lstm, encoder, embedding_bag, tied_weights, dict_and_dataclass, causal_lm]
#: Devices and shares: more devices than cores, very unequal shares, shares of zero anywhere.
TEAMS: list[tuple[str, Any]] = [
    ("cpu*1", "even"),
    ("cpu*2", "even"),
    ("cpu*2", (5, 1)),
    ("cpu*2", (0, 1)),
    ("cpu*2", (1, 0)),
    ("cpu*3", (1, 0, 2)),
    ("cpu*4", (1, 3, 2, 5)),
    ("cpu*3", "wild"),
]
#: Odd ones, fewer samples than devices, none, and one that changes from step to step.
BATCHES = (9, 2, 1, 7, 0, 33)


class Wild:
    """Shares such as no measurement would give, others in each call; all or nothing among them."""

    num_observed = 1

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self.draw = random.Random(0)  # noqa: S311 - a simulation
        self.num_learned = 0

    def choose(self, batch: int) -> Choice:
        weights = [self.draw.choice([0, 0, 1, 1, 20]) for _ in range(self.num_devices)]
        if not any(weights):
            weights[self.draw.randrange(self.num_devices)] = 1
        return Choice(share_out(batch, weights), measured=self.draw.random() < 0.5)

    guess = choose

    def limit(self, caps: Any) -> None:
        assert all(cap > 0 for cap in caps)  # nobody is missing

    def observe(self, shares: Any, busy_s: Any, lags_s: Any, lasted_s: float) -> None:
        assert all(busy > 0 for share, busy in zip(shares, busy_s, strict=True) if share)
        assert all(lag >= 0 for lag in lags_s)
        assert lasted_s >= max(busy_s)
        self.num_learned += 1


class Models(nn.Module):
    """The models of all tasks, so that a team starts once for all of them."""

    def __init__(self) -> None:
        super().__init__()
        made = {task.__name__: task() for task in TASKS}
        self.of = nn.ModuleDict({name: task.model for name, task in made.items()})

    def forward(self, name: str, *inputs: Any) -> Any:
        return self.of[name](*inputs)


@pytest.fixture(scope="module", params=TEAMS, ids=str)
def models(request: pytest.FixtureRequest) -> Iterator[tuple[Models, Models, Wild | None]]:
    """All models on a team, the same ones plain, and what decides the shares if it is wild."""
    torch.manual_seed(0)
    plain = Models().double()
    parallel = copy.deepcopy(plain)
    devices, shares = request.param
    evener.parallelize(parallel, devices, shares="auto" if shares == "wild" else shares)
    with torch.no_grad():  # the helpers start before the first test looks what there is
        parallel("mlp", torch.zeros(9, 6, dtype=torch.float64))
    wild = None
    if shares == "wild":
        way = vars(parallel)[STATE_NAME].way
        wild = Wild(len(way._devices))
        way._policies = Policies(way._devices, wild, wild)  # type: ignore[arg-type]
    yield parallel, plain, wild
    evener.release(parallel)
    assert_same_state(parallel, plain)


# ------------------------------------------------------------------ what is compared


def assert_close(actual: Any, expected: Any, what: str) -> None:
    if not isinstance(expected, Tensor):
        assert type(actual) is type(expected), what
        assert actual == expected, what
        return
    assert isinstance(actual, Tensor), what
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    if not expected.is_floating_point():
        assert torch.equal(actual, expected), what
        return
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual.detach(),
        expected.detach(),
        rtol=0,
        atol=TOLERANCE * scale,
        equal_nan=True,
        msg=what,
    )


def assert_same_outputs(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert type(actual) is type(expected)
        assert list(actual) == list(expected)
        for key in expected:
            assert_same_outputs(actual[key], expected[key])
    elif isinstance(expected, Answer):
        assert type(actual) is Answer
        assert_same_outputs(vars(actual), vars(expected))
    else:
        assert_close(actual, expected, "outputs")


def assert_same_state(actual: nn.Module, expected: nn.Module) -> None:
    assert list(actual.state_dict()) == list(expected.state_dict())
    for (name, one), other in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert_close(one, other, name)
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert_close(one.grad, other.grad, f"gradient of {name}")
    for (name, one), other in zip(actual.named_buffers(), expected.buffers(), strict=True):
        assert_close(one, other, name)


@pytest.mark.parametrize("task", TASKS)
def test_training_is_that_of_one_device(
    task: Callable[[], Task], models: tuple[Models, Models, Wild | None]
) -> None:
    name = task.__name__
    _, inputs_for, loss_of = task()
    *both, wild = models
    parallel, plain = (each.of[name] for each in both)
    optimizers = [
        torch.optim.SGD(each.of[name].parameters(), lr=0.1, momentum=0.9) for each in both
    ]
    for batch in BATCHES:
        inputs, target = inputs_for(batch), classes(batch)
        inputs = _double(inputs)
        for each, optimizer in zip(both, optimizers, strict=True):
            optimizer.zero_grad()
            outputs = each(name, *inputs)
            loss = loss_of(outputs, target)
            loss.backward()
            if batch:  # a mean over no samples is not a number
                optimizer.step()
            if each is both[0]:
                parallel_outputs, parallel_loss = outputs, loss

        assert_same_outputs(parallel_outputs, outputs)
        assert_close(parallel_loss, loss, "loss")
        assert_same_state(parallel, plain)
        if not batch:
            for each in both:
                each.zero_grad()
    for each in both:
        each.eval()
    inputs = _double(inputs_for(5))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same_outputs(*(each(name, *inputs) for each in both))
    for each in both:
        each.train()
    assert wild is None or wild.num_learned > 1


@pytest.mark.parametrize("shares", ["even", (1, 5), (3, 0, 1), (1, 3, 2, 5)], ids=str)
def test_gradient_accumulation_over_tokens_is_that_of_one_batch(shares: Any) -> None:
    """Three micro-batches of very uneven texts are one batch, as it is on one device."""
    plain = CausalLM().double()
    model = copy.deepcopy(plain)
    evener.parallelize(model, f"cpu*{2 if shares == 'even' else len(shares)}", shares=shares)
    words = texts(15)
    micro = words[:7], words[7:8], words[8:]
    num_tokens = int((words[:, 1:] != 0).sum())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]

    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain(words)["loss"].backward()
        losses = []
        for part in micro:
            losses.append(model(part)["total"] / num_tokens)
            losses[-1].backward()
        assert_close(torch.stack(losses).sum(), plain(words)["loss"], "loss")
        assert_same_state(model, plain)
        for optimizer in optimizers:
            optimizer.step()
    evener.release(model)


def test_a_plain_mean_over_tokens_is_joined_by_samples_and_is_another() -> None:
    """What the guide warns of, and what evener.Mean is for."""

    class Plain(CausalLM):
        def forward(self, words: Tensor) -> Any:
            outputs = super().forward(words)
            return outputs["loss"].total / outputs["loss"].weight  # type: ignore[attr-defined]

    plain = Plain().double()
    model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares=(1, 3))
    words = texts(8)

    found, expected = model(words), plain(words)

    assert_close(found, plain(words[:2]) * 2 / 8 + plain(words[2:]) * 6 / 8, "joined by samples")
    assert abs(float((found - expected).detach())) > 1e-3
    evener.release(model)


def test_optimizers_that_were_made_before_stay_valid() -> None:
    model, inputs_for, loss_of = mlp()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    evener.parallelize(model, "cpu*2", shares=(2, 1))
    inputs, target = inputs_for(6), classes(6)
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        loss_of(each(*inputs), target).backward()
        optimizer.step()
    evener.release(model)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def _double(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        {name: value.double() for name, value in item.items()}
        if isinstance(item, dict)
        else item.double()
        if item.is_floating_point()
        else item
        for item in inputs
    )


def test_batch_norm_of_one_device_counts_its_own_share_and_says_so() -> None:
    """Each device normalises by its own share until batch norm is exact."""
    model = nn.BatchNorm1d(3)
    evener.parallelize(model, "cpu*2", shares=(3, 1))
    x = torch.randn(8, 3)

    outputs = model(x)

    expected = torch.cat(
        [functional.batch_norm(part, None, None, training=True) for part in (x[:6], x[6:])]
    )
    torch.testing.assert_close(outputs, expected)
    # The running statistics are the first device's.
    torch.testing.assert_close(model.running_mean, 0.1 * x[:6].mean(0))
    assert int(model.num_batches_tracked) == 1
    evener.release(model)


def test_ordered_dicts_keep_their_type() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
            return OrderedDict(b=x + 1, a=x * 2)

    model = evener.parallelize(Named(), "cpu*2")
    x = torch.arange(5.0)

    outputs = model(x)

    assert type(outputs) is OrderedDict
    assert list(outputs) == ["b", "a"]
    assert torch.equal(outputs["b"], x + 1)
    evener.release(model)
