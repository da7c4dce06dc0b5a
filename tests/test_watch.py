"""Watch: every change of the user's is noticed and followed; what is no change is not."""

from __future__ import annotations

import enum
import pickle
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evener.replica import from_bytes, shared_tensors, to_bytes
from evener.update import Update
from evener.watch import Watch


class Mode(enum.Enum):
    ADD = 1
    MULTIPLY = 2


class Naive:
    """One that compares as people often write it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __eq__(self, other: object) -> bool:
        return bool(self.size == other.size)  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.rate = 0.5
        self.flag: Any = None
        self.register_buffer("large", torch.zeros(200, 200))  # more than is sent each time

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.rate


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.inner = Inner()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.count = 1
        self.mode = Mode.ADD
        self.items = [1, 2]
        self.table: dict[str, Any] = {"a": 1, "b": [1]}
        self.names = {"x", "y"}
        self.pair = (1, 2)
        self.tensor = torch.zeros(2)
        self.array = np.zeros(2)
        self.naive: Any = None
        inner = SimpleNamespace(rate=0.5)
        self.config = SimpleNamespace(rate=0.1, layers=[4, 4], inner=inner)
        self.nested = ([1], torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x))


class Follower:
    """A replica that is kept equal through a watch, as in a helper."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.shared = shared_tensors(module)
        self.watch = Watch(module, self.shared)
        self._theirs = [nn.Parameter(t.detach(), requires_grad=False) for t in self.shared]
        for their, tensor in zip(self._theirs, self.shared, strict=True):
            their.requires_grad_(tensor.requires_grad)
        self.replica: nn.Module = from_bytes(to_bytes(module, self.shared), self._theirs)

    def follow(self) -> Update:
        assert not self.watch.is_stale()
        update = self.watch.update()
        # The mirror puts them into the arena; here the places are just numbers.
        told = {n: self.watch.buffers[n].clone() for n in self.watch.new_buffers}
        update.buffers = {n: n for n in told}  # type: ignore[misc]
        arrived: Update = pickle.loads(pickle.dumps(update))
        arrived.apply(list(self.replica.modules()), self._theirs, told.__getitem__)  # type: ignore[arg-type]
        return update


@pytest.fixture
def module() -> Outer:
    return Outer()


@pytest.fixture
def follower(module: Outer) -> Follower:
    """In evaluation, and in step: nothing is sent that has not changed."""
    module.eval()
    made = Follower(module)
    made.follow()
    return made


INTERNAL = frozenset(vars(nn.Module())) - {"training"}


def attributes(module: nn.Module) -> list[dict[str, str]]:
    """The plain attributes of all submodules, as they print, with their types."""

    def shown(value: Any) -> str:
        return f"{type(value)} {sorted(value) if isinstance(value, set) else value}"

    return [
        {name: shown(value) for name, value in vars(each).items() if name not in INTERNAL}
        for each in module.modules()
    ]


def assert_in_step(follower: Follower) -> None:
    module, replica = follower.module, follower.replica

    assert attributes(replica) == attributes(module)
    for (name, one), other in zip(replica.named_buffers(), module.buffers(), strict=True):
        assert torch.equal(one, other), name
    for (name, one), other in zip(replica.named_parameters(), module.parameters(), strict=True):
        assert one.requires_grad == other.requires_grad, name
        assert torch.equal(one, other), name


# ------------------------------------------------------------------ silence


def test_where_nothing_changed_nothing_is_told(follower: Follower) -> None:
    assert not follower.watch.is_stale()
    assert not follower.follow()
    assert not follower.follow()


def test_a_model_in_training_without_buffers_is_silent_too() -> None:
    follower = Follower(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))

    assert not follower.follow()
    assert not follower.follow()


