"""`log.to: [csv]`: `metrics.csv` in the run directory, a line for each number."""

from __future__ import annotations

import csv
from collections.abc import Mapping

from zrun.trackers.tracker import TrackedRun

_HEAD = ("step", "time", "name", "value")


class CsvFile:
    """Appends to the file; one that is there already goes on."""

    def __init__(self, run: TrackedRun) -> None:
        path = run.folder / "metrics.csv"
        is_new = not path.exists() or not path.stat().st_size
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        if is_new:
            self._writer.writerow(_HEAD)

    def scalars(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._writer.writerows((step, f"{at:.3f}", name, value) for name, value in values.items())

    def flush(self) -> None:
        self._file.flush()

    def end(self, state: str) -> None:
        self._file.close()
