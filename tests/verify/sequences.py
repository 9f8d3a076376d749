"""Programs that do nothing but communicate, written as lists of steps; and how they are spoilt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.passes.base import Mesh, Program
from tests.verify.sketch import Sketch, aten, c10d, program

ROWS = 12  # divides by every group of the meshes used here


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One communication of input ``source``, waited for at once or, where ``late``, at the end."""

    op: str
    group: str
    source: int = 0
    columns: int = 2
    dtype: torch.dtype = torch.float32
    reduce_op: str = "sum"
    late: bool = False


def build(mesh: Mesh, rank: int, steps: Sequence[Step]) -> Program:
    """The program of ``rank``: every step communicates a fresh tensor, every result is returned."""
    sketch = Sketch()
    base = sketch.input("x", (ROWS, 1))
    handles = []
    for step in steps:
        sketch.layer = f"layer{step.source}"
        scaled = sketch.call(aten.mul.Tensor, base, float(step.source + 1))
        tensor = sketch.call(aten.expand.default, scaled, [ROWS, step.columns])
        tensor = sketch.call(aten._to_copy.default, tensor, dtype=step.dtype)
        handle = _issue(sketch, step, tensor, len(mesh.group_ranks(step.group, rank)))
        handles.append(handle if step.late else sketch.call(c10d.wait_tensor.default, handle))
    results = [sketch.call(c10d.wait_tensor.default, h) if s.late else h for s, h in zip(steps, handles, strict=True)]
    return program(sketch, results, mesh, rank)


def _issue(sketch: Sketch, step: Step, tensor, size: int):
    if step.op == "all_reduce":
        return sketch.call(c10d.all_reduce.default, tensor, step.reduce_op, step.group)
    if step.op == "all_gather":
        return sketch.call(c10d.all_gather_into_tensor.default, tensor, size, step.group)
    if step.op == "reduce_scatter":
        return sketch.call(c10d.reduce_scatter_tensor.default, tensor, step.reduce_op, size, step.group)
    if step.op == "broadcast":
        return sketch.call(c10d.broadcast.default, tensor, 0, step.group)
    split = [ROWS // size] * size
    return sketch.call(c10d.all_to_all_single.default, tensor, split, split, step.group)
