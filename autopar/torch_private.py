"""Every private torch name that the ``autopar`` package needs, each with the public behaviour it stands for.

Tried with torch 2.13 and 2.14.  When a torch release moves one of these names, this is the only file to change.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx, nn

# _register_work, _resolve_process_group: what functional collectives use to find a group by its name and to note the
# work that ``wait_tensor`` waits for.
from torch._C._distributed_c10d import _register_work, _resolve_process_group

# config: here only which autocast state the backward half is traced under.
from torch._functorch import config as functorch_config

# aot_export_joint_with_descriptors: the joint forward and backward graph that ``torch.compile`` traces before it
# partitions it.  The descriptors say what every input and output of that graph stands for.
from torch._functorch._aot_autograd.descriptors import (
    AOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

# simple_registry: where operations are marked as having an effect.
from torch._library import simple_registry

# OpOverload: the type of ``torch.ops.aten.add.Tensor``.
from torch._ops import OpOverload

# FakeTensorMode: tensors with a shape, a dtype and a device but no data (what ``torch.export`` runs models on).
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# FunctionalTensor: the wrapper that turns in-place operations into out-of-place ones while a trace runs.
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor

# DTensorSpec, TensorMeta: what a DTensor knows besides its local tensor (mesh, placements, global shape and strides).
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# StridedShard: a dim seen as [split_factor, ranks, rest] of which a rank holds one row of the middle: the placement of
# packed weights, and of a dim that an earlier mesh axis splits inside a later one.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# annotate, preserve_node_meta: user annotations on the nodes that a trace records, as ``torch.export`` keeps them.
from torch.fx.traceback import annotate, preserve_node_meta

# pytree: the flattening of nested containers that ``torch.export`` and ``torch.func`` use for arguments and results.
from torch.utils import _pytree as pytree

# TorchDispatchMode: sees every operation that is dispatched.
from torch.utils._python_dispatch import TorchDispatchMode

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

__all__ = [
    "DTensorSpec",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "StridedShard",
    "TensorMeta",
    "annotate",
    "checkpoint_regions",
    "compiling",
    "cuda_calls_ignored",
    "dispatched",
    "dtensor",
    "eager_submodules",
    "foreach_mul_",
    "foreach_norm",
    "gradient_of",
    "joint_graph",
    "local_tensor",
    "mutated_tangent_of",
    "mutation_of",
    "plain_input",
    "plain_output",
    "preserve_node_meta",
    "pytree",
    "quiet_failures",
    "redirected_autocast",
    "share_found_inf",
    "tangent_of",
    "traced_backward",
]


def joint_graph(module: nn.Module, args: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    """The joint graph of ``module(*args)``: fake tensors in, flat outputs then flat gradients out.

    Placeholders and the output node carry descriptors in ``meta["desc"]``, read with :func:`plain_input`,
    :func:`tangent_of`, :func:`plain_output`, :func:`gradient_of` and :func:`mutation_of`.
    """
    with contextlib.ExitStack() as stack:
        # A user's backward runs outside the autocast region that the forward ran in.
        stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
        stack.enter_context(unchecked_linalg())
        joint = aot_export_joint_with_descriptors(stack, module, args)
        graph_module: fx.GraphModule = joint.graph_module
        return graph_module


@contextlib.contextmanager
def unchecked_linalg() -> Iterator[None]:
    """``torch.linalg`` without its checks for singular matrices, which are effects that a trace has to order.

    A captured ``torch.linalg.cholesky`` gives NaN or infinities where the eager one raises, as ``cholesky_ex`` does.
    """
    holder = simple_registry.singleton.find("aten::_linalg_check_errors").effect
    kept = holder.effect
    holder.register(None)
    try:
        yield
    finally:
        holder.register(kept)


def plain_input(desc: object) -> int | None:
    """Position among the traced call's arguments that a placeholder stands for."""
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def tangent_of(desc: object) -> int | None:
    """Position among the traced call's outputs whose incoming gradient a placeholder stands for."""
    if isinstance(desc, TangentAOTInput) and isinstance(desc.output, PlainAOTOutput):
        return desc.output.idx
    return None


def mutated_tangent_of(desc: object) -> int | None:
    """Position of the argument that was changed in place and whose new value wants an incoming gradient."""
    return mutation_of(desc.output) if isinstance(desc, TangentAOTInput) else None


def plain_output(desc: AOTOutput | None) -> int | None:
    """Position among the traced call's outputs."""
    return desc.idx if isinstance(desc, PlainAOTOutput) else None


def gradient_of(desc: AOTOutput | None) -> int | None:
    """Position of the argument whose gradient an output is."""
    return plain_input(desc.grad_of) if isinstance(desc, GradAOTOutput) else None


def mutation_of(desc: AOTOutput | None) -> int | None:
    """Position of the argument whose new value an output is."""
    return plain_input(desc.mutated_input) if isinstance(desc, InputMutationAOTOutput) else None


