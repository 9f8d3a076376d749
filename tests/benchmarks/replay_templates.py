"""GPT and Llama blocks from a row's shapes, captured and priced; the rest of the model is folded from one block."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.cost_models.compute import Op, OpKind
from autopar.cost_models.memory import peak
from autopar.passes.base import InputKind, Phase, StepGraph
from autopar.passes.pricing import buffers, price_graph, recomputed, saved

# Layers outside the tensor-parallel regions, which sequence parallelism splits.
OUTSIDE = frozenset({"norm1", "norm2", "residual1", "residual2", "norm"})
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """What one rank holds of a transformer block, and the micro-batch it runs on."""

    batch: int
    sequence: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    rms: bool
    rope: bool
    bias: bool
    dropout: bool
    dtype: str


class Norm(nn.Module):
    """LayerNorm or RMSNorm under one name, so that its ops are found by their layer."""

    def __init__(self, hidden: int, *, rms: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.bias = None if rms else nn.Parameter(torch.zeros(hidden))
        self.rms = rms

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        return F.rms_norm(x, shape, self.weight) if self.rms else F.layer_norm(x, shape, self.weight, self.bias)


class Residual(nn.Module):
    """Addition to the residual stream, after dropout."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + (F.dropout(y, self.p) if self.p else y)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class Block(nn.Module):
    """A pre-norm transformer block with the local shapes of one tensor-parallel rank."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.head_dim
        self.norm1 = Norm(shape.hidden, rms=shape.rms)
        self.qkv = nn.Linear(shape.hidden, (shape.heads + 2 * shape.kv_heads) * width, bias=shape.bias)
        self.out = nn.Linear(shape.heads * width, shape.hidden, bias=shape.bias)
        self.norm2 = Norm(shape.hidden, rms=shape.rms)
        self.up = nn.Linear(shape.hidden, shape.ffn * (2 if shape.gated else 1), bias=shape.bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.bias)
        self.residual1 = Residual(0.1 if shape.dropout else 0.0)
        self.residual2 = Residual(0.1 if shape.dropout else 0.0)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.shape
        packed = self.qkv(self.norm1(x)).view(s.batch, s.sequence, s.heads + 2 * s.kv_heads, s.head_dim).transpose(1, 2)
        q, k, v = packed.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        if s.rope:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.heads != s.kv_heads)
        x = self.residual1(x, self.out(a.transpose(1, 2).reshape(s.batch, s.sequence, -1)))
        y = self.up(self.norm2(x))
        if s.gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        else:
            y = F.gelu(y)
        return self.residual2(x, self.down(y))


class Head(nn.Module):
    """Final norm, logits and the loss over a (part of the) vocabulary."""

    def __init__(self, hidden: int, vocab: int, *, rms: bool) -> None:
        super().__init__()
        self.norm = Norm(hidden, rms=rms)
        self.logits = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(self.norm(x)).flatten(0, 1).float(), labels)


def block_graph(shape: BlockShape) -> StepGraph:
    """The joint graph of one block."""
    dtype = DTYPES[shape.dtype]
    with torch.device("meta"):
        model = Block(shape).to(dtype)
        x = torch.empty(shape.batch, shape.sequence, shape.hidden, dtype=dtype, requires_grad=True)
        angles = torch.empty(shape.sequence, shape.head_dim, dtype=dtype)
    return capture(model, (x, angles, angles))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """What one rank holds of the final norm and the logits."""

    batch: int
    sequence: int
    hidden: int
    vocab: int
    rms: bool
    dtype: str


def head_graph(shape: HeadShape) -> StepGraph:
    """The joint graph of final norm, logits and loss."""
    dtype = DTYPES[shape.dtype]
    with torch.device("meta"):
        model = Head(shape.hidden, shape.vocab, rms=shape.rms).to(dtype)
        x = torch.empty(shape.batch, shape.sequence, shape.hidden, dtype=dtype, requires_grad=True)
        labels = torch.empty(shape.batch * shape.sequence, dtype=torch.int64)
    return capture(model, (x, labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedOps:
    """A captured block or head in numbers.

    Attributes:
        forward, backward: ops.
        again: what of the forward a recomputing backward runs again.
        saved: (layer, bytes) of the values kept for the backward.
        passing_bytes: the most that is alive beside them and the parameters.
        num_parameters: of this rank.
    """

    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    again: tuple[Op, ...]
    saved: tuple[tuple[str, int], ...]
    passing_bytes: float
    num_parameters: int

    def map(self, change: Callable[[tuple[Op, ...]], tuple[Op, ...]]) -> PricedOps:
        """The same with every list changed."""
        lists = {name: change(getattr(self, name)) for name in ("forward", "backward", "again")}
        return dataclasses.replace(self, **lists)

    def saved_bytes(self, ranks: int) -> float:
        """Kept for the backward, of which what lies outside the tensor-parallel regions is split over ``ranks``."""
        return sum(size / (ranks if layer in OUTSIDE else 1) for layer, size in self.saved)


@functools.cache
def priced(shape: BlockShape | HeadShape, *, fused: bool) -> PricedOps:
    """Ops of a block or head."""
    graph = block_graph(shape) if isinstance(shape, BlockShape) else head_graph(shape)
    costs = price_graph(graph.graph, fused=fused)
    kept = saved(graph.graph, fused=fused)
    lives = [b for b in buffers(graph.graph) if b.kind != "input"]
    held = sum(
        n.meta["val"].numel()
        for n, spec in zip(graph.placeholders, graph.inputs, strict=False)
        if spec.kind is InputKind.PARAMETER
    )
    return PricedOps(
        forward=costs.ops(Phase.FORWARD),
        backward=costs.ops(Phase.BACKWARD),
        again=price_graph(recomputed(graph.graph), fused=fused).ops(),
        saved=tuple((str(node.meta.get("layer", "")), size) for node, size in kept.items()),
        passing_bytes=peak(lives).bytes - sum(kept.values()),
        num_parameters=held,
    )


def split_sequence(ops: tuple[Op, ...], ranks: int) -> tuple[Op, ...]:
    """Ops outside the tensor-parallel regions (norms, residual additions) on a part of the sequence."""
    return tuple(
        dataclasses.replace(op, bytes=op.bytes / ranks, flops=op.flops / ranks) if op.layer in OUTSIDE else op
        for op in ops
    )


def gather_keys(ops: tuple[Op, ...], ranks: int) -> tuple[Op, ...]:
    """Attention of a part of the queries over the keys of all context-parallel ranks."""
    out = []
    for op in ops:
        if op.kind in (OpKind.ATTENTION, OpKind.ATTENTION_BACKWARD):
            q, (b, heads, keys, d) = op.shapes
            out.append(dataclasses.replace(op, shapes=(q, (b, heads, keys * ranks, d)), flops=op.flops * ranks))
        else:
            out.append(op)
    return tuple(out)
