"""The engine of a compiled module: which program serves a call, and what happens when there is none yet."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from autopar.cost_models.errors import CaptureError, InputError, RuntimeStateError
from autopar.passes.base import Mesh, StepGraph
from autopar.passes.placement import Layout
from autopar.plan import Plan
from autopar.runtime.arrivals import (
    Arrival,
    GlobalCall,
    check_equal,
    check_values,
    dtensor_layouts,
    equal_everywhere,
    input_layouts,
    local_batch,
)
from autopar.runtime.bind import group_names
from autopar.runtime.calls import Leaves, on_device, read_call
from autopar.runtime.groups import Groups, groups_for, on_stage
from autopar.runtime.hooks import open_hooks
from autopar.runtime.joint import JointRunner
from autopar.runtime.layout import storable
from autopar.runtime.outer import OuterRunner
from autopar.runtime.outputs import LeafLayouts
from autopar.runtime.runner import Compiled, Home, Runner, uses_float16
from autopar.runtime.seed import GradientSeed
from autopar.runtime.state import ModelState, Pair, check_same_model
from autopar.runtime.world import World
from autopar.torch_private import DTensorSpec, share_found_inf

MAX_PROGRAMS = 16
AUTOCAST = 2  # position in a key
Key = list[Any]


class Pipeline(Protocol):
    """Makes a program for one kind of call; all ranks call it alike."""

    def capture(self, call: GlobalCall) -> StepGraph:
        """The step of one device that makes this call."""
        ...

    def build(self, step: StepGraph, inputs: Mapping[str, Layout], plan: Plan | None) -> Compiled:
        """Plan the step and lower it for this rank.

        Args:
            step: what was captured.
            inputs: how inputs lie of which ranks hold parts, by name.
            plan: the plan by which the model is laid out already, or None.
        """
        ...


@dataclass(slots=True, kw_only=True)
class Entry:
    """One program of the cache.

    Attributes:
        key: the kind of call it serves.
        serial: how many were made before it; the same on every rank.
        runner: runs it.
        parts: positions of inputs of which a rank passes its part.
        checked: whether the values of a first call were compared between ranks.
    """

    key: Key
    serial: int
    runner: Runner
    parts: tuple[int, ...]
    checked: bool = False


class Engine:
    """Serves the calls of one compiled module.

    Args:
        model: the module that was compiled.
        pipeline: makes the programs.
        world: the processes.
        local_mesh: the grid, where ranks pass their parts of a batch; None where all pass the same global batch.
        backend: "eager", or the name of a ``torch.compile`` backend.
    """

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        world: World,
        *,
        local_mesh: Mesh | None = None,
        backend: str = "eager",
    ) -> None:
        self.model, self.pipeline, self.world, self.local_mesh = model, pipeline, world, local_mesh
        self.state = ModelState(model)
        self.groups: Groups | None = None
        self.seed = GradientSeed(world.device)
        self.backend = backend
        self.plan: Plan | None = None
        self.entries: list[Entry] = []
        self.last: Entry | None = None
        self._made = 0
        self._calls = 0
        self._modules = list(model.modules())
        self._first_names: tuple[str, ...] = ()
        self._home: Home | None = None
        self._read_slots()

    def _read_slots(self) -> None:
        self._slots = [slot for entry in self.state.stored for slot in entry.slots]
        self._held = [entry.tensor if entry.present else None for entry in self.state.stored for _ in entry.slots]
        self._trained = [entry.tensor for entry in self.state.parameters]

    # calls ----------------------------------------------------------------------------------------------------------

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any]) -> Any:  # noqa: ANN401
        """Serve one call."""
        leaves, signature = read_call(args, kwargs, targets)
        key = self._key(signature)
        last = self.last
        entry = last if last is not None and last.key == key else self._find(key)
        if self.local_mesh is not None and self.world.control is not None:
            entry = self._agreed(entry)
        if entry is None:
            entry = self._add(args, kwargs, targets, key)
        if self.state.uninitialised:
            raise self._without_values()
        if not entry.checked:
            self._check_values(args, kwargs, targets, entry)
        self.last = entry
        entry.runner.number = self._calls = self._calls + 1
        if key[AUTOCAST] is None:
            return entry.runner(leaves)
        with torch.autocast(self.world.device.type, enabled=False):  # it was captured: it must not act twice
            return entry.runner(leaves)

    def _key(self, signature: Leaves) -> Key:
        held = [table[key] for table, key in self._slots]
        if not all(map(operator.is_, held, self._held)):
            raise RuntimeStateError(
                f"{self.state.stale()} was replaced by another tensor after compiling: write into it instead "
                "(with torch.no_grad(): p.copy_(...), or load_state_dict), or compile the changed model again"
            )
        kind = self.world.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return [
            signature,
            torch.is_grad_enabled(),
            autocast,
            [module.training for module in self._modules],
            [tensor.requires_grad for tensor in self._trained],
        ]

    def _find(self, key: Key) -> Entry | None:
        for entry in self.entries:
            if entry.key == key:
                return entry
        return None

    def _agreed(self, entry: Entry | None) -> Entry | None:
        """The entry, where all ranks found the same one; else None on all of them: they compile together."""
        mine = -1 if entry is None else entry.serial
        extremes = torch.tensor([mine, -mine])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.world.control)
        return entry if int(extremes[0]) == -int(extremes[1]) else None

    def _without_values(self) -> RuntimeStateError:
        names = sorted(self.state.uninitialised)
        some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        return RuntimeStateError(
            f"{len(names)} parameters or buffers were built on meta and have no values yet ({some}): call "
            "module.init_weights(seed), module.load_state_dict(...) or autopar.load(...) first"
        )

    def _check_values(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any], entry: Entry
    ) -> None:
        if self.groups is not None:
            arrival = Arrival.of(args, kwargs, targets)
            check_values(arrival, self.world, self.groups.mesh, entry.parts)
        entry.checked = True

    # new programs ---------------------------------------------------------------------------------------------------

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any]) -> list[Pair]:
        """Make the first program and lay the model out as its plan says.

        Returns:
            (old, new) for every parameter and buffer that was replaced.
        """
        check_same_model(self.state, self.world)
        arrival = self._arrival(args, kwargs, targets, example=True)
        _, signature = self.world.together("reading the inputs", lambda: read_call(args, kwargs, targets))
        key = self._key(on_device(signature, self.world.device))
        compiled, layouts = self._compiled(arrival)
        self.plan = compiled.plan
        self.groups = groups_for(self.world, compiled.program.mesh)
        program = on_stage(compiled.program)
        stored = {
            spec.name: storable(tensor.layout, tensor.shape, program.mesh)
            for spec, tensor in zip(program.inputs, program.input_tensors, strict=True)
        }
        pairs = self.state.place(self.world, self.groups, stored.get)
        self._read_slots()
        if self.groups is not None:
            share_found_inf()
        self._home = Home(
            state=self.state,
            world=self.world,
            groups=self.groups,
            seed=self.seed,
            anchor=torch.empty(0, device=self.world.device, requires_grad=True),
            backend=self.backend,
        )
        self._first_names = arrival.names
        self.last = self._keep(key, compiled, layouts)
        return pairs

    def _add(self, args: Any, kwargs: Any, targets: Any, key: Key) -> Entry:  # noqa: ANN401 - whatever users pass
        arrival = self._arrival(args, kwargs, targets)
        compiled, layouts = self._compiled(arrival)
        return self._keep(key, compiled, layouts)

    def _arrival(self, args: Any, kwargs: Any, targets: Any, *, example: bool = False) -> Arrival:  # noqa: ANN401
        def read() -> Arrival:
            arrival = Arrival.of(args, kwargs, targets)
            arrival.check_devices(self.world.device, example=example)
            return arrival

        return self.world.together("reading the inputs", read)

    def _compiled(self, arrival: Arrival) -> tuple[Compiled, LeafLayouts]:
        """Run the pipeline on the global call; returns how the leaves of a rank's call lie, too."""
        layouts: dict[int, Any] = dict(dtensor_layouts(arrival))
        try:
            if self.local_mesh is None:
                check_equal(arrival, self.world)
                return self._build(self._capture(arrival, layouts, {}), arrival, layouts), layouts
            parts, shapes = local_batch(arrival, self.world, self.local_mesh)
            step, parts = self._capture_parts(arrival, layouts, parts, shapes)
            return self._build(step, arrival, layouts | parts), layouts | parts
        except CaptureError as error:
            difference = arrival.differences(self._first_names) if self._first_names else ""
            if not difference:
                raise
            raise CaptureError(f"{error} (this call {difference}, unlike the one that was compiled)") from error

    def _capture_parts(
        self, arrival: Arrival, layouts: LeafLayouts, parts: dict[int, Layout], shapes: Mapping[int, tuple[int, ...]]
    ) -> tuple[StepGraph, dict[int, Layout]]:
        """The step on the global batch, and which inputs turned out to be parts of it.

        An input with as many rows as the batch need not be a part of it: a mask of [length, length].  One that all data
        ranks pass alike may be either; what the model does with it decides.

        Raises:
            InputError: the model works both ways.
        """
        alike = set(parts).intersection(equal_everywhere(arrival, self.world))
        alike = {i for i in alike if arrival.leaves[i].shape[0] > 1}
        if not alike or alike == set(parts):
            return self._capture(arrival, {**layouts, **parts}, shapes), parts
        fewer = {i: layout for i, layout in parts.items() if i not in alike}
        try:
            whole = self._capture(arrival, {**layouts, **fewer}, {i: shapes[i] for i in fewer})
        except CaptureError:
            return self._capture(arrival, {**layouts, **parts}, shapes), parts
        with contextlib.suppress(CaptureError):
            self._capture(arrival, {**layouts, **parts}, shapes)
            some = ", ".join(arrival.names[i] for i in sorted(alike))
            raise InputError(
                f"all data ranks pass the same {some}, with as many rows as their part of the batch: it may be a part "
                "or a whole. Pass a DTensor (Shard(0) or Replicate()), make it a buffer of the model, or use "
                'batch="global"'
            )
        return whole, fewer

    def _capture(self, arrival: Arrival, layouts: LeafLayouts, shapes: Mapping[int, tuple[int, ...]]) -> StepGraph:
        with open_hooks(self.model), self.state.complete():
            return self.pipeline.capture(arrival.as_global(layouts, shapes))

    def _build(self, step: StepGraph, arrival: Arrival, layouts: LeafLayouts) -> Compiled:
        return self.pipeline.build(step, input_layouts(arrival, layouts, self.groups), self.plan)

    def _keep(self, key: Key, compiled: Compiled, layouts: LeafLayouts) -> Entry:
        """Make the program's groups and its runner, and put it into the cache in place of the least recently made."""
        if self._home is None:
            raise RuntimeStateError("a program was made before the model was laid out")
        home = self._home
        program = compiled.program
        everyone = self.world.exchange((group_names(program.graph_module), uses_float16(program)))
        low_precision = any(narrow for _, narrow in everyone)
        if self.groups is not None:
            for name in sorted({name for names, _ in everyone for name in names}):
                self.groups.group(name)
        runner = self.world.together("binding the program", lambda: make_runner(compiled, home, layouts, low_precision))
        parts = tuple(i for i, layout in layouts.items() if not isinstance(layout, DTensorSpec))
        entry = Entry(key=key, serial=self._made, runner=runner, parts=parts)
        self._made += 1
        self.entries = [*self.entries[-MAX_PROGRAMS + 1 :], entry]
        return entry


def make_runner(compiled: Compiled, home: Home, layouts: LeafLayouts, low_precision: bool) -> Runner:  # noqa: FBT001
    """The runner for what a program holds: no backward, a backward with its loss, or one whose loss is outside."""
    if not compiled.step.training:
        return Runner(compiled, home, layouts, low_precision=low_precision)
    if compiled.step.loss_leaf >= 0:
        return JointRunner(compiled, home, layouts, low_precision=low_precision)
    return OuterRunner(compiled, home, layouts, low_precision=low_precision)
