"""The findings of a check of hosts as text: a table, and a line for each problem. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zrun.hosts.probe import HostReport
from zrun_core.sizes import format_size, several

if TYPE_CHECKING:
    from zrun.preflight.calibration import Calibration, MatmulRates

_MAX_ROWS = 20  # of a table; of more hosts it shows those with problems


@dataclass(frozen=True)
class Finding:
    """A host, and what is to be said of it.

    Attributes:
        report: None: it was not reached.
        problems: for which it cannot be used.
    """

    host: str
    report: HostReport | None
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()


def describe(findings: Sequence[Finding]) -> str:
    """Return all hosts in one table, then a line for each problem."""
    bad = [finding for finding in findings if finding.problems]
    lines = [f"{len(bad)} of {several(len(findings), 'host')} cannot be used:"]
    shown = bad
    if len(findings) <= _MAX_ROWS:
        shown = list(findings)
    lines += [f"  {line}" for line in table(shown)]
    if len(shown) < len(findings):
        lines.append(f"  and {len(findings) - len(shown)} more that can be used")
    lines += [f"  {line}" for line in sentences(bad, lambda finding: finding.problems)]
    return "\n".join(lines)


def sentences(findings: Sequence[Finding], of: Callable[[Finding], Sequence[str]]) -> list[str]:
    """Return a line for each thing to say, with all hosts of which it is said."""
    hosts: dict[str, list[str]] = {}
    for finding in findings:
        for sentence in of(finding):
            hosts.setdefault(sentence, []).append(finding.host)
    return [f"{', '.join(names)}: {sentence}" for sentence, names in hosts.items()]


def table(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each host, below a heading."""
    rows = [
        ("host", "address", "python", "torch", "cores", "memory", "GPUs", "shm", "clock", ""),
        *map(_row, findings),
    ]
    return aligned(rows)


def rates_tables(rates: Calibration) -> list[str]:
    """Return tables of what was measured: of hosts, of GPUs, of links."""
    tables: list[list[tuple[str, ...]]] = [
        [("host", "fp32", "bf16", "copy", "disk write", "disk read")],
        [("GPU", "fp32", "bf16", "copy", "to device", "from device")],
        [("from", "to", "rate", "round trip")],
    ]
    for name, host in rates.hosts.items():
        disk = _rate(host.disk.write_bytes_per_s), _rate(host.disk.read_bytes_per_s)
        if host.disk.error is not None:
            disk = f"{host.disk.folder}: {host.disk.error}", "-"
        tables[0].append((name, *_flops(host.cpu), _rate(host.copy_bytes_per_s), *disk))
        for number, gpu in enumerate(host.gpus):
            both = _rate(gpu.to_device_bytes_per_s), _rate(gpu.from_device_bytes_per_s)
            tables[1].append((f"{name} {number}", *_flops(gpu), _rate(gpu.copy_bytes_per_s), *both))
    for link in rates.links:
        tables[2].append(
            (link.source, link.target, _rate(link.bytes_per_s), f"{link.round_trip_s * 1e6:.0f} us")
        )
    return [line for rows in tables if len(rows) > 1 for line in (*aligned(rows), "")][:-1]


def _flops(rates: MatmulRates) -> tuple[str, str]:
    return f"{rates.fp32_flops / 1e12:.2f} TFLOP/s", f"{rates.bf16_flops / 1e12:.2f} TFLOP/s"


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(finding: Finding) -> tuple[str, ...]:
    report = finding.report
    if report is None:
        return (finding.host, *["-"] * 8, "not there")
    address = report.address or "-"
    if report.address and report.interface:
        address = f"{report.address} ({report.interface})"
    gpus = "none"
    if report.facts.gpus:
        gpus = f"{len(report.facts.gpus)} x {report.facts.gpus[0].name}"
    shm = report.limits.shm_free_bytes
    verdict = "ok"
    if finding.problems:
        verdict = several(len(finding.problems), "problem")
    return (
        finding.host,
        address,
        report.software.python,
        report.software.torch or "none",
        str(report.facts.cores),
        format_size(report.facts.memory_bytes),
        gpus,
        "none" if shm is None else format_size(shm),
        f"{report.skew_s:+.2f} s",
        verdict,
    )
