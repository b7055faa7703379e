"""What can go wrong on GPUs, done on purpose, and what zrun must make of it.

    python tests/simulated_gpu/gpu_faults.py     prints the table of docs/reliability.md

Two or four ranks on one host, and four on two (`tests/hosts/rig.py`), with NCCL between them, which
tells of nothing: kernels run on, and the host waits for its device. "s" is from the fault to the
end of the launcher. What still runs, listens or lies in shared memory or among temporary files
after that is "left".
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import leftovers
from simulated_gpu.machine import Machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE.parent / "hosts"))
import faults as host_faults  # noqa: E402
import rig as rigs  # noqa: E402

PATIENCE_S = 400.0  # only bounds a failure: a busy machine may take long
HANG_S = 4.0
BUSY_S = 60.0  # that a busy machine may take longer, with the stacks and the end of all processes
HOSTS = ("node1", "node2")
LIMITS: dict[str, Any] = {"hang_s": 600, "first_step_s": 600}
PIPELINE: dict[str, Any] = {"slots": 4, "zero": 1, "parallel": {"pp": 2}}


@dataclass(frozen=True)
class Outcome:
    """How a launch ended.

    Attributes:
        said: on stderr.
        failure: what failure.json says.
        seconds: from the fault to the end; nan: there was none.
        left: what is still there, by where; it may be nothing.
    """

    code: int
    said: str
    failure: dict[str, Any]
    seconds: float
    left: dict[str, list[str]]


# One host


def launch(
    folder: Path,
    fault: str,
    *,
    gpu: Mapping[str, Any] | None = None,
    report: str = "",
    **keys: Any,
) -> Outcome:
    """Train on GPUs of a machine until `fault` of faulty.py ends it.

    Args:
        report: of a board, as tests/scenarios has it, once ranks train and boards are watched.
    """
    for name in ("faulty.py", "hungry_gpu.py"):
        shutil.copy(HERE / name, folder)
    job = {
        "name": "faulty",
        "model": {"call": "faulty.py:Net", "args": {"fault": fault}},
        "data": {"call": "faulty.py:data", "workers": 1},
        "steps": 6,
        "batch": 8,
        "slots": 2,
        "device": "cuda",
        "threads": 1,
        "zero": {"stage": 3, "bucket": 64},
        "log": {"every": 1},
        **keys,
    }
    job["limits"] = LIMITS | keys.get("limits", {})
    (folder / "job.yaml").write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in job.items())
    )
    (folder / "tmp").mkdir()
    mark = secrets.token_hex(8)
    machine = Machine(folder, "dgx1v")
    machine.say("sensors 0-7 50 200 300 90 1290 1530", "slowed 0-7 0", "ecc 0-7 0 0")
    environment = machine.gpu_environment(**(gpu or {}))
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    own = {"ZRUN_ESTIMATE": "off", "TMPDIR": str(folder / "tmp"), "ZRUN_TEST": mark}
    shared = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", "zrun", "train", "job.yaml", "--run-dir", "run"]
    running = subprocess.Popen(
        [*command, "--ui", "plain"],
        cwd=folder,
        env=environment | own,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    struck = folder / "struck"
    try:
        if report:
            _await_training(folder / "run" / "events.jsonl", running)
            machine.say(report)
            struck.touch()
        _, said = running.communicate(timeout=PATIENCE_S)
    finally:
        running.kill()
        running.wait()
    seconds = time.time() - struck.stat().st_mtime if struck.exists() else float("nan")
    report = folder / "run" / "failure.json"
    return Outcome(
        running.returncode,
        said,
        json.loads(report.read_text()) if report.exists() else {},
        seconds,
        leftovers.find(mark, folder / "tmp", shared),
    )


def _await_training(record: Path, running: subprocess.Popen[str]) -> None:
    """Wait until steps have been trained and boards have told of themselves, or it has ended."""
    late = time.monotonic() + PATIENCE_S
    found = ""
    while running.poll() is None and time.monotonic() < late:
        found = record.read_text() if record.exists() else ""
        if found.count('"type":"step"') > 3 and '"type":"gpus"' in found:
            return
        time.sleep(0.1)
    raise AssertionError(f"it has not begun to train on boards that are watched: {found[-500:]}")


# Two hosts


@dataclass
class TwoHosts:
    """Hosts of a rig, whose Python finds GPUs: those of a DGX-1 each.

    Attributes:
        python: what `launch.python` says.
        environment: of a launcher that trains on one such host, this one.
    """

    rig: rigs.Rig
    folder: Path
    gpu: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        found = Machine(self.folder, "dgx1v").gpu_environment(delay_us=100, **self.gpu)
        found["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
        names = ("SIMULATED_GPU", "PYTHONPATH", "LD_LIBRARY_PATH", "ZRUN_FAKE_NVML")
        own = {name: found[name] for name in names} | {"TMPDIR": str(self.temporary)}
        self.environment = found | own | {"ZRUN_ESTIMATE": "off"}
        self.python = self.folder / "python"
        told = " ".join(f"{name}={shlex.quote(value)}" for name, value in own.items())
        self.python.write_text(f'#!/bin/sh\nexport {told}\nexec {sys.executable} "$@"\n')
        self.python.chmod(0o755)

    def start(self, name: str, **keys: Any) -> host_faults.Launch:
        """Begin to train with two ranks on each host, or where `keys` say."""
        folder = self.folder / name
        folder.mkdir()
        shutil.copy(HERE / "faulty.py", folder)
        given: dict[str, Any] = {
            "model": {"call": "faulty.py:Net", "args": {"pause": 0.02}},
            "data": {"call": "faulty.py:data", "workers": 1},
            "device": "cuda",
            "hosts": list(HOSTS),
            "slots": 2,
            "batch": 8,
            "launch": {"ssh": self.rig.ssh, "python": str(self.python)},
            **keys,
        }
        given["limits"] = {"stop_s": 20, **LIMITS, **keys.get("limits", {})}
        return host_faults.start(self.rig, folder, environment=self.environment, **given)

    def left(self) -> dict[str, list[str]]:
        """Return what is still there, once what ends by itself has had its time."""
        late = time.monotonic() + host_faults.LEFT_S
        while (found := self.rig.leftovers()) and time.monotonic() < late:
            time.sleep(0.1)
        files = leftovers.temporary_files(self.temporary)
        return found | ({"temporary files": files} if files else {})


def cut_link(launched: host_faults.Launch) -> None:
    launched.rig.hosts["node2"].link("down")


def part_hosts(launched: host_faults.Launch) -> None:
    """They lose each other; the launcher reaches both."""
    launched.rig.part("node1", "node2")


def kill_all(launched: host_faults.Launch) -> None:
    """Every process of a host, all at once, as where it loses its power."""
    for pid in launched.rig.hosts["node2"].pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Fault:
    """What is done, and what must follow.

    Attributes:
        strike: once two hosts train; None: faulty.py does it, on one host.
        says: the line of the message that names the cause.
        waits: what the message, or failure.json, says of the others; empty: nothing.
        promised_s: by docs/faults.md, from the fault until it is noticed.
        keys: of the job.
        gpu: settings of the simulated GPUs.
        report: of a board, while ranks train on one host.
        may_leave: a temporary folder of an agent that was killed with all its host.
    """

    name: str
    code: int
    says: str
    promised_s: float
    fault: str = "none"
    strike: Callable[[host_faults.Launch], None] | None = None
    waits: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    gpu: dict[str, Any] = field(default_factory=dict)
    report: str = ""
    may_leave: bool = False


BOARD = "GPU-00000001-0000-0000-0000-000000000000"  # of four, links give it to rank 2
ENDLESS: dict[str, Any] = {"steps": 100000}
SOON_HANGS = {"limits": {"hang_s": HANG_S}}
AT_NODE2 = r"rank 2 of 4 \(node2, cuda:0, pp 1 dp 0\)"
GONE = r"gone with it: rank 2 \(node2, cuda:0, pp 1 dp 0\), 3 \(node2, cuda:1, pp 1 dp 1\)$"
ON_ONE_HOST = [
    Fault(
        "rank killed",
        5,
        r"^rank 1 of 4 \(\S+, cuda:1, pp 0 dp 1\) was killed by SIGKILL after step [23]",
        1,
        fault="kill",
        keys=PIPELINE,
    ),
    Fault(
        "rank hangs, `hang_s: 4`",
        6,
        r"^no progress for 4 s \(limits.hang_s\): rank 1 of 4 \(\S+, cuda:1, pp 0 dp 1\) is stuck "
        "in forward of step 3",
        HANG_S,
        fault="sleep",
        waits=r"^  rank 3 \(pp 1 dp 1\) waits for activations of micro-batch 0 from rank 1 \(",
        keys=PIPELINE | SOON_HANGS,
    ),
    Fault(
        "rank hangs, `collective_s: 25`",
        6,
        r"rank 0 has waited for more than 25 s \(limits.collective_s\) for all_gather",
        25,
        fault="sleep",
        waits="which rank 1 has not reached",
        keys={"limits": {"collective_s": 25}},
    ),
    Fault(
        "the same, while the others' code reads a loss, `collective_s: 8`",
        6,
        r"^rank 0 has waited for more than 8 s \(limits.collective_s\) for all_gather \d+, "
        r"'blocks.0.inner' \(.*\), which rank 1 has not reached$",
        8,
        fault="hang while others read a loss",
        waits=r"^rank 0 of 2 \(\S+, cuda:0\) failed at step 3 in forward$",
        keys={"limits": {"collective_s": 8}},
    ),
    Fault(
        "rank does not come to a collective of the code's own; torch's limit is 3 s",
        6,
        r"^torch ended the rank: its NCCL ALLREDUCE \d+ did not finish within 3 s; it waited for",
        3,
        fault="hang before a collective of the code",
        waits=r"^rank 0 of 2 \(\S+, cuda:0\) failed at step 3 in forward$",
    ),
    Fault(
        "rank leaves out a block",
        6,
        "ranks disagree on the order of ",
        3,
        fault="leave out a block",
    ),
    Fault(
        "GPU out of memory",
        5,
        "forward failed .*: out of memory: ",
        1,
        fault="fill",
        gpu={"memory": 1 << 30},
    ),
    Fault(
        "GPU falls off the bus: Xid 79",
        5,
        r"^rank 2 of 4 \(\S+, cuda:2, pp 1 dp 0\) was ended after step \d+: the GPU of rank 2 "
        rf"\(\S+, cuda:2, pp 1 dp 0\), {BOARD}, reported Xid 79, the GPU fell off the bus$",
        10,
        waits="^  next: leave this host out and reboot it",
        keys=PIPELINE | ENDLESS,
        report="xid 1 79",
    ),
    Fault(
        "kernel fails of uncorrectable memory errors (ECC)",
        5,
        rf"{BOARD}, reported 2 uncorrectable errors of its memory \(ECC\)",
        1,
        fault="fail once a board has told",
        waits=r"^rank 1 of 2 \(\S+, cuda:1\) failed at step \d+ in forward",
        keys=ENDLESS,
        report="ecc 1 0 2",
    ),
]
ON_TWO_HOSTS = [
    Fault(
        "link of a host cut",
        6,
        "^lost node2: the host no longer answers: it is down, or the network is cut",
        15,
        strike=cut_link,
        waits=GONE,
        keys=PIPELINE | {"slots": 2},
    ),
    Fault(
        "all processes of a host killed",
        6,
        "^lost node2: (the connection broke|its agent was killed there)",
        15,
        strike=kill_all,
        waits=GONE,
        keys=PIPELINE | {"slots": 2},
        may_leave=True,
    ),
    Fault(
        "the same, and NCCL tells of it",
        6,
        "^lost node2: (the connection broke|its agent was killed there)",
        15,
        strike=kill_all,
        waits=r"gone with it: rank 2 \(node2, cuda:0\), 3 \(node2, cuda:1\)$",
        keys={"slots": 2, "zero": 3},
        gpu={"nccl_remote_errors": 1},
        may_leave=True,
    ),
    Fault(
        "two hosts parted, `hang_s: 4`",
        6,
        "^no progress for 4 s .*the network between node[12] and node[12] is cut",
        20,
        strike=part_hosts,
        waits=r"^  rank [01] \(pp 0 dp [01]\) waits ",
        keys=PIPELINE | {"slots": 2} | SOON_HANGS,
    ),
    Fault(
        "rank of another host killed",
        5,
        f"^{AT_NODE2} was killed by SIGKILL after step",
        1,
        strike=host_faults.kill_worker,
        keys=PIPELINE | {"slots": 2},
    ),
    Fault(
        "rank of another host stopped, `hang_s: 4`",
        6,
        f"^no progress for 4 s .*: {AT_NODE2} is stopped by a signal",
        HANG_S,
        strike=host_faults.stop_worker,
        waits=r"^  rank [013] \(pp \d dp \d\) waits ",
        keys=PIPELINE | {"slots": 2} | SOON_HANGS,
    ),
]


def strike(fault: Fault, folder: Path, rig: rigs.Rig | None = None) -> Outcome:
    """Train, have it happen, and wait for the end.

    Args:
        rig: for faults of two hosts.
    """
    if fault.strike is None:
        return launch(folder, fault.fault, gpu=fault.gpu, report=fault.report, **fault.keys)
    assert rig is not None
    hosts = TwoHosts(rig, folder / "hosts", fault.gpu)
    launched = hosts.start("job", **fault.keys)
    try:
        launched.wait_for(lambda: len(launched.events("step")) > 3, "training")
        begun = time.monotonic()
        fault.strike(launched)
        _, said = launched.launcher.communicate(timeout=PATIENCE_S)
        seconds = time.monotonic() - begun
    finally:
        launched.launcher.kill()
        launched.launcher.wait()
        rig.hosts["node2"].link("up")
        if fault.strike is part_hosts:
            rig.join("node1", "node2")
    left = hosts.left()
    if fault.may_leave:
        files = [each for each in left.pop("temporary files", []) if not each.startswith("zrun-")]
        left |= {"temporary files": files} if files else {}
    failure = json.loads((launched.folder / "run" / "failure.json").read_text())
    return Outcome(launched.launcher.returncode, said, failure, seconds, left)


def cause(fault: Fault, found: Outcome) -> str:
    """Return the line that names the cause; empty: there is none, or it lacks who waits."""
    lines = found.said.splitlines()
    causes = [line for line in lines if re.search(fault.says, line)]
    if not causes or not any(re.search(fault.waits, line) for line in lines):
        return ""
    return causes[-1]


def is_in_time(fault: Fault, found: Outcome) -> bool:
    """Return whether it was over in the time that is promised; False where it did not happen.

    Nothing else would end it: every limit that is not the fault's own is 600 s.
    """
    return found.seconds < fault.promised_s + BUSY_S


def main() -> int:
    """Strike with every fault, and print what came of it."""
    rows: list[Sequence[str]] = []
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="zrun-gpu-faults-") as text:
        folder = Path(text)

        def add(fault: Fault, number: int, rig: rigs.Rig | None = None) -> None:
            nonlocal wrong
            own = folder / f"{'two' if rig else 'one'}-{number}"
            own.mkdir()
            found = strike(fault, own, rig)
            line = cause(fault, found)
            is_right = (found.code, found.left) == (fault.code, {}) and bool(line)
            is_right &= is_in_time(fault, found)
            wrong += not is_right
            mark = "" if is_right else f"WRONG: {found.said[-2000:]} {found.left}"
            left = sum(map(len, found.left.values()))
            seconds = f"{found.seconds:.1f}"
            rows.append((fault.name, str(found.code), seconds, str(left), f"`{line}`{mark}"))
            print("|", " | ".join(rows[-1]), "|", flush=True)

        print("| fault | exit | s | left | message |\n|---|---|---|---|---|")
        for number, fault in enumerate(ON_ONE_HOST):
            add(fault, number)
        if reason := rigs.missing() or rigs.not_isolated():
            print(f"two hosts: {reason}")
            return int(wrong > 0)
        with rigs.build(folder / "rig") as rig:
            for number, fault in enumerate(ON_TWO_HOSTS):
                add(fault, number, rig)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
