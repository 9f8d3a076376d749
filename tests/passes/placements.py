"""A random legal choice at every call and a random place for every input: what the fuzz partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from torch import fx

from autopar.passes.base import InputKind, Mesh, StepGraph
from autopar.passes.options import Choice, OptionSpace, shape_of, value_of
from autopar.passes.partition import Assignment
from autopar.passes.placement import Layout, Placement, compatible
from autopar.passes.rules.table import op_name

AXES = ("x", "y", "z")
KEPT = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.BATCH)


def random_assignment(rnd: Random, step: StepGraph, space: OptionSpace, sizes: Sequence[int]) -> Assignment:
    """Choices drawn independently at every call, with a random share of calls left whole.

    A call that few others agree with is what needs the most redistribution, and redistribution is where layouts are
    confused: nothing here looks at the neighbours.
    """
    mesh = Mesh(axes=AXES[: len(sizes)], sizes=tuple(sizes))
    busy = rnd.choice((0.5, 0.8, 1.0))
    choices = {n.name: random_choices(rnd, space, n, sizes, busy) for n in space.rows}
    storage = {
        spec.name: random_storage(rnd, space, node, sizes)
        for node, spec in zip(step.placeholders, step.inputs, strict=True)
        if spec.kind in KEPT and rnd.random() < busy
    }
    return Assignment(mesh=mesh, choices=choices, storage=storage, gather_once=rnd.random() < 0.3)


def random_choices(
    rnd: Random, space: OptionSpace, node: fx.Node, sizes: Sequence[int], busy: float
) -> tuple[Choice, ...]:
    """One choice an axis; those of later axes fit those of earlier ones."""
    picked: tuple[Choice, ...] = ()
    for size in sizes:
        options = [c for c in space.choices(node, size) if fits(space, node, (*picked, c))]
        picked += (options[0] if rnd.random() > busy else rnd.choice(options),)
    return picked


def fits(space: OptionSpace, node: fx.Node, choices: Sequence[Choice]) -> bool:
    """Whether the layouts that the choices give every argument and output split disjoint atoms."""
    arguments = [shape_of(value_of(t)) for t in space.tensors[node]]
    if not all(compatible(tuple(c.inputs[i] for c in choices), shape) for i, shape in enumerate(arguments)):
        return False
    layouts = zip(*(c.outputs for c in choices), strict=True)
    return all(None in layout or compatible(layout, shape_of((node, i))) for i, layout in enumerate(layouts))


def random_storage(rnd: Random, space: OptionSpace, node: fx.Node, sizes: Sequence[int]) -> Layout:
    """A layout in which an input of the step may be kept."""
    layout: tuple[Placement, ...] = ()
    for size in sizes:
        options = [p for p in space.storage(node, size) if compatible((*layout, p), shape_of((node, 0)))]
        layout += (rnd.choice(options),)
    return layout


def pairs_met(space: OptionSpace, assignment: Assignment) -> Counter[tuple[str, str]]:
    """How often each (operation, kind of choice) is taken; factors are told by name, blocks and sizes are not."""
    met: Counter[tuple[str, str]] = Counter()
    for node in space.rows:
        for choice in assignment.choices[node.name]:
            met[op_name(node.target), choice.label.partition(":")[0] + ("*" if choice.blocks > 1 else "")] += 1
    return met
