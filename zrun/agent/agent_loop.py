"""The agent's thread between its host's workers and the launcher.

It forwards telemetry and exit statuses up, obeys what comes down, stops the other workers when one fails, and takes the
end of its input for the launcher's death. The main thread only waits: the workers end with it.
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
from typing import Any

from zrun.agent.echo import Echo
from zrun.agent.memory_watch import MemoryWatch
from zrun.agent.observer import Observer
from zrun.agent.workers import Workers
from zrun.system import processes
from zrun.system.deadlines import AwakeClock
from zrun.system.processes import Process
from zrun.system.tail_file import last_lines
from zrun.transport.frames import (
    EVENT,
    GRACE_S,
    ORPHAN_S,
    PROGRESS_S,
    SILENCE_S,
    Frame,
    StartRequest,
    StopMode,
    Unpacker,
)
from zrun.transport.nonblocking_writer import NonblockingWriter
from zrun_core.errors import ExitCode
from zrun_core.spine import memory_limits
from zrun_core.spine.events import Event, encode
from zrun_core.spine.stop_signals import SAVE

_READ_BYTES = 1 << 16
_LARGEST_EVENT = 1 << 18
_LAST_WORDS_S = 0.1  # for the workers that fail together with the first one to say why
_EVENTS_PER_TURN = 256  # then the other descriptors are served
_LARGEST_NOTE = 1 << 18


class AgentLoop:
    """
    Attributes:
        orders: what the launcher sent to be done by the main thread: questions, then one start.
        verdict: how the run ended, once an agent has heard it that is to end in the same way.
    """

    def __init__(self, control: int, output: int, *, is_joined: bool = False) -> None:
        """
        Args:
            control: what the launcher says.
            output: where it is told.
            is_joined: another launcher started this process. It ends the run should that one vanish, and stays after
                the workers' end until it has the verdict.
        """
        self.orders: SimpleQueue[StartRequest | Frame] = SimpleQueue()
        self.verdict: int | None = None
        self._is_joined, self._parent = is_joined, os.getppid()
        self._is_deaf = False  # nothing more will be heard
        self._is_done = False
        self._control, self._output = control, output
        self._outbox = NonblockingWriter(output)
        self._is_held_up = self._is_pausing = (
            False  # the launcher takes nothing; no telemetry is read meanwhile
        )
        self._unpacker = Unpacker()
        self._started = False
        self._telemetry: socket.socket | None = None
        self._datagram = memoryview(bytearray(_LARGEST_EVENT))
        self._leaders: dict[int, Process] = {}  # by rank; of all, what forks them
        self._workers: Workers = {}
        self._observer: Observer | None = None
        self._echoes: dict[
            int, Echo
        ] = {}  # of the ranks whose output the launcher shows, while they run
        self._run_dir = Path()
        self._looked = 0.0
        # The launcher's silence means that it, or the way to it, is dead: all three by the clock of a process that
        # may have stood still itself.
        self._is_remote = False
        self._awake = AwakeClock()
        self._heard = self._moved = self._awake()  # the launcher; the ranks, by their boards
        self._states: object = None  # as the boards said last
        self._is_on_hold = False  # the launcher has said that it will be silent
        self._is_finishing = False  # the ranks were asked to end, since nobody was heard
        self._running: set[int] = set()  # ranks, also those that are to be forked
        self._writing = threading.Lock()
        self._stop_with: StopMode | None = None  # for those that are to be forked too
        self._terminate_at: float | None = None
        self._kill_at: float | None = None
        self._oom_kills = memory_limits.oom_kills()
        self._memory: MemoryWatch | None = None
        self._shortage = ""  # of memory, for which the workers were killed
        self._done, self._finish = os.pipe()
        # epoll lets the main thread add descriptors while this one waits.
        self._selector = selectors.EpollSelector()
        self._on(control, self._read_control)
        self._on(self._done, self._close)
        self._thread = threading.Thread(target=self._run, name="agent-loop", daemon=True)
        self._thread.start()

    @property
    def is_orphaned(self) -> bool:
        """Whether the launcher ended, or was lost, before it had let this agent end."""
        return self._is_deaf and self.verdict is None

    def listen(self, telemetry: socket.socket) -> None:
        """Forward every datagram of this socket."""
        telemetry.setblocking(False)
        self._telemetry = telemetry
        self._on(telemetry.fileno(), self._hear)

    def watch(
        self,
        ranks: Sequence[int],
        server: int,
        run_dir: Path,
        observer: Observer,
        echoes: Mapping[int, Echo],
        *,
        is_remote: bool,
        memory: int | None,
    ) -> None:
        """Report how these workers fare, and stop them when the launcher says so or dies.

        Args:
            server: the process that is to fork them, see `follow`.
            echoes: what the launcher shows of their output, by rank.
            memory: bytes that they may take together; None: what the host has.
            is_remote: the launcher is on another host, and may vanish without a word.
        """
        self._run_dir = run_dir
        self._running = set(ranks)
        self._lead(dict.fromkeys(ranks, server))
        self._send({"frame": "started"})
        self._heard = self._moved = self._awake()
        self._observer, self._is_remote = observer, is_remote
        self._echoes = dict(echoes)
        self._memory = MemoryWatch(memory)
        if self._stop_with is not None:
            self.stop(self._stop_with)

    def follow(self, workers: Workers) -> None:
        """The workers are processes of their own from now on, or have ended before they were."""
        self._workers = workers
        self._lead({rank: worker.pid for rank, worker in workers.items() if worker.status is None})
        for worker in workers.values():
            self._on(worker.pidfd, self._exited)
        if self._stop_with is not None:
            self.stop(self._stop_with)

    def _lead(self, pids: Mapping[int, int]) -> None:
        """These processes lead the sessions of these ranks, or will do so."""
        found = {rank: Process.find(pid) for rank, pid in pids.items()}
        self._leaders |= {rank: leader for rank, leader in found.items() if leader is not None}

    def answer(self, frame: Frame) -> None:
        """Tell the launcher something."""
        self._send(frame)

    def finish(self) -> None:
        """Forward what is left and end the thread."""
        os.close(self._finish)
        self._thread.join()

    def end_sessions(self) -> None:
        """Leave nothing of the workers behind: not their helpers, nor what those left to this process."""
        left = [
            process
            for leader in self._distinct_leaders()
            for process in processes.session_of(leader)
        ]
        processes.send(left, signal.SIGTERM)
        processes.send(processes.wait_gone(left, GRACE_S / 5), signal.SIGKILL)
        processes.end_children(GRACE_S)

    def abandon(self) -> None:
        """End everything without another word: whoever would hear of it takes this process for dead."""
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), self._output)
        self.stop(StopMode.KILL)
        self.end_sessions()

    def _run(self) -> None:
        try:
            while True:
                patience = PROGRESS_S
                for moment in (self._terminate_at, self._kill_at):
                    if moment is not None:
                        patience = min(patience, max(0.0, moment - time.monotonic()))
                if self._memory is not None:
                    patience = min(patience, self._memory.patience(time.monotonic()))
                for key, _ in self._selector.select(patience):
                    key.data(key.fd)
                if self._terminate_at is not None and time.monotonic() >= self._terminate_at:
                    self._terminate_at = None
                    for leader in self._distinct_leaders():
                        processes.send(processes.session_of(leader), signal.SIGTERM)
                if self._kill_at is not None and time.monotonic() >= self._kill_at:
                    self._kill_at = None
                    self.stop(StopMode.KILL)
                self._look(time.monotonic())
        except _Finished:
            self._flush()
        except BaseException:
            # Without this thread nobody would hear of the launcher's end.
            traceback.print_exc()
            self.stop(StopMode.KILL)
            os._exit(1)

    def _look(self, now: float) -> None:
        """What is to be done now and then."""
        awake = self._awake()
        if self._observer is not None and now - self._looked > PROGRESS_S:
            self._looked = now
            running = sorted(self._running)
            board = self._observer.look(running)
            if board["states"] != self._states:
                self._states, self._moved = board["states"], awake
            if not self._outbox.is_full:
                self._send(board)
                for echo in self._echoes.values():
                    self._tell(echo.look(now))
            if (
                self._memory is not None
                and self._observer.have_allocated_all(running)
                and not self._memory.settle()
            ):
                self._memory = None
        if self._memory is not None:
            self._shortage = self._memory.shortage(
                now, [leader.pid for leader in self._distinct_leaders()]
            )
            if self._shortage:
                print(f"{self._shortage}: the workers are killed", flush=True)
                self._memory = None
                self.stop(StopMode.KILL)
        if self._is_remote and not self._is_deaf and not self._is_on_hold:
            self._mind_silence(awake - self._heard, awake - self._moved)
        if self._is_joined and os.getppid() != self._parent:
            self._parent = os.getppid()
            print("the launcher that started this process is gone: stopping", flush=True)
            self._asked(StopMode.FINISH)

    def _mind_silence(self, silent_s: float, still_s: float) -> None:
        """End the ranks of a launcher that is not heard any more.

        Args:
            silent_s: since its last word.
            still_s: since the ranks last made progress. Those that go on reach the ranks of all other hosts, so it is
                the launcher that stands still or is gone, and not the network: they have more time, and may save.
        """
        if silent_s <= SILENCE_S:
            return
        if still_s > SILENCE_S or silent_s > 2 * ORPHAN_S:
            self._tell_deaf(silent_s, StopMode.NOW)
            self._hear_no_more()
            self._asked(StopMode.NOW)
        elif silent_s > ORPHAN_S and not self._is_finishing:
            self._is_finishing = True
            self._tell_deaf(silent_s, StopMode.FINISH)
            self._asked(StopMode.FINISH)

    def _tell_deaf(self, silent_s: float, how: StopMode) -> None:
        print(f"no word from the launcher for {silent_s:.0f} s: stopping ({how})", flush=True)
        self._send({"frame": "deaf", "silent_s": silent_s, "stop": how})

    def _report_hang(self) -> None:
        running = sorted(self._running)
        if self._observer is not None:
            self._send(
                self._observer.report_hang(
                    {rank: self._leaders[rank] for rank in running if rank in self._leaders}
                )
            )

    def _on(self, descriptor: int, action: Callable[[int], object]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def _read_control(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, _READ_BYTES)
        except OSError:  # a connection that broke
            data = b""
        if not data:
            self._selector.unregister(descriptor)
            self._hear_no_more()
            self._asked(StopMode.NOW)
            return
        self._heard, self._is_on_hold = self._awake(), False
        for frame in self._unpacker.feed(data):
            if "stop" in frame:
                self._asked(StopMode(frame["stop"]))
            elif "save" in frame:
                self._ask_for_save()
            elif "testify" in frame:
                self._report_hang()
            elif "hold" in frame:
                self._is_on_hold = True
            elif "ask" in frame:
                self.orders.put(frame)
            elif "exit" in frame:
                self.verdict = int(frame["exit"])
                self._hear_no_more()
            elif "beat" not in frame:
                self._started = True
                self.orders.put(StartRequest(**frame))

    def _asked(self, how: StopMode) -> None:
        """End the workers; those that `watch` is about to hear of too."""
        if not self._started:
            os._exit(
                (ExitCode.HANG if self.verdict is None else self.verdict) if self._is_joined else 0
            )
        self.stop(how)

    def _hear_no_more(self) -> None:
        """The launcher has said its last, or cannot be heard."""
        self._is_deaf = True
        if self._is_done:
            raise _Finished

    def stop(self, how: StopMode) -> None:
        """Ask the workers to end: SIGUSR1 to them alone, or SIGTERM or SIGKILL to all that they started too."""
        self._stop_with = how
        if how is StopMode.NOW and self._kill_at is None:
            self._kill_at = time.monotonic() + GRACE_S
        for leader in self._distinct_leaders():
            if how is StopMode.FINISH:
                processes.send([leader], signal.SIGUSR1)
                continue
            if how is StopMode.NOW:
                processes.send(
                    [leader], signal.SIGINT
                )  # a worker takes the second of SIGINT and SIGTERM for "now"
            processes.send(
                processes.session_of(leader),
                signal.SIGKILL if how is StopMode.KILL else signal.SIGTERM,
            )

    def _ask_for_save(self) -> None:
        """One rank is told, and tells the others: two would be told in different steps, and save twice."""
        if 0 in self._running and 0 in self._workers and self._stop_with is None:
            processes.send([self._leaders[0]], SAVE)

    def _hear(self, descriptor: int) -> None:
        if self._outbox.is_full:  # workers keep what they have to tell
            self._is_pausing = True
            self._selector.unregister(descriptor)
        else:
            self._forward()

    def _forward(self) -> int:
        """Send a turn's worth of datagrams up, and say how many there were."""
        assert self._telemetry is not None
        datagrams: list[bytes] = []
        with suppress(BlockingIOError):
            while len(datagrams) < _EVENTS_PER_TURN:
                datagrams.append(bytes(self._datagram[: self._telemetry.recv_into(self._datagram)]))
        # A worker sends one line at a time; anything else would break the stream.
        lines = (EVENT + line + b"}\n" for line in datagrams if b"\n" not in line)
        self._write(b"".join(lines))
        return len(datagrams)

    def _distinct_leaders(self) -> list[Process]:
        return list(dict.fromkeys(list(self._leaders.values())))

    def _exited(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        rank, worker = next(
            (rank, worker) for rank, worker in self._workers.items() if worker.pidfd == pidfd
        )
        self._running.discard(rank)
        if self._telemetry is not None:
            while self._forward() == _EVENTS_PER_TURN:
                pass  # what it said before it ended comes first
        status = worker.wait()
        oom_kills = memory_limits.oom_kills()
        by_kernel = oom_kills is not None and oom_kills > (self._oom_kills or 0)
        oom = status == -signal.SIGKILL and (bool(self._shortage) or by_kernel)
        told = {
            "frame": "exit",
            "rank": rank,
            "status": status,
            "oom": oom,
            "shortage": self._shortage * oom,
        }
        last_words = self._last_words(rank, status)
        if (echo := self._echoes.pop(rank, None)) is not None:
            self._tell(echo.last_look(time.monotonic(), _log_bytes(last_words["note"])))
        self._send({**told, **last_words})
        if status != 0 and self._kill_at is None:
            now = time.monotonic()
            self._terminate_at, self._kill_at = now + _LAST_WORDS_S, now + GRACE_S

    def _last_words(self, rank: int, status: int) -> dict[str, Any]:
        """Why a worker ended: its own note and the end of its log, which only this host may have."""
        note: str | None = None
        with (
            suppress(OSError),
            open(self._run_dir / "failures" / f"rank-{rank}.json", errors="replace") as file,
        ):
            note = file.read(_LARGEST_NOTE)
        return {
            "note": note,
            "log": last_lines(self._run_dir / "logs" / f"rank-{rank}.log") if status else [],
        }

    def _close(self, _: int) -> None:
        for rank, worker in self._workers.items():
            if rank in self._running and worker.poll() is not None:
                self._exited(worker.pidfd)
        self._send({"frame": "done"})
        if not self._is_joined or self._is_deaf:
            raise _Finished
        self._selector.unregister(self._done)
        self._is_done = True

    def _tell(self, events: Sequence[Event]) -> None:
        self._write(b"".join(EVENT + encode(event) + b"}\n" for event in events))

    def _send(self, frame: dict[str, object]) -> None:
        self._write(json.dumps(frame).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        with self._writing:
            self._outbox.put(data)
            if not self._outbox.send() and not self._is_held_up:
                self._is_held_up = True
                self._selector.register(self._output, selectors.EVENT_WRITE, self._go_on)

    def _go_on(self, _: int) -> None:
        """The launcher takes something again."""
        with self._writing:
            if self._outbox.send():
                self._is_held_up = False
                self._selector.unregister(self._output)
        if self._is_pausing and not self._outbox.is_full:
            assert self._telemetry is not None
            self._is_pausing = False
            self._on(self._telemetry.fileno(), self._hear)

    def _flush(self) -> None:
        """Let the launcher take what waits for it, as long as it is there."""
        poll = select.poll()
        poll.register(self._output, select.POLLOUT)
        poll.register(self._control, select.POLLIN)
        while not self._outbox.send() and not self._is_deaf:
            ready = {descriptor for descriptor, _ in poll.poll(1000 * PROGRESS_S)}
            if self._control in ready:
                try:
                    self._is_deaf = not os.read(self._control, _READ_BYTES)
                except OSError:  # a connection that broke
                    self._is_deaf = True
                self._heard = self._awake()
            self._is_deaf |= self._is_remote and self._awake() - self._heard > SILENCE_S


def _log_bytes(note: str | None) -> int | None:
    """Return how much a rank had printed when it left this note."""
    with suppress(ValueError, TypeError, KeyError):
        return int(json.loads(note or "")["log_bytes"])
    return None


class _Finished(Exception):  # noqa: N818
    """The thread's work is done."""
