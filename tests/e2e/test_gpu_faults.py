"""GPUs that report errors while a job runs on them: what it says, and with which exit code.

NVML is a library of the tests, on whose machine errors come when a test says so; the ranks are
processes without torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_for

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))
import fake_nvml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
UUID = "GPU-00000001-0000-0000-0000-000000000000"
HANGING = {"0": "steps_then_hang", "1": "steps_then_hang"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


class Run:
    """A run of two ranks, on two of the eight GPUs of a machine."""

    def __init__(self, folder: Path, machine: fake_nvml.Machine, process: Any) -> None:
        self.folder = folder / "run"
        self.machine = machine
        self.process = process

    def events(self, kind: str) -> list[dict[str, Any]]:
        record = self.folder / "events.jsonl"
        lines = record.read_text().splitlines(keepends=True) if record.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["type"] == kind]

    def await_ranks(self) -> None:
        """Until both have begun, and their GPUs are watched."""
        wait_for(lambda: len(self.events("step")) == 2 and self.events("gpus"))

    def end(self) -> tuple[int, str, dict[str, Any]]:
        """Exit code, last words, and failure.json."""
        _, err = self.process.communicate(timeout=PATIENCE_S)
        failure = self.folder / "failure.json"
        return self.process.returncode, err, json.loads(failure.read_text())


@contextmanager
def running(folder: Path, library: Path, behaviour: dict[str, str], *options: str) -> Iterator[Run]:
    machine = fake_nvml.Machine(folder, "h100-8")
    machine.say("sensors 0-7 50 300 700 90 1500 1980", "slowed 0-7 0", "ecc 0-7 0 0")
    (folder / "job.yaml").write_text(
        "name: fake\nmodel: {call: 'fake:model'}\ndata: fake:data\nsteps: 3\nbatch: 4\n"
        "device: cuda\nslots: 2\n"
    )
    told = f"model.args.behaviour={json.dumps(behaviour)}"
    command = [sys.executable, "-m", "zrun", "train", "job.yaml", told, *options]
    process = subprocess.Popen(
        [*command, "--worker", "fake_worker", "--run-dir", "run", "--ui", "plain"],
        cwd=folder,
        env=machine.environment(library) | {"PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Run(folder, machine, process)
    finally:
        process.kill()
        process.wait()


def test_a_rank_whose_gpu_is_lost_is_ended(library: Path, tmp_path: Path) -> None:
    """It waits for its GPU for ever, and the other rank for it."""
    with running(tmp_path, library, HANGING) as run:
        run.await_ranks()
        run.machine.say("xid 1 79")
        code, said, failure = run.end()
    assert code == 5
    here = os.uname().nodename
    assert (
        f"rank 1 of 2 ({here}, cuda:1) was ended after step 1: the GPU of rank 1 ({here}, cuda:1), "
        f"{UUID}, reported Xid 79, the GPU fell off the bus\n" in said
    )
    assert "next: leave this host out and reboot it" in said
    assert (failure["rank"], failure["exit_code"]) == (1, 5)
    assert failure["gpu_fault"]["xid"] == 79
    (warning,) = run.events("warning")
    assert warning["rank"] == 1
    assert warning["message"].startswith(
        f"rank 1 ({here}, cuda:1): its GPU {UUID} reports Xid 79, the GPU fell off the bus: leave"
    )


@pytest.mark.thorough
def test_an_error_explains_what_a_rank_says(library: Path, tmp_path: Path) -> None:
    """A kernel fails in one place, and Python in another."""
    failing = {"0": "steps_then_hang", "1": "fail_when_told"}
    with running(tmp_path, library, failing) as run:
        run.await_ranks()
        run.machine.say("xid 1 31")
        (run.folder / "fail").touch()
        code, said, failure = run.end()
    assert code == 5
    assert "torch.AcceleratorError: CUDA error: an illegal memory access" in said
    assert "reported Xid 31, a kernel read or wrote an address that is not mapped" in said
    assert "next: look for an index out of range or a bad address in the code" in said
    assert (failure["gpu_fault"]["xid"], failure["kind"]) == (31, "user")


@pytest.mark.thorough
def test_errors_of_other_gpus_explain_nothing(library: Path, tmp_path: Path) -> None:
    """GPU 3 is another job's; an error that is survived is no reason either."""
    failing = {"0": "fail_when_told", "1": "steps_then_hang"}
    with running(tmp_path, library, failing) as run:
        run.await_ranks()
        run.machine.say("xid 3 79", "xid 1 63")
        wait_for(lambda: run.events("warning"))
        (run.folder / "fail").touch()
        code, said, failure = run.end()
    assert (code, failure["gpu_fault"]) == (5, None)
    assert "reported" not in said
    assert "Xid 63, a damaged row of its memory will be replaced" in str(run.events("warning"))


