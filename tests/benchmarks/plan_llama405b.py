"""Time and memory of planning Llama-3 405B for pp 16 x tp 8 x dp 128, built on meta: one rank's program is emitted.

    python tests/benchmarks/plan_llama405b.py [--rank N] [--json]

Prints seconds a station, the peak of resident memory and the number of lines of the program's text; the goal is 120 s,
4 GB and 3,000 lines on two cores.
"""

from __future__ import annotations

import argparse

from stations import Stations

from autopar.capture import capture
from autopar.cost_models.cluster import Cluster
from autopar.lower import Lowering
from autopar.models.catalogue import build
from autopar.plan import Constraints
from autopar.report.dump import dump
from autopar.search.planner import Planner

PP, TP, DP, MICROBATCHES = 16, 8, 128, 32


def main() -> None:
    """Run all stations once and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rank", type=int, default=5 * TP * DP, help="whose program; by default one of the middle")
    parser.add_argument("--text", help="write the program's text to this file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    stations = Stations()
    model, args, kwargs, loss_fn = build("llama3-405b", batch=DP * MICROBATCHES, sequence=options.sequence)
    stations.done("build")
    step = capture(model, args, kwargs, loss_fn=loss_fn)
    stations.done("capture")
    wishes = Constraints(
        dp=DP,
        tp=TP,
        pp=PP,
        microbatches=MICROBATCHES,
        schedule=options.schedule,
        zero=0,
        recompute="none",
        sequence_parallel=False,
    )
    plan = Planner(step, Cluster.parse(f"{PP * DP}x{TP}xH100"), wishes).best(PP * TP * DP)
    stations.done("plan")
    program = Lowering(step, plan).program(options.rank)
    stations.done("emit")
    text = dump(program)
    stations.done("text")
    if options.text:
        with open(options.text, "w", encoding="utf-8") as file:
            file.write(text)
    stations.report(
        as_json=options.json,
        nodes_captured=len(step.graph.nodes),
        nodes_emitted=len(program.graph_module.graph.nodes),
        lines=len(text.splitlines()),
    )


if __name__ == "__main__":
    main()
