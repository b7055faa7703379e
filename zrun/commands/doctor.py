"""`zrun doctor`: are this machine, or the hosts of a file, fit to train on, and how fast are they?"""

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
    from zrun.preflight.host_report import Finding
    from zrun.transport.agent_process import AgentLink


def doctor(
    hosts: Annotated[
        Path | None,
        typer.Option(help="Look at the hosts of this file.", show_default="this machine"),
    ] = None,
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure matrix products, memory, disk and links.")
    ] = False,
    disk: Annotated[
        Path | None,
        typer.Option(
            help="With --bench: the folder whose disk counts.", show_default="this folder"
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="With --bench: where the rates are stored.",
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

    Nothing is changed. Exit code 3: some cannot be used, each with the reason.

    Example: zrun doctor --hosts hostfile --bench
    """
    from zrun.preflight.calibration import Calibration
    from zrun.preflight.host_bench import measure
    from zrun.preflight.host_checks import HostRequirements
    from zrun.preflight.inspection import inspect_hosts
    from zrun.transport.agent_process import close_all

    agents = _agents(hosts, ssh, python or sys.executable)
    try:
        findings = inspect_hosts(agents, HostRequirements(shared=(Path.cwd(),), must_share=False))
        well = not any(finding.problems for finding in findings)
        rates = (
            measure(agents, findings, str((disk or Path.cwd()).absolute()))
            if bench and well
            else None
        )
    finally:
        close_all(agents)
    if rates is not None:
        path = save or Calibration.default_path(os.environ)
        rates.write(path)
        print(f"the rates are in {path}", file=sys.stderr)
    if as_json:
        print(
            json.dumps(
                {
                    "hosts": [_facts(finding) for finding in findings],
                    "rates": rates and rates.model_dump(mode="json"),
                },
                indent=2,
            )
        )
    else:
        _print(findings, rates)
    if not well:
        from zrun_core.errors import ExitCode

        raise typer.Exit(ExitCode.PREFLIGHT)


def _agents(hosts: Path | None, ssh: str, python: str) -> Sequence[AgentLink]:
    if hosts is None:
        from zrun.transport.local import LocalAgent

        return [LocalAgent()]
    from zrun.hosts.hostfile import read_hostfile
    from zrun.transport.ssh import SshAgent

    return [SshAgent(entry, ssh, python) for entry in read_hostfile(hosts)]


def _facts(finding: Finding) -> dict[str, object]:
    report = finding.report.to_json() if finding.report is not None else None
    return {
        "host": finding.host,
        "problems": finding.problems,
        "notes": finding.notes,
        "report": report,
    }


def _print(findings: Sequence[Finding], rates: Calibration | None) -> None:
    from zrun.preflight.host_report import rates_tables, sentences, table

    lines = [*table(findings), *sentences(findings, lambda finding: finding.problems)]
    lines += [f"note: {line}" for line in sentences(findings, lambda finding: finding.notes)]
    print("\n".join([*lines, *(["", *rates_tables(rates)] if rates is not None else [])]))
