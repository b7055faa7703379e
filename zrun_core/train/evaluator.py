"""Evaluation: the mean loss and the user's own metrics over held-out data, summed over all ranks.

Every number is a sum over all samples, divided once by the sum of its weights, in fp64: neither the
size of the batches nor the number of ranks changes what it comes to.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, SupportsFloat

import torch
from torch import Tensor, nn

from zrun_core.data.batch import MicroBatch
from zrun_core.data.loader import eval_batches
from zrun_core.distributed import rng
from zrun_core.distributed.named_vector import HostCopy, NamedVector
from zrun_core.errors import UserCodeError
from zrun_core.guards.batches import BatchDigest, BatchGuard
from zrun_core.spine.spec import RunSpec
from zrun_core.telemetry.recorder import Evaluated, checked_name
from zrun_core.train.micro_batches import MicroBatchRunner
from zrun_core.train.rank_phase import RankPhase
from zrun_core.user_code.loss import Loss, LossFunction, compute_loss
from zrun_core.user_code.user import user_code
from zrun_core.zero.sharded_model import ShardedModel

Metrics = Callable[[nn.Module, Any], Any]
_SAME_NAMES = "return the same names on every rank for every batch, with weight 0 where none counts"


@dataclass(frozen=True)
class HeldOut:
    """Held-out data of the user, and the functions of an evaluation, loaded.

    Attributes:
        sets: the datasets by name; a single one may be called "".
        metrics: (model, batch) -> {name: (sum, weight)}.
    """

    sets: Mapping[str, object]
    metrics: Metrics | None
    loss: LossFunction | None
    collate: Callable[[list[Any]], Any] | None


class Number(NamedTuple):
    """Sum and weight that a batch adds to one of the numbers; a tensor is 0-d."""

    total: Tensor | float
    weight: Tensor | float


class Evaluator:
    """Walks the held-out data. All ranks call it at the same place."""

    def __init__(
        self,
        spec: RunSpec,
        sharded: ShardedModel,
        held_out: HeldOut,
        phase: RankPhase,
        asked_to_stop: Callable[[], bool],
        runner: MicroBatchRunner,
    ) -> None:
        self._spec = spec
        self._sharded = sharded
        self._held_out = held_out
        self._phase = phase
        self._asked_to_stop = asked_to_stop
        self._runner = runner
        self._comm = sharded.comm
        self._mesh = sharded.mesh
        self._world = sharded.mesh.world
        self._device = self._comm.device
        self._batches = BatchGuard(self._mesh, self._comm, spec.plan)

    def run(self) -> Evaluated | None:
        """Evaluate each set in turn; modules get their modes back.

        A signal that asks for the end cuts it off, on all ranks before the same batch, and the
        random streams are set back: the run makes it anew when it goes on.

        Returns:
            What it came to, the same on every rank; None where a signal cut it off.

        Raises:
            UserCodeError: the user's model, loss, metrics or data raised, or the metrics have
                other names on another rank.
            JobError: ranks that compute the same samples have read different ones.
        """
        start = time.monotonic()
        streams = rng.capture(self._device)
        values: dict[str, float] = {}
        samples = tokens = 0
        self._runner.begin_evaluation()
        with evaluation_mode(self._sharded.module):
            for name, data in self._held_out.sets.items():
                sums = _Sums(self._device)
                if not self._walk(data, sums):
                    rng.restore(*streams, self._device)
                    return None
                numbers, (num_samples, num_tokens) = self._over_ranks(sums)
                samples += int(num_samples)
                tokens += int(num_tokens)
                prefix = f"{name}/" if name else ""
                values |= {f"{prefix}{key}": value for key, value in numbers.items()}
        return Evaluated(values, samples, tokens, time.monotonic() - start)

    def _walk(self, data: object, sums: _Sums) -> bool:
        """Add up what every batch of this rank comes to; return whether no rank was to stop."""
        config = self._spec.job.eval
        batches = eval_batches(
            data,
            self._spec.batch.micro,
            self._mesh.data.index,
            self._mesh.data.size,
            None if config is None else config.samples,
            self._held_out.collate,
            self._spec.job.seed,
            self._device,
        )
        for micro in batches:
            read = self._batches.digest([micro])
            vote = self._vote_on_stop(read)
            micro = micro.to(self._device)
            numbers = self._numbers(micro)
            if numbers:
                sums.add(micro, numbers)
            self._phase.tick()
            with self._comm.waiting():
                found = vote.read()
            self._batches.check(found.get("batches", 0.0), read, "an evaluation")
            if found["asked"]:
                return False
        return True

    def _numbers(self, micro: MicroBatch) -> dict[str, Number]:
        """Compute the numbers of one batch; none but on the last stage of a pipeline.

        A loss that the metrics have is not computed again, except in a pipeline, whose other stages
        do not see the metrics.
        """
        found: dict[str, Number] = {}
        if self._held_out.metrics is not None:
            found = self._runner.evaluate(partial(self._metrics_of, micro)) or {}
        if "loss" not in found or self._mesh.pipe.size > 1:
            loss = self._runner.evaluate(partial(self._loss_of, micro))
            if loss is not None:
                found.setdefault("loss", Number(loss.total.double(), loss.weight))
        return found

    def _metrics_of(self, micro: MicroBatch) -> dict[str, Number]:
        assert self._held_out.metrics is not None
        with user_code("eval.metrics failed"):
            result = self._held_out.metrics(self._sharded.module, micro.batch)
            return read_metrics(result, micro.num_samples)

    def _loss_of(self, micro: MicroBatch) -> Loss:
        model = self._sharded.module
        with user_code("evaluation failed"):
            return compute_loss(model, micro.batch, self._held_out.loss, micro.num_samples)

    def _vote_on_stop(self, read: BatchDigest) -> HostCopy:
        """Count the ranks that were asked to stop, and compare what ranks have read.

        It is read after the batch, so that a device has the batch to compute meanwhile.
        """
        asked = float(self._asked_to_stop())
        own = NamedVector.of(self._device, asked=asked, **self._batches.first_sums)
        self._batches.add(read, own)
        summed = self._comm.all_reduce_small(own.values, self._world, name="evaluation")
        return HostCopy.of(NamedVector(own.names, summed))

    def _over_ranks(self, sums: _Sums) -> tuple[dict[str, float], list[float]]:
        """Return every number over all ranks, and how many samples and tokens there were.

        Raises:
            UserCodeError: the ranks do not have the same names.
        """
        names = sorted(sums.by_name)
        if self._held_out.metrics is not None:
            names = self._agreed_names(names)
        if self._mesh.adds_samples:
            own = torch.cat([sums.counts, *(sums.by_name[name] for name in names)])
        else:
            own = sums.counts.new_zeros(2 + 2 * len(names))
        summed = self._comm.all_reduce_small(own, self._world, name="evaluation")
        counts_and_numbers = self._comm.read(summed)
        counts = counts_and_numbers[:2]
        numbers = iter(counts_and_numbers[2:])  # sum, weight, sum, weight, ...
        values = {}
        for name, total, weight in zip(names, numbers, numbers, strict=True):
            values[name] = total / weight if weight else math.nan
        return {"loss": values.pop("loss"), **values}, counts

    def _agreed_names(self, names: list[str]) -> list[str]:
        """Return the names of the ranks that have numbers, which must be the same."""
        own = json.dumps(names).encode() if self._mesh.adds_samples else b""
        told = self._comm.all_gather_bytes(own, self._world, name="evaluation")
        everyones = {rank: json.loads(each) for rank, each in enumerate(told) if each}
        first, expected = next(iter(everyones.items()))
        for rank, theirs in everyones.items():
            if theirs != expected:
                raise UserCodeError(
                    f"eval.metrics returned {', '.join(expected)} on rank {first} and "
                    f"{', '.join(theirs)} on rank {rank}: {_SAME_NAMES}"
                )
        agreed: list[str] = expected
        return agreed


class _Sums:
    """Sums over the batches of this rank so far.

    Attributes:
        counts: fp64 [2], samples and tokens.
        by_name: fp64 [2] each, the sum and the weight of a number.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_batches = False
        self.counts = self._zeros()
        self.by_name = {"loss": self._zeros()}

    def _zeros(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self._device)

    def add(self, micro: MicroBatch, numbers: Mapping[str, Number]) -> None:
        """Add the numbers of one batch.

        Raises:
            UserCodeError: they have other names than those of the batches before.
        """
        if self._has_batches and numbers.keys() != self.by_name.keys():
            raise UserCodeError(
                f"eval.metrics returned {', '.join(sorted(numbers))} for a batch after "
                f"{', '.join(sorted(self.by_name))} for the one before: {_SAME_NAMES}"
            )
        self._has_batches = True
        for name, number in numbers.items():
            into = self.by_name.setdefault(name, self._zeros())
            if micro.num_samples:  # else it is a stand-in, whatever its numbers are
                into[0] += number.total
                into[1] += number.weight
        self.counts[0] += micro.num_samples
        self.counts[1] += micro.num_tokens


