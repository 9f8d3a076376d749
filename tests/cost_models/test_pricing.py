"""The bridge from captured graphs to records."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import autopar
from autopar.capture import capture
from autopar.cost_models.cluster import Cluster
from autopar.cost_models.collectives import Collective
from autopar.cost_models.compute import OpKind
from autopar.lower.program import lower
from autopar.passes.base import Mesh, OutputKind, OutputSpec, Phase, Program, StepGraph
from autopar.passes.pricing import buffers, price_graph, price_node, recomputed, saved
from autopar.passes.program_cost import predict

B, T, H = 2, 16, 32


class Block(nn.Module):
    """Attention and a gated projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(H), nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(B, T, 12, 8).transpose(1, 2).split(4, dim=1)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(B, T, H))
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return capture(Block(), (torch.randn(B, T, H, requires_grad=True),))


def test_matmul_flops_of_forward_and_backward(graph: StepGraph) -> None:
    priced = price_graph(graph.graph)
    weights = H * 3 * H + H * H + 2 * H * 4 * H
    for phase, factor in ((Phase.FORWARD, 2), (Phase.BACKWARD, 4)):
        matmuls = [op for op in priced.ops(phase) if op.kind is OpKind.MATMUL]
        assert sum(op.flops for op in matmuls) == factor * B * T * weights
        assert all(op.is_linear for op in matmuls)


def test_causal_attention_counts_half(graph: StepGraph) -> None:
    ops = price_graph(graph.graph).ops()
    (forward,) = [op for op in ops if op.kind is OpKind.ATTENTION]
    (backward,) = [op for op in ops if op.kind is OpKind.ATTENTION_BACKWARD]
    whole = 4 * B * 4 * T * T * 8
    assert forward.flops == pytest.approx(whole * (T + 1) / (2 * T))
    assert backward.flops == pytest.approx(2.5 * forward.flops)


def test_every_op_of_a_block_has_a_formula_and_views_are_free(graph: StepGraph) -> None:
    priced = price_graph(graph.graph)
    assert priced.by_bytes == ()
    assert not {op.name for op in priced.ops()} & {"view", "transpose", "split", "t"}


def test_fusion_saves_traffic_and_keeps_matmuls(graph: StepGraph) -> None:
    eager, fused = price_graph(graph.graph), price_graph(graph.graph, fused=True)
    assert len(fused.ops()) < len(eager.ops())
    assert sum(op.bytes for op in fused.ops()) < sum(op.bytes for op in eager.ops())
    flops = [sum(op.flops for op in p.ops() if op.kind is OpKind.MATMUL) for p in (eager, fused)]
    assert flops[0] == flops[1]


def test_saved_bytes_of_a_block_without_dropout(graph: StepGraph) -> None:
    # fp32: norm out, q k v, attention out, residual, up, gelu = 1+3+1+1+4+4 widths; and statistics and logsumexp.
    wide = B * T * H * 4
    assert sum(saved(graph.graph).values()) == pytest.approx(14 * wide, rel=0.05)


def test_recompute_skips_what_only_leads_to_the_result(graph: StepGraph) -> None:
    again = [op for op in price_graph(recomputed(graph.graph)).ops() if op.kind is OpKind.MATMUL]
    assert len(again) == 3


def test_buffers_cover_the_program(graph: StepGraph) -> None:
    lives = buffers(graph.graph)
    assert all(b.born <= b.dies for b in lives)
    activations = sum(b.bytes for b in lives if b.kind == "activation")
    assert activations == pytest.approx(sum(saved(graph.graph).values()), rel=0.3)


def test_unknown_ops_are_priced_by_bytes_and_named() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cumprod(x, 0).sum()

    priced = price_graph(capture(Odd(), (torch.eye(8, requires_grad=True),)).graph)
    assert any("cumprod" in name for name in priced.by_bytes)
    assert all(op.bytes > 0 for op in priced.ops())


