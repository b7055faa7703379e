"""One rank's process: forked for zrun's agent, or `python -m zrun_core run_dir/spec.json` under plain torchrun.

It reads where it sits from torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK). ZRUN_STORE names the file through which
the ranks of one host meet, or the address at which those of several do: tcp://10.0.0.1:41234, where rank 0 has
inherited the socket that listens there, ZRUN_STORE_FD. Without it they meet at MASTER_ADDR:MASTER_PORT. A failure is
written to `run_dir/failures/rank-N.json` before the process ends with the failure's exit code.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from zrun_core.checkpoint.checkpointer import Checkpointer, RunInfo, versions
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.folder_lock import hold
from zrun_core.checkpoint.initial import load_weights
from zrun_core.checkpoint.model_state import ModelState
from zrun_core.checkpoint.resume import Resumed, load_newest, restore_streams
from zrun_core.data.loader import BatchLoader
from zrun_core.distributed import rng
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.transport import Group
from zrun_core.errors import (
    ExitCode,
    JobError,
    OutOfMemoryError,
    PeerError,
    RendezvousError,
    StoppedError,
    UserCodeError,
    ZrunError,
    lack_of_threads,
)
from zrun_core.guards import oom
from zrun_core.optim.lr import make_schedule
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.spine import heap, memory_limits, tracebacks
from zrun_core.spine.events import Emitter
from zrun_core.spine.flight_recorder import FlightRecorder, Watchdog, host_file
from zrun_core.spine.parallel_dims import refuse_untrained
from zrun_core.spine.section import Ref
from zrun_core.spine.spec import RunSpec
from zrun_core.spine.stop_signals import StopSignals
from zrun_core.train import parallelize
from zrun_core.train.evaluator import HeldOut
from zrun_core.train.rank_phase import RankPhase
from zrun_core.train.trainer import Trainer, UserFunctions
from zrun_core.user_code import user
from zrun_core.user_code.build import Built, build_once_per_host
from zrun_core.user_code.meta_init import build_on_meta
from zrun_core.zero.sharded_model import ShardingConfig, check_room

_KINDS: dict[type[BaseException], str] = {UserCodeError: "user", PeerError: "peer"}
# Of a whole traceback, to the launcher, which reads notes up to a size; the log has all of it.
_TOLD_CHARS = 24_000


def main() -> NoReturn:
    """Run one rank and end the process with the contract's exit code."""
    try:
        spec, rank = _given(sys.argv[1:], os.environ)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    _die_with_parent()
    heap.keep_freed_memory()  # where torchrun has started this process, and not the launcher
    faulthandler.enable()
    worker = Worker(spec, rank)
    code = ExitCode.OK
    try:
        worker.listen()
        worker.run()
    except BaseException as error:
        code = worker.report(error)
    worker.emitter.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code
    )  # destroying a gloo group sometimes aborts, and loader processes must not delay the end


