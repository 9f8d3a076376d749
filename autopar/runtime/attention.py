"""Attention on accelerators: capture runs on a CPU, whose fused attention no other device has.

A step is captured with the CPU's form of fused attention, forward and backward.  On another device these two calls
become ``torch.nn.functional.scaled_dot_product_attention``, which picks that device's best kernel; the backward runs
its forward again, because what a kernel saves for it differs from kernel to kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

aten = torch.ops.aten
CPU_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(  # noqa: PLR0913 - the signature of the operation it stands for
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - the signature of the operation it stands for
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention [b, h, l, e], zeros in place of the logsumexp [b, h, l], which :func:`backward` does not read)."""
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out, query.new_zeros(query.shape[:-1], dtype=torch.float32)


def backward(  # noqa: PLR0913 - the signature of the operation it stands for
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - as above
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value."""
    del out, logsumexp
    inputs = [t.detach().requires_grad_() for t in (query, key, value)]
    with torch.enable_grad():
        q, k, v = inputs
        again, _ = forward(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    return torch.autograd.grad(again, inputs, grad_out)


def attend_on_device(graph: fx.Graph) -> None:
    """Replace the CPU's attention by the device's own (in place)."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (CPU_FORWARD, CPU_BACKWARD):
            node.target = forward if node.target is CPU_FORWARD else backward
