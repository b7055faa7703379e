"""Estimates, and the results of a search among them. Plain data, which needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zrun_core.memory.buffers import Buffer
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.timing.timing import StepTime
from zrun_core.plan.trace.peak import Peak

FROM_DATA_SHEETS = "times from data sheets, not from measurements: zrun doctor --bench measures"


@dataclass(frozen=True)
class RankMemory:
    """The memory of the ranks of one class.

    Attributes:
        role: "all", or the place in the pipeline: "first", "middle", "last".
        peak: with the steady buffers in it.
        allocated: by the allocator, at most.
        reserved: with what the allocator holds beside it; on a CPU with the holes of the heap.
        device_used: reserved, and what the driver and its libraries take; on a CPU of the process.
        communicators: of these, between ranks.
        pinned, pageable: of the host's memory.
        evaluation: bytes that an evaluation takes of the device beyond a step; in `reserved`.
        hook: bytes that hooks, as far as they are known, take beyond both; in `reserved`.
    """

    role: str
    buffers: tuple[Buffer, ...]
    peak: Peak
    allocated: int
    reserved: int
    device_used: int
    communicators: int
    pinned: int
    pageable: int
    disk: int
    evaluation: int = 0
    hook: int = 0


@dataclass(frozen=True)
class StageEstimate:
    """A stage of a pipeline.

    Attributes:
        blocks: numbers of the first block of each of its chunks, and of the one after its last.
        num_params: on the stage; tied ones are on several.
        busy: seconds of a step in which it computes.
        in_flight: micro-batches that it holds at most, each counted as often as it is in a chunk.
        activations: bytes of these, of what is temporary, and of the batch.
        device_used: as of `RankMemory`.
        sent: bytes that a rank of it sends to other stages for a micro-batch, exactly:
            `activations`, and `gradients` of what it has got.
    """

    blocks: tuple[tuple[int, int], ...]
    num_params: int
    busy: float
    in_flight: int
    activations: int
    device_used: int
    sent: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Estimate:
    """A candidate on some hardware.

    Attributes:
        paper: bytes of states per rank as papers count them, K = 12, by kind.
        host_bytes: of each node's memory; `host_parts` says for what.
        capacity: bytes of a device.
        is_bound: its batches are of the longest samples: most take less.
        fits: whether it does; where its states alone are known, whether these do.
        source: where activations come from: "traced", "measured on the CPU", or "states
            alone" where nobody knows them.
        notes: what a reader should know.
        traffic: bytes that a rank of the first stage sends per step, exactly: those of parameters
            and their gradients by collective, under "tensor" what it sends to ranks that have
            slices of the same layers, and under "pipe" what it sends to other stages.
        sent_apart: those of "tensor" by collective, and of "pipe" by what is sent.
        pushed: bytes that each other data-parallel rank sends to the first one per step, exactly,
            with a parameter server; else 0.
        moved: bytes that it moves between tiers per step, exactly: by tier ("host" or "disk"), by
            direction ("read" from it or "written" to it), and by kind of state.
        stages: of a pipeline, in order; none without one, or in a search.
        after_blocks: what follows the last block computes as much as so many blocks.
    """

    candidate: Candidate
    ranks: tuple[RankMemory, ...]
    paper: dict[str, float]
    host_bytes: int
    time: StepTime
    capacity: int
    fits: bool
    source: str
    notes: tuple[str, ...] = ()
    host_parts: dict[str, int] = field(default_factory=dict)
    traffic: dict[str, int] = field(default_factory=dict)
    sent_apart: dict[str, dict[str, int]] = field(default_factory=dict)
    pushed: int = 0
    is_bound: bool = False
    moved: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    stages: tuple[StageEstimate, ...] = ()
    after_blocks: float = 0.0

    @property
    def knows_states_only(self) -> bool:
        """True if its bytes and seconds are a bound, so that nobody can say that it fits."""
        return self.source == "states alone"

    @property
    def device_used(self) -> int:
        """Of the fullest rank."""
        return max(rank.device_used for rank in self.ranks)

    @property
    def headroom(self) -> int:
        """Bytes that the fullest device has left; negative where it lacks some."""
        return self.capacity - self.device_used


def offloaded_bytes(host_parts: Mapping[str, int]) -> int:
    """Return the bytes of a node's memory in which states of devices lie.

    Args:
        host_parts: as of an `Estimate`.
    """
    return host_parts["pinned"] + host_parts["pageable"]


@dataclass(frozen=True)
class SearchResult:
    """The results of a search.

    Attributes:
        best: what fits, best first; at most ten, of which no two look the same.
        pareto: what fits and is beaten by nothing in both time and headroom, to a hundredth of
            each; by time.
        rejected: what does not fit, the smallest overshoot first; at most ten, of which no two look
            the same.
        tried: configurations that were estimated.
        pruned: configurations that a bound has ruled out.
        keeps_base: nothing is faster for sure than what was asked for, which is the first of
            `best` then.
        is_interrupted: it was ended before all was considered.
    """

    best: tuple[Estimate, ...]
    pareto: tuple[Estimate, ...]
    rejected: tuple[Estimate, ...]
    tried: int
    pruned: int
    keeps_base: bool = False
    is_interrupted: bool = False
