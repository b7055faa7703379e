"""Decide where a run begins: anew, or from a checkpoint. Nothing is written here.

    zrun train job.yaml                    a new run
    zrun train job.yaml --resume auto      the newest run of this name that has saved goes on, in
                                           its directory
    zrun train job.yaml --resume 500       a new run from step 500 of that run
    zrun train job.yaml --resume best      a new run from the best step of that run
    zrun train job.yaml --resume PATH      a new run from a step, a folder of steps, or a run
                                           directory

With --run-dir or `checkpoint.dir`, only that place is looked at.

A folder that cannot be read is an error, never an empty one: its steps would be set aside. Each
folder is listed once for a decision; a decision that moves files of an earlier run is taken again
under the lock of its directory (`choose_under_lock`), because until then that run may save.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from zrun.runs.run_lock import RunLock
from zrun.runs.rundir import EarlierRun, is_run, lock_run
from zrun_core.checkpoint.names import step_of, steps_in
from zrun_core.errors import CheckpointError, JobError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.spec import ResumeSpec, checkpoint_folder

if TYPE_CHECKING:
    from zrun_core.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class StartPoint:
    """The beginning of a run.

    Attributes:
        run_dir: chosen, or that of the run that goes on; None: a new one.
        resume: the checkpoint that it goes on from; None: it starts from the beginning.
        earlier: what becomes of a run that the directory holds.
        aside: a folder of checkpoints, which are set aside for those of the new run.
        note: for the user; empty: nothing out of the ordinary.
        complete: there is nothing left to train.
    """

    run_dir: Path | None
    resume: ResumeSpec | None = None
    earlier: EarlierRun = EarlierRun.REFUSE
    aside: Path | None = None
    note: str = ""
    complete: bool = False


@dataclass(frozen=True)
class _StepFolder:
    """A folder of checkpoints, and its steps, oldest first, as they were when it was listed."""

    path: Path
    steps: list[int]

    @classmethod
    def read(cls, path: Path) -> _StepFolder:
        return cls(path, steps_in(path))


def choose_start(
    job: JobConfig, chosen: Path | None, fresh: bool, root: Path = Path("runs")
) -> StartPoint:
    """Decide how a run of `job` begins.

    Args:
        job: whose `resume` says from where.
        chosen: --run-dir; None: it was not given.
        fresh: --fresh: start over where checkpoints are.

    Raises:
        JobError: it could not be told whether to start over or to go on.
        CheckpointError: what is asked for does not exist, is not valid, or cannot be read.
    """
    if fresh or job.resume == "never":
        return _start_anew(job, chosen, fresh)
    own = _own_folder(job, chosen)
    runs = root / job.name
    if job.resume == "auto":
        return _continue_newest(job, chosen, own, runs)
    if isinstance(job.resume, int):
        source = _numbered_step(job.resume, own, runs)
    elif job.resume == "best":
        source = _best_step(own, runs)
    else:
        source = _checkpoint_at(Path(job.resume).expanduser().absolute())
    return _branch(job, chosen, own, source)


def choose_restart(job: JobConfig, run_dir: Path, origin: ResumeSpec | None) -> StartPoint:
    """Decide how a run that failed goes on in its directory: from what it saved, or as it began.

    Args:
        origin: the checkpoint that its first attempt went on from; None: it had none.

    Raises:
        CheckpointError: what it has saved, or `origin`, is not valid, or cannot be read.
    """
    own = checkpoint_folder(job, run_dir.absolute())
    if steps_in(own):
        return _resume_from(job, ResumeSpec(folder=str(own)), run_dir, EarlierRun.CONTINUE)
    if origin is not None:
        return _resume_from(job, origin, run_dir, EarlierRun.START_OVER)
    return _start_over(run_dir)


def choose_under_lock(decide: Callable[[], StartPoint]) -> tuple[StartPoint, RunLock | None]:
    """Take a decision again while no other launcher holds the run directory that it is about.

    Returns:
        The decision, and the lock on that directory; None if no file of an earlier run is moved.

    Raises:
        JobError: another launcher holds the directory.
    """
    while True:
        start = decide()
        if start.run_dir is None or start.complete or start.earlier is EarlierRun.REFUSE:
            return start, None
        lock = lock_run(start.run_dir.absolute())
        try:
            if decide() == start:
                return start, lock
        except BaseException:
            lock.close()
            raise
        lock.close()  # the earlier run has saved, or ended, since the first decision


def _start_anew(job: JobConfig, chosen: Path | None, fresh: bool) -> StartPoint:
    """Start from the beginning; refuse to do so over checkpoints, unless the user says --fresh."""
    given = _given_folder(job)
    if fresh and chosen is not None and is_run(chosen):
        note = f"starts over: the earlier run moves to {chosen}/attempts"
        return StartPoint(chosen, earlier=EarlierRun.START_OVER, aside=given, note=note)
    steps = steps_in(given) if given is not None else []
    if not steps:
        return StartPoint(chosen)  # claiming the directory refuses one that holds a run
    if not fresh:
        raise JobError(
            f"checkpoint.dir: {given} holds step {steps[-1]}: continue with --resume auto, start "
            "over with --fresh, or name another folder"
        )
    note = f"starts over: the checkpoints in {given} are set aside"
    return StartPoint(chosen, aside=given, note=note)


def _start_over(run_dir: Path) -> StartPoint:
    """Start from the beginning in the directory of a run that has saved nothing."""
    note = "resume: the earlier run has saved nothing, so it starts over"
    return StartPoint(run_dir, earlier=EarlierRun.START_OVER, note=note)


def _continue_newest(
    job: JobConfig, chosen: Path | None, own: _StepFolder | None, runs: Path
) -> StartPoint:
    """Go on in the folder that the user names, else with the newest run that has saved.

    `job` has `resume: auto`, and `own` is the folder that the user names; `runs` is where this
    job's runs lie.
    """
    found = own if own is not None else _newest_folder(runs)
    if found is None or not found.steps:
        if chosen is not None and is_run(chosen):
            return _start_over(chosen)
        where = found.path if found is not None else runs
        note = f"resume: no checkpoint in {where}: starts from the beginning"
        return StartPoint(chosen, note=note)
    run_dir = chosen if own is not None else found.path.parent
    earlier = EarlierRun.REFUSE
    if run_dir is not None and is_run(run_dir):
        earlier = EarlierRun.CONTINUE
    return _resume_from(job, ResumeSpec(folder=str(found.path)), run_dir, earlier)


def _numbered_step(step: int, own: _StepFolder | None, runs: Path) -> ResumeSpec:
    """Find a step in the user's own folder, or in the newest run that has it."""
    found = own
    if own is None or not own.steps:
        found = _newest_folder(runs, step)
    if found is None:
        raise CheckpointError(f"resume: no run in {runs} has a step {step}: see zrun ckpt ls")
    return ResumeSpec(folder=str(found.path), step=step)


