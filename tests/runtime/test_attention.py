"""The device's attention in place of the CPU's: same results and gradients (run here on the CPU)."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.runtime import attention


def inputs(kv_heads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 4, 6, 8), (2, kv_heads, 6, 8), (2, kv_heads, 6, 8))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
def test_both_calls_equal_the_cpu_forms(causal: bool, masked: bool) -> None:
    q, k, v = inputs(4)
    mask = torch.randn(2, 1, 6, 6, dtype=torch.float64) if masked else None
    out, lse = attention.CPU_FORWARD(q, k, v, 0.0, causal, attn_mask=mask)
    got, _ = attention.forward(q, k, v, 0.0, causal, attn_mask=mask)
    torch.testing.assert_close(got, out)
    grad = torch.randn_like(out)
    want = attention.CPU_BACKWARD(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask)
    mine = attention.backward(grad, q, k, v, got, torch.zeros(2, 4, 6), 0.0, causal, attn_mask=mask)
    for a, b in zip(mine, want, strict=True):
        torch.testing.assert_close(a, b)


def test_the_pass_replaces_both_calls() -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = attention.CPU_FORWARD(q, k, v, 0.0, True)
        return (out, *attention.CPU_BACKWARD(grad, q, k, v, out, lse, 0.0, True))

    q, k, v = inputs(4)
    values = (q, k, v, torch.randn_like(q))
    graph = fx.Graph()
    names = [graph.placeholder(n) for n in "qkvg"]
    call = graph.call_function(attention.CPU_FORWARD, (*names[:3], 0.0, True))
    parts = [graph.call_function(lambda t, i: t[i], (call, i)) for i in range(2)]
    back = graph.call_function(attention.CPU_BACKWARD, (names[3], *names[:3], *parts, 0.0, True))
    graph.output((parts[0], back))
    attention.attend_on_device(graph)
    assert {n.target for n in graph.nodes} >= {attention.forward, attention.backward}
    got, gradients = fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run(*values)
    for a, b in zip((got, *gradients), step(*values), strict=True):
        torch.testing.assert_close(a, b)
