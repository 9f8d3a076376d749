"""Rules against the operations themselves: wrong splits, missing splits, missing linearity, on recorded calls."""

import json

import pytest
import torch
from torch._decomp import decomposition_table

from autopar.passes.normalize import FORMS
from autopar.passes.rules import table
from autopar.passes.rules.row import parse_row
from autopar.passes.rules.table import RULES
from tests.rules.calls import Recorded, load
from tests.rules.exempt import LINEAR, SPLITS, UNRECORDED, UNTRIED
from tests.rules.oracle import missing_linearity, missing_splits, single, wrong_splits

CALLS = {op: calls for op, calls in load().items() if op.startswith("aten::")}
FEW = 1  # calls of an operation in every run; the others are behind the marker
# Operations that have kernels on devices only; here they run as torch decomposes them.
ON_DEVICES = (torch.ops.aten._fused_rms_norm_backward.default,)


@pytest.fixture(scope="module", autouse=True)
def kernels_of_devices():
    with torch.library._scoped_library("aten", "IMPL") as library:
        for op in ON_DEVICES:
            library.impl(op, decomposition_table[op], "CPU")
        yield


def checked(op):
    """Calls that can be compared: draws cannot, nor can what memory happens to hold."""
    undefined = op.startswith(("aten::empty", "aten::new_empty"))
    return [c for c in CALLS[op] if not undefined and not single(c).row.random]


def check(op, calls):
    wrong = [line for call in calls for line in wrong_splits(call)]
    assert not wrong, "\n".join(wrong)
    if op in UNTRIED or op in FORMS:  # what has a normal form is split in that form
        return
    missing = [line for call in calls for line in missing_splits(call)] if op not in SPLITS else []
    missing += [line for call in calls for line in missing_linearity(call)] if op not in LINEAR else []
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("op", CALLS)
def test_rules_say_what_operations_do(op):
    check(op, checked(op)[:FEW])


@pytest.mark.slow
@pytest.mark.parametrize("op", CALLS)
def test_rules_say_what_operations_do_on_all_recorded_calls(op):
    check(op, checked(op)[FEW:])


def test_every_rule_is_checked_on_some_call():
    ours = {op for op in RULES if op.startswith("aten::")}
    assert sorted(ours - set(CALLS) - set(UNRECORDED)) == []


def test_exemptions_are_needed():
    assert set(SPLITS) | set(LINEAR) | set(UNTRIED) <= set(CALLS)
    assert not set(UNRECORDED) & set(CALLS)


def test_the_oracle_finds_wrong_and_missing_rules(monkeypatch):
    line = '{"args": [{"shape": [6], "dtype": "torch.float64"}%s], "kwargs": {}}'
    tanh = Recorded("aten::tanh", **json.loads(line % ""))
    cummax = Recorded("aten::logcumsumexp", **json.loads(line % ", 0"))
    assert not list(missing_splits(tanh))
    assert not list(wrong_splits(cummax))
    monkeypatch.setitem(table.RULES, "aten::tanh", lambda call: parse_row("a -> a | nosplit a", call.shapes))
    monkeypatch.setitem(table.RULES, "aten::logcumsumexp", lambda call: parse_row("a -> a", call.shapes))
    assert [line.endswith("S(0) -> S(0)") for line in missing_splits(tanh)] == [True]
    assert list(wrong_splits(cummax))
