"""The lockstep run gives what a real job gives: its numbers, its random stream, its memory behaviour."""

import gc
import operator
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autopar.passes.base import Mesh
from autopar.verify import run_lockstep
from tests.verify.sketch import Sketch, aten, c10d, program

RANKS = 2
# op, arguments after the tensor ("GROUP" stands for the group's name), whether the op takes a list
OPS = {
    "all_reduce": (c10d.all_reduce.default, ("sum", "GROUP")),
    "all_reduce max": (c10d.all_reduce.default, ("max", "GROUP")),
    "all_reduce avg": (c10d.all_reduce.default, ("avg", "GROUP")),
    "all_reduce product": (c10d.all_reduce.default, ("product", "GROUP")),
    "all_gather": (c10d.all_gather_into_tensor.default, (RANKS, "GROUP")),
    "reduce_scatter": (c10d.reduce_scatter_tensor.default, ("sum", RANKS, "GROUP")),
    "all_to_all": (c10d.all_to_all_single.default, ([3, 3], [3, 3], "GROUP")),
    "broadcast": (c10d.broadcast.default, (1, "GROUP")),
}


def tensor_of(rank):
    """A tensor that is not contiguous and differs from rank to rank."""
    return (torch.arange(24.0).reshape(4, 6).t() + 1) * (rank + 1) / 7


def arguments_for(arguments, group):
    return [group if a == "GROUP" else a for a in arguments]


def gloo_worker(rank, store, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    group = dist.group.WORLD.group_name
    results = {
        name: c10d.wait_tensor(op(tensor_of(rank), *arguments_for(arguments, group)))
        for name, (op, arguments) in OPS.items()
    }
    other = 1 - rank
    buffer = torch.empty(6, 4)
    sent = tensor_of(rank).contiguous()
    pending = [c10d.isend(sent, other, 3, group), c10d.irecv(buffer, other, 3, group)]
    results["send and receive"] = [c10d.wait_tensor(p) for p in pending][1]
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_every_communication_equals_gloo(tmp_path):
    mp.spawn(gloo_worker, args=(str(tmp_path / "store"), str(tmp_path)), nprocs=RANKS)
    mesh = Mesh(axes=("dp",), sizes=(RANKS,))
    programs = []
    for rank in range(RANKS):
        sketch = Sketch()
        x = sketch.input("x", (6, 4))
        results = [sketch.wait(op, x, *arguments_for(arguments, "dp")) for op, arguments in OPS.values()]
        buffer = sketch.call(aten.empty.memory_format, [6, 4], device="cpu")
        send = sketch.call(c10d.isend.default, x, 1 - rank, 3, "dp")
        receive = sketch.call(c10d.irecv.default, buffer, 1 - rank, 3, "dp")
        sketch.call(c10d.wait_tensor.default, send)
        results.append(sketch.call(c10d.wait_tensor.default, receive))
        programs.append(program(sketch, results, mesh, rank))
    outputs = run_lockstep(programs, [[tensor_of(r)] for r in range(RANKS)])
    for rank in range(RANKS):
        real = torch.load(tmp_path / f"{rank}.pt")
        assert len(real) == len(outputs[rank])
        for (name, want), got in zip(real.items(), outputs[rank], strict=True):
            assert torch.equal(got, want), name
            assert got.stride() == want.stride(), name


def test_every_rank_draws_the_stream_of_one_device():
    """Draws before and after a wait are those of a rank that runs alone, and the caller's stream does not move."""
    mesh = Mesh(axes=("dp",), sizes=(3,))
    programs = []
    for rank in range(3):
        sketch = Sketch()
        x = sketch.input("x", (2,))
        first = sketch.call(aten.rand.default, [4], device="cpu")
        total = sketch.wait(c10d.all_reduce.default, x, "sum", "dp")
        second = sketch.call(aten.native_dropout.default, sketch.call(aten.ones_like.default, first), 0.5, train=True)
        kept = sketch.graph.call_function(operator.getitem, (second, 0))
        programs.append(program(sketch, [first, total, kept], mesh, rank))
    torch.manual_seed(11)
    first, kept = torch.rand(4), torch.native_dropout(torch.ones(4), 0.5, train=True)[0]
    torch.manual_seed(11)
    before = torch.get_rng_state()
    results = run_lockstep(programs, [[torch.ones(2)]] * 3)
    assert torch.equal(torch.get_rng_state(), before)
    for result in results:
        assert torch.equal(result[0], first)
        assert torch.equal(result[2], kept)


def test_values_are_let_go_after_their_last_use():
    mesh = Mesh(axes=("dp",), sizes=(1,))
    sketch = Sketch()
    node = sketch.input("x", (4,))
    for _ in range(20):
        node = sketch.wait(c10d.all_reduce.default, sketch.call(aten.mul.Tensor, node, 2.0), "sum", "dp")
    alive, most = [], 0

    def watch(rank, node, value):
        nonlocal most
        alive.append(weakref.ref(value))
        most = max(most, sum(ref() is not None for ref in alive))

    gc.collect()
    (result,) = run_lockstep([program(sketch, [node], mesh, 0)], [[torch.ones(4)]], observer=watch)
    assert result[0].tolist() == [2.0**20] * 4
    assert most <= 4


def test_results_do_not_share_memory_between_ranks():
    mesh = Mesh(axes=("dp",), sizes=(2,))
    programs = []
    for rank in range(2):
        sketch = Sketch()
        x = sketch.input("x", (4,))
        total = sketch.wait(c10d.all_reduce.default, x, "sum", "dp")
        gathered = sketch.wait(c10d.all_gather_into_tensor.default, x, 2, "dp")
        programs.append(program(sketch, [total, gathered], mesh, rank))
    one, two = run_lockstep(programs, [[torch.ones(4)], [torch.ones(4)]])
    pointers = [t.data_ptr() for t in (*one, *two)]
    assert len(set(pointers)) == 4


def test_ambient_autocast_and_grad_mode_do_not_reach_the_programs():
    mesh = Mesh(axes=("dp",), sizes=(1,))
    sketch = Sketch()
    x = sketch.input("x", (4, 4))
    programs = [program(sketch, [sketch.call(aten.mm.default, x, x)], mesh, 0)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ((result,),) = run_lockstep(programs, [[torch.ones(4, 4, requires_grad=True)]])
    assert result.dtype == torch.float32
    assert not result.requires_grad
