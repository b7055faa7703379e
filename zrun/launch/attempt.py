"""One attempt at a run: look at the hosts, plan, start the workers, and follow them to the end."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zrun.estimate.forecast import Forecast
from zrun.estimate.gate import Gate, refusal
from zrun.hosts.backend import with_backend
from zrun.job.environment import without_secrets
from zrun.job.load import LoadedJob
from zrun.job.problems import ValueOrigin
from zrun.job.render import with_origins
from zrun.launch.bring_up import bring_up
from zrun.launch.failures import Failure, Hang, LostHost, Stopped
from zrun.launch.launch_request import AttemptResult, LaunchRequest
from zrun.launch.supervise import LauncherSignals, SupervisedRun, Supervisor, judge
from zrun.placement.plan import ResolvedJob, check_gpus, make_plan
from zrun.runs.rundir import RunDir, set_checkpoints_aside
from zrun.runs.start_point import choose_restart, choose_start, choose_under_lock
from zrun.system.output import say
from zrun.system.signals import ends_with_parent, ignore, name_of, stoppable
from zrun.transport.agent_process import AgentLink
from zrun.transport.agents import AgentGroup
from zrun.transport.frames import StartRequest
from zrun.transport.join import JoinedAgent
from zrun.watch.follow import Follower
from zrun.watch.panel_layout import Facts
from zrun.watch.phases import PhaseWatch
from zrun.watch.preface import brief, places, preface, width_of
from zrun.watch.report import report
from zrun.watch.screen import open_screen
from zrun.watch.stragglers import Stragglers
from zrun.watch.topology import show_seats
from zrun.watch.ui import Ui
from zrun_core.checkpoint.names import steps_in
from zrun_core.errors import CheckpointError, ExitCode, StoppedError
from zrun_core.spine.events import Event
from zrun_core.spine.parallel_dims import refuse_untrained
from zrun_core.spine.spec import ResumeSpec, RunSpec, checkpoint_folder


def attempt(request: LaunchRequest, members: list[AgentLink]) -> AttemptResult:
    """Look at the hosts, plan, start the workers and follow them to the end."""
    config, reasons = with_backend(request.loaded.config, request.backend)
    job_dir = request.loaded.path.absolute().parent
    least = (
        config.min_hosts if request.is_restart and config.min_hosts is not None else len(members)
    )
    root = request.run_dir or Path("runs") / config.name
    assembly = bring_up(members, request.backend, config, job_dir, root.absolute(), least)
    if assembly.dropped:
        say(assembly.dropped, sys.stderr)
    check_gpus(request.backend.gpus, config, assembly.cluster)
    resolved = make_plan(config, assembly.cluster)
    resolved = replace(resolved, reasons=(*reasons, *resolved.reasons))
    is_told = request.ui is not Ui.none and not request.is_restart
    width = width_of(sys.stderr)
    if is_told and request.dry_run:
        print(preface(resolved, assembly.cluster, width), file=sys.stderr)
        show_seats(resolved.plan.ranks, assembly.cluster, sys.stderr)
    elif is_told:
        print(brief(resolved, request.loaded.config, assembly.cluster, width), file=sys.stderr)
        print(
            f"every other key has its default: zrun check {shlex.quote(str(request.loaded.path))}",
            file=sys.stderr,
        )
    if not request.dry_run:
        refuse_untrained(resolved.job.parallel.tp, resolved.job.parallel.pp)
    lock = request.lock
    if request.is_restart:
        assert request.run_dir is not None
        beginning = choose_restart(resolved.job, request.run_dir, request.origin)
    elif request.dry_run:
        beginning = choose_start(resolved.job, request.run_dir, request.fresh)
    else:
        beginning, lock = choose_under_lock(
            lambda: choose_start(resolved.job, request.run_dir, request.fresh)
        )
    if beginning.note:
        print(beginning.note, file=sys.stderr)
    if request.dry_run or beginning.complete:
        return AttemptResult(ExitCode.OK)
    gate = Gate(
        request.loaded,
        resolved,
        assembly.cluster,
        request.environment,
        force=request.force,
        is_restart=request.is_restart,
    )
    with (
        gate,
        RunDir.claim(
            resolved.job.name, beginning.run_dir, earlier=beginning.earlier, lock=lock
        ) as rundir,
    ):
        if is_told:
            print(
                places(rundir.path, resolved.job.log.ranks, resolved.plan.world_size),
                file=sys.stderr,
            )
        if request.detached is not None:
            request.detached.switch_to_log(rundir)
        if beginning.aside is not None:
            set_checkpoints_aside(beginning.aside, rundir.run_id)
        rundir.write_job(_record(request.loaded, resolved))
        rundir.write_plan(resolved.plan)
        spec = _spec(request.loaded, resolved, rundir, beginning.resume, gate.memory_bytes)
        agents = AgentGroup([post.agent for post in assembly.posts])
        agents.start(
            StartRequest(
                spec=spec.to_json(),
                host=post.host,
                env={}
                if isinstance(post.agent, JoinedAgent)
                else request.environment,  # it has its own
                module=request.worker,
                store=assembly.store,
                interface=post.interface,
                seat=post.seat,
                is_remote=post.is_remote,
            )
            for post in assembly.posts
        )
        code, failure, was_asked = _monitor(agents, resolved, spec, rundir, request, gate)
        rundir.exit_code = code
        committed = _committed(spec)
        return AttemptResult(
            code, failure, rundir.path, committed, rundir.keep_lock(), was_asked, beginning.resume
        )


def _committed(spec: RunSpec) -> int:
    """Return the newest step that the run has saved, for messages; 0: none, or not known now."""
    if spec.job.checkpoint is None:
        return 0
    with suppress(CheckpointError):
        return max(steps_in(spec.checkpoint_folder), default=0)
    return 0


def _spec(
    loaded: LoadedJob,
    resolved: ResolvedJob,
    rundir: RunDir,
    resume: ResumeSpec | None,
    memory_bytes: int | None,
) -> RunSpec:
    return RunSpec(
        job=without_secrets(resolved.job),
        plan=resolved.plan,
        batch=resolved.batch,
        job_dir=str(loaded.path.absolute().parent),
        run_dir=str(rundir.path),
        run_id=rundir.run_id,
        checkpoints=str(checkpoint_folder(resolved.job, rundir.path)),
        resume=resume,
        memory_bytes=memory_bytes,
    )


def _record(loaded: LoadedJob, resolved: ResolvedJob) -> str:
    """The job as it runs, with the origin of each value."""
    autos = {each.key: ValueOrigin("auto", each.why) for each in resolved.reasons}
    return with_origins(
        LoadedJob(without_secrets(resolved.job), loaded.path, {**loaded.origins, **autos})
    )


def _monitor(
    agents: AgentGroup,
    resolved: ResolvedJob,
    spec: RunSpec,
    rundir: RunDir,
    request: LaunchRequest,
    gate: Gate,
) -> tuple[int, Failure | Hang | LostHost | None, bool]:
    """Watch the run to its end, and report it.

    Returns:
        its exit code, the failure behind it, and whether a signal had asked for the end.
    """
    job, plan, ui = resolved.job, resolved.plan, request.ui
    facts = Facts(job.name, rundir.run_id, tuple(place.host for place in plan.ranks))
    follower = Follower(
        open_screen(ui, facts, job.log.every, sys.stdout, os.environ), rundir.append
    )
    run, interrupts = SupervisedRun(plan.world_size), LauncherSignals()
    phases = PhaseWatch(compiles=job.compile)
    stragglers = Stragglers(facts)

    def on_event(event: Event, line: bytes | None) -> None:
        follower.event(event, line)
        gate.see(event, follower.event)
        stragglers.see(event, follower.event)

    def on_turn() -> None:
        phases.see(time.monotonic(), run.states)
        if (news := phases.news()) is not None:
            follower.event(news)
        follower.turn(phases.doing)
        gate.turn(follower.event)

    turn = ends_with_parent(on_turn) if request.backend.kind == "env" else on_turn
    try:
        with interrupts.caught():
            Supervisor(agents, run, interrupts, job.limits).watch(on_event, turn)
        ignore()  # what is left are the last words
    finally:
        follower.close()
    committed = _committed(spec)
    code, failure = judge(run, plan, rundir, interrupts, committed)
    goes_on = request.is_restart or job.resume != "never"
    is_vain = goes_on and not run.trains and _is_of_its_own(failure)
    resume = request.resume_command if committed and not is_vain else None
    if failure is not None:
        record = failure.to_json() | {"resume": resume}
        rundir.write_failure(record)
        unfit = _unfit(code, failure, run, gate)
        if unfit is not None:
            code = ExitCode.PREFLIGHT
            rundir.write_failure(record | {"exit_code": int(code), "unfit": unfit.to_json()})
        told = refusal(unfit) if unfit is not None else failure.describe()
        say(told + (f"\n  resume: {resume}" if resume else ""), sys.stderr)
    elif code == ExitCode.OK and ui is not Ui.none:
        out = sys.stderr if ui is Ui.json else sys.stdout
        columns = shutil.get_terminal_size().columns if out.isatty() else None
        say(report(follower.state, rundir.path, columns), out)
    elif code != ExitCode.OK:
        by = name_of(interrupts.first) if interrupts.first is not None else run.stopping
        stopped = Stopped(code, by, run.last_step, committed, tuple(run.lost.values()))
        rundir.write_failure(stopped.to_json() | {"resume": resume})
        say(stopped.describe(resume), sys.stderr)
    return code, failure, interrupts.first is not None or bool(run.stopping)


def _is_of_its_own(failure: Failure | Hang | LostHost | None) -> bool:
    """Whether a rank said why it failed: the same command would come to the same."""
    return isinstance(failure, Failure) and failure.note is not None and not failure.note.is_echo


def _unfit(
    code: int, failure: Failure | Hang | LostHost, run: SupervisedRun, gate: Gate
) -> Forecast | None:
    """What an estimate says of a job for which a rank had no room; None: it would fit, or nobody waited for it."""
    if not isinstance(failure, Failure) or not gate.may_refuse:
        return None
    at_first = run.last_step < 2 or bool(
        failure.end.shortage
    )  # all that lasts is there in the second step
    if code != ExitCode.PREFLIGHT and not (failure.is_out_of_memory and at_first):
        return None
    reason = f": {failure.note.message}" if failure.note is not None else ""
    say(f"{failure.headline}{reason}\nlooking for what would fit; a signal ends that", sys.stderr)
    with suppress(StoppedError), stoppable(lambda: "looking"):
        found = gate.explanation(is_refused=code == ExitCode.PREFLIGHT)
        if gate.forecast is None:
            say("nothing was found in this time: zrun estimate says what would fit", sys.stderr)
        return found
    return None
