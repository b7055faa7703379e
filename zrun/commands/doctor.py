"""`zrun doctor`: check that this machine, or the hosts of a file, can train, and measure them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zrun.preflight.calibration import Calibration
    from zrun.preflight.gpu_trial import JudgedRow
    from zrun.preflight.host_report import Finding

    Trial = dict[str, list[JudgedRow]]


def doctor(
    hosts: Annotated[
        Path | None,
        typer.Option(help="Check the hosts of this file.", show_default="this machine"),
    ] = None,
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure matrix products, memory, disk and links.")
    ] = False,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu", help="Compute and train on every GPU for a minute; compare with the CPU."
        ),
    ] = False,
    disk: Annotated[
        Path | None,
        typer.Option(
            help="With --bench: measure the disk of this folder.", show_default="this folder"
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="With --bench: the file to store the rates in.",
            show_default="~/.cache/zrun/calibration.json",
        ),
    ] = None,
    ssh: Annotated[
        str, typer.Option(help="The ssh client, with options; as launch.ssh of a job.")
    ] = "ssh",
    python: Annotated[
        str | None,
        typer.Option(
            help="The Python on the hosts; as launch.python of a job.", show_default="this one"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at every host before a job does: versions, GPUs, memory, limits, network, clocks.

    Nothing is changed. Exit code 3: some cannot be used, each with the reason,
    or a check of --gpu failed.

    Example: zrun doctor --hosts hostfile --bench
    """
    from zrun.hosts.hostfile import read_hostfile
    from zrun.preflight.calibration import Calibration
    from zrun.preflight.gpu_trial import Verdict, try_gpus
    from zrun.preflight.host_bench import measure
    from zrun.preflight.host_checks import HostRequirements
    from zrun.preflight.inspection import inspect_hosts
    from zrun.transport.agent_process import AgentLink, LocalAgent, close_all
    from zrun.transport.open_agents import open_ssh_agents
    from zrun_core.errors import ExitCode

    agents: list[AgentLink]
    if hosts is None:
        agents = [LocalAgent()]
    else:
        agents = open_ssh_agents(read_hostfile(hosts), ssh, python or sys.executable)
    rates = None
    trial: Trial = {}
    try:
        needs = HostRequirements(shared=(Path.cwd(),), must_share=False, cuda=gpu)
        findings = inspect_hosts(agents, needs)
        all_fit = not any(finding.problems for finding in findings)
        if bench and all_fit:
            folder = (disk or Path.cwd()).absolute()
            rates = measure(agents, findings, str(folder))
        if gpu and all_fit:
            trial = try_gpus(agents, findings)
    finally:
        close_all(agents)
    if rates is not None:
        path = save or Calibration.default_path(os.environ)
        rates.write(path)
        print(f"measured rates written to {path}", file=sys.stderr)
    if as_json:
        _print_json(findings, rates, trial)
    else:
        _print(findings, rates, trial)
    has_failed = any(row.verdict is Verdict.FAILED for rows in trial.values() for row in rows)
    if has_failed or not all_fit:
        raise typer.Exit(ExitCode.PREFLIGHT)


def _print_json(findings: Sequence[Finding], rates: Calibration | None, trial: Trial) -> None:
    hosts = []
    for finding in findings:
        report = finding.report.to_json() if finding.report is not None else None
        said = {"host": finding.host, "problems": finding.problems, "notes": finding.notes}
        hosts.append({**said, "report": report})
    measured = rates.model_dump(mode="json") if rates is not None else None
    checked = {host: [row.to_json() for row in rows] for host, rows in trial.items()}
    print(json.dumps({"hosts": hosts, "rates": measured, "gpu_checks": checked}, indent=2))


def _print(findings: Sequence[Finding], rates: Calibration | None, trial: Trial) -> None:
    from zrun.preflight.gpu_trial import trial_lines
    from zrun.preflight.host_report import rates_tables, sentences, table

    lines = table(findings)
    lines += sentences(findings, lambda finding: finding.problems)
    lines += [f"note: {line}" for line in sentences(findings, lambda finding: finding.notes)]
    if rates is not None:
        lines += ["", *rates_tables(rates)]
    for host, rows in trial.items():
        lines += ["", *trial_lines(host, rows)]
    print("\n".join(lines))
