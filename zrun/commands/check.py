"""`zrun check JOB`: validate a job, its hosts and its model. Nothing is started."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zrun.flags import Exclude, Gpus, HostList, HostsFile, Include, Nodes
from zrun_core.errors import ExitCode, JobError, PreflightError

if TYPE_CHECKING:
    from zrun.hosts.backend import Backend
    from zrun.hosts.cluster import Cluster
    from zrun.job.load import LoadedJob
    from zrun.job.structure import Structure
    from zrun.placement.plan import ResolvedJob
    from zrun_core.spine.config import JobConfig

_BUILD_TIMEOUT_S = 300.0
_WIDE = 120  # columns where there is no terminal


def check(
    job: Annotated[Path, typer.Argument(help="The job file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the file."),
    ] = None,
    hosts: HostsFile = None,
    host_list: HostList = None,
    include: Include = None,
    exclude: Exclude = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Plan for this many ranks on each host.")
    ] = None,
    no_import: Annotated[
        bool, typer.Option("--no-import", help="Do not run the job's own code.")
    ] = False,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="NxMxGPU",
            help="Plan for simulated hosts x devices, such as 8x4xV100-32G.",
            show_default=False,
        ),
    ] = None,
    values: Annotated[
        bool,
        typer.Option(
            "--values",
            help="Start the ranks of one model here; compare them with the whole model.",
        ),
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not contact other hosts; no plan is made.")
    ] = False,
    grid: Annotated[
        bool,
        typer.Option("--grid", help="Draw the pipeline schedule: what each stage computes when."),
    ] = False,
    layers: Annotated[
        bool,
        typer.Option("--layers", help="Print how ranks wrap the forward of each module."),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Print every key of the job, with its value.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Validate a job, look at its hosts, resolve what it leaves open, and build its model.

    Nothing is started, and nothing is changed on any host. With --simulate the
    memory of each rank is estimated, too. With --values the ranks of one model
    are started here, on CPUs where GPUs are too few: stages, and slices of
    layers, are compared with the whole model, and nothing is trained. With
    --layers the functions that ranks put around the forward of each module are
    listed, by the names that stacks and debuggers have for them.

    Exit codes: 0 it can train; 2 the job is wrong; 3 some hosts cannot be used,
    or it does not fit; 5 its own code failed.

    Example: zrun check job.yaml zero.stage=3 --slots 8
    """
    from zrun.hosts.backend import HostOptions, find_backend
    from zrun.job.load import load_job
    from zrun.job.structure import inspect_structure
    from zrun.placement.plan import plan_on_backend
    from zrun.trackers.tracker import check_installed

    _refuse_together(
        {"--grid": grid, "--json": as_json}, "one draws a picture and the other prints data"
    )
    where_else = {"--simulate": simulate is not None, "--no-import": no_import}
    for flag, is_given in where_else.items():
        _refuse_together({"--values": values, flag: is_given}, "--values runs the model here")
    _refuse_together(
        {"--layers": layers, "--no-import": no_import}, "--layers builds the model of the job"
    )
    options = HostOptions(hosts, host_list, include, exclude, nodes, gpus)
    given = [f"slots={slots}"] if slots is not None else []
    loaded = load_job(job, [*(overrides or ()), *given])
    if simulate is not None:
        named = [*options.as_arguments()[:1], *(["--slots"] if given else [])]
        if named:
            raise JobError(
                f"--simulate says which hosts and devices there are: leave out {named[0]}"
            )
        code = _check_simulated(loaded, simulate, no_import, grid, as_json, everything, layers)
        raise typer.Exit(code)
    backend = find_backend(loaded.config, options, os.environ, job.absolute().parent, gethostname())
    cluster, no_plan = _find_cluster(backend, loaded, offline)
    resolved = None
    if cluster is not None:
        resolved = plan_on_backend(loaded.config, backend, cluster)
        check_installed(resolved.job.log.to)
    structure = None
    if not no_import:
        gpu_ranks = 0
        if resolved is not None and backend.kind == "local" and resolved.job.device == "cuda":
            gpu_ranks = len(resolved.plan.ranks)
        on = _device_of_layers(loaded, resolved) if layers else None
        structure = inspect_structure(loaded, _BUILD_TIMEOUT_S, gpu_ranks, layers_on=on)
    compared = None
    if values:
        compared = _compare_values(job, [*(overrides or ()), *given])
    if as_json:
        where = {
            "backend": {"kind": backend.kind, "why": backend.why},
            "hosts": [asdict(entry) for entry in backend.hosts or ()],
            "no_plan": str(no_plan) or None,
            "values": compared,
        }
        print(json.dumps(_report(loaded, resolved, structure) | where, indent=2))
    else:
        _print(loaded, backend, cluster, resolved, structure, no_plan, everything)
        told = compared or _why_not_compared(loaded.config)
        if told:
            print(f"values: {told}")
        if grid:
            _print_grid(resolved)
    if isinstance(no_plan, PreflightError):
        raise typer.Exit(no_plan.exit_code)


