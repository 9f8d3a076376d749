"""The search over uniform plans: what is weighed, what it costs folded and whole, what is chosen."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopar.capture import capture
from autopar.cost_models.cluster import Cluster
from autopar.cost_models.errors import ConstraintError
from autopar.plan import Constraints
from autopar.search.candidates import Candidate, Space
from autopar.search.folding import fold
from autopar.search.planner import Planner
from autopar.search.price import Price, even_cuts
from autopar.search.uniform import Sketch, rank

GB = 1e9


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, depth, width=64, vocabulary=96):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def step_of(depth, width=64, rows=16, length=32):
    with torch.device("meta"):
        model = Stack(depth, width)
    return capture(model, (torch.zeros(rows, length, dtype=torch.int64),))


def space(world_size, rows=(16,), *, blocks=8, neighbours=8, training=True, **wishes):
    return Space(
        world_size=world_size,
        constraints=Constraints(**wishes),
        rows=rows,
        neighbours=neighbours,
        blocks=blocks,
        training=training,
    )


@pytest.mark.parametrize("depth", [7, 9])
def test_a_folded_step_is_the_step_of_a_shallower_model(depth):
    folds = fold(step_of(depth))
    for found, blocks in zip(folds.steps, (folds.kept[0], folds.kept[0] + 1), strict=True):
        want = step_of(blocks)
        assert [str(n.target) for n in found.graph.nodes if n.op == "call_function"] == [
            str(n.target) for n in want.graph.nodes if n.op == "call_function"
        ]
        assert len(found.inputs) == len(want.inputs) == len(found.placeholders)
        assert len(found.outputs) == len(want.outputs) == len(found.results)
    assert folds.total([len(s.graph.nodes) for s in folds.steps]) == len(step_of(depth).graph.nodes)


def test_what_has_few_or_unequal_blocks_is_not_folded():
    assert fold(step_of(3)) is None
    model = nn.Sequential(*(nn.Linear(n, n + 1) for n in range(4, 12)))
    assert fold(capture(model, (torch.randn(3, 4),), loss_fn=lambda y: y.sum())) is None


def test_an_encoder_and_a_decoder_are_folded_apart():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=8,
        num_decoder_layers=9,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
    )
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    step = capture(transformers.T5ForConditionalGeneration(config), (), {"input_ids": tokens, "labels": tokens})
    folds = fold(step)
    assert len(folds.left_out) == 2
    assert folds.total([len(s.graph.nodes) for s in folds.steps]) == len(step.graph.nodes)
    for shallow in folds.steps:
        shallow.graph.lint()


FLAT = [
    Candidate(dp=2, tp=1, zero=0, sequence_parallel=False),
    Candidate(dp=1, tp=2, zero=0, sequence_parallel=False),
    Candidate(dp=1, tp=2, zero=0, sequence_parallel=True),
    Candidate(dp=2, tp=2, zero=3, sequence_parallel=True),
    Candidate(dp=2, tp=1, zero=3, sequence_parallel=False, recompute="full"),
    Candidate(dp=2, tp=1, zero=2, sequence_parallel=False, microbatches=4),
    Candidate(dp=1, tp=1, zero=0, sequence_parallel=False, microbatches=4, recompute="selective"),
]
PIPED = [
    Candidate(dp=1, tp=1, zero=0, sequence_parallel=False, pp=pp, microbatches=m, schedule=schedule, recompute=again)
    for pp, m, schedule, again in [
        (2, 4, None, "none"),
        (4, 8, None, "none"),
        (2, 8, "zb", "none"),
        (2, 4, "gpipe", "none"),
        (2, 4, None, "full"),
    ]
]


@pytest.fixture(scope="module")
def deep():
    step = step_of(12, width=256, rows=16, length=128)
    return step, fold(step)


@pytest.mark.parametrize("candidate", FLAT, ids=Candidate.text)
def test_folded_and_whole_prices_agree(deep, candidate):
    step, folds = deep
    planner = Planner(step, Cluster.parse("1x4xA100-80GB"))
    whole, folded = planner._price_whole(candidate), planner._folded(folds).price(candidate)
    assert folded.flops == pytest.approx(whole.flops, rel=1e-3)
    assert folded.step_s == pytest.approx(whole.step_s, rel=0.03)
    assert folded.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.03)
    assert folded.comm_bytes == pytest.approx(whole.comm_bytes, rel=0.03)


@pytest.mark.parametrize("candidate", PIPED, ids=Candidate.text)
def test_a_pipeline_put_together_costs_what_its_programs_cost(deep, candidate):
    step, folds = deep
    planner = Planner(step, Cluster.parse("1x4xA100-80GB"))
    whole, folded = planner._price_whole(candidate), planner._folded(folds).price(candidate)
    assert folded.step_s == pytest.approx(whole.step_s, rel=0.15)
    assert folded.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.25)


def test_every_candidate_fits_the_ranks_and_honours_the_wishes():
    found = list(space(8, tp=2, zero=3, recompute="none").candidates())
    assert found
    assert all(c.dp * c.tp * c.pp == 8 and c.tp == 2 and c.zero == 3 and c.recompute == "none" for c in found)
    assert {c.pp for c in found} == {1, 2, 4}
    assert all(c.microbatches >= c.pp for c in found)


def test_tensor_parallelism_stays_among_neighbours_unless_it_is_wished_for():
    assert {c.tp for c in space(16, neighbours=4).candidates()} == {1, 2, 4}
    assert {c.tp for c in space(16, neighbours=4, tp=16).candidates()} == {16}


def test_a_fixed_size_is_taken_literally_and_memory_saved_only_where_needed():
    found = space(2, dp=2, tp=1, pp=1)
    families = {found.family(c) for c in found.candidates()}
    assert len(families) == 1
    assert len({space(2).family(c) for c in space(2).candidates() if c.dp == 2}) > 1


@pytest.mark.parametrize(
    ("wishes", "message"),
    [({"dp": 3}, "dp=3"), ({"tp": 5}, "tp=5"), ({"microbatches": 32}, "microbatches=32 is not possible")],
)
def test_wishes_that_cannot_be(wishes, message):
    with pytest.raises(ConstraintError, match=message):
        list(space(4, **wishes).candidates())


def test_a_forward_pass_has_no_recompute_no_zero_and_no_more_micro_batches_than_rows():
    found = list(space(4, rows=(3,), training=False, microbatches=8).candidates())
    assert {(c.zero, c.recompute, c.pp) for c in found} == {(0, "none", 1)}
    assert all(c.microbatches <= 3 for c in found)


def sketch(**changes):
    figures = {
        "compute_s": 8.0,
        "parameter_bytes": 4 * GB,
        "saved_bytes": 32 * GB,
        "boundary_bytes": 0.5 * GB,
        "blocks": 8,
        "cluster": Cluster.parse("1x8xA100-80GB"),
        "optimizer": "adamw",
    }
    return Sketch(**(figures | changes))


def honest(drawn, factor_s=1.0, factor_bytes=1.0):
    """Prices that the sketch gets right but for a factor."""

    def price(candidate):
        state, activations = drawn.held_bytes(candidate)
        return Price(
            step_s=factor_s * drawn.seconds(candidate),
            peak_bytes=state + factor_bytes * activations,
            owners=(("all", 1.0),),
            comm_bytes=0.0,
            flops=0.0,
            parts={"compute": factor_s * drawn.seconds(candidate)},
        )

    return price


@settings(max_examples=40, deadline=None)
@given(
    st.floats(0.1, 100),
    st.floats(0.1, 60),
    st.floats(1, 400),
    st.floats(0.001, 4),
    st.floats(0.5, 3.0),
    st.floats(0.6, 1.9),
)
def test_the_best_is_the_best_of_all(compute_s, parameters, kept, boundary, factor_s, factor_bytes):
    """Against all candidates, priced: with sketches that are wrong by a factor the search finds the same plan."""
    drawn = sketch(
        compute_s=compute_s, parameter_bytes=parameters * GB, saved_bytes=kept * GB, boundary_bytes=boundary * GB
    )
    price, plans = honest(drawn, factor_s, factor_bytes), space(8)
    found = rank(plans, drawn, price, 40 * GB, most=10**6)
    prices = [price(c) for c in plans.candidates()]
    fitting = [p.step_s for p in prices if p.peak_bytes <= 40 * GB]
    if fitting:
        assert found.best.fits
        assert found.best.price.step_s == pytest.approx(min(fitting), rel=0.02)
    else:
        assert not found.best.fits
        assert found.best.price.peak_bytes == min(p.peak_bytes for p in prices)


def test_the_ranking_says_why_the_others_lose():
    drawn = sketch()
    found = rank(space(8), drawn, honest(drawn, factor_bytes=1.9), 20 * GB, most=12)
    assert found.best.reason == ""
    assert all(w.reason for w in found.weighed[1:])
    assert any("does not fit" in w.reason for w in found.weighed)
    assert any("slower" in w.reason for w in found.weighed)
    fits = [w.fits for w in found.weighed]
    assert fits == sorted(fits, reverse=True)


def test_plans_that_cannot_be_run_are_left_out_and_alone_they_raise():
    drawn = sketch()

    def price(candidate):
        if candidate.pp > 1:
            raise ConstraintError("no pipelines here")
        return honest(drawn)(candidate)

    assert rank(space(8), drawn, price, 80 * GB, most=10**6).best.candidate.pp == 1
    with pytest.raises(ConstraintError, match="no pipelines here"):
        _ = rank(space(8, pp=2), drawn, price, 80 * GB, most=10**6).best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 5))
def test_cuts_are_even(weights, count):
    cuts = even_cuts(weights, count)
    assert len(cuts) == count - 1
    assert list(cuts) == sorted(cuts)

    def heaviest(at):
        return max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *at, len(weights))))

    every = itertools.combinations_with_replacement(range(len(weights) + 1), count - 1)
    assert heaviest(cuts) == min(map(heaviest, every))


def test_memory_decides_what_is_given_up():
    """The less memory, the more is split or recomputed; with the least, nothing fits and the smallest peak is told."""
    step = step_of(8, width=512, rows=32, length=256)
    cluster = Cluster.parse("1x4xA100-80GB")
    roomy = Planner(step, cluster, Constraints(dp=4)).rank(4).best
    assert (roomy.candidate.zero, roomy.candidate.recompute, roomy.candidate.microbatches) == (0, "none", 1)
    budget = int(roomy.price.peak_bytes * 0.6)
    tight = Planner(step, cluster, Constraints(dp=4, memory_bytes=budget)).rank(4).best
    assert tight.fits
    assert dataclasses.replace(tight.candidate, zero=0, recompute="none", microbatches=1) == roomy.candidate
    nothing = Planner(step, cluster, Constraints(dp=4, memory_bytes=1000)).rank(4).best
    assert not nothing.fits
    assert nothing.price.owner
    assert nothing.price.peak_bytes < tight.price.peak_bytes
