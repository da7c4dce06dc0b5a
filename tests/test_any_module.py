"""Any module: what models are made of, each compared with the plain module in float64.

All of them are parts of one parallel module, whose helpers so start once; which part a call uses
is told by a string among the inputs.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import evener
from evener.piece import current_flags
from evener.trees import flatten

SHARES = (3, 1, 2)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Lists(nn.Module):
    """Parameters in lists and dicts, used by number and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(3)])
        self.named = nn.ParameterDict({"scale": torch.ones(4), "shift": torch.zeros(4)})
        self.layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        assert len(self.weights) == 3  # empty in replicas of nn.DataParallel, once
        assert len(list(self.parameters())) == 9
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        for layer in self.layers.values():
            x = layer(x)
        return x * self.named["scale"] + self.named["shift"]


class Strange(nn.Module):
    """Parameters of other forms: transposed, complex, 0-dim, a buffer that wants a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(3, 4).t())
        self.strided = nn.Parameter(torch.randn(8)[::2])
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("offset", torch.randn(3, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        y = (x + self.strided) @ self.transposed * self.scalar + self.offset + self.frozen
        return (y * self.complex).abs() + 1


class Counting(nn.Module):
    """Buffers and attributes that the forward changes, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("num_calls", torch.tensor(0))
        self.register_buffer("average", torch.zeros(3))
        self.calls: list[int] = []
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        with torch.no_grad():
            self.average.lerp_(self.linear.bias, 0.1)
        self.calls.append(int(self.num_calls))
        return self.linear(x) / self.temperature


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.group = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.group(self.conv(x)).mean((2, 3))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.embed(words).sum(1)


Named = namedtuple("Named", "scores, extra")  # noqa: PYI024


@dataclass
class Record:
    scores: Tensor
    loss: Tensor | None
    name: str


class Output(OrderedDict):  # type: ignore[type-arg]
    """As transformers' outputs are: a dict whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Shapes(nn.Module):
    """Outputs of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, *, kind: str, more: Any = None) -> Any:
        y = self.linear(x)
        if more is not None:
            y = y * more["scale"] + more["pair"][0]
        made: dict[str, Any] = {
            "tuple": (y, [y * 2, {"a": None}], "text", 3, 0.5),
            "named": Named(y, (None, y + 1)),
            "record": Record(y, y.square().mean(), "record"),
            "dict": Output(scores=y, name="dict"),
            "none": None,
            "flags": (y, str(current_flags()), torch.is_grad_enabled()),
        }
        return made[kind]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 5, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # "RNN module weights are not part of single contiguous chunk of memory"
            warnings.simplefilter("error")
            return self.gru(x)[0][:, -1]


class Packed(nn.Module):
    """Takes and gives packed sequences; states have the batch in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2)

    def forward(self, x: PackedSequence) -> tuple[PackedSequence, Tensor]:
        packed, (hidden, _) = self.lstm(x)
        return packed, hidden.transpose(0, 1)


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        symmetric = nn.Linear(4, 4)
        parametrize.register_parametrization(symmetric, "weight", Symmetric())
        self.parts = nn.ModuleDict(
            {
                "weight norm": parametrizations.weight_norm(nn.Linear(4, 3)),
                "spectral norm": parametrizations.spectral_norm(nn.Linear(4, 3)),
                "orthogonal": parametrizations.orthogonal(nn.Linear(4, 4)),
                "parametrized": symmetric,
                "lists": Lists(),
                "strange": Strange(),
                "counting": Counting(),
                "convolutional": Convolutional(),
                "sparse": Sparse(),
                "shapes": Shapes(),
                "recurrent": Recurrent(),
                "packed": Packed(),
            }
        )

    def forward(self, part: str, *args: Any, **kwargs: Any) -> Any:
        return self.parts[part](*args, **kwargs)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Zoo, Zoo]]:
    """A plain and a parallel zoo; the helpers are there for all tests of this file."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    plain = Zoo()
    torch.set_default_dtype(torch.float32)
    parallel = evener.parallelize(copy.deepcopy(plain), "cpu*3", shares=SHARES)
    parallel("lists", torch.randn(6, 4, dtype=torch.float64))
    yield plain, parallel
    evener.release(parallel)


def inputs(part: str, batch: int) -> Tensor:
    if part == "sparse":
        return torch.randint(0, 9, (batch, 5))
    if part == "convolutional":
        image = torch.randn(batch, 3, 6, 6, dtype=torch.float64)
        return image.to(memory_format=torch.channels_last)
    if part == "recurrent":
        return torch.randn(batch, 7, 4, dtype=torch.float64)
    return torch.randn(batch, 4, dtype=torch.float64)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    found = {name: tensor.grad for name, tensor in named if tensor.grad is not None}
    return {name: g.to_dense() if g.is_sparse else g for name, g in found.items()}


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    """Gradients and buffers are the same."""
    ours, theirs = gradients(one), gradients(other)
    assert ours.keys() == theirs.keys()
    assert theirs
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-11, atol=1e-13, msg=name)
    for (name, buffer), (_, expected) in zip(
        one.named_buffers(), other.named_buffers(), strict=True
    ):
        torch.testing.assert_close(buffer, expected, rtol=1e-12, atol=1e-14, msg=name)


