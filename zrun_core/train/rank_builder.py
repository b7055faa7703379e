"""What a rank trains with, built step by step, together with the other ranks.

    rendezvous  the ranks meet, and make their groups
    import      the user's code
    build       the whole model, without values that others have or that are replaced
    data        where ranks have parts of a model: the first batch, by which it is divided and cut
    shard       what this rank has of it, in flat units
    load        values, from a checkpoint or from files of weights
    data        what is left of them, and the trainer

They are the phases with which a failure is told, or a rank that others wait for.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zrun_core.activations.offloaded_inputs import OffloadedInputs
from zrun_core.checkpoint.checkpointer import Checkpointer, versions
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.folder_lock import hold
from zrun_core.checkpoint.initial_weights import load_weights
from zrun_core.checkpoint.model_state import ModelState
from zrun_core.checkpoint.rank_save import RunInfo
from zrun_core.checkpoint.resume import Resumed, load_newest, restore_streams
from zrun_core.checkpoint.whole_values import WholeValues, newest_step, weights_of
from zrun_core.data.batch import MicroBatch, copied, first_samples
from zrun_core.distributed import rng
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.communicators import backend_timeout, connect, connect_groups, waits_fail
from zrun_core.distributed.mesh import Mesh
from zrun_core.errors import ZrunError
from zrun_core.guards.watchdog import Watchdog
from zrun_core.hardware import accelerator
from zrun_core.memory.buffers import placement_of
from zrun_core.memory.room import Room
from zrun_core.optim.lr import make_schedule
from zrun_core.optim.where import resolve_where_placed
from zrun_core.pipeline.schedule import num_versions
from zrun_core.spine import memory_limits
from zrun_core.spine.events import Emitter
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.spine.sections.section import Ref
from zrun_core.spine.spec import RunSpec
from zrun_core.spine.stop_signals import StopSignals
from zrun_core.tensor_parallel.same_plan import check_same
from zrun_core.tensor_parallel.tensor_comm import TensorComm
from zrun_core.train import parallelize, rendezvous
from zrun_core.train.hook_check import check_hooks
from zrun_core.train.host_room import host_room
from zrun_core.train.job_data import JobData
from zrun_core.train.model_part import ModelPart
from zrun_core.train.rank_phase import RankPhase
from zrun_core.train.stage_building import StageParts, build_stage
from zrun_core.train.tensor_building import divide_model, input_partition, plan_tensors
from zrun_core.train.trainer import Trainer
from zrun_core.train.value_check import ValueCheck
from zrun_core.user_code import user
from zrun_core.user_code.build import Built, build_once_per_host, check_trained
from zrun_core.user_code.loss import compute_loss
from zrun_core.user_code.meta_init import build_on_meta
from zrun_core.user_code.trial import kept_attributes
from zrun_core.zero.passes.graph_breaks import load_compiler
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.wrap.sharding_config import ShardingConfig, check_model_fits

_COMPARED = 2  # samples before the first step: a norm over a batch needs two


class RankBuilder:
    """Builds the trainer of a rank.

    Attributes:
        phase: in which it is.
        comm: with the other ranks, since they have met.
        mesh: the groups of this rank.
        streams: that its model draws from, once there is one.
        lock: on the folder of checkpoints, which rank 0 holds.
    """

    comm: Comm
    mesh: Mesh
    streams: rng.Streams

    def __init__(
        self,
        spec: RunSpec,
        rank: int,
        emitter: Emitter,
        stop: StopSignals,
        board: FlightRecorder,
        give_up: Callable[[ZrunError], None],
    ) -> None:
        """Note what a rank is given.

        Args:
            give_up: ends the process, whatever it waits for; called by another thread.
        """
        self.spec = spec
        self.rank = rank
        self.emitter = emitter
        self.stop = stop
        self.board = board
        self.phase = RankPhase(board)
        self.lock: int | None = None
        self._give_up = give_up
        self._job_dir = Path(spec.job_dir)
        self._device = torch.device(spec.plan.ranks[rank].device)
        self._data: JobData | None = None

    def build(self) -> Trainer:
        """Join the others, build the model, shard it, load it, open the data."""
        job = self.spec.job
        torch.set_num_threads(self.spec.plan.ranks[self.rank].threads)

        self.phase.enter("rendezvous")
        room = host_room(self.spec, self.rank)  # once all have joined, others may take of it
        self._join()
        self.comm, self.mesh = self._connect()

        self.phase.enter("import")
        user.add_to_path(self._job_dir)
        user.load(job.model, self._job_dir)
        if job.compile:
            load_compiler()

        self.phase.enter("build")
        self._settings = self._sharding_config(room)
        built = self._build_model()
        check_trained(built.module)
        check_hooks(job, self._job_dir, built.module)
        part = ModelPart()
        if self._has_part:
            part = self._take_part(built)

        self.phase.enter("shard")
        inputs = self._offloaded_inputs()
        sharded, notes = parallelize.parallelize(
            built, job, self._settings, self.mesh, self.comm, inputs, part.stage, part.divided
        )
        sharded.module.to(self._device)  # buffers: the parameters are there
        notes = [*built.notes, *part.notes, *notes, *_idle_devices(self._device)]
        if (slow := self._settings.precision.slowness(self._device)) is not None:
            notes.append(slow)

        self.phase.enter("load")
        self._hold_folder()
        state = part.state_of(sharded)
        resumed, loading_notes = self._load(state)
        notes += loading_notes

        data = self._open_data()
        trainer, total_steps = self._make_trainer(sharded, state, data, resumed, part, inputs)
        notes += data.notes(self.spec, total_steps)
        notes += part.end_check(trainer, resumed)
        self._go_on(trainer, resumed)
        trainer.recorder.start(notes, None if resumed is None else resumed.path, total_steps)
        return trainer

    # Together with the other ranks

    def _join(self) -> None:
        """Meet the other ranks.

        Raises:
            RendezvousError: not all of them came in time.
        """
        world_size = self.spec.plan.world_size
        rendezvous.join(self.rank, world_size, self._device, self.spec.job.limits)

    def _connect(self) -> tuple[Comm, Mesh]:
        """Build the groups of this rank; those of one host see each other on its board."""
        job = self.spec.job
        plan = self.spec.plan
        limit_s = job.limits.collective_s
        comm = Comm(self._device, self.board)
        Watchdog(
            self.board,
            self._give_up,
            limit_s=math.inf if waits_fail(self._device) else limit_s,
            limit_key="limits.collective_s",
            device_waits=comm.device_waits,
        )
        wraps = job.parallel.virtual > 1
        mesh = Mesh.build(
            self.rank,
            [place.host for place in plan.ranks],
            plan.shard_size(job.zero),
            places=[place.coordinates for place in plan.ranks],
            wraps=wraps,
            timeout_s=backend_timeout(self._device, limit_s),
        )
        reason = comm.use_cma(mesh.host, limit_s)
        if reason is not None:
            print(f"the ranks of this host talk through sockets: {reason}")
        connect(comm, mesh, wraps=wraps, has_hub=job.sync == "server")
        return comm, mesh

    # The whole model

    def _sharding_config(self, room: Room) -> ShardingConfig:
        job = self.spec.job
        optimizer = resolve_where_placed(
            job.optim,
            lambda name: user.load(Ref(call=name), self._job_dir),
            self._device,
            placement_of(job.offload, job.activations, self._device.type),
        )
        return replace(
            parallelize.make_settings(job, optimizer, self._device),
            memory_bytes=self._memory_bytes(),
            room=room,
            disk_folder=str(self.spec.offload_folder),
        )

    def _memory_bytes(self) -> int | None:
        """Return how many bytes the model may take on its device; None: there is no limit."""
        given = self.spec.memory_bytes
        if given is None or self._device.type != "cpu":
            return given
        return given - memory_limits.resident_bytes([os.getpid()])  # this process has its part

    @property
    def _has_part(self) -> bool:
        """True if ranks have parts of the model's structure: stages, or slices of layers."""
        return self.mesh.data.size < self.mesh.world.size

    def _build_model(self) -> Built:
        job = self.spec.job
        # Values that a checkpoint or strict weights will replace need not be made.
        is_loaded = self.spec.resume is not None
        is_replaced = job.init_from is not None and job.init_from.strict
        values = not is_loaded and not is_replaced

        def factory() -> torch.nn.Module:
            return user.build_model(job.model, self._job_dir)

        if job.init == "meta":
            return build_on_meta(factory, job.seed, values=values)
        check_states = None
        if not self._has_part:
            check_states = partial(
                check_model_fits, settings=self._settings, mesh=self.mesh, comm=self.comm
            )
        return build_once_per_host(
            factory,
            job.seed,
            Path(self.spec.run_dir) / f"init-{self.mesh.host.ranks[0]}",
            self.mesh.host,
            self.comm,
            values=values,
            host_bytes=self._host_bytes() if self._settings.memory_bytes is not None else None,
            check_states=check_states,
        )

    def _host_bytes(self) -> int:
        """Return how many bytes the ranks of this host may take together."""
        limits = (
            memory_limits.host_total(),
            memory_limits.process_available(),
            self.spec.job.limits.memory,
        )
        return min(limit for limit in limits if limit is not None)

    # This rank's part of it

    def _take_part(self, built: Built) -> ModelPart:
        """Make the model this rank's stage and slices of it, in place. Collective.

        Its first forward tells what can be divided and where it can be cut.

        Raises:
            JobError: it cannot be parted as the job asks.
        """
        job = self.spec.job
        data = self._open_data()
        self.phase.enter("build")
        batch = data.first_batch().to(self._device)
        forward = self._first_forward(built, data, batch)
        tensor_comm = TensorComm(self.comm, self.mesh.tensor)
        compute = self._settings.precision.compute
        plan, notes = plan_tensors(built.module, job.parallel, forward, compute, self._device)
        check_same(plan, tensor_comm)
        check = self._begin_value_check(built, data, batch)
        stage = None
        if self.mesh.pipe.size > 1:
            stage = self._cut(built, forward)
            notes = [*notes, *stage.notes]

        self.phase.enter("shard")
        divided = divide_model(built.module, plan, job.parallel, tensor_comm, stage)
        return ModelPart(stage, divided, check, notes)

    def _first_forward(
        self, built: Built, data: JobData, batch: MicroBatch
    ) -> Callable[[], object]:
        """Return what runs the loss of the first batch, by which a model is divided and cut.

        It leaves no trace in the batch and in the model.
        """

        def forward() -> object:
            autocast = self._settings.precision.autocast(self._device)
            failing = user.user_code("forward failed")
            loss = data.functions.loss
            with autocast, failing, kept_attributes(built.module, loss, batch.batch):
                return compute_loss(built.module, copied(batch.batch), loss, 1)

        return forward

    def _begin_value_check(
        self, built: Built, data: JobData, batch: MicroBatch
    ) -> ValueCheck | str:
        """Run the forward of the whole model, to compare with; or return why it is not."""
        job = self.spec.job
        if not job.guards.check_values:
            return "guards.check_values is false"
        few = batch
        if data.functions.collate is None:  # of one of the user's own, rows may be anything
            few = first_samples(batch, _COMPARED)
        check = ValueCheck(
            [few, batch],
            data.functions.loss,
            self._settings.precision,
            data.streams,
            self.mesh,
            self.spec.batch.global_size,
            is_compiled=job.compile,
            patience_s=job.limits.collective_s,
            trust=job.guards.trust,
        )
        if self.spec.resume is not None:
            self._hold_folder()
        check.run_whole(built, self._device, self._free_bytes(), self._stored_values(built))
        return check

    def _stored_values(self, built: Built) -> Callable[[], WholeValues] | None:
        """Return what opens the values that the run begins or goes on with, if files have them."""
        if self.spec.resume is not None:
            return partial(newest_step, self.spec.resume)
        init_from = self.spec.job.init_from
        return None if init_from is None else partial(weights_of, init_from, built.module)

    def _free_bytes(self) -> int:
        """Return how many bytes of the device a trial may take."""
        if self._device.type == "cpu":
            return self._host_bytes()
        return accelerator.free_memory(self._device)

    def _cut(self, built: Built, forward: Callable[[], object]) -> StageParts:
        """Make the model this rank's stage of a pipeline. Collective.

        Stages with the same parameters get a group, and PipeDream's their versions.

        Raises:
            JobError: the model cannot be cut as the job asks.
        """
        job = self.spec.job
        stage = build_stage(built.module, forward, job, self._settings, self.mesh, self.comm.device)
        places = [place.coordinates for place in self.spec.plan.ranks]
        timeout_s = backend_timeout(self.comm.device, job.limits.collective_s)
        self.mesh = self.mesh.tie(places, stage.tied_stages, timeout_s)
        connect_groups(self.comm, [self.mesh.tied])
        pipe = self.mesh.pipe
        versions_kept = num_versions(job.parallel.schedule, pipe.index, pipe.size)
        self._settings = replace(self._settings, versions=versions_kept)
        return stage

    def _offloaded_inputs(self) -> OffloadedInputs | None:
        job = self.spec.job
        return parallelize.offloaded_inputs(
            self._settings.placement.activation,
            self.mesh,
            self.comm,
            self.spec.offload_folder,
            job.offload.host_memory,
            input_partition(job.activations, job.parallel, self.mesh, self.comm),
        )

    # Values, data, and what trains with them

    def _hold_folder(self) -> None:
        """Lock the folder of checkpoints, on rank 0, if that is not done.

        That is before anything in it is read: another run could remove it meanwhile.
        """
        if self.spec.job.checkpoint is not None and self.rank == 0 and self.lock is None:
            self.lock = hold(self.spec.checkpoint_folder)

    def _load(self, state: ModelState) -> tuple[Resumed | None, list[str]]:
        """Fill the model from where the run goes on, or begins; return notes for the user too."""
        if self.spec.resume is not None:
            resumed = load_newest(self.spec.resume, state, self.comm, self.mesh.world)
            return resumed, resumed.in_words()
        init_from = self.spec.job.init_from
        if init_from is not None:
            return None, load_weights(init_from, state, self.mesh.world)
        return None, []

    def _open_data(self) -> JobData:
        """Return the data, which are opened when they are asked for first."""
        self.phase.enter("data")
        if self._data is None:
            self._data = JobData.open(self.spec, self.mesh, self._device)
        return self._data

    def _make_trainer(
        self,
        sharded: ShardedModel,
        state: ModelState,
        data: JobData,
        resumed: Resumed | None,
        part: ModelPart,
        inputs: OffloadedInputs | None,
    ) -> tuple[Trainer, int | None]:
        """Return the trainer, and how many steps it will make, as of `JobData.total_steps`."""
        job = self.spec.job
        functions = data.functions
        self.streams = data.streams
        state.holders = (data.dataset, functions.collate)
        part.draw_from(data.streams)
        data.streams.begin()  # from here on each rank draws from its own
        total_steps = data.total_steps(job, resumed)
        trainer = Trainer(
            self.spec,
            sharded,
            data.loader,
            functions,
            make_schedule(job.lr, total_steps, functions.lr_schedule),
            self.emitter,
            self.phase,
            self.stop,
            data.streams.forwards,
            self._checkpointer(state, data.streams),
            None if part.stage is None else part.stage.stage,
        )
        trainer.recorder.inputs = inputs
        trainer.recorder.stage = None if part.stage is None else part.stage.facts
        return trainer, total_steps

    def _go_on(self, trainer: Trainer, resumed: Resumed | None) -> None:
        """Have the run begin, or go on where the checkpoint was made."""
        if resumed is not None:
            trainer.state.resume(resumed)
            restore_streams(resumed, self.streams)
        elif trainer.checkpointer is not None and self.rank == 0:
            trainer.loader.mark({})
        if trainer.checkpointer is not None:
            trainer.checkpointer.open(resumed)

    def _checkpointer(self, state: ModelState, streams: rng.Streams) -> Checkpointer | None:
        job = self.spec.job
        if job.checkpoint is None:
            return None
        # The user may have named the folder of the run, and so its id.
        run_id = re.sub(r"[^A-Za-z0-9_-]", "-", self.spec.run_id)[:128]
        about = RunInfo(run_id, job.model_dump(mode="json", by_alias=True), versions())
        return Checkpointer(
            CheckpointFolder(self.spec.checkpoint_folder),
            state,
            streams,
            job.checkpoint,
            self.comm,
            self.mesh.world,
            about,
            self._emit_save,
            job.limits.save_s,
            "limits.save_s",
        )

    def _emit_save(self, **fields: Any) -> None:
        if "warning" in fields:
            self.emitter.emit("warning", message=fields.pop("warning"), **fields)
        else:
            self.emitter.emit("save", **fields)


def _idle_devices(device: torch.device) -> list[str]:
    """Say which devices stay idle while `device` trains, if torch knows some."""
    why_not = accelerator.why_not_others()
    if device.type != "cpu" or why_not is None:
        return []
    return [f"ranks train on CPUs: {why_not}"]
