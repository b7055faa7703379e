"""Feeds trackers from a run's events.

[Note: a launch that goes on]
The record is read from its beginning by every launch. `trackers.json` in the run directory says how
far each series has come, by tracker, and under which id its run is known; what is not newer is left
out. So a step that a run makes once more is there once, and what a launcher that was killed had not
fed is fed by the next one. What a tracker had been given and the file does not say, of the last
seconds, may be there twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from zrun.trackers.tracker import TrackedRun, Tracker, maker_of
from zrun.watch.run_state import number
from zrun_core.spine.events import Event

FILE = "trackers.json"
_OF_STEPS = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "loss_scale": "train/loss_scale",
    "epoch": "train/epoch",
    "total_tokens": "train/tokens",
    "total_samples": "train/samples",
    "step_s": "speed/step_s",
    "tokens_per_s": "speed/tokens_per_s",
    "samples_per_s": "speed/samples_per_s",
    "tflops": "speed/tflops",
    "mfu": "speed/mfu",
}
_OF_MEMORY = {
    "rss_bytes": "memory/process_bytes",
    "device_allocated": "memory/gpu_tensors_bytes",
    "device_reserved": "memory/gpu_reserved_bytes",
}


def scalars_of(event: Event) -> tuple[int, dict[str, float]] | None:
    """Return the step and the numbers of an event; None: it has none for trackers."""
    kind = event.get("type")
    values: dict[str, Any] = {}
    if kind == "step":
        values = {name: event.get(key) for key, name in _OF_STEPS.items()}
        if not event.get("tokens"):  # its data have none
            values = {name: value for name, value in values.items() if "tokens" not in name}
        values |= {f"time/{part}": took for part, took in (event.get("split") or {}).items()}
    elif kind == "memory" and event["rank"] == 0:
        values = {name: event.get(key) for key, name in _OF_MEMORY.items()}
    elif kind == "eval":
        told = event.get("metrics") or {"loss": event["loss"]}
        values = {f"eval/{name}": value for name, value in told.items()}
    elif kind == "metrics":
        values = dict(event["values"])
    found = {name: number(value) for name, value in values.items() if value is not None}
    return (int(event["step"]), found) if found else None


class _Fed:
    """A tracker, and how far each of its series has come."""

    def __init__(self, kind: str, kept: Mapping[str, Any]) -> None:
        self.kind = kind
        self.ids: dict[str, Any] = kept.get("ids") or {}
        self._last: dict[str, int] = kept.get("last") or {}
        self._tracker: Tracker | None = None

    def begin(self, run: TrackedRun) -> None:
        self._tracker = maker_of(self.kind)(run)

    def feed(self, step: int, at: float, values: Mapping[str, float]) -> None:
        news = {name: value for name, value in values.items() if step > self._last.get(name, -1)}
        if news:
            self._made.scalars(step, at, news)
            self._last |= dict.fromkeys(news, step)

    def flush(self) -> None:
        self._made.flush()

    def end(self, state: str) -> None:
        self._made.end(state)

    def kept(self) -> dict[str, Any]:
        return {"ids": self.ids, "last": self._last}

    @property
    def _made(self) -> Tracker:
        assert self._tracker is not None
        return self._tracker


class Feed:
    """The trackers of one launch."""

    def __init__(
        self,
        kinds: Sequence[str],
        *,
        project: str,
        folder: Path,
        config: Mapping[str, Any],
        args: Mapping[str, Mapping[str, Any]],
        tell: Callable[[str], None],
    ) -> None:
        """Make the trackers.

        Args:
            kinds: of `KINDS`.
            project, folder, config, args: as of `TrackedRun`, `args` by tracker.
            tell: called with what the user should know.
        """
        self._folder = folder
        self._tell = tell
        kept = _read(folder / FILE)
        self._feds = [_Fed(kind, kept.get(kind) or {}) for kind in kinds]
        for fed in list(self._feds):
            run = TrackedRun(
                project, folder.name, folder, config, args.get(fed.kind) or {}, fed.ids
            )
            self._call(fed, "did not start", fed.begin, run)
        self._keep()

    def event(self, event: Event) -> None:
        """Feed an event of the run."""
        found = None
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # of another version
            found = scalars_of(event)
        if found is None:
            return
        step, values = found
        for fed in list(self._feds):
            self._call(fed, "failed", fed.feed, step, float(event["time"]), values)

    def flush(self) -> None:
        """Let all of it reach its place, and write down how far it has come."""
        for fed in list(self._feds):
            self._call(fed, "failed", fed.flush)
        self._keep()

    def end(self, state: str) -> None:
        """The launch is over: "finished" or "failed"."""
        self.flush()
        for fed in list(self._feds):
            self._call(fed, "did not end cleanly", fed.end, state)

    def _call(self, fed: _Fed, what: str, call: Callable[..., None], *args: Any) -> None:
        """Call a tracker; one that raises is left out."""
        try:
            call(*args)
        except BaseException as error:  # a package may even exit
            self._feds.remove(fed)
            why = str(error).partition("\n")[0] or type(error).__name__
            self._tell(f"log.to: {fed.kind} {what}, and is off from here on: {why}")

    def _keep(self) -> None:
        path = self._folder / FILE
        kept = _read(path) | {fed.kind: fed.kept() for fed in self._feds}
        part = path.with_name(f".{FILE}.{os.getpid()}")
        with suppress(OSError):
            part.write_text(json.dumps(kept), encoding="utf-8")
            part.replace(path)


def _read(path: Path) -> dict[str, Any]:
    """Return what an earlier launch has kept; nothing where that cannot be read."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