def _device_of_layers(loaded: LoadedJob, resolved: ResolvedJob | None) -> str:
    """Return the type of the devices whose ranks' layers are listed: "cpu" where it is not known.

    Between CPUs and their hosts' memory nothing is moved.
    """
    job = loaded.config if resolved is None else resolved.job
    return "cuda" if job.device == "cuda" else "cpu"


def _refuse_together(flags: dict[str, bool], why: str) -> None:
    """Refuse flags that are given together.

    Raises:
        JobError: all of them are given.
    """
    if all(flags.values()):
        raise JobError(f"{' and '.join(flags)}: {why}; leave one of them out")


def _compare_values(job: Path, overrides: list[str]) -> str:
    """Return what comparing the values of the model's parts came to, or end with why not."""
    from zrun.verification.passes import TrialFailedError
    from zrun.verification.values import compare_values

    try:
        return compare_values(job, overrides)
    except TrialFailedError as error:  # what it was has been said
        raise typer.Exit(error.exit_code) from None


def _why_not_compared(job: JobConfig) -> str:
    """Return that values of the model's parts were not compared, and how to; "": it has none."""
    from zrun.topology.machine import read_machine

    ranks = job.parallel.model_ranks
    if ranks == 1:
        return ""
    if not job.guards.check_values:
        return "not compared, here or in the run: guards.check_values is false"
    if ranks > max(os.cpu_count() or 1, len(read_machine().devices)):
        return (
            f"not compared: the {ranks} ranks of one model are too many for this host; the run "
            "compares them before its first step"
        )
    return (
        f"not compared: --values starts the {ranks} ranks of one model here and compares them with "
        "the whole model; the run does so before its first step"
    )


def _find_cluster(
    backend: Backend, loaded: LoadedJob, offline: bool
) -> tuple[Cluster | None, str | PreflightError]:
    """Return the hosts; or None, and why they are not looked at or cannot be used."""
    from zrun.hosts.cluster import Cluster
    from zrun.hosts.offload_disk import SwapFolder
    from zrun.launch.bring_up import cluster_of, look_at_hosts, look_here
    from zrun.preflight.host_report import describe

    job_dir = loaded.path.absolute().parent
    if backend.kind == "local":
        swap = SwapFolder.of(loaded.config, job_dir, Path("runs") / loaded.config.name)
        try:
            return Cluster((backend.on_this_host(look_here(swap)),)), ""
        except PreflightError as error:
            return None, error
    if backend.kind == "env":
        return None, f"the ranks are those that another launcher started ({backend.why})"
    if offline:
        return None, "the hosts were not checked (--offline)"
    findings = look_at_hosts(backend, loaded.config, job_dir)
    if any(finding.problems for finding in findings):
        return None, PreflightError(describe(findings))
    return cluster_of(findings, backend), ""


def _print(
    loaded: LoadedJob,
    backend: Backend,
    cluster: Cluster | None,
    resolved: ResolvedJob | None,
    structure: Structure | None,
    no_plan: str | PreflightError,
    everything: bool,
) -> None:
    from zrun.watch.preface import hosts_preface
    from zrun.watch.topology import show_seats

    if backend.hosts is not None or backend.kind != "local":
        print(hosts_preface(backend))
    if resolved is not None and cluster is not None:
        _print_job(loaded, resolved, cluster, everything)
        show_seats(resolved.plan.ranks, cluster, sys.stdout)
    else:
        print(f"plan: none: {no_plan}")
    _print_structure(structure)


