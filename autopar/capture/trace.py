"""From a model and one call of it to the joint graph of its training step, on fake CPU tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autopar.capture.accelerator import stand_in_for_accelerator
from autopar.capture.adapt import adapt_modules
from autopar.capture.call import Result, check_constants, describe_result, flatten_call
from autopar.capture.convert import OUTPUT_COPY, convert
from autopar.capture.labels import Labels
from autopar.capture.refuse import refusal
from autopar.capture.repeats import find_repeats
from autopar.capture.state import Held, check_plain, fake_like, held_tensors, numbers, preserved, swapped
from autopar.cost_models.errors import CaptureError
from autopar.passes.base import InputKind, InputSpec, StepGraph
from autopar.torch_private import (
    FakeTensorMode,
    annotate,
    compiling,
    eager_submodules,
    joint_graph,
    preserve_node_meta,
    pytree,
    quiet_failures,
)


def capture(
    model: nn.Module,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    loss_fn: Callable[..., object] | None = None,
    targets: Sequence[object] = (),
    training: bool | None = None,
) -> StepGraph:
    """Capture ``loss_fn(model(*args, **kwargs), *targets)`` and its backward as one flat graph.

    The model is called on fake CPU tensors, so models of any size, on any device (``meta`` included) are welcome, and
    it is left as it was.  What is captured is what one call does now: train and eval flags of the submodules,
    ``requires_grad`` of the parameters, ambient autocast.

    Args:
        model: a plain module.
        args: positional arguments of one call; tensors give shapes, strides, dtypes and ``requires_grad``.
        kwargs: keyword arguments of that call.
        loss_fn: called with the model's output and the targets; returns a 0-d tensor, or a pytree whose ``.loss``,
            ``["loss"]`` or first leaf is it.  Without it the loss is the model's 0-d output, else its ``.loss``.
        targets: further arguments of ``loss_fn``.
        training: capture the backward too; by default as gradients are enabled here.  False captures under
            ``torch.no_grad()``.

    Returns:
        the step on the global batch.

    Raises:
        CaptureError: the model cannot be captured; the message names the line and the way out.
    """
    if training is None:
        training = torch.is_grad_enabled()
    check_plain(model)
    leaves, spec, names = flatten_call(args, kwargs, targets)
    check_constants(zip(names, leaves, strict=True), what="input")
    parameters, buffers = held_tensors(model)
    held = parameters + buffers
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    batch = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    originals = [*(h.tensor for h in held), *batch.values()]
    fakes = [fake_like(tensor, mode) for tensor in originals]
    if not training:
        fakes = [fake.detach() for fake in fakes]

    inputs = [
        InputSpec(
            kind=InputKind.PARAMETER if h.is_parameter else InputKind.BUFFER,
            name=h.names[0],
            aliases=tuple(h.names[1:]),
            trainable=fake.requires_grad,
        )
        for h, fake in zip(held, fakes, strict=False)
    ]
    inputs += [
        InputSpec(kind=InputKind.BATCH, name=names[i], leaf=i, trainable=fake.requires_grad)
        for i, fake in zip(batch, fakes[len(held) :], strict=True)
    ]

    call = _Call(
        model=model,
        loss_fn=loss_fn,
        held=held,
        leaves=leaves,
        positions=list(batch),
        spec=spec,
        labels=Labels(model),
    )
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet_failures())
            stack.enter_context(compiling())
            stack.enter_context(eager_submodules())
            stack.enter_context(stand_in_for_accelerator(originals))
            stack.enter_context(preserve_node_meta())
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.set_grad_enabled(training))
            joint = joint_graph(_Traced(call), tuple(fakes))
            if call.counts:
                call.check_steady(mode, fakes)
    except Exception as error:  # noqa: BLE001 -- only adds where and why, and chains the cause
        raise refusal(error, call.labels.failed_in) from (None if isinstance(error, CaptureError) else error)
    if call.result is None:
        raise CaptureError("the model was not called while it was traced")
    repeated = find_repeats(model, tuple(call.labels.called))
    return convert(joint, inputs, call.result, regions=call.labels.regions, repeated=repeated)


@dataclass(slots=True, kw_only=True)
class _Call:
    """One call of the model, ready to be run on traced tensors.

    Attributes:
        model: what is called.
        loss_fn: what its output is given to.
        held: the model's tensors, in the order of the first traced tensors.
        leaves: the flattened call; those at ``positions`` are replaced by the remaining traced tensors.
        positions: positions of the tensors among the leaves.
        spec: pytree spec of ``(args, kwargs, targets)``.
        labels: annotates the trace.
        result: what the last run returned.
        counts: whether the last run changed plain numbers among the model's attributes.
    """

    model: nn.Module
    loss_fn: Callable[..., object] | None
    held: list[Held]
    leaves: list[object]
    positions: list[int]
    spec: pytree.TreeSpec
    labels: Labels
    result: Result | None = None
    counts: bool = False

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors of the result.  Only the loss carries grad; without a loss every float leaf that has it does."""
        before = numbers(self.model)
        with preserved(self.model), self.labels.active():
            value = self._run_once(tensors)
            self.counts = numbers(self.model) != before
            self.result, outputs = describe_result(value, from_loss_fn=self.loss_fn is not None)
            # The trace treats outputs that alias inputs or each other in a way of its own: copies avoid that.
            loss_leaf = self.result.loss_leaf
            with annotate({OUTPUT_COPY: True}):
                return tuple(
                    (output if loss_leaf in (leaf, -1) else output.detach()).clone()
                    for leaf, output in zip(self.result.tensor_leaves, outputs, strict=True)
                )

    def _run_once(self, tensors: Sequence[torch.Tensor]) -> object:
        """What the call returns; the model is left as the call leaves it."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors[len(self.held) :], strict=True):
            leaves[position] = tensor
        args, kwargs, targets = pytree.tree_unflatten(leaves, self.spec)
        adapt_modules(self.model)
        with swapped(self.model, self.held, list(tensors[: len(self.held)])):
            value: object = self.model(*args, **kwargs)
            return value if self.loss_fn is None else self.loss_fn(value, *targets)

    def check_steady(self, mode: FakeTensorMode, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse a model that counts its calls in a Python number: the captured step would always be the same call.

        Raises:
            CaptureError: a second call changes a number again.
        """
        with mode, torch.no_grad(), preserved(self.model):
            self._run_once(tensors)
            first = numbers(self.model)
            self._run_once(tensors)
            second = numbers(self.model)
        for name, value in second.items():
            if name in first and first[name] != value:
                raise CaptureError(
                    f"every call changes the attribute {name} of the model (a second one from {first[name]} to {value})"
                    ", which a captured step would freeze: keep it in a buffer, or change it outside forward"
                )


class _Traced(nn.Module):
    """The call as a module without parameters: everything that varies is an argument."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.call.run(tensors)
