"""What is said of GPUs that are unwell: counters, heat, lanes, links, and errors in a run.

Through scenarios, and through the real pynvml and a library of our own.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scenarios"))
import fake_nvml

from zrun.hosts import probe
from zrun.hosts.cluster import simulate
from zrun.hosts.probe import Driver, HostReport, Limits, Software, _gpu_states
from zrun.preflight.gpu_checks import find_gpu_notes, find_gpu_problems
from zrun.topology import nvml, xids
from zrun.topology.nvml_health import NvmlMonitor, read_health
from zrun.topology.scenario import Scenario

SICK = [
    "GPU 2 is slowed down at 88 degrees, to 765 of 1410 MHz: it is too hot (its own protection)",
    "GPU 3 is slowed down at 41 degrees, to 210 of 1410 MHz: the power supply brakes it",
    "GPU 4 has damaged memory, which a reset replaces (nvidia-smi --gpu-reset, with no process "
    "on it)",
    "GPU 4 has had 2 uncorrectable memory errors since its driver was loaded: look at dmesg",
    "GPU 6 uses 4 of 16 PCIe lanes, so copies to and from the host take longer: reseat the "
    "board, and check its riser",
    "GPU 6 has 10 of 12 fast links up: see nvidia-smi nvlink --status",
]
WATCH = """
import sys
from zrun.topology.machine import monitor
with monitor(sys.argv[1:]) as found:
    print("watches", flush=True)
    for line in sys.stdin:
        for fault in [*found.faults(float(line)), *found.changes()]:
            print(fault.uuid, fault.is_fatal, fault, flush=True)
        print("end", flush=True)
    health = found.health()
    print({uuid: each.temperature_c for uuid, each in health.items()})
