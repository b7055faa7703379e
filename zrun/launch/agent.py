"""`python -m zrun.launch.agent`: runs the workers of one host and ends with its launcher.

The launcher starts it before it knows what to run. It may ask what the host is like, and then sends the `Start` frame.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zrun.launch import processes
from zrun.launch.environment import WORKER_DEFAULTS
from zrun.launch.frames import Start, Stop
from zrun.launch.hangs import HangGuard
from zrun.launch.switchboard import Switchboard
from zrun.launch.witness import Witness
from zrun.launch.workers import Command
from zrun_core.board import BoardView
from zrun_core.config import LimitsConfig

_STORE = "store"  # the file through which the workers find each other
_LONGEST_SOCKET_PATH = 100  # the kernel takes 107 bytes


def main() -> None:
    processes.die_with_parent(signal.SIGTERM)
    processes.adopt_orphans()
    control, output = _take_streams()
    os.write(output, _hello())
    switchboard = Switchboard(control, output)
    start = _answer_questions(switchboard)
    run_dir = Path(start.spec["run_dir"])
    _log_to(run_dir / "logs" / f"agent-{start.host}.log")
    with _telemetry(run_dir) as telemetry:
        switchboard.listen(telemetry)
        try:
            _run(start, run_dir, telemetry.getsockname(), switchboard)
        finally:
            # A second signal must not cut the cleaning short.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            switchboard.end_sessions()
            (run_dir / _STORE).unlink(missing_ok=True)
            switchboard.finish()


def _answer_questions(switchboard: Switchboard) -> Start:
    """Say what the launcher asks before it says what to run."""
    witness = Witness()
    while not isinstance(order := switchboard.orders.get(), Start):
        switchboard.answer(witness.answer(order))
    witness.close()
    return order


def _run(start: Start, run_dir: Path, telemetry: str, switchboard: Switchboard) -> None:
    spec_file = run_dir / "spec.json"
    spec_file.touch(mode=0o600)
    spec_file.write_text(json.dumps(start.spec | {"telemetry": telemetry}, indent=1))
    plan = start.spec["plan"]
    here = [place for place in plan["ranks"] if place["host"] == start.host]
    command = Command(
        run_id=start.spec["run_id"],
        module=start.module,
        argument=str(spec_file),
        env=os.environ | _environment(start.env, run_dir, here),
        world_size=len(plan["ranks"]),
        logs={place["rank"]: run_dir / "logs" / f"rank-{place['rank']}.log" for place in here},
        cpus={place["rank"]: place["cpus"] for place in here if place.get("cpus")},
        slices={place["rank"]: place["uuid"] for place in here if (place.get("uuid") or "").startswith("MIG-")},
    )
    guard = None
    if len(here) == len(plan["ranks"]):  # the ranks of one host share a board
        view = BoardView(run_dir / "board", len(here))
        guard = HangGuard(view, LimitsConfig.model_validate(start.spec["job"].get("limits", {})), run_dir)
    _pass_on_signals(switchboard)
    workers = command.start()
    switchboard.watch(workers, guard)
    for worker in workers.values():
        worker.wait()


def _pass_on_signals(switchboard: Switchboard) -> None:
    """A scheduler signals every process of a job: what means "finish" to the launcher must not end this one.

    Where SIGTERM tells of the launcher's death, the end of its stream does too.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: switchboard.stop(Stop.FINISH))


def _environment(asked: dict[str, str], run_dir: Path, here: list[dict[str, Any]]) -> dict[str, str]:
    """What the workers get beyond what this process has and what `Command` adds. `here` is the ranks of this host."""
    gpus = [place["uuid"] for place in here if place.get("uuid") is not None]
    return (
        {key: os.environ.get(key, value) for key, value in WORKER_DEFAULTS.items()}
        | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})  # in the order of the ranks
        | asked
        | {
            "OMP_NUM_THREADS": str(here[0].get("threads", 1)),
            "ZRUN_STORE": str(run_dir / _STORE),
        }
    )


def _hello() -> bytes:
    """Says that there is an agent. On a line of its own: a login shell may have written half of one."""
    frame = {"frame": "hello", "pid": os.getpid(), "python": platform.python_version(), "zrun": version("zrun")}
    return b"\n" + json.dumps(frame).encode() + b"\n"


def _take_streams() -> tuple[int, int]:
    """Keep stdin and stdout for the launcher alone: a worker or a library that prints must not break the stream."""
    control, output = os.dup(0), os.dup(1)  # not inherited by workers
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return control, output


def _log_to(path: Path) -> None:
    """Send this process's own messages to a file: the terminal belongs to the launcher."""
    with open(path, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


@contextmanager
def _telemetry(run_dir: Path) -> Iterator[socket.socket]:
    """A datagram socket in the run directory, or in a folder of its own where that path is too long for one."""
    folder = run_dir
    if len(os.fsencode(run_dir / "telemetry.sock")) > _LONGEST_SOCKET_PATH:
        folder = Path(tempfile.mkdtemp(prefix="zrun-"))  # 0700
    path = folder / "telemetry.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telemetry:
        telemetry.bind(str(path))
        try:
            yield telemetry
        finally:
            path.unlink(missing_ok=True)
            if folder is not run_dir:
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
