"""What a rank holds: parameters, gradients, optimizer state, activations in flight, and who owns the peak.

Two views.  :func:`peak` walks buffers with a birth and a death, in the order a program runs; it serves emitted graphs.
:func:`step_memory` folds layers of a uniform plan: state, what each micro-batch in flight keeps, and the largest
passing need.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost_models.errors import ConstraintError
from autopar.cost_models.schedules import Action, Kind, build
from autopar.cost_models.stack import StackProfile
from autopar.cost_models.step import UniformPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Memory taken from the moment ``born`` through the moment ``dies`` (positions in the program).

    Attributes:
        name: of the value.
        layer: dotted path of the module it belongs to.
        kind: ``parameter``, ``gradient``, ``optimizer``, ``input``, ``activation`` or ``temporary``.
        bytes: size.
    """

    name: str
    bytes: float
    born: int
    dies: int
    layer: str = ""
    kind: str = "activation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment of most memory.

    Attributes:
        bytes: how much.
        at: position in the program.
        owners: (layer, kind) to bytes of what was alive, largest first.
    """

    bytes: float
    at: int
    owners: tuple[tuple[str, str, float], ...]


def peak(buffers: Iterable[Buffer]) -> Peak:
    """The most that is alive at once, and whose it is.

    >>> a, b = Buffer(name="a", bytes=3, born=0, dies=1), Buffer(name="b", bytes=4, born=1, dies=2)
    >>> peak([a, b]).bytes, peak([a, b]).at
    (7.0, 1)
    """
    items = list(buffers)
    edges = sorted([(b.born, 0, b.bytes) for b in items] + [(b.dies, 1, -b.bytes) for b in items])
    alive = best = 0.0
    at = 0
    for time, _, change in edges:
        alive += change
        if alive > best:
            best, at = alive, time
    owners: dict[tuple[str, str], float] = {}
    for b in items:
        if b.born <= at <= b.dies:
            owners[b.layer, b.kind] = owners.get((b.layer, b.kind), 0.0) + b.bytes
    ordered = sorted(((*key, size) for key, size in owners.items()), key=lambda o: -o[2])
    return Peak(bytes=float(best), at=at, owners=tuple(ordered))


def alive(buffers: Iterable[Buffer], length: int) -> list[float]:
    """Bytes held at every position of a program of ``length`` positions.

    >>> a, b = Buffer(name="a", bytes=3, born=0, dies=1), Buffer(name="b", bytes=4, born=1, dies=5)
    >>> alive([a, b], 3)
    [3.0, 7.0, 4.0]
    """
    change = [0.0] * (length + 1)
    for b in buffers:
        change[min(b.born, length)] += b.bytes
        change[min(b.dies + 1, length)] -= b.bytes
    return list(itertools.accumulate(change[:length]))


# Bytes of state per parameter beside the parameter itself, by optimizer.
_OPTIMIZER_BYTES: Mapping[str, float] = {
    "none": 0.0,
    "sgd": 0.0,
    "sgd_momentum": 4.0,
    "adam": 8.0,
    "adamw": 8.0,
    "adam8bit": 2.0,
    "adafactor": 0.1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes a parameter costs on one rank, split as ``zero`` says.

    Attributes:
        parameter: the copy that computes.
        gradient: what is accumulated.
        optimizer: moments and, with low-precision parameters, the fp32 master copy.
    """

    parameter: float
    gradient: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameter + self.gradient + self.optimizer


