"""The first choice: for every mesh axis in turn, the cheapest way to run every call.

For one axis it minimises  sum of work  +  sum of bytes moved  over all calls (:mod:`autopar.search.eliminate`), where
work that is not split weighs more than moving its data: an axis that was asked for is to be used.  On the data axis
only the batch's family may be split; on the tensor axis families that reach a parameter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import fx

from autopar.passes.base import InputKind, Mesh, OutputKind, Phase, StepGraph
from autopar.passes.options import (
    Choice,
    Families,
    OptionSpace,
    Value,
    batch_inputs,
    batch_seeds,
    replicated,
    shape_of,
    value_of,
)
from autopar.passes.partition import Assignment, fake_of
from autopar.passes.placement import (
    REPLICATE,
    Layout,
    Placement,
    Shard,
    can_split,
    compatible,
    make_shard,
    shards_of_dim,
)
from autopar.passes.redistribute import StepKind, kind_of, wire_bytes
from autopar.passes.rules.row import Row
from autopar.passes.rules.table import op_name
from autopar.plan import LayerConstraints
from autopar.search.eliminate import Problem, Solution, Table

Family = tuple[Value, Placement]

# Price of work that is not split, in bytes moved: an axis that was asked for is to be used.
BYTES_PER_FLOP = {"data": 1e3, "micro": 1e3, "tensor": 0.1}
# Price of one more collective, as a share of the price of all work: small work is not worth one.  On the data axis
# reductions travel in buckets, and all that can be split by rows is to be.
COLLECTIVE = {"data": 0.0, "micro": 1e-5, "tensor": 1e-5}
COLLECTIVE_SEQUENCE = 0.25  # the same as a share of an activation, where those are to be split along the sequence
BARRIER = 1e-4  # the same between micro-batches, where all have to arrive before one can go on
TOUCH = {"data": 10.0, "micro": 1e-3, "tensor": 1e-3}  # price of touching a byte of memory
TOUCH_SEQUENCE = 0.1  # the same where the user asked for activations to be split along the sequence
WEIGHT = 10.0  # price of moving a weight over a tensor axis, relative to an activation: that axis is there to split it
LATE = 0.99  # price of moving what leaves the step, relative to moving it earlier
SHALLOW = 3  # blocks of a model of which the shares above are meant
COPY = 1e-3  # price of touching the bytes that a redistribution moves
KEEP = 3.0  # price of keeping a byte of a parameter: a tensor axis is there to split them
# Least price of keeping a matrix whole or of gathering it where activations are split along the sequence, in
# activations: work on a part of the sequence with whole matrices may move less, but the axis is there to split them.
WHOLE_SEQUENCE = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisWish:
    """What one mesh axis is for.

    Attributes:
        name: name of the axis.
        size: number of ranks.
        role: "data", "micro" (micro-batches, which split the rows of each data rank) or "tensor".
        zero: parameters are kept split over this (data) axis.
        blocks: ranks of the data axes outside this (data) axis: the rows of each of them are split further.
        sequence_parallel: families of the inputs (the sequence) may be split on this (tensor) axis too.
    """

    name: str
    size: int
    role: str
    zero: int = 0
    blocks: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True, kw_only=True)
class AxisResult:
    """Choices of one axis, placement of every input, and whether anything was split."""

    choices: Mapping[fx.Node, Choice]
    storage: Mapping[fx.Node, Placement]
    cost: float
    exact: bool
    used: bool


def no_wishes(layer: str) -> LayerConstraints:
    """No layer is treated apart."""
    return LayerConstraints()


class FirstChoice:
    """Chooses for all axes of a mesh; see :func:`choose`."""

    def __init__(
        self,
        step: StepGraph,
        rows: Mapping[fx.Node, Row],
        wishes: Sequence[AxisWish],
        layers: Callable[[str], LayerConstraints] = no_wishes,
    ) -> None:
        self.step, self.rows, self.wishes, self.layers = step, rows, wishes, layers
        blocks = max((w.blocks for w in wishes), default=1)
        self.space = OptionSpace(step.graph, rows, batch_seeds(step.placeholders, step.inputs, blocks))
        self.specs = dict(zip(step.placeholders, step.inputs, strict=True))
        self.done: list[AxisResult] = []
        self.streams = block_boundaries(step)

    def run(self) -> list[AxisResult]:
        """Results, one per wish, in the order of the wishes."""
        for wish in self.wishes:
            self.done.append(self._axis(wish))
        return self.done

    def _axis(self, wish: AxisWish) -> AxisResult:
        if wish.size == 1:
            return self._idle()
        families = Families(self.space, wish.size)
        if wish.role == "tensor":
            allowed = self._tensor_families(families)
            if wish.sequence_parallel:
                allowed -= self._stream_families(families)
            return self._solve(wish, families, allowed, self._sequence(families, wish))
        batches = self._batch_families(families, wish)
        each = [{family} for family in batches]
        if wish.role == "data" and len(batches) > 1:
            # Two towers have a batch each (texts, images), which meet in the loss alone.  Last: the others win ties.
            each.append(set(batches))
        results = [self._solve(wish, families, some) for some in each]
        return min(results, key=lambda r: r.cost) if results else self._solve(wish, families, set())

    def _idle(self) -> AxisResult:
        """An axis of one rank."""
        choices = {node: replicated(row) for node, row in self.rows.items()}
        storage: dict[fx.Node, Placement] = dict.fromkeys(self.specs, REPLICATE)
        return AxisResult(choices=choices, storage=storage, cost=0.0, exact=True, used=False)

    def _batch_families(self, families: Families, wish: AxisWish) -> list[Family]:
        """Candidate batches: the families of dim 0 of the batch inputs."""
        found: dict[Family, None] = {}
        for node in batch_inputs(list(self.specs), self.step.inputs):
            shape = shape_of((node, 0))
            if shape and shape[0] % wish.blocks == 0 and can_split(shape[0] // wish.blocks, wish.size):
                shard = make_shard(0, wish.blocks, shape[0] // wish.blocks, wish.size)
                found[families.find(((node, 0), shard))] = None
        return list(found)

    def _tensor_families(self, families: Families, *, with_inputs: bool = False) -> set[Family]:
        """Families that reach a parameter (or, ``with_inputs``, an input of the step), the batch excepted."""
        wish = self.wishes[len(self.done)]
        found = set()
        for node, spec in self.specs.items():
            wanted = spec.kind is InputKind.PARAMETER or (with_inputs and spec.kind is InputKind.BATCH)
            if wanted and isinstance(node.meta.get("val"), torch.Tensor):
                for placement in self.space.storage(node, wish.size):
                    if isinstance(placement, Shard):
                        found.add(families.find(((node, 0), placement)))
        return found - set(self._batch_families(families, wish))

    def _stream_families(self, families: Families) -> set[Family]:
        """Families of what runs from block to block, but for those of inputs: the width of the residual stream."""
        wish = self.wishes[len(self.done)]
        found = set()
        for node in self.streams:
            for dim, size in enumerate(shape_of((node, 0))):
                if can_split(size, wish.size):
                    found.add(families.find(((node, 0), make_shard(dim, 1, size, wish.size))))
        inputs = {
            families.find(((node, 0), make_shard(dim, 1, size, wish.size)))
            for node, spec in self.specs.items()
            if spec.kind is InputKind.BATCH and isinstance(node.meta.get("val"), torch.Tensor)
            for dim, size in enumerate(shape_of((node, 0)))
            if can_split(size, wish.size)
        }
        return found - inputs

    def _sequence(self, families: Families, wish: AxisWish) -> Callable[[str], set[Family]]:
        """Families that sequence parallelism adds, by layer."""
        extra = self._tensor_families(families, with_inputs=True)

        def of_layer(layer: str) -> set[Family]:
            own = self.layers(layer).sequence_parallel
            return extra if (wish.sequence_parallel if own is None else own) else set()

        return of_layer

    # one axis

    def _solve(
        self,
        wish: AxisWish,
        families: Families,
        allowed: set[Family],
        extra: Callable[[str], set[Family]] = lambda layer: set(),
    ) -> AxisResult:
        options = {}
        for node, choices in families.options.items():
            layer = node.meta.get("layer", "")
            if wish.role == "tensor" and self.layers(layer).tp == 1:
                options[node] = [c for c in choices if c.factor is None]
            else:
                more = extra(layer)
                options[node] = self._allowed(node, choices, families, allowed | more if more else allowed)
        stores = {p: self._stores(p, wish, families, allowed) for p in self.specs}
        solution = AxisProblem(self, wish, options, stores).solve()
        chosen = {n: c[solution.assignment[n]] for n, c in options.items()}
        kept = {p: s[solution.assignment[p]] for p, s in stores.items()}
        used = any(c.factor is not None for c in chosen.values())
        return AxisResult(choices=chosen, storage=kept, cost=solution.value, exact=solution.exact, used=used)

    def _allowed(self, node: fx.Node, choices: list[Choice], families: Families, allowed: set[Family]) -> list[Choice]:
        kept = []
        values = [value_of(t) for t in self.space.tensors[node]]
        for choice in choices:
            pairs = [(v, p) for v, p in zip(values, choice.inputs, strict=True) if isinstance(p, Shard)]
            pairs += [((node, i), p) for i, p in enumerate(choice.outputs) if isinstance(p, Shard)]
            if (not pairs or families.find(pairs[0]) in allowed) and self._fits(node, values, choice):
                kept.append(choice)
        return kept

    def _fits(self, node: fx.Node, values: list[Value], choice: Choice) -> bool:
        """Whether the choice goes with what earlier axes do to the same call."""
        earlier = [r.choices[node] for r in self.done]
        data = self.wishes[len(self.done)].role != "tensor"
        for c in earlier:
            inside = c.blocks * c.units
            nested = data and inside and choice.blocks % inside == 0
            if choice.factor is not None and c.factor == choice.factor and not nested:
                return False
        for i, value in enumerate(values):
            if not compatible((*(c.inputs[i] for c in earlier), choice.inputs[i]), shape_of(value)):
                return False
        for i, placement in enumerate(choice.outputs):
            layout = (*(c.outputs[i] for c in earlier), placement)
            if placement is not None and not compatible(layout, shape_of((node, i))):  # type: ignore[arg-type]
                return False
        return True

    def _stores(self, node: fx.Node, wish: AxisWish, families: Families, allowed: set[Family]) -> list[Placement]:
        if self.specs[node].kind is not InputKind.PARAMETER or wish.role != "tensor":
            return [REPLICATE]
        if self.layers(layer_of(self.specs[node].name)).tp == 1:
            return [REPLICATE]
        earlier = tuple(r.storage[node] for r in self.done)
        return [
            p
            for p in self.space.storage(node, wish.size)
            if not isinstance(p, Shard)
            or (families.find(((node, 0), p)) in allowed and compatible((*earlier, p), shape_of((node, 0))))
        ]

    def local_bytes(self, value: Value) -> float:
        """Bytes of a value on one rank, given what earlier axes split."""
        fake = fake_of(value)
        size = float(math.prod(fake.shape) * fake.dtype.itemsize)
        node, index = value
        for wish, result in zip(self.wishes, self.done, strict=False):
            placed = result.choices[node].outputs[index] if node in result.choices else result.storage.get(node)
            if isinstance(placed, Shard):
                size /= wish.size
        return size

    def flops(self, node: fx.Node) -> float:
        """Work of a call on one rank, given what earlier axes split."""
        work = row_flops(node, self.rows[node])
        for wish, result in zip(self.wishes, self.done, strict=False):
            if result.choices[node].factor is not None:
                work /= wish.size
        return work


def num_blocks(step: StepGraph) -> int:
    """Repeated blocks of the model."""
    return sum(len(group) for group in step.repeated)


class AxisProblem:
    """The minimisation of one axis: a variable per call and per input, a hub per value that many calls read."""

    def __init__(
        self,
        owner: FirstChoice,
        wish: AxisWish,
        options: Mapping[fx.Node, list[Choice]],
        stores: Mapping[fx.Node, list[Placement]],
    ) -> None:
        self.owner, self.wish, self.options, self.stores = owner, wish, options, stores
        self.problem = Problem()
        self.per_flop = BYTES_PER_FLOP[wish.role]
        # A deep model is as many times the work of a shallow one, and its collectives are no dearer for that.
        total = sum(owner.flops(node) for node in options) * min(1.0, SHALLOW / max(1, num_blocks(owner.step)))
        self.weights = weight_views(owner.step)
        collective = 1.0 + COLLECTIVE[wish.role] * self.per_flop * total
        self.whole: dict[fx.Node, float] = {}  # the least that keeping or making a matrix whole costs
        if wish.sequence_parallel:
            activation = self._activation_bytes()
            collective = min(collective, 1.0 + COLLECTIVE_SEQUENCE * activation)
            self.whole = dict.fromkeys(self._matrices(), WHOLE_SEQUENCE * activation)
        micro = wish.role == "micro"
        self.prices = Prices(wish.size, 1.0 + BARRIER * self.per_flop * total if micro else collective)
        # Micro-batches join for free where the result leaves the step, and nearly so where it comes from inputs alone.
        self.output_prices = Prices(wish.size, 0.0) if micro else self.prices
        self.input_prices = Prices(wish.size, collective) if micro else self.prices
        self.from_inputs = input_values(owner.step) if micro else set()
        self.touch = TOUCH_SEQUENCE if wish.sequence_parallel else TOUCH[wish.role]

    def _activation_bytes(self) -> float:
        """Bytes of what most of the heavy calls of the forward read beside weights."""
        sizes = []
        for node in self.options:
            if self.owner.flops(node) > 0 and node.meta.get("phase") is not Phase.BACKWARD:
                read = [v for t in self.owner.space.tensors[node] if (v := value_of(t))[0] not in self.weights]
                sizes += [min(self.owner.local_bytes(v) for v in read)] if read else []
        return statistics.median(sizes) if sizes else 0.0

    def _matrices(self) -> set[fx.Node]:
        """Parameters that heavy calls read, and the views and casts through which they do."""
        found = set()
        for node in self.options:
            if self.owner.flops(node) > 0:
                for tensor in self.owner.space.tensors[node]:
                    source, _ = value_of(tensor)
                    while source in self.weights:
                        found.add(source)
                        source = next(iter(source.all_input_nodes), node)
        return found

    def solve(self) -> Solution:
        """Build all tables and minimise."""
        for node, choices in self.options.items():
            self.problem.variable(node, np.array([self._work(node, c) for c in choices]))
        for node, placements in self.stores.items():
            self.problem.variable(node, np.array([self._keep(node, p) for p in placements]))
        self._edges()
        self._outputs()
        return self.problem.solve()

    def _work(self, node: fx.Node, choice: Choice) -> float:
        share = 1.0 if choice.factor is None else 1.0 / self.wish.size
        work = self.per_flop * self.owner.flops(node) * share
        for source, placement in zip(self.owner.space.tensors[node], choice.inputs, strict=True):
            work += self.touch * self._part(value_of(source), placement)
        for index, output in enumerate(choice.outputs):
            if output is not None:
                work += self.touch * self._part((node, index), output)
        return work

    def _part(self, value: Value, placement: Placement) -> float:
        return self.owner.local_bytes(value) / (self.wish.size if isinstance(placement, Shard) else 1)

    def _keep(self, node: fx.Node, placement: Placement) -> float:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return 0.0
        whole = self.whole.get(node, 0.0) if placement == REPLICATE else 0.0
        return KEEP * self._part((node, 0), placement) + whole

    def _produced(self, value: Value) -> tuple[Hashable | None, list[Placement]]:
        """(variable, placement per value of the variable) of a value's producer."""
        node, index = value
        if node in self.options:
            return node, [c.outputs[index] or REPLICATE for c in self.options[node]]
        if node in self.stores:
            return node, self.stores[node]
        return None, [REPLICATE]

    def _edges(self) -> None:
        readers: dict[tuple[Value, Phase], list[tuple[fx.Node, int]]] = {}
        for node in self.options:
            phase = node.meta.get("phase", Phase.FORWARD)
            for i, tensor in enumerate(self.owner.space.tensors[node]):
                readers.setdefault((value_of(tensor), phase), []).append((node, i))
        for (value, phase), places in readers.items():
            source, have = self._produced(value)
            # Light readers have a form of their own: the one that the heavy ones share would look free to them.
            heavy = [(n, i) for n, i in places if self.owner.flops(n) > 0]
            light = [(n, i) for n, i in places if self.owner.flops(n) == 0]
            for kind, some in (("heavy", heavy), ("light", light)):
                shared = source is not None and len({n for n, _ in some}) > 1
                shared = shared and (kind == "heavy" or self.wish.sequence_parallel)
                hub = ("hub", kind, value, phase)
                origin, held = self._hub(hub, value, source, have, some) if shared else (source, have)
                for node, i in some:
                    wanted = [c.inputs[i] for c in self.options[node]]
                    self._link(origin, held, node, wanted, self._moved_bytes(value), self._prices_of(value))

    def _hub(
        self,
        hub: Hashable,
        value: Value,
        source: Hashable | None,
        have: list[Placement],
        places: list[tuple[fx.Node, int]],
    ) -> tuple[Hashable, list[Placement]]:
        """A variable for the form in which several readers share a value: it is moved once, not once a reader."""
        forms = dict.fromkeys(have)
        for node, i in places:
            forms.update(dict.fromkeys(c.inputs[i] for c in self.options[node]))
        self.problem.variable(hub, np.zeros(len(forms)))
        self._link(source, have, hub, list(forms), self._moved_bytes(value), self._prices_of(value))
        return hub, list(forms)

    def _prices_of(self, value: Value) -> Prices:
        return self.input_prices if value[0] in self.from_inputs else self.prices

    def _moved_bytes(self, value: Value) -> float:
        """Bytes of a value for the price of moving it: on a tensor axis weights stay where they are if they can."""
        weight = WEIGHT if self.wish.role == "tensor" and value[0] in self.weights else 1.0
        return max(weight * self.owner.local_bytes(value), self.whole.get(value[0], 0.0))

    def _link(
        self,
        source: Hashable | None,
        have: list[Placement],
        target: Hashable,
        wanted: list[Placement],
        size: float,
        prices: Prices,
    ) -> None:
        table = prices.table(have, wanted, size)
        if source is None:
            self.problem.unary[target] = self.problem.unary[target] + table[0]
        else:
            self.problem.add_pair(source, target, table)

    def _outputs(self) -> None:
        """Outputs leave reduced; gradients leave as their parameter is kept."""
        by_name = {spec.name: node for node, spec in self.owner.specs.items()}
        step = self.owner.step
        for spec, node in zip(step.outputs, step.results, strict=True):
            if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            value = value_of(node)
            source, have = self._produced(value)
            size = self.owner.local_bytes(value)
            if source is None:
                continue
            if spec.kind in (OutputKind.LOSS, OutputKind.RESULT):
                costs = [0.0 if isinstance(p, Shard) else self.output_prices.of(p, REPLICATE, size) for p in have]
                self.problem.unary[source] = self.problem.unary[source] + np.array(costs)
            else:
                home = by_name[spec.name]
                # Among equals the last reduction wins: those that leave the step travel in buckets.
                self._link(source, have, home, self.stores[home], LATE * size, self.output_prices)


