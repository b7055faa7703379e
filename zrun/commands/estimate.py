"""`zrun estimate`: where every byte of a job goes, how fast it should be, and what makes it fit. Nothing is started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zrun.flags import Exclude, Gpus, HostList, HostsFile, Include, Nodes, is_finite
from zrun_core.errors import ExitCode, JobError

if TYPE_CHECKING:
    from zrun.estimate.answer import Answer
    from zrun.estimate.question import Question
    from zrun.hosts.backend import HostOptions
    from zrun.hosts.cluster import Cluster
    from zrun.job.load import LoadedJob
    from zrun_core.hardware.hardware import Hardware
    from zrun_core.plan.answer.planner import Estimate

_WIDE = 120  # columns where there is no terminal
_USUAL_GPU = "A100-80G"  # of --world and a size alone


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
            metavar="NAME", help="On one such device, or --world of them.", show_default=False
        ),
    ] = None,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="NxMxGPU",
            help="On hosts that are not there: 512x8xA100-40G.",
            show_default=False,
        ),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="So many devices: of --gpu; of a size alone, A100-80G.",
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
        bool, typer.Option("--fit", help="Search the cheapest change that fits.")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="Search the fastest configuration that fits.")
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=A,B,..", help="A row for each value of a key.", show_default=False
        ),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="List the buffers with this in their name, or of this kind.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="How long so many tokens take: 450B.", show_default=False)
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e9,
            callback=is_finite,
            help="Of a device for an hour, with --tokens.",
            show_default=False,
        ),
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(
            metavar="patch", help="Print the keys that must change, as YAML.", show_default=False
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the job with these keys.", show_default=False),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a picture of it.", show_default=False)
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="S",
            help="Seconds that the job's model and data may take; 60.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Compare a run with its estimate.", show_default=False),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, every buffer included.")
    ] = False,
) -> None:
    """Say where every byte of a job goes, how fast it should be, and what makes it fit. Nothing is started.

    The hardware is this machine, or what --gpu or --simulate name.

    Exit codes: 0 it fits, or a job that fits was written; 2 the question is wrong;
    3 it does not fit, nobody can say, or --check found the estimate wrong.

    Examples: zrun estimate job.yaml zero.stage=2;
    zrun estimate job.yaml --simulate 1x8xH100-80G --best;
    zrun estimate 7.5B --world 64 --gpu A100-80G;
    zrun estimate --check runs/gpt/20261121-031359-de0d
    """
    from zrun.estimate.forecast import PATIENCE_S
    from zrun.hosts.backend import HostOptions

    patience_s = PATIENCE_S if patience is None else patience
    if check is not None:
        raise typer.Exit(_check(check, what, as_json, patience_s))
    what = _checked(what, emit, fit and best)
    given = [
        *(overrides or ()),
        *([f"slots={slots}"] if slots else []),
        *([f"batch.micro={micro}"] if micro else []),
    ]
    options = HostOptions(hosts, host_list, include, exclude, nodes, gpus)
    asking = _EstimateRequest(what, given, gpu, simulate, world, options, seq, price, patience_s)
    question, loaded = asking.ask()
    if sweep is not None:
        _sweep(asking, question, loaded, sweep, as_json)
        return
    from zrun.estimate.answer import answer

    with _telling(f"estimating {what}"):
        found = answer(question, "fit" if fit else "best" if best else None)
    if asking.cluster is not None and loaded is not None and not found.is_partial:
        _keep(found, loaded, asking.cluster)
    if write is not None:
        _write(found, asking, write)
    if html is not None:
        _html(found, html)
    if emit is not None:
        _emit(found)
    elif as_json:
        print(json.dumps(_as_json(found, tokens, price), indent=2))
    else:
        _show(found, explain, tokens, price)
    has_what_fits = found.target is not None and (best or write is not None)
    if not found.fits and not has_what_fits:
        raise typer.Exit(ExitCode.PREFLIGHT)


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """A line on a terminal for as long as something takes, which may be minutes with a model that does not end."""
    if not sys.stderr.isatty():
        yield
        return
    from zrun.watch.console import open_console

    with open_console(sys.stderr).status(what):
        yield


def _keep(found: Answer, loaded: LoadedJob, cluster: Cluster) -> None:
    """For a `zrun train` of the same job, which then knows at once."""
    from zrun.estimate.answer import forecast_of
    from zrun.estimate.forecast import key_of, store

    store(key_of(loaded.config, loaded.path.absolute().parent, cluster), forecast_of(found))


class _EstimateRequest:
    """What was asked on the command line, and how to ask it again with other keys."""

    def __init__(
        self,
        what: str,
        given: list[str],
        gpu: str | None,
        simulate: str | None,
        world: int | None,
        options: HostOptions,
        seq: int | None,
        price: float | None,
        patience_s: float,
    ) -> None:
        from zrun.estimate.question import names_model_only

        if gpu is not None and simulate is not None:
            raise JobError("--gpu and --simulate both name the hardware: leave one out")
        self.what, self.given, self.options, self.seq = what, given, options, seq
        self.is_shape = names_model_only(what)
        self.patience_s = patience_s
        self.cluster: Cluster | None = None  # that was found, if the hardware is not named
        if seq is not None and not self.is_shape:
            raise JobError(
                "--seq: a job says how long its samples are, in the arguments of its model and data"
            )
        if self.is_shape and world is not None and simulate is None:
            gpu = gpu or _USUAL_GPU
        self.hardware = _hardware(gpu, simulate, world, price)
        if self.hardware is None and world is not None:
            given.append(f"slots={world}")

    def ask(self, *more: str) -> tuple[Question, LoadedJob | None]:
        from zrun.estimate.machine import hardware_of
        from zrun.estimate.question import of_job, of_job_on, of_shape

        given = [*self.given, *more]
        if self.is_shape:
            hardware = self.hardware
            if hardware is None:
                cluster = _found(None, self.options)
                host = cluster.hosts[0]
                hardware = hardware_of(
                    cluster, "cuda" if host.gpus else "cpu", max(1, len(host.gpus))
                )
            return of_shape(self.what, hardware, given, self.seq), None
        from zrun.job.load import load_job

        loaded = load_job(Path(self.what), given)
        if self.hardware is not None:
            return of_job_on(loaded, self.hardware, self.patience_s), loaded
        self.cluster = _found(loaded, self.options)
        return of_job(loaded, self.cluster, patience_s=self.patience_s), loaded


def _hardware(
    gpu: str | None, simulate: str | None, world: int | None, price: float | None
) -> Hardware | None:
    from zrun_core.hardware.hardware import parse_simulate

    if simulate is not None:
        if world is not None:
            raise JobError("--world: --simulate says how many devices there are")
        return parse_simulate(simulate, price=price)
    if gpu is not None:
        if "x" in gpu.lower().removeprefix("rtx"):
            raise JobError(
                f"--gpu {gpu}: one device by its name; --simulate takes hosts and devices"
            )
        return parse_simulate(f"{world or 1}x{gpu}", price=price)
    return None


def _found(loaded: LoadedJob | None, options: HostOptions) -> Cluster:
    """The hosts of a job. Of others than this one nothing is asked: they are taken to be like it."""
    from zrun.hosts.backend import find_backend
    from zrun.hosts.cluster import Cluster, probe_host
    from zrun.placement.plan import check_gpus

    here = probe_host()
    if loaded is None:
        return Cluster((here,))
    backend = find_backend(
        loaded.config, options, os.environ, loaded.path.absolute().parent, gethostname()
    )
    cluster = Cluster((backend.on_this_host(here),))
    if backend.kind != "local" and backend.hosts:
        cluster = Cluster(
            tuple(here.called(str(entry), entry.slots, entry.chosen) for entry in backend.hosts)
        )
    check_gpus(backend.gpus, loaded.config, cluster)
    return cluster


def _show(found: Answer, explain: str | None, tokens: str | None, price: float | None) -> None:
    from zrun.estimate.bars import bars
    from zrun.estimate.plan_tables import (
        buffer_table,
        choice_table,
        stage_table,
        time_lines,
        whole_run,
    )
    from zrun.watch.console import open_console

    console = open_console(sys.stdout, wide=_WIDE)
    if explain is not None:
        table = buffer_table(found.chosen, explain)
        if not table.row_count:
            names = sorted(
                {buffer.kind.value for rank in found.chosen.ranks for buffer in rank.buffers}
            )
            raise JobError(
                f"--explain {explain}: no buffer has this in its name; kinds are {', '.join(names)}"
            )
        console.print(table)
        return
    for line in _head(found):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    console.print(stage_table(found.stages, found.chosen.candidate, console.width))
    console.print()
    ascii_only = not console.encoding.lower().startswith("utf")
    for bar in bars(found.chosen, min(console.width, 100), ascii_only):
        console.print(bar, no_wrap=True, overflow="crop")
    console.print()
    for line in time_lines(found.chosen):
        console.print(line, markup=False, soft_wrap=True)
    if found.num_steps is not None and found.chosen.time.seconds:
        console.print(whole_run(found.chosen.time, found.num_steps), markup=False, soft_wrap=True)
    if tokens is not None:
        console.print(_budget(found, found.chosen, tokens, price), markup=False, soft_wrap=True)
    if found.verdict:
        console.print(found.verdict, markup=False, soft_wrap=True)
    if found.found is not None:
        _show_search(console, found, choice_table, tokens, price)
    _show_patch(console, found)
    for note in found.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _show_search(
    console: Any, found: Answer, table: Any, tokens: str | None, price: float | None
) -> None:
    from textwrap import fill

    from zrun.estimate.plan_tables import CHOICES

    result = found.found
    assert result is not None
    console.print(
        f"\n{result.tried + result.pruned:,} configurations, {result.tried:,} of them estimated",
        markup=False,
    )
    if result.best:
        console.print(table(result.best, console.width))
        console.print("the fastest for each amount of free memory: none is both faster and smaller")
        console.print(table(result.pareto, console.width))
        if tokens is not None:
            console.print(
                _budget(found, result.best[0], tokens, price), markup=False, soft_wrap=True
            )
    else:
        console.print("none of them fits; the nearest:")
        console.print(table(result.rejected, console.width))
    console.print(fill(CHOICES, console.width), markup=False)
    shown = [*result.best, *result.pareto] if result.best else list(result.rejected)
    if any(each.candidate.lacking() for each in shown):
        console.print("* zrun plans these, and does not train with them yet")
        if found.today is not None:
            console.print("the fastest that it trains:")
            console.print(table([found.today], console.width))


def _show_patch(console: Any, found: Answer) -> None:
    from zrun.estimate.patch import as_overrides, as_yaml

    changes, config = found.changes, found.question.config
    if changes and config is not None:
        console.print(
            f"\nwith {' '.join(as_overrides(changes))}, or in the job file:",
            markup=False,
            soft_wrap=True,
        )
        console.print(
            "\n".join(f"  {line}" for line in as_yaml(changes, config).splitlines()), markup=False
        )


def _head(found: Answer) -> list[str]:
    from zrun.watch.formatting import count
    from zrun_core.spine.sizes import format_size

    question, hardware = found.question, found.question.hardware
    job, chosen = question.job, found.chosen
    dims = chosen.candidate.dims
    axes = f" = dp {dims.dp} x tp {dims.tp} x pp {dims.pp}" if dims.tp * dims.pp > 1 else ""
    ranks = f"{dims.world_size} rank{'s' if dims.world_size > 1 else ''}{axes}"
    tokens = f" of {found.tokens_per_sample:,} tokens" if found.tokens_per_sample else ""
    share = "a rank's share of memory" if hardware.shares_memory else hardware.device.name
    return [
        f"{question.title}: {count(found.num_params)} parameters, {ranks} on {hardware.name} "
        f"({share}: {format_size(chosen.capacity)})",
        f"batch: {question.batch}{tokens}; {job.precision.compute}, {job.optim.name}, "
        f"checkpoint {chosen.candidate.checkpoint}; activations: {chosen.source}",
    ]


def _budget(found: Answer, chosen: Estimate, tokens: str, price: float | None) -> str:
    from zrun.estimate.plan_tables import cost_of_tokens
    from zrun_core.plan.question.transformer import parse_count

    return cost_of_tokens(chosen.time, parse_count(tokens), chosen.candidate.dims.world_size, price)


def _sweep(
    asking: _EstimateRequest,
    question: Question,
    loaded: LoadedJob | None,
    sweep: str,
    as_json: bool,
) -> None:
    from zrun.estimate.answer import as_data
    from zrun.estimate.plan_tables import sweep_table
    from zrun.estimate.question import with_other_keys
    from zrun.job.load import load_job
    from zrun.watch.console import open_console
    from zrun_core.errors import ZrunError

    key, equals, values = sweep.partition("=")
    if not equals or not all(values.split(",")):
        raise JobError(f"--sweep {sweep}: write a key and its values, such as batch.micro=1,2,4")
    rows: list[tuple[str, Estimate | str]] = []
    for value in values.split(","):
        change = f"{key}={value}"
        try:
            if loaded is None:
                asked, _ = asking.ask(change)
            else:
                asked = with_other_keys(
                    question, load_job(Path(asking.what), [*asking.given, change]), key
                )
            with _telling(f"estimating {asking.what} {change}"):
                rows.append((value, asked.planner.estimate(asked.base)))
        except ZrunError as error:
            rows.append((value, str(error)))
    if all(isinstance(found, str) for _, found in rows):
        raise JobError("\n".join(dict.fromkeys(str(found) for _, found in rows)))
    if as_json:
        print(
            json.dumps(
                [{"value": value, "estimate": as_data(found)} for value, found in rows], indent=2
            )
        )
    else:
        console = open_console(sys.stdout, wide=_WIDE)
        console.print(sweep_table(key, rows, console.width))
        for value, found in rows:
            if isinstance(found, str):
                console.print(f"{value}: {found}", markup=False, soft_wrap=True)


def _emit(found: Answer) -> None:
    from zrun.estimate.patch import as_yaml

    config = found.question.config
    if config is None:
        raise JobError("--emit patch: there is no job to change; name a job file")
    if found.changes:
        print(as_yaml(found.changes, config))
    else:
        print(found.verdict or "nothing has to change", file=sys.stderr)


def _write(found: Answer, asking: _EstimateRequest, target: Path) -> None:
    from zrun.estimate.patch import write_job

    if found.question.config is None:
        raise JobError("--write: there is no job to write; name a job file")
    if not found.fits and found.target is None:
        return  # the answer says that nothing is known to fit
    write_job(Path(asking.what), target, found.changes, asking.given)
    print(f"wrote {target}", file=sys.stderr)


def _html(found: Answer, target: Path) -> None:
    from zrun.estimate.html import page

    notes = [f"note: {note}" for note in found.notes]
    verdict = found.verdict or "fits"
    title = f"zrun estimate: {found.question.title}"
    try:
        target.write_text(
            page(title, [*_head(found), *notes], found.stages, found.chosen, verdict),
            encoding="utf-8",
        )
    except OSError as error:
        raise JobError(f"--html {target}: {error.strerror}") from None
    print(f"wrote {target}", file=sys.stderr)


def _as_json(found: Answer, tokens: str | None, price: float | None) -> dict[str, Any]:
    from zrun.estimate.answer import as_data

    result, hardware = found.found, found.question.hardware
    return {
        "title": found.question.title,
        "hardware": as_data(hardware),
        "parameters": found.num_params,
        "batch": found.question.batch.model_dump(),
        "steps": found.num_steps,
        "estimate": as_data(found.chosen),
        "fits": found.fits,
        "sentence": found.sentence or None,
        "stages": [as_data(each) for each in found.stages],
        "changes": found.changes,
        "fix": as_data(found.fix),
        "search": as_data(result) if result is not None else None,
        "budget": _budget(found, found.chosen, tokens, price) if tokens is not None else None,
    }


def _checked(what: str | None, emit: str | None, is_torn: bool) -> str:
    if what is None:
        raise JobError("name a job file, a size such as 7.5B, or the config.json of a model")
    if emit not in (None, "patch"):
        raise JobError(f"--emit {emit}: only patch can be emitted")
    if is_torn:
        raise JobError("--fit and --best ask for different things: leave one out")
    return what


def _check(run: str, what: str | None, as_json: bool, patience_s: float) -> int:
    from zrun.estimate.compare_run import check_run
    from zrun.runs.listing import find_run

    if what is not None:
        raise JobError("--check RUN knows its job: leave the job out")
    path = find_run(run)
    result = check_run(path, patience_s)
    if as_json:
        lines = [line.to_json() for line in result.lines]
        print(
            json.dumps(
                {
                    "run": str(path),
                    "source": result.source,
                    "lines": lines,
                    "notes": result.notes,
                    "is_right": result.is_right,
                },
                indent=2,
            )
        )
    else:
        print(f"{path.name}: activations {result.source}")
        print("\n".join(map(str, result.lines)))
        for note in result.notes:
            print(f"note: {note}")
    return ExitCode.OK if result.is_right else ExitCode.PREFLIGHT
