"""Which software made which published runs, and its habits.  One profile a software; nothing here is per row."""

from __future__ import annotations

import dataclasses

from replay_rows import Run

from autopar.cost_models.stack import StackProfile

# Megatron-LM and Megatron-DeepSpeed of 2020-2022: attention in separate kernels with dropout, reentrant checkpoints,
# a loss in several passes, pipeline messages that stop the host.  Host times fitted to the small single-node models.
MEGATRON = StackProfile(
    name="megatron-unfused",
    attention="unfused",
    attention_dropout=True,
    fused_loss=False,
    dispatch_s=9.5e-5,
    send_host_s=8e-4,
    send_overlap=False,
    optimizer_bytes=50,
    recompute_whole=True,
    # DeepSpeed keeps the input and output of a stage, and fp32 gradients of what it owns (and half as much passing).
    stage_copies=2,
    update_bytes=6,
    memory_meter="device",
)
# Megatron-Core with Transformer Engine: NeMo, Megatron-Bridge, the dgxc recipes.
MEGATRON_CORE = StackProfile(
    name="megatron-core", attention="cudnn", dp_overlap=0.9, gather_overlap=0.9, tp_overlap=0.5
)
FSDP_EAGER = StackProfile(name="fsdp-eager", attention="flash", fused=False)
FSDP_COMPILED = StackProfile(name="fsdp-compiled", attention="flash")
COMPOSER = StackProfile(name="composer", attention="flash1", fused=False)
MAXTEXT = StackProfile(name="maxtext", attention="cudnn")
INTERNEVO = StackProfile(name="internevo", attention="flash", dp_overlap=0.9)
NANOTRON = StackProfile(name="nanotron", attention="flash", gradient_bytes=4)
NEOX = StackProfile(name="gpt-neox", attention="flash1", fused=False, dispatch_s=3e-5, recompute_whole=True)

# First pattern that occurs in the source wins.
BY_SOURCE = (
    ("BLOOM", MEGATRON),
    ("vTrain", MEGATRON),
    ("Sep-2020", MEGATRON),
    ("Pythia", NEOX),
    ("maxtext", MAXTEXT),
    ("torchtitan docs", FSDP_EAGER),
    ("torchtitan", FSDP_COMPILED),
    ("fms-fsdp", FSDP_COMPILED),
    ("llm-foundry", COMPOSER),
    ("InternEvo", INTERNEVO),
    ("nanotron", NANOTRON),
)


def stack_of(run: Run) -> StackProfile:
    """Profile of the run's software, in the formats the row states."""
    stack = next((s for pattern, s in BY_SOURCE if pattern in run.source), MEGATRON_CORE)
    changes: dict[str, object] = {}
    if "fp4" in run.precision:
        changes["linear_dtype"] = "fp4"
    elif "fp8" in run.precision:
        changes["linear_dtype"] = "fp8"
    if "HSDP" in run.notes:
        changes["shard_ranks"] = run.node_size
    if "shard group = 4 ranks" in run.notes:
        changes["shard_ranks"] = 4
    if run.precision.startswith("amp"):
        changes["gradient_bytes"] = 4
    return dataclasses.replace(stack, **changes)  # type: ignore[arg-type]


def plan_as_run(run: Run) -> Run:
    """The run with what its source states wrongly put right.

    vTrain's single-node table is annotated with full recompute from a configuration file of another experiment.  With
    it a 2048-wide model on one A100 would sustain 258 TFLOP/s in unfused kernels (the slope of its time in the
    micro-batch), more than such kernels can; without, 194.
    """
    if "ground_truth_single" in run.source:
        return dataclasses.replace(run, recompute="none")
    return run
