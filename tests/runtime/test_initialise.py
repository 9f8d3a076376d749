"""Values for models built on meta."""

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import RuntimeStateError

X = torch.ones(2, 4)


def compiled(make, x=X):
    with torch.device("meta"):
        model = make()
    return autopar.compile(model, (x.to("meta"),), loss_fn=lambda y: y.float().sum())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def test_every_layer_initialises_itself():
    module = compiled(Tied)
    with pytest.raises(RuntimeStateError, match=r"6 parameters or buffers were built on meta .*norm\.bias"):
        module(X)
    module.init_weights(3)
    assert module.last.weight is module.first.weight
    assert module.norm.weight.tolist() == [1.0] * 4
    assert module.norm.num_batches_tracked.item() == 0
    assert module.norm.running_var.tolist() == [1.0] * 4
    assert 0 < module.first.weight.abs().max() <= 0.5
    module(X).backward()


def test_the_seed_decides_and_the_generator_stays():
    one, other, third = compiled(Tied), compiled(Tied), compiled(Tied)
    before = torch.get_rng_state()
    one.init_weights(3)
    other.init_weights(3)
    third.init_weights(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.first.weight, other.first.weight)
    assert not torch.equal(one.first.weight, third.first.weight)


class Raw(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.gain = nn.Linear(4, 4), nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.layer(x) * self.gain + self.table


def test_what_no_layer_initialises_is_named():
    with pytest.raises(RuntimeStateError, match="no layer initialises gain, table"):
        compiled(Raw).init_weights(0)


class Scaled(Raw):
    def reset_parameters(self):
        self.gain.fill_(2.0)
        self.table = torch.arange(4.0)  # a new tensor
        self.layer.weight.mul_(0.0)  # on top of what the layer did


def test_a_model_initialises_on_top_of_its_layers():
    module = compiled(Scaled)
    module.init_weights(0)
    assert module.gain.item() == 2.0
    assert module.table.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not module.layer.weight.any()
    assert module.layer.bias.any()


class ByModel(nn.Module):
    """As Hugging Face's models do it."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), nn.Embedding(3, 4)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
            module.bias.data.zero_()

    def forward(self, x):
        return self.layer(x) + self.table.weight[0]


def test_a_model_may_initialise_its_layers():
    module = compiled(ByModel)
    with pytest.raises(RuntimeStateError, match=r"no layer initialises table\.weight"):
        module.init_weights(0)
    assert 0 < module.layer.weight.abs().max() < 0.2
    assert not module.layer.bias.any()


def test_weights_can_be_loaded_instead():
    module, whole = compiled(Tied), Tied()
    state = whole.state_dict()
    incomplete = {k: v for k, v in state.items() if k.startswith("first")}
    module.load_state_dict(incomplete, strict=False)
    with pytest.raises(RuntimeStateError, match="built on meta"):
        module(X)
    module.load_state_dict(state)
    torch.testing.assert_close(module(X), whole(X).sum())