"""


def report(name: str) -> HostReport:
    """What an agent would tell of the machine of a scenario."""
    scenario = Scenario.read(fake_nvml.scenario(name))
    facts = simulate(scenario).hosts[0]
    driver, gpus = _gpu_states(nvml.read(scenario), {gpu.uuid for gpu in facts.gpus})
    software = Software("3.11.7", "/usr/bin/python3", "0.1.0", "code", "2.13.0+cu126", "CUDA 12.6")
    limits = Limits(1024, None, None, 1 << 30)
    return HostReport(facts, software, {}, (), limits, driver, gpus, False, {}, None, "me")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


def test_what_ails_gpus_is_told_and_stops_nothing() -> None:
    assert list(find_gpu_notes(report("sick-8"), is_wanted=True)) == SICK


def test_memory_that_cannot_be_mended_stops_a_job() -> None:
    sick = report("sick-8")
    (problem,) = find_gpu_problems(sick, None)
    assert problem == (
        "GPU 5 has damaged memory and no spare rows left to replace it with: leave it out, and "
        "have the GPU replaced"
    )
    assert list(find_gpu_problems(sick, range(5))) == []
    assert any("have the GPU replaced" in note for note in find_gpu_notes(sick, is_wanted=False))


@pytest.mark.parametrize("name", ["h100-8", "pcie-8-2sockets", "pcie-bridges", "old-driver"])
def test_nothing_is_said_of_gpus_that_are_well_or_tell_nothing(name: str) -> None:
    assert list(find_gpu_notes(report(name), is_wanted=True)) == []


def test_boards_of_several_kinds_are_told() -> None:
    assert list(find_gpu_notes(report("mixed-4"), is_wanted=True)) == [
        "its GPUs differ (2 x NVIDIA A100-PCIE-40GB, 2 x NVIDIA GeForce RTX 4090): the ranks of a "
        "job, or of a stage, need the same kind"
    ]


def test_a_driver_without_a_board_says_what_to_look_at() -> None:
    empty = report("zero-gpu")
    (problem,) = find_gpu_problems(empty, None)
    assert problem == (
        "it has no usable GPU: NVIDIA driver 550.54.15 sees none: compare nvidia-smi -L with "
        "lspci -d 10de:; a container is started with --gpus all"
    )
    assert empty.driver == Driver("550.54.15", (12, 4))


def test_health_crosses_to_the_launcher() -> None:
    sick = report("sick-8")
    assert HostReport.from_json(json.loads(json.dumps(sick.to_json()))) == sick
    assert sick.gpus[2].health.temperature_c == 88
    assert (sick.gpus[2].health.power_w, sick.gpus[2].health.power_limit_w) == (180, 400)
    assert sick.gpus[4].health.corrected == 17


@pytest.mark.parametrize(
    ("bits", "slowed"),
    [
        (0x1, ()),  # idle
        (0x10 | 0x2, ()),  # clocks that somebody has set
        (0x8, ("its own protection (power or heat)",)),
        (0x48, ("it is too hot (its own protection)",)),
        (0x24, ("it is too hot (the driver's limit)", "its power limit")),
    ],
)
def test_reasons_for_low_clocks(bits: int, slowed: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "machine.txt"
    path.write_text(f"gpus 1\nslowed 0 {bits}\n")
    assert read_health(Scenario.read(path), 0).slowed == slowed


# Errors in a run.


def test_xids_say_what_they_mean() -> None:
    lost = xids.fault_of("GPU-a", 79)
    assert lost is not None
    assert (str(lost), lost.is_fatal) == ("Xid 79, the GPU fell off the bus", True)
    code = xids.fault_of("GPU-a", 31)
    assert code is not None
    assert not code.is_fatal
    assert "compute-sanitizer" in code.advice
    assert xids.fault_of("GPU-a", 45) is None  # the driver's cleaning up after a process
    rare = xids.fault_of("GPU-a", 444)
    assert rare is not None
    assert str(rare) == "Xid 444, see https://docs.nvidia.com/deploy/xid-errors"


class _Watching:
    """A process that watches GPUs of a machine, and says what it sees when asked."""

    def __init__(self, environ: dict[str, str], *uuids: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WATCH, *uuids],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "watches"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def faults(self, patience_s: float) -> list[str]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{patience_s}\n")
        self.process.stdin.flush()
        return list(iter(self._line, "end"))

    def end(self) -> str:
        rest, _ = self.process.communicate(timeout=30)
        return rest.strip()


def test_errors_are_told_as_they_come(library: Path, tmp_path: Path) -> None:
    """Of the GPUs that are watched, and only from then on."""
    machine = fake_nvml.Machine(tmp_path, "h100-8")
    machine.say("xid 1 48", "sensors 0-7 50 300 700 90 1500 1980")
    one, two = (f"GPU-{number:08x}-0000-0000-0000-000000000000" for number in (1, 2))
    watching = _Watching(machine.environment(library), one, two, "GPU-of-nobody")
    assert watching.faults(0.05) == []
    machine.say("xid 3 79", "xid 2 31", "xid 1 45", "xid 1 94")
    assert watching.faults(1.0) == [
        f"{two} False Xid 31, a kernel read or wrote an address that is not mapped",
        f"{one} True Xid 94, an uncorrectable error of its memory, which ends the process that "
        "met it",
    ]
    machine.say("ecc 2 9 2")
    assert watching.faults(0.05) == []  # nothing was known before
    machine.say("ecc 2 9 5")  # without an event
    assert watching.faults(0.05) == [
        f"{two} False 3 uncorrectable errors of its memory (ECC)",
    ]
    machine.say("lost 2")
    assert watching.faults(0.05) == [f"{two} True the GPU fell off the bus"]
    assert watching.faults(0.05) == []  # once
    assert watching.end() == str({one: 50})


def test_a_driver_without_events_is_watched_by_its_counters(library: Path, tmp_path: Path) -> None:
    machine = fake_nvml.Machine(tmp_path, "h100-8")
    machine.say("fails nvmlEventSetCreate 3", "ecc 0-7 0 0")
    gpu = "GPU-00000000-0000-0000-0000-000000000000"
    watching = _Watching(machine.environment(library), gpu)
    machine.say("ecc 0 0 1")
    assert watching.faults(0.05) == [f"{gpu} False an uncorrectable error of its memory (ECC)"]
    watching.end()


def test_slices_are_watched_as_the_gpu_they_are_part_of(library: Path, tmp_path: Path) -> None:
    machine = fake_nvml.Machine(tmp_path, "a100-mig-7")
    part = "MIG-00000000-0000-0000-0000-000000000004"
    watching = _Watching(machine.environment(library), part)
    machine.say("xid 0 95")
    assert watching.faults(1.0)[0].startswith(f"{part} True Xid 95")
    watching.end()


def test_a_watch_of_a_library_that_fails_ends_no_process() -> None:
    class Broken:
        def call(self, name: str, *arguments: Any) -> Any:
            raise nvml.NotKnown(999)

    monitor = NvmlMonitor(Broken(), ["GPU-a"])
    assert (monitor.faults(0.0), monitor.changes(), monitor.health()) == ([], [], {})


# By the command line.


def zrun(environ: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zrun", *argv],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_doctor_tells_what_ails_the_gpus_of_this_machine(library: Path) -> None:
    done = zrun(fake_nvml.environment(library, "sick-8"), "doctor")
    assert done.returncode == 0, done.stderr
    assert "8 x NVIDIA A100-SXM4-80GB" in done.stdout
    here = os.uname().nodename
    for note in SICK:
        assert f"note: {here}: {note}\n" in done.stdout


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (18, "an NVIDIA driver and a library of different versions, as after an update: reboot"),
        (9, "an NVIDIA library whose driver is not loaded: modprobe nvidia"),
        (4, "an NVIDIA driver that this user may not ask: give it /dev/nvidiactl"),
    ],
)
@pytest.mark.at_most(2)
def test_a_driver_that_does_not_start_is_named(
    library: Path, tmp_path: Path, code: int, words: str
) -> None:
    machine = fake_nvml.Machine(tmp_path, "h100-8")
    machine.say(f"fails nvmlInit {code}")
    done = zrun(machine.environment(library), "doctor")
    assert done.returncode == 0
    assert words in done.stdout


@pytest.mark.thorough
def test_topo_names_a_wrong_variable(library: Path) -> None:
    environ = fake_nvml.environment(library, "h100-8")
    right = zrun(environ | {"CUDA_VISIBLE_DEVICES": "GPU-00000005"}, "topo", "--json")
    assert [gpu["gpu"] for gpu in json.loads(right.stdout)["hosts"][0]["gpus"]] == ["5"]
    wrong = zrun(environ | {"CUDA_VISIBLE_DEVICES": "0,8"}, "topo")
    assert wrong.returncode == 0
    assert "'8' is no GPU of this host, which has 0, 1, 2, 3, ..." in wrong.stdout
    seats = zrun(environ | {"CUDA_VISIBLE_DEVICES": "0,8"}, "topo", "--tp", "1", "--pp", "2")
    assert seats.returncode == 3
    assert "CUDA_VISIBLE_DEVICES: '8' is no GPU" in seats.stderr


INSTALL = (
    "/usr/bin/python3 -m pip install --force-reinstall torch==2.13.0 --index-url "
    "https://download.pytorch.org/whl/{} (or another one that https://pytorch.org/get-started "
    "names for its driver)"
)


def with_torch(report: HostReport, version: str, target: str | None) -> HostReport:
    return replace(report, software=replace(report.software, torch=version, torch_for=target))


@pytest.mark.parametrize(
    ("version", "kind"),
    [("2.13.0+cpu", "CPUs"), ("2.13.0", "CPUs"), ("2.13.0+xpu", "Intel's GPUs")],
)
def test_a_wheel_that_computes_on_no_gpu_of_a_host_is_told(version: str, kind: str) -> None:
    healthy = report("h100-8")  # its driver serves CUDA 12
    (note,) = find_gpu_notes(with_torch(healthy, version, kind), is_wanted=True)
    assert note == (
        f"torch {version} is a wheel for {kind}, without CUDA: {INSTALL.format('cu126')}"
    )
    newer = replace(healthy, driver=Driver("580.65.06", (13, 0)))
    (note,) = find_gpu_notes(with_torch(newer, version, kind), is_wanted=True)
    assert note.endswith(INSTALL.format("cu130"))
    assert list(find_gpu_notes(healthy, is_wanted=True)) == []
    assert list(find_gpu_notes(with_torch(healthy, "2.13.0", None), is_wanted=True)) == []
    bare = replace(healthy, facts=replace(healthy.facts, gpus=()), gpus=())
    assert list(find_gpu_notes(with_torch(bare, version, kind), is_wanted=True)) == []


def test_a_wheel_is_for_the_gpus_of_one_vendor() -> None:
    nvidia = report("h100-8")
    (note,) = find_gpu_notes(with_torch(nvidia, "2.13.0+rocm7.2", "ROCm 7.2"), is_wanted=True)
    assert note.startswith("torch 2.13.0+rocm7.2 is a wheel for ROCm 7.2, without CUDA: /usr")
    gpus = tuple(replace(gpu, is_rocm=True) for gpu in nvidia.facts.gpus)
    amd = replace(nvidia, facts=replace(nvidia.facts, gpus=gpus), driver=None)
    assert list(find_gpu_notes(with_torch(amd, "2.13.0", "ROCm 7.2"), is_wanted=True)) == []
    for target in ("CPUs", "CUDA 13.0"):
        (note,) = find_gpu_notes(with_torch(amd, "2.13.0", target), is_wanted=True)
        assert note == (
            f"torch 2.13.0 is a wheel for {target}, without ROCm: install the wheel that "
            "https://pytorch.org/get-started names for its ROCm"
        )


def test_a_driver_that_does_not_serve_the_cuda_of_pypi_s_wheel_is_a_problem() -> None:
    healthy = report("h100-8")
    assert healthy.driver is not None
    old = f"its driver {healthy.driver.version} supports CUDA 12."
    (problem,) = find_gpu_problems(with_torch(healthy, "2.13.0", "CUDA 13.0"), None)
    assert problem.startswith(old)
    assert problem.endswith(
        "and torch 2.13.0 needs CUDA 13.0: update the driver to 580 or newer, or "
        + INSTALL.format("cu126")
    )
    for target in ("CUDA 12.9", "CUDA 12.6", "CPUs", "ROCm 7.2", None):
        assert list(find_gpu_problems(with_torch(healthy, "2.13.0", target), None)) == []
    ancient = replace(healthy, driver=Driver("470.57.02", (11, 4)))
    (problem,) = find_gpu_problems(with_torch(ancient, "2.13.0", "CUDA 12.6"), None)
    assert problem.endswith("update the driver to 525 or newer")  # no wheel is for CUDA 11


VERSION = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '2.13.0'
debug = False
cuda: Optional[str] = {cuda}
git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'
hip: Optional[str] = {hip}
rocm: Optional[str] = None
xpu: Optional[str] = {xpu}
"""


