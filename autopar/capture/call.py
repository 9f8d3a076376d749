"""How a call is flattened, where the loss is in what it returned, and how the result is put together again."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.cost_models.errors import CaptureError
from autopar.passes.base import OutputKind, StepGraph
from autopar.torch_private import pytree

CONSTANT_TYPES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    range,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.Size,
)


def flatten_call(
    args: Sequence[object], kwargs: Mapping[str, object] | None = None, targets: Sequence[object] = ()
) -> tuple[list[object], pytree.TreeSpec, tuple[str, ...]]:
    """Flatten a call into leaves, their pytree spec and their names.

    Keyword arguments are taken in alphabetical order, so that a call with another order is the same call.  Dataclasses
    that torch does not know yet are registered as pytrees when they are met.

    Returns:
        the leaves (tensors and others) in order, the spec of ``(args, kwargs, targets)``, and one name a leaf.

    >>> flatten_call((1, [2]), {"b": 3, "a": {"x": 4}}, (5,))[::2]
    ([1, 2, 4, 3, 5], ('args[0]', 'args[1][0]', "kwargs['a']['x']", "kwargs['b']", 'targets[0]'))
    """
    call = (tuple(args), dict(sorted((kwargs or {}).items())), tuple(targets))
    with_paths, spec = flatten_tree(call)
    roots = ("args", "kwargs", "targets")
    names = tuple(roots[path[0].idx] + pytree.keystr(path[1:]) for path, _ in with_paths)
    return [leaf for _, leaf in with_paths], spec, names


def flatten_tree(tree: object) -> tuple[list[tuple[Any, object]], pytree.TreeSpec]:
    """(path, leaf) pairs and the spec of ``tree``, with dataclasses opened."""
    while True:
        leaves, spec = pytree.tree_flatten_with_path(tree)
        unknown = {type(leaf) for _, leaf in leaves if _is_open_dataclass(leaf)}
        if not unknown:
            return leaves, spec
        for cls in unknown:
            pytree.register_dataclass(cls)


def _is_open_dataclass(leaf: object) -> bool:
    """Whether a leaf is a dataclass instance that can be taken apart and built again from its fields."""
    return (
        dataclasses.is_dataclass(leaf)
        and not isinstance(leaf, (type, *CONSTANT_TYPES))
        and all(f.init for f in dataclasses.fields(leaf))
    )


def check_constants(pairs: Iterable[tuple[str, object]], *, what: str) -> None:
    """Refuse leaves that are neither tensors nor plain constants.

    Raises:
        CaptureError: naming the leaf and its type.
    """
    for name, leaf in pairs:
        if isinstance(leaf, (torch.Tensor, *CONSTANT_TYPES)):
            continue
        kind = type(leaf).__qualname__
        if what == "result":
            advice = (
                "return tensors in dicts, lists, tuples or dataclasses (a cache: call the model with use_cache=False)"
            )
        else:
            advice = "pass tensors and plain constants in dicts, lists, tuples or dataclasses"
        raise CaptureError(f"{name} is an object of type {kind}, which a captured step cannot carry: {advice}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a call returned, without its tensors.

    Attributes:
        spec: pytree spec of the result.
        num_leaves: number of its leaves.
        tensor_leaves: positions of the tensors among the leaves.
        constants: the other leaves, by position.
        loss_leaf: position of the loss, or -1.
    """

    spec: pytree.TreeSpec
    num_leaves: int
    tensor_leaves: tuple[int, ...]
    constants: Mapping[int, object]
    loss_leaf: int


def describe_result(value: object, *, from_loss_fn: bool) -> tuple[Result, list[torch.Tensor]]:
    """Take a result apart: its description, and its tensors in the order of ``Result.tensor_leaves``.

    Args:
        value: what ``loss_fn`` (or the model) returned.
        from_loss_fn: whether ``loss_fn`` returned it.

    Raises:
        CaptureError: the result holds an object that is neither a tensor nor a constant, or no loss where there must
            be one.
    """
    pairs, spec = flatten_tree(value)
    check_constants(((f"result{pytree.keystr(path)}", leaf) for path, leaf in pairs), what="result")
    leaves = [leaf for _, leaf in pairs]
    tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    result = Result(
        spec=spec,
        num_leaves=len(leaves),
        tensor_leaves=tuple(tensors),
        constants={i: leaf for i, leaf in enumerate(leaves) if i not in tensors},
        loss_leaf=_find_loss(value, leaves, from_loss_fn=from_loss_fn),
    )
    return result, list(tensors.values())


def _find_loss(result: object, leaves: Sequence[object], *, from_loss_fn: bool) -> int:
    """Position of the loss among the result's leaves, or -1.

    From ``loss_fn`` the loss is the 0-d tensor, ``.loss``, ``["loss"]`` or the first leaf; from a model only the 0-d
    tensor or ``.loss``.

    Raises:
        CaptureError: ``loss_fn`` returned no 0-d floating-point tensor.
    """
    loss: object
    if isinstance(result, torch.Tensor):
        loss = result
    else:
        loss = getattr(result, "loss", None)
        if loss is None and from_loss_fn:
            loss = result["loss"] if isinstance(result, Mapping) and "loss" in result else next(iter(leaves), None)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point():
        return next((i for i, leaf in enumerate(leaves) if leaf is loss), -1)
    if from_loss_fn:
        got = f"a {loss.dtype} tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise CaptureError(
            f"the loss that loss_fn returned is {got}; it must be a floating-point tensor without dims: reduce it with "
            ".mean() or .sum(), and return it alone, as .loss, as ['loss'] or as the first leaf"
        )
    return -1


def rebuild_result(step: StepGraph, output_values: Sequence[object]) -> Any:  # noqa: ANN401 -- the user's own type
    """What the call returns, from the values of the step's outputs.

    Args:
        step: the captured step.
        output_values: one value per entry of ``step.outputs``; only losses and results are read.

    Returns:
        the model's (or ``loss_fn``'s) own structure: ModelOutput, dataclass, dict, tensor.
    """
    leaves: dict[int, object] = dict(step.result_constants)
    for spec, value in zip(step.outputs, output_values, strict=True):
        if spec.kind in (OutputKind.LOSS, OutputKind.RESULT):
            leaves[spec.leaf] = value
    return pytree.tree_unflatten([leaves[i] for i in range(len(leaves))], step.result_spec)
