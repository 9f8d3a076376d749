"""Image classifiers: the vision transformer and ResNet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from autopar.models.transformer import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTConfig:
    """Sizes of a vision transformer."""

    num_layers: int
    width: int
    num_heads: int
    patch: int
    image: int = 224
    num_classes: int = 1000


class ViT(nn.Module):
    """Transformer over image patches (Dosovitskiy et al., 2020)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width))
        num_positions = (config.image // config.patch) ** 2 + 1
        self.positions = nn.Parameter(torch.randn(1, num_positions, config.width) * 0.02)
        self.blocks = nn.ModuleList(
            Block(config.width, config.num_heads, causal=False) for _ in range(config.num_layers)
        )
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, config.num_classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Loss of classifying ``images`` [batch, 3, height, width] as ``labels`` [batch]."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])).float(), labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig:
    """Blocks in each of the four groups of a ResNet; width of the first; image size and classes."""

    depths: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    image: int = 224
    num_classes: int = 1000


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a residual; the last one widens four times."""

    def __init__(self, inputs: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.reduce, self.reduce_norm = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.spread = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.spread_norm = nn.BatchNorm2d(width)
        self.widen, self.widen_norm = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == 4 * width
            else nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, inputs, height, width] to [batch, 4 width, height / stride, width / stride]."""
        y = F.relu(self.reduce_norm(self.reduce(x)))
        y = F.relu(self.spread_norm(self.spread(y)))
        return F.relu(self.widen_norm(self.widen(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Residual network with bottleneck blocks (He et al., 2015), strided in the 3x3 convolutions."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        width = config.width
        self.stem, self.stem_norm = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width)
        blocks, inputs = [], width
        for group, depth in enumerate(config.depths):
            for index in range(depth):
                blocks.append(Bottleneck(inputs, width << group, stride=2 if group and not index else 1))
                inputs = 4 * width << group
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inputs, config.num_classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Loss of classifying ``images`` [batch, 3, height, width] as ``labels`` [batch]."""
        x = F.max_pool2d(F.relu(self.stem_norm(self.stem(images))), 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)
