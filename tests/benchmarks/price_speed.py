"""How fast the cost models are: redistributions priced a second, and one plan of Llama-3 405B evaluated.

    python tests/benchmarks/price_speed.py

Redistributions: every pair of layouts of a matrix on an 8 x 8 mesh (the steps that the rewriter would insert), priced
for many sizes of the matrix at once.  The plan: stages of a captured block and head, their computations and
communications priced and its pipeline's schedule timed; the block is captured before.  Goals: a million prices a
second, 50 ms a plan.  Both are also told in times of a pass over a million numbers (a square root) in the same run.
The last line is JSON.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

from replay_rows import Run, plan_of, stages_of  # noqa: E402
from replay_stacks import MEGATRON_CORE  # noqa: E402

from autopar.cost_models.cluster import Cluster  # noqa: E402
from autopar.cost_models.collectives import Collective, CollectiveModel  # noqa: E402
from autopar.cost_models.compute import KernelModel  # noqa: E402
from autopar.cost_models.step import StepModel  # noqa: E402
from autopar.passes.placement import Layout, Partial, Replicate, Shard, compatible  # noqa: E402
from autopar.passes.redistribute import StepKind, steps  # noqa: E402

SIZES = {"dp": 8, "tp": 8}
NUM_SIZES = 20_000
ROUNDS = 5
COLLECTIVES = {
    StepKind.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
    StepKind.ALL_REDUCE: Collective.ALL_REDUCE,
    StepKind.ALL_TO_ALL: Collective.ALL_TO_ALL,
    StepKind.ALL_GATHER: Collective.ALL_GATHER,
}


def main() -> None:
    """Measure both and print."""
    reference_s = seconds(lambda: np.sqrt(np.arange(1e6)))
    num_prices, prices_s = redistributions()
    plan_s, step_s = llama_plan()
    figures = {
        "prices_per_s": num_prices / prices_s,
        "million_prices_in_references": prices_s / num_prices * 1e6 / reference_s,
        "plan_ms": plan_s * 1e3,
        "plan_in_references": plan_s / reference_s,
        "predicted_step_s": step_s,
    }
    print(f"{num_prices:,} redistributions in {prices_s:.3f} s: {figures['prices_per_s'] / 1e6:.2f} million a second")
    print(f"one plan of Llama-3 405B: {figures['plan_ms']:.1f} ms (its step: {step_s:.2f} s)")
    print(json.dumps(figures))


def seconds(run: Callable[[], object]) -> float:
    """Median time of a call, after one that is not counted."""
    run()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def redistributions() -> tuple[int, float]:
    """(number of prices, seconds) of all pairs of layouts, each for ``NUM_SIZES`` sizes."""
    cluster = Cluster.parse("8x8xH100")
    model = CollectiveModel(cluster=cluster)
    spans = cluster.axis_levels(SIZES)
    kinds = (Replicate(), Partial("sum"), Shard(0, 1, 8), Shard(1, 1, 8))
    shape, ranks = (8192, 8192), tuple(SIZES.values())
    layouts: list[Layout] = [pair for pair in itertools.product(kinds, repeat=2) if compatible(pair, shape)]
    pairs = [(a, b) for a in layouts for b in layouts if a != b and not _gains_partial(a, b)]
    paths = [steps(a, b, shape, ranks) for a, b in pairs]
    num_bytes = np.geomspace(1e3, 1e10, NUM_SIZES)

    def share(layout: Layout) -> float:
        return float(np.prod([1 / n if isinstance(p, Shard) else 1.0 for p, n in zip(layout, ranks, strict=True)]))

    def price() -> None:
        for path in paths:
            total = np.zeros(NUM_SIZES)
            for step in path:
                if step.kind in COLLECTIVES:
                    moved = num_bytes * max(share(step.before), share(step.after))
                    total += model.seconds(COLLECTIVES[step.kind], moved, spans[list(SIZES)[step.axis]])

    return len(pairs) * NUM_SIZES, seconds(price)


def _gains_partial(source: Layout, target: Layout) -> bool:
    return any(isinstance(b, Partial) and not isinstance(a, Partial) for a, b in zip(source, target, strict=True))


def llama_plan() -> tuple[float, float]:
    """(seconds an evaluation, predicted step time) of Llama-3 405B on 2048 devices: tp 8, pp 16, dp 16."""
    run = Run(
        id="",
        source="",
        model="llama3-405b",
        family="llama",
        layers=126,
        hidden=16384,
        ffn=53248,
        gated=True,
        heads=128,
        kv_heads=8,
        vocab=128256,
        tied=False,
        sequence=8192,
        gpu="H100",
        num_devices=2048,
        node_size=8,
        internode="",
        dp=16,
        tp=8,
        pp=16,
        cp=1,
        chunks=1,
        microbatch=1,
        global_batch=2048,
        precision="bf16",
        recompute="none",
        zero=1,
        sequence_parallel=True,
        schedule="1f1b",
        measured_s=0.0,
        memory_gib=0.0,
        notes="",
        assumed=(),
    )
    cluster = Cluster.parse("256x8xH100")
    kernels = KernelModel(device=cluster.device)
    model = StepModel(
        cluster=cluster, kernels=kernels, collectives=CollectiveModel(cluster=cluster), stack=MEGATRON_CORE
    )
    found = 0.0

    def evaluate() -> None:
        nonlocal found
        found = model.step(stages_of(run, MEGATRON_CORE), plan_of(run)).step_s

    return seconds(evaluate), found


if __name__ == "__main__":
    sys.exit(main())
