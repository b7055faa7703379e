"""Where a run begins: anew, or from a checkpoint. Decided from what lies on the disk, before anything is written.

    zrun train job.yaml                    a new run
    zrun train job.yaml --resume auto      the newest run of this name that has saved goes on, in its directory
    zrun train job.yaml --resume 500       a new run from step 500 of that run
    zrun train job.yaml --resume best      a new run from the best step of that run
    zrun train job.yaml --resume PATH      a new run from a step, a folder of steps, or a run directory

With --run-dir or `checkpoint.dir`, that place and no other is looked at.

A folder that cannot be read is an error, never an empty one: what it holds would be set aside. And what is to become of
an earlier run is decided while its directory is locked (`choose_under_lock`), for until then that run may save.
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
    """How a run begins.

    Attributes:
        run_dir: chosen, or that of the run that goes on; None: a new one.
        earlier: what becomes of a run that the directory holds.
        aside: a folder of checkpoints, those of which make room for the new run's.
        note: what to tell the user; empty: nothing out of the ordinary.
        complete: there is nothing left to train.
    """

    run_dir: Path | None
    resume: ResumeSpec | None = None
    earlier: EarlierRun = EarlierRun.REFUSE
    aside: Path | None = None
    note: str = ""
    complete: bool = False


def choose_start(
    job: JobConfig, chosen: Path | None, fresh: bool, root: Path = Path("runs")
) -> StartPoint:
    """Decide how a run of `job` begins.

    Args:
        chosen: --run-dir.
        fresh: --fresh: start over where checkpoints are.
        root: of the run directories.

    Raises:
        JobError: it could not be told whether to start over or to go on.
        CheckpointError: what is asked for is not there, not valid, or cannot be read.
    """
    if fresh or job.resume == "never":
        return _anew(job, chosen, fresh)
    own = _own_folder(job, chosen)
    if job.resume == "auto":
        return _auto(job, chosen, own, root)
    if isinstance(job.resume, int):
        folder = (
            own
            if own is not None and steps_in(own)
            else _newest_folder(root / job.name, job.resume)
        )
        if folder is None:
            raise CheckpointError(
                f"resume: no run in {root / job.name} has a step {job.resume}: see zrun ckpt ls"
            )
        source = ResumeSpec(folder=str(folder), step=job.resume)
    elif job.resume == "best":
        source = _best(job, own, root)
    else:
        source = _at(Path(job.resume).expanduser().absolute())
    return _branch(job, chosen, own, source)


def choose_restart(job: JobConfig, run_dir: Path, origin: ResumeSpec | None) -> StartPoint:
    """Decide how a run that failed goes on, in its own directory: from what it has saved, or as it began.

    Args:
        origin: what its first attempt went on from; None: from nothing.

    Raises:
        CheckpointError: what it has saved, or `origin`, is not valid, or cannot be read.
    """
    own = checkpoint_folder(job, run_dir.absolute())
    if steps_in(own):
        return _from(job, ResumeSpec(folder=str(own)), run_dir, EarlierRun.CONTINUE)
    if origin is not None:
        return _from(job, origin, run_dir, EarlierRun.START_OVER)
    return StartPoint(
        run_dir,
        earlier=EarlierRun.START_OVER,
        note="resume: the earlier run has saved nothing, so it starts over",
    )


def choose_under_lock(decide: Callable[[], StartPoint]) -> tuple[StartPoint, RunLock | None]:
    """What `decide` comes to while no other launcher has the directory of the earlier run that it is about.

    Returns:
        It, and the lock on that directory; None where nothing of an earlier run is to be touched.

    Raises:
        JobError: another launcher has the directory.
    """
    while True:
        beginning = decide()
        if (
            beginning.run_dir is None
            or beginning.complete
            or beginning.earlier is EarlierRun.REFUSE
        ):
            return beginning, None
        lock = lock_run(beginning.run_dir.absolute())
        try:
            if decide() == beginning:
                return beginning, lock
        except BaseException:
            lock.close()
            raise
        lock.close()  # it has just ended, and left something else behind


def _anew(job: JobConfig, chosen: Path | None, fresh: bool) -> StartPoint:
    if (
        fresh and chosen is not None and is_run(chosen)
    ):  # without --fresh, whoever claims it says why not
        note = f"starts over: the earlier run moves to {chosen}/attempts"
        return StartPoint(
            chosen, earlier=EarlierRun.START_OVER, aside=_given_folder(job), note=note
        )
    folder = _given_folder(job)
    if folder is not None and (steps := steps_in(folder)):
        if not fresh:
            raise JobError(
                f"checkpoint.dir: {folder} holds step {steps[-1]}: go on with --resume auto, start over with --fresh, "
                "or name another folder"
            )
        return StartPoint(
            chosen, aside=folder, note=f"starts over: the checkpoints in {folder} are set aside"
        )
    return StartPoint(chosen)


def _auto(job: JobConfig, chosen: Path | None, own: Path | None, root: Path) -> StartPoint:
    folder = own if own is not None else _newest_folder(root / job.name)
    if folder is None or not steps_in(folder):
        if chosen is not None and is_run(chosen):
            note = "resume: the earlier run has saved nothing, so it starts over"
            return StartPoint(chosen, earlier=EarlierRun.START_OVER, note=note)
        return StartPoint(
            chosen,
            note=f"resume: no checkpoint in {folder or root / job.name}: starts from the beginning",
        )
    run_dir = chosen if own is not None else folder.parent
    earlier = EarlierRun.CONTINUE if run_dir is not None and is_run(run_dir) else EarlierRun.REFUSE
    return _from(job, ResumeSpec(folder=str(folder)), run_dir, earlier)


def _best(job: JobConfig, own: Path | None, root: Path) -> ResumeSpec:
    """The best step of the user's own folder, or of the newest run that has saved."""
    from zrun_core.checkpoint.folder import CheckpointFolder

    folder = own if own is not None else _newest_folder(root / job.name)
    if folder is None:
        raise CheckpointError(f"resume: no run in {root / job.name} has saved anything")
    step, problem = CheckpointFolder(folder).best()
    if step is None:
        why = problem or "checkpoint.best keeps one"
        raise CheckpointError(f"resume: {folder} has no best step: {why}")
    return ResumeSpec(folder=str(folder), step=step)


