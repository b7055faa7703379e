"""The memory and the time of candidates, together.

    planner = Planner(profile, parse_simulate("64x8xA100-80G"), job)
    planner.estimate(candidate).fits

The buffers are those that the runtime allocates, the activations those of the traced peak or of a
formula, beyond them lies what the allocator holds, and the time is that of the cost model. A
`Planner` keeps what candidates have in common, so that a thousand of them cost little more than
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zrun_core.errors import JobError
from zrun_core.hardware.hardware import GB, MIB, Hardware
from zrun_core.memory.buffers import Buffer, Kind, Tier
from zrun_core.memory.layout import UnitLayout, whole_pages
from zrun_core.memory.tensors import TENSOR
from zrun_core.memory.tier_traffic import Direction, Move
from zrun_core.pipeline.split import Split
from zrun_core.plan.answer.outcome import (
    FROM_DATA_SHEETS,
    Estimate,
    RankMemory,
    StageEstimate,
    offloaded_bytes,
)
from zrun_core.plan.answer.state_model import StageStates, StateModel
from zrun_core.plan.memory import rank_memory
from zrun_core.plan.memory.rank_memory import PipelineStage
from zrun_core.plan.memory.states import (
    PAPER_ADAM_BYTES,
    PAPER_GRAD_BYTES,
    PAPER_PARAM_BYTES,
    settings_of,
)
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.question.subject import Divide, Subject
from zrun_core.plan.question.transformer import TransformerShape
from zrun_core.plan.timing.cost_model import CostModel
from zrun_core.plan.timing.layer_messages import Messages, stage_messages
from zrun_core.plan.timing.micro_batch_cost import TimingSettings
from zrun_core.plan.timing.timing import StepTime, step_time
from zrun_core.plan.trace.peak import Peak
from zrun_core.plan.trace.profile import Profile
from zrun_core.plan.trace.rows import TracePhase
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.zero.sharding_config import ShardingConfig

# Of a rank in its host's memory; on a CPU that is the device's context.
_PROCESS_BYTES = {"cuda": 1800 * MIB, "cpu": 0}
_LOADER_BYTES = 220 * MIB  # of a process that reads data
_SEGMENT_BYTES = 2 * MIB  # in multiples of which CUDA's allocator reserves memory
_INPUT_SLOTS = "slots of inputs of blocks"
_INPUT_WRITES = 2  # of them are on their way to a disk at a time
_TOKEN_BYTES = 2.0 * 8  # of a token and its label, int64


def job_of_size(precision: str = "bf16") -> JobConfig:
    """Return a job that says nothing, for models that are a size only."""
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


class Planner:
    """Estimates candidates of one model on one kind of hardware.

    Attributes:
        cost_model: of micro-batches, in time.
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
        divide: Divide | None = None,
        load: Callable[[str], Any] = _no_code,
    ) -> None:
        """
        Args:
            subject: the model, traced or as a shape.
            hardware: to run it on.
            job: the rest that decides: the optimizer, formats of reductions, sizes of units,
                loaders.
            formula: the shape of a traced model, for what was not traced.
            divide: traces a part of it, as of `Subject`.
            load: finds the optimizer that the job names as `module:attr`.

        Raises:
            JobError: there is no such optimizer, or it cannot be sharded.
        """
        self.subject = subject
        self.hardware = hardware
        self.job = job if job is not None else job_of_size()
        self.device_type = "cpu" if hardware.device.kind == "cpu" else "cuda"
        settings = settings_of(self.job, load, self.device_type)
        shape = subject if isinstance(subject, TransformerShape) else formula
        timing = _timing_settings(self.job, settings, shape)
        parallel = self.job.parallel
        asked = (parallel.tp, parallel.tp > 1 and parallel.sequence)
        self.parts = Subject(subject, formula, divide, asked)
        self.cost_model = CostModel(self.parts, hardware, timing)
        self.num_blocks: int
        self.num_params: int
        self.tokens_per_sample: int | None
        self.num_samples: int | None
        if isinstance(subject, TransformerShape):
            self.num_blocks = subject.layers
            self.num_params = subject.params
            self.tokens_per_sample = subject.seq
            self.num_samples = None
        else:
            self.num_blocks = subject.num_blocks
            self.num_params = subject.num_params
            self.tokens_per_sample = subject.tokens_per_sample
            self.num_samples = subject.num_samples
        self._settings = settings
        self.pipeline = self.cost_model.pipeline
        self._states = StateModel(self.parts, self.job, settings, self.device_type, self.pipeline)
        self._peaks: dict[tuple[object, ...], Peak] = {}
        self._beyond: dict[tuple[object, ...], int] = {}

    def split(self, candidate: Candidate) -> Split:
        """Return the stages of a candidate.

        Raises:
            JobError: the model cannot be cut so.
        """
        return self.pipeline.split(candidate.dims, candidate.split)

    def stage(self, candidate: Candidate, index: int) -> PipelineStage:
        """Return a stage of a candidate, as its activations see it.

        Raises:
            JobError: the model cannot be cut so.
        """
        if candidate.dims.pp == 1:
            return PipelineStage.whole(candidate, self.num_blocks)
        split = self.split(candidate)
        borders = self.cost_model.border_bytes(candidate, split)
        return PipelineStage.of(candidate, split, index, borders, self.pipeline.costs)

    def _stages(self, candidate: Candidate) -> list[int]:
        """Return a stage of each class: of those alike, the one that holds most micro-batches."""
        dims = candidate.dims
        if dims.pp == 1:
            return [0]
        split = self.split(candidate)
        found: dict[object, int] = {}
        for index in range(dims.pp):
            sizes = tuple(map(len, split.stage_blocks(index)))
            found.setdefault((index == 0, index == dims.pp - 1, sizes), index)
        return sorted(found.values())

    def _role(self, candidate: Candidate, index: int) -> str:
        if candidate.dims.pp == 1:
            return "all"
        if index == 0:
            return "first"
        if index == candidate.dims.pp - 1:
            return "last"
        return "middle" if len(self._stages(candidate)) == 3 else f"stage {index}"

    # One rank

    def rank(self, candidate: Candidate, index: int) -> RankMemory:
        """Return the memory of the first rank of a pipeline stage.

        Raises:
            JobError: it is impossible.
        """
        stage = self.stage(candidate, index)
        states = self._states.of_stage(candidate, index)
        others = self._others(candidate)
        waiting = self._waiting_inputs(candidate, stage)
        beside = sum(buffer.num_bytes for buffer in others)
        steady = {phase: num_bytes + beside for phase, num_bytes in states.steady.items()}
        peak = self.peak(candidate, stage, steady)
        reserved = peak.num_bytes + self._reserved_beyond(candidate, peak, states)
        outside = self.outside(candidate)
        if self.device_type == "cuda":
            reserved = -(-reserved // _SEGMENT_BYTES) * _SEGMENT_BYTES
        else:
            outside += self._kernels(candidate)
        return RankMemory(
            role=self._role(candidate, index),
            buffers=(*states.buffers, *others, *waiting),
            peak=peak,
            allocated=peak.num_bytes,
            reserved=reserved,
            device_used=reserved + outside,
            pinned=states.pinned + _on_tier(waiting, Tier.HOST),
            pageable=states.pageable + _PROCESS_BYTES[self.device_type],
            disk=states.disk + _on_tier(waiting, Tier.DISK),
        )

    def _others(self, candidate: Candidate) -> list[Buffer]:
        """Return what else is on the device all the time: batches, and the library's workspace."""
        batches = candidate.flowing
        if self.device_type == "cuda":
            batches = min(2, batches)  # the one in use, and the one that is copied meanwhile
        batch_bytes = round(batches * self._batch_bytes(candidate.micro))
        found = [Buffer("batch", Kind.ACTIVATION, batch_bytes)]
        workspace = self.hardware.device.workspace_bytes
        if workspace:
            found.append(Buffer("workspace of matrix products", Kind.TEMP, workspace))
        if self.device_type == "cpu" and candidate.placement.activation is Tier.DISK:
            found.append(Buffer(_INPUT_SLOTS, Kind.RING, self._input_slots(candidate)))
        return found

    def _input_sizes(self, candidate: Candidate) -> list[int]:
        """Return the bytes of the inputs of all recomputed blocks, if they wait elsewhere."""
        if not rank_memory.moves_inputs(candidate):
            return []
        profile = None
        if not self.cost_model.uses_formula(candidate.key):
            profile = self._profile(candidate)
        shape = self.cost_model.formula
        return rank_memory.input_bytes(profile, shape, candidate, self._every(candidate))

    def _input_slots(self, candidate: Candidate) -> int:
        """Return the bytes of host memory in which inputs are on their way to a disk."""
        return _INPUT_WRITES * whole_pages(max(self._input_sizes(candidate), default=0))

    def _waiting_inputs(self, candidate: Candidate, stage: PipelineStage) -> list[Buffer]:
        """Return what the inputs of a stage's recomputed blocks take where they wait."""
        tier = candidate.placement.activation
        share = stage.held_blocks / max(1, self.num_blocks)
        num_bytes = round(share * sum(map(whole_pages, self._input_sizes(candidate))))
        if not num_bytes:
            return []
        name = "inputs of recomputed blocks"
        found = [Buffer(name, Kind.ACTIVATION, num_bytes, tier, pinned=tier is Tier.HOST)]
        if tier is Tier.DISK and self.device_type == "cuda":
            slots = self._input_slots(candidate)
            found.append(Buffer(_INPUT_SLOTS, Kind.RING, slots, Tier.HOST, pinned=True))
        return found

    def _batch_bytes(self, micro: int) -> float:
        if isinstance(self.subject, Profile):
            return self.subject.batch_bytes.at(micro)
        return _TOKEN_BYTES * micro * self.subject.seq

    def peak(
        self, candidate: Candidate, stage: PipelineStage, steady: Mapping[TracePhase, int]
    ) -> Peak:
        """Return the largest live set of a stage.

        Args:
            candidate: the configuration.
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
            found = self._peaks[key] = self._peak_beyond(candidate, stage, beyond)
        return replace(found, num_bytes=found.num_bytes + least)

    def _peak_beyond(
        self, candidate: Candidate, stage: PipelineStage, beyond: Mapping[TracePhase, int]
    ) -> Peak:
        if self.cost_model.uses_formula(candidate.key):
            formula = self.cost_model.formula
            assert formula is not None
            every_n = self.job.activations.n
            return rank_memory.by_formula(formula, candidate, stage, beyond, every_n)
        cuda = self.device_type == "cuda"
        every = self._every(candidate)
        profile = self._profile(candidate)
        return rank_memory.traced(profile, candidate, stage, beyond, every=every, cuda=cuda)

    def _profile(self, candidate: Candidate) -> Profile:
        """Return the trace of what a rank computes.

        Raises:
            JobError: it was not traced so.
        """
        dims = candidate.dims
        profile = self.parts.traced(dims.tp, sequence=candidate.sequence_parallel)
        assert profile is not None
        if candidate.checkpoint not in profile.traces:
            raise self._untraced(candidate)
        return profile

    def _every(self, candidate: Candidate) -> int:
        """Return of how many blocks one is recomputed."""
        return self.job.activations.n if candidate.checkpoint == "every_n" else 1

    def _reserved_beyond(self, candidate: Candidate, peak: Peak, states: StageStates) -> int:
        """Return the bytes that the allocator holds beyond those in use at the peak."""
        if self.cost_model.uses_formula(candidate.key) or candidate.dims.pp > 1:
            return rank_memory.formula_slack(peak.dynamic)
        profile = self._profile(candidate)
        late = () if self.device_type == "cuda" else states.moments
        away = rank_memory.moves_inputs(candidate)
        passes = min(2, candidate.accumulation)
        key = (candidate.key, passes, late, away, candidate.input_ranks, candidate.init)
        every = self._every(candidate)
        if key not in self._beyond:
            if self.device_type == "cuda":
                self._beyond[key] = rank_memory.reserved_beyond(profile, candidate, every)
            else:
                self._beyond[key] = rank_memory.heap_beyond(profile, candidate, peak, late, every)
        return self._beyond[key]

    def _kernels(self, candidate: Candidate) -> int:
        """Return the bytes of code that a CPU's library makes for the shapes of products."""
        if self.cost_model.uses_formula(candidate.key):
            return 0
        return rank_memory.kernel_bytes(self._profile(candidate), candidate)

    def outside(self, candidate: Candidate) -> int:
        """Return the bytes of a device outside of its allocator.

        They are the driver's, and those of a communicator for each group that a rank belongs to.
        """
        dims = candidate.dims
        replicas = dims.dp // dims.shard_size
        sizes = {dims.world_size, dims.tp, dims.dp, dims.pp, dims.shard_size, replicas}
        groups = len(sizes - {1})
        device = self.hardware.device
        imported = 0
        builds_on_meta = candidate.init == "meta" or dims.world_size > 1
        recomputes = candidate.checkpoint != "none"
        if self.device_type == "cpu" and (builds_on_meta or recomputes):
            imported = rank_memory.COMPILER_BYTES
        return device.context_bytes + imported + groups * device.communicator_bytes

    # All of it

    def overshoot(self, candidate: Candidate) -> int:
        """Return the bytes that the fullest device lacks; 0 or less if it has enough.

        Raises:
            JobError: it is impossible.
        """
        self._check(candidate)
        capacity = self.hardware.device.memory_bytes
        others = sum(buffer.num_bytes for buffer in self._others(candidate))
        beside = others + self.outside(candidate)
        used = 0
        for index in self._stages(candidate):
            stage = self.stage(candidate, index)
            steady = self._states.of_stage(candidate, index).steady
            in_use = self.peak(candidate, stage, steady).num_bytes + beside
            if in_use <= capacity:
                # The rest that the allocator takes is asked for only where it may decide.
                in_use = self.rank(candidate, index).device_used
            used = max(used, in_use)
            if used > capacity:
                break
        return used - capacity

    def layouts(self, candidate: Candidate) -> tuple[UnitLayout, ...]:
        """Return the units of the first rank."""
        return self._states.of_stage(candidate, 0).layouts

    def device_suffices(self, candidate: Candidate) -> bool:
        """Return whether what a candidate keeps on its devices fits there.

        Where these are cores of a host, that is also what else the host holds meanwhile.

        Raises:
            JobError: it is impossible.
        """
        if self.overshoot(candidate) > 0:
            return False
        if not self.hardware.shares_memory:
            return True
        ranks = [self.rank(candidate, index) for index in self._stages(candidate)]
        return _most_at_once(self._host(candidate, ranks)) <= self.hardware.host_bytes

    def estimate(self, candidate: Candidate, *, traffic: bool = True) -> Estimate:
        """Return the memory and the time of a candidate.

        Args:
            candidate: the configuration.
            traffic: fill in `traffic`, `moved` and `stages` of the estimate.

        Raises:
            JobError: it is impossible.
        """
        self._check(candidate)
        ranks = tuple(self.rank(candidate, index) for index in self._stages(candidate))
        host = self._host(candidate, ranks)
        source = "formula"
        is_ragged = False
        if isinstance(self.subject, Profile):
            is_ragged = self.subject.is_ragged
            if not self.cost_model.uses_formula(candidate.key):
                source = self._profile(candidate).source_of(candidate.checkpoint)
        known = ranks
        time = self.time(candidate)
        if source == "guessed":
            # A guess rules nothing out: only what is known can do.
            known = tuple(_without_activations(rank) for rank in ranks)
        return Estimate(
            candidate=candidate,
            ranks=ranks,
            paper=self.paper_bytes(candidate),
            host_bytes=_most_at_once(host),
            time=time,
            capacity=self.hardware.device.memory_bytes,
            fits=self._fits(candidate, known, self._host(candidate, known)),
            source=source,
            notes=tuple(self._notes(candidate, source)),
            host_parts=host,
            traffic=self.traffic(candidate) if traffic else {},
            moved=self.moved(candidate) if traffic else {},
            is_bound=is_ragged,
            stages=self._all_stages(candidate, time) if traffic else (),
            after_blocks=self.pipeline.after_blocks if candidate.dims.pp > 1 else 0.0,
        )

    def _all_stages(self, candidate: Candidate, time: StepTime) -> tuple[StageEstimate, ...]:
        """Return every stage of a pipeline; none without one."""
        if candidate.dims.pp == 1:
            return ()
        split = self.split(candidate)
        found = []
        for index in range(split.pp):
            rank = self.rank(candidate, index)
            layouts = self._states.of_stage(candidate, index).layouts
            beside = sum(buffer.num_bytes for buffer in self._others(candidate))
            stage = StageEstimate(
                blocks=tuple((run.start, run.stop) for run in split.stage_blocks(index)),
                num_params=sum(unit.numel for unit in layouts),
                busy=time.busy[index],
                in_flight=self.stage(candidate, index).held,
                activations=rank.peak.dynamic + beside,
                device_used=rank.device_used,
            )
            found.append(stage)
        return tuple(found)

    def _fits(
        self,
        candidate: Candidate,
        ranks: Sequence[RankMemory],
        host: Mapping[str, int],
    ) -> bool:
        hardware = self.hardware
        if max(rank.device_used for rank in ranks) > hardware.device.memory_bytes:
            return False
        if _most_at_once(host) > hardware.host_bytes:
            return False
        most = hardware.offload_bytes
        if most is not None and offloaded_bytes(host) > most:
            return False
        disk = self._local_ranks(candidate.dims) * max(rank.disk for rank in ranks)
        return disk <= hardware.disk_bytes

    def time(self, candidate: Candidate) -> StepTime:
        """Return the time of a step.

        Raises:
            JobError: nothing tells what its micro-batches take.
        """
        try:
            return step_time(self.cost_model, candidate, self.tokens_per_sample)
        except KeyError:
            raise self._untraced(candidate) from None

    def traffic(self, candidate: Candidate) -> dict[str, int]:
        """Return the bytes that a rank sends in a step, as `Estimate.traffic`."""
        found = self._states.traffic(candidate)
        ranks = candidate.dims.tp
        messages = self.layer_messages(candidate)
        of_micro_batch = sum(each.sent_bytes(ranks) * times for each, times in messages.items())
        found[TENSOR] += candidate.accumulation * of_micro_batch
        return {kind: num_bytes for kind, num_bytes in found.items() if num_bytes}

    def layer_messages(self, candidate: Candidate) -> Messages:
        """Return what ranks of the first stage with slices of the same layers exchange.

        It is that of a micro-batch.
        """
        return stage_messages(self.cost_model, candidate, 0)

    def moved(self, candidate: Candidate) -> dict[str, dict[str, dict[str, int]]]:
        """Return the bytes that a step of a rank moves between tiers, as `Estimate.moved`."""
        if not candidate.offloads:
            return {}
        found: dict[str, dict[str, dict[str, int]]] = {}
        moves = self._states.moved(candidate) | self._moved_inputs(candidate)
        for move, num_bytes in moves.items():
            kinds = found.setdefault(move.tier.value, {}).setdefault(move.direction.value, {})
            kinds[move.kind.value] = num_bytes
        return found

    def _moved_inputs(self, candidate: Candidate) -> dict[Move, int]:
        """Return the bytes of inputs of recomputed blocks that move: the last one does not return.

        Of a pipeline they are those of all its stages.
        """
        sizes = self._input_sizes(candidate)
        if not sizes:
            return {}
        by_direction = {Direction.WRITTEN: sum(sizes), Direction.READ: sum(sizes[:-1])}
        tiers = [candidate.placement.activation]
        if self.device_type == "cuda" and tiers == [Tier.DISK]:
            tiers.append(Tier.HOST)
        return {
            Move(tier, direction, Kind.ACTIVATION): candidate.accumulation * num_bytes
            for tier in tiers
            for direction, num_bytes in by_direction.items()
            if num_bytes
        }

    def paper_bytes(self, candidate: Candidate) -> dict[str, float]:
        """Return the states of a rank as papers count them, by kind.

        A parameter has 2 bytes, its gradient 2, and its states in Adam 12 (Rajbhandari et al.
        2020).
        """
        dims = candidate.dims
        params = self.num_params / (dims.tp * dims.pp)
        ranks = dims.shard_size
        return {
            "params": PAPER_PARAM_BYTES * params / (ranks if candidate.stage >= 3 else 1),
            "grads": PAPER_GRAD_BYTES * params / (ranks if candidate.stage >= 2 else 1),
            "optim": PAPER_ADAM_BYTES * params / (ranks if candidate.stage >= 1 else 1),
        }

    def _check(self, candidate: Candidate) -> None:
        """Refuse what is impossible."""
        dims = candidate.dims
        traced = self.job.precision.compute
        num_devices = self.hardware.num_devices
        if isinstance(self.subject, Profile) and candidate.precision != traced:
            raise JobError(
                f"precision {candidate.precision}: the model was traced in {traced}: trace it anew"
            )
        if dims.world_size > num_devices:
            raise JobError(
                f"{candidate}: {dims.world_size} ranks on {num_devices} devices: name "
                "more of them, or fewer ranks"
            )
        if dims.pp > 1:
            why_not = why_not_scheduled(candidate.schedule, dims.virtual)
            if why_not:
                raise JobError(why_not)
            self.split(candidate)
        why_not = self.why_not_placed(candidate)
        if why_not:
            raise JobError(f"offload: {why_not}")

    def why_not_placed(self, candidate: Candidate) -> str:
        """Return why the states of a candidate cannot live where it has them; "" if they can."""
        optimizer = self._settings.optimizer
        assert optimizer is not None
        return candidate.why_not_placed(optimizer.name, layer_wise=optimizer.layer_wise)

    def _untraced(self, candidate: Candidate) -> JobError:
        policy = candidate.checkpoint
        message = f"checkpoint {policy}: the model was not traced with it"
        dims = candidate.dims
        traced = self.parts.traced(dims.tp, sequence=candidate.sequence_parallel)
        if traced is not None:
            why = traced.untraced.get(policy)
            if why:
                message += f": {why}"
        return JobError(message)

    # The memory of hosts

    def can_build(self, world: int) -> bool:
        """Return True if a node has room for the whole model, as its factory makes it."""
        processes = min(self.hardware.devices_per_node, world) * _PROCESS_BYTES[self.device_type]
        return self._built_bytes + processes <= self.hardware.host_bytes

    @property
    def _built_bytes(self) -> int:
        """The bytes of the whole model in fp32; 0 of one that is a size only."""
        if self.job.model.call == "size:size":
            return 0
        return 4 * self.num_params

    def _local_ranks(self, dims: ParallelDims) -> int:
        return min(self.hardware.devices_per_node, dims.world_size)

    def _host(self, candidate: Candidate, ranks: Iterable[RankMemory]) -> dict[str, int]:
        """Return the bytes of a node's memory by what they are for.

        A node with several pipeline stages is taken to have the fullest ones.
        """
        local = self._local_ranks(candidate.dims)
        process = _PROCESS_BYTES[self.device_type]
        found = {
            "pinned": local * max(rank.pinned for rank in ranks),
            "pageable": local * (max(rank.pageable for rank in ranks) - process),
            "processes": local * process,
            "loaders": local * self.job.data.workers * _LOADER_BYTES,
            "build": 0 if candidate.init == "meta" else self._built_bytes,
        }
        if self.hardware.shares_memory:
            found["training"] = local * max(rank.device_used for rank in ranks)
        return found

    # Notes

    def _notes(self, candidate: Candidate, source: str) -> list[str]:
        notes = []
        dims = candidate.dims
        if isinstance(self.subject, Profile):
            traced = self.parts.traced(dims.tp, sequence=candidate.sequence_parallel)
            notes += self._notes_of_trace(traced or self.subject, candidate.checkpoint, source)
        if self.hardware.usual_disk and candidate.placement.uses(Tier.DISK):
            rate = f"{self.hardware.disk_read / GB:g} GB/s each way"
            notes.append(f"nobody has measured the disk, which is taken to move {rate}")
        if not self.hardware.measured:
            notes.append(FROM_DATA_SHEETS)
        if candidate.partition and candidate.sequence_parallel:
            notes.append(
                "activations.partition changes nothing: with parallel.sequence the inputs of "
                "blocks are slices of the sequence already"
            )
        return notes

    @staticmethod
    def _notes_of_trace(profile: Profile, policy: str, source: str) -> list[str]:
        notes = []
        if source == "guessed":
            reason = profile.untraced.get(policy) or profile.why
            notes.append(f"activations with checkpoint {policy} are not known: {reason}")
        elif source == "formula":
            notes.append("activations by formula: the model was not traced so")
        elif profile.why:
            notes.append(f"activations {source}: {profile.why}")
        return [*notes, *profile.notes]


def _timing_settings(
    job: JobConfig, settings: ShardingConfig, shape: TransformerShape | None
) -> TimingSettings:
    chosen = settings.optimizer
    assert chosen is not None
    return TimingSettings(
        reduce_bytes=settings.precision.reduce.itemsize,
        moments=chosen.moments,
        moment_bytes=chosen.moment_dtype.itemsize,
        prefetch=settings.prefetch,
        every_n=job.activations.n,
        fused=job.compile,
        causal=shape is None or not shape.name.startswith("bert"),
    )


def _without_activations(rank: RankMemory) -> RankMemory:
    """Return the memory of a rank without its activations and temporaries."""
    num_bytes = rank.allocated - rank.peak.dynamic
    outside = rank.device_used - rank.reserved
    return replace(
        rank,
        allocated=num_bytes,
        reserved=num_bytes,
        device_used=num_bytes + outside,
    )


def _on_tier(buffers: Iterable[Buffer], tier: Tier) -> int:
    return sum(buffer.num_bytes for buffer in buffers if buffer.tier is tier)


def why_not_scheduled(schedule: str, virtual: int) -> str:
    """Return why a schedule cannot have so many chunks on a stage; "" if it can."""
    if virtual > 1 and schedule != "interleaved":
        one = f"{schedule} has one chunk on each stage"
        return f"parallel.virtual: {virtual}: {one}: write schedule: interleaved"
    if virtual == 1 and schedule == "interleaved":
        return "parallel.schedule: interleaved has 2 chunks on each stage or more: write virtual: 2"
    if schedule == "layer_major":
        return "parallel.schedule: layer_major is for the whole model on a rank: write pp: 1"
    return ""


def _most_at_once(parts: Mapping[str, int]) -> int:
    """Return the most that a node holds at once: while it trains, or while it builds the model."""
    training = sum(parts.values()) - parts["build"]
    return max(training, parts["build"] + parts["processes"])
