"""One launch, from what was asked to an exit code: `launch(request, agent)`.

It makes an attempt (`zrun.launch.attempt`), and others as often as the job allows. Where another
launcher started a process for each rank or host, the first of them leads, and the others become its
agents.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

from zrun.job.environment import forwarded_environment
from zrun.launch.bring_up import open_agents
from zrun.launch.failures import Failure, Hang, LostHost
from zrun.launch.launch_request import AttemptResult, LaunchRequest
from zrun.system.output import say
from zrun.system.signals import ignore, stoppable
from zrun.transport.agent_process import AgentLink, close_all
from zrun.transport.join import (
    JoinedAgent,
    JoinServer,
    Rendezvous,
    become_agent,
    connect_to_leader,
    job_key,
)
from zrun.transport.local import LocalAgent
from zrun.watch.preface import hosts_preface
from zrun.watch.ui import Ui
from zrun_core.errors import ExitCode, PreflightError, StoppedError, ZrunError

_PAUSES_S = (5.0, 10.0, 20.0)  # the last one is that of every later restart


def launch(request: LaunchRequest, early: LocalAgent | None) -> int:
    """Train as `request` says.

    Args:
        early: the agent of this host, which got ready while the job was read; None: none was started.

    Returns:
        the exit code. A process of another launcher that is not the first one becomes an agent, and
        returns only if it found no leader.
    """
    if request.backend.kind == "env":
        assert early is not None  # --dry-run is refused there
        return _join(request, early)
    if request.backend.kind != "local":
        shared = forwarded_environment(os.environ)
        request = replace(request, environment=shared | request.environment)
    _tell_hosts(request)
    if early is not None and request.backend.kind != "local":
        early.close()
        early = None
    return _run(request, early)


def _join(request: LaunchRequest, own: LocalAgent) -> int:
    """Lead the processes that another launcher started, or become an agent of the one that does."""
    rendezvous = Rendezvous.of(request.backend.cluster_env, os.environ)
    key = job_key(request.loaded.config, request.worker, rendezvous, os.environ)
    if rendezvous.index > 0:
        own.close()
        try:
            connection = connect_to_leader(rendezvous, key, request.loaded.config.limits.start_s)
        except StoppedError as error:  # the first one says so
            return error.exit_code
        os.environ.update(request.environment)  # not sent: its values may be secrets
        become_agent(connection)
    _tell_hosts(request)
    request = replace(
        request,
        # mpirun hands on what it takes from a terminal of its own.
        ui=Ui.plain if request.ui is Ui.auto else request.ui,
        resume_command=f"start all processes again, each with {request.resume_command}",
    )
    return _run_as_leader(request, own, rendezvous, key)


def _tell_hosts(request: LaunchRequest) -> None:
    """Print how ranks are started, and the hosts; nothing where it is simply this host."""
    backend = request.backend
    if request.ui is not Ui.none and (backend.hosts is not None or backend.kind != "local"):
        print(hosts_preface(backend), file=sys.stderr)


def _run(request: LaunchRequest, early: LocalAgent | None) -> int:
    """Train, and start again as often as the job allows. Returns the exit code."""
    job = request.loaded.config
    restarts = Restarts(job.restarts)
    outcome = AttemptResult(ExitCode.OK)
    when = "before training began"
    with stoppable(lambda: when) as arm:
        while True:
            missing: PreflightError | None = None
            members: list[AgentLink] = [early] if early is not None else []
            try:
                if not members and not (request.dry_run and request.backend.kind == "local"):
                    members = open_agents(request.backend, job)
                early = None
                outcome = _attempt(request, members)
            except PreflightError as error:
                if not request.is_restart:
                    raise
                missing = error  # a lost host may be a while in coming back
            finally:
                close_all(members)
            pause_s = (
                None if outcome.was_asked else restarts.after(outcome.failure, outcome.committed)
            )
            if pause_s is None or outcome.run_dir is None:
                if missing is not None:
                    raise missing
                return outcome.code
            when = f"before restart {restarts.made}" + (
                f"; resume: {request.resume_command}" if outcome.committed else ""
            )
            arm()
            if missing is not None:
                say(str(missing), sys.stderr)
            origin = request.origin if request.is_restart else outcome.origin
            left = "from the beginning" if origin is None else "from where the run began"
            left = f"after step {outcome.committed}" if outcome.committed else left
            say(
                f"restart {restarts.made} of {restarts.budget} in {pause_s:g} s, {left}", sys.stderr
            )
            time.sleep(pause_s)
            request = request.once_more(outcome)


def _run_as_leader(
    request: LaunchRequest, own: LocalAgent, rendezvous: Rendezvous, key: bytes
) -> int:
    """Train with the processes that another launcher started, of which this is the first. Returns the exit code."""
    door = JoinServer.open(rendezvous, key)
    own.known_address = door.address
    if rendezvous.is_rank:
        own.host = f"rank 0 ({own.host})"
    members: list[AgentLink] = [own, *door.gather(request.loaded.config.limits.start_s)]
    code: int = ExitCode.WORKER  # of a bug
    try:
        code = _attempt(request, members).code
    except ZrunError as error:
        code = error.exit_code
        raise
    finally:
        ignore()  # once the others have ended, their launcher may want to end this one too
        for member in members:
            if isinstance(member, JoinedAgent):
                member.send_exit_code(code)
        close_all(members)
    return code


def _attempt(request: LaunchRequest, members: list[AgentLink]) -> AttemptResult:
    from zrun.launch.attempt import attempt  # late: meanwhile the agents get ready

    return attempt(request, members)


class Restarts:
    """The budget of a run, over all hosts.

    What would only happen again is not tried again: a mistake in the job, an exception, numbers that went wrong. A
    restart after which nothing new was committed counts twice.

    Attributes:
        made: restarts so far.
    """

    def __init__(self, budget: int) -> None:
        self.made = 0
        self._left = self.budget = budget
        self._committed: int | None = None

    def after(self, failure: Failure | Hang | LostHost | None, committed: int) -> float | None:
        """Seconds to wait before the run goes on; None: it does not.

        Args:
            committed: the newest step that was saved; 0: none.
        """
        if failure is None or not _is_accident(failure):
            return None
        cost = 2 if self.made and committed == self._committed else 1
        if self._left < cost:
            return None
        self._left -= cost
        self._committed = committed
        self.made += 1
        return _PAUSES_S[min(self.made, len(_PAUSES_S)) - 1]


def _is_accident(failure: Failure | Hang | LostHost) -> bool:
    """Whether it came from outside of the training itself."""
    if isinstance(failure, Failure):
        return failure.note.is_echo if failure.note is not None else failure.end.signal is not None
    return True