def input_values(step: StepGraph) -> set[fx.Node]:
    """Calls that no parameter enters."""
    parameters = {n for n, s in zip(step.placeholders, step.inputs, strict=True) if s.kind is InputKind.PARAMETER}
    found: set[fx.Node] = set()
    for node in step.graph.nodes:
        if node not in parameters and all(s in found for s in node.all_input_nodes):
            found.add(node)
    return found


class Prices:
    """Bytes on the wire of every change of placement on one axis."""

    def __init__(self, num_ranks: int, per_collective: float) -> None:
        self.num_ranks, self.per_collective = num_ranks, per_collective
        self._tables: dict[tuple[tuple[Placement, ...], tuple[Placement, ...]], tuple[Table, Table]] = {}

    def table(self, have: list[Placement], wanted: list[Placement], size: float) -> Table:
        """Prices [have, wanted] for a value of ``size`` bytes."""
        key = (tuple(have), tuple(wanted))
        if key not in self._tables:
            parts = np.array([[self._price(a, b) for b in wanted] for a in have])
            self._tables[key] = (parts[..., 0], parts[..., 1])
        per_byte, fixed = self._tables[key]
        return per_byte * size + fixed

    def of(self, have: Placement, wanted: Placement, size: float) -> float:
        """One price."""
        per_byte, fixed = self._price(have, wanted)
        return per_byte * size + fixed

    def _price(self, have: Placement, wanted: Placement) -> tuple[float, float]:
        """(price per byte of the whole value, fixed price)."""
        if have == wanted:
            return 0.0, 0.0
        kind = kind_of(have, wanted, self.num_ranks)
        share = 1.0 / self.num_ranks if kind is StepKind.ALL_TO_ALL else 1.0
        per_byte = wire_bytes(kind, self.num_ranks, share) + COPY
        fixed = 0.0 if kind in (StepKind.SLICE, StepKind.TO_PARTIAL) else self.per_collective
        return per_byte, fixed


