"""The command line: what it prints, for people and machines, and what it refuses with which exit code."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli import BAD_INPUT, CHECK_FAILED, DONE, NOTHING_FITS, main
from autopar.cli_options import bytes_of
from autopar.cost_models.cluster import Cluster
from autopar.cost_models.errors import UsageError
from autopar.models.catalogue import names
from autopar.plan import Plan

MODEL = """
import torch
from torch import nn

def make(batch=4):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)]
    return nn.Sequential(*layers), (torch.randn(batch, 8),), {}, lambda out: out.square().mean()

def other():
    return nn.Linear(8, 8), (torch.randn(4, 8),), {}, lambda out: out.square().mean()

def branching():
    class Branching(nn.Module):
        def forward(self, x):
            return x.sum() if x.sum() > 0 else x.mean()
    return Branching(), (torch.randn(4, 8, requires_grad=True),), {}
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(MODEL)
    return f"{path}:make"


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def one_line(text):
    assert text.startswith("autopar: ")
    assert text.endswith("\n")
    assert text.count("\n") == 1
    return text


def test_models_lists_every_built_in_model(run):
    code, out, err = run("models")
    assert (code, err) == (DONE, "")
    assert all(name in out for name in names())


def test_models_as_json(run):
    code, out, _ = run("models", "--json")
    document = json.loads(out)
    assert (code, document["format"], document["schema"]) == (DONE, "autopar models", 1)
    found = {row["name"]: row for row in document["models"]}
    assert set(found) == set(names())
    assert found["gpt2"]["parameters"] == 124_439_808
    assert set(found["gpt2"]) == {"name", "parameters", "dtype", "sequence", "about"}


def test_search_writes_a_plan_and_explains_it(run, model, tmp_path):
    path = tmp_path / "plan.json"
    code, out, err = run("search", model, "--cluster", "1x2xH100", "--tp", 2, "-o", path)
    assert (code, err) == (DONE, "")
    assert "dp 1 x tp 2 x pp 1 = 2 ranks" in out
    assert "parameters in float32; a step takes args[0] [4, 8]" in out
    assert Plan.load(path).tp == 2
    code, out, _ = run("explain", path)
    assert code == DONE
    assert "dp 1 x tp 2 x pp 1" in out


def test_search_as_json_prints_the_plan(run, model):
    code, out, err = run("search", model, "--cluster", "1x2xH100", "--dp", 2, "--zero", 3, "--json")
    assert (code, err) == (DONE, "")
    plan = Plan.from_json(out)
    assert (plan.dp, plan.zero) == (2, 3)


def test_what_does_not_fit_exits_3_and_says_what_is_needed(run, model):
    code, out, err = run("search", model, "--cluster", "1x2xH100", "--memory", "1kB", "--json")
    assert code == NOTHING_FITS
    assert "nothing fits" in one_line(err)
    assert "1 kB" in err
    Plan.from_json(out)


def test_explain_tells_differences(run, model, tmp_path):
    for name, size in (("a", "--tp"), ("b", "--dp")):
        assert run("search", model, "--cluster", "1x2xH100", size, 2, "-o", tmp_path / name)[0] == DONE
    code, out, _ = run("explain", tmp_path / "a", "--diff", tmp_path / "b")
    assert code == DONE
    assert "tp: 2 -> 1" in out
    assert run("explain", tmp_path / "a", "--diff", tmp_path / "a")[1] == "no difference\n"


@pytest.mark.parametrize("format", ["text", "json", "dot", "svg"])
def test_dump_in_every_format(run, model, tmp_path, format):
    path = tmp_path / "dump"
    code, out, err = run("dump", model, "--tp", 2, "--format", format, "-o", path)
    assert (code, out, err) == (DONE, "", "")
    text = path.read_text()
    if format == "text":
        ast.parse(text)
    if format == "json":
        document = json.loads(text)
        shown = {node["name"] for node in document["nodes"]}
        assert all(set(node["inputs"]) <= shown for node in document["nodes"])
    assert "all_reduce" in text


def test_dump_of_a_rank_of_a_saved_plan(run, model, tmp_path):
    plan = tmp_path / "plan.json"
    run("search", model, "--cluster", "1x2xH100", "--tp", 2, "-o", plan)
    code, out, _ = run("dump", model, "--plan", plan, "--rank", 1, "--only", "collectives")
    assert code == DONE
    assert "rank 1 of 2 (tp 1/2)" in out
    assert "all_reduce" in out
    code, out, _ = run("dump", model, "--dp", 2, "--diff", plan)
    assert code == DONE
    assert any(line.strip().startswith("+ all_reduce") for line in out.splitlines())


def test_dump_draws_the_schedule(run, model, tmp_path):
    wishes = ("--dp", 1, "--tp", 1, "--pp", 2, "--microbatches", 4, "--schedule", "zb")
    code, out, _ = run("dump", model, *wishes, "--schedule")
    assert code == DONE
    assert "zb: 2 stages on 2 ranks, 4 micro-batches" in out
    assert "bubble" in out
    assert "W3" in out
    plan = tmp_path / "plan.json"
    run("search", model, "--cluster", "1x2xH100", *wishes, "-o", plan)
    code, out, _ = run("dump", model, "--plan", plan, "--grid", "--format", "svg")
    assert code == DONE
    assert out.startswith("<svg")
    assert run("dump", model, *wishes, "--grid", "--format", "dot")[0] == BAD_INPUT
    code, _, err = run("dump", model, "--dp", 2, "--schedule")
    assert code == BAD_INPUT
    assert "--microbatches" in one_line(err)


