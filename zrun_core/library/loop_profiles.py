"""Profiles of a loop of the user's own: steps of its first optimizer, in the run directory.

    zrun_core.init(run_dir="runs/gan/1", profile=[10, 12])

`zrun profile` asks for others: its signal reaches rank 0, which is the script itself, and the other
ranks hear of it in the step's message, as in a job. A step is what lies between two returns of
`step()`, so the first one of a script, whose beginning nobody knows, is never traced.
"""

from __future__ import annotations

import atexit
import json
import signal
from contextlib import ExitStack, suppress
from typing import Any

from zrun_core.library.run import Run
from zrun_core.spine.stop_signals import PROFILE
from zrun_core.train.profiles import ProfiledRun, Profiles
from zrun_core.zero.sharded_model import ShardedModel


class LoopProfiles:
    """The profiles of a run, on one rank."""

    def __init__(self, run: Run, sharded: ShardedModel) -> None:
        """
        Args:
            run: with a run directory.
            sharded: the model of its first optimizer.
        """
        assert run.run_dir is not None
        self._run = run
        self._comm = sharded.comm
        self._world = sharded.mesh.world
        self._is_asked = False
        self._untold: list[dict[str, Any]] = []  # events of a rank that has no record
        self._step = ExitStack()  # names the step, while it is traced
        name = f"rank {run.rank}"
        about = ProfiledRun(run.run_dir, run.profile, None, name, None, sharded.tiers is not None)
        self._profiles = Profiles(about, sharded, self._emit, take_request=self._take_request)
        if run.is_main:
            with suppress(ValueError):  # not the main thread: then nobody can ask
                signal.signal(PROFILE, self._note)
        atexit.register(self._end)

    @property
    def contribution(self) -> float:
        """What this rank adds to the step's message."""
        return self._profiles.contribution

    def update(self, asked: float) -> None:
        """Learn from a step's message whether rank 0 was asked."""
        self._profiles.update(asked)

    def between_steps(self, done: int) -> None:
        """End the profile whose last step is made, and begin the one whose turn it is. Collective.

        Args:
            done: steps of the run so far.
        """
        self._step.close()
        was_under_way = self._profiles.is_under_way
        self._profiles.after_step(done)
        if was_under_way and not self._profiles.is_under_way:
            self._tell()
        self._profiles.before_step(done)
        if self._profiles.is_on:
            self._step.enter_context(self._profiles.step(done + 1))

    def _note(self, *_: object) -> None:
        self._is_asked = True

    def _take_request(self) -> bool:
        asked, self._is_asked = self._is_asked, False
        return asked

    def _emit(self, kind: str, **fields: Any) -> None:
        if self._run.is_main:
            self._run._record.emit(kind, **fields)  # type: ignore[arg-type]
        else:
            self._untold.append({"kind": kind, "rank": self._run.rank, **fields})

    def _tell(self) -> None:
        """Have rank 0 record what the others found."""
        own, self._untold = self._untold, []
        texts = self._comm.all_gather_bytes(json.dumps(own).encode(), self._world, name="profile")
        for text in texts:
            for event in json.loads(text):
                self._run._record.emit(event.pop("kind"), **event)

    def _end(self) -> None:
        """Write the profile that is on when the script ends, each rank for itself."""
        self._step.close()
        self._profiles.end_run(self._run._step)
