"""`zrun train`: from a job file to an exit code."""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated

import typer

from zrun.flags import DryRun, Exclude, Gpus, HostList, HostsFile, Include, Nodes, RunFolder, Slots
from zrun.starting import refuse_joined, stopped_in_words
from zrun.watch.ui import Ui
from zrun_core.errors import JobError

if TYPE_CHECKING:
    from zrun.hosts.backend import HostOptions
    from zrun.job.load import LoadedJob


def train(
    job: Annotated[Path, typer.Argument(help="The job file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the file."),
    ] = None,
    run_dir: RunFolder = None,
    ui: Annotated[
        Ui, typer.Option(help="How progress is shown; auto: live on a terminal, else plain.")
    ] = Ui.auto,
    hosts: HostsFile = None,
    host_list: HostList = None,
    include: Include = None,
    exclude: Exclude = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    slots: Slots = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|STEP|best|PATH|never",
            help="Checkpoint to continue from; short for resume=...",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from step 0; old checkpoints are kept.")
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
    dry_run: DryRun = False,
    force: Annotated[
        bool, typer.Option("--force", help="Start even if the estimate says that it does not fit.")
    ] = False,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Run in the background; return after the first step."),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="First compare the job with a plain loop: zrun verify.")
    ] = False,
    worker: Annotated[str, typer.Option(hidden=True)] = "zrun_core.train.worker",
) -> None:
    """Train the model of a job.

    Example: zrun train job.yaml zero.stage=3 optim.lr=3e-4

    Exit codes: 0 done; 2 the job is wrong; 3 this machine cannot run it;
    4 workers did not start in time; 5 a worker failed; 6 a hang;
    7 the numbers went wrong; 8 a checkpoint could not be saved; 9 no valid
    checkpoint; 10 replicas diverged; 11 --verify: it trains something else;
    75 stopped by a signal after saving; 130 or 143 stopped by a signal before
    saving.
    """
    from zrun.system.signals import stoppable
    from zrun.transport.agent_process import LocalAgent

    if verify and not dry_run:
        _verify_first(job, [*(overrides or ()), *_as_overrides(slots, None)])
    detached = None
    if detach and not dry_run:
        from zrun.launch.detach import DetachedLauncher

        detached = DetachedLauncher.begin(ui)
    # First of all: the agent gets ready while this process still reads the job.
    early = None if dry_run else LocalAgent()
    with stopped_in_words(), stoppable(lambda: "before training began"), early or nullcontext():
        from zrun.hosts.backend import HostOptions, find_backend
        from zrun.job.environment import worker_environment
        from zrun.job.hidden import without_secret_values
        from zrun.job.load import load_job

        given = [*(overrides or ()), *_as_overrides(slots, resume)]
        loaded = load_job(job, given)
        if smoke is not None:
            if fresh or resume is not None:
                raise JobError(
                    "--smoke starts from step 0 and saves nothing: leave out --resume and --fresh"
                )
            loaded = _load_trial(loaded, smoke, given, ui)
        options = HostOptions(hosts, host_list, include, exclude, nodes, gpus)
        job_dir = job.absolute().parent
        backend = find_backend(loaded.config, options, os.environ, job_dir, gethostname())
        environment = worker_environment(loaded.config, os.environ)
        if backend.kind == "env":
            refuse_joined(loaded.config, backend, dry_run, detach, "zrun train")

        from zrun.launch.launch_request import LaunchRequest
        from zrun.launch.session import launch

        repeated, left_out = without_secret_values(overrides or (), os.environ)
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
            resume_command=_resume_command(job, repeated, slots, options, run_dir, force),
            left_out=left_out,
            command=shlex.join(["zrun", *sys.argv[1:]]),
            detached=detached,
        )
        code = launch(request, early)
    raise typer.Exit(code)


def _as_overrides(slots: int | None, resume: str | None) -> list[str]:
    """Return the options that are short for keys of the job, as such keys.

    Raises:
        JobError: a key with its value stands where `--resume` has its own.
    """
    given = []
    if resume is not None and "=" in resume and not Path(resume).exists():
        raise JobError(
            f"--resume {resume}: this is a key of the job, not a checkpoint: write --resume auto "
            f"{resume}"
        )
    if slots is not None:
        given.append(f"slots={slots}")
    if resume is not None:
        is_word = bool(resume) and not resume.isdigit()
        given.append(f"resume={json.dumps(resume) if is_word else resume}")
    return given


def _resume_command(
    job: Path,
    overrides: list[str],
    slots: int | None,
    options: HostOptions,
    run_dir: Path | None,
    force: bool,
) -> str:
    """Return the command that goes on with this run, with all options that it needs again."""
    words = ["zrun", "train", str(job), *overrides]
    if slots is not None:
        words.append(f"--slots={slots}")
    words += options.as_arguments()
    if run_dir is not None:
        words += ["--run-dir", str(run_dir)]
    if force:
        words.append("--force")
    return shlex.join([*words, "--resume", "auto"])


def _load_trial(loaded: LoadedJob, steps: int, given: list[str], ui: Ui) -> LoadedJob:
    """Return the trial of a job (--smoke), and print what it is."""
    from zrun.job.load import load_job
    from zrun.job.smoke import smoke_of

    trial = smoke_of(loaded.config, steps)
    if ui is not Ui.none:
        print(trial.told, file=sys.stderr)
    return load_job(loaded.path, [*given, *trial.overrides])


def _verify_first(job: Path, overrides: list[str]) -> None:
    """Compare the job with a plain loop; end here if it trains something else."""
    from zrun.verification.verify import VerifyRequest
    from zrun.verification.verify import verify as run

    with stopped_in_words():
        code = run(VerifyRequest(job, overrides))
    if code:
        raise typer.Exit(code)
