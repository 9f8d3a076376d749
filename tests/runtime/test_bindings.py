"""Calls are exchanged for cheaper ones only where they are the same."""

import torch
from torch import fx

from autopar.runtime.bindings import use_bindings

ATEN = torch.ops.aten


def exchanged(target, *args, **kwargs):
    """The target that a node of ``target(*args)`` gets, tensors being placeholders."""
    graph = fx.Graph()

    def node(value):
        if not isinstance(value, torch.Tensor):
            return value
        placeholder = graph.placeholder("x")
        placeholder.meta["val"] = value
        return placeholder

    args = torch.utils._pytree.tree_map(node, args)
    call = graph.call_function(target, args, kwargs)
    graph.output(call)
    use_bindings(graph, {})
    return call.target


X = torch.ones(3, 3)


def test_bindings_of_torch_and_of_its_tensor():
    assert exchanged(ATEN.mm.default, X, X) is torch.mm
    assert exchanged(ATEN.add.Tensor, X, X) is torch.add
    assert exchanged(ATEN.sum.dim_IntList, X, [0], True) is torch.sum
    assert exchanged(ATEN.expand.default, X, [2, 3, 3]) is torch.Tensor.expand
    assert exchanged(ATEN.gelu.default, X, approximate="tanh") is torch.nn.functional.gelu
    assert exchanged(ATEN.cat.default, [X, X], 1) is torch.cat


def test_calls_that_would_go_elsewhere_stay():
    for target, args in [
        (ATEN.mul.Scalar, (X, 2.0)),  # torch.mul makes a tensor of the number
        (ATEN.native_layer_norm_backward.default, (X, X, [3], X, X, None, None, [True, False, False])),  # not public
        (ATEN.nonzero.default, (X,)),  # not without data
    ]:
        assert exchanged(target, *args) is target


def test_collectives_and_functions_of_others_stay():
    target = torch.ops._c10d_functional.wait_tensor.default
    assert exchanged(target, X) is target
    assert exchanged(torch.mm, X, X) is torch.mm
