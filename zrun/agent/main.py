"""`python -m zrun.agent.main`: runs the workers of one host and ends with its launcher.

The launcher starts it before it knows what to run. It may ask what the host is like, and then sends
the `StartRequest` frame.
With the argument `joined` it is a process that another launcher started, see `zrun.transport.join`:
that one looks at its exit code, which is the run's.
Otherwise it is two processes: see `zrun.agent.reaper`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zrun.agent import reaper
from zrun.agent.agent_loop import AgentLoop
from zrun.agent.echo import Echo
from zrun.agent.host_watch import HostWatch
from zrun.agent.observer import Observer
from zrun.agent.rpc_server import RpcServer
from zrun.agent.script_observer import ScriptObserver
from zrun.agent.workers import WorkerCommand, isolated_gpus
from zrun.job.environment import SCRIPT_DEFAULTS, WORKER_DEFAULTS
from zrun.system import processes
from zrun.topology.machine import monitor
from zrun.topology.visible import environment_of
from zrun.transport.frames import StartRequest, StopMode
from zrun_core.errors import ExitCode
from zrun_core.spine.flight_page import host_file
from zrun_core.spine.flight_view import FlightRecorderView
from zrun_core.spine.folders import make_private
from zrun_core.spine.held_memory import testimony_file
from zrun_core.spine.releases import own_release

_STORE = "store"  # the file through which the workers find each other


def main() -> None:
    """Serve the launcher at stdin and stdout until it, or the workers, are gone."""
    is_joined = sys.argv[1:] == ["joined"]
    if is_joined:  # the other launcher looks at this very process
        private = reaper.private_folder()
    else:  # from here on this is the child of what was started
        private = reaper.fork_agent()
    processes.adopt_orphans()
    control, output = _take_streams()
    terminal = os.dup(2) if is_joined else None  # a launcher that detaches gives up all of it
    try:
        os.write(output, _hello())
    except OSError:  # the launcher has gone meanwhile
        os._exit(ExitCode.HANG if is_joined else ExitCode.OK)
    loop = AgentLoop(control, output, is_joined=is_joined)
    start, store = _serve_rpc(loop)
    run_dir = Path(start.spec["run_dir"])
    # The launcher's disk may not be this one.
    for folder in (run_dir, run_dir / "logs", run_dir / "failures"):
        make_private(folder)
    _log_to(run_dir / "logs" / f"agent-{start.host}.log")
    signal.signal(reaper.ABANDONED, lambda *_: _abandon(loop, private))
    with _telemetry_socket(private) as telemetry:
        loop.listen(telemetry)
        try:
            _run(start, store, run_dir, telemetry.getsockname(), loop)
        finally:
            # A second signal must not cut the cleaning short.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            loop.end_sessions()
            if not start.seat:  # rank 0 is here, or all of this host's
                (run_dir / _STORE).unlink(missing_ok=True)
            loop.finish()
    if loop.is_orphaned:
        _report_killed_launcher(run_dir)
    if terminal is not None:
        _exit_as_the_run(loop.exit_code, terminal)


def _serve_rpc(loop: AgentLoop) -> tuple[StartRequest, socket.socket | None]:
    """Answer what the launcher asks before it says what to run.

    Returns:
        What to run, and the socket at which the ranks of several hosts meet, if it was asked for.
    """
    server = RpcServer()
    while True:
        order = loop.orders.get()
        if isinstance(order, StartRequest):
            server.close()
            return order, server.store
        loop.answer(server.answer(order))


def _exit_as_the_run(code: int | None, terminal: int) -> None:
    """End with the exit code of the run, which the process of rank 0 has sent, or has not."""
    if code is None:
        here = socket.gethostname()
        text = f"error: {here}: lost the process of rank 0, which led the run\n"
        os.write(terminal, text.encode())
        code = ExitCode.HANG
    sys.exit(code)


def _run(
    start: StartRequest,
    store: socket.socket | None,
    run_dir: Path,
    telemetry: str,
    loop: AgentLoop,
) -> None:
    """Start the workers and wait until they have ended."""
    plan = start.spec["plan"]
    here = [place for place in plan["ranks"] if place["host"] == start.host]
    all_here = range(here[0]["rank"], here[-1]["rank"] + 1)
    ranks = all_here
    if start.seat is not None:
        ranks = range(start.seat, start.seat + 1)
    spec_file = host_file(run_dir, "spec.json", ranks.start)
    spec_file.touch(mode=0o600)
    spec_file.write_text(json.dumps(start.spec | {"telemetry": telemetry}, indent=1))
    for rank in ranks:  # of an earlier attempt, where the launcher does not see this disk
        (run_dir / "failures" / f"rank-{rank}.json").unlink(missing_ok=True)
        testimony_file(run_dir, rank).unlink(missing_ok=True)
    hosts = list(dict.fromkeys(place["host"] for place in plan["ranks"]))
    script = start.spec.get("script")
    master = None
    if script is not None:
        address, port = script["master"]
        master = (address, port)
        if store is not None:
            store.close()  # the script's own rank 0 listens there
            store = None
    command = WorkerCommand(
        run_id=start.spec["run_id"],
        module=start.module,
        argument=str(spec_file),
        env=os.environ | _environment(start, run_dir, here),
        world_size=len(plan["ranks"]),
        host=(hosts.index(start.host), len(hosts)),
        ranks=all_here,
        logs={rank: run_dir / "logs" / f"rank-{rank}.log" for rank in ranks},
        cpus={place["rank"]: place["cpus"] for place in here if place.get("cpus")},
        alone=isolated_gpus(here),
        store=store,
        meeting=master,
        restart=start.spec.get("restart", 0),
        max_restarts=start.spec["job"].get("restarts", 0),
    )
    echoes = _echoes(start, run_dir, ranks)
    _pass_on_signals(loop)
    server = command.start()
    if store is not None:
        store.close()  # rank 0 has it, or will
    view = FlightRecorderView(host_file(run_dir, "board", all_here.start), all_here)
    observer = Observer(view, run_dir)
    if script is not None:
        observer = ScriptObserver(view, run_dir)
        loop.finish_by(signal.SIGTERM)  # which scripts may know
    memory = start.spec["job"].get("limits", {}).get("memory")
    host = None
    if ranks.start == all_here.start:  # of several agents of a host, one tells of it
        host = HostWatch(ranks.start, run_dir)
    loop.watch(
        ranks,
        server.pid,
        observer,
        echoes,
        is_remote=start.is_remote,
        memory=memory,
        host=host,
        num_ranks=command.world_size,
    )
    workers = server.workers()
    loop.follow(workers)
    gpus = {
        place["rank"]: (place["uuid"], f"rank {place['rank']} ({start.host}, {place['device']})")
        for place in here
        if place["rank"] in ranks and place.get("uuid") is not None
    }
    if gpus:
        loop.watch_gpus(gpus, monitor)
    for worker in workers.values():
        worker.wait()


def _echoes(start: StartRequest, run_dir: Path, ranks: range) -> dict[int, Echo]:
    """Return what the launcher shows of the output of these ranks, by rank."""
    asked = start.spec["job"].get("log", {}).get("ranks", [0])
    everyone = range(len(start.spec["plan"]["ranks"]))
    shown = everyone if asked == "all" else [rank for rank in everyone if rank in asked]
    logs = {rank: run_dir / "logs" / f"rank-{rank}.log" for rank in ranks if rank in shown}
    return {
        rank: Echo(
            log,
            rank,
            share=len(shown),
            place=f"{start.host}:{log}" if start.is_remote else "",
            note=run_dir / "failures" / f"rank-{rank}.json",
        )
        for rank, log in logs.items()
    }


def _report_killed_launcher(run_dir: Path) -> None:
    # Late: it imports pydantic, for which no agent has to wait otherwise.
    from zrun.agent.post_mortem import report_killed_launcher

    try:
        report_killed_launcher(run_dir)
    except OSError as error:
        print(f"the launcher is gone, and this could not be recorded: {error}", flush=True)


def _abandon(loop: AgentLoop, folder: Path) -> None:
    """End while this process can still clean up: its reaper, which would do so, was killed."""
    loop.abandon()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _pass_on_signals(loop: AgentLoop) -> None:
    """Take every signal for "finish": a scheduler sends them to all processes of a job.

    Where SIGTERM tells of the launcher's death, the end of its stream does too.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: loop.stop(StopMode.FINISH))


