"""How well the cost models predict published measurements.

    python tests/benchmarks/cost_accuracy.py published_runs.csv memory_runs.csv collectives.csv

The kind of a file is told by its columns.  Each model is a captured block and head, folded over its layers; its plan is
priced by the functions that price our own plans.  ``--fit`` finds the residual gain of every source anew and writes it
to ``replay_gains.json``; without it the stored gains are used, so that rows kept aside are judged with what was fitted
to the others.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

from replay_collectives import curves, fitted_errors, shared_errors  # noqa: E402
from replay_memory import published_bytes, small_run, small_run_bytes  # noqa: E402
from replay_rows import Run, SkippedRowError, cluster_of, parse, plan_of, read, stages_of  # noqa: E402
from replay_stacks import plan_as_run, stack_of  # noqa: E402

from autopar.cost_models.collectives import CollectiveModel  # noqa: E402
from autopar.cost_models.compute import KernelModel  # noqa: E402
from autopar.cost_models.fit import fit_gain  # noqa: E402
from autopar.cost_models.step import StepModel  # noqa: E402

GAINS = HERE / "replay_gains.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement and its prediction before the residual gain."""

    run: Run
    stack: str
    measured: float
    predicted: float


def predict_seconds(run: Run) -> float:
    """Step time of a run with gain 1."""
    stack, cluster = stack_of(run), cluster_of(run)
    kernels = KernelModel(
        device=cluster.device,
        attention=stack.attention,
        attention_dropout=stack.attention_dropout,
        linear_dtype=stack.linear_dtype,
    )
    model = StepModel(cluster=cluster, kernels=kernels, collectives=CollectiveModel(cluster=cluster), stack=stack)
    return model.step(stages_of(run, stack), plan_of(run)).step_s


def pairs_right(points: Sequence[Point], *, same_batch: bool = False) -> float:
    """Share of pairs in the right order among runs of one model, device and number of devices.

    Pairs closer than 2 % do not count; with ``same_batch`` neither do those of different global batches.
    """
    right = total = 0
    for plans in _problems(points, same_batch=same_batch):
        for i, (a, x) in enumerate(plans):
            for b, y in plans[:i]:
                if abs(a / b - 1) > 0.02:
                    total += 1
                    right += (a > b) == (x > y)
    return right / total if total else float("nan")


def regret_of(points: Sequence[Point]) -> float:
    """How much slower than the best plan the best predicted one is, on the mean over problems of one global batch."""
    regrets = [
        min(plans, key=lambda plan: plan[1])[0] / min(measured for measured, _ in plans) - 1
        for plans in _problems(points, same_batch=True)
        if len(plans) > 1
    ]
    return statistics.fmean(regrets) if regrets else float("nan")


def _problems(points: Sequence[Point], *, same_batch: bool) -> list[list[tuple[float, float]]]:
    """(measured, predicted) of the runs of each problem, source by source."""
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for p in points:
        r = p.run
        key = (r.source, r.model, r.heads, r.sequence, r.precision, r.gpu, r.num_devices)
        groups[*key, r.global_batch if same_batch else None].append((p.measured, p.predicted))
    return list(groups.values())


class Table:
    """Collects rows of the report and prints them."""

    def __init__(self) -> None:
        self.summary: dict[str, dict[str, float | int | None]] = {}

    def heading(self, text: str) -> None:
        print(f"\n{text}")
        print(
            f"{'source':<52} {'n':>4} {'skip':>4} {'mean%':>6} {'med%':>6} {'bias%':>6} {'gain':>6} {'left1out%':>9} "
            f"{'pairs':>6} {'batch':>6} {'regret%':>7}  worst"
        )

    def row(
        self,
        name: str,
        errors: Sequence[float],
        *,
        skipped: int = 0,
        worst: str = "",
        gain: float | None = None,
        left_out: float | None = None,
        pairs: float | None = None,
        same_batch: float | None = None,
        regret: float | None = None,
    ) -> None:
        """Print one source; ``errors`` are signed relative errors."""
        size = [abs(e) for e in errors]
        mean = statistics.fmean(size) if size else float("nan")
        bias = statistics.fmean(errors) if errors else float("nan")
        middle = statistics.median(size) if size else float("nan")
        print(
            f"{name[:52]:<52} {len(errors):>4} {skipped:>4} {100 * mean:>6.2f} {100 * middle:>6.2f} "
            f"{100 * bias:>+6.2f} "
            f"{_text(gain, 3):>6} {_text(left_out, 2, 100):>9} {_text(pairs, 3):>6} {_text(same_batch, 3):>6} "
            f"{_text(regret, 2, 100):>7}  {worst}"
        )
        self.summary[name] = {
            "n": len(errors),
            "skipped": skipped,
            "mape": _number(mean),
            "bias": _number(bias),
            "pairs": _number(pairs),
            "pairs_of_one_batch": _number(same_batch),
            "regret": _number(regret),
            "left_out": _number(left_out),
        }


def _number(value: float | None) -> float | None:
    return None if value is None or value != value else round(value, 5)


