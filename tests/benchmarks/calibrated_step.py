"""Step time and peak memory of a small GPT under several splits: predicted after calibrating, and measured, in one run.

    torchrun --standalone --nproc-per-node 2 tests/benchmarks/calibrated_step.py
    python ../shared/testbed/hosts.py --hosts 2 --mbit 400 -- tests/benchmarks/calibrated_step.py

The ranks calibrate together (``autopar.calibrate``), the emitted programs are priced by ``passes/program_cost`` with
gain 1, and the same programs are run, in interleaved rounds.  All ranks run a reference kernel (a matmul of 512) for a
while before and after every timed step: predicted and measured times are compared in units of it, as it was calibrated
and as it ran then.  Other work on the machine slows a processor and not a network, and ranks that wait for each other
more than either of them, so what counts are the quiet rounds: those in which the reference got the whole processor on
every rank.  The program waits for such moments (``--patience`` seconds in all); where there were too few, the half of
the rounds with the fastest reference counts, and ``load`` says how much slower it was.  Memory is what torch's
allocator reports for one step beside what the rank holds.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.calibrate import REFERENCE_SIZE, calibrate
from autopar.capture import capture
from autopar.cost_models.cluster import Cluster
from autopar.lower import Lowering
from autopar.passes.program_cost import ProgramCost, predict
from autopar.plan import Constraints
from autopar.runtime.native import scatter_by_exchange

PLAIN = {"pp": 1, "microbatches": 1, "recompute": "none", "sequence_parallel": False}
PLANS = {
    "ddp": PLAIN | {"dp": 2, "tp": 1, "zero": 0},
    "fsdp": PLAIN | {"dp": 2, "tp": 1, "zero": 3},
    "tp": PLAIN | {"dp": 1, "tp": 2, "zero": 0},
    "recompute": PLAIN | {"dp": 2, "tp": 1, "zero": 3, "recompute": "full"},
}
REFERENCE_CALLS = 50
QUIET = 0.95  # share of a processor that the reference has to get for a round to count as quiet
ENOUGH = 3  # quiet rounds that are enough to leave the others out


class Block(nn.Module):
    """A block of a decoder, normalised first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output [batch, length, width]."""
        inner = self.before_attention(x)
        heads = (f(inner).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class GPT(nn.Module):
    """A decoder that returns its loss."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.tokens, self.positions = nn.Embedding(options.vocab, width), nn.Embedding(options.length, width)
        self.blocks = nn.ModuleList(Block(width, options.heads) for _ in range(options.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, options.vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of predicting ``labels`` from ``ids``."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A timed step of the slowest rank, the reference kernel around it, and the share of a processor that that got."""

    seconds: float
    reference_s: float
    share: float


@dataclass(slots=True, kw_only=True)
class Case:
    """One plan: what was predicted, what runs, and what was measured (seconds of a step and of the reference)."""

    name: str
    predicted: ProgramCost
    step: Callable[[], None]
    measured_bytes: float
    rounds: list[Round]

    def counted(self) -> list[Round]:
        """The quiet rounds, or the half of all rounds in which the reference ran fastest."""
        quiet = [r for r in self.rounds if r.share >= QUIET]
        if len(quiet) >= ENOUGH:
            return quiet
        return sorted(self.rounds, key=lambda r: r.reference_s)[: (len(self.rounds) + 1) // 2]


def main() -> None:
    """Calibrate, predict, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 4, "width": 384, "heads": 6, "vocab": 4096, "length": 128, "batch": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--patience", type=float, default=120.0)
    parser.add_argument("--plans", default="ddp,fsdp,tp", help=", ".join(PLANS))
    parser.add_argument("--save", type=Path, help="write the calibrated cluster there")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gauge = Gauge(options.patience)
    gauge.wait()
    cluster, rows = calibrate()
    reference_s = next(row.seconds for row in rows if row.name == "reference")
    if options.save is not None and dist.get_rank() == 0:
        cluster.to_file(options.save)
    cases = [prepare(name, cluster, options) for name in options.plans.split(",")]
    measure(cases, gauge, options.rounds, options.steps)
    if dist.get_rank() == 0:
        show(cases, reference_s)
    dist.destroy_process_group()


def prepare(name: str, cluster: Cluster, options: argparse.Namespace) -> Case:
    """Plan, price the emitted programs of all ranks' kinds, and compile."""
    torch.manual_seed(0)
    model = GPT(options)
    ids = torch.randint(0, options.vocab, (options.batch, options.length + 1))
    batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    step = capture(copy.deepcopy(model), batch)
    plan = autopar.plan(model, batch, cluster=cluster, constraints=Constraints(**PLANS[name]), optimizer="sgd")
    program = Lowering(step, plan).program(dist.get_rank())
    scatter_by_exchange(program.graph_module.graph)  # as the runtime does on a CPU
    predicted = predict([program], cluster, optimizer_bytes_per_parameter_byte=0.0)
    compiled = autopar.compile(model, batch, plan=plan, optimizer="sgd")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=1e-2)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        compiled(*batch).backward()
        optimizer.step()

    run()
    held = [p.to_local() if hasattr(p, "to_local") else p for p in compiled.parameters()]
    optimizer.zero_grad(set_to_none=True)
    held_bytes = sum(t.numel() * t.element_size() for t in (*held, *batch))
    return Case(
        name=name,
        predicted=predicted,
        step=run,
        measured_bytes=held_bytes + allocated_bytes(run),
        rounds=[],
    )


def allocated_bytes(run: Callable[[], None]) -> float:
    """The most that torch's allocator gave out at once while ``run`` ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    rows = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    totals = [e["args"]["Total Allocated"] for e in rows]
    # The meter goes on from where an earlier profile stopped.
    return float(max(totals) - (totals[0] - rows[0]["args"]["Bytes"]))


class Gauge:
    """Runs the reference kernel on all ranks at once, and waits for moments in which nothing else runs.

    Args:
        patience_s: how long it waits in all.
    """

    def __init__(self, patience_s: float) -> None:
        self.left_s = patience_s
        self.square = torch.randn(REFERENCE_SIZE, REFERENCE_SIZE)

    def read(self) -> tuple[float, float]:
        """(seconds a call on the slowest rank, share of a processor on the rank that got least)."""
        dist.barrier()
        start, ran = time.perf_counter(), time.thread_time()
        for _ in range(REFERENCE_CALLS):
            torch.mm(self.square, self.square)
        took_s, ran_s = time.perf_counter() - start, time.thread_time() - ran
        worst = torch.tensor([took_s / REFERENCE_CALLS, -ran_s / took_s])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return float(worst[0]), -float(worst[1])

    def wait(self) -> tuple[float, float]:
        """The first quiet reading, or the last one when patience is at its end.  All ranks leave together."""
        while True:
            start = time.perf_counter()
            found = self.read()
            if found[1] >= QUIET:
                return found
            time.sleep(0.2)
            passed = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(passed, dist.ReduceOp.MAX)
            self.left_s -= float(passed)
            if self.left_s < 0:
                return found


def measure(cases: list[Case], gauge: Gauge, rounds: int, steps: int) -> None:
    """Interleaved rounds."""
    for turn in range(rounds + 1):
        for i in range(len(cases)):
            case = cases[(turn + i) % len(cases)]
            before_s, before = gauge.wait()
            start = time.perf_counter()
            for _ in range(steps):
                case.step()
            took = torch.tensor((time.perf_counter() - start) / steps)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            after_s, after = gauge.read()
            if turn:  # The first round warms up.
                row = Round(seconds=float(took), reference_s=(before_s + after_s) / 2, share=min(before, after))
                case.rounds.append(row)


def show(cases: list[Case], reference_s: float) -> None:
    """Print a table and the JSON line."""
    figures = {}
    print(f"reference kernel while calibrating {reference_s * 1e3:.3f} ms")
    print(f"{'plan':9}{'predicted':>10}{'measured':>10}{'predicted':>11}{'measured':>10}{'error':>8}   ", end="")
    print(f"{'predicted':>10}{'measured':>10}{'error':>8}{'load':>8}")
    print(f"{'':9}{'s':>10}{'s':>10}{'kernels':>11}{'kernels':>10}{'':8}   {'MB':>10}{'MB':>10}")
    for case in cases:
        counted = case.counted()
        want = statistics.median(r.seconds / r.reference_s for r in counted)
        got = case.predicted.step_s / reference_s
        peak = case.predicted.peak.bytes
        row = {
            "predicted_s": case.predicted.step_s,
            "measured_s": statistics.median(r.seconds for r in counted),
            "fastest_s": min(r.seconds for r in case.rounds),
            "load": statistics.median(r.reference_s for r in counted) / reference_s,
            "rounds": len(counted),
            "quiet": sum(r.share >= QUIET for r in case.rounds),
            "predicted_kernels": got,
            "measured_kernels": want,
            "time_error": got / want - 1,
            "predicted_bytes": peak,
            "measured_bytes": case.measured_bytes,
            "memory_error": peak / case.measured_bytes - 1,
        }
        figures[case.name] = row
        print(
            f"{case.name:9}{row['predicted_s']:10.4f}{row['measured_s']:10.4f}{got:11.1f}{want:10.1f}"
            f"{row['time_error']:+8.1%}   {peak / 1e6:10.1f}{case.measured_bytes / 1e6:10.1f}"
            f"{row['memory_error']:+8.1%}{row['load']:8.2f}{row['quiet']:4d} of {len(case.rounds)} quiet"
        )
    worst = {k: max(abs(r[k]) for r in figures.values()) for k in ("time_error", "memory_error")}
    print(json.dumps({"reference_s": reference_s, "plans": figures, "worst": worst}))


if __name__ == "__main__":
    sys.exit(main())
