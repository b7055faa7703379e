"""`zrun train`: from a job file to an exit code."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from zrun.flags import Exclude, Gpus, HostList, HostsFile, Include, Nodes
from zrun.watch.ui import Ui
from zrun_core.errors import CheckpointError, ExitCode, JobError, PreflightError, StoppedError, ZrunError
from zrun_core.printable import printable

if TYPE_CHECKING:
    from zrun.estimate.forecast import Forecast
    from zrun.estimate.gate import Gate
    from zrun.job.load import LoadedJob
    from zrun.launch.agent_process import AgentLink
    from zrun.launch.agents import Agents
    from zrun.launch.detach import Detached
    from zrun.launch.failures import Failure, Hang, LostHost
    from zrun.launch.hosts import Backend
    from zrun.launch.join import Rendezvous
    from zrun.launch.local import LocalAgent
    from zrun.launch.lock import Lock
    from zrun.launch.plan import Resolved
    from zrun.launch.rundir import RunDir
    from zrun.launch.supervise import Run
    from zrun_core.config import JobConfig
    from zrun_core.events import Event
    from zrun_core.spec import ResumeSpec


def train(
    job: Annotated[Path, typer.Argument(help="The job file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the file.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of this run.", show_default="runs/<name>/<run id>")
    ] = None,
    ui: Annotated[Ui, typer.Option(help="How progress is shown; auto: live on a terminal, else plain.")] = Ui.auto,
    hosts: HostsFile = None,
    host_list: HostList = None,
    include: Include = None,
    exclude: Exclude = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    slots: Annotated[
        int | None, typer.Option(help="Ranks on each host; short for slots=N.", show_default=False)
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="auto, a step, best, a path, or never; short for resume=...", show_default=False),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over where checkpoints are; they are kept.")] = False,
    smoke: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**6,
            metavar="N",
            help="A trial: N steps, a schedule to match, no saves; in runs/<name>-smoke.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and stop.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Start even what does not fit by the estimate.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once its first step is done; it goes on by itself.")
    ] = False,
    worker: Annotated[str, typer.Option(hidden=True)] = "zrun_core.worker",
) -> None:
    """Train the model of a job.

    Example: zrun train job.yaml zero.stage=3 optim.lr=3e-4

    Exit codes: 0 done; 2 the job is wrong; 3 this machine cannot run it;
    4 workers did not start in time; 5 a worker failed; 6 a hang;
    7 the numbers went wrong; 8 a checkpoint could not be saved; 9 no valid
    checkpoint; 10 replicas diverged; 75 stopped by a signal after saving;
    130 or 143 stopped by a signal before saving.
    """
    from zrun.launch.local import LocalAgent
    from zrun.launch.signals import stoppable

    detached = None
    if detach and not dry_run:
        from zrun.launch.detach import Detached

        detached = Detached.begin(ui)
    # First of all: the agent gets ready while this process still reads the job.
    early = None if dry_run else LocalAgent()
    with _told(), stoppable(lambda: "before training began"), early or nullcontext():
        from zrun.job.load import load_job
        from zrun.launch.environment import forwarded_environment, worker_environment
        from zrun.launch.hosts import HostOptions, find_backend
        from zrun.watch.preface import hosts_preface

        options = HostOptions(hosts, host_list, include, exclude, nodes, gpus)
        short = {"slots": slots, "resume": json.dumps(resume) if resume and not resume.isdigit() else resume}
        given = [f"{key}={value}" for key, value in short.items() if value is not None]
        loaded = load_job(job, [*(overrides or ()), *given])
        if smoke is not None:
            loaded = _smoke(loaded, smoke, [*(overrides or ()), *given], fresh or resume is not None, ui)
        backend = find_backend(loaded.config, options, os.environ, job.absolute().parent, gethostname())
        environment = worker_environment(loaded.config, os.environ)
        rendezvous = None
        if backend.kind == "env":
            from zrun.launch.join import Rendezvous, become_agent, job_key, knock

            _refuse_joined(loaded.config, backend, dry_run, detach)
            rendezvous = Rendezvous.of(backend.convention, os.environ)
            key = job_key(loaded.config, worker, rendezvous, os.environ)
            if rendezvous.index > 0 and early is not None:
                early.close()
                try:
                    connection = knock(rendezvous, key, loaded.config.limits.start_s)
                except StoppedError as error:  # the first one says so
                    raise typer.Exit(error.exit_code) from None
                os.environ.update(environment)  # not sent: its values may be secrets
                become_agent(connection)
        elif backend.kind != "local":
            environment = forwarded_environment(os.environ) | environment
        if ui is not Ui.none and (backend.hosts is not None or backend.kind != "local"):
            print(hosts_preface(backend), file=sys.stderr)
        again = [f"--slots={slots}"] * (slots is not None) + options.as_arguments()
        again += ["--run-dir", str(run_dir)] if run_dir is not None else []
        again += ["--force"] * force
        command = shlex.join(["zrun", "train", str(job), *(overrides or ()), *again, "--resume", "auto"])
        order = _Order(
            loaded=loaded,
            backend=backend,
            environment=environment,
            run_dir=run_dir,
            fresh=fresh,
            force=force,
            # mpirun hands on what it takes from a terminal of its own.
            ui=Ui.plain if rendezvous is not None and ui is Ui.auto else ui,
            dry_run=dry_run,
            worker=worker,
            again=command if rendezvous is None else f"start all processes again, each with {command}",
            detached=detached,
        )
        if rendezvous is not None:
            assert early is not None
            raise typer.Exit(_lead(order, early, rendezvous, key))
        if early is not None and backend.kind != "local":
            early.close()
            early = None
        code = _run(order, early)
    raise typer.Exit(code)


def _smoke(loaded: LoadedJob, steps: int, given: list[str], goes_on: bool, ui: Ui) -> LoadedJob:
    """Return the trial of a job, and tell what it is."""
    from zrun.job.load import load_job
    from zrun.job.smoke import smoke_of

    if goes_on:
        raise JobError("--smoke begins anew and saves nothing: leave out --resume and --fresh")
    trial = smoke_of(loaded.config, steps)
    if ui is not Ui.none:
        print(trial.told, file=sys.stderr)
    return load_job(loaded.path, [*given, *trial.overrides])


@contextmanager
def _told() -> Iterator[None]:
    """Whoever stopped it reads one line, and the shell gets the exit code."""
    try:
        yield
    except StoppedError as error:
        _say(str(error), sys.stderr)
        raise typer.Exit(error.exit_code) from None


@dataclass(frozen=True)
class _Order:
    """What was asked for, and what stays the same however often it is tried.

    Attributes:
        again: the command that goes on from the run's last checkpoint.
        is_restart: it goes on, in the directory of the run that failed.
        origin: what the first attempt went on from.
        lock: on that directory: nobody else gets it in between, and the run counts as running.
    """

    loaded: LoadedJob
    backend: Backend
    environment: dict[str, str]
    run_dir: Path | None
    fresh: bool
    force: bool
    ui: Ui
    dry_run: bool
    worker: str
    again: str
    detached: Detached | None = None
    is_restart: bool = False
    lock: Lock | None = None
    origin: ResumeSpec | None = None

    def once_more(self, outcome: _Outcome) -> _Order:
        """The same, from what the run has saved; from where it began if that is nothing."""
        origin = self.origin if self.is_restart else outcome.origin
        return replace(self, run_dir=outcome.run_dir, fresh=False, is_restart=True, lock=outcome.lock, origin=origin)


@dataclass(frozen=True)
class _Outcome:
    code: int
    failure: Failure | Hang | LostHost | None = None
    run_dir: Path | None = None  # None: nothing was started
    committed: int = 0  # the newest step that was saved
    lock: Lock | None = None  # on the run directory
    was_asked: bool = False  # to end, by a signal
    origin: ResumeSpec | None = None  # what it went on from


def _run(order: _Order, early: LocalAgent | None) -> int:
    """Train, and start again as often as the job allows. Returns the exit code."""
    from zrun.launch.agent_process import close_all
    from zrun.launch.assemble import open_agents
    from zrun.launch.restarts import Restarts
    from zrun.launch.signals import stoppable

    job = order.loaded.config
    restarts = Restarts(job.restarts)
    outcome = _Outcome(ExitCode.OK)
    when = "before training began"
    with stoppable(lambda: when) as arm:
        while True:
            missing: PreflightError | None = None
            members: list[AgentLink] = [early] if early is not None else []
            try:
                if not members and not (order.dry_run and order.backend.kind == "local"):
                    members = open_agents(order.backend, job)
                early = None
                outcome = _attempt(order, members)
            except PreflightError as error:
                if not order.is_restart:
                    raise
                missing = error  # a lost host may be a while in coming back
            finally:
                close_all(members)
            pause_s = None if outcome.was_asked else restarts.after(outcome.failure, outcome.committed)
            if pause_s is None or outcome.run_dir is None:
                if missing is not None:
                    raise missing
                return outcome.code
            when = f"before restart {restarts.made}" + (f"; resume: {order.again}" if outcome.committed else "")
            arm()
            if missing is not None:
                _say(str(missing), sys.stderr)
            origin = order.origin if order.is_restart else outcome.origin
            left = "from the beginning" if origin is None else "from where the run began"
            left = f"after step {outcome.committed}" if outcome.committed else left
            _say(f"restart {restarts.made} of {restarts.budget} in {pause_s:g} s, {left}", sys.stderr)
            time.sleep(pause_s)
            order = order.once_more(outcome)


def _refuse_joined(job: JobConfig, backend: Backend, dry_run: bool, detach: bool) -> None:
    """What only the launcher that started the processes could do."""
    asked = "restarts" if job.restarts else "--detach" if detach else "--dry-run" if dry_run else None
    if asked is not None:
        instead = {
            "restarts": "leave it out, and let that launcher start all of them again, with --resume auto",
            "--detach": "leave it out, and let that launcher go on without its terminal",
            "--dry-run": "call zrun train --dry-run once, by itself",
        }[asked]
        raise JobError(f"{asked}: another launcher started this process ({backend.why}): {instead}")


def _lead(order: _Order, own: LocalAgent, rendezvous: Rendezvous, key: bytes) -> int:
    """Train with the processes that another launcher started, of which this is the first. Returns the exit code."""
    from zrun.launch.agent_process import close_all
    from zrun.launch.join import Door, JoinedAgent
    from zrun.launch.signals import ignore

    door = Door.open(rendezvous, key)
    own.known_at = door.address
    if rendezvous.is_rank:
        own.host = f"rank 0 ({own.host})"
    members: list[AgentLink] = [own, *door.gather(order.loaded.config.limits.start_s)]
    code: int = ExitCode.WORKER  # of a bug
    try:
        code = _attempt(order, members).code
    except ZrunError as error:
        code = error.exit_code
        raise
    finally:
        ignore()  # once the others have ended, their launcher may want to end this one too
        for member in members:
            if isinstance(member, JoinedAgent):
                member.dismiss(code)
        close_all(members)
    return code


def _attempt(order: _Order, members: list[AgentLink]) -> _Outcome:
    """Look at the hosts, plan, start the workers and follow them to the end."""
    from zrun.estimate.gate import Gate
    from zrun.launch.agents import Agents
    from zrun.launch.assemble import assemble
    from zrun.launch.frames import Start
    from zrun.launch.hosts import with_backend
    from zrun.launch.join import JoinedAgent
    from zrun.launch.plan import check_gpus, make_plan
    from zrun.launch.resume import begin, begin_again, under_lock
    from zrun.launch.rundir import RunDir, set_checkpoints_aside
    from zrun.watch.preface import brief, places, preface, width_of
    from zrun.watch.topology import show_seats
    from zrun_core.parallel_dims import refuse_untrained

    config, reasons = with_backend(order.loaded.config, order.backend)
    job_dir = order.loaded.path.absolute().parent
    least = config.min_hosts if order.is_restart and config.min_hosts is not None else len(members)
    root = order.run_dir or Path("runs") / config.name
    assembly = assemble(members, order.backend, config, job_dir, root.absolute(), least)
    if assembly.dropped:
        _say(assembly.dropped, sys.stderr)
    check_gpus(order.backend.gpus, config, assembly.cluster)
    resolved = make_plan(config, assembly.cluster)
    resolved = replace(resolved, reasons=(*reasons, *resolved.reasons))
    is_told = order.ui is not Ui.none and not order.is_restart
    width = width_of(sys.stderr)
    if is_told and order.dry_run:
        print(preface(resolved, assembly.cluster, width), file=sys.stderr)
        show_seats(resolved.plan.ranks, assembly.cluster, sys.stderr)
    elif is_told:
        print(brief(resolved, order.loaded.config, assembly.cluster, width), file=sys.stderr)
        print(f"every other key has its default: zrun check {shlex.quote(str(order.loaded.path))}", file=sys.stderr)
    if not order.dry_run:
        refuse_untrained(resolved.job.parallel.tp, resolved.job.parallel.pp)
    lock = order.lock
    if order.is_restart:
        assert order.run_dir is not None
        beginning = begin_again(resolved.job, order.run_dir, order.origin)
    elif order.dry_run:
        beginning = begin(resolved.job, order.run_dir, order.fresh)
    else:
        beginning, lock = under_lock(lambda: begin(resolved.job, order.run_dir, order.fresh))
    if beginning.note:
        print(beginning.note, file=sys.stderr)
    if order.dry_run or beginning.complete:
        return _Outcome(ExitCode.OK)
    gate = Gate(
        order.loaded, resolved, assembly.cluster, order.environment, force=order.force, is_restart=order.is_restart
    )
    with (
        gate,
        RunDir.claim(resolved.job.name, beginning.run_dir, earlier=beginning.earlier, lock=lock) as rundir,
    ):
        if is_told:
            print(places(rundir.path, resolved.job.log.ranks, resolved.plan.world_size), file=sys.stderr)
        if order.detached is not None:
            order.detached.moved_in(rundir)
        if beginning.aside is not None:
            set_checkpoints_aside(beginning.aside, rundir.run_id)
        rundir.write_job(_record(order.loaded, resolved))
        rundir.write_plan(resolved.plan)
        spec = _spec(order.loaded, resolved, rundir, beginning.resume, gate.memory_bytes)
        agents = Agents([post.agent for post in assembly.posts])
        agents.start(
            Start(
                spec=spec,
                host=post.host,
                env={} if isinstance(post.agent, JoinedAgent) else order.environment,  # it has its own
                module=order.worker,
                store=assembly.store,
                interface=post.interface,
                seat=post.seat,
                is_remote=post.is_remote,
            )
            for post in assembly.posts
        )
        code, failure, was_asked = _follow(agents, resolved, rundir, order, gate)
        rundir.exit_code = code
        committed = _committed(resolved, rundir)
        return _Outcome(code, failure, rundir.path, committed, rundir.keep_lock(), was_asked, beginning.resume)


def _committed(resolved: Resolved, rundir: RunDir) -> int:
    """The newest step that the run has saved; 0: none, or nobody can tell now. It decides nothing."""
    from zrun_core.checkpoint.names import steps_in
    from zrun_core.spec import checkpoint_folder

    if resolved.job.checkpoint is None:
        return 0
    with suppress(CheckpointError):
        return max(steps_in(checkpoint_folder(resolved.job, rundir.path)), default=0)
    return 0


def _spec(
    loaded: LoadedJob, resolved: Resolved, rundir: RunDir, resume: ResumeSpec | None, memory_bytes: int | None
) -> dict[str, Any]:
    from zrun.launch.environment import without_secrets
    from zrun_core.spec import RunSpec

    spec = RunSpec(
        job=without_secrets(resolved.job),
        plan=resolved.plan,
        batch=resolved.batch,
        job_dir=str(loaded.path.absolute().parent),
        run_dir=str(rundir.path),
        run_id=rundir.run_id,
        resume=resume,
        memory_bytes=memory_bytes,
    )
    return spec.as_json()


def _record(loaded: LoadedJob, resolved: Resolved) -> str:
    """The job as it runs, with the origin of each value."""
    from zrun.job.load import LoadedJob
    from zrun.job.problems import Origin
    from zrun.job.render import with_origins
    from zrun.launch.environment import without_secrets

    autos = {each.key: Origin("auto", each.why) for each in resolved.reasons}
    return with_origins(LoadedJob(without_secrets(resolved.job), loaded.path, {**loaded.origins, **autos}))


def _follow(
    agents: Agents, resolved: Resolved, rundir: RunDir, order: _Order, gate: Gate
) -> tuple[int, Failure | Hang | LostHost | None, bool]:
    """Watch the run to its end, and report it.

    Returns:
        its exit code, the failure behind it, and whether a signal had asked for the end.
    """
    from zrun.estimate.gate import refusal
    from zrun.launch.failures import Stopped
    from zrun.launch.signals import ends_with_parent, ignore, name_of
    from zrun.launch.supervise import Interrupts, Run, Supervisor, judge
    from zrun.watch.follow import Follower
    from zrun.watch.phases import PhaseWatch
    from zrun.watch.report import report
    from zrun.watch.room import Facts
    from zrun.watch.screen import open_screen
    from zrun.watch.stragglers import Stragglers

    job, plan, ui = resolved.job, resolved.plan, order.ui
    facts = Facts(job.name, rundir.run_id, tuple(place.host for place in plan.ranks))
    follower = Follower(open_screen(ui, facts, job.log.every, sys.stdout, os.environ), rundir.append)
    run, interrupts = Run(plan.world_size), Interrupts()
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

    turn = ends_with_parent(on_turn) if order.backend.kind == "env" else on_turn
    try:
        with interrupts.caught():
            Supervisor(agents, run, interrupts, job.limits).watch(on_event, turn)
        ignore()  # what is left are the last words
    finally:
        follower.close()
    committed = _committed(resolved, rundir)
    code, failure = judge(run, plan, rundir, interrupts, committed)
    goes_on = order.is_restart or job.resume != "never"
    is_vain = goes_on and not run.trains and _is_of_its_own(failure)
    again = order.again if committed and not is_vain else None
    if failure is not None:
        record = failure.as_json() | {"resume": again}
        rundir.write_failure(record)
        unfit = _unfit(code, failure, run, gate)
        if unfit is not None:
            code = ExitCode.PREFLIGHT
            rundir.write_failure(record | {"exit_code": int(code), "unfit": unfit.as_json()})
        told = refusal(unfit) if unfit is not None else failure.describe()
        _say(told + (f"\n  resume: {again}" if again else ""), sys.stderr)
    elif code == ExitCode.OK and ui is not Ui.none:
        out = sys.stderr if ui is Ui.json else sys.stdout
        columns = shutil.get_terminal_size().columns if out.isatty() else None
        _say(report(follower.state, rundir.path, columns), out)
    elif code != ExitCode.OK:
        by = name_of(interrupts.first) if interrupts.first is not None else run.stopping
        stopped = Stopped(code, by, run.last_step, committed, tuple(run.lost.values()))
        rundir.write_failure(stopped.as_json() | {"resume": again})
        _say(stopped.describe(again), sys.stderr)
    return code, failure, interrupts.first is not None or bool(run.stopping)


def _is_of_its_own(failure: Failure | Hang | LostHost | None) -> bool:
    """Whether a rank said why it failed: the same command would come to the same."""
    from zrun.launch.failures import Failure

    return isinstance(failure, Failure) and failure.note is not None and not failure.note.is_echo


def _unfit(code: int, failure: Failure | Hang | LostHost, run: Run, gate: Gate) -> Forecast | None:
    """What an estimate says of a job for which a rank had no room; None: it would fit, or nobody waited for it."""
    from zrun.launch.failures import Failure
    from zrun.launch.signals import stoppable

    if not isinstance(failure, Failure) or not gate.may_refuse:
        return None
    at_first = run.last_step < 2 or bool(failure.end.shortage)  # all that lasts is there in the second step
    if code != ExitCode.PREFLIGHT and not (failure.is_out_of_memory and at_first):
        return None
    reason = f": {failure.note.message}" if failure.note is not None else ""
    _say(f"{failure.headline}{reason}\nlooking for what would fit; a signal ends that", sys.stderr)
    with suppress(StoppedError), stoppable(lambda: "looking"):
        found = gate.explanation(is_refused=code == ExitCode.PREFLIGHT)
        if gate.forecast is None:
            _say("nothing was found in this time: zrun estimate says what would fit", sys.stderr)
        return found
    return None


def _say(text: str, out: TextIO) -> None:
    """Print, if anybody still listens. Python would end with a code of its own if the last flush failed."""
    try:
        print(printable(text), file=out, flush=True)
    except OSError:
        with open(os.devnull, "wb") as nothing:
            for stream in (1, 2):
                os.dup2(nothing.fileno(), stream)