@pytest.mark.thorough
def test_the_rank_without_a_gpu_is_to_blame_for_the_others(library: Path, tmp_path: Path) -> None:
    """The other one fails first, of a message that does not come."""
    failing = {"0": "fail_when_told", "1": "steps_then_hang"}
    with running(tmp_path, library, failing) as run:
        run.await_ranks()
        run.machine.say("xid 1 95")
        wait_for(lambda: run.events("warning"))
        (run.folder / "fail").touch()
        code, said, failure = run.end()
    assert (code, failure["rank"]) == (5, 1)
    assert "Xid 95, an uncorrectable error of its memory, which was not contained" in said


@pytest.mark.thorough
def test_a_hang_names_what_a_gpu_reported(library: Path, tmp_path: Path) -> None:
    waiting = {"0": "wait_for_others", "1": "wait_for_others"}
    limits = ("limits.hang_s=3", "limits.first_step_s=3", "limits.collective_s=2")
    with running(tmp_path, library, waiting, *limits) as run:
        wait_for(lambda: run.events("gpus"))
        run.machine.say("xid 1 74")
        code, said, failure = run.end()
    assert (code, failure["kind"]) == (6, "hang")
    assert f"{UUID}, reported Xid 74, an error of an NVLink" in said
    assert "next: look at nvidia-smi nvlink --errorcounters" in said
    assert failure["gpu_fault"]["ranks"] == [1]


@pytest.mark.thorough
def test_memory_errors_are_counted_where_no_event_comes(library: Path, tmp_path: Path) -> None:
    failing = {"0": "steps_then_hang", "1": "fail_when_told"}
    with running(tmp_path, library, failing) as run:
        run.await_ranks()
        run.machine.say("ecc 1 0 2")
        (run.folder / "fail").touch()
        code, said, _ = run.end()
    assert code == 5
    assert "reported 2 uncorrectable errors of its memory (ECC)" in said


@pytest.mark.thorough
def test_sensors_are_recorded_and_heat_is_told(library: Path, tmp_path: Path) -> None:
    with running(tmp_path, library, {"0": "steps_then_hang", "1": "fail_when_told"}) as run:
        run.await_ranks()
        run.machine.say("sensors 1 91 200 700 99 765 1980", "slowed 1 72")
        wait_for(lambda: run.events("warning"))
        (run.folder / "fail").touch()
        code, _, _ = run.end()
    assert code == 5
    (sensed,) = run.events("gpus")[0]["gpus"][1:]
    assert (sensed["rank"], sensed["uuid"], sensed["temperature_c"]) == (1, UUID, 50)
    assert (sensed["utilisation"], sensed["power_w"], sensed["slowed"]) == (90, 300, [])
    here = os.uname().nodename
    assert [event["message"] for event in run.events("warning")] == [
        f"rank 1 ({here}, cuda:1): its GPU is slowed down at 91 degrees, to 765 of 1980 MHz: it is "
        "too hot (its own protection)"
    ]
