"""Process groups: the mesh of a plan as a DeviceMesh, and the real group behind each name that a program uses."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.passes.base import Mesh
from autopar.runtime.world import World, as_timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups of one mesh.

    Attributes:
        mesh: the grid; rank ``r`` of the world is rank ``r`` of the grid.
        device_mesh: the same grid for DTensors.
        timeout_s: how long a rank waits in a collective.
    """

    mesh: Mesh
    device_mesh: DeviceMesh
    timeout_s: float | None = None
    _joined: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    def group(self, name: str) -> dist.ProcessGroup:
        """This rank's group along the axes ``name`` ("tp", "dp+tp").

        A group is made when it is first asked for, by its members: they must ask in the same order.
        """
        axes = tuple(axis for axis in self.mesh.axes if axis in name.split("+"))
        if len(axes) == 1:
            return self.device_mesh.get_group(axes[0])
        key = "+".join(axes)
        if key not in self._joined:
            self._joined[key] = _new_group(self.mesh, key, self.timeout_s)
        return self._joined[key]


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
    axes = [_new_group(mesh, axis, timeout_s) for axis in mesh.axes]
    grid = torch.arange(mesh.size, dtype=torch.int).reshape(mesh.sizes)
    group = axes if len(axes) > 1 else axes[0]
    device_mesh = DeviceMesh.from_group(
        group, device_type, mesh=grid if len(axes) > 1 else None, mesh_dim_names=mesh.axes
    )
    return Groups(mesh=mesh, device_mesh=device_mesh, timeout_s=timeout_s)
