"""What can go wrong while three hosts train, done on purpose, and what zrun must make of it.

    python tests/hosts/faults.py        prints the table (make test-faults)

Most strike once training has begun. "s" is from the fault to the end of the launcher; whatever
still runs, listens or lies in shared memory on any host after that is "left".
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rig as rigs

from zrun.transport.frames import SILENCE_S

WILD = Path(__file__).parents[1] / "e2e" / "wild.py"
PATIENCE_S = 300.0  # only bounds a failure: a busy machine may take long
HANG_S = 4.0
# What a cut link or a killed launcher leaves ends by itself within 20 s on a quiet machine.
LEFT_S = 60.0


def _begun(pid: int) -> int:
    """Return when a process began, in the system's ticks; 0: it has gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


@dataclass
class Launch:
    """A job under way on the hosts of a rig."""

    rig: rigs.Rig
    folder: Path
    launcher: subprocess.Popen[str]

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "run" / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["type"] == kind]

    def pids(self, host: str, text: str) -> list[int]:
        """Processes on a host whose command line has `text`, the oldest first."""
        found = [pid for pid, line in self.rig.hosts[host].commands().items() if text in line]
        return sorted(found, key=lambda pid: (_begun(pid), pid))  # numbers begin anew at times

    def agent(self, host: str) -> int:
        """The agent of a host, which is not the first process there with its command line.

        That is its reaper.
        """
        return self.pids(host, "zrun.agent.main")[-1]

    def ssh_client(self, host: str) -> int:
        """The process here that leads to a host."""
        for entry in Path("/proc").iterdir():
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1] if line else ""
            except OSError:
                continue
            if host.encode() in line and b"ssh" in line[0] and int(parent) == self.launcher.pid:
                return int(entry.name)
        raise AssertionError(f"no ssh client leads to {host}")

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                self.launcher.kill()
                raise AssertionError(f"{what} never came to be: {self.launcher.communicate()[1]}")
            time.sleep(0.02)


def start(
    rig: rigs.Rig,
    folder: Path,
    *overrides: str,
    environment: dict[str, str] | None = None,
    **keys: Any,
) -> Launch:
    """Begin to train a small model, a rank on each host.

    Args:
        environment: of the launcher; None: of this process.
    """
    folder.mkdir(exist_ok=True)
    shutil.copy(WILD, folder)
    given = {
        "name": "wild",
        "model": {"call": "wild.py:Net", "args": {"pause": 0.02}},
        "data": "wild.py:data",
        "steps": 100_000,
        "batch": 6,
        "slots": 1,
        "device": "cpu",
        "threads": 1,
        "log": {"every": 1},
        "hosts": list(rig.hosts),
        "launch": {"ssh": rig.ssh},
        "limits": {"hang_s": 600, "stop_s": 600},
        **keys,
    }
    (folder / "job.yaml").write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in given.items())
    )
    command = [
        sys.executable,
        "-m",
        "zrun",
        "train",
        "job.yaml",
        "--run-dir",
        "run",
        "--ui",
        "plain",
        *overrides,
    ]
    # Nobody reads what it prints: a pipe would fill, and hold it up.
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    launcher = subprocess.Popen(command, cwd=folder, env=environment, text=True, **quiet)
    return Launch(rig, folder, launcher)


def kill_worker(launch: Launch) -> None:
    os.kill(launch.pids("node2", "zrun_core")[0], signal.SIGKILL)


def stop_worker(launch: Launch) -> None:
    os.kill(launch.pids("node2", "zrun_core")[0], signal.SIGSTOP)


def kill_agent(launch: Launch) -> None:
    os.kill(launch.agent("node2"), signal.SIGKILL)


def kill_ssh(launch: Launch) -> None:
    os.kill(launch.ssh_client("node3"), signal.SIGKILL)


def kill_launcher(launch: Launch) -> None:
    launch.launcher.kill()


def cut(launch: Launch) -> None:
    launch.rig.hosts["node2"].link("down")


def part(launch: Launch) -> None:
    """Two hosts lose each other; the launcher reaches both."""
    launch.rig.part("node2", "node3")
    try:
        launch.launcher.wait(PATIENCE_S)
    finally:
        launch.rig.join("node2", "node3")


