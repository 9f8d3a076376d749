"""Run the programs of all ranks and the single-device step on the same inputs, and compare every output."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.cost_models.errors import VerificationError
from autopar.passes.base import Mesh, OutputKind, OutputSpec, Program, ProgramTensor, StepGraph
from autopar.verify.compare import check_local_shapes, magnitude, part_differences, relative, shard_tensor
from autopar.verify.locate import first_mismatch
from autopar.verify.lockstep import run_lockstep
from autopar.verify.meetings import check_ranks
from autopar.verify.report import Report, Row
from autopar.verify.tolerance import Tolerance, is_exact
from autopar.verify.values import Values, input_values

ROUNDINGS = 8  # an error may be as many times what rounding the inputs does


def verify_programs(
    step: StepGraph,
    programs: Sequence[Program],
    values: Values | int = 0,
    *,
    rtol: float | None = None,
    locate: bool = True,
    normal: StepGraph | None = None,
) -> Report:
    """Compare every output of ``programs``, run in lockstep, with the single-device ``step``.

    The error of an output is its largest absolute difference over its largest entry, or over a share of the largest
    entry among the outputs of its kind where that is more (:class:`autopar.verify.tolerance.Tolerance`).  NaN and
    infinities must be at the same places; integers must be equal; dtypes and shapes must be.  With the default ``rtol``
    an error also passes that is no larger than what a rounding of the inputs makes of the output on one device: where a
    gradient is zero but for rounding, no other order of summation gives its digits.

    Args:
        step: one device's step on the global batch.
        programs: the programs of ranks 0, 1, ... of one mesh.
        values: values of the inputs by name, or a seed for random ones.
        rtol: allowed error; by default by the coarsest dtype of the step (float64 1e-10, float32 5e-5, float16 5e-3,
            bfloat16 3e-2).
        locate: on a difference, run again and find the first wrong value.
        normal: the rewritten step that the programs were made from, where that is not ``step``; wrong values are looked
            for in it, outputs are always compared with ``step``.

    Raises:
        VerificationError: the programs cannot run together (collectives do not match, deadlock, a node fails), or draw
            random numbers of their own (``rng="fast"``).
    """
    mesh = check_ranks(programs)
    _refuse_own_randomness(step, programs)
    inputs = input_values(step, values)
    tolerance = Tolerance.of(step.graph_module, rtol)
    local = [local_inputs(p, inputs) for p in programs]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(values if isinstance(values, int) else 0)
        start = torch.get_rng_state()
        wanted = run_single(step, inputs)
        torch.set_rng_state(start)
        outputs = run_lockstep(programs, local)
        rows = _compare(step.outputs, wanted, programs, outputs, tolerance)
        if rtol is None and not all(r.ok for r in rows):
            torch.set_rng_state(start)
            floors = tolerance.floors(step.outputs, wanted)
            rows = _within_rounding(rows, wanted, run_single(step, nudged(inputs)), floors)
        mismatch = None
        if locate and not all(r.ok for r in rows):
            wrong = {(r.kind, r.name): r.error for r in rows if not r.ok}
            torch.set_rng_state(start)
            whole = [inputs[s.name] for s in step.inputs]
            mismatch = first_mismatch(normal or step, programs, whole, local, wrong=wrong, rtol=tolerance.rtol)
    return Report(ok=all(r.ok for r in rows), rows=tuple(rows), mesh=mesh, first_mismatch=mismatch)


def run_single(step: StepGraph, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Outputs of the single-device step."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        whole = [inputs[s.name] for s in step.inputs]
        return tuple(fx.Interpreter(step.graph_module).run(*whole, enable_io_processing=False))


def nudged(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs, every floating-point entry rounded up or down by one unit in its last place."""
    generator = torch.Generator().manual_seed(0)
    found = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            sign = 2 * torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8) - 1
            found[name] = value * (1 + torch.finfo(value.dtype).eps * sign.to(value.dtype))
    return found


def _within_rounding(
    rows: Sequence[Row], wanted: Sequence[Any], moved: Sequence[Any], floors: Mapping[OutputKind, float]
) -> list[Row]:
    """The rows; a wrong one whose error is no larger than what rounded inputs do to the output is right."""
    found = []
    for row, want, other in zip(rows, wanted, moved, strict=True):
        if not row.ok and not row.note and isinstance(want, torch.Tensor) and not is_exact(want):
            allowed = ROUNDINGS * relative(magnitude(other - want), _scale(want, floors[row.kind]))
            if math.isfinite(row.error) and row.error <= allowed:
                row = dataclasses.replace(row, ok=True, tolerance=allowed)
        found.append(row)
    return found


