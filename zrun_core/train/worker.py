"""One rank's process: forked for zrun's agent, or under plain torchrun.

`python -m zrun_core run_dir/spec.json` starts it there.

It reads its rank from torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK). ZRUN_STORE names the
file through which the ranks of one host meet, or the address at which those of several do:
tcp://10.0.0.1:41234, where rank 0 has inherited the socket that listens there, ZRUN_STORE_FD.
Without it they meet at MASTER_ADDR:MASTER_PORT. A failure is written to
`run_dir/failures/rank-N.json` before the process ends with the failure's exit code.
"""

from __future__ import annotations

import ctypes
import faulthandler
import math
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from zrun_core.checkpoint.checkpointer import Checkpointer, versions
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.folder_lock import hold
from zrun_core.checkpoint.initial_weights import load_weights
from zrun_core.checkpoint.model_state import ModelState
from zrun_core.checkpoint.rank_save import RunInfo
from zrun_core.checkpoint.resume import Resumed, load_newest, restore_streams
from zrun_core.checkpoint.whole_values import WholeValues, newest_step, weights_of
from zrun_core.data.batch import MicroBatch, copied
from zrun_core.data.loader import BatchLoader
from zrun_core.distributed import rng
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.communicators import backend_timeout, connect, connect_groups, waits_fail
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.transport import Group
from zrun_core.errors import (
    ExitCode,
    JobError,
    StoppedError,
    ZrunError,
)
from zrun_core.guards.holders import CallsUnderWay
from zrun_core.guards.memory_witness import MemoryWitness
from zrun_core.guards.watchdog import Watchdog
from zrun_core.hardware import accelerator
from zrun_core.memory.buffers import placement_of
from zrun_core.memory.room import Room
from zrun_core.optim.lr import make_schedule
from zrun_core.optim.where import resolve_where_placed
from zrun_core.pipeline.schedule import num_versions
from zrun_core.spine import heap, memory_limits
from zrun_core.spine.events import Emitter
from zrun_core.spine.flight_page import host_file
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.spine.held_memory import HeldMemory, Holder
from zrun_core.spine.sections.section import Ref
from zrun_core.spine.spec import RunSpec
from zrun_core.spine.stop_signals import StopSignals
from zrun_core.tensor_parallel.divide import Divided
from zrun_core.tensor_parallel.same_plan import check_same
from zrun_core.tensor_parallel.tensor_comm import TensorComm
from zrun_core.train import failure_note, parallelize, rendezvous
from zrun_core.train.evaluator import HeldOut
from zrun_core.train.host_room import host_room
from zrun_core.train.rank_phase import RankPhase
from zrun_core.train.stage_building import StageParts, build_stage
from zrun_core.train.tensor_building import divide_model, input_partition, plan_tensors
from zrun_core.train.trainer import Trainer, UserFunctions
from zrun_core.train.value_check import ValueCheck, not_compared, why_not_compared
from zrun_core.user_code import user
from zrun_core.user_code.build import Built, build_once_per_host, check_trained
from zrun_core.user_code.loss import compute_loss
from zrun_core.user_code.meta_init import build_on_meta
from zrun_core.user_code.trial import kept_attributes
from zrun_core.zero.passes.graph_breaks import load_compiler
from zrun_core.zero.wrap.sharding_config import ShardingConfig, check_model_fits

# Torch's profiler tells stderr when it begins and ends. It reads this when it is used first.
_QUIET_PROFILER = ("KINETO_LOG_LEVEL", "6")


def import_for(path: str) -> None:
    """Import what ranks of the job at `path`, a spec.json, would each import after they are forked.

    Fake tensors and recomputation too need the module of torch's compiler.
    """
    try:
        job = RunSpec.read(Path(path)).job
    except (OSError, ValueError):
        return  # `main` says what is wrong with it
    has_parts = job.parallel.tp > 1 or job.parallel.pp > 1
    if has_parts or job.compile or job.activations.checkpoint != "none":
        load_compiler()


