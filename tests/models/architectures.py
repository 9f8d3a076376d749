"""Every architecture of :mod:`tests.models.recipes`, split and compared with one device; run it to print the table.

python -m tests.models.architectures [--plans tp2,zero3.dp2] [--only NAME,NAME]
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from autopar.capture import capture, flatten_call
from autopar.cost_models.cluster import Cluster
from autopar.cost_models.errors import AutoparError, CaptureError
from autopar.lower import Lowering, Prepared
from autopar.passes.base import OutputKind, Program, StepGraph
from autopar.plan import Constraints, Plan
from autopar.search.first_choice import row_flops
from autopar.search.planner import Planner
from autopar.verify import check_programs, verify_programs
from autopar.verify.parity import run_single
from autopar.verify.values import input_values, model_values
from tests.models.recipes import RECIPES, Call, Recipe

PLANS: Mapping[str, Mapping[str, Any]] = {
    "tp2": {"tp": 2},
    "zero3.dp2": {"dp": 2, "zero": 3},
    "tp2.sp": {"tp": 2, "sequence_parallel": True},
    "dp2.tp2": {"dp": 2, "tp": 2},
    "dp2.tp2.zero3.sp": {"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True},
}


def convolution_work(node: fx.Node) -> int:
    """Every output (input, where transposed) meets the kernel once.  (torch's own formula forgets groups backward.)"""
    forward = len(node.args) == 9
    large, small, weight = (node, *node.args[:2]) if forward else node.args[:3]
    transposed = node.args[-3] if forward else node.args[-4]
    times = 1 if forward else sum(node.args[-1][:2])
    return 2 * times * value(small if transposed else large).numel() * value(weight)[0].numel()


def grouped_work(node: fx.Node) -> int:
    """Every row meets the matrix of its group; backward twice."""
    times = 1 if isinstance(value(node), torch.Tensor) else 2
    return 2 * times * value(node.args[0]).numel() * value(node.args[1]).shape[-1]


def value(node: Any) -> Any:  # noqa: ANN401 - a node of whatever kind
    return node.meta["val"]


# torch has no formula for attention on CPU: it is the work of attention on CUDA.
ATTENTION = "aten._scaled_dot_product_flash_attention"
TORCH: Mapping[str, Callable[..., int]] = {str(packet): formula for packet, formula in flop_registry.items()}
OF_TORCH = TORCH | {f"{ATTENTION}_for_cpu{half}": TORCH[ATTENTION + half] for half in ("", "_backward")}
OWN: Mapping[str, Callable[[fx.Node], int]] = {
    "aten.convolution": convolution_work,
    "aten.convolution_backward": convolution_work,
    "transformers.grouped_mm_fallback": grouped_work,
    "transformers.grouped_mm_fallback_backward": grouped_work,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row of the table.

    Attributes:
        name: of the architecture.
        parameters: how many numbers it trains.
        nodes: calls in the captured step.
        plan: what was asked for.
        result: "equal", "WRONG: ...", "refused: ..." (an AutoparError) or "CRASHED: ...".
        split: share of the work of contractions that is split over the ranks.
        whole: operations that ran on every rank for lack of a rule, with their number of calls.
        unsplit: contractions that a tensor axis leaves whole, largest first.
        seconds: of planning, lowering and comparing.
    """

    name: str
    parameters: int
    nodes: int
    plan: str
    result: str
    split: float
    whole: Mapping[str, int]
    unsplit: Sequence[str] = ()
    seconds: float = 0.0


def outcomes(recipe: Recipe, plans: Sequence[str]) -> list[Outcome]:
    """The rows of one architecture, one a plan; what autopar refuses, and a crash, are rows too."""
    torch.manual_seed(0)
    call = recipe.make()
    call.model.train()
    parameters = sum(p.numel() for p in call.model.parameters())
    try:
        step = capture(call.model, call.args, call.kwargs, loss_fn=call.loss_fn)
    except CaptureError as error:
        result = f"refused: {error}"
        return [Outcome(name=recipe.name, parameters=parameters, nodes=0, plan="", result=result, split=0.0, whole={})]
    leaves, _, _ = flatten_call(call.args, call.kwargs, ())
    values = model_values(step, call.model, leaves)
    fault = difference_from_eager(call, step, values)
    if fault:
        return [Outcome(name=recipe.name, parameters=parameters, nodes=0, plan="", result=fault, split=0.0, whole={})]
    return [compare(recipe.name, parameters, step, values, plan) for plan in plans]


def difference_from_eager(call: Call, step: StepGraph, values: Mapping[str, Any]) -> str:
    """How the captured step, run on one device, differs from the model and ``loss.backward()``; "" if not at all."""
    model = copy.deepcopy(call.model)  # running statistics change, and ``values`` share the original's memory
    torch.manual_seed(1)
    outputs = run_single(step, input_values(step, values))
    torch.manual_seed(1)
    out = model(*call.args, **call.kwargs)
    loss = call.loss_fn(out) if call.loss_fn else getattr(out, "loss", out)
    loss.backward()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    scale = max(float(p.grad.abs().max()) for p in parameters.values() if p.grad is not None)
    for spec, got in zip(step.outputs, outputs, strict=True):
        if spec.kind is OutputKind.LOSS and not torch.allclose(got, loss, rtol=1e-5):
            return f"WRONG: captured, the loss is {got}; the model's is {loss}"
        if spec.kind is OutputKind.GRADIENT:
            want = parameters[spec.name].grad
            if (got is None) != (want is None) or (got is not None and float((got - want).abs().max()) > 1e-4 * scale):
                return f"WRONG: captured, the gradient of {spec.name} is not the model's"
    return ""


def compare(name: str, parameters: int, step: StepGraph, values: Mapping[str, Any], plan_name: str) -> Outcome:
    """One plan of one captured step, in lockstep with one device."""
    sizes = {"dp": 1, "tp": 1, "pp": 1} | dict(PLANS[plan_name])
    world_size = math.prod(sizes[a] for a in ("dp", "tp", "pp"))
    start = time.perf_counter()
    split, whole, reasons = 0.0, dict[str, int](), list[str]()
    try:
        planner = Planner(step, Cluster.local(world_size), Constraints(**sizes))
        plan = planner.best(world_size)
        prepared = planner.prepared(step, split_batch=plan.dp > 1)
        whole = calls_without_rule(prepared)
        reasons = unsplit_contractions(plan, prepared, "tp") if plan.tp > 1 else []
        lowering = Lowering(step, plan, rng="exact")
        programs = [lowering.program(rank) for rank in range(world_size)]
        check_programs(programs)
        split = split_share(step, programs)
        report = verify_programs(step, programs, values)
        result = "equal" if report.ok else f"WRONG: {report.first_mismatch or report.worst}"
    except AutoparError as error:
        result = f"refused: {type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - a crash is a row of the table, and makes the program fail
        result = f"CRASHED: {error!r}"
    return Outcome(
        name=name, parameters=parameters, nodes=sum(n.op == "call_function" for n in step.graph.nodes), plan=plan_name,
        result=result, split=split, whole=whole, unsplit=reasons, seconds=time.perf_counter() - start,
    )  # fmt: skip


def split_share(step: StepGraph, programs: Sequence[Program]) -> float:
    """Share of one device's contractions that is split, counted in the programs: 1 where each rank does 1/n of them."""
    whole, most = work(step.graph), max(work(p.graph_module.graph) for p in programs)
    ranks = len(programs)
    return (1 - most / whole) * ranks / (ranks - 1) if whole else 0.0


def work(graph: fx.Graph) -> int:
    """Floating-point operations of a graph's contractions, by torch's own formulas and the shapes of its values."""
    total = 0
    for node in graph.nodes:
        name = str(getattr(node.target, "overloadpacket", ""))
        if name in OWN:
            total += OWN[name](node)
        elif name in OF_TORCH:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
            total += OF_TORCH[name](*args, **kwargs, out_val=value(node))
    return total


def calls_without_rule(prepared: Prepared) -> dict[str, int]:
    """Operations without a rule and how often they are called."""
    found: dict[str, int] = {}
    for node in prepared.unknown:
        found[str(node.target)] = found.get(str(node.target), 0) + 1
    return found


def unsplit_contractions(plan: Plan, prepared: Prepared, axis: str) -> list[str]:
    """The contractions that every rank of ``axis`` runs whole, largest first: where to look when little is split."""
    index = plan.mesh.axes.index(axis)
    found = [
        (row_flops(node, row), f"{node.meta.get('phase')} {node.meta.get('layer')}: {node.format_node()}")
        for node, row in prepared.rows.items()
        if row_flops(node, row) and (node.name not in plan.choices or plan.choices[node.name][index] == "R")
    ]
    return [f"{flops:.0f} {text}" for flops, text in sorted(found, reverse=True)]


def table(found: Sequence[Outcome]) -> str:
    """Markdown: one line an architecture, its plans side by side."""
    plans = list(dict.fromkeys(o.plan for o in found if o.plan))
    lines = [
        "| architecture | parameters | calls | " + " | ".join(plans) + " | without a rule |",
        "| --- | ---: | ---: |" + " --- |" * len(plans) + " --- |",
    ]
    for name in dict.fromkeys(o.name for o in found):
        rows = {o.plan: o for o in found if o.name == name}
        first = next(iter(rows.values()))
        whole = dict(sorted({op: n for o in rows.values() for op, n in o.whole.items()}.items()))
        cells = [cell(rows.get(plan)) for plan in plans] if first.plan else [first.result, *[""] * (len(plans) - 1)]
        listed = ", ".join(f"{op} ({n})" for op, n in whole.items()) or "none"
        lines.append(f"| {name} | {first.parameters:,} | {first.nodes} | {' | '.join(cells)} | {listed} |")
    return "\n".join(lines)


def cell(outcome: Outcome | None) -> str:
    """``equal, 98%``: the result and the share of the work that is split."""
    if outcome is None:
        return ""
    ran = not outcome.result.startswith(("refused", "CRASHED"))
    return f"{outcome.result}, {outcome.split:.0%}" if ran else outcome.result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", default="tp2,zero3.dp2", help=f"some of {', '.join(PLANS)}")
    parser.add_argument("--why", action="store_true", help="also say which contractions a tensor axis leaves whole")
    parser.add_argument("--only", default="", help="names of architectures; all by default")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    wanted = options.only.split(",") if options.only else []
    found: list[Outcome] = []
    for recipe in RECIPES:
        if not wanted or any(w.lower() in recipe.name.lower() for w in wanted):
            for row in outcomes(recipe, options.plans.split(",")):
                print(f"{row.name} {row.plan}: {cell(row)} [{row.seconds:.1f} s]", file=sys.stderr, flush=True)
                if options.why:
                    print(*(f"  {line}" for line in row.unsplit), sep="\n", file=sys.stderr)
                found.append(row)
    print(table(found))
    wrong = sum(o.result.startswith(("WRONG", "CRASHED")) for o in found)
    refused = sum(o.result.startswith("refused") for o in found)
    names = {o.name for o in found}
    print(f"\n{len(names)} architectures, {len(found)} rows: {wrong} wrong or crashed, {refused} refused")
    return 4 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
