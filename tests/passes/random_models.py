"""Random small models: what the fuzz captures.  Every block maps [batch, time, width] to the same shape.

A block draws its variant when it is made, so that a model is a fixed function.  Sizes are small, often odd and often
equal to each other (batch = time = width), because a layout inferred from sizes is wrong there.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a model: ``width`` is ``heads * head_width``."""

    batch: int
    time: int
    heads: int
    head_width: int
    vocab: int

    @property
    def width(self) -> int:
        return self.heads * self.head_width


def random_sizes(rnd: Random) -> Sizes:
    heads, head_width = rnd.choice((1, 2, 3, 4, 6)), rnd.choice((2, 3, 4))
    width = heads * head_width
    batch = rnd.choice((1, 2, 3, 4, 5, 6, 8, width))
    time = rnd.choice((1, 2, 3, 4, 5, 7, batch, width))
    return Sizes(batch=batch, time=time, heads=heads, head_width=head_width, vocab=rnd.choice((5, 8, 11, 13, width)))


class Block(nn.Module):
    """A block knows the sizes and keeps what it drew."""

    def __init__(self, rnd: Random, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.draw(rnd)

    def draw(self, rnd: Random) -> None:
        """Choose the variant and make the parameters."""


class Mlp(Block):
    def draw(self, rnd: Random) -> None:
        h, bias = self.sizes.width, rnd.random() < 0.5
        inner = rnd.choice((h, 2 * h, 5, 3 * self.sizes.heads))
        self.up, self.down = nn.Linear(h, inner, bias=bias), nn.Linear(inner, h, bias=rnd.random() < 0.5)
        acts = (F.gelu, F.relu, F.silu, torch.tanh, F.softplus, F.elu, F.hardswish, F.mish, F.leaky_relu)
        self.act = rnd.choice(acts)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class GatedMlp(Block):
    """[gate | up] packed in one weight, or apart."""

    def draw(self, rnd: Random) -> None:
        h, inner = self.sizes.width, rnd.choice((4, 5, 6, self.sizes.width))
        self.packed, self.down = nn.Linear(h, 2 * inner, bias=rnd.random() < 0.5), nn.Linear(inner, h)
        self.how = rnd.choice(("chunk", "split", "slice", "glu", "unbind"))

    def forward(self, x: Tensor) -> Tensor:
        y = self.packed(x)
        inner = y.shape[-1] // 2
        if self.how == "glu":
            return self.down(F.glu(y))
        if self.how == "chunk":
            gate, up = y.chunk(2, -1)
        elif self.how == "split":
            gate, up = y.split([inner, inner], -1)
        elif self.how == "slice":
            gate, up = y[..., :inner], y[..., inner:]
        else:
            gate, up = y.unflatten(-1, (2, inner)).unbind(-2)
        return self.down(F.silu(gate) * up)


class Norm(Block):
    def draw(self, rnd: Random) -> None:
        h = self.sizes.width
        self.how = rnd.choice(("layer", "layer", "rms", "rms_by_hand", "group", "batch", "instance", "plain"))
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(h))
        self.bias = nn.Parameter(0.1 * torch.randn(h))
        self.group = nn.GroupNorm(self.sizes.heads, h)
        self.batch = nn.BatchNorm1d(h, affine=rnd.random() < 0.7, track_running_stats=rnd.random() < 0.7)
        self.batch.train(rnd.random() < 0.8)

    def forward(self, x: Tensor) -> Tensor:
        shape = (self.sizes.width,)
        if self.how == "layer":
            return F.layer_norm(x, shape, self.weight, self.bias)
        if self.how == "plain":
            return F.layer_norm(x, shape)
        if self.how == "rms":
            return F.rms_norm(x, shape, self.weight)
        if self.how == "rms_by_hand":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight
        if self.sizes.batch * self.sizes.time == 1 or self.sizes.time * self.sizes.head_width == 1:
            return x * self.weight + self.bias
        if self.how == "group":
            return self.group(x.transpose(1, 2)).transpose(1, 2)
        if self.how == "instance" and self.sizes.time > 1:
            return F.instance_norm(x.transpose(1, 2), weight=self.weight, bias=self.bias).transpose(1, 2)
        return self.batch(x.transpose(1, 2)).transpose(1, 2)


