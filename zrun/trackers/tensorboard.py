"""`log.to: [tensorboard]`: event files in `tensorboard/` of the run directory.

tensorboard --logdir runs/gpt
"""

from __future__ import annotations

from collections.abc import Mapping

from zrun.trackers.tracker import TrackedRun


class TensorBoard:
    """Writes event files, without torch and TensorFlow."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._summary = Summary
        folder = run.args.get("folder") or run.folder / "tensorboard"
        self._writer = EventFileWriter(str(folder))

    def scalars(self, step: int, at: float, values: Mapping[str, float]) -> None:
        told = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = self._event(wall_time=at, step=step, summary=self._summary(value=told))
        self._writer.add_event(event)

    def flush(self) -> None:
        self._writer.flush()

    def end(self, state: str) -> None:
        self._writer.close()
