"""Phase of a rank: what it does now, for watchdogs and for the note of a failure."""

from __future__ import annotations

from zrun_core.spine.flight_recorder import FlightRecorder


class RankPhase:
    """The phase of one rank, on its page of the flight recorder if there is one.

    Attributes:
        name: of the phase, one of `flight_page.PHASES`.
    """

    def __init__(self, board: FlightRecorder | None) -> None:
        self._board = board
        self.name = ""
        self.enter("start")

    def enter(self, name: str) -> None:
        """Begin the phase `name`."""
        self.name = name
        if self._board is not None:
            self._board.phase(name)

    def begin_step(self, step: int) -> None:
        """Note that optimizer step `step` begins."""
        if self._board is not None:
            self._board.step(step)

    def tick(self) -> None:
        """Note progress inside of a long phase."""
        if self._board is not None:
            self._board.tick()
