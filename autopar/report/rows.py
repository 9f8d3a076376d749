"""A program as rows for people: one row a node, with everything that a dump shows of it.

:mod:`autopar.report.reader` makes them from a graph; the renderers read rows and no graphs.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.passes.base import Mesh, Phase
from autopar.plan import layer_matches


class Kind(enum.Enum):
    """What a row is; the value is its name in dumps."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "input"
    SEED = "seed"
    CONSTANT = "constant"
    COMPUTATION = "computation"
    VIEW = "view"
    COMMUNICATION = "collective"
    WAIT = "wait"
    PART = "part"
    OUTPUT = "output"


class Only(enum.Enum):
    """What a dump may be narrowed to."""

    COLLECTIVES = "collectives"
    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    GRADIENTS = "gradients"
    COMPUTATION = "computation"


_ONLY = {
    Only.COLLECTIVES: Kind.COMMUNICATION,
    Only.PARAMETERS: Kind.PARAMETER,
    Only.BUFFERS: Kind.BUFFER,
    Only.INPUTS: Kind.BATCH,
    Only.COMPUTATION: Kind.COMPUTATION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """What a rank holds of a value: short dtype and local shape."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """What a communication row does.

    Attributes:
        op: ``all_reduce``, ``all_gather_into_tensor``, ...
        group: mesh axis, or several joined by "+".
        num_ranks: members of the group.
        moved_bytes: bytes that this rank's link carries in one direction, for the ring (or direct) algorithm.
        serves: the tensors that it is for: names of parameters, ``gradient of`` them, or the value that is moved.
    """

    op: str
    group: str
    num_ranks: int
    moved_bytes: int
    serves: tuple[str, ...]

    def belongs_to(self, layer: str) -> bool:
        """Whether it moves a parameter or a gradient of a layer that fits the pattern ``layer``."""
        return any(layer_matches(layer, name.removeprefix("gradient of ")) for name in self.serves)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One node of a program.

    Attributes:
        name: name of the value.
        kind: what the node is.
        call: what it calls, such as ``aten.mm``; empty for inputs.
        arguments: the arguments as Python text.
        inputs: names of the rows that it reads, in order.
        label: for inputs and outputs, what of the model they are.
        layer, phase, source: where it comes from.
        layout: placement on each axis with more than one rank, such as ``tp:S(0)``.
        local: what this rank holds of its result.
        global_shape: shape of the whole result, or None where it is not known.
        communication: set where it communicates.
        roles: outputs of the step that are this value, such as ``gradient of tok.weight``.
    """

    name: str
    kind: Kind
    call: str
    arguments: str
    inputs: tuple[str, ...]
    label: str
    layer: str
    phase: Phase | None
    source: str
    layout: tuple[str, ...]
    local: tuple[LocalTensor, ...]
    global_shape: tuple[int, ...] | None
    communication: Communication | None = None
    roles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The rows of a program.

    Attributes:
        mesh, rank: whose program it is.
        rows: the step, in the order in which it runs; the last one is the output.
        parts: rows of the sub-programs that ``part`` rows call, by name.
    """

    mesh: Mesh
    rank: int
    rows: tuple[Row, ...]
    parts: Mapping[str, tuple[Row, ...]]

    @property
    def title(self) -> str:
        """Which rank this is."""
        coords = self.mesh.coords(self.rank)
        places = [f"{a} {c}/{s}" for a, c, s in zip(self.mesh.axes, coords, self.mesh.sizes, strict=True) if s > 1]
        return f"rank {self.rank} of {self.mesh.size}" + (f" ({', '.join(places)})" if places else "")


def select(view: View, *, layer: str | None = None, only: Only | None = None) -> View:
    """The rows that belong to a layer that fits the pattern ``layer``, and that are what ``only`` says."""

    def keep(row: Row) -> bool:
        talk = row.communication
        if layer is not None and not (layer_matches(layer, row.layer) or (talk and talk.belongs_to(layer))):
            return False
        if only is Only.GRADIENTS:
            return any(role.startswith("gradient") for role in row.roles)
        return only is None or row.kind is _ONLY[only]

    parts = {name: tuple(filter(keep, rows)) for name, rows in view.parts.items()}
    return dataclasses.replace(view, rows=tuple(filter(keep, view.rows)), parts=parts)
