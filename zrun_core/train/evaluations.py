"""Schedule of a run's evaluations, and what follows: the best step, early stop, `hooks.on_eval`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zrun_core.checkpoint.best import EarlyStop
from zrun_core.checkpoint.checkpointer import Checkpointer
from zrun_core.spine.events import Emitter
from zrun_core.spine.sections.evaluation import EvalConfig
from zrun_core.telemetry.recorder import Recorder
from zrun_core.train.ending import Ending, EndRequests
from zrun_core.train.evaluator import Evaluator, broadcast_buffers
from zrun_core.train.rank_phase import RankPhase
from zrun_core.train.user_hooks import Hooks
from zrun_core.zero.sharded_model import ShardedModel


class Evaluations:
    """The evaluations of a run. All ranks call each method at the same place.

    Attributes:
        is_owed: a signal cut the last one off; the run makes it first when it goes on.
    """

    def __init__(
        self,
        config: EvalConfig | None,
        sharded: ShardedModel,
        evaluator: Evaluator | None,
        recorder: Recorder,
        checkpointer: Checkpointer | None,
        ending: EndRequests,
        hooks: Hooks,
        phase: RankPhase,
        emitter: Emitter,
    ) -> None:
        """
        Args:
            config: `eval` of the job; None: nothing is evaluated.
            checkpointer: told of it too, for the best step; None: nothing is saved.
        """
        self.is_owed = False
        self._config = config
        self._sharded = sharded
        self._evaluator = evaluator
        self._recorder = recorder
        self._checkpointer = checkpointer
        self._ending = ending
        self._hooks = hooks
        self._phase = phase
        self._emitter = emitter
        self._early_stop: EarlyStop | None = None
        if config is not None and config.stop is not None:
            self._early_stop = EarlyStop(config.stop)

    def is_due_first(self, *, is_resumed: bool) -> bool:
        """Return whether to evaluate before the first step of this process."""
        if self._config is None:
            return False
        return self.is_owed if is_resumed else self._config.first

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after `step`."""
        every = None if self._config is None else self._config.every
        return every is not None and step % every == 0

    def is_due_at_end(self, step: int) -> bool:
        """Return whether to evaluate when the run ends with `step`: not if that was just done."""
        return self._config is not None and not self.is_due(step)

    def run(self) -> None:
        """Evaluate the held-out data, and call `hooks.on_eval`; an evaluation cut off is owed.

        Raises:
            UserCodeError: the user's model, loss, metrics, data or hook raised.
            JobError: the job names a metric that the evaluation does not have.
        """
        assert self._evaluator is not None
        self._phase.enter("evaluation")
        found = None
        if not self._ending.must_stop:
            broadcast_buffers(self._sharded)
            found = self._evaluator.run()
        self.is_owed = found is None
        if found is None:
            self._ending.must_stop = True
            return
        step = self._recorder.progress.steps
        self._recorder.evaluation(found)
        if self._checkpointer is not None and step:
            self._checkpointer.offer(step, found.values)
        if self._early_stop is not None:
            why = self._early_stop.see(step, found.values)
            if why is not None:
                self._ending.request(Ending("early stop", why))
        if "on_eval" in self._hooks:
            self._hooks.call("on_eval", loss=found.loss)
            self._ending.hear_hooks()  # no step's message follows soon

    def early_stop_json(self) -> dict[str, Any] | None:
        """Return what the early stop remembers, for a manifest; None without one."""
        return None if self._early_stop is None else self._early_stop.to_json()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from the `progress` of a manifest."""
        self.is_owed = bool(state.get("owes_evaluation"))  # older checkpoints do not say
        found = state.get("early_stop")
        if found is None or self._early_stop is None:
            return
        is_same = self._early_stop.resume(found, had_ended=state.get("ended") is not None)
        if not is_same and self._recorder.is_main:
            self._emitter.emit(
                "warning",
                message="eval.stop names another metric or mode than before: its count starts over",
            )
