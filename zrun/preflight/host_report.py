"""What was found out about hosts, as text: one table, and a line for each thing that is wrong. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zrun.hosts.probe import HostReport
from zrun_core.spine.sizes import format_size

if TYPE_CHECKING:
    from zrun.preflight.calibration import Calibration, MatmulRates

_SHOWN = 20  # rows of a table of hosts that are well


@dataclass(frozen=True)
class Finding:
    """A host, and what is to be said of it."""

    host: str
    report: HostReport | None
    problems: tuple[str, ...]  # for which it cannot be used
    notes: tuple[str, ...] = ()


def describe(findings: Sequence[Finding]) -> str:
    """All hosts in one table, then a line for each problem."""
    bad = [finding for finding in findings if finding.problems]
    count = f"{len(findings)} host{'' if len(findings) == 1 else 's'}"
    lines = [f"{len(bad)} of {count} cannot be used:"]
    shown = findings if len(findings) <= _SHOWN else bad
    lines += [f"  {line}" for line in table(shown)]
    if len(shown) < len(findings):
        lines.append(f"  and {len(findings) - len(shown)} more that can be used")
    return "\n".join(
        [*lines, *(f"  {line}" for line in sentences(bad, lambda finding: finding.problems))]
    )


def sentences(findings: Sequence[Finding], of: Callable[[Finding], Sequence[str]]) -> list[str]:
    """A line for each thing to say, with all hosts of which it is said: many often have the same."""
    hosts: dict[str, list[str]] = {}
    for finding in findings:
        for sentence in of(finding):
            hosts.setdefault(sentence, []).append(finding.host)
    return [f"{', '.join(names)}: {sentence}" for sentence, names in hosts.items()]


def table(findings: Sequence[Finding]) -> list[str]:
    """A line for each host, below a heading."""
    rows = [
        ("host", "address", "python", "torch", "cores", "memory", "GPUs", "shm", "clock", ""),
        *map(_row, findings),
    ]
    return _aligned(rows)


def rates_tables(rates: Calibration) -> list[str]:
    """What was measured: of hosts, of GPUs, of links."""
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
    return [line for rows in tables if len(rows) > 1 for line in (*_aligned(rows), "")][:-1]


def _flops(rates: MatmulRates) -> tuple[str, str]:
    return f"{rates.fp32_flops / 1e12:.2f} TFLOP/s", f"{rates.bf16_flops / 1e12:.2f} TFLOP/s"


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(finding: Finding) -> tuple[str, ...]:
    report, num_problems = finding.report, len(finding.problems)
    if report is None:
        return (finding.host, *["-"] * 8, "not there")
    address = (
        f"{report.address} ({report.interface})"
        if report.address and report.interface
        else report.address or "-"
    )
    gpus = (
        f"{len(report.facts.gpus)} x {report.facts.gpus[0].name}" if report.facts.gpus else "none"
    )
    shm = report.limits.shm_free_bytes
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
        "ok" if not num_problems else f"{num_problems} problem{'' if num_problems == 1 else 's'}",
    )
