"""What a partitioned step says about micro-batches and stages.

The partitioner treats micro-batches as one more mesh axis, ``mb``.  :class:`Fold` reads the local programs of one
rank's micro-batches side by side and sorts their calls:

* what is the same for all micro-batches is done *once*; the rest is done for *each*;
* a collective over ``mb`` *joins* the micro-batches: a sum over them, or all of them in a row;
* a join of what comes from inputs alone (a count of valid tokens) is made before everything else; any other one raises
  the *level* of what follows: all micro-batches have to pass the join before one can go on;
* what comes from inputs alone, or only prepares a parameter, is *cheap to repeat*: it has no stage and is done wherever
  it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from autopar.cost_models.errors import ConstraintError, PartitionError
from autopar.passes.base import InputKind, Phase, Program
from autopar.passes.random import seeded
from autopar.passes.redistribute import MICROBATCHES
from autopar.passes.rules.row import is_getitem
from autopar.passes.split_stages import STAGE, early_backward
from autopar.passes.torch_ops import ALL_GATHER, ALL_REDUCE, group_of, is_collective, is_wait, pytree

# Calls that only bring a parameter into another form; a stage that needs it in that form does them itself.
PREPARING = frozenset(
    {
        "aten::t", "aten::transpose.int", "aten::permute", "aten::view", "aten::reshape", "aten::_unsafe_view",
        "aten::unsqueeze", "aten::squeeze.dim", "aten::slice.Tensor", "aten::select.int", "aten::expand", "aten::clone",
        "aten::_to_copy", "aten::alias", "aten::detach", "aten::constant_pad_nd", "_c10d_functional::wait_tensor",
        "_c10d_functional::all_gather_into_tensor", "_c10d_functional::all_reduce", "aten::view_as_real",
        "aten::view_as_complex", "aten::split.Tensor", "aten::split_with_sizes", "aten::zeros_like",
    }
)  # fmt: skip
# Calls that are too heavy to be repeated on every stage that needs their result.
HEAVY = ("mm", "bmm", "addmm", "baddbmm", "convolution", "scaled_dot_product", "_fft", "sort", "linalg", "mv", "dot")


def target_name(node: fx.Node) -> str:
    """Name of the operation that a node calls, with its overload."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return str(getattr(node.target, "__name__", node.target))
    return str(schema.name) + (f".{schema.overload_name}" if schema.overload_name else "")