def test_convolutions_and_embeddings() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.conv = nn.Embedding(1000, 8), nn.Conv1d(8, 16, 3, padding=1)

        def forward(self, i: Tensor) -> Tensor:
            return self.conv(self.table(i).transpose(1, 2)).sum()

    priced = price_graph(capture(Net(), (torch.zeros(2, 10, dtype=torch.int64),)).graph)
    assert priced.by_bytes == ()
    forward = {op.name: op for op in priced.ops(Phase.FORWARD)}
    assert forward["convolution"].flops == 2 * 2 * 10 * 8 * 3 * 16
    assert forward["embedding"].bytes == 2 * (2 * 10 * 8 * 4) + 2 * 10 * 8
    backward = {op.name: op for op in priced.ops(Phase.BACKWARD)}
    assert backward["convolution_backward"].flops == 2 * forward["convolution"].flops


def program() -> Program:
    """Two matmuls with an all_reduce over tp between them."""
    g = fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        value = torch.empty(256, 256)
    ops = torch.ops
    x = g.placeholder("x")
    a = g.call_function(ops.aten.mm.default, (x, x))
    r = g.call_function(ops._c10d_functional.all_reduce.default, (a, "sum", "tp"))
    b = g.call_function(ops.aten.mm.default, (x, a))
    w = g.call_function(ops._c10d_functional.wait_tensor.default, (r,))
    out = g.call_function(ops.aten.add.Tensor, (w, b))
    g.output((out,))
    for node in g.nodes:
        node.meta.update(val=value, phase=Phase.FORWARD, layer="net")
    return Program(
        graph_module=fx.GraphModule({}, g),
        inputs=(),
        outputs=(),
        input_tensors=(),
        output_tensors=(),
        mesh=Mesh(axes=("dp", "tp"), sizes=(1, 2)),
        rank=0,
    )


def test_transfers_name_their_group_and_bytes() -> None:
    item = next(i for i in map(price_node, program().graph_module.graph.nodes) if i and "all" in i.node.name)
    assert (item.cost.collective, item.cost.group, item.cost.bytes) == (Collective.ALL_REDUCE, "tp", 256 * 256 * 4)  # type: ignore[union-attr]


def test_a_program_overlaps_what_its_graph_allows() -> None:
    cost = predict([program_with_outputs()], Cluster.parse("2xCPU"), optimizer_bytes_per_parameter_byte=0.0)
    names = [e.name.split()[0] for e in cost.timeline.programs[0]]
    starts = dict(zip(names, cost.timeline.starts[0], strict=True))
    ends = dict(zip(names, cost.timeline.ends[0], strict=True))
    assert starts["second"] == pytest.approx(ends["first"])
    assert starts["sum"] == pytest.approx(ends["first"])
    assert starts[names[-1]] >= max(ends["second"], ends["sum"]) - 1e-12
    assert cost.sent_bytes == {"tp": 256 * 256 * 4}
    assert cost.peak.bytes >= 3 * 256 * 256 * 4


def test_stages_wait_for_each_others_messages() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    x, y = torch.randn(8, 32), torch.randn(8, 32)

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return ((out - target) ** 2).mean()

    cluster = Cluster.parse("2xCPU")
    constraints = autopar.Constraints(pp=2, microbatches=2)
    plan = autopar.plan(model, (x,), cluster=cluster, loss_fn=loss_fn, targets=(y,), constraints=constraints)
    step = capture(model, (x,), loss_fn=loss_fn, targets=(y,))
    programs = [lower(step, plan, rank) for rank in (0, 1)]
    together = predict(programs, cluster)
    alone = [predict([p], cluster).timeline.step_s for p in programs]
    assert together.timeline.step_s > max(alone)
    received = [e.meets for e in together.timeline.programs[1] if e.meets]
    assert sorted(received) == sorted(e.meets for e in together.timeline.programs[0] if e.meets)


def program_with_outputs() -> Program:
    p = program()
    for node, name in zip(list(p.graph_module.graph.nodes)[1:], ("first", "sum", "second"), strict=False):
        node.name = name
    return Program(
        graph_module=p.graph_module,
        inputs=(),
        outputs=(OutputSpec(kind=OutputKind.RESULT, name="result[0]"),),
        input_tensors=(),
        output_tensors=(None,),
        mesh=p.mesh,
        rank=0,
    )
