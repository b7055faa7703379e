"""Read runs that are to be compared, from their files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from zrun.job.flat_keys import flat_keys
from zrun.runs.listing import read_run
from zrun.watch.comparison import ComparedRun
from zrun.watch.run_record import read_record


def read_compared(paths: Sequence[Path]) -> list[ComparedRun]:
    """Return runs as their files tell of them; what cannot be read is left out."""
    names = [path.name for path in paths]
    if len(set(names)) < len(names):  # of several folders
        names = [str(path) for path in paths]
    return [_read(path, name) for path, name in zip(paths, names, strict=True)]


def _read(path: Path, name: str) -> ComparedRun:
    record = read_record(path)
    summary = read_run(path)
    keys = {}
    with suppress(OSError, yaml.YAMLError, AttributeError, UnicodeDecodeError, RecursionError):
        keys = flat_keys(yaml.safe_load((path / "job.yaml").read_text(encoding="utf-8")))
    return ComparedRun(
        name=name,
        outcome=str(summary.state),
        keys=keys,
        state=record.state,
        curves=record.curves,
        seconds=summary.seconds,
        num_events=record.num_events,
    )
