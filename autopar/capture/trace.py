"""From a model and one call of it to the joint graph of its training step, on fake CPU tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.capture.adapt import adapt_modules
from autopar.capture.autocast import accelerator_autocast
from autopar.capture.call import check_constants, find_loss, flatten_call, flatten_tree
from autopar.capture.convert import OUTPUT_COPY, convert
from autopar.capture.labels import Labels
from autopar.capture.refuse import refusal
from autopar.capture.repeats import find_repeats
from autopar.capture.state import Held, fake_like, held_tensors, preserved, swapped
from autopar.cost_models.errors import CaptureError
from autopar.passes.base import InputKind, InputSpec, StepGraph
from autopar.torch_private import FakeTensorMode, annotate, compiling, eager_submodules, joint_graph, preserve_node_meta, pytree


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
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
    leaves, call_spec, names = flatten_call(args, kwargs, targets)
    check_constants(zip(names, leaves, strict=True), what="input")
    parameters, buffers = held_tensors(model)
    held = parameters + buffers
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    originals = [*(h.tensor for h in held), *(leaves[i] for i in positions)]
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
        for i, fake in zip(positions, fakes[len(held) :], strict=True)
    ]

    call = _Call(
        model=model,
        loss_fn=loss_fn,
        held=held,
        leaves=leaves,
        positions=positions,
        call_spec=call_spec,
        labels=Labels(model),
    )
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(compiling())
            stack.enter_context(eager_submodules())
            stack.enter_context(accelerator_autocast(originals))
            stack.enter_context(preserve_node_meta())
            stack.enter_context(torch.set_grad_enabled(training))
            joint = joint_graph(_Traced(call), tuple(fakes))
    except Exception as error:  # noqa: BLE001 -- only adds where and why, and chains the cause
        raise refusal(error, call.labels.layer_of(error)) from (None if isinstance(error, CaptureError) else error)
    return convert(
        joint,
        inputs=tuple(inputs),
        result_leaves=tuple(call.result_leaves),
        result_spec=call.result_spec,
        result_constants=call.result_constants,
        loss_leaf=call.loss_leaf,
        regions=call.labels.regions,
        repeated=find_repeats(model, tuple(call.labels.called)),
    )


@dataclass(slots=True, kw_only=True)
class _Call:
    """One call of the model, ready to be run on traced tensors, and what was learnt about its result.

    Attributes:
        model, loss_fn: what is called.
        held: the model's tensors, in the order of the first traced tensors.
        leaves: the flattened call; those at ``positions`` are replaced by the remaining traced tensors.
        call_spec: pytree spec of ``(args, kwargs, targets)``.
        labels: annotates the trace.
        result_leaves: positions of the tensors among the leaves of the result, in the order of the traced outputs.
        result_spec, result_constants, loss_leaf: as in StepGraph.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    held: list[Held]
    leaves: list[Any]
    positions: list[int]
    call_spec: Any
    labels: Labels
    result_leaves: list[int] = field(default_factory=list)
    result_spec: Any = None
    result_constants: dict[int, Any] = field(default_factory=dict)
    loss_leaf: int = -1

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors of the result.  Only the loss carries grad; without a loss every float leaf that has it does."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors[len(self.held) :], strict=True):
            leaves[position] = tensor
        args, kwargs, targets = pytree.tree_unflatten(leaves, self.call_spec)
        with preserved(self.model), self.labels.active():
            adapt_modules(self.model)
            with swapped(self.model, self.held, list(tensors[: len(self.held)])):
                result = self.model(*args, **kwargs)
                if self.loss_fn is not None:
                    result = self.loss_fn(result, *targets)
            return self._split(result)

    def _split(self, result: Any) -> tuple[torch.Tensor, ...]:
        with_paths, self.result_spec = flatten_tree(result)
        check_constants(((f"result{pytree.keystr(path)}", leaf) for path, leaf in with_paths), what="result")
        leaves = [leaf for _, leaf in with_paths]
        self.loss_leaf = find_loss(result, leaves, from_loss_fn=self.loss_fn is not None)
        self.result_leaves = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.result_constants = {i: v for i, v in enumerate(leaves) if not isinstance(v, torch.Tensor)}
        outputs = []
        # The trace treats outputs that alias inputs or each other in a way of its own: a copy of each avoids that.
        with annotate({OUTPUT_COPY: True}):
            for i in self.result_leaves:
                carries_grad = self.loss_leaf in (i, -1)
                outputs.append((leaves[i] if carries_grad else leaves[i].detach()).clone())
        return tuple(outputs)


class _Traced(nn.Module):
    """The call as a module without parameters: everything that varies is an argument."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.call.run(tensors)