def local_inputs(program: Program, inputs: Mapping[str, Any]) -> list[Any]:
    """What a rank passes to its program: its part of every global input, and the random seed if there is one."""
    mesh = program.mesh
    found = []
    for spec, held in zip(program.inputs, program.input_tensors, strict=True):
        value = inputs[spec.name]
        if isinstance(value, torch.Tensor):
            if tuple(value.shape) != held.shape:
                raise VerificationError(
                    f"rank {program.rank}: {spec.name} has global shape {list(value.shape)}; the program was made for "
                    f"{list(held.shape)}"
                )
            value = shard_tensor(value, held.layout, mesh.sizes, mesh.coords(program.rank))
        found.append(value)
    if program.seed_input is not None:
        found.append(torch.zeros((), dtype=torch.int64))
    return found


def _refuse_own_randomness(step: StepGraph, programs: Sequence[Program]) -> None:
    for program in programs:
        seeds = [n for n in program.graph_module.graph.nodes if n.op == "placeholder" and n.name == program.seed_input]
        if any(n.users for n in seeds):
            raise VerificationError(
                f'rank {program.rank} draws its own random numbers (rng="fast"), which no single device draws; '
                f'lower with rng="exact" to compare'
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """One output on all ranks: the parts (None where a rank has none) and where they lie."""

    parts: tuple[Any, ...]
    tensors: tuple[ProgramTensor | None, ...]


def _compare(
    specs: Sequence[OutputSpec],
    wanted: Sequence[Any],
    programs: Sequence[Program],
    outputs: Sequence[tuple[Any, ...]],
    tolerance: Tolerance,
) -> list[Row]:
    mesh = programs[0].mesh
    by_rank = [
        {(s.kind, s.name): (o, t) for s, o, t in zip(p.outputs, out, p.output_tensors, strict=True)}
        for p, out in zip(programs, outputs, strict=True)
    ]
    floors = tolerance.floors(specs, wanted)
    rows = []
    for spec, want in zip(specs, wanted, strict=True):
        entries = [rank.get((spec.kind, spec.name), (None, None)) for rank in by_rank]
        held = _Held(parts=tuple(e[0] for e in entries), tensors=tuple(e[1] for e in entries))
        rows.append(_row(spec, want, held, mesh, rtol=tolerance.rtol, floor=floors[spec.kind]))
    return rows


def _row(spec: OutputSpec, want: object, held: _Held, mesh: Mesh, *, rtol: float, floor: float) -> Row:
    note = _structural_fault(want, held, mesh)
    if note:
        return Row(kind=spec.kind, name=spec.name, error=math.inf, tolerance=rtol, ok=False, note=note)
    layout = next((t.layout for t in held.tensors if t is not None), None)
    if not isinstance(want, torch.Tensor) or layout is None:
        return Row(kind=spec.kind, name=spec.name, error=0.0, tolerance=rtol, ok=True)
    apart, drift = part_differences(held.parts, layout, mesh, want)
    exact = is_exact(want)
    scale = _scale(want, floor)
    tolerance = 0.0 if exact else rtol
    worst = max(apart, key=lambda rank: apart[rank])
    error = relative(apart[worst], scale)
    return Row(
        kind=spec.kind,
        name=spec.name,
        error=error,
        tolerance=tolerance,
        ok=error <= tolerance,
        worst_rank=worst if error else None,
        drift=relative(drift, scale),
    )


def _scale(want: torch.Tensor, floor: float) -> float:
    """What the error of an output is relative to."""
    return 1.0 if is_exact(want) else max(magnitude(want), floor)


def _structural_fault(want: object, held: _Held, mesh: Mesh) -> str:
    """What is wrong with an output before its numbers are looked at, or ""."""
    found = [rank for rank, part in enumerate(held.parts) if part is not None]
    if not isinstance(want, torch.Tensor):
        off = [rank for rank in found if isinstance(held.parts[rank], torch.Tensor) or held.parts[rank] != want]
        return f"rank {off[0]} has {_kind(held.parts[off[0]])} where one device has {want}" if off else ""
    if not found:
        return "None where one device has a tensor"
    first = held.tensors[found[0]]
    for rank in found:
        part, tensor = held.parts[rank], held.tensors[rank]
        if not isinstance(part, torch.Tensor) or part.dtype != want.dtype:
            return f"rank {rank} has {_kind(part)} where one device has {_kind(want)}"
        if tensor is None or first is None or tensor.layout != first.layout:
            return f"ranks {found[0]} and {rank} have the layouts {first} and {tensor}"
    try:
        check_local_shapes(held.parts, first.layout if first else (), mesh, tuple(want.shape))
    except VerificationError as error:
        return str(error)
    return ""


def _kind(value: object) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, torch.Tensor) else repr(value)
