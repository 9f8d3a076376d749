"""What makes two calls the same kind of call."""

import dataclasses
import math

import pytest
import torch

from autopar.capture import flatten_call
from autopar.runtime.calls import on_device, read_call


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    flag: bool = False


X = torch.zeros(2, 3)

CALLS = [
    ((X,), {}, ()),
    ((X, X), {}, ()),
    ((X,), {}, (X,)),
    ((X.double(),), {}, ()),
    ((torch.zeros(3, 2),), {}, ()),
    ((torch.zeros(3, 2).T,), {}, ()),
    ((X.clone().requires_grad_(),), {}, ()),
    (([X],), {}, ()),
    (((X,),), {}, ()),
    (({"a": X},), {}, ()),
    (({"b": X},), {}, ()),
    ((), {"a": X}, ()),
    ((), {"b": X}, ()),
    ((), {"a": X, "b": None}, ()),
    ((1,), {}, ()),
    ((1.0,), {}, ()),
    ((True,), {}, ()),
    ((Batch(X),), {}, ()),
    ((Batch(X, flag=True),), {}, ()),
]


def test_different_calls_have_different_signatures():
    signatures = [read_call(*call)[1] for call in CALLS]
    for i, one in enumerate(signatures):
        assert [j for j, other in enumerate(signatures) if one == other] == [i]


@pytest.mark.parametrize("call", CALLS)
def test_leaves_come_in_the_order_of_capture(call):
    leaves, _ = read_call(*call)
    wanted, _, _ = flatten_call(*call)
    assert len(leaves) == len(wanted)
    assert all(a is b or a == b for a, b in zip(leaves, wanted, strict=True))


def test_equal_calls_are_recognised():
    one = read_call((X, {"a": [1, None]}), {"p": X, "q": 2.0}, ())[1]
    other = read_call((X + 1, {"a": [1, None]}), {"q": 2.0, "p": X}, ())[1]
    assert one == other


def test_nan_is_the_same_constant_every_time():
    assert read_call((math.nan,), {}, ())[1] == read_call((math.nan,), {}, ())[1]


def test_objects_that_cannot_be_captured_are_never_recognised():
    thing = object()
    assert read_call((thing,), {}, ())[1] != read_call((thing,), {}, ())[1]


def test_meta_examples_stand_for_tensors_of_the_device():
    example = read_call((X.to("meta"), 3), {}, ())[1]
    assert on_device(example, torch.device("cpu")) == read_call((X, 3), {}, ())[1]
