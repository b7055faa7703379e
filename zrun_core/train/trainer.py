"""The training loop: steps of micro-batches, evaluation, and the user's hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from zrun_core.checkpoint.best import EarlyStop
from zrun_core.checkpoint.checkpointer import Checkpointer, SaveConsensus
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.resume import Resumed
from zrun_core.data.batch import MicroBatch
from zrun_core.data.loader import BatchLoader
from zrun_core.data.marks import differences
from zrun_core.data.order import shifts
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.errors import (
    CheckpointError,
    DivergedError,
    ExitCode,
    JobError,
    NumericError,
    OutOfMemoryError,
    PeerError,
    SaveError,
    StoppedError,
    ZrunError,
)
from zrun_core.guards.numeric import NumericGuard
from zrun_core.guards.oom import MemoryGuard
from zrun_core.guards.replicas import ReplicaGuard
from zrun_core.optim.lr import Schedule
from zrun_core.pipeline.schedule import Action, ActionKind, no_pipeline
from zrun_core.spine.events import Emitter
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.spine.spec import RunSpec
from zrun_core.spine.stop_signals import StopSignals
from zrun_core.spine.tracebacks import add_location, raised_at
from zrun_core.telemetry.metrics import FlopCount, StepClock, StepPhase
from zrun_core.telemetry.peak_memory import PeakMemory
from zrun_core.telemetry.progress import Progress
from zrun_core.telemetry.recorder import IssuedStep, Recorder
from zrun_core.train.evaluator import Evaluator, HeldOut
from zrun_core.train.step_runner import StepRunner, modules_differ
from zrun_core.train.user_hooks import Hook, Hooks
from zrun_core.user_code.loss import LossFunction, LossKind, compute_loss
from zrun_core.user_code.user import user_code
from zrun_core.zero.micro_pass import MicroPass
from zrun_core.zero.sharded_model import ShardedModel


@dataclass(frozen=True)
class UserFunctions:
    """The user's functions, loaded. Hooks are named by their keys."""

    loss: LossFunction | None
    hooks: Mapping[str, Hook]
    held_out: HeldOut | None
    collate: Callable[[list[Any]], Any] | None


class Ending(NamedTuple):
    """Why a run ends: `reason` and `why` of the `end` event."""

    reason: str
    why: str | None = None

    def __str__(self) -> str:
        return self.reason if self.why is None else f"{self.reason}: {self.why}"


class _UnderWay(NamedTuple):
    """A micro-batch between its forward and its backward."""

    micro: MicroPass
    share: torch.Tensor  # of the loss, to be differentiated


@contextmanager
def _pointing_at_forward() -> Iterator[None]:
    """Say how to find the line of the user's code behind an error that names none."""
    try:
        yield
    except RuntimeError as error:
        if raised_at(error) is None:
            setting = "torch.autograd.set_detect_anomaly(True)"
            add_location(error, f": with {setting} in your file, the log shows the line of forward")
        raise