@pytest.mark.parametrize(
    ("cuda", "hip", "xpu", "target"),
    [
        ("'13.0'", None, None, "CUDA 13.0"),
        ("'12.6'", None, None, "CUDA 12.6"),
        (None, "'7.2.26015-fc0010cf6a'", None, "ROCm 7.2"),
        (None, None, "'20250301'", "Intel's GPUs"),
        (None, None, None, "CPUs"),
    ],
)
def test_what_torch_is_for_is_read_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, hip: str, xpu: str, target: str
) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "version.py").write_text(VERSION.format(cuda=cuda, hip=hip, xpu=xpu))
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr(probe, "find_spec", lambda name: spec)
    assert probe.torch_target() == target


def test_what_torch_is_for_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(probe, "find_spec", lambda name: spec)
    assert probe.torch_target() is None  # no such file
    (tmp_path / "version.py").write_text("__version__ = '3.0'\n")
    assert probe.torch_target() is None
    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    assert probe.torch_target() is None


def test_what_this_torch_is_for() -> None:
    import torch

    found = probe.torch_target()
    assert found is not None
    if torch.version.cuda is not None:
        assert found == f"CUDA {torch.version.cuda}"
    elif torch.version.hip is None:
        assert found in ("CPUs", "Intel's GPUs")
