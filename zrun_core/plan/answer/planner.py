"""The memory and the time of candidates, together.

    planner = Planner(profile, parse_simulate("64x8xA100-80G"), job)
    planner.estimate(candidate).fits

The buffers are those that the runtime allocates, the activations those of the traced peak, beyond
them lies what the allocator holds, and the time is that of the cost model. A
`Planner` keeps what candidates have in common, so that a thousand of them cost little more than
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from zrun_core.checkpoint.block_writer import HELD_BYTES
from zrun_core.errors import JobError
from zrun_core.hardware.hardware import MIB, Hardware
from zrun_core.memory.buffers import Buffer, Tier
from zrun_core.memory.layout import UnitLayout
from zrun_core.memory.tensors import TENSOR
from zrun_core.pipeline.messages import PIPE
from zrun_core.pipeline.split import Split
from zrun_core.plan.answer.activation_model import ActivationModel
from zrun_core.plan.answer.host_model import HostModel, most_at_once
from zrun_core.plan.answer.notes import notes_of
from zrun_core.plan.answer.outcome import Estimate, RankMemory, StageEstimate
from zrun_core.plan.answer.state_model import StateModel
from zrun_core.plan.memory.paper_states import paper_bytes
from zrun_core.plan.memory.rank_memory import PipelineStage
from zrun_core.plan.memory.states import settings_of
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.question.subject import Divide, Subject
from zrun_core.plan.timing.cost_model import CostModel
from zrun_core.plan.timing.layer_messages import Messages, stage_messages
from zrun_core.plan.timing.micro_batch_cost import TimingSettings
from zrun_core.plan.timing.timing import StepTime, step_time
from zrun_core.plan.trace.peak import Course
from zrun_core.plan.trace.profile import COMPILER_BYTES, Profile
from zrun_core.plan.trace.rows import TracePhase
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import NumCommunicators, ParallelDims
from zrun_core.zero.wrap.sharding_config import ShardingConfig

_SEGMENT_BYTES = 2 * MIB  # in multiples of which CUDA's allocator reserves memory


def _no_code(name: str) -> Any:
    raise JobError(f"optim.name: {name} is code, and nothing was given that loads it")


class Planner:
    """Estimates candidates of one model on one kind of hardware.

    Attributes:
        parts: the model, whole and divided.
        num_params, tokens_per_sample, num_samples: of the whole, as of `Subject`.
        cost_model: of micro-batches, in time.
        activations: of micro-batches, in memory.
        hosts: what ranks take beside their devices.
    """

    def __init__(
        self,
        subject: Profile,
        hardware: Hardware,
        job: JobConfig,
        *,
        divide: Divide | None = None,
        at_once: int = 1,
        end: Callable[[], None] = lambda: None,
        load: Callable[[str], Any] = _no_code,
    ) -> None:
        """
        Args:
            divide, at_once, end: trace parts of it, as of `Subject`.
            load: finds the optimizer that the job names as `module:attr`.

        Raises:
            JobError: there is no such optimizer, or it cannot be sharded.
        """
        self.subject = subject
        self.hardware = hardware
        self.job = job
        self.device_type = "cpu" if hardware.device.kind == "cpu" else "cuda"
        settings = settings_of(self.job, load, self.device_type)
        timing = _timing_settings(self.job, settings)
        self.parts = Subject(subject, divide, at_once, end)
        self.num_params = self.parts.num_params
        self.tokens_per_sample = self.parts.tokens_per_sample
        self.num_samples = self.parts.num_samples
        self.cost_model = CostModel(self.parts, hardware, timing)
        self._settings = settings
        self.pipeline = self.cost_model.pipeline
        self._states = StateModel(self.parts, self.job, settings, self.device_type, self.pipeline)
        self.activations = ActivationModel(self.cost_model, self.job, hardware, self.device_type)
        self.hosts = HostModel(hardware, self.job, self.num_params, self.device_type)

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
            return PipelineStage.whole(candidate, self.parts.num_blocks)
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
        held = self.activations.held(candidate)
        waiting = self.activations.waiting(candidate, stage)
        steady = _with(states.steady, held)
        peak = self.activations.peak(candidate, stage, steady)
        beyond = self.activations.reserved_beyond(candidate, stage, peak)
        reserved = peak.num_bytes + beyond
        evaluating = steady[TracePhase.FORWARD] + self.activations.evaluation(candidate)
        evaluation = max(0, evaluating - reserved)
        reserved += evaluation
        in_hook = steady[TracePhase.FORWARD] + self.activations.generation()
        if self.activations.hooks_gather:
            in_hook += states.gathered
        hook = max(0, in_hook - reserved)
        reserved += hook
        outside = self.outside(candidate, index)
        if self.device_type == "cuda":
            reserved = -(-reserved // _SEGMENT_BYTES) * _SEGMENT_BYTES
        else:
            outside += self.activations.kernels(candidate)
        return RankMemory(
            role=self._role(candidate, index),
            buffers=(*states.buffers, *held, *waiting),
            peak=peak,
            allocated=peak.num_bytes,
            reserved=reserved,
            device_used=reserved + outside,
            communicators=self.communicators(candidate, index),
            pinned=states.pinned + _on_tier(waiting, Tier.HOST),
            pageable=states.pageable + self.hosts.process_bytes,
            disk=states.disk + _on_tier(waiting, Tier.DISK),
            evaluation=evaluation,
            hook=hook,
        )

    def course(self, candidate: Candidate) -> Course:
        """Return what the fullest stage holds through a step.

        Raises:
            JobError: it is impossible.
        """
        stages = self._stages(candidate)
        index = max(stages, key=lambda each: self.rank(candidate, each).device_used)
        stage = self.stage(candidate, index)
        states = self._states.of_stage(candidate, index)
        steady = _with(states.steady, self.activations.held(candidate))
        return self.activations.course(candidate, stage, steady)

    def outside(self, candidate: Candidate, index: int) -> int:
        """Return the bytes of a device of a stage outside of its allocator.

        They are the driver's, and those of communicators.
        """
        own = 0
        if self.device_type == "cpu":
            own = self._imported(candidate)
            if self.job.checkpoint is not None:
                own += min(HELD_BYTES, self._saved_bytes())
        context = self.hardware.device.context_bytes
        return context + own + self.communicators(candidate, index)

    def _saved_bytes(self) -> int:
        """Return the bytes of a checkpoint: masters and moments of the whole model."""
        moments = self.cost_model.settings.moments * self.cost_model.settings.moment_bytes
        return self.num_params * (4 + moments)

    def _imported(self, candidate: Candidate) -> int:
        """Return the bytes that a rank on a CPU imports beyond torch and zrun."""
        imported = self.subject.imported_bytes
        needs_compiler = self.subject.builds_with_compiler
        builds_on_meta = candidate.init == "meta" or candidate.dims.world_size > 1
        recomputes = candidate.checkpoint != "none"
        is_divided = candidate.dims.model_ranks > 1  # by way of fake tensors
        if (builds_on_meta and needs_compiler) or recomputes or is_divided:
            imported += COMPILER_BYTES
        return imported

    def communicators(self, candidate: Candidate, index: int) -> int:
        """Return the bytes of a device of a stage that communicators take: groups, and messages."""
        device = self.hardware.device
        if not device.communicator_bytes:
            return 0  # gloo's are on the host
        tied: tuple[int, ...] = ()
        if candidate.dims.pp > 1:
            tied, _ = self.pipeline.tied(self.split(candidate))
        counts = _num_communicators(candidate.dims, index, self.hardware.devices_per_node, tied)
        return counts.groups * device.communicator_bytes + counts.pairs * device.pair_bytes

    # All of it

    def overshoot(self, candidate: Candidate) -> int:
        """Return the bytes that the fullest device lacks; 0 or less if it has enough.

        Raises:
            JobError: it is impossible.
        """
        self._check(candidate)
        capacity = self.hardware.device.memory_bytes
        held = sum(buffer.num_bytes for buffer in self.activations.held(candidate))
        used = 0
        for index in self._stages(candidate):
            beside = held + self.outside(candidate, index)
            stage = self.stage(candidate, index)
            steady = self._states.of_stage(candidate, index).steady
            in_use = self.activations.peak(candidate, stage, steady).num_bytes + beside
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
        return self.hosts.has_memory(self.hosts.parts(candidate, ranks))

    def estimate(
        self, candidate: Candidate, *, traffic: bool = True, all_stages: bool = True
    ) -> Estimate:
        """Return the memory and the time of a candidate.

        Args:
            traffic: fill in `traffic`, `sent_apart`, `pushed` and `moved` of the estimate.
            all_stages: fill in `stages` of it.

        Raises:
            JobError: it is impossible.
        """
        self._check(candidate)
        ranks = tuple(self.rank(candidate, index) for index in self._stages(candidate))
        host = self.hosts.parts(candidate, ranks)
        source = self.activations.source(candidate)
        time = self.time(candidate)
        if source == "states alone":
            ranks = tuple(_without_activations(rank) for rank in ranks)
        return Estimate(
            candidate=candidate,
            ranks=ranks,
            paper=paper_bytes(self.num_params, candidate),
            host_bytes=most_at_once(host),
            time=time,
            capacity=self.hardware.device.memory_bytes,
            fits=self._fits(candidate, ranks),
            source=source,
            notes=notes_of(candidate, source, self.parts, self.hardware),
            host_parts=host,
            traffic=self.traffic(candidate) if traffic else {},
            sent_apart=self.sent_apart(candidate) if traffic else {},
            pushed=self._states.pushed(candidate) if traffic else 0,
            moved=self.moved(candidate) if traffic else {},
            is_bound=self.subject.is_ragged,
            stages=self._all_stages(candidate, time) if all_stages else (),
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
            beside = sum(buffer.num_bytes for buffer in self.activations.held(candidate))
            stage = StageEstimate(
                blocks=tuple((run.start, run.stop) for run in split.stage_blocks(index)),
                num_params=sum(unit.numel for unit in layouts),
                busy=time.busy[index],
                in_flight=self.stage(candidate, index).held,
                activations=rank.peak.dynamic + beside,
                device_used=rank.device_used,
                sent=self.sent_to_stages(candidate, index),
            )
            found.append(stage)
        return tuple(found)

    def _fits(self, candidate: Candidate, ranks: Sequence[RankMemory]) -> bool:
        if max(rank.device_used for rank in ranks) > self.hardware.device.memory_bytes:
            return False
        return self.hosts.has_room(candidate, ranks)

    def time(self, candidate: Candidate) -> StepTime:
        """Return the time of a step.

        Raises:
            JobError: nothing tells what its micro-batches take.
        """
        try:
            return step_time(
                self.cost_model, candidate, self._usual_tokens(), self._seconds_of_sample()
            )
        except KeyError:
            raise self.activations.untraced(candidate) from None

    def _usual_tokens(self) -> int | None:
        """Return the tokens of a usual sample, of which the time is; None where they are none."""
        if self.tokens_per_sample is None:
            return None
        return round(self.tokens_per_sample * self.subject.usual_share)

    def _seconds_of_sample(self) -> float:
        """Return the seconds that a rank waits for each of its samples."""
        reads_ahead = self.job.data.workers > 0 or self.device_type != "cpu"
        return 0.0 if reads_ahead else self.subject.sample_s

    def traffic(self, candidate: Candidate) -> dict[str, int]:
        """Return the bytes that a rank sends in a step, as `Estimate.traffic`."""
        found = self._states.traffic(candidate)
        for axis, by_kind in self.sent_apart(candidate).items():
            found[axis] = sum(by_kind.values())
        return {kind: num_bytes for kind, num_bytes in found.items() if num_bytes}

    def sent_apart(self, candidate: Candidate) -> dict[str, dict[str, int]]:
        """Return the bytes that layers and stages exchange in a step, as `Estimate.sent_apart`."""
        ranks = candidate.dims.tp
        of_layers: Counter[str] = Counter()
        for message, times in self.layer_messages(candidate).items():
            of_layers[message.kind] += message.sent_bytes(ranks) * times
        count = candidate.accumulation
        in_step = Counter({kind: count * num_bytes for kind, num_bytes in of_layers.items()})
        in_step["all_reduce"] += self._states.summed_over_slices(candidate)
        to_stages = self.sent_to_stages(candidate, 0)
        handed_on = Counter({what: count * num_bytes for what, num_bytes in to_stages.items()})
        found = {TENSOR: dict(+in_step), PIPE: dict(+handed_on)}
        return {axis: by_kind for axis, by_kind in found.items() if by_kind}

    def sent_to_stages(self, candidate: Candidate, stage: int) -> dict[str, int]:
        """Return the bytes that a rank of a stage sends to others for a micro-batch.

        They are `activations`, and `gradients` of what others have sent.
        """
        if candidate.dims.pp == 1:
            return {}
        split = self.split(candidate)
        borders = self.cost_model.border_bytes(candidate, split)
        returning = self.cost_model.returning_bytes(candidate, split)
        chunks = split.chunks(stage)
        last = split.num_chunks - 1
        return {
            "activations": round(sum(borders[chunk + 1] for chunk in chunks if chunk < last)),
            "gradients": round(sum(returning[chunk] for chunk in chunks)),
        }

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
        moves = self._states.moved(candidate) | self.activations.moved(candidate)
        for move, num_bytes in moves.items():
            kinds = found.setdefault(move.tier.value, {}).setdefault(move.direction.value, {})
            kinds[move.kind.value] = num_bytes
        return found

    def _check(self, candidate: Candidate) -> None:
        """Refuse what is impossible."""
        dims = candidate.dims
        traced = self.job.precision.compute
        num_devices = self.hardware.num_devices
        if candidate.precision != traced:
            raise JobError(
                f"precision {candidate.precision}: the model was traced in {traced}: trace it anew"
            )
        if dims.world_size > num_devices:
            raise JobError(
                f"{candidate}: {dims.world_size} ranks on {num_devices} devices: name "
                "more of them, or fewer ranks"
            )
        if dims.pp > 1:
            why_not = candidate.why_not_scheduled()
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


def _timing_settings(job: JobConfig, settings: ShardingConfig) -> TimingSettings:
    chosen = settings.optimizer
    assert chosen is not None
    return TimingSettings(
        reduce_bytes=settings.precision.reduce.itemsize,
        moments=chosen.moments,
        moment_bytes=chosen.moment_dtype.itemsize,
        prefetch=settings.prefetch,
        every_n=job.activations.n,
        fused=job.compile,
        through_first=job.sync != "ring",
        updates_apart=job.sync == "async_server" and job.staleness != 0,
    )


@lru_cache(maxsize=4096)
def _num_communicators(
    dims: ParallelDims, stage: int, ranks_per_host: int, tied_stages: tuple[int, ...]
) -> NumCommunicators:
    return dims.communicators(stage, ranks_per_host, tied_stages)


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


def _with(steady: Mapping[TracePhase, int], buffers: Iterable[Buffer]) -> dict[TracePhase, int]:
    """Return the bytes of each phase with these buffers."""
    beside = sum(buffer.num_bytes for buffer in buffers)
    return {phase: num_bytes + beside for phase, num_bytes in steady.items()}


def _on_tier(buffers: Iterable[Buffer], tier: Tier) -> int:
    return sum(buffer.num_bytes for buffer in buffers if buffer.tier is tier)
