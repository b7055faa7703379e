"""Memory that ran out: what holds it, and what a job can say to need less."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence

import torch

from zrun_core.errors import OutOfMemoryError
from zrun_core.hardware import accelerator
from zrun_core.memory.buffers import Kind
from zrun_core.sizes import format_size
from zrun_core.spine.config import JobConfig
from zrun_core.spine.events import Emitter
from zrun_core.spine.spec import BatchPlan, RunSpec
from zrun_core.telemetry.metrics import process_memory
from zrun_core.user_code.user import is_out_of_memory
from zrun_core.zero.account import allocated_memory, own_tensors
from zrun_core.zero.sharded_model import ShardedModel

_SHOWN = 5
_TOLD = 3  # holders in a warning
_NAMES = {
    Kind.PARAM: "parameters",
    Kind.GRAD: "gradients",
    Kind.OPTIM: "optimizer states and fp32 masters",
    Kind.RING: "scratch of gathers and reductions",
    Kind.BUFFER: "buffers of modules",
}


class MemoryGuard:
    """Decides when a rank has no memory for its micro-batch: stop, or all ranks drop the batch.

    Dropping is exact where the others need nothing of this rank but its part in the reductions,
    which it can still take: at stages 0 to 2, and once the order of the reductions is known, after
    the first step.
    """

    def __init__(self, spec: RunSpec, sharded: ShardedModel, emitter: Emitter) -> None:
        """Make a guard.

        Args:
            spec: the run; `guards.on_oom` and `guards.max_nonfinite` decide.
            sharded: the model, which knows what holds memory.
            emitter: takes the warning of a dropped batch.
        """
        self._spec = spec
        self._job = spec.job
        self._sharded = sharded
        self._emitter = emitter
        self._last_step = 0  # in which memory ran out
        self._in_a_row = 0  # steps

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
            f"{format_size(size)} {name}" for name, size in largest_holders(self._sharded)[:_TOLD]
        )
        self._emitter.emit(
            "warning",
            message=f"step {step}: {error}; all ranks drop this batch. What holds most: {most}",
        )
        # The traceback holds the activations.
        error.__cause__ = error.__context__ = error.__traceback__ = None

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


def largest_holders(sharded: ShardedModel) -> list[tuple[str, int]]:
    """Return what holds most bytes of this rank, largest first.

    These are the runtime's buffers by kind, tensors beyond them, and the rest of the process.
    """
    by_kind = allocated_memory(sharded).by_kind
    found = Counter({_NAMES[kind]: size for kind, size in by_kind.items()})
    params = _NAMES[Kind.PARAM]
    size, name = max((unit.allocated()[0].num_bytes, unit.name) for unit in sharded.units)
    found[f"{params}, largest unit {name!r} with {format_size(size)}"] = found.pop(params)
    found.update(_other_tensors(sharded))
    memory = process_memory(sharded.comm.device)
    held = memory["device_allocated"]
    if held is None:  # on a CPU
        held = memory["rss_bytes"]
    rest = (held or 0) - sum(found.values())
    if rest > 0:
        found["activations saved for backward, libraries and what else the process holds"] = rest
    return [(name, size) for name, size in found.most_common(_SHOWN) if size]


def _other_tensors(sharded: ShardedModel) -> Counter[str]:
    """Return bytes of tensors that Python knows, but for the runtime's, by shape and format."""
    known = {tensor.untyped_storage().data_ptr() for tensor in own_tensors(sharded)}
    device = sharded.comm.device.type
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        if type(thing) is not torch.Tensor:
            continue
        if thing.device.type != device or thing.is_sparse:
            continue
        storage = thing.untyped_storage()
        if not storage.nbytes() or storage.data_ptr() in known:
            continue
        known.add(storage.data_ptr())
        found[f"tensors {tuple(thing.shape)} {str(thing.dtype).removeprefix('torch.')}"] += (
            storage.nbytes()
        )
    return found


def advice(job: JobConfig, batch: BatchPlan) -> list[str]:
    """Return lines of a job file that lower memory, the cheapest first."""
    found = []
    if batch.micro > 1:
        found.append(f"batch.micro: {batch.micro // 2}  # activations halve, the result stays")
    if job.activations.checkpoint == "none":
        found.append("activations.checkpoint: full  # recompute blocks in backward")
    if job.zero.stage < 3 and batch.ranks > 1:
        found.append(
            f"zero.stage: {job.zero.stage + 1}  # divide more states over the {batch.ranks} ranks"
        )
    if job.precision.compute == "fp32":
        found.append("precision: bf16  # half the activations")
    return found


def explain(error: OutOfMemoryError, spec: RunSpec, sharded: ShardedModel) -> str:
    """Return the message of a run that stops: what holds most, and what would help.

    Args:
        error: ended it.
        spec: the run.
        sharded: the model, which knows what holds memory.
    """
    try:
        return describe(str(error), largest_holders(sharded), advice(spec.job, spec.batch))
    except Exception as failed:
        if not is_out_of_memory(failed):
            raise
        return str(error)  # there is none left even for this


def describe(what: str, holders: Sequence[tuple[str, int]], lines: Sequence[str]) -> str:
    """Return the message of a run that stops.

    Args:
        what: ended it.
        holders: of memory: name and bytes, largest first.
        lines: of a job file that would help.
    """
    text = [f"{what}. What holds most:"]
    text += [f"  {format_size(size):>10}  {name}" for name, size in holders]
    if lines:
        text.append("What would help, in the job file:")
        text += [f"  {line}" for line in lines]
    return "\n".join(text)
