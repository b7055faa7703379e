"""One attempt at a run, from agents that were just started to its result: `attempt()`.

    plan       bring up the hosts, resolve the job on them, and say what will run
    begin      decide whether the run starts anew or from a checkpoint, and claim its directory
    start      record the job, and send every agent the spec of its ranks
    monitor    take in events until all ranks have ended; record them, and draw the screen
    conclude   the exit code, `failure.json`, one message, and `report.html`

`zrun.launch.session` draws the processes that take part.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zrun.estimate import auto_share
from zrun.estimate.forecast import Forecast
from zrun.estimate.gate import Gate, refusal
from zrun.hosts.backend import with_backend
from zrun.hosts.cluster import Cluster
from zrun.job.flat_keys import flat_keys
from zrun.job.hidden import may_be_secret, shown_command, without_secrets
from zrun.job.load import LoadedJob, load_job
from zrun.job.problems import ValueOrigin
from zrun.job.render import with_origins
from zrun.job.script import KEYS, script_text
from zrun.launch.bring_up import ClusterSession, bring_up
from zrun.launch.failures import BESIDE_STEPS, Failure, Hang, LostHost, Stopped
from zrun.launch.held import beside_plan, held_in_words
from zrun.launch.launch_request import AttemptResult, LaunchRequest
from zrun.launch.page import write_page
from zrun.launch.supervise import SupervisedRun, Supervisor, judge
from zrun.pages.outcome import Outcome
from zrun.placement.plan import ResolvedJob, plan_on_backend
from zrun.runs.run_lock import RunLock
from zrun.runs.rundir import EarlierRun, RunDir, set_checkpoints_aside
from zrun.runs.start_point import StartPoint, choose_restart, choose_start, choose_under_lock
from zrun.system.output import Dispensable, say
from zrun.system.ports import free_port
from zrun.system.signals import LauncherSignals, ends_with_parent, ignore, name_of, stoppable
from zrun.trackers.tracker import check_installed
from zrun.transport.agent_process import AgentLink
from zrun.transport.agents import AgentGroup
from zrun.transport.frames import StartRequest
from zrun.transport.join import JoinedAgent
from zrun.watch import formatting
from zrun.watch.checks_left_out import checks_left_out
from zrun.watch.follow import Follower
from zrun.watch.panel_layout import Facts
from zrun.watch.phases import PhaseWatch
from zrun.watch.preface import brief, places, preface, script_brief, width_of
from zrun.watch.rank_windows import RankWindows
from zrun.watch.report import report
from zrun.watch.run_state import RunState
from zrun.watch.screen import open_screen
from zrun.watch.stragglers import Stragglers
from zrun.watch.topology import show_seats
from zrun.watch.ui import Ui
from zrun_core.checkpoint.names import steps_in
from zrun_core.errors import CheckpointError, ExitCode, StoppedError, ZrunError
from zrun_core.sizes import several
from zrun_core.spine.events import Event
from zrun_core.spine.printable import printable
from zrun_core.spine.spec import RunSpec, ScriptSpec, checkpoint_folder
from zrun_core.spine.tracker_process import TrackerProcess


@dataclass(frozen=True)
class _ClaimedRun:
    """A run whose directory this process holds, and all that was decided about it."""

    request: LaunchRequest
    resolved: ResolvedJob
    rundir: RunDir
    spec: RunSpec
    gate: Gate | None  # None: a script, of which nothing can be foreseen

    @property
    def forecast(self) -> Forecast | None:
        """What was foreseen of it."""
        return None if self.gate is None else self.gate.forecast

    @property
    def facts(self) -> Facts:
        plan = self.resolved.plan
        hosts = tuple(place.host for place in plan.ranks)
        places = tuple(filter(None, (plan.along_axes(place.rank) for place in plan.ranks)))
        name = self.resolved.job.name
        is_script = self.request.script is not None
        return Facts(name, self.rundir.run_id, hosts, places, is_script)

    def write_page(self, state: RunState, outcome: Outcome) -> Path | None:
        """Write `report.html`, from what the events of this launch have told."""
        return write_page(self.rundir, self.facts, state, outcome)


@dataclass(frozen=True)
class _Observed:
    """A run that is over: what the agents told, the signals that came, and the last screen."""

    run: SupervisedRun
    signals: LauncherSignals
    state: RunState


def attempt(request: LaunchRequest, members: list[AgentLink]) -> AttemptResult:
    """Bring up the hosts, plan, start the workers, and follow them to the end.

    Args:
        request: what is asked for; `is_restart` if an earlier attempt has failed.
        members: the agents, in the order of the hosts' ranks. The caller closes them.

    Raises:
        ZrunError: the run could not be started, or not be recorded.
    """
    session, resolved = _plan(request, members)
    start, lock = _choose_start(request, resolved)
    if start.note:
        print(start.note, file=sys.stderr)
    if request.dry_run or start.complete:
        return AttemptResult(ExitCode.OK)
    gate = None
    if request.script is None:
        gate = Gate(
            request.loaded,
            resolved,
            session.cluster,
            request.environment,
            force=request.force,
            is_restart=request.is_restart,
        )
    name = resolved.job.name
    with (
        gate or nullcontext(),
        RunDir.claim(name, start.run_dir, earlier=start.earlier, lock=lock) as rundir,
    ):
        memory_bytes = None if gate is None else gate.memory_bytes
        spec = _prepare(request, resolved, start, rundir, session.store, memory_bytes)
        run = _ClaimedRun(request, resolved, rundir, spec, gate)
        try:
            agents = _start_workers(session, request, spec)
            observed = _monitor(run, agents)
        except ZrunError as error:
            outcome = Outcome.of(error.exit_code, str(error))
            run.write_page(RunState(), outcome)
            raise
        committed = _committed_step(spec)
        code, failure = _conclude(run, observed, committed)
        rundir.exit_code = code
        return AttemptResult(
            code,
            failure,
            rundir.path,
            committed,
            lock=rundir.keep_lock(),
            was_asked=observed.signals.first is not None or bool(observed.run.stop_reason),
            origin=start.resume,
        )


# Plan and begin.


def _plan(request: LaunchRequest, members: list[AgentLink]) -> tuple[ClusterSession, ResolvedJob]:
    """Bring up the hosts and resolve the job on them; print what will run."""
    config, _ = with_backend(request.loaded.config, request.backend)
    job_dir = request.loaded.path.absolute().parent
    root = request.run_dir or Path("runs") / config.name
    least = len(members)
    if request.is_restart and config.min_hosts is not None:
        least = config.min_hosts
    session = bring_up(
        members,
        request.backend,
        config,
        job_dir,
        root.absolute(),
        least,
        for_script=request.script is not None,
    )
    if session.dropped:
        say(session.dropped, sys.stderr)
    resolved = plan_on_backend(request.loaded.config, request.backend, session.cluster)
    check_installed(resolved.job.log.to)
    if auto_share.is_open(resolved):
        resolved = _with_share(request, resolved, session.cluster)
    if _tells_user(request):
        _print_plan(request, resolved, session.cluster)
    return session, resolved


def _with_share(request: LaunchRequest, resolved: ResolvedJob, cluster: Cluster) -> ResolvedJob:
    """Return the job with the share of its states that leaves the device: a run keeps its own."""
    if request.is_restart:
        assert request.run_dir is not None
        fraction = load_job(request.run_dir / "job.yaml").config.offload.fraction
        if fraction != "auto":
            return auto_share.with_share(resolved, fraction)
    if _tells_user(request):
        say(f"{auto_share.KEY}: auto: estimating how much to offload", sys.stderr)
    return auto_share.with_least_share(
        request.loaded, resolved, cluster, request.environment, force=request.force
    )


def _tells_user(request: LaunchRequest) -> bool:
    """Return whether what will run is printed: a restart would only repeat it."""
    return request.ui is not Ui.none and not request.is_restart


def _print_plan(request: LaunchRequest, resolved: ResolvedJob, cluster: Cluster) -> None:
    width = width_of(sys.stderr)
    if request.script is not None:
        print(script_brief(resolved, request.script, cluster, width), file=sys.stderr)
        if request.dry_run:
            show_seats(resolved.plan.ranks, cluster, sys.stderr)
        return
    if request.dry_run:
        print(preface(resolved, cluster, width), file=sys.stderr)
        show_seats(resolved.plan.ranks, cluster, sys.stderr)
        return
    print(brief(resolved, request.loaded.config, cluster, width), file=sys.stderr)
    path = shlex.quote(str(request.loaded.path))
    print(f"all other keys have their defaults: zrun check --all {path}", file=sys.stderr)


def _choose_start(
    request: LaunchRequest, resolved: ResolvedJob
) -> tuple[StartPoint, RunLock | None]:
    """Decide where the run begins; return the lock on its directory too, if this process has it."""
    job = resolved.job
    if request.script is not None:
        if request.is_restart:
            return StartPoint(request.run_dir, earlier=EarlierRun.CONTINUE), request.lock
        return StartPoint(request.run_dir), None
    if request.is_restart:
        assert request.run_dir is not None
        return choose_restart(job, request.run_dir, request.origin), request.lock
    if request.dry_run:
        return choose_start(job, request.run_dir, request.fresh), None
    return choose_under_lock(lambda: choose_start(job, request.run_dir, request.fresh))


# Start.


def _prepare(
    request: LaunchRequest,
    resolved: ResolvedJob,
    start: StartPoint,
    rundir: RunDir,
    store: str | None,
    memory_bytes: int | None,
) -> RunSpec:
    """Record the job in a run directory that was just claimed, and return the spec of its ranks.

    `store` is where the ranks of several hosts meet; None: there is one host. `memory_bytes` is
    what each rank may have; None: no limit is known.
    """
    if _tells_user(request):
        shown = resolved.job.log.ranks
        told = places(rundir.path, shown, resolved.plan.world_size, is_job=request.script is None)
        print(told, file=sys.stderr)
    if request.detached is not None:
        request.detached.switch_to_log(rundir, is_script=request.script is not None)
    if start.aside is not None:
        set_checkpoints_aside(start.aside, rundir.run_id)
    rundir.write_launch(shown_command(request.command))
    rundir.write_job(_job_text(request, resolved))
    rundir.write_plan(resolved.plan)
    return RunSpec(
        job=without_secrets(resolved.job),
        plan=resolved.plan,
        batch=resolved.batch,
        job_dir=str(request.loaded.path.absolute().parent),
        run_dir=str(rundir.path),
        run_id=rundir.run_id,
        checkpoints=str(checkpoint_folder(resolved.job, rundir.path)),
        resume=start.resume,
        memory_bytes=memory_bytes,
        script=_script_on(request.script, store),
        restart=request.restart,
    )


def _script_on(script: ScriptSpec | None, store: str | None) -> ScriptSpec | None:
    """Return the script with the address at which its ranks meet: rank 0 will listen there.

    `store` is None where all ranks are on this host.
    """
    if script is None:
        return None
    address, port = "127.0.0.1", free_port()
    if store is not None:
        host, _, number = store.removeprefix("tcp://").rpartition(":")
        address, port = host.strip("[]"), int(number)
    return script.model_copy(update={"master": (address, port)})


def _job_text(request: LaunchRequest, resolved: ResolvedJob) -> str:
    """Return the job as it runs, with the origin of each value."""
    loaded = request.loaded
    autos = {each.key: ValueOrigin("auto", each.why) for each in resolved.reasons}
    origins = {**loaded.origins, **autos}
    job = LoadedJob(without_secrets(resolved.job), loaded.path, origins)
    return with_origins(job) if request.script is None else script_text(job, request.script)


def _start_workers(session: ClusterSession, request: LaunchRequest, spec: RunSpec) -> AgentGroup:
    """Send every agent what it is to run."""
    agents = AgentGroup([host.agent for host in session.agents])
    spec_json = spec.to_json()  # one object: what is the same for all hosts is packed once
    starts = []
    for host in session.agents:
        has_own_environment = isinstance(host.agent, JoinedAgent)
        start = StartRequest(
            spec=spec_json,
            host=host.host,
            env={} if has_own_environment else request.environment,
            module=request.worker,
            store=session.store,
            interface=host.interface,
            seat=host.seat,
            is_remote=host.is_remote,
        )
        starts.append(start)
    agents.start(starts)
    return agents


# Monitor.


def _monitor(claimed: _ClaimedRun, agents: AgentGroup) -> _Observed:
    """Follow the ranks until all have ended: record events, draw the screen, pass on signals."""
    request = claimed.request
    gate = claimed.gate
    job = claimed.resolved.job
    plan = claimed.resolved.plan
    facts = claimed.facts
    is_script = request.script is not None
    screen = open_screen(
        request.ui, facts, job.log.every, sys.stdout, os.environ, is_script=is_script
    )
    follower = Follower(screen, claimed.rundir.append)
    run = SupervisedRun(plan.world_size, is_script=is_script)
    signals = LauncherSignals()
    phases = PhaseWatch(compiles=job.compile)
    stragglers = Stragglers(facts)
    tell_phase = Dispensable("the status of ranks")
    compare = Dispensable("the comparison with the estimate")
    find_slow = Dispensable("the search for slow ranks")
    track = Dispensable("the log of trackers")
    trackers = _start_trackers(claimed)

    def see(event: Event) -> None:
        _tell_not_compared(request, event)
        if gate is not None:
            compare(gate.see, event, follower.event)

    windows = RankWindows(
        plan.world_size,
        follower.event,
        see,
        partial(find_slow, stragglers.see),
        num_hosts=len(plan.hosts),
    )

    def see_phase() -> None:
        phases.see(time.monotonic(), run.states)
        news = phases.news()
        if news is not None:
            follower.event(news)

    def on_turn() -> None:
        if not is_script:
            tell_phase(see_phase)
        elif request.detached is not None and run.started >= set(plan.hosts):
            request.detached.has_started()
        windows.turn()
        follower.turn(phases.doing)
        if gate is not None:
            compare(gate.turn, follower.event)
        if trackers is not None:
            track(trackers.turn, follower.event)

    turn = ends_with_parent(on_turn) if request.backend.kind == "env" else on_turn
    try:
        with signals.caught():
            Supervisor(agents, run, signals, job.limits, run_dir=claimed.rundir.path).watch(
                windows.take, turn
            )
        ignore()  # what is left are the last words
    finally:
        windows.close()
        follower.close()
        if trackers is not None:
            for note in trackers.end("failed" if follower.state.end is None else "finished"):
                say(f"warning: {note}", sys.stderr)
    return _Observed(run, signals, follower.state)


def _start_trackers(claimed: _ClaimedRun) -> TrackerProcess | None:
    """Start the process that feeds the trackers of `log.to`; None: it names none."""
    job = claimed.resolved.job
    if not job.log.to:
        return None
    keys = job.model_dump(mode="json", exclude={"env"})
    args = keys.pop("log")["args"]
    script = claimed.request.script
    if script is not None:
        keys = {"script": script.name, **{key: keys[key] for key in KEYS if key in keys}}
    config = {
        name: value
        for name, value in flat_keys(keys).items()
        if not any(map(may_be_secret, name.split(".")))
    }
    try:
        return TrackerProcess(
            job.log.to, claimed.rundir.path, project=job.name, config=config, args=args
        )
    except OSError as error:  # the ranks have been started
        say(f"warning: log.to: the trackers cannot be started: {error}", sys.stderr)
        return None


def _committed_step(spec: RunSpec) -> int:
    """Return the newest step that the run has saved, for messages; 0: none, or not known now."""
    if spec.job.checkpoint is None:
        return 0
    with suppress(CheckpointError):
        return max(steps_in(spec.checkpoint_folder), default=0)
    return 0


# Conclude.


def _conclude(
    claimed: _ClaimedRun, observed: _Observed, committed: int
) -> tuple[int, Failure | Hang | LostHost | None]:
    """Judge how the run ended, write `failure.json` unless all is well, and tell the user.

    `committed` is the newest step that is saved; 0: none.

    Returns:
        The exit code, and the failure behind it.
    """
    request = claimed.request
    rundir = claimed.rundir
    run = observed.run
    signals = observed.signals
    code, failure = judge(run, claimed.resolved.plan, rundir, signals, committed)
    if failure is not None:
        resume = request.resume_command if _can_resume(claimed, run, failure, committed) else None
        return _report_failure(claimed, observed, code, failure, resume), failure
    if code != ExitCode.OK:
        resume = request.resume_command if committed else None
        by = name_of(signals.first) if signals.first is not None else run.stop_reason
        lost = tuple(run.lost.values())
        stopped = Stopped(
            code,
            by,
            run.last_step,
            committed,
            lost,
            run.seen,
            is_script=run.is_script,
            held=run.held,
        )
        planned = beside_plan(run.held, claimed.forecast)
        message = stopped.describe(resume and request.resume_in_words, planned)
        rundir.write_failure(stopped.to_json() | {"resume": resume, "told": message})
        say(message, sys.stderr)
        claimed.write_page(observed.state, Outcome.of(code, message))
    else:
        _report(claimed, observed)
    return code, None


def _tell_not_compared(request: LaunchRequest, event: Event) -> None:
    """Say, whatever the screen, which checks before the first step were left out, or overruled.

    Ranks may then train something else, and nobody would see. Other screens tell all notes.
    """
    if event["type"] != "start" or request.ui not in (Ui.none, Ui.json) or not request.command:
        return
    for note in checks_left_out(event):
        say(f"note: {printable(note)}", sys.stderr)


def _report(claimed: _ClaimedRun, observed: _Observed) -> None:
    """Write the page of a run that is done, and print its report."""
    rundir = claimed.rundir
    state = observed.state
    page = claimed.write_page(state, Outcome.of(ExitCode.OK))
    ui = claimed.request.ui
    if ui is Ui.none:
        return
    out = sys.stderr if ui is Ui.json else sys.stdout
    columns = shutil.get_terminal_size().columns if out.isatty() else None
    ascii_only = not (out.encoding or "").lower().startswith("utf")

    if observed.run.is_script and not state.step.step:
        ranks = several(observed.run.num_ranks, "rank")
        took = formatting.duration(state.elapsed_s or 0.0)
        say(f"done  the script ended on {ranks}, in {took}\nrun   {rundir.path}", out)
        return

    def tell() -> None:
        say(report(state, rundir.path, columns, page=page, ascii_only=ascii_only), out)

    Dispensable("the report")(tell)


def _can_resume(
    claimed: _ClaimedRun,
    run: SupervisedRun,
    failure: Failure | Hang | LostHost,
    committed: int,
) -> bool:
    """Return whether the failed run has a step to go on from, and would get further than before."""
    if not committed:
        return False
    was_resumed = claimed.request.is_restart or claimed.resolved.job.resume != "never"
    if not was_resumed or run.is_training:
        return True
    # It failed before its first step. If a rank says why, the same command would fail again.
    says_why = (
        isinstance(failure, Failure) and failure.note is not None and not failure.note.is_echo
    )
    return not says_why


def _report_failure(
    claimed: _ClaimedRun,
    observed: _Observed,
    code: int,
    failure: Failure | Hang | LostHost,
    resume: str | None,
) -> int:
    """Write and print a failure, and write its page.

    Returns the exit code, which says so if the job does not fit.
    """
    record = failure.to_json() | {"resume": resume}
    claimed.rundir.write_failure(record)  # at once: an estimate may take a while
    unfit = _unfit(code, failure, observed.run, claimed.gate)
    message = failure.describe()
    if isinstance(failure, Failure) and failure.held is not None:
        planned = beside_plan(failure.held, claimed.forecast)
        message = failure.describe(planned)
        of_refusal = ["", *held_in_words(failure.held), *planned]
    else:
        of_refusal = []
    if unfit is not None:
        code = ExitCode.PREFLIGHT
        message = "\n".join([refusal(unfit), *of_refusal])
        record |= {"exit_code": int(code), "unfit": unfit.to_json()}
    if resume is not None:
        message += f"\n  resume: {claimed.request.resume_in_words}"
    claimed.rundir.write_failure(record | {"told": message})
    say(message, sys.stderr)
    claimed.write_page(observed.state, Outcome.of(code, message))
    return code


def _unfit(
    code: int, failure: Failure | Hang | LostHost, run: SupervisedRun, gate: Gate | None
) -> Forecast | None:
    """Return the estimate of a job for which a rank had no memory, if that says so too.

    None: it was something else, the job would fit by the estimate, or a signal ended the waiting.
    """
    if gate is None or not isinstance(failure, Failure) or not gate.may_refuse:
        return None
    was_refused = code == ExitCode.PREFLIGHT
    # All that lasts is there in the second step: what runs out of memory later had fitted.
    end = failure.end
    was_killed_in_step = bool(end.shortage) and end.short_in not in BESIDE_STEPS
    is_early = run.last_step < 2 or was_killed_in_step
    if not was_refused and not (failure.is_out_of_memory and is_early):
        return None
    reason = f": {failure.note.message}" if failure.note is not None else ""
    say(
        f"{failure.headline}{reason}\nsearching for a configuration that fits (Ctrl-C skips this)",
        sys.stderr,
    )
    with suppress(StoppedError), stoppable(lambda: "looking"):
        found = gate.explanation(is_refused=was_refused)
        if gate.forecast is None:
            say("found none in this time: run zrun estimate to see what would fit", sys.stderr)
        return found
    return None
