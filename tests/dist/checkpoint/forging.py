"""Steps that somebody has changed, with digests that fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zrun_core.checkpoint.digest import digest
from zrun_core.checkpoint.folder import read_step

Change = Callable[[dict[str, Any]], None]


def forge(step: Path, change: Change) -> None:
    """Change the manifest of a step."""
    path = step / "manifest.json"
    raw = json.loads(path.read_bytes())
    del raw["digest"]
    change(raw)
    body = json.dumps(raw)[:-1].encode()
    path.write_bytes(body + b',\n"digest":"%s"}\n' % digest(body).encode())


def forge_record(step: Path, rank: int, change: Change) -> None:
    """Change the record of a rank, and what the manifest says of its file."""
    info = read_step(step).files[rank]
    file = step / info.name
    content = file.read_bytes()
    raw = json.loads(content[-info.record_bytes :])
    change(raw)
    record = json.dumps(raw).encode()
    file.write_bytes(content[: -info.record_bytes] + record)

    def fit(manifest: dict[str, Any]) -> None:
        told = manifest["files"][rank]
        told["num_bytes"] += len(record) - info.record_bytes
        told["record_bytes"] = len(record)
        told["digest"] = digest(record)

    forge(step, fit)
