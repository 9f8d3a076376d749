"""Train a byte-level GPT on the sources of Python's standard library.

python examples/01_train_gpt.py                                                 one device
torchrun --standalone --nproc-per-node 2 examples/01_train_gpt.py [--tp 2]      two; what is not fixed is chosen
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
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        layers = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(*layers)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, width=128, layers=4, heads=4, length=128):
        super().__init__()
        self.tok, self.pos = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids, labels):
        logits = self.head(self.norm(self.blocks(self.tok(ids) + self.pos.weight)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, default in {"steps": 100, "batch": 16, "dp": None, "tp": None, "zero": None}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
options = parser.parse_args()
constraints = autopar.Constraints(dp=options.dp, tp=options.tp, zero=options.zero)

torch.manual_seed(0)  # every rank draws the same global batch
sources = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
rows = torch.frombuffer(bytearray(sources), dtype=torch.uint8).long().unfold(0, 129, 129)
batches = (rows[torch.randint(len(rows), (options.batch,))] for _ in range(options.steps))

example = torch.zeros(options.batch, 128, dtype=torch.long)
model = autopar.compile(GPT(), (example, example), constraints=constraints)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
console = Console(quiet=torch.distributed.is_initialized() and torch.distributed.get_rank() > 0)
with console.status("training") as status:
    start = time.perf_counter()
    for step, batch in enumerate(batches, 1):
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rate = step * example.numel() / (time.perf_counter() - start)
        line = f"step {step}/{options.steps}  loss {loss.item():.3f}  {rate:,.0f} tokens/s"
        status.update(line)
        if step % 10 == 0:
            console.print(line)
console.print(model.plan.explain(), markup=False, highlight=False, soft_wrap=True)