def step(pair: tuple[Zoo, Zoo], part: str, *args: Any, **kwargs: Any) -> list[Any]:
    """Outputs of both, after a backward of both."""
    results = []
    for zoo in pair:
        zoo.zero_grad()
        for buffer in zoo.buffers():
            buffer.grad = None
        results.append(zoo(part, *args, **kwargs))
        sum(
            leaf.abs().square().sum()
            for leaf in flatten(results[-1])[0]
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ).backward()
    assert_alike(pair[1], pair[0])
    return results


PARTS = [part for part in Zoo().parts if part not in ("shapes", "packed")]


@pytest.mark.parametrize("part", PARTS)
def test_a_step_is_that_of_the_plain_module(pair: tuple[Zoo, Zoo], part: str) -> None:
    for batch in (7, 2, 1):
        one, other = step(pair, part, inputs(part, batch))
        torch.testing.assert_close(other, one, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", ["tuple", "named", "record", "dict", "flags"])
def test_outputs_come_as_they_are(pair: tuple[Zoo, Zoo], kind: str) -> None:
    x = inputs("shapes", 5)
    more = {"scale": 2.0, "pair": (torch.ones(5, 1, dtype=torch.float64), None)}

    one, other = step(pair, "shapes", x, kind=kind, more=more)

    assert type(other) is type(one)
    leaves, structure = flatten(one)
    ours, our_structure = flatten(other)
    assert our_structure == structure
    for leaf, expected in zip(ours, leaves, strict=True):
        if isinstance(expected, Tensor):
            torch.testing.assert_close(leaf, expected, rtol=1e-11, atol=1e-13)
        else:
            assert type(leaf) is type(expected)
            assert leaf == expected


@pytest.mark.parametrize(
    "lengths", [[5, 4, 4, 2, 1, 1], [1, 7, 2, 3, 3, 1], [3], [3, 3], [4000, 3, 3, 3, 3, 2000]]
)
def test_packed_sequences(pair: tuple[Zoo, Zoo], lengths: list[int]) -> None:
    is_sorted = sorted(lengths, reverse=True) == lengths
    grads = []
    for zoo in pair:
        torch.manual_seed(1)
        steps = [torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in lengths]
        x = pack_sequence(steps, enforce_sorted=is_sorted)
        packed, hidden = zoo("packed", x)
        assert isinstance(packed, PackedSequence)
        zoo.zero_grad()
        (packed.data.square().sum() + hidden.sum()).backward()
        grads.append((packed, hidden, [step.grad for step in steps]))
    torch.testing.assert_close(grads[1][1:], grads[0][1:], rtol=1e-10, atol=1e-12)
    for one, other in zip(grads[1][0], grads[0][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert_alike(pair[1], pair[0])


def test_no_output_at_all(pair: tuple[Zoo, Zoo]) -> None:
    assert pair[1]("shapes", inputs("shapes", 5), kind="none") is None


def test_inputs_of_other_forms(pair: tuple[Zoo, Zoo]) -> None:
    base = torch.randn(4, 12, dtype=torch.float64)
    for x in (
        base[:, ::3],
        base[:, :6].T,
        base[:1, :4].expand(6, 4),
        base.view(4, 3, 4).permute(1, 0, 2).select(1, 2),
        torch.randn(0, 4, dtype=torch.float64),
    ):
        y = x if x.shape[1] == 4 else x[:, :4]
        one, other = step(pair, "lists", y)
        torch.testing.assert_close(other, one, rtol=1e-11, atol=1e-13)


def test_inputs_that_want_gradients(pair: tuple[Zoo, Zoo]) -> None:
    grads = []
    for zoo in pair:
        torch.manual_seed(3)
        leaf = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
        shared = torch.randn(4, dtype=torch.float64, requires_grad=True)
        zoo("lists", leaf.T.contiguous().T * shared).square().sum().backward()
        grads.append((leaf.grad, shared.grad))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-11, atol=1e-13)


# ------------------------------------------------------------------ what the user changes


def test_what_changes_between_calls_is_followed(pair: tuple[Zoo, Zoo]) -> None:
    x = inputs("counting", 6)

    def both(change: Callable[[Any], Any]) -> None:
        for zoo in pair:
            change(zoo)
        step(pair, "counting", x)

    for temperature in (0.5, 0.25):
        both(lambda zoo, t=temperature: setattr(zoo.parts["counting"], "temperature", t))
    both(lambda zoo: zoo.parts["counting"].linear.bias.requires_grad_(False))
    both(lambda zoo: zoo.parts["counting"].linear.requires_grad_(True))
    both(lambda zoo: zoo.parts["counting"].average.fill_(3))
    both(lambda zoo: zoo.eval())
    both(lambda zoo: zoo.train())
    state = {name: value * 0.5 for name, value in pair[0].state_dict().items()}
    both(lambda zoo: zoo.load_state_dict(state))
    both(lambda zoo: zoo.to("cpu"))
    torch.manual_seed(5)
    layer = nn.Linear(4, 3).double()
    both(lambda zoo: setattr(zoo.parts["counting"], "linear", copy.deepcopy(layer)))
    both(lambda zoo: parametrizations.weight_norm(zoo.parts["counting"].linear))
    both(lambda zoo: parametrize.remove_parametrizations(zoo.parts["counting"].linear, "weight"))
    assert pair[1].parts["counting"].calls == pair[0].parts["counting"].calls


def test_another_dtype_and_back(pair: tuple[Zoo, Zoo]) -> None:
    plain, parallel = pair
    x = inputs("lists", 6)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            parallel.parts["lists"].to(dtype)
            out = parallel("lists", x.to(dtype))
            assert out.dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 0.1
            expected = plain("lists", x)
            torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
            out.sum().backward()
            assert parallel.parts["lists"].weights[0].grad.dtype == dtype
    finally:
        parallel.zero_grad()
        parallel.parts["lists"].double()
        parallel.load_state_dict(plain.state_dict())


# ------------------------------------------------------------------ the settings of the program


def test_a_gradient_scaler(pair: tuple[Zoo, Zoo]) -> None:
    x = inputs("lists", 6)
    states = []
    for zoo in pair:
        part = zoo.parts["lists"]
        before = copy.deepcopy(part.state_dict())
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, float("inf"), 1.0):  # a step with overflow is left out
            optimizer.zero_grad()
            scaler.scale(zoo("lists", x).square().sum() * factor).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(part.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        states.append((scaler.get_scale(), copy.deepcopy(part.state_dict())))
        part.load_state_dict(before)
    torch.testing.assert_close(states[1], states[0], rtol=1e-11, atol=1e-13)


def test_autocast(pair: tuple[Zoo, Zoo]) -> None:
    x = inputs("lists", 6).float()
    try:
        for zoo in pair:
            zoo.parts["lists"].float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            one, other = (zoo("lists", x) for zoo in pair)
        assert one.dtype == other.dtype
        torch.testing.assert_close(other, one, rtol=0.05, atol=0.05)
    finally:
        for zoo in pair:
            zoo.parts["lists"].double()


def test_flags_hold_in_the_helpers(pair: tuple[Zoo, Zoo]) -> None:
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        with torch.no_grad():
            _, flags, grad = pair[1]("shapes", inputs("shapes", 6), kind="flags")
        assert flags == str(current_flags())  # all devices agree, or it would be an error
        assert not grad
    finally:
        torch.use_deterministic_algorithms(mode=False)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomalies_are_found_on_every_device(
    pair: tuple[Zoo, Zoo], capfd: pytest.CaptureFixture[str]
) -> None:
    x = inputs("strange", 6)
    x[5] = float("inf")  # a sample of the last device's
    with torch.autograd.detect_anomaly():
        pair[1]("strange", x[:5]).sum().backward()
        with pytest.raises(RuntimeError, match="returned nan values"):
            pair[1]("strange", x).sum().backward()
    pair[1].zero_grad()
    assert "Traceback of forward call that caused the error" in capfd.readouterr().err


def test_a_profile_shows_the_first_device_and_the_time_spent_for_the_others(
    pair: tuple[Zoo, Zoo],
) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pair[1]("lists", inputs("lists", 6)).sum().backward()
    names = {event.key for event in profile.key_averages()}

    assert "aten::tanh" in names
    assert {"evener: forward", "evener: backward", "evener: waiting"} <= names


# ------------------------------------------------------------------ modules beside each other


class Encoder(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared
        self.own = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(torch.tanh(self.shared(x)))


def test_two_parallel_modules_that_share_a_layer() -> None:
    """The shared layer's parameters can lie in one team's memory only: they move when needed."""
    torch.manual_seed(0)
    shared = nn.Linear(4, 3, dtype=torch.float64)
    plain = [Encoder(shared), Encoder(shared)]
    expected = copy.deepcopy(plain)
    optimizers = [
        torch.optim.SGD([*one.parameters(), *other.own.parameters()], lr=0.1)
        for one, other in (plain, expected)
    ]
    for one in plain:
        evener.parallelize(one, "cpu*2", shares="even")
    x = torch.randn(5, 4, dtype=torch.float64)
    for _ in range(3):
        for (one, other), optimizer in zip((plain, expected), optimizers, strict=True):
            optimizer.zero_grad()
            # A graph of the first is still open when the second moves the shared parameters.
            (one(x).square().sum() + other(x.flip(0)).sum() + one(x * 2).sum()).backward()
            optimizer.step()
    for one, other in zip(plain, expected, strict=True):
        for (name, tensor), value in zip(
            one.state_dict().items(), other.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(tensor, value, rtol=1e-11, atol=1e-13, msg=name)
        evener.release(one)
