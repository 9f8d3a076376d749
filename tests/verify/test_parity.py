import dataclasses
import math

import pytest
import torch

from autopar.cost_models.errors import VerificationError
from autopar.passes.base import Mesh, OutputKind, OutputSpec, StepGraph
from autopar.verify import check_programs, verify_programs
from autopar.verify.parity import nudged
from autopar.verify.tolerance import Tolerance
from tests.verify.sketch import BATCH, HIDDEN, OUT, WIDTH, Sketch, aten, mlp_programs, mlp_step


@pytest.mark.parametrize(
    ("dp", "tp", "zero"), [(1, 1, False), (1, 2, False), (4, 1, False), (2, 3, False), (4, 4, True)]
)
def test_right_programs_equal_one_device(dp, tp, zero):
    programs = mlp_programs(dp, tp, zero=zero)
    check_programs(programs)
    report = verify_programs(mlp_step(), programs, 7)
    assert report.ok, report.text()
    assert [(r.kind, r.name) for r in report.rows][1] == (OutputKind.GRADIENT, "up")
    assert max(r.error for r in report.rows) < 1e-6
    assert all(r.drift == 0 for r in report.rows)
    assert "all equal to one device" in report.text()


def test_uneven_rows_are_padded_and_cut():
    assert WIDTH % 4, "the case needs rows that do not divide"
    assert verify_programs(mlp_step(), mlp_programs(4, 1, zero=True), 3).ok


def test_a_forgotten_forward_reduction_is_found_at_its_node():
    report = verify_programs(mlp_step(), mlp_programs(1, 2, forget="forward"), 7)
    assert not report.ok
    found = report.first_mismatch
    assert (found.origin, found.ranks) == ("mul", (0, 1))
    assert found.source.startswith("model.py:")
    assert "first wrong value: mul = aten.mul.Tensor" in report.text()


def test_a_forgotten_gradient_reduction_is_reported_though_every_node_is_right():
    report = verify_programs(mlp_step(), mlp_programs(2, 1, forget="gradient"), 7)
    wrong = [r.name for r in report.rows if not r.ok]
    assert wrong == ["down"]
    assert (report.first_mismatch.origin, report.first_mismatch.layer) == ("mm_2", "mlp.down")
    assert "right where it is computed, wrong as the gradient down" in str(report.first_mismatch)
    assert report.rows[2].drift > 0


def test_one_wrong_rank_is_named_with_layer_and_op():
    programs = mlp_programs(2, 2)
    node = next(n for n in programs[3].graph_module.graph.nodes if n.meta.get("origin") == "relu")
    node.target = torch.ops.aten.tanh.default
    programs[3].graph_module.recompile()
    report = verify_programs(mlp_step(), programs, 7)
    assert (report.first_mismatch.origin, report.first_mismatch.ranks) == ("relu", (3,))
    assert report.first_mismatch.layer == "mlp.up"
    assert "rank 3" in str(report.first_mismatch)
    assert verify_programs(mlp_step(), programs, 7, locate=False).first_mismatch is None


def test_a_loose_tolerance_is_the_callers_choice():
    programs = mlp_programs(1, 2)
    node = next(n for n in programs[0].graph_module.graph.nodes if n.meta.get("origin") == "mul_1")
    node.args = (node.args[0], 2.001)
    assert not verify_programs(mlp_step(), programs, 7).ok
    assert verify_programs(mlp_step(), programs, 7, rtol=1e-2).ok


def test_given_values_are_used_and_checked():
    values = {"up": torch.ones(WIDTH, HIDDEN), "down": torch.ones(HIDDEN, OUT), "args[0]": torch.ones(BATCH, WIDTH)}
    assert verify_programs(mlp_step(), mlp_programs(2, 2), values).ok
    with pytest.raises(VerificationError, match="no value for the parameter 'down'"):
        verify_programs(mlp_step(), mlp_programs(2, 2), {k: v for k, v in values.items() if k != "down"})
    with pytest.raises(VerificationError, match="captured with"):
        verify_programs(mlp_step(), mlp_programs(2, 2), values | {"up": torch.ones(2, 2)})


