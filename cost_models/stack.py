"""What a training software does beside the plan: used only to replay published runs of other software.

Our own programs are read from the emitted graph; for them :data:`OURS` holds, which hides nothing and scales nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.errors import ClusterError

GAIN_LIMITS = (0.85, 1.15)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackProfile:
    """Habits of one training software.

    Attributes:
        name: shown in reports.
        attention: ``unfused``, ``flash`` or ``cudnn``.
        attention_dropout: whether unfused attention drops out scores.
        fused: whether element-wise chains run as one kernel.
        fused_loss: whether logits, softmax and loss run as one kernel.
        dispatch_s: host time per kernel launch; what a small model waits for.
        step_overhead_s: host time per step: logging, loss scale, gradient norm, data.
        dp_overlap: share of the last backward behind which gradients are reduced.
        gather_overlap: share of the first forward behind which ZeRO-1 and 2 gather parameters.
        tp_overlap: share of tensor-parallel communication hidden behind its matmuls.
        fsdp_overlap: whether parameters are gathered, and gradients scattered, while other layers compute.
        send_host_s: time in which host and device wait for each other at every pipeline message.
        send_overlap: whether pipeline sends run beside computation.
        linear_dtype: format of the matmuls by weights, when not the activations' (``fp8``).
        gradient_bytes: per element that is reduced: 2 or 4.
        optimizer_bytes: memory traffic of the optimizer per parameter it owns.
        jitter: by how much each doubling of the number of nodes lengthens the step: the slowest is waited for.
        slowdown: by how much communication lengthens computation beside it.
        recompute_whole: whether recompute runs a layer's forward to its end (reentrant checkpoints) or only as far as
            the backward needs.
        shard_ranks: ranks over which parameters or optimizer state are split; 0: all data-parallel ranks.
        stage_copies: boundary activations that a pipeline engine keeps per micro-batch in flight, beside the layers'.
        update_bytes: per owned parameter, held beside the optimizer's state while it updates.
        memory_meter: ``allocated`` (tensors), ``reserved`` (the allocator's share) or ``device`` (with the context).
        gain: residual factor on the step time, clamped to 0.85-1.15 and printed.
    """

    name: str
    attention: str = "flash"
    attention_dropout: bool = False
    fused: bool = True
    fused_loss: bool = True
    dispatch_s: float = 0.0
    step_overhead_s: float = 0.0
    dp_overlap: float = 0.0
    gather_overlap: float = 0.0
    tp_overlap: float = 0.0
    fsdp_overlap: bool = True
    send_host_s: float = 0.0
    send_overlap: bool = True
    linear_dtype: str = ""
    gradient_bytes: int = 2
    optimizer_bytes: float = 34.0
    jitter: float = 0.008
    slowdown: float = 0.2
    recompute_whole: bool = False
    shard_ranks: int = 0
    stage_copies: int = 0
    update_bytes: float = 0.0
    memory_meter: str = "allocated"
    gain: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a gain that hides a wrong model."""
        if not GAIN_LIMITS[0] <= self.gain <= GAIN_LIMITS[1]:
            raise ClusterError(
                f"stack {self.name!r}: gain {self.gain} is outside {GAIN_LIMITS}; find the cause instead"
            )
