"""Find the first value of the step that the ranks compute differently from one device.

Program nodes say which value of the step they compute (``meta["origin"]``, ``meta["origin_index"]`` where the node has
several outputs) and how it lies on the mesh (``meta["layout"]``).  Both are run again; every such value that feeds a
wrong output is put together and compared.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.cost_models.errors import VerificationError
from autopar.passes.base import OutputKind, Program, StepGraph
from autopar.passes.placement import Layout
from autopar.verify.compare import check_local_shapes, magnitude, part_differences, relative
from autopar.verify.lockstep import run_lockstep
from autopar.verify.report import Mismatch
from autopar.verify.tolerance import is_exact

# An intermediate value is measured against its own size, or this share of its inputs' where they cancel.
_CANCELLATION = 1e-2
_Value = tuple[str, int]  # name of a node of the step, index of the output
# A value that is off by less than this share of the wrong output's error did not cause it.
_SHARE = 1e-2


def first_mismatch(
    step: StepGraph,
    programs: Sequence[Program],
    inputs: Sequence[Any],
    local: Sequence[Sequence[Any]],
    *,
    wrong: Mapping[tuple[OutputKind, str], float],
    rtol: float,
) -> Mismatch | None:
    """The first wrong value, in the order of ``step``'s nodes, among those that feed the wrong outputs.

    Args:
        step: one device's step.
        programs: the programs of ranks 0, 1, ...
        inputs: values of the step's placeholders, in order.
        local: for each rank the values of its program's placeholders.
        wrong: error of every output that is wrong.
        rtol: error that rounding explains.

    Both runs draw random numbers from the state that the default CPU generator has at the call.
    """
    ends = [n for s, n in zip(step.outputs, step.results, strict=True) if (s.kind, s.name) in wrong and n is not None]
    named = {n.meta.get("origin") for p in programs for n in p.graph_module.graph.nodes if "layout" in n.meta}
    wanted = {node.name for node in _ancestors(ends) if node.name in named and _is_defined(node)}
    start = torch.get_rng_state()
    recorder = _Recorder(step.graph_module, wanted)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        recorder.run(*inputs, enable_io_processing=False)
    torch.set_rng_state(start)
    smallest = min((e for e in wrong.values() if e > 0), default=rtol)
    collector = _Collector(programs, recorder, max(rtol, _SHARE * min(smallest, 1.0)))
    run_lockstep(programs, local, observer=collector)
    found = collector.finish([n for n in step.graph.nodes if n.name in wanted])
    return found or _lost_after(step, collector, wrong)


def _lost_after(
    step: StepGraph, collector: _Collector, wrong: Mapping[tuple[OutputKind, str], float]
) -> Mismatch | None:
    """The first wrong output whose own value was computed right: it was spoilt on its way out (a missing reduction)."""
    for spec, node in zip(step.outputs, step.results, strict=True):
        value = None if node is None else _value_of(node)
        if (spec.kind, spec.name) not in wrong or node is None or value not in collector.layouts:
            continue
        note = f"right where it is computed, wrong as the {spec.kind.value} {spec.name}: its reduction or gather is off"
        ranks, layout = tuple(range(collector.num_ranks)), collector.layouts[value]
        return _describe(node, layout, ranks, wrong[spec.kind, spec.name], note)
    return None


def _value_of(node: fx.Node) -> _Value:
    """The value that ``node`` stands for: a getitem is an output of the node before it."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int):
        return node.args[0].name, node.args[1]
    return node.name, 0


def _describe(node: fx.Node, layout: Layout, ranks: tuple[int, ...], error: float, note: str) -> Mismatch:
    return Mismatch(
        origin=node.name,
        op=str(node.target),
        layer=node.meta.get("layer", ""),
        phase=node.meta.get("phase"),
        source=node.meta.get("source", ""),
        layout=", ".join(map(str, layout)),
        ranks=ranks,
        error=error,
        note=note,
    )


