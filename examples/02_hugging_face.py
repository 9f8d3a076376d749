"""Train a GPT-2 of the transformers library, made from a configuration: nothing about the model changes.

torchrun --standalone --nproc-per-node 2 examples/02_hugging_face.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

torch.manual_seed(0)
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, use_cache=False)
config.bos_token_id = config.eos_token_id = 0
ids = torch.randint(256, (8, 64))  # random text, learned by heart
batch = {"input_ids": ids, "labels": ids}

# The loss is the model's own: its output has a field of that name.
model = autopar.compile(GPT2LMHeadModel(config).train(), kwargs=batch, constraints=autopar.Constraints(zero=3))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
for step in range(1, 21):
    output = model(**batch)
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if first and step % 5 == 0:
        print(f"step {step:2}  loss {output.loss.item():.3f}")
if first:
    print(model.plan.explain())