def traced_backward(node: fx.Node) -> bool:
    """Whether the node was recorded while the backward half of the joint graph was traced."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true, as it is inside ``torch.compile`` and ``torch.export``."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def quiet_failures() -> Iterator[None]:
    """Keep torch from logging the errors of fake tensors: they are raised and reported anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def redirected_autocast(device_types: tuple[str, ...]) -> Iterator[None]:
    """Make ``torch.autocast(device_type)`` of the given types an autocast of the CPU with the same dtype."""
    original = torch.autocast.__init__

    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,  # noqa: FBT001, FBT002 -- torch's own signature
        cache_enabled: bool | None = None,  # noqa: FBT001
    ) -> None:
        if device_type in device_types:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype(device_type)
        original(self, device_type, dtype, enabled, cache_enabled)

    setattr(torch.autocast, "__init__", init)  # noqa: B010 -- a method of a class may not be assigned
    try:
        yield
    finally:
        setattr(torch.autocast, "__init__", original)  # noqa: B010


@contextlib.contextmanager
def cuda_calls_ignored() -> Iterator[None]:
    """Make ``tensor.cuda()`` return the traced tensor itself: traced tensors override it beneath function modes."""
    original = FunctionalTensor.cuda

    def stay(self: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return self

    setattr(FunctionalTensor, "cuda", stay)  # noqa: B010 -- a method of a class may not be assigned
    try:
        yield
    finally:
        setattr(FunctionalTensor, "cuda", original)  # noqa: B010


@contextlib.contextmanager
def eager_submodules() -> Iterator[None]:
    """Run what the user gave to ``torch.compile`` eagerly, as ``torch.compiler.set_stance("force_eager")`` does."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def checkpoint_regions(region: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Run ``torch.utils.checkpoint.checkpoint`` blocks once, inline, inside ``region()``.

    Replaces what ``checkpoint`` looks up for its two variants; callers that imported ``checkpoint`` by name are
    covered too.  A re-entrant checkpoint whose arguments need no gradient yields none, as in eager mode.
    """

    def without_reentrant(fn: object, *args: object, **kwargs: object) -> Iterator[None]:
        with region():
            yield

    def reentrant(fn: Callable[..., object], preserve_rng_state: object, *args: object) -> object:
        tracked = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with region(), torch.set_grad_enabled(tracked and torch.is_grad_enabled()):
            return fn(*args)

    home: Any = torch.utils.checkpoint
    saved = home._checkpoint_without_reentrant_generator, home.CheckpointFunction
    home._checkpoint_without_reentrant_generator = without_reentrant
    home.CheckpointFunction = types.SimpleNamespace(apply=reentrant)
    try:
        yield
    finally:
        home._checkpoint_without_reentrant_generator, home.CheckpointFunction = saved


def dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """``DTensor.from_local(local, spec.mesh, spec.placements)`` without its checks and its place in autograd."""
    # Called by hand because calling the class runs an __init__ that does nothing and takes most of the time.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """``tensor.to_local()`` without a place in autograd and without making a view."""
    return tensor._local_tensor


def share_found_inf() -> None:
    """Make ``torch.amp.GradScaler`` skip a step on all ranks when any rank of the gradients' mesh overflows.

    DTensor's own handler (torch 2.13, 2.14) looks at the first gradient of a list only: where that one is replicated,
    an overflow in a shard of another stays unseen on the other ranks, and their weights part for ever.
    """
    check = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    DTensor._op_dispatcher._custom_op_handlers[check] = _check_and_unscale


def _check_and_unscale(op_call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    gradients, found_inf, inverse_scale = args
    op_call([g.to_local() if isinstance(g, DTensor) else g for g in gradients], found_inf, inverse_scale, **kwargs)
    for mesh in {g.device_mesh for g in gradients if isinstance(g, DTensor)}:
        for axis in range(mesh.ndim):
            torch.distributed.all_reduce(found_inf, torch.distributed.ReduceOp.MAX, group=mesh.get_group(axis))


class _Recorder(TorchDispatchMode):
    """Notes the operations that are dispatched inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def dispatched(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    """(operation, positional arguments, keyword arguments) of all that ``function(*args, **kwargs)`` dispatches."""
    recorder = _Recorder()
    with recorder:
        function(*args, **kwargs)
    return recorder.calls


def foreach_mul_(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply every tensor in place by one factor, with one kernel where the device has it."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def foreach_norm(tensors: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """``torch.linalg.vector_norm`` of every tensor, with one kernel where the device has it."""
    return list(torch._foreach_norm(tensors, order)) if tensors else []


def group_named(name: str) -> torch.distributed.ProcessGroup:
    """The process group that functional collectives know by ``name``."""
    group: torch.distributed.ProcessGroup = _resolve_process_group(GroupName(name))
    return group


def register_work(handle: torch.Tensor, work: torch.distributed.Work) -> None:
    """Let ``wait_tensor(handle)`` wait for ``work``."""
    _register_work(handle, work)