def _is_defined(node: fx.Node) -> bool:
    """Whether ``node`` computes something: no input of the step, no uninitialised memory."""
    return node.op == "call_function" and "empty" not in str(node.target)


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found, stack = set(nodes), list(nodes)
    while stack:
        for used in stack.pop().all_input_nodes:
            if used not in found:
                found.add(used)
                stack.append(used)
    return found


class _Recorder(fx.Interpreter):
    """Runs the single-device step; keeps the values of the ``wanted`` nodes, and the scale to measure each against."""

    def __init__(self, module: fx.GraphModule, wanted: Collection[str]) -> None:
        super().__init__(module)
        self.values: dict[_Value, torch.Tensor] = {}
        self.scales: dict[_Value, float] = {}
        self._wanted = wanted
        self._sizes: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> object:
        """Run one node and note what is needed of its value."""
        value = super().run_node(n)
        tensors = {
            index: item
            for index, item in enumerate(value if isinstance(value, list | tuple) else [value])
            if isinstance(item, torch.Tensor)
        }
        sizes = {index: magnitude(tensor) for index, tensor in tensors.items()}
        self._sizes[n] = max(sizes.values(), default=0.0)
        if n.name in self._wanted:
            inputs = max((self._sizes.get(used, 0.0) for used in n.all_input_nodes), default=0.0)
            for index, tensor in tensors.items():
                self.values[n.name, index] = tensor
                self.scales[n.name, index] = max(sizes[index], _CANCELLATION * inputs)
        return value


class _Collector:
    """Observer of the lockstep run: gathers the ranks' parts of a value, compares them, and lets them go."""

    def __init__(self, programs: Sequence[Program], recorder: _Recorder, tolerance: float) -> None:
        self.num_ranks = len(programs)
        self._mesh = programs[0].mesh
        self._recorder = recorder
        self._tolerance = tolerance
        self.layouts: dict[_Value, Layout] = {}
        self._parts: dict[_Value, dict[int, torch.Tensor]] = {}
        self._found: dict[_Value, tuple[tuple[int, ...], float, str]] = {}

    def __call__(self, rank: int, node: fx.Node, value: object) -> None:
        """Take one rank's part of a value."""
        layout = node.meta.get("layout")
        origin = (node.meta.get("origin", ""), node.meta.get("origin_index", 0))
        if layout is None or origin not in self._recorder.values or not isinstance(value, torch.Tensor):
            return
        parts = self._parts.setdefault(origin, {})
        parts[rank] = value
        self.layouts.setdefault(origin, layout)
        if len(parts) == self._mesh.size:
            self._compare(origin)

    def finish(self, order: Sequence[fx.Node]) -> Mismatch | None:
        """Compare what only some ranks hold, and describe the first wrong value in ``order``."""
        for origin in list(self._parts):
            self._compare(origin)
        place = {node.name: (number, node) for number, node in enumerate(order)}
        first = min(self._found, key=lambda value: (place[value[0]][0], value[1]), default=None)
        if first is None:
            return None
        return _describe(place[first[0]][1], self.layouts[first], *self._found[first])

    def _compare(self, origin: _Value) -> None:
        parts = self._parts.pop(origin)
        want, scale = self._recorder.values[origin], self._recorder.scales[origin]
        layout, held = self.layouts[origin], [parts.get(rank) for rank in range(self._mesh.size)]
        try:
            check_local_shapes(held, layout, self._mesh, tuple(want.shape))
        except VerificationError as error:
            self._found[origin] = (tuple(sorted(parts)), math.inf, str(error))
            return
        apart, _ = part_differences(held, layout, self._mesh, want)
        exact = is_exact(want)
        errors = {rank: distance if exact else relative(distance, scale) for rank, distance in apart.items()}
        wrong = tuple(rank for rank, error in errors.items() if error > (0.0 if exact else self._tolerance))
        if wrong:
            self._found[origin] = (wrong, max(errors.values()), "")
