"""The rates of this host's cores, measured in a few seconds by the first who asks, and kept.

They are measured by the time of the process, so a busy host need not be waited for. What `zrun
doctor --bench` has measured counts more. `ZRUN_CALIBRATION=off` leaves them out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from socket import gethostname

from pydantic import ValidationError

from zrun.agent.bench import run_quickly
from zrun.preflight.calibration import HostRates
from zrun.system import processes
from zrun_core.spine.cache import cache_folder, digest_of_file, write_cached

_MOST_CACHED = 20  # kinds of cores, or versions of torch
_SWITCH = "ZRUN_CALIBRATION"


def quick_rates(environ: Mapping[str, str]) -> HostRates | None:
    """Return the rates of this host's cores; None if they cannot be measured, or are not to be."""
    if environ.get(_SWITCH) == "off":
        return None
    place = _place(environ)
    kept = _kept(place)
    if kept is not None:
        return kept
    try:
        found = run_quickly()
        rates = HostRates.model_validate(found)
    except (OSError, RuntimeError, ValueError):
        return None
    write_cached(place, rates.model_dump_json(), _MOST_CACHED)
    return rates


def are_due(environ: Mapping[str, str]) -> bool:
    """Return whether `quick_rates` would measure them, which takes some seconds of a core."""
    return environ.get(_SWITCH) != "off" and _kept(_place(environ)) is None


def _place(environ: Mapping[str, str]) -> Path:
    return cache_folder("rates", environ) / f"{_key()}.json"


def _kept(place: Path) -> HostRates | None:
    """Return what was measured before; None the first time, or of another version."""
    try:
        return HostRates.model_validate_json(place.read_bytes())
    except (OSError, ValidationError):
        return None


def _key() -> str:
    """Return what is equal where the same code takes the same time."""
    bench = Path(__file__).parents[1] / "agent" / "bench.py"
    facts = [
        gethostname(),
        _kind_of_cores(),
        len(os.sched_getaffinity(0)),
        version("torch"),
        digest_of_file(bench),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _kind_of_cores() -> list[str]:
    """Return the name of the processor and its instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return []
    return re.findall(r"^(?:model name|flags|Features)\s*: (.*)$", text, re.MULTILINE)[:2]


if __name__ == "__main__":  # of a launcher, which does not wait for it
    processes.die_with_parent(signal.SIGKILL)
    quick_rates(os.environ)
