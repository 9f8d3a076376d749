"""The intermediate representation: one training step as a flat ``torch.fx`` graph with described inputs and outputs.

A :class:`StepGraph` is what capture hands to the passes: one device's step.  A :class:`Program` is what the passes hand
to the runtime and to the verifier: the step of one rank of a mesh.

Node metadata (``node.meta``) that every pass keeps:

``val``       fake tensor (or tuple of them, or a Python number): global in a StepGraph, local in a Program
``layer``     dotted path of the module that produced the node ("" for code outside any module, such as the loss)
``phase``     ``Phase.FORWARD`` or ``Phase.BACKWARD``
``source``    "file.py:12: code" of the user's line, or ""
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.passes.placement import Layout


class Phase(enum.Enum):
    """Which half of the training step a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


class InputKind(enum.Enum):
    """What a placeholder of the step stands for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    SEED = "seed"


class OutputKind(enum.Enum):
    """What an output of the step stands for."""

    LOSS = "loss"
    RESULT = "result"
    GRADIENT = "gradient"
    INPUT_GRADIENT = "input_gradient"
    MUTATION = "mutation"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """One placeholder of a step, in the order of the graph's placeholders.

    Attributes:
        kind: what it is.
        name: canonical dotted name of the parameter or buffer, or the path of the batch leaf in the call, such as
            ``args[0]``, ``kwargs['labels']``, ``targets[0]``.  The seed of output leaf ``i`` is called ``seed[i]``.
        aliases: other names under which a tied parameter (or a buffer registered twice) appears in the model.
        leaf: position among the flattened tensor and non-tensor leaves of ``(args, kwargs, targets)``; -1 otherwise.
        trainable: whether a gradient is asked for.
    """

    kind: InputKind
    name: str
    aliases: tuple[str, ...] = ()
    leaf: int = -1
    trainable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """One output of a step, in the order of the graph's output tuple.

    Attributes:
        kind: what it is.
        name: for gradients and mutations the name of the input they belong to; for results ``result[i]``.
        leaf: for the loss and results, the position among the flattened leaves of what the call returns; -1 otherwise.
    """

    kind: OutputKind
    name: str
    leaf: int = -1


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """One device's training step (or forward pass) on the global batch.

    Attributes:
        graph_module: flat placeholders, one per entry of ``inputs``; one output node holding a tuple with one entry per
            entry of ``outputs`` (an entry may be None: a parameter that got no gradient).
        inputs: description of the placeholders.
        outputs: description of the outputs.
        result_spec: pytree spec of what the call returns.
        result_constants: leaves of the result that are not tensors of this graph, by leaf position.
        training: whether the graph holds a backward half.
        loss_leaf: position of the loss among the result's leaves, or -1 where the loss is computed outside.
        checkpoints: layer paths that the user wrapped in ``torch.utils.checkpoint`` (hints for recompute).
        repeated: groups of layer paths that are copies of one block, in order of execution.
    """

    graph_module: fx.GraphModule
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    result_spec: Any = None
    result_constants: Mapping[int, Any] = field(default_factory=dict)
    training: bool = True
    loss_leaf: int = -1
    checkpoints: tuple[str, ...] = ()
    repeated: tuple[tuple[str, ...], ...] = ()

    @property
    def graph(self) -> fx.Graph:
        """The graph of ``graph_module``."""
        return self.graph_module.graph

    @property
    def placeholders(self) -> list[fx.Node]:
        """The placeholder nodes, one per entry of ``inputs``."""
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    @property
    def results(self) -> tuple[fx.Node | None, ...]:
        """The values of the output tuple, one per entry of ``outputs``."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """An n-d grid of ranks.  Ranks are numbered row-major: the last axis varies fastest.

    >>> mesh = Mesh(axes=("dp", "tp"), sizes=(2, 4))
    >>> mesh.size, mesh.coords(6), mesh.group_ranks("tp", 6), mesh.group_ranks("dp", 6)
    (8, (1, 2), (4, 5, 6, 7), (2, 6))
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def axis_size(self, axis: str) -> int:
        """Number of ranks along ``axis``."""
        return self.sizes[self.axes.index(axis)]

    def coords(self, rank: int) -> tuple[int, ...]:
        """Position of ``rank``, one coordinate an axis."""
        out = []
        for size in reversed(self.sizes):
            out.append(rank % size)
            rank //= size
        return tuple(reversed(out))

    def rank(self, coords: tuple[int, ...]) -> int:
        """Inverse of :meth:`coords`."""
        rank = 0
        for size, coord in zip(self.sizes, coords, strict=True):
            rank = rank * size + coord
        return rank

    def group_ranks(self, group: str, rank: int) -> tuple[int, ...]:
        """Ranks that ``rank`` communicates with in ``group`` ("tp", or several axes joined by "+": "dp+tp")."""
        axes = [self.axes.index(a) for a in group.split("+")]
        here = self.coords(rank)
        return tuple(
            r
            for r in range(self.size)
            if all(c == h for i, (c, h) in enumerate(zip(self.coords(r), here, strict=True)) if i not in axes)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTensor:
    """Where an input or output of a program lives: its layout on the mesh, global shape and dtype."""

    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Program:
    """The step of one rank.

    Communication is ``torch.ops._c10d_functional.*`` followed by ``wait_tensor``; the group argument is the name of a
    mesh axis (or several joined by "+"), which the runtime binds to the name of a real process group.

    Attributes:
        graph_module: flat placeholders, one per entry of ``inputs``; output tuple with one entry per ``outputs``.
        inputs, outputs: the same descriptions as the StepGraph's.
        input_tensors: layout of every input, in order; the caller passes the local part (a replicated batch input is
            the whole global tensor: the program narrows it).
        output_tensors: layout of every output, in order; None where the output is None or a Python number.
        mesh: the grid; ``rank`` is this program's place in it.
        seed_input: name of the extra int64 0-d placeholder ("rng_seed", last) when the program draws random numbers
            under ``rng="fast"``, else None.
    """

    graph_module: fx.GraphModule
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    input_tensors: tuple[ProgramTensor, ...]
    output_tensors: tuple[ProgramTensor | None, ...]
    mesh: Mesh
    rank: int
    seed_input: str | None = None