class Attention(Block):
    """Grouped-query attention: packed or separate projections, masks of several shapes, the fused op or by hand."""

    def draw(self, rnd: Random) -> None:
        s = self.sizes
        self.kv_heads = rnd.choice([n for n in range(1, s.heads + 1) if s.heads % n == 0])
        self.q = nn.Linear(s.width, s.width, bias=rnd.random() < 0.5)
        self.kv = nn.Linear(s.width, 2 * self.kv_heads * s.head_width, bias=rnd.random() < 0.5)
        self.qkv = nn.Linear(s.width, s.width + 2 * self.kv_heads * s.head_width) if rnd.random() < 0.4 else None
        self.out = nn.Linear(s.width, s.width)
        self.mask = rnd.choice((None, "causal", "bool", "float", "heads", "keys"))
        self.how = rnd.choice(("fused", "fused", "gqa", "by_hand", "einsum"))
        self.relative = nn.Parameter(0.3 * torch.randn(s.heads, s.time, s.time))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, kv_width = self.sizes, self.kv_heads * self.sizes.head_width
        if self.qkv is None:
            q, (k, v) = self.q(x), self.kv(x).chunk(2, -1)
        else:
            q, k, v = self.qkv(x).split([s.width, kv_width, kv_width], -1)

        def heads(y: Tensor, count: int) -> Tensor:
            return y.view(s.batch, s.time, count, s.head_width).transpose(1, 2)

        return heads(q, s.heads), heads(k, self.kv_heads), heads(v, self.kv_heads)

    def bias_of(self, x: Tensor) -> Tensor | None:
        t = self.sizes.time
        if self.mask == "bool":
            return torch.ones(t, t, dtype=torch.bool).tril()
        if self.mask == "float":
            return torch.full((t, t), float("-inf"), dtype=x.dtype).triu(1)
        if self.mask == "heads":
            return self.relative.unsqueeze(0)
        if self.mask == "keys":
            return (
                (torch.arange(t) < t - 1)
                .logical_or(torch.arange(t) == 0)
                .view(1, 1, 1, t)
                .expand(self.sizes.batch, 1, t, t)
            )
        return None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        bias, causal = self.bias_of(x), self.mask == "causal"
        groups = self.sizes.heads // self.kv_heads
        if self.how == "gqa":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=True)
            return self.out(y.transpose(1, 2).flatten(2))
        if groups > 1:
            k, v = (y.repeat_interleave(groups, dim=1) for y in (k, v))
        if self.how == "fused":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)
            return self.out(y.transpose(1, 2).reshape(x.shape))
        if causal:
            bias = torch.full((x.shape[1],) * 2, float("-inf"), dtype=x.dtype).triu(1)
        scores = torch.einsum("bhld,bhsd->bhls", q, k) if self.how == "einsum" else q @ k.transpose(-1, -2)
        scores = scores * self.sizes.head_width**-0.5
        if bias is not None:
            scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Convolution(Block):
    """A convolution over time, or over [time, width] as an image, with pooling and resampling."""

    def draw(self, rnd: Random) -> None:
        s = self.sizes
        self.how = rnd.choice(("time", "depthwise", "grouped", "image", "transposed", "pool"))
        groups = {"depthwise": s.width, "grouped": s.heads}.get(self.how, 1)
        self.line = nn.Conv1d(s.width, s.width, 3, padding=1, groups=groups, bias=rnd.random() < 0.5)
        self.back = nn.ConvTranspose1d(s.width, s.width, 3, padding=1, groups=s.heads)
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 1, bias=rnd.random() < 0.5)
        self.norm = nn.BatchNorm2d(4)
        self.pool = rnd.choice((nn.AvgPool1d, nn.MaxPool1d))(3, stride=1, padding=1)
        self.shrink = rnd.random() < 0.5 and s.time % 2 == 0 and s.width % 2 == 0
        self.mode = rnd.choice(("nearest", "bilinear"))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "image":
            y = self.first(x.unsqueeze(1))
            y = F.relu(self.norm(y) if self.sizes.batch * self.sizes.time > 1 else y)
            if self.shrink:
                y = F.interpolate(F.max_pool2d(y, 2), scale_factor=2, mode=self.mode)
            return self.second(y).squeeze(1)
        y = x.transpose(1, 2)
        if self.how == "pool":
            y = self.pool(y)
        elif self.how == "transposed":
            y = self.back(y)
        else:
            y = self.line(y)
        return y.transpose(1, 2)


