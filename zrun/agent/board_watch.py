"""The agent's watch over the GPUs of its ranks: what they report, how hot and busy they are.

Libraries of drivers may stand still for many seconds while a GPU is in trouble, so a thread of its
own asks them. A GPU on which nothing can go on has its rank ended after a while: such a rank often
waits for ever, and then all others wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict

from zrun.agent.uplink import Uplink
from zrun.topology.boards import POWER_CAP, Fault, Health, Monitor
from zrun_core.spine.events import Event

_WAIT_S = 0.25  # for an error, before the thread looks whether it is to do something else
_LOOK_S = 5.0  # between two looks at counters
_TELL_S = 10.0  # between two reports of sensors
_OWN_WORDS_S = 10.0  # that a rank gets to end by itself once its GPU cannot go on
_REASONS = 2  # looks in a row after which it is told that a GPU is slowed down

OpenMonitor = Callable[[frozenset[str]], AbstractContextManager[Monitor | None]]


class BoardWatch:
    """Watches the GPUs of a host's ranks in a thread of its own, and tells the launcher."""

    def __init__(
        self, gpus: Mapping[int, tuple[str, str]], uplink: Uplink, open_monitor: OpenMonitor
    ) -> None:
        """Begin to watch.

        Args:
            gpus: by rank, the UUID of its GPU, and the rank in words.
            open_monitor: opens the monitor of GPUs with these UUIDs, which is used in the thread
                only.
        """
        self._ranks: dict[str, list[int]] = {}
        for rank, (uuid, _) in gpus.items():
            self._ranks.setdefault(uuid, []).append(rank)
        self._names = {rank: name for rank, (_, name) in gpus.items()}
        self._uplink = uplink
        self._open_monitor = open_monitor
        self._turn = threading.Condition()
        self._num_turns = 0
        self._is_hurried = False
        self._is_over = False
        self._lost: dict[int, tuple[float, Fault]] = {}  # ranks whose GPU cannot go on, since when
        self._slowed: dict[tuple[str, str], int] = {}  # looks in a row, by GPU and reason
        self._thread = threading.Thread(target=self._run, name="board-watch", daemon=True)
        self._thread.start()

    # Called by other threads.

    def catch_up(self, patience_s: float) -> None:
        """Let the thread tell what its GPUs have reported up to now, if it does so in time."""
        with self._turn:
            wanted = self._num_turns + 2  # the turn under way may have looked already
            self._is_hurried = True
            self._turn.wait_for(lambda: self._is_over or self._num_turns >= wanted, patience_s)

    def doomed(self) -> dict[int, Fault]:
        """Return the ranks that had their time to end by themselves, and why they have to."""
        with self._turn:
            lost = dict(self._lost)
        now = time.monotonic()
        return {rank: fault for rank, (at, fault) in lost.items() if now > at + _OWN_WORDS_S}

    def close(self) -> None:
        """End the thread, unless a library holds it."""
        self._is_over = True
        self._thread.join(2 * _WAIT_S)

    # The thread.

    def _run(self) -> None:
        try:
            with self._open_monitor(frozenset(self._ranks)) as monitor:
                if monitor is not None:
                    self._watch(monitor)
        finally:
            with self._turn:
                self._is_over = True
                self._turn.notify_all()

    def _watch(self, monitor: Monitor) -> None:
        look_at = tell_at = 0.0
        while not self._is_over:
            faults = monitor.faults(_WAIT_S)
            now = time.monotonic()
            if now >= look_at or self._is_hurried:
                self._is_hurried = False
                look_at = now + _LOOK_S
                faults += monitor.changes()
                health = monitor.health()
                self._note_slowed(health)
                if now >= tell_at:
                    tell_at = now + _TELL_S
                    self._tell_health(health)
            for fault in faults:
                self._tell_fault(fault, now)
            with self._turn:
                self._num_turns += 1
                self._turn.notify_all()

    def _tell_fault(self, fault: Fault, now: float) -> None:
        ranks = self._ranks[fault.uuid]
        if fault.is_fatal:
            with self._turn:
                for rank in ranks:
                    self._lost.setdefault(rank, (now, fault))
        self._uplink.send({"frame": "fault", "ranks": ranks, "fault": asdict(fault)})
        names = ", ".join(self._names[rank] for rank in ranks)
        self._warn(ranks[0], f"{names}: its GPU {fault.uuid} reports {fault}: {fault.advice}")

    def _note_slowed(self, health: Mapping[str, Health]) -> None:
        """Warn once of each reason for which a GPU has been slow for more than a moment."""
        for uuid, sensed in health.items():
            for why in sensed.slowed:
                if why == POWER_CAP:  # usual for one that has work
                    continue
                looks = self._slowed[uuid, why] = self._slowed.get((uuid, why), 0) + 1
                if looks == _REASONS:
                    rank = self._ranks[uuid][0]
                    name = self._names[rank]
                    self._warn(rank, f"{name}: its GPU is slowed down{sensed.strain}: {why}")

    def _tell_health(self, health: Mapping[str, Health]) -> None:
        if not health or self._uplink.is_full:
            return
        told = [
            {"rank": rank, "uuid": uuid, **_sensors(sensed)}
            for uuid, sensed in health.items()
            for rank in self._ranks[uuid]
        ]
        told.sort(key=lambda each: int(each["rank"]))
        self._send({"type": "gpus", "rank": told[0]["rank"], "gpus": told})

    def _warn(self, rank: int, message: str) -> None:
        self._send({"type": "warning", "rank": rank, "message": message})

    def _send(self, event: Event) -> None:
        self._uplink.send_events([{"time": time.time(), **event}])


def _sensors(sensed: Health) -> Event:
    """Return what a GPU says now, as the fields of an event."""
    return {
        "utilisation": sensed.utilisation,
        "power_w": sensed.power_w,
        "power_limit_w": sensed.power_limit_w,
        "temperature_c": sensed.temperature_c,
        "clock_mhz": sensed.clock_mhz,
        "used_bytes": sensed.used_bytes,
        "slowed": list(sensed.slowed),
        "corrected": sensed.corrected,
        "uncorrected": sensed.uncorrected,
        "remap": sensed.remap,
    }
