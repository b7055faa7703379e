"""Stands in for the real worker in tests of the launcher: no torch, one behaviour per rank.

`model.args` of the job names it: `{"behaviour": {"1": "raise"}}`; ranks without one train and end
well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from zrun.system.processes import die_with_parent
from zrun_core.errors import ExitCode
from zrun_core.spine.events import Emitter
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.spine.spec import RunSpec

RANK = -1  # until there is one: a process for all of them imports this module
STEPS = 3


def main() -> None:
    global RANK
    RANK = int(os.environ["RANK"])
    die_with_parent(signal.SIGKILL)
    spec = RunSpec.read(Path(sys.argv[1]))
    behaviour = spec.job.model.args.get("behaviour", {}).get(str(RANK), "train")
    print(f"rank {RANK} behaves: {behaviour}")
    print("on stderr", file=sys.stderr)
    emitter = Emitter(spec.telemetry, RANK)
    if RANK == 0:
        emitter.emit("start", job=spec.job.name, world_size=spec.plan.world_size, **START)
    BEHAVIOURS[behaviour](spec, emitter)
    emitter.close()
    sys.stdout.flush()
    os._exit(0)


def train(spec: RunSpec, emitter: Emitter) -> None:
    for step in range(1, STEPS + 1):
        if RANK == 0:
            emitter.emit(
                "step", step=step, loss=3.0 / step, lr=1e-3, step_s=0.01, samples_per_s=1e3
            )
        emitter.emit(
            "memory",
            step=step,
            rss_bytes=1 << 20,
            peak_rss_bytes=2 << 20,
            params=1,
            grads=2,
            optim=3,
        )
    if RANK == 0:
        emitter.emit("end", step=STEPS, reason="steps", total_s=0.1, loss=1.0)


def train_together(spec: RunSpec, emitter: Emitter) -> None:
    """Train once all ranks have started, so that they tell of a step at about the same time."""
    wait_for_all(spec)
    train(spec, emitter)


def train_slowly(spec: RunSpec, emitter: Emitter) -> None:
    """Start with the others, and take longer for a step than they do, and more memory."""
    wait_for_all(spec)
    for step in range(1, STEPS + 1):
        held = {"rss_bytes": 5 << 30, "peak_rss_bytes": 9 << 30, "params": 1, "grads": 2}
        emitter.emit("memory", step=step, **held, split={"forward": 0.9, "comm": 0.1})


def wait_for_all(spec: RunSpec) -> None:
    here = Path(spec.run_dir) / "here"
    here.mkdir(exist_ok=True)
    (here / str(RANK)).touch()
    while len(list(here.iterdir())) < spec.plan.world_size:
        time.sleep(0.01)


def fail(spec: RunSpec, kind: str, message: str, code: ExitCode, trace: str | None = None) -> None:
    note = {
        "rank": RANK,
        "kind": kind,
        "type": "ValueError",
        "message": message,
        "exit_code": code,
        "traceback": trace,
    }
    note |= {"step": 2, "phase": "forward", "time": time.time()}
    (Path(spec.run_dir) / "failures" / f"rank-{RANK}.json").write_text(json.dumps(note))
    os._exit(code)


def fail_in_user_code(spec: RunSpec, emitter: Emitter) -> None:
    """Fail once the launcher has heard that rank 0 starts, however late that has come to it."""
    record = Path(spec.run_dir) / "events.jsonl"
    while not (record.exists() and b'"start"' in record.read_bytes()):
        time.sleep(0.01)
    trace = (
        'Traceback (most recent call last):\n  File "train.py", line 7, in forward\n'
        "ValueError: a wrong turn"
    )
    fail(spec, "user", "a wrong turn", ExitCode.WORKER, trace)


def fail_numerically(spec: RunSpec, emitter: Emitter) -> None:
    fail(spec, "zrun", "the loss is not finite", ExitCode.NUMERIC)


def lose_peer(spec: RunSpec, emitter: Emitter) -> None:
    """What gloo says once the other rank is gone."""
    while not (Path(spec.run_dir) / "failures" / f"rank-{1 - RANK}.json").exists():
        time.sleep(0.001)
    fail(
        spec,
        "user",
        "Connection closed by peer [127.0.0.1]:1234",
        ExitCode.WORKER,
        "Traceback: gloo",
    )


def kill_itself(spec: RunSpec, emitter: Emitter) -> None:
    if RANK == 1:
        time.sleep(0.3)  # rank 0's steps arrive first
    os.kill(os.getpid(), signal.SIGKILL)


def steps_then_hang(spec: RunSpec, emitter: Emitter) -> None:
    emitter.emit("step", step=1, loss=3.0)
    hang(spec, emitter)


def fail_when_told(spec: RunSpec, emitter: Emitter) -> None:
    """Fail as a kernel does: later than it was asked, in whatever line waits for the GPU."""
    emitter.emit("step", step=1, loss=3.0)
    while not (Path(spec.run_dir) / "fail").exists():
        time.sleep(0.01)
    trace = (
        'Traceback (most recent call last):\n  File "train.py", line 7, in forward\n'
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    )
    fail(spec, "user", "CUDA error: an illegal memory access", ExitCode.WORKER, trace)


def hang(spec: RunSpec, emitter: Emitter) -> None:
    emitter.emit("log", message=f"hanging {os.getpid()}")
    time.sleep(600)


def will_not_finish(spec: RunSpec, emitter: Emitter) -> None:
    """Never comes to the end of its step; what is meant by "now" it obeys."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    hang(spec, emitter)