class Statistics(Block):
    """A reduction over some dims, put back by broadcasting."""

    def draw(self, rnd: Random) -> None:
        ways = ("mean", "sum", "amax", "amin", "var", "std", "logsumexp", "norm", "max", "prod", "median")
        self.how = rnd.choice(ways)
        self.dims = rnd.choice(((0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)))
        if self.how in ("max", "prod", "median"):
            self.dims = self.dims[:1]

    def forward(self, x: Tensor) -> Tensor:
        d = self.dims
        if self.how in ("mean", "sum", "amax", "amin", "logsumexp"):
            y = getattr(torch, self.how)(x, d, keepdim=True)
        elif self.how in ("var", "std"):
            y = getattr(torch, self.how)(x, d, keepdim=True, correction=0)
            y = y if self.how == "var" else y.clamp(min=0.1)
        elif self.how == "norm":
            y = torch.linalg.vector_norm(x, dim=d, keepdim=True)
        elif self.how == "prod":
            y = torch.tanh(x).prod(d[0], keepdim=True)
        else:
            y = getattr(torch, self.how)(x, d[0], keepdim=True).values
        return torch.tanh(x) * torch.tanh(y)


class Moves(Block):
    """Data moved about: cut, joined, rolled, padded, reshaped across the boundaries of dims."""

    def draw(self, rnd: Random) -> None:
        self.how = rnd.choice(
            (
                "roll",
                "flip",
                "pad",
                "shift",
                "cat_slices",
                "stack",
                "cross",
                "swap",
                "flatten",
                "repeat",
                "expand",
                "unbind",
                "even_odd",
                "heads_out",
                "unfold",
                "diagonal",
                "tril",
                "narrow_cat",
                "slice_add",
                "movedim",
            )
        )
        self.dim = rnd.choice((0, 1, 2))
        self.scale = nn.Parameter(torch.randn(self.sizes.width))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.how)(x) * self.scale

    def roll(self, x: Tensor) -> Tensor:
        return x.roll(1, self.dim)

    def flip(self, x: Tensor) -> Tensor:
        return x.flip(self.dim)

    def pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 1, 0))[:, :-1]

    def shift(self, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)

    def cat_slices(self, x: Tensor) -> Tensor:
        cut = max(1, x.shape[self.dim] // 2)
        return torch.cat([x.narrow(self.dim, cut, x.shape[self.dim] - cut), x.narrow(self.dim, 0, cut)], self.dim)

    def stack(self, x: Tensor) -> Tensor:
        return torch.stack([x, torch.tanh(x)], self.dim).sum(self.dim)

    def cross(self, x: Tensor) -> Tensor:
        return torch.tanh(x.reshape(x.shape[1], x.shape[0], -1)).reshape(x.shape)

    def swap(self, x: Tensor) -> Tensor:
        return torch.tanh(x.transpose(0, 1).contiguous()).view(x.shape)

    def flatten(self, x: Tensor) -> Tensor:
        return torch.tanh(x.flatten(0, 1)).flatten().view_as(x)

    def repeat(self, x: Tensor) -> Tensor:
        times = [1, 1, 1]
        times[self.dim] = 2
        return x.repeat(*times).chunk(2, self.dim)[1]

    def expand(self, x: Tensor) -> Tensor:
        return x.mean(self.dim, keepdim=True).expand_as(x)

    def unbind(self, x: Tensor) -> Tensor:
        parts = x.unbind(self.dim)
        return torch.stack(parts[1:] + parts[:1], self.dim)

    def even_odd(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., ::2], -x[..., 1::2]], -1)

    def heads_out(self, x: Tensor) -> Tensor:
        y = x.view(*x.shape[:2], self.sizes.heads, -1).permute(2, 0, 1, 3)
        return torch.tanh(y).permute(1, 2, 0, 3).reshape(x.shape)

    def unfold(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).sum(-1)

    def diagonal(self, x: Tensor) -> Tensor:
        outer = x.unsqueeze(-1) * x.unsqueeze(-2)
        return torch.diagonal(outer, dim1=-2, dim2=-1)

    def tril(self, x: Tensor) -> Tensor:
        return x.tril() - x.triu(1)

    def narrow_cat(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., -1:], x[..., :-1]], -1)

    def slice_add(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0] = y[:, -1] * 2
        return y

    def movedim(self, x: Tensor) -> Tensor:
        return torch.tanh(x.movedim(self.dim, 0)).movedim(0, self.dim)