def _best_step(own: _StepFolder | None, runs: Path) -> ResumeSpec:
    """Find the best step of the user's own folder, or of the newest run that has saved."""
    from zrun_core.checkpoint.folder import CheckpointFolder

    found = own if own is not None else _newest_folder(runs)
    if found is None:
        raise CheckpointError(f"resume: no run in {runs} has saved anything")
    step, problem = CheckpointFolder(found.path).best()
    if step is None:
        why = problem or "checkpoint.best keeps one"
        raise CheckpointError(f"resume: {found.path} has no best step: {why}")
    return ResumeSpec(folder=str(found.path), step=step)


def _checkpoint_at(path: Path) -> ResumeSpec:
    """Find the checkpoint at a path: a step, a folder of steps, or a run directory."""
    step = step_of(path.name)
    if step is not None:
        return ResumeSpec(folder=str(path.parent), step=step)
    if not os.path.isfile(path):
        for folder in (path, path / "checkpoints"):
            if steps_in(folder):
                return ResumeSpec(folder=str(folder))
    choice = "a step-... folder, a folder of them, or a run directory"
    meant = "; did you mean auto?" if get_close_matches(path.name, ["auto"]) else ""
    raise CheckpointError(f"resume: {path} is no checkpoint: name {choice}{meant}")


