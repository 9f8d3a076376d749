"""The schedule of a plan as a grid, ranks of the pipeline by time: who computes what when, and who idles.

The times are those that the timeline predicts for the emitted programs; :mod:`autopar.report.grid_drawing` draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.collectives import CollectiveModel
from autopar.cost_models.compute import KernelModel
from autopar.cost_models.errors import UsageError
from autopar.cost_models.schedules import Action, Kind
from autopar.cost_models.timeline import COMPUTE, Timeline, simulate
from autopar.passes.arrange_stages import ACTION
from autopar.passes.base import Program
from autopar.passes.program_cost import ProgramEvents, program_events
from autopar.plan import Plan
from autopar.report.text import duration, plural

SLOWDOWN = 0.2  # of computing by communication beside it, where nobody measured it; as predictions take it
_WIDTH = 118
_FILLS = {Kind.FORWARD: "-", Kind.BACKWARD: "=", Kind.INPUT_GRADIENT: "=", Kind.WEIGHT_GRADIENT: "~", None: "+"}
_IDLE = "."


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Something that keeps a rank busy.

    Attributes:
        action: of the schedule; None for what stands between actions (sums of gradients, reductions).
        start_s, end_s: when, in seconds from the start of the step.
    """

    action: Action | None
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A step as it is predicted.

    Attributes:
        ranks: what each rank of the pipeline does, in the order of time.
        step_s: the end of the last block.
        title: the plan in a line.
    """

    ranks: tuple[tuple[Block, ...], ...]
    step_s: float
    title: str

    def idle(self, rank: int) -> float:
        """Share of the step in which ``rank`` has nothing to do."""
        return 1.0 - sum(b.end_s - b.start_s for b in self.ranks[rank]) / self.step_s if self.step_s else 0.0

    @property
    def bubble(self) -> float:
        """Mean over the ranks of :meth:`idle`."""
        return sum(map(self.idle, range(len(self.ranks)))) / len(self.ranks)

    def label(self, action: Action) -> str:
        """An action as the grid names it: the stage is left out where it is the rank's only one."""
        whole = str(action)
        return whole if self.has_chunks else whole[len(str(action.stage)) :]

    @property
    def has_chunks(self) -> bool:
        """Whether a rank runs several stages."""
        return any(b.action is not None and b.action.stage >= len(self.ranks) for line in self.ranks for b in line)

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of actions that occur."""
        found = {b.action.kind for line in self.ranks for b in line if b.action is not None}
        return [kind for kind in Kind if kind in found]

    def headline(self) -> str:
        """The step and its bubble."""
        return f"a step takes {duration(self.step_s)} without the optimizer; the bubble is {self.bubble:.1%}"


def grid_of(plan: Plan, programs: Sequence[Program], cluster: Cluster) -> Grid:
    """The grid of a plan.

    Args:
        plan: has stages or micro-batches.
        programs: one of each rank of the pipeline.
        cluster: on which their times are predicted.

    Raises:
        UsageError: the plan has no schedule.
    """
    if plan.pp * plan.microbatches == 1:
        raise UsageError("the plan has one stage and one micro-batch, so no schedule; give --pp or --microbatches")
    kernels, collectives = KernelModel(device=cluster.device), CollectiveModel(cluster=cluster)
    rows = [program_events(p, kernels, collectives, rank=i) for i, p in enumerate(programs)]
    timeline = simulate([row.events for row in rows], slowdown=SLOWDOWN)
    lines = tuple(tuple(_blocks(row, timeline)) for row in rows)
    schedule = plan.schedule or "1f1b"
    title = (
        f"{schedule if plan.pp > 1 else 'accumulation'}: {plural(plan.num_stages, 'stage')} on "
        f"{plural(plan.pp, 'rank')}, {plan.microbatches} micro-batches, {cluster.name}"
    )
    return Grid(ranks=lines, step_s=timeline.step_s, title=title)


def _blocks(row: ProgramEvents, timeline: Timeline) -> Iterator[Block]:
    """What one rank does: its sub-programs, and what it computes or waits to have reduced between them."""
    starts, ends = timeline.starts[row.rank], timeline.ends[row.rank]
    busy: list[tuple[float, float, Action | None]] = []
    inside: set[int] = set()
    for call, (_, first, last) in zip(_calls(row.program), row.parts, strict=True):
        places = [i for i in range(first, last) if row.events[i].stream == COMPUTE]
        inside.update(range(first, last))
        if places:
            busy.append((starts[places[0]], ends[places[-1]], call.meta.get(ACTION)))
    for i, event in enumerate(row.events):
        if i not in inside and not event.meets and ends[i] > starts[i]:
            busy.append((starts[i], ends[i], None))
    return _apart(busy)


def _calls(program: Program) -> list[fx.Node]:
    module = program.graph_module
    calls = module.graph.find_nodes(op="call_module")
    return [n for n in calls if isinstance(module.get_submodule(str(n.target)), fx.GraphModule)]


def _apart(busy: Sequence[tuple[float, float, Action | None]]) -> Iterator[Block]:
    """Spans as blocks that do not overlap: actions win, and what stands between them is joined where it touches."""
    named = sorted((b for b in busy if b[2] is not None), key=lambda b: b[:2])
    rest = sorted((b for b in busy if b[2] is None), key=lambda b: b[:2])
    free: list[tuple[float, float]] = []
    last = 0.0
    for start, end, _ in named:
        free.append((last, start))
        last = max(last, end)
    free.append((last, float("inf")))
    found = [Block(action=action, start_s=start, end_s=end) for start, end, action in named]
    gap = 0
    for start, end, _ in rest:
        while free[gap][1] <= start:
            gap += 1
        for low, high in free[gap:]:
            if low >= end:
                break
            if max(low, start) < min(high, end):
                found.append(Block(action=None, start_s=max(low, start), end_s=min(high, end)))
    joined: list[Block] = []
    for block in sorted(found, key=lambda b: (b.start_s, b.end_s)):
        before = joined[-1] if joined else None
        if before and before.action is None and block.action is None and block.start_s <= before.end_s:
            joined[-1] = Block(action=None, start_s=before.start_s, end_s=max(before.end_s, block.end_s))
        else:
            joined.append(block)
    yield from joined


def as_lines(grid: Grid, *, width: int = _WIDTH) -> str:
    """The grid as text, in bands of ``width`` characters: a line a rank, a character a moment."""
    unit_s = _unit_s(grid)
    count = max(1, round(grid.step_s / unit_s))
    rows = [_characters(grid, line, unit_s, count) for line in grid.ranks]
    names = [f"rank {rank}" for rank in range(len(rows))]
    margin = max(map(len, names)) + 2
    room = width - margin
    lines = [grid.title, grid.headline(), _legend(grid, unit_s), ""]
    for start in range(0, count, room):
        if count > room:
            lines.append(f"from {duration(start * unit_s) if start else '0'}")
        lines += [f"{name.ljust(margin)}{row[start : start + room]}" for name, row in zip(names, rows, strict=True)]
        lines.append("")
    shares = "  ".join(f"{name} {grid.idle(rank):.1%}" for rank, name in enumerate(names))
    return "\n".join([*lines, f"idle: {shares}"])


def _unit_s(grid: Grid) -> float:
    """Seconds of one character: most actions have room for their names."""
    needed = sorted(
        (b.end_s - b.start_s) / (len(grid.label(b.action)) + 1)
        for line in grid.ranks
        for b in line
        if b.action is not None and b.end_s > b.start_s
    )
    return needed[len(needed) // 4] if needed else max(grid.step_s, 1e-9) / _WIDTH


def _characters(grid: Grid, blocks: Sequence[Block], unit_s: float, count: int) -> str:
    row = [_IDLE] * count
    for block in blocks:
        start, end = round(block.start_s / unit_s), round(block.end_s / unit_s)
        if block.action is None:
            row[start:end] = "+" * (min(end, count) - start)
            continue
        end = min(max(end, start + 1), count)
        text = grid.label(block.action).ljust(end - start, _FILLS[block.action.kind])
        row[start:end] = text[: end - start]
    return "".join(row)


NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
}


def _legend(grid: Grid, unit_s: float) -> str:
    names = [f"{kind.value}{_FILLS[kind]} {NAMES[kind]}" for kind in grid.kinds]
    what = "stage, kind, micro-batch" if grid.has_chunks else "kind, micro-batch"
    others = f"+ between actions, {_IDLE} idle"
    return f"{what}: {', '.join(names)}; {others}; a character is {duration(unit_s)}"
