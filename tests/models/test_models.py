"""The built-in models have the published sizes and train; MODEL may also be a factory or a configuration."""

import json

import pytest
import torch

from autopar.cost_models.errors import UsageError
from autopar.models.catalogue import build, names
from autopar.models.gpt import BERT, GPT, BERTConfig, GPTConfig
from autopar.models.huggingface import from_config
from autopar.models.llama import Llama, LlamaConfig
from autopar.models.load import load_model
from autopar.models.vision import ResNet, ResNetConfig, ViT, ViTConfig

# Millions of parameters as the papers and model cards give them.
PUBLISHED = {
    "gpt2": 124.4,
    "gpt2-medium": 354.8,
    "gpt2-large": 774.0,
    "gpt2-xl": 1557.6,
    "gpt3-175b": 174_600,
    "llama3-8b": 8030,
    "llama3-70b": 70_554,
    "llama3-405b": 405_853,
    "mixtral-8x7b": 46_703,
    "bert": 109.5,
    "t5": 222.9,
    "vit-l16": 304.3,
    "resnet50": 25.56,
}


@pytest.mark.parametrize("name", names())
def test_sizes_are_the_published_ones(name):
    model, args, kwargs, loss_fn = build(name, batch=2)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(PUBLISHED[name], rel=2e-3)
    assert all(p.is_meta for p in model.parameters())
    assert {t.shape[0] for t in (*args, *kwargs.values())} == {2}
    assert loss_fn is None


TINY = {
    "gpt": lambda: GPT(GPTConfig(num_layers=2, width=16, num_heads=2, sequence=8, vocabulary=11)),
    "bert": lambda: BERT(BERTConfig(num_layers=1, width=16, num_heads=2, sequence=8, vocabulary=11)),
    "llama": lambda: Llama(LlamaConfig(num_layers=1, width=16, num_heads=4, num_kv_heads=2, hidden=24, vocabulary=11)),
    "mixtral": lambda: Llama(
        LlamaConfig(num_layers=1, width=16, num_heads=4, num_kv_heads=2, hidden=24, vocabulary=11, num_experts=4)
    ),
    "vit": lambda: ViT(ViTConfig(num_layers=1, width=16, num_heads=2, patch=4, image=8, num_classes=11)),
    "resnet": lambda: ResNet(ResNetConfig(depths=(1, 2), width=4, image=32, num_classes=11)),
}


def tiny_call(kind):
    labels = torch.randint(11, (3,))
    if kind == "vit":
        return torch.randn(3, 3, 8, 8), labels
    if kind == "resnet":
        return torch.randn(3, 3, 32, 32), labels
    ids = torch.randint(1, 11, (3, 8))
    return (ids, torch.zeros_like(ids), ids) if kind == "bert" else (ids, ids)


@pytest.mark.parametrize("kind", TINY)
def test_every_architecture_learns_by_heart(kind):
    model, call = TINY[kind](), tiny_call(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        losses.append(model(*call))
        losses[-1].backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0].dim() == 0
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_decoders_do_not_see_what_comes_later(kind):
    model = TINY[kind]().eval()
    ids = torch.randint(11, (1, 8))
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % 11
    labels = torch.full((1, 8), -100)
    labels[0, :7] = 3
    assert torch.equal(model(ids, labels), model(changed, labels))


def test_a_token_takes_the_experts_that_the_router_chose():
    torch.manual_seed(0)
    config = LlamaConfig(num_layers=1, width=8, num_heads=2, num_kv_heads=1, hidden=12, vocabulary=5, num_experts=4)
    experts = Llama(config).blocks[0].mlp
    x = torch.randn(2, 3, 8)
    wanted = torch.zeros_like(x)
    for row in range(2):
        for place in range(3):
            token = x[row, place]
            scores, which = experts.router(token).topk(2)
            for weight, expert in zip(scores.softmax(0), which, strict=True):
                inner = torch.nn.functional.silu(token @ experts.gate[expert]) * (token @ experts.up[expert])
                wanted[row, place] += weight * (inner @ experts.down[expert])
    torch.testing.assert_close(experts(x), wanted)


def test_batch_sequence_and_dtype_are_those_asked_for():
    model, (ids, labels), _, _ = build("llama3-8b", batch=3, sequence=17, dtype=torch.float16)
    assert ids.shape == labels.shape == (3, 17)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "gpt-2", "batch": 1}, "did you mean 'gpt2'"),
        ({"name": "nothing", "batch": 1}, "they are gpt2, "),
        ({"name": "gpt2", "batch": 0}, "at least 1"),
        ({"name": "gpt2", "batch": 1, "sequence": 1025}, "use 1 to 1024"),
        ({"name": "resnet50", "batch": 1, "sequence": 8}, "takes images"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        build(**arguments)


FACTORY = """
import torch
def plain():
    return torch.nn.Linear(4, 4), (torch.ones(2, 4),), {}
def sized(batch=2, sequence=3):
    return torch.nn.Linear(4, 4), (torch.ones(batch, sequence, 4),), {}, lambda out: out.sum()
def wrong():
    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)
def failing():
    raise ValueError("no such size")
"""


@pytest.fixture
def factory_file(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(FACTORY)
    return path


def test_a_factory_of_a_file(factory_file):
    plain = load_model(f"{factory_file}:plain")
    assert plain.loss_fn is None
    assert plain.args[0].shape == (2, 4)
    sized = load_model(f"{factory_file}:sized", batch=5)
    assert sized.args[0].shape == (5, 3, 4)
    assert sized.loss_fn(torch.ones(2)) == 2


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("{}:missing", {}, "has no function 'missing'"),
        ("{}:wrong", {}, r"returned \(Linear, tuple\); it must return \(model, args, kwargs\)"),
        ("{}:failing", {}, "failed: ValueError: no such size"),
        ("{}:plain", {"batch": 4}, "takes no batch"),
        ("{}", {}, "my_model.py:FUNCTION"),
        ("{}x.py:f", {}, "there is no file"),
        ("none.json", {}, "cannot be read"),
        ("model.bin", {}, "is no model"),
    ],
)
def test_a_spec_that_names_no_model_is_refused(factory_file, spec, options, message):
    with pytest.raises(UsageError, match=message):
        load_model(spec.format(factory_file), **options)


def test_a_file_that_does_not_import_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    with pytest.raises(UsageError, match="cannot be imported: ModuleNotFoundError"):
        load_model(f"{tmp_path}/broken.py:make")


def test_a_configuration_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32}
    fields |= {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    path.write_text(json.dumps(fields | {"max_position_embeddings": 16}))
    loaded = load_model(str(path), batch=3)
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert loaded.kwargs["input_ids"].shape == (3, 16)
    assert all(p.is_meta for p in loaded.model.parameters())
    on_cpu = load_model(str(path), batch=3, device="cpu")
    assert on_cpu.model(**on_cpu.kwargs).loss.dim() == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [({}, "no model_type"), ({"model_type": "no-such-model"}, "cannot build a 'no-such-model'")],
)
def test_a_configuration_that_transformers_does_not_know(fields, message):
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match=message):
        from_config(fields, batch=1, sequence=None, device="meta")
