"""What a rule is: one row in factor notation, saying which splits of an operation are correct.

``mm`` is ``"m k, k n -> m n | sum k | linear 0 / 1"``: every letter is a factor.  Splitting a factor splits each tensor
dim in which it appears; an output in which it does not appear becomes Partial.  A dim written ``(h d)`` is made of
atoms, outermost first; a dim of size 1 that broadcasts is written ``1``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.cost_models.errors import PartitionError
from autopar.passes.torch_ops import OpOverload

if TYPE_CHECKING:
    from autopar.passes.lowering import LocalContext

Dims = tuple[tuple[str, ...], ...]
Lowering = Callable[["LocalContext"], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Which splits of one call are correct.

    Attributes:
        inputs: for every tensor argument in schema order, the factors (atoms, outermost first) of every dim.
        outputs: the same for every tensor output; None where the output is not a tensor.
        sizes: global size of every factor.
        reduce: factors that may be split though an output lacks them, and how that output is then Partial.
        nosplit: factors that may not be split.
        linear: sets of inputs that may be Partial together, which makes every output Partial.
        addends: inputs that must be Partial where the named factors are split (a bias beside a split contraction).
        complete: for a factor, the outputs that lack it and are whole on every rank all the same.
        whole: factors whose split must be one contiguous run (their global position matters to the lowering).
        shape_args: names of arguments that hold the shape of an output: recomputed from the local shape.
        localize: returns replacements of arguments by name, given the local context.
        lowerings: factors whose split needs a program of its own in place of the operation.
        lower: program used whenever anything is split (whatever the factor).
        random: whether the call draws from the generator.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims | None, ...]
    sizes: Mapping[str, int]
    reduce: Mapping[str, str] = field(default_factory=dict)
    nosplit: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    addends: Mapping[int, frozenset[str]] = field(default_factory=dict)
    complete: Mapping[str, frozenset[int]] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    shape_args: Mapping[str, int] = field(default_factory=dict)
    localize: Lowering | None = None
    lowerings: Mapping[str, Lowering] = field(default_factory=dict)
    lower: Lowering | None = None
    random: bool = False

    def splittable(self, factor: str) -> bool:
        """Whether ``factor`` may be split at all."""
        if factor in self.nosplit or self.sizes[factor] < 2:
            return False
        if factor in self.reduce:
            return True
        done = self.complete.get(factor, frozenset())
        return all(
            dims is None or i in done or any(factor in dim for dim in dims) for i, dims in enumerate(self.outputs)
        )

    def with_(self, **changes: Any) -> Row:
        """A copy with some fields replaced."""
        return replace(self, **changes)


class Call:
    """A call of an ATen operation in the graph, with its arguments bound to the names of the schema."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.op: OpOverload = node.target  # type: ignore[assignment]
        schema = self.op._schema
        self.names = [a.name for a in schema.arguments]
        bound = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        bound.update(zip(self.names, node.args, strict=False))
        bound.update(node.kwargs)
        self.args: dict[str, Any] = bound

    @cached_property
    def tensors(self) -> list[fx.Node]:
        """Tensor arguments in schema order (lists flattened, None skipped)."""
        found: list[fx.Node] = []
        for name in self.names:
            value = self.args.get(name)
            found.extend(
                item
                for item in (value if isinstance(value, (list, tuple)) else (value,))
                if isinstance(item, fx.Node) and isinstance(item.meta.get("val"), torch.Tensor)
            )
        return found

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Global shapes of :attr:`tensors`."""
        return [tuple(n.meta["val"].shape) for n in self.tensors]

    @cached_property
    def outputs(self) -> list[torch.Tensor | None]:
        """Fake tensors of the outputs (None where an output is no tensor)."""
        value = self.node.meta["val"]
        items = value if isinstance(value, (list, tuple)) else (value,)
        return [v if isinstance(v, torch.Tensor) else None for v in items]

    @cached_property
    def out_shapes(self) -> list[tuple[int, ...] | None]:
        """Global shapes of :attr:`outputs`."""
        return [None if o is None else tuple(o.shape) for o in self.outputs]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def has(self, name: str) -> bool:
        """Whether the optional tensor argument ``name`` was given."""
        return isinstance(self.args.get(name), fx.Node)

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of the tensor argument ``name``."""
        return tuple(self.args[name].meta["val"].shape)


def is_tensor_node(node: fx.Node) -> bool:
    """Whether the node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_getitem(node: fx.Node) -> bool:
    """Whether the node picks one output of a multi-output call."""
    return node.op == "call_function" and node.target is operator.getitem


def parse_dims(text: str) -> Dims:
    """``"b (h d) 1"`` -> ``(("b",), ("h", "d"), ())``.

    >>> parse_dims("b (h d) 1")
    (('b',), ('h', 'd'), ())
    """
    out: list[tuple[str, ...]] = []
    for token in re.findall(r"\([^)]*\)|\S+", text):
        if token.startswith("("):
            out.append(tuple(token[1:-1].split()))
        else:
            out.append(() if token == "1" else (token,))
    return tuple(out)


def parse_row(text: str, shapes: Sequence[tuple[int, ...]], sizes: Mapping[str, int] | None = None) -> Row:
    """Read a row from text, taking factor sizes from the shapes of the inputs (and ``sizes`` for compound dims).

    The text is ``"inputs -> outputs | sum FACTORS | max FACTORS | nosplit FACTORS | linear 0 1 / 2 | whole FACTORS"``.

    Raises:
        PartitionError: the text does not fit the shapes.
    """
    head, *clauses = (part.strip() for part in text.split("|"))
    left, right = head.split("->")
    inputs = tuple(parse_dims(t) for t in left.split(",")) if left.strip() else ()
    outputs = tuple(None if t.strip() == "none" else parse_dims(t) for t in right.split(","))
    if len(inputs) != len(shapes):
        raise PartitionError(f"row {text!r} describes {len(inputs)} tensors, the call has {len(shapes)}")
    known = dict(sizes or {})
    for dims, shape in zip(inputs, shapes, strict=True):
        if len(dims) != len(shape):
            raise PartitionError(f"row {text!r}: {dims} does not fit shape {shape}")
        for dim, size in zip(dims, shape, strict=True):
            unknown = [f for f in dim if f not in known]
            if len(unknown) == 1:
                known[unknown[0]] = size // math.prod(known[f] for f in dim if f in known)
            if unknown[1:] or math.prod(known[f] for f in dim) != size:
                raise PartitionError(f"row {text!r}: dim {dim} does not fit size {size} with {known}")
    reduce: dict[str, str] = {}
    nosplit: set[str] = set()
    whole: set[str] = set()
    linear: tuple[frozenset[int], ...] = ()
    for clause in clauses:
        word, _, rest = clause.partition(" ")
        if word in ("sum", "max", "min"):
            reduce.update(dict.fromkeys(rest.split(), word))
        elif word == "nosplit":
            nosplit.update(rest.split())
        elif word == "whole":
            whole.update(rest.split())
        elif word == "linear":
            linear = tuple(frozenset(int(i) for i in group.split()) for group in rest.split("/"))
        else:
            raise PartitionError(f"row {text!r}: unknown clause {clause!r}")
    return Row(
        inputs=inputs,
        outputs=outputs,
        sizes=known,
        reduce=reduce,
        nosplit=frozenset(nosplit),
        whole=frozenset(whole),
        linear=linear,
    )