def cut_after_a_save(launch: Launch) -> None:
    launch.wait_for(lambda: launch.events("save"), "a save")
    cut(launch)


def interrupt(launch: Launch) -> None:
    launch.launcher.send_signal(signal.SIGINT)


def interrupt_twice(launch: Launch) -> None:
    launch.launcher.send_signal(signal.SIGINT)
    time.sleep(0.1)  # two key presses
    launch.launcher.send_signal(signal.SIGINT)


def unplug_briefly(launch: Launch) -> None:
    """Three seconds without a cable: TCP sends again what was lost."""
    before = len(launch.events("step"))
    launch.rig.hosts["node2"].link("down")
    time.sleep(3.0)
    launch.rig.hosts["node2"].link("up")
    launch.wait_for(lambda: len(launch.events("step")) > before + 20, "more steps")
    launch.launcher.send_signal(signal.SIGINT)


def nap(launch: Launch, pid: int) -> None:
    """A process stands still for longer than anybody's silence is believed,
    and nobody else minds.
    """
    os.kill(pid, signal.SIGSTOP)
    time.sleep(SILENCE_S + 5.0)
    os.kill(pid, signal.SIGCONT)
    late = time.time() + 3.0
    launch.wait_for(lambda: launch.events("step")[-1]["time"] > late, "steps of after the nap")
    launch.launcher.send_signal(signal.SIGINT)


def agent_naps(launch: Launch) -> None:
    nap(launch, launch.agent("node2"))


def launcher_naps(launch: Launch) -> None:
    nap(launch, launch.launcher.pid)


def stop_one_of_two(launch: Launch) -> None:
    """Another job of the same user on the same hosts goes on."""
    other = start(launch.rig, launch.folder / "other")
    other.wait_for(lambda: len(other.events("step")) > 3, "training")
    launch.launcher.send_signal(signal.SIGINT)
    launch.launcher.wait(PATIENCE_S)
    before = len(other.events("step"))
    other.wait_for(lambda: len(other.events("step")) > before + 20, "more steps of the other job")
    other.launcher.send_signal(signal.SIGINT)
    assert other.launcher.wait(PATIENCE_S) == 130


@dataclass(frozen=True)
class Fault:
    """What is done, and what must follow.

    The exit code, a line of the report, the seconds that it may take.

    Attributes:
        strike: once training has begun; None: nothing more than what `hosts` and `keys` say.
        keys: of the job.

    """

    name: str
    strike: Callable[[Launch], None] | None
    code: int
    says: str
    bound_s: float
    hosts: tuple[str, ...] = rigs.NAMES
    keys: Callable[[rigs.Rig], dict[str, Any]] = lambda rig: {}


def no_python(rig: rigs.Rig) -> dict[str, Any]:
    return {"launch": {"ssh": rig.ssh, "python": "/nowhere/python"}}


def soon_hangs(rig: rigs.Rig) -> dict[str, Any]:
    return {"limits": {"hang_s": HANG_S, "stop_s": 20}}


def do_with_two(rig: rigs.Rig) -> dict[str, Any]:
    return {
        **soon_hangs(rig),
        "steps": 60,
        "checkpoint": {"every": 5},
        "restarts": 1,
        "min_hosts": 2,
    }


