"""A plan in plain text: what is split where, what a rank holds of it, what a step is expected to cost."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from autopar.passes.placement import local_shape
from autopar.report.text import VIEWS, duration, family, folded, plural, quantity, table

if TYPE_CHECKING:
    from autopar.plan import Plan

_NUMBERED = re.compile(r"(_\d+)+$")
_KINDS = {"parameter": "parameters", "buffer": "buffers", "batch": "inputs"}


def explain_plan(plan: Plan) -> str:
    """``plan`` as a text for people; copies of one block are folded into one line."""
    lines = [*_headline(plan), ""]
    for kind, title in _KINDS.items():
        lines += _tensors(plan, kind, title)
    if plan.stages:
        lines += ["stages", *_stages(plan), ""]
    if plan.choices:
        lines += [*_choices(plan), ""]
    if plan.notes:
        lines += ["notes", *(f"  {note}" for note in plan.notes), ""]
    return "\n".join(lines[:-1])


def _headline(plan: Plan) -> list[str]:
    shape = f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp} = {plural(plan.world_size, 'rank')}"
    exceptions = f" ({plural(len(plan.recompute_layers), 'exception')})" if plan.recompute_layers else ""
    schedule = f", schedule {plan.schedule}" if plan.schedule else ""
    predicted, certificate = plan.predicted, plan.certificate
    lines = [
        f"{shape}, zero {plan.zero}, sequence parallel {'on' if plan.sequence_parallel else 'off'}, "
        f"recompute {plan.recompute}{exceptions}, micro-batches {plan.microbatches}{schedule}",
        f"predicted for a rank: step {duration(predicted.step_time_s)}, peak {quantity(predicted.peak_bytes, 'B')}, "
        f"sends {quantity(predicted.comm_bytes, 'B')}, computes {quantity(predicted.flops, 'FLOP')}",
    ]
    if certificate.gap is None or certificate.bound_s is None:
        lines.append("how far from the best plan: not known")
    else:
        lines.append(f"at most {certificate.gap:.1%} slower than the best plan (bound {duration(certificate.bound_s)})")
    if certificate.space:
        lines.append(f"searched: {certificate.space}")
    return lines


def _tensors(plan: Plan, kind: str, title: str) -> list[str]:
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, info in plan.tensors.items():
        if info.kind == kind:
            key = (family(name), info, plan.storage.get(name))
            groups.setdefault(key, []).append(name)
    if not groups:
        return []
    rows = [[title, "copies", "dtype", "shape", *plan.mesh.axes, "whole", "on a rank"]]
    total_bytes = total_held_bytes = 0
    for names in groups.values():
        whole_bytes = sum(plan.tensors[name].num_bytes for name in names)
        held_bytes = sum(_held_bytes(plan, name) for name in names)
        total_bytes += whole_bytes
        total_held_bytes += held_bytes
        info = plan.tensors[names[0]]
        also = "".join(f" = {alias}" for alias in info.aliases)
        rows.append(
            [
                f"  {folded(names)}{also}",
                str(len(names)),
                info.dtype,
                "x".join(map(str, info.shape)) or "-",
                *plan.storage.get(names[0], ("R",) * len(plan.mesh.axes)),
                quantity(whole_bytes, "B"),
                quantity(held_bytes, "B"),
            ]
        )
    blanks = [""] * (3 + len(plan.mesh.axes))
    rows.append(["  all", *blanks, quantity(total_bytes, "B"), quantity(total_held_bytes, "B")])
    return [*table(rows, right=(1, len(rows[0]) - 2, len(rows[0]) - 1)), ""]


def _held_bytes(plan: Plan, name: str) -> int:
    """Bytes of ``name`` on the rank that holds most of it: rank 0 of the mesh, as ``chunk`` cuts."""
    info = plan.tensors[name]
    if not info.num_bytes:
        return 0
    held = local_shape(info.shape, plan.layout(name), plan.mesh.sizes, plan.mesh.coords(0))
    return math.prod(held) * info.num_bytes // math.prod(info.shape)


def _stages(plan: Plan) -> Iterator[str]:
    for stage in range(plan.pp):
        layers = [layer for layer, where in plan.stages.items() if where == stage]
        yield f"  {stage}: {', '.join(_fold_all(layers)) or 'nothing; it passes tensors on'}"


def _choices(plan: Plan) -> list[str]:
    """The calls that are split, by operation and by the factor that each axis splits; views follow what they view."""
    counts = Counter((_NUMBERED.sub("", name), labels) for name, labels in plan.choices.items())
    rows = [["operations", "calls", *plan.work_mesh.axes]]
    for (operation, labels), count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if operation not in VIEWS:
            rows.append([f"  {operation}", str(count), *labels])
    return table(rows, right=(1,))


def _fold_all(names: list[str]) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(family(name), []).append(name)
    return (folded(group) for group in groups.values())


def diff_plans(old: Plan, new: Plan) -> str:
    """What changes from ``old`` to ``new``, one line each; empty where they are equal."""
    lines: list[str] = []
    for f in dataclasses.fields(old):
        before, after = getattr(old, f.name), getattr(new, f.name)
        if before == after:
            continue
        if isinstance(before, Mapping):
            lines += _diff_mappings(f.name, before, after)
        elif dataclasses.is_dataclass(before):
            for part in dataclasses.fields(before):
                was, now = getattr(before, part.name), getattr(after, part.name)
                if was != now:
                    lines.append(f"{f.name}.{part.name}: {was} -> {now}")
        elif f.name == "notes":
            lines += [f"notes: - {note}" for note in before if note not in after]
            lines += [f"notes: + {note}" for note in after if note not in before]
        else:
            lines.append(f"{f.name}: {before} -> {after}")
    return "\n".join(lines)


def _diff_mappings(title: str, before: Mapping[str, object], after: Mapping[str, object]) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in dict.fromkeys(itertools.chain(before, after)):
        was, now = (_short(side[name]) if name in side else "-" for side in (before, after))
        if was != now:
            kind = _NUMBERED.sub("", name) if title == "choices" else family(name)
            groups.setdefault((kind, was, now), []).append(name)
    for (kind, was, now), names in groups.items():
        what = f"of {plural(len(names), 'call')} of {kind}" if title == "choices" else folded(names)
        yield f"{title} {what}: {was} -> {now}"


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) if value else "-"
    if dataclasses.is_dataclass(value):
        return " ".join(str(getattr(value, f.name)) for f in dataclasses.fields(value))
    return str(value)
