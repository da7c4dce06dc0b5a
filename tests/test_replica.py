"""Replicas: a module to bytes and back, over shared memory, with classes unknown elsewhere."""

from __future__ import annotations

import abc
import codecs
import importlib.util
import io
import os
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from evener.arena import Arena, lay_out, moved
from evener.errors import ModuleError
from evener.replica import (
    adopt,
    from_bytes,
    give_back,
    private_buffers,
    shared_tensors,
    to_bytes,
)

# ------------------------------------------------------------------ which tensors


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.embed(x)))


def test_each_parameter_is_shared_once() -> None:
    module = Tied()

    shared = shared_tensors(module)

    assert [id(tensor) for tensor in shared] == [
        id(module.embed.weight),
        id(module.norm.weight),
        id(module.norm.bias),
        id(module.out.bias),
    ]


def test_a_buffer_that_wants_a_gradient_is_shared_and_all_others_are_private() -> None:
    module = Tied()
    module.register_buffer("free", torch.zeros(2, requires_grad=True))
    module.register_buffer("fixed", torch.zeros(2), persistent=False)
    module.register_buffer("none", None)

    assert shared_tensors(module)[-1] is module.free
    assert {key: value.shape for key, value in private_buffers(module).items()} == {
        (0, "fixed"): (2,),
        (2, "running_mean"): (3,),
        (2, "running_var"): (3,),
        (2, "num_batches_tracked"): (),
    }


# ------------------------------------------------------------------ there and back


def replica_of(module: Any, shared: list[Tensor] | None = None) -> Any:
    """A copy with parameters of its own, as in a helper."""
    originals = shared_tensors(module) if shared is None else shared
    return from_bytes(
        to_bytes(module, originals),
        [nn.Parameter(tensor.detach(), requires_grad=False) for tensor in originals],
    )


def test_a_replica_computes_the_same() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.LSTM(4, 2)).eval()
    x = torch.randn(5, 3)

    replica = replica_of(module)

    assert torch.equal(replica(x)[0], module(x)[0])
    assert replica.state_dict().keys() == module.state_dict().keys()


def test_parameters_share_memory_and_buffers_do_not() -> None:
    module = Tied()

    replica = replica_of(module)

    for name, parameter in module.named_parameters():
        assert replica.get_parameter(name).data_ptr() == parameter.data_ptr(), name
    for name, buffer in module.named_buffers():
        assert replica.get_buffer(name).data_ptr() != buffer.data_ptr(), name
        assert torch.equal(replica.get_buffer(name), buffer), name


def test_parameters_do_not_travel() -> None:
    small, large = nn.Linear(2, 2), nn.Linear(1000, 1000)

    assert len(to_bytes(large, shared_tensors(large))) < 2 * len(
        to_bytes(small, shared_tensors(small))
    )


def test_tied_weights_stay_tied() -> None:
    replica = replica_of(Tied())

    assert replica.out.weight is replica.embed.weight


def test_a_module_used_twice_is_used_twice() -> None:
    layer = nn.Linear(2, 2)
    module = nn.ModuleList([layer, nn.Sequential(layer)])

    replica = replica_of(module)

    assert replica[1][0] is replica[0]


def test_a_list_of_layers_and_a_parameter_in_a_dict_are_those_of_the_replica() -> None:
    module = Tied()
    module.layers = [module.out, module.norm]
    module.by_name = {"bias": module.out.bias}

    replica = replica_of(module)

    assert replica.layers == [replica.out, replica.norm]
    assert replica.by_name["bias"] is replica.out.bias


def test_modes_hooks_and_plain_attributes_travel() -> None:
    module = Tied()
    module.norm.eval()
    module.rate = 0.5
    module.register_forward_hook(lambda module, args, output: output * module.rate)
    x = torch.tensor([1, 2])

    replica = replica_of(module)

    assert (replica.training, replica.norm.training, replica.rate) == (True, False, 0.5)
    torch.testing.assert_close(replica(x), module(x))


def test_parametrizations_travel() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    x = torch.randn(4, 3)

    replica = replica_of(module)

    assert torch.equal(replica(x), module(x))
    assert type(replica).__name__ == type(module).__name__


def test_a_value_of_an_attribute_travels_alone() -> None:
    module = Tied()

    shared = shared_tensors(module)
    bias, numbers = from_bytes(to_bytes((module.out.bias, [1, 2]), shared), shared)

    assert bias is module.out.bias
    assert numbers == [1, 2]


