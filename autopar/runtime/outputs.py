"""What a program returns: results for the caller, gradients for autograd, new values for buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.cost_models.errors import PartitionError
from autopar.passes.base import OutputKind, Program, ProgramTensor, StepGraph
from autopar.passes.placement import REPLICATE, Layout
from autopar.runtime.border import Relayout, dtensor_writer, like_dtensor, local_of, relayout
from autopar.runtime.groups import Groups
from autopar.runtime.layout import is_replicated
from autopar.runtime.state import ModelState, Stored
from autopar.torch_private import DTensorSpec, dtensor, pytree

LeafLayouts = Mapping[int, Layout | DTensorSpec]
Gradients = list[torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A parameter, or an input of the call, that gets a gradient.

    Attributes:
        stored: the parameter; None for an input.
        leaf: the input's position among the call's leaves; -1 for a parameter.
        position: of its gradient among the program's outputs; -1 where it has none.
        convert: brings the gradient to the layout of what it belongs to.
        spec: dresses it as a DTensor; None for a plain tensor.
    """

    stored: Stored | None
    leaf: int
    position: int
    convert: Relayout | None
    spec: DTensorSpec | None


class Outputs:
    """Reads the values that a program returned.

    Args:
        step: the captured step.
        program: this rank's program.
        state: the module's parameters and buffers.
        groups: the mesh; None alone.
        leaf_layouts: how the tensor leaves of a call lie; one that is not named is whole on every rank.
    """

    def __init__(
        self, step: StepGraph, program: Program, state: ModelState, groups: Groups | None, leaf_layouts: LeafLayouts
    ) -> None:
        self._groups = groups
        self._program = program
        self._layouts = leaf_layouts
        self._spec = step.result_spec
        self._single = step.result_spec.is_leaf()
        self._template = [step.result_constants.get(i) for i in range(step.result_spec.num_leaves)]
        self.loss = -1
        self.results: list[tuple[int, int, Relayout | None]] = []
        self.mutations: list[tuple[int, tuple[dict[str, Any], str], Relayout | None]] = []
        positions = {}
        for position, (spec, made) in enumerate(zip(program.outputs, program.output_tensors, strict=True)):
            if spec.kind is OutputKind.LOSS:
                self.loss = position
                self.results.append((position, spec.leaf, self._result_writer(made)))
            elif spec.kind is OutputKind.RESULT:
                self.results.append((position, spec.leaf, self._result_writer(made)))
            elif spec.kind is OutputKind.MUTATION:
                stored = state[spec.name]
                convert = None if made is None else self._to_layout(made, stored.layout)
                self.mutations.append((position, stored.slots[0], convert))
            else:
                positions[spec.name] = position if made is not None else -1
        trained = [spec for spec in program.inputs if spec.trainable]
        self.trained = [self._trained(spec.name, spec.leaf, positions, state) for spec in trained]

    def _result_writer(self, made: ProgramTensor | None) -> Relayout | None:
        if made is None or self._groups is None:
            return None
        if not made.shape:
            if not is_replicated(made.layout):
                raise PartitionError(f"a scalar result is laid out as {made.layout}; every rank must hold its value")
            return None
        return dtensor_writer(made, self._groups)

    def _to_layout(self, made: ProgramTensor, layout: Layout) -> Relayout | None:
        want = ProgramTensor(layout=layout, shape=made.shape, dtype=made.dtype)
        return relayout(made.layout, want, self._groups)

    def _trained(self, name: str, leaf: int, positions: Mapping[str, int], state: ModelState) -> Trained:
        position = positions.get(name, -1)
        made = self._program.output_tensors[position] if position >= 0 else None
        stored = state[name] if leaf < 0 else None
        whole = (REPLICATE,) * len(self._program.mesh.axes)
        home = stored.layout if stored is not None else self._layouts.get(leaf, whole)
        if isinstance(home, DTensorSpec):
            convert = None if made is None else like_dtensor(made, home, self._groups)
            return Trained(stored=None, leaf=leaf, position=position, convert=convert, spec=home)
        convert = None if made is None else self._to_layout(made, home)
        spec = None if stored is None else stored.spec
        return Trained(stored=stored, leaf=leaf, position=position, convert=convert, spec=spec)

    def differentiable(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """What autograd must know about: the trained parameters and inputs of a call."""
        return [t.stored.tensor if t.stored is not None else leaves[t.leaf] for t in self.trained]

    def gradients(self, values: Sequence[Any]) -> Gradients:
        """The gradients of what is trained, in the layouts of their owners, as plain local tensors."""
        found: Gradients = []
        for trained in self.trained:
            gradient = values[trained.position] if trained.position >= 0 else None
            if gradient is not None and trained.convert is not None:
                gradient = trained.convert(gradient)
            found.append(gradient)
        return found

    def dressed(self, gradients: Gradients) -> Gradients:
        """The gradients as their owners are: DTensors for DTensors."""
        return [
            gradient if gradient is None or trained.spec is None else dtensor(gradient, trained.spec)
            for gradient, trained in zip(gradients, self.trained, strict=True)
        ]

    def write_back(self, values: Sequence[Any]) -> None:
        """Give buffers that the step changed their new values."""
        for position, (table, key), convert in self.mutations:
            new = values[position]
            if new is not None:
                local_of(table[key]).copy_(new if convert is None else convert(new))

    def leaves(self, values: Sequence[Any]) -> list[Any]:
        """The leaves of what the call returns."""
        leaves = list(self._template)
        for position, leaf, write in self.results:
            value = values[position]
            leaves[leaf] = value if write is None or value is None else write(value)
        return leaves

    def result(self, leaves: list[Any]) -> Any:  # noqa: ANN401 - what the model returns
        """What the call returns, in the model's own types."""
        return leaves[0] if self._single else pytree.tree_unflatten(leaves, self._spec)
