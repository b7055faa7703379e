"""AMD's GPUs, as a module `amdsmi` of our own tells of them, behind the face of NVIDIA's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scenarios" / "fake_amdsmi"))
import amdsmi

from zrun.topology import amd
from zrun.topology.amd import AmdMonitor, Amdsmi
from zrun.topology.links import link_matrix
from zrun.topology.visible import NamedGpu, environment_of, visible

FAKE = Path(amdsmi.__file__).parent
UUIDS = [f"GPU-{0xABC0 + number:016x}" for number in range(8)]
ALL = {"all": [64000, 64000]}


def machine(links: dict[str, list[int]], *boards: dict[str, Any]) -> dict[str, Any]:
    """A box of eight, four on each node, some of which are told otherwise."""
    found = [
        {"serial": hex(0xABC0 + number), "bdf": f"0000:{5 + number:02x}:00.0", "node": number // 4}
        for number in range(8)
    ]
    for number, board in enumerate(boards):
        found[number] |= board
    return {"boards": found, "links": links}


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say what machine this is."""
    path = tmp_path / "machine.json"
    monkeypatch.setenv("ZRUN_FAKE_AMDSMI", str(path))
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi)

    def say(links: dict[str, list[int]], *boards: dict[str, Any]) -> None:
        path.write_text(json.dumps(machine(links, *boards)))

    return say


def test_boards_and_their_links_are_read(told: Any) -> None:
    told(ALL, {"used": 4096, "pids": [4711]})
    found = amd.read_machine()
    assert (found.driver, found.cuda, found.trouble) == ("6.10.5", None, None)
    first = found.devices[0]
    assert (first.uuid, first.name, first.index) == (UUIDS[0], "AMD Instinct MI300X", 0)
    assert (first.memory_bytes, first.free_bytes) == (196608 << 20, 192512 << 20)
    assert (first.processes, first.bus_id, first.numa) == ((4711,), "00000000:05:00.0", 0)
    assert (first.health.power_w, first.health.power_limit_w) == (140.0, 750.0)
    assert (first.health.temperature_c, first.health.max_clock_mhz) == (41, 2100)
    links = link_matrix(found)
    assert links.kind == "xGMI between all"
    assert {links.paths[a][b] for a in range(8) for b in range(8) if a != b} == {"XG1"}
    assert links.bandwidth[0][7] == 48.0
    assert not links.through_switch


def test_bundles_of_links_and_pcie_are_told_apart(told: Any) -> None:
    """The dies of an MI250 have four links, other pairs one or none."""
    links = {"0-1": [50000, 200000], "2-3": [50000, 200000], "0-2": [50000, 50000]}
    mi250 = {"name": "AMD Instinct MI250X", "gfx": "gfx90a"}
    told(links, *[mi250] * 8)
    found = link_matrix(amd.read_machine())
    assert (found.paths[0][1], found.bandwidth[0][1]) == ("XG4", 144.0)
    assert (found.paths[2][0], found.bandwidth[2][0]) == ("XG1", 36.0)
    assert (found.paths[1][2], found.paths[1][6]) == ("NODE", "SYS")
    assert found.kind == "xGMI between some"


def test_what_ails_a_board_is_read(told: Any) -> None:
    hot = {"degrees": 104, "slowed": {"active_prochot_thrm": True, "active_ppt_pwr": True}}
    told(ALL, hot, {"errors": [4, 1], "pages": ["RESERVED", "PENDING"]}, {"lanes": [8, 16]})
    health = [board.health for board in amd.read_machine().devices]
    assert health[0].slowed == ("it is too hot (its own protection)", "its power limit")
    assert (health[1].corrected, health[1].uncorrected, health[1].remap) == (4, 1, "pending")
    assert (health[2].pcie_width, health[2].max_pcie_width) == (8, 16)
    assert health[3].slowed == ()


def test_partitions_of_a_gpu_have_no_name_of_their_own(told: Any) -> None:
    part = {"serial": "0xabc0", "bdf": "0000:05:00.0"}
    told(ALL, part, part)
    assert [board.uuid for board in amd.read_machine().devices[:3]] == [None, None, UUIDS[2]]


def test_a_board_that_does_not_answer_is_named(told: Any) -> None:
    told(ALL, {"lost": True})
    found = amd.read_machine()
    assert found.devices[0].problem == "does not answer (amdsmi)"
    assert len(link_matrix(found)) == 7


