"""Train a byte-level GPT on the sources of Python's standard library, on as many processes as torchrun starts.

python examples/01_train_gpt.py                                        one device
torchrun --standalone --nproc-per-node 2 examples/01_train_gpt.py      two, split as the search likes
torchrun --standalone --nproc-per-node 2 examples/01_train_gpt.py --tp 2
"""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import autopar


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width=128, layers=4, heads=4, length=128):
        super().__init__()
        self.tok, self.pos = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.tok(ids) + self.pos.weight)))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, default in {"steps": 100, "batch": 16, "dp": None, "tp": None, "zero": None}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
options = parser.parse_args()

torch.manual_seed(0)  # every rank draws the same global batch
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sources)), dtype=torch.uint8).long()


def rows():
    return torch.stack([text[i : i + 129] for i in torch.randint(len(text) - 129, (options.batch,))])


def loss_fn(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


ids = rows()
model = autopar.compile(
    GPT(),
    (ids[:, :-1],),
    loss_fn=loss_fn,
    targets=(ids[:, 1:],),
    constraints=autopar.Constraints(dp=options.dp, tp=options.tp, zero=options.zero),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
console = Console(quiet=torch.distributed.is_initialized() and torch.distributed.get_rank() > 0)
with console.status("training") as status:
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        ids = rows()
        loss = model(ids[:, :-1], targets=(ids[:, 1:],))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rate = step * options.batch * 128 / (time.perf_counter() - start)
        status.update(f"step {step}/{options.steps}  loss {loss.item():.3f}  {rate:,.0f} tokens/s")
        if step % 10 == 0:
            console.print(f"step {step:4}  loss {loss.item():.3f}  {rate:8,.0f} tokens/s")
console.print(model.plan.explain(), markup=False, highlight=False, soft_wrap=True)
