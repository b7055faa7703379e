"""`log.to: [prometheus]`: the newest numbers, in a file for node_exporter's textfile collector.

    zrun_train_loss{job="gpt",run="20260102-030405-ab12"} 1.9287

The file is replaced as a whole, so that nobody reads half of one. It goes where
`log.args.prometheus.path` says, else to `metrics.prom` in the run directory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from zrun.trackers.tracker import TrackedRun

_ODD = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusFile:
    """Holds the newest value of each name."""

    def __init__(self, run: TrackedRun) -> None:
        self._path = Path(run.args.get("path") or run.folder / "metrics.prom")
        labels = {"job": run.project, "run": run.name}
        quoted = (f'{key}="{_escaped(value)}"' for key, value in labels.items())
        self._labels = f"{{{','.join(quoted)}}}"
        # Of an earlier launch too: what it has told is not told again.
        self._newest: dict[str, float] = run.ids.setdefault("newest", {})
        self._newest["is_over"] = 0.0

    def scalars(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._newest |= values
        self._newest["step"] = step

    def flush(self) -> None:
        lines = []
        for name, value in sorted(self._newest.items()):
            full = f"zrun_{_ODD.sub('_', name)}"
            lines.append(f"# TYPE {full} gauge\n{full}{self._labels} {_number(value)}\n")
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        part.write_text("".join(lines), encoding="utf-8")
        part.replace(self._path)

    def end(self, state: str) -> None:
        self._newest["is_over"] = 1.0
        self.flush()


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
