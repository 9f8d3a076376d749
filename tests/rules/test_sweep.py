"""Torch's operator database: in every run a cross-section of it, all of it behind the marker."""

import pytest

from tests.rules.opinfo import operations
from tests.rules.sweep import check_operation
from tests.rules.verdict import Outcome, Verdict

# One of every kind: element-wise, views, products, norms, losses, reductions, look-ups, places, matrices, draws.
QUICK = [
    "add",
    "mul",
    "where",
    "clamp",
    "nn.functional.gelu",
    "nn.functional.glu",
    "nn.functional.prelu",
    "nn.functional.threshold",
    "reshape",
    "permute",
    "split_with_sizes",
    "cat",
    "stack",
    "roll",
    "rot90",
    "unfold",
    "diagonal",
    "tile",
    "repeat",
    "nn.functional.pad.constant",
    "nn.functional.pad.reflect",
    "nn.functional.pixel_shuffle",
    "as_strided",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "addbmm",
    "einsum",
    "nn.functional.linear",
    "nn.functional.conv2d",
    "nn.functional.conv_transpose1d",
    "nn.functional.bilinear",
    "nn.functional.scaled_dot_product_attention",
    "cdist",
    "nn.functional.layer_norm",
    "nn.functional.group_norm",
    "nn.functional.batch_norm",
    "nn.functional.rms_norm",
    "softmax",
    "log_softmax",
    "logsumexp",
    "nn.functional.cross_entropy",
    "nn.functional.nll_loss",
    "nn.functional.huber_loss",
    "nn.functional.binary_cross_entropy_with_logits",
    "nn.functional.mse_loss",
    "sum",
    "mean",
    "var",
    "amax",
    "argmax",
    "linalg.vector_norm",
    "cumsum",
    "sort",
    "topk",
    "any",
    "count_nonzero",
    "gather",
    "scatter_add",
    "index_select",
    "index_put",
    "index_add",
    "nn.functional.embedding",
    "searchsorted",
    "nn.functional.max_pool2d",
    "nn.functional.avg_pool1d",
    "nn.functional.interpolate.bilinear",
    "nn.functional.grid_sample",
    "nn.functional.unfold",
    "linalg.cholesky",
    "linalg.svd",
    "linalg.solve",
    "fft.rfft",
    "fft.ifft2",
    "nn.functional.dropout",
    "bernoulli",
    "unique",
    "nonzero",
]


def test_a_cross_section_of_the_database_is_right():
    outcomes = sweep(QUICK, limit=2)
    bad = [o for o in outcomes if o.verdict in (Verdict.WRONG, Verdict.CRASH, Verdict.NO_SAMPLE)]
    assert not bad, "\n".join(f"{o.name}: {o.note}" for o in bad)
    refused = {o.name for o in outcomes if o.verdict is Verdict.REFUSED}
    assert refused == {"unique", "nonzero"}
    whole = {o.name: list(o.whole) for o in outcomes if o.verdict is Verdict.REPLICATED}
    assert whole == {"as_strided": ["aten::as_strided"]}


@pytest.mark.slow
def test_the_whole_database_is_right_and_split_where_it_can_be():
    outcomes = sweep(list(operations()))
    bad = [o for o in outcomes if o.verdict in (Verdict.WRONG, Verdict.CRASH)]
    assert not bad, "\n".join(f"{o.name}: {o.note}" for o in bad)
    parallel = [o for o in outcomes if o.parallel]
    split = [o for o in parallel if o.verdict is Verdict.SPLIT]
    print(f"{len(split)} of {len(parallel)} operations with a dim that can be split are split")
    assert len(split) >= 0.85 * len(parallel)


def sweep(names, limit=4):
    known = operations()
    return [check_operation(known[name], name, limit) for name in names]


def test_the_most_telling_verdict_counts():
    outcome = Outcome("mm")
    for verdict in (Verdict.REFUSED, Verdict.SPLIT, Verdict.REPLICATED):
        outcome.add(verdict, verdict.value)
    assert (outcome.verdict, outcome.note) == (Verdict.SPLIT, "split")
    outcome.add(Verdict.WRONG, "off by one")
    assert (outcome.verdict, outcome.note) == (Verdict.WRONG, "off by one")
