"""What micro-batches take on the first rank of a pipeline stage, for every way to compute them.

    model.peak(candidate, stage, steady)        the largest live set
    model.held(candidate)                       there all the time: batches, a workspace
    model.waiting(candidate, stage)             inputs of recomputed blocks, where they wait

Peaks cost the most of a search; candidates that compute alike share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zrun_core.errors import JobError
from zrun_core.hardware.hardware import Hardware
from zrun_core.memory.buffers import Buffer, Kind, Tier
from zrun_core.memory.layout import whole_pages
from zrun_core.memory.tier_traffic import Direction, Move
from zrun_core.plan.memory import rank_memory
from zrun_core.plan.memory.rank_memory import PipelineStage
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.timing.cost_model import CostModel
from zrun_core.plan.trace.peak import Course, Passes, Peak
from zrun_core.plan.trace.profile import Profile
from zrun_core.plan.trace.rows import TracePhase
from zrun_core.spine.config import JobConfig

_INPUT_SLOTS = "slots of inputs of blocks"
_INPUT_WRITES = 2  # of them are on their way to a disk at a time


class ActivationModel:
    """Computes the activations of candidates, each kind once."""

    def __init__(
        self, cost_model: CostModel, job: JobConfig, hardware: Hardware, device_type: str
    ) -> None:
        """
        Args:
            device_type: "cuda" or "cpu".
        """
        self._cost_model = cost_model
        self._subject = cost_model.subject
        self._job = job
        self._hardware = hardware
        self._device_type = device_type
        self._peaks: dict[tuple[object, ...], Peak] = {}
        self._beyond: dict[tuple[object, ...], int] = {}

    # At the peak

    def peak(
        self, candidate: Candidate, stage: PipelineStage, steady: Mapping[TracePhase, int]
    ) -> Peak:
        """Return the largest live set of a stage.

        Args:
            stage: its blocks, and the micro-batches that it holds.
            steady: bytes that are there anyway, by phase.

        Raises:
            JobError: nothing tells what its micro-batches take.
        """
        # Peaks differ by what the phases have beyond each other: stages of ZeRO share most of them.
        least = min(steady.values())
        beyond = {phase: size - least for phase, size in steady.items()}
        key = (
            candidate.micro,
            candidate.checkpoint,
            candidate.precision,
            rank_memory.adds_gradients(candidate),
            candidate.dims.tp,
            candidate.sequence_parallel,
            stage,
            tuple(beyond.values()),
            rank_memory.moves_inputs(candidate),
            candidate.input_ranks,
            rank_memory.makes_weights_late(candidate),
        )
        found = self._peaks.get(key)
        if found is None:
            found = self._peaks[key] = self._passes(candidate, stage, beyond).peak()
        return replace(found, num_bytes=found.num_bytes + least)

    def course(
        self, candidate: Candidate, stage: PipelineStage, steady: Mapping[TracePhase, int]
    ) -> Course:
        """Return what a stage holds through a step, arguments as of `peak`."""
        return self._passes(candidate, stage, steady).course()

    def _passes(
        self, candidate: Candidate, stage: PipelineStage, steady: Mapping[TracePhase, int]
    ) -> Passes:
        cuda = self._device_type == "cuda"
        every = self._every(candidate)
        profile = self._profile(candidate)
        return rank_memory.passes(profile, candidate, stage, steady, every=every, cuda=cuda)

    def reserved_beyond(self, candidate: Candidate, stage: PipelineStage, peak: Peak) -> int:
        """Return the bytes that the allocator holds beyond those in use at the peak of a stage."""
        is_cuda = self._device_type == "cuda"
        has_stages = candidate.dims.pp > 1
        if has_stages and is_cuda:
            return rank_memory.slack_of_stage(peak.dynamic)
        profile = self._profile(candidate)
        away = rank_memory.moves_inputs(candidate)
        passes = candidate.flowing if has_stages else min(2, candidate.accumulation)
        of_stage = (candidate.schedule, stage) if has_stages else None
        key = (candidate.key, passes, away, candidate.input_ranks, candidate.init, of_stage)
        every = self._every(candidate)
        if key not in self._beyond:
            if is_cuda:
                self._beyond[key] = rank_memory.reserved_beyond(profile, candidate, every)
            else:
                self._beyond[key] = rank_memory.heap_beyond(profile, candidate, stage, peak, every)
        return self._beyond[key]

    def kernels(self, candidate: Candidate) -> int:
        """Return the bytes of code that a CPU's library makes for the shapes of products."""
        device = self._hardware.device
        has_instructions = device.flops(candidate.precision) > device.flops("fp32")
        if not has_instructions:
            return 0
        return rank_memory.kernel_bytes(self._profile(candidate), candidate)

    def evaluation(self, candidate: Candidate) -> int:
        """Return the bytes that an evaluation holds of a micro-batch, as the allocator gives them.

        Where ranks have parts of the layers, it is taken to be that of all of them.
        """
        if self._job.eval is None:
            return 0
        num_bytes = self._subject.whole.evaluation_bytes.at(candidate.micro)
        return round(num_bytes * (1 + rank_memory.HEAP_SLACK))

    def generation(self) -> int:
        """Return the bytes that the bundled hook holds while it makes text, as `evaluation`."""
        return round(self._subject.whole.generation_bytes * (1 + rank_memory.HEAP_SLACK))

    @property
    def hooks_gather(self) -> bool:
        """Whether a hook has all parameters of a rank whole at once."""
        return self._subject.whole.hooks_gather

    # Beside it

    def held(self, candidate: Candidate) -> list[Buffer]:
        """Return what is on the device all the time: batches, and the library's workspace."""
        batches = candidate.flowing
        if self._device_type == "cuda":
            batches = min(2, batches)  # the one in use, and the one that is copied meanwhile
        batch_bytes = round(batches * self._subject.whole.batch_bytes.at(candidate.micro))
        found = [Buffer("batch", Kind.ACTIVATION, batch_bytes)]
        workspace = self._hardware.device.workspace_bytes
        if workspace:
            found.append(Buffer("workspace of matrix products", Kind.TEMP, workspace))
        if self._device_type == "cpu" and candidate.placement.activation is Tier.DISK:
            found.append(Buffer(_INPUT_SLOTS, Kind.RING, self._input_slots(candidate)))
        return found

    def waiting(self, candidate: Candidate, stage: PipelineStage) -> list[Buffer]:
        """Return what the inputs of a stage's recomputed blocks take where they wait."""
        tier = candidate.placement.activation
        share = stage.held_blocks / max(1, self._subject.num_blocks)
        num_bytes = round(share * sum(map(whole_pages, self._input_sizes(candidate))))
        if not num_bytes:
            return []
        name = "inputs of recomputed blocks"
        found = [Buffer(name, Kind.ACTIVATION, num_bytes, tier, pinned=tier is Tier.HOST)]
        if tier is Tier.DISK and self._device_type == "cuda":
            slots = self._input_slots(candidate)
            found.append(Buffer(_INPUT_SLOTS, Kind.RING, slots, Tier.HOST, pinned=True))
        return found

    def moved(self, candidate: Candidate) -> dict[Move, int]:
        """Return the bytes of inputs of recomputed blocks that move: the last one does not return.

        Of a pipeline they are those of all its stages.
        """
        sizes = self._input_sizes(candidate)
        if not sizes:
            return {}
        by_direction = {Direction.WRITTEN: sum(sizes), Direction.READ: sum(sizes[:-1])}
        tiers = [candidate.placement.activation]
        if self._device_type == "cuda" and tiers == [Tier.DISK]:
            tiers.append(Tier.HOST)
        return {
            Move(tier, direction, Kind.ACTIVATION): candidate.accumulation * num_bytes
            for tier in tiers
            for direction, num_bytes in by_direction.items()
            if num_bytes
        }

    def _input_sizes(self, candidate: Candidate) -> list[int]:
        """Return the bytes of the inputs of all recomputed blocks, if they wait elsewhere."""
        if not rank_memory.moves_inputs(candidate):
            return []
        profile = self._profile(candidate)
        return rank_memory.input_bytes(profile, candidate, self._every(candidate))

    def _input_slots(self, candidate: Candidate) -> int:
        """Return the bytes of host memory in which inputs are on their way to a disk."""
        return _INPUT_WRITES * whole_pages(max(self._input_sizes(candidate), default=0))

    # What it was traced with

    def source(self, candidate: Candidate) -> str:
        """Return where activations come from, as `Estimate.source`.

        Raises:
            JobError: nothing tells of them.
        """
        return self._profile(candidate).source_of(candidate.checkpoint)

    def _profile(self, candidate: Candidate) -> Profile:
        """Return the trace of what a rank computes.

        Raises:
            JobError: it was not traced so.
        """
        dims = candidate.dims
        profile = self._subject.traced(dims.tp, sequence=candidate.sequence_parallel)
        if candidate.checkpoint not in profile.traces:
            raise self.untraced(candidate)
        return profile

    def untraced(self, candidate: Candidate) -> JobError:
        """Return the error that nothing tells what micro-batches take."""
        policy = candidate.checkpoint
        message = f"checkpoint {policy}: the model was not traced with it"
        dims = candidate.dims
        traced = self._subject.traced(dims.tp, sequence=candidate.sequence_parallel)
        if why := traced.untraced.get(policy):
            message += f": {why}"
        return JobError(message)

    def _every(self, candidate: Candidate) -> int:
        """Return of how many blocks one is recomputed."""
        return self._job.activations.n if candidate.checkpoint == "every_n" else 1
