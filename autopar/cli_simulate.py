"""``autopar simulate``: the programs of a plan through the timeline, as figures and as a trace for Perfetto."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autopar.capture import capture
from autopar.cost_models.cluster import Cluster
from autopar.cost_models.errors import UsageError
from autopar.cost_models.timeline import summary
from autopar.lower import Lowering
from autopar.models.catalogue import build, names, needs_library
from autopar.models.load import LoadedModel, load_model
from autopar.passes.program_cost import ProgramCost, predict
from autopar.plan import Plan
from autopar.report.text import duration, quantity, table
from autopar.search.price import state_factor


def simulate_command(  # noqa: PLR0913 - the options of a command
    plan: Annotated[Path, typer.Argument(help="A plan that search wrote.")],
    model: Annotated[
        str | None, typer.Argument(help="What it is for: file.py:factory, a built-in name (found when left out), ...")
    ] = None,
    *,
    cluster: Annotated[
        str | None, typer.Option(help="2x8xH100, or a JSON file; by default this machine as it was calibrated.")
    ] = None,
    global_batch: Annotated[int | None, typer.Option(help="Rows of the global batch; by default the plan's.")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens in a row; by default the plan's.")] = None,
    optimizer: Annotated[str, typer.Option(help="Whose state is counted as memory.")] = "adamw",
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace, for ui.perfetto.dev.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> int:
    """Simulate one step of a plan: time, exposed communication, bubble and memory, and a trace of every stage."""
    chosen = Plan.load(plan)
    where = Cluster.local(chosen.world_size) if cluster is None else Cluster.parse(cluster)
    if where.num_devices < chosen.world_size:
        raise UsageError(
            f"the plan is for {chosen.world_size} ranks and {cluster or 'this machine'} has {where.num_devices} "
            "devices; give a larger --cluster"
        )
    loaded = _model_of(chosen, model, global_batch, sequence)
    with Console(stderr=True).status("simulating"):
        step = capture(loaded.model, loaded.args, loaded.kwargs, loss_fn=loaded.loss_fn)
        chosen.check(step)
        lowering = Lowering(step, chosen)
        size = chosen.dp * chosen.tp
        programs = [lowering.program(stage * size) for stage in range(chosen.pp)]
        cost = predict(programs, where, optimizer_bytes_per_parameter_byte=state_factor(optimizer), memory=True)
    if trace is not None:
        _write_trace(cost, trace)
    document = _document(cost, loaded.name, where.name)
    sys.stdout.write((json.dumps(document, indent=1) if as_json else _text(cost, document, trace)) + "\n")
    return 0


def _model_of(plan: Plan, model: str | None, batch: int | None, sequence: int | None) -> LoadedModel:
    """The model, called with the batch that the plan was made for.

    Raises:
        UsageError: no model was named and no built-in one has the plan's parameters.
    """
    is_factory = model is not None and model.rpartition(":")[0].endswith(".py")
    if not is_factory:
        shape = next((info.shape for info in plan.tensors.values() if info.kind == "batch"), ())
        batch = batch or (shape[0] if shape else None)
        sequence = sequence or (shape[1] if len(shape) == 2 else None)
    return load_model(model or built_in(plan), batch=batch, sequence=sequence)


def built_in(plan: Plan) -> str:
    """The built-in model whose parameters are the plan's.

    Raises:
        UsageError: there is none.
    """
    want = {name: info.shape for name, info in plan.tensors.items() if info.kind == "parameter"}
    for name in names():
        if needs_library(name):
            continue
        made, *_ = build(name, batch=1)
        if want == {key: tuple(value.shape) for key, value in made.named_parameters()}:
            return name
    raise UsageError(
        "the plan is for none of the built-in models: name its model after it, as for search (file.py:factory or a "
        "config.json)"
    )


def _write_trace(cost: ProgramCost, path: Path) -> None:
    try:
        path.write_text(cost.timeline.trace_text(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error


def _document(cost: ProgramCost, model: str, cluster: str) -> dict[str, object]:
    timeline = cost.timeline
    ranks = [
        {
            "stage": rank,
            "compute_s": timeline.busy_s(rank),
            "exposed_s": timeline.exposed_s(rank),
            "bubble": timeline.bubble(rank),
            "peak_bytes": timeline.peak_bytes(rank),
        }
        for rank in range(len(timeline.programs))
    ]
    return {
        "format": "autopar simulation",
        "schema": 1,
        "model": model,
        "cluster": cluster,
        "step_s": cost.step_s,
        "optimizer_s": cost.optimizer_s,
        "peak_bytes": cost.peak.bytes,
        "owners": [{"layer": layer, "kind": kind, "bytes": size} for layer, kind, size in cost.peak.owners[:8]],
        "sent_bytes": dict(cost.sent_bytes),
        "by_bytes": list(cost.by_bytes),
        "stages": ranks,
    }


def _text(cost: ProgramCost, document: dict[str, object], trace: Path | None) -> str:
    figures = summary(cost.timeline)
    rows = [
        [
            str(rank),
            duration(cost.timeline.busy_s(rank)),
            duration(cost.timeline.exposed_s(rank)),
            f"{cost.timeline.bubble(rank):.1%}",
            quantity(cost.timeline.peak_bytes(rank), "B"),
        ]
        for rank in range(len(cost.timeline.programs))
    ]
    owners = ", ".join(f"{layer or 'model'} {kind} {quantity(size, 'B')}" for layer, kind, size in cost.peak.owners[:3])
    lines = [
        f"{document['model']} on {document['cluster']}: a step takes {duration(cost.step_s)}, of which "
        f"{duration(figures['compute_s'])} computing, {duration(figures['exposed_s'])} exposed communication and "
        f"{duration(cost.optimizer_s)} the optimizer",
        f"the peak is {quantity(cost.peak.bytes, 'B')}; most of it: {owners}",
        "",
        *table([["stage", "computing", "exposed communication", "idle", "peak memory"], *rows], right=range(1, 5)),
    ]
    if cost.by_bytes:
        lines.append(f"priced by their bytes alone: {', '.join(cost.by_bytes)}")
    if trace is not None:
        lines.append(f"trace written to {trace}; open it in ui.perfetto.dev")
    return "\n".join(lines)
