"""End of an optimizer step: update, copy the totals to the host, read them without waiting.

The loop of a job (`trainer.py`) and a loop of the user's own (`library/optimizer.py`) both end
their steps here.

[Note: why totals are read one step late]
On a GPU the host runs ahead: it queues kernels much faster than the device executes them. Reading
one number (`tensor.item()`) makes the host wait until the device has done all that was queued, and
the device then idles until the host has queued the next kernels. So the totals of step N are copied
to pinned host memory behind the update of N, without waiting, and read when the backward of N+1 has
been queued:

    host     F B update(N) copy(N) | F B         read(N) lr update(N+1) copy(N+1) | F B  ...
    device          F B update(N) copy(N)  F B                update(N+1) ...

That is early enough: whether N was skipped decides the learning rate of the update of N+1, and no
more. The device has most of F B of N+1 to do still, so it never runs dry.

What is read late is known late: an error of N is raised in the middle of N+1, whose gradients are
there already. Where a state is to be saved, or the next skip may end the loop, totals are read at
once. On a CPU there is nothing to overlap: always at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zrun_core.distributed.named_vector import HostCopy, NamedVector
from zrun_core.errors import HangError
from zrun_core.hardware.accelerator import is_accelerator
from zrun_core.telemetry.step_totals import StepTotals
from zrun_core.zero.sharded_model import ShardedModel, StepResult
from zrun_core.zero.unit.precision import LossScaler


class StepRunner:
    """Issues the updates of one model, and holds the totals of the last one until they are read.

    Attributes:
        reads_late: whether totals are best read during the next step: see the note above.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self._copy: HostCopy | None = None  # of the step whose totals were not read yet
        self.reads_late = is_accelerator(sharded.comm.device)

    def issue(
        self,
        lr: float | None,
        sums: NamedVector,
        divisor_of: Callable[[NamedVector], torch.Tensor],
        scaler: LossScaler | None = None,
    ) -> StepResult:
        """Update the model, and begin to copy the step's totals to the host.

        Args:
            lr: learning rate of all parameter groups; None leaves each its own.
            sums: [n] float64, numbers of this rank, named as fields of `StepTotals`.
            divisor_of: computes from the summed numbers what the gradient is divided by, 0-d.
            scaler: of the loss, if it is not the model's own.

        Returns:
            The result on the device.
        """
        # An update of the scale binds another tensor, so this one stays the scale of this step.
        scale = self._sharded.scaler.scale if scaler is None else scaler.scale
        result = self._sharded.step(lr, sums, divisor_of, scaler)
        self._copy = HostCopy.of(
            result.sums.extended(
                grad_norm=result.grad_norm,
                skipped=result.skipped,
                agreed=result.agreed,
                scale=scale,
            )
        )
        return result

    def read(self) -> StepTotals | None:
        """Wait for the totals of the last step; None if they were read before."""
        copy = self._copy
        self._copy = None
        if copy is None:
            return None
        with self._sharded.comm.waiting():
            return StepTotals(**copy.read())


def modules_differ(step: str, leaf: str) -> HangError:
    """Return the error of ranks that gathered different modules in one step.

    Args:
        step: which one, in the words of the loop.
        leaf: where the user names a module that is to be handled as a whole.
    """
    return HangError(
        f"{step}: ranks gathered different modules; name the module that chooses between them in "
        f"{leaf}, so that it is handled as a whole"
    )