def _given(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[RunSpec, int]:
    """The spec and the rank that this process was started with.

    Raises:
        JobError: it was not started as the usage says, or no rank can train by the plan.
    """
    usage = "usage: torchrun --nproc-per-node N -m zrun_core RUN_DIR/spec.json"
    if len(arguments) != 1:
        raise JobError(f"one argument is needed, the spec.json of a run directory; {usage}")
    try:
        spec = RunSpec.read(Path(arguments[0]))
    except OSError as error:
        raise JobError(f"{arguments[0]} cannot be read: {error.strerror}; {usage}") from None
    except ValueError:  # pydantic's
        raise JobError(f"{arguments[0]} is not the spec.json of a run directory; {usage}") from None
    size = spec.plan.world_size
    try:
        rank, given = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise JobError(
            f"RANK and WORLD_SIZE say which rank this is, and are not set; {usage}"
        ) from None
    if given != size or not 0 <= rank < size:
        raise JobError(
            f"{arguments[0]} is for {size} ranks, and this is rank {rank} of {given}; {usage}"
        )
    dims = spec.plan.dims
    refuse_untrained(dims.tp, dims.pp)
    return spec, rank


class Worker:
    """Builds a rank from its spec and runs it."""

    def __init__(self, spec: RunSpec, rank: int) -> None:
        self.spec, self.rank = spec, rank
        self.run_dir = Path(spec.run_dir)
        is_heard = (
            spec.telemetry is not None and Path(spec.telemetry).exists()
        )  # not under torchrun, of an earlier run
        self.emitter = Emitter(spec.telemetry if is_heard else None, rank)
        self.stop = StopSignals()
        self.lock: int | None = None  # on the folder of checkpoints
        ranks = spec.plan.ranks_on(spec.plan.ranks[rank].host)
        self.board = FlightRecorder(
            host_file(self.run_dir, "board", ranks.start), rank, ranks, spec.plan.world_size
        )
        self.phase = RankPhase(self.board)
        self._trainer: Trainer | None = None

    def listen(self) -> None:
        """Obey signals; SIGQUIT writes every thread's stack, also while the process is stuck in native code."""
        self.stop.listen()
        folder = self.run_dir / "stacks"
        folder.mkdir(mode=0o700, exist_ok=True)
        # For as long as the process lives.
        stacks = os.open(
            folder / f"rank-{self.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600
        )
        faulthandler.register(signal.SIGQUIT, stacks)

    def run(self) -> None:
        """Everything from joining the others to the last step."""
        trainer, world = self._prepare()
        self._trainer = trainer
        self.stop.can_finish = True
        trainer.run()
        trainer.comm.barrier(world)

    def _prepare(self) -> tuple[Trainer, Group]:
        """Join the others, build the model, shard it, open the data."""
        job, plan, job_dir = self.spec.job, self.spec.plan, Path(self.spec.job_dir)
        device = torch.device(plan.ranks[self.rank].device)
        torch.set_num_threads(plan.ranks[self.rank].threads)
        self.phase.enter("rendezvous")
        self._join(device)
        comm, mesh = self._connect(device)

        self.phase.enter("import")
        user.add_to_path(job_dir)
        user.load(job.model, job_dir)
        self.phase.enter("build")
        chosen = resolve_optimizer(
            job.optim, lambda name: user.load(Ref(call=name), job_dir), device
        )
        settings = parallelize.make_settings(job, chosen, device)
        settings = replace(settings, memory_bytes=self._memory_bytes(device))
        built = self._build(settings, mesh, comm)
        self.phase.enter("shard")
        sharded, notes = parallelize.parallelize(built, job, settings, mesh, comm)
        sharded.module.to(device)  # buffers: the parameters are there
        notes = [*built.notes, *notes]
        self.phase.enter("load")
        if job.checkpoint is not None and self.rank == 0:
            self.lock = hold(self.spec.checkpoint_folder)  # before anything in it is believed
        state = ModelState(sharded)
        resumed = None
        if self.spec.resume is not None:
            resumed = load_newest(self.spec.resume, state, comm, mesh.world)
            notes += resumed.in_words()
        elif job.init_from is not None:
            notes += load_weights(job.init_from, state, mesh.world)

        self.phase.enter("data")
        parts = self._load_parts()
        custom = (
            user.function(job.lr.schedule, job_dir, user.TAKES["lr.schedule"])
            if isinstance(job.lr.schedule, Ref)
            else None
        )
        dataset = user.call(_plain(job.data), job_dir)
        state.holders = (dataset, parts.collate)
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
            collate=parts.collate,
            draws=streams.data,
        )
        streams.begin()  # from here on each rank draws from its own
        total_steps = self._total_steps(loader, resumed)
        if job.epochs is not None and total_steps is not None:
            notes.append(
                f"epochs {job.epochs}: {total_steps} steps of {self.spec.batch.global_size} samples"
            )
        checkpointer = self._checkpointer(state, streams, comm, mesh.world)
        trainer = Trainer(
            self.spec,
            sharded,
            loader,
            parts,
            make_schedule(job.lr, total_steps, custom),
            self.emitter,
            self.phase,
            self.stop,
            checkpointer,
        )
        if resumed is not None:
            trainer.state.resume(resumed)
            restore_streams(resumed, streams)
        elif checkpointer is not None and self.rank == 0:
            loader.mark({})
        if checkpointer is not None:
            checkpointer.open(resumed)
        trainer.recorder.start(notes, resumed.path if resumed is not None else None, total_steps)
        return trainer, mesh.world

    def _total_steps(self, loader: BatchLoader, resumed: Resumed | None) -> int | None:
        """Return the optimizer steps of the whole run, or None where only its end will tell."""
        if self.spec.job.steps is not None:
            return self.spec.job.steps
        progress = resumed.manifest.progress if resumed is not None else {}
        return loader.total_steps(progress.get("steps", 0), progress.get("cursor", 0))

    def _checkpointer(
        self,
        state: ModelState,
        streams: rng.Streams,
        comm: Comm,
        world: Group,
    ) -> Checkpointer | None:
        config = self.spec.job.checkpoint
        if config is None:
            return None
        folder = CheckpointFolder(self.spec.checkpoint_folder)
        run_id = re.sub(r"[^A-Za-z0-9_-]", "-", self.spec.run_id)[
            :128
        ]  # of a folder that the user named
        about = RunInfo(run_id, self.spec.job.model_dump(mode="json", by_alias=True), versions())
        return Checkpointer(
            folder,
            state,
            streams,
            config,
            comm,
            world,
            about,
            self._tell_save,
            self.spec.job.limits.save_s,
            "limits.save_s",
        )

    def _tell_save(self, **fields: Any) -> None:
        if "warning" in fields:
            self.emitter.emit("warning", message=fields.pop("warning"), **fields)
        else:
            self.emitter.emit("save", **fields)

    def _join(self, device: torch.device) -> None:
        """Meet the other ranks.

        Raises:
            RendezvousError: not all of them came in time.
        """
        size, limits = self.spec.plan.world_size, self.spec.job.limits
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if size == 1:
            return
        store = _store(
            os.environ.get("ZRUN_STORE"), self.rank, size, timedelta(seconds=limits.start_s)
        )
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(
                backend,
                store=store,
                init_method=None if store is not None else "env://",
                rank=self.rank,
                world_size=size,
                timeout=timedelta(seconds=limits.collective_s),
            )
        except dist.DistStoreError as error:
            raise RendezvousError(
                f"not all {size} ranks arrived within {limits.start_s:g} s (limits.start_s): {error}"
            ) from None

    def _connect(self, device: torch.device) -> tuple[Comm, Mesh]:
        """The groups of this rank; those of one host see each other on its board."""
        job, plan = self.spec.job, self.spec.plan
        Watchdog(self.board, self._give_up)
        comm = Comm(device, self.board)
        mesh = Mesh.build(
            self.rank,
            [place.host for place in plan.ranks],
            plan.shard_size(job.zero),
            places=[place.coordinates for place in plan.ranks],
            timeout_s=job.limits.collective_s,
        )
        if (reason := comm.use_cma(mesh.host, job.limits.collective_s)) is not None:
            print(f"the ranks of this host talk through sockets: {reason}")
        return comm, mesh

    def _memory_bytes(self, device: torch.device) -> int | None:
        """What the model may take where it lives; None: nobody looks. On a CPU this process has its part already."""
        given = self.spec.memory_bytes
        return (
            given
            if given is None or device.type != "cpu"
            else given - memory_limits.resident_bytes([os.getpid()])
        )

    def _build(self, settings: ShardingConfig, mesh: Mesh, comm: Comm) -> Built:
        job = self.spec.job
        values = self.spec.resume is None and (job.init_from is None or not job.init_from.strict)

        def factory() -> torch.nn.Module:
            return user.build_model(job.model, Path(self.spec.job_dir))

        if job.init == "meta":
            return build_on_meta(factory, job.seed, values=values)
        path = self.run_dir / f"init-{mesh.host.ranks[0]}"
        return build_once_per_host(
            factory,
            job.seed,
            path,
            mesh.host,
            comm,
            values=values,
            host_bytes=self._host_bytes() if settings.memory_bytes is not None else None,
            check_states=lambda structure: check_room(structure, settings, mesh, comm),
        )

    def _host_bytes(self) -> int:
        """Return what the ranks of this host may take together."""
        total = memory_limits.host_total()
        return min(total, self.spec.job.limits.memory or total)

    def _load_parts(self) -> UserFunctions:
        job, job_dir = self.spec.job, Path(self.spec.job_dir)

        def load(ref: Ref | None, key: str) -> Any:
            return None if ref is None else user.function(ref, job_dir, user.TAKES[key])

        loss, collate = load(job.loss, "loss"), load(job.data.collate, "data.collate")
        return UserFunctions(
            loss=loss,
            hooks={name: load(ref, "hooks") for name, ref in job.hooks if ref is not None},
            held_out=None
            if job.eval is None
            else HeldOut(
                sets={name: user.call(ref, job_dir) for name, ref in job.eval.sets.items()},
                metrics=load(job.eval.metrics, "eval.metrics"),
                loss=loss,
                collate=collate,
            ),
            collate=collate,
        )

    def _give_up(self, error: ZrunError) -> None:
        """Exit with `error`. Called by another thread: the main one waits in a collective."""
        code = self.report(error)
        self.emitter.close()
        os._exit(code)

    def report(self, error: BaseException) -> ExitCode:
        """Write the failure for the launcher, print it to the rank's log, and say how to exit."""
        if isinstance(error, StoppedError):  # no failure
            print(error, file=sys.stderr, flush=True)
            return error.exit_code
        phase = self.phase.name
        error = _in_users_terms(error, phase)
        text, raised = str(error), error.__cause__  # which it tells of
        if isinstance(error, ZrunError):
            kind, code = _KINDS.get(type(error), "zrun"), error.exit_code
        else:
            kind, code = "bug", ExitCode.WORKER
            text, raised = tracebacks.full_traceback(error, _TOLD_CHARS), None
        if isinstance(error, OutOfMemoryError) and self._trainer is not None:
            text = oom.explain(error, self.spec, self._trainer.sharded)
        failure = {
            "rank": self.rank,
            "step": self._trainer.progress.steps if self._trainer is not None else 0,
            "phase": phase,
            "kind": kind,
            "type": type(error).__name__,
            "message": _in_a_line(error),
            "traceback": text,
            "whole_traceback": raised and tracebacks.full_traceback(raised, _TOLD_CHARS),
            "log_bytes": _log_bytes(),  # what follows in it is told by the launcher
            "exit_code": int(code),
            "time": time.time(),
        }
        folder = self.run_dir / "failures"
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            (folder / f"rank-{self.rank}.json").write_text(json.dumps(failure))
        if raised is not None:
            print(tracebacks.full_traceback(raised), end="\n\n", file=sys.stderr)
            text = text.splitlines()[0] if kind == "user" else text
        print(text, file=sys.stderr, flush=True)
        return code


