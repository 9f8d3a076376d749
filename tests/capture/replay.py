"""Run a captured step on real tensors, and the same call in eager mode."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from autopar.capture import flatten_call
from autopar.passes.base import InputKind, OutputKind, StepGraph
from tests.capture.zoo import Case

SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one step computes; gradients and buffers by name, results by leaf."""

    results: dict[int, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    mutations: dict[str, torch.Tensor]


def in_dtype(case: Case, dtype: torch.dtype) -> Case:
    """The case with every floating-point tensor in ``dtype``."""

    def convert(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)
        return leaf

    model = case.model.to(dtype)
    for module in model.modules():
        module.__dict__.update({k: convert(v) for k, v in module.__dict__.items() if isinstance(v, torch.Tensor)})
    args, kwargs, targets = tree_map(convert, (case.args, case.kwargs, case.targets))
    loss_fn = case.loss_fn.to(dtype) if isinstance(case.loss_fn, torch.nn.Module) else case.loss_fn
    return Case(model=model, args=args, kwargs=kwargs, targets=targets, loss_fn=loss_fn)


def replay(step: StepGraph, case: Case) -> tuple[Outcome, list[Any]]:
    """The step on the case's tensors, every seed being ones."""
    leaves, _, _ = flatten_call(case.args, case.kwargs, case.targets)
    held = dict(case.model.named_parameters()) | dict(case.model.named_buffers())
    values: list[Any] = []
    for spec, node in zip(step.inputs, step.placeholders, strict=True):
        if spec.kind is InputKind.SEED:
            values.append(torch.ones(node.meta["val"].shape, dtype=node.meta["val"].dtype))
        else:
            values.append((leaves[spec.leaf] if spec.kind is InputKind.BATCH else held[spec.name]).detach())
    torch.manual_seed(SEED)
    outputs = list(step.graph_module(*values))
    by_kind: dict[OutputKind, dict[Any, Any]] = {kind: {} for kind in OutputKind}
    for spec, value in zip(step.outputs, outputs, strict=True):
        by_kind[spec.kind][spec.name if spec.leaf < 0 else spec.leaf] = value
    outcome = Outcome(
        results=by_kind[OutputKind.LOSS] | by_kind[OutputKind.RESULT],
        gradients=by_kind[OutputKind.GRADIENT] | by_kind[OutputKind.INPUT_GRADIENT],
        mutations=by_kind[OutputKind.MUTATION],
    )
    return outcome, outputs


def eager(case: Case, loss_leaf: int, *, training: bool = True) -> Outcome:
    """The case in eager mode on a copy: gradients of the loss, or of the sum of all results without one."""
    model = copy.deepcopy(case.model)
    call = (case.args, case.kwargs, case.targets)
    args, kwargs, targets = tree_map(
        lambda t: t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t, call
    )
    torch.manual_seed(SEED)
    with torch.set_grad_enabled(training):
        result = model(*args, **kwargs)
        if case.loss_fn is not None:
            result = case.loss_fn(result, *targets)
    leaves = tree_leaves(result) if not hasattr(result, "__dataclass_fields__") else tree_leaves(vars(result))
    tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    roots = [tensors[loss_leaf]] if loss_leaf >= 0 else [t for t in tensors.values() if t.requires_grad]
    if training:
        sum(root.sum() for root in roots).backward()
    inputs, _, names = flatten_call(args, kwargs, targets)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    gradients |= {
        n: t.grad for n, t in zip(names, inputs, strict=True) if isinstance(t, torch.Tensor) and t.requires_grad
    }
    before = dict(case.model.named_buffers())
    changed = {n: b for n, b in model.named_buffers() if not torch.equal(b, before[n])}
    return Outcome(
        results={i: t.detach() for i, t in tensors.items()}, gradients=gradients if training else {}, mutations=changed
    )
