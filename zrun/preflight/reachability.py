"""Do the hosts reach each other, and at which addresses? Every one listens at one address and knocks at the others'."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace

from zrun.hosts.cluster import listed
from zrun.hosts.probe import HostReport
from zrun.preflight.rpc_client import OTHER_ZRUN, ask
from zrun.transport.agent_process import AgentLink

_MEET_S = 10.0
_ALL_PAIRS = 32  # hosts; among more of them everyone knocks at the first one and at some neighbours
_NEIGHBOURS = 4  # on each side

Reachability = dict[AgentLink, tuple[HostReport, list[str]]]  # and its problems


def check_reachability(reports: Mapping[AgentLink, HostReport]) -> Reachability:
    """Let every host listen at one address and knock at those of the others."""
    if len(reports) < 2:
        return {}
    mark = secrets.token_hex(8)
    found: Reachability = {agent: (report, []) for agent, report in reports.items()}
    places = open_listeners(found, mark)
    _check_addresses(found)
    names = {agent.host: agent for agent in places}
    agents = list(places)
    questions = {}
    for number, agent in enumerate(agents):
        others = [agents[each] for each in peers_of(len(agents), number)]
        questions[agent] = {
            "ask": "knock",
            "mark": mark,
            "peers": {other.host: places[other] for other in others},
        }
    for agent, answer in ask(questions, _MEET_S).items():
        _, problems = found[agent]
        if isinstance(answer, str) or "error" in answer:
            problems.append(
                answer
                if isinstance(answer, str)
                else f"it could not knock at others ({answer['error']})"
            )
            continue
        try:
            causes = _by_cause(answer["failed"])
            unreached = [
                [f"{peer} at {places[names[peer]][0]}" for peer in peers] for peers, _ in causes
            ]
        except (KeyError, TypeError, AttributeError):
            problems.append(OTHER_ZRUN)
            continue
        for (_, cause), where in zip(causes, map(listed, unreached), strict=True):
            problems.append(
                f"it cannot reach {where} ({cause}): open the ports between the hosts in their firewall"
            )
    return found


def open_listeners(found: Reachability, mark: str) -> dict[AgentLink, tuple[str, int]]:
    """The address and port at which each host now listens; the reports learn their addresses."""
    known = {agent: report.reached_at for agent, (report, _) in found.items()}
    questions = {}
    for agent in found:
        others = [known[other] or other.host for other in found if other is not agent]
        questions[agent] = {
            "ask": "door",
            "mark": mark,
            "known": known[agent],
            "towards": others[:_NEIGHBOURS],
        }
    places: dict[AgentLink, tuple[str, int]] = {}
    for agent, answer in ask(questions, _MEET_S).items():
        report, problems = found[agent]
        if isinstance(answer, str) or "error" in answer:
            problems.append(
                answer
                if isinstance(answer, str)
                else f"it cannot listen to others ({answer['error']})"
            )
            continue
        try:
            address, port, interface = answer["address"], answer["port"], answer["interface"]
        except KeyError:
            problems.append(OTHER_ZRUN)
            continue
        if address is None:
            problems.append(f"no interface leads to the other hosts: it has {_candidates(report)}")
        else:
            places[agent] = address, port
            found[agent] = replace(report, address=address, interface=interface), problems
    return places


def _check_addresses(found: Reachability) -> None:
    """Say which hosts are one, and which have an address that means something else to the others."""
    seen: dict[tuple[str | None, str], AgentLink] = {}
    outside = any(
        report.address and not _is_loopback(report.address) for report, _ in found.values()
    )
    for agent, (report, problems) in found.items():
        if report.address is None:
            continue
        if _is_loopback(report.address) and outside:
            problems.append(
                f"it was reached at {report.address}, where others cannot reach it: name it by another address; it has "
                f"{_candidates(report)}"
            )
        other = seen.setdefault((report.address, report.facts.hostname), agent)
        if other is not agent:
            problems.append(f"it is the same machine as {other.host}: name each host once")


def peers_of(count: int, number: int) -> list[int]:
    """At whose doors one of `count` hosts knocks. Between any two that do, it is both ways."""
    if count <= _ALL_PAIRS or number == 0:
        near = set(range(count))
    else:
        near = {(number + step) % count for step in range(-_NEIGHBOURS, _NEIGHBOURS + 1)} | {0}
    return sorted(near - {number})


def _by_cause(failed: Mapping[str, str]) -> list[tuple[list[str], str]]:
    causes: dict[str, list[str]] = {}
    for peer, cause in failed.items():
        causes.setdefault(cause, []).append(peer)
    return [(peers, cause) for cause, peers in causes.items()]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _candidates(report: HostReport) -> str:
    found = [
        f"{name} {address}"
        for name, all_ in report.addresses.items()
        for address in all_
        if name != "lo"
    ]
    return ", ".join(found) or "no interface but lo"