# Calls whose work is the product of the sizes of their factors, and how often that product is done.
CONTRACTIONS: Mapping[str, float] = {
    "aten::mm": 1,
    "aten::bmm": 1,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
    "aten::mv": 1,
    "aten::addmv": 1,
    "aten::dot": 1,
    "transformers::grouped_mm_fallback": 1,
    "transformers::grouped_mm_fallback_backward": 2,
    "aten::convolution": 1,
    "aten::convolution_backward": 2,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 1,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 2.5,
}


def block_boundaries(step: StepGraph) -> list[fx.Node]:
    """Forward values of one repeated block that the next one reads."""
    follows = {b: a for group in step.repeated for a, b in pairwise(group)}

    def block(node: fx.Node) -> str:
        parts = str(node.meta.get("layer", "")).split(".")
        paths = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
        return next((p for p in paths if p in blocks), "")

    blocks = set(follows) | set(follows.values())
    found: dict[fx.Node, None] = {}
    for node in step.graph.nodes if blocks else ():
        if node.op == "call_function" and node.meta.get("phase") is Phase.FORWARD:
            before = follows.get(block(node))
            for source in node.all_input_nodes:
                if before and source.meta.get("phase") is Phase.FORWARD and block(source) == before:
                    found[source] = None
    return [node for node in found if isinstance(node.meta.get("val"), torch.Tensor)]


