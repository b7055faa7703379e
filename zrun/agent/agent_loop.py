"""The agent's thread between its host's workers and the launcher.

    launcher                       agent                                        workers
       |                             |
       |--- stdin -----> AgentLoop --+--- questions, the start ---> main thread -- forks --> |
       |                     |                                           |                   |
       |                     +--- WorkerSignals: save, finish, now, kill -------------------> |
       |                     |                                           |                   |
       | <-- stdout -- Uplink <-- answers -------------------------------+                   |
                             <-- TelemetryRelay <---- datagrams ----------------------------- |
                             <-- Observer, Echo <---- flight recorder, notes, logs ---------- |
                             <-- exit statuses <----- pidfds -------------------------------- |

It stops the other workers when one fails, and takes the end of its input for the launcher's death.
The main thread only waits, and the workers end with it.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from zrun.agent.board_watch import BoardWatch, OpenMonitor
from zrun.agent.echo import Echo
from zrun.agent.host_watch import HostWatch
from zrun.agent.launcher_silence import LauncherSilence
from zrun.agent.memory_fold import MemoryFold
from zrun.agent.memory_watch import MemoryWatch
from zrun.agent.observer import Observer
from zrun.agent.uplink import TelemetryRelay, Uplink
from zrun.agent.worker_signals import WorkerSignals
from zrun.agent.workers import Workers
from zrun.transport.frames import (
    PROGRESS_S,
    SILENCE_S,
    Frame,
    StartRequest,
    StopMode,
    Unpacker,
)
from zrun.transport.memories import FEW_RANKS
from zrun_core.errors import ExitCode
from zrun_core.spine import memory_limits
from zrun_core.spine.flight_page import BESIDE_STEPS
from zrun_core.spine.held_memory import HeldMemory

_READ_BYTES = 1 << 16
_REPORTED_S = 1.5  # in which an error of a GPU that ended a rank is told


class AgentLoop:
    """Serves the launcher and the workers of one host in a thread of its own.

    Attributes:
        orders: what the launcher sent to be done by the main thread: questions, then one start.
        exit_code: of the run, once an agent has heard it that is to end in the same way.
    """

    def __init__(self, control: int, output: int, *, is_joined: bool = False) -> None:
        """Start the thread.

        Args:
            control: descriptor from which the launcher's frames are read.
            output: descriptor to which frames for the launcher are written.
            is_joined: another launcher started this process. It ends the run should that one
                vanish, and stays after the workers' end until it has heard the exit code.
        """
        self.orders: SimpleQueue[StartRequest | Frame] = SimpleQueue()
        self.exit_code: int | None = None
        self._is_joined = is_joined
        self._parent = os.getppid()
        self._is_deaf = False  # nothing more will be heard from the launcher
        self._is_done = False  # the workers have ended, and the launcher was told
        self._has_start = False
        # The launcher.
        self._control = control
        self._unpacker = Unpacker()
        self._silence = LauncherSilence()
        self._is_remote = False  # it may vanish without a word
        # The workers.
        self._signals = WorkerSignals()
        self._workers: Workers = {}
        self._running: set[int] = set()  # ranks, also those that are to be forked
        self._observer: Observer | None = None
        self._observed_at = 0.0
        self._echoes: dict[int, Echo] = {}  # of the running ranks whose output the launcher shows
        self._telemetry: TelemetryRelay | None = None
        self._oom_kills = memory_limits.oom_kills() or 0
        self._memory: MemoryWatch | None = None
        self._shortage = ""  # of memory, for which the workers were killed
        self._short_in = ""  # the phase in which that was
        self._held: dict[int, HeldMemory] = {}  # by rank, before they were ended for want of memory
        self._host: HostWatch | None = None
        self._boards: BoardWatch | None = None
        self._without_gpu: set[int] = set()  # ranks that were killed because their GPU failed
        self._has_failed = False  # a worker
        # epoll lets the main thread add descriptors while this one waits.
        self._selector = selectors.EpollSelector()
        self._uplink = Uplink(output, self._selector)
        self._on_readable(control, self._read_control)
        done, self._finish = os.pipe()
        self._on_readable(done, self._close)
        self._thread = threading.Thread(target=self._run, name="agent-loop", daemon=True)
        self._thread.start()

    # Called by the main thread.

    @property
    def is_orphaned(self) -> bool:
        """Return whether the launcher ended, or was lost, before it had let this agent end."""
        return self._is_deaf and self.exit_code is None

    def answer(self, frame: Frame) -> None:
        """Send a frame to the launcher."""
        self._uplink.send(frame)

    def listen(self, telemetry: socket.socket) -> None:
        """Forward every datagram of this socket."""
        self._telemetry = TelemetryRelay(telemetry, self._uplink, self._selector)

    def watch(
        self,
        ranks: Sequence[int],
        server: int,
        observer: Observer,
        echoes: Mapping[int, Echo],
        *,
        is_remote: bool,
        memory: int | None,
        host: HostWatch | None = None,
        num_ranks: int = 1,
    ) -> None:
        """Report on these ranks, and stop them when the launcher says so or dies.

        Args:
            server: pid of the process that is to fork them, see `follow`.
            echoes: what the launcher shows of their output, by rank.
            is_remote: the launcher is on another host, and may vanish without a word.
            memory: bytes that the ranks may take together; None: what the host has.
            host: looks at what else is used; None: another agent of this host does.
            num_ranks: of the launch; of many, events of these ranks' memory are folded.
        """
        if num_ranks > FEW_RANKS and len(ranks) > 1 and self._telemetry is not None:
            self._telemetry.fold = MemoryFold(ranks)
        self._host = host
        self._running = set(ranks)
        self._uplink.send({"frame": "started"})
        self._silence.restart()
        self._is_remote = is_remote
        self._echoes = dict(echoes)
        self._memory = MemoryWatch(memory)
        self._observer = observer
        self._signals.add(dict.fromkeys(ranks, server))

    def follow(self, workers: Workers) -> None:
        """Watch processes of their own from now on; some may have ended before they were."""
        self._workers = workers
        running = {rank: worker for rank, worker in workers.items() if worker.status is None}
        self._signals.add({rank: worker.pid for rank, worker in running.items()})
        for worker in workers.values():
            self._on_readable(worker.pidfd, self._report_exit)

    def watch_gpus(self, gpus: Mapping[int, tuple[str, str]], open_monitor: OpenMonitor) -> None:
        """Watch the GPUs of the ranks too; see `BoardWatch` for the arguments."""
        self._boards = BoardWatch(gpus, self._uplink, open_monitor)

    def finish_by(self, number: signal.Signals) -> None:
        """Ask the workers to finish by this signal."""
        self._signals.finishing = number

    def stop(self, how: StopMode) -> None:
        """Ask the workers to end."""
        self._signals.stop(how)

    def end_sessions(self) -> None:
        """Leave nothing of the workers behind."""
        self._signals.end_sessions()

    def finish(self) -> None:
        """Forward what is left and end the threads."""
        if self._boards is not None:
            self._boards.close()
        os.close(self._finish)
        self._thread.join()

    def abandon(self) -> None:
        """End everything in silence: the launcher takes this process for dead."""
        self._uplink.discard()
        self.stop(StopMode.KILL)
        self.end_sessions()

    # Called by the thread of this loop.

    def _run(self) -> None:
        try:
            while True:
                patience_s = self._signals.patience_s(PROGRESS_S)
                if self._memory is not None:
                    patience_s = min(patience_s, self._memory.patience(time.monotonic()))
                for key, _ in self._selector.select(patience_s):
                    key.data(key.fd)
                if self._telemetry is not None:
                    self._telemetry.resume()
                    self._telemetry.send_due()
                self._signals.send_due()
                now = time.monotonic()
                if self._observer is not None and now - self._observed_at > PROGRESS_S:
                    self._observed_at = now
                    self._observe(self._observer, now)
                self._watch_memory(now)
                self._watch_boards()
                self._watch_launchers()
        except _Finished:
            self._flush()
        except BaseException:
            # Without this thread nobody would hear of the launcher's end.
            traceback.print_exc()
            self.stop(StopMode.KILL)
            os._exit(1)

    def _observe(self, observer: Observer, now: float) -> None:
        running = sorted(self._running)
        board = observer.look(running)
        self._silence.note_progress(board["states"])
        if not self._uplink.is_full:
            self._uplink.send(board)
            for echo in self._echoes.values():
                self._uplink.send_events(echo.look(now))
            told = None if self._host is None else self._host.look(now)
            if told is not None:
                self._uplink.send_events([told])
        if self._memory is None or not observer.have_allocated_all(running):
            return
        is_limited = self._memory.settle()
        if not is_limited:
            self._memory = None

    def _watch_memory(self, now: float) -> None:
        if self._memory is None:
            return
        running = sorted(self._running)
        observer = self._observer

        def is_beside_steps() -> bool:
            assert observer is not None
            return any(observer.phase([rank])[0] in BESIDE_STEPS for rank in running)

        pids = [leader.pid for leader in self._signals.leaders]
        shortage = self._memory.look(now, pids, is_beside_steps)
        if shortage is None:
            return
        assert self._observer is not None
        leaders = self._signals.leaders_of(running)
        self._held = self._observer.ask_what_is_held(leaders, self._memory.can_wait)
        fullest = max(self._held, key=lambda rank: self._held[rank].num_bytes, default=None)
        phase, step = self._observer.phase(running if fullest is None else [fullest])
        text = f"{shortage.text} ({phase}{f' of step {step}' if step else ''})"
        if shortage.may_finish:
            print(f"{text}: the workers finish their step", flush=True)
            held = None if fullest is None else self._held[fullest].to_json()
            self._uplink.send({"frame": "short", "why": text, "held": held})
            self.stop(StopMode.FINISH)
            return
        print(f"{text}: killing the workers", flush=True)
        self._shortage, self._short_in = text, phase
        self._memory = None
        self.stop(StopMode.KILL)

    def _watch_boards(self) -> None:
        """End ranks whose GPU cannot go on: they would wait for it, and all others for them."""
        doomed = {} if self._boards is None else self._boards.doomed()
        for rank, fault in doomed.items():
            if rank in self._running - self._without_gpu and rank in self._workers:
                self._without_gpu.add(rank)
                print(f"stopping rank {rank}: its GPU reported {fault}", flush=True)
                self._signals.kill(rank)

    def _watch_launchers(self) -> None:
        """End the ranks of a launcher that is not heard any more, or of another one that ended."""
        if self._is_remote and not self._is_deaf:
            how = self._silence.demands()
            if how is not None:
                silent_s = self._silence.seconds
                print(
                    f"nothing heard from the launcher for {silent_s:.0f} s: stopping ({how})",
                    flush=True,
                )
                self._uplink.send({"frame": "deaf", "silent_s": silent_s, "stop": how})
                if how is StopMode.NOW:
                    self._hear_no_more()
                self._end_workers(how)
        if self._is_joined and os.getppid() != self._parent:
            self._parent = os.getppid()
            print("the launcher that started this process is gone: stopping", flush=True)
            self._end_workers(StopMode.FINISH)

    def _on_readable(self, descriptor: int, action: Callable[[int], object]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def _read_control(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, _READ_BYTES)
        except OSError:  # a connection that broke
            data = b""
        if not data:
            self._selector.unregister(descriptor)
            self._hear_no_more()
            self._end_workers(StopMode.NOW)
            return
        self._silence.hear()
        for frame in self._unpacker.feed(data):
            self._obey(frame)

    def _obey(self, frame: Frame) -> None:
        if "stop" in frame:
            self._end_workers(StopMode(frame["stop"]))
        elif "save" in frame:
            if 0 in self._running and 0 in self._workers:
                self._signals.save()
        elif "profile" in frame:
            if 0 in self._running and 0 in self._workers:
                self._signals.profile(frame["profile"], Path(frame["run_dir"]))
        elif "testify" in frame:
            if self._observer is not None:
                leaders = self._signals.leaders_of(sorted(self._running))
                self._uplink.send(self._observer.report_hang(leaders))
        elif "hold" in frame:
            self._silence.hold()
        elif "ask" in frame:
            self.orders.put(frame)
        elif "exit" in frame:
            self.exit_code = int(frame["exit"])
            self._hear_no_more()
        elif "beat" not in frame:
            self._has_start = True
            self.orders.put(StartRequest(**frame))

    def _end_workers(self, how: StopMode) -> None:
        """Stop the workers, also those that `watch` is about to hear of."""
        if self._has_start:
            self.stop(how)
        elif not self._is_joined:
            os._exit(ExitCode.OK)
        else:
            os._exit(ExitCode.HANG if self.exit_code is None else self.exit_code)

    def _hear_no_more(self) -> None:
        self._is_deaf = True
        if self._is_done:
            raise _Finished

    def _report_exit(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        rank = next(rank for rank, worker in self._workers.items() if worker.pidfd == pidfd)
        self._running.discard(rank)
        if self._telemetry is not None:
            self._telemetry.end_of(rank)  # what it said before it ended comes first
        assert self._observer is not None
        status = self._observer.status_of(rank, self._workers[rank].wait())
        by_kernel = (memory_limits.oom_kills() or 0) > self._oom_kills
        is_oom = status == -signal.SIGKILL and (bool(self._shortage) or by_kernel)
        if status != 0 and self._boards is not None and not self._has_failed:
            self._boards.catch_up(_REPORTED_S)  # the GPU's own word about it comes first
        self._has_failed |= status != 0
        note, log = self._observer.last_words(rank, status)
        echo = self._echoes.pop(rank, None)
        if echo is not None:
            self._uplink.send_events(echo.last_look(time.monotonic(), _log_bytes(note)))
        self._uplink.send(
            {
                "frame": "exit",
                "rank": rank,
                "status": status,
                "oom": is_oom,
                "shortage": self._shortage if is_oom else "",
                "short_in": self._short_in if is_oom else "",
                "held": self._held[rank].to_json() if is_oom and rank in self._held else None,
                "note": note,
                "log": log,
            }
        )
        if status != 0:
            self._signals.stop_after_failure()

    def _close(self, descriptor: int) -> None:
        """Report the last exits: the main thread has seen the end of all workers."""
        for rank, worker in self._workers.items():
            if rank in self._running and worker.poll() is not None:
                self._report_exit(worker.pidfd)
        self._uplink.send({"frame": "done"})
        if not self._is_joined or self._is_deaf:
            raise _Finished
        self._selector.unregister(descriptor)
        self._is_done = True

    def _flush(self) -> None:
        """Let the launcher take what waits for it, as long as it is there."""
        poll = select.poll()
        poll.register(self._uplink.output, select.POLLOUT)
        poll.register(self._control, select.POLLIN)
        while not self._uplink.flush() and not self._is_deaf:
            ready = {descriptor for descriptor, _ in poll.poll(1000 * PROGRESS_S)}
            if self._control in ready:
                try:
                    self._is_deaf = not os.read(self._control, _READ_BYTES)
                except OSError:  # a connection that broke
                    self._is_deaf = True
                self._silence.hear()
            if self._is_remote and self._silence.seconds > SILENCE_S:
                self._is_deaf = True


def _log_bytes(note: str | None) -> int | None:
    """Return how much a rank had printed when it left this note."""
    with suppress(ValueError, TypeError, KeyError):
        return int(json.loads(note or "")["log_bytes"])
    return None


class _Finished(Exception):  # noqa: N818
    """The thread's work is done."""