class Fold:
    """The programs of all micro-batches of one place on the mesh, read side by side; a call is known by its position.

    Args:
        programs: the local programs of micro-batch 0, 1, ...; where all micro-batches have equally many rows, those of
            the first two and of the last one are enough.
        count: number of micro-batches.
        num_stages: number of pipeline stages.
        regather: gather a parameter anew for each micro-batch, instead of holding it for the whole step (ZeRO 3).

    Raises:
        PartitionError: the programs differ in structure.
    """

    def __init__(self, programs: Sequence[Program], *, count: int, num_stages: int, regather: bool) -> None:
        self.programs, self.num_stages, self.regather = programs, num_stages, regather
        for program in programs:
            split_sums(program)
        self.lists: list[list[fx.Node]] = [list(p.graph_module.graph.nodes) for p in programs]
        self.nodes = self.lists[0]
        if any(len(nodes) != len(self.nodes) for nodes in self.lists):
            raise PartitionError("the programs of two micro-batches have different numbers of calls")
        self.index = [{n: i for i, n in enumerate(nodes)} for nodes in self.lists]
        self.count = count
        self.known: dict[tuple[int, int], tuple[Any, Any, list[Any]]] = {}
        self.spec_of = dict(
            zip((i for i, n in enumerate(self.nodes) if n.op == "placeholder"), programs[0].inputs, strict=False)
        )
        self._read()
        self._sort()

    # structure

    def _read(self) -> None:
        size = len(self.nodes)
        self.inputs: list[list[int]] = [[self.index[0][s] for s in n.all_input_nodes] for n in self.nodes]
        self.join = [self._is_join(n) for n in self.nodes]
        self.alias = list(range(size))  # waiting for a join is the join
        self.wait_of: dict[int, int] = {}
        for i, node in enumerate(self.nodes):
            if is_wait(node) and self.join[self.inputs[i][0]]:
                self.alias[i] = self.inputs[i][0]
                self.wait_of[self.inputs[i][0]] = i
        self.inputs = [[self.alias[s] for s in sources] for sources in self.inputs]
        self.output = self.index[0][self.programs[0].graph_module.graph.output_node()]
        results = cast("tuple[Any, ...]", self.nodes[self.output].args[0])
        self.results = [self.alias[self.index[0][r]] if isinstance(r, fx.Node) else r for r in results]
        self.differs = [self.count > 1 and self._differs(i) for i in range(size)]
        self.live = self._live()

    @staticmethod
    def _is_join(node: fx.Node) -> bool:
        if not is_collective(node) or group_of(node) != MICROBATCHES:
            return False
        if node.target not in (ALL_REDUCE, ALL_GATHER):
            raise PartitionError(f"{node.format_node()} would exchange parts of micro-batches")
        return True

    def node(self, microbatch: int, position: int) -> fx.Node:
        """A call as its micro-batch has it (or one that has it in the same shapes)."""
        found: fx.Node = self.lists[min(microbatch, len(self.lists) - 1)][position]
        return found

    def described(self, microbatch: int, position: int) -> tuple[Any, Any, list[Any]]:
        """(target, shape of the arguments, leaves of the arguments) with nodes given by their positions.

        Numbers that differ between equal micro-batches grow evenly: they are where the rows begin and end.
        """
        if len(self.lists) == self.count or microbatch < 2:
            return self._read_call(microbatch, position)
        first, second = self._read_call(0, position), self._read_call(1, position)
        if len(first[2]) != len(second[2]):
            return second
        leaves = [
            a + microbatch * (b - a) if is_number(a) and is_number(b) else b
            for a, b in zip(first[2], second[2], strict=True)
        ]
        return second[0], second[1], leaves

    def _read_call(self, which: int, position: int) -> tuple[Any, Any, list[Any]]:
        key = (which, position)
        if key not in self.known:
            node, index = self.lists[which][position], self.index[which]
            leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
            self.known[key] = (node.target, spec, [Ref(index[a]) if isinstance(a, fx.Node) else a for a in leaves])
        return self.known[key]

    def _differs(self, i: int) -> bool:
        if self.nodes[i].op in ("placeholder", "output", "get_attr"):
            return False
        first = self.described(0, i)
        if len(self.lists) == self.count:
            return any(not same(self.described(m, i), first) for m in range(1, self.count))
        if not same(self.described(self.count - 1, i), self._read_call(len(self.lists) - 1, i)):
            raise PartitionError(f"{self.nodes[i].format_node()} does not grow evenly over the micro-batches")
        return not same(self.described(1, i), first)

    def _live(self) -> list[bool]:
        live = [False] * len(self.nodes)
        queue = [r for r in self.results if isinstance(r, int) and not isinstance(r, bool)]
        queue += [i for i, n in enumerate(self.nodes) if is_draw(n)]
        while queue:
            i = queue.pop()
            if not live[i]:
                live[i] = True
                queue += self.inputs[i]
        return live

    # kinds

    def _sort(self) -> None:
        size = len(self.nodes)
        self.each, self.cheap, self.from_inputs = [False] * size, [False] * size, [False] * size
        self.level, self.depth, self.stage = [0] * size, [0] * size, [-1] * size
        self.parameters: list[frozenset[int]] = [frozenset()] * size
        early = early_backward(self.programs[0].graph_module.graph)
        self.backward = [n.meta.get("phase") is Phase.BACKWARD and n not in early for n in self.nodes]
        for i, node in enumerate(self.nodes):
            if node.op == "output" or self.alias[i] != i:
                continue
            self._sort_one(i, node)
        # A backward that waits for a join needs all forwards first; a forward that does can be finished at the end.
        self.coupled = [
            i
            for i in range(size)
            if self.live[i] and self.each[i] and self.level[i] and self.backward[i] and not self.cheap[i]
        ]

    def _sort_one(self, i: int, node: fx.Node) -> None:
        sources = self.inputs[i]
        self.parameters[i] = frozenset().union(*(self.parameters[s] for s in sources))
        spec = self.spec_of.get(i)
        if node.op == "placeholder":
            self.cheap[i] = True
            parameter = spec is not None and spec.kind is InputKind.PARAMETER
            self.parameters[i] = frozenset([i]) if parameter else frozenset()
            self.from_inputs[i] = not parameter
            self.each[i] = self.count == 1 and spec is not None and spec.kind is InputKind.BATCH
            return
        if node.op == "get_attr":
            self.cheap[i] = self.from_inputs[i] = True
            return
        joined = self.join[i]
        self.each[i] = not joined and (self.differs[i] or any(self.each[s] for s in sources))
        heavy = any(h in target_name(node) for h in HEAVY)
        self.from_inputs[i] = all(self.from_inputs[s] for s in sources) and not heavy and node.target is not seeded
        if is_getitem(node):
            source = sources[0]
            self.each[i], self.cheap[i], self.from_inputs[i] = (
                self.each[source],
                self.cheap[source],
                self.from_inputs[source],
            )
        else:
            self.cheap[i] = self.from_inputs[i] or self._prepares(i, node)
        if self.cheap[i] and self.regather and is_collective(node) and self.parameters[i] and self.count > 1:
            self.each[i] = True
        if self.from_inputs[i]:
            self.depth[i] = max((self.depth[s] for s in sources), default=0) + joined
        else:
            self.level[i] = max((self.level[s] for s in sources), default=0) + joined
        self.stage[i] = -1 if self.cheap[i] else self._stage(i, node)

    def _prepares(self, i: int, node: fx.Node) -> bool:
        if target_name(node) not in PREPARING or self.join[i] or len(self.parameters[i]) != 1:
            return False
        return all(self.cheap[s] for s in self.inputs[i])

    def _stage(self, i: int, node: fx.Node) -> int:
        if is_wait(node) or is_getitem(node) or self.join[i]:
            return max(self.stage[self.inputs[i][0]], 0)
        stage = int(node.meta.get(STAGE, 0))
        placed = [s for s in self.inputs[i] if self.stage[s] >= 0]
        if self.backward[i]:
            return min([stage, *(self.stage[s] for s in placed if self.backward[s] and self.each[s])])
        return max([stage, *(self.stage[s] for s in placed if self.each[s])])

    def refuse_coupling(self, schedule: str) -> None:
        """Refuse a schedule that lets a micro-batch go on before all have reached a join.

        Raises:
            ConstraintError: with the layer and operation that couples the micro-batches.
        """
        if not self.coupled:
            return
        join = min(
            j
            for j in range(len(self.nodes))
            if self.join[j] and self.live[j] and not self.from_inputs[j] and self._feeds_each(j)
        )
        node = self.nodes[join]
        layer = node.meta.get("layer") or "code outside any layer"
        source = node.meta.get("source", "")
        raise ConstraintError(
            f"{layer} needs all {self.count} micro-batches before any of them can go on "
            f"({node.meta.get('origin') or self.nodes[self.inputs[join][0]].name}{', ' + source if source else ''}), "
            f'which schedule="{schedule}" does not allow; use schedule="gpipe", or microbatches=1'
        )

    def _feeds_each(self, join: int) -> bool:
        reached = {join}
        for i in range(join + 1, len(self.nodes)):
            if any(s in reached for s in self.inputs[i]):
                if self.live[i] and self.each[i] and self.backward[i]:
                    return True
                reached.add(i)
        return False


