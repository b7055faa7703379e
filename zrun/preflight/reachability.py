"""Connections between the hosts of a run: at which addresses do they reach each other?

Every host listens at one address and connects to those of the others: all of them, or among more
than 32 the first one and four neighbours on each side.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace

from zrun.hosts.cluster import listed
from zrun.hosts.probe import HostReport
from zrun.preflight.rpc_client import OTHER_ZRUN, ask
from zrun.transport.agent_process import AgentLink
from zrun.transport.frames import Frame

_HELLO_S = 10.0
_ALL_PAIRS = 32  # hosts; among more, each connects to the first one and to some neighbours
_NEIGHBOURS = 4  # on each side

Reachability = dict[AgentLink, tuple[HostReport, list[str]]]  # and its problems


def check_reachability(reports: Mapping[AgentLink, HostReport]) -> Reachability:
    """Let every host listen at one address and connect to those of the others.

    Returns:
        The reports, with the addresses that were found, and the problems of each host; {} for less
        than two.
    """
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
    for agent, answer in ask(questions, _HELLO_S).items():
        _, problems = found[agent]
        if isinstance(answer, str) or "error" in answer:
            problems.append(_explain(answer, "it could not test connections to other hosts"))
            continue
        unreached: dict[str, list[str]] = {}  # by cause
        try:
            for peer, cause in answer["failed"].items():
                address, _ = places[names[peer]]
                unreached.setdefault(cause, []).append(f"{peer} at {address}")
        except (KeyError, TypeError, AttributeError):
            problems.append(OTHER_ZRUN)
            continue
        for cause, peers in unreached.items():
            problems.append(
                f"it cannot reach {listed(peers)} ({cause}): open the ports between the hosts in "
                "their firewall"
            )
    return found


def _explain(answer: Frame | str, what: str) -> str:
    if isinstance(answer, str):
        return answer
    return f"{what} ({answer['error']})"


def open_listeners(found: Reachability, mark: str) -> dict[AgentLink, tuple[str, int]]:
    """Have each host listen, and return at which address and port it does.

    Args:
        found: the reports, which get their addresses, and the problems, to which some are added.
        mark: that each is to send to visitors.
    """
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
    for agent, answer in ask(questions, _HELLO_S).items():
        report, problems = found[agent]
        if isinstance(answer, str) or "error" in answer:
            problems.append(_explain(answer, "it could not accept connections from other hosts"))
            continue
        try:
            address = answer["address"]
            port = answer["port"]
            interface = answer["interface"]
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
    """Note which hosts are one, and whose address means something else to the others."""
    seen: dict[tuple[str | None, str], AgentLink] = {}
    outside = any(
        report.address and not _is_loopback(report.address) for report, _ in found.values()
    )
    for agent, (report, problems) in found.items():
        if report.address is None:
            continue
        if _is_loopback(report.address) and outside:
            problems.append(
                f"it was reached at {report.address}, where others cannot reach it: name it by "
                f"another address; it has {_candidates(report)}"
            )
        other = seen.setdefault((report.address, report.facts.hostname), agent)
        if other is not agent:
            problems.append(f"it is the same machine as {other.host}: name each host once")


def peers_of(count: int, number: int) -> list[int]:
    """Return the hosts to which one of `count` connects; each of them connects to it too."""
    if count <= _ALL_PAIRS or number == 0:
        near = set(range(count))
    else:
        near = {(number + step) % count for step in range(-_NEIGHBOURS, _NEIGHBOURS + 1)}
        near.add(0)
    return sorted(near - {number})


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _candidates(report: HostReport) -> str:
    found = []
    for name, addresses in report.addresses.items():
        if name != "lo":
            found += [f"{name} {address}" for address in addresses]
    return ", ".join(found) or "no interface but lo"
