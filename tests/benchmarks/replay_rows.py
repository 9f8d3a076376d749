"""Rows of the published tables: reading, defaults for what a row does not say, and the layers of its model."""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from replay_templates import BlockShape, HeadShape, gather_keys, priced, split_sequence

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.collectives import Collective, Transfer
from autopar.cost_models.memory import LayerMemory
from autopar.cost_models.stack import StackProfile
from autopar.cost_models.step import LayerCost, UniformPlan

T = TypeVar("T")


class SkippedRowError(Exception):
    """The row lacks something that cannot be assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run, typed."""

    id: str
    source: str
    model: str
    family: str
    layers: int
    hidden: int
    ffn: int
    gated: bool
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    sequence: int
    gpu: str
    num_devices: int
    node_size: int
    internode: str
    dp: int
    tp: int
    pp: int
    cp: int
    chunks: int
    microbatch: int
    global_batch: int
    precision: str
    recompute: str
    zero: int
    sequence_parallel: bool
    schedule: str
    measured_s: float
    memory_gib: float
    notes: str
    assumed: tuple[str, ...]

    @property
    def microbatches(self) -> int:
        return max(1, round(self.global_batch / (self.dp * self.microbatch)))


def read(path: str | Path) -> list[dict[str, str]]:
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _int(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = row.get(name, "").strip()
    if text:
        return int(float(text))
    if default is None:
        raise SkippedRowError(f"no {name}")
    return default


def parse(row: Mapping[str, str]) -> Run:
    """A typed run.

    Raises:
        SkippedRowError: the row lacks the model's shape, the plan or a step time.
    """
    measured = row["iter_time_s"] or row["iter_time_derived_s"]
    if not measured:
        raise SkippedRowError("no step time")
    assumed = []
    if not row["microbatch"]:
        assumed.append("microbatch=1")
    recompute = row["recompute"]
    if row["mfu_pct"] and row["hfu_pct"] and row["zero_stage"] == "3":
        # Executed over useful flops says how much of the forward ran twice.
        again = 3 * (float(row["hfu_pct"]) / float(row["mfu_pct"]) - 1)
        recompute = "full" if again > 0.7 else recompute if again > 0.05 else "none"
    if not recompute:
        assumed.append("recompute=none")
    virtual = row["virtual_stages"]
    pp = _int(row, "pp")
    schedule = row["schedule"]
    interleaved = schedule.startswith("interleaved") or (not schedule and pp > 1 and _int(row, "virtual_stages", 1) > 1)
    layers, hidden = _int(row, "n_layers"), _int(row, "hidden")
    chunks = _int(row, "virtual_stages", 1) if interleaved else 1
    if interleaved and not virtual:
        chunks = max(1, min(layers // pp, 8)) if layers % pp == 0 else math.ceil(layers / pp) // 2
        assumed.append(f"virtual_stages={chunks}")
    heads = _int(row, "n_heads", max(1, hidden // 128))
    zero = {"": 0, "fsdp (params not resharded after fwd ~ zero2)": 2}.get(row["zero_stage"])
    dp, microbatch = _int(row, "dp"), _int(row, "microbatch", 1)
    return Run(
        id=row["id"],
        source=row["source"],
        model=row["model"],
        family=row["family"],
        layers=layers,
        hidden=hidden,
        ffn=_int(row, "ffn_hidden"),
        gated=row["gated_mlp"] == "yes",
        heads=heads,
        kv_heads=_int(row, "n_kv_heads", heads),
        vocab=_int(row, "vocab"),
        tied=row["tied_embeddings"] == "yes",
        sequence=_int(row, "seq_len"),
        gpu=row["gpu"],
        num_devices=_int(row, "n_gpus"),
        node_size=_int(row, "gpus_per_node", 8),
        internode=row["internode"],
        dp=dp,
        tp=_int(row, "tp"),
        pp=pp,
        cp=_int(row, "cp", 1),
        chunks=chunks,
        microbatch=microbatch,
        global_batch=_int(row, "global_batch", dp * microbatch),
        precision=row["precision"].lower(),
        recompute={"": "none", "selective-layer": "layer2", "selective-op": "op"}.get(recompute, recompute),
        zero=int(row["zero_stage"]) if zero is None else zero,
        sequence_parallel=row["sequence_parallel"] == "yes",
        schedule="interleaved" if interleaved and chunks > 1 else "1f1b",
        measured_s=float(measured),
        memory_gib=float(row["peak_mem_GiB"] or 0),
        notes=row["notes"],
        assumed=tuple(assumed),
    )


GPUS = (
    (r"H100-96GB", "H100-HBM2e"),
    (r"H100", "H100"),
    (r"H200", "H200"),
    (r"GB300", "GB300"),
    (r"GB200", "GB200"),
    (r"B200", "B200"),
    (r"A800", "A800"),
    (r"A100.*40", "A100-40GB"),
    (r"A100", "A100-80GB"),
    (r"V100", "V100-32GB"),
    (r"MI300X", "MI300X"),
)


def profile_of(gpu: str) -> str:
    for pattern, name in GPUS:
        if re.search(pattern, gpu):
            return name
    raise SkippedRowError(f"no profile for {gpu!r}")


def cluster_of(run: Run) -> Cluster:
    """The profile of the row's device, with the network that the row states."""
    size = 72 if run.gpu.startswith(("GB200", "GB300")) and "NVL72" in (run.internode or "NVL72") else run.node_size
    size = min(size, run.num_devices)
    while run.num_devices % size:
        size -= 1
    cluster = Cluster.parse(f"{run.num_devices // size}x{size}x{profile_of(run.gpu)}")
    rate = network_gbit_per_device(run.internode, run.node_size)
    if rate is None:
        return cluster
    levels = [
        cluster.levels[0],
        dataclasses.replace(cluster.levels[1], port_bytes_per_s=rate * 1e9 / 8, devices_per_port=1.0),
    ]
    return dataclasses.replace(cluster, levels=tuple(levels))


def network_gbit_per_device(text: str, node_size: int) -> float | None:
    """``8x400Gb/s NDR``, ``800Gb/s per node``, ``400Gb/s RDMA per GPU``; None when nothing is stated."""
    match = re.search(r"(?:(\d+)x)?(\d+)Gb/s", text)
    if match is None:
        return None
    total = int(match.group(1) or 1) * float(match.group(2))
    return total if "per GPU" in text else total / node_size


def block_shape(run: Run, stack: StackProfile) -> BlockShape:
    """What one rank holds of a block."""
    return BlockShape(
        batch=run.microbatch,
        sequence=run.sequence // run.cp,
        hidden=run.hidden,
        heads=max(1, run.heads // run.tp),
        kv_heads=max(1, run.kv_heads // run.tp),
        head_dim=run.hidden // run.heads,
        ffn=run.ffn // run.tp,
        gated=run.gated,
        rms=run.family == "llama" or run.gated,
        rope=run.family in ("llama", "nemotron", "neox"),
        bias=run.family in ("gpt", "gpt3", "neox"),
        dropout=stack.attention_dropout,
        dtype="fp16" if not run.precision or run.precision == "fp16" else "bf16",
    )


def head_shape(run: Run, stack: StackProfile) -> HeadShape:
    """What one rank holds of the head; the vocabulary is padded to whole tiles a rank."""
    block = block_shape(run, stack)
    return HeadShape(
        batch=run.microbatch,
        sequence=block.sequence,
        hidden=run.hidden,
        vocab=math.ceil(run.vocab / (128 * run.tp)) * 128,
        rms=block.rms,
        dtype=block.dtype,
    )


def layer_memory(run: Run, stack: StackProfile) -> tuple[LayerMemory, LayerMemory, LayerMemory]:
    """Embedding, block and head in bytes a micro-batch."""
    shape, head = block_shape(run, stack), head_shape(run, stack)
    block_ops, head_ops = priced(shape, fused=stack.fused), priced(head, fused=stack.fused)
    ranks = run.tp if run.sequence_parallel else 1
    stream = 2.0 * shape.batch * shape.sequence * shape.hidden
    scores = shape.batch * shape.heads * shape.sequence * shape.sequence * run.cp
    attention = scores * (5 if stack.attention_dropout else 2) if stack.attention == "unfused" else 0.0
    block = LayerMemory(
        name="block",
        num_parameters=block_ops.num_parameters,
        saved_bytes=block_ops.saved_bytes(ranks) + stream / ranks + attention,
        attention_bytes=attention,
        input_bytes=stream / ranks,
        passing_bytes=block_ops.passing_bytes + (2 * 2.0 * scores if attention else 0.0),
    )
    logits = shape.batch * shape.sequence * head.vocab
    table = head.vocab * run.hidden
    head_memory = LayerMemory(
        name="head",
        num_parameters=head_ops.num_parameters,
        # A fused loss turns the fp32 logits into their gradient in place, beside the half-precision ones.
        saved_bytes=stream / ranks * 2,
        passing_bytes=6.0 * logits if stack.fused else head_ops.passing_bytes + head_ops.saved_bytes(1),
    )
    embedding = LayerMemory(
        name="embedding",
        num_parameters=table,
        saved_bytes=stream / ranks / 2 if stack.attention_dropout else 0.0,
    )
    return embedding, block, head_memory


def layer_costs(run: Run, stack: StackProfile) -> tuple[LayerCost, LayerCost, LayerCost]:
    """Embedding, block and head as one rank runs them on one micro-batch."""
    tp, cp = run.tp, run.cp
    shape, head_shapes = block_shape(run, stack), head_shape(run, stack)
    sequence = shape.sequence
    ranks = tp if run.sequence_parallel else 1
    ops = priced(shape, fused=stack.fused).map(lambda ops: split_sequence(gather_keys(ops, cp), ranks))
    activation = 2.0 * run.microbatch * sequence * run.hidden
    kv = 2.0 * 2 * run.microbatch * run.sequence * shape.kv_heads * shape.head_dim
    tensor = _tensor_parallel(activation, tp, split=run.sequence_parallel)
    keys = (Transfer(collective=Collective.ALL_GATHER, group="cp", bytes=kv),) if cp > 1 else ()
    keys_back = (*keys, Transfer(collective=Collective.REDUCE_SCATTER, group="cp", bytes=kv)) if cp > 1 else ()
    block = LayerCost(
        name="block",
        forward=ops.forward,
        backward=ops.backward,
        again=ops.forward if stack.recompute_whole else ops.again,
        again_transfers=tensor + keys if stack.recompute_whole else tensor[: len(tensor) - 1] + keys,
        forward_transfers=tensor + keys,
        backward_transfers=tensor + keys_back,
        num_parameters=ops.num_parameters,
    )
    head_ops = priced(head_shapes, fused=stack.fused and stack.fused_loss)
    table = head_shapes.vocab * run.hidden
    one = tensor[:1]
    head = LayerCost(
        name="head",
        forward=head_ops.forward,
        backward=head_ops.backward,
        forward_transfers=one if run.sequence_parallel else (),
        backward_transfers=one,
        num_parameters=table,
    )
    embedding = LayerCost(name="embedding", forward=(), backward=(), forward_transfers=one, num_parameters=table)
    return embedding, block, head


def _tensor_parallel(activation_bytes: float, tp: int, *, split: bool) -> tuple[Transfer, ...]:
    """Two reductions of the activations a block and direction; split in two halves under sequence parallelism."""
    if tp == 1:
        return ()
    kinds = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) if split else (Collective.ALL_REDUCE,)
    return tuple(Transfer(collective=k, group="tp", bytes=activation_bytes) for _ in range(2) for k in kinds)


def stages_of(run: Run, stack: StackProfile) -> list[list[tuple[LayerCost, int]]]:
    """The layers of every stage."""
    return spread(run, layer_costs(run, stack))


def memory_stages_of(run: Run, stack: StackProfile) -> list[list[tuple[LayerMemory, int]]]:
    """The same in bytes.  With one stage a tied table is held once."""
    embedding, block, head = layer_memory(run, stack)
    if run.tied and run.pp == 1:
        head = dataclasses.replace(head, num_parameters=head.num_parameters - embedding.num_parameters)
    stages = spread(run, (embedding, block, head))
    if run.pp == 1 or not stack.stage_copies:
        return stages
    copies = 2.0 * stack.stage_copies * run.microbatch * run.sequence / run.cp * run.hidden
    boundary = LayerMemory(name="stage boundary", saved_bytes=copies, input_bytes=copies)
    return [[(boundary, 1), *stage] for stage in stages]


def spread(run: Run, layers: tuple[T, T, T]) -> list[list[tuple[T, int]]]:
    """(layer, how often) of every stage; a remainder goes to the stages without embedding and head."""
    embedding, block, head = layers
    count = run.pp * run.chunks
    per, extra = divmod(run.layers, count)
    numbers = [per] * count
    order = [*range(1, count - 1), 0, count - 1] if count > 2 else list(range(count))
    for i in order[:extra]:
        numbers[i] += 1
    if extra and (run.layers + 2) % count == 0:
        numbers = [(run.layers + 2) // count] * count
        numbers[0] -= 1
        numbers[-1] -= 1
    stages = [[(block, n)] for n in numbers]
    stages[0].insert(0, (embedding, 1))
    stages[-1].append((head, 1))
    return stages


def plan_of(run: Run) -> UniformPlan:
    return UniformPlan(
        dp=run.dp,
        tp=run.tp,
        pp=run.pp,
        cp=run.cp,
        num_chunks=run.chunks,
        num_microbatches=run.microbatches,
        zero=run.zero,
        recompute=run.recompute if run.recompute in ("none", "selective", "full") else "none",
        schedule=run.schedule,
        send_bytes=2.0 * run.microbatch * run.sequence / run.cp * run.hidden / run.tp,
    )
