"""Every operation of torch's database: captured, split in every way that is offered, run in lockstep, compared.

python -m tests.rules.sweep                 # the whole database (an hour on one core), writes tests/rules/README.md
python -m tests.rules.sweep mm softmax      # some operations, prints
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.passes.base import InputKind, Mesh, Phase, StepGraph
from autopar.passes.normalize import Normalize
from autopar.passes.options import Choice, OptionSpace, replicated
from autopar.passes.partition import Assignment, partition
from autopar.passes.rules.table import RuleTable, op_name, rows_of
from autopar.passes.torch_ops import pytree
from autopar.verify import Report, verify_programs
from autopar.verify.compare import magnitude
from autopar.verify.parity import run_single
from tests.rules import dtensor
from tests.rules.apart import DiedError, apart
from tests.rules.opinfo import OpInfo, Sample, operations, samples
from tests.rules.oracle import has_parallel_dim
from tests.rules.table import README, table
from tests.rules.verdict import Outcome, Verdict

SAMPLES = 4
MESHES = (Mesh(axes=("x",), sizes=(2,)), Mesh(axes=("x",), sizes=(3,)))
RTOL = 2e-4


# Calls that make or move data and do not compute: they say nothing about whether the operation is split.
MOVES = frozenset(
    f"aten::{name}"
    for name in """
    clone alias detach reshape view permute transpose t expand squeeze unsqueeze slice select as_strided _to_copy
    full arange scalar_tensor ones zeros eye copy lift_fresh_copy split split_with_sizes unbind cat stack
    """.split()  # noqa: SIM905 - twenty names read better as text
)


def inputs_of(step: StepGraph, sample: Sample) -> dict[str, Any]:
    """The sample's tensors by the names of the step's inputs, and a random seed for every output."""
    values: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(7)
    for spec, node in zip(step.inputs, step.placeholders, strict=True):
        if spec.kind is InputKind.SEED:
            example = node.meta["val"]
            values[spec.name] = torch.randn(example.shape, generator=generator, dtype=example.dtype)
        else:
            values[spec.name] = sample.tensors[spec.leaf].detach()
    return values


def rounds(space: OptionSpace, rows: Iterable[fx.Node], num_ranks: int) -> list[dict[fx.Node, Choice]]:
    """Assignments that together take every choice of every call: in round i all calls take their i-th."""
    options = {n: space.choices(n, num_ranks)[1:] for n in rows}
    most = max((len(o) for o in options.values()), default=0)
    return [{n: o[i % len(o)] for n, o in options.items() if o and i < len(o) + 1} for i in range(most)]


def has_work(node: fx.Node, *, moves: bool = False) -> bool:
    """Whether a call of the forward computes (or with ``moves``, moves) something that has a dim to split."""
    values = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]
    tensors = [v for v in [*values, *(n.meta["val"] for n in node.all_input_nodes)] if isinstance(v, torch.Tensor)]
    large = any(n > 1 for t in tensors for n in t.shape)
    return large and node.meta["phase"] is Phase.FORWARD and (moves or node.target._schema.name not in MOVES)


def rounding(step: StepGraph, values: dict[str, Any], report: Report) -> bool:
    """Whether all differences are rounding of numbers that cancel: small beside the inputs, which are of order one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wanted = run_single(step, values)
    errors = zip(report.rows, wanted, strict=True)
    return all(row.ok or (row.error * magnitude(want) < RTOL / 10 and not row.note) for row, want in errors)


def check_sample(sample: Sample, outcome: Outcome) -> None:
    """Capture, split, compare; what happens is added to ``outcome``."""
    training = any(t.requires_grad for t in sample.tensors)
    step = capture(sample, tuple(sample.tensors), training=training)
    normal = Normalize()(step)
    rows, _ = rows_of(normal.graph, RuleTable())
    space = OptionSpace(normal.graph, rows)
    values = inputs_of(step, sample)
    memo: dict[Any, Any] = {}
    working = [n for n in rows if has_work(n)] or [n for n in rows if has_work(n, moves=True)]
    split = {n for n in working if any(c.factor for c in space.choices(n, 2))}
    for mesh in MESHES:
        for chosen in rounds(space, rows, mesh.sizes[0]):
            choices = {n.name: (chosen.get(n) or replicated(rows[n]),) for n in rows}
            assignment = Assignment(mesh=mesh, choices=choices)
            programs = [partition(normal, rows, assignment, rank, rng="exact", memo=memo) for rank in range(mesh.size)]
            report = verify_programs(step, programs, values, rtol=RTOL, normal=normal)
            if not report.ok and not rounding(step, values, report):
                outcome.add(Verdict.WRONG, f"{sample} on {mesh.size} ranks: {report.text()}")
                return
            outcome.splits += sum(c.factor is not None for c in chosen.values())
    outcome.whole.update({op_name(n.target): None for n in working if n not in split})
    whole = not split or len(split) < len(working)
    outcome.add(Verdict.REPLICATED if whole else Verdict.SPLIT)


