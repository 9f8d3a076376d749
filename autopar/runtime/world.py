"""The processes that run together: how they find each other, talk about what to do, and fail together."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import autopar.errors
from autopar.cost_models.errors import AutoparError, RuntimeStateError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among all of them.

    Attributes:
        rank: number of this process.
        size: number of processes.
        device: where this process computes.
        control: a gloo group of all processes for small Python objects; None where there is only one.
        timeout_s: how long a process waits for the others; None is torch's default for the backend.
    """

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    timeout_s: float | None = None

    def exchange(self, value: Any) -> list[Any]:  # noqa: ANN401 - any picklable value
        """The ``value`` of every rank, by rank.  All ranks must call this.

        Raises:
            RuntimeStateError: a rank did not come in time.
        """
        if self.control is None:
            return [value]
        everyone: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(everyone, value, group=self.control)
        except RuntimeError as error:
            raise RuntimeStateError(
                f"rank {self.rank} waited for the other {self.size - 1} ranks, and not all of them came: every rank "
                "must compile the same model and call it with the same kinds of inputs, in the same order"
            ) from error
        return everyone

    def together(self, doing: str, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank; where it fails on one rank, it fails on all of them.

        Args:
            doing: what the action does, for the message on the ranks where it went well ("capturing the model").
            action: must not communicate.

        Raises:
            AutoparError: on the ranks where the action went well, of the kind that the first failing rank raised, or a
                RuntimeStateError where that was no AutoparError.  The failing ranks raise their own error.
        """
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - told to the other ranks, then raised again below
            failure = error
        told = None if failure is None else (type(failure).__name__, str(failure))
        everyone = self.exchange(told)
        if failure is not None:
            raise failure
        for rank, other in enumerate(everyone):
            if other is not None:
                raise _remote_error(rank, doing, *other)
        return result

    def from_first(self, value: T) -> T:
        """Rank 0's ``value`` on every rank."""
        return self.from_rank(value, 0)

    def from_rank(self, value: T, rank: int) -> T:
        """The ``value`` of one rank on every rank."""
        if self.control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=rank, group=self.control)
        return box[0]

    def share(self, value: T, key: str) -> list[T]:
        """The ``value`` of every rank, by rank, where values of equal ``key`` are alike and are told once."""
        keys = self.exchange(key)
        firsts = {k: rank for rank, k in reversed(list(enumerate(keys)))}
        found = {k: self.from_rank(value, rank) for k, rank in sorted(firsts.items(), key=lambda item: item[1])}
        return [found[k] for k in keys]


def _remote_error(rank: int, doing: str, kind: str, message: str) -> AutoparError:
    cls = getattr(autopar.errors, kind, None)
    if isinstance(cls, type) and issubclass(cls, AutoparError):
        return cls(f"rank {rank}: {message}")
    return RuntimeStateError(f"rank {rank} failed while {doing}: {kind}: {message}")


def connect(device: torch.device, timeout_s: float | None = None) -> World:
    """The world that this process is part of.

    Under torchrun ``torch.distributed`` is initialised if it is not yet; a process on its own needs none.

    Args:
        device: where the model is.
        timeout_s: how long a rank waits for another one before it gives up.

    Raises:
        RuntimeStateError: the process group that exists cannot communicate from ``device``.
    """
    if not dist.is_available():
        return World(rank=0, size=1, device=device, timeout_s=timeout_s)
    if not dist.is_initialized():
        if not dist.is_torchelastic_launched():
            return World(rank=0, size=1, device=device, timeout_s=timeout_s)
        _initialise(device, timeout_s)
    if dist.get_world_size() == 1:
        return World(rank=0, size=1, device=device, timeout_s=timeout_s)
    _check_backend(device)
    control = _control_group(dist.group.WORLD, timeout_s)
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=device, control=control, timeout_s=timeout_s)


def _initialise(device: torch.device, timeout_s: float | None) -> None:
    if device.type == "cpu":
        dist.init_process_group("gloo", timeout=as_timeout(timeout_s))
        return
    backend = dist.get_default_backend_for_device(device)
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(f"cpu:gloo,{device.type}:{backend}", timeout=as_timeout(timeout_s))


def as_timeout(timeout_s: float | None) -> datetime.timedelta | None:
    """Seconds as torch.distributed takes them."""
    return None if timeout_s is None else datetime.timedelta(seconds=timeout_s)


def _check_backend(device: torch.device) -> None:
    config = dist.get_backend_config()
    known = {part.split(":")[0] for part in config.split(",")}
    if device.type not in known:
        raise RuntimeStateError(
            f"the model is on {device} and torch.distributed was initialised for {', '.join(sorted(known))} only "
            f"({config}): move the model there before compiling it, or initialise with a backend for {device.type}"
        )


@functools.lru_cache(maxsize=8)
def _control_group(world: dist.ProcessGroup, timeout_s: float | None) -> dist.ProcessGroup:
    """One gloo group of all ranks for each default group and timeout."""
    ranks = dist.get_process_group_ranks(world)
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=as_timeout(timeout_s), backend="gloo")
    return group