def _text(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "-" if value is None or value != value else f"{value * factor:.{digits}f}"


def worst_of(errors: Sequence[float], names: Sequence[str]) -> str:
    """Name and error of the worst row."""
    if not errors:
        return ""
    i = max(range(len(errors)), key=lambda j: abs(errors[j]))
    return f"{names[i]} {100 * errors[i]:+.0f}%"


def report_times(rows: Iterable[Mapping[str, str]], table: Table, gains: dict[str, float], *, fit: bool) -> None:
    """Step times of published runs, by source."""
    points: dict[str, list[Point]] = defaultdict(list)
    skipped: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        try:
            run = plan_as_run(parse(row))
            predicted = predict_seconds(run)
        except SkippedRowError as reason:
            skipped[row["source"]][str(reason)] += 1
            continue
        points[run.source].append(
            Point(run=run, stack=stack_of(run).name, measured=run.measured_s, predicted=predicted)
        )
    if fit:
        gains.update({s: fit_gain([p.measured / p.predicted for p in ps]) for s, ps in points.items()})
    table.heading("step time")
    stacks = {source: ps[0].stack for source, ps in points.items()}
    everything: list[float] = []
    assumed: list[float] = []
    means, left_outs = [], []
    for source, ps in points.items():
        alike = [gains[s] for s in gains if s != source and s in stacks and stacks[s] == ps[0].stack]
        gain = gains.get(source, statistics.median(alike) if alike else 1.0)
        errors = [p.predicted * gain / p.measured - 1 for p in ps]
        everything += errors
        assumed += [e for e, p in zip(errors, ps, strict=True) if p.run.assumed]
        means.append(statistics.fmean(abs(e) for e in errors))
        left_out = None
        if alike:
            other = statistics.median(alike)
            left_out = statistics.fmean(abs(p.predicted * other / p.measured - 1) for p in ps)
            left_outs.append(left_out)
        table.row(
            source,
            errors,
            skipped=sum(skipped[source].values()),
            worst=worst_of(errors, [p.run.id for p in ps]),
            gain=gain,
            left_out=left_out,
            pairs=pairs_right(ps),
            same_batch=pairs_right(ps, same_batch=True),
            regret=regret_of(ps),
        )
    every = [p for ps in points.values() for p in ps]
    num_skipped = sum(sum(c.values()) for c in skipped.values())
    table.row(
        "all",
        everything,
        skipped=num_skipped,
        pairs=pairs_right(every),
        same_batch=pairs_right(every, same_batch=True),
        regret=regret_of(every),
    )
    table.row("of these: micro-batch, stages or recompute assumed", assumed)
    print(f"mean of the sources {100 * statistics.fmean(means):.2f} %", end="")
    if left_outs:
        print(f"; leave one source out (gain from others of its software) {100 * statistics.fmean(left_outs):.2f} %")
    for source, reasons in skipped.items():
        print(f"skipped in {source[:50]}: {dict(reasons)}")
    with_memory = [p.run for p in every if p.run.memory_gib]
    if with_memory:
        report_published_memory(with_memory, table)


def report_published_memory(runs: Sequence[Run], table: Table) -> None:
    """Peak memory of published runs, nothing fitted per source."""
    by_source: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        # 80 GB is where these devices end: such rows only say that the plan did not fit.
        if run.memory_gib < 79:
            by_source[run.source].append(run)
    table.heading("peak memory of published runs")
    for source, rows in by_source.items():
        # Whole "GB" of nvidia-smi and of the sources' own meters are GiB.
        errors = [published_bytes(r, stack_of(r)) / (r.memory_gib * 2**30) - 1 for r in rows]
        table.row(f"memory: {source}", errors, worst=worst_of(errors, [r.id for r in rows]))


def report_small_memory(rows: Iterable[Mapping[str, str]], table: Table) -> None:
    """Peak allocated bytes of Megatron-Core's functional tests, nothing fitted."""
    errors: list[float] = []
    names = []
    skipped: Counter[str] = Counter()
    for row in rows:
        try:
            run = small_run(row)
        except SkippedRowError as reason:
            skipped[str(reason)] += 1
            continue
        errors.append(small_run_bytes(run, row) / float(row["mem_max_allocated_bytes"]) - 1)
        names.append(run.id)
    table.heading("peak memory of small runs, nothing fitted")
    table.row("memory_runs", errors, skipped=sum(skipped.values()), worst=worst_of(errors, names))
    print(f"skipped: {dict(skipped)}")


def report_collectives(rows: Sequence[Mapping[str, str]], table: Table) -> None:
    """Collectives: lines fitted per curve, then constants shared per machine."""
    found = curves(rows)
    fitted = fitted_errors(found)
    table.heading("collectives")
    left = len(rows) - sum(len(found[key]) for key in fitted)
    names = [" ".join(map(str, key)) for key in fitted]
    errors = list(fitted.values())
    table.row("collectives, fitted per curve (mean errors)", errors, skipped=left, worst=worst_of(errors, names))
    for hardware, (error, count) in shared_errors(found).items():
        table.row(f"collectives, shared constants: {hardware} ({count})", [error])


def main(arguments: Sequence[str]) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--fit", action="store_true", help="fit the residual gains to these files and store them")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    gains: dict[str, float] = json.loads(GAINS.read_text()) if GAINS.exists() else {}
    table = Table()
    times: list[dict[str, str]] = []
    for path in options.files:
        try:
            rows = read(path)
        except OSError as error:
            parser.error(f"{path}: {error.strerror}")
        if not rows:
            parser.error(f"{path} has no rows")
        if "mem_max_allocated_bytes" in rows[0]:
            report_small_memory(rows, table)
        elif "busbw_GBps" in rows[0]:
            report_collectives(rows, table)
        elif missing := {"id", "source", "model", "gpu", "iter_time_s"} - rows[0].keys():
            parser.error(
                f"{path} holds neither runs (no column {', '.join(sorted(missing))}) nor memory "
                f"(mem_max_allocated_bytes) nor collectives (busbw_GBps)"
            )
        else:
            times += rows
    if times:
        report_times(times, table, gains, fit=options.fit)
    if options.fit:
        GAINS.write_text(json.dumps({k: round(v, 4) for k, v in sorted(gains.items())}, indent=2) + "\n")
    print(f"\n{time.perf_counter() - start:.0f} s")
    print(json.dumps(table.summary))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
