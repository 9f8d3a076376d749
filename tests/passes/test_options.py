"""Options: which atoms of which dims may be split, found by passing the cuts of views along the graph."""

import pytest
import torch
from torch import nn

from autopar.passes.base import InputKind
from autopar.passes.options import Families, batch_inputs, replicated, shape_of, value_of
from autopar.passes.placement import PARTIAL, REPLICATE, Partial, Shard, make_shard
from tests.passes.prepared import Lambda, ready
from tests.passes.random_models import Random, random_model


def storage_of(prepared, name, num_ranks):
    (node,) = [n for n, s in zip(prepared.normal.placeholders, prepared.normal.inputs, strict=True) if s.name == name]
    return prepared.space.storage(node, num_ranks)


def test_a_matrix_product_offers_its_three_factors_and_two_linearities():
    prepared = ready(Lambda(lambda m, x: x @ m.w, w=torch.randn(4, 6)), torch.randn(8, 4))
    node = prepared.node("aten::mm")
    found = {c.label: (c.inputs, c.outputs) for c in prepared.space.choices(node, 2)}
    r, s0, s1 = REPLICATE, Shard(0, 1, 2), Shard(1, 1, 2)
    assert found == {
        "R": ((r, r), (r,)),
        "m": ((s0, r), (s0,)),
        "k": ((s1, s0), (PARTIAL,)),
        "n": ((r, s1), (s1,)),
        "linear:0": ((PARTIAL, r), (PARTIAL,)),
        "linear:1": ((r, PARTIAL), (PARTIAL,)),
    }


def test_a_bias_beside_a_split_contraction_is_partial():
    prepared = ready(nn.Linear(4, 6), torch.randn(8, 4))
    choice = prepared.choice(prepared.node("aten::addmm"), "k", 2)
    assert choice.inputs == (PARTIAL, Shard(1, 1, 2), Shard(0, 1, 2))


class Packed(nn.Module):
    """[Q | K | V] in one weight, then heads."""

    def __init__(self, heads, width):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(12, 3 * heads * width, bias=False)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in self.qkv(x).chunk(3, -1))
        return torch.einsum("bthd,bshd,bshe->bthe", q, k, v).flatten(-2)


def test_packed_weights_are_split_in_each_part():
    prepared = ready(Packed(4, 2), torch.randn(2, 3, 12))
    assert Shard(0, 3, 2) in storage_of(prepared, "qkv.weight", 2)
    assert Shard(0, 3, 4) in storage_of(prepared, "qkv.weight", 4)
    labels = [c.label for c in prepared.space.choices(prepared.node("aten::mm"), 4)]
    assert "n:3:4" in labels


def test_heads_decide_how_many_parts_there_can_be():
    """Three heads of width 4 are 12 columns: 4 ranks can share columns, not heads."""
    prepared = ready(Packed(3, 4), torch.randn(2, 3, 12))
    offered = storage_of(prepared, "qkv.weight", 3)
    assert Shard(0, 3, 3) in offered
    batched = prepared.node("aten::bmm")
    assert all(c.factor != "b" or c.blocks > 1 or c.units != 4 for c in prepared.space.choices(batched, 4))


def test_uneven_parts_are_kept_only_as_torch_chunk_cuts_a_whole_dim():
    prepared = ready(Packed(5, 2), torch.randn(2, 3, 12))
    node = prepared.node("aten::mm")
    assert "n:3:5" in [c.label for c in prepared.space.choices(node, 2)]
    kept = [p for p in storage_of(prepared, "qkv.weight", 2) if isinstance(p, Shard)]
    assert kept
    assert all(p.units == 2 for p in kept)
    whole = ready(nn.Linear(4, 7, bias=False), torch.randn(8, 4))
    assert Shard(0, 1, 7) in storage_of(whole, "weight", 2)


def test_a_flattened_batch_and_sequence_keep_their_atoms():
    prepared = ready(nn.Linear(4, 6), torch.randn(8, 3, 4))
    labels = {c.label: c.inputs[1] for c in prepared.space.choices(prepared.node("aten::addmm"), 3)}
    assert labels["m:8:3"] == Shard(0, 8, 3)  # the sequence
    assert labels["m:1:8"] == Shard(0, 1, 8)  # the batch, unevenly


def test_a_dim_that_is_too_short_offers_nothing():
    prepared = ready(Lambda(lambda m, x: x @ m.w, w=torch.randn(4, 3)), torch.randn(8, 4))
    assert not [c for c in prepared.space.choices(prepared.node("aten::mm"), 4) if c.factor == "n"]


def test_an_output_without_a_split_factor_is_reduced_as_its_row_says():
    prepared = ready(Lambda(lambda m, x: x.amax(0)), torch.randn(8, 4, requires_grad=True))
    (choice,) = [c for c in prepared.space.choices(prepared.node("aten::amax"), 2) if c.factor == "d0"]
    assert choice.outputs == (Partial("max"),)


@pytest.mark.parametrize("seed", range(4))
def test_labels_tell_choices_apart_and_the_first_is_whole(seed):
    model, args = random_model(Random(seed))
    prepared = ready(model, *args)
    for node, row in prepared.rows.items():
        for num_ranks in (2, 3):
            choices = prepared.space.choices(node, num_ranks)
            assert choices[0] == replicated(row)
            assert len({c.label for c in choices}) == len(choices)
            assert len({(c.inputs, c.outputs) for c in choices}) == len(choices)
            for choice in choices:
                assert len(choice.inputs) == len(prepared.space.tensors[node])


def test_a_family_runs_through_the_whole_step():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    prepared = ready(model, torch.randn(8, 4))
    families = Families(prepared.space, 2)
    (batch,) = batch_inputs(prepared.normal.placeholders, prepared.normal.inputs)
    root = families.find(((batch, 0), make_shard(0, 1, 8, 2)))
    rows = [n for n in prepared.rows if shape_of((n, 0))[:1] == (8,)]
    assert rows
    assert all(families.find(((n, 0), Shard(0, 1, 2))) == root for n in rows)
    hidden = [n for n in prepared.rows if shape_of((n, 0)) == (8, 6)]
    assert len({families.find(((n, 0), Shard(1, 1, 2))) for n in hidden}) == 1


def test_outputs_of_a_call_are_looked_through():
    prepared = ready(Lambda(lambda m, x: x.chunk(2, -1)[1] * 2), torch.randn(4, 6, requires_grad=True))
    mul = next(n for n in prepared.rows if "mul" in n.name)
    node, index = value_of(mul.args[0])
    assert (node.op, shape_of((node, index))) == ("call_function", (4, 3))
    assert any(s.kind is InputKind.BATCH for s in prepared.normal.inputs)
