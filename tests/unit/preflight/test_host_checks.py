"""From what is known of hosts to sentences; and doors and knocks on this machine's own loopback."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from zrun.agent.connectivity import Listener, connect
from zrun.hosts.cluster import Gpu, HostFacts
from zrun.hosts.probe import (
    Driver,
    Folder,
    GpuState,
    HostReport,
    Limits,
    Software,
    _gpu_states,
    facts,
    job_code,
)
from zrun.preflight.host_checks import HostRequirements, find_notes, find_problems, requirements_of
from zrun.preflight.host_report import Finding, describe
from zrun.preflight.reachability import peers_of
from zrun.topology.boards import Board, Reading
from zrun_core.spine.config import JobConfig

HERE = Software("3.11.7", "/venv/bin/python", "0.1.0", "c0de", "2.13.0+cu128", "CUDA 12.8")
GB = 1 << 30
REPORT = HostReport(
    facts=HostFacts(
        "n1", 8, 64 * GB, (Gpu("GPU-a", "H100", 80 * GB), Gpu("GPU-b", "H100", 80 * GB))
    ),
    software=HERE,
    code={"train.py": "1"},
    folders=(Folder("/runs", True, 9 * GB, None),),
    limits=Limits(1024, None, None, 8 * GB),
    driver=Driver("570.1", (12, 8)),
    gpus=(GpuState("GPU-a", 79 * GB, 80 * GB, ()), GpuState("GPU-b", 79 * GB, 80 * GB, ())),
    infiniband=False,
    addresses={"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",)},
    reached_at="10.0.0.1",
    user="me",
)
NEEDS = HostRequirements(
    job_dir=Path("/job"), shared=(Path("/runs"),), cuda=True, shm_bytes=64 << 20
)


def said(report: HostReport, needs: HostRequirements = NEEDS) -> list[str]:
    return list(find_problems(report, HERE, {"train.py": "1"}, needs, "n1"))


def test_a_good_host_has_nothing_said_of_it() -> None:
    assert said(REPORT) == []
    assert list(find_notes(REPORT, HERE, NEEDS)) == []


def test_it_crosses_as_json() -> None:
    assert HostReport.from_json(REPORT.to_json()) == REPORT


def test_an_agent_looks_at_this_machine(tmp_path: Path) -> None:
    (tmp_path / ".zrun-token-x").touch()
    answer = facts(
        {
            "job_dir": str(tmp_path),
            "folders": {str(tmp_path): "x", str(tmp_path / "none"): "y"},
            "swap": {"path": str(tmp_path / "not" / "yet"), "is_made": True},
        }
    )
    report = HostReport.from_json(answer["report"])
    assert report.facts.disk is not None
    assert report.facts.disk.folder == str(tmp_path)
    assert report.facts.disk.free_bytes > 0
    assert report.code == {}
    assert [(folder.same, folder.trouble) for folder in report.folders] == [
        (True, None),
        (False, None),
    ]
    assert report.folders[0].free_bytes
    assert "127.0.0.1" in report.addresses["lo"]
    assert answer["said"] >= answer["heard"]


SOFTWARE = {
    "torch 2.12.0 there, 2.13.0+cu128 here: install the same version for /venv/bin/python": {
        "torch": "2.12.0"
    },
    "/venv/bin/python has no torch: install 2.13.0+cu128 there": {"torch": None},
    "torch 2.13.0+cu128 for CPUs there, for CUDA 12.8 here: install the same build for /venv": {
        "torch_for": "CPUs"
    },
    "zrun 0.2.0 there, 0.1.0 here: install the same": {"zrun": "0.2.0", "zrun_code": "x"},
    "its zrun has different code: install the same version": {"zrun_code": "x"},
    "Python 3.12.1 there, 3.11.7 here: name one that is the same everywhere in launch.python": {
        "python": "3.12.1"
    },
}


@pytest.mark.parametrize("problem", SOFTWARE)
def test_software_must_be_the_same(problem: str) -> None:
    (line,) = said(
        replace(REPORT, software=replace(HERE, **SOFTWARE[problem])), replace(NEEDS, cuda=False)
    )
    assert line.startswith(problem)


def test_a_patch_of_python_is_worth_a_remark_only() -> None:
    report = replace(REPORT, software=replace(HERE, python="3.11.2"), skew_s=-60.0)
    assert said(report) == []
    assert list(find_notes(report, HERE, NEEDS)) == [
        "its clock is -60.0 s off; nothing depends on it but the times in logs",
        "Python 3.11.2 there, 3.11.7 here",
    ]


PROBLEMS = {
    "the job's folder /job is not there: share it, or copy it: rsync -a /job/ n1:/job/": {
        "code": None
    },
    "the job's code differs in new.py, train.py: share it": {
        "code": {"train.py": "2", "new.py": "1"}
    },
    "/runs is another folder there than here": {"folders": (Folder("/runs", False, GB, None),)},
    "/runs: nothing can be written there as me: Read-only": {
        "folders": (Folder("/runs", True, GB, "Read-only"),)
    },
    "/runs: 1.0 GiB free, 2.0 GiB needed": {"folders": (Folder("/runs", True, GB, None),)},
    "it has no usable GPU, and no driver that answers": {
        "facts": HostFacts("n1", 8, GB),
        "gpus": (),
        "driver": None,
    },
    "its driver 470 supports CUDA 11.4, and torch 2.13.0+cu128 needs CUDA 12.8: update": {
        "driver": Driver("470", (11, 4))
    },
    "GPU 1 is in use, 60.0 GiB of 80.0 GiB are taken: end pid 7, 8, or": {
        "gpus": (REPORT.gpus[0], GpuState("GPU-b", 20 * GB, 80 * GB, (7, 8)))
    },
    "ulimit -n (open files) is 64, 256 are needed: raise nofile": {
        "limits": Limits(64, None, None, GB)
    },
    "ulimit -u (threads of a user) is 64, 100 are needed: raise nproc": {
        "limits": Limits(None, 64, None, GB)
    },
    "ulimit -l (locked memory) is 64.0 KiB, and InfiniBand": {
        "limits": Limits(None, None, 65536, GB),
        "infiniband": True,
    },
    "/dev/shm has 1.0 MiB free, 64.0 MiB are needed: mount -o remount,size=64M": {
        "limits": Limits(None, None, None, 1 << 20)
    },
    "there is no /dev/shm, 64.0 MiB are needed": {"limits": Limits(None, None, None, None)},
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_each_problem_says_what_is_and_what_is_needed(problem: str) -> None:
    (line,) = said(
        replace(REPORT, **PROBLEMS[problem]),
        replace(NEEDS, free_bytes=2 * GB if "2.0 GiB" in problem else 0, nproc=100),
    )
    assert line.startswith(problem)


def test_a_gpu_that_is_left_out_may_be_busy() -> None:
    busy = replace(REPORT, gpus=(REPORT.gpus[0], GpuState("GPU-b", 20 * GB, 80 * GB, (7,))))
    assert said(busy, replace(NEEDS, chosen={"n1": (0,)})) == []
    assert len(said(busy, replace(NEEDS, chosen={"n1": (1,)}))) == 1


def test_a_gpu_that_is_lost_is_worth_a_remark() -> None:
    """How many are left is counted where ranks are seated."""
    report = replace(
        REPORT, facts=replace(REPORT.facts, problems=("GPU 2 is lost: it fell off the bus",))
    )
    assert said(report) == []
    assert list(find_notes(report, HERE, NEEDS)) == ["GPU 2 is lost: it fell off the bus"]


def test_who_computes_on_a_gpu_is_read_of_those_that_are_visible() -> None:
    devices = (
        Board(0, uuid="GPU-a", memory_bytes=80 * GB, free_bytes=20 * GB, processes=(7,)),
        Board(1, uuid="GPU-hidden", memory_bytes=80 * GB, free_bytes=80 * GB),
        Board(2, "is lost"),
        Board(3, uuid="GPU-d", memory_bytes=80 * GB, free_bytes=80 * GB, processes=None),
    )
    driver, states = _gpu_states(Reading(devices, driver="570.1", cuda=12080), {"GPU-a", "GPU-d"})
    assert driver == Driver("570.1", (12, 8))
    assert states == (
        GpuState("GPU-a", 20 * GB, 80 * GB, (7,)),
        GpuState("GPU-d", 80 * GB, 80 * GB, ()),
    )
    assert _gpu_states(Reading(), set()) == (None, ())


def test_what_a_job_needs_grows_with_its_ranks_and_loaders() -> None:
    keys = {"name": "x", "model": "m:f", "steps": 1, "batch": 1}
    plain = JobConfig.model_validate(keys | {"data": "m:d"})
    loading = JobConfig.model_validate(
        keys | {"data": {"call": "m:d", "workers": 4}, "device": "cuda"}
    )
    small, large = (
        requirements_of(plain, Path("/j"), [Path("/r")], 2, 2, None),
        requirements_of(loading, Path("/j"), [Path("/r")], 64, 8, None),
    )
    assert (small.job_dir, small.shared, small.cuda, small.shm_bytes) == (
        Path("/j"),
        (Path("/r"),),
        False,
        0,
    )
    assert large.cuda
    assert large.shm_bytes == 8 * (32 + 64) << 20
    assert (small.nofile, large.nofile) == (272, 832)  # 1024 is the usual limit
    assert large.nproc == 8 * 80


def test_one_table_names_all_and_groups_what_is_the_same() -> None:
    findings = [
        Finding(f"n{number}", REPORT, ("no torch",) if number % 2 else ()) for number in range(4)
    ]
    text = describe([*findings, Finding("gone", None, ("refused",))])
    assert text.splitlines()[0] == "3 of 5 hosts cannot be used:"
    assert text.splitlines()[-2:] == ["  n1, n3: no torch", "  gone: refused"]
    many = describe(
        [Finding(f"n{number}", REPORT, ()) for number in range(999)]
        + [Finding("gone", None, ("refused",))]
    )
    assert "  and 999 more that can be used" in many.splitlines()
    assert len(many.splitlines()) == 5


def test_code_is_compared_but_not_what_is_no_code(tmp_path: Path) -> None:
    for name in (
        "train.py",
        "net/model.py",
        ".git/hook.py",
        "runs/x/old.py",
        "venv/lib/a.py",
        "env/b.py",
        "data.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    before = job_code(tmp_path)
    assert before is not None
    assert sorted(before) == ["net/model.py", "train.py"]
    (tmp_path / "net/model.py").write_text("x = 2\n")
    assert job_code(tmp_path) == before | {"net/model.py": job_code(tmp_path / "net")["model.py"]}  # type: ignore[index]
    assert job_code(tmp_path / "gone") is None


def test_between_any_two_hosts_that_knock_it_is_both_ways() -> None:
    for count in (2, 32, 100):
        knocked = {(a, b) for a in range(count) for b in peers_of(count, a)}
        assert all((b, a) in knocked for a, b in knocked)
        assert all((0, each) in knocked for each in range(1, count))
        assert all(a != b for a, b in knocked)
    assert len(knocked) < 100 * 11


def test_a_door_is_at_one_address_and_knows_its_mark() -> None:
    door, other = Listener("127.0.0.1", "mark"), Listener("127.0.0.1", "another")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        closed = socket.create_server(("127.0.0.1", 0))
        closed_port = closed.getsockname()[1]
        closed.close()
        places = {
            "good": door.port,
            "other": other.port,
            "closed": closed_port,
            "deaf": deaf.getsockname()[1],
        }
        failed = connect(
            {name: ("127.0.0.1", port) for name, port in places.items()}, "mark", patience_s=0.3
        )
    assert failed == {
        "other": "another machine or program answers at that address",
        "closed": "Connection refused",
        "deaf": "no answer within 0.3 s",
    }
    door.close()
    other.close()
    assert connect(
        {"gone": ("127.0.0.1", door.port), "nonsense": ("no address", 1)}, "mark"
    ).keys() == {
        "gone",
        "nonsense",
    }
