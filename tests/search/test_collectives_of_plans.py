"""What a plan communicates, counted by layer: Megatron's and data parallelism's collectives, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx, nn

from autopar.capture import capture
from autopar.cost_models.cluster import Cluster
from autopar.lower import Lowering
from autopar.models.llama import Llama, LlamaConfig
from autopar.passes.base import InputKind, OutputKind, Phase, Program
from autopar.passes.placement import Shard
from autopar.passes.torch_ops import ALL_REDUCE, is_collective
from autopar.plan import Constraints
from autopar.search.planner import Planner

transformers = pytest.importorskip("transformers")


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=96,
        n_positions=16,
        n_embd=32,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    ids = torch.randint(0, 96, (4, 16))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


def program_of(constraints: Constraints, ranks: int, *, disable: tuple[str, ...] = ("bucket", "overlap")) -> Program:
    model, kwargs = gpt2()
    step = capture(model, (), kwargs)
    plan = Planner(step, Cluster.local(ranks), constraints).best(ranks)
    return Lowering(step, plan, disable_passes=disable).program(0)


def collectives(program: Program) -> list[fx.Node]:
    return [n for n in program.graph_module.graph.nodes if is_collective(n)]


def block_of(node: fx.Node) -> str:
    parts = node.meta["layer"].split(".")
    return ".".join(parts[:3]) if parts[:2] == ["transformer", "h"] else ""


def test_tensor_parallel_gpt2_has_two_all_reduces_a_block_each_way() -> None:
    program = program_of(Constraints(dp=1, tp=2, pp=1), 2)
    counted = Counter((block_of(n), n.meta["phase"]) for n in collectives(program) if block_of(n))
    assert counted == {(f"transformer.h.{i}", phase): 2 for i in range(3) for phase in Phase}
    assert all(n.target is ALL_REDUCE for n in collectives(program) if block_of(n))


def test_data_parallel_gpt2_reduces_gradients_and_scalars_of_the_loss() -> None:
    program = program_of(Constraints(dp=2, tp=1, pp=1), 2)
    outputs = dict(zip(program.graph_module.graph.output_node().args[0], program.outputs, strict=True))
    gradients = scalars = 0
    for node in collectives(program):
        assert node.target is ALL_REDUCE
        if node.meta["val"].dim() == 0:
            scalars += 1
            continue
        (wait,) = node.users
        while wait not in outputs:
            (wait,) = wait.users
        assert outputs[wait].kind is OutputKind.GRADIENT
        gradients += 1
    assert gradients == sum(spec.kind is OutputKind.GRADIENT for spec in program.outputs)
    assert scalars == 2  # the sum of the losses and the number of valid tokens


def test_sequence_parallel_gpt2_keeps_activations_between_regions_split() -> None:
    program = program_of(Constraints(dp=1, tp=2, pp=1, sequence_parallel=True), 2)
    names = Counter(
        (block_of(n), n.meta["phase"], n.target._schema.name.split("::")[1])
        for n in collectives(program)
        if block_of(n) and n.meta["val"].numel() > 32 * 2  # not the gradients of norms and biases
    )
    assert not any("all_reduce" in name for _, _, name in names)
    for i in range(3):
        for phase in Phase:
            assert names[(f"transformer.h.{i}", phase, "reduce_scatter_tensor")] == 2
    adds = [n for n in program.graph_module.graph.nodes if n.target is torch.ops.aten.add.Tensor and block_of(n)]
    wide = [n for n in adds if tuple(n.meta["val"].shape) == (4, 16, 32)]
    assert not wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [512, 1024, 2048])  # shorter than the width, equal, longer
def test_sequence_parallel_llama_is_megatrons_however_long_the_sequence(length: int, dtype: torch.dtype) -> None:
    config = LlamaConfig(num_layers=3, width=1024, num_heads=16, num_kv_heads=8, hidden=3072, vocabulary=9600)
    with torch.device("meta"):
        model, ids = Llama(config).to(dtype), torch.zeros(8, length, dtype=torch.long)
    step = capture(model, (ids, ids))
    plan = Planner(step, Cluster.parse("1x2xH100"), Constraints(dp=1, tp=2, pp=1, sequence_parallel=True)).best(2)
    program = Lowering(step, plan, disable_passes=("bucket", "overlap")).program(0)
    names = Counter(
        (n.meta["phase"], n.target._schema.name.split("::")[1])
        for n in collectives(program)
        if n.meta["layer"].startswith("blocks.1") and n.meta["val"].numel() > 1024  # not the gradients of norms
    )
    assert names == {(p, name): 2 for p in Phase for name in ("reduce_scatter_tensor", "all_gather_into_tensor")}
    pairs = zip(program.inputs, program.input_tensors, strict=True)
    held = {spec.name: tensor for spec, tensor in pairs if spec.kind is InputKind.PARAMETER}
    assert all(isinstance(t.layout[-1], Shard) for name, t in held.items() if len(t.shape) == 2 and "blocks" in name)


def test_buckets_join_the_gradient_reductions() -> None:
    program = program_of(Constraints(dp=2, tp=1, pp=1), 2, disable=())
    assert len([n for n in collectives(program) if n.meta["val"].dim()]) == 1