def _branch(
    job: JobConfig, chosen: Path | None, own: Path | None, source: ResumeSpec
) -> StartPoint:
    """Go on from a step that the user names."""
    is_own = own is not None and own.resolve() == Path(source.folder).resolve()
    earlier = EarlierRun.REFUSE
    if chosen is not None and is_run(chosen):
        if not is_own:
            raise JobError(
                f"run directory {chosen} holds an earlier run: choose another with --run-dir"
            )
        earlier = EarlierRun.CONTINUE
    if (
        is_own
        and source.step is not None
        and (newer := [s for s in steps_in(Path(source.folder)) if s > source.step])
    ):
        raise JobError(
            f"resume: {source.folder} holds step {newer[-1]} too, which step {source.step} would lead to again: choose "
            "another --run-dir or checkpoint.dir for what comes now"
        )
    if not is_own and own is not None and (steps := steps_in(own)):
        raise JobError(
            f"checkpoint.dir: {own} holds step {steps[-1]} of another run: name another folder"
        )
    return _from(job, source, chosen, earlier)


def _from(
    job: JobConfig, source: ResumeSpec, run_dir: Path | None, earlier: EarlierRun
) -> StartPoint:
    from zrun_core.checkpoint.folder import CheckpointFolder
    from zrun_core.checkpoint.verify import verify

    found = [
        each
        for each in CheckpointFolder(Path(source.folder)).scan()
        if source.step in (None, each.step)
    ]
    newest = next((each for each in found if each.manifest is not None), None)
    if newest is None or newest.manifest is None:
        what = f"step {source.step}" if source.step is not None else "a valid checkpoint"
        reasons = "".join(f"\n  step {each.step}: {each.problem}" for each in found)
        raise CheckpointError(
            f"{source.folder} does not hold {what}{reasons}\n"
            "name another with --resume PATH or --resume STEP, or start over with --fresh"
        )
    ended = newest.manifest.progress.get("ended") if source.step is None else None
    if (ended or _is_complete(newest.manifest, job)) and not verify(newest.path, newest.manifest):
        note = f"already complete: {newest.path}"
        if ended:
            how = f"to train on, name the step: --resume {newest.step}"
            note += f" (it ended early: {ended}); {how}"
        return StartPoint(run_dir, note=note, complete=True)
    note = f"resume: goes on after step {newest.step} of {source.folder}"
    return StartPoint(run_dir, source, earlier, note=note)


def _is_complete(manifest: Manifest, job: JobConfig) -> bool:
    """Whether the run that saved had come to the end of `job`."""
    progress = manifest.progress
    steps, tokens, cursor = (progress.get(key) or 0 for key in ("steps", "tokens", "cursor"))
    if job.steps is not None:
        return bool(steps >= job.steps)
    if job.tokens is not None:
        return bool(tokens >= job.tokens)
    samples = progress.get("dataset_samples")
    return bool(samples and job.epochs is not None and cursor >= samples * job.epochs)


def _given_folder(job: JobConfig) -> Path | None:
    """`checkpoint.dir`."""
    has_own = job.checkpoint is not None and job.checkpoint.dir is not None
    return checkpoint_folder(job, Path()) if has_own else None


def _own_folder(job: JobConfig, chosen: Path | None) -> Path | None:
    """The folder that the user says checkpoints lie in; None: that of whichever run it will be."""
    if (given := _given_folder(job)) is not None:
        return given
    return checkpoint_folder(job, chosen.absolute()) if chosen is not None else None


def _newest_folder(runs: Path, step: int | None = None) -> Path | None:
    """The checkpoints of the newest run below `runs` that has any, or has `step`. Run ids sort by time."""
    try:
        names = sorted(os.listdir(runs), reverse=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{runs} cannot be read: {error.strerror}") from None
    for name in filter(lambda name: is_run(runs / name), names):
        steps = steps_in(folder := (runs / name / "checkpoints").absolute())
        if steps if step is None else step in steps:
            return folder
    return None


def _at(path: Path) -> ResumeSpec:
    """A step, a folder of steps, or a run directory."""
    if (step := step_of(path.name)) is not None:
        return ResumeSpec(folder=str(path.parent), step=step)
    for folder in () if os.path.isfile(path) else (path, path / "checkpoints"):
        if steps_in(folder):
            return ResumeSpec(folder=str(folder))
    choice = "a step-... folder, a folder of them, or a run directory"
    meant = "; did you mean auto?" if get_close_matches(path.name, ["auto"]) else ""
    raise CheckpointError(f"resume: {path} is no checkpoint: name {choice}{meant}")
