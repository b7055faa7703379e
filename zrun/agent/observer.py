"""What an agent sees of the ranks of its host: their pages of the board, and what they do while one hangs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zrun.agent.unanswered import own_addresses, unanswered
from zrun.system import processes
from zrun.system.processes import Process
from zrun.system.tail_file import last_lines
from zrun_core.spine.flight_recorder import FlightRecorderView

_STACKS_S = 1.0  # that ranks get for writing their stacks


class Observer:
    """What an agent sees of its host's ranks."""

    def __init__(self, view: FlightRecorderView, run_dir: Path) -> None:
        self._view, self._run_dir = view, run_dir

    def look(self, ranks: Iterable[int]) -> dict[str, Any]:
        """The frame that says how far the running `ranks` are."""
        return {"frame": "board", "states": {rank: list(self._view.state(rank)) for rank in ranks}}

    def have_allocated_all(self, ranks: Iterable[int]) -> bool:
        """Whether each of the running `ranks` has made two steps: the first one's update makes the moments."""
        return all(0 < state.first < state.step - 1 for state in map(self._view.state, ranks))

    def report_hang(self, leaders: Mapping[int, Process]) -> dict[str, Any]:
        """The frame that says what the running workers do, with their stacks and the ends of their logs."""
        halted = [rank for rank, leader in leaders.items() if leader.state in ("T", "t")]
        states = {rank: self._view.state(rank) for rank in leaders}
        told = [
            {
                "rank": rank,
                "step": state.step,
                "phase": state.phase,
                "does": "is stopped" if rank in halted else "waits" if state.waiting else "runs",
                "last": str(self._view.last(rank) or "no collective"),
            }
            for rank, state in states.items()
        ]
        return {
            "frame": "testimony",
            "ranks": told,
            "disagreement": None if halted else self._view.disagreement(),
            "stalemate": None if halted else self._view.stalemate(),
            "stacks": self._dump_stacks(leaders, halted),
            "logs": {
                rank: last_lines(self._run_dir / "logs" / f"rank-{rank}.log") for rank in leaders
            },
            "addresses": own_addresses(),
            "unanswered": unanswered(leader.pid for leader in leaders.values()),
        }

    def _dump_stacks(self, leaders: Mapping[int, Process], halted: list[int]) -> dict[int, str]:
        """Have every worker write its stacks; faulthandler does so without Python's help. Text by rank."""
        folder = self._run_dir / "stacks"
        files = {rank: folder / f"rank-{rank}.txt" for rank in leaders}
        there = {
            rank: leader for rank, leader in leaders.items() if files[rank].exists()
        }  # it listens
        processes.send(list(there.values()), signal.SIGQUIT)
        processes.send(
            [leaders[rank] for rank in halted], signal.SIGCONT
        )  # what is stopped cannot write
        deadline = time.monotonic() + _STACKS_S
        sizes: dict[int, int] = {}
        while time.monotonic() < deadline:
            now = {rank: files[rank].stat().st_size for rank in there}
            if now == sizes and all(now.values()):
                break
            sizes = now
            time.sleep(_STACKS_S / 20)
        return {rank: files[rank].read_text(errors="replace") for rank in there}
