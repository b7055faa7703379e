"""`zrun train`: from a job file to an exit code."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated

import typer

from zrun.flags import Exclude, Gpus, HostList, HostsFile, Include, Nodes
from zrun.watch.ui import Ui
from zrun_core.errors import JobError, StoppedError

if TYPE_CHECKING:
    from zrun.hosts.backend import Backend
    from zrun.job.load import LoadedJob
    from zrun_core.spine.config import JobConfig


def train(
    job: Annotated[Path, typer.Argument(help="The job file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the file."),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Directory of this run.", show_default="runs/<name>/<run id>"),
    ] = None,
    ui: Annotated[
        Ui, typer.Option(help="How progress is shown; auto: live on a terminal, else plain.")
    ] = Ui.auto,
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
        typer.Option(
            help="auto, a step, best, a path, or never; short for resume=...", show_default=False
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over where checkpoints are; they are kept.")
    ] = False,
    smoke: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**6,
            metavar="N",
            help="A trial: N steps, a schedule to match, no saves; in runs/<name>-smoke.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run, and stop.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Start even what does not fit by the estimate.")
    ] = False,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Return once its first step is done; it goes on by itself."),
    ] = False,
    worker: Annotated[str, typer.Option(hidden=True)] = "zrun_core.train.worker",
) -> None:
    """Train the model of a job.

    Example: zrun train job.yaml zero.stage=3 optim.lr=3e-4

    Exit codes: 0 done; 2 the job is wrong; 3 this machine cannot run it;
    4 workers did not start in time; 5 a worker failed; 6 a hang;
    7 the numbers went wrong; 8 a checkpoint could not be saved; 9 no valid
    checkpoint; 10 replicas diverged; 75 stopped by a signal after saving;
    130 or 143 stopped by a signal before saving.
    """
    from zrun.system.signals import stoppable
    from zrun.transport.local import LocalAgent

    detached = None
    if detach and not dry_run:
        from zrun.launch.detach import DetachedLauncher

        detached = DetachedLauncher.begin(ui)
    # First of all: the agent gets ready while this process still reads the job.
    early = None if dry_run else LocalAgent()
    with _told(), stoppable(lambda: "before training began"), early or nullcontext():
        from zrun.hosts.backend import HostOptions, find_backend
        from zrun.job.environment import worker_environment
        from zrun.job.load import load_job

        options = HostOptions(hosts, host_list, include, exclude, nodes, gpus)
        short = {
            "slots": slots,
            "resume": json.dumps(resume) if resume and not resume.isdigit() else resume,
        }
        given = [f"{key}={value}" for key, value in short.items() if value is not None]
        loaded = load_job(job, [*(overrides or ()), *given])
        if smoke is not None:
            loaded = _smoke(
                loaded, smoke, [*(overrides or ()), *given], fresh or resume is not None, ui
            )
        backend = find_backend(
            loaded.config, options, os.environ, job.absolute().parent, gethostname()
        )
        environment = worker_environment(loaded.config, os.environ)
        if backend.kind == "env":
            _refuse_joined(loaded.config, backend, dry_run, detach)
        again = [f"--slots={slots}"] * (slots is not None) + options.as_arguments()
        again += ["--run-dir", str(run_dir)] if run_dir is not None else []
        again += ["--force"] * force
        command = shlex.join(
            ["zrun", "train", str(job), *(overrides or ()), *again, "--resume", "auto"]
        )
        from zrun.launch.launch_request import LaunchRequest
        from zrun.launch.session import launch

        request = LaunchRequest(
            loaded=loaded,
            backend=backend,
            environment=environment,
            run_dir=run_dir,
            fresh=fresh,
            force=force,
            ui=ui,
            dry_run=dry_run,
            worker=worker,
            resume_command=command,
            detached=detached,
        )
        code = launch(request, early)
    raise typer.Exit(code)


def _smoke(loaded: LoadedJob, steps: int, given: list[str], goes_on: bool, ui: Ui) -> LoadedJob:
    """Return the trial of a job, and tell what it is."""
    from zrun.job.load import load_job
    from zrun.job.smoke import smoke_of

    if goes_on:
        raise JobError("--smoke begins anew and saves nothing: leave out --resume and --fresh")
    trial = smoke_of(loaded.config, steps)
    if ui is not Ui.none:
        print(trial.told, file=sys.stderr)
    return load_job(loaded.path, [*given, *trial.overrides])


@contextmanager
def _told() -> Iterator[None]:
    """Whoever stopped it reads one line, and the shell gets the exit code."""
    try:
        yield
    except StoppedError as error:
        from zrun.system.output import say

        say(str(error), sys.stderr)
        raise typer.Exit(error.exit_code) from None


def _refuse_joined(job: JobConfig, backend: Backend, dry_run: bool, detach: bool) -> None:
    """What only the launcher that started the processes could do."""
    asked = (
        "restarts" if job.restarts else "--detach" if detach else "--dry-run" if dry_run else None
    )
    if asked is not None:
        instead = {
            "restarts": "leave it out, and let that launcher start all of them again, with --resume auto",
            "--detach": "leave it out, and let that launcher go on without its terminal",
            "--dry-run": "call zrun train --dry-run once, by itself",
        }[asked]
        raise JobError(f"{asked}: another launcher started this process ({backend.why}): {instead}")
