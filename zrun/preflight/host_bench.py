"""How fast are the hosts, and the links between them? All hosts at the same time, then links that share no host."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version

from zrun.preflight.calibration import Calibration, HostRates, LinkRates
from zrun.preflight.host_report import Finding
from zrun.preflight.reachability import open_listeners
from zrun.preflight.rpc_client import ask
from zrun.transport.agent_process import AgentLink
from zrun_core.errors import PreflightError

_BENCH_S = 270.0
_LINK_S = 20.0


def measure(agents: Sequence[AgentLink], findings: Sequence[Finding], folder: str) -> Calibration:
    """Measure hosts that were found to be well.

    Args:
        folder: on whose disk files are written and read, on each host.

    Raises:
        PreflightError: a host could not do it.
    """
    answers = ask(
        {agent: {"ask": "bench", "folder": folder} for agent in agents},
        1.0,
        answer_s=_BENCH_S,
    )
    hosts: dict[str, HostRates] = {}
    failed: list[str] = []
    for agent in agents:
        answer = answers[agent]
        if isinstance(answer, str) or "error" in answer:
            failed.append(f"{agent.host}: {answer if isinstance(answer, str) else answer['error']}")
        else:
            hosts[agent.host] = HostRates.model_validate(answer["rates"])
    links = _links(agents, findings, failed) if not failed and len(agents) > 1 else []
    if failed:
        raise PreflightError("\n  ".join(["not everything could be measured:", *failed]))
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return Calibration(made=made, zrun=version("zrun"), hosts=hosts, links=tuple(links))


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """The links of a ring of hosts, in rounds in which no host is at two links."""
    ring = [(number, (number + 1) % count) for number in range(count)]
    if count == 2:
        return [[ring[0]], [ring[1]]]
    last = [[ring[-1]]] if count % 2 else []
    paired = ring[: count - len(last)]
    return [paired[0::2], paired[1::2], *last]


def _links(
    agents: Sequence[AgentLink], findings: Sequence[Finding], failed: list[str]
) -> list[LinkRates]:
    mark = secrets.token_hex(8)
    reports = {
        agent: each.report
        for agent, each in zip(agents, findings, strict=True)
        if each.report is not None
    }
    found = {agent: (report, failed) for agent, report in reports.items()}
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
            names = agents[source].host, agents[target].host
            if isinstance(answer, str) or "error" in answer:
                why = answer if isinstance(answer, str) else answer["error"]
                failed.append(f"{names[0]} to {names[1]}: {why}")
            else:
                links.append(LinkRates(source=names[0], target=names[1], **answer["rates"]))
    return links
