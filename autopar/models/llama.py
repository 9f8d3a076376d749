"""Llama 3 (rotary positions, grouped heads, gated feed-forward) and Mixtral (a feed-forward of several experts)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from autopar.models.transformer import token_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama; with ``num_experts`` those of a Mixtral."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    vocabulary: int = 128256
    sequence: int = 8192
    rope_theta: float = 500000.0
    num_experts: int = 0
    num_chosen: int = 2


Tables = tuple[torch.Tensor, torch.Tensor]


class GroupedAttention(nn.Module):
    """Causal attention with rotary positions; several query heads share a key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        kv_width = self.head_width * config.num_kv_heads
        self.q, self.o = (nn.Linear(config.width, config.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(config.width, kv_width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, tables: Tables) -> torch.Tensor:
        """[batch, sequence, width] to the same; ``tables`` are cosines and sines [sequence, head width]."""
        q, k, v = (f(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, tables), rotate(k, tables)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: torch.Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


def rotary_tables(config: LlamaConfig, length: int, device: torch.device, dtype: torch.dtype) -> Tables:
    """Cosines and sines [length, head width] of Su et al., *RoFormer* (2021), in the half-split form."""
    head_width = config.width // config.num_heads
    steps = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), config.rope_theta**-steps)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, tables: Tables) -> torch.Tensor:
    """``x`` [..., sequence, head width] turned by its position."""
    cosines, sines = tables
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


class GatedFeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (Shazeer, 2020)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(config.width, config.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] to the same."""
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """Gated feed-forwards of which a router chooses ``num_chosen`` for each token.

    The dispatch is dense: every expert computes every token, and those that were not chosen get weight 0.  That is what
    the model computes, at ``num_experts / num_chosen`` times its cost, without shapes that depend on data.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_chosen = config.num_chosen
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        self.gate, self.up = (
            nn.Parameter(torch.randn(config.num_experts, config.width, config.hidden) * config.width**-0.5)
            for _ in range(2)
        )
        self.down = nn.Parameter(torch.randn(config.num_experts, config.hidden, config.width) * config.hidden**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] to the same."""
        tokens = x.flatten(0, 1)
        scores = self.router(tokens)
        chosen, which = scores.topk(self.num_chosen, -1)
        weights = torch.zeros_like(scores).scatter(-1, which, chosen.softmax(-1))
        every = tokens.expand(self.gate.shape[0], -1, -1)
        mixed = torch.bmm(F.silu(torch.bmm(every, self.gate)) * torch.bmm(every, self.up), self.down)
        return (mixed * weights.t().unsqueeze(-1)).sum(0).view_as(x)


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each with its norm and residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(config.width, eps=1e-5), GroupedAttention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mlp = Experts(config) if config.num_experts else GatedFeedForward(config)

    def forward(self, x: torch.Tensor, tables: Tables) -> torch.Tensor:
        """[batch, sequence, width] to the same."""
        x = x + self.attention(self.attention_norm(x), tables)
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """Decoder of Dubey et al., *The Llama 3 herd of models* (2024); with experts, Jiang et al., *Mixtral* (2024)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Loss of predicting ``labels`` [batch, sequence] from ``ids`` [batch, sequence]."""
        x = self.tokens(ids)
        tables = rotary_tables(self.config, ids.shape[1], x.device, x.dtype)
        for block in self.blocks:
            x = block(x, tables)
        return token_loss(self.head(self.norm(x)), labels)
