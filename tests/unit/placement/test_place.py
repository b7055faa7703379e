"""Where ranks sit: axes, hosts, GPUs and cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scenarios"))
import fake_nvml

from zrun.hosts import cluster as cluster_module
from zrun.hosts.cluster import Cluster, Gpu, HostFacts, probe_host, simulate
from zrun.placement.plan import ResolvedJob, make_plan
from zrun.topology.cpus import NumaNode, format_cpus, parse_cpus
from zrun.topology.scenario import Scenario
from zrun_core.errors import ExitCode, PreflightError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.spine.spec import RankPlace


def machines(name: str) -> Cluster:
    return simulate(Scenario.read(fake_nvml.scenario(name)))


def job(**keys: Any) -> JobConfig:
    base = {"name": "t", "model": "m:f", "data": "m:d", "steps": 1, "batch": {"micro": 1}}
    return JobConfig.model_validate(base | keys)


def plan(cluster: Cluster, **keys: Any) -> list[RankPlace]:
    return make_plan(job(**keys), cluster).plan.ranks


def reason(resolved: ResolvedJob, key: str) -> str:
    return next(f"{each.value} ({each.why})" for each in resolved.reasons if each.key == key)


def gpus_of(places: list[RankPlace]) -> list[int]:
    """The number of each rank's GPU, from its UUID."""
    return [int((place.uuid or "")[4:12], 16) for place in places]


def host(name: str, kind: str, num_gpus: int, fabric: str | None = None) -> HostFacts:
    gpus = tuple(
        Gpu(f"GPU-{name}-{index}", kind, 80 << 30, index, fabric=fabric)
        for index in range(num_gpus)
    )
    return HostFacts(name, 32, 1 << 38, gpus)


def groups(places: list[RankPlace], axis: str) -> list[list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    others = [other for other in ("pp", "dp", "tp") if other != axis]
    for place in places:
        found.setdefault(tuple(getattr(place, other) for other in others), []).append(place.rank)
    return sorted(found.values())


def test_eight_hosts_in_three_dimensions() -> None:
    """pp 4, tp 4, dp 2 on 8 x 4: a tp group is a host, dp pairs are neighbours, pipelines are every
    other host.
    """
    places = plan(machines("rack-8x4"), parallel={"tp": 4, "pp": 4, "dp": 2})
    assert [place.rank for place in places] == list(range(32))
    for place in places:
        assert place.rank == place.pp * 8 + place.dp * 4 + place.tp
        assert place.host == f"host{place.rank // 4}"
        assert place.device == f"cuda:{place.local_rank}" == f"cuda:{place.rank % 4}"
    on_hosts = {
        axis: {
            tuple(dict.fromkeys(places[rank].host[4:] for rank in group))
            for group in groups(places, axis)
        }
        for axis in ("tp", "dp", "pp")
    }
    assert on_hosts["tp"] == {(str(number),) for number in range(8)}
    assert on_hosts["dp"] == {("0", "1"), ("2", "3"), ("4", "5"), ("6", "7")}
    assert on_hosts["pp"] == {("0", "2", "4", "6"), ("1", "3", "5", "7")}


def test_axes_of_sixteen_ranks() -> None:
    two = Cluster((host("a", "H100", 8), host("b", "H100", 8)))
    places = plan(two, parallel={"tp": 2, "pp": 4})
    assert {axis: groups(places, axis)[0] for axis in ("tp", "dp", "pp")} == {
        "tp": [0, 1],
        "dp": [0, 2],
        "pp": [0, 4, 8, 12],
    }
    assert ParallelDims(2, 2, 4).groups("pipe")[0] == (0, 4, 8, 12)


def test_another_order_of_axes() -> None:
    places = plan(machines("a100-8"), parallel={"tp": 2, "pp": 2, "order": ["tp", "pp", "dp"]})
    assert [(place.dp, place.pp, place.tp) for place in places[:5]] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
    ]


