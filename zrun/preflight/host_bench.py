"""Measurements of hosts, all at the same time, and of the links between them.

Links that share a host are measured one after the other.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime

from zrun.preflight.calibration import Calibration, HostRates, LinkRates
from zrun.preflight.host_report import Finding
from zrun.preflight.reachability import Reachability, open_listeners
from zrun.preflight.rpc_client import ask
from zrun.transport.agent_process import AgentLink
from zrun_core.errors import PreflightError
from zrun_core.spine.releases import own_release

_BENCH_S = 270.0
_LINK_S = 20.0


def measure(agents: Sequence[AgentLink], findings: Sequence[Finding], folder: str) -> Calibration:
    """Measure hosts that were found to be well.

    Args:
        findings: of the same hosts.
        folder: on whose disk files are written and read, on each host.

    Raises:
        PreflightError: a host could not do it.
    """
    question = {"ask": "bench", "folder": folder}
    answers = ask(dict.fromkeys(agents, question), 1.0, answer_s=_BENCH_S)
    hosts: dict[str, HostRates] = {}
    failed: list[str] = []
    for agent in agents:
        answer = answers[agent]
        if isinstance(answer, str) or "error" in answer:
            failed.append(f"{agent.host}: {answer if isinstance(answer, str) else answer['error']}")
        else:
            hosts[agent.host] = HostRates.model_validate(answer["rates"])
    links: list[LinkRates] = []
    if not failed and len(agents) > 1:
        links = _measure_links(agents, findings, failed)
    if failed:
        raise PreflightError("\n  ".join(["not everything could be measured:", *failed]))
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return Calibration(made=made, zrun=own_release(), hosts=hosts, links=tuple(links))


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return the links of a ring of hosts, in rounds in which no host is at two links.

    For 5 hosts: 0-1 2-3, then 1-2 3-4, then 4-0.
    """
    ring = [(number, (number + 1) % count) for number in range(count)]
    if count == 2:  # one link, in both directions
        return [[ring[0]], [ring[1]]]
    if count % 2 == 0:
        return [ring[0::2], ring[1::2]]
    return [ring[:-1:2], ring[1:-1:2], [ring[-1]]]


def _measure_links(
    agents: Sequence[AgentLink], findings: Sequence[Finding], failed: list[str]
) -> list[LinkRates]:
    mark = secrets.token_hex(8)
    found: Reachability = {}
    for agent, finding in zip(agents, findings, strict=True):
        if finding.report is not None:
            found[agent] = (finding.report, failed)
    places = open_listeners(found, mark)
    links = []
    for pairs in rounds(len(agents)):
        questions = {}
        for source, target in pairs:
            address, port = places[agents[target]]
            questions[agents[source]] = {
                "ask": "link",
                "address": address,
                "port": port,
                "mark": mark,
            }
        answers = ask(questions, 1.0, answer_s=_LINK_S)
        for source, target in pairs:
            answer = answers[agents[source]]
            here = agents[source].host
            there = agents[target].host
            if isinstance(answer, str) or "error" in answer:
                why = answer if isinstance(answer, str) else answer["error"]
                failed.append(f"{here} to {there}: {why}")
            else:
                links.append(LinkRates(source=here, target=there, **answer["rates"]))
    return links