class Trainer:
    """Runs a job on one rank."""

    def __init__(
        self,
        spec: RunSpec,
        sharded: ShardedModel,
        loader: BatchLoader,
        parts: UserFunctions,
        schedule: Schedule,
        emitter: Emitter,
        board: FlightRecorder | None,
        stop: StopSignals,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.spec, self.job = spec, spec.job
        self.sharded, self.loader, self.parts = sharded, loader, parts
        self.schedule, self.emitter, self.board, self.stop = schedule, emitter, board, stop
        self.module, self.comm, self.world = sharded.module, sharded.comm, sharded.mesh.world
        self.device = self.comm.device
        self.phase = "start"
        self._issued: IssuedStep | None = None
        self._clock = StepClock(self.device)
        self._flops_per_sample: float | None = None
        self.checkpointer = checkpointer  # None: nothing is saved
        self.recorder = Recorder(spec, sharded, emitter, self._clock)
        self.progress = self.recorder.progress
        self.hooks = Hooks(parts.hooks, sharded, self.recorder, Path(spec.run_dir))
        self._early: Ending | None = None  # the run ends before the job says so
        self._must_end = False  # so says a hook of some rank
        self._committed: list[int] = []  # steps of which hooks.on_save has not heard
        if checkpointer is not None:
            checkpointer.on_commit = self._committed.append
        self.replicas = ReplicaGuard(sharded)
        self._evaluator: Evaluator | None = None
        if parts.held_out is not None:
            self._evaluator = Evaluator(spec, sharded, parts.held_out, board, self._asked_to_stop)
        stop_config = None if self.job.eval is None else self.job.eval.stop
        self._early_stop = None if stop_config is None else EarlyStop(stop_config)
        self._numeric = NumericGuard(self.job, sharded, emitter, is_main=self.is_main)
        self._memory = MemoryGuard(spec, sharded, emitter)
        self._own_losses: list[torch.Tensor] = []  # of the micro-batches of the last step
        self._own_step = range(0)  # its positions in the data
        self._is_resumed = False
        self._owes_evaluation = False  # a signal cut it off
        self._last_saved = -1, -1  # step and number of updates
        self._must_stop = self._has_told_stop = False
        self.steps = StepRunner(sharded)
        if "on_step" in parts.hooks:  # it is called between two steps
            self.steps.reads_late = False
        self._numeric_problem: str | None = None

    @property
    def phase(self) -> str:
        """What this rank does, in the words of the board."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        if self.board is not None:
            self.board.phase(phase)

    @property
    def is_main(self) -> bool:
        return self.world.index == 0

    def run(self) -> None:
        """Train to the end of the job.

        Raises:
            UserCodeError: the user's model, loss, data or hooks raised.
            NumericError: too many steps in a row were not finite.
            DivergedError: ranks hold different values of what must be equal.
            StoppedError: a signal asked for the end.
            JobError: the job counts tokens, and the data has none; or it names a metric that no
                evaluation has.
            SaveError: this rank could not save.
            PeerError: another rank could not, or has ended.
        """
        try:
            self._run()
        except (
            DivergedError
        ):  # on all ranks; but what is being saved is of a state that was still the same
            if self.checkpointer is not None:
                self.phase = "save"
                with suppress(SaveError, PeerError):
                    self.checkpointer.finish()
            raise

    def _run(self) -> None:
        if not self.module.training:
            self.module.train()
        if not self._is_resumed:  # its buffers are those of the run that it goes on with
            self._broadcast_buffers()
        self._call_hook("on_start")
        evaluation = self.job.eval
        comes_first = self._owes_evaluation if self._is_resumed else evaluation and evaluation.first
        if evaluation is not None and comes_first:
            self.evaluate()
            self._save_if_best()
        self._clock.restart()
        ending = self._train()
        self._resolve()
        self.recorder.warn_once()
        self.recorder.warn_of_growth()
        if ending.reason == "stopped":
            self._leave()
        if self.checkpointer is not None:
            self.phase = "save"
            self.checkpointer.finish()
            if self.checkpointer.config.final:
                self.save("end")
            self._tell_saves()
        if self.job.eval is not None:
            every = self.job.eval.every
            if every is None or self.progress.steps % every:
                self.evaluate()
                self._save_if_best()
            if self._owes_evaluation:
                self._leave()
        if self.checkpointer is not None:
            self.phase = "save"
            self.checkpointer.finish_pruning()
        self._call_hook("on_end", reason=ending.reason)
        self.recorder.end(*ending)
        self.phase = "end"

    def _train(self) -> Ending:
        evaluation = self.job.eval
        while self.job.steps is None or self.progress.steps < self.job.steps:
            if self._must_stop:
                return Ending("stopped")
            self._hear_who_ends()
            if self._early is not None:
                return self._early
            with self._watched():
                self.phase = "data"
                with self._clock.during(StepPhase.DATA):
                    micro_batches = self.loader.next_step()
                if micro_batches is None:
                    return Ending("epochs" if self.job.epochs is not None else "data ended")
                self.step(micro_batches)
            if (
                evaluation is not None
                and evaluation.every is not None
                and self.progress.steps % evaluation.every == 0
            ):
                self._resolve()
                self.evaluate()
                self._clock.restart()
            self._save_if_due()
            if self.job.tokens is not None:
                self._resolve()
                if not self.progress.tokens:
                    raise JobError(
                        "tokens: the batches hold none (no input_ids, no integer tensor of 2 or more dims): "
                        "write steps or epochs"
                    )
                if self.progress.tokens >= self.job.tokens:
                    return Ending("tokens")
        return Ending("steps")

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Measure the memory of the second step of this process: all that lasts is there by then."""
        if self.recorder.num_steps != 1:
            yield
            return
        with PeakMemory(self.device) as water:
            yield
        self.recorder.peak(water)

    # Saving and going on

    def save(self, reason: str) -> None:
        """Save now, unless this step is saved already. Between two steps, on all ranks; it is there on return.

        Raises:
            SaveError, PeerError: as `Checkpointer.save`.
        """
        if self.checkpointer is None:
            return
        self.phase = "save"
        self._resolve()
        self.checkpointer.save(self.progress.steps, self._state, reason)
        self._clock.restart()

    def _save_if_due(self) -> None:
        if self.checkpointer is None or not self.checkpointer.needs_turn(self.progress.steps):
            return
        self.phase = "save"
        self._resolve()
        if self._must_stop:  # then it is saved on leaving
            return
        self._hear_who_ends()
        self.checkpointer.after_step(self.progress.steps, self._state)
        self._tell_saves()
        self._clock.restart()

    def _save_if_best(self) -> None:
        """Save what was evaluated outside of the loop, or mark it where it is saved already."""
        if self.checkpointer is not None and self.checkpointer.has_better:
            self.save("best")
            self._tell_saves()

    def _tell_saves(self) -> None:
        """Call `hooks.on_save` for each step that was committed since this was called last."""
        assert self.checkpointer is not None
        committed = list(self._committed)
        self._committed.clear()
        for step in committed:
            folder = self.checkpointer.folder
            self._call_hook("on_save", step=step, saved=folder.step_path(step))

    def _state(self) -> dict[str, Any]:
        """What of a save is not a tensor: counters, the place in the data, the loss scale.

        Raises:
            DivergedError: the ranks do not hold the same, so nothing is saved.
        """
        if self.job.guards.replica_every:
            self.check_replicas(self.job.optim.lr * self.schedule(self.progress.updates))
        self._last_saved = self.progress.steps, self.progress.updates
        return {
            **self.progress.to_json(),
            "cursor": self.loader.cursor,
            "dataset_samples": self.loader.num_samples,
            "marks": {str(number): mark for number, mark in self.loader.marks.items()},
            "scaler": self.sharded.scaler.state_dict() if self.sharded.scaler.enabled else None,
            "owes_evaluation": self._owes_evaluation,
            "ended": None if self._early is None else str(self._early),
            "early_stop": None if self._early_stop is None else self._early_stop.to_json(),
        }

    def resume(self, resumed: Resumed) -> None:
        """Go on where the run was whose tensors are loaded already, but for its random streams.

        Raises:
            CheckpointError: the manifest lacks what a run needs, or the position in the data means nothing any more.
        """
        state = resumed.manifest.progress
        try:
            self.recorder.resume(Progress.from_json(state))
            cursor, before, scaler = state["cursor"], state["dataset_samples"], state["scaler"]
        except KeyError as error:
            raise CheckpointError(
                f"{resumed.path} is not of a training run: no {error} in its progress"
            ) from None
        # Whoever goes on after a numeric stop has changed something: it has as many steps as at first.
        self.progress.skips_in_a_row = self.progress.unrecoverable_skips = 0
        self._last_saved = self.progress.steps, self.progress.updates
        self._owes_evaluation = bool(state.get("owes_evaluation"))  # older checkpoints do not say
        self._resume_early_stop(state)
        now = self.loader.num_samples
        if shifts(cursor, before, now, shuffle=self.job.data.shuffle):
            was, has = (
                f"{length} samples" if length is not None else "no length"
                for length in (before, now)
            )
            raise CheckpointError(
                f"{resumed.path} was saved at sample {cursor} of a dataset with {was}, which has {has} now: some would "
                "be skipped and others read again; go on with the same data, or take only the weights to the new data, "
                f"with init_from: {resumed.path}"
            )
        if self.recorder.is_main and (changed := self._changes_of_data(resumed.manifest)):
            self.emitter.emit(
                "warning",
                message=f"the data is not that of {resumed.path}: {'; '.join(changed)}; the run goes on at sample "
                f"{cursor} of what there is now, so some samples may be read twice and others never",
            )
        if scaler is not None and self.sharded.scaler.enabled:
            self.sharded.scaler.load_state_dict(scaler)
        self.loader.seek(cursor)
        self._is_resumed = True

    def _changes_of_data(self, saved: Manifest) -> list[str]:
        """Return what of the data and its order is not what it was, as far as that is known; on the main rank."""
        found = []
        before, now = saved.progress["dataset_samples"], self.loader.num_samples
        if None not in (before, now) and before != now:
            found.append(f"it had {before} samples and has {now}")
        marks = {int(number): mark for number, mark in saved.progress.get("marks", {}).items()}
        self.loader.mark(marks)
        if different := differences(marks, self.loader.marks):
            found.append(different)
        data, seed = saved.job.get("data", {}), saved.job.get("seed", self.job.seed)
        shuffled = data.get("shuffle", self.job.data.shuffle)
        if shuffled != self.job.data.shuffle:
            found.append(
                f"data.shuffle was {str(shuffled).lower()} and is {str(self.job.data.shuffle).lower()}"
            )
        elif shuffled and seed != self.job.seed:
            found.append(f"seed, which the order follows, was {seed} and is {self.job.seed}")
        return found

    def _resume_early_stop(self, state: dict[str, Any]) -> None:
        found = state.get("early_stop")
        if found is None or self._early_stop is None:
            return
        is_same = self._early_stop.resume(found, had_ended=state.get("ended") is not None)
        if not is_same and self.is_main:
            self.emitter.emit(
                "warning",
                message="eval.stop names another metric or mode than before: it begins anew",
            )

    # One step

    def step(self, micro_batches: list[MicroBatch]) -> None:
        """One optimizer step: forward and backward of each micro-batch, then the update."""
        self.progress.steps += 1
        self.progress.micro_batches += len(micro_batches)
        if self.board is not None:
            self.board.step(self.progress.steps)
        self.comm.drain()
        self.comm.take_waited()  # what came before the step is not its own
        waited = dict.fromkeys(StepPhase, 0.0)
        sums = self._first_sums()
        self.sharded.begin_step()
        losses = self._execute(no_pipeline(len(micro_batches)), micro_batches, sums, waited)
        if self.steps.reads_late:
            self._resolve(
                between_steps=False
            )  # whether the last one was skipped decides this one's learning rate
        self.phase = "update"
        lr = self.job.optim.lr * self.schedule(self.progress.updates)
        if (
            self.job.guards.replica_every
            and self.progress.steps % self.job.guards.replica_every == 0
        ):
            self.check_replicas(lr)
        self._own_losses, self._own_step = losses, self.loader.last_step
        with self._clock.during(StepPhase.OPTIM):
            self.steps.issue(lr, sums, self._divisor)
        waited[StepPhase.OPTIM] += self.comm.take_waited()
        flops = (self._flops_per_sample or 0.0) * sum(micro.num_samples for micro in micro_batches)
        self._issued = IssuedStep(
            self.progress.steps,
            lr,
            self._clock.restart(),
            waited,
            self.comm.drain(),
            flops,
        )
        if not self.steps.reads_late or self._numeric_problem is not None or self._numeric.is_close:
            self._resolve()

    def _first_sums(self) -> NamedVector:
        """Return what each rank tells of `Numbers`, with what this one says before the step."""
        consensus = SaveConsensus()
        if self.checkpointer is not None:
            consensus = self.checkpointer.contribution(self.stop.take_save())
        return NamedVector.of(
            self.device,
            weight=0.0,
            loss=0.0,
            samples=0.0,
            tokens=0.0,
            stop=float(self._asked_to_stop()),
            end=float(bool(self.hooks.wish)),
            dropped=0.0,
            **consensus._asdict(),
        )

    def _execute(
        self,
        actions: Sequence[Action],
        micro_batches: Sequence[MicroBatch],
        sums: NamedVector,
        waited: dict[StepPhase, float],
    ) -> list[torch.Tensor]:
        """Run the forwards and backwards of one step.

        Args:
            actions: what to run in which order.
            micro_batches: by the number that `actions` give them.
            sums: what each micro-batch adds its numbers to.
            waited: seconds of waiting for other ranks, which are added here.

        Returns:
            Shares of the loss, without their graphs, in the order of the backwards.

        Raises:
            OutOfMemoryError: memory ran out, and the step is not to be dropped.
        """
        under_way: dict[int, _UnderWay] = {}
        losses = []
        for action in actions:
            boundary = action is actions[-1]
            is_lost = False
            try:
                if action.kind is ActionKind.FORWARD:
                    batch = micro_batches[action.micro]
                    under_way[action.micro] = self._forward(batch, sums, waited)
                elif action.micro in under_way:
                    losses.append(self._backward(under_way.pop(action.micro), waited, boundary))
                else:  # its forward ran out of memory
                    self.sharded.contribute_zeros(boundary=boundary)
            except OutOfMemoryError as error:
                self._memory.see(error, self.progress.steps)
                is_lost = True
            if is_lost:  # not before the traceback has let go of the activations
                self._memory.release()
                sums.add(dropped=1.0)
                if action.kind is ActionKind.BACKWARD:
                    self.sharded.contribute_zeros(boundary=boundary)
        return losses

    def _forward(
        self,
        batch: MicroBatch,
        sums: NamedVector,
        waited: dict[StepPhase, float],
    ) -> _UnderWay:
        """Run the forward of one micro-batch, and add its numbers to `sums`.

        Contributions are shares of the nominal global batch: full batches of means need no division afterwards.
        """
        self.phase = "forward"
        with self._clock.during(StepPhase.FORWARD):
            batch = batch.to(self.device)
            counted = self._counting_flops(batch)
            with self.sharded.forward() as micro, user_code("forward failed"), counted:
                loss = compute_loss(self.module, batch.batch, self.parts.loss, batch.num_samples)
            # A stand-in for a rank that has run out of samples counts nothing, whatever its loss
            # function says.
            weight = loss.weight if batch.num_samples else 0.0
            total = loss.total.detach().double() if batch.num_samples else 0.0
            if self.sharded.mesh.adds_samples:
                counts = {"samples": batch.num_samples, "tokens": batch.num_tokens}
                sums.add(weight=weight, loss=total, **counts)
            nominal = self.spec.batch.global_size
            if not batch.num_samples:
                share = loss.value * 0.0
            elif loss.kind is LossKind.MEAN:
                share = loss.value * (float(loss.weight) / nominal)
            else:
                share = loss.value / nominal
        waited[StepPhase.FORWARD] += self.comm.take_waited()
        return _UnderWay(micro, share)

    def _backward(
        self,
        under_way: _UnderWay,
        waited: dict[StepPhase, float],
        boundary: bool,
    ) -> torch.Tensor:
        """Run the backward of one micro-batch; return its share of the loss, without its graph."""
        self.phase = "backward"
        timed = self._clock.during(StepPhase.BACKWARD)
        with timed, user_code("backward failed"), _pointing_at_forward():
            self.sharded.backward(under_way.share, under_way.micro, boundary=boundary)
        waited[StepPhase.BACKWARD] += self.comm.take_waited()
        return under_way.share.detach()

    def _divisor(self, sums: NamedVector) -> torch.Tensor:
        nominal = self.spec.batch.global_size
        return sums["weight"] / nominal * (sums["dropped"] == 0)  # 0 skips the step

    @contextmanager
    def _counting_flops(self, micro: MicroBatch) -> Iterator[None]:
        """Count the first forward's FLOPs; backward takes twice as many."""
        if self._flops_per_sample is not None or not micro.num_samples or self.job.compile:
            yield
            return
        with FlopCount() as count:
            yield
        self._flops_per_sample = 3 * count.flops / micro.num_samples

    def _resolve(self, *, between_steps: bool = True) -> None:
        """Read the numbers of the step that was issued last, and tell them.

        Raises:
            NumericError: too many steps in a row were not finite. Not within a step: it ends first, since only between
                two steps is there a state to save.
        """
        with self._waiting():
            totals = self.steps.read()
        if totals is None:
            return
        issued = self._issued
        assert issued is not None
        if self.checkpointer is not None:
            self.checkpointer.update(totals.consensus)
        if not totals.agreed:
            raise modules_differ(f"step {issued.step}", "zero.leaf")
        self.recorder.step(issued, totals, self.loader.epoch)
        self._must_stop |= totals.stop > 0
        self._must_end |= totals.end > 0
        losses = [float(loss) for loss in self._own_losses] if totals.skipped else []
        samples = partial(self.loader.samples_of, self._own_step)
        problem = self._numeric.see(
            self.progress,
            issued.step,
            totals,
            losses,
            samples,
            is_late=not between_steps,
        )
        if self.checkpointer is not None:  # while numbers go wrong, no step before that goes
            self.checkpointer.prunes = not self.progress.unrecoverable_skips
        self._numeric_problem = self._numeric_problem or problem
        if self._numeric_problem is not None and between_steps:
            self._stop_numerically(self._numeric_problem)
        self._call_hook("on_step")

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """The host waits for the device, which may wait for other ranks: the watchdog looks after it."""
        if self.board is not None:
            self.board.waiting(True)
        yield
        if self.board is not None:
            self.board.waiting(False)

    # Guards

    def check_replicas(self, lr: float) -> None:
        """Compare with the other ranks what must be equal. Collective.

        That is parameters, counters, loss scale, learning rate and the order of samples. The streams
        of `zrun_core.distributed.rng` are a rank's own: see docs/faults.md.

        Raises:
            DivergedError: it is not.
        """
        progress = self.progress
        self.replicas.check(
            progress.steps,
            {
                "step": progress.steps,
                "updates": progress.updates,
                "skips": progress.skips,
                "samples": progress.samples,
                "tokens": progress.tokens,
                "lr": lr,
                "loss scale": float(self.sharded.scaler.scale),
                "seed": self.job.seed,
                **self.loader.shared(),
            },
        )

    def _call_hook(self, name: str, **facts: Any) -> None:
        """Call a hook of the user's, if there is one of this name."""
        if name in self.hooks:
            self.phase = "hook"
            self.hooks.call(name, **facts)

    def _hear_who_ends(self) -> None:
        """Learn why the run is to end, from ranks whose hooks want it. Collective if one does."""
        if not self._must_end or self._early is not None:
            return
        wishes = self.comm.all_gather_bytes(self.hooks.wish.encode(), self.world, name="ending")
        self._early = Ending("hook", next(wish.decode() for wish in wishes if wish))

    def _asked_to_stop(self) -> bool:
        """Whether a signal came to this rank. The others learn of it with the step's numbers."""
        asked = self.stop.first
        if asked is not None and not self._has_told_stop:
            self._has_told_stop = True
            self.emitter.emit("stop", step=self.progress.steps, signal=asked.name)
        return asked is not None

    def _leave(self) -> NoReturn:
        """End between two steps, all ranks together.

        Raises:
            StoppedError: unless the step could not be saved, and the job says to stop then: it is the error to tell.
            SaveError, PeerError: as `Checkpointer.save`.
        """
        self._hear_who_ends()
        saved = self.checkpointer is not None
        try:
            self.save("stopped")
        except (SaveError, PeerError) as error:
            if self.checkpointer is None or self.checkpointer.config.on_save_error == "stop":
                raise
            saved = False
            if isinstance(error, SaveError):
                self.emitter.emit("warning", message=str(error))
        if self.checkpointer is not None:
            self._tell_saves()
        self._call_hook("on_end", reason="stopped")
        self.phase = "end"
        self.stop.ignore()  # from here on the ranks leave together
        self.comm.barrier(self.world)
        code = ExitCode.STOPPED if saved else self.stop.exit_code
        raise StoppedError(
            f"stopped after step {self.progress.steps}, {'saved' if saved else 'not saved'}", code
        )

    def _stop_numerically(self, problem: str) -> NoReturn:
        """Save and end.

        Raises:
            NumericError: always.
        """
        if self.checkpointer is not None:
            try:
                problem += self._save_last_good(self.checkpointer)
            except ZrunError as error:
                problem += f"; and the last good parameters could not be saved: {error}"
        raise NumericError(problem)

    def _save_last_good(self, checkpointer: Checkpointer) -> str:
        """Save, if that is of use, and say what became of it. Skipped steps changed nothing since the last good one.

        Nothing older goes for it: nobody knows yet from which step the run can go on.
        """
        checkpointer.prunes = False
        self.phase = "save"
        checkpointer.finish()
        step, updates = self._last_saved
        is_saved = step == checkpointer.last_step and updates == self.progress.updates
        broken = self.sharded.find_nonfinite_parameter()
        if broken is not None:
            what = (
                f"step {step} is saved with it: go on from one before it"
                if is_saved
                else "nothing more is saved"
            )
            return f"; {broken[0]} is {broken[1]} itself: {what}, see zrun ckpt ls"
        if is_saved:
            return f"; the last good parameters are those of step {step}, which is saved"
        self.save("numeric")
        return f"; the last good parameters are saved as step {self.progress.steps}"

    # Evaluation

    def evaluate(self) -> None:
        """Evaluate the held-out data, and call `hooks.on_eval`; what a signal cuts off is owed."""
        assert self._evaluator is not None
        self.phase = "evaluation"
        found = None
        if not self._must_stop:
            self._broadcast_buffers()
            found = self._evaluator.run()
        self._owes_evaluation = found is None
        if found is None:
            self._must_stop = True
            return
        self.recorder.evaluation(found)
        if self.checkpointer is not None and self.progress.steps:
            self.checkpointer.offer(self.progress.steps, found.values)
        if self._early_stop is not None:
            why = self._early_stop.see(self.progress.steps, found.values)
            if why is not None and self._early is None:
                self._early = Ending("early stop", why)
        if "on_eval" in self.hooks:
            self._call_hook("on_eval", loss=found.loss)
            wishes = torch.tensor([float(bool(self.hooks.wish))], device=self.device)
            wishes = self.comm.all_reduce_small(wishes, self.world, name="ending")
            self._must_end |= wishes.item() > 0

    def _broadcast_buffers(self) -> None:
        """Buffers (running statistics) are those of the first rank that trains the same."""
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                self.comm.broadcast(buffer, self.sharded.mesh.data, name=name)