class Ref(int):
    """Position of a call among the arguments of another."""


def is_number(value: object) -> bool:
    """Whether the constant is a whole number that may differ between micro-batches."""
    return isinstance(value, int) and not isinstance(value, bool | Ref)


def same(one: tuple[Any, Any, list[Any]], other: tuple[Any, Any, list[Any]]) -> bool:
    """Whether two calls are equal, for arguments that are positions or constants."""
    if one[0] is not other[0] or one[1] != other[1]:
        return False
    return all(
        type(a) is type(b) and (a is b or a == b or (a != a and b != b)) for a, b in zip(one[2], other[2], strict=True)
    )


def is_draw(node: fx.Node) -> bool:
    """Whether the call draws from the default generator, whose numbers depend on the order of draws."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and "empty" not in target_name(node)


def split_sums(program: Program) -> None:
    """Sums of two stages' gradients are made after the micro-batches are joined: they cross between stages once."""
    graph = program.graph_module.graph
    queue = [
        n for n in graph.nodes if n.op == "call_function" and n.target is ALL_REDUCE and group_of(n) == MICROBATCHES
    ]
    while queue:
        reduce = queue.pop()
        total = reduce.args[0]
        if not isinstance(total, fx.Node) or total.target is not torch.ops.aten.add.Tensor or total.kwargs:
            continue
        parts = [p for p in total.args if isinstance(p, fx.Node)]
        if len(total.users) != 1 or len(parts) != len(total.args) or reduce.args[1] != "sum":
            continue
        if len({node.meta.get(STAGE) for node in (total, *parts)}) == 1:
            continue
        wait = next(iter(reduce.users))
        joined = []
        for part in parts:
            with graph.inserting_before(wait):
                new = graph.call_function(ALL_REDUCE, (part, *reduce.args[1:]))
                done = graph.call_function(wait.target, (new,))
            for made, like in ((new, reduce), (done, wait)):
                made.meta = {**like.meta, STAGE: part.meta.get(STAGE, like.meta.get(STAGE, 0))}
            queue.append(new)
            joined.append(done)
        with graph.inserting_before(wait):
            added = graph.call_function(total.target, tuple(joined))
        added.meta = dict(wait.meta)
        wait.replace_all_uses_with(added)
        graph.erase_node(wait)
        graph.erase_node(reduce)
        graph.erase_node(total)