def test_any_function_may_be_missing_or_fail(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another ROCm, or for a board that cannot."""
    told(ALL)
    names = [name for name in vars(amdsmi) if name.startswith("amdsmi_get_gpu_") or "topo" in name]
    for name in names:
        monkeypatch.delattr(amdsmi, name)
        found = amd.read(Amdsmi(amdsmi))
        assert len(found.devices) == 8
        assert len(link_matrix(found)) in (0, 8)
    assert all(board.problem for board in found.devices)


def test_without_a_driver_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi)
    monkeypatch.delenv("ZRUN_FAKE_AMDSMI", raising=False)
    assert amd.read_machine().trouble is None  # as on any machine with ROCm's packages
    monkeypatch.setattr(amd, "_KFD", "/dev/null")
    assert amd.read_machine().trouble == (
        "an AMD driver that does not answer (Error code: 34 | AMDSMI_STATUS_DRIVER_NOT_LOADED): is "
        "amdgpu loaded, and is this user in the groups render and video?"
    )
    monkeypatch.delitem(sys.modules, "amdsmi")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(FAKE)])
    missing = amd.read_machine().trouble
    assert missing is not None
    assert missing.startswith("an AMD driver, and no module amdsmi that reads it")


def test_errors_in_a_run_are_counted(told: Any) -> None:
    told(ALL)
    monitor = AmdMonitor(Amdsmi(amdsmi), [UUIDS[1], UUIDS[2], "GPU-of-nobody"])
    assert monitor.changes() == []
    told(ALL, {"errors": [0, 9]}, {"errors": [5, 2]}, {"lost": True})
    errors, lost = monitor.changes()
    assert (errors.uuid, errors.is_fatal) == (UUIDS[1], False)
    assert str(errors) == "uncorrectable errors of its memory (2, ECC)"
    assert (lost.uuid, lost.is_fatal, str(lost)) == (UUIDS[2], True, "the GPU is gone")
    assert monitor.changes() == []
    assert list(monitor.health()) == [UUIDS[1]]


@pytest.mark.parametrize("name", ["amdsmi_get_gpu_asic_info", "amdsmi_get_gpu_vram_usage"])
def test_a_call_that_fails_ends_no_rank(
    told: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    told(ALL)
    monitor = AmdMonitor(Amdsmi(amdsmi), UUIDS)

    def busy(handle: int) -> None:
        raise amdsmi.AmdSmiException("Error code: 30 | AMDSMI_STATUS_BUSY")

    monkeypatch.setattr(amdsmi, name, busy)
    assert monitor.changes() == []


def test_a_driver_that_is_busy_for_a_moment_ends_no_rank(
    told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(ALL)
    monitor = AmdMonitor(Amdsmi(amdsmi), [UUIDS[0]])
    told(ALL, {"lost": True})
    monkeypatch.setattr(amd.time, "sleep", lambda seconds: told(ALL))
    assert monitor.changes() == []


def test_processes_that_are_not_told_are_not_known(
    told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(ALL)
    monkeypatch.setattr(amdsmi, "amdsmi_get_gpu_process_list", lambda handle: [object()])
    assert amd.read_machine().devices[0].processes is None
    monkeypatch.setattr(amdsmi, "amdsmi_get_gpu_process_list", lambda handle: [])
    assert amd.read_machine().devices[0].processes == ()


# Variables.

GPUS = [NamedGpu(number, uuid, is_rocm=True) for number, uuid in enumerate(UUIDS)]


@pytest.mark.parametrize(
    ("environ", "places"),
    [
        ({"ROCR_VISIBLE_DEVICES": "2,5"}, (2, 5)),
        ({"ROCR_VISIBLE_DEVICES": UUIDS[7]}, (7,)),
        ({"HIP_VISIBLE_DEVICES": "3,1"}, (3, 1)),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, (3, 1)),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "7"}, (0,)),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "2,0"}, (6, 4)),
        ({"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "0"}, ()),
        (environment_of([UUIDS[6], UUIDS[1]]), (6, 1)),
    ],
)
def test_hip_counts_what_rocm_leaves(environ: dict[str, str], places: tuple[int, ...]) -> None:
    found = visible(GPUS, environ)
    assert (found.places, found.trouble) == (places, None)


def test_a_number_beyond_what_rocm_leaves_is_named() -> None:
    found = visible(GPUS, {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "0,4"})
    assert found.places == (4,)
    assert found.trouble == (
        "HIP_VISIBLE_DEVICES: '4' is no GPU of this host, which has 0, 1, so ROCm shows only the 1 "
        "before it"
    )


def test_topo_and_doctor_know_amd(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(ALL, {}, {"errors": [0, 3], "pages": ["PENDING"]})))
    environ = os.environ | {"ZRUN_FAKE_AMDSMI": str(path), "HIP_VISIBLE_DEVICES": "1,4"}
    environ["PYTHONPATH"] = os.pathsep.join((str(FAKE), os.environ.get("PYTHONPATH", "")))

    def zrun(*argv: str) -> str:
        command = [sys.executable, "-m", "zrun", *argv]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    topo = zrun("topo", "--tp", "2")
    assert "2 x AMD Instinct MI300X, driver 6.10.5; xGMI between all" in topo
    assert "{1,4}" in topo
    assert "XG1" in topo
    doctor = zrun("doctor")
    assert "GPU 0 has had 3 uncorrectable memory errors since its driver was loaded" in doctor
    assert "a reset replaces (amd-smi reset --gpureset, with no process on it)" in doctor
