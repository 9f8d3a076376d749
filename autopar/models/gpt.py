"""GPT-2 and GPT-3 (decoders with learned positions) and BERT (an encoder that predicts masked tokens)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from autopar.models.transformer import Block, token_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT."""

    num_layers: int
    width: int
    num_heads: int
    sequence: int = 1024
    vocabulary: int = 50257


class GPT(nn.Module):
    """Decoder whose head is the token embedding (Radford et al., 2019; Brown et al., 2020)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.sequence, config.width)
        self.blocks = nn.ModuleList(
            Block(config.width, config.num_heads, causal=True) for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Loss of predicting ``labels`` [batch, sequence] from ``ids`` [batch, sequence]."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return token_loss(self.head(self.norm(x)), labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class BERTConfig:
    """Sizes of a BERT."""

    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    sequence: int = 512
    vocabulary: int = 30522
    num_segments: int = 2


class BERT(nn.Module):
    """Encoder with a masked-token head tied to the token embedding (Devlin et al., 2018)."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width, padding_idx=0)
        self.positions = nn.Embedding(config.sequence, config.width)
        self.segments = nn.Embedding(config.num_segments, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.blocks = nn.ModuleList(
            Block(config.width, config.num_heads, causal=False, norm_first=False) for _ in range(config.num_layers)
        )
        self.transform, self.transform_norm = nn.Linear(config.width, config.width), nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, segments: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Loss of predicting the labels that are not -100; all inputs are [batch, sequence]."""
        x = self.tokens(ids) + self.segments(segments)
        x = self.norm(x + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return token_loss(self.head(self.transform_norm(F.gelu(self.transform(x)))), labels)
