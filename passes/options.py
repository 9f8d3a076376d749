"""From rows to options: in which ways each call may run on one mesh axis.

Splitting a factor may mean splitting it as a whole or as one of several packed parts (``S(dim, blocks)``).  Which
parts make sense is found by passing the atoms that views cut along the graph, in both directions, until nothing new
appears.  A *family* is a set of (value, shard) pairs that rows connect: the batch, the heads, a hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.passes.base import InputKind, InputSpec
from autopar.passes.placement import PARTIAL, REPLICATE, Partial, Placement, Shard, can_split, make_shard
from autopar.passes.rules.row import Call, Dims, Row, is_getitem

Value = tuple[fx.Node, int]
Structure = tuple[int, int]  # (blocks, units): a dim seen as [blocks, units, rest]
Atoms = tuple[tuple[str, tuple[Structure, ...]], ...]  # factors of a call and the atoms in which each may be split
MAX_STRUCTURES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How one call runs on one mesh axis.

    Attributes:
        label: short text that identifies the choice among the call's options: ``R``, ``n``, ``n:3:2``, ``linear:0.1``.
        inputs: placement wanted of every tensor argument.
        outputs: placement of every output (None where it is no tensor).
        factor: the factor that is split, or None.
        blocks, units: which atom of the factor.
    """

    label: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    factor: str | None = None
    blocks: int = 1
    units: int = 0


def value_of(node: fx.Node) -> Value:
    """The producer and output index behind a node (getitem is looked through)."""
    index = 0
    if is_getitem(node):
        index = node.args[1]  # type: ignore[assignment]
        node = node.args[0]  # type: ignore[assignment]
    return node, index


def shape_of(value: Value) -> tuple[int, ...]:
    """Global shape of a value."""
    meta = value[0].meta["val"]
    tensor = meta[value[1]] if isinstance(meta, (list, tuple)) else meta
    return tuple(tensor.shape)


def outer_product(dim: Sequence[str], factor: str, sizes: Mapping[str, int]) -> int:
    """Product of the atoms outside ``factor`` in ``dim``."""
    return math.prod(sizes[f] for f in dim[: dim.index(factor)])


def find_factor(dims: Dims | None, factor: str) -> int:
    """The dim in which ``factor`` appears, or -1."""
    if dims is not None:
        for i, dim in enumerate(dims):
            if factor in dim:
                return i
    return -1


class Structures:
    """Atoms of every dim of every value, passed along rows until nothing changes."""

    def __init__(
        self,
        rows: Mapping[fx.Node, Row],
        tensors: Mapping[fx.Node, list[fx.Node]],
        seeds: Mapping[tuple[Value, int], Structure] | None = None,
    ) -> None:
        self._found: dict[tuple[Value, int], dict[Structure, None]] = {k: {s: None} for k, s in (seeds or {}).items()}
        self._sites: dict[fx.Node, list[tuple[str, int, list[tuple[tuple[Value, int], int]]]]] = {}
        for node, row in rows.items():
            self._sites[node] = self._sites_of(node, row, tensors[node])
        self._settle(rows)

    @staticmethod
    def _sites_of(
        node: fx.Node, row: Row, tensors: list[fx.Node]
    ) -> list[tuple[str, int, list[tuple[tuple[Value, int], int]]]]:
        sites = []
        described: list[tuple[Value, Dims | None]] = [
            (value_of(t), dims) for t, dims in zip(tensors, row.inputs, strict=True)
        ]
        described += [((node, i), dims) for i, dims in enumerate(row.outputs)]
        places: dict[str, list[tuple[tuple[Value, int], int]]] = {}
        for value, dims in described:
            for i, dim in enumerate(dims or ()):
                outer = 1
                for factor in dim:
                    places.setdefault(factor, []).append(((value, i), outer))
                    outer *= row.sizes[factor]
        for factor, found in places.items():
            # Behind an atom of size 0 there is nothing to hand out.
            if row.splittable(factor) and all(outer for _, outer in found):
                sites.append((factor, row.sizes[factor], found))
        return sites

    def _settle(self, rows: Mapping[fx.Node, Row]) -> None:
        order = list(rows)
        changed, sweep = True, 0
        while changed and sweep < 8:
            changed = False
            for node in order if sweep % 2 == 0 else reversed(order):
                changed |= self._visit(node)
            sweep += 1

    def _visit(self, node: fx.Node) -> bool:
        changed = False
        for _, size, places in self._sites[node]:
            mine = self._of_factor(size, places)
            for key, outer in places:
                known = self._found.setdefault(key, {})
                for blocks, units in mine:
                    structure = (outer * blocks, units)
                    if structure not in known and len(known) < MAX_STRUCTURES:
                        known[structure] = None
                        changed = True
        return changed

    def _of_factor(self, size: int, places: list[tuple[tuple[Value, int], int]]) -> dict[Structure, None]:
        mine: dict[Structure, None] = {(1, size): None}
        for key, outer in places:
            for blocks, units in self._found.get(key, ()):
                inner, rest = divmod(blocks, outer)
                if rest == 0 and inner and size % (inner * units) == 0:
                    mine[(inner, units)] = None
        return mine

    def of_node(self, node: fx.Node) -> list[tuple[str, list[Structure]]]:
        """Factors of a call that may be split, with the atoms in which each may be."""
        return [(f, list(self._of_factor(size, places))) for f, size, places in self._sites[node]]

    def of_value(self, value: Value) -> list[tuple[int, Structure]]:
        """(dim, structure) pairs known of a value."""
        return [(dim, s) for dim in range(len(shape_of(value))) for s in self._found.get((value, dim), ())]


