"""A save in the background of a user's own loop; optimizer steps move it on without waiting."""

from __future__ import annotations

import atexit
import sys
from typing import Any

from zrun_core.checkpoint.checkpointer import Checkpointer, SaveConsensus


class Background:
    """The save of this process that is under way: one at a time, the same on every rank."""

    def __init__(self) -> None:
        self._saves: Checkpointer | None = None
        self._number = 0  # of saves begun here

    @property
    def step(self) -> int | None:
        """The step that is being saved."""
        if self._saves is None:
            return None
        return self._saves.under_way

    def save(self, saves: Checkpointer, step: int, progress: dict[str, Any], *, wait: bool) -> None:
        """Save, or begin to, after the save that was under way.

        Args:
            saves: of the folder.
            step: to be saved.
            progress: for the manifest.
            wait: until it is on disk.

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
        """Return the number of the save under way, and what this rank adds to a step's message."""
        if self._saves is None or self.step is None:
            return self._number, SaveConsensus()
        return self._number, self._saves.contribution()

    def advance(self, number: int, consensus: SaveConsensus) -> None:
        """Move a save on, as far as no rank has to wait for that. Collective.

        Args:
            number: of the save that the consensus is of; an earlier one is over.
            consensus: sums of a step's message, the same on every rank.

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
        saves = self._saves
        self._saves = None
        if saves is not None:
            saves.finish()

    def _tell_unfinished(self) -> None:
        if self.step is not None:
            print(
                f"zrun_core: step {self.step} is not saved: the script ended in the middle of it; "
                "call zrun_core.finish() at its end",
                file=sys.stderr,
            )
