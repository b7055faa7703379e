"""A disk for states is looked at before a run: what cannot hold them, and what will be slow."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from test_host_checks import GB, HERE, NEEDS, REPORT

from zrun.hosts import offload_disk
from zrun.hosts.cluster import Cluster, HostFacts
from zrun.hosts.offload_disk import SwapFolder, find_problem, find_warnings, in_words, look_at
from zrun.launch.bring_up import look_here
from zrun.placement.plan import make_plan
from zrun.preflight.host_checks import find_problems
from zrun.watch.preface import preface
from zrun_core.errors import PreflightError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.spec import offload_folder
from zrun_core.tiers import probe
from zrun_core.tiers.probe import DiskFacts

GOOD = DiskFacts("/scratch", None, "xfs", False, True, 1700 * GB, 2.9e9, 2.1e9)


def job(**keys: Any) -> JobConfig:
    required = {"name": "j", "model": "m:f", "data": "m:f", "steps": 1, "batch": {"micro": 1}}
    return JobConfig.model_validate(required | keys)


def folder_of(path: Path | str) -> SwapFolder:
    return SwapFolder(str(path), is_made=False)


def test_two_looks_at_a_small_disk_do_not_fill_it_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, is_first = 12 << 20, True
    found: list[DiskFacts] = []

    def reserve(file: int, num_bytes: int) -> None:
        nonlocal room, is_first
        if num_bytes > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        room -= num_bytes
        was_first, is_first = is_first, False
        if was_first:
            found.append(probe.probe_disk(str(tmp_path)))

    free = SimpleNamespace(f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: setattr(free, "f_bavail", room) or free)
    monkeypatch.setattr(probe, "reserve", reserve)
    found.append(probe.probe_disk(str(tmp_path)))
    assert [each.error for each in found] == [None, None]
    assert list(find_warnings(replace(found[0], direct=True), job())) == []  # not called slow
    assert "too little to measure its speed" in in_words(found[0])
    room = 0
    assert probe.probe_disk(str(tmp_path)).error == "No space left on device"


@pytest.mark.parametrize(
    ("keys", "path", "is_made"),
    [
        ({"offload": "host"}, None, False),
        ({"offload": "disk"}, "/runs/j", True),
        ({"offload": {"optimizer": "disk", "dir": "/scratch"}}, "/scratch", False),
        ({"offload": {"optimizer": "disk", "dir": "swap"}}, "/job/swap", False),
        ({"offload": {"optimizer": "disk", "dir": "~/swap"}}, "~/swap", False),
        (
            {
                "offload": {"dir": "/scratch"},
                "activations": {"checkpoint": "full", "offload": "disk"},
            },
            "/scratch",
            False,
        ),
    ],
)
def test_the_folder_is_looked_for_beside_the_job_or_is_the_run_directory(
    keys: dict[str, Any], path: str | None, is_made: bool
) -> None:
    asked = job(**keys)
    found = SwapFolder.of(asked, Path("/job"), Path("/runs/j"))
    assert found == (None if path is None else SwapFolder(path, is_made))
    if found is not None:
        worker = offload_folder(asked, Path("/job"), Path("/runs/j"))
        assert str(worker) == os.path.expanduser(found.path), "ranks look at the same place"


def test_a_usable_disk_has_its_rates_measured_and_nothing_is_left_there(tmp_path: Path) -> None:
    disk = look_at(folder_of(tmp_path))
    assert find_problem(disk) is None
    assert disk.folder == str(tmp_path)
    assert disk.free_bytes > 0
    assert disk.read_rate > 0
    assert disk.write_rate > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "there is no such folder: make it, or name a folder"),
        ("file", "Not a directory: name a folder"),
    ],
)
def test_a_folder_must_be_there(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PreflightError) as refused:
        look_here(folder_of(tmp_path / name))
    assert str(refused.value) == (
        f"states on disk: {tmp_path / name}: {words} on a local disk in offload.dir"
    )


def test_memory_is_no_disk() -> None:
    with pytest.raises(PreflightError, match=r"/dev/shm is memory, not a disk \(tmpfs\), and the"):
        look_here(folder_of("/dev/shm"))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ("open", errno.EROFS, "Read-only file system"),
        ("open", errno.EACCES, "Permission denied"),
        ("posix_fallocate", errno.ENOSPC, "No space left on device"),
        ("preadv", errno.EIO, "Input/output error"),
    ],
)
def test_a_disk_that_takes_no_files_is_refused_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int, words: str
) -> None:
    def fail(*given: object) -> None:
        del given  # the traceback would keep memory of a map that is to be closed
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        disk = look_at(folder_of(tmp_path))
    assert f"{tmp_path}: {words}: name a folder" in (find_problem(disk) or "")


def test_a_disk_that_does_not_answer_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Event()
    monkeypatch.setattr(offload_disk, "probe_disk", lambda folder: answers.wait())
    monkeypatch.setattr(offload_disk, "_PATIENCE_S", 0.05)
    disk = look_at(folder_of(tmp_path))
    answers.set()
    assert disk.error == "it has not answered for 0.05 s"


def test_a_slow_disk_is_not_measured_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_LONGEST_S", 0.0)
    written: list[int] = []
    monkeypatch.setattr(probe, "write_pages", lambda file, memory, offset: written.append(offset))
    assert look_at(folder_of(tmp_path)).write_rate > 0
    assert written == [0], "one block is enough to know"


def test_a_host_whose_disk_holds_no_states_cannot_be_used() -> None:
    facts = replace(REPORT.facts, disk=DiskFacts("/scratch", "Read-only file system", "xfs"))
    said = list(find_problems(replace(REPORT, facts=facts), HERE, {"train.py": "1"}, NEEDS, "n1"))
    assert said == [
        "states on disk: /scratch: Read-only file system: name a folder on a local disk in "
        "offload.dir"
    ]


def test_a_fast_disk_is_shown_without_a_warning() -> None:
    asked = job(offload="disk")
    host = HostFacts("n1", 8, 64 * GB, disk=GOOD)
    other = replace(host, hostname="n2", disk=replace(GOOD, free_bytes=GB))
    line = "disk: /scratch (xfs), 1.7 TiB free, reads 2.9 GB/s, writes 2.1 GB/s"
    resolved = make_plan(asked, Cluster((host,)))
    assert resolved.warnings == ()
    assert line in preface(resolved, Cluster((host,))).splitlines()
    shown = preface(resolved, Cluster((host, other)))
    assert f"{in_words(other.disk or GOOD)} (n2, which has least of 2 hosts)" in shown


@pytest.mark.parametrize(
    ("offload", "price"),
    [
        (
            {"optimizer": "disk", "grad": "device"},
            ", and a step reads 12 bytes of each parameter and writes 12: about 360 s for a "
            "billion parameters of this host",
        ),
        (
            "disk",
            ", and a step reads 16 bytes of each parameter and writes 16: about 480 s for a "
            "billion parameters of this host",
        ),
        ("device", ""),
    ],
)
def test_a_slow_disk_is_warned_of_with_its_price(offload: Any, price: str) -> None:
    slow = replace(GOOD, read_rate=100e6, write_rate=50e6)
    asked = job(offload=offload, activations={"checkpoint": "full", "offload": "disk"})
    said = list(find_warnings(slow, asked))
    assert said == [
        f"the disk of /scratch is slow: it reads 100 MB/s, writes 50 MB/s{price}",
    ]
    host = HostFacts("n1", 8, 64 * GB, disk=slow)
    assert make_plan(asked, Cluster((host,))).warnings == (f"n1: {said[0]}",)


def test_a_disk_without_direct_transfers_is_a_warning_only() -> None:
    (said,) = find_warnings(replace(GOOD, direct=False), job(offload="disk"))
    assert said.startswith("/scratch (xfs) has no direct I/O: all traffic goes through")
