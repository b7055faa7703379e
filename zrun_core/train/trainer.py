"""Training loop of a job: steps, with evaluations, saves and the user's hooks between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from zrun_core.checkpoint.checkpointer import Checkpointer
from zrun_core.data.batch import MicroBatch
from zrun_core.data.loader import BatchLoader
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.distributed.rng import ForwardStreams
from zrun_core.errors import (
    DivergedError,
    ExitCode,
    JobError,
    NumericError,
    PeerError,
    SaveError,
    StoppedError,
)
from zrun_core.guards.batches import BatchDigest, BatchGuard
from zrun_core.guards.loss_causes import LossCauses
from zrun_core.guards.losses import LossGuard
from zrun_core.guards.numeric import NumericGuard
from zrun_core.guards.oom import MemoryGuard
from zrun_core.guards.replicas import ReplicaGuard
from zrun_core.hardware import accelerator
from zrun_core.optim.lr import Schedule
from zrun_core.spine.events import Emitter
from zrun_core.spine.spec import RunSpec
from zrun_core.spine.stop_signals import StopSignals
from zrun_core.stages.stage import Stage
from zrun_core.telemetry.metrics import StepClock, StepPhase
from zrun_core.telemetry.peak_memory import PeakMemory
from zrun_core.telemetry.recorder import IssuedStep, Recorder
from zrun_core.telemetry.step_totals import StepTotals
from zrun_core.train.ending import Ending, EndRequests
from zrun_core.train.evaluations import Evaluations
from zrun_core.train.evaluator import Evaluator, HeldOut, broadcast_buffers
from zrun_core.train.micro_batches import RunnerContext
from zrun_core.train.profiles import ProfiledRun, Profiles
from zrun_core.train.rank_phase import RankPhase
from zrun_core.train.run_saves import RunSaves
from zrun_core.train.runners import make_runner, make_windows
from zrun_core.train.saved_state import SavedState
from zrun_core.train.step_runner import StepRunner, modules_differ
from zrun_core.train.user_hooks import Hook, Hooks
from zrun_core.train.windows import Windows
from zrun_core.user_code.loss import LossFunction
from zrun_core.zero.sharded_model import ShardedModel


@dataclass(frozen=True)
class UserFunctions:
    """The user's functions, loaded. Hooks are named by their keys."""

    loss: LossFunction | None
    hooks: Mapping[str, Hook]
    held_out: HeldOut | None
    collate: Callable[[list[Any]], Any] | None
    lr_schedule: Schedule | None


class StepWatcher(Protocol):
    """Sees each step of a run."""

    def begin_step(self, micro_batches: Sequence[MicroBatch], positions: range) -> None:
        """See what this rank has read for a step.

        Args:
            positions: in the stream, of all ranks.
        """
        ...

    def end_step(self, issued: IssuedStep, totals: StepTotals) -> None:
        """See what the step has come to, once its updates were begun."""
        ...


