"""How long the static proof takes: do the communications of all ranks fit, and does nobody wait for ever?

    python tests/benchmarks/proof_speed.py

The programs of all ranks are emitted (not timed) and handed to ``autopar.verify.check_programs``.  Goal: under 2 s for
64 ranks with 1F1B and 32 micro-batches.  With thousands of ranks, those of one stage share a program, as symmetric
ranks do.  Seconds are also told in times of a loop of a million additions in the same run.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable

import torch

from autopar.capture import capture
from autopar.cost_models.cluster import Cluster
from autopar.lower import Lowering
from autopar.models.gpt import GPT, GPTConfig
from autopar.passes.base import Program
from autopar.plan import Constraints
from autopar.search.planner import Planner
from autopar.verify import check_programs

GOAL_S = 2.0
ROUNDS = 3
COUNT = 32
# dp, tp, pp, schedule, whether the ranks of a stage share one program
CASES = (
    (4, 2, 8, "1f1b", False),
    (1, 1, 64, "1f1b", False),
    (4, 2, 8, "zb", False),
    (4, 2, 8, "interleaved", False),
    (128, 8, 4, "1f1b", True),
)


def main() -> None:
    """Emit, check, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    reference_s = fastest(lambda: sum(i + 1 for i in range(1_000_000)))
    print(f"{'plan':26}{'ranks':>7}{'programs':>10}{'nodes':>9}{'seconds':>9}{'references':>12}")
    rows = []
    for dp, tp, pp, schedule, shared in CASES:
        programs = emitted(dp, tp, pp, schedule, shared=shared)
        different = {id(p.graph_module): p for p in programs}
        row = {
            "plan": f"dp{dp}.tp{tp}.pp{pp}.m{COUNT}.{schedule}",
            "ranks": len(programs),
            "programs": len(different),
            "nodes": sum(len(p.graph_module.graph.nodes) for p in different.values()),
            "seconds": fastest(lambda programs=programs: check_programs(programs)),
        }
        row["references"] = row["seconds"] / reference_s
        rows.append(row)
        print(
            f"{row['plan']:26}{row['ranks']:7,}{row['programs']:10}{row['nodes']:9,}{row['seconds']:9.3f}"
            f"{row['references']:12.1f}"
        )
    print(f"goal: {GOAL_S:.0f} s for 64 ranks with 1f1b")
    print(json.dumps({"rows": rows, "reference_s": reference_s, "goal_s": GOAL_S}))


def emitted(dp: int, tp: int, pp: int, schedule: str, *, shared: bool) -> list[Program]:
    """The programs of all ranks for a GPT with a block a stage, two where a rank has two stages."""
    torch.manual_seed(0)
    depth = pp * (2 if schedule == "interleaved" else 1)
    config = GPTConfig(num_layers=depth, width=16 * tp, num_heads=tp, sequence=8, vocabulary=32)
    ids = torch.randint(0, 32, (dp * COUNT, 8))
    step = capture(GPT(config), (ids, ids))
    size = dp * tp * pp
    wishes = Constraints(dp=dp, tp=tp, pp=pp, microbatches=COUNT, schedule=schedule, recompute="none", zero=0)
    lowering = Lowering(step, Planner(step, Cluster.local(size), wishes).best(size))
    if not shared:
        return [lowering.program(rank) for rank in range(size)]
    firsts = [lowering.program(stage * dp * tp) for stage in range(pp)]
    return [dataclasses.replace(firsts[rank // (dp * tp)], rank=rank) for rank in range(size)]


def fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs: what else the machine does only adds."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


if __name__ == "__main__":
    sys.exit(main())