def weight_views(step: StepGraph) -> set[fx.Node]:
    """Parameters, and calls that read nothing but one parameter (its transposes and casts)."""
    found = {
        node for node, spec in zip(step.placeholders, step.inputs, strict=True) if spec.kind is InputKind.PARAMETER
    }
    for node in step.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and len(inputs) == 1 and inputs[0] in found:
            found.add(node)
    return found


def row_flops(node: fx.Node, row: Row) -> float:
    """Floating-point operations of a contraction, from the sizes of its factors; 0 for other calls."""
    times = CONTRACTIONS.get(op_name(node.target))  # type: ignore[arg-type]
    if times is None:
        return 0.0
    sizes = row.sizes
    if "dot_product" in str(node.target):
        return 2.0 * times * math.prod(n for f, n in sizes.items() if f not in ("d", "e")) * (sizes["d"] + sizes["e"])
    return 2.0 * times * math.prod(n for f, n in sizes.items() if not f.startswith("x"))


def layer_of(parameter: str) -> str:
    """The layer that owns a parameter."""
    return parameter.rpartition(".")[0]


def choose(
    step: StepGraph,
    rows: Mapping[fx.Node, Row],
    wishes: Sequence[AxisWish],
    layers: Callable[[str], LayerConstraints] = no_wishes,
) -> tuple[Assignment, list[str]]:
    """The cheapest assignment for ``step`` on the mesh that ``wishes`` span, and notes on what could not be used.

    Args:
        step: a normalized step.
        rows: its rows.
        wishes: the mesh axes, outermost first.
        layers: wishes for single layers, by their path.
    """
    results = FirstChoice(step, rows, wishes, layers).run()
    mesh = Mesh(axes=tuple(w.name for w in wishes), sizes=tuple(w.size for w in wishes))
    choices = {n.name: tuple(r.choices[n] for r in results) for n in rows}
    storage: dict[str, Layout] = {}
    for node, spec in zip(step.placeholders, step.inputs, strict=True):
        layout = tuple(r.storage.get(node, REPLICATE) for r in results)
        if spec.kind is InputKind.PARAMETER:
            own = layers(layer_of(spec.name)).zero
            for axis, wish in enumerate(wishes):
                zero = wish.zero if own is None or wish.role != "data" else own
                if zero and wish.size > 1:
                    layout = zero_layout(layout, shape_of((node, 0)), axis, mesh.sizes)
        storage[spec.name] = layout
    notes = [
        f"axis {w.name} of {w.size} ranks: nothing worth splitting, so it replicates"
        for w, r in zip(wishes, results, strict=True)
        if w.size > 1 and not r.used
    ]
    zero = max((w.zero for w in wishes), default=0)
    return Assignment(mesh=mesh, choices=choices, storage=storage, gather_once=zero in (1, 2)), notes


def zero_layout(layout: Layout, shape: tuple[int, ...], axis: int, sizes: tuple[int, ...]) -> Layout:
    """``layout`` with the parameter also split over the data axis: by a dim that divides and, if possible, is whole.

    Parameters too small to give every rank a part stay whole.

    >>> zero_layout((REPLICATE, Shard(0, 1, 2)), (8, 6), 0, (2, 2))
    (Shard(dim=1, blocks=1, units=2), Shard(dim=0, blocks=1, units=2))
    """
    num_ranks = sizes[axis]
    candidates: list[tuple[int, int, Shard]] = []
    for dim, size in enumerate(shape):
        others = shards_of_dim(layout, dim)
        blocks = max((s.blocks * s.units for _, s in others), default=1)
        rest = size // blocks
        if rest % num_ranks == 0 and rest:
            candidates.append((len(others), dim, Shard(dim, blocks, num_ranks)))
        elif not others and can_split(size, num_ranks):
            candidates.append((2, dim, Shard(dim, 1, size)))
    for _, _, shard in sorted(candidates, key=lambda c: c[:2]):
        split = (*layout[:axis], shard, *layout[axis + 1 :])
        if compatible(split, shape):
            return split
    return layout
