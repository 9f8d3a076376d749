"""Process groups: the mesh of a plan as a DeviceMesh, and the real group behind each name that a program uses."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.passes.base import Mesh, Program, ProgramTensor
from autopar.passes.unroll_microbatches import PIPELINE
from autopar.runtime.world import World, as_timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups of one mesh.

    Attributes:
        everyone: the grid of all ranks; has an axis "pp" where there are pipeline stages.
        mesh: the grid of the ranks of this rank's stage, over which its tensors lie.
        rank: this rank's place in that grid.
        device_mesh: that grid for DTensors.
        timeout_s: how long a rank waits in a collective.
    """

    everyone: Mesh
    mesh: Mesh
    rank: int
    device_mesh: DeviceMesh
    timeout_s: float | None = None
    _made: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    def group(self, name: str) -> dist.ProcessGroup:
        """This rank's group along the axes ``name`` ("tp", "dp+tp").

        A group is made when it is first asked for, by its members: they must ask in the same order.
        """
        key = "+".join(axis for axis in self.everyone.axes if axis in name.split("+"))
        if key not in self._made:
            self._made[key] = _new_group(self.everyone, key, self.timeout_s)
        return self._made[key]

    def group_of_all(self) -> dist.ProcessGroup:
        """The group of all ranks."""
        return self.group("+".join(self.everyone.axes))


def on_stage(program: Program) -> Program:
    """The program as its stage sees it: on the grid of the stage's ranks, over which its tensors lie."""
    if PIPELINE not in program.mesh.axes:
        return program
    mesh = stage_mesh(program.mesh)
    kept = [i for i, axis in enumerate(program.mesh.axes) if axis != PIPELINE]

    def placed(tensor: ProgramTensor) -> ProgramTensor:
        return dataclasses.replace(tensor, layout=tuple(tensor.layout[i] for i in kept))

    return dataclasses.replace(
        program,
        mesh=mesh,
        rank=program.rank % mesh.size,
        input_tensors=tuple(placed(tensor) for tensor in program.input_tensors),
        output_tensors=tuple(None if tensor is None else placed(tensor) for tensor in program.output_tensors),
    )


def stage_mesh(mesh: Mesh) -> Mesh:
    """The grid of the ranks of one pipeline stage; stages are the outermost axis."""
    pairs = [(axis, size) for axis, size in zip(mesh.axes, mesh.sizes, strict=True) if axis != PIPELINE]
    return Mesh(axes=tuple(axis for axis, _ in pairs), sizes=tuple(size for _, size in pairs))


def _new_group(mesh: Mesh, name: str, timeout_s: float | None) -> dist.ProcessGroup:
    ranks = list(mesh.group_ranks(name, dist.get_rank()))
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout=as_timeout(timeout_s), use_local_synchronization=True, group_desc=f"autopar {name}"
    )
    return group


def groups_for(world: World, mesh: Mesh) -> Groups | None:
    """The groups of ``mesh``, shared by everything that is compiled for the same mesh; None for a world of one."""
    if world.size == 1:
        return None
    return _groups(dist.group.WORLD, mesh, world.device.type, world.timeout_s)


@functools.lru_cache(maxsize=32)
def _groups(world: dist.ProcessGroup, mesh: Mesh, device_type: str, timeout_s: float | None) -> Groups:
    """One set of groups for each default group, mesh, kind of device and timeout."""
    made = {axis: _new_group(mesh, axis, timeout_s) for axis in mesh.axes}
    stage = stage_mesh(mesh)
    first = dist.get_rank(world) // stage.size * stage.size
    grid = torch.arange(first, first + stage.size, dtype=torch.int).reshape(stage.sizes)
    device_mesh = DeviceMesh.from_group(
        [made[axis] for axis in stage.axes], device_type, mesh=grid, mesh_dim_names=stage.axes
    )
    return Groups(
        everyone=mesh,
        mesh=stage,
        rank=dist.get_rank(world) - first,
        device_mesh=device_mesh,
        timeout_s=timeout_s,
        _made=made,
    )
