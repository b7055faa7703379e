"""Finding the steps that a person means: by a run, a folder of checkpoints, or one step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from zrun.runs.listing import checkpoints_of, find_run
from zrun.runs.rundir import is_run
from zrun_core.checkpoint.names import step_of
from zrun_core.errors import CheckpointError, JobError

if TYPE_CHECKING:
    from zrun_core.checkpoint.folder import CheckpointFolder, SavedStep

_SHOWN = 3


@dataclass(frozen=True)
class StepLocation:
    """Steps, newest first, and the folder that they are in."""

    folder: CheckpointFolder
    steps: Sequence[SavedStep]
    is_single: bool  # the path was that of one step
    # Earlier ones of the run, newest first.
    attempts: Mapping[int, StepLocation] = field(default_factory=dict)

    def newest_valid(self) -> SavedStep:
        """Return the newest step that counts.

        Raises:
            CheckpointError: there is none; the message says what is wrong with those that are
                there.
        """
        for found in self.steps:
            if found.problem is None:
                return found
        problems = "".join(f"\n  {found.problem}" for found in self.steps[:_SHOWN])
        raise CheckpointError(
            f"no valid checkpoint in {self.folder.path}{problems}{self._elsewhere()}"
        )

    def step(self, which: str | int | None) -> SavedStep:
        """Return the step `which`, a number or "best"; of None, the newest that counts.

        Raises:
            JobError: it is neither.
            CheckpointError: it is not there, or does not count.
        """
        if which is None:
            return self.newest_valid()
        number = self.best() if which == "best" else None
        if number is None:
            if not str(which).isdecimal():
                raise JobError(f"--step {which}: write the number of a step, or best")
            number = int(which)
        for found in self.steps:
            if found.step == number:
                if found.problem is not None:
                    raise CheckpointError(found.problem)
                return found
        there = ", ".join(str(found.step) for found in self.steps[:_SHOWN]) or "none"
        raise CheckpointError(
            f"{self.folder.path} has no step {number}; it has {there}{self._elsewhere()}"
        )

    def best(self) -> int:
        """Return the number of the best step.

        Raises:
            CheckpointError: none is known.
        """
        number, problem = self.folder.best()
        if number is None:
            why = problem or "checkpoint.best keeps one"
            raise CheckpointError(f"{self.folder.path} has no best step: {why}{self._elsewhere()}")
        return number

    def _elsewhere(self) -> str:
        for newest in self.attempts.values():
            return f"\n  an earlier attempt has some: {newest.folder.path}"
        return ""


def locate(text: str) -> StepLocation:
    """Return the steps that `text` leads to.

    There is at least one, or one that was set aside, or one of an earlier attempt.

    Args:
        text: a path, or else a run as `zrun logs` takes it: its id or the beginning of that, or a
            job.

    Raises:
        JobError: there is no such folder, and no such run.
        CheckpointError: it holds no checkpoints.
    """
    from zrun_core.checkpoint.folder import CheckpointFolder

    path = _path_of(text)
    if step_of(path.name) is not None:
        folder = CheckpointFolder(path.parent)
        steps = [found for found in folder.scan() if found.path == path]
        if steps:
            return StepLocation(folder, steps, is_single=True)
    attempts = _attempts(path)
    for candidate in (path / "checkpoints", path, checkpoints_of(path)):
        if not candidate.is_dir():
            continue
        folder = CheckpointFolder(candidate)
        steps = folder.scan()
        if steps or folder.aside():
            return StepLocation(folder, steps, is_single=False, attempts=attempts)
    if attempts:
        folder = CheckpointFolder(path / "checkpoints")
        return StepLocation(folder, [], is_single=False, attempts=attempts)
    raise CheckpointError(f"{path} holds no checkpoints{_runs_with_some(path)}")


def _path_of(text: str) -> Path:
    path = Path(os.path.expanduser(text))  # unlike Path's, it leaves a user who does not exist
    if path.is_dir():
        return path.absolute()
    if "/" in text:
        raise JobError(
            f"{text}: no such folder; give a run directory, its checkpoints folder, "
            "or one step in it"
        )
    return find_run(text)


def _attempts(run: Path) -> dict[int, StepLocation]:
    """Return the steps of earlier attempts of a run that was started over, newest first."""
    from zrun_core.checkpoint.folder import CheckpointFolder

    names = [each.name for each in (run / "attempts").glob("*") if each.name.isdecimal()]
    found = {}
    for number in sorted(map(int, names), reverse=True):
        folder = CheckpointFolder(run / "attempts" / str(number) / "checkpoints")
        steps = folder.scan()
        if steps:
            found[number] = StepLocation(folder, steps, is_single=False)
    return found


def _runs_with_some(path: Path) -> str:
    """Name a run that has checkpoints: below a folder, else beside a run that has none."""
    below = sorted(each.parents[1] for each in path.glob("*/checkpoints/*/"))
    if below:
        return f"; name one of its runs, such as {below[-1]}"
    beside = sorted(
        each.parents[1] for each in path.parent.glob("*/checkpoints/*/") if is_run(each.parents[1])
    )
    return f"; another run of its job has some: {beside[-1]}" if beside else ""
