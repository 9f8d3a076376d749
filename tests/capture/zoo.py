"""Small models, one for each thing that capture must get right, with one call and a loss each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

DIM = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Any] | None = None
    targets: tuple[Any, ...] = ()


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (6, DIM)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, DIM)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
            for _ in range(3)
        )
        self.out = nn.Linear(DIM, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return F.cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten(), ignore_index=3)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.rest = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.register_buffer("angle", torch.linspace(0, 1, 2), persistent=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        query = self.query(x).view(rows, length, 4, 2).transpose(1, 2) * self.angle.cos()
        key, value = self.rest(x).view(rows, length, 2, 4).transpose(1, 2).chunk(2, dim=-1)
        key, value = (t.repeat_interleave(2, dim=1) for t in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        return out.transpose(1, 2).flatten(2)


class ConvNorm(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4, momentum=momentum)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.act(self.norm(self.conv(x))).mean((2, 3)))


class Noisy(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=self.use_reentrant)
        return self.blocks[2](F.dropout(x, 0.3, self.training))


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(DIM, DIM).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(2, DIM)), nn.Parameter(torch.randn(DIM, 2))
        self.unused, self.ignored = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.front(x)
        return hidden + hidden @ self.down.T @ self.up.T, self.ignored(hidden)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class StraightThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Rounded.apply(self.first(x)))


class Penalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        score = self.net(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + (slope.norm(dim=-1) - 1).square().mean()


class Amp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.island = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.first(x)
            with torch.autocast("cpu", enabled=False):
                return self.island(hidden.to(x.dtype))


@dataclass
class Structured:
    """Not registered with pytree: capture opens it by itself."""

    scores: torch.Tensor
    hidden: list[torch.Tensor]
    note: str = "kept"
    extra: torch.Tensor | None = None


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(
        self, inputs: dict[str, Any], scales: list[float], *, mask: torch.Tensor | None = None, keep: bool = True
    ) -> Structured:
        hidden, kept = inputs["x"] + inputs["more"]["shift"], []
        for layer, scale in zip(self.layers, scales, strict=True):
            hidden = layer(hidden).tanh() * scale
            kept += [hidden] if keep else []
        return Structured(hidden if mask is None else hidden * mask[:, None], kept)


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        self.again = self.block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.block(self.block(x)))


class Assigned(nn.Module):
    """Keeps a moving average by assigning its buffers, and works in place on views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("average", torch.zeros(DIM))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x).clone()
        hidden[:, 1:3].mul_(2.0)
        hidden[:, 0] = 1.0
        self.average = 0.9 * self.average + 0.1 * hidden.mean(0)
        self.calls += 1
        return hidden + self.average


class Constants(nn.Module):
    """Reads tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.plain = torch.linspace(0, 1, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], dtype=x.dtype)
        return self.linear(x)[:, torch.tensor([0, 3])] * (weights + self.plain)[:2] * torch.tensor(3).item()


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(DIM, DIM))
        self.linear.register_forward_hook(lambda _, __, output: output * 2)
        self.linear.bias.register_hook(lambda grad: grad * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        share = self.gate(x).softmax(-1)
        best, which = share.topk(2, dim=-1)
        kept = torch.zeros_like(share).scatter(-1, which, best)
        out = sum(kept[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return {"out": out, "loss": out.square().mean() + share.mean(0).square().sum()}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(DIM, DIM, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


def cases() -> dict[str, Callable[[], Case]]:
    """A maker for every case: the same seed before gives the same model and batch."""
    tokens = lambda: torch.randint(0, 20, (4, 5))  # noqa: E731
    return {
        "tied": lambda: Case(model=Tied(), args=(tokens(), tokens())),
        "attention": lambda: Case(model=Attention(), args=(batch(3, 5, DIM), torch.rand(3, 5) > 0.2), loss_fn=square),
        "batch_norm": lambda: Case(model=ConvNorm(), args=(batch(4, 2, 5, 5),), loss_fn=square),
        "batch_norm_cumulative": lambda: Case(model=ConvNorm(None), args=(batch(4, 2, 5, 5),), loss_fn=square),
        "batch_norm_eval": lambda: Case(model=ConvNorm().eval(), args=(batch(4, 2, 5, 5),), loss_fn=square),
        "dropout_checkpoint": lambda: Case(model=Noisy(use_reentrant=False), args=(batch(),), loss_fn=square),
        "dropout_reentrant": lambda: Case(model=Noisy(use_reentrant=True), args=(batch(),), loss_fn=square),
        "half_frozen": lambda: Case(model=HalfFrozen(), args=(batch(),), loss_fn=lambda out: out[0].square().sum()),
        "custom_function": lambda: Case(model=StraightThrough(), args=(batch(),), loss_fn=square),
        "gradient_penalty": lambda: Case(model=Penalty(), args=(batch(),)),
        "autocast": lambda: Case(model=Amp(), args=(batch(),), loss_fn=square),
        "nested": lambda: Case(
            model=Nested(),
            args=({"x": batch(), "more": {"shift": batch()}}, [0.5, 2.0]),
            kwargs={"mask": torch.rand(6), "keep": True},
            loss_fn=lambda out: out.scores.mean() + sum(h.square().mean() for h in out.hidden),
        ),
        "reused": lambda: Case(model=Reused(), args=(batch(),), loss_fn=square),
        "assigned_buffers": lambda: Case(model=Assigned(), args=(batch(),), loss_fn=square),
        "constants": lambda: Case(model=Constants(), args=(batch(),), loss_fn=square),
        "hooks": lambda: Case(model=Hooked(), args=(batch(),), loss_fn=square),
        "experts": lambda: Case(model=Experts(), args=(batch(),), loss_fn=lambda out: out),
        "recurrent": lambda: Case(model=Recurrent(), args=(batch(5, 2, DIM),), loss_fn=square),
        "targets": lambda: Case(
            model=nn.Linear(DIM, 4),
            args=(batch(),),
            loss_fn=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0])),
            targets=(torch.randint(0, 4, (6,)),),
        ),
        "input_gradient": lambda: Case(model=nn.Linear(DIM, 4), args=(batch().requires_grad_(),), loss_fn=square),
        "no_loss": lambda: Case(model=Nested(), args=({"x": batch(), "more": {"shift": batch()}}, [0.5, 2.0])),
        "aliased_outputs": lambda: Case(model=Aliased(), args=(batch(),)),
    }


class Aliased(nn.Module):
    """Returns its input, a parameter, the same tensor twice and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        hidden = self.linear(x)
        return hidden, hidden, hidden[0], hidden.view(-1), x, self.linear.weight, hidden.argmax(-1), 7
