"""The public functions, each an explicit sequence of stations: capture, plan, lower, prove, run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture import capture, flatten_call
from autopar.cost_models.cluster import Cluster
from autopar.cost_models.errors import ConstraintError, PlanError, UsageError
from autopar.lower import Lowering
from autopar.passes.base import Mesh, Program, StepGraph
from autopar.passes.placement import Layout
from autopar.plan import Constraints, Plan, format_placement
from autopar.runtime.arrivals import GlobalCall
from autopar.runtime.engine import Engine
from autopar.runtime.module import ParallelModule
from autopar.runtime.runner import Compiled
from autopar.runtime.state import device_of
from autopar.runtime.world import World, connect
from autopar.search.planner import Planner
from autopar.verify.static import check_outlines, digest, outline

BATCHES = ("global", "local")
RNGS = ("fast", "exact")
OPTIONAL_PASSES = ("bucket", "overlap")


def compile(  # noqa: PLR0913 - the contract
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    batch: str = "global",
    cluster: Cluster | None = None,
    plan: Plan | None = None,
    constraints: Constraints | None = None,
    optimizer: str = "adamw",
    backend: str = "eager",
    rng: str = "fast",
    reduce_dtype: torch.dtype | None = None,
    bucket_bytes: int | None = None,
    disable_passes: Collection[str] = (),
    timeout_s: float | None = None,
    time_limit_s: float | None = None,
) -> ParallelModule:
    """Turn ``model`` into one that runs on all ranks; what it computes is what one device computes.

    Args:
        model: a plain module; it is taken over, its parameters become DTensors under their names.
        args: positional arguments of one call.
        kwargs: keyword arguments of that call.
        loss_fn: called as ``loss_fn(output, *targets)``; returns a 0-d tensor, or a pytree whose ``.loss``,
            ``["loss"]`` or first leaf is it.  Without it the loss is the model's 0-d output, else its ``.loss``.
        targets: further arguments of ``loss_fn``; a call passes them as ``targets=``.
        batch: "global": every rank passes the same global batch; "local": every data rank passes its part.
        cluster: the machine, for the choice of a plan; by default this one.
        plan: how to split, instead of choosing.
        constraints: what the choice must honour.
        optimizer: name of the optimizer, whose state takes memory.
        backend: "eager", or the name of a ``torch.compile`` backend that runs each rank's program.
        rng: "fast": a mask of its own for every part of a tensor; "exact": the random numbers of one device.
        reduce_dtype: dtype in which low-precision gradients are summed over ranks; by default float32.
        bucket_bytes: gradients are reduced in buckets of about this size; 0: one by one.
        disable_passes: names of optional passes to leave out ("bucket", "overlap").
        timeout_s: how long a rank waits for another one.
        time_limit_s: how long the choice of a plan may take.

    Returns:
        the compiled module.

    Raises:
        AutoparError: on all ranks, before the first step.

    >>> module = compile(nn.Linear(4, 2), (torch.ones(3, 4),), loss_fn=lambda y: y.sum())
    >>> module(torch.ones(3, 4)).backward()
    >>> module.bias.grad
    tensor([3., 3.])
    """
    options = Options(
        constraints=constraints or Constraints(),
        plan=plan,
        cluster=cluster,
        optimizer=optimizer,
        rng=rng,
        reduce_dtype=reduce_dtype or torch.float32,
        bucket_bytes=bucket_bytes,
        disable_passes=tuple(disable_passes),
        time_limit_s=time_limit_s,
    )
    if batch not in BATCHES:
        raise UsageError(f'batch={batch!r} is not possible; use "global" or "local"')
    model = model.original if isinstance(model, ParallelModule) else model
    leaves, _, _ = flatten_call(args, kwargs, targets)
    device = device_of(model, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    world = connect(device, timeout_s)
    world.together("checking the sizes", lambda: check_sizes(options, world.size))
    local_mesh = (
        world.together("checking the sizes", lambda: mesh_of(options, world.size)) if batch == "local" else None
    )
    pipeline = Pipeline(model=model, loss_fn=loss_fn, options=options, world=world)
    engine = Engine(model, pipeline, world, local_mesh=local_mesh, backend=backend)
    module = ParallelModule(model, engine)
    module.prepare(args, kwargs or {}, targets)
    return module


def plan(  # noqa: PLR0913 - the contract
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster,
    loss_fn: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    constraints: Constraints | None = None,
    optimizer: str = "adamw",
    time_limit_s: float | None = None,
) -> Plan:
    """How to train ``model`` on ``cluster``, without running it and without a process group.

    Args:
        model: a plain module of any size; one built on meta is welcome.
        args: positional arguments of one call (meta tensors are welcome).
        kwargs: keyword arguments of that call.
        cluster: the machine; its number of devices is the number of ranks.
        loss_fn: as in :func:`compile`.
        targets: further arguments of ``loss_fn``.
        constraints: what the choice must honour.
        optimizer: name of the optimizer, whose state takes memory.
        time_limit_s: how long the choice may take.

    Raises:
        AutoparError: the model cannot be captured, or no plan honours the constraints.
    """
    options = Options(
        constraints=constraints or Constraints(), cluster=cluster, optimizer=optimizer, time_limit_s=time_limit_s
    )
    step = capture(model, args, kwargs, loss_fn=loss_fn, targets=targets)
    return choose_plan(step, options, cluster.num_devices)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What :func:`compile` was asked for, as far as plans and programs depend on it.

    ``placed`` are the stages on which an earlier plan put the layers' runs, and with them the parameters.

    Raises:
        UsageError: a value that is not known.
    """

    constraints: Constraints
    plan: Plan | None = None
    cluster: Cluster | None = None
    optimizer: str = "adamw"
    rng: str = "fast"
    reduce_dtype: torch.dtype = torch.float32
    bucket_bytes: int | None = None
    disable_passes: tuple[str, ...] = ()
    time_limit_s: float | None = None
    placed: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def like(self, plan: Plan) -> Options:
        """The options for another kind of call of a module that is laid out by ``plan``."""
        fixed = dataclasses.replace(
            self.constraints,
            dp=plan.dp,
            tp=plan.tp,
            pp=plan.pp,
            zero=plan.zero,
            sequence_parallel=plan.sequence_parallel,
            microbatches=plan.microbatches,
            schedule=plan.schedule,
        )
        return dataclasses.replace(self, constraints=fixed, plan=None, placed=plan.stages)

    def __post_init__(self) -> None:
        if self.rng not in RNGS:
            raise UsageError(f'rng={self.rng!r} is not possible; use "fast" or "exact"')
        for name in self.disable_passes:
            if name not in OPTIONAL_PASSES:
                raise UsageError(f"disable_passes names {name!r}; passes that can be left out are {OPTIONAL_PASSES}")
        if not self.reduce_dtype.is_floating_point:
            raise UsageError(f"reduce_dtype={self.reduce_dtype} is not a floating-point dtype")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The stations between a call and its program; all ranks go through them together.

    Attributes:
        model: the module as the user wrote it.
        loss_fn: what is called on its output.
        options: what was asked for.
        world: the processes.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    options: Options
    world: World

    def capture(self, call: GlobalCall) -> StepGraph:
        """The step of one device that makes this call."""

        def run() -> StepGraph:
            return capture(self.model, call.args, call.kwargs, loss_fn=self.loss_fn, targets=call.targets)

        return self.world.together("capturing the model", run)

    def build(self, step: StepGraph, inputs: Mapping[str, Layout], plan: Plan | None) -> Compiled:
        """Plan the step and lower it for this rank.

        Args:
            step: what was captured.
            inputs: how inputs lie of which ranks hold parts, by name.
            plan: the plan by which the model is laid out already, or None.
        """
        agreed = taking(self._agreed_plan(step, plan), inputs)
        program = self.world.together("lowering the plan", lambda: self._lower(step, agreed))
        made = self.world.together("reading the program's communication", lambda: outline(program))
        check_outlines(program.mesh, self.world.share(made, digest(made)))
        return Compiled(step=step, plan=agreed, program=program)

    def _agreed_plan(self, step: StepGraph, earlier: Plan | None) -> Plan:
        """One plan for all ranks: the user's for the first program, else rank 0's choice."""
        world, given = self.world, self.options.plan
        if earlier is None and given is not None:
            hashes = world.exchange(given.hash())
            world.together("checking the plan", lambda: _check_hashes(hashes))
            world.together("checking the plan", lambda: given.check(step, world_size=world.size))
            return given
        options = self.options if earlier is None else self.options.like(earlier)
        made = world.together(
            "planning", lambda: choose_plan(step, options, world.size).to_json() if world.rank == 0 else ""
        )
        text = world.from_first(made)

        def check() -> Plan:
            agreed = Plan.from_json(text)
            agreed.check(step, world_size=world.size)
            return agreed

        return world.together("checking the plan against this rank's model", check)

    def _lower(self, step: StepGraph, plan: Plan) -> Program:
        options = self.options
        lowering = Lowering(
            step,
            plan,
            rng=options.rng,
            reduce_dtype=options.reduce_dtype,
            bucket_bytes=options.bucket_bytes,
            disable_passes=options.disable_passes,
        )
        return lowering.program(self.world.rank)