class OptionSpace:
    """All options of all calls of a graph, for mesh axes of any size.

    ``seeds`` are atoms of dims that no call cuts but the caller wants: the rows of each data rank, to be split further.
    """

    def __init__(
        self, graph: fx.Graph, rows: Mapping[fx.Node, Row], seeds: Mapping[tuple[Value, int], Structure] | None = None
    ) -> None:
        self.graph = graph
        self.rows = rows
        self.tensors = {node: Call(node).tensors for node in rows}
        self.structures = Structures(rows, self.tensors, seeds)
        self._known: dict[tuple[int, Atoms, int], list[Choice]] = {}

    def choices(self, node: fx.Node, num_ranks: int) -> list[Choice]:
        """Every correct way to run ``node`` on an axis of ``num_ranks`` ranks; the first replicates."""
        row = self.rows[node]
        atoms = tuple((factor, tuple(structures)) for factor, structures in self.structures.of_node(node))
        key = (id(row), atoms, num_ranks)  # rows live as long as this object does
        if key not in self._known:
            self._known[key] = options_of(row, atoms, num_ranks)
        return self._known[key]

    def storage(self, node: fx.Node, num_ranks: int) -> list[Placement]:
        """Placements in which an input of the step may be kept: replicated, or split as the calls want it."""
        found: dict[Placement, None] = {REPLICATE: None}
        shape = shape_of((node, 0))
        for dim, (blocks, units) in self.structures.of_value((node, 0)):
            if not can_split(units, num_ranks):
                continue
            # DTensor holds uneven parts only as torch.chunk cuts a whole dim.
            if units % num_ranks and (blocks != 1 or units != shape[dim]):
                continue
            found[make_shard(dim, blocks, units, num_ranks)] = None
        return list(found)


def options_of(row: Row, atoms: Atoms, num_ranks: int) -> list[Choice]:
    """Every correct way to run a call of ``row`` whose factors may be split in ``atoms``."""
    found = {(c.inputs, c.outputs): c for c in (replicated(row),)}
    for factor, structures in atoms:
        for blocks, units in structures:
            if can_split(units, num_ranks) and (blocks == 1 or factor not in row.whole):
                choice = split_choice(row, factor, blocks, units, num_ranks)
                found.setdefault((choice.inputs, choice.outputs), choice)
    for group in row.linear:
        choice = linear_choice(row, group)
        found.setdefault((choice.inputs, choice.outputs), choice)
    return list(found.values())


