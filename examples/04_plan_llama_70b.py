"""Plan the training of Llama-3 70B on 64 devices, on any laptop: the model has shapes and no weights.

python examples/04_plan_llama_70b.py

The same on the command line:

autopar search llama3-70b --cluster 8x8xH100 --dp 8 --tp 8 --zero 3 --global-batch 8 --sequence 2048
"""

import autopar
from autopar.models.catalogue import build

model, args, kwargs, _ = build("llama3-70b", batch=8, sequence=2048)
plan = autopar.plan(
    model,
    args,
    kwargs,
    cluster=autopar.Cluster.parse("8x8xH100"),
    constraints=autopar.Constraints(dp=8, tp=8, pp=1, zero=3, sequence_parallel=True),
)
print(plan.explain())
plan.save("llama3-70b.json")
print("\nwritten to llama3-70b.json; compile(..., plan=autopar.Plan.load('llama3-70b.json')) uses it on 64 ranks")