def slow_clock(rig: rigs.Rig) -> dict[str, Any]:
    """node2 takes it to be a minute earlier."""
    source, shim, python = (rig.folder / name for name in ("clock.c", "clock.so", "python"))
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    python.write_text(
        f'#!/bin/sh\n[ "$(hostname)" = node2 ] && export LD_PRELOAD={shim}\nexec '
        f'{sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return {"launch": {"ssh": rig.ssh, "python": str(python)}, "steps": 12}


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec -= 60;
    return result;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec, t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""

FAULTS = [
    Fault("unknown host", None, 3, "nowhere: no such host is known here", 12, ("node1", "nowhere")),
    Fault(
        "connection refused",
        None,
        3,
        "refusing: the connection was refused",
        12,
        ("node1", "refusing"),
    ),
    Fault(
        "wrong host key",
        None,
        3,
        "changed: its host key is not the one known here",
        12,
        ("changed", "node2"),
    ),
    Fault("no login", None, 3, "stranger: ssh was refused", 12, ("stranger", "node2")),
    Fault("no Python there", None, 3, "there is no Python /nowhere/python", 12, keys=no_python),
    Fault("worker killed", kill_worker, 5, r"rank 1 of \d \(node2, cpu\) was killed by SIGKILL", 8),
    Fault(
        "worker stopped",
        stop_worker,
        6,
        r"rank 1 of \d \(node2, cpu\) is stopped by a signal or a debugger",
        HANG_S + 8,
        keys=soon_hangs,
    ),
    Fault("agent killed", kill_agent, 6, r"lost node2: its agent was killed there", 8),
    Fault(
        "ssh client killed", kill_ssh, 6, r"lost node3: the ssh client was killed by signal 9", 8
    ),
    Fault("launcher killed", kill_launcher, -9, "", 8),
    Fault("link cut", cut, 6, r"lost node2: the host no longer answers", 20, keys=soon_hangs),
    Fault(
        "two hosts parted",
        part,
        6,
        r"the network between node[23] and node[23] is cut",
        30,
        keys=soon_hangs,
    ),
    Fault(
        "link cut, min_hosts: 2",
        cut_after_a_save,
        0,
        r"restart 1 of 1 in 5 s, after step",
        60,
        keys=do_with_two,
    ),
    Fault("link down for 3 s", unplug_briefly, 130, r"stopped after step", 60),
    Fault("agent stopped for 20 s", agent_naps, 130, r"stopped after step", 120),
    Fault("launcher stopped for 20 s", launcher_naps, 130, r"stopped after step", 120),
    Fault("ctrl-C", interrupt, 130, r"stopped after step", 8),
    Fault("ctrl-C twice", interrupt_twice, 130, r"stopped after step", 8),
    Fault("one of two jobs stopped", stop_one_of_two, 130, r"stopped after step", 60),
    Fault("clock of node2 -60 s", None, 0, r"^hosts: 3 hosts", 60, keys=slow_clock),
]


@dataclass(frozen=True)
class Outcome:
    code: int
    cause: str  # the line that names it
    report: str
    seconds: float
    left: dict[str, list[str]]


def strike(fault: Fault, rig: rigs.Rig, folder: Path) -> Outcome:
    """Train, do it, and wait for the end."""
    begun = time.monotonic()
    launch = start(rig, folder, **{"hosts": list(fault.hosts), **fault.keys(rig)})
    try:
        if fault.strike is not None:
            launch.wait_for(lambda: len(launch.events("step")) > 3, "training")
            begun = time.monotonic()
            fault.strike(launch)
        _, report = launch.launcher.communicate(timeout=PATIENCE_S)
        seconds = time.monotonic() - begun
        rig.hosts["node2"].link("up")
        left_by = time.monotonic() + LEFT_S
        while (left := rig.leftovers()) and time.monotonic() < left_by:
            time.sleep(0.1)
    finally:
        launch.launcher.kill()
        rig.hosts["node2"].link("up")
    lines = [line for line in report.splitlines() if fault.says and re.search(fault.says, line)]
    return Outcome(launch.launcher.returncode, lines[-1] if lines else "", report, seconds, left)


def main() -> int:
    """Strike with every fault, and print what came of it."""
    if reason := rigs.missing():
        print(f"three hosts: {reason}")
        return 0
    wrong = 0
    print(f"{'fault':26} {'exit':>4} {'s':>5}  {'left':4}  cause")
    with (
        tempfile.TemporaryDirectory(prefix="zrun-faults-") as folder,
        rigs.build(Path(folder) / "rig") as rig,
    ):
        for number, fault in enumerate(FAULTS):
            found = strike(fault, rig, Path(folder) / str(number))
            is_right = found.code == fault.code and found.seconds < fault.bound_s and not found.left
            is_right &= bool(found.cause) or not fault.says
            wrong += not is_right
            left = sum(map(len, found.left.values()))
            mark = (
                ""
                if is_right
                else f"  WRONG: expected {fault.code} within {fault.bound_s:g} s, {fault.says}"
            )
            print(
                f"{fault.name:26} {found.code:4} {found.seconds:5.1f}  {left:4}  "
                f"{found.cause}{mark}",
                flush=True,
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
