"""`log.to: [trackio]`: a run of trackio, on this machine or in a Space.

`log.args.trackio` has arguments of `trackio.init`, such as `project` and `space_id`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zrun.trackers.tracker import TrackedRun


class TrackioRun:
    """Its name is kept, so that another launch goes on with it."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        given: dict[str, Any] = {
            "project": run.project,
            "name": run.unique_name,
            "config": dict(run.config),
            "resume": "allow",
        }
        self._run: Any = trackio.init(**(given | dict(run.args)))

    def scalars(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """It writes by itself."""

    def end(self, state: str) -> None:
        self._run.finish()