def read_metrics(result: object, num_samples: int) -> dict[str, Number]:
    """Return what a metrics function returned for one batch, looked at.

    Args:
        num_samples: what a mean of the batch weighs.

    Raises:
        UserCodeError: it is no mapping of names to (sum, weight) or to means.
    """
    if not isinstance(result, Mapping):
        what = type(result).__name__
        raise UserCodeError(f"eval.metrics returned {what}: return a dict of name -> (sum, weight)")
    found = {}
    for name, value in result.items():
        try:
            checked_name(name)
        except ValueError as error:
            raise UserCodeError(f"eval.metrics: {error}") from None
        if isinstance(value, tuple | list) and len(value) == 2:
            found[name] = Number(_scalar(name, value[0]), _scalar(name, value[1]))
        else:
            found[name] = Number(_scalar(name, value) * num_samples, num_samples)
    return found


def _scalar(name: str, value: object) -> Tensor | float:
    """Return one number; a tensor stays on its device, so that the host need not wait for it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().double().reshape(())
    if isinstance(value, SupportsFloat) and not isinstance(value, Tensor):
        return float(value)
    what = type(value).__name__
    if isinstance(value, Tensor):
        what = f"shape {tuple(value.shape)}"
    advice = "return (sum, weight), two numbers, or the batch's mean"
    raise UserCodeError(f"eval.metrics: {name} is {what}: {advice}")


def broadcast_buffers(sharded: ShardedModel) -> None:
    """Give each rank the buffers (running statistics) of the first that trains the same model."""
    with torch.no_grad():
        for name, buffer in sharded.module.named_buffers():
            sharded.comm.broadcast(buffer, sharded.mesh.data, name=name)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode, and afterwards each in the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    yield
    for module, mode in modes:
        module.training = mode