def replicated(row: Row) -> Choice:
    """Every rank runs the whole call."""
    return Choice(
        label="R",
        inputs=tuple(REPLICATE for _ in row.inputs),
        outputs=tuple(None if dims is None else REPLICATE for dims in row.outputs),
    )


def split_choice(row: Row, factor: str, blocks: int, units: int, num_ranks: int) -> Choice:
    """Split ``factor``, seen as [blocks, units, rest], over ``num_ranks``."""
    canonical = num_ranks if units % num_ranks == 0 else units

    def place(dims: Dims | None, missing: Placement) -> Placement | None:
        if dims is None:
            return None
        dim = find_factor(dims, factor)
        if dim < 0:
            return missing
        outer = outer_product(dims[dim], factor, row.sizes)
        return Shard(dim, outer * blocks, canonical)

    inputs = []
    for i, dims in enumerate(row.inputs):
        missing: Placement = PARTIAL if factor in row.addends.get(i, ()) else REPLICATE
        inputs.append(place(dims, missing) or REPLICATE)
    outputs = []
    for i, out in enumerate(row.outputs):
        whole = i in row.complete.get(factor, ())
        absent: Placement = REPLICATE if whole or factor not in row.reduce else Partial(row.reduce[factor])
        outputs.append(place(out, absent))
    label = factor if blocks == 1 and canonical == num_ranks else f"{factor}:{blocks}:{canonical}"
    return Choice(
        label=label, inputs=tuple(inputs), outputs=tuple(outputs), factor=factor, blocks=blocks, units=canonical
    )


def linear_choice(row: Row, group: Iterable[int]) -> Choice:
    """The inputs of ``group`` are Partial, and so is every output."""
    members = sorted(group)
    return Choice(
        label="linear:" + ".".join(map(str, members)),
        inputs=tuple(PARTIAL if i in members else REPLICATE for i in range(len(row.inputs))),
        outputs=tuple(None if dims is None else PARTIAL for dims in row.outputs),
    )


class Families:
    """Union-find over (value, shard) pairs that options connect on an axis of one size."""

    def __init__(self, space: OptionSpace, num_ranks: int) -> None:
        self._parent: dict[tuple[Value, Placement], tuple[Value, Placement]] = {}
        self.options = {node: space.choices(node, num_ranks) for node in space.rows}
        for node, choices in self.options.items():
            values = [value_of(t) for t in space.tensors[node]]
            for choice in choices:
                pairs = [(v, p) for v, p in zip(values, choice.inputs, strict=True) if isinstance(p, Shard)]
                pairs += [((node, i), p) for i, p in enumerate(choice.outputs) if isinstance(p, Shard)]
                for pair in pairs[1:]:
                    self._join(pairs[0], pair)

    def find(self, pair: tuple[Value, Placement]) -> tuple[Value, Placement]:
        """Representative of a pair's family."""
        root = pair
        while (parent := self._parent.get(root, root)) != root:
            root = parent
        while (parent := self._parent.get(pair, pair)) != root:
            self._parent[pair] = root
            pair = parent
        return root

    def _join(self, a: tuple[Value, Placement], b: tuple[Value, Placement]) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self._parent[b] = a


def batch_seeds(
    placeholders: Sequence[fx.Node], inputs: Sequence[InputSpec], data_ranks: int
) -> dict[tuple[Value, int], Structure]:
    """The rows of each of ``data_ranks`` ranks as atoms of the batch inputs' first dims: they can be split again."""
    found = {}
    for node in batch_inputs(placeholders, inputs):
        shape = shape_of((node, 0))
        if data_ranks > 1 and shape and shape[0] and shape[0] % data_ranks == 0:
            found[((node, 0), 0)] = (data_ranks, shape[0] // data_ranks)
    return found


def batch_inputs(placeholders: Sequence[fx.Node], inputs: Sequence[InputSpec]) -> list[fx.Node]:
    """Placeholders that hold the batch."""
    return [
        n
        for n, spec in zip(placeholders, inputs, strict=True)
        if spec.kind is InputKind.BATCH and isinstance(n.meta.get("val"), torch.Tensor)
    ]
