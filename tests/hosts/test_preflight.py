"""Three hosts looked at before a start.

What is found, and everything that can be wrong with them, at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rig import Host, Rig

from zrun.hosts.backend import Backend, HostEntry
from zrun.hosts.cluster_env import NONE
from zrun.hosts.offload_disk import SwapFolder
from zrun.hosts.probe import HostReport, software
from zrun.launch.bring_up import bring_up
from zrun.preflight.host_checks import HostRequirements
from zrun.preflight.inspection import check_hosts, inspect_hosts
from zrun.preflight.rpc_client import ask
from zrun.transport.agent_process import AgentLink, LocalAgent, close_all
from zrun.transport.open_agents import open_agents
from zrun.transport.ssh import SshAgent
from zrun_core.errors import PreflightError
from zrun_core.spine.config import JobConfig


@contextmanager
def agents(
    rig: Rig, *more: AgentLink, python: dict[str, str] | None = None
) -> Iterator[list[AgentLink]]:
    """An agent on each of the three, and `more`."""
    found = [
        SshAgent(HostEntry(name), rig.ssh, (python or {}).get(name, sys.executable))
        for name in rig.hosts
    ]
    both: list[AgentLink] = [*found, *more]
    try:
        yield both
    finally:
        close_all(both)


def problems(error: PreflightError) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if ": " in line]


def test_good_hosts_are_told_apart(rig: Rig, tmp_path: Path) -> None:
    with agents(rig, LocalAgent()) as all_:
        reports = check_hosts(
            all_, HostRequirements(job_dir=Path(__file__).parent, shared=(tmp_path / "run",))
        )
    addresses = [*(host.address for host in rig.hosts.values()), rig.address]
    assert [report.address for report in reports] == addresses
    if rig.isolated:
        assert [report.facts.hostname for report in reports] == [*rig.hosts, os.uname().nodename]
        assert [report.interface for report in reports[:3]] == ["eth0"] * 3
    assert all(report.software == software() for report in reports)
    assert all(abs(report.skew_s) <= report.skew_error_s + 0.01 for report in reports)
    assert list(tmp_path.iterdir()) == []  # no token is left
    assert HostReport.from_json(reports[0].to_json()) == reports[0]


def test_nothing_listens_at_every_address(isolated_rig: Rig) -> None:
    rig = isolated_rig
    with agents(rig) as all_:
        opened = ask(
            {
                agent: {
                    "ask": "door",
                    "mark": "m",
                    "known": rig.hosts[agent.host].address,
                    "towards": [],
                }
                for agent in all_
            },
            12.0,
        )
        for agent in all_:
            answer, host = opened[agent], rig.hosts[agent.host]
            assert isinstance(answer, dict)
            listening = {line.split()[3] for line in host.run("ss", "-Hltn").stdout.splitlines()}
            assert listening == {f"{host.address}:22", f"{host.address}:{answer['port']}"}


@contextmanager
def mounted(host: Host, folder: str, *options: str) -> Iterator[None]:
    host.run("mount", "-t", "tmpfs", *options, "tmpfs", folder)
    try:
        yield
    finally:
        host.run("umount", folder)


@contextmanager
def few_files(host: Host, number: int) -> Iterator[None]:
    before = host.run(
        "prlimit", "--pid", str(host.sshd.pid), "--nofile", "--noheadings", "--output", "SOFT,HARD"
    )
    subprocess.run(["prlimit", "--pid", str(host.sshd.pid), f"--nofile={number}:"], check=True)
    try:
        yield
    finally:
        soft = before.stdout.split()[0]
        subprocess.run(["prlimit", "--pid", str(host.sshd.pid), f"--nofile={soft}:"], check=True)


def test_everything_that_is_wrong_is_said_at_once(
    isolated_rig: Rig, tmp_path: Path, old_torch: str
) -> None:
    rig = isolated_rig
    job, run, swap = tmp_path / "job", tmp_path / "run", tmp_path / "swap"
    for folder in (job, run, swap):
        folder.mkdir()
    (job / "train.py").touch()
    node1, node2, node3 = rig.hosts.values()
    with (
        mounted(node1, str(run)),
        mounted(node2, "/dev/shm", "-o", "size=1M"),
        mounted(node2, str(job)),
        mounted(node3, str(swap)),
        few_files(node3, 64),
        agents(rig, SshAgent(HostEntry("refusing"), rig.ssh), python={"node1": old_torch}) as all_,
        pytest.raises(PreflightError) as caught,
    ):
        check_hosts(
            all_,
            HostRequirements(
                job_dir=job,
                shared=(run,),
                shm_bytes=64 << 20,
                nofile=500,
                swap=SwapFolder(str(swap), is_made=False),
            ),
        )
    assert str(caught.value).startswith("4 of 4 hosts cannot be used:\n  host ")
    expected = [
        f"node1: torch 1.0.0 there, {software().torch} here: install the same version for "
        f"{old_torch}",
        f"node1: {run} is another folder there than here: put it on a file system that all "
        "hosts share",
        f"node2: the job's code differs in train.py: share it, or copy it: rsync -a {job}/ "
        f"node2:{job}/",
        "node2: /dev/shm has 1.0 MiB free, 64.0 MiB are needed: mount -o remount,size=64M "
        "/dev/shm, or",
        f"node3: states on disk: {swap} is memory, not a disk (tmpfs), and they would stay in it",
        "node3: ulimit -n (open files) is 64, 500 are needed",
        "refusing: the connection was refused",
    ]
    lines = problems(caught.value)
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start), line


def test_hosts_that_do_not_reach_each_other_are_named(isolated_rig: Rig) -> None:
    rig = isolated_rig
    node2, node3 = rig.hosts["node2"], rig.hosts["node3"]
    node2.run("ip", "route", "add", "unreachable", node3.address)
    try:
        with agents(rig) as all_, pytest.raises(PreflightError) as caught:
            check_hosts(all_, HostRequirements())
    finally:
        node2.run("ip", "route", "del", "unreachable", node3.address)
    advice = "open the ports between the hosts in their firewall"
    assert problems(caught.value) == [
        f"node2: it cannot reach node3 at {node3.address} (No route to host): {advice}",
        f"node3: it cannot reach node2 at {node2.address} (no answer within 3 s): {advice}",
    ]


def test_a_machine_with_two_names_is_one_host(rig: Rig) -> None:
    with agents(rig, SshAgent(HostEntry("again"), rig.ssh)) as all_:
        findings = inspect_hosts(all_, HostRequirements())
    assert [finding.problems for finding in findings[:3]] == [()] * 3
    assert findings[3].problems == ("it is the same machine as node1: name each host once",)


def test_a_host_with_a_port_is_called_by_both(isolated_rig: Rig, tmp_path: Path) -> None:
    """A name may be there several times, with other ports."""
    job = JobConfig.model_validate(
        {
            "name": "x",
            "model": "m:f",
            "data": "m:d",
            "steps": 1,
            "batch": 1,
            "launch": {"ssh": isolated_rig.ssh},
        }
    )
    entries = (HostEntry("node1", port=22, slots=2), HostEntry("node2", chosen=(1,), slots=2))
    backend = Backend("ssh", "", entries, NONE)
    started = open_agents(backend, job)
    try:
        found = bring_up(started, backend, job, tmp_path, tmp_path / "run", least=2)
        assert [(host.hostname, host.slots, host.chosen) for host in found.cluster.hosts] == [
            *[("node1:22", 2, None), ("node2", 2, (1,))]
        ]
        assert {agent.host: agent.interface for agent in found.agents} == {
            "node1:22": "eth0",
            "node2": "eth0",
        }
    finally:
        close_all(started)


def test_a_clock_that_is_off_is_reported_only(rig: Rig, late_python: str) -> None:
    with agents(rig, python={"node3": late_python}) as all_:
        findings = inspect_hosts(all_, HostRequirements())
    assert [finding.problems for finding in findings] == [()] * 3
    assert [len(finding.notes) for finding in findings] == [0, 0, 1]
    report = findings[2].report
    assert report is not None
    assert abs(report.skew_s + 60) < 1 + report.skew_error_s
    assert findings[2].notes[0].startswith(f"its clock is {report.skew_s:+.1f} s off")


@pytest.fixture(scope="module")
def old_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with all that this one has, and the metadata of another torch."""
    folder = tmp_path_factory.mktemp("old")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "torch-1.0.0.dist-info").mkdir()
    (site / "torch-1.0.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n"
    )
    (site / "more.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def late_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """This Python, a minute late."""
    folder = tmp_path_factory.mktemp("late")
    (folder / "late.c").write_text(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <time.h>\n"
        "int clock_gettime(clockid_t id, struct timespec *now) {\n"
        "  static int (*real)(clockid_t, struct timespec *);\n"
        "  if (!real) real = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "
        '"clock_gettime");\n'
        "  int status = real(id, now);\n  if (id == CLOCK_REALTIME) now->tv_sec -= 60;\n  "
        "return status;\n}\n"
    )
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", folder / "late.so", folder / "late.c", "-ldl"], check=True
    )
    wrapper = folder / "python"
    wrapper.write_text(f'#!/bin/sh\nLD_PRELOAD={folder}/late.so exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)
