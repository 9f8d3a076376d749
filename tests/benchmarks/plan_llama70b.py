"""Time and memory of planning Llama-3 70B for an 8 x 8 mesh: captured on meta, split, one rank's program emitted.

    python tests/benchmarks/plan_llama70b.py [--json]

Prints seconds a station and the peak of resident memory; the goal is 60 s and 3 GB on two cores.
"""

from __future__ import annotations

import argparse
from collections import Counter

from stations import Stations

from autopar.capture import capture
from autopar.cost_models.cluster import Cluster
from autopar.lower import Lowering
from autopar.models.catalogue import build
from autopar.passes.torch_ops import is_collective
from autopar.plan import Constraints
from autopar.search.planner import Planner


def main() -> None:
    """Run all stations once and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    stations = Stations()
    model, args, kwargs, loss_fn = build("llama3-70b", batch=options.batch, sequence=options.sequence)
    stations.done("build")
    step = capture(model, args, kwargs, loss_fn=loss_fn)
    stations.done("capture")
    plan = Planner(step, Cluster.parse("8x8xH100"), Constraints(dp=8, tp=8, pp=1, zero=3)).best(64)
    stations.done("plan")
    program = Lowering(step, plan).program(0)
    stations.done("emit")
    nodes = list(program.graph_module.graph.nodes)
    collectives = Counter(n.target._schema.name.split("::")[1] for n in nodes if is_collective(n))
    stations.report(
        as_json=options.json,
        nodes_captured=len(step.graph.nodes),
        nodes_emitted=len(nodes),
        collectives=dict(collectives),
    )


if __name__ == "__main__":
    main()