def _branch(
    job: JobConfig, chosen: Path | None, own: _StepFolder | None, source: ResumeSpec
) -> StartPoint:
    """Start a run from a step that the user names.

    `own` is the folder in which the new run saves, if the user names one.

    Raises:
        JobError: the new run would save among the steps of another, or steps that are there twice.
    """
    is_own = own is not None and own.path.resolve() == Path(source.folder).resolve()
    earlier = EarlierRun.REFUSE
    if chosen is not None and is_run(chosen):
        if not is_own:
            raise JobError(
                f"run directory {chosen} holds an earlier run: choose another with --run-dir"
            )
        earlier = EarlierRun.CONTINUE
    if own is not None and own.steps:
        newest = own.steps[-1]
        if not is_own:
            raise JobError(
                f"checkpoint.dir: {own.path} holds step {newest} of another run: name another "
                "folder"
            )
        if source.step is not None and newest > source.step:
            raise JobError(
                f"resume: {source.folder} already holds step {newest}, which a run from step "
                f"{source.step} would save again: choose another --run-dir or checkpoint.dir"
            )
    return _resume_from(job, source, chosen, earlier)


def _resume_from(
    job: JobConfig, source: ResumeSpec, run_dir: Path | None, earlier: EarlierRun
) -> StartPoint:
    """Go on from the newest valid step of a folder, or from one step of it; nothing if complete.

    `run_dir` is None for a new run; `earlier` is what becomes of the run that is there.

    Raises:
        CheckpointError: there is no such step, or it is not valid.
    """
    from zrun_core.checkpoint.folder import CheckpointFolder
    from zrun_core.checkpoint.verify import verify

    found = CheckpointFolder(Path(source.folder)).scan()
    if source.step is not None:
        found = [each for each in found if each.step == source.step]
    newest = next((each for each in found if each.manifest is not None), None)
    if newest is None or newest.manifest is None:
        what = f"step {source.step}" if source.step is not None else "a valid checkpoint"
        reasons = "".join(f"\n  step {each.step}: {each.problem}" for each in found)
        raise CheckpointError(
            f"{source.folder} does not hold {what}{reasons}\n"
            "name another with --resume PATH or --resume STEP, or start over with --fresh"
        )
    ended = newest.manifest.progress.get("ended") if source.step is None else None
    is_over = bool(ended) or _is_complete(newest.manifest, job)
    if is_over and not verify(newest.path, newest.manifest):
        note = f"already complete: {newest.path}"
        if ended:
            how = f"to train longer from there, name the step: --resume {newest.step}"
            note += f" (it ended early: {ended}); {how}"
        return StartPoint(run_dir, note=note, complete=True)
    note = f"resume: continues after step {newest.step} of {source.folder}"
    return StartPoint(run_dir, source, earlier, note=note)


def _is_complete(manifest: Manifest, job: JobConfig) -> bool:
    """Return whether the run that saved had reached the end of `job`."""
    progress = manifest.progress
    if job.steps is not None:
        return bool((progress.get("steps") or 0) >= job.steps)
    if job.tokens is not None:
        return bool((progress.get("tokens") or 0) >= job.tokens)
    samples = progress.get("dataset_samples")
    if not samples or job.epochs is None:
        return False
    return bool((progress.get("cursor") or 0) >= samples * job.epochs)


def _given_folder(job: JobConfig) -> Path | None:
    """Return `checkpoint.dir`; None: the job has none."""
    if job.checkpoint is None or job.checkpoint.dir is None:
        return None
    return checkpoint_folder(job, Path())


def _own_folder(job: JobConfig, chosen: Path | None) -> _StepFolder | None:
    """List the folder that the user names; None: it is that of a run yet to be found."""
    given = _given_folder(job)
    if given is not None:
        return _StepFolder.read(given)
    if chosen is not None:
        return _StepFolder.read(checkpoint_folder(job, chosen.absolute()))
    return None


def _newest_folder(runs: Path, step: int | None = None) -> _StepFolder | None:
    """Return the checkpoints of the newest run below `runs` that has any, or has `step`."""
    try:
        names = sorted(os.listdir(runs), reverse=True)  # run ids sort by time
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{runs} cannot be read: {error.strerror}") from None
    for name in names:
        if not is_run(runs / name):
            continue
        found = _StepFolder.read((runs / name / "checkpoints").absolute())
        is_meant = bool(found.steps) if step is None else step in found.steps
        if is_meant:
            return found
    return None
