"""One program, ready to run: from the leaves of a call to the model's result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autopar.cost_models.errors import PlanError, RuntimeStateError
from autopar.passes.base import InputKind, InputSpec, Program, ProgramTensor, StepGraph
from autopar.passes.placement import REPLICATE
from autopar.plan import Plan
from autopar.runtime.bind import bind, input_order
from autopar.runtime.bindings import Binding, use_bindings
from autopar.runtime.border import Relayout, dtensor_reader, local_of, relayout
from autopar.runtime.failures import explained
from autopar.runtime.groups import Groups, on_stage
from autopar.runtime.outputs import LeafLayouts, Outputs
from autopar.runtime.seed import GradientSeed
from autopar.runtime.sends import call_directly, with_own_sends
from autopar.runtime.state import ModelState
from autopar.runtime.world import World
from autopar.torch_private import DTensorSpec


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the pipeline made for one kind of call.

    Attributes:
        step: the captured step.
        plan: how it is split.
        program: this rank's program.
    """

    step: StepGraph
    plan: Plan
    program: Program


@dataclass(frozen=True, kw_only=True)
class Home:
    """What all programs of one module share: where they run and what they read.

    Attributes:
        state: the module's parameters and buffers.
        world: the processes.
        groups: the mesh; None alone.
        seed: the gradient seed.
        anchor: a tensor that requires grad, so that the loss does on ranks that train nothing themselves.
        backend: "eager", or the name of a ``torch.compile`` backend.
    """

    state: ModelState
    world: World
    groups: Groups | None
    seed: GradientSeed
    anchor: torch.Tensor
    backend: str = "eager"


class Runner:
    """Runs a program without a backward, and is what the runners of training steps share.

    Args:
        compiled: the program and where it comes from.
        home: where it runs.
        leaf_layouts: how the tensor leaves of a call lie; one that is not named is whole on every rank.
        low_precision: whether any rank computes in float16, so that gradients may overflow on some ranks.
    """

    def __init__(
        self, compiled: Compiled, home: Home, leaf_layouts: LeafLayouts, *, low_precision: bool = False
    ) -> None:
        program, groups = on_stage(compiled.program), home.groups
        self.compiled, self.low_precision = compiled.program, low_precision
        self.program, self.home, self.plan, self.loss_leaf = program, home, compiled.plan, compiled.step.loss_leaf
        specs = [(program.inputs[i], program.input_tensors[i]) for i in input_order(program)]
        held = [pair for pair in specs if pair[0].kind in (InputKind.PARAMETER, InputKind.BUFFER)]
        absent = [spec.name for spec, _ in held if not home.state[spec.name].present]
        if absent:
            some = ", ".join(absent[:4])
            raise PlanError(
                f"this kind of call needs {some} on a pipeline stage that does not hold it: the stages of its plan "
                "differ from those of the first one; compile a copy of the model for such calls"
            )
        self._slots = [home.state[spec.name].slots[0] for spec, _ in held]
        self._held_readers = _held_readers(held, home)
        self._batch = [
            (spec.leaf, _batch_reader(spec, tensor, home, leaf_layouts))
            for spec, tensor in specs
            if spec.kind is InputKind.BATCH
        ]
        self.seeds = [(spec, tensor) for spec, tensor in specs if spec.kind is InputKind.SEED]
        self.outputs = Outputs(compiled.step, program, home.state, groups, leaf_layouts)
        self.number = 0
        self.set_up(with_own_sends(bind(compiled.program, _real_name(groups), home.world.device)))

    def set_up(self, bound: fx.GraphModule) -> None:
        """Keep what :meth:`__call__` runs."""
        self.run = self.runnable(bound)

    def runnable(self, bound: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        """The function that runs a bound graph, with errors that say where they come from."""
        function = as_callable(bound, self.home.backend)

        def run(*values: Any) -> Sequence[Any]:  # noqa: ANN401 - what the graph takes
            try:
                return function(*values)
            except Exception as error:
                told = explained(error, bound, self.home.world, self.number)
                if told is error:
                    raise
                raise told from error

        return run

    def __call__(self, leaves: Sequence[Any]) -> Any:  # noqa: ANN401 - what the model returns
        """Run the program on the leaves of a call and return the model's result."""
        with torch.no_grad():
            values = self.run(*self.values(leaves), *self.random_seed())
            self.outputs.write_back(values)
            return self.outputs.result(self.outputs.leaves(values))

    def values(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """This rank's parameters, buffers and batch, as the program takes them.  Called without gradients."""
        values = [local_of(table[key]) for table, key in self._slots]
        for position, read in self._held_readers:
            values[position] = read(values[position])
        values += [leaves[leaf] if read is None else read(leaves[leaf]) for leaf, read in self._batch]
        return values

    def random_seed(self) -> list[torch.Tensor]:
        """What the random draws of this call start from: rank 0's default generator, on every rank."""
        if self.program.seed_input is None:
            return []
        seed = torch.empty((), dtype=torch.int64).random_()
        if self.home.world.control is not None:
            dist.broadcast(seed, src=0, group=self.home.world.control)
        return [seed]


def _real_name(groups: Groups | None) -> Callable[[str], str]:
    if groups is not None:
        return lambda name: str(groups.group(name).group_name)

    def alone(name: str) -> str:
        raise RuntimeStateError(f"a program for one rank communicates in {name!r}")

    return alone


def _held_readers(held: Sequence[tuple[InputSpec, ProgramTensor]], home: Home) -> list[tuple[int, Relayout]]:
    """For the parameters and buffers that a program wants in another layout than they are stored in: how to get it."""
    found = []
    for position, (spec, tensor) in enumerate(held):
        read = relayout(home.state[spec.name].layout, tensor, home.groups)
        if read is not None:
            found.append((position, read))
    return found


def _batch_reader(spec: InputSpec, tensor: ProgramTensor, home: Home, layouts: LeafLayouts) -> Relayout | None:
    have = layouts.get(spec.leaf, (REPLICATE,) * len(tensor.layout))
    if isinstance(have, DTensorSpec):
        return dtensor_reader(tensor, home.groups)
    return relayout(have, tensor, home.groups)


def uses_float16(program: Program) -> bool:
    """Whether the program computes in a dtype so narrow that losses are scaled for it."""
    modules = [m for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    values = (node.meta.get("val") for module in modules for node in module.graph.nodes)
    return any(isinstance(value, torch.Tensor) and value.dtype is torch.float16 for value in values)


def as_callable(bound: fx.GraphModule, backend: str) -> Callable[..., Sequence[Any]]:
    """The function that runs a bound graph."""
    if backend == "eager":
        known: dict[Any, Binding | None] = {}
        for module in bound.modules():
            if isinstance(module, fx.GraphModule):
                use_bindings(module.graph, known)
                module.recompile()
                if module is not bound:
                    call_directly(module)
        function: Callable[..., Sequence[Any]] = bound.forward
        return function
    return torch.compile(bound, backend=backend, dynamic=False)
