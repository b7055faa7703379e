"""The forecast of a run in plain numbers, which a launcher reads without torch.

    forecast = stored(key_of(job, job_dir, cluster))    # of an earlier estimate

`forecast_process.py` makes one where none is stored.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from pydantic import TypeAdapter, ValidationError

from zrun_core.spine.cache import cache_folder, write_cached

if TYPE_CHECKING:
    from pathlib import Path

    from zrun.hosts.cluster import Cluster
    from zrun_core.spine.config import JobConfig

PATIENCE_S = 60.0  # for a job's model and data while they are looked at
_KEPT = 200  # forecasts in the cache
# Keys of a job that change no byte and no second of a step.
UNRELATED = (
    "name",
    "steps",
    "tokens",
    "epochs",
    "lr",
    "resume",
    "restarts",
    "min_hosts",
    "init_from",
    "log",
    "checkpoint",
    "guards",
    "limits",
    "launch",
)


@dataclass(frozen=True)
class Forecast:
    """An estimate of a job, of its fullest rank.

    Attributes:
        source: where activations come from: "traced", "measured on the CPU", or "states
            alone" where nobody knows them.
        peak_bytes: of tensors.
        reserved_bytes: by the allocator.
        device_bytes: with the driver and libraries; the whole process on a CPU.
        capacity: of the device, or a rank's share of its host's memory, when it was made.
        step_s, low_s, high_s: of a step, and between which bounds.
        calibrated: the rates of these very hosts were measured.
        is_bound: samples differ in size, and these are bytes and seconds of the longest.
        sentence: why it does not fit; "" if it does.
        changes: keys with which it would fit; empty if none are known.
        patch: the same as a part of a job file.
        fraction: share of the states that leave the device, by `offload.fraction: auto` the least
            that fits; None: of an earlier zrun.
        units_away, units: of the model: those whose states leave, and all.
        runs: earlier ones of this kind, by which the times are scaled.
        activation_bytes: of `peak_bytes`, with temporaries; None: of an earlier zrun.
        sent: bytes that a rank of the first stage sends in a step, to ranks with slices of the same
            layers (`tensor`) and to other stages (`pipe`), by collective or by what is sent.
        stages_sent: bytes that a rank of each stage of a pipeline sends to others for a
            micro-batch, by what is sent.
    """

    source: str
    peak_bytes: int
    reserved_bytes: int
    device_bytes: int
    capacity: int
    step_s: float
    low_s: float
    high_s: float
    calibrated: bool
    sentence: str = ""
    changes: tuple[str, ...] = ()
    patch: str = ""
    is_bound: bool = False
    fraction: float | None = None
    units_away: int = 0
    units: int = 0
    runs: int = 0
    activation_bytes: int | None = None
    sent: dict[str, dict[str, int]] = field(default_factory=dict)
    stages_sent: tuple[dict[str, int], ...] = ()

    @property
    def fits(self) -> bool:
        return not self.sentence

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self | None:
        """Read what `to_json` gave as text; None if it is something else."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError:
            return None


def key_of(job: JobConfig, job_dir: Path, cluster: Cluster) -> str:
    """Return a digest that is equal for jobs that are estimated alike.

    It covers the job's keys, its code, the hosts, their measured rates, zrun and torch.

    Args:
        job: with all overrides applied.
        job_dir: folder of the job file; data and code that are no Python files lie relative to it.
    """
    from zrun.hosts.probe import job_code, own_code, version_of
    from zrun.preflight.calibration import Calibration

    path = Calibration.default_path(os.environ)
    rates = path.read_bytes() if path.is_file() else b""
    hosts = [
        (
            host.cores,
            host.memory_bytes,
            host.slots,
            host.chosen,
            [(gpu.name, gpu.memory_bytes) for gpu in host.gpus],
        )
        for host in cluster.hosts
    ]
    facts = {
        "job": job.model_dump(mode="json", by_alias=True, exclude=set(UNRELATED)),
        "memory": job.limits.memory,
        "code": job_code(job_dir),
        "folder": str(job_dir),
        "hosts": hosts,
        "rates": hashlib.sha256(rates).hexdigest(),
        "zrun": own_code(),
        "torch": version_of("torch"),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def stored(key: str) -> Forecast | None:
    """Return the forecast of an earlier estimate; None if there is none that can be read."""
    with suppress(OSError):
        return Forecast.from_json((cache_folder("forecasts") / f"{key}.json").read_bytes())
    return None


def store(key: str, forecast: Forecast) -> None:
    """Keep a forecast for the next launch. Where nothing can be written, nothing is kept."""
    write_cached(
        cache_folder("forecasts") / f"{key}.json", json.dumps(forecast.to_json()) + "\n", _KEPT
    )