@pytest.mark.parametrize(
    ("name", "keys", "order"),
    [
        ("dgx1v", {"parallel": {"tp": 2}}, [0, 3, 1, 2, 5, 6, 4, 7]),
        ("dgx1v", {"parallel": {"tp": 4}}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("dgx1v", {"parallel": {"tp": 2, "pp": 2}}, [0, 3, 1, 2, 4, 7, 5, 6]),
        ("dgx1v", {}, [0, 3, 2, 1, 5, 6, 7, 4]),  # the ring of double links
        (
            "dgx1v",
            {"zero": {"stage": 3, "shard_group": 4}},
            [0, 1, 2, 3, 4, 5, 6, 7],
        ),  # a copy of the states per quad
        (
            "pcie-bridges",
            {"parallel": {"tp": 2}},
            [0, 3, 1, 2, 4, 7, 5, 6],
        ),  # the bridges, then the sockets
        ("h100-8", {"parallel": {"tp": 2}}, list(range(8))),
        ("no-links-told", {"parallel": {"tp": 2}}, list(range(4))),
    ],
)
def test_gpus_follow_the_links(name: str, keys: dict[str, Any], order: list[int]) -> None:
    places = plan(machines(name), **keys)
    assert gpus_of(places) == order
    assert [place.device for place in places] == [f"cuda:{rank}" for rank in range(len(order))]


def test_chosen_gpus_are_grouped_among_themselves() -> None:
    (box,) = machines("pcie-bridges").hosts
    places = plan(Cluster((box.called("box", chosen=(0, 1, 2, 3)),)), parallel={"tp": 2})
    assert gpus_of(places) == [0, 3, 1, 2]
    assert gpus_of(plan(Cluster((box.called("box", 4),)), parallel={"tp": 2})) == [0, 3, 1, 2]


def test_a_tp_group_stays_on_a_host() -> None:
    uneven = Cluster((host("a", "H100", 6), host("b", "H100", 6)))
    with pytest.raises(PreflightError) as caught:
        plan(uneven, parallel={"tp": 4})
    assert caught.value.exit_code is ExitCode.PREFLIGHT
    assert (
        "parallel.tp: 4 ranks of one tp group would sit on several hosts (a has 6 ranks, b has 6 "
        "ranks), such as ranks 4, 5, 6, 7 on a, b: write a tp " in (str(caught.value))
    )
    places = plan(uneven, parallel={"tp": 4, "allow_cross_node_tp": True})
    assert [place.host for place in places] == ["a"] * 6 + ["b"] * 6
    (warning,) = make_plan(job(parallel={"tp": 4, "allow_cross_node_tp": True}), uneven).warnings
    assert "1 tp group on several hosts, such as ranks 4, 5, 6, 7 on a, b" in warning


def test_an_nvlink_domain_may_span_hosts() -> None:
    places = plan(machines("nvl72-part"), parallel={"tp": 8})
    assert {place.host for place in places} == {"host0", "host1"}
    apart = Cluster((host("a", "GB200", 4, "one/1"), host("b", "GB200", 4, "other/1")))
    with pytest.raises(PreflightError, match="would sit on several hosts"):
        plan(apart, parallel={"tp": 8})


def test_slices_have_no_tp() -> None:
    with pytest.raises(
        PreflightError, match="host offers MIG slices, which have no links to each other"
    ):
        plan(machines("a100-mig-7"), parallel={"tp": 2})


def test_a_rank_on_a_slice_sees_nothing_else() -> None:
    (box,) = machines("a100-mig-7").hosts
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    places = plan(Cluster((box.called("box", 7),)), env=shared)
    assert {place.device for place in places} == {"cuda:0"}
    assert len({place.uuid for place in places}) == 7


def test_nccl_takes_a_gpu_once() -> None:
    """Ranks on slices of one GPU would end in "Duplicate GPU detected"."""
    (box,) = machines("a100-mig-7").hosts
    with pytest.raises(PreflightError) as caught:
        plan(Cluster((box.called("box", 2),)))
    assert str(caught.value).startswith(
        "slots: ranks 0 and 1 would be on MIG slices of one GPU, GPU 0 of box, and NCCL takes a "
        "GPU once, whatever its slices: write slots: 1 and give each job a slice"
    )
    (place,) = plan(Cluster((box.called("box", 1),)))
    assert place.uuid == "MIG-00000000-0000-0000-0000-000000000000"
    (place,) = plan(Cluster((box,)), slots=1, env={"CUDA_VISIBLE_DEVICES": box.gpus[4].uuid})
    assert place.uuid == "MIG-00000000-0000-0000-0000-000000000004"


def test_different_gpus_of_a_host_are_named_by_number() -> None:
    (box,) = machines("mixed-4").hosts
    with pytest.raises(PreflightError) as caught:
        plan(Cluster((box,)))
    assert (
        "the ranks would run on different GPUs: NVIDIA A100-PCIE-40GB (40 GiB) on host (GPU 0, 1) "
        "and NVIDIA GeForce RTX 4090 (24 GiB) on host (GPU 2, 3). The slowest" in str(caught.value)
    )
    assert gpus_of(plan(Cluster((box,)), env={"CUDA_VISIBLE_DEVICES": "2,3"})) == [2, 3]
    assert [place.pp for place in plan(Cluster((box,)), parallel={"pp": 2})] == [0, 0, 1, 1]


def test_stages_may_differ_and_replicas_may_not() -> None:
    mixed = Cluster((host("new", "H100", 4), host("old", "A100", 4)))
    places = plan(mixed, parallel={"tp": 2, "pp": 2})
    assert {(place.host, place.pp) for place in places} == {("new", 0), ("old", 1)}
    with pytest.raises(PreflightError) as caught:
        plan(mixed, parallel={"tp": 4})
    assert (
        "the ranks would run on different GPUs: H100 (80 GiB) on new and A100 (80 GiB) on old"
        in str(caught.value)
    )
    with pytest.raises(PreflightError, match="stage 0 of the pipeline would run on different GPUs"):
        plan(mixed, parallel={"tp": 2, "pp": 2, "order": ["tp", "pp", "dp"]})


def test_the_batch_divides_over_replicas() -> None:
    resolved = make_plan(job(parallel={"tp": 4}, batch={"global": 6}), machines("h100-8"))
    assert resolved.batch.ranks == 2
    assert reason(resolved, "parallel.dp") == "2 (8 ranks / (tp 4 x pp 1))"
    assert resolved.job.parallel.dp == 2
    assert make_plan(resolved.job, machines("h100-8")).plan == resolved.plan


def test_ranks_keep_to_cores_near_their_gpu() -> None:
    places = plan(machines("h100-8"))
    assert [place.cpus for place in places] == [
        "0-11",
        "12-23",
        "24-35",
        "36-47",
        "48-59",
        "60-71",
        "72-83",
        "84-95",
    ]
    assert [place.numa for place in places] == [0] * 4 + [1] * 4
    assert {place.threads for place in places} == {12}


def test_ranks_without_a_gpu_divide_the_host() -> None:
    nodes = (NumaNode(0, ((0, 4), (1, 5))), NumaNode(1, ((2, 6), (3, 7))))
    box = HostFacts("box", 8, 1 << 34, nodes=nodes)
    places = plan(Cluster((box,)), slots=2)
    assert [(place.cpus, place.numa, place.threads) for place in places] == [
        ("0-1,4-5", 0, 4),
        ("2-3,6-7", 1, 4),
    ]
    assert plan(Cluster((box,)), slots=1)[0].cpus is None  # all is its own


@pytest.mark.parametrize(
    ("keys", "facts", "words"),
    [
        ({"bind": "off"}, {}, None),
        ({"env": {"OMP_PROC_BIND": "true"}}, {}, "off (env.OMP_PROC_BIND is set)"),
        ({}, {"unbound": "an affinity is set already"}, "off (an affinity is set already)"),
        ({}, {"nodes": ()}, "off (its cores are not known)"),
        ({"threads": 5}, {}, "off (ranks share cores)"),
        ({"slots": 16}, {}, "off (ranks share cores)"),
        ({"slots": 1}, {}, "off (one rank has all cores)"),
    ],
)
def test_when_ranks_are_not_bound(
    keys: dict[str, Any], facts: dict[str, Any], words: str | None
) -> None:
    box = replace(
        HostFacts("box", 8, 1 << 34, nodes=(NumaNode(0, tuple((cpu,) for cpu in range(8))),)),
        **facts,
    )
    resolved = make_plan(job(**({"slots": 2} | keys)), Cluster((box,)))
    assert {place.cpus for place in resolved.plan.ranks} == {None}
    assert resolved.job.bind == "off"
    assert words is None or reason(resolved, "bind") == words


def test_gpus_all_on_one_socket_leave_the_ranks_free() -> None:
    """Their share of one node would be less than the threads that all cores give them."""
    (box,) = machines("h100-8").hosts
    near = replace(box, gpus=tuple(replace(gpu, numa=0) for gpu in box.gpus))
    assert reason(make_plan(job(), Cluster((near,))), "bind") == "off (too few cores near its GPU)"


@pytest.fixture
def own_affinity() -> Iterator[set[int]]:
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_an_affinity_of_the_users_own_is_seen(
    own_affinity: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module.cgroup, "cpu_quota", lambda: None)
    monkeypatch.setattr(cluster_module.cgroup, "cpuset", lambda: set(own_affinity))
    for name in cluster_module.USER_BINDING:
        monkeypatch.delenv(name, raising=False)
    assert probe_host().unbound is None
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    assert probe_host().unbound == "KMP_AFFINITY is set"
    monkeypatch.delenv("KMP_AFFINITY")
    monkeypatch.setattr(
        cluster_module.cgroup, "cpuset", lambda: own_affinity | {max(own_affinity) + 1}
    )
    assert probe_host().unbound == "an affinity is set already"
    monkeypatch.setattr(cluster_module.cgroup, "cpu_quota", lambda: 0.5)
    assert probe_host().unbound == (
        f"a CPU quota of 1 on {len(own_affinity)} CPUs, which others use too"
        if len(own_affinity) > 1
        else "an affinity is set already"
    )


def test_cpu_sets_are_text_as_linux_writes_it() -> None:
    assert format_cpus(parse_cpus("0-7,64-71")) == "0-7,64-71"
