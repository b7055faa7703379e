"""`zrun train`: from a job file to an exit code."""

from __future__ import annotations

import json
import os
import shlex
import sys
import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer

from zrun.flags import Exclude, Gpus, HostList, HostsFile, Include, Nodes
from zrun.watch.ui import Ui
from zrun_core.errors import ExitCode, JobError, ZrunError

if TYPE_CHECKING:
    from zrun.job.load import LoadedJob
    from zrun.launch.hosts import Backend
    from zrun.launch.local import LocalAgent
    from zrun.launch.plan import Resolved
    from zrun.launch.rundir import RunDir
    from zrun_core.spec import ResumeSpec


def train(
    job: Annotated[Path, typer.Argument(help="The job file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the file.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of this run.", show_default="runs/<name>/<run id>")
    ] = None,
    ui: Annotated[Ui, typer.Option(help="How progress is shown; auto: live on a terminal, else plain.")] = Ui.auto,
    hosts: HostsFile = None,
    host_list: HostList = None,
    include: Include = None,
    exclude: Exclude = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    slots: Annotated[
        int | None, typer.Option(help="Ranks on each host; short for slots=N.", show_default=False)
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="auto, a step, a path, or never; short for resume=...", show_default=False),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over where checkpoints are; they are kept.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and stop.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return once it trains; it goes on by itself.")] = False,
    worker: Annotated[str, typer.Option(hidden=True)] = "zrun_core",
) -> None:
    """Train the model of a job.

    Example: zrun train job.yaml zero.stage=3 optim.lr=3e-4

    Exit codes: 0 done; 2 the job is wrong; 3 this machine cannot run it;
    4 workers did not start in time; 5 a worker failed; 6 a hang;
    7 the numbers went wrong; 8 a checkpoint could not be saved; 9 no valid
    checkpoint; 10 replicas diverged; 75 stopped by a signal after saving;
    130 or 143 stopped by a signal before saving.
    """
    from zrun.launch.frames import Start
    from zrun.launch.local import LocalAgent

    detached = None
    if detach and not dry_run:
        from zrun.launch.detach import Detached

        detached = Detached.begin(ui)
    # First of all: the agent gets ready while this process still reads the job.
    with nullcontext() if dry_run else LocalAgent() as agent:
        from zrun.job.load import load_job
        from zrun.launch.cluster import Cluster, probe_host
        from zrun.launch.environment import worker_environment
        from zrun.launch.hosts import HostOptions, find_backend, with_backend
        from zrun.launch.plan import make_plan
        from zrun.launch.resume import begin
        from zrun.launch.rundir import RunDir, set_checkpoints_aside
        from zrun.watch.preface import hosts_preface, print_preface
        from zrun.watch.topology import show_seats

        options = HostOptions(hosts, host_list, include, exclude, nodes, gpus)
        short = {"slots": slots, "resume": json.dumps(resume) if resume and not resume.isdigit() else resume}
        given = [f"{key}={value}" for key, value in short.items() if value is not None]
        loaded = load_job(job, [*(overrides or ()), *given])
        environment = worker_environment(loaded.config, os.environ)
        backend = find_backend(loaded.config, options, os.environ, job.absolute().parent, gethostname())
        if ui is not Ui.none and (backend.hosts is not None or backend.kind != "local"):
            print(hosts_preface(backend), file=sys.stderr)
        if backend.kind != "local":
            if dry_run:
                return
            _refuse(backend)
        host = probe_host()
        cluster = Cluster((backend.on_this_host(host),))
        config, reasons = with_backend(loaded.config, backend)
        resolved = make_plan(config, cluster)
        resolved = replace(resolved, reasons=(*reasons, *resolved.reasons))
        if ui is not Ui.none:
            print_preface(resolved, cluster, sys.stderr)
        if agent is None and ui is not Ui.none:
            show_seats(resolved.plan.ranks, cluster, sys.stderr)
        _refuse_untrained(resolved, dry_run)
        beginning = begin(resolved.job, run_dir, fresh)
        if beginning.note:
            print(beginning.note, file=sys.stderr)
        if agent is None or beginning.complete:
            return
        with RunDir.claim(resolved.job.name, beginning.run_dir, earlier=beginning.earlier) as rundir:
            if detached is not None:
                detached.moved_in(rundir)
            if beginning.aside is not None:
                set_checkpoints_aside(beginning.aside, rundir.run_id)
            rundir.write_job(_record(loaded, resolved))
            rundir.write_plan(resolved.plan)
            agent.start(Start(_spec(loaded, resolved, rundir, beginning.resume), host.hostname, environment, worker))
            given = [f"--slots={slots}"] * (slots is not None) + options.as_arguments()
            given += ["--run-dir", str(run_dir)] if run_dir is not None else []
            again = shlex.join(["zrun", "train", str(job), *(overrides or ()), *given, "--resume", "auto"])
            code = rundir.exit_code = _follow(agent, resolved, rundir, ui, again)
    raise typer.Exit(code)