def test_a_state_of_its_own_is_respected() -> None:
    class Logged(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.lock = threading.Lock()

        def __getstate__(self) -> dict[str, Any]:
            return {name: value for name, value in vars(self).items() if name != "lock"}

    replica = replica_of(Logged())

    assert not hasattr(replica, "lock")


# ------------------------------------------------------------------ what cannot travel


class Holder:
    """An object of the user's, not a module."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing


def lock() -> Any:
    return threading.Lock()


def generator() -> Any:
    return (i for i in range(3))


def file() -> Any:
    return tempfile.TemporaryFile("wb")


UNSENDABLE = {"lock": lock, "generator": generator, "file": file}

#: Where the thing is put, and what it is called then.
HIDEOUTS: list[tuple[Callable[[nn.Module, Any], Any], str]] = [
    (lambda module, thing: setattr(module, "own", thing), "own"),
    (lambda module, thing: setattr(module.out, "deep", thing), "out.deep"),
    (lambda module, thing: setattr(module, "things", [1, thing]), "things[1]"),
    (lambda module, thing: setattr(module, "pair", (thing, 1)), "pair[0]"),
    (lambda module, thing: setattr(module, "table", {"a": {3: thing}}), "table['a'][3]"),
    (lambda module, thing: setattr(module.norm, "held", Holder(thing)), "norm.held.thing"),
    (lambda module, thing: setattr(module, "all", {"x": [Holder(thing)]}), "all['x'][0].thing"),
]


@pytest.mark.parametrize(("hide", "path"), HIDEOUTS)
@pytest.mark.parametrize("kind", UNSENDABLE)
def test_what_cannot_be_sent_is_named_by_its_path(
    hide: Callable[[nn.Module, Any], Any], path: str, kind: str
) -> None:
    module = Tied()
    thing = UNSENDABLE[kind]()
    hide(module, thing)

    with pytest.raises(ModuleError) as caught:
        to_bytes(module, shared_tensors(module))

    said, name = str(caught.value), type(thing).__name__
    assert said.startswith(f"{path} cannot be sent to a helper: ")
    assert name in said
    assert f"{name}: cannot pickle" not in said
    assert isinstance(caught.value.__cause__, Exception)
    if kind == "file":
        thing.close()


def test_a_hook_that_cannot_be_sent_is_named() -> None:
    module, held = Tied(), lock()
    module.norm.register_forward_hook(lambda *_: held.locked())

    with pytest.raises(ModuleError, match=r"^norm\._forward_hooks.* cannot be sent"):
        to_bytes(module, shared_tensors(module))


def test_an_attribute_that_cannot_be_sent_is_named_as_it_is_called() -> None:
    with pytest.raises(ModuleError, match=r"^changed attributes\[\(0, 'a'\)\]\[0\] cannot be"):
        to_bytes({(0, "a"): [lock()]}, [], "changed attributes")


def test_the_search_ends_where_objects_lead_back_to_each_other() -> None:
    """A child that knows its parent, in a list so that torch does not take it for a submodule."""
    module = Tied()
    module.out.parents = [module]
    module.lock = lock()

    with pytest.raises(ModuleError, match=r"^lock cannot be sent to a helper: .*lock"):
        to_bytes(module, shared_tensors(module))


def test_a_failure_leaves_no_module_registered_for_pickling() -> None:
    module = Tied()
    module.lock = lock()
    before = set(cloudpickle.list_registry_pickle_by_value())

    with pytest.raises(ModuleError):
        to_bytes(module, shared_tensors(module))
    to_bytes(Tied(), shared_tensors(Tied()))

    assert set(cloudpickle.list_registry_pickle_by_value()) == before


# ------------------------------------------------------------------ classes unknown elsewhere

#: A module of the user's that was loaded from its path, or made by a program.
SOURCE = """
import enum
from dataclasses import dataclass
import torch
from torch import nn

FACTOR = 3.0


class Mode(enum.Enum):
    ADD = 1
    MULTIPLY = 2


@dataclass
class Options:
    mode: Mode = Mode.ADD


def helper_function(x, options):
    return x * FACTOR if options.mode is Mode.MULTIPLY else x + FACTOR


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = Options()
        self.weight = nn.Parameter(torch.ones(2))


class Model(Base):
    def forward(self, x):
        return helper_function(x * self.weight, self.options)
"""

#: What a helper does with the bytes.
LOAD = """
import sys
import torch
from evener.replica import from_bytes

weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
loaded = from_bytes(open(sys.argv[1], "rb").read(), [weight])
"""


@pytest.fixture
def by_path(made_module: Callable[[str], ModuleType]) -> ModuleType:
    """A module that no other interpreter can import."""
    return made_module(SOURCE)


def loaded_elsewhere(
    data: bytes, tmp_path: Path, run_python: Callable[..., str], then: str
) -> str:
    path = tmp_path / "bytes"
    path.write_bytes(data)
    return run_python(LOAD + then, path).strip()


def test_a_class_of_a_module_that_was_loaded_by_path_arrives(
    by_path: ModuleType, tmp_path: Path, run_python: Callable[..., str]
) -> None:
    module = by_path.Model()
    module.options.mode = by_path.Mode.MULTIPLY

    printed = loaded_elsewhere(
        to_bytes(module, shared_tensors(module)),
        tmp_path,
        run_python,
        "print(loaded(torch.ones(2)).tolist(), type(loaded).__mro__[1].__name__)",
    )

    assert printed == "[3.0, 6.0] Base"
    assert not cloudpickle.list_registry_pickle_by_value()


def test_a_changed_attribute_of_such_a_class_arrives(
    by_path: ModuleType, tmp_path: Path, run_python: Callable[..., str]
) -> None:
    """A layer of torch's own, with an attribute of the user's kind."""
    changed = {(0, "options"): by_path.Options(by_path.Mode.MULTIPLY)}

    printed = loaded_elsewhere(
        to_bytes(changed, [], "changed attributes"), tmp_path, run_python, "print(loaded)"
    )

    assert printed.startswith("{(0, 'options'): Options(mode=<Mode.MULTIPLY: 2>)}")


def test_an_attribute_of_such_a_class_arrives_in_a_layer_of_torch(
    by_path: ModuleType, tmp_path: Path, run_python: Callable[..., str]
) -> None:
    module = nn.PReLU(2)
    module.options = by_path.Options()

    printed = loaded_elsewhere(
        to_bytes(module, shared_tensors(module)), tmp_path, run_python, "print(loaded.options)"
    )

    assert printed == "Options(mode=<Mode.ADD: 1>)"


def test_a_module_under_the_name_of_another_is_not_mistaken_for_it(
    made_module: Callable[[str], ModuleType],
    tmp_path: Path,
    run_python: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`colorsys.py` of the user's here, and another one on the path of the interpreter."""
    source = made_module(SOURCE).__file__
    spec = importlib.util.spec_from_file_location("colorsys", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "colorsys", module)
    spec.loader.exec_module(module)
    model = module.Model()

    printed = loaded_elsewhere(
        to_bytes(model, shared_tensors(model)),
        tmp_path,
        run_python,
        "print(loaded(torch.ones(2)).tolist())",
    )

    assert printed == "[4.0, 5.0]"


@pytest.mark.parametrize(
    "importable",
    [
        nn.Linear,
        torch.tanh,
        torch.optim.SGD,
        nn.functional.relu,
        OrderedDict,
        pytest.Item,
        to_bytes,
        # Modules that the interpreter has inside of it, or under two names.
        abc.ABCMeta,
        abc.ABC,
        Callable,
        codecs.StreamReader,
        os.path.join,
        os.getcwd,
        importlib.util.find_spec,
    ],
    ids=lambda importable: importable.__name__,
)
def test_what_can_be_imported_travels_by_name(importable: Any) -> None:
    assert len(to_bytes(importable, [])) < 100


def test_an_abstract_class_arrives_as_one(tmp_path: Path, run_python: Callable[..., str]) -> None:
    class Abstract(nn.Module, abc.ABC):
        @abc.abstractmethod
        def scale(self) -> float: ...

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale()

    class Concrete(Abstract):
        def scale(self) -> float:
            return 2.0

    printed = loaded_elsewhere(
        to_bytes(Concrete(), []),
        tmp_path,
        run_python,
        "import abc; print(loaded(torch.ones(1)).item(), type(type(loaded)) is abc.ABCMeta)",
    )

    assert printed == "2.0 True"


def test_a_class_made_in_a_function_arrives(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    scale = 5

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return super().__call__(x) if x is None else x * self.weight * scale

    module = Local()

    printed = loaded_elsewhere(
        to_bytes(module, shared_tensors(module)),
        tmp_path,
        run_python,
        "print(loaded(torch.ones(2)).tolist(), loaded.weight is weight)",
    )

    assert printed == "[5.0, 10.0] True"


# ------------------------------------------------------------------ into the arena and out


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


@dataclass
class Adopted:
    tensors: list[Tensor]
    values: list[Tensor]


@pytest.fixture
def adopted(arena: Arena) -> Adopted:
    """Parameters of all kinds, moved into the arena."""
    tensors: list[Tensor] = [
        nn.Parameter(torch.randn(3, 4)),
        nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(4, 3).t()),
        nn.Parameter(torch.randn(5), requires_grad=False),
        nn.Parameter(torch.tensor([1, 2]), requires_grad=False),
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.randn(0, 3)),
        torch.randn(3, requires_grad=True),
        nn.Parameter(torch.randn(3, dtype=torch.bfloat16)),
    ]
    values = [tensor.detach().clone(memory_format=torch.preserve_format) for tensor in tensors]
    places, num_bytes = lay_out(tensors)
    region = arena.take(num_bytes)
    adopt(tensors, moved(places, region.offset), region)
    region.close()
    return Adopted(tensors, values)


