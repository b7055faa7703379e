"""The check of all hosts before anything is started there.

    reports = check_hosts(agents, HostRequirements(job_dir=folder, shared=(run_dir,)))

Is every host there, is it what the job needs (`host_checks`), and do they reach each other
(`reachability`)? All are asked at the same time, and all that is wrong is said at once, in one
table (`host_report`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from zrun.hosts.probe import TOKEN_PREFIX, HostReport, job_code, software
from zrun.preflight.host_checks import HostRequirements, find_notes, find_problems
from zrun.preflight.host_report import Finding, describe
from zrun.preflight.reachability import check_reachability
from zrun.preflight.rpc_client import OTHER_ZRUN, Answers, ask
from zrun.transport.agent_process import AgentLink
from zrun_core.errors import PreflightError

HELLO_S = 30.0  # ssh may take 10 to connect, and Python some more to start from a network disk
_SETTLE_S = 1.5  # without news, those that are there meet before the others are waited for


def check_hosts(
    agents: Sequence[AgentLink], needs: HostRequirements, hello_s: float = HELLO_S
) -> tuple[HostReport, ...]:
    """Look at the hosts of all agents, which were started but not told what to run.

    Args:
        hello_s: seconds that an agent may take to be there.

    Returns:
        What is known of each, in the order of `agents`, with the address at which the others reach
        it.

    Raises:
        PreflightError: some cannot be used; the text is a table of all hosts and a line for each
            problem.
    """
    findings = inspect_hosts(agents, needs, hello_s)
    if any(finding.problems for finding in findings):
        raise PreflightError(describe(findings))
    return tuple(finding.report for finding in findings if finding.report is not None)


def inspect_hosts(
    agents: Sequence[AgentLink], needs: HostRequirements, hello_s: float = HELLO_S
) -> list[Finding]:
    """Look at the hosts like `check_hosts`, and return those that cannot be used too.

    Args:
        hello_s: seconds that an agent may take to be there.

    Raises:
        PreflightError: this host itself cannot write to a folder of `needs.shared`.
    """
    with _tokens(needs.shared) as tokens:
        question = {
            "ask": "facts",
            "job_dir": str(needs.job_dir) if needs.job_dir is not None else None,
            "folders": {str(folder): token for folder, token in tokens.items()},
            "swap": None if needs.swap is None else asdict(needs.swap),
        }
        deadline = time.monotonic() + hello_s
        answers = ask(dict.fromkeys(agents, question), hello_s, settle_s=_SETTLE_S)
        reports = _reports(answers, agents)
        reachability = check_reachability(reports)
        late = [agent for agent in agents if agent not in answers]
        if late:
            more = ask(dict.fromkeys(late, question), max(0.1, deadline - time.monotonic()))
            answers |= more
            num_before = len(reports)
            reports = _reports(answers, agents)
            if len(reports) > num_before:  # all of them once more
                reachability = check_reachability(reports)
    here = software()
    code: dict[str, str] | None = {}
    if needs.job_dir is not None:
        code = job_code(needs.job_dir)
    findings = []
    for agent in agents:
        found = reports.get(agent)
        if found is None:
            findings.append(Finding(agent.host, None, (str(answers[agent]),)))
            continue
        report, unreached = reachability.get(agent, (found, []))
        problems = (*find_problems(report, here, code, needs, agent.host), *unreached)
        findings.append(
            Finding(agent.host, report, problems, tuple(find_notes(report, here, needs)))
        )
    return findings


def _reports(answers: Answers, agents: Sequence[AgentLink]) -> dict[AgentLink, HostReport]:
    """Return the reports of the agents that gave one, in their order.

    For others a sentence takes the place of the answer.
    """
    reports = {}
    for agent in agents:
        answer = answers.get(agent, "")
        if isinstance(answer, str):
            continue
        if "error" in answer:
            answers[agent] = f"its agent could not inspect it ({answer['error']})"
            continue
        try:
            report = HostReport.from_json(answer["report"])
            heard = float(answer["heard"])
            said = float(answer["said"])
        except (KeyError, TypeError, ValueError):  # the last is pydantic's too
            answers[agent] = OTHER_ZRUN
            continue
        # As between two clocks of NTP (RFC 5905, section 8): a message takes about the same time in
        # both directions.
        #
        #     here    asked ---------------------- got     skew:  mean of heard - asked
        #                  \                   /                  and said - got
        #     there         heard ------- said             error: half of both ways together
        skew = ((heard - answer["asked"]) + (said - answer["got"])) / 2
        error = ((answer["got"] - answer["asked"]) - (said - heard)) / 2
        reached_at = agent.known_address
        if agent.by_ssh:
            reached_at = report.reached_at
        reports[agent] = replace(
            report, skew_s=skew, skew_error_s=abs(error), reached_at=reached_at
        )
    return reports


@contextmanager
def _tokens(folders: Sequence[Path]) -> Iterator[dict[Path, str]]:
    """Leave a file of a random name in each folder, by which other hosts know it again.

    Raises:
        PreflightError: a folder is not writable.
    """
    tokens = {_existing(folder): secrets.token_hex(8) for folder in folders}
    made: list[Path] = []
    try:
        for folder, token in tokens.items():
            path = folder / f"{TOKEN_PREFIX}{token}"
            try:
                path.touch(mode=0o600, exist_ok=False)
            except OSError as error:
                raise PreflightError(
                    f"{folder}: nothing can be written there: {error.strerror}"
                ) from None
            made.append(path)
        yield tokens
    finally:
        for path in made:
            with suppress(OSError):
                path.unlink()


def _existing(folder: Path) -> Path:
    """Return the folder itself, or the nearest one above that exists."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.is_dir())
