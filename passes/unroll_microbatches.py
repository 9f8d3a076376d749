"""From the folded programs of a rank's micro-batches to its whole step.

A rank emits its own of the events that :mod:`autopar.passes.arrange_stages` put into one order; when another rank's
event makes something that this rank needs, it posts the receive.  Two ranks thus post what they exchange in the same
order, so that no wait can be circular, even where a send blocks until it is received.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from autopar.cost_models.errors import PartitionError
from autopar.cost_models.schedules import Action
from autopar.passes.arrange_stages import ACTION, ONCE, Arrangement, Event, Part
from autopar.passes.base import InputKind, Mesh, OutputKind, Phase, Program, ProgramTensor
from autopar.passes.lowering import Emitter
from autopar.passes.microbatch import Fold, Ref, is_draw, is_number
from autopar.passes.placement import REPLICATE, Layout
from autopar.passes.redistribute import MICROBATCHES
from autopar.passes.split_stages import stage_of_input
from autopar.passes.torch_ops import ALL_REDUCE, IRECV, ISEND, WAIT, pytree

MOST_SENDS = 2  # sends to one rank that may be under way before the oldest is waited for
PIPELINE = "pp"
COMBINE: Mapping[str, str] = {"sum": "add.Tensor", "max": "maximum", "min": "minimum"}


class Unroll:
    """Emits the step of one rank; see the module.

    Args:
        fold: the folded programs of the rank's place on the mesh of one stage.
        layout: who runs what.
        mesh: the grid of all ranks; has an axis "pp" where there are several stages.
        rank: the rank.
    """

    def __init__(self, fold: Fold, layout: Arrangement, mesh: Mesh, rank: int) -> None:
        self.fold, self.layout, self.mesh, self.rank = fold, layout, mesh, rank
        self.place = mesh.coords(rank)[mesh.axes.index(PIPELINE)] if PIPELINE in mesh.axes else 0
        self.first = fold.programs[0]
        self.graph = fx.Graph()
        fake = next(n.meta["val"] for n in fold.nodes if hasattr(n.meta.get("val"), "fake_mode"))
        self.emitter = Emitter(self.graph, fake.fake_mode)
        self.root = torch.nn.Module()
        self.values: dict[tuple[int, int], fx.Node] = {}
        self.partial: dict[int, list[fx.Node]] = {}
        self.given: dict[int, int] = {}
        self.pending: dict[tuple[int, int], fx.Node] = {}
        self.sends: dict[int, deque[fx.Node]] = {}
        self.counted: set[int] = set()
        self.modules: dict[int, dict[int, tuple[str, list[tuple[int, int]]]]] = {}
        self.readers: dict[int, list[int]] = {}
        for j in range(len(fold.nodes)):
            if fold.join[j] and fold.live[j]:
                self.readers.setdefault(fold.inputs[j][0], []).append(j)
        self.moves: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.tags: dict[tuple[int, int, int], int] = {}

    def run(self) -> Program:
        """Emit everything."""
        homes = self._homes()
        self._plan_moves(homes)
        for i, node in enumerate(self.fold.nodes):
            if node.op == "placeholder":
                new = self.graph.placeholder(node.name)
                new.meta = dict(node.meta)
                self.values[i, ONCE] = new
        for i, node in enumerate(self.fold.nodes):
            if is_draw(node) and self.fold.live[i] and self.fold.cheap[i] and not self.fold.each[i]:
                self._value(i, ONCE)
        self._emit_events()
        results = self._results(homes)
        for waiting in self.sends.values():
            for handle in waiting:
                self._wait(handle)
        self.graph.output(tuple(results))
        return self._program(results, homes)

    # what lies where

    def _homes(self) -> dict[int, set[int]]:
        """Ranks of the pipeline that hold each parameter and buffer."""
        fold, layout = self.fold, self.layout
        homes: dict[int, set[int]] = {i: set() for i, spec in fold.spec_of.items()}
        for event in layout.events:
            start = layout.parts[event.part].calls if event.part >= 0 else [event.call]
            for i in self._cheap_sources(start):
                homes.get(i, set()).add(event.rank)
        places = [(n.meta.get("layer", ""), fold.stage[i]) for i, n in enumerate(fold.nodes) if fold.stage[i] >= 0]
        for i, spec in fold.spec_of.items():
            if spec.kind in (InputKind.BATCH, InputKind.SEED):
                homes[i] = set(range(layout.num_ranks))
            elif not homes[i]:
                homes[i] = {layout.rank_of(stage_of_input(spec.name, places))}
        by_name = {spec.name: homes[i] for i, spec in fold.spec_of.items()}
        for made, r in zip(self.first.outputs, fold.results, strict=True):
            if isinstance(r, int) and fold.cheap[r]:
                for i in self._cheap_sources([r]):
                    homes[i].update(by_name.get(made.name, range(layout.num_ranks)))
        return homes

    def _cheap_sources(self, start: Iterable[int]) -> set[int]:
        """Inputs of the step from which the cheap calls among the sources of ``start`` are made."""
        fold = self.fold
        seen, queue = set(start), list(start)
        while queue:
            i = queue.pop()
            if fold.join[i] and not fold.from_inputs[i]:
                continue
            for s in fold.inputs[i]:
                if s not in seen and fold.cheap[s]:
                    seen.add(s)
                    queue.append(s)
        return {i for i in seen if self.fold.nodes[i].op == "placeholder"}

    def _targets(self, position: int, homes: Mapping[int, set[int]]) -> set[int]:
        """Ranks that return the output at ``position``."""
        fold, spec, r = self.fold, self.first.outputs[position], self.fold.results[position]
        everyone = set(range(self.layout.num_ranks))
        if spec.kind in (OutputKind.GRADIENT, OutputKind.MUTATION):
            return next((homes[i] for i, s in fold.spec_of.items() if s.name == spec.name), everyone)
        if spec.kind is OutputKind.RESULT and isinstance(r, int) and not isinstance(r, bool):
            value = fold.nodes[r].meta.get("val")
            if isinstance(value, torch.Tensor) and value.dim() and fold.stage[r] >= 0:
                return {self.layout.rank_of(fold.stage[r])}
        return everyone

    def _plan_moves(self, homes: Mapping[int, set[int]]) -> None:
        """For every value, the ranks it is sent to."""
        wanted: dict[tuple[int, int], set[int]] = {}
        for event in self.layout.events:
            for i in self.layout.needed_by(event):
                wanted.setdefault((i, event.microbatch if self.fold.each[i] else ONCE), set()).add(event.rank)
        for position, r in enumerate(self.fold.results):
            if isinstance(r, int) and not isinstance(r, bool):
                for i in self.layout.owned([r]):
                    wanted.setdefault((i, 0 if self.fold.each[i] else ONCE), set()).update(
                        self._targets(position, homes)
                    )
        for (i, m), ranks in wanted.items():
            source = self.layout.rank_of(self.fold.stage[i])
            self.moves[i, m] = [(source, target) for target in sorted(ranks) if target != source]
        # Messages between two ranks are numbered in the order of the events, so that one cannot be taken for another.
        sent: dict[tuple[int, int], int] = {}
        for event in self.layout.events:
            for i in self.layout.made_by(event):
                for pair in self.moves.get((i, event.microbatch), ()):
                    self.tags[i, event.microbatch, pair[1]] = sent[pair] = sent.get(pair, -1) + 1

    # events

    def _emit_events(self) -> None:
        events = self.layout.events
        left: dict[int, int] = {}
        for event in events:
            if event.rank == self.place and event.part >= 0:
                left[event.stage] = left.get(event.stage, 0) + 1
        for event in events:
            made = [(i, event.microbatch) for i in self.layout.made_by(event)]
            if event.rank == self.place:
                if event.part >= 0:
                    self._run_part(event)
                    left[event.stage] -= 1
                    if not left[event.stage]:
                        self._finish(event.stage)
                else:
                    self._value(event.call, ONCE)
                for key in made:
                    for _, target in self.moves.get(key, ()):
                        self._send(key, target)
                continue
            for key in made:
                for source, target in self.moves.get(key, ()):
                    if target == self.place:
                        self._receive(key, source)

    def _finish(self, stage: int) -> None:
        """A stage has run for the last time: what only this rank needs of its sums is reduced right away."""
        fold = self.fold
        ready: set[int] = set()
        for event in self.layout.events:
            if event.part >= 0 or event.stage != stage or (event.call, ONCE) in self.values:
                continue
            i = event.call
            whole = fold.join[i] and self.given.get(i) == fold.count
            local = not fold.join[i] and all(
                s in ready or (s, ONCE) in self.values or fold.cheap[s] for s in fold.inputs[i]
            )
            if (whole or local) and not self.moves.get((i, ONCE)):
                self._value(i, ONCE)
                ready.add(i)

    # values

    def _value(self, i: int, m: int) -> fx.Node:
        """The value of a call on this rank: there already, received, joined, or (done once) made now."""
        fold = self.fold
        key = (i, m if fold.each[i] and fold.nodes[i].op != "placeholder" else ONCE)
        if key in self.values:
            return self.values[key]
        if key in self.pending:
            self.values[key] = self._received(key)
        elif fold.join[i]:
            self.values[key] = self._joined(i)
        elif key[1] == ONCE and fold.nodes[i].op in ("call_function", "get_attr"):
            self.values[key] = self._copy(i)
        else:
            raise PartitionError(
                f"{fold.nodes[i].format_node()} is needed on pipeline rank {self.place} before it is made"
            )
        return self.values[key]

    def _copy(self, i: int) -> fx.Node:
        node = self.fold.nodes[i]
        if node.op == "get_attr":
            name = str(node.target)
            if not hasattr(self.root, name):
                self.root.register_buffer(name, getattr(self.first.graph_module, name))
            new = self.graph.get_attr(name)
        else:
            target, spec, leaves = self.fold.described(0, i)
            filled = [self._value(self.fold.alias[a], ONCE) if isinstance(a, Ref) else a for a in leaves]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            new = self.graph.create_node("call_function", target, args, kwargs, name=node.name)
        new.meta = plain_meta(node)
        return new

    def _joined(self, i: int) -> fx.Node:
        """A collective over the micro-batches, as a sum of what they gave or as all of it in a row."""
        node, fold = self.fold.nodes[i], self.fold
        source = fold.inputs[i][0]
        if fold.from_inputs[i]:
            self._count(fold.depth[i])
        found = self.partial.get(i, [])
        if not fold.each[source]:
            found = [self._value(source, ONCE)] * fold.count
        elif self.given.get(i) != fold.count:
            raise PartitionError(f"{node.format_node()} is needed before all micro-batches gave their part")
        self.emitter.describe(node)
        if node.target is ALL_REDUCE:
            total = found[0]
            for other in found[1:]:
                total = self._combined(i, total, other)
        else:
            total = self.emitter.call("cat", found)
        wait = fold.nodes[fold.wait_of.get(i, i)]
        total.meta = {**plain_meta(wait), "val": total.meta["val"]}
        return total

    def _combined(self, i: int, one: fx.Node, other: fx.Node) -> fx.Node:
        self.emitter.describe(self.fold.nodes[i])
        return self.emitter.call(COMBINE[str(self.fold.nodes[i].args[1])], one, other)

    def _count(self, depth: int) -> None:
        """Run what counts over the inputs of all micro-batches."""
        number = self.layout.counts[depth - 1]
        if number not in self.counted and self.layout.parts[number].outputs:
            self.counted.add(number)
            for m in range(self.fold.count):
                self._run_part(Event(self.place, -1, m, part=number))

    def _gather_part(self, i: int, m: int, node: fx.Node) -> None:
        """One more micro-batch gave its part of a join."""
        for j in self.readers.get(i, ()):
            have = self.partial.setdefault(j, [])
            self.given[j] = self.given.get(j, 0) + 1
            if self.fold.nodes[j].target is ALL_REDUCE and have:
                have[0] = self._combined(j, have[0], node)
            else:
                have.append(node)

    # parts

    def _run_part(self, event: Event) -> None:
        part, m = self.layout.parts[event.part], event.microbatch
        if event.part not in self.modules:
            self.modules[event.part] = self._build(part)
        name, numbers = self.modules[event.part][m]
        constants = [self.fold.described(m, i)[2][k] for i, k in numbers]
        arguments = [self._value(i, m) for i in part.inputs]
        called = self.graph.call_module(name, (*arguments, *constants))
        outputs: Any = cast("fx.GraphModule", self.root.get_submodule(name)).graph.output_node().args[0]
        backward = any(self.fold.backward[i] for i in part.calls)
        called.meta = {
            "val": tuple(o.meta["val"] for o in outputs),
            "layer": "",
            "phase": Phase.BACKWARD if backward else Phase.FORWARD,
            "source": "",
        }
        if part.kind is not None:
            called.meta[ACTION] = Action(part.stage, part.kind, m)
        for k, i in enumerate(part.outputs):
            piece = self.graph.call_function(operator.getitem, (called, k))
            piece.meta = plain_meta(self.fold.node(m, i))
            self.values[i, m] = piece
            self._gather_part(i, m, piece)

    def _build(self, part: Part) -> dict[int, tuple[str, list[tuple[int, int]]]]:
        """The sub-programs of a part: one for all micro-batches that differ in numbers alone."""
        fold = self.fold
        kinds: dict[Any, list[int]] = {}
        found = {}
        for m in range(fold.count):
            kinds.setdefault(self._kind(part, m), []).append(m)
        for number, members in enumerate(kinds.values()):
            varying = self._varying(part, members)
            name = part.name + ("" if number == 0 else f"_{number + 1}")
            self.root.add_module(name, self._module(part, members[0], varying, name))
            found.update(dict.fromkeys(members, (name, varying)))
        return found

    def _kind(self, part: Part, m: int) -> Any:
        fold = self.fold
        found: list[Any] = [shapes_of(fold.node(m, i).meta.get("val")) for i in (*part.inputs, *part.calls)]
        for i in part.calls:
            if fold.differs[i]:
                target, spec, leaves = fold.described(m, i)
                found.append((target, str(spec), tuple("int" if is_number(a) else repr(a) for a in leaves)))
        return tuple(found)

    def _varying(self, part: Part, members: Sequence[int]) -> list[tuple[int, int]]:
        """(call, argument) of the numbers that differ between ``members``."""
        found = []
        for i in part.calls:
            if self.fold.differs[i]:
                every = [self.fold.described(m, i)[2] for m in members]
                found += [(i, k) for k, a in enumerate(every[0]) if is_number(a) and any(e[k] != a for e in every)]
        return found

    def _module(self, part: Part, m: int, varying: Sequence[tuple[int, int]], name: str) -> fx.GraphModule:
        fold, graph = self.fold, fx.Graph()
        env: dict[int, fx.Node] = {}
        for i in part.inputs:
            env[i] = graph.placeholder(fold.node(m, i).name)
            env[i].meta = dict(fold.node(m, i).meta)
        given: dict[tuple[int, int], fx.Node] = {}
        for i, k in varying:
            given[i, k] = graph.placeholder(f"{fold.node(m, i).name}_{k}")
            given[i, k].meta = {"val": fold.described(m, i)[2][k]}
        for i in part.calls:
            node = fold.node(m, i)
            target, spec, leaves = fold.described(m, i)
            filled = [env[fold.alias[a]] if isinstance(a, Ref) else given.get((i, k), a) for k, a in enumerate(leaves)]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            env[i] = graph.create_node("call_function", target, args, kwargs, name=node.name)
            env[i].meta = dict(node.meta)
        graph.output(tuple(env[i] for i in part.outputs))
        return fx.GraphModule(torch.nn.Module(), graph, class_name=name)

    # sends and receives

    def _send(self, key: tuple[int, int], target: int) -> None:
        waiting = self.sends.setdefault(target, deque())
        if len(waiting) >= MOST_SENDS:
            self._wait(waiting.popleft())
        value = self._value(*key)
        self.emitter.describe(self.fold.nodes[key[0]])
        sent = self.emitter.call("contiguous", value)  # real kernels may lay results out otherwise than fake ones say
        waiting.append(self.emitter.call(ISEND, sent, target, self.tags[*key, target], PIPELINE))

    def _receive(self, key: tuple[int, int], source: int) -> None:
        node = self.fold.node(max(key[1], 0), key[0])
        self.emitter.describe(node)
        like = node.meta["val"]
        buffer = self.emitter.call("empty.memory_format", list(like.shape), dtype=like.dtype, device=like.device)
        self.pending[key] = self.emitter.call(IRECV, buffer, source, self.tags[*key, self.place], PIPELINE)

    def _received(self, key: tuple[int, int]) -> fx.Node:
        node = self.fold.node(max(key[1], 0), key[0])
        self.emitter.describe(node)
        value = self.emitter.wait(self.pending.pop(key))
        value.meta = {**plain_meta(node), "val": value.meta["val"]}
        return value

    def _wait(self, handle: fx.Node) -> None:
        self.emitter.meta = {k: handle.meta[k] for k in ("layer", "phase", "source") if k in handle.meta}
        self.emitter.call(WAIT, handle)

    # outputs

    def _results(self, homes: Mapping[int, set[int]]) -> list[Any]:
        found: list[Any] = []
        for position, r in enumerate(self.fold.results):
            if not isinstance(r, int) or isinstance(r, bool):
                found.append(r)
            elif self.place not in self._targets(position, homes):
                found.append(None)
            else:
                if self.fold.each[r] and self.fold.count > 1:
                    raise PartitionError(
                        f"{self.fold.nodes[r].format_node()} leaves the step as the part of one micro-batch"
                    )
                found.append(self._value(r, 0))
        return found

    def _program(self, results: Sequence[Any], homes: Mapping[int, set[int]]) -> Program:
        first, axes = self.first, self.first.mesh.axes
        keep = [p for p, i in enumerate(self.fold.spec_of) if self.place in homes[i]]
        for p, i in enumerate(self.fold.spec_of):
            if p not in keep:
                self.graph.erase_node(self.values[i, ONCE])
        absent = {first.inputs[p].name for p in range(len(first.inputs)) if p not in keep}
        mine = [
            p for p, spec in enumerate(first.outputs)
            if spec.name not in absent or spec.kind not in (OutputKind.GRADIENT, OutputKind.MUTATION)
        ]  # fmt: skip
        output = self.graph.output_node()
        output.args = (tuple(results[p] for p in mine),)
        module = fx.GraphModule(self.root, self.graph)
        module.graph.lint()

        def placed(tensor: ProgramTensor | None) -> ProgramTensor | None:
            if tensor is None:
                return None
            layout: Layout = tuple(p for p, axis in zip(tensor.layout, axes, strict=True) if axis != MICROBATCHES)
            if PIPELINE in self.mesh.axes:
                layout = (REPLICATE, *layout)
            return ProgramTensor(layout=layout, shape=tensor.shape, dtype=tensor.dtype)

        return Program(
            graph_module=module,
            inputs=tuple(first.inputs[p] for p in keep),
            outputs=tuple(first.outputs[p] for p in mine),
            input_tensors=tuple(placed(first.input_tensors[p]) for p in keep),  # type: ignore[misc]
            output_tensors=tuple(None if results[p] is None else placed(first.output_tensors[p]) for p in mine),
            mesh=self.mesh,
            rank=self.rank,
            seed_input=first.seed_input,
        )


def plain_meta(node: fx.Node) -> dict[str, Any]:
    """What is still true of a local value when it stands in a program of several micro-batches."""
    return {k: v for k, v in node.meta.items() if k in ("val", "layer", "phase", "source", "stage")}


def shapes_of(value: Any) -> Any:
    """What of a value must agree for two micro-batches to share a sub-program."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, list | tuple):
        return tuple(shapes_of(v) for v in value)
    return type(value)
