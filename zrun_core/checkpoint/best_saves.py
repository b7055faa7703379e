"""The best evaluation so far, while saves begin, succeed and fail: `checkpoint.best`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zrun_core.checkpoint.best import Best, is_better, value_of
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.resume import Resumed
from zrun_core.errors import SaveError
from zrun_core.spine.sections.evaluation import BestConfig


class BestSaves:
    """The best evaluation, by how far its step is saved. The same on every rank.

    Attributes:
        candidate: the best one, if its step is not saved as that yet.
        newest: the best one of a step that is committed or under way.
    """

    def __init__(self) -> None:
        self.candidate: Best | None = None
        self.newest: Best | None = None
        self._committed: Best | None = None

    def offer(self, step: int, values: Mapping[str, float], goal: BestConfig) -> None:
        """Take in the evaluation after `step`.

        Args:
            step: optimizer steps made.
            values: of all metrics, by name.
            goal: the metric that counts, and whether lower or higher is better.

        Raises:
            JobError: the metric is not among `values`.
        """
        value = value_of("checkpoint.best.metric", goal.metric, values)
        if is_better(value, self.newest, goal.mode):
            self.candidate = Best(step, goal.metric, goal.mode, value)

    def begin_save(self) -> Best | None:
        """Make the candidate the newest: its step is being saved. Return it."""
        candidate = self.candidate
        self.candidate = None
        if candidate is not None:
            self.newest = candidate
        return candidate

    def commit(self) -> None:
        """Keep the newest: its step is committed."""
        self._committed = self.newest

    def revert(self) -> None:
        """Forget the newest: its step could not be saved."""
        self.newest = self._committed

    def restore(self, best: Best | None) -> None:
        """Go on from the best step of a run that is resumed."""
        self.newest = best
        self._committed = best


def find_best(
    folder: CheckpointFolder, goal: BestConfig, resumed: Resumed, warn: Callable[[str], object]
) -> Best | None:
    """Return the best step of a run that goes on in its own folder. For rank 0.

    The manifest of the step that it goes on from has it. The file `best` has it too, where that
    step was evaluated after it was saved; and the file is written anew where a process died before
    it was written.

    Args:
        resumed: the step that the run goes on from.
    """
    saved = resumed.manifest.progress.get("best")
    known = None if saved is None else Best(**saved)
    named = folder.best_so_far()
    if any(best is not None and not best.is_of(goal) for best in (known, named)):
        warn(
            "checkpoint.best names another metric or mode than before: the best step so far no "
            "longer counts"
        )
        return None
    if known is not None and not folder.step_path(known.step).is_dir():
        warn(
            f"step {known.step}, the best so far, is gone: the next evaluated step is the best "
            "again"
        )
        known = None
    is_of_before = named is not None and named.step <= resumed.manifest.step
    if named is not None and is_of_before and is_better(named.value, known, goal.mode):
        known = named
    if known is not None and known != named:
        point_best(folder, known, warn)
    return known


def point_best(folder: CheckpointFolder, best: Best, warn: Callable[[str], object]) -> None:
    """Write the file `best`, or warn that it cannot be written. For rank 0."""
    try:
        folder.point_best(best)
    except SaveError as error:
        warn(str(error))