class Trainer:
    """Runs a job on one rank.

    It owns the order of things: what a step is made of, what comes between two steps, and how a run
    begins and ends. The parts know how:

        MicroBatchRunner    forwards and backwards of one step
        Windows             of steps after which ranks meet, where they do not after each one
        StepRunner          update; totals of the step, read late
        Recorder            counts steps and emits their events
        Evaluations         held-out data, early stop
        RunSaves            checkpoints, with the counters and places of RunState
        Profiles            steps that are traced
        EndRequests         signals, hooks and early stops that end the run
        guards              skips, memory, replicas, batches

    Attributes:
        watcher: of the steps; None: nobody watches. The totals of a step are read at once then.
    """

    def __init__(
        self,
        spec: RunSpec,
        sharded: ShardedModel,
        loader: BatchLoader,
        functions: UserFunctions,
        schedule: Schedule,
        emitter: Emitter,
        phase: RankPhase,
        stop: StopSignals,
        draws: ForwardStreams,
        checkpointer: Checkpointer | None = None,
        stage: Stage | None = None,
    ) -> None:
        """
        Args:
            schedule: factor of the learning rate, by number of updates.
            checkpointer: None: nothing is saved.
            stage: of a pipeline; None: there is none.
        """
        job = spec.job
        self.spec = spec
        self.job = job
        self.sharded = sharded
        self.module = sharded.module
        self.comm = sharded.comm
        self.world = sharded.mesh.world
        self.loader = loader
        self.schedule = schedule
        self.emitter = emitter
        self.phase = phase
        self.stop = stop
        self.checkpointer = checkpointer
        self._clock = StepClock(self.comm.device, self.comm.spans)
        self.recorder = Recorder(spec, sharded, emitter, self._clock)
        self.progress = self.recorder.progress

        self.memory = MemoryGuard(spec, sharded, emitter)
        context = RunnerContext(
            spec, sharded, functions.loss, self._clock, phase, self.memory, draws
        )
        self.micro_batches = make_runner(context, stage)
        self.hooks = Hooks(
            functions.hooks,
            sharded,
            self.recorder,
            self.micro_batches,
            Path(spec.run_dir),
            phase,
        )
        self.ending = EndRequests(stop, self.hooks, self.comm, self.world, emitter, self.progress)
        self.profiles = Profiles(
            ProfiledRun.of_job(spec, sharded),
            sharded,
            emitter.emit,
            take_request=stop.take_profile,
            pauses=partial(phase.enter, "profile"),
            goes_on=self._clock.restart,
        )
        evaluator = None
        if functions.held_out is not None:
            evaluator = Evaluator(
                spec,
                sharded,
                functions.held_out,
                phase,
                self.ending.asked_to_stop,
                self.micro_batches,
            )
        self.evaluations = Evaluations(
            job.eval,
            sharded,
            evaluator,
            self.recorder,
            checkpointer,
            self.ending,
            self.hooks,
            phase,
            emitter,
        )
        self.state = SavedState(
            job,
            self.recorder,
            loader,
            sharded.scaler,
            self.evaluations,
            self.ending,
            emitter,
        )
        self.saves = RunSaves(
            checkpointer,
            sharded,
            self.progress,
            self._read_totals,
            self._state_to_save,
            self.ending,
            self.hooks,
            phase,
            self._clock,
        )
        self._windows = make_windows(
            context,
            loader,
            emitter,
            self.micro_batches,
            self.ending.asked_to_stop,
            lambda: self.saves.under_way,
        )
        if checkpointer is not None:
            checkpointer.has_rare_turns = self._windows is not None

        self._replicas = ReplicaGuard(sharded, spec.plan)
        self._batches = BatchGuard(sharded.mesh, self.comm, spec.plan)
        self._losses = LossGuard(sharded.mesh)
        self.loss_causes = LossCauses(sharded, functions.loss, self._replicas, spec.plan)
        self._has_ended_step = False  # in this run
        self._numeric = NumericGuard(job, sharded, emitter, is_main=self.recorder.is_main)
        self._numeric_problem: str | None = None  # found within a step, which is to end first
        self.steps = StepRunner(sharded)
        if "on_step" in self.hooks:  # it is called between two steps, with the totals of the last
            self.steps.reads_late = False
        self._issued: IssuedStep | None = None  # the step that `steps` holds the totals of
        self._issued_losses: list[torch.Tensor] = []  # its micro-batches, on this rank
        self._issued_samples = range(0)  # its positions in the data
        self._issued_batches = BatchDigest()  # what this rank has read for it
        self._has_measured = False  # the memory of a step
        self.watcher: StepWatcher | None = None
        phase.enter("start")

    def run(self) -> None:
        """Train to the end of the job.

        Raises:
            UserCodeError: the user's model, loss, data or hooks raised.
            NumericError: too many steps in a row were not finite.
            DivergedError: ranks hold different values of what must be equal.
            StoppedError: a signal asked for the end.
            JobError: the job counts tokens, and the data has none; it names a metric that no
                evaluation has; or ranks that must read the same do not.
            SaveError: this rank could not save.
            PeerError: another rank could not, or has ended.
        """
        try:
            self._begin()
            ending = self._train()
            self._end(ending)
        except DivergedError:
            # It is raised on all ranks. A save under way is of a state that was still the same.
            found_in = self.phase.name
            with suppress(SaveError, PeerError):
                self.saves.finish_under_way()
            self.phase.enter(found_in)
            raise

    def _begin(self) -> None:
        """Start the run, or go on with it."""
        if not self.module.training:
            self.module.train()
        if not self.state.is_resumed:  # else each rank has its buffers from the checkpoint
            broadcast_buffers(self.sharded)
        self.hooks.call("on_start")
        if self.evaluations.is_due_first(is_resumed=self.state.is_resumed):
            self.evaluations.run()
            self.saves.save_if_best()
        self._clock.restart()

    def _train(self) -> Ending:
        """Run steps, and what comes between them, until the run is to end."""
        job = self.job
        while job.steps is None or self.progress.steps < job.steps:
            if self.ending.must_stop:
                return Ending("stopped")
            self.ending.agree()
            if self.ending.early is not None:
                return self.ending.early
            self.profiles.before_step(self.progress.steps, self._steps_together)
            with self._measured(), self.profiles.step(self.progress.steps + 1):
                has_data = self._run_steps()
            self.profiles.after_step(self.progress.steps)
            if not has_data:
                return Ending("epochs" if job.epochs is not None else "data ended")
            if self.evaluations.is_due(self.progress.steps):
                self._read_totals()
                self.evaluations.run()
                self._clock.restart()
            self.saves.after_step()
            if job.tokens is not None and self._has_read_tokens(job.tokens):
                return Ending("tokens")
        return Ending("steps")

    def _end(self, ending: Ending) -> None:
        """End the run. The order is that in which things would be missed.

        1. The profile that is on, which is of steps, and totals of the last step: whatever follows
           needs to know whether it was skipped.
        2. After a signal: save and leave; whoever sent it waits.
        3. Save the last step. An evaluation takes long and calls the user's code: the training is
           safe before it begins, and a signal during it costs the evaluation alone.
        4. Evaluate. Is this the best step, it is marked as that on disk.
        5. Wait until older steps are removed, so that nobody finds more of them than the job keeps.
        6. `hooks.on_end`, and last the `end` event: for everyone who reads events, nothing follows.
        """
        self.profiles.end_run(self.progress.steps)
        self._read_totals()
        self.recorder.warn_once()
        self.recorder.warn_of_growth()
        if ending.reason == "stopped":
            self._leave()
        self.saves.finish()
        if self.evaluations.is_due_at_end(self.progress.steps):
            self.evaluations.run()
            self.saves.save_if_best()
        if self.evaluations.is_owed:
            self._leave()
        self.saves.wait_for_pruning()
        self.hooks.call("on_end", reason=ending.reason)
        self.recorder.end(*ending)
        self.phase.enter("end")

    def _has_read_tokens(self, limit: int) -> bool:
        """Return whether the run has read as many tokens as the job says.

        Raises:
            JobError: the data has none.
        """
        self._read_totals()
        if not self.progress.tokens:
            raise JobError(
                "tokens: the batches hold none (no input_ids, no integer tensor of 2 or more "
                "dims): write steps or epochs"
            )
        return self.progress.tokens >= limit

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Measure the memory of this process's second step: all that lasts is allocated by then.

        Where steps come in windows, it is that of the second window. It is a later one where the
        second is profiled: of two profilers of torch's the second would end the first.
        """
        num_steps = self.recorder.num_steps
        is_first = not num_steps
        if not is_first and not self._has_measured and not self.profiles.is_on:
            self._has_measured = True
            with PeakMemory(self.comm.device) as peak:
                yield
            if self.recorder.num_steps > num_steps:  # else the data had ended
                self.recorder.peak(peak)
            return
        yield

    @property
    def _steps_together(self) -> int:
        """Return how many steps the next `_run_steps` is to run."""
        return 1 if self._windows is None else self._windows.length(self.progress.steps)

    def _run_steps(self) -> bool:
        """Run the next step, or a window of steps; return whether there was data for it."""
        self.phase.enter("data")
        if self._windows is not None:
            return self._run_window(self._windows)
        with self._clock.during(StepPhase.DATA):
            micro_batches = self.loader.next_step()
        if micro_batches is None:
            return False
        self.step(micro_batches)
        return True

    # One step

    def step(self, micro_batches: list[MicroBatch]) -> None:
        """Run one optimizer step: forward and backward of each micro-batch, then the update.

        Args:
            micro_batches: of this rank, as many on every rank.
        """
        passes = self.micro_batches
        passes.look_ahead(micro_batches)
        if self.watcher is not None:
            self.watcher.begin_step(micro_batches, self.loader.last_step)
        self.progress.steps += 1
        self.progress.micro_batches += len(micro_batches)
        self.phase.begin_step(self.progress.steps)
        self.comm.drain()
        self.comm.waits.take()  # what came before the step is not its own
        passes.begin_step()
        read = self._batches.digest(micro_batches)
        sums = self._first_sums(read)
        self.sharded.begin_step()
        actions = passes.order(len(micro_batches))
        with self._batches.explaining(read):
            losses = passes.run(actions, micro_batches, sums, self.progress.steps)
        if self.steps.reads_late:  # whether the last step was skipped decides this one's rate
            self._read_totals(between_steps=False)

        self.phase.enter("update")
        lr = self._next_lr()
        replica_every = self.job.guards.replica_every
        if replica_every and self.progress.steps % replica_every == 0:
            self.check_replicas(lr)
        with self._clock.during(StepPhase.OPTIM):
            self.steps.issue(lr, sums, self._divisor)
        passes.waited[StepPhase.OPTIM] += self.comm.waits.take()
        self._issued_losses = losses
        self._issued_samples = self.loader.last_step
        self._issued_batches = read
        self._issued = IssuedStep(
            step=self.progress.steps,
            lr=lr,
            clock=self._clock.restart(),
            waited=passes.waited,
            sent=self.comm.drain(),
            flops=passes.flops(micro_batches),
            uncounted=passes.uncounted,
            micro_batches=len(micro_batches),
            tier_counts=self.sharded.updates.step_counts,
            actions=passes.marks,
        )
        ends_soon = self._numeric_problem is not None or self._numeric.is_close
        if not self.steps.reads_late or ends_soon or self.watcher is not None:
            self._read_totals()

    def _run_window(self, windows: Windows) -> bool:
        """Run steps after which all ranks meet once, or fewer of them if one had to stop.

        Returns:
            Whether there was data for them.
        """
        before = replace(self.progress)
        with self._clock.during(StepPhase.DATA):
            steps = windows.read(before.steps)
        if not steps:
            return False
        self.phase.begin_step(before.steps + 1)
        self.comm.drain()
        self.comm.waits.take()

        def lr_of(number: int) -> float:
            return self.job.optim.lr * self.schedule(before.updates + number)

        read = self._batches.digest([batch for step in steps for batch in step.batches])
        first = before.steps + 1
        ended = windows.run(steps, first, lr_of, partial(self._first_sums, read))
        when = f"steps {first} to {before.steps + len(ended)}"
        self._batches.check(ended[-1].totals.batches, read, when)
        self.saves.update(ended[-1].totals)
        for step in ended:
            self.progress.steps += 1
            self.progress.micro_batches += step.issued.micro_batches
            self._check_losses(step.totals.apart, step.issued.step, step.losses)
            if step.totals.skipped:
                self.sharded.look_back_at(step.norms)
            self._count(
                step.issued, step.totals, step.read.epoch, step.losses, step.read.samples, late=True
            )
            self.hooks.call("on_step")
        if "on_step" in self.hooks:
            self.ending.hear_hooks()  # the next message is a window away
        self._stop_for_numbers()
        replica_every = self.job.guards.replica_every
        if replica_every and self.progress.steps % replica_every == 0:
            self.check_replicas(self._next_lr())
        return True

    def _first_sums(self, read: BatchDigest) -> NamedVector:
        """Return the numbers of `StepTotals` that ranks sum, as this one begins the step with."""
        consensus = self.saves.contribution(self.stop.take_save())
        sums = NamedVector.of(
            self.comm.device,
            weight=0.0,
            loss=0.0,
            samples=0.0,
            tokens=0.0,
            stop=float(self.ending.asked_to_stop()),
            end=float(bool(self.hooks.wish)),
            dropped=0.0,
            profile=self.profiles.contribution,
            **consensus._asdict(),
            **self._losses.first_sums,
            **self._batches.first_sums,
        )
        self._batches.add(read, sums)
        return sums

    def _divisor(self, sums: NamedVector) -> torch.Tensor:
        """Return what the gradient is to be divided by, 0-d; 0 skips the step.

        It is 1 where all batches of the step were full: see `MicroBatchRunner`.
        """
        is_whole = sums["dropped"] == 0
        return sums["weight"] / self.spec.batch.global_size * is_whole

    def _next_lr(self) -> float:
        """Return the learning rate of the next update."""
        return self.job.optim.lr * self.schedule(self.progress.updates)

    def _read_totals(self, *, between_steps: bool = True) -> None:
        """Read the totals of the step that was issued last, if they were not read yet.

        `between_steps` says that no gradient of the next step is there yet.

        Raises:
            JobError: ranks that compute the same samples have read different ones.
            DivergedError: ranks that share layers have computed different losses.
            HangError: the ranks gathered different modules.
            NumericError: too many steps in a row were not finite. Not within a step: it ends
                first, since only between two steps is there a state to save.
        """
        totals = self.steps.read()
        if totals is None:
            return
        issued = self._issued
        assert issued is not None
        self._batches.check(totals.batches, self._issued_batches, f"step {issued.step}")
        self._check_losses(totals.apart, issued.step, self._issued_losses)
        self.saves.update(totals)
        if not totals.agreed:
            raise modules_differ(f"step {issued.step}", "zero.leaf")
        self._count(
            issued,
            totals,
            self.loader.epoch,
            self._issued_losses,
            self._issued_samples,
            late=not between_steps,
        )
        if between_steps:
            self._stop_for_numbers()
        self.hooks.call("on_step")

    def _count(
        self,
        issued: IssuedStep,
        totals: StepTotals,
        epoch: float | None,
        losses: Sequence[torch.Tensor],
        samples: range,
        *,
        late: bool,
    ) -> None:
        """Count a step, tell of it, and look at its numbers.

        `losses` are those of its micro-batches, on this rank, and `samples` its positions in the
        data. `late` says that the next step's gradient is there already. The rest is as of
        `Recorder.step`.
        """
        self.recorder.step(issued, totals, epoch)
        if self.watcher is not None:
            self.watcher.end_step(issued, totals)
        self.ending.update(totals)
        self.profiles.update(totals.profile)

        def samples_of(rank: int, micro: int | None) -> str:
            reader = self.spec.plan.ranks[rank].dp
            return self.loader.samples_of(samples, reader, micro)

        def losses_of() -> list[float]:
            return accelerator.fetch(torch.stack(list(losses))).tolist() if losses else []

        problem = self._numeric.see(
            self.progress,
            issued.step,
            totals,
            losses_of,
            samples_of,
            is_late=late,
        )
        # While numbers go wrong, the step from which the run could go on may be any older one.
        self.saves.keep_older(keep=self.progress.unrecoverable_skips > 0)
        self._numeric_problem = self._numeric_problem or problem

    def _stop_for_numbers(self) -> None:
        """Stop between two steps, if too many were not finite.

        Raises:
            NumericError: so it is.
        """
        if self._numeric_problem is not None:
            found_in = self.phase.name
            told = self._numeric_problem + self.saves.save_last_good(self.state.last_saved)
            self.phase.enter(found_in)
            raise NumericError(told)

    # Between two steps

    def _check_losses(self, apart: float, step: int, losses: Sequence[torch.Tensor]) -> None:
        """Make sure that ranks which share layers have computed the same. Collective if not."""

        def causes() -> str:
            return self.loss_causes.say(step, losses, is_first=not self._has_ended_step)

        self._losses.check(apart, f"step {step}", causes)
        self._has_ended_step = True

    def check_replicas(self, lr: float) -> None:
        """Compare with the other ranks what must be equal. Collective.

        That is parameters, counters, loss scale, learning rate and the order of samples. The
        streams of `zrun_core.distributed.rng` are a rank's own: see docs/faults.md.

        Raises:
            DivergedError: it is not equal.
        """
        self._replicas.check(self.progress.steps, self.state.shared_numbers(lr))

    def _state_to_save(self) -> dict[str, Any]:
        """Return what of a save is not a tensor.

        Raises:
            DivergedError: the ranks do not hold the same, so nothing is saved.
        """
        if self.job.guards.replica_every:
            self.check_replicas(self._next_lr())
        return self.state.to_json()

    def _leave(self) -> NoReturn:
        """End after a signal, all ranks together.

        Raises:
            StoppedError: in the end, unless saving failed and the job says to stop then.
            SaveError, PeerError: as `Checkpointer.save`.
        """
        self.ending.agree()
        is_saved = self.saves.save_on_leaving(self._warn)
        self.hooks.call("on_end", reason="stopped")
        self.phase.enter("end")
        self.stop.ignore()  # from here on the ranks leave together
        self.comm.barrier(self.world)
        text = f"stopped after step {self.progress.steps}"
        if is_saved:
            raise StoppedError(f"{text}, saved", ExitCode.STOPPED)
        raise StoppedError(f"{text}, not saved", self.stop.exit_code)

    def _warn(self, text: str) -> None:
        self.emitter.emit("warning", message=text)