@pytest.mark.parametrize("training", [False, True])
def test_what_a_forward_and_a_training_step_change_is_no_change(
    module: Outer,
    training: bool,
) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.calls = 0
            self.seen: list[int] = []
            self.cache: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(len(x))
            self.cache[self.calls] = x
            self.last = x
            self.recent = [x]
            return self.linear(x)

    module = Counting().train(training)
    follower = Follower(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    for _ in range(3):
        assert not follower.follow()
        module(torch.ones(4, 3)).sum().backward()
        follower.watch.accept()
        optimizer.step()
        optimizer.zero_grad()
    assert not follower.watch.is_stale()
    assert not follower.follow()


def test_a_change_after_a_forward_is_noticed_although_the_forward_changed_the_same() -> None:
    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.recent = [len(x)]
            return x

    module = Counting()
    follower = Follower(module)
    module(torch.ones(4))
    follower.replica(torch.ones(4))
    follower.watch.accept()
    module.recent.append(7)

    assert follower.follow()
    assert follower.replica.recent == [4, 7]


def test_reading_is_no_change(module: Outer, follower: Follower) -> None:
    module.state_dict()
    list(module.named_parameters())
    repr(module)
    module.requires_grad_(True)
    module.eval()
    module.float()

    assert not follower.watch.is_stale()
    assert not follower.follow()


# ------------------------------------------------------------------ attributes

CHANGES: dict[str, Callable[[Outer], Any]] = {
    # The mode of training.
    "train": lambda m: m.train(),
    "train of one layer": lambda m: m.inner.norm.train(),
    # Plain attributes.
    "set": lambda m: setattr(m, "count", 2),
    "set in a submodule": lambda m: setattr(m.inner, "rate", 0.25),
    "set to None": lambda m: setattr(m, "mode", None),
    "set to something": lambda m: setattr(m.inner, "flag", "on"),
    "set anew": lambda m: setattr(m, "fresh", 3),
    "set to an enum": lambda m: setattr(m, "mode", Mode.MULTIPLY),
    "set to an equal float": lambda m: setattr(m, "count", 1.0),
    "set to an equal bool": lambda m: setattr(m, "count", True),
    "set to a function": lambda m: setattr(m, "mode", torch.tanh),
    "set to a lambda": lambda m: setattr(m, "mode", lambda x: x + 1),
    "deleted": lambda m: delattr(m, "count"),
    "deleted in a submodule": lambda m: delattr(m.inner, "rate"),
    "renamed": lambda m: (delattr(m, "naive"), setattr(m, "other", None)),
    "renamed to another place": lambda m: (delattr(m.inner, "flag"), setattr(m.inner, "b", None)),
    "one deleted and one set": lambda m: (delattr(m, "count"), setattr(m, "c", 5)),
    "two swapped": lambda m: (setattr(m, "count", Mode.ADD), setattr(m, "mode", 1)),
    # Lists, dicts, sets.
    "list appended": lambda m: m.items.append(3),
    "list shortened": lambda m: m.items.pop(),
    "list emptied": lambda m: m.items.clear(),
    "list reversed": lambda m: m.items.reverse(),
    "list item set": lambda m: m.items.__setitem__(0, 5),
    "list item set to an equal float": lambda m: m.items.__setitem__(0, 1.0),
    "list replaced": lambda m: setattr(m, "items", [7]),
    "list replaced by an equal one of floats": lambda m: setattr(m, "items", [1.0, 2.0]),
    "list becomes a tuple": lambda m: setattr(m, "items", (1, 2)),
    "dict item set": lambda m: m.table.__setitem__("a", 2),
    "dict item set to an equal float": lambda m: m.table.__setitem__("a", 1.0),
    "dict replaced by an equal one of floats": lambda m: setattr(m, "table", {"a": 1.0, "b": [1]}),
    "tuple replaced by an equal one of floats": lambda m: setattr(m, "pair", (1.0, 2)),
    "dict item added": lambda m: m.table.__setitem__("c", None),
    "dict item removed": lambda m: m.table.pop("a"),
    "dict item replaced by a list": lambda m: m.table.__setitem__("b", [2]),
    "dict replaced": lambda m: setattr(m, "table", OrderedDict(a=1)),
    "list in a dict appended": lambda m: m.table["b"].append(2),
    "field of an object set": lambda m: setattr(m.config, "rate", 0.5),
    "field of an object's object set": lambda m: setattr(m.config.inner, "rate", 0.25),
    "list of an object appended": lambda m: m.config.layers.append(8),
    "list in a tuple set": lambda m: m.nested[0].__setitem__(0, 5),
    "tensor in a tuple filled": lambda m: m.nested[1].fill_(5),
    "set added": lambda m: m.names.add("z"),
    "set removed": lambda m: m.names.discard("x"),
    # Tensors and arrays that are neither parameters nor buffers.
    "tensor replaced": lambda m: setattr(m, "tensor", torch.ones(2)),
    "tensor of another form": lambda m: setattr(m, "tensor", torch.zeros(3, 3)),
    "tensor of another dtype": lambda m: setattr(m, "tensor", torch.zeros(1).double()),
    "array replaced": lambda m: setattr(m, "array", np.ones(2)),
    "tensor in a list": lambda m: m.items.append(torch.ones(2)),
    # Objects that compare in their own way.
    "naive": lambda m: setattr(m, "naive", Naive(3)),
    "forward of the instance": lambda m: setattr(m.inner, "forward", torch.tanh),
}


def printable(module: nn.Module) -> None:
    """Make functions and objects print alike in both processes."""
    for each in module.modules():
        for name, value in list(vars(each).items()):
            if isinstance(value, Naive):
                vars(each)[name] = f"Naive of {value.size}"
            elif callable(value) and name not in INTERNAL:
                vars(each)[name] = str(value(torch.tensor(0.5)))


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_and_followed(module: Outer, follower: Follower, change: str) -> None:
    CHANGES[change](module)

    update = follower.follow()
    again = follower.follow()

    assert update
    assert not again.attributes
    assert not again.removed
    printable(module)
    printable(follower.replica)
    assert_in_step(follower)


def test_each_step_of_an_annealing_is_followed(module: Outer, follower: Follower) -> None:
    for step in range(5):
        module.inner.rate = 1 / (step + 1)

        assert follower.follow()
        assert follower.replica.inner.rate == module.inner.rate
    assert not follower.follow()


def test_a_change_and_its_opposite(module: Outer, follower: Follower) -> None:
    for value in (2, 1, 2, 2, 1):
        module.count = value
        follower.follow()

        assert follower.replica.count == value
    module.count = 7
    module.count = 1
    assert not follower.follow()


def test_only_what_changed_is_told(module: Outer, follower: Follower) -> None:
    module.table["a"] = 2

    update = follower.follow()

    assert update.attributes is not None
    assert list(from_bytes(update.attributes, [])) == [(0, "table")]
    assert (update.removed, update.requires_grad, update.buffers) == ([], None, {})


def test_a_list_that_two_modules_share_is_shared_in_the_replica(module: Outer) -> None:
    module.inner.items = module.items
    follower = Follower(module.eval())
    module.items.append(5)

    follower.follow()

    assert follower.replica.items == [1, 2, 5]
    assert follower.replica.inner.items is follower.replica.items


def test_a_list_that_was_replaced_by_an_equal_one_is_watched_from_then_on(
    module: Outer, follower: Follower
) -> None:
    old = module.items
    module.items = list(old)
    follower.follow()
    old.append("not ours any more")
    follower.follow()
    assert follower.replica.items == [1, 2]
    module.items.append(3)
    follower.follow()

    assert follower.replica.items == [1, 2, 3]


def test_an_attribute_that_leads_to_a_parameter_leads_to_that_of_the_replica(
    module: Outer, follower: Follower
) -> None:
    module.items = [module.linear.weight]

    follower.follow()

    assert follower.replica.items[0] is follower.replica.linear.weight


# ------------------------------------------------------------------ parameters


def test_frozen_and_thawed_parameters_are_followed(module: Outer, follower: Follower) -> None:
    module.linear.weight.requires_grad_(False)
    update = follower.follow()
    assert update.requires_grad == [False, *[True] * 7]
    assert update.attributes is None
    assert_in_step(follower)

    module.requires_grad_(False)
    assert follower.follow()
    assert_in_step(follower)

    module.requires_grad_(True)
    assert follower.follow()
    assert not follower.follow()
    assert_in_step(follower)


def test_values_of_parameters_need_no_telling(module: Outer, follower: Follower) -> None:
    with torch.no_grad():
        module.linear.weight.fill_(3)

    assert not follower.follow()
    assert_in_step(follower)


# ------------------------------------------------------------------ buffers

BUFFER_CHANGES: dict[str, Callable[[Outer], Any]] = {
    "in place": lambda m: m.inner.norm.running_mean.add_(1),
    "in part": lambda m: m.inner.large[3:5].fill_(2),
    "in place through detach": lambda m: m.inner.large.detach().fill_(1),
    "reassigned": lambda m: setattr(m.inner.norm, "running_var", torch.full((3,), 4.0)),
    "reassigned to another memory with equal values": lambda m: setattr(
        m.inner, "large", m.inner.large.clone()
    ),
    "data replaced": lambda m: setattr(m.inner.large, "data", torch.ones(200, 200)),
    "loaded": lambda m: m.load_state_dict(
        {**Outer().state_dict(), "inner.large": torch.ones(200, 200)}
    ),
    "reset": lambda m: (m.inner.norm.running_mean.fill_(3), m.inner.norm.reset_running_stats()),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", BUFFER_CHANGES)
def test_a_change_of_a_buffer_is_noticed_and_followed(
    module: Outer, follower: Follower, change: str, mode: Callable[[], Any]
) -> None:
    with mode():
        BUFFER_CHANGES[change](module)

    update = follower.follow()

    assert update.buffers
    assert_in_step(follower)


def test_only_the_buffer_that_changed_is_told(module: Outer, follower: Follower) -> None:
    module.inner.large.add_(1)

    numbers = follower.follow().buffers

    assert [follower.watch.buffers[number] is module.inner.large for number in numbers] == [True]
    assert not follower.follow()


def test_two_buffers_of_a_form_that_were_swapped(module: Outer, follower: Follower) -> None:
    norm = module.inner.norm
    norm.running_mean, norm.running_var = norm.running_var, norm.running_mean

    assert len(follower.follow().buffers) == 2
    assert_in_step(follower)


def test_the_statistics_of_batch_norm_in_training_wait_until_a_replica_reads_them(
    module: Outer,
) -> None:
    """Batch norm changes them without counting, and those of the first device count."""
    follower = Follower(module.train())
    for _ in range(3):
        module(torch.randn(5, 3))
        follower.replica(torch.randn(4, 3))
        follower.watch.accept()
        assert not follower.follow()
    module.inner.norm.eval()

    assert len(follower.follow().buffers) == 3
    assert_in_step(follower)
    assert not follower.follow()


def test_the_statistics_are_told_at_once_to_a_replica_whose_own_become_the_users(
    module: Outer,
) -> None:
    follower = Follower(module.train())
    module(torch.randn(5, 3))

    follower.watch.update(everything=True)
    assert len(follower.watch.new_buffers) == 3
    assert not follower.watch.update()
    assert not follower.watch.new_buffers


def test_the_last_statistics_of_training_reach_the_evaluation(module: Outer) -> None:
    follower = Follower(module.train())
    follower.follow()
    module(torch.randn(5, 3))
    follower.replica(torch.randn(4, 3))
    follower.watch.accept()
    module.eval()

    follower.follow()
    assert_in_step(follower)
    assert not follower.follow()


class OwnNorm(nn.BatchNorm1d):
    """One that reads its statistics in training, which torch's own do not."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) - self.running_mean) / 2


@pytest.mark.parametrize("change", ["by a forward", "through data"])
def test_changes_that_torch_does_not_count_are_followed_in_training(
    module: Outer, change: str
) -> None:
    module.inner.norm = OwnNorm(3)
    follower = Follower(module.train())
    follower.follow()
    if change == "by a forward":
        module(torch.randn(5, 3))
    else:
        module.inner.norm.running_mean.data.add_(1)

    follower.follow()
    assert_in_step(follower)
    follower.replica(torch.randn(5, 3))  # the last forward changes it still
    module.eval()
    follower.follow()
    assert_in_step(follower)
    assert not follower.follow()


def test_a_large_buffer_is_not_sent_again_and_again_in_training(module: Outer) -> None:
    module.inner.norm = OwnNorm(3)
    follower = Follower(module.train())
    follower.follow()

    numbers = follower.follow().buffers

    assert len(numbers) == 3
    assert not any(follower.watch.buffers[number] is module.inner.large for number in numbers)


def test_an_earlier_graph_keeps_the_buffers_it_needs(module: Outer, follower: Follower) -> None:
    """A helper's backward may come after the next update."""
    outputs = follower.replica(torch.randn(4, 3))
    module.inner.norm.running_var.add_(1)
    module.inner.norm.running_mean.add_(1)

    follower.follow()

    outputs.sum().backward()


def test_a_buffer_made_in_inference_mode_is_followed(module: Outer) -> None:
    with torch.inference_mode():
        module.inner.norm.running_mean = torch.ones(3)
    follower = Follower(module.eval())
    with torch.inference_mode():
        module.inner.norm.running_mean.fill_(5)

    follower.follow()

    assert_in_step(follower)


# ------------------------------------------------------------------ structure


def move(parameter: Tensor, to: Callable[[Tensor], Tensor]) -> None:
    parameter.data = to(parameter.data)


STRUCTURE_CHANGES: dict[str, Callable[[Outer], Any]] = {
    "layer replaced": lambda m: setattr(m, "linear", nn.Linear(3, 3)),
    "layer replaced by an activation": lambda m: setattr(m, "linear", nn.ReLU()),
    "deep layer replaced": lambda m: setattr(m.inner, "norm", nn.BatchNorm1d(3)),
    "layer added": lambda m: m.add_module("more", nn.Linear(2, 2)),
    "layer removed": lambda m: delattr(m, "linear"),
    "layer set to None": lambda m: setattr(m, "linear", None),
    "layers swapped": lambda m: m.__dict__["_modules"].update(linear=m.inner, inner=m.linear),
    "layer renamed": lambda m: m._modules.__setitem__("other", m._modules.pop("inner")),
    "parameter replaced": lambda m: setattr(m.linear, "bias", nn.Parameter(torch.zeros(3))),
    "parameter added": lambda m: m.register_parameter("more", nn.Parameter(torch.zeros(1))),
    "parameter removed": lambda m: delattr(m.linear, "bias"),
    "parameter set to None": lambda m: setattr(m.linear, "bias", None),
    "parameter renamed": lambda m: m.linear._parameters.__setitem__(
        "offset", m.linear._parameters.pop("bias")
    ),
    "parameters tied": lambda m: setattr(m.inner.norm, "bias", m.linear.bias),
    "data transposed in its memory": lambda m: move(m.linear.weight, Tensor.t),
    "data cut in its memory": lambda m: move(m.linear.weight, lambda data: data[:2]),
    "whole module to another dtype": lambda m: m.double(),
    "layer taken out of a list": lambda m: m.layers.__delitem__(0),
    "layer popped from a list": lambda m: m.layers.pop(0),
    "layers cut off a list": lambda m: setattr(m, "layers", m.layers[:1]),
    "buffer added": lambda m: m.register_buffer("more", torch.zeros(1)),
    "buffer removed": lambda m: delattr(m.inner, "large"),
    "buffer set to None": lambda m: setattr(m.inner, "large", None),
    "buffer of another form": lambda m: setattr(m.inner, "large", torch.zeros(2)),
    "buffer of another dtype": lambda m: setattr(m.inner, "large", m.inner.large.double()),
    "buffer resized in place": lambda m: m.inner.large.resize_(2, 2),
    "buffer renamed": lambda m: m.inner._buffers.__setitem__("big", m.inner._buffers.pop("large")),
    "buffer wants a gradient": lambda m: m.inner.large.requires_grad_(),
    "buffer becomes a parameter": lambda m: (
        delattr(m.inner, "large"),
        setattr(m.inner, "large", nn.Parameter(torch.zeros(200, 200))),
    ),
    "forward hook": lambda m: m.linear.register_forward_hook(lambda *_: None),
    "forward hook before": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda m: m.linear.register_full_backward_hook(lambda *_: None),
    "backward hook before": lambda m: m.register_full_backward_pre_hook(lambda *_: None),
    "weight norm": lambda m: nn.utils.parametrizations.weight_norm(m.linear),
}


@pytest.mark.parametrize("change", STRUCTURE_CHANGES)
def test_a_change_of_structure_needs_a_new_copy(
    module: Outer, follower: Follower, change: str
) -> None:
    STRUCTURE_CHANGES[change](module)

    assert follower.watch.is_stale()
    renewed = Watch(module, shared_tensors(module))
    assert not renewed.is_stale()
    assert not renewed.has_moved()


@pytest.mark.parametrize("to", [torch.clone, Tensor.double])
def test_a_parameter_in_other_memory_is_noticed(
    module: Outer, follower: Follower, to: Callable[[Tensor], Tensor]
) -> None:
    assert not follower.watch.has_moved()
    move(module.linear.weight, to)

    assert not follower.watch.is_stale()
    assert follower.watch.has_moved()


def test_a_hook_that_was_removed_needs_a_new_copy(module: Outer) -> None:
    handle = module.linear.register_forward_hook(lambda *_: None)
    follower = Follower(module)
    handle.remove()

    assert follower.watch.is_stale()


def test_a_parameter_that_was_replaced_is_not_mistaken_for_its_successor_at_its_address(
    module: Outer,
) -> None:
    follower = Follower(module.eval())
    for _ in range(50):
        module.linear.bias = None
        module.linear.bias = nn.Parameter(torch.zeros(3))

        assert follower.watch.is_stale()


# ------------------------------------------------------------------ updates


def test_what_cannot_be_sent_is_named(module: Outer, follower: Follower) -> None:
    module.inner.flag = (i for i in range(3))

    with pytest.raises(ValueError, match=r"changed attributes\[\(2, 'flag'\)\] cannot be sent"):
        follower.follow()


def test_what_cannot_be_sent_is_an_error_until_it_is_taken_away(
    module: Outer, follower: Follower
) -> None:
    module.config.layers.append(i for i in range(3))

    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be sent"):
            follower.follow()
    module.config.layers.pop()
    module.config.rate = 7

    follower.follow()
    assert_in_step(follower)
