"""Clusters: text and file forms, errors, and which mesh axis crosses which level."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.cluster import Cluster, DeviceRun, LinkLevel, load_profile, profile_names, read_curve
from autopar.cost_models.collectives import Collective, CollectiveModel
from autopar.cost_models.compute import KernelModel, matmul, memory_op
from autopar.cost_models.errors import ClusterError


def test_parse_reads_counts_outermost_first() -> None:
    cluster = Cluster.parse("4x8xA100-80GB")
    assert cluster.num_devices == 32
    assert [level.name for level in cluster.levels] == ["nvlink", "network"]
    assert cluster.device.peak("bf16") == 312e12
    assert cluster.levels[1].port_bytes_per_s == 25e9


def test_parse_splits_a_flat_count_into_nodes() -> None:
    assert [level.fanout for level in Cluster.parse("16xH100").levels] == [8, 2]


def test_parse_three_levels() -> None:
    cluster = Cluster.parse("2x4x8xH100")
    assert [level.fanout for level in cluster.levels] == [8, 4, 2]
    spans = cluster.axis_levels({"pp": 2, "dp": 8, "tp": 4})
    assert (spans["tp"].extents, spans["dp"].extents, spans["pp"].extents) == ((4, 1, 1), (2, 4, 1), (1, 1, 2))


@pytest.mark.parametrize("text", ["H100", "8xNoSuchDevice", "0x8xH100", "8x", "12xH100", "2x8xH100+1x4xH100"])
def test_parse_errors_name_what_was_got(text: str) -> None:
    with pytest.raises(ClusterError) as error:
        Cluster.parse(text)
    assert text.split("x")[-1].split("+")[0][:4] in str(error.value) or text in str(error.value)


@pytest.mark.parametrize("name", profile_names())
def test_every_figure_of_a_profile_has_a_source(name: str) -> None:
    profile = load_profile(name)
    cluster = Cluster.parse(f"2x{profile['levels'][0]['fanout']}x{name}")
    for figure in ("peak_flops", "memory_bytes", "memory_bytes_per_s"):
        assert any(path == "device" or path.startswith(f"device.{figure}") for path in cluster.sources)
    assert cluster.device.memory_bytes > 1e9


def test_file_round_trip(tmp_path: Path) -> None:
    cluster = Cluster.parse("2x8xH200+1x8xH100")
    cluster.to_file(tmp_path / "c.json")
    again = Cluster.from_file(tmp_path / "c.json")
    assert again.to_json() == cluster.to_json()
    assert again.device_at(15).name == "H200"
    assert again.device_at(16).name == "H100"


def test_file_errors_name_the_place(tmp_path: Path) -> None:
    document = Cluster.parse("8xH100").to_json()
    cases = {
        "devices[0].device.memory_bytes": lambda d: d["devices"][0]["device"].update(memory_bytes="80GB"),
        "levels[0].port_bytes_per_s": lambda d: d["levels"][0].update(port_bytes_per_s=0),
        "unknown field 'color'": lambda d: d["levels"][0].update(color="red"),
        "field 'levels' is missing": lambda d: d.pop("levels"),
        "'fanout'": lambda d: d["levels"][0].update(fanout=4),
    }
    for expected, damage in cases.items():
        broken = json.loads(json.dumps(document))
        damage(broken)
        (tmp_path / "c.json").write_text(json.dumps(broken))
        with pytest.raises(ClusterError) as error:
            Cluster.from_file(tmp_path / "c.json")
        assert expected in str(error.value)
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(ClusterError, match="not JSON"):
        Cluster.from_file(tmp_path / "c.json")
    with pytest.raises(ClusterError, match="cannot read"):
        Cluster.from_file(tmp_path / "none.json")


def test_axes_that_do_not_divide_a_node_count_as_crossing() -> None:
    spans = Cluster.parse("3x8xH100").axis_levels({"dp": 8, "tp": 3})
    assert spans["tp"].extents == (1, 3)
    assert spans["dp"].num_ranks == 8
    assert Cluster.parse("8xH100").axis_levels({"dp": 2, "tp": 3})["tp"].extents == (3,)


def test_a_mesh_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(ClusterError, match="needs 16 devices"):
        Cluster.parse("8xH100").axis_levels({"dp": 16})


def test_local_reads_what_calibration_wrote(tmp_path: Path) -> None:
    Cluster.parse("4xCPU").to_file(tmp_path / "c.json")
    assert Cluster.local(2, path=tmp_path / "c.json").num_devices == 2


CURVE = ((1e3, 1e-6), (1e6, 1e-4), (1e9, 1.0))


def measured_pair() -> Cluster:
    cluster = Cluster.parse("2xCPU")
    level = dataclasses.replace(cluster.levels[0], slows_compute=0.5, curves={"all_reduce": CURVE})
    device = dataclasses.replace(cluster.device, curves={"memory": CURVE, "matmul fp32": CURVE})
    run = dataclasses.replace(cluster.devices[0], device=device)
    return dataclasses.replace(cluster, devices=(run,), levels=(level, *cluster.levels[1:]))


def test_curves_survive_the_file(tmp_path: Path) -> None:
    measured_pair().to_file(tmp_path / "c.json")
    assert Cluster.from_file(tmp_path / "c.json") == measured_pair()


@given(st.floats(1, 1e12), st.floats(1, 10))
def test_a_curve_never_falls_and_passes_through_its_points(work: float, more: float) -> None:
    assert read_curve(CURVE, work * more) >= read_curve(CURVE, work)
    assert read_curve(CURVE, [1e3, 1e6, 1e9, 2e9]) == pytest.approx([1e-6, 1e-4, 1.0, 2.0])


@pytest.mark.parametrize("points", [[], [[2, 1], [1, 2]], [[1, 2], [2, 1]], [[0, 1]]])
def test_a_curve_that_falls_is_refused(points: list[list[float]]) -> None:
    with pytest.raises(ClusterError, match="whose work rises"):
        dataclasses.replace(Cluster.parse("1xCPU").device, curves={"memory": points})


def test_measured_curves_stand_in_place_of_the_formulas() -> None:
    cluster = measured_pair()
    kernels = KernelModel(device=cluster.device)
    copy, product = memory_op("add", 1e6), matmul(100, 100, 50, "fp32")
    assert kernels.seconds([copy, product]) == pytest.approx([1e-4, 1e-4])
    unmeasured = matmul(100, 100, 50, "bf16")
    assert kernels.seconds([unmeasured]) == pytest.approx(
        KernelModel(device=Cluster.parse("2xCPU").device).seconds([unmeasured])
    )
    model, span = CollectiveModel(cluster=cluster), cluster.group_span({"dp": 2}, "dp")
    assert model.seconds(Collective.ALL_REDUCE, [0.0, 1e6], span) == pytest.approx([0.0, 1e-4])
    assert model.seconds(Collective.ALL_GATHER, 1e6, span) > 0


def test_smaller_groups_than_measured_take_less() -> None:
    cluster = Cluster.parse("8xCPU")
    level = dataclasses.replace(cluster.levels[0], curves={c.value: CURVE for c in Collective})
    model = CollectiveModel(cluster=dataclasses.replace(cluster, levels=(level, *cluster.levels[1:])))
    for collective in Collective:
        spans = [cluster.group_span({"a": 8 // n, "b": n}, "b") for n in (2, 4, 8)]
        times = [float(model.seconds(collective, 1e7, span)) for span in spans]
        assert times == sorted(times)
        assert times[-1] == pytest.approx(float(read_curve(CURVE, 1e7)))


def test_resized_keeps_whole_nodes() -> None:
    assert [lv.fanout for lv in Cluster.parse("2x8xH100").resized(32).levels] == [8, 4]
    assert [lv.fanout for lv in Cluster.parse("2x8xH100").resized(4).levels] == [4, 1]


def test_devices_and_levels_must_agree() -> None:
    level = LinkLevel(name="x", fanout=3, port_bytes_per_s=1.0, latency_s=0.0)
    with pytest.raises(ClusterError, match="join 3 devices"):
        Cluster(name="c", devices=(DeviceRun(count=2, device=Cluster.parse("8xH100").device),), levels=(level,))