def taking(plan: Plan, inputs: Mapping[str, Layout]) -> Plan:
    """The plan with inputs taken as they come, where ranks hold parts of them."""
    texts = {
        name: tuple(format_placement(p, size) for p, size in zip(layout, plan.mesh.sizes, strict=True))
        for name, layout in inputs.items()
    }
    return dataclasses.replace(plan, storage={**plan.storage, **texts}) if texts else plan


def choose_plan(step: StepGraph, options: Options, world_size: int) -> Plan:
    """The best plan for ``world_size`` ranks that honours the constraints."""
    cluster = options.cluster or Cluster.local(world_size)
    planner = Planner(step, cluster, options.constraints, options.optimizer, None, options.placed)
    return planner.best(world_size, time_limit_s=options.time_limit_s)


def check_sizes(options: Options, world_size: int) -> None:
    """Refuse axis sizes that the running ranks cannot form.

    Raises:
        ConstraintError: the sizes in the constraints do not fit; PlanError: those in the plan.
    """
    if options.plan is not None and options.plan.world_size != world_size:
        need = options.plan.world_size
        raise PlanError(
            f"the plan is for {need} ranks and {world_size} {_are(world_size)} running: start it with torchrun "
            f"--nproc-per-node {need}, or compile without the plan"
        )
    wish = options.constraints
    sizes = {name: size for name in ("dp", "tp", "pp") if (size := getattr(wish, name)) is not None}
    product = math.prod(sizes.values())
    if product == world_size or (len(sizes) < len(("dp", "tp", "pp")) and world_size % product == 0):
        return
    said = " x ".join(f"{name}={size}" for name, size in sizes.items())
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    raise ConstraintError(
        f"{said} takes {product} ranks and {world_size} {_are(world_size)} running: start it with torchrun "
        f"--nproc-per-node {product}, or choose dp, tp and pp with the product {world_size} (each one of "
        f"{', '.join(map(str, divisors))})"
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def mesh_of(options: Options, world_size: int) -> Mesh:
    """The grid that ranks form who pass parts of a batch: how many parts there are must be known beforehand.

    Raises:
        ConstraintError: neither the plan nor the constraints say it.
    """
    dp = options.plan.dp if options.plan is not None else options.constraints.dp
    if dp is None:
        raise ConstraintError(
            f'batch="local" needs to know how many parts a batch has: set Constraints(dp=...); {world_size} where every'
            " rank passes a part of its own"
        )
    pp = options.plan.pp if options.plan is not None else options.constraints.pp or 1
    return Mesh(axes=("dp", "tp"), sizes=(dp, world_size // (dp * pp)))


def _check_hashes(hashes: Sequence[str]) -> None:
    for rank, other in enumerate(hashes):
        if other != hashes[0]:
            raise PlanError(f"rank {rank} was given another plan than rank 0: load the same file on every rank")
