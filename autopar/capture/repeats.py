"""Which layers are copies of one block."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import nn


def find_repeats(model: nn.Module, called: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Groups of layer paths that are copies of one block, in order of execution.

    Copies are children of one ModuleList or Sequential that agree in class, and in the names, classes, shapes, dtypes
    and flags of everything inside.  Only the outermost groups are listed, and only layers that ran.

    Args:
        model: the captured model.
        called: layer paths in the order in which they first ran.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> model = nn.ModuleDict({"h": nn.ModuleList([block() for _ in range(3)]), "out": nn.Linear(4, 4)})
    >>> find_repeats(model, ("h.0", "h.1", "h.2", "out"))
    (('h.0', 'h.1', 'h.2'),)
    """
    order = {name: i for i, name in enumerate(called)}
    groups: list[tuple[str, ...]] = []
    members: set[str] = set()
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or _inside(name, members):
            continue
        found: dict[Hashable, list[str]] = {}
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            if path in order and next(child.parameters(), None) is not None:
                found.setdefault(_structure(child), []).append(path)
        for paths in found.values():
            if len(paths) > 1:
                groups.append(tuple(sorted(paths, key=order.__getitem__)))
                members.update(paths)
    return tuple(sorted(groups, key=lambda group: order[group[0]]))


def _inside(name: str, members: set[str]) -> bool:
    """Whether a layer path is one of ``members`` or lies below one."""
    parts = name.split(".")
    return any(".".join(parts[:i]) in members for i in range(1, len(parts) + 1))


def _structure(module: nn.Module) -> Hashable:
    """What two copies of one block have in common."""
    tensors = tuple(
        (name, t.shape, t.dtype, t.requires_grad)
        for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
        for name, t in named
    )
    modules = tuple((name, type(m), m.training) for name, m in module.named_modules())
    return modules, tensors
