"""What a run has not compared before its first step, or trains all the same: of its notes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOT_COMPARED = "not compared before training"  # of `zrun_core.train.value_check.not_compared`
TRUSTED = "guards.trust: "  # how a note begins of what is trained though it differs


def checks_left_out(start: Mapping[str, Any] | None) -> list[str]:
    """Return the notes of a start that tell of it.

    Args:
        start: the event; None: the run has not begun.
    """
    notes = map(str, (start or {}).get("notes") or ())
    return [note for note in notes if NOT_COMPARED in note or note.startswith(TRUSTED)]
