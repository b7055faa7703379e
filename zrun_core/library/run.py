"""A rank of a user's own script: its number, how it meets the others, what it shares with them."""

from __future__ import annotations

import functools
import math
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from socket import gethostname
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from zrun_core.distributed import rng
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.communicators import (
    backend_timeout,
    connect,
    set_defaults,
    waits_fail,
)
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import sent_to
from zrun_core.errors import (
    JobError,
    PreflightError,
    RendezvousError,
    UserCodeError,
    ZrunError,
)
from zrun_core.guards.watchdog import Watchdog
from zrun_core.hardware import accelerator
from zrun_core.library import arguments
from zrun_core.library.background_save import Background
from zrun_core.library.launched import Launch, LaunchedRecord, find_launch
from zrun_core.library.out_of_memory import ModelsHeld
from zrun_core.library.run_record import Record, Trackers
from zrun_core.spine import device_names, heap, visible_devices
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.spine.releases import check_release
from zrun_core.spine.sections.launch import LogConfig
from zrun_core.spine.sections.profile import ProfileConfig, why_no_ranks
from zrun_core.spine.tracebacks import user_location

_ADVICE = (
    "Every rank must call models, backward() and step() in one order, equally often; "
    'name a module that chooses what runs inside it in shard(zero={"stage": ..., "leaf": [...]})'
)
_PATH_BYTES = 1024
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class ProcessPlace(NamedTuple):
    """The place of this process among the ranks."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_host: int


class Run:
    """This process among the ranks of a script; `init()` makes it.

    Attributes:
        rank: of this process, from 0.
        world_size: number of ranks.
        local_rank: of this process among those of its host.
        device: where models are sharded to, and where batches belong.
        seed: of model factories; each rank's own stream was seeded from it too.
        run_dir: where the record lies, that of the launcher under `zrun run`; None: there is none.
        profile: which steps of which ranks are traced, unasked; None: none.
    """

    def __init__(
        self,
        slot: ProcessPlace,
        device: torch.device,
        *,
        seed: int,
        timeout_s: float,
        patience_s: float,
        run_dir: Path | None,
        launch: Launch | None = None,
        trackers: Trackers | None = None,
        profile: ProfileConfig | None = None,
    ) -> None:
        self._launch = launch
        self._is_save_asked = False
        self.rank = slot.rank
        self.world_size = slot.world_size
        self.local_rank = slot.local_rank
        self._ranks_per_host = slot.ranks_per_host
        self.device = device
        self.seed = seed
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._streams = rng.Streams(seed, device, dp=self.rank)
        self._hosts = [str(rank // self._ranks_per_host) for rank in range(self.world_size)]
        self._meshes: dict[int, Mesh] = {}
        mesh = self._make_mesh(1)
        with self._shared_folder(mesh) as folder:
            board = None
            if self.world_size > 1:
                ranks = range(mesh.host.ranks[0], mesh.host.ranks[-1] + 1)
                file = folder / "board" if launch is None else launch.board(ranks.start)
                board = FlightRecorder(file, self.rank, ranks, self.world_size, _ADVICE)
                if launch is not None:
                    board.phase("script")
            self._comm = Comm(device, board)
            if board is not None:
                Watchdog(
                    board,
                    functools.partial(_stop, self.rank),
                    limit_s=math.inf if waits_fail(device) else timeout_s,
                    limit_key="timeout_s of init()",
                    late=functools.partial(tell_late, board, patience_s),
                    late_s=patience_s,
                    device_waits=self._comm.device_waits,
                )
            connect(self._comm, mesh)
            reason = self._comm.use_cma(mesh.host, timeout_s)
            if reason is not None:
                print(
                    f"zrun_core: the ranks of this host talk through sockets: {reason}",
                    file=sys.stderr,
                )
            self._comm.barrier(mesh.world)  # all have opened the board
        self.run_dir = run_dir
        self.profile = profile
        self._record = self._open_record(run_dir, trackers)
        self._step = 0  # of the first optimizer
        self._loaded_step = 0  # from which it goes on
        self._has_optimizer = False
        self._num_units = 0  # of the models sharded so far
        self._models = ModelsHeld(self.rank)
        self._record.models = self._models
        self._background = Background()

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes files of the user's own."""
        return self.rank == 0

    @property
    def save_asked(self) -> bool:
        """True on every rank once `zrun save` has asked, until `zrun_core.save`.

        Steps of the first optimizer tell it, and only under `zrun run`.
        """
        return self._is_save_asked

    def mean(self, value: float | torch.Tensor, weight: float | torch.Tensor = 1.0) -> float:
        """Return the mean of a number over all ranks, weighted by `weight`. Every rank calls it.

        Args:
            value: of this rank, a number or a tensor of one element.
            weight: of this rank's number, 0 or more.

        Returns:
            NaN where all weights are 0.

        Raises:
            JobError: an argument is not one number.
        """
        number = sent_to(self.device, arguments.scalar("mean", "value", value))
        share = sent_to(self.device, arguments.scalar("mean", "weight", weight, is_weight=True))
        total = self._comm.all_reduce_small(
            torch.stack([number * share, share]), self._mesh(1).world, name="mean"
        )
        weighted_sum, weights = self._comm.read(total)
        return weighted_sum / weights if weights else float("nan")

    def metric(self, name: str, value: float | torch.Tensor) -> None:
        """Record a number under a name, in the events of `init(run_dir=...)`. Rank 0's counts.

        Where ranks have different ones: `run.metric(name, run.mean(value))`, on all ranks.

        Raises:
            JobError: the name or the value is none.
        """
        number = arguments.scalar("metric", "value", value)
        if self.is_main and self._record:
            self._record.metrics(self._step, {name: float(number)})

    def _claim_steps(self) -> bool:
        """Return whether this is the run's first optimizer, whose steps are those of the run."""
        is_first = not self._has_optimizer
        self._has_optimizer = True
        return is_first

    def _open_record(self, run_dir: Path | None, trackers: Trackers | None) -> Record:
        """Begin the record on rank 0. Collective where there is one.

        Raises:
            JobError: it cannot be made.
        """
        if run_dir is None:
            return Record(None)
        world = self._mesh(1).world
        names = self._comm.all_gather_bytes(gethostname().encode(), world, name="hosts")
        record = Record(None)
        problem = ""
        if self.is_main:
            try:
                record = Record(run_dir) if self._launch is None else LaunchedRecord(self._launch)
            except JobError as error:
                problem = str(error)
        problem = self._comm.all_gather_bytes(problem.encode(), world, name="record")[0].decode()
        if problem:
            raise JobError(problem)
        record.start([name.decode() for name in names], self.device, trackers)
        return record

    def _mesh(self, shard_size: int) -> Mesh:
        """Return the groups for shards over `shard_size` ranks. Collective at the first call."""
        if shard_size not in self._meshes:
            connect(self._comm, self._make_mesh(shard_size))
        return self._meshes[shard_size]

    def _make_mesh(self, shard_size: int) -> Mesh:
        timeout_s = backend_timeout(self.device, self._timeout_s)
        made = Mesh.build(self.rank, self._hosts, shard_size, timeout_s=timeout_s)
        self._meshes[shard_size] = made
        return made

    def _meet(self, what: str) -> None:
        """Return when every rank has called `what`.

        Raises:
            HangError: some have not, for a long time.
        """
        self._comm.monitored_barrier(self._mesh(1).world, what, self._patience_s)

    @contextmanager
    def _shared_folder(self, mesh: Mesh) -> Iterator[Path]:
        """Make a folder for the ranks of this host, which is there while its first one is inside.

        It is to be left once everyone has opened what it needs there: a rank that is killed later
        leaves nothing behind.
        """
        path = torch.zeros(_PATH_BYTES, dtype=torch.uint8, device=self.device)
        with ExitStack() as made:
            if mesh.host.index == 0:
                text = os.fsencode(made.enter_context(tempfile.TemporaryDirectory(prefix="zrun-")))
                path[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            Comm(self.device).broadcast(path, mesh.host, name="folder")
            yield Path(os.fsdecode(bytes(path.tolist()).rstrip(b"\0")))


_current: Run | None = None


def init(
    *,
    seed: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    threads: int | None = None,
    timeout_s: float = 600.0,
    patience_s: float = 25.0,
    run_dir: str | os.PathLike[str] | None = None,
    trackers: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    profile: Sequence[int] | Mapping[str, Any] | None = None,
) -> Run:
    """Join the ranks that `torchrun` has started; without torchrun this is a world of one rank.

    Later calls return the same run. A process group that exists already is used as it is. The
    generators of Python, numpy and torch are seeded, on each rank with its own stream (dropout
    differs between ranks), and model factories run with `seed` itself.

    Args:
        seed: of model factories, and, mixed with the rank, of each rank's own stream.
        device: auto is the local rank's GPU where there is one.
        threads: CPU threads of this rank; None divides the usable cores by the ranks of the host,
            where torchrun would leave each rank with one.
        timeout_s: seconds that the ranks may take to arrive, and one collective to wait for the
            others.
        patience_s: seconds that `shard`, `gathered`, `save` and `load` wait for all ranks to call
            them. Where ranks wait that long in a step, a line on stderr says for which one, and
            where in the script it is.
        run_dir: a folder for the record of this run, such as runs/gan/1: events.jsonl with a line
            for each step of the first optimizer, the numbers of `Run.metric`, saves and the end;
            `zrun ps` lists it. A script that is started again goes on in it. Under `zrun run` the
            record is the launcher's, and this folder is not used.
        trackers: that get every number of the record: names as of a job's `log.to`, or these with
            their arguments, as in {"wandb": {"project": "gan"}}.
        profile: steps to trace, as a job's `profile`: [10, 12], or {"steps": [10, 12], "ranks":
            [0, 1]}.

    Raises:
        JobError: an argument is wrong.
        PreflightError: torchrun's variables are incomplete, there is no GPU for this rank, or torch
            is too old.
        RendezvousError: not every rank came in time.
    """
    global _current
    if _current is None:
        check_release("torch", torch.__version__)
        seed = arguments.whole("init", "seed", seed, None, "a whole number")
        timeout_s = arguments.number("init", "timeout_s", timeout_s, "seconds above 0", above=0)
        patience_s = arguments.number("init", "patience_s", patience_s, "seconds above 0", above=0)
        if threads is not None:
            threads = arguments.whole(
                "init", "threads", threads, 1, "a number of threads, 1 or more, or None"
            )
        folder = None
        if run_dir is not None:
            folder = arguments.folder("init", run_dir, name="run_dir")
        chosen_trackers = _find_trackers(trackers)
        slot = _find_slot()
        launch = find_launch()
        for name, value in (("trackers", trackers), ("profile", profile)):
            if value is not None and folder is None and launch is None:
                raise JobError(
                    f"init({name}={value!r}): these belong to a record: name a run_dir too"
                )
        chosen_profile = _find_profile(profile, slot.world_size)
        chosen = _find_device(device, slot.local_rank)
        if threads is None:
            threads = 1
            if hasattr(os, "sched_getaffinity"):
                threads = max(1, len(os.sched_getaffinity(0)) // slot.ranks_per_host)
        torch.set_num_threads(threads)
        if chosen.type == "cpu":
            heap.keep_freed_memory()
        _join(slot.world_size, chosen, timeout_s)
        if launch is not None:
            if folder is not None and slot.rank == 0:
                launch.say_where_the_record_is(folder)
            folder = launch.run_dir
            launch.listen()
        _current = Run(
            slot,
            chosen,
            seed=seed,
            timeout_s=timeout_s,
            patience_s=patience_s,
            run_dir=folder,
            launch=launch,
            trackers=chosen_trackers,
            profile=chosen_profile,
        )
        _current._streams.begin()  # as a job's worker does
    return _current


def current() -> Run:
    """Return the run of this process.

    Raises:
        UserCodeError: there is none yet.
    """
    if _current is None:
        raise UserCodeError("zrun_core.init() comes first")
    return _current


def _find_trackers(given: Sequence[str] | Mapping[str, Mapping[str, Any]] | None) -> Trackers:
    """Return the trackers that `init` was given, with the arguments of each.

    Raises:
        JobError: there is no such tracker, or one is named twice.
    """
    if isinstance(given, str):
        raise JobError(f"init(trackers={given!r}): write a list, such as [{given!r}]")
    try:
        asked: dict[str, Any] = {"to": list(given or ())}
    except TypeError:
        raise JobError(f"init(trackers={given!r}): write a list of names") from None
    if isinstance(given, Mapping):
        asked["args"] = given
    found = arguments.section("init", "trackers", LogConfig, asked)
    return {kind: found.args.get(kind) or {} for kind in found.to}


def _find_profile(given: object, world_size: int) -> ProfileConfig | None:
    """Return the profile that `init` was given.

    Raises:
        JobError: it is wrong, or of ranks that there are not.
    """
    if given is None:
        return None
    found = arguments.section("init", "profile", ProfileConfig, given)
    why = why_no_ranks(found.ranks, world_size)
    if why is not None:
        raise JobError(f"init(profile={given!r}): {why}")
    return found


def _find_slot() -> ProcessPlace:
    """Read the place of this process from torchrun's variables, or from a group that exists.

    Raises:
        PreflightError: torchrun's variables are incomplete.
    """
    found = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    wrong = [name for name, text in found.items() if not text.isascii() or not text.isdigit()]
    if wrong:
        raise PreflightError(
            f"init(): {wrong[0]}={found[wrong[0]]!r} is no number: start the script with torchrun"
        )
    if dist.is_initialized():
        rank = dist.get_rank()
        size = dist.get_world_size()
        local_size = int(found.get("LOCAL_WORLD_SIZE", size))
        local_rank = int(found.get("LOCAL_RANK", rank % local_size))
        slot = ProcessPlace(rank, size, local_rank, local_size)
    elif not found:
        return ProcessPlace(rank=0, world_size=1, local_rank=0, ranks_per_host=1)
    else:
        missing = [name for name in _VARIABLES if name not in found]
        if missing:
            raise PreflightError(
                f"init(): {', '.join(found)} set without {', '.join(missing)}: start the script "
                "with torchrun, or without any of these variables for one rank"
            )
        slot = ProcessPlace(*(int(found[name]) for name in _VARIABLES))
    if slot.world_size % slot.ranks_per_host:
        raise PreflightError(
            f"init(): {slot.world_size} ranks with {slot.ranks_per_host} on this host: "
            "give every host the same number"
        )
    return slot


def _find_device(device: str, local_rank: int) -> torch.device:
    if device not in device_names.CPU_AND_GPU:
        why = device_names.why_refused(device) or "write auto, cpu or cuda"
        raise JobError(f"init(device={device!r}): {why}")
    if device == "cpu":
        return torch.device("cpu")
    num_gpus = accelerator.device_count()
    if not num_gpus:
        why_not = accelerator.why_not(accelerator.device_at(local_rank))
        if device == "auto":
            why_not = None if visible_devices.are_hidden(os.environ) else accelerator.why_idle()
        if why_not is None:
            return torch.device("cpu")
        raise PreflightError(f'init(): {why_not}; init(device="cpu") trains without')
    if local_rank >= num_gpus:
        raise PreflightError(
            f"init(): local rank {local_rank} has no GPU of its own, there are {num_gpus}: "
            'lower --nproc-per-node, or write init(device="cpu")'
        )
    accelerator.prefer_expandable_segments()
    chosen = accelerator.device_at(local_rank)
    if (why_not := accelerator.why_not(chosen)) is not None:
        raise PreflightError(f'init(): {why_not}; init(device="cpu") trains without')
    accelerator.set_device(chosen)
    return chosen


def _join(world_size: int, device: torch.device, timeout_s: float) -> None:
    if world_size == 1 or dist.is_initialized():
        return
    if (why_not := accelerator.why_not(device, world_size)) is not None:
        raise PreflightError(f"init(): {why_not}")
    backend = accelerator.backend_name(device)
    set_defaults()
    timeout = timedelta(seconds=backend_timeout(device, timeout_s))
    try:
        dist.init_process_group(backend, timeout=timeout)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        reason = str(error).splitlines()[0]
        raise RendezvousError(
            f"init(): not all {world_size} ranks arrived within {timeout_s:g} s: {reason}"
        ) from None


def _stop(rank: int, error: ZrunError) -> None:
    """End the process. Called by the watchdog's thread: the main one waits for other ranks."""
    print(f"zrun_core: {error}. Rank {rank} is at {_place()}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


def tell_late(board: FlightRecorder, seconds: float, late: list[int]) -> None:
    """Say which ranks of this host keep the others waiting, and where they are in the script.

    Called by the watchdog's thread on every rank. The wait goes on: the others may be busy with
    something that takes that long.

    Args:
        board: of this rank.
        seconds: of waiting so far.
        late: ranks of this host that do not wait; none if all wait for another host.
    """
    waiting = [rank for rank in board.ranks if rank not in late]
    if board.rank in late:
        text = f"rank {board.rank} has kept others waiting for {seconds:g} s: it is at {_place()}"
    elif board.rank == waiting[0]:
        whom = "ranks of other hosts"
        if late:
            whom = " and ".join(_name_of(board, rank) for rank in late)
        text = f"rank {board.rank} has waited {seconds:g} s at {_place()}, for {whom}"
    else:
        return
    print(f"zrun_core: {text}", file=sys.stderr, flush=True)


def _name_of(board: FlightRecorder, rank: int) -> str:
    if board.state(rank).is_halted:
        return f"rank {rank} (stopped by a signal)"
    return f"rank {rank}, which {board.tier_wait(rank) or 'does something else'}"


def _place() -> str:
    """Return where the main thread is in the user's own code."""
    return user_location(sys._current_frames().get(threading.main_thread().ident or 0))