def _print_job(
    loaded: LoadedJob, resolved: ResolvedJob, cluster: Cluster, everything: bool
) -> None:
    """Print what the job says and what each auto became; or every key."""
    from zrun.watch.preface import brief, preface, width_of

    width = width_of(sys.stdout)
    if everything:
        print(preface(resolved, cluster, width))
        return
    print(brief(resolved, loaded.config, cluster, width))
    print("all other keys have their defaults: --all prints them too")


def _check_simulated(
    loaded: LoadedJob,
    simulate: str,
    no_import: bool,
    grid: bool,
    as_json: bool,
    everything: bool,
    layers: bool,
) -> int:
    """Say all of a job that needs no host, and what was not looked at. Returns the exit code."""
    from zrun.estimate.answer import answer
    from zrun.estimate.on_simulated import memory_facts, memory_view, plan_on
    from zrun.estimate.question import of_job_on
    from zrun.job.structure import inspect_structure
    from zrun.watch.console import open_console
    from zrun.watch.topology import show_seats
    from zrun_core.hardware.simulated import parse_simulate

    hardware = parse_simulate(simulate)
    resolved, cluster = plan_on(loaded, hardware)
    structure = None
    if not no_import:
        on = _device_of_layers(loaded, resolved) if layers else None
        structure = inspect_structure(loaded, _BUILD_TIMEOUT_S, layers_on=on)
    found = None if no_import else answer(of_job_on(loaded, hardware))
    if as_json:
        where: dict[str, Any] = {
            "backend": {"kind": "simulated", "why": f"--simulate {simulate}"},
            "hosts": [],
            "no_plan": None,
            "memory": found and memory_facts(found),
        }
        print(json.dumps(_report(loaded, resolved, structure) | where, indent=2))
    else:
        _print_job(loaded, resolved, cluster, everything)
        show_seats(resolved.plan.ranks, cluster, sys.stdout)
        _print_structure(structure)
        if found is not None:
            console = open_console(sys.stdout, wide=_WIDE)
            for part in memory_view(found, console.width):
                console.print(part, markup=False, soft_wrap=isinstance(part, str))
        unseen = "their software, links, cores and disks, and whether they reach each other"
        if found is None:
            unseen += "; memory (--no-import)"
        print(f"not checked: the hosts of --simulate {simulate}: {unseen}")
        if grid:
            _print_grid(resolved)
    fits = found is None or found.fits
    return ExitCode.OK if fits else ExitCode.PREFLIGHT


def _print_structure(structure: Structure | None) -> None:
    from zrun.watch.layer_lines import layer_lines

    if structure is None:
        print("structure: not checked")
        return
    print(f"structure: {_in_words(structure)}")
    for note in structure.notes:
        print(f"note: {note}")
    if structure.layers is not None:
        for line in layer_lines(structure.layers):
            print(line)


def _print_grid(resolved: ResolvedJob | None) -> None:
    from zrun.watch.schedule_grid import show_grid

    if resolved is None:
        print("schedule: not drawn: without a plan the number of micro-batches is not known")
        return
    print()
    show_grid(resolved, sys.stdout)


def _report(
    loaded: LoadedJob, resolved: ResolvedJob | None, structure: Structure | None
) -> dict[str, Any]:
    """Return for JSON what is known of a job, wherever it is to run."""
    from zrun.job.hidden import without_secrets

    config = resolved.job if resolved is not None else loaded.config
    return {
        "job": str(loaded.path),
        "config": without_secrets(config).model_dump(mode="json", by_alias=True),
        "batch": resolved and resolved.batch.model_dump(),
        "plan": resolved and resolved.plan.model_dump(),
        "auto": [asdict(reason) for reason in resolved.reasons] if resolved else [],
        "warnings": resolved.warnings if resolved else [],
        "notes": resolved.notes if resolved else [],
        "structure": structure and asdict(structure),
    }


def _in_words(structure: Structure) -> str:
    from zrun_core.sizes import format_size
    from zrun_core.spine.printable import printable

    numbers = f"{structure.num_parameters:,} parameters in {structure.num_tensors} tensors"
    num_frozen = structure.num_parameters - structure.num_trainable
    if num_frozen:
        numbers += f" ({num_frozen:,} frozen)"
    size = format_size(structure.parameter_bytes)
    return f"{printable(structure.class_name)}, {numbers}, {size}"