def test_verify_compares_with_one_device(run, model):
    code, out, _ = run("verify", model, "--dp", 2, "--tp", 2, "--zero", 3)
    assert code == DONE
    assert "all equal to one device" in out


def test_verify_as_json(run, model):
    code, out, _ = run("verify", model, "--tp", 2, "--json")
    document = json.loads(out)
    assert (code, document["format"], document["schema"], document["ok"]) == (DONE, "autopar verify", 1, True)
    assert document["first_mismatch"] is None
    keys = {"kind", "name", "error", "tolerance", "ok", "worst_rank", "drift", "note"}
    assert all(set(row) == keys for row in document["rows"])


def test_calibrate_writes_a_cluster_that_search_reads(run, model, tmp_path):
    path = tmp_path / "clusters" / "here.json"
    code, out, _ = run("calibrate", "--device", "cpu", "--repeats", 1, "-o", path)
    assert code == DONE
    assert "matmul" in out
    assert str(path) in out
    assert Cluster.from_file(path).num_devices == 1
    code, out, _ = run("search", model, "--cluster", path)
    assert code == DONE
    assert "= 1 rank," in out


def test_a_plan_with_a_wrong_layout_fails_the_check_or_is_refused(run, model, tmp_path, monkeypatch):
    """A rule that lies is found: the row of a matrix product is told to forget that a split sum is partial."""
    from autopar.passes.rules import table

    row = table.RULES["aten::addmm"]
    lie = lambda call: row(call).with_(complete={"k": (0,)})  # noqa: E731
    monkeypatch.setitem(table.RULES, "aten::addmm", lie)
    code, out, _ = run("verify", model, "--tp", 2)
    assert code == CHECK_FAILED
    assert "WRONG" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["search"], "Missing argument"),
        (["search", "{model}"], "needs --cluster"),
        (["search", "{model}", "--cluster", "2xZ9"], "no device profile is called 'Z9'"),
        (["search", "{model}", "--cluster", "none.json"], "none.json"),
        (["search", "gpt-2", "--cluster", "2xH100"], "did you mean 'gpt2'"),
        (["search", "nothing.py:f", "--cluster", "2xH100"], "there is no file nothing.py"),
        (["search", "{model}x", "--cluster", "2xH100"], "has no function 'makex'"),
        (["search", "{model}", "--cluster", "2xH100", "--dp", "3"], "dp=3"),
        (["search", "{model}", "--cluster", "2xH100", "--dp", "two"], "Invalid value for '--dp'"),
        (["search", "{model}", "--cluster", "2xH100", "--zero", "9"], "zero=9"),
        (["search", "{model}", "--cluster", "2xH100", "--recompute", "all"], "recompute='all'"),
        (["search", "{model}", "--cluster", "2xH100", "--memory", "much"], "'much' is no size"),
        (["search", "{model}", "--cluster", "2xH100", "--layers", "{{"], "is no JSON"),
        (["search", "{model}", "--cluster", "2xH100", "--layers", "[1]"], "must map patterns"),
        (["search", "{model}", "--cluster", "2xH100", "-o", "/no/such/folder/plan.json"], "cannot be written"),
        (["dump", "{model}", "--tp", "2", "--rank", "2"], "use 0 to 1"),
        (["dump", "{model}", "--tp", "2", "--format", "png"], "use one of text, json, dot, svg"),
        (["dump", "{model}", "--tp", "2", "--only", "weights"], "use one of collectives"),
        (["dump", "{branching}"], "x.sum() > 0"),
        (["explain", "no-such-plan.json"], "cannot be read"),
        (["calibrate", "--device", "abacus"], "'abacus' is no device"),
        (["calibrate", "--repeats", "0"], "Invalid value for '--repeats'"),
        (["verify", "{model}", "--plan", "no-such-plan.json"], "cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(run, model, arguments, message):
    branching = model.replace(":make", ":branching")
    code, out, err = run(*(argument.format(model=model, branching=branching) for argument in arguments))
    assert code == BAD_INPUT
    assert out == ""
    assert message in one_line(err)


def test_a_plan_of_another_model_is_refused(run, model, tmp_path):
    plan = tmp_path / "plan.json"
    run("search", model, "--cluster", "1x2xH100", "--tp", 2, "-o", plan)
    code, _, err = run("dump", model.replace(":make", ":other"), "--plan", plan)
    assert code == BAD_INPUT
    assert "made for another model" in one_line(err)


@pytest.mark.parametrize("text", ["", "GB", "-1", "1TBs", "1e9"])
def test_sizes_that_are_none(text):
    with pytest.raises(UsageError, match="is no size"):
        bytes_of(text)


def test_help_names_every_command_and_costs_no_error(run):
    code, out, err = run("--help")
    assert (code, err) == (DONE, "")
    assert all(name in out for name in ("search", "explain", "dump", "verify", "models"))


def test_the_module_runs_as_a_program(model):
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "autopar", "search", model]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == BAD_INPUT
    assert "needs --cluster" in one_line(done.stderr)