def main(kind: type[Worker] | None = None) -> NoReturn:
    """Run one rank and end the process with the contract's exit code.

    Args:
        kind: of the worker; None: the one that trains, and no more.
    """
    try:
        spec, rank = _read_arguments(sys.argv[1:], os.environ)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    _die_with_parent()
    os.environ.setdefault(*_QUIET_PROFILER)
    heap.keep_freed_memory()  # where torchrun has started this process, and not the launcher
    faulthandler.enable()
    _keep_sockets_with_the_agent(spec)
    worker = (kind or Worker)(spec, rank)
    code = ExitCode.OK
    try:
        worker.listen()
        worker.run()
    except BaseException as error:
        code = worker.report(error)
    worker.emitter.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Destroying a gloo group sometimes aborts, and the loader's processes must not delay the end.
    os._exit(code)


def _read_arguments(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[RunSpec, int]:
    """Return the spec and the rank that this process was started with.

    Raises:
        JobError: it was not started as the usage says, or no rank can train by the plan.
    """
    usage = "usage: torchrun --nproc-per-node N -m zrun_core RUN_DIR/spec.json"
    if len(arguments) != 1:
        raise JobError(f"one argument is needed, the spec.json of a run directory; {usage}")
    path = arguments[0]
    try:
        spec = RunSpec.read(Path(path))
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}; {usage}") from None
    except ValueError:  # pydantic's
        raise JobError(f"{path} is not the spec.json of a run directory; {usage}") from None
    size = spec.plan.world_size
    try:
        rank = int(environment["RANK"])
        given = int(environment["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise JobError(
            f"RANK and WORLD_SIZE say which rank this is, and are not set; {usage}"
        ) from None
    if given != size or not 0 <= rank < size:
        raise JobError(f"{path} is for {size} ranks, and this is rank {rank} of {given}; {usage}")
    return spec, rank


class _Data(NamedTuple):
    """The job's data, and the user's functions."""

    functions: UserFunctions
    dataset: object
    streams: rng.Streams
    loader: BatchLoader


class Worker:
    """Builds a rank from its spec and runs it."""

    def __init__(self, spec: RunSpec, rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self.run_dir = Path(spec.run_dir)
        self.job_dir = Path(spec.job_dir)
        telemetry = spec.telemetry
        if telemetry is not None and not Path(telemetry).exists():
            telemetry = None  # of an earlier run: this one was started by torchrun
        self.emitter = Emitter(telemetry, rank)
        self.stop = StopSignals()
        self.lock: int | None = None  # on the folder of checkpoints
        ranks = spec.plan.ranks_on(spec.plan.ranks[rank].host)
        board_file = host_file(self.run_dir, "board", ranks.start)
        self.board = FlightRecorder(board_file, rank, ranks, spec.plan.world_size)
        self.phase = RankPhase(self.board)
        self._trainer: Trainer | None = None
        self.streams: rng.Streams | None = None  # that its model draws from, once there is one

    def listen(self) -> None:
        """Obey signals; SIGQUIT writes every thread's stack, even while native code is stuck."""
        self.stop.listen()
        folder = self.run_dir / "stacks"
        folder.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        stacks = os.open(folder / f"rank-{self.rank}.txt", flags, 0o600)  # open until the end
        faulthandler.register(signal.SIGQUIT, stacks)
        MemoryWitness(self.run_dir, self.rank, self._held_memory)

    def run(self) -> None:
        """Join the other ranks, build the rank's trainer, and train to the end."""
        trainer, world = self._prepare()
        self._trainer = trainer
        self.stop.can_finish = True
        trainer.run()
        trainer.comm.barrier(world)

    def _prepare(self) -> tuple[Trainer, Group]:
        """Join the others, build the model, shard it, load it, open the data."""
        job = self.spec.job
        place = self.spec.plan.ranks[self.rank]
        device = torch.device(place.device)
        torch.set_num_threads(place.threads)

        self.phase.enter("rendezvous")
        room = host_room(self.spec, self.rank)  # once all have joined, others may take of it
        self._join(device)
        comm, mesh = self._connect(device)

        self.phase.enter("import")
        user.add_to_path(self.job_dir)
        user.load(job.model, self.job_dir)
        if job.compile:
            load_compiler()

        self.phase.enter("build")
        settings = self._sharding_config(device, room)
        built = self._build(settings, mesh, comm)
        check_trained(built.module)

        plan = None
        plan_notes: list[str] = []
        data = None
        parts = None
        check: ValueCheck | str | None = None
        tensor_comm = TensorComm(comm, mesh.tensor)
        if mesh.data.size < mesh.world.size:  # ranks have parts of the model
            self.phase.enter("data")
            data = self._open_data(mesh, device)
            self.phase.enter("build")
            batch = _first_batch(data).to(device)
            forward = self._first_forward(built, data, batch, settings, device)
            compute = settings.precision.compute
            plan, plan_notes = plan_tensors(built.module, job.parallel, forward, compute, device)
            check_same(plan, tensor_comm)
            check = self._begin_value_check(built, data, batch, settings, mesh)
            mesh, parts = self._cut(built, forward, settings, mesh, comm)
            settings = replace(
                settings,
                versions=num_versions(job.parallel.schedule, mesh.pipe.index, mesh.pipe.size),
            )

        self.phase.enter("shard")
        divided = divide_model(built.module, plan, job.parallel, tensor_comm, parts)
        inputs = parallelize.offloaded_inputs(
            settings.placement.activation,
            mesh,
            comm,
            self.spec.offload_folder,
            job.offload.host_memory,
            input_partition(job.activations, job.parallel, mesh, comm),
        )
        sharded, notes = parallelize.parallelize(
            built, job, settings, mesh, comm, inputs, parts, divided
        )
        sharded.module.to(device)  # buffers: the parameters are there
        notes = [*built.notes, *plan_notes, *notes, *_idle_devices(device)]
        if (slow := settings.precision.slowness(device)) is not None:
            notes.append(slow)
        if parts is not None:
            notes += parts.notes

        self.phase.enter("load")
        self._hold_folder()
        state = ModelState(sharded)
        if parts is not None:
            saved_elsewhere = parts.stage.saved_elsewhere
            state = ModelState(sharded, order=parts.order, saved_elsewhere=saved_elsewhere)
        resumed, loading_notes = self._load(state, mesh, comm)
        notes += loading_notes

        self.phase.enter("data")
        if data is None:
            data = self._open_data(mesh, device)
        functions, dataset, streams, loader = data
        self.streams = streams
        state.holders = (dataset, functions.collate)
        if divided is not None:
            divided.regions.streams = streams
        streams.begin()  # from here on each rank draws from its own
        total_steps = self._total_steps(loader, resumed)
        notes += self._notes_of_data(loader, total_steps)
        checkpointer = self._checkpointer(state, streams, comm, mesh.world)
        trainer = Trainer(
            self.spec,
            sharded,
            loader,
            functions,
            make_schedule(job.lr, total_steps, functions.lr_schedule),
            self.emitter,
            self.phase,
            self.stop,
            streams.forwards,
            checkpointer,
            None if parts is None else parts.stage,
        )
        trainer.recorder.inputs = inputs
        trainer.recorder.stage = None if parts is None else parts.facts
        notes += _end_value_check(check, trainer, divided, resumed)
        if resumed is not None:
            trainer.state.resume(resumed)
            restore_streams(resumed, streams)
        elif checkpointer is not None and self.rank == 0:
            loader.mark({})
        if checkpointer is not None:
            checkpointer.open(resumed)
        trainer.recorder.start(notes, None if resumed is None else resumed.path, total_steps)
        return trainer, mesh.world

    # Together with the other ranks

    def _join(self, device: torch.device) -> None:
        """Meet the other ranks.

        Raises:
            RendezvousError: not all of them came in time.
        """
        rendezvous.join(self.rank, self.spec.plan.world_size, device, self.spec.job.limits)

    def _connect(self, device: torch.device) -> tuple[Comm, Mesh]:
        """Build the groups of this rank; those of one host see each other on its board."""
        job = self.spec.job
        plan = self.spec.plan
        limit_s = job.limits.collective_s
        comm = Comm(device, self.board)
        Watchdog(
            self.board,
            self._give_up,
            limit_s=math.inf if waits_fail(device) else limit_s,
            limit_key="limits.collective_s",
            device_waits=comm.device_waits,
        )
        mesh = Mesh.build(
            self.rank,
            [place.host for place in plan.ranks],
            plan.shard_size(job.zero),
            places=[place.coordinates for place in plan.ranks],
            wraps=job.parallel.virtual > 1,
            timeout_s=backend_timeout(device, limit_s),
        )
        reason = comm.use_cma(mesh.host, limit_s)
        if reason is not None:
            print(f"the ranks of this host talk through sockets: {reason}")
        wraps = job.parallel.virtual > 1
        connect(comm, mesh, wraps=wraps, has_hub=job.sync == "server")
        return comm, mesh

    # The model

    def _sharding_config(self, device: torch.device, room: Room) -> ShardingConfig:
        job = self.spec.job
        optimizer = resolve_where_placed(
            job.optim,
            lambda name: user.load(Ref(call=name), self.job_dir),
            device,
            placement_of(job.offload, job.activations, device.type),
        )
        settings = parallelize.make_settings(job, optimizer, device)
        return replace(
            settings,
            memory_bytes=self._memory_bytes(device),
            room=room,
            disk_folder=str(self.spec.offload_folder),
        )

    def _memory_bytes(self, device: torch.device) -> int | None:
        """Return how many bytes the model may take on its device; None: there is no limit."""
        given = self.spec.memory_bytes
        if given is None or device.type != "cpu":
            return given
        return given - memory_limits.resident_bytes([os.getpid()])  # this process has its part

    def _build(self, settings: ShardingConfig, mesh: Mesh, comm: Comm) -> Built:
        job = self.spec.job
        # Values that a checkpoint or strict weights will replace need not be made.
        is_loaded = self.spec.resume is not None
        is_replaced = job.init_from is not None and job.init_from.strict
        values = not is_loaded and not is_replaced

        def factory() -> torch.nn.Module:
            return user.build_model(job.model, self.job_dir)

        if job.init == "meta":
            return build_on_meta(factory, job.seed, values=values)
        check_states = None
        if mesh.data.size == mesh.world.size:  # else this rank has a part of the structure
            check_states = partial(check_model_fits, settings=settings, mesh=mesh, comm=comm)
        return build_once_per_host(
            factory,
            job.seed,
            self.run_dir / f"init-{mesh.host.ranks[0]}",
            mesh.host,
            comm,
            values=values,
            host_bytes=self._host_bytes() if settings.memory_bytes is not None else None,
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

    def _hold_folder(self) -> None:
        """Lock the folder of checkpoints, on rank 0, if that is not done.

        That is before anything in it is read: another run could remove it meanwhile.
        """
        if self.spec.job.checkpoint is not None and self.rank == 0 and self.lock is None:
            self.lock = hold(self.spec.checkpoint_folder)

    def _load(self, state: ModelState, mesh: Mesh, comm: Comm) -> tuple[Resumed | None, list[str]]:
        """Fill the model from where the run goes on, or begins; return notes for the user too."""
        if self.spec.resume is not None:
            resumed = load_newest(self.spec.resume, state, comm, mesh.world)
            return resumed, resumed.in_words()
        init_from = self.spec.job.init_from
        if init_from is not None:
            return None, load_weights(init_from, state, mesh.world)
        return None, []

    def _first_forward(
        self,
        built: Built,
        data: _Data,
        batch: MicroBatch,
        settings: ShardingConfig,
        device: torch.device,
    ) -> Callable[[], object]:
        """Return what runs the loss of the first batch, by which a model is divided and cut.

        It leaves no trace in the batch and in the model.
        """

        def forward() -> object:
            autocast = settings.precision.autocast(device)
            failing = user.user_code("forward failed")
            loss = data.functions.loss
            with autocast, failing, kept_attributes(built.module, loss, batch.batch):
                return compute_loss(built.module, copied(batch.batch), loss, 1)

        return forward

    def _begin_value_check(
        self,
        built: Built,
        data: _Data,
        batch: MicroBatch,
        settings: ShardingConfig,
        mesh: Mesh,
    ) -> ValueCheck | str:
        """Run the forward of the whole model, to compare with; or return why it is not."""
        why_not = self._why_not_compared()
        if why_not:
            return why_not
        check = ValueCheck(
            batch,
            data.functions.loss,
            settings.precision,
            data.streams,
            mesh,
            self.spec.batch.global_size,
            is_compiled=self.spec.job.compile,
            patience_s=self.spec.job.limits.collective_s,
            trust=self.spec.job.guards.trust,
        )
        device = torch.device(self.spec.plan.ranks[self.rank].device)
        if self.spec.resume is not None:
            self._hold_folder()
        check.run_whole(built, device, self._free_bytes(device), self._stored_values(built))
        return check

    def _stored_values(self, built: Built) -> Callable[[], WholeValues] | None:
        """Return what opens the values that the run begins or goes on with, if files have them."""
        if self.spec.resume is not None:
            return partial(newest_step, self.spec.resume)
        init_from = self.spec.job.init_from
        return None if init_from is None else partial(weights_of, init_from, built.module)

    def _why_not_compared(self) -> str:
        """Return why the whole model's forward is not run; "" if it is."""
        return "" if self.spec.job.guards.check_values else "guards.check_values is false"

    def _free_bytes(self, device: torch.device) -> int:
        """Return how many bytes of the device a trial may take."""
        if device.type == "cpu":
            return self._host_bytes()
        return accelerator.free_memory(device)

    def _cut(
        self,
        built: Built,
        forward: Callable[[], object],
        settings: ShardingConfig,
        mesh: Mesh,
        comm: Comm,
    ) -> tuple[Mesh, StageParts | None]:
        """Make the model this rank's stage of a pipeline; return it, and its groups. Collective.

        Raises:
            JobError: the model cannot be cut as the job asks.
        """
        if mesh.pipe.size == 1:
            return mesh, None
        job = self.spec.job
        parts = build_stage(built.module, forward, job, settings, mesh, comm.device)
        places = [place.coordinates for place in self.spec.plan.ranks]
        timeout_s = backend_timeout(comm.device, job.limits.collective_s)
        mesh = mesh.tie(places, parts.tied_stages, timeout_s)
        connect_groups(comm, [mesh.tied])
        return mesh, parts

    # The user's functions and data

    def _open_data(self, mesh: Mesh, device: torch.device) -> _Data:
        job = self.spec.job
        functions = self._load_functions()
        dataset = user.call(_without_options(job.data), self.job_dir)
        streams = rng.Streams(
            job.seed,
            device,
            dp=mesh.data.index,
            pp=mesh.pipe.index,
            tp=mesh.tensor.index,
        )
        loader = BatchLoader(
            dataset,
            job.data,
            self.spec.batch,
            mesh.data.index,
            job.seed,
            device,
            epochs=job.epochs,
            collate=functions.collate,
            draws=streams.data,
        )
        return _Data(functions, dataset, streams, loader)

    def _load_functions(self) -> UserFunctions:
        job = self.spec.job
        loss = self._function(job.loss, "loss")
        collate = self._function(job.data.collate, "data.collate")
        hooks = {name: self._function(ref, "hooks") for name, ref in job.hooks if ref is not None}
        held_out = None
        if job.eval is not None:
            held_out = HeldOut(
                sets={name: user.call(ref, self.job_dir) for name, ref in job.eval.sets.items()},
                metrics=self._function(job.eval.metrics, "eval.metrics"),
                loss=loss,
                collate=collate,
            )
        lr_schedule = None
        if isinstance(job.lr.schedule, Ref):
            lr_schedule = self._function(job.lr.schedule, "lr.schedule")
        return UserFunctions(
            loss=loss, hooks=hooks, held_out=held_out, collate=collate, lr_schedule=lr_schedule
        )

    def _function(self, ref: Ref | None, key: str) -> Any:
        """Load the function of a job's key; None without one."""
        return None if ref is None else user.function(ref, self.job_dir, user.TAKES[key])

    def _total_steps(self, loader: BatchLoader, resumed: Resumed | None) -> int | None:
        """Return the optimizer steps of the whole run; None if only its end will tell."""
        if self.spec.job.steps is not None:
            return self.spec.job.steps
        progress = {} if resumed is None else resumed.manifest.progress
        return loader.total_steps(progress.get("steps", 0), progress.get("cursor", 0))

    def _notes_of_data(self, loader: BatchLoader, total_steps: int | None) -> list[str]:
        """Say how long the data lasts, where the user may not have meant it so."""
        epochs, size = self.spec.job.epochs, self.spec.batch.global_size
        if epochs is not None and total_steps is not None:
            return [f"epochs {epochs}: {total_steps} steps of {size} samples"]
        if epochs is None and loader.num_samples is not None and loader.num_samples < size:
            return [
                f"the data has {loader.num_samples} samples and a step takes {size}: each step "
                "has some of them more than once"
            ]
        return []

    # Saves

    def _checkpointer(
        self,
        state: ModelState,
        streams: rng.Streams,
        comm: Comm,
        world: Group,
    ) -> Checkpointer | None:
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
            comm,
            world,
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

    # Failures

    def _held_memory(self, calls: CallsUnderWay) -> HeldMemory:
        """Return what this rank holds while the user's code is in these calls. Of any thread."""
        if self._trainer is not None:
            return self._trainer.memory.held(self.rank, calls)
        held = memory_limits.resident_bytes([os.getpid()])
        whole = Holder("the process, which has not begun to train", "since", held)
        return HeldMemory(self.rank, held, calls.place, {whole.kind: held}, (whole,))

    def _give_up(self, error: ZrunError) -> None:
        """Exit with `error`. Called by another thread: the main one waits in a collective."""
        code = self.report(error)
        self.emitter.close()
        os._exit(code)

    def report(self, error: BaseException) -> ExitCode:
        """Write the failure for the launcher, print it to the rank's log, and return the code."""
        if isinstance(error, StoppedError):  # no failure
            print(error, file=sys.stderr, flush=True)
            return error.exit_code
        return failure_note.report(error, self.run_dir, self.rank, self.phase.name, self._trainer)


def _end_value_check(
    check: ValueCheck | str | None,
    trainer: Trainer,
    divided: Divided | None,
    resumed: Resumed | None,
) -> list[str]:
    """Compare what this rank's part of the model computes; return notes for the user.

    `check` may be why there is none; None: this rank has all of the model. `divided` has the slices
    of its layers that this rank has; None: it has all of them.
    """
    if check is None:
        return []
    if isinstance(check, str):
        trainer.loss_causes.why_not_compared = check
        return [not_compared(check)]
    regions = None if divided is None else divided.regions
    step = None if resumed is None else resumed.path
    notes = check.compare(trainer.micro_batches, trainer.sharded, regions, step)
    trainer.loss_causes.why_not_compared = why_not_compared(notes)
    return notes


def _first_batch(data: _Data) -> MicroBatch:
    """Return the first micro-batch.

    Raises:
        JobError: there is none.
    """
    batch = data.loader.peek()
    if batch is None:
        raise JobError("parallel: the data yields no batch, which is needed to divide the model")
    return batch


def _idle_devices(device: torch.device) -> list[str]:
    """Say which devices stay idle while `device` trains, if torch knows some."""
    why_not = accelerator.why_not_others()
    if device.type != "cpu" or why_not is None:
        return []
    return [f"ranks train on CPUs: {why_not}"]


def _without_options(ref: Ref) -> Ref:
    """Return the reference alone, without the options of a section that extends it."""
    return Ref(call=ref.call, args=ref.args)


def _keep_sockets_with_the_agent(spec: RunSpec) -> None:
    """Have the sockets of loader processes lie in the folder that the agent removes in the end.

    Else each rank with loader processes would leave a folder among the temporary files: it ends
    without Python's own end, or is killed.
    """
    if spec.telemetry is not None and Path(spec.telemetry).exists():
        folder = str(Path(spec.telemetry).parent)
        multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def _die_with_parent() -> None:
    """Ask the kernel to end this process when the agent that started it does."""
    if sys.platform.startswith("linux"):
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died in between
            os._exit(ExitCode.TERMINATED)
