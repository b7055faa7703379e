"""`zrun estimate`: the memory of a job by the byte, its speed, the change that makes it fit."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated

import typer

from zrun.flags import Exclude, Gpus, HostList, HostsFile, Include, Nodes, is_finite
from zrun_core.errors import ExitCode, JobError

if TYPE_CHECKING:
    from zrun.estimate.answer import Answer
    from zrun.estimate.request import EstimateRequest, QuestionMaker
    from zrun.estimate.trial import Trial
    from zrun.hosts.cluster import Cluster
    from zrun.job.load import LoadedJob
    from zrun_core.plan.answer.outcome import Estimate

# Exit codes of runs whose message names the log of a rank.
_HAS_LOG = (
    ExitCode.RENDEZVOUS,
    ExitCode.WORKER,
    ExitCode.HANG,
    ExitCode.NUMERIC,
    ExitCode.DIVERGED,
)


def estimate(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="WHAT",
            help="A job file, a size such as 7.5B, or a config.json.",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the file."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Type of device, such as A100-80G; --world says how many.",
            show_default=False,
        ),
    ] = None,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="NxMxGPU",
            help="Simulated hosts x devices, such as 512x8xA100-40G.",
            show_default=False,
        ),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of devices (of --gpu; default A100-80G).",
            show_default=False,
        ),
    ] = None,
    hosts: HostsFile = None,
    host_list: HostList = None,
    include: Include = None,
    exclude: Exclude = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    slots: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks on each host; short for slots=N.", show_default=False),
    ] = None,
    micro: Annotated[
        int | None, typer.Option(min=1, help="Short for batch.micro=N.", show_default=False)
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(
            min=1, max=2**24, help="Tokens per sample of a size or config.json.", show_default=False
        ),
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Find the cheapest change that makes it fit.")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="Find the fastest configuration that fits.")
    ] = False,
    headroom: Annotated[
        str | None,
        typer.Option(
            metavar="7%",
            help="Share of memory that --best and --fit keep free if they can; default 7%.",
            show_default=False,
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=A,B,..", help="Estimate once for each value of a key.", show_default=False
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Run the job's first steps here, and scale all times by what they take.",
        ),
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="List buffers by their kind or a part of their name.",
            show_default=False,
        ),
    ] = None,
    at_peak: Annotated[
        bool,
        typer.Option("--at-peak", help="Draw memory over a step; list what is held at its peak."),
    ] = False,
    tokens: Annotated[
        str | None,
        typer.Option(help="Time to train on this many tokens: 450B.", show_default=False),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e9,
            callback=is_finite,
            help="Price of one device for one hour: adds the cost to --tokens.",
            show_default=False,
        ),
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(
            metavar="patch", help="Print the keys to change, as YAML.", show_default=False
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the changed job to this file.", show_default=False
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the estimate as a web page.", show_default=False),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="S",
            help="Seconds to wait for the job's model and data; default 60.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Compare a run with its estimate.", show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="With --fit: show all tables and configurations.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, every buffer included.")
    ] = False,
) -> None:
    """Say where every byte of a job goes, how fast it should be, and what makes it fit.

    Nothing is started but with --measure. The hardware is this machine, or what --gpu or --simulate
    name.

    Exit codes: 0 it fits, or a job that fits was written; 2 the question is wrong;
    3 it does not fit, nobody can say, or --check found the estimate wrong;
    130 Ctrl-C ended a search: the best so far is the answer, if there is one.

    Examples: zrun estimate job.yaml zero.stage=2;
    zrun estimate job.yaml --simulate 1x8xH100-80G --best;
    zrun estimate 7.5B --world 64 --gpu A100-80G;
    zrun estimate --check runs/gpt/20261121-031359-de0d
    """
    from zrun.estimate.forecast import PATIENCE_S
    from zrun.estimate.request import EstimateRequest
    from zrun.hosts.backend import HostOptions

    patience_s = PATIENCE_S if patience is None else patience
    if check is not None:
        raise typer.Exit(_compare(check, what, as_json, patience_s))
    if what is None:
        raise JobError("name a job file, a size such as 7.5B, or the config.json of a model")
    given = list(overrides or ())
    if slots and (simulate or gpu):
        raise JobError("--simulate and --gpu use one rank per device: leave out --slots")
    if slots:
        given.append(f"slots={slots}")
    if micro:
        given.append(f"batch.micro={micro}")
    request = EstimateRequest(
        what=what,
        overrides=tuple(given),
        host_options=HostOptions(hosts, host_list, include, exclude, nodes, gpus),
        gpu=gpu,
        simulate=simulate,
        world=world,
        seq=seq,
        fit=fit,
        best=best,
        headroom=None if headroom is None else _share_of(headroom),
        sweep=sweep,
        measure=measure,
        explain=explain,
        at_peak=at_peak,
        tokens=tokens,
        price=price,
        emit=emit,
        write=write,
        html=html,
        everything=everything,
        as_json=as_json,
        patience_s=patience_s,
    )
    raise typer.Exit(_estimate(request))


def _share_of(text: str) -> float:
    """Return a share of a memory, of `7%` or `0.07`.

    Raises:
        JobError: it is none.
    """
    number = text.removesuffix("%")
    try:
        share = float(number) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise JobError(f"--headroom {text}: a share of the memory is wanted, such as 7% or 0.07")
    return share


def _estimate(request: EstimateRequest) -> int:
    """Answer a request. Returns the exit code."""
    from zrun.estimate.request import QuestionMaker

    request.check()
    maker = QuestionMaker(request)
    if request.sweep is not None:
        _sweep(request, maker, request.sweep)
        return ExitCode.OK
    question, loaded = maker.ask()
    from zrun.estimate.answer import answer
    from zrun.estimate.history import earlier_runs, kind_of, with_history
    from zrun.estimate.progress import Progress

    with Progress(f"estimating {request.what}") as progress:
        found = answer(question, request.goal, request.headroom, progress.watch)
    if found.is_interrupted:
        _show(request, maker, found)
        return ExitCode.INTERRUPTED
    if maker.cluster is not None and loaded is not None and not found.is_partial:
        _keep(found, loaded, maker.cluster)
    if request.measure and found.fits is not False:
        assert loaded is not None
        from zrun.estimate.trial import with_trial

        trial, code = _run_trial(request, maker, loaded)
        if trial is None:
            return code
        found = with_trial(found, trial)
    elif maker.cluster is not None and loaded is not None:
        kind = kind_of(loaded.config, loaded.path.absolute().parent, maker.cluster)
        found = with_history(found, earlier_runs(kind))
    _show(request, maker, found)
    has_what_fits = found.target is not None and (request.best or request.write is not None)
    return ExitCode.OK if found.fits or has_what_fits else ExitCode.PREFLIGHT


def _show(request: EstimateRequest, maker: QuestionMaker, found: Answer) -> None:
    """Print and write the answer as the options say."""
    from zrun.estimate import screens

    if request.write is not None:
        source = Path(request.what)
        screens.write_changed_job(found, source, request.write, maker.overrides)
    if request.html is not None:
        screens.write_page(found, request.html)
    if request.emit is not None:
        screens.print_changes(found)
    elif request.as_json:
        print(json.dumps(screens.to_json(found, request.tokens, request.price), indent=2))
    elif request.explain is not None:
        screens.print_buffers(found, request.explain)
    elif request.at_peak:
        screens.print_at_peak(found)
    elif request.fit and not request.everything:
        screens.print_fit(found, request.tokens, request.price)
    else:
        screens.print_answer(found, request.tokens, request.price)


@contextmanager
def _telling(doing: str) -> Iterator[None]:
    """Show a line on a terminal for as long as something takes, which may be minutes."""
    if not sys.stderr.isatty():
        yield
        return
    from zrun.watch.console import open_console

    with open_console(sys.stderr).status(doing):
        yield


def _keep(found: Answer, loaded: LoadedJob, cluster: Cluster) -> None:
    """Keep the answer for a `zrun train` of the same job, which then knows at once."""
    from zrun.estimate.answer import forecast_of
    from zrun.estimate.forecast import key_of, store

    store(key_of(loaded.config, loaded.path.absolute().parent, cluster), forecast_of(found))


def _run_trial(
    request: EstimateRequest, maker: QuestionMaker, loaded: LoadedJob
) -> tuple[Trial | None, int]:
    """Run the first steps of a job.

    Returns:
        the measurements, None if the job failed; and the exit code. A rank that failed has said
        why, and where its log is: only then the run directory stays.
    """
    from zrun.estimate.trial import STEPS, read_trial, trial_overrides
    from zrun.hosts.backend import find_backend
    from zrun.job.environment import worker_environment
    from zrun.job.load import load_job
    from zrun.launch.launch_request import LaunchRequest
    from zrun.launch.session import launch
    from zrun.watch.ui import Ui

    trial = load_job(loaded.path, [*maker.overrides, *trial_overrides(loaded.config)])
    job_dir = loaded.path.absolute().parent
    backend = find_backend(trial.config, request.host_options, os.environ, job_dir, gethostname())
    if backend.kind == "env":
        raise JobError(
            f"--measure: another launcher started this process ({backend.why}): call zrun estimate "
            "once, by itself"
        )
    # Other hosts write there, too: as for any run, the folder that all of them have is this one.
    parent = None if backend.kind == "local" else Path.cwd()
    folder = Path(tempfile.mkdtemp(prefix=".zrun-measure-", dir=parent))
    code: int = ExitCode.OK
    try:
        launch_request = LaunchRequest(
            loaded=trial,
            backend=backend,
            environment=worker_environment(trial.config, os.environ),
            run_dir=folder / "run",
            fresh=False,
            force=False,
            ui=Ui.none,
            dry_run=False,
            worker="zrun_core.train.worker",
            resume_command="",
        )
        with _telling(f"running {STEPS} steps of {request.what}"):
            code = launch(launch_request, None)
        if code != ExitCode.OK:
            return None, code
        return read_trial(folder / "run" / "events.jsonl"), code
    finally:
        if code not in _HAS_LOG:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(request: EstimateRequest, maker: QuestionMaker, sweep: str) -> None:
    """Print an estimate for each value of a key.

    Raises:
        JobError: `sweep` is no key with values, or none of them can be estimated.
    """
    from zrun.estimate.question import with_other_keys
    from zrun.estimate.screens import print_sweep
    from zrun.job.load import load_job
    from zrun_core.errors import ZrunError

    question, loaded = maker.ask()
    key, equals, values = sweep.partition("=")
    if not equals or not all(values.split(",")):
        raise JobError(f"--sweep {sweep}: write a key and its values, such as batch.micro=1,2,4")
    rows: list[tuple[str, Estimate | str]] = []
    for value in values.split(","):
        change = f"{key}={value}"
        try:
            if loaded is None:
                asked, _ = maker.ask(change)
            else:
                changed = load_job(Path(request.what), [*maker.overrides, change])
                asked = with_other_keys(question, changed, key)
            with _telling(f"estimating {request.what} {change}"):
                rows.append((value, asked.planner.estimate(asked.base)))
        except ZrunError as error:
            rows.append((value, str(error)))
    if all(isinstance(found, str) for _, found in rows):
        raise JobError("\n".join(dict.fromkeys(str(found) for _, found in rows)))
    print_sweep(key, rows, as_json=request.as_json)


def _compare(run: str, what: str | None, as_json: bool, patience_s: float) -> int:
    """Compare a run with its estimate. Returns the exit code."""
    from zrun.estimate.compare_run import check_run
    from zrun.estimate.screens import print_comparison
    from zrun.runs.listing import find_run

    if what is not None:
        raise JobError("--check RUN reads the job of the run: leave the job out")
    found = check_run(find_run(run), patience_s)
    print_comparison(found, as_json=as_json)
    return ExitCode.OK if found.is_right else ExitCode.PREFLIGHT
