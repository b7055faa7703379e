"""A plain training loop on one rank: what a run is compared with.

    for each data-parallel rank of the run, with a model of its own
        for each micro-batch: model(**batch), total.backward()
    gradient = sum of all / sum of their weights;  clip;  torch.optim's step

It knows nothing of units, shards, stages or slices. What it has in common with the runtime: how the
user's code is found, the seeds that micro-batches and samples draw from, and the learning rate of a
step. The order of samples is the contract of `zrun_core/data/order.py`, written down once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

from zrun_core.data.batch import copied, to_device
from zrun_core.data.samples import reads_several
from zrun_core.distributed import rng
from zrun_core.spine.sections.section import Ref
from zrun_core.spine.spec import RunSpec
from zrun_core.stages.node_calls import DrawingWalk, install_nodes, walking
from zrun_core.user_code import user
from zrun_core.user_code.trial import Attributes, AttributesCopy
from zrun_core.verification.record import TensorShape
from zrun_core.zero.wrap.auto_wrap import repeated_blocks

_NUDGE = 2.0  # times the distance of neighbours in the format
_ATOMICS = 1e-4  # of a gradient, what a device may add up in another order
_NUDGES_OF_STEP = 100  # seeds of one, of which few are used


class Contribution(NamedTuple):
    """The gradient of one micro-batch, by parameter; None where it got none."""

    rank: int  # data-parallel
    micro: int
    grads: Mapping[str, Tensor]


class PlainGradient(NamedTuple):
    """What a step's forwards and backwards have come to.

    Attributes:
        loss: mean over the samples.
        weight: of them.
        grads: by parameter, of the sum of losses over the nominal global batch, times the scale.
        parts: of each micro-batch, which add up to it; none where they would take too much memory.
        buffers: by replica, what they left in its buffers; of a step that is run again.
    """

    loss: float
    weight: float
    grads: Mapping[str, Tensor]
    parts: Sequence[Contribution]
    buffers: Sequence[Mapping[str, Tensor]] = ()


class PlainData:
    """The job's data, read sample by sample."""

    def __init__(self, spec: RunSpec) -> None:
        job, job_dir = spec.job, Path(spec.job_dir)
        self._seed = job.seed
        self._shuffle = job.data.shuffle
        self._epochs = job.epochs
        self._global_size = spec.batch.global_size
        self._dataset: Any = user.call(Ref(call=job.data.call, args=job.data.args), job_dir)
        self._collate = default_collate
        if job.data.collate is not None:
            self._collate = user.function(job.data.collate, job_dir, ("samples",))
        is_walked = isinstance(self._dataset, IterableDataset) or not (
            hasattr(self._dataset, "__getitem__") and hasattr(self._dataset, "__len__")
        )
        self._walk = self._walked() if is_walked else None
        self._seen: list[Any] = []  # of the walk
        self._orders: dict[int, Tensor] = {}  # by epoch, the newest

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch; None: only walking tells."""
        return None if self._walk is not None else len(self._dataset)

    def positions(self, step: int) -> range:
        """Return the positions in the stream of a step's samples."""
        size = self._global_size
        positions = range((step - 1) * size, step * size)
        if self._epochs is not None and self.num_samples is not None:
            last = self.num_samples * self._epochs
            positions = range(positions.start, min(positions.stop, last))
        return positions

    def sample(self, position: int) -> tuple[int, Any] | None:
        """Return the sample at a position of the stream, and its index in the data set.

        None: samples are not read one by one.
        """
        if self._walk is not None or reads_several(self._dataset):
            return None
        number = self._number(position)
        with rng.kept_position(rng.CPU):
            rng.seed(rng.mix(self._seed, position))
            return number, self._dataset[number]

    def batches(self, parts: Sequence[Sequence[Sequence[int]]]) -> list[list[tuple[Any, int]]]:
        """Return the micro-batches of a step, by data-parallel rank, with their samples' number.

        Args:
            parts: positions of their samples in the stream.
        """
        first = parts[0][0][0]
        found: list[list[tuple[Any, int]]] = []
        for rank, of_rank in enumerate(parts):
            read = self._indexed if self._walk is None else self._from_walk
            with rng.kept_position(rng.CPU):
                own = [read(positions) if positions else None for positions in of_rank]
            if self._walk is not None:
                # What batches draw follows from the step, one after the other.
                with rng.Streams(self._seed, rng.CPU, dp=rank).data.at(first):
                    own = [None if each is None else self._collate(each) for each in own]
            found.append([(batch, len(part)) for batch, part in zip(own, of_rank, strict=True)])
        return found

    def _indexed(self, positions: Sequence[int]) -> Any:
        """Return the batch of the samples at these positions: each draws from its own."""
        numbers = [self._number(position) for position in positions]
        if reads_several(self._dataset):
            rng.seed(rng.mix(self._seed, positions[0]))
            return self._collate(self._dataset.__getitems__(numbers))
        samples = []
        for position, number in zip(positions, numbers, strict=True):
            rng.seed(rng.mix(self._seed, position))
            samples.append(self._dataset[number])
        return self._collate(samples)

    def _number(self, position: int) -> int:
        """Return the index in the dataset of the sample at a position of the stream."""
        epoch, place = divmod(position, len(self._dataset))
        if not self._shuffle:
            return place
        if epoch not in self._orders:
            seed = (self._seed * 1_000_003 + epoch) % 2**32
            generator = torch.Generator().manual_seed(seed)
            self._orders = {epoch: torch.randperm(len(self._dataset), generator=generator)}
        return int(self._orders[epoch][place])

    def _from_walk(self, positions: Sequence[int]) -> list[Any]:
        """Return the samples at these positions."""
        assert self._walk is not None
        while len(self._seen) <= positions[-1]:
            self._seen.append(next(self._walk))
        return [self._seen[position] for position in positions]

    def _walked(self) -> Iterator[Any]:
        epoch = 0
        while self._epochs is None or epoch < self._epochs:
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(epoch)
            number = 0
            rng.seed(rng.mix(rng.mix(self._seed, epoch), 0))
            walk = iter(self._dataset)
            while True:
                if number:
                    rng.seed(rng.mix(rng.mix(self._seed, epoch), number))
                sample = list(islice(walk, 1))
                if not sample:
                    break
                yield sample[0]
                number += 1
            epoch += 1


