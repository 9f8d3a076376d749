"""The examples run, alone and on two ranks, and say what they promise."""

import ast
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ONE_RANK = [sys.executable]
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(launcher, name, *arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short_and_say_how_to_run_them(path):
    text = path.read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= 60
    assert f"examples/{path.name}" in ast.get_docstring(ast.parse(text))


@pytest.mark.distributed
def test_01_computes_the_same_on_one_and_on_two_ranks(tmp_path):
    arguments = ["--steps", "20", "--batch", "4"]
    losses = []
    for launcher, more in ((ONE_RANK, []), (TWO_RANKS, ["--dp", "2", "--zero", "3"])):
        out = run(launcher, "01_train_gpt.py", *arguments, *more, folder=tmp_path)
        losses.append([float(x) for x in re.findall(r"loss (\d+\.\d+)", out)])
        assert "tokens/s" in out
        assert "blocks.{0-3}.qkv.weight" in out
    assert losses[0][-1] < 4 < math.log(256), "much better than a guess"
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)


@pytest.mark.distributed
def test_02_trains_a_model_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    out = run(TWO_RANKS, "02_hugging_face.py", folder=tmp_path)
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", out)]
    assert losses == sorted(losses, reverse=True)
    assert "transformer.wte.weight = lm_head.weight" in out


def test_03_shows_two_reductions_each_way(tmp_path):
    out = run(ONE_RANK, "03_where_collectives_go.py", folder=tmp_path)
    assert out.count("_c10d_functional.all_reduce(") == 4
    for place in ("forward blocks.0.attention.out", "forward blocks.0.mlp.down", "backward blocks.0.mlp.up"):
        assert f"# ---- {place}" in out


@pytest.mark.slow
def test_04_plans_a_model_that_does_not_fit_here(tmp_path):
    out = run(ONE_RANK, "04_plan_llama_70b.py", folder=tmp_path)
    assert "dp 8 x tp 8 x pp 1 = 64 ranks" in out
    assert (tmp_path / "llama3-70b.json").exists()
