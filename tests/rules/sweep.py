"""Every operation of torch's database: captured, split in every way that is offered, run in lockstep, compared.

python -m tests.rules.sweep                 # the whole database (an hour on one core), writes tests/rules/README.md
python -m tests.rules.sweep mm softmax      # some operations, prints
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
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
from autopar.verify import verify_programs
from tests.rules.opinfo import OpInfo, Sample, operations, samples

SAMPLES = 4
MESHES = (Mesh(axes=("x",), sizes=(2,)), Mesh(axes=("x",), sizes=(3,)))
RTOL = 2e-4


class Verdict(Enum):
    SPLIT = "split"
    REPLICATED = "replicated"
    REFUSED = "refused"
    WRONG = "WRONG"
    CRASH = "CRASH"
    NO_SAMPLE = "no sample"


@dataclass(slots=True)
class Outcome:
    """What became of one operation over its samples."""

    name: str
    verdict: Verdict = Verdict.NO_SAMPLE
    splits: int = 0  # (call, choice) pairs that ran and were right
    whole: dict[str, None] = field(
        default_factory=dict
    )  # calls of the forward that had something to split and could not
    note: str = ""

    def add(self, verdict: Verdict, note: str = "") -> None:
        """Keep the worst that happened; one sample that is split is enough for "split"."""
        order = [Verdict.NO_SAMPLE, Verdict.REFUSED, Verdict.REPLICATED, Verdict.SPLIT, Verdict.WRONG, Verdict.CRASH]
        if order.index(verdict) > order.index(self.verdict):
            self.verdict, self.note = verdict, note or self.note


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


def has_work(node: fx.Node) -> bool:
    """Whether a call of the forward computes something that has a dim to split."""
    values = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]
    tensors = [v for v in [*values, *(n.meta["val"] for n in node.all_input_nodes)] if isinstance(v, torch.Tensor)]
    large = any(n > 1 for t in tensors for n in t.shape)
    return large and node.target._schema.name not in MOVES and node.meta["phase"] is Phase.FORWARD


def check_sample(sample: Sample, outcome: Outcome) -> None:
    """Capture, split, compare; what happens is added to ``outcome``."""
    training = any(t.requires_grad for t in sample.tensors)
    step = capture(sample, tuple(sample.tensors), training=training)
    normal = Normalize()(step)
    rows, _ = rows_of(normal.graph, RuleTable())
    space = OptionSpace(normal.graph, rows)
    values = inputs_of(step, sample)
    memo: dict[Any, Any] = {}
    working = [n for n in rows if has_work(n)]
    split = {n for n in working if any(c.factor for c in space.choices(n, 2))}
    for mesh in MESHES:
        for chosen in rounds(space, rows, mesh.sizes[0]):
            choices = {n.name: (chosen.get(n) or replicated(rows[n]),) for n in rows}
            assignment = Assignment(mesh=mesh, choices=choices)
            programs = [partition(normal, rows, assignment, rank, rng="exact", memo=memo) for rank in range(mesh.size)]
            report = verify_programs(step, programs, values, rtol=RTOL, normal=normal)
            if not report.ok:
                outcome.add(Verdict.WRONG, f"{sample} on {mesh.size} ranks: {report.text()}")
                return
            outcome.splits += sum(c.factor is not None for c in chosen.values())
    outcome.whole.update({op_name(n.target): None for n in working if n not in split})
    whole = not split or len(split) < len(working)
    outcome.add(Verdict.REPLICATED if whole else Verdict.SPLIT)


def check_operation(op: OpInfo, name: str, limit: int = SAMPLES) -> Outcome:
    """The outcome of one operation; what is no AutoparError is a crash."""
    outcome = Outcome(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in samples(op, limit):
            try:
                check_sample(sample, outcome)
            except AutoparError as error:
                outcome.add(Verdict.REFUSED, str(error).splitlines()[0])
            except Exception as error:  # noqa: BLE001 -- counted, and fails the sweep
                outcome.add(Verdict.CRASH, f"{sample}: {type(error).__name__}: {error}")
    return outcome


def sweep(names: Sequence[str] = ()) -> list[Outcome]:
    """Outcomes of the named operations, or of all."""
    known = operations()
    found = []
    for name in names or known:
        start = time.perf_counter()
        outcome = check_operation(known[name], name)
        found.append(outcome)
        shown = outcome.note[-1500:] if outcome.verdict in (Verdict.WRONG, Verdict.CRASH) else outcome.note[:100]
        whole = " ".join(outcome.whole)
        took = f"{time.perf_counter() - start:5.1f}s"
        print(f"{name:50s} {outcome.verdict.value:11s} {outcome.splits:5d} {took} {whole} {shown}", flush=True)
    return found


def main() -> None:
    torch.set_num_threads(1)
    outcomes = sweep(sys.argv[1:])
    for verdict in Verdict:
        print(verdict.value, sum(o.verdict is verdict for o in outcomes))


if __name__ == "__main__":
    main()
