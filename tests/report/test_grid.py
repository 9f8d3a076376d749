"""The grid of a schedule: every action once, in order, with shares of idle time that add up."""

import itertools
import re
from xml.etree import ElementTree

import pytest

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.errors import UsageError
from autopar.cost_models.schedules import Kind
from autopar.lower.program import schedule_of
from autopar.report.grid import Block, Grid, as_lines, grid_of
from autopar.report.grid_drawing import as_picture
from tests.passes.pipelines import Tied, lowered, tokens

PLANS = [
    {"pp": 4, "microbatches": 8, "schedule": "1f1b"},
    {"pp": 2, "microbatches": 4, "schedule": "gpipe"},
    {"pp": 2, "microbatches": 4, "schedule": "interleaved"},
    {"pp": 2, "microbatches": 4, "schedule": "zb", "tp": 2},
    {"dp": 2, "microbatches": 4, "zero": 2},
]


def made(wishes, model=None):
    ranks = wishes.get("dp", 1) * wishes.get("tp", 1) * wishes.get("pp", 1)
    lowering, plan = lowered(model or Tied(depth=8), tokens(), ranks, **wishes)
    programs = [lowering.program(stage * plan.dp * plan.tp) for stage in range(plan.pp)]
    return plan, grid_of(plan, programs, Cluster.parse("1x8xH100"))


@pytest.mark.parametrize("wishes", PLANS)
def test_every_rank_shows_its_actions_in_the_order_of_the_schedule(wishes):
    plan, grid = made(wishes)
    schedule = schedule_of(plan, coupled=False, training=True)
    for line, want in zip(grid.ranks, schedule.ranks, strict=True):
        shown = [b.action for b in line if b.action is not None]
        # A stage without an input gradient (the first) has a whole backward in its weight gradients.
        assert shown == [a for a in want if a in shown]
        assert {a for a in want if a.kind is not Kind.INPUT_GRADIENT} <= set(shown)
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(line))
    text = as_lines(grid)
    assert all(f"rank {rank}" in text for rank in range(plan.pp))
    assert f"{grid.bubble:.1%}" in text
    ElementTree.fromstring(as_picture(grid))


def test_the_bubble_is_the_share_of_time_in_which_nothing_is_done():
    def block(start_s, end_s):
        return Block(action=None, start_s=start_s, end_s=end_s)

    grid = Grid(ranks=((block(0, 1), block(3, 4)), (block(1, 4),)), step_s=4.0, title="two ranks")
    assert grid.idle(0) == 0.5
    assert grid.bubble == pytest.approx((0.5 + 0.25) / 2)


def test_a_long_grid_is_cut_into_bands_that_together_are_whole():
    _, grid = made(PLANS[0])
    narrow, wide = as_lines(grid, width=60), as_lines(grid, width=10_000)
    assert max(map(len, narrow.splitlines()[3:-1])) <= 60
    for rank in range(4):
        pieces = re.findall(rf"^rank {rank}  (\S+)$", narrow, re.M)
        assert len(pieces) > 1
        assert "".join(pieces) == re.search(rf"^rank {rank}  (\S+)$", wide, re.M)[1]


def test_a_plan_without_a_schedule_is_refused():
    lowering, plan = lowered(Tied(depth=1), tokens(), 2, dp=2)
    with pytest.raises(UsageError, match="--microbatches"):
        grid_of(plan, [lowering.program(0)], Cluster.local(2))
