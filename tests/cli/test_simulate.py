"""``autopar simulate``: figures, a trace that Perfetto reads, and what it refuses."""

import json

import pytest

from autopar.cli import BAD_INPUT, DONE, main

MODEL = """
import torch
from torch import nn

def make(batch=8):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers), (torch.randn(batch, 32),), {}, lambda out: out.square().mean()
"""


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(MODEL)
    return f"{path}:make"


def planned(run, model, path, *options):
    code, _, err = run("search", model, "--cluster", "1x2xH100", *options, "-o", path)
    assert (code, err) == (DONE, "")
    return path


def check_trace(document, num_ranks, streams):
    """What Perfetto's importer needs of every event; spans of one stream follow each other."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["pid"] for e in events} == set(range(num_ranks))
    for rank in range(num_ranks):
        assert {name for (pid, _), name in named.items() if pid == rank} >= set(streams)
    ends = dict.fromkeys(named, 0.0)
    for event in events:
        if event["ph"] == "X":
            assert event["name"]
            assert event["dur"] >= 0
            assert event["ts"] >= ends[event["pid"], event["tid"]] - 1e-6
            ends[event["pid"], event["tid"]] = event["ts"] + event["dur"]
        elif event["ph"] == "C":
            assert event["args"]["bytes"] >= 0
    assert all(end > 0 for end in ends.values())


def test_a_trace_of_every_stage_and_stream(run, model, tmp_path):
    plan = planned(run, model, tmp_path / "plan.json", "--pp", 2, "--microbatches", 2)
    trace = tmp_path / "trace.json"
    code, out, err = run("simulate", plan, model, "--cluster", "1x2xH100", "--trace", trace)
    assert (code, err) == (DONE, "")
    assert "a step takes" in out
    assert "trace written to" in out
    document = json.loads(trace.read_text())
    check_trace(document, 2, ["compute"])
    forwards = [e["name"] for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
    assert any("mm" in name for name in forwards)
    assert any("isend" in name for name in forwards)


@pytest.mark.parametrize("zero", [0, 3])
def test_figures_are_those_of_the_plan(run, model, tmp_path, zero):
    plan = planned(run, model, tmp_path / "plan.json", "--dp", 2, "--zero", zero)
    trace = tmp_path / "trace.json"
    code, out, _ = run("simulate", plan, model, "--cluster", "1x2xH100", "--json", "--trace", trace)
    found = json.loads(out)
    predicted = json.loads(plan.read_text())["predicted"]
    assert (code, found["format"], found["schema"]) == (DONE, "autopar simulation", 1)
    assert found["step_s"] == pytest.approx(predicted["step_time_s"])
    assert found["peak_bytes"] == pytest.approx(predicted["peak_bytes"], abs=1)
    (stage,) = found["stages"]
    assert stage["peak_bytes"] == pytest.approx(found["peak_bytes"], rel=0.05)
    assert 0 < stage["compute_s"] <= found["step_s"]
    events = json.loads(trace.read_text())["traceEvents"]
    check_trace({"traceEvents": events, "displayTimeUnit": "ms"}, 1, ["compute", "nvlink"])
    top = max(e["args"]["bytes"] for e in events if e["ph"] == "C")
    assert top == pytest.approx(stage["peak_bytes"])


def test_a_built_in_model_is_found_by_its_parameters(run, tmp_path):
    plan = tmp_path / "plan.json"
    fixed = ("--dp", 2, "--tp", 1, "--pp", 1, "--zero", 0, "--microbatches", 1, "--recompute", "none")
    run("search", "gpt2", "--cluster", "1x2xH100", *fixed, "--global-batch", 2, "--sequence", 16, "-o", plan)
    code, out, err = run("simulate", plan, "--cluster", "1x2xH100")
    assert (code, err) == (DONE, "")
    assert "gpt2 on 1x2xH100" in out


def test_what_cannot_be_simulated_is_one_line(run, model, tmp_path):
    plan = planned(run, model, tmp_path / "plan.json", "--dp", 2)
    for arguments, message in (
        (["no-such-plan.json"], "cannot be read"),
        ([plan], "none of the built-in models"),
        ([plan, model, "--global-batch", 4], "made for another model"),
        ([plan, model, "--cluster", "1x1xH100"], "larger --cluster"),
        ([plan, model, "--trace", tmp_path / "no" / "trace.json"], "cannot be written"),
    ):
        code, out, err = run("simulate", *arguments)
        assert (code, out) == (BAD_INPUT, "")
        assert message in err
        assert err.count("\n") == 1