def _environment(start: StartRequest, run_dir: Path, here: list[dict[str, Any]]) -> dict[str, str]:
    """Return what the workers get beyond what this process has and what `WorkerCommand` adds.

    `here` are the ranks of this host, as in the plan.
    """
    is_script = start.spec.get("script") is not None
    defaults = SCRIPT_DEFAULTS if is_script else WORKER_DEFAULTS
    found = {key: os.environ.get(key, value) for key, value in defaults.items()}
    if start.interface is not None:
        found["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", start.interface)
        found["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", f"={start.interface}")
    found |= start.env
    gpus = [place["uuid"] for place in here if place.get("uuid") is not None]
    # Of those that the environment names the plan has chosen: in the order of the ranks.
    found |= environment_of(gpus)
    threads = str(here[0].get("threads", 1))
    if is_script:
        found.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", threads))
        return found
    found["OMP_NUM_THREADS"] = threads
    found["ZRUN_STORE"] = start.store or str(run_dir / _STORE)
    return found


def _hello() -> bytes:
    """Return the first frame, on a line of its own: a login shell may have written half of one."""
    frame = {
        "frame": "hello",
        "pid": os.getpid(),
        "python": platform.python_version(),
        "zrun": own_release(),
    }
    return b"\n" + json.dumps(frame).encode() + b"\n"


def _take_streams() -> tuple[int, int]:
    """Keep stdin and stdout for the launcher: what a library prints must not go there."""
    control = os.dup(0)  # not inherited by workers
    output = os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return control, output


def _log_to(path: Path) -> None:
    """Send this process's own messages to a file: the terminal belongs to the launcher."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


@contextmanager
def _telemetry_socket(folder: Path) -> Iterator[socket.socket]:
    """Open a datagram socket in a folder of its own.

    The path of the run directory may be too long, or its file system may have no sockets.
    """
    folder.mkdir(mode=0o700)
    path = folder / reaper.SOCKET
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telemetry:
        telemetry.bind(str(path))
        try:
            yield telemetry
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
