"""Time and memory of planning Llama-3 405B for pp 16 x tp 8 x dp 128, built on meta: one rank's program is emitted.

    python tests/benchmarks/plan_llama405b.py [--rank N] [--json]

Prints seconds a station, the peak of resident memory and the number of lines of the program's text; the goal is 120 s,
4 GB and 3,000 lines on two cores.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

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
    times: dict[str, float] = {}
    last = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        times[name], last = now - last, now

    model, args, kwargs, loss_fn = build("llama3-405b", batch=DP * MICROBATCHES, sequence=options.sequence)
    lap("build")
    step = capture(model, args, kwargs, loss_fn=loss_fn)
    lap("capture")
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
    lap("plan")
    program = Lowering(step, plan).program(options.rank)
    lap("emit")
    text = dump(program)
    lap("text")
    if options.text:
        with open(options.text, "w", encoding="utf-8") as file:
            file.write(text)
    figures = {
        "seconds": {name: round(value, 2) for name, value in times.items()},
        "total_s": round(sum(times.values()), 2),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
        "nodes_captured": len(step.graph.nodes),
        "nodes_emitted": len(program.graph_module.graph.nodes),
        "lines": len(text.splitlines()),
    }
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    for name, value in figures.items():
        sys.stdout.write(f"{name}: {value}\n")


if __name__ == "__main__":
    main()
