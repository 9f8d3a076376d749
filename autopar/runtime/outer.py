"""Training steps whose loss is computed outside: a forward program, and a backward program that takes its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autopar.runtime.border import dtensor_reader, local_zeros
from autopar.runtime.halves import split_halves
from autopar.runtime.joint import given, second_backward
from autopar.runtime.outputs import Gradients
from autopar.runtime.runner import Runner
from autopar.runtime.seed import poisoned, pressure
from autopar.torch_private import foreach_mul_


class OuterRunner(Runner):
    """Runs the forward of a step when it is called, and its backward when gradients of its results arrive."""

    def set_up(self, bound: fx.GraphModule) -> None:
        """Cut the program in two."""
        halves = split_halves(bound, self.program)
        self.run_forward = self.runnable(halves.forward)
        self.run_backward = self.runnable(halves.backward)
        self.early, self.late = halves.forward_outputs, halves.backward_outputs
        self.seeded = [int(spec.name[len("seed[") : -1]) for spec, _ in self.seeds]
        self.seed_readers = [
            dtensor_reader(tensor, self.home.groups) if self.home.groups else None for _, tensor in self.seeds
        ]

    def __call__(self, leaves: Sequence[Any]) -> Any:  # noqa: ANN401 - what the model returns
        """Run the forward; the results that depend on what is trained carry grad."""
        call = OuterCall(self, leaves)
        trained = self.outputs.differentiable(leaves)
        carriers = _OuterFunction.apply(call, self.home.anchor, *trained)  # type: ignore[no-untyped-call]
        result, call.result_leaves = call.result_leaves, []
        for leaf, carrier in zip(self.seeded, carriers, strict=True):
            result[leaf] = carrier
        return self.outputs.result(result)

    def placed(self, values: Sequence[Any], positions: Sequence[int]) -> list[Any]:
        """The values of one half at their positions among the program's outputs."""
        every: list[Any] = [None] * len(self.program.outputs)
        for position, value in zip(positions, values, strict=False):
            every[position] = value
        return every


class OuterCall:
    """One step between its forward and its backward."""

    def __init__(self, runner: OuterRunner, leaves: Sequence[Any]) -> None:
        self.runner = runner
        self.leaves = leaves
        self.result_leaves: list[Any] = []
        self.saved: Sequence[Any] | None = None

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Run the forward half; returns the results that carry grad."""
        runner = self.runner
        values = runner.run_forward(*runner.values(self.leaves), *runner.random_seed())
        self.leaves = ()
        self.saved = values[len(runner.early) :]
        every = runner.placed(values, runner.early)
        runner.outputs.write_back(every)
        self.result_leaves = runner.outputs.leaves(every)
        return tuple(self.result_leaves[leaf] for leaf in runner.seeded)

    def backward(self, incoming: Sequence[torch.Tensor | None]) -> Gradients:
        """Run the backward half, once."""
        saved, self.saved = self.saved, None
        if saved is None:
            raise second_backward()
        runner = self.runner
        seeds = [self._seed(i, gradient) for i, gradient in enumerate(incoming)]
        with torch.autocast(runner.home.world.device.type, enabled=False):  # whatever surrounds the user's backward
            values = runner.run_backward(*saved, *seeds)
        gradients = runner.outputs.gradients(runner.placed(values, runner.late))
        if runner.low_precision:
            groups = runner.home.groups
            everyone = None if groups is None else groups.group_of_all()
            near = pressure(given(gradients), everyone, runner.home.world.device)
            foreach_mul_(given(gradients), poisoned(1.0, near))
        return runner.outputs.dressed(gradients)

    def _seed(self, index: int, incoming: torch.Tensor | None) -> torch.Tensor:
        """The gradient that arrived at a result, laid out as the program takes it; zeros where none did."""
        home = self.runner.home
        _, want = self.runner.seeds[index]
        if incoming is None:
            return local_zeros(want, home.groups, home.world.device)
        read = self.runner.seed_readers[index]
        return read(incoming) if read is not None and isinstance(incoming, DTensor) else incoming


class _OuterFunction(torch.autograd.Function):
    """The step's place in autograd: its inputs are what is trained, its outputs are results that depend on it."""

    @staticmethod
    def forward(ctx: Any, call: OuterCall, anchor: torch.Tensor, *trained: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        """Run the forward half."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Run the backward half."""
        return (None, None, *ctx.call.backward(incoming))
