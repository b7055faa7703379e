"""A candidate's memory and time: the buffers that the runtime allocates, the traced peak, the allocator, the clock.

    planner = Planner(profile, parse_simulate("64x8xA100-80G"), job)
    planner.estimate(candidate).fits

`estimate` is the same for one candidate. A `Planner` keeps what candidates have in common, so that a thousand of them
cost little more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from zrun_core.errors import JobError
from zrun_core.hardware.hardware import MIB, Hardware
from zrun_core.memory.buffers import Buffer, Kind, Placement, Tier
from zrun_core.memory.layout import UnitLayout
from zrun_core.memory.state_policy import ZeroPolicy
from zrun_core.plan.answer.outcome import FROM_DATA_SHEETS, Estimate, RankMemory
from zrun_core.plan.memory import rank_memory
from zrun_core.plan.memory.allocator import pinned_bytes
from zrun_core.plan.memory.rank_memory import PipelineStage
from zrun_core.plan.memory.states import (
    FIRST,
    PAPER_ADAM_BYTES,
    PAPER_GRAD_BYTES,
    PAPER_PARAM_BYTES,
    PlannedModel,
    layouts_of_rank,
    mesh_info_of_rank,
    plan_model,
    plan_shape,
    rank_buffers,
    settings_of,
)
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.question.transformer import TransformerShape
from zrun_core.plan.timing.cost_model import CostModel
from zrun_core.plan.timing.micro_batch_cost import TimingSettings
from zrun_core.plan.timing.timing import StepTime, step_time
from zrun_core.plan.trace.module_tree import skeleton_of
from zrun_core.plan.trace.peak import Peak
from zrun_core.plan.trace.profile import Profile
from zrun_core.plan.trace.rows import TracePhase
from zrun_core.spine.config import JobConfig, PrecisionConfig
from zrun_core.spine.parallel_dims import Coordinates, ParallelDims
from zrun_core.zero.exchange import StepCounts, expected_traffic
from zrun_core.zero.precision import Precision
from zrun_core.zero.sharded_model import ShardingConfig

__all__ = [
    "Candidate",
    "Estimate",
    "Placement",
    "Planner",
    "RankMemory",
    "StepTime",
    "Tier",
    "estimate",
]

_PROCESS_BYTES = {
    "cuda": 1800 * MIB,
    "cpu": 0,
}  # of a rank in its host's memory; on a CPU it is the device's context
_LOADER_BYTES = 220 * MIB  # of a process that reads data
_PHASES = tuple(TracePhase)


def estimate(
    candidate: Candidate,
    subject: Profile | TransformerShape,
    hardware: Hardware,
    job: JobConfig | None = None,
    *,
    formula: TransformerShape | None = None,
) -> Estimate:
    """What `candidate` takes.

    Args:
        job: what is not the candidate's: the optimizer, formats of reductions, sizes of units, loaders.
        formula: the shape of a traced model, for what is divided by tensor parallelism.

    Raises:
        JobError: it is impossible: nothing divides so, or nothing tells what its micro-batches take.
    """
    return Planner(subject, hardware, job, formula=formula).estimate(candidate)


def job_of_size(precision: str = "bf16") -> JobConfig:
    """A job that says nothing, for models that are a size only."""
    return JobConfig.model_validate(
        {
            "name": "size",
            "model": "size:size",
            "data": "size:size",
            "steps": 1,
            "batch": {"micro": 1},
            "precision": precision,
        }
    )


def _no_code(name: str) -> Any:
    raise JobError(f"optim.name: {name} is the job's own code, and this estimate has no job")


class _StageStates(NamedTuple):
    """Steady bytes of a stage."""

    buffers: tuple[Buffer, ...]
    layouts: tuple[UnitLayout, ...]
    steady: Mapping[TracePhase, int]  # on the device
    moments: tuple[int, ...]  # bytes of each one that the optimizer keeps there
    pinned: int
    pageable: int
    disk: int


class Planner:
    """Estimates candidates of one model on one kind of hardware.

    Attributes:
        costs: what micro-batches take in time.
        num_blocks: repeated blocks of the model.
        tokens_per_sample: None where samples are no tokens.
        num_samples: of the training data; None where that is not known.
    """

    def __init__(
        self,
        subject: Profile | TransformerShape,
        hardware: Hardware,
        job: JobConfig | None = None,
        *,
        formula: TransformerShape | None = None,
        load: Callable[[str], Any] = _no_code,
    ) -> None:
        """
        Args:
            load: finds the optimizer that the job names as `module:attr`.

        Raises:
            JobError: there is no such optimizer, or it cannot be sharded.
        """
        self.subject, self.hardware = subject, hardware
        self.job = job if job is not None else job_of_size()
        self.device_type = "cpu" if hardware.device.kind == "cpu" else "cuda"
        self.settings = settings_of(self.job, load, self.device_type)
        shape = subject if isinstance(subject, TransformerShape) else formula
        self.cost_model = CostModel(subject, hardware, self._terms(shape), formula)
        if isinstance(subject, TransformerShape):
            self.num_blocks, self.tokens_per_sample = subject.layers, subject.seq
            self.num_samples: int | None = None
            self.num_params = subject.params
        else:
            self.num_blocks, self.num_params = subject.num_blocks, subject.num_params
            self.tokens_per_sample = subject.tokens_per_sample  # type: ignore[assignment]
            self.num_samples = subject.num_samples
        self._cuts: dict[tuple[object, ...], PlannedModel] = {}
        self._peaks: dict[tuple[object, ...], Peak] = {}
        self._beyond: dict[tuple[object, ...], int] = {}
        self._settings: dict[tuple[object, ...], ShardingConfig] = {}
        self._states: dict[tuple[object, ...], _StageStates] = {}

    def _terms(self, shape: TransformerShape | None) -> TimingSettings:
        chosen = self.settings.optimizer
        assert chosen is not None
        return TimingSettings(
            reduce_bytes=self.settings.precision.reduce.itemsize,
            moments=chosen.moments,
            moment_bytes=chosen.moment_dtype.itemsize,
            prefetch=self.settings.prefetch,
            every_n=self.job.activations.n,
            fused=self.job.compile,
            causal=shape is None or not shape.name.startswith("bert"),
        )

    # States

    def settings_for(self, candidate: Candidate) -> ShardingConfig:
        """How a job with this candidate's keys would be sharded."""
        key = (candidate.stage, candidate.precision, candidate.checkpoint != "none")
        found = self._settings.get(key)
        if found is None:
            config = PrecisionConfig(compute=candidate.precision, reduce=self.job.precision.reduce)  # type: ignore[arg-type]
            found = self._settings[key] = replace(
                self.settings,
                zero=ZeroPolicy(candidate.stage),
                precision=Precision.of(config),
                recomputes_blocks=candidate.checkpoint != "none",
            )
        return found

    def cut(self, candidate: Candidate) -> PlannedModel:
        """The units of what one tensor-parallel rank has.

        Raises:
            JobError: the model does not divide so.
        """
        tp = candidate.dims.tp
        key = (tp, candidate.precision)
        found = self._cuts.get(key)
        if found is None:
            settings = self.settings_for(candidate)
            if isinstance(self.subject, Profile) and tp == 1:
                try:
                    model = skeleton_of(self.subject)
                except ValueError as error:
                    raise JobError(f"the states of this model are not known: {error}") from None
                found = plan_model(model, settings, self.subject.buffer_bytes)
            else:
                if self.cost_model.formula is None:
                    raise JobError(
                        f"tp {tp}: how this model is divided is not known: it has no transformer's shape"
                    )
                try:
                    found = plan_shape(self.cost_model.formula, settings, tp)
                except ValueError as error:
                    raise JobError(f"tp {tp}: {error}") from None
            self._cuts[key] = found
        return found

    def states(self, candidate: Candidate, index: int) -> _StageStates:
        """The buffers of a stage's first rank, which are there from step to step."""
        key = (
            candidate.stage,
            candidate.dims,
            candidate.precision,
            candidate.checkpoint != "none",
            candidate.placement,
            index,
        )
        found = self._states.get(key)
        if found is None:
            settings, dims = self.settings_for(candidate), candidate.dims
            cut = self.cut(candidate)
            rank = Coordinates(pp=index)
            try:
                buffers = rank_buffers(
                    cut,
                    settings,
                    dims,
                    rank=rank,
                    placement=candidate.placement,
                    device=self.device_type,
                )
            except ValueError as error:
                raise JobError(f"pp {dims.pp}: {error}") from None
            peers = mesh_info_of_rank(settings, dims, rank, self.device_type)
            hosted = [buffer for buffer in buffers if buffer.tier is Tier.HOST]
            found = _StageStates(
                tuple(buffers),
                layouts_of_rank(cut, settings, dims, rank, peers),
                _by_phase(buffers),
                tuple(each.num_bytes for each in buffers if each.is_moment),
                sum(pinned_bytes(buffer.num_bytes) for buffer in hosted if buffer.pinned),
                sum(buffer.num_bytes for buffer in hosted if not buffer.pinned),
                sum(buffer.num_bytes for buffer in buffers if buffer.tier is Tier.DISK),
            )
            self._states[key] = found
        return found

    # One rank

    def rank(self, candidate: Candidate, index: int) -> RankMemory:
        """The first rank of a pipeline stage."""
        cuda = self.device_type == "cuda"
        stage = PipelineStage.of(candidate.dims, index, self.num_blocks, candidate.accumulation)
        states, others = self.states(candidate, index), self._others(candidate)
        beside = sum(buffer.num_bytes for buffer in others)
        steady = {phase: num_bytes + beside for phase, num_bytes in states.steady.items()}
        peak = self.peak(candidate, stage, steady)
        allocated = peak.num_bytes
        reserved = allocated + self._reserved_beyond(candidate, peak, states)
        if cuda:
            reserved = -(-reserved // (2 * MIB)) * 2 * MIB
        return RankMemory(
            _role(candidate.dims, index),
            (*states.buffers, *others),
            peak,
            allocated,
            reserved,
            reserved + self.outside(candidate.dims) + (0 if cuda else self._kernels(candidate)),
            states.pinned,
            states.pageable + _PROCESS_BYTES[self.device_type],
            states.disk,
        )

    def _others(self, candidate: Candidate) -> list[Buffer]:
        """What else is on the device all the time: the batch, and the library's workspace."""
        batches = (
            candidate.accumulation if self.device_type == "cpu" else min(2, candidate.accumulation)
        )
        found = [
            Buffer("batch", Kind.ACTIVATION, round(batches * self._batch_bytes(candidate.micro)))
        ]
        if self.hardware.device.workspace_bytes:
            found.append(
                Buffer(
                    "workspace of matrix products", Kind.TEMP, self.hardware.device.workspace_bytes
                )
            )
        return found

    def _batch_bytes(self, micro: int) -> float:
        if isinstance(self.subject, Profile):
            return self.subject.batch_bytes.at(micro)
        return 2.0 * 8 * micro * self.subject.seq  # tokens and labels, int64

    def peak(
        self, candidate: Candidate, stage: PipelineStage, steady: Mapping[TracePhase, int]
    ) -> Peak:
        """The largest live set of a stage.

        Raises:
            JobError: nothing tells what its micro-batches take.
        """
        least = min(steady.values())
        beyond = {phase: size - least for phase, size in steady.items()}
        dims = candidate.dims
        key = (
            candidate.micro,
            candidate.checkpoint,
            candidate.precision,
            rank_memory.adds_gradients(candidate),
            dims.tp,
            candidate.sequence_parallel,
            stage.blocks,
            stage.held,
            stage.first,
            stage.last,
            tuple(beyond.values()),
        )
        found = self._peaks.get(key)
        if found is None:
            if self.cost_model.uses_formula(candidate.key):
                assert self.cost_model.formula is not None
                found = rank_memory.by_formula(
                    self.cost_model.formula, candidate, stage, beyond, self.job.activations.n
                )
            else:
                assert isinstance(self.subject, Profile)
                if candidate.checkpoint not in self.subject.traces:
                    raise self._untraced(candidate)
                cuda = self.device_type == "cuda"
                found = rank_memory.traced(self.subject, candidate, stage, beyond, cuda=cuda)
            self._peaks[key] = found
        return replace(found, num_bytes=found.num_bytes + least)

    def _reserved_beyond(self, candidate: Candidate, peak: Peak, states: _StageStates) -> int:
        if self.cost_model.uses_formula(candidate.key) or candidate.dims.pp > 1:
            return rank_memory.formula_slack(peak.dynamic)
        assert isinstance(self.subject, Profile)
        late = () if self.device_type == "cuda" else states.moments
        key = (candidate.checkpoint, candidate.micro, min(2, candidate.accumulation), late)
        if key not in self._beyond:
            if self.device_type == "cuda":
                self._beyond[key] = rank_memory.reserved_beyond(self.subject, candidate)
            else:
                self._beyond[key] = rank_memory.heap_beyond(self.subject, candidate, peak, late)
        return self._beyond[key]

    def _kernels(self, candidate: Candidate) -> int:
        if self.cost_model.uses_formula(candidate.key):
            return 0
        assert isinstance(self.subject, Profile)
        return rank_memory.kernel_bytes(self.subject, candidate)

    def outside(self, dims: ParallelDims) -> int:
        """Bytes of a device outside of its allocator: the driver's, and those of each group that a rank belongs to."""
        groups = {
            dims.world_size,
            dims.tp,
            dims.dp,
            dims.pp,
            dims.shard_size,
            dims.dp // dims.shard_size,
        } - {1}
        device = self.hardware.device
        imported = (
            rank_memory.BUILDS_ON_META if self.device_type == "cpu" and dims.world_size > 1 else 0
        )
        return device.context_bytes + imported + len(groups) * device.communicator_bytes

    # All of it

    def overshoot(self, candidate: Candidate) -> int:
        """Bytes that the fullest device lacks; 0 or less if the device has enough of them.

        Raises:
            JobError: it is impossible.
        """
        self._check(candidate)
        used, capacity = 0, self.hardware.device.memory_bytes
        beside = sum(buffer.num_bytes for buffer in self._others(candidate)) + self.outside(
            candidate.dims
        )
        for index in self._stages(candidate.dims):
            stage = PipelineStage.of(candidate.dims, index, self.num_blocks, candidate.accumulation)
            in_use = (
                self.peak(candidate, stage, self.states(candidate, index).steady).num_bytes + beside
            )
            # What the allocator takes beyond that is asked only where it may decide.
            used = max(
                used, in_use if in_use > capacity else self.rank(candidate, index).device_used
            )
            if used > capacity:
                break
        return used - capacity

    @staticmethod
    def _stages(dims: ParallelDims) -> list[int]:
        """One pipeline stage of each class: of those in the middle, the one that holds most micro-batches."""
        return sorted({0, min(1, dims.pp - 1), dims.pp - 1})

    def estimate(self, candidate: Candidate, *, traffic: bool = True) -> Estimate:
        """What `candidate` takes, without `Estimate.traffic` if nobody wants it.

        Raises:
            JobError: it is impossible.
        """
        self._check(candidate)
        dims = candidate.dims
        ranks = tuple(self.rank(candidate, index) for index in self._stages(dims))
        host = self._host(candidate, ranks)
        uses_formula = self.cost_model.uses_formula(candidate.key)
        source = "formula"
        if not uses_formula and isinstance(self.subject, Profile):
            source = self.subject.source_of(candidate.checkpoint)
        # What is guessed rules nothing out: that only what is known can do.
        known = tuple(map(self._known, ranks)) if source == "guessed" else ranks
        fits = self._fits(candidate, known, self._host(candidate, known))
        return Estimate(
            candidate,
            ranks,
            self.paper_bytes(candidate),
            _of_host(host),
            self.time(candidate),
            self.hardware.device.memory_bytes,
            fits,
            source,
            tuple(self._notes(candidate, source)),
            host,
            self.traffic(candidate) if traffic else {},
            isinstance(self.subject, Profile) and self.subject.is_ragged,
        )

    def _known(self, rank: RankMemory) -> RankMemory:
        """`rank` without its activations and temporaries."""
        num_bytes = rank.allocated - rank.peak.dynamic
        outside = rank.device_used - rank.reserved
        return replace(
            rank,
            allocated=num_bytes,
            reserved=num_bytes,
            device_used=num_bytes + outside,
        )

    def _fits(
        self,
        candidate: Candidate,
        ranks: Sequence[RankMemory],
        host: Mapping[str, int],
    ) -> bool:
        hardware = self.hardware
        if max(rank.device_used for rank in ranks) > hardware.device.memory_bytes:
            return False
        if _of_host(host) > hardware.host_bytes:
            return False
        local = min(hardware.devices_per_node, candidate.dims.world_size)
        disk = local * max(rank.disk for rank in ranks)
        is_unknown = not hardware.disk_bytes and hardware.measured
        return not disk or disk <= hardware.disk_bytes or is_unknown

    def time(self, candidate: Candidate) -> StepTime:
        """The time of a step.

        Raises:
            JobError: nothing tells what its micro-batches take.
        """
        try:
            return step_time(self.cost_model, candidate, self.tokens_per_sample)
        except KeyError:
            raise self._untraced(candidate) from None

    def _untraced(self, candidate: Candidate) -> JobError:
        policy, subject = candidate.checkpoint, self.subject
        why = subject.untraced.get(policy) if isinstance(subject, Profile) else None
        because = f": {why}" if why else ""
        return JobError(f"checkpoint {policy}: the model was not traced with it{because}")

    def _check(self, candidate: Candidate) -> None:
        dims, hardware, traced = candidate.dims, self.hardware, self.job.precision.compute
        if isinstance(self.subject, Profile) and candidate.precision != traced:
            raise JobError(
                f"precision {candidate.precision}: the model was traced in {traced}: trace it anew"
            )
        if dims.world_size > hardware.num_devices:
            raise JobError(
                f"{candidate}: {dims.world_size} ranks on {hardware.num_devices} devices: name "
                "more of them, or fewer ranks"
            )
        if dims.pp * dims.virtual > max(1, self.num_blocks):
            raise JobError(
                f"pp {dims.pp} with {dims.virtual} parts each: the model has {self.num_blocks} repeated blocks only"
            )
        if dims.virtual > 1 and candidate.accumulation % dims.pp:
            raise JobError(
                f"virtual {dims.virtual}: interleaved stages take micro-batches in groups of {dims.pp}, and a step has "
                f"{candidate.accumulation}"
            )

    def paper_bytes(self, candidate: Candidate) -> dict[str, float]:
        """States of a rank as papers count them, by kind: 2 bytes of parameters and of gradients, and 12."""
        dims = candidate.dims
        params = self.num_params / (dims.tp * dims.pp)
        share = dims.shard_size
        return {
            "params": PAPER_PARAM_BYTES * params / (share if candidate.stage >= 3 else 1),
            "grads": PAPER_GRAD_BYTES * params / (share if candidate.stage >= 2 else 1),
            "optim": PAPER_ADAM_BYTES * params / (share if candidate.stage >= 1 else 1),
        }

    def traffic(self, candidate: Candidate) -> dict[str, int]:
        """Bytes that the first rank of the first stage sends to data-parallel peers in a step, by collective."""
        settings, dims = self.settings_for(candidate), candidate.dims
        often = StepCounts(1, candidate.accumulation, 1)
        peers = mesh_info_of_rank(settings, dims, FIRST, self.device_type)
        layouts = self.states(candidate, 0).layouts
        return expected_traffic(layouts, settings.states, settings.exchange, often, peers)

    def can_build(self, world: int) -> bool:
        """Whether a node has room for the whole model, as its factory makes it."""
        processes = min(self.hardware.devices_per_node, world) * _PROCESS_BYTES[self.device_type]
        return self._whole_bytes + processes <= self.hardware.host_bytes

    @property
    def _whole_bytes(self) -> int:
        return 0 if self.job.model.call == "size:size" else 4 * self.num_params

    def _host(self, candidate: Candidate, ranks: Iterable[RankMemory]) -> dict[str, int]:
        """Bytes of a node's memory by what they are for. A node with several stages has the fullest ones."""
        local = min(self.hardware.devices_per_node, candidate.dims.world_size)
        process = _PROCESS_BYTES[self.device_type]
        whole = 0 if candidate.init == "meta" else self._whole_bytes
        found = {
            "pinned": local * max(rank.pinned for rank in ranks),
            "pageable": local * (max(rank.pageable for rank in ranks) - process),
            "processes": local * process,
            "loaders": local * self.job.data.workers * _LOADER_BYTES,
            "build": whole,
        }
        if self.hardware.shares_memory:
            found["training"] = local * max(rank.device_used for rank in ranks)
        return found

    def _notes(self, candidate: Candidate, source: str) -> list[str]:
        notes = [
            f"zrun plans {what} and does not train with it yet" for what in candidate.lacking()
        ]
        if isinstance(self.subject, Profile):
            policy = candidate.checkpoint
            if source == "guessed":
                reason = self.subject.untraced.get(policy) or self.subject.why
                notes.append(f"activations with checkpoint {policy} are not known: {reason}")
            elif source == "formula":
                notes.append("activations by formula: the model was not traced so")
            elif self.subject.why:
                notes.append(f"activations {source}: {self.subject.why}")
            notes += self.subject.notes
        if not self.hardware.measured:
            notes.append(FROM_DATA_SHEETS)
        return notes


def _of_host(parts: Mapping[str, int]) -> int:
    """The most that a node holds at once: while it trains, or while it builds the model."""
    return max(sum(parts.values()) - parts["build"], parts["build"] + parts["processes"])


def _by_phase(buffers: Iterable[Buffer]) -> dict[TracePhase, int]:
    """Bytes on the device that are in use in each phase."""
    here = [buffer for buffer in buffers if buffer.tier is Tier.DEVICE]
    return {
        phase: sum(b.num_bytes for b in here if b.phases is None or phase.value in b.phases)
        for phase in _PHASES
    }


def _role(dims: ParallelDims, index: int) -> str:
    if dims.pp == 1:
        return "all"
    return "first" if index == 0 else "last" if index == dims.pp - 1 else "middle"
