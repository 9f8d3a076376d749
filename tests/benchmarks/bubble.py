"""Idle time of pipelines: measured with real messages between ranks that sleep in place of computing, and simulated.

    torchrun --standalone --nproc-per-node 4 tests/benchmarks/bubble.py

Every rank is a stage.  A rank runs its program in the sleep mode of ``autopar/runtime/pretend.py``: computations are
slept for as long as the cost model predicts for a slow device, sends and receives are real ones of gloo over loopback.
So four ranks need hardly any processor.  Idle is the share of the step in which a rank computes nothing: measured from
timestamps, and as the simulator (``cost_models/timeline.py``) tells it for the same programs.  The links that it is
told are stated below and fitted to nothing.  What counts is the fastest step: other work on the machine wakes sleepers
late, and ranks that wait for each other add that up.  Goal: the idle share of the ranks in the middle of the pipeline
is within 20 % of the simulated one.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import warnings

import torch
import torch.distributed as dist

from autopar.capture import capture
from autopar.cost_models.cluster import Cluster, Device, DeviceRun, LinkLevel
from autopar.cost_models.compute import KernelModel
from autopar.lower import Lowering
from autopar.models.gpt import GPT, GPTConfig
from autopar.passes.program_cost import predict
from autopar.plan import Constraints, Plan
from autopar.runtime.groups import groups_for
from autopar.runtime.pretend import Moment, PretendedStep, idle_share
from autopar.runtime.world import World, connect
from autopar.search.planner import Planner

# Half a Gflop/s: a stage's forward of a micro-batch takes some tens of milliseconds.
SLOW = Device(
    name="slow",
    peak_flops={"fp32": 5e8},
    memory_bytes=1e9,
    memory_bytes_per_s=5e8,
    compute_units=1,
    kernel_s=0.0,
    dispatch_s=0.0,
)
# Loopback: about 1 GB/s and 0.2 ms.  A message does not slow a rank that sleeps.
LOOPBACK = LinkLevel(name="loopback", fanout=1, port_bytes_per_s=1e9, latency_s=2e-4, slows_compute=0.0)
GOAL = 0.2


def main() -> None:
    """Measure, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 8, "width": 64, "heads": 4, "vocab": 64, "length": 32, "rows": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schedules", default="1f1b,zb")
    parser.add_argument("--microbatches", default="8,16")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    world = connect(torch.device("cpu"))
    rows = [
        measure(schedule, int(count), world, options)
        for schedule in options.schedules.split(",")
        for count in options.microbatches.split(",")
    ]
    if world.rank == 0:
        show(rows)
    dist.destroy_process_group()


def measure(schedule: str, microbatches: int, world: World, options: argparse.Namespace) -> dict[str, object]:
    """One schedule: what the simulator says, and what happens."""
    link = dataclasses.replace(LOOPBACK, fanout=world.size)
    cluster = Cluster(name="loopback", devices=(DeviceRun(count=world.size, device=SLOW),), levels=(link,))
    step = capture(*model_of(microbatches, options))
    wishes = Constraints(dp=1, tp=1, pp=world.size, microbatches=microbatches, schedule=schedule, recompute="none")
    made = Planner(step, cluster, wishes).best(world.size).to_json() if world.rank == 0 else None
    lowering = Lowering(step, Plan.from_json(world.from_first(made)))
    mine = lowering.program(world.rank)
    groups = groups_for(world, mine.mesh)
    pretended = PretendedStep(mine, KernelModel(device=SLOW), lambda name: str(groups.group(name).group_name))
    found = []
    for turn in range(options.steps + 1):
        dist.barrier()
        ranks = world.exchange(pretended.run())
        if turn:  # the first one connects
            found.append(ranks)
    if world.rank:
        return {}
    timeline = predict([mine, *map(lowering.program, range(1, world.size))], cluster).timeline
    fastest = min(found, key=step_seconds)
    idle = [idle_share(fastest, r) for r in range(world.size)]
    middle = range(1, world.size - 1)
    return {
        "schedule": schedule,
        "microbatches": microbatches,
        "simulated_step_s": timeline.step_s,
        "measured_step_s": step_seconds(fastest),
        "median_step_s": statistics.median(map(step_seconds, found)),
        "simulated_idle": [timeline.bubble(r) for r in range(world.size)],
        "measured_idle": idle,
        "simulated_middle": statistics.mean(timeline.bubble(r) for r in middle),
        "measured_middle": statistics.mean(idle[r] for r in middle),
    }


def model_of(count: int, options: argparse.Namespace) -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
    """The model and its batch of ``count`` micro-batches."""
    config = GPTConfig(
        num_layers=options.layers,
        width=options.width,
        num_heads=options.heads,
        sequence=options.length,
        vocabulary=options.vocab,
    )
    torch.manual_seed(0)
    ids = torch.randint(0, options.vocab, (options.rows * count, options.length))
    return GPT(config), (ids, ids)


def step_seconds(ranks: list[list[Moment]]) -> float:
    """From the first start of a rank to the last end."""
    moments = [moment for line in ranks for moment in line]
    return max(m.end_s for m in moments) - min(m.start_s for m in moments)


def show(rows: list[dict[str, object]]) -> None:
    """Print a table and the JSON line."""
    print("idle of the middle ranks, idle by rank: share of the step; steps in ms")
    heads = ("simulated", "fastest", "median", "simulated", "measured", "error")
    print(f"{'schedule':10}{'micro-batches':>14}" + "".join(f"{head:>11}" for head in heads) + "   simulated/measured")
    print(f"{'':10}{'':14}{'step':>11}{'step':>11}{'step':>11}{'idle':>11}{'idle':>11}{'':11}   idle by rank")
    worst = 0.0
    for row in rows:
        simulated, measured = row["simulated_middle"], row["measured_middle"]
        row["error"] = measured / simulated - 1
        worst = max(worst, abs(row["error"]))
        steps = (row["simulated_step_s"], row["measured_step_s"], row["median_step_s"])
        pairs = zip(row["simulated_idle"], row["measured_idle"], strict=True)
        print(
            f"{row['schedule']:10}{row['microbatches']:14d}"
            + "".join(f"{seconds * 1e3:11.0f}" for seconds in steps)
            + f"{simulated:11.1%}{measured:11.1%}{row['error']:+11.1%}   "
            + "  ".join(f"{one:.1%}/{other:.1%}" for one, other in pairs)
        )
    print(f"largest error {worst:.1%}; goal {GOAL:.0%}")
    print(json.dumps({"rows": rows, "worst_error": worst, "goal": GOAL}))


if __name__ == "__main__":
    sys.exit(main())
