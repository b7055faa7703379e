"""The states of a model on the first rank of each pipeline stage, for every way to shard them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from zrun_core.errors import JobError
from zrun_core.memory.buffers import Buffer, Tier
from zrun_core.memory.layout import UnitLayout, whole_pages
from zrun_core.memory.placement import place
from zrun_core.memory.state_policy import MeshInfo, RankPlaces, ZeroPolicy
from zrun_core.memory.tensors import TENSOR
from zrun_core.memory.tier_traffic import Move, step_traffic
from zrun_core.pipeline.schedule import num_versions
from zrun_core.pipeline.split import Split
from zrun_core.plan.memory.states import (
    PlannedModel,
    layouts_of_rank,
    mesh_info_of_rank,
    plan_model,
    rank_buffers,
)
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.question.pipeline_model import PipelineModel
from zrun_core.plan.question.subject import Subject
from zrun_core.plan.trace.module_tree import skeleton_of
from zrun_core.plan.trace.rows import TracePhase
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import Coordinates
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.zero.unit.exchange import (
    StepCounts,
    expected_traffic,
    planned_gathers,
    shared_sum_bytes,
)
from zrun_core.zero.unit.precision import Precision
from zrun_core.zero.unit.unit_params import is_read_in_place, moves_pages
from zrun_core.zero.wrap.sharding_config import ShardingConfig


class StageStates(NamedTuple):
    """The buffers of a pipeline stage's first rank that stay from step to step.

    Attributes:
        layouts: of its units.
        steady: bytes on the device that are in use, by phase.
        gathered: bytes on the device of all parameters whole, beyond the room for gathers.
        moments: bytes of each one that the optimizer keeps there.
        pinned, pageable: bytes in the host's memory.
        disk: bytes on its disks.
    """

    buffers: tuple[Buffer, ...]
    layouts: tuple[UnitLayout, ...]
    steady: Mapping[TracePhase, int]
    gathered: int
    moments: tuple[int, ...]
    pinned: int
    pageable: int
    disk: int


class StateModel:
    """Lists the states of candidates, each kind once."""

    def __init__(
        self,
        subject: Subject,
        job: JobConfig,
        settings: ShardingConfig,
        device_type: str,
        pipeline: PipelineModel,
    ) -> None:
        """
        Args:
            device_type: "cuda" or "cpu".
        """
        self._subject = subject
        self._job = job
        self._job_settings = settings
        self._device_type = device_type
        self._pipeline = pipeline
        self._settings: dict[tuple[object, ...], ShardingConfig] = {}
        self._models: dict[tuple[object, ...], PlannedModel] = {}
        self._states: dict[tuple[object, ...], StageStates] = {}

    def of_stage(self, candidate: Candidate, index: int) -> StageStates:
        """Return the states of the first rank of a pipeline stage.

        Raises:
            JobError: the model does not divide so.
        """
        key = (
            candidate.stage,
            candidate.dims,
            candidate.sequence_parallel,
            candidate.precision,
            candidate.checkpoint != "none",
            candidate.placement,
            candidate.layer_major,
            self._split_of(candidate),
            num_versions(candidate.schedule, index, candidate.dims.pp),
            index,
        )
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = self._of_stage(candidate, index)
        return found

    def _of_stage(self, candidate: Candidate, index: int) -> StageStates:
        dims = candidate.dims
        settings = replace(
            self._settings_of(candidate),
            versions=num_versions(candidate.schedule, index, dims.pp),
        )
        model = self._model_of(candidate)
        rank = Coordinates(pp=index)
        buffers = rank_buffers(
            model,
            settings,
            dims,
            rank=rank,
            placement=candidate.placement,
            device=self._device_type,
            tied_size=model.num_tied(self._split_of(candidate), index),
            split=self._split_of(candidate),
        )
        on_host = [buffer for buffer in buffers if buffer.tier is Tier.HOST]
        on_disk = [buffer for buffer in buffers if buffer.tier is Tier.DISK]
        return StageStates(
            buffers=tuple(buffers),
            layouts=self._layouts(candidate, index),
            steady=_bytes_by_phase(buffers),
            gathered=self._gathered(candidate, index, settings),
            moments=tuple(
                buffer.num_bytes
                for buffer in buffers
                if buffer.is_moment and buffer.tier is Tier.DEVICE
            ),
            pinned=sum(whole_pages(each.num_bytes) for each in on_host if each.pinned),
            pageable=sum(each.num_bytes for each in on_host if not each.pinned),
            disk=sum(each.num_bytes for each in on_disk),
        )

    def _gathered(self, candidate: Candidate, index: int, settings: ShardingConfig) -> int:
        layouts = self._layouts(candidate, index)
        most, planned = (
            settings.states.gather_ring_bytes(
                layouts,
                ahead,
                moves_pages=moves_pages(self._device_type),
                placements=place(layouts, candidate.placement),
            )
            for ahead in (len(layouts), settings.prefetch)
        )
        return most - planned

    def _split_of(self, candidate: Candidate) -> Split | None:
        if candidate.dims.pp == 1:
            return None
        return self._pipeline.split(candidate.dims, candidate.split)

    def _layouts(self, candidate: Candidate, index: int) -> tuple[UnitLayout, ...]:
        settings = self._settings_of(candidate)
        mesh_info = self._mesh_info(candidate, index)
        model = self._model_of(candidate)
        split = self._split_of(candidate)
        return layouts_of_rank(model, settings, Coordinates(pp=index), mesh_info, split)

    def _mesh_info(self, candidate: Candidate, index: int) -> MeshInfo:
        settings = self._settings_of(candidate)
        num_tied = self._model_of(candidate).num_tied(self._split_of(candidate), index)
        rank = Coordinates(pp=index)
        return mesh_info_of_rank(settings, candidate.dims, rank, self._device_type, num_tied)

    def traffic(self, candidate: Candidate) -> dict[str, int]:
        """Return the bytes of parameters and gradients that a step sends, by collective.

        They are those of the first rank of the first stage, and exact.
        """
        settings = self._settings_of(candidate)
        counts = StepCounts(1, candidate.accumulation, 1, pushes=1)
        places = RankPlaces(self._mesh_info(candidate, 0))
        layouts = self.of_stage(candidate, 0).layouts
        return expected_traffic(layouts, settings.states, settings.exchange, counts, places)

    def summed_over_slices(self, candidate: Candidate) -> int:
        """Return the bytes of gradients that a step sums over ranks with slices of the same layers.

        They are of the rank that `traffic` is of.
        """
        settings = self._settings_of(candidate)
        places = RankPlaces(self._mesh_info(candidate, 0))
        layouts = self.of_stage(candidate, 0).layouts
        place = candidate.dims.tp, 0
        return shared_sum_bytes(layouts, settings.states, places, TENSOR, place)

    def pushed(self, candidate: Candidate) -> int:
        """Return the bytes that a step of the second replica sends to a parameter server.

        0: there is none, or no second replica.
        """
        settings = self._settings_of(candidate)
        mesh_info = replace(self._mesh_info(candidate, 0), replica_index=1)
        if mesh_info.num_replicas < 2:
            return 0
        layouts = self.of_stage(candidate, 0).layouts
        counts = StepCounts(1, candidate.accumulation, 1, pushes=1)
        places = RankPlaces(mesh_info)
        found = expected_traffic(layouts, settings.states, settings.exchange, counts, places)
        return found.get("push", 0)

    def moved(self, candidate: Candidate) -> dict[Move, int]:
        """Return the bytes of states that a step moves between tiers, as `traffic` does."""
        settings = self._settings_of(candidate)
        places = RankPlaces(self._mesh_info(candidate, 0))
        layouts = self.of_stage(candidate, 0).layouts
        passes = 1 if candidate.layer_major else candidate.accumulation
        gathers = planned_gathers(layouts, settings.states)
        return step_traffic(
            layouts,
            place(layouts, candidate.placement),
            settings.states,
            places,
            micro_batches=candidate.accumulation,
            gathers={
                unit.name: passes * times for unit, times in zip(layouts, gathers, strict=True)
            },
            host_is_device=is_read_in_place(self._device_type, candidate.placement),
        )

    def _settings_of(self, candidate: Candidate) -> ShardingConfig:
        """Return how a job with this candidate's keys would be sharded."""
        recomputes = candidate.checkpoint != "none"
        key = (
            candidate.stage,
            candidate.precision,
            recomputes,
            candidate.placement,
            candidate.layer_major,
        )
        found = self._settings.get(key)
        if found is None:
            precision = PrecisionConfig(
                compute=candidate.precision,  # type: ignore[arg-type]
                reduce=self._job.precision.reduce,
            )
            found = self._settings[key] = replace(
                self._job_settings,
                zero=ZeroPolicy(candidate.stage),
                precision=Precision.of(precision),
                recomputes_blocks=recomputes,
                layer_major=candidate.layer_major,
                placement=candidate.placement,
            )
        return found

    def _model_of(self, candidate: Candidate) -> PlannedModel:
        """Return the units of one tensor-parallel rank."""
        key = (candidate.dims.tp, candidate.sequence_parallel, candidate.precision)
        found = self._models.get(key)
        if found is None:
            found = self._models[key] = self._plan_model(candidate)
        return found

    def _plan_model(self, candidate: Candidate) -> PlannedModel:
        settings = self._settings_of(candidate)
        profile = self._subject.traced(candidate.dims.tp, sequence=candidate.sequence_parallel)
        try:
            model = skeleton_of(profile)
        except ValueError as error:
            raise JobError(f"the states of this model are not known: {error}") from None
        uses = self._pipeline.uses
        return plan_model(model, settings, profile.buffer_bytes, profile.table, uses)


def _bytes_by_phase(buffers: Iterable[Buffer]) -> dict[TracePhase, int]:
    """Return the bytes on the device that are in use in each phase."""
    here = [buffer for buffer in buffers if buffer.tier is Tier.DEVICE]
    found = dict.fromkeys(TracePhase, 0)
    for buffer in here:
        for phase in TracePhase:
            if buffer.phases is None or phase.value in buffer.phases:
                found[phase] += buffer.num_bytes
    return found
