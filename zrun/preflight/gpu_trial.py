"""The check of `zrun doctor --gpu`: all hosts at the same time, a verdict for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from zrun.agent.gpu_check import Row
from zrun.hosts.cluster import HostFacts
from zrun.preflight.host_report import Finding, aligned
from zrun.preflight.rpc_client import ask
from zrun.topology.cpus import format_cpus
from zrun.topology.grouping import best_ring
from zrun.transport.agent_process import AgentLink
from zrun_core.errors import PreflightError

_TRIAL_S = 330.0
# Shares of what the links could do.
_FAST = 0.6
_BROKEN = 0.25

_UNTRUSTED = (
    "leave that GPU out, and have it looked at: what it computes cannot be trusted "
    "(nvidia-smi -q -d ECC, dmesg)"
)
_REPORT = "report it, with what zrun doctor --gpu --json prints"
_LINKS = (
    "see nvidia-smi topo -p2p r; a virtual machine, ACS or the IOMMU may send what GPUs exchange "
    "through the CPU; NCCL_DEBUG=INFO names the way that NCCL takes"
)
_ADVICE = {
    "arithmetic": _UNTRUSTED,
    "repetition": _UNTRUSTED,
    "memory": _UNTRUSTED,
    "all-reduce": _LINKS,
    "messages": _LINKS,
}


class Verdict(StrEnum):
    OK = "ok"
    SLOW = "slow"
    FAILED = "failed"


@dataclass(frozen=True)
class JudgedRow:
    """A row of the check, and what to think of it.

    Attributes:
        advice: what to do; "" where all is well.
    """

    row: Row
    verdict: Verdict
    found: str
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self.row) | {
            "verdict": self.verdict,
            "found": self.found,
            "advice": self.advice or None,
        }


def try_gpus(
    agents: Sequence[AgentLink], findings: Sequence[Finding]
) -> dict[str, list[JudgedRow]]:
    """Compute and train on the GPUs of hosts that were found to be well.

    Args:
        findings: of the same hosts.

    Returns:
        The rows of each host.

    Raises:
        PreflightError: a host could not do it.
    """
    questions = {}
    facts: dict[AgentLink, HostFacts] = {}
    for agent, finding in zip(agents, findings, strict=True):
        if finding.report is None:
            continue
        facts[agent] = finding.report.facts
        free = {state.uuid: state.free_bytes for state in finding.report.gpus}
        gpus = [
            {
                "uuid": gpu.uuid,
                "index": gpu.index,
                "free_bytes": free.get(gpu.uuid, gpu.memory_bytes),
                "is_slice": gpu.is_slice,
            }
            for gpu in finding.report.facts.gpus
        ]
        questions[agent] = {"ask": "gpu check", "gpus": gpus}
    answers = ask(questions, 1.0, answer_s=_TRIAL_S)
    found: dict[str, list[JudgedRow]] = {}
    failed: list[str] = []
    for agent, answer in answers.items():
        if isinstance(answer, str) or "error" in answer:
            failed.append(f"{agent.host}: {answer if isinstance(answer, str) else answer['error']}")
            continue
        rows = [_row_of(each) for each in answer["rows"]]
        found[agent.host] = [judge(row, facts[agent]) for row in rows]
    if failed:
        raise PreflightError("\n  ".join(["not every GPU could be checked:", *failed]))
    return found


def _row_of(told: Mapping[str, Any]) -> Row:
    lists = {name: tuple(told[name]) for name in ("gpus", "lines")}
    return Row(**{**told, **lists})


def judge(row: Row, facts: HostFacts) -> JudgedRow:
    """Return a row with its verdict.

    Args:
        facts: of its host, whose links say what an all-reduce could reach.
    """
    advice = _ADVICE.get(row.check, _REPORT)
    if row.problem is not None:
        return JudgedRow(row, Verdict.FAILED, row.found, advice)
    could = _link_rate(row.gpus, facts)
    if row.rate is None or not could:
        return JudgedRow(row, Verdict.OK, row.found)
    found = f"{row.found} of {could / 1e9:.1f} GB/s that the links could do"
    if row.rate >= _FAST * could:
        return JudgedRow(row, Verdict.OK, found)
    verdict = Verdict.SLOW if row.rate >= _BROKEN * could else Verdict.FAILED
    return JudgedRow(row, verdict, found, advice)


def _link_rate(numbers: Sequence[int], facts: HostFacts) -> float:
    """Return bytes per second over the weakest link of the best ring of GPUs; 0: not known."""
    if facts.links is None or len(numbers) < 2:
        return 0.0
    places = {gpu.index: place for place, gpu in enumerate(facts.gpus)}
    ring = best_ring(facts.links.bandwidth, tuple(places[number] for number in numbers))
    steps = zip(ring, (*ring[1:], ring[0]), strict=True)
    return 1e9 * min(facts.links.bandwidth[a][b] for a, b in steps)


def trial_lines(host: str, rows: Sequence[JudgedRow]) -> list[str]:
    """Return the table of a host: GPUs of which the same is to be said share a line."""
    together: dict[tuple[str, str, Verdict], list[JudgedRow]] = {}
    for each in rows:
        together.setdefault((each.row.check, each.found, each.verdict), []).append(each)
    cells: list[tuple[str, ...]] = [(f"{host}: check", "GPUs", "found", "")]
    for (check, found, verdict), same in together.items():
        groups = ", ".join(_numbers(each.row.gpus) for each in same)
        if all(len(each.row.gpus) == 1 for each in same):
            groups = format_cpus(each.row.gpus[0] for each in same)
        cells.append((check, groups, found, verdict.value))
    lines = aligned(cells)
    bad = [each for each in rows if each.verdict is not Verdict.OK]
    for advice in dict.fromkeys(each.advice for each in bad):
        checks = dict.fromkeys(each.row.check for each in bad if each.advice == advice)
        lines.append(f"{host}: {', '.join(checks)}: {advice}")
    for each in bad:
        lines += [f"  {line}" for line in each.row.lines]
    return lines


def _numbers(gpus: Sequence[int]) -> str:
    return " and ".join(map(str, gpus)) if len(gpus) == 2 else format_cpus(gpus)