def test_nan_must_be_at_the_same_places():
    x = torch.randn(BATCH, WIDTH)
    x[1, 2] = math.nan
    values = {"up": torch.rand(WIDTH, HIDDEN), "down": torch.rand(HIDDEN, OUT), "args[0]": x}
    assert verify_programs(mlp_step(), mlp_programs(2, 2), values).ok
    programs = mlp_programs(2, 2)
    for program in programs:
        graph = program.graph_module.graph
        (x,) = [n for n in graph.nodes if n.name == "args"]
        with graph.inserting_after(x):
            clean = graph.call_function(torch.ops.aten.nan_to_num.default, (x,))
        x.replace_all_uses_with(clean, delete_user_cb=lambda user, clean=clean: user is not clean)
    report = verify_programs(mlp_step(), programs, values)
    assert [(r.name, r.error) for r in report.rows] == [("loss", math.inf), ("up", math.inf), ("down", math.inf)]


def test_programs_of_too_few_ranks_are_refused():
    with pytest.raises(VerificationError, match="ranks 0 to 3 are needed"):
        verify_programs(mlp_step(), mlp_programs(2, 2)[:3], 0)
    with pytest.raises(VerificationError, match="another mesh"):
        verify_programs(mlp_step(), [*mlp_programs(1, 2)[:1], *mlp_programs(2, 1)[1:]], 0)


def test_report_of_a_missing_gradient():
    step = mlp_step()
    step = StepGraph(graph_module=step.graph_module, inputs=step.inputs, outputs=step.outputs)
    output = step.graph.output_node()
    loss, _, down = output.args[0]
    output.args = ((loss, None, down),)
    report = verify_programs(step, mlp_programs(1, 2), 0)
    assert "where one device has None" in report.rows[1].note
    assert report.mesh == Mesh(axes=("dp", "tp"), sizes=(1, 2))


def test_a_zero_gradient_is_measured_against_the_largest_one():
    """The key bias of attention: its true gradient is zero, what a run gives is rounding."""
    gradient = [OutputSpec(kind=OutputKind.GRADIENT, name=n) for n in ("weight", "bias")]
    floors = Tolerance(1e-2, 1e-7).floors(gradient, [torch.full((3,), 5.0), torch.full((3,), 1e-9)])
    assert floors[OutputKind.GRADIENT] == pytest.approx(5e-3)
    strict = Tolerance(1e-6, 1e-7).floors(gradient, [torch.full((3,), 5.0), torch.full((3,), 1e-9)])
    assert strict[OutputKind.GRADIENT] * 1e-6 == pytest.approx(2e-7 * 5.0)
    buffers = [OutputSpec(kind=OutputKind.MUTATION, name=n) for n in ("var", "mean", "count")]
    floors = Tolerance(1e-2, 1e-7).floors(buffers, [torch.full((3,), 5e4), torch.zeros(3), torch.tensor(10**9)])
    assert floors[OutputKind.MUTATION] == pytest.approx(1e-3)


def test_inputs_are_nudged_by_one_unit_in_the_last_place():
    given = {"x": torch.randn(50, dtype=torch.float64), "ids": torch.arange(3), "n": 3}
    moved = nudged(given)
    assert moved["n"] == 3
    assert moved["ids"] is given["ids"]
    apart = (moved["x"] - given["x"]).abs() / given["x"].abs()
    assert apart.max() < 4 * torch.finfo(torch.float64).eps
    assert apart.max() > 0


def test_the_tolerance_follows_the_coarsest_dtype():
    sketch = Sketch()
    x = sketch.input("x", (2,), torch.float64)
    y = sketch.call(aten.mul.Tensor, x, 2.0)
    assert Tolerance.of(sketch.module([y])) == Tolerance(1e-10, torch.finfo(torch.float64).eps)
    assert Tolerance.of(sketch.module([y]), 0.5).rtol == 0.5
    sketch = Sketch()
    x = sketch.input("x", (2,))
    y = sketch.call(aten._to_copy.default, x, dtype=torch.bfloat16)
    assert Tolerance.of(sketch.module([y])).rtol == 3e-2


def test_programs_with_their_own_random_stream_are_refused():
    programs = mlp_programs(1, 2)
    graph = programs[1].graph_module.graph
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "call_function")):
        seed = graph.placeholder("rng_seed")
        graph.call_function(torch.ops.aten.neg.default, (seed,))
    programs[1] = dataclasses.replace(programs[1], seed_input="rng_seed")
    with pytest.raises(VerificationError, match="rank 1 draws its own random numbers"):
        verify_programs(mlp_step(), programs, 0)
