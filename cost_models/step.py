"""The step time of a uniform plan (dp x tp x pp x cp, ZeRO, recompute) from the costs of its layers.

Layers are priced once and folded; stages go through the pipeline simulator; what data parallelism adds comes last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cost_models.cluster import Cluster, Span
from autopar.cost_models.collectives import Collective, CollectiveModel, Transfer
from autopar.cost_models.compute import KernelModel, Op, OpKind, memory_op
from autopar.cost_models.pipeline import StageCost, step_seconds
from autopar.cost_models.stack import StackProfile

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One layer as one rank runs it on one micro-batch.

    Attributes:
        name: shown in reports.
        forward, backward: computations, local shapes.
        forward_transfers, backward_transfers: communications of the layer's own parallelism (tensor, context).
        again, again_transfers: what a backward that kept the layer's input alone runs first.
        num_parameters: held by the rank before ZeRO splits them.
        parameter_bytes: per parameter as the forward uses it.
    """

    name: str
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    forward_transfers: tuple[Transfer, ...] = ()
    backward_transfers: tuple[Transfer, ...] = ()
    again: tuple[Op, ...] = ()
    again_transfers: tuple[Transfer, ...] = ()
    num_parameters: float = 0.0
    parameter_bytes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformPlan:
    """One layout for all layers.

    Attributes:
        dp, tp, pp, cp: ranks of each axis; ``tp`` is laid over neighbouring devices, then cp, dp, pp.
        num_chunks: stages a pipeline rank holds (interleaved schedule).
        num_microbatches: per data-parallel rank.
        zero: 0-3 over dp (and cp).
        recompute: ``none``, ``selective`` (attention) or ``full``.
        schedule: name of the pipeline schedule.
        send_bytes: activation that crosses a stage boundary, per micro-batch and rank.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    num_chunks: int = 1
    num_microbatches: int = 1
    zero: int = 0
    recompute: str = "none"
    schedule: str = "1f1b"
    send_bytes: float = 0.0

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh sizes, outermost axis first."""
        return {axis: int(getattr(self, axis)) for axis in AXES}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Predicted step.

    Attributes:
        step_s: duration.
        parts: seconds by cause, of the busiest stage; they explain the step and need not add up to it.
    """

    step_s: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Prices uniform plans on one cluster.

    Attributes:
        cluster: the machine.
        kernels: prices computations.
        collectives: prices communications.
        stack: habits of the software.
    """

    cluster: Cluster
    kernels: KernelModel
    collectives: CollectiveModel
    stack: StackProfile

    def step(self, stages: Sequence[Sequence[tuple[LayerCost, int]]], plan: UniformPlan) -> StepCost:
        """Price one step.

        Args:
            stages: (layer, how often) of every stage, in order; ``pp * num_chunks`` of them.
            plan: how it is run.

        Returns:
            Step time and its parts.
        """
        spans = self.cluster.axis_levels(plan.sizes)
        layers = {layer.name: layer for stage in stages for layer, _ in stage}
        times = {name: self._layer(layer, plan, spans) for name, layer in layers.items()}
        send_s = 0.0
        if plan.pp > 1:
            send_s = float(self.collectives.seconds(Collective.SEND, plan.send_bytes, spans["pp"]))
            send_s += self.stack.send_host_s
        costs = [
            StageCost(
                forward_s=sum(times[layer.name].forward_s * n for layer, n in stage),
                backward_s=sum(times[layer.name].backward_s * n for layer, n in stage),
                weight_s=sum(times[layer.name].backward_s * n / 2 for layer, n in stage),
                send_s=send_s,
            )
            for stage in stages
        ]
        pipeline_s = step_seconds(
            plan.schedule, plan.pp, plan.num_microbatches, costs, overlap_sends=self.stack.send_overlap
        )
        ranks = [[stages[c * plan.pp + r] for c in range(plan.num_chunks)] for r in range(plan.pp)]
        loads = [sum(layer.num_parameters * n for stage in rank for layer, n in stage) for rank in ranks]
        first = max(range(plan.pp), key=lambda r: loads[r])
        tails = self._data_parallel(loads[first], plan, costs[first :: plan.pp], times, ranks[first])
        nodes = math.prod(plan.sizes.values()) / self.cluster.levels[0].fanout
        jitter = 1 + self.stack.jitter * math.log2(max(1.0, nodes))
        total = (pipeline_s + sum(tails.values())) * jitter + self.stack.step_overhead_s
        busy = max(sum((c.forward_s + c.backward_s) for c in costs[r :: plan.pp]) for r in range(plan.pp))
        parts = {"pipeline": pipeline_s, "busy": busy * plan.num_microbatches, "send": send_s, **tails}
        return StepCost(step_s=total * self.stack.gain, parts=parts)

    def _layer(self, layer: LayerCost, plan: UniformPlan, spans: dict[str, Span]) -> StageCost:
        """Forward and backward of one layer on one micro-batch, with its own communication."""
        forward_s = self._run(layer.forward, layer.forward_transfers, spans)
        backward_s = self._run(layer.backward, layer.backward_transfers, spans)
        if plan.recompute == "full":
            backward_s += self._run(layer.again, layer.again_transfers, spans)
        elif plan.recompute == "selective":
            backward_s += self._run([op for op in layer.again if op.kind is OpKind.ATTENTION], (), spans)
        if plan.zero == 3:
            gather_s, scatter_s = self._shard_seconds(layer, plan)
            forward_s = self._beside(forward_s, gather_s)
            backward_s = self._beside(backward_s, gather_s + scatter_s)
        return StageCost(forward_s=forward_s, backward_s=backward_s)

    def _run(self, ops: Sequence[Op], transfers: Sequence[Transfer], spans: dict[str, Span]) -> float:
        """Computation and the communication that it cannot hide; or the host, when it launches more slowly."""
        sent_s = sum(float(self.collectives.seconds(t.collective, t.bytes, spans[t.group])) for t in transfers)
        expanded = self.kernels.expand(ops)
        device_s = float(self.kernels.seconds(expanded).sum()) if expanded else 0.0
        launches = sum(op.num_kernels for op in expanded)
        device_s += sent_s * (1 - self.stack.tp_overlap)
        return side_by_side(device_s, launches * self.stack.dispatch_s)

    def _beside(self, compute_s: float, transfer_s: float) -> float:
        """Computation and communication side by side, or after one another."""
        if not self.stack.fsdp_overlap:
            return compute_s + transfer_s
        return max(compute_s + self.stack.slowdown * min(compute_s, transfer_s), transfer_s)

    def _group(self, plan: UniformPlan) -> Span:
        return self.cluster.group_span(plan.sizes, "dp+cp")

    def _shard_group(self, plan: UniformPlan) -> tuple[Span, Span | None]:
        """Ranks that split state, and those that replicate the split state."""
        whole = self._group(plan)
        limit = self.stack.shard_ranks
        if not limit or limit >= whole.num_ranks:
            return whole, None
        inner, left = [], limit
        for extent in whole.extents:
            inner.append(math.gcd(extent, left))
            left //= inner[-1]
        outer = tuple(e // i for e, i in zip(whole.extents, inner, strict=True))
        return Span(extents=tuple(inner), stride=whole.stride), Span(extents=outer, stride=whole.stride * limit)

    def _shard_seconds(self, layer: LayerCost, plan: UniformPlan) -> tuple[float, float]:
        """Gathering a layer's parameters and scattering its gradients (and reducing them over the replicas)."""
        shard, replicas = self._shard_group(plan)
        gather = self.collectives.seconds(Collective.ALL_GATHER, layer.num_parameters * layer.parameter_bytes, shard)
        gradient_bytes = layer.num_parameters * self.stack.gradient_bytes
        scatter = self.collectives.seconds(Collective.REDUCE_SCATTER, gradient_bytes, shard)
        if replicas is not None:
            scatter = scatter + self.collectives.seconds(
                Collective.ALL_REDUCE, gradient_bytes / shard.num_ranks, replicas
            )
        return float(gather), float(scatter)

    def _data_parallel(
        self,
        num_parameters: float,
        plan: UniformPlan,
        costs: Sequence[StageCost],
        times: dict[str, StageCost],
        rank: Sequence[Sequence[tuple[LayerCost, int]]],
    ) -> dict[str, float]:
        """What follows the last backward and cannot be hidden: gradients, optimizer, parameters."""
        stack, span = self.stack, self._group(plan)
        shard, _ = self._shard_group(plan)
        gradient_bytes = num_parameters * stack.gradient_bytes
        owners = shard.num_ranks if plan.zero >= 1 else 1
        update = memory_op("optimizer", num_parameters / owners * stack.optimizer_bytes)
        parts = {"optimizer": float(self.kernels.seconds([update])[0])}
        if plan.zero == 3:
            last = max((layer for stage in rank for layer, _ in stage), key=lambda layer: layer.num_parameters)
            gather_s, scatter_s = self._shard_seconds(last, plan)
            parts["first gather, last scatter"] = gather_s + scatter_s
            return parts
        window_s = sum(c.backward_s for c in costs) * stack.dp_overlap
        if plan.zero == 0:
            reduce_s = float(self.collectives.seconds(Collective.ALL_REDUCE, gradient_bytes, span))
            gather_s = 0.0
        else:
            shard_group, replicas = self._shard_group(plan)
            kind = Collective.REDUCE_SCATTER
            if replicas is None:
                reduce_s = float(self.collectives.seconds(kind, gradient_bytes, span))
            else:
                reduce_s = float(self.collectives.seconds(Collective.ALL_REDUCE, gradient_bytes, span))
            gather_s = float(self.collectives.seconds(Collective.ALL_GATHER, num_parameters * 2, shard_group))
        parts["gradients"] = _left(reduce_s, window_s, stack.slowdown)
        parts["parameters"] = _left(gather_s, sum(c.forward_s for c in costs) * stack.gather_overlap, stack.slowdown)
        return parts


def side_by_side(device_s: float, host_s: float) -> float:
    """Device and host in a pipeline: the slower sets the pace, and where they are close each also waits for the other.

    >>> side_by_side(3.0, 0.0), round(side_by_side(1.0, 1.0), 3)
    (3.0, 1.26)
    """
    return float((device_s**3 + host_s**3) ** (1 / 3))


def _left(transfer_s: float, window_s: float, slowdown: float) -> float:
    """What a window of computation leaves of a transfer, and by how much the transfer lengthens the window."""
    hidden = min(transfer_s, window_s)
    return transfer_s - hidden + slowdown * hidden
