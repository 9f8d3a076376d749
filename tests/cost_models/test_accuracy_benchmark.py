"""The accuracy benchmark end to end on a few public rows (its source column says where each was published)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = Path(__file__).with_name("published_sample.csv")


def test_a_few_published_runs_are_predicted_within_a_tenth() -> None:
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / "cost_accuracy.py"), str(SAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=True)
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert summary["all"]["n"] == 6
    assert summary["all"]["mape"] < 0.1
    assert all(row["n"] + row["skipped"] > 0 for row in summary.values() if row["n"])
