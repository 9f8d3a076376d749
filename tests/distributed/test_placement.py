"""Parameters on a mesh: what DTensor makes of our layouts, and what optimizers make of those."""

import pytest
import torch
from torch import nn

from autopar.passes.base import Mesh
from autopar.passes.placement import REPLICATE, Shard
from autopar.runtime.border import gathered
from autopar.runtime.groups import groups_for
from autopar.runtime.layout import is_storable, local_part, storable
from autopar.runtime.state import ModelState
from autopar.runtime.world import connect
from autopar.torch_private import dtensor

LAYOUTS = {
    "replicated": (REPLICATE, REPLICATE),
    "rows over tp": (REPLICATE, Shard(0, 1, 2)),
    "columns over dp": (Shard(1, 1, 2), REPLICATE),
    "rows over both, dp outside": (Shard(0, 1, 2), Shard(0, 2, 2)),
    "rows over both, tp outside": (Shard(0, 2, 2), Shard(0, 1, 2)),
    "packed over tp": (REPLICATE, Shard(0, 3, 2)),
    "packed over tp, columns over dp": (Shard(1, 1, 2), Shard(0, 3, 2)),
    "packed over dp, columns over tp": (Shard(0, 3, 2), Shard(1, 1, 2)),
    "packed inside zero": (Shard(0, 1, 2), Shard(0, 6, 2)),
}


class One(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())


def train(layout, optimizer):
    """Two steps on rows laid out over 2 x 2 ranks; returns the whole weight and gradient as DTensor gives them."""
    world = connect(torch.device("cpu"))
    groups = groups_for(world, Mesh(axes=("dp", "tp"), sizes=(2, 2)))
    torch.manual_seed(world.rank)  # rank 0's weights count
    state = ModelState(One(torch.randn(24, 4)))
    state.place(world, groups, lambda name: layout)
    weight = state["weight"].tensor
    torch.manual_seed(7)
    steps = make(optimizer, [weight])
    grads = [torch.randn(24, 4) for _ in range(2)]
    for grad in grads:
        part = local_part(grad, layout, groups.mesh, world.rank).clone()
        weight.grad = dtensor(part, state["weight"].spec)
        steps.step()
    return weight.full_tensor().detach(), weight.grad.full_tensor(), tuple(weight.to_local().shape)


def make(name, parameters):
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.1)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_whole_tensors_and_optimizers_agree_with_one_device(ranks, layout, optimizer):
    results = ranks(4, train, layout, optimizer)
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(24, 4))
    torch.manual_seed(7)
    steps = make(optimizer, [weight])
    for grad in [torch.randn(24, 4) for _ in range(2)]:
        weight.grad = grad
        steps.step()
    for whole, gradient, shape in results:
        torch.testing.assert_close(whole, weight.detach())
        torch.testing.assert_close(gradient, weight.grad)
        split = sum(isinstance(p, Shard) for p in layout)
        assert shape[0] * shape[1] == 96 // 2**split


UNKNOWN_TO_DTENSOR = [
    (Shard(0, 6, 2), Shard(0, 3, 2)),  # ZeRO inside a packed weight that tp splits
    (Shard(0, 3, 2), Shard(0, 6, 2)),
    (Shard(0, 6, 2), Shard(0, 1, 2)),  # a gap
]


def gather_all(layouts):
    world = connect(torch.device("cpu"))
    groups = groups_for(world, Mesh(axes=("dp", "tp"), sizes=(2, 2)))
    whole = torch.arange(24.0 * 4).reshape(24, 4)
    return [gathered(local_part(whole, x, groups.mesh, world.rank), x, (24, 4), groups) for x in layouts]


def test_layouts_that_dtensor_does_not_know_are_gathered_right(ranks):
    layouts = [*LAYOUTS.values(), *UNKNOWN_TO_DTENSOR, (REPLICATE, Shard(0, 8, 3)), (Shard(1, 2, 2), Shard(0, 1, 24))]
    for results in ranks(4, gather_all, layouts):
        for result in results:
            assert torch.equal(result, torch.arange(24.0 * 4).reshape(24, 4))


@pytest.mark.parametrize("layout", UNKNOWN_TO_DTENSOR, ids=lambda layout: "-".join(map(str, layout)))
def test_they_are_stored_in_another_way_that_splits_as_much(layout):
    mesh = Mesh(axes=("dp", "tp"), sizes=(2, 2))
    assert not is_storable(layout, (24, 4), mesh)
    instead = storable(layout, (24, 4), mesh)
    assert is_storable(instead, (24, 4), mesh)
    assert sum(isinstance(p, Shard) for p in instead) == 2
    assert sum(isinstance(p, Shard) for p in storable(layout, (24, 3), mesh)) == 1  # nothing else to split


def uneven(size):
    world = connect(torch.device("cpu"))
    groups = groups_for(world, Mesh(axes=("dp", "tp"), sizes=(2, 2)))
    state = ModelState(One(torch.arange(size * 2.0).reshape(size, 2)))
    state.place(world, groups, lambda name: (REPLICATE, Shard(0, 1, size)))
    weight = state["weight"].tensor
    weight.grad = dtensor(torch.ones_like(weight.to_local()), state["weight"].spec)
    torch.optim.AdamW([weight], lr=0.0).step()
    return weight.full_tensor().detach(), weight.to_local().shape[0]


def test_uneven_rows(ranks):
    results = ranks(4, uneven, 7)
    assert [rows for _, rows in results] == [4, 3, 4, 3]
    for whole, _ in results:
        assert torch.equal(whole, torch.arange(14.0).reshape(7, 2))
