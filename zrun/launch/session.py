"""One launch, from a request to an exit code: `launch(request, early)`.

It makes an attempt (`zrun.launch.attempt`), and others as often as the job allows. These processes
take part, on each host those below the reaper:

    zrun train, zrun run       the launcher: plans, starts, records events, draws, judges, restarts
      |
      |  ssh or srun to other hosts; a plain child on this one
      |
      +- reaper                parent of the agent: if that is killed, it ends what is left
           |
           +- agent            starts the ranks of its host, forwards what they tell, stops them
                |
                +- fork server imports torch once, forks a worker per rank, and ends
                |
                +- worker ...  one per rank, adopted from the fork server: `zrun_core.train.worker`,
                               or `zrun_core.script.worker`

    down  frames on the agent's stdin: what to run, stop, save, a heartbeat; end of file is the
          launcher's death
    up    frames on its stdout: events, progress of the ranks, exit statuses; end of file is a lost
          host

Where another launcher (mpirun, torchrun, srun) has started a `zrun train` for each rank or host,
the first of them leads, and the others become its agents: `zrun.transport.join`.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

from zrun.job.environment import forwarded_environment
from zrun.launch.launch_request import AttemptResult, LaunchRequest
from zrun.launch.restarts import Restarts
from zrun.system.output import say
from zrun.system.signals import held, ignore, stoppable
from zrun.transport.agent_process import AgentLink, LocalAgent, close_all
from zrun.transport.join import (
    JoinedAgent,
    JoinServer,
    Rendezvous,
    become_agent,
    connect_to_leader,
    job_key,
)
from zrun.transport.open_agents import open_agents
from zrun.watch.preface import hosts_preface
from zrun.watch.ui import Ui
from zrun_core.errors import ExitCode, PreflightError, StoppedError, ZrunError


def launch(request: LaunchRequest, early: LocalAgent | None) -> int:
    """Train as `request` says.

    Args:
        early: the agent of this host, started before the job was read; None: none was.

    Returns:
        The exit code. A process of another launcher that is not the first one becomes an agent, and
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
    what = request.worker
    if request.script is not None:
        what += f" {request.script.model_dump_json()}"
    key = job_key(request.loaded.config, what, rendezvous, os.environ)
    if rendezvous.member.index > 0:
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
    """Print how ranks are started, and on which hosts; nothing if it is simply this host."""
    backend = request.backend
    if request.ui is not Ui.none and (backend.hosts is not None or backend.kind != "local"):
        print(hosts_preface(backend), file=sys.stderr)


def _run(request: LaunchRequest, early: LocalAgent | None) -> int:
    """Train, and start again as often as the job allows. Returns the exit code."""
    restarts = Restarts(request.loaded.config.restarts, is_script=request.script is not None)
    result = AttemptResult(ExitCode.OK)
    when = "before training began"
    with stoppable(lambda: when) as arm:
        while True:
            members: list[AgentLink] = [early] if early is not None else []
            early = None
            unfit: PreflightError | None = None
            try:
                if not members:
                    with held():
                        members = _start_agents(request)
                result = _attempt(request, members)
            except PreflightError as error:
                if not request.is_restart:
                    raise
                unfit = error  # a lost host may take a while to come back
            finally:
                close_all(members)
            pause_s = None
            if not result.was_asked:
                pause_s = restarts.after(result.failure, result.committed)
            if pause_s is None or result.run_dir is None:
                if unfit is not None:
                    raise unfit
                return result.code
            when = f"before restart {restarts.made}"
            if result.committed:
                when += f"; resume: {request.resume_in_words}"
            arm()
            if unfit is not None:
                say(str(unfit), sys.stderr)
            request = request.for_restart(result)
            _announce(restarts, pause_s, request, result.committed)
            time.sleep(pause_s)


def _start_agents(request: LaunchRequest) -> list[AgentLink]:
    """Begin to start the agents of all hosts; a dry run of this host alone needs none."""
    if request.dry_run and request.backend.kind == "local":
        return []
    return open_agents(request.backend, request.loaded.config)


def _announce(restarts: Restarts, pause_s: float, request: LaunchRequest, committed: int) -> None:
    """Print that the run is started again, when, and from where."""
    if request.script is not None:
        start = "from where the script itself resumes"
    elif committed:
        start = f"after step {committed}"
    elif request.origin is not None:
        start = "from where the run began"
    else:
        start = "from the beginning"
    say(f"restart {restarts.made} of {restarts.budget} in {pause_s:g} s, {start}", sys.stderr)


def _run_as_leader(
    request: LaunchRequest, own: LocalAgent, rendezvous: Rendezvous, key: bytes
) -> int:
    """Train with the processes that another launcher started, of which this is the first.

    Returns:
        The exit code, which the others have been sent too.
    """
    server = JoinServer(rendezvous, key)
    own.known_address = server.address
    if rendezvous.member.is_rank:
        own.host = f"rank 0 ({own.host})"
    members: list[AgentLink] = [own, *server.gather(request.loaded.config.limits.start_s)]
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
