"""Force the split of Megatron-LM on a small GPT and show where its communication goes; runs without processes.

python examples/03_where_collectives_go.py

A block needs two reductions forward, after its two row-split layers, and two backward, where its two column-split
layers got their input.
"""

import torch

import autopar
from autopar.capture import capture
from autopar.lower import lower
from autopar.models.gpt import GPT, GPTConfig
from autopar.report.dump import dump

with torch.device("meta"):  # sizes are enough
    model = GPT(GPTConfig(num_layers=4, width=256, num_heads=8, sequence=64, vocabulary=512))
    ids = torch.zeros(8, 64, dtype=torch.long)

wishes = autopar.Constraints(dp=1, tp=4, pp=1)
plan = autopar.plan(model, (ids, ids), cluster=autopar.Cluster.parse("1x4xH100"), constraints=wishes)
program = lower(capture(model, (ids, ids)), plan, rank=0)

print(plan.explain())
print()
print(dump(program, layer="blocks.0", only="collectives"))
