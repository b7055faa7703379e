"""The save that goes on behind a user's own loop. Each optimizer step moves it on, and no step waits for it."""

from __future__ import annotations

import atexit
import sys
from typing import Any

from zrun_core.checkpoint.checkpointer import Checkpointer, SaveConsensus


class Background:
    """At most one save of this process that is under way, whatever its folder; the same one on every rank."""

    def __init__(self) -> None:
        self._saves: Checkpointer | None = None
        self._number = 0  # of saves begun here

    @property
    def step(self) -> int | None:
        """The step that is being saved."""
        return None if self._saves is None else self._saves.under_way

    def save(self, saves: Checkpointer, step: int, progress: dict[str, Any], *, wait: bool) -> None:
        """Save, or begin to. What was under way is finished first.

        Raises:
            SaveError: this rank could not save, this step or the one before.
            PeerError: another rank could not.
            HangError: a rank's disk has not answered for half an hour.
        """
        self.finish()
        saves.save(step, lambda: progress, "asked", wait=wait)
        if saves.under_way is not None:
            if not self._number:
                atexit.register(self._tell_unfinished)
            self._saves = saves
            self._number += 1

    def contribution(self) -> tuple[int, SaveConsensus]:
        """Which save is under way, and what this rank adds to a step's message for it."""
        return (
            self._number,
            SaveConsensus()
            if self.step is None or self._saves is None
            else self._saves.contribution(),
        )

    def advance(self, number: int, consensus: SaveConsensus) -> None:
        """Move save `number` on, as far as its consensus says that nobody waits. Collective if it says so.

        Raises:
            SaveError: this rank could not save.
            PeerError: another rank could not.
        """
        saves = self._saves
        if saves is not None and number == self._number:  # else they are of a save before it
            saves.advance(consensus)

    def finish(self) -> None:
        """Wait until no save is under way. Collective.

        Raises:
            SaveError: this rank could not save.
            PeerError: another rank could not.
        """
        saves, self._saves = self._saves, None
        if saves is not None:
            saves.finish()

    def _tell_unfinished(self) -> None:
        if self.step is not None:
            print(
                f"zrun_core: step {self.step} is not saved: the script ended in the middle of it; call "
                "zrun_core.finish() at its end",
                file=sys.stderr,
            )