def step_and_not_finish(spec: RunSpec, emitter: Emitter) -> None:
    emitter.emit("step", step=1, loss=3.0)
    will_not_finish(spec, emitter)


def hang_with_helper(spec: RunSpec, emitter: Emitter) -> None:
    """A data loader that outlives its parent and does not listen to SIGTERM."""
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', "
        "flush=True); time.sleep(600)"
    )
    helper = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert helper.stdout is not None
    helper.stdout.readline()
    emitter.emit("log", message=f"helper {helper.pid}")
    will_not_finish(spec, emitter)


def wait_for_disk(spec: RunSpec, emitter: Emitter) -> None:
    """A rank that has asked its disk for a state, which never comes."""
    with board(spec).wait_for_tier(f"its disk ({spec.offload_folder})"):
        hang(spec, emitter)


def wait_for_others(spec: RunSpec, emitter: Emitter) -> None:
    board(spec).waiting(True)
    hang(spec, emitter)


def board(spec: RunSpec) -> FlightRecorder:
    """Return the page of a rank that has begun its first step."""
    ranks = range(spec.plan.world_size)
    own = FlightRecorder(Path(spec.run_dir) / "board", RANK, ranks, len(ranks))
    own.step(1)
    own.phase("forward")
    return own


def leave_early(spec: RunSpec, emitter: Emitter) -> None:
    os._exit(0)


def show_environment(spec: RunSpec, emitter: Emitter) -> None:
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "ZRUN_STORE",
    )
    found = {name: os.environ[name] for name in (*names, "OMP_NUM_THREADS", *spec.job.env)}
    emitter.emit("log", message=json.dumps(found | {"cwd": os.getcwd(), "stdin": sys.stdin.read()}))
    train(spec, emitter)


START: dict[str, Any] = {
    "params": 1234567,
    "stage": 2,
    "precision": "bf16",
    "device": "cpu",
    "total_steps": STEPS,
    "planned_bytes": {"params": 1, "grads": 2, "optim": 3, "rings": 4},
    "notes": ["a note"],
}
BEHAVIOURS = {
    function.__name__: function
    for function in (
        train,
        train_together,
        train_slowly,
        fail_in_user_code,
        fail_numerically,
        lose_peer,
        kill_itself,
        steps_then_hang,
        fail_when_told,
        hang,
        will_not_finish,
        step_and_not_finish,
        hang_with_helper,
        wait_for_disk,
        wait_for_others,
        leave_early,
        show_environment,
    )
}
