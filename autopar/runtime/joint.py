"""Training steps whose loss is inside: one program runs forward and backward, ``backward`` hands out what it kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from autopar.cost_models.errors import RuntimeStateError
from autopar.runtime.outputs import Gradients
from autopar.runtime.runner import Runner
from autopar.runtime.seed import poisoned, pressure
from autopar.torch_private import foreach_mul_


class JointRunner(Runner):
    """Runs a program that holds the forward and the backward of a step."""

    def set_up(self, bound: fx.GraphModule) -> None:
        """Keep the program."""
        self.run = self.runnable(bound)

    def __call__(self, leaves: Sequence[Any]) -> Any:  # noqa: ANN401 - what the model returns
        """Run the whole step; the loss in the result carries grad."""
        call = JointCall(self, leaves)
        trained = self.outputs.differentiable(leaves)
        loss = _JointFunction.apply(call, self.home.anchor, *trained)  # type: ignore[no-untyped-call]
        result, call.result_leaves = call.result_leaves, []
        result[self.loss_leaf] = loss
        return self.outputs.result(result)


class JointCall:
    """One step between its forward and its backward."""

    def __init__(self, runner: JointRunner, leaves: Sequence[Any]) -> None:
        self.runner = runner
        self.leaves = leaves
        self.result_leaves: list[Any] = []
        self.gradients: Gradients | None = None
        self.near: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        """Run the step, keep its gradients, return the loss."""
        runner, seed = self.runner, self.runner.home.seed
        watch = runner.low_precision or not seed.is_one
        self.start = seed.tensor(runner.seeds[0][1].dtype)
        values = runner.run(*runner.values(self.leaves), self.start, *runner.random_seed())
        self.leaves = ()
        runner.outputs.write_back(values)
        self.result_leaves = runner.outputs.leaves(values)
        self.gradients = runner.outputs.gradients(values)
        if watch:
            self.near = pressure(
                given(self.gradients),
                None if runner.home.groups is None else runner.home.groups.group_of_all(),
                runner.home.world.device,
            )
        loss: torch.Tensor = self.result_leaves[runner.loss_leaf]
        return loss

    def backward(self, incoming: torch.Tensor) -> Gradients:
        """Hand out the gradients, once."""
        gradients, self.gradients = self.gradients, None
        if gradients is None:
            raise second_backward()
        factor = self.runner.home.seed.arrived(incoming, self.start)
        if self.near is not None:
            factor = poisoned(factor, self.near)
        if not isinstance(factor, float) or factor != 1.0:
            foreach_mul_(given(gradients), factor)
        return self.runner.outputs.dressed(gradients)


class _JointFunction(torch.autograd.Function):
    """The step's place in autograd: its inputs are what is trained, its output is the loss."""

    @staticmethod
    def forward(ctx: Any, call: JointCall, anchor: torch.Tensor, *trained: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """Run the step."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Hand out the gradients."""
        return (None, None, *ctx.call.backward(incoming))


def given(gradients: Gradients) -> list[torch.Tensor]:
    """The gradients that there are."""
    return [gradient for gradient in gradients if gradient is not None]


def second_backward() -> RuntimeStateError:
    """The error of a step whose gradients were handed out already."""
    return RuntimeStateError(
        "backward ran twice through one call of a compiled module: the call computed its gradients and gave them "
        "out in the first backward (retain_graph=True cannot keep them); call the module again, or add the losses first"
    )
