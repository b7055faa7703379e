"""One way to run a model, as the planner considers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from zrun_core.memory.buffers import ON_DEVICE, Placement, Tier
from zrun_core.pipeline.schedule import num_flowing
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.spine.sections.schedules import PLAIN, SCHEDULES, Schedule


class CandidateKey(NamedTuple):
    """The part of a candidate on which the work of one rank in a micro-batch depends."""

    micro: int
    tp: int
    sequence_parallel: bool
    checkpoint: str
    precision: str


@dataclass(frozen=True)
class Candidate:
    """A configuration.

    Attributes:
        micro: samples of a micro-batch.
        accumulation: micro-batches of a step on each data-parallel rank.
        checkpoint: "none", "full", "every_n" or "selective".
        precision: "fp32", "bf16" or "fp16".
        sequence_parallel: tensor-parallel ranks divide what lies between their products, too.
        schedule: as of `parallel.schedule`: the order of its forwards and backwards.
        split: names of the first block of each chunk but the first; none: where it is most even.
        init: "factory": a node holds the whole model while it is built; "meta": none does.
        partition: tensor-parallel ranks divide the inputs of recomputed blocks (P_a).
    """

    stage: int
    dims: ParallelDims
    micro: int
    accumulation: int
    checkpoint: str = "none"
    precision: str = "bf16"
    placement: Placement = ON_DEVICE
    sequence_parallel: bool = False
    init: str = "factory"
    schedule: str = PLAIN
    split: tuple[str, ...] = ()
    partition: bool = False

    @property
    def input_ranks(self) -> int:
        """Ranks that divide the inputs of recomputed blocks. Those of sequences are slices."""
        divides = self.partition and self.checkpoint != "none" and not self.sequence_parallel
        return self.dims.tp if divides else 1

    @property
    def order(self) -> Schedule:
        """What sets its schedule apart from others."""
        return SCHEDULES[self.schedule]

    @property
    def layer_major(self) -> bool:
        """True if all micro-batches go through a block before the next one comes."""
        return self.order.goes_in_slices

    @property
    def global_batch(self) -> int:
        return self.micro * self.accumulation * self.dims.dp

    @property
    def key(self) -> CandidateKey:
        return CandidateKey(
            self.micro, self.dims.tp, self.sequence_parallel, self.checkpoint, self.precision
        )

    @property
    def offloads(self) -> bool:
        """True if a state or activation lives elsewhere than on the device."""
        return self.placement.uses(Tier.HOST) or self.placement.uses(Tier.DISK)

    def why_not_placed(self, optimizer: str, *, layer_wise: bool) -> str:
        """Return why its states cannot live where they are placed; "" if they can.

        Args:
            layer_wise: all units propose an update before the first is applied.
        """
        here = self.placement
        if here.param is not Tier.DEVICE and self.stage < 3:
            return f"parameters on {here.param} need zero.stage: 3, where they come for their use"
        if here.grad is not Tier.DEVICE and here.optimizer is Tier.DEVICE:
            return f"gradients on {here.grad} need an optimizer there or on another tier"
        if here.optimizer is Tier.DISK and layer_wise:
            return (
                f"{optimizer} on a disk would read and write 40 bytes per parameter and step, "
                "because all updates are proposed before the first is applied: write "
                "offload.optimizer: host, or an elementwise optimizer such as adamw"
            )
        if here.activation is not Tier.DEVICE and self.checkpoint == "none":
            return f"activations on {here.activation} are inputs of recomputed blocks: none is"
        return ""

    def why_not_scheduled(self) -> str:
        """Return why its schedule cannot have so many chunks on a stage; "" if it can."""
        schedule = self.schedule
        virtual = self.dims.virtual
        if virtual > 1 and not self.order.has_chunks:
            one = f"{schedule} has one chunk on each stage"
            return f"parallel.virtual: {virtual}: {one}: write schedule: interleaved"
        if virtual == 1 and self.order.has_chunks:
            return (
                f"parallel.schedule: {schedule} has 2 chunks on each stage or more: write "
                "virtual: 2"
            )
        if self.order.goes_in_slices:
            return f"parallel.schedule: {schedule} is for the whole model on a rank: write pp: 1"
        return ""

    @property
    def flowing(self) -> int:
        """Micro-batches that go through the pipeline before it is drained."""
        return num_flowing(self.schedule, self.dims.pp, self.accumulation)

    def __str__(self) -> str:
        dims = self.dims
        words = [f"zero {self.stage}", f"dp {dims.dp}"]
        if dims.tp > 1:
            words.append(f"tp {dims.tp}+sp" if self.sequence_parallel else f"tp {dims.tp}")
        if dims.pp > 1:
            words.append(f"pp {dims.pp}x{dims.virtual}" if dims.virtual > 1 else f"pp {dims.pp}")
            words.append(self.schedule)
        if self.stage and dims.shard_size < dims.dp:
            words.append(f"shard {dims.shard_size}")
        words.append(f"micro {self.micro} x {self.accumulation}")
        if self.checkpoint != "none":
            divided = " of divided inputs" if self.input_ranks > 1 else ""
            words.append(f"checkpoint {self.checkpoint}{divided}")
        if self.offloads:
            words.append(_offloads_in_words(self.placement))
        return ", ".join([*words, self.precision])


def features(candidate: Candidate) -> int:
    """Return how much of what a plain data-parallel run does without a candidate uses."""
    dims = candidate.dims
    here = candidate.placement
    tiers = (here.param, here.grad, here.optimizer, here.activation)
    used = [
        dims.tp > 1,
        dims.pp > 1,
        dims.pp > 1 and candidate.schedule != PLAIN,
        candidate.checkpoint != "none",
        candidate.stage == 3,
        candidate.stage > 0 and dims.shard_size < dims.dp,
        candidate.offloads,
        *(tier is not Tier.DEVICE for tier in tiers),
    ]
    return used.count(True)


def changes(base: Candidate, other: Candidate) -> int:
    """Return how many keys of a job differ; the accumulation follows from the others."""
    keys: tuple[Callable[[Candidate], object], ...] = (
        lambda c: c.stage,
        lambda c: c.micro,
        lambda c: c.checkpoint,
        lambda c: c.precision,
        lambda c: c.placement,
        lambda c: c.dims.tp,
        lambda c: c.sequence_parallel,
        lambda c: (c.dims.pp, c.dims.virtual),
        lambda c: c.dims.world_size,
        lambda c: c.stage > 0 and c.dims.shard_size < c.dims.dp,
        lambda c: c.init,
    )
    return sum(key(base) != key(other) for key in keys)


def _offloads_in_words(place: Placement) -> str:
    homes = {
        "param": place.param,
        "grad": place.grad,
        "optimizer": place.optimizer,
        "activations": place.activation,
    }
    away = [f"{name} on {tier}" for name, tier in homes.items() if tier is not Tier.DEVICE]
    share = f" ({place.fraction:.0%})" if place.fraction < 1 else ""
    return ", ".join(away) + share
