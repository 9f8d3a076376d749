"""Rows of memory_runs.csv and the memory column of published runs, priced by ``cost_models.memory``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from replay_rows import Run, SkippedRowError, memory_stages_of, plan_of

from autopar.cost_models.memory import MemoryCost, StateBytes, state_bytes, step_memory
from autopar.cost_models.stack import StackProfile

MIB = 2**20
# What nvidia-smi counts outside PyTorch's allocator: the CUDA context and the channel buffers of NCCL's communicators
# (data, tensor, pipeline, tied embedding, world), about 1 GB each on A100.
CONTEXT_BYTES = 5.5e9
# The allocator's cache above what is allocated, in training with varying block sizes.
RESERVED_SHARE = 1.03


def small_run(row: Mapping[str, str]) -> Run:
    """A row of memory_runs.csv (Megatron-Core's functional tests) as a run.

    Raises:
        SkippedRowError: the test is not plain training, or its stage sizes or attention kernel are not in the row.
    """
    case = row["case"]
    for word, why in (
        ("grpo", "not plain training"),
        ("distill", "holds two models"),
        ("uneven", "stage sizes not stated"),
    ):
        if word in case:
            raise SkippedRowError(why)
    if not row["attn"]:
        raise SkippedRowError("attention kernel not stated")
    layers, hidden, heads = int(row["n_layers"]), int(row["hidden"]), int(row["n_heads"])
    tp, pp, cp = int(row["tp"]), int(row["pp"]), int(row["cp"] or 1)
    # GB200 nodes hold four devices; "1node" tests run on one node, the others on eight devices.
    world = 4 if "1node" in case and "gb200" in row["golden"] else 8
    dp = world // (tp * pp * cp)
    chunks = layers // pp // int(row["vp_layers"]) if row["vp_layers"] else int(row["vp"] or 1)
    gated = row["swiglu"] == "true"
    microbatch = int(row["mbs"])
    # Megatron's default width: 4 h, or 8/3 h in whole multiples of 64 with a gate.
    width = int(row["ffn_hidden"] or (hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden))
    return Run(
        id=f"{case} {row['golden']}",
        source="Megatron-Core functional tests",
        model=case,
        family="gpt",
        layers=layers,
        hidden=hidden,
        ffn=width,
        gated=gated,
        heads=heads,
        kv_heads=int(row["num_query_groups"] or heads),
        vocab=50257,
        tied=row["untied"] != "true",
        sequence=int(row["seq_len"]),
        gpu="A100-80GB" if "a100" in row["golden"] or row["golden"] == "lts" else "H100",
        num_devices=world,
        node_size=8,
        internode="",
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        chunks=max(1, chunks),
        microbatch=microbatch,
        global_batch=int(row["gbs"] or 8 * dp * microbatch),
        precision="fp16" if row["fp16"] else "bf16",
        recompute=row["recompute"] or "none",
        zero=1 if row["dist_opt"] else 0,
        sequence_parallel=bool(row["sequence_parallel"]),
        schedule="interleaved" if chunks > 1 else "1f1b",
        measured_s=float(row["iter_time_median_s"]),
        memory_gib=float(row["mem_max_allocated_bytes"]) / 2**30,
        notes="",
        assumed=(),
    )


def small_run_bytes(run: Run, row: Mapping[str, str]) -> float:
    """Peak allocated bytes on the last pipeline rank, which is the one that writes the log."""
    stack = StackProfile(
        name="megatron-core", attention="flash" if row["attn"] == "flash" else "unfused", attention_dropout=True
    )
    state = state_bytes(
        optimizer="adam",
        parameter_bytes=2,
        gradient_bytes=2 if run.precision == "fp16" else 4,
        master=True,
        zero=run.zero,
        shard_ranks=run.dp * run.cp,
    )
    return _costs(run, stack, state, workspace_bytes=workspace_bytes(run.gpu, row["deterministic"] == "true"))[-1].bytes


def workspace_bytes(gpu: str, deterministic: bool) -> float:
    """cuBLAS and cuBLASLt workspaces of two streams, and Transformer Engine's own.

    PyTorch reserves 8 MiB a handle and stream (32 MiB on Hopper and later, and under CUBLAS_WORKSPACE_CONFIG=:4096:8,
    which deterministic runs set); Transformer Engine 4 MiB (32 MiB).
    """
    hopper = not gpu.startswith("A100")
    return 2 * (32 if hopper or deterministic else 8) * MIB + (32 if hopper else 4) * MIB


def published_bytes(run: Run, stack: StackProfile) -> float:
    """Peak bytes of a published run, as its source measures: the larger of the first and last rank of the pipeline."""
    half = run.precision not in ("fp32",)
    shard = stack.shard_ranks or run.dp * run.cp
    state = state_bytes(
        optimizer="adam",
        parameter_bytes=2 if half else 4,
        gradient_bytes=stack.gradient_bytes,
        master=True,
        zero=run.zero,
        shard_ranks=shard,
    )
    extra = stack.update_bytes / (shard if run.zero else 1)
    state = dataclasses.replace(state, optimizer=state.optimizer + extra)
    costs = _costs(run, stack, state, workspace_bytes=workspace_bytes(run.gpu, deterministic=False))
    used = max(costs[0].bytes, costs[-1].bytes)
    return used * RESERVED_SHARE + CONTEXT_BYTES if stack.memory_meter == "device" else used


def _costs(run: Run, stack: StackProfile, state: StateBytes, *, workspace_bytes: float) -> tuple[MemoryCost, ...]:
    return step_memory(memory_stages_of(run, stack), plan_of(run), stack, state, workspace_bytes=workspace_bytes)