def _log_bytes() -> int | None:
    """Return how much this rank has printed; None where that goes to no file."""
    sys.stdout.flush()
    found = os.fstat(2)
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _in_a_line(error: BaseException) -> str:
    """What went wrong, without where: of an exception of the user's, what it says at its end."""
    if not isinstance(error, ZrunError):
        return f"{type(error).__name__}: {tracebacks.first_line(error)}"
    first, *rest = str(error).splitlines()
    return f"{first}: {rest[-1].strip()}" if rest and isinstance(error, UserCodeError) else first


def _in_users_terms(error: BaseException, phase: str) -> BaseException:
    """What is no `ZrunError`, and no bug of the runtime either."""
    if isinstance(error, ZrunError):
        return error
    told: ZrunError | None
    if user.is_out_of_memory(error):
        told = OutOfMemoryError(f"{phase} failed: out of memory: {tracebacks.first_line(error)}")
    elif isinstance(error, KeyboardInterrupt):  # no signal raises one here: the user's code did
        told = UserCodeError(f"{phase} failed\n{tracebacks.user_traceback(error)}")
    else:
        told = lack_of_threads(error)
    if told is None:
        return error
    told.__cause__ = error
    return told


def _plain(ref: Ref) -> Ref:
    """The reference alone, without the options of a section that extends it."""
    return Ref(call=ref.call, args=ref.args)


def _store(where: str | None, rank: int, size: int, patience: timedelta) -> Any:
    """The place where ranks meet that the agent names; None: torchrun's.

    The listening socket is bound to one address, where torch's own would listen on all of them.

    Raises:
        RendezvousError: rank 0 is not there.
    """
    if where is None:
        return None
    if not where.startswith("tcp://"):
        store = dist.FileStore(where, size)  # type: ignore[attr-defined]
        store.set_timeout(patience)
        return store
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    listener = int(os.environ["ZRUN_STORE_FD"]) if rank == 0 else None
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host.strip("[]"),
            int(port),
            size,
            rank == 0,
            patience,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise RendezvousError(
            f"rank 0 cannot be reached at {where} (limits.start_s, or a firewall): {reason}"
        ) from None


def _die_with_parent() -> None:
    """Ask the kernel to end this process when the agent that started it does."""
    if sys.platform.startswith("linux"):
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died in between
            os._exit(ExitCode.TERMINATED)