class Lookups(Block):
    """Gather, scatter, index and sort."""

    def draw(self, rnd: Random) -> None:
        self.how = rnd.choice(
            (
                "gather",
                "index",
                "index_select",
                "topk",
                "scatter",
                "scatter_add",
                "index_put",
                "index_add",
                "sort",
                "where",
                "one_hot",
                "cumsum",
                "argmax",
                "pairs",
            )
        )
        self.dim = rnd.choice((0, 1, 2))
        self.table = nn.Parameter(torch.randn(self.sizes.vocab, self.sizes.width))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.how)(x)

    def ids(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2]) * 7 % self.sizes.vocab

    def order(self, x: Tensor) -> Tensor:
        return (torch.arange(x.shape[self.dim]) * 5 + 1) % x.shape[self.dim]

    def gather(self, x: Tensor) -> Tensor:
        shape = [1, 1, 1]
        shape[self.dim] = -1
        return x.gather(self.dim, self.order(x).view(shape).expand_as(x))

    def index(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.table)[self.ids(x)]

    def index_select(self, x: Tensor) -> Tensor:
        return x.index_select(self.dim, self.order(x))

    def topk(self, x: Tensor) -> Tensor:
        best, where = x.topk((x.shape[-1] + 1) // 2, -1)
        return torch.zeros_like(x).scatter(-1, where, best.softmax(-1))

    def scatter(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter(1, self.ids(x).unsqueeze(-1).expand_as(x) % x.shape[1], 1.5) * x

    def scatter_add(self, x: Tensor) -> Tensor:
        where = (self.ids(x) % x.shape[1]).unsqueeze(-1).expand_as(x)
        return torch.zeros_like(x).scatter_add(1, where, x)

    def index_put(self, x: Tensor) -> Tensor:
        rows = self.ids(x)[:, 0] % x.shape[0]
        return x.index_put((rows,), torch.tanh(x), accumulate=True)

    def index_add(self, x: Tensor) -> Tensor:
        return x.index_add(self.dim, self.order(x), torch.tanh(x))

    def sort(self, x: Tensor) -> Tensor:
        return x.sort(self.dim).values

    def where(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x.mean(self.dim, keepdim=True))

    def one_hot(self, x: Tensor) -> Tensor:
        return x + F.one_hot(self.ids(x), self.sizes.vocab).to(x.dtype) @ self.table

    def cumsum(self, x: Tensor) -> Tensor:
        return torch.tanh(x.cumsum(self.dim))

    def argmax(self, x: Tensor) -> Tensor:
        return x * F.one_hot(x.argmax(-1), x.shape[-1]).to(x.dtype)

    def pairs(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0]).view(-1, 1)
        return x[rows, (self.ids(x) * 3) % x.shape[1]]


class Products(Block):
    """Products of activations with each other, einsums and low-rank factors."""

    def draw(self, rnd: Random) -> None:
        s = self.sizes
        self.how = rnd.choice(("gram", "experts", "outer", "lora", "bilinear", "batched", "time_mix", "dot"))
        self.a, self.b = nn.Parameter(torch.randn(s.width, 2) * 0.3), nn.Parameter(torch.randn(2, s.width) * 0.3)
        self.up = nn.Parameter(torch.randn(3, s.width, 5) * 0.3)
        self.down = nn.Parameter(torch.randn(3, 5, s.width) * 0.3)
        self.mix = nn.Parameter(torch.randn(s.time, s.time) * 0.3)
        self.a.requires_grad_(rnd.random() < 0.7)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "gram":
            return torch.tanh(x @ x.transpose(1, 2)) @ x
        if self.how == "experts":
            gate = (x @ self.a @ self.b)[..., :1].sigmoid()
            y = torch.einsum("nbtf,nfh->bth", F.gelu(torch.einsum("bth,nhf->nbtf", x, self.up)), self.down)
            return gate * y
        if self.how == "outer":
            return torch.einsum("bti,btj,ij->bti", x, torch.tanh(x), self.a @ self.b)
        if self.how == "bilinear":
            return torch.einsum("bth,sh->bts", x, torch.tanh(x[0])) @ torch.tanh(x[0])
        if self.how == "batched":
            return torch.baddbmm(x, x @ self.a, self.b.expand(x.shape[0], -1, -1), beta=0.5)
        if self.how == "time_mix":
            return torch.einsum("ts,bsh->bth", self.mix, x)
        if self.how == "dot":
            return x * torch.tanh((x * x).sum() + torch.dot(self.a[:, 0], self.b[0]))
        return x @ self.a @ self.b


class Noise(Block):
    def draw(self, rnd: Random) -> None:
        self.how = rnd.choice(("dropout", "dropout", "rand_like", "alpha", "channels"))
        self.p = rnd.choice((0.1, 0.5))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "dropout":
            return F.dropout(x, self.p)
        if self.how == "rand_like":
            return x * torch.rand_like(x)
        if self.how == "alpha":
            return x + torch.randn(x.shape, dtype=x.dtype)
        return F.dropout1d(x, self.p)


class Softmaxes(Block):
    def draw(self, rnd: Random) -> None:
        self.how, self.dim = rnd.choice(("softmax", "log_softmax", "sigmoid", "softmin")), rnd.choice((0, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "sigmoid":
            return x.sigmoid()
        return getattr(F, self.how)(x, self.dim)


BLOCKS = (
    Mlp,
    GatedMlp,
    Norm,
    Norm,
    Attention,
    Attention,
    Convolution,
    Statistics,
    Moves,
    Moves,
    Lookups,
    Lookups,
    Products,
    Noise,
    Softmaxes,
)


class Embed(Block):
    """Tokens to [batch, time, width]: with padding, positions, or a plain product of one-hot vectors."""

    def draw(self, rnd: Random) -> None:
        s = self.sizes
        self.table = nn.Embedding(s.vocab, s.width, padding_idx=rnd.choice((None, 0, s.vocab - 1)))
        self.places = nn.Embedding(s.time, s.width) if rnd.random() < 0.6 else None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return x if self.places is None else x + self.places(torch.arange(ids.shape[1]))


class Head(Block):
    """The loss."""

    def draw(self, rnd: Random) -> None:
        s = self.sizes
        ways = ("classes", "classes", "classes", "pooled", "square", "binary", "nll", "contrast", "huber")
        self.how = rnd.choice(ways)
        self.project = nn.Linear(s.width, s.vocab, bias=rnd.random() < 0.5)
        self.ignore, self.reduction = rnd.random() < 0.5, rnd.choice(("mean", "mean", "sum"))
        self.weighted, self.smooth = rnd.random() < 0.3, rnd.choice((0.0, 0.0, 0.1))
        self.register_buffer("weights", torch.rand(s.vocab) + 0.5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.how == "square":
            return F.mse_loss(x, torch.tanh(x).detach() * 0.5, reduction=self.reduction)
        if self.how == "huber":
            return F.huber_loss(x, torch.zeros_like(x), reduction=self.reduction)
        if self.how == "contrast":
            y = F.normalize(x.mean(1), dim=-1)
            return F.cross_entropy(y @ y.t() / 0.5, torch.arange(y.shape[0]))
        logits = self.project(x)
        if self.how == "binary":
            wanted = F.one_hot(labels.clamp(min=0), self.sizes.vocab).to(x.dtype)
            return F.binary_cross_entropy_with_logits(logits, wanted, reduction=self.reduction)
        if self.how == "pooled":
            return F.cross_entropy(logits.mean(1), labels[:, 0].clamp(min=0))
        weights = self.weights if self.weighted else None
        labels = labels if self.ignore else labels.clamp(min=0)
        if self.how == "nll":
            rows = logits.log_softmax(-1).transpose(1, 2)
            return F.nll_loss(rows, labels, weights, ignore_index=-100, reduction=self.reduction)
        smooth = 0.0 if self.weighted else self.smooth
        return F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), weights, reduction=self.reduction, label_smoothing=smooth
        )


class RandomModel(nn.Module):
    """Tokens -> embedding -> blocks, some of them with a residual and some twice -> loss."""

    def __init__(self, rnd: Random, sizes: Sizes, num_blocks: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed, self.head = Embed(rnd, sizes), Head(rnd, sizes)
        if rnd.random() < 0.4:
            self.head.project.weight = self.embed.table.weight
        self.blocks = nn.ModuleList(rnd.choice(BLOCKS)(rnd, sizes) for _ in range(num_blocks))
        self.residual = [rnd.random() < 0.6 for _ in self.blocks]
        self.shared = rnd.random() < 0.15

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block, residual in zip([*self.blocks, *self.blocks[: self.shared]], [*self.residual, True], strict=False):
            y = block(x)
            x = x + y if residual else y
        return self.head(x, labels)


def random_model(rnd: Random) -> tuple[RandomModel, tuple[Tensor, Tensor]]:
    """A model and the arguments of one call; its parameters and inputs depend on what ``rnd`` draws alone."""
    sizes = random_sizes(rnd)
    torch.manual_seed(rnd.randrange(1000))
    model = RandomModel(rnd, sizes, rnd.choice((1, 2, 2, 3)))
    model.to(rnd.choice((torch.float32, torch.float64, torch.float64)))
    ids = torch.randint(0, sizes.vocab, (sizes.batch, sizes.time))
    labels = torch.randint(0, sizes.vocab, (sizes.batch, sizes.time))
    labels[torch.rand(labels.shape) < 0.2] = -100
    labels[0, 0] = 1
    return model, (ids, labels)
