"""State: a replica that is told becomes what the module was like before a call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from evener.arena import Arena
from evener.errors import HelperDiedError
from evener.replica import from_bytes, shared_tensors, to_bytes
from evener.state import COPIED_BYTES, State, Told, told, told_first


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


class Net(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.width = 1
        self.register_buffer("scale", torch.zeros(size))


def state_of(module: nn.Module, buffers: dict[int, Told]) -> State:
    """As the watch keeps it: with dictionaries of its own."""
    attributes = [dict(vars(each)) for each in module.modules()]
    return State(attributes, [p.requires_grad for p in shared_tensors(module)], buffers)


def follow(module: nn.Module, state: State, arena: Arena) -> nn.Module:
    """A copy of the module as it is now, after it was told the state."""
    shared = shared_tensors(module)
    update = state.update_from(module, shared, arena)
    own = [nn.Parameter(tensor.detach().clone()) for tensor in shared]
    replica: nn.Module = from_bytes(to_bytes(module, shared), own)
    update.apply(list(replica.modules()), own, arena.whole.tensor)
    return replica


def test_a_replica_is_what_the_module_was(arena: Arena) -> None:
    module = Net().train()
    module.width, module.only_then = 5, "then"
    module.linear.bias.requires_grad_(False)
    state = state_of(module, told_first(arena, {0: module.scale}))

    module.eval()
    module.width, module.only_now = 6, "now"
    del module.only_then
    module.linear.bias.requires_grad_(True)
    module.linear.weight.requires_grad_(False)
    module.scale.fill_(9.0)
    replica = follow(module, state, arena)

    assert replica.training
    assert replica.linear.training
    assert (replica.width, replica.only_then) == (5, "then")
    assert not hasattr(replica, "only_now")
    assert replica.linear.weight.requires_grad
    assert not replica.linear.bias.requires_grad
    assert replica.scale.tolist() == [0.0, 0.0, 0.0]
    # The user's is as it was.
    assert (module.training, module.width, module.only_now) == (False, 6, "now")
    assert module.scale.tolist() == [9.0, 9.0, 9.0]


def test_where_nothing_has_changed_no_attribute_is_sent(arena: Arena) -> None:
    module = Net()
    state = state_of(module, {})

    update = state.update_from(module, shared_tensors(module), arena)

    assert update.attributes is None
    assert update.removed == []
    assert update.buffers == {}
    assert update.requires_grad == [True, True]


def test_each_state_has_the_values_of_its_time(arena: Arena) -> None:
    module = Net()
    states = []
    for value in (1.0, 2.0, 3.0):
        module.scale.fill_(value)
        states.append(state_of(module, told(arena, {0: module.scale})))

    found = [follow(module, state, arena).scale[0] for state in states]

    assert found == [1.0, 2.0, 3.0]


def test_what_no_state_needs_is_free(arena: Arena) -> None:
    values = torch.zeros(3)
    first = told(arena, {0: values})
    place = first[0].place

    del first

    assert told(arena, {0: values})[0].place == place
    assert told(arena, {}) == {}


def test_large_buffers_are_not_copied_at_first(arena: Arena) -> None:
    small, large = torch.zeros(2), torch.zeros(COPIED_BYTES // 4 + 1)

    found = told_first(arena, {0: small, 1: large})

    assert found[0].place is not None
    assert found[0].values is not small
    assert found[1].place is None
    assert found[1].values is large


def test_a_large_buffer_that_has_not_changed_is_sent(arena: Arena) -> None:
    module = Net(COPIED_BYTES // 4 + 1)
    state = state_of(module, told_first(arena, {0: module.scale}))

    assert follow(module, state, arena).scale.shape == module.scale.shape
    assert list(state.update_from(module, shared_tensors(module), arena).buffers) == [0]


def test_a_large_buffer_that_has_changed_since_is_lost(arena: Arena) -> None:
    module = Net(COPIED_BYTES // 4 + 1)
    state = state_of(module, told_first(arena, {0: module.scale}))
    module.scale.add_(1)

    with pytest.raises(HelperDiedError, match=r"a buffer of \d+ bytes has changed since the call"):
        state.update_from(module, shared_tensors(module), arena)