def _refuse(backend: Backend) -> NoReturn:
    if backend.kind == "env":
        raise JobError(
            f"zrun train cannot join the ranks of another launcher yet ({backend.why}): run it once, by itself, or use "
            "zrun_core in a loop of your own"
        )
    instead = "add launch=local" if backend.kind == "slurm" else "name no hosts"
    raise JobError(f"zrun train uses this host only, for now, and not {backend}: {instead}")


def _refuse_untrained(resolved: Resolved, dry_run: bool) -> None:
    """Tensor and pipeline parallelism have a plan, but nothing that trains by it."""
    parallel = resolved.job.parallel
    if not dry_run and parallel.tp * parallel.pp > 1:
        key = "tp" if parallel.tp > 1 else "pp"
        raise JobError(
            f"parallel.{key}: {getattr(parallel, key)}: tensor and pipeline parallelism are planned, and shown by zrun "
            "check, zrun topo and --dry-run, but not trained yet: leave parallel out, and write zero: 3 to share a "
            "model over the ranks"
        )


def _spec(loaded: LoadedJob, resolved: Resolved, rundir: RunDir, resume: ResumeSpec | None) -> dict[str, Any]:
    from zrun.launch.environment import without_secrets
    from zrun_core.spec import RunSpec

    spec = RunSpec(
        job=without_secrets(resolved.job),
        plan=resolved.plan,
        batch=resolved.batch,
        job_dir=str(loaded.path.absolute().parent),
        run_dir=str(rundir.path),
        run_id=rundir.run_id,
        resume=resume,
    )
    return spec.as_json()


def _record(loaded: LoadedJob, resolved: Resolved) -> str:
    """The job as it runs, with the origin of each value."""
    from zrun.job.load import LoadedJob
    from zrun.job.problems import Origin
    from zrun.job.render import with_origins
    from zrun.launch.environment import without_secrets

    autos = {each.key: Origin("auto", each.why) for each in resolved.reasons}
    return with_origins(LoadedJob(without_secrets(resolved.job), loaded.path, {**loaded.origins, **autos}))


def _follow(agent: LocalAgent, resolved: Resolved, rundir: RunDir, ui: Ui, again: str) -> int:
    """Watch the run to its end, report it, and return its exit code.

    Args:
        again: the command that goes on from the run's last checkpoint.
    """
    from zrun.launch.supervise import Interrupts, Run, judge, watch
    from zrun.watch.follow import Follower
    from zrun.watch.report import report
    from zrun.watch.screen import open_screen
    from zrun.watch.view import Facts
    from zrun_core.spec import checkpoint_folder

    job, plan = resolved.job, resolved.plan
    facts = Facts(job.name, rundir.run_id, plan.world_size)
    follower = Follower(open_screen(ui, facts, job.log.every, sys.stdout, os.environ), rundir.append)
    run, interrupts = Run(plan.world_size), Interrupts()
    try:
        with interrupts.caught():
            watch(agent, run, interrupts, job.limits, follower.event, follower.turn)
    except ZrunError as error:
        rundir.write_failure({"message": str(error), "exit_code": int(error.exit_code)})
        raise
    except Exception as error:
        rundir.write_failure({"message": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        raise
    finally:
        follower.close()
    code, failure = judge(run, plan, rundir, interrupts)
    has_checkpoint = job.checkpoint is not None and any(checkpoint_folder(job, rundir.path).glob("step-*[0-9]"))
    if failure is not None:
        rundir.write_failure(failure.as_json() | {"resume": again if has_checkpoint else None})
        _say(failure.describe() + (f"\n  resume: {again}" if has_checkpoint else ""), sys.stderr)
    elif code == ExitCode.OK and ui is not Ui.none:
        _say(report(follower.state, rundir.path), sys.stderr if ui is Ui.json else sys.stdout)
    elif code != ExitCode.OK:
        saved = f"saved; resume: {again}" if code == ExitCode.STOPPED else "not saved"
        _say(f"stopped after step {run.last_step}, {saved}", sys.stderr)
    return code


def _say(text: str, out: TextIO) -> None:
    """Print, if anybody still listens. Python would end with a code of its own if the last flush failed."""
    try:
        print(text, file=out, flush=True)
    except OSError:
        with open(os.devnull, "wb") as nothing:
            for stream in (1, 2):
                os.dup2(nothing.fileno(), stream)