def test_adopted_tensors_are_the_same_objects_values_and_strides(adopted: Adopted) -> None:
    for tensor, value in zip(adopted.tensors, adopted.values, strict=True):
        assert torch.equal(tensor, value)
        assert tensor.stride() == value.stride()
        assert tensor.dtype == value.dtype
        assert tensor.is_leaf
        assert tensor.requires_grad == (tensor.is_floating_point() and tensor.shape != (5,))
    assert [type(tensor) for tensor in adopted.tensors].count(nn.Parameter) == 8


def test_adopted_tensors_lie_in_the_arena(arena: Arena, adopted: Adopted) -> None:
    offsets = {tensor.data_ptr() for tensor in adopted.tensors if tensor.numel()}

    assert len(offsets) == 8
    assert arena.take(8).offset != 0  # theirs is not free


def test_parameters_tied_by_their_memory_are_refused_with_the_way_out(arena: Arena) -> None:
    one, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    other.data = one.data
    places, num_bytes = lay_out([one, other])
    region = arena.take(num_bytes)

    with pytest.raises(ModuleError, match=r"use the same memory; tie them by giving both names"):
        adopt([one, other], moved(places, region.offset), region)


def test_an_optimizer_made_before_goes_on(arena: Arena) -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    layer(torch.ones(3)).sum().backward()
    optimizer.step()
    gradient = layer.weight.grad
    before = layer.weight.detach().clone()
    tensors = shared_tensors(layer)
    places, num_bytes = lay_out(tensors)

    adopt(tensors, places, arena.take(num_bytes))
    optimizer.step()

    assert layer.weight.grad is gradient
    assert not torch.equal(layer.weight, before)
    assert next(iter(optimizer.state)) is layer.weight


