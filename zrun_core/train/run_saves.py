"""Schedule of a run's saves, and `hooks.on_save`.

Every save is of the state between two steps: the update of the last step is made on all ranks, its
totals are read and counted, and nothing of the next one has begun, neither its samples nor its
random numbers nor a gradient. So `RunSaves` has the last step's totals read first, wherever it is
called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zrun_core.checkpoint.checkpointer import Checkpointer, SaveConsensus
from zrun_core.errors import PeerError, SaveError, ZrunError
from zrun_core.telemetry.metrics import StepClock
from zrun_core.telemetry.progress import Progress
from zrun_core.telemetry.step_totals import StepTotals
from zrun_core.train.ending import EndRequests
from zrun_core.train.rank_phase import RankPhase
from zrun_core.train.user_hooks import Hooks
from zrun_core.zero.sharded_model import ShardedModel


class RunSaves:
    """The saves of a run. Every method does nothing in a run that does not save.

    All ranks call each method at the same place between two steps, but for `contribution` and
    `update`.
    """

    def __init__(
        self,
        checkpointer: Checkpointer | None,
        sharded: ShardedModel,
        progress: Progress,
        read_totals: Callable[[], None],
        state: Callable[[], dict[str, Any]],
        ending: EndRequests,
        hooks: Hooks,
        phase: RankPhase,
        clock: StepClock,
    ) -> None:
        """
        Args:
            checkpointer: None: nothing is saved.
            read_totals: reads the totals of the last step, if they were not read yet.
        """
        self._checkpointer = checkpointer
        self._sharded = sharded
        self._progress = progress
        self._read_totals = read_totals
        self._state = state
        self._ending = ending
        self._hooks = hooks
        self._phase = phase
        self._clock = clock
        self._committed: list[int] = []  # steps of which hooks.on_save was not told yet
        if checkpointer is not None:
            checkpointer.on_commit = self._committed.append

    @property
    def under_way(self) -> int | None:
        """The step that is being saved beside training; the same on every rank."""
        return None if self._checkpointer is None else self._checkpointer.under_way

    # In the middle of a step

    def contribution(self, asked: bool) -> SaveConsensus:
        """Return what this rank adds to the step's message.

        Args:
            asked: a signal has asked this rank for a save since the step before.
        """
        if self._checkpointer is None:
            return SaveConsensus()
        return self._checkpointer.contribution(asked)

    def update(self, totals: StepTotals) -> None:
        """Learn from a step's totals how far the other ranks are."""
        if self._checkpointer is not None:
            self._checkpointer.update(totals.consensus)

    def keep_older(self, *, keep: bool) -> None:
        """Remove no older steps while `keep`: the run may have to go on from one of them."""
        if self._checkpointer is not None:
            self._checkpointer.prunes = not keep

    # Between two steps

    def save(self, reason: str) -> None:
        """Save now, unless this step is saved already; it is committed on return.

        Raises:
            SaveError, PeerError: as `Checkpointer.save`.
        """
        if self._checkpointer is None:
            return
        self._phase.enter("save")
        self._read_totals()
        self._checkpointer.save(self._progress.steps, self._state, reason)
        self._clock.restart()

    def after_step(self) -> None:
        """Move the save under way on, and begin the one that is due.

        Raises:
            SaveError, PeerError: as `Checkpointer.after_step`.
        """
        if self._checkpointer is None or not self._checkpointer.needs_turn(self._progress.steps):
            return
        self._phase.enter("save")
        self._read_totals()
        if self._ending.must_stop:  # then it is saved on leaving
            return
        self._ending.agree()
        self._checkpointer.after_step(self._progress.steps, self._state)
        self.tell_hooks()
        self._clock.restart()

    def save_if_best(self) -> None:
        """Save a step that was evaluated outside of the loop, or mark it if it is saved already."""
        if self._checkpointer is not None and self._checkpointer.has_better:
            self.save("best")
            self.tell_hooks()

    def tell_hooks(self) -> None:
        """Call `hooks.on_save` for each step that was committed since the last call."""
        if self._checkpointer is None:
            return
        committed = list(self._committed)
        self._committed.clear()
        for step in committed:
            path = self._checkpointer.folder.step_path(step)
            self._hooks.call("on_save", step=step, saved=path)

    # At the end

    def finish(self) -> None:
        """Commit the save under way, and save the last step if the job wants that.

        Raises:
            SaveError, PeerError: as `Checkpointer.save`.
        """
        if self._checkpointer is None:
            return
        self._phase.enter("save")
        self._checkpointer.finish()
        if self._checkpointer.config.final:
            self.save("end")
        self.tell_hooks()

    def finish_under_way(self) -> None:
        """Commit the save under way: its copy is of an earlier state, and saving goes on alone.

        Raises:
            SaveError, PeerError: as `Checkpointer.finish`.
        """
        if self._checkpointer is not None:
            self._phase.enter("save")
            self._checkpointer.finish()

    def wait_for_pruning(self) -> None:
        """Wait until older steps are removed."""
        if self._checkpointer is not None:
            self._phase.enter("save")
            self._checkpointer.finish_pruning()

    def save_on_leaving(self, warn: Callable[[str], None]) -> bool:
        """Save because a signal asked for the end.

        Args:
            warn: called with why this rank could not save, where the job says to go on then.

        Returns:
            Whether the step is saved.

        Raises:
            SaveError, PeerError: it is not, and the job says to stop then.
        """
        if self._checkpointer is None:
            return False
        is_saved = True
        try:
            self.save("stopped")
        except (SaveError, PeerError) as error:
            if self._checkpointer.config.on_save_error == "stop":
                raise
            is_saved = False
            if isinstance(error, SaveError):
                warn(str(error))
        self.tell_hooks()
        return is_saved

    def save_last_good(self, last_saved: tuple[int, int]) -> str:
        """Save, if it is of use, before the run ends because of its numbers.

        Skipped steps changed nothing since the last good one. Older steps stay: from which of them
        the run can go on is not known yet.

        Args:
            last_saved: steps and updates of the run when it was saved last.

        Returns:
            What became of it, to go on a message with; "" where nothing is saved at all.
        """
        if self._checkpointer is None:
            return ""
        try:
            return self._save_last_good(self._checkpointer, last_saved)
        except ZrunError as error:
            return f"; and the last good parameters could not be saved: {error}"

    def _save_last_good(self, checkpointer: Checkpointer, last_saved: tuple[int, int]) -> str:
        checkpointer.prunes = False
        self._phase.enter("save")
        checkpointer.finish()
        step, updates = last_saved
        is_saved = step == checkpointer.last_step and updates == self._progress.updates
        broken = self._sharded.find_nonfinite_parameter()
        if broken is not None:
            name, kind = broken
            advice = "nothing more is saved"
            if is_saved:
                advice = f"step {step} is saved with it: resume from an earlier one"
            return f"; {name} is {kind} itself: {advice}, see zrun ckpt ls"
        if is_saved:
            return f"; the last good parameters are those of step {step}, which is saved"
        self.save("numeric")
        return f"; the last good parameters are saved as step {self._progress.steps}"
