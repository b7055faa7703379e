"""`log.to: [wandb]`: a run of Weights & Biases. `WANDB_*` of the shell count: `WANDB_MODE=offline`.

`log.args.wandb` has arguments of `wandb.init`, such as `project` and `entity`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zrun.trackers.tracker import TrackedRun


class WandbRun:
    """Its id is kept, so that another launch goes on with it."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        given: dict[str, Any] = {
            "project": run.project,
            "name": run.name,
            "id": run.unique_name,
            "dir": str(run.folder),
            "config": dict(run.config),
            "resume": "allow",
        }
        self._run = wandb.init(**(given | dict(run.args)))
        # Evaluations and hooks may come after their step: each number has its own.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def flush(self) -> None:
        """It sends by itself."""

    def end(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "finished" else 1)