def runs(sample: Sample) -> bool:
    """Whether the operation runs on one device on copies (some samples rely on the memory around their tensors)."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            sample(*sample.tensors)
        except Exception:  # noqa: BLE001 -- whatever torch raises
            return False
    return True


def check_operation(op: OpInfo, name: str, limit: int = SAMPLES) -> Outcome:
    """The outcome of one operation; what is no AutoparError is a crash."""
    outcome = Outcome(name)
    if name.startswith(("empty", "new_empty")):
        return outcome  # what is in memory cannot be compared
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in filter(runs, samples(op, limit)):
            outcome.parallel = outcome.parallel or is_parallel(sample)
            try:
                check_sample(sample, outcome)
            except AutoparError as error:
                outcome.add(Verdict.REFUSED, str(error).splitlines()[0])
            except Exception as error:  # noqa: BLE001 -- counted, and fails the sweep
                outcome.add(Verdict.CRASH, f"{sample}: {type(error).__name__}: {error}")
    outcome.parallel = outcome.parallel or outcome.verdict is Verdict.SPLIT
    return outcome


def is_parallel(sample: Sample) -> bool:
    """Whether some dim of the inputs can be split so that the plain operation gives parts, or terms, of the outputs.

    Where a kernel goes down when it is tried, we say yes.
    """

    def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [t for t in pytree.tree_leaves(sample(*tensors)) if isinstance(t, torch.Tensor)]

    def found() -> bool:
        with torch.no_grad():
            return has_parallel_dim(run, [t.detach() for t in sample.tensors])

    try:
        return apart(found)
    except DiedError:
        return True


def sweep_dtensor(names: Sequence[str], limit: int = SAMPLES) -> list[Outcome]:
    """The same operations through DTensor."""
    known, found = operations(), []
    dtensor.check_operation(known["mm"], "mm", 1)
    for name in names or known:
        try:
            outcome = apart(partial(dtensor.check_operation, known[name], name, limit))
        except DiedError as error:
            outcome = Outcome(name, Verdict.CRASH, note=str(error))
        found.append(outcome)
        print(f"DTensor {name:50s} {outcome.verdict.value:12s} {outcome.note[:100]!r}", flush=True)
    return found


def sweep(names: Sequence[str] = (), limit: int = SAMPLES) -> list[Outcome]:
    """Outcomes of the named operations, or of all."""
    known, found = operations(), []
    check_operation(known["mm"], "mm", 1)  # what torch loads late is loaded once, not in every process
    for name in names or known:
        start = time.perf_counter()
        try:
            outcome = apart(partial(check_operation, known[name], name, limit))
        except DiedError as error:
            outcome = Outcome(name, Verdict.CRASH, parallel=True, note=str(error))
        found.append(outcome)
        note = outcome.note if outcome.verdict in (Verdict.WRONG, Verdict.CRASH) else outcome.note[:100]
        whole = "" if outcome.verdict is Verdict.SPLIT else " ".join(outcome.whole)
        kind = outcome.verdict.value + ("" if outcome.parallel else " -")
        seconds = time.perf_counter() - start
        print(f"{name:50s} {kind:12s} {outcome.splits:5d} {seconds:5.1f} s {whole} {note}", flush=True)
    return found


def main() -> None:
    torch.set_num_threads(1)
    names = sys.argv[1:]
    outcomes = sweep(names)
    peers = sweep_dtensor(names)
    text = table(outcomes, peers)
    print(text)
    if not names:
        README.write_text(text)


if __name__ == "__main__":
    main()
