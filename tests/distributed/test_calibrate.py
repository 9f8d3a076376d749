"""Calibration in a world of real processes: what is measured, that ranks agree, and the command under torchrun."""

import json
import subprocess
import sys

import torch.distributed as dist

from autopar.calibrate import Sizes, calibrate
from autopar.calibrate_links import ranks_by_host
from autopar.cost_models.cluster import Cluster
from autopar.cost_models.collectives import Collective, CollectiveModel

SMALL = Sizes(matmul=(32, 64), elements=(1 << 12, 1 << 14), message_bytes=(1 << 12, 1 << 16))


def measured():
    """A short calibration: the cluster as JSON, the names of what was timed, the shares that were reported."""
    shares = []
    cluster, rows = calibrate(sizes=SMALL, repeats=2, report=lambda _, share: shares.append(share))
    return cluster.to_json(), [row.name for row in rows], shares, ranks_by_host()


def test_all_ranks_measure_and_agree(ranks):
    results = ranks(2, measured)
    document, names, shares, hosts = results[0]
    assert results[1][0] == document
    cluster = Cluster.from_json(json.loads(json.dumps(document)))
    assert cluster.num_devices == 2
    (level,) = cluster.levels
    assert set(level.curves) == {c.value for c in Collective}
    assert level.slows_compute is not None
    assert level.slowed_by_compute >= 0
    assert {"matmul fp32", "memory", "gelu_backward", "attention_backward"} <= set(cluster.device.curves)
    assert {"matmul bf16", "_softmax", "loopback all_reduce", "loopback send", "reference"} <= set(names)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert hosts == [[0, 1]]


def test_a_measured_world_prices_what_it_measured(ranks):
    cluster = Cluster.from_json(ranks(2, measured)[0][0])
    (level,) = cluster.levels
    model, span = CollectiveModel(cluster=cluster), cluster.group_span({"dp": 2}, "dp")
    for collective in Collective:
        for size, seconds in level.curves[collective.value]:
            assert abs(model.seconds(collective, size, span) / seconds - 1) < 1e-6


def test_the_world_stays_usable(ranks):
    assert ranks(2, sum_of_ranks) == [1.0, 1.0]


def sum_of_ranks():
    """A collective after a calibration."""
    import torch

    calibrate(sizes=SMALL, repeats=1)
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return float(total)


def test_the_command_runs_to_its_end_under_torchrun(tmp_path):
    path = tmp_path / "cluster.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "autopar", "calibrate", "--device", "cpu", "--repeats", "1", "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "destroy_process_group" not in done.stderr
    assert "written to" in done.stdout
    assert Cluster.local(2, path=path).num_devices == 2
    assert Cluster.local(1, path=path).num_devices == 1
