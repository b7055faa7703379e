"""`zrun run`: from a script that torchrun would start to an exit code."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from socket import gethostname
from typing import Annotated

import typer

from zrun.flags import DryRun, Exclude, Gpus, HostList, HostsFile, Include, Nodes, RunFolder, Slots
from zrun.starting import refuse_joined, stopped_in_words
from zrun.watch.ui import Ui
from zrun_core.errors import JobError


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE] SCRIPT [ARGS]",
            help="Keys of the launch, the script, and its own arguments.",
            show_default=False,
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="The script is a module, as of python -m.")
    ] = False,
    run_dir: RunFolder = None,
    ui: Annotated[
        Ui,
        typer.Option(
            help="How progress is shown; auto: the script's lines, and a panel of its steps on a "
            "terminal where it uses zrun_core."
        ),
    ] = Ui.auto,
    hosts: HostsFile = None,
    host_list: HostList = None,
    include: Include = None,
    exclude: Exclude = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    slots: Slots = None,
    dry_run: DryRun = False,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Run in the background; return once its ranks are started."),
    ] = False,
) -> None:
    """Launch a script as torchrun does, on one host or many.

    Example: zrun run --slots 2 restarts=1 train.py --lr 3e-4

    Options come before the script: what follows it is its own. Keys are those
    of a job that say how ranks are started: name, hosts, launch, slots, device,
    threads, bind, restarts, min_hosts, log, env, limits.

    Exit codes: 0 every rank ended with 0; 2 the command line is wrong; 3 this
    machine, or a host, cannot run it; 4 workers did not start in time; 5 a rank
    failed; 6 a hang, or a lost host; 130 or 143 stopped by a signal.
    """
    from zrun.job.script import ScriptCommand, load_script
    from zrun.system.signals import stoppable
    from zrun.transport.agent_process import LocalAgent

    words = list(command or ())
    overrides = []
    while words and "=" in words[0]:
        overrides.append(words.pop(0))
    if not words:
        raise JobError("no script is named: zrun run --slots 2 train.py, or -m module")
    script = ScriptCommand(words[0], tuple(words[1:]), module)
    given = [*overrides, *([] if slots is None else [f"slots={slots}"])]
    loaded, spec = load_script(script, given)
    detached = None
    if detach and not dry_run:
        from zrun.launch.detach import DetachedLauncher

        detached = DetachedLauncher.begin(ui)
    early = None if dry_run else LocalAgent()
    with stopped_in_words(), stoppable(lambda: "before it began"), early or nullcontext():
        from zrun.hosts.backend import HostOptions, find_backend
        from zrun.job.environment import worker_environment
        from zrun.job.hidden import without_secret_values

        options = HostOptions(hosts, host_list, include, exclude, nodes, gpus)
        backend = find_backend(loaded.config, options, os.environ, Path.cwd(), gethostname())
        environment = worker_environment(loaded.config, os.environ)
        if backend.kind == "env":
            refuse_joined(loaded.config, backend, dry_run, detach, "zrun run")

        from zrun.launch.launch_request import LaunchRequest
        from zrun.launch.session import launch

        repeated, left_out = without_secret_values(overrides, os.environ)
        again = ["zrun", "run", *options.as_arguments(), *repeated, *script.words]
        request = LaunchRequest(
            loaded=loaded,
            backend=backend,
            environment=environment,
            run_dir=run_dir,
            fresh=False,
            force=False,
            ui=ui,
            dry_run=dry_run,
            worker="zrun_core.script.worker",
            resume_command=shlex.join(again),
            left_out=left_out,
            command=shlex.join(["zrun", *sys.argv[1:]]),
            detached=detached,
            script=spec,
        )
        code = launch(request, early)
    raise typer.Exit(code)