def state_bytes(  # noqa: PLR0913 -- the ways in which state is kept
    *,
    optimizer: str = "adamw",
    parameter_bytes: int = 4,
    gradient_bytes: int = 4,
    master: bool = False,
    zero: int = 0,
    shard_ranks: int = 1,
    full_copy: bool = True,
) -> StateBytes:
    """Bytes per parameter of a rank.

    Args:
        optimizer: sgd, sgd_momentum, adam, adamw, adam8bit, adafactor or none.
        parameter_bytes: of the parameter as it computes: 4, or 2 in half precision.
        gradient_bytes: of the accumulated gradient.
        master: whether the optimizer keeps an fp32 copy beside half-precision parameters.
        zero: 1 splits optimizer state over ``shard_ranks``, 2 also gradients, 3 also parameters.
        shard_ranks: ranks that share the state.
        full_copy: whether the full parameters of zero 1 and 2 stay for the whole step.

    Raises:
        ConstraintError: the optimizer is not known.

    >>> state_bytes(optimizer="adamw", parameter_bytes=2, gradient_bytes=4, master=True).total
    18.0
    >>> state_bytes(optimizer="adamw", zero=3, shard_ranks=8).total
    2.0
    """
    if optimizer not in _OPTIMIZER_BYTES:
        raise ConstraintError(f"optimizer {optimizer!r} is not known; use one of {', '.join(_OPTIMIZER_BYTES)}")
    moments = _OPTIMIZER_BYTES[optimizer] + (4.0 if master else 0.0)
    parameter = parameter_bytes / (shard_ranks if zero >= 3 or (zero and not full_copy) else 1)
    return StateBytes(
        parameter=parameter,
        gradient=gradient_bytes / (shard_ranks if zero >= 2 else 1),
        optimizer=moments / (shard_ranks if zero >= 1 else 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """What one layer holds on one rank for one micro-batch.

    Attributes:
        name: shown as the owner.
        num_parameters: of the rank, before ZeRO splits them.
        saved_bytes: kept from forward to backward when nothing is recomputed.
        attention_bytes: the part of ``saved_bytes`` that selective recompute drops.
        input_bytes: what full recompute keeps.
        passing_bytes: the most that is alive for a moment inside the layer, beside what is saved.
    """

    name: str
    num_parameters: float = 0.0
    saved_bytes: float = 0.0
    attention_bytes: float = 0.0
    input_bytes: float = 0.0
    passing_bytes: float = 0.0

    def kept_bytes(self, recompute: str) -> float:
        """Kept per micro-batch in flight.

        >>> LayerMemory(name="block", saved_bytes=10, attention_bytes=4, input_bytes=1).kept_bytes("selective")
        6
        """
        if recompute == "full":
            return min(self.input_bytes, self.saved_bytes)
        return self.saved_bytes - (self.attention_bytes if recompute == "selective" else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCost:
    """Peak of one rank.

    Attributes:
        bytes: the peak, as the stack's meter shows it.
        parts: bytes by cause.
        owner: the largest part, in words.
        rank: pipeline rank.
    """

    bytes: float
    rank: int
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """The largest part."""
        return max(self.parts, key=lambda k: self.parts[k])


def step_memory(
    stages: Sequence[Sequence[tuple[LayerMemory, int]]],
    plan: UniformPlan,
    stack: StackProfile,
    state: StateBytes,
    *,
    workspace_bytes: float = 0.0,
    context_bytes: float = 0.0,
) -> tuple[MemoryCost, ...]:
    """Peak of every pipeline rank.

    Args:
        stages: (layer, how often) of every stage; ``pp * num_chunks`` of them.
        plan: how it is run.
        stack: habits of the software (what its meter counts).
        state: bytes per parameter.
        workspace_bytes: of the matmul libraries, inside the allocator.
        context_bytes: outside the allocator; counted by the ``device`` meter.

    Returns:
        One cost a pipeline rank.
    """
    schedule = build(plan.schedule, plan.pp, _steady(plan), plan.num_chunks)
    costs = []
    for rank, line in enumerate(schedule.ranks):
        held = [item for c in range(plan.num_chunks) for item in stages[c * plan.pp + rank]]
        parameters = sum(layer.num_parameters * n for layer, n in held)
        activations, passing = _walk(line, stages, plan)
        parts = {
            "parameters": parameters * state.parameter,
            "gradients": parameters * state.gradient,
            "optimizer": parameters * state.optimizer,
            "activations": activations,
            "passing": passing,
            "workspace": workspace_bytes,
        }
        if stack.memory_meter == "device":
            parts["context"] = context_bytes
        costs.append(MemoryCost(bytes=sum(parts.values()), rank=rank, parts=parts))
    return tuple(costs)


def _walk(
    line: Sequence[Action], stages: Sequence[Sequence[tuple[LayerMemory, int]]], plan: UniformPlan
) -> tuple[float, float]:
    """(bytes kept for backwards, bytes of the action itself) at the moment of their largest sum."""
    kept = {a.stage: sum(layer.kept_bytes(plan.recompute) * n for layer, n in stages[a.stage]) for a in line}
    passing = {a.stage: _passing(stages[a.stage], plan) for a in line}
    alive, best = 0.0, (0.0, 0.0)
    for action in line:
        if action.kind is Kind.FORWARD:
            alive += kept[action.stage]
        best = max(best, (alive, passing[action.stage]), key=sum)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
            alive -= kept[action.stage]
    return best


def _steady(plan: UniformPlan) -> int:
    """Micro-batches after which no more are in flight, in whole rounds for interleaved schedules."""
    if plan.schedule == "gpipe":
        return plan.num_microbatches
    most = 2 * plan.pp
    if plan.num_microbatches <= most:
        return plan.num_microbatches
    return most


def _passing(stage: Sequence[tuple[LayerMemory, int]], plan: UniformPlan) -> float:
    """The most one layer of the stage needs while it runs, beside what is kept."""
    need = 0.0
    for layer, _ in stage:
        again = {"full": layer.saved_bytes - layer.kept_bytes("full"), "selective": layer.attention_bytes}
        need = max(need, layer.passing_bytes + again.get(plan.recompute, 0.0))
    if plan.zero == 3:
        # The layer in use, and the next one on its way, are whole.
        need += 2 * 2.0 * max((layer.num_parameters for layer, _ in stage), default=0.0)
    return need
