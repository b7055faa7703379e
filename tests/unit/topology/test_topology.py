"""Links as NVML tells them, through the real pynvml and a library of our own,
and as scenarios tell them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "scenarios"))
import fake_nvml

from zrun.cli import app
from zrun.hosts.cluster import HostFacts, simulate
from zrun.topology import nvml
from zrun.topology.boards import Reading
from zrun.topology.cpus import NumaNode, format_cpus, parse_cpus, read_nodes, shares
from zrun.topology.links import LinkMatrix, link_matrix
from zrun.topology.nvml_source import NotKnown
from zrun.topology.scenario import Scenario
from zrun.watch.topology import groupings
from zrun_core.errors import JobError

_READ = """
import dataclasses, json, os, sys
from zrun.topology.machine import read_machine
for path in sys.argv[1:]:
    os.environ["ZRUN_FAKE_NVML"] = path
    print(json.dumps(dataclasses.asdict(read_machine())))
"""


def reading(name: str) -> Reading:
    return nvml.read(Scenario.read(fake_nvml.scenario(name)))


def matrix(name: str) -> LinkMatrix:
    return link_matrix(reading(name))


def host(name: str) -> HostFacts:
    return simulate(Scenario.read(fake_nvml.scenario(name))).hosts[0]


def told(value: Reading) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(value)))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


def read_by_pynvml(library: Path, names: list[str]) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", _READ, *(str(fake_nvml.scenario(name)) for name in names)],
        env=fake_nvml.environment(library, names[0]),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_real_binding_reads_what_scenarios_say(library: Path) -> None:
    """One process reads all: `nvmlInit` loads the next scenario."""
    for name, found in zip(fake_nvml.NAMES, read_by_pynvml(library, fake_nvml.NAMES), strict=True):
        assert found == told(reading(name)), name


def test_functions_that_the_driver_lacks_are_not_known(tmp_path: Path) -> None:
    """Here the symbols are missing, where the scenario only says so."""
    old = fake_nvml.build(tmp_path, "-DOLD_DRIVER")
    (found,) = read_by_pynvml(old, ["old-driver"])
    assert found == told(reading("old-driver"))
    assert found["devices"][0]["links"] == [{"remote": None, "bus_id": "00000000:11:00.0"}]
    assert found["devices"][0]["memory_bytes"] == 16280 << 20
    assert found["devices"][0]["numa"] is None
    assert found["cuda"] == 9000


def test_without_a_driver_there_are_no_gpus(library: Path) -> None:
    environ = fake_nvml.environment(library, "dgx1v") | {"ZRUN_FAKE_NVML": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-m", "zrun", "topo", "--json"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["hosts"][0]["gpus"] == []


def test_topo_of_a_machine_is_topo_of_its_scenario(library: Path) -> None:
    """The command itself, on eight GPUs that pynvml finds."""
    command = [sys.executable, "-m", "zrun", "topo", "--json"]
    environ = fake_nvml.environment(library, "dgx1v")
    real = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert real.returncode == 0, real.stderr
    found, expected = (
        json.loads(real.stdout)["hosts"][0],
        json.loads(topo("dgx1v", "--json"))["hosts"][0],
    )
    for key in ("gpus", "links", "paths", "bandwidth_gb_s", "groups", "driver"):
        if key == "gpus":  # NUMA nodes are those of the machine that runs the test
            found[key] = [each | {"numa": None} for each in found[key]]
            expected[key] = [each | {"numa": None} for each in expected[key]]
        assert found[key] == expected[key], key


def topo(name: str, *options: str) -> str:
    result = CliRunner().invoke(
        app, ["topo", "--simulate", str(fake_nvml.scenario(name)), *options]
    )
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dgx1v", "hybrid cube mesh"),
        ("dgx2", "NVSwitch"),
        ("a100-8", "NVSwitch"),
        ("h100-8", "NVSwitch"),
        ("pcie-8-2sockets", "PCIe"),
        ("pcie-bridges", "NVLink pairs"),
        ("a100-mig-7", "MIG slices"),
        ("one-gpu", "one device"),
        ("zero-gpu", "no GPU"),
        ("lost-gpu", "NVSwitch"),
        ("old-driver", "NVLink pairs"),
        ("no-links-told", "links not known"),
    ],
)
def test_kinds_of_machines(name: str, kind: str) -> None:
    assert matrix(name).kind == kind


@pytest.mark.parametrize(
    ("name", "pair", "path", "bandwidth"),
    [
        ("dgx1v", (0, 3), "NV2", 40.0),
        ("dgx1v", (0, 1), "NV1", 20.0),
        ("dgx1v", (0, 5), "SYS", 6.0),
        ("dgx2", (0, 15), "NV6", 120.0),
        ("a100-8", (1, 6), "NV12", 240.0),
        ("h100-8", (1, 6), "NV18", 370.8),
        ("nvl72-part", (0, 1), "NV18", 721.8),
        ("pcie-8-2sockets", (0, 1), "PIX", 12.0),
        ("pcie-8-2sockets", (0, 2), "NODE", 8.0),
        ("pcie-bridges", (0, 3), "NV4", 48.0),
        ("pcie-bridges", (0, 1), "PHB", 10.0),
        ("old-driver", (0, 1), "NV1", 18.0),
        ("no-links-told", (0, 1), "?", 0.0),
        ("a100-mig-7", (0, 1), "MIG", 0.0),
        ("a100-mig-7", (0, 7), "MIG", 0.0),
    ],
)
def test_paths_and_bandwidths(
    name: str, pair: tuple[int, int], path: str, bandwidth: float
) -> None:
    found = matrix(name)
    for a, b in (pair, pair[::-1]):
        assert (found.paths[a][b], found.bandwidth[a][b]) == (path, bandwidth)


@pytest.mark.parametrize(
    ("name", "tp", "groups", "bandwidths"),
    [
        ("dgx1v", 2, [(0, 3), (1, 2), (4, 7), (5, 6)], (40.0, 20.0)),
        ("dgx1v", 4, [(0, 1, 2, 3), (4, 5, 6, 7)], (20.0, 20.0)),
        ("pcie-bridges", 2, [(0, 3), (1, 2), (4, 7), (5, 6)], (48.0, 10.0)),
        ("pcie-8-2sockets", 4, [(0, 1, 2, 3), (4, 5, 6, 7)], (8.0, 8.0)),
        ("h100-8", 4, [(0, 1, 2, 3), (4, 5, 6, 7)], (370.8, 370.8)),
    ],
)
def test_tp_groups(
    name: str, tp: int, groups: list[tuple[int, ...]], bandwidths: tuple[float, float]
) -> None:
    """The best groups, and what they are better than."""
    found = next(each for each in groupings(host(name)) if each.tp == tp)
    assert found.groups == groups
    assert (found.bottleneck, found.naive_bottleneck) == bandwidths


def test_one_lost_gpu_costs_one_gpu() -> None:
    found = host("lost-gpu")
    assert [gpu.index for gpu in found.gpus] == [0, 1, 2, 4, 5, 6, 7]
    assert found.problems == ("GPU 3 is lost: it fell off the bus",)
    assert "7 x NVIDIA A100-SXM4-80GB, GPU 3 is lost" in str(found)


def test_a_divided_gpu_is_its_slices() -> None:
    found = host("a100-mig-7")
    assert [gpu.is_slice for gpu in found.gpus] == [True] * 7 + [False]
    assert {gpu.uuid[:4] for gpu in found.gpus[:7]} == {"MIG-"}
    assert {gpu.memory_bytes for gpu in found.gpus[:7]} == {4864 << 20}
    assert "7 x NVIDIA A100-SXM4-40GB MIG 4864MiB, 1 x NVIDIA A100-SXM4-40GB" in str(found)
    assert groupings(found) == []


def test_memory_of_the_first_version_serves_where_the_second_differs() -> None:
    assert {gpu.memory_bytes for gpu in host("memory-v2").gpus} == {23028 << 20}


def test_processes_on_a_gpu_are_seen() -> None:
    assert reading("one-gpu").devices[0].processes == (4711,)


class _Failing:
    """A scenario of which one call after the other fails."""

    def __init__(self, scenario: Scenario, fails: set[int], code: int | None) -> None:
        self.scenario, self.fails, self.code, self.count = scenario, fails, code, 0

    def call(self, name: str, *arguments: Any) -> Any:
        self.count += 1
        if self.count in self.fails:
            raise NotKnown(self.code)
        return self.scenario.call(name, *arguments)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["dgx1v", "a100-mig-7", "pcie-bridges"]),
    st.sets(st.integers(1, 250), max_size=40),
    st.sampled_from([None, 2, 3, 4, 13, 15, 999]),
)
def test_any_call_may_fail(name: str, fails: set[int], code: int | None) -> None:
    source = _Failing(Scenario.read(fake_nvml.scenario(name)), fails, code)
    links = link_matrix(nvml.read(source))
    assert all(
        links.bandwidth[a][b] == links.bandwidth[b][a]
        for a in range(len(links))
        for b in range(len(links))
    )


def test_topo_draws_links_and_groups() -> None:
    lines = topo("dgx1v").splitlines()
    assert (
        lines[0]
        == "host: 80 cores, 512.0 GiB, 8 x Tesla V100-SXM2-32GB, driver 535.161.08; hybrid cube "
        "mesh"
    )
    paths = "0 X NV1 NV1 NV2 NV2 SYS SYS SYS"
    assert lines[2].split() == [*paths.split(), "32.0", "GiB", "0", "0-19,40-59"]
    assert (
        " ".join(lines[11].split())
        == "2 {0,3} {1,2} {4,7} {5,6} 40 GB/s {0,1} {2,3} {4,5} {6,7} 20 GB/s"
    )
    assert " ".join(lines[12].split()) == "4 {0,1,2,3} {4,5,6,7} 20 GB/s the same 20 GB/s"


def test_topo_says_what_it_does_not_know() -> None:
    assert "Links are not known: GPUs are used in the order of their numbers" in topo(
        "no-links-told"
    )
    assert "MIG slices have no links to each other: parallel.tp must be 1 here" in topo(
        "a100-mig-7"
    )
    assert "no GPU" in topo("zero-gpu")


def test_the_description_in_the_documentation_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "topology.md").read_text(encoding="utf-8")
    path = tmp_path / "machine.txt"
    path.write_text(next(block for block in page.split("```") if block.startswith("\ngpus ")))
    found = simulate(Scenario.read(path)).hosts[0]
    assert found.links == host("pcie-bridges").links
    assert topo("dgx1v").splitlines()[0] in page


def test_topo_as_json() -> None:
    found = json.loads(topo("dgx1v", "--json"))["hosts"][0]
    assert found["groups"][0] == {
        "tp": 2,
        "groups": [[0, 3], [1, 2], [4, 7], [5, 6]],
        "bottleneck_gb_s": 40.0,
        "naive_groups": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "naive_bottleneck_gb_s": 20.0,
    }
    assert found["gpus"][7]["numa"] == 1


def test_topo_seats_ranks() -> None:
    """Pairs on double links; the second pair continues the ring of NVLinks."""
    ranks = json.loads(topo("dgx1v", "--tp", "2", "--json"))["ranks"]
    assert [int(place["uuid"][4:12], 16) for place in ranks] == [0, 3, 1, 2, 5, 6, 4, 7]
    assert [place["device"] for place in ranks] == [f"cuda:{rank}" for rank in range(8)]
    assert [place["tp"] for place in ranks] == [0, 1] * 4


def test_many_ranks_are_cut(tmp_path: Path) -> None:
    large = tmp_path / "large.txt"
    large.write_text(fake_nvml.scenario("rack-8x4").read_text().replace("hosts 8", "hosts 100"))
    result = CliRunner().invoke(app, ["topo", "--simulate", str(large), "--tp", "4"])
    assert result.exit_code == 0, result.output
    assert "and 336 ranks more: --json lists all\n" in result.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu 8", "1: 'gpu' is none of gpus, name"),
        ("gpus eight", "'eight' is no number from 0 to 64"),
        ("gpus 2\nlink 0 2 1", ":2: 'link 0 2 1': 2 names a GPU beyond the 2"),
        ("gpus 2\nlink 0 1", "words are missing, or there are too many"),
        ("gpus 2\nlink 0,1 1 1", "too many values"),
        ("gpus 2\npath 0 1 NVL", "'NVL' is none of PIX, PXB, PHB, NODE, SYS"),
        ("gpus 1\nnode 0 0 1-x", "is no list of numbers: write 0-3,8"),
        ("gpus 1\nfabric xyz 1", "non-hexadecimal"),
    ],
)
def test_a_wrong_description_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "machine.txt"
    path.write_text(text)
    with pytest.raises(JobError) as caught:
        Scenario.read(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_a_description_that_is_not_there() -> None:
    with pytest.raises(
        JobError, match="No such file or directory: a description of a machine is wanted"
    ):
        Scenario.read(Path("/nowhere/machine.txt"))


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_damaged_descriptions_are_refused_or_shown(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lines = fake_nvml.scenario(data.draw(st.sampled_from(fake_nvml.NAMES))).read_text().splitlines()
    line = data.draw(st.integers(0, len(lines) - 1))
    words = lines[line].split() or [""]
    word = data.draw(st.integers(0, len(words) - 1))
    words[word] = data.draw(
        st.sampled_from(["", "-1", "0", "99", "0-7", "7-0", "x", "0,0", "GPU", "\x1b[2J", "1" * 30])
    )
    lines[line] = " ".join(words)
    path = tmp_path_factory.getbasetemp() / "damaged.txt"
    path.write_text("\n".join(lines))
    try:
        found = simulate(Scenario.read(path)).hosts[0]
    except JobError:  # exit code 2
        return
    assert len(found.gpus) == (0 if found.links is None else len(found.links))
    groupings(found)


def test_facts_of_a_real_box_travel_as_json() -> None:
    for name in fake_nvml.NAMES:
        facts = host(name)
        assert HostFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", (0, 1, 2, 3, 8)), ("", ()), ("7", (7,)), ("0,2-3", (0, 2, 3))]
)
def test_lists_of_cpus(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus
    assert format_cpus(reversed(cpus)) == text


def two_sockets(tmp_path: Path) -> Path:
    """Two nodes of four cores with two threads each: thread n + 8 is the sibling of n."""
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = tmp_path / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for cpu in range(16):
        folder = tmp_path / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    return tmp_path


def test_nodes_and_cores_of_a_host(tmp_path: Path) -> None:
    nodes = read_nodes(set(range(16)), two_sockets(tmp_path))
    assert [node.id for node in nodes] == [0, 1]
    assert nodes[1].cores == ((4, 12), (5, 13), (6, 14), (7, 15))


def test_cpus_that_are_not_ours_are_left_out(tmp_path: Path) -> None:
    nodes = read_nodes({1, 2, 9, 12}, two_sockets(tmp_path))
    assert nodes == (NumaNode(0, ((1, 9), (2,))), NumaNode(1, ((12,),)))


def test_a_host_that_tells_nothing_is_one_node(tmp_path: Path) -> None:
    assert read_nodes({3, 1}, tmp_path) == (NumaNode(0, ((1,), (3,))),)


def test_this_machine_has_its_cpus_once() -> None:
    cpus = os.sched_getaffinity(0)
    assert sorted(cpu for node in read_nodes(cpus) for cpu in node.cpus) == sorted(cpus)


def test_shares_are_whole_cores_of_the_ranks_own_node(tmp_path: Path) -> None:
    nodes = read_nodes(set(range(16)), two_sockets(tmp_path))
    assert shares(nodes, [0, 1, 1]) == [(0, 8, 1, 9, 2, 10, 3, 11), (4, 12, 5, 13), (6, 14, 7, 15)]
    assert shares(nodes, [None, None]) == [nodes[0].cpus, nodes[1].cpus]
    assert shares(nodes, [0, 9]) == [nodes[0].cpus, nodes[1].cpus]  # a node that nobody knows
    assert shares(nodes, [0] * 5)[0] == ()  # less than a core
