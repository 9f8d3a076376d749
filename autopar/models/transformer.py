"""Parts that GPT, BERT and ViT share: attention and feed-forward with biases."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Multi-head self-attention with one packed [Q|K|V] projection.

    Args:
        width: size of the model.
        num_heads: heads; divides ``width``.
        causal: whether a position sees only those before it.
    """

    def __init__(self, width: int, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] to the same."""
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Two linear layers around GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same."""
        out: torch.Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each with its norm and residual.

    Args:
        width: size of the model.
        num_heads: heads of the attention.
        causal: whether a position sees only those before it.
        norm_first: normalise what enters (GPT, ViT) or what leaves (BERT).
    """

    def __init__(self, width: int, num_heads: int, *, causal: bool, norm_first: bool = True) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, num_heads, causal=causal)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), FeedForward(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] to the same."""
        if self.norm_first:
            x = x + self.attention(self.attention_norm(x))
            x = x + self.mlp(self.mlp_norm(x))
        else:
            x = self.attention_norm(x + self.attention(x))
            x = self.mlp_norm(x + self.mlp(x))
        return x


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of logits [batch, sequence, vocabulary] over labels [batch, sequence]; -100 is no label."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
