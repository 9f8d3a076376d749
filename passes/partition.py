"""The partitioner: from one device's step and a choice per call and mesh axis to the program of one rank.

Each call becomes itself on local tensors (with local sizes where its arguments hold some), a small program of its rule,
or itself on whole tensors.  Wherever a value lies otherwise than its consumer wants, the steps of
:mod:`autopar.passes.redistribute` are inserted, once per (value, layout, phase).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.cost_models.errors import PartitionError
from autopar.passes.base import InputKind, InputSpec, Mesh, OutputKind, Phase, Program, ProgramTensor, StepGraph
from autopar.passes.lowering import Emitter, LocalContext, Memo
from autopar.passes.options import Choice, Value, replicated, shape_of, value_of
from autopar.passes.placement import REPLICATE, Layout, Partial, local_shape
from autopar.passes.random import SEED_NAME, lower_random
from autopar.passes.redistribute import MICROBATCHES, Redistributor, steps, wire_bytes
from autopar.passes.rules.row import Call, Row, is_getitem
from autopar.passes.rules.strides import takes_any_strides
from autopar.passes.rules.table import op_name
from autopar.passes.torch_ops import LazyGraphModule

RESHAPES = frozenset({"aten::view", "aten::_unsafe_view", "aten::reshape"})


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What the partitioner is told: a choice per call and axis, and where inputs are kept.

    Attributes:
        mesh: the grid of ranks.
        choices: for a call's node name, one Choice per mesh axis; calls not named run replicated.
        storage: layout of every input of the step, by name; inputs not named are replicated.
        gather_once: keep a gathered parameter from forward to backward (ZeRO 1 and 2), instead of gathering per phase.
        reduce_dtype: dtype in which gradients of lower precision are summed over ranks; None sums in their own.
    """

    mesh: Mesh
    choices: Mapping[str, tuple[Choice, ...]]
    storage: Mapping[str, Layout] = field(default_factory=dict)
    gather_once: bool = False
    reduce_dtype: torch.dtype | None = torch.float32


def partition(
    step: StepGraph,
    rows: Mapping[fx.Node, Row],
    assignment: Assignment,
    rank: int,
    *,
    rng: str = "fast",
    memo: Memo | None = None,
) -> Program:
    """The program of ``rank``.

    Args:
        step: one device's step.
        rows: the row of every call (``rules.table.rows_of``).
        assignment: what to split how.
        rank: which rank's program.
        rng: "fast" or "exact" (see :mod:`autopar.passes.random`).
        memo: shapes that earlier partitionings of the same step found; pass one dict for all ranks to save time.

    Raises:
        PartitionError: a choice does not fit its call, or two axes split one atom of a dim.
    """
    return Partitioner(step, rows, assignment, rank, rng, {} if memo is None else memo).run()


