"""Bytes that a step keeps from its forward to its backward, with and without recompute: measured and predicted.

    python tests/benchmarks/recompute_memory.py
    torchrun --standalone --nproc-per-node 2 tests/benchmarks/recompute_memory.py     # split over two ranks

The model is the GPT of ``calibrated_step.py`` at its sizes.  Measured is what torch's allocator had given out, at the
start of the first operation of the backward (of the loss), beyond what it had given out before the call: parameters,
the batch and the optimizer's state do not count.  The program runs as it is; the moment comes from the profiler.
Predicted is what the buffers of the emitted program (those that memory is priced by) hold at that place.  Peak is the
most that was given out at once during the call.  Goals: with recompute="full" at most 45 % of the plain plan's bytes,
predicted within 10 %.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, fx

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from calibrated_step import GPT  # noqa: E402

import autopar  # noqa: E402
from autopar.capture import capture  # noqa: E402
from autopar.lower import Lowering  # noqa: E402
from autopar.passes.pricing import buffers  # noqa: E402
from autopar.plan import Constraints, Plan  # noqa: E402

MODES = ("none", "selective", "full")
FIRST_OF_BACKWARD = "nll_loss_backward"
GOAL_SHARE, GOAL_ERROR = 0.45, 0.1


def main() -> None:
    """Compile, measure, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 4, "width": 384, "heads": 6, "vocab": 4096, "length": 128, "batch": 16}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = {mode: row_of(mode, ranks, rank, options) for mode in MODES}
    if rank == 0:
        show(rows, ranks)
    if dist.is_initialized():
        dist.destroy_process_group()


def row_of(mode: str, ranks: int, rank: int, options: argparse.Namespace) -> dict[str, float]:
    """One mode: kept bytes, measured and predicted, and the most that was in use."""
    torch.manual_seed(0)
    model = GPT(options)
    ids = torch.randint(0, options.vocab, (options.batch, options.length + 1))
    batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    wishes = Constraints(dp=ranks, tp=1, pp=1, zero=0, microbatches=1, sequence_parallel=False, recompute=mode)
    step = capture(model, batch)
    compiled = autopar.compile(model, batch, constraints=wishes, optimizer="sgd")
    predicted = kept_bytes(step, compiled.plan, rank)
    compiled(*batch).backward()
    compiled.zero_grad(set_to_none=True)
    kept, peak = measured_bytes(compiled, batch)
    return {"measured_bytes": kept, "predicted_bytes": predicted, "peak_bytes": peak}


def kept_bytes(step: object, plan: Plan, rank: int) -> float:
    """What the buffers of the emitted program hold before the first operation of the backward."""
    graph: fx.Graph = Lowering(step, plan).program(rank).graph_module.graph
    names = [str(getattr(node.target, "__name__", node.target)) for node in graph.nodes]
    place = next(i for i, name in enumerate(names) if name.startswith(FIRST_OF_BACKWARD))
    inputs = {node.name for node in graph.find_nodes(op="placeholder")}
    return sum(b.bytes for b in buffers(graph) if b.name not in inputs and b.born < place <= b.dies)


def measured_bytes(compiled: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """(bytes given out when the backward starts, most bytes given out), beyond those before the call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss = compiled(*batch)
    loss.backward()
    compiled.zero_grad(set_to_none=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    start = min(e["ts"] for e in events if e.get("name") == f"aten::{FIRST_OF_BACKWARD}")
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    now = kept = peak = 0.0
    for time, change in changes:
        now += change
        peak = max(peak, now)
        kept = now if time < start else kept
    return kept, peak


def show(rows: dict[str, dict[str, float]], ranks: int) -> None:
    """Print a table and the JSON line."""
    print(f"dp={ranks}: MB kept from forward to backward on rank 0, and MB in use at the peak of the step")
    print(f"{'recompute':12}{'measured':>10}{'of plain':>10}{'predicted':>11}{'error':>8}{'peak':>10}{'of plain':>10}")
    plain = rows["none"]
    for mode, row in rows.items():
        row["share"] = row["measured_bytes"] / plain["measured_bytes"]
        row["peak_share"] = row["peak_bytes"] / plain["peak_bytes"]
        row["error"] = row["predicted_bytes"] / row["measured_bytes"] - 1
        print(
            f"{mode:12}{row['measured_bytes'] / 1e6:10.1f}{row['share']:10.1%}{row['predicted_bytes'] / 1e6:11.1f}"
            f"{row['error']:+8.1%}{row['peak_bytes'] / 1e6:10.1f}{row['peak_share']:10.1%}"
        )
    print(f"goals: full at most {GOAL_SHARE:.0%} of plain, predicted within {GOAL_ERROR:.0%}")
    print(json.dumps({"ranks": ranks, "modes": rows, "goal_share": GOAL_SHARE, "goal_error": GOAL_ERROR}))


if __name__ == "__main__":
    sys.exit(main())
