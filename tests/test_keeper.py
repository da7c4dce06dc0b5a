"""The keeper: each cell begins with the module as it was."""

from __future__ import annotations

import torch
from torch import nn

from evener.keeper import Keeper, add_changes, apply_changes, pack, unpack
from evener.replica import private_buffers


def test_cells_do_not_see_what_others_changed_and_all_changes_are_weighted() -> None:
    module = nn.BatchNorm1d(2, dtype=torch.float64)
    module.seen = 0
    before = [module.running_mean, module.num_batches_tracked]
    x = torch.randn(12, 2, dtype=torch.float64)
    keeper = Keeper(module)
    nodes = []
    for i, part in enumerate([x[:4], x[4:]]):
        keeper.begin()
        assert not module.running_mean.any()
        assert module.seen == 0
        module(part)
        module.seen = i + 7
        nodes.append(keeper.end(len(part) / 12, is_first=i == 0))
    keeper.restore()

    assert [module.running_mean, module.num_batches_tracked] == before or all(
        one is other
        for one, other in zip(
            before, [module.running_mean, module.num_batches_tracked], strict=True
        )
    )
    assert module.seen == 7
    apply_changes(list(private_buffers(module).values()), add_changes(*nodes))
    torch.testing.assert_close(module.running_mean, 0.1 * x.mean(0))
    assert module.num_batches_tracked == 1


def test_changes_travel() -> None:
    like = [torch.zeros(3), torch.zeros((), dtype=torch.int64), torch.zeros(2, 0), torch.zeros(2)]
    given = [torch.randn(3), torch.tensor(7), torch.zeros(2, 0), None]
    found = unpack(pack(given), like)
    assert found[3] is None
    for one, other in zip(found[:3], given[:3], strict=True):
        assert one is not None
        assert torch.equal(one, other)
