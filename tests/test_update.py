"""An update: a replica is afterwards what the user's module is (see also test_watch)."""

from __future__ import annotations

import torch
from torch import nn

from evener.arena import lay_out
from evener.replica import to_bytes
from evener.update import Update

PLACE = lay_out([torch.zeros(2)])[0][0]


def test_an_update_without_content_is_false() -> None:
    assert not Update()
    assert Update(attributes=b"x")
    assert Update(removed=[(0, "a")])
    assert Update(requires_grad=[])
    assert Update(buffers={0: PLACE})


def test_a_replica_follows() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[0].gone = 1
    shared = list(module.parameters())
    update = Update(
        attributes=to_bytes({(2, "eps"): 0.5}, shared),
        removed=[(1, "gone"), (1, "never there")],
        requires_grad=[False, True, True, False],
        buffers={1: PLACE},
    )

    told = torch.full((2,), 7.0)

    update.apply(list(module.modules()), shared, {PLACE: told}.__getitem__)
    told.zero_()  # the memory may be used again

    assert module[1].eps == 0.5
    assert not hasattr(module[0], "gone")
    assert [tensor.requires_grad for tensor in shared] == [False, True, True, False]
    assert torch.equal(module[1].running_var, torch.full((2,), 7.0))
    assert torch.equal(module[1].running_mean, torch.zeros(2))
