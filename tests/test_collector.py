"""The collector: where the gradients of a helper's shared tensors go."""

from __future__ import annotations

import gc
import pickle
import weakref

import torch
from torch import nn

from evener.arena import Arena, lay_out, moved
from evener.collector import Collector


def test_gradients_go_to_their_places_and_those_of_a_cell_stay_as_they_came() -> None:
    arena = Arena()
    shared = [
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(4, 2)),
        nn.Parameter(torch.ones(2)),
    ]
    layout, num_bytes = lay_out(shared)
    region = arena.take(num_bytes)
    places = moved(layout, region.offset)
    collector = Collector(arena.whole)
    for number, tensor in enumerate(shared):
        tensor.register_post_accumulate_grad_hook(collector.hook(number))
    numbers = torch.tensor([1, 1])

    def backward() -> None:
        looked_up = nn.functional.embedding(numbers, shared[1], sparse=True)
        (shared[0].sum() * 2 + looked_up.sum()).backward()

    collector.begin(places)
    backward()
    shared[0].sum().backward()  # as where a checkpoint inside reaches it again
    assert collector.present == [True, False, False]
    assert region.tensor(places[0]).tolist() == [3.0, 3.0, 3.0]
    assert pickle.loads(collector.others[1]).to_dense()[1].tolist() == [2.0, 2.0]
    assert all(tensor.grad is None for tensor in shared)

    collector.begin_cell()
    backward()
    backward()
    first, second, third = collector.taken(3)
    assert first is not None
    assert second is not None
    assert first.tolist() == [4.0, 4.0, 4.0]
    assert second.is_sparse
    assert third is None
    assert collector.taken(3) == [None, None, None]
    assert region.tensor(places[0]).tolist() == [3.0, 3.0, 3.0]

    gone = weakref.ref(collector)
    del collector
    gc.collect()
    assert gone() is None  # though the tensors hold its hooks
    shared[0].sum().backward()
    assert shared[0].grad is not None
    region.close()
    arena.close()