def test_given_back_tensors_keep_values_and_strides_and_free_the_arena(
    arena: Arena, adopted: Adopted
) -> None:
    with torch.no_grad():
        adopted.tensors[0].add_(1)

    give_back(adopted.tensors)

    assert torch.equal(adopted.tensors[0], adopted.values[0] + 1)
    for tensor, value in zip(adopted.tensors[1:], adopted.values[1:], strict=True):
        assert torch.equal(tensor, value)
        assert tensor.stride() == value.stride()
    assert arena.take(8).offset == 0


def test_gradients_in_the_arena_are_given_back_too(arena: Arena) -> None:
    parameter = nn.Parameter(torch.ones(8))
    region = arena.take(1 << 12)
    (place,), _ = lay_out([parameter])
    parameter.grad = region.tensor(place._replace(offset=region.offset)).fill_(3)
    region.close()

    give_back([parameter])

    assert parameter.grad.tolist() == [3] * 8
    assert arena.take(1 << 12).offset == region.offset


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_tensors_can_be_given_back_in_any_mode_and_trained_afterwards(
    arena: Arena, adopted: Adopted, mode: Callable[[], Any]
) -> None:
    with mode():
        give_back(adopted.tensors)

    for tensor in adopted.tensors:
        assert not tensor.is_inference()
        if tensor.requires_grad:
            (tensor * 2).sum().backward()
            with torch.no_grad():
                tensor.sub_(tensor.grad)
    assert arena.take(8).offset == 0


def test_a_checkpoint_of_an_adopted_module_is_a_plain_one(arena: Arena) -> None:
    module = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20))

    def saved() -> bytes:
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        return file.getvalue()

    plain = saved()
    tensors = shared_tensors(module)
    places, num_bytes = lay_out(tensors)
    adopt(tensors, places, arena.take(num_bytes))

    assert len(saved()) == len(plain)
    state = torch.load(io.BytesIO(saved()))
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())
