"""The command line: ``autopar search | explain | dump | verify | simulate | calibrate | models``.

MODEL is ``file.py:factory``, a built-in name or a ``config.json`` of transformers.  Bad input gives one line on
standard error.  Exit codes: 0 done, 2 bad input, 3 nothing fits, 4 a check failed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from autopar.calibrate import calibrate
from autopar.capture import capture
from autopar.cli_dump import draw_schedule, with_grid_flag
from autopar.cli_options import WorkOptions, with_work_options
from autopar.cli_simulate import simulate_command
from autopar.cost_models.cluster import Cluster, default_calibration_path
from autopar.cost_models.errors import AutoparError, UsageError
from autopar.lower import Lowering
from autopar.models.catalogue import build, entry, names, needs_library
from autopar.models.load import LoadedModel
from autopar.passes.base import StepGraph
from autopar.plan import SEARCHED, Plan
from autopar.report.changes import diff_programs
from autopar.report.dump import FORMATS, dump
from autopar.report.text import duration, quantity
from autopar.report.weighed import weighed_document, weighed_table
from autopar.runtime.world import connect
from autopar.search.planner import Planner
from autopar.verify.api import verify as compare
from autopar.verify.report import Report

DONE, BAD_INPUT, NOTHING_FITS, CHECK_FAILED = 0, 2, 3, 4
_TABLE_WIDTH = 100

app = typer.Typer(
    help="Plan, show and check how a PyTorch model is split over many devices.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)

Model = Annotated[str, typer.Argument(help="file.py:factory, a built-in name, or a config.json.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="A plan to use instead of searching one.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="File to write to.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]

simulate = simulate = app.command("simulate")(simulate_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        words = with_grid_flag(sys.argv[1:] if arguments is None else arguments)
        code = app(args=words, prog_name="autopar", standalone_mode=False)
    except typer.TyperException as error:
        message = error.format_message()
    except AutoparError as error:
        message = str(error)
    except typer.Abort:
        message = "stopped"
    else:
        return code if isinstance(code, int) else DONE
    if message:
        _complain(message)
    return BAD_INPUT


@app.command()
@with_work_options
def search(
    model: Model,
    *,
    output: Output = None,
    time_limit: Annotated[float | None, typer.Option(min=0.0, help="Seconds that the search may take.")] = None,
    as_json: AsJson = False,
    work: WorkOptions,
) -> int:
    """Find the plan for MODEL on a cluster, say what a step costs and why the other plans lose."""
    if work.cluster is None:
        raise UsageError("search needs --cluster, such as 2x8xH100 or a JSON file")
    loaded, cluster = work.load(model), work.ranks()
    step = _captured(loaded)
    planner = Planner(step, cluster, work.constraints(), work.optimizer)
    with _busy("searching"):
        ranking = planner.rank(cluster.num_devices, time_limit_s=time_limit)
        plan = planner.plan(ranking)
    if output is not None:
        plan.save(output)
    assumed = assumptions(loaded, step, cluster, work)
    if as_json:
        document = json.loads(plan.to_json()) | {SEARCHED: weighed_document(ranking, assumed)}
        _write(json.dumps(document, indent=1, allow_nan=False), None)
    else:
        _write(f"{assumed}\n\n{weighed_table(ranking)}\n\n{plan.explain()}", None)
    best, budget = ranking.best, quantity(ranking.budget_bytes, "B")
    if best.fits or best.price is None:
        return DONE
    needed = f"{quantity(best.price.peak_bytes, 'B')} ({best.candidate.text()}), most of it {best.price.owner}"
    _complain(f"nothing fits: the smallest peak found is {needed}; a rank may use {budget}")
    return NOTHING_FITS


@app.command()
def explain(
    plan: Annotated[Path, typer.Argument(help="A plan that search wrote.")],
    *,
    diff: Annotated[Path | None, typer.Option(help="Another plan: show what changes.")] = None,
    as_json: AsJson = False,
) -> int:
    """Show a saved plan: what is split where, bytes, predicted cost."""
    loaded = Plan.load(plan)
    if diff is not None:
        text = loaded.diff(Plan.load(diff)) or "no difference"
    else:
        text = loaded.to_json() if as_json else loaded.explain()
    _write(text, None)
    return DONE


@app.command("dump")
@with_work_options
def dump_command(
    model: Model,
    *,
    plan: PlanFile = None,
    rank: Annotated[int, typer.Option(help="Whose program.")] = 0,
    format: Annotated[str, typer.Option(help=", ".join(FORMATS))] = "text",
    layer: Annotated[str | None, typer.Option(help="Layers by pattern: 'blocks.0', 'blocks.*.mlp', '**.norm'.")] = None,
    only: Annotated[
        str | None, typer.Option(help="collectives, parameters, buffers, inputs, gradients or computation.")
    ] = None,
    fold: Annotated[bool | None, typer.Option(help="Leave out copies of a block that was shown.")] = None,
    diff: Annotated[Path | None, typer.Option(help="Another plan: show what its program does otherwise.")] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="Draw the schedule, ranks by time; so does --schedule without a name.")
    ] = False,
    output: Output = None,
    as_json: AsJson = False,
    work: WorkOptions,
) -> int:
    """Show the program of one rank, as Python, JSON, dot or SVG, or the schedule of all."""
    loaded = work.load(model)
    step, chosen = _plan(loaded, work, plan)
    if grid:
        cluster = work.ranks() if plan is None or work.cluster else Cluster.local(chosen.world_size)
        _write(draw_schedule(step, chosen, cluster, format), output)
        return DONE
    if not 0 <= rank < chosen.world_size:
        raise UsageError(f"rank {rank} is not one of the plan's {chosen.world_size}; use 0 to {chosen.world_size - 1}")
    program = Lowering(step, chosen).program(rank)
    if diff is not None:
        other = Plan.load(diff)
        other.check(step)
        text = diff_programs(program, Lowering(step, other).program(rank), layer=layer) or "no difference"
    else:
        text = dump(program, "json" if as_json else format, layer=layer, only=only, folds=fold)
    _write(text, output)
    return DONE


@app.command()
@with_work_options
def verify(model: Model, *, plan: PlanFile = None, as_json: AsJson = False, work: WorkOptions) -> int:
    """Run the programs of all ranks in this process and compare every output with one device."""
    loaded = work.load(model, device="cpu")
    chosen = Plan.load(plan) if plan is not None else _plan(loaded, work, None)[1]
    with _busy("running all ranks"):
        report = compare(loaded.model, loaded.args, loaded.kwargs, plan=chosen, loss_fn=loaded.loss_fn)
    _write(_report_json(report) if as_json else report.text(), None)
    return DONE if report.ok else CHECK_FAILED


@app.command("calibrate")
def calibrate_command(
    *,
    output: Output = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default the accelerator, if any.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each measurement; the first quartile counts.")] = 8,
    as_json: AsJson = False,
) -> int:
    """Measure this machine, and under torchrun its links, and write a cluster file that plans for it can use."""
    place = _device(device)
    path = default_calibration_path() if output is None else output
    alone = not dist.is_initialized()
    world = connect(place)
    with Progress(console=Console(stderr=True), transient=True, disable=world.rank > 0) as progress:
        task = progress.add_task("measuring", total=1.0)
        cluster, rows = calibrate(
            device=place,
            repeats=repeats,
            report=lambda name, share: progress.update(task, description=f"measured {name}", completed=share),
        )
    if alone and dist.is_initialized():
        dist.destroy_process_group()
    if world.rank > 0:
        return DONE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        cluster.to_file(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error
    if as_json:
        _write(json.dumps(cluster.to_json(), indent=1), None)
        return DONE
    table = Table("measured", "size", "time", box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(row.name, f"{row.size:,}", duration(row.seconds))
    Console(width=max(Console().width, _TABLE_WIDTH)).print(table)
    _write(f"{cluster.num_devices} x {cluster.device.name}, written to {path}", None)
    return DONE


def _device(name: str | None) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"{name!r} is no device; use one like cpu or cuda") from error
    if device.type != "cpu" and (accelerator is None or device.type != accelerator.type):
        raise UsageError(
            f"there is no {device.type} device here; use cpu" + (f" or {accelerator}" if accelerator else "")
        )
    return device


@app.command()
def models(*, as_json: AsJson = False) -> int:
    """List the built-in models."""
    with _busy("building them without weights"):
        rows = [_listed(name) for name in names()]
    if as_json:
        document = {"format": "autopar models", "schema": 1, "models": [dataclasses.asdict(row) for row in rows]}
        _write(json.dumps(document, indent=1), None)
        return DONE
    table = Table("name", "parameters", "dtype", "sequence", "", box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        count = "-" if row.parameters is None else quantity(row.parameters, "")
        table.add_row(row.name, count, row.dtype, "-" if row.sequence is None else str(row.sequence), row.about)
    Console(width=max(Console().width, _TABLE_WIDTH)).print(table)
    return DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """A built-in model as ``models`` shows it; ``parameters`` is None where its library is not installed."""

    name: str
    parameters: int | None
    dtype: str
    sequence: int | None
    about: str


def _listed(name: str) -> _Listed:
    found = entry(name)
    count = None
    if not needs_library(name):
        model, *_ = build(name, batch=1)
        count = sum(p.numel() for p in model.parameters())
    dtype = str(found.dtype).removeprefix("torch.")
    return _Listed(name=name, parameters=count, dtype=dtype, sequence=found.sequence, about=found.about)


def _plan(loaded: LoadedModel, work: WorkOptions, file: Path | None) -> tuple[StepGraph, Plan]:
    """The captured step and the plan of ``file``, else one that is searched."""
    constraints, cluster = work.constraints(), work.ranks()
    step = _captured(loaded)
    if file is not None:
        plan = Plan.load(file)
        plan.check(step)
        return step, plan
    with _busy("searching"):
        return step, Planner(step, cluster, constraints, work.optimizer).best(cluster.num_devices)


def _captured(loaded: LoadedModel) -> StepGraph:
    with _busy(f"capturing {loaded.name}"):
        return capture(loaded.model, loaded.args, loaded.kwargs, loss_fn=loaded.loss_fn)


def assumptions(loaded: LoadedModel, step: StepGraph, cluster: Cluster, work: WorkOptions) -> str:
    """What a prediction rests on, in two lines: the call, the optimizer, the machine's figures."""
    batch = [
        f"{spec.name} {list(node.meta['val'].shape)}"
        for spec, node in zip(step.inputs, step.placeholders, strict=True)
        if spec.leaf >= 0
    ]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in loaded.model.parameters()})
    device = cluster.device
    peaks = ", ".join(f"{dtype} {quantity(peak, 'FLOP/s')}" for dtype, peak in device.peak_flops.items())
    links = ", ".join(
        f"{level.name} of {level.fanout} at {quantity(level.device_bytes_per_s, 'B/s')}" for level in cluster.levels
    )
    return (
        f"{loaded.name} on {work.cluster}: parameters in {', '.join(dtypes)}; a step takes {', '.join(batch)}\n"
        f"assumed: {work.optimizer} with its state in the parameters' dtype; eager kernels; {device.name} with "
        f"{quantity(device.memory_bytes, 'B')}, peaks {peaks}; a device's share of the links, one direction: {links}"
    )


def _report_json(report: Report) -> str:
    rows = [{**dataclasses.asdict(row), "kind": row.kind.value} for row in report.rows]
    mismatch = None if report.first_mismatch is None else str(report.first_mismatch)
    document = {"format": "autopar verify", "schema": 1, "ok": report.ok, "rows": rows, "first_mismatch": mismatch}
    return json.dumps(document, indent=1)


def _write(text: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(text + "\n")
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error}") from error


def _complain(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"autopar: {text}", markup=False, highlight=False)


@contextmanager
def _busy(text: str) -> Iterator[None]:
    """Say on a terminal what takes a while."""
    with Console(stderr=True).status(text):
        yield
