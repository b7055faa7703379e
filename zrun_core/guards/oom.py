"""Memory that ran out: may the run go on without the batch, and what would help a job."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace

from zrun_core.errors import OutOfMemoryError
from zrun_core.guards.holders import ACTIVATIONS, CallsUnderWay, base_bytes, held_memory
from zrun_core.hardware import accelerator
from zrun_core.memory.buffers import Kind
from zrun_core.sizes import format_size
from zrun_core.spine.config import JobConfig
from zrun_core.spine.events import Emitter
from zrun_core.spine.held_memory import Change, HeldMemory
from zrun_core.spine.spec import BatchPlan, RunSpec
from zrun_core.user_code.user import is_out_of_memory
from zrun_core.zero.sharded_model import ShardedModel

_TOLD = 3  # holders in a warning
# Of what is held beside libraries: where the model has less of it, no key of the job helps.
_WORTH_IT = 0.2
# What the next stage divides, by stage.
_DIVIDED = dict(enumerate((Kind.OPTIM, Kind.GRAD, Kind.PARAM)))


class MemoryGuard:
    """Decides when a rank has no memory for its micro-batch: stop, or all ranks drop the batch.

    Dropping is exact where the others need nothing of this rank but its part in the reductions,
    which it can still take: at stages 0 to 2, and once the order of the reductions is known, after
    the first step.
    """

    def __init__(self, spec: RunSpec, sharded: ShardedModel, emitter: Emitter) -> None:
        """Make a guard."""
        self._spec = spec
        self._job = spec.job
        self._sharded = sharded
        self._emitter = emitter
        self._last_step = 0  # in which memory ran out
        self._in_a_row = 0  # steps
        self._base_bytes = base_bytes(sharded)

    def see(self, error: OutOfMemoryError, step: int) -> None:
        """Note that memory ran out in `step`. Return if the step is to be dropped.

        Raises:
            OutOfMemoryError: the run must stop.
        """
        if step == self._last_step + 1:
            self._in_a_row += 1
        elif step != self._last_step:  # another micro-batch of a step counts once
            self._in_a_row = 1
        self._last_step = step
        if self._job.guards.on_oom == "stop":
            raise error
        if (why_not := self._why_not(step)) is not None:
            raise OutOfMemoryError(
                f"{error} (guards.on_oom: skip does not drop this batch: {why_not})"
            ) from error
        most = ", ".join(
            f"{format_size(each.num_bytes)} {each.name}"
            for each in self.held(0, CallsUnderWay.of_error(error)).holders[:_TOLD]
        )
        self._emitter.emit(
            "warning",
            message=f"step {step}: {error}; all ranks drop this batch. What holds most: {most}",
        )
        # The traceback holds the activations.
        error.__cause__ = error.__context__ = error.__traceback__ = None

    def held(self, rank: int, calls: CallsUnderWay) -> HeldMemory:
        """Return what a rank holds, and the changes of its job that would help. Of any thread."""
        held = held_memory([self._sharded], rank, calls, self._base_bytes)
        tensors = held.by_kind.get("tensors", 0)
        grown = held.num_bytes - held.by_kind.get("rest", 0)
        if grown - tensors < _WORTH_IT * grown:
            return held  # no change of the job frees what the user's code keeps
        found = changes(self._job, self._spec.batch, held.by_kind)
        return replace(held, changes=tuple(found))

    def explain(self, error: OutOfMemoryError, rank: int) -> HeldMemory | None:
        """Return what a rank holds that stops; None: not even this can be told.

        Args:
            error: ended it. Its traceback holds what the calls under way held.
        """
        try:
            return self.held(rank, CallsUnderWay.of_error(error))
        except Exception as failed:
            if not is_out_of_memory(failed):
                raise
            return None  # there is none left even for this

    def _why_not(self, step: int) -> str | None:
        """Say why a batch cannot be dropped; None if it can."""
        if step == 1 or not self._sharded.reducer.order.is_recorded:
            return "the order of reductions is learnt in the first step"
        if self._in_a_row >= self._job.guards.max_nonfinite:
            many = "none may be"
            if self._in_a_row > 1:
                many = f"those of the {self._in_a_row - 1} steps before were"
            return f"{many}, guards.max_nonfinite: {self._job.guards.max_nonfinite}"
        return None

    def release(self) -> None:
        """Give back what the lost micro-batch held."""
        gc.collect()
        if accelerator.is_accelerator(self._sharded.comm.device):
            accelerator.empty_cache()


def changes(job: JobConfig, batch: BatchPlan, by_kind: Mapping[str, int]) -> list[Change]:
    """Return changes of a job that lower memory, the cheapest first.

    Args:
        by_kind: bytes that a rank holds, of which each change saves a part.
    """
    found = []
    activations = by_kind.get(ACTIVATIONS, 0)
    if batch.micro > 1:
        fewer = batch.micro // 2
        why = "activations halve, the result stays"
        saves = activations - activations * fewer // batch.micro
        found.append(Change("batch.micro", str(fewer), why, saves or None))
    if job.activations.checkpoint == "none":
        found.append(Change("activations.checkpoint", "full", "recompute blocks in backward"))
    stage = job.zero.stage
    next_divided = _DIVIDED.get(stage)
    if next_divided is not None and batch.ranks > 1:
        held = by_kind.get(next_divided.value, 0)
        why = f"divide more states over the {batch.ranks} ranks"
        saves = held - held // batch.ranks
        found.append(Change("zero.stage", str(stage + 1), why, saves or None))
    if job.precision.compute == "fp32":
        why = "half the activations"
        found.append(Change("precision", "bf16", why, activations // 2 or None))
    return found
