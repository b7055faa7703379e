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
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from zrun_core.errors import ExitCode, JobError, StoppedError, ZrunError
from zrun_core.guards.holders import CallsUnderWay
from zrun_core.guards.memory_witness import MemoryWitness
from zrun_core.spine import heap, memory_limits
from zrun_core.spine.events import Emitter
from zrun_core.spine.flight_page import host_file
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.spine.held_memory import HeldMemory, Holder
from zrun_core.spine.spec import RunSpec
from zrun_core.spine.stop_signals import StopSignals
from zrun_core.train import failure_note
from zrun_core.train.rank_builder import RankBuilder
from zrun_core.train.trainer import Trainer
from zrun_core.zero.passes.graph_breaks import check_without_compiler, load_compiler

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
    has_parts = job.parallel.model_ranks > 1
    if has_parts or job.compile or job.activations.checkpoint != "none":
        load_compiler()
    else:
        check_without_compiler()


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


class Worker:
    """A rank's process: it has the trainer built, trains, and tells how that ended.

    Attributes:
        builder: of the trainer.
    """

    def __init__(self, spec: RunSpec, rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self.run_dir = Path(spec.run_dir)
        telemetry = spec.telemetry
        if telemetry is not None and not Path(telemetry).exists():
            telemetry = None  # of an earlier run: this one was started by torchrun
        self.emitter = Emitter(telemetry, rank)
        self.stop = StopSignals()
        ranks = spec.plan.ranks_on(spec.plan.ranks[rank].host)
        board_file = host_file(self.run_dir, "board", ranks.start)
        board = FlightRecorder(board_file, rank, ranks, spec.plan.world_size)
        self.builder = RankBuilder(spec, rank, self.emitter, self.stop, board, self._give_up)
        self._trainer: Trainer | None = None

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
        """Join the other ranks, have the rank's trainer built, and train to the end."""
        trainer = self.prepare()
        self._trainer = trainer
        self.stop.can_finish = True
        trainer.run()
        self.meet_others()

    def prepare(self) -> Trainer:
        """Return the trainer."""
        return self.builder.build()

    def meet_others(self) -> None:
        """Wait until all ranks have come here: until then they may need this one."""
        self.builder.comm.barrier(self.builder.mesh.world)

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
        phase = self.builder.phase.name
        return failure_note.report(error, self.run_dir, self.rank, phase, self._trainer)


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
