"""State of a run between two steps apart from its tensors: saved in a checkpoint, and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.resume import Resumed
from zrun_core.data.loader import BatchLoader
from zrun_core.data.marks import differences
from zrun_core.data.order import shifts
from zrun_core.errors import CheckpointError
from zrun_core.hardware import accelerator
from zrun_core.spine.config import JobConfig
from zrun_core.spine.events import Emitter
from zrun_core.telemetry.progress import Progress
from zrun_core.telemetry.recorder import Recorder
from zrun_core.train.ending import EndRequests
from zrun_core.train.evaluations import Evaluations
from zrun_core.zero.unit.precision import LossScaler


class SavedState:
    """Counters, the place in the data, the loss scale, and what evaluations have left.

    It means something between two steps only, when the totals of the last step were read: in the
    middle of a step samples are read and random numbers drawn that no update has used, gradients
    are half reduced, and a save would repeat or lose them.

    Attributes:
        last_saved: steps and updates of the run when it was saved last; -1 before.
        is_resumed: the run goes on from a checkpoint.
    """

    def __init__(
        self,
        job: JobConfig,
        recorder: Recorder,
        loader: BatchLoader,
        scaler: LossScaler,
        evaluations: Evaluations,
        ending: EndRequests,
        emitter: Emitter,
    ) -> None:
        self.last_saved = (-1, -1)
        self.is_resumed = False
        self._job = job
        self._recorder = recorder
        self._progress = recorder.progress
        self._loader = loader
        self._scaler = scaler
        self._evaluations = evaluations
        self._ending = ending
        self._emitter = emitter

    def shared_numbers(self, lr: float) -> dict[str, float]:
        """Return the numbers that must be equal on all ranks, by name."""
        progress = self._progress
        return {
            "step": progress.steps,
            "updates": progress.updates,
            "skips": progress.skips,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "lr": lr,
            "loss scale": float(accelerator.fetch(self._scaler.scale)),
            "seed": self._job.seed,
            **self._loader.shared(),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the `progress` of a manifest. The state counts as saved from here on."""
        self.last_saved = (self._progress.steps, self._progress.updates)
        early = self._ending.early
        return {
            **self._progress.to_json(),
            "cursor": self._loader.cursor,
            "dataset_samples": self._loader.num_samples,
            "marks": {str(number): mark for number, mark in self._loader.marks.items()},
            "scaler": self._scaler.state_dict() if self._scaler.enabled else None,
            "owes_evaluation": self._evaluations.is_owed,
            "ended": None if early is None else str(early),
            "early_stop": self._evaluations.early_stop_json(),
        }

    def resume(self, resumed: Resumed) -> None:
        """Go on where the run was. Its tensors are loaded already; its random streams are not.

        Raises:
            CheckpointError: the manifest lacks what a run needs, or its position in the data means
                nothing in the data of this run.
        """
        state = resumed.manifest.progress
        try:
            self._recorder.resume(Progress.from_json(state))
            cursor = state["cursor"]
            length = state["dataset_samples"]
            scaler = state["scaler"]
        except KeyError as error:
            raise CheckpointError(
                f"{resumed.path} is not of a training run: no {error} in its progress"
            ) from None
        # A user who goes on after a numeric stop has changed something: skips are allowed anew.
        self._progress.skips_in_a_row = 0
        self._progress.unrecoverable_skips = 0
        self.last_saved = (self._progress.steps, self._progress.updates)
        self._evaluations.resume(state)
        self._check_position(resumed, cursor, length)
        if self._recorder.is_main:
            self._warn_of_other_data(resumed, cursor)
        if scaler is not None and self._scaler.enabled:
            self._scaler.load_state_dict(scaler)
        self._loader.seek(cursor)
        self.is_resumed = True

    def _check_position(self, resumed: Resumed, cursor: int, before: int | None) -> None:
        """Refuse a position that means other samples now.

        `cursor` is its position in the stream of samples; `before` is how many samples the dataset
        had when it was saved, None if it had no length.
        """
        now = self._loader.num_samples
        if not shifts(cursor, before, now, shuffle=self._job.data.shuffle):
            return
        raise CheckpointError(
            f"{resumed.path} was saved at sample {cursor} of a dataset with {_length(before)}, "
            f"which has {_length(now)} now: some samples would be skipped, others "
            "repeated; continue with the same data, or start on the new data from the weights "
            f"alone, with init_from: {resumed.path}"
        )

    def _warn_of_other_data(self, resumed: Resumed, cursor: int) -> None:
        changes = self._changes_of_data(resumed.manifest)
        if not changes:
            return
        message = (
            f"the data is not that of {resumed.path}: {'; '.join(changes)}; the run goes on at "
            f"sample {cursor} of the data as it is now: some samples may be repeated, others "
            "skipped"
        )
        self._emitter.emit("warning", message=message)

    def _changes_of_data(self, saved: Manifest) -> list[str]:
        """Return the known differences of the data and its order. On the main rank."""
        found = []
        before = saved.progress["dataset_samples"]
        now = self._loader.num_samples
        if before is not None and now is not None and before != now:
            found.append(f"it had {before} samples and has {now}")
        found += self._changes_of_samples(saved.progress.get("marks", {}))

        shuffle = self._job.data.shuffle
        data: Mapping[str, Any] = saved.job.get("data", {})
        was_shuffled = data.get("shuffle", shuffle)
        seed = saved.job.get("seed", self._job.seed)
        if was_shuffled != shuffle:
            was = str(was_shuffled).lower()
            found.append(f"data.shuffle was {was} and is {str(shuffle).lower()}")
        elif was_shuffled and seed != self._job.seed:
            found.append(f"seed, which the order follows, was {seed} and is {self._job.seed}")
        return found

    def _changes_of_samples(self, saved: Mapping[str, str]) -> list[str]:
        """Compare digests of a few samples with those that were saved, by number."""
        marks = {int(number): mark for number, mark in saved.items()}
        self._loader.mark(marks)
        difference = differences(marks, self._loader.marks)
        return [difference] if difference else []


def _length(num_samples: int | None) -> str:
    return "no length" if num_samples is None else f"{num_samples} samples"