class Partitioner:
    """State of one partitioning; see :func:`partition`."""

    def __init__(
        self, step: StepGraph, rows: Mapping[fx.Node, Row], assignment: Assignment, rank: int, rng: str, memo: Memo
    ) -> None:
        self.step, self.rows, self.assignment, self.rank, self.rng = step, rows, assignment, rank, rng
        mesh = assignment.mesh
        self.axes, self.sizes, self.coords = mesh.axes, mesh.sizes, mesh.coords(rank)
        self.graph = fx.Graph()
        self.emitter = Emitter(self.graph, fake_mode_of(step), memo)
        self.mover = Redistributor(self.emitter, self.axes, self.sizes, self.coords)
        self.whole: Layout = tuple(REPLICATE for _ in self.axes)
        self.values: dict[Value, fx.Node] = {}
        self.layouts: dict[Value, Layout] = {}
        self.cache: dict[tuple[Value, Layout, Phase | None], fx.Node] = {}
        self.root = torch.nn.Module()
        self.seed: fx.Node | None = None
        self.draws = 0
        self.forms: dict[tuple[Value, Phase | None], dict[Layout, fx.Node]] = {}
        self.wanted = self._wanted_outputs()
        self.parameters: set[Value] = set()

    def run(self) -> Program:
        """Emit everything."""
        for node, spec in zip(self.step.placeholders, self.step.inputs, strict=True):
            self._placeholder(node, spec)
        draws = any(self.rows[n].random for n in self.step.graph.nodes if n in self.rows)
        if draws and self.rng == "fast":
            self.seed = self.graph.placeholder(SEED_NAME)
            with self.emitter.fake_mode:
                self.seed.meta["val"] = torch.empty((), dtype=torch.int64)
        for node in self.step.graph.nodes:
            if node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function" and not is_getitem(node):
                self._call(node)
        outputs, tensors = self._outputs()
        self.graph.output(tuple(outputs))
        module = LazyGraphModule(self.root, self.graph)
        return Program(
            graph_module=module,
            inputs=self.step.inputs,
            outputs=self.step.outputs,
            input_tensors=tuple(self._tensor((n, 0), self.layouts[(n, 0)]) for n in self.step.placeholders),
            output_tensors=tuple(tensors),
            mesh=self.assignment.mesh,
            rank=self.rank,
            seed_input=None if self.seed is None else SEED_NAME,
        )

    def _tensor(self, value: Value, layout: Layout) -> ProgramTensor:
        return ProgramTensor(layout=layout, shape=shape_of(value), dtype=fake_of(value).dtype)

    def _placeholder(self, node: fx.Node, spec: InputSpec) -> None:
        layout = self.assignment.storage.get(spec.name, self.whole)
        new = self.graph.placeholder(node.name)
        fake = node.meta["val"]
        shape = local_shape(tuple(fake.shape), layout, self.sizes, self.coords)
        with self.emitter.fake_mode:
            new.meta["val"] = fake if layout == self.whole else torch.empty(shape, dtype=fake.dtype, device=fake.device)
        self.emitter.describe(node)
        new.meta.update(self.emitter.meta)
        if spec.kind is InputKind.PARAMETER:
            self.parameters.add((node, 0))
        self._define((node, 0), new, layout)

    def _constant(self, node: fx.Node) -> None:
        name = str(node.target)
        if not hasattr(self.root, name):
            self.root.register_buffer(name, getattr(self.step.graph_module, name))
        new = self.graph.get_attr(name)
        new.meta["val"] = node.meta["val"]
        self.emitter.describe(node)
        new.meta.update(self.emitter.meta)
        self._define((node, 0), new, self.whole)

    def _define(self, value: Value, new: fx.Node, layout: Layout) -> None:
        self.values[value] = new
        self.layouts[value] = layout
        new.meta.update(origin=value[0].name, layout=layout, global_shape=shape_of(value))
        if value[1] or isinstance(value[0].meta["val"], (list, tuple)):
            new.meta["origin_index"] = value[1]
        for wanted in self.wanted.get(value, ()):
            # A reduction that an output needs starts right after its producer, to run beside what follows.
            self._fetch(value, wanted, None)

    def _fetch(self, value: Value, layout: Layout, phase: Phase | None) -> fx.Node:
        """The value in ``layout``, redistributed where it lies otherwise."""
        have = self.layouts[value]
        if have == layout:
            return self.values[value]
        if self.assignment.gather_once and value in self.parameters:
            phase = None
        elif phase is not None and any(isinstance(p, Partial) for p in have):
            # The reduced value is no larger than its terms, which are kept anyway: backward uses that of forward.
            phase = Phase.FORWARD
        key = (value, layout, phase)
        if key not in self.cache:
            raised = phase is None and self._raise_precision(value)
            node, have = (self.values[value], have) if raised else self._nearest(value, layout, phase)
            if raised:
                node = self.emitter.call("_to_copy", node, dtype=self.assignment.reduce_dtype)
            out = self.mover.run(node, have, layout, shape_of(value))
            if raised:
                out = self.emitter.call("_to_copy", out, dtype=fake_of(value).dtype)
            out.meta["layout"] = layout
            out.meta["global_shape"] = shape_of(value)
            self.cache[key] = out
            self.forms.setdefault((value, phase), {})[layout] = out
        return self.cache[key]

    def _nearest(self, value: Value, layout: Layout, phase: Phase | None) -> tuple[fx.Node, Layout]:
        """The form of the value, among those at hand, from which ``layout`` takes the fewest bytes on the wire."""
        forms = {self.layouts[value]: self.values[value], **self.forms.get((value, phase), {})}
        shape, itemsize = shape_of(value), fake_of(value).dtype.itemsize
        origin = tuple(0 for _ in self.axes)

        def cost(have: Layout) -> float:
            total = 0.0
            for step in steps(have, layout, shape, self.sizes):
                # As the first rank sees it: uneven parts must not lead ranks to different choices.
                both = (local_shape(shape, side, self.sizes, origin) for side in (step.before, step.after))
                largest = max(math.prod(side) for side in both) * itemsize
                total += wire_bytes(step.kind, self.sizes[step.axis], largest)
            return total

        if len(forms) == 1:
            return self.values[value], self.layouts[value]
        best = min(forms, key=cost)
        return forms[best], best

    def _raise_precision(self, value: Value) -> bool:
        dtype, wide = fake_of(value).dtype, self.assignment.reduce_dtype
        if wide is None or not dtype.is_floating_point or dtype.itemsize >= wide.itemsize:
            return False
        return any(isinstance(p, Partial) for p in self.layouts[value])

    def _call(self, node: fx.Node) -> None:
        row = self.rows.get(node)
        if row is None:
            raise PartitionError(f"{node.format_node()} has no row: rows_of() must cover every call")
        call = Call(node)
        choices = self.assignment.choices.get(node.name) or tuple(replicated(row) for _ in self.axes)
        self.emitter.describe(node)
        phase = node.meta.get("phase", Phase.FORWARD)
        tensors = []
        for i, source in enumerate(call.tensors):
            layout = tuple(c.inputs[i] for c in choices)
            tensors.append(self._fetch(value_of(source), layout, phase))
        self.emitter.describe(node)
        if not takes_any_strides(call.op):
            pairs = zip(tensors, call.tensors, strict=True)
            tensors = [self.emitter.contiguous(t) if s.meta["val"].is_contiguous() else t for t, s in pairs]
        context = LocalContext(
            emitter=self.emitter,
            call=call,
            row=row,
            tensors=tensors,
            choices=choices,
            axes=self.axes,
            sizes=self.sizes,
            coords=self.coords,
        )
        result = self._emit(context)
        self._bind_outputs(node, result, context)

    def _emit(self, ctx: LocalContext) -> Any:
        row, factors = ctx.row, ctx.split_factors
        if row.random:
            self.draws += 1
            return lower_random(ctx, self.rng, self.seed, self.draws - 1)
        if op_name(ctx.call.op) in RESHAPES:
            # A local view may be illegal where the global one was not (other strides): reshape copies when it must.
            return self.emitter.main_call("reshape", ctx.tensor(0), list(ctx.local_output_shape(0)))
        if not factors:
            return ctx.emit_unchanged()
        special = [row.lowerings[f] for f in sorted(factors) if f in row.lowerings]
        if special:
            return special[0](ctx)
        if row.lower is not None:
            return row.lower(ctx)
        replaced: dict[str, Any] = {}
        for name, index in row.shape_args.items():
            replaced[name] = list(ctx.local_output_shape(index))
        if row.localize is not None:
            replaced.update(row.localize(ctx))
        return ctx.emit_call(replaced)

    def _bind_outputs(self, node: fx.Node, result: Any, ctx: LocalContext) -> None:
        multi = isinstance(node.meta["val"], (list, tuple))
        if not multi:
            self._check(ctx, result, 0)
            self._define((node, 0), result, ctx.output_layout(0))
            return
        used = {value_of(user)[1] for user in node.users if is_getitem(user)}
        for index, dims in enumerate(ctx.row.outputs):
            if dims is None or index not in used:
                continue
            self.emitter.describe(node)
            new = self.emitter.getitem(result, index) if isinstance(result, fx.Node) else result[index]
            self._check(ctx, new, index)
            self._define((node, index), new, ctx.output_layout(index))

    def _check(self, ctx: LocalContext, new: fx.Node, index: int) -> None:
        """What the local call made must have the shape that the choice promises."""
        want = ctx.local_output_shape(index)
        got = tuple(new.meta["val"].shape)
        if got != want:
            labels = [c.label for c in ctx.choices]
            raise PartitionError(
                f"{ctx.call.node.format_node()}: split as {labels}, output {index} has local shape {got} where {want} "
                f"was expected; the rule of {ctx.call.op} is wrong for this call"
            )

    def _wanted_outputs(self) -> dict[Value, list[Layout]]:
        """Layouts in which the step's outputs leave, by value (None there: any layout that is not Partial)."""
        wanted: dict[Value, list[Layout]] = {}
        for spec, node in zip(self.step.outputs, self.step.results, strict=True):
            kept = spec.kind in (OutputKind.GRADIENT, OutputKind.MUTATION, OutputKind.INPUT_GRADIENT)
            if kept and isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor):
                layout = self.assignment.storage.get(spec.name, self.whole)
                wanted.setdefault(value_of(node), []).append(layout)
        return wanted

    def _outputs(self) -> tuple[list[Any], list[ProgramTensor | None]]:
        nodes: list[Any] = []
        tensors: list[ProgramTensor | None] = []
        for spec, node in zip(self.step.outputs, self.step.results, strict=True):
            if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
                nodes.append(None if node is None else self.values[value_of(node)])
                tensors.append(None)
                continue
            value = value_of(node)
            self.emitter.describe(node)
            if spec.kind in (OutputKind.LOSS, OutputKind.RESULT):
                layout: Layout = tuple(
                    REPLICATE if isinstance(p, Partial) or axis == MICROBATCHES else p
                    for axis, p in zip(self.axes, self.layouts[value], strict=True)
                )
                if not shape_of(value):
                    layout = self.whole
            else:
                layout = self.assignment.storage.get(spec.name, self.whole)
            nodes.append(self._fetch(value, layout, None))
            tensors.append(self._tensor(value, layout))
        return nodes, tensors


def fake_of(value: Value) -> torch.Tensor:
    """The fake tensor of a value."""
    meta = value[0].meta["val"]
    tensor: torch.Tensor = meta[value[1]] if isinstance(meta, (list, tuple)) else meta
    return tensor


def fake_mode_of(step: StepGraph) -> Any:
    """The fake tensor mode that the step's values belong to."""
    for node in step.graph.nodes:
        meta = node.meta.get("val")
        for value in meta if isinstance(meta, (list, tuple)) else (meta,):
            mode = getattr(value, "fake_mode", None)
            if mode is not None:
                return mode
    raise PartitionError("the step's nodes carry no fake tensors: capture it first")