class ReplicaState(NamedTuple):
    """What forwards change of a model, besides gradients."""

    buffers: Mapping[str, Tensor]
    attributes: AttributesCopy
    position: Any


class Replica:
    """The model of one data-parallel rank, with all that its forwards change.

    Attributes:
        module: the user's.
        params: by name, those that train.
    """

    def __init__(self, spec: RunSpec, rank: int, device: torch.device) -> None:
        """Build the model, as the factory makes it from the job's seed."""
        job, job_dir = spec.job, Path(spec.job_dir)
        self.rank = rank
        self._device = device
        self._draws_by_block = job.parallel.draws_by_block
        self._draws_by_turn = job.parallel.facts.goes_in_slices
        self._turns: list[int] = []  # seeds of the micro-batches of a step, where they take turns
        torch.manual_seed(job.seed)
        self.module = user.build_model(job.model, job_dir)
        self.module.train()
        for param in self.module.parameters():
            param.data = param.data.float()  # `use_formats` narrows them
        self.loss_fn = None
        if job.loss is not None:
            self.loss_fn = user.function(job.loss, job_dir, ("model", "batch"))
        self.module.to(device)
        self.params = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if self._draws_by_block:
            install_nodes(self.module, repeated_blocks(self.module))
        self._attributes = Attributes(self.module.modules(), self.loss_fn)
        self._streams = rng.Streams(job.seed, device, dp=rank)
        with rng.kept_position(device):
            self._streams.begin()
            self._position = rng.capture(device)

    def use_formats(self, tensors: Mapping[str, TensorShape]) -> None:
        """Cast each parameter to the format in which the run computes with it."""
        for name, param in self.module.named_parameters():
            if name in tensors:
                param.data = param.data.to(getattr(torch, tensors[name].dtype))

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take these values; others stay."""
        params = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, value in values.items():
                params[name].copy_(value)

    def begin_step(self, num_micro_batches: int) -> None:
        """Draw what a step draws at its beginning: in layer-major order, seeds."""
        if self._draws_by_turn:
            with self._at_position():
                self._turns = [rng.draw_seed() for _ in range(num_micro_batches)]

    @contextmanager
    def _at_position(self) -> Iterator[None]:
        """Draw from this rank's stream, where it is."""
        with rng.kept_position(self._device):
            rng.restore(*self._position, self._device)
            yield
            self._position = rng.capture(self._device)

    @contextmanager
    def drawing(self, step: int, micro: int) -> Iterator[None]:
        """Draw what this rank draws in a forward."""
        draws = self._streams.forwards
        if self._draws_by_block:
            with draws.of_micro(step, micro), walking(DrawingWalk(draws)):
                yield
        elif self._draws_by_turn:
            with rng.kept_position(self._device):
                rng.seed(self._turns[micro], self._device)
                yield
        else:
            with self._at_position():
                yield

    @property
    def position(self) -> Any:
        """Where its stream of random numbers is."""
        return self._position

    @position.setter
    def position(self, position: Any) -> None:
        self._position = position

    def begin_late(self, step: int) -> None:
        """Begin the stream of a rank that a run has from after `step` on only."""
        with rng.kept_position(self._device):
            self._streams.begin_late(step)
            self._position = rng.capture(self._device)

    def state(self) -> ReplicaState:
        """Return what a forward may change, as it is now."""
        return ReplicaState(self.buffers(), self._attributes.copy(), self._position)

    def put_back(self, state: ReplicaState) -> None:
        """Make it what it was at a `state`."""
        self.load_buffers(state.buffers)
        self._attributes.put_back(state.attributes)
        self._position = state.position

    def buffers(self) -> dict[str, Tensor]:
        """Return its buffers, on the CPU."""
        return {n: b.detach().cpu().clone() for n, b in self.module.named_buffers()}

    def load_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Take the values of these buffers."""
        for name, buffer in self.module.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])


class PlainLoop:
    """Forwards and backwards of whole steps.

    Attributes:
        replicas: the models, by data-parallel rank.
    """

    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        dtype: torch.dtype,
        replicas: int | None = None,
    ) -> None:
        """
        Args:
            replicas: data-parallel ranks, of which each has a model; None: those of the run.
        """
        self._spec = spec
        self._device = device
        self._dtype = dtype
        count = spec.batch.ranks if replicas is None else replicas
        self.replicas = [Replica(spec, rank, device) for rank in range(count)]
        self._begun: list[ReplicaState] = []  # the last step, by replica

    def gradient(
        self,
        step: int,
        batches: Sequence[Sequence[tuple[Any, int]]],
        scale: float,
        *,
        keeps_parts: bool = False,
    ) -> PlainGradient:
        """Run the forwards and backwards of a step.

        Args:
            step: its number, from 1.
            batches: by data-parallel rank, its micro-batches with their numbers of samples.
            keeps_parts: of each micro-batch, too.
        """
        self._begun = [replica.state() for replica in self.replicas]
        global_size = self._spec.batch.global_size
        loss = weight = 0.0
        sums: dict[str, Tensor] = {}
        parts: list[Contribution] = []
        for replica, of_rank in zip(self.replicas, batches, strict=True):
            replica.begin_step(len(of_rank))
            for micro, (batch, num_samples) in enumerate(of_rank):
                if not num_samples:
                    continue
                total, own_weight, grads = self._micro(
                    replica, step, micro, batch, num_samples, scale / global_size
                )
                loss += total
                weight += own_weight
                for name, grad in grads.items():
                    sums[name] = sums[name] + grad if name in sums else grad
                if keeps_parts:
                    parts.append(Contribution(replica.rank, micro, grads))
        return PlainGradient(loss / weight if weight else 0.0, weight, sums, parts)

    def nudged(
        self,
        step: int,
        nudge: int,
        batches: Sequence[Sequence[tuple[Any, int]]],
        scale: float,
        values: Mapping[str, Tensor],
    ) -> PlainGradient:
        """Run the last step once more, with values that rounding has moved; nothing is left of it.

        Args:
            step, batches, scale: as of `gradient`.
            nudge: which of many ways to move them.
        """
        generator = torch.Generator().manual_seed(_NUDGES_OF_STEP * step + nudge)
        size = _NUDGE * torch.finfo(self._dtype).eps
        moved = {
            name: value * (1 + size * (2 * torch.rand(value.shape, generator=generator) - 1))
            for name, value in values.items()
        }
        return self._again(step, batches, scale, moved, values)

    def repeats(
        self,
        step: int,
        batches: Sequence[Sequence[tuple[Any, int]]],
        scale: float,
        values: Mapping[str, Tensor],
        found: PlainGradient,
    ) -> bool:
        """Return whether the last step, run once more as it was, comes to what it came to.

        On a CPU to the bit. If not, its forwards change something that is not put back, and what
        `nudged` returns says nothing of rounding.

        Args:
            step, batches, scale, values: as of `nudged`.
            found: what the step came to.
        """
        again = self._again(step, batches, scale, values, values)
        exact = 0.0 if self._device.type == "cpu" else _ATOMICS
        if not math.isclose(again.loss, found.loss, rel_tol=exact):
            return not math.isfinite(found.loss)
        return again.grads.keys() == found.grads.keys() and all(
            float((again.grads[name] - grad).norm()) <= exact * float(grad.norm())
            for name, grad in found.grads.items()
            if grad.isfinite().all()
        )

    def _again(
        self,
        step: int,
        batches: Sequence[Sequence[tuple[Any, int]]],
        scale: float,
        begin: Mapping[str, Tensor],
        end: Mapping[str, Tensor],
    ) -> PlainGradient:
        """Run the last step again, with values `begin`; leave what it left, and values `end`."""
        begun = self._begun
        ended = [replica.state() for replica in self.replicas]
        for replica, state in zip(self.replicas, begun, strict=True):
            replica.put_back(state)
            replica.load(begin)
        found = self.gradient(step, batches, scale)
        found = found._replace(buffers=[replica.buffers() for replica in self.replicas])
        self._begun = begun
        for replica, state in zip(self.replicas, ended, strict=True):
            replica.put_back(state)
            replica.load(end)
        return found

    def _micro(
        self,
        replica: Replica,
        step: int,
        micro: int,
        batch: Any,
        num_samples: int,
        factor: float,
    ) -> tuple[float, float, dict[str, Tensor]]:
        """Return total and weight of a micro-batch, and its gradient times `factor`, fp32."""
        for param in replica.params.values():
            param.grad = None
        with replica.drawing(step, micro):
            with self._autocast(), user.user_code("forward failed"):
                own = to_device(copied(batch), self._device)  # forward may write to it
                total, weight = plain_loss(replica.module, own, replica.loss_fn, num_samples)
            with user.user_code("backward failed"):
                (total * factor).backward()
        grads = {}
        for name, param in replica.params.items():
            if param.grad is not None:
                grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
                grads[name] = grad.detach().to("cpu", torch.float32, copy=True)
                param.grad = None
        return float(total.detach()), float(weight), grads

    def _autocast(self) -> AbstractContextManager[object]:
        if self._dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype, cache_enabled=False)


def plain_loss(
    model: nn.Module, batch: Any, loss_fn: Any, num_samples: int
) -> tuple[Tensor, float | Tensor]:
    """Return the sum of losses over a micro-batch, and its weight.

    A dict is given to the model by keywords, a list or tuple by position. It returns its loss: a
    number, something with `loss`, or a tuple with one number. A loss function returns that, or a
    sum and its weight.
    """
    if loss_fn is not None:
        result = loss_fn(model, batch)
        if isinstance(result, tuple) and len(result) == 2 and not hasattr(result, "loss"):
            return result
    elif isinstance(batch, Mapping):
        result = model(**batch)
    elif isinstance(batch, list | tuple):
        result = model(*batch)
    else:
        result = model(batch)
    if isinstance(result, Mapping) and "loss" in result:
        result = result["loss"]
    elif hasattr(result, "loss"):
        result = result.loss
    elif isinstance(result, tuple):
        (result,) = (each for each in result if isinstance(each, Tensor) and each.dim() == 0)
    return result * num_samples, num_samples


def split_samples(positions: range, ranks: int, micro: int) -> list[list[Sequence[int]]]:
    """Return the positions of each micro-batch, by data-parallel rank.

    Ranks take contiguous parts, the first ones one more where it does not divide; each rank cuts
    its part into micro-batches in order. All have as many as the first; the last may be empty.
    """
    size, longer = divmod(len(positions), ranks)
    found: list[list[Sequence[int]]] = []
    start = 0
    for rank in range(ranks):
        stop = start + size + (1 if rank < longer else 0)
        own = positions[start:stop]
        start = stop
        found.append([own[first : first + micro] for first in range(0, max(len(own), 1), micro)])
    longest = max(len(of_rank) for of_rank in found)
    for of_rank in found:
        of_rank += [()] * (longest - len(of_rank))
    return found
