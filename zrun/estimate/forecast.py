"""What is foretold of a run, in plain numbers: a launcher reads them without torch.

forecast = stored(key)                       # of an earlier estimate of the same job, code and hosts
making = Making(request)                     # or a process that makes one, and stores it
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import TypeAdapter, ValidationError

from zrun_core.spine.cache import cache_folder, write_cached

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zrun.hosts.cluster import Cluster
    from zrun_core.spine.config import JobConfig

PATIENCE_S = 60.0  # for a job's model and data while they are looked at
_LAST_WORDS_S = 3.0
_KEPT = 200  # forecasts in the cache
# Keys of a job that change no byte and no second of a step.
UNRELATED = (
    "name",
    "steps",
    "tokens",
    "epochs",
    "lr",
    "eval",
    "hooks",
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
        source: where activations come from: "traced", "measured on the CPU", "formula" or
            "guessed".
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

    @property
    def fits(self) -> bool:
        return not self.sentence

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self | None:
        """What `to_json` gave as text; None if it is something else."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError:
            return None


def key_of(job: JobConfig, job_dir: Path, cluster: Cluster) -> str:
    """What is equal for jobs that are estimated alike: their keys, their code, the hosts, and zrun."""
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
        "folder": str(job_dir),  # data and code outside of Python files lie relative to it
        "hosts": hosts,
        "rates": hashlib.sha256(rates).hexdigest(),
        "zrun": own_code(),
        "torch": version_of("torch"),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def stored(key: str) -> Forecast | None:
    """The forecast of an earlier estimate."""
    with suppress(OSError):
        return Forecast.from_json((cache_folder("forecasts") / f"{key}.json").read_bytes())
    return None


def store(key: str, forecast: Forecast) -> None:
    """Keep a forecast for the next launch. Where nothing can be written, nothing is kept."""
    write_cached(
        cache_folder("forecasts") / f"{key}.json", json.dumps(forecast.to_json()) + "\n", _KEPT
    )


@dataclass(frozen=True)
class ForecastRequest:
    """All that a process needs to make a forecast."""

    job: dict[str, Any]  # a JobConfig without defaults
    path: str  # of its file
    overrides: tuple[str, ...]
    hosts: list[dict[str, Any]]  # `HostFacts`
    key: str


class Pace(StrEnum):
    """How much of the cores a process takes from others."""

    NOW = "now"
    ASIDE = "aside"  # a tenth of one, where all are busy
    IDLE = "idle"  # none: it runs while nobody else wants them


class Making:
    """A process that makes a forecast while other things go on."""

    def __init__(
        self, request: ForecastRequest, environment: Mapping[str, str], pace: Pace
    ) -> None:
        """Start it."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "zrun.estimate.background", pace.value, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | dict(environment),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asdict(request)).encode())
            self._process.stdin.close()
        self.forecast: Forecast | None = None

    def poll(self) -> bool:
        """Whether it has ended; `forecast` is there then, unless it failed."""
        if self._process.poll() is None:
            return False
        self._read()
        return True

    def wait(self, timeout_s: float) -> Forecast | None:
        """The forecast, if it is made in this time."""
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
                self._read()
        finally:
            self.close()
        return self.forecast

    def close(self) -> None:
        """End it; it ends what it has started."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_WORDS_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        if self.forecast is None and not self._process.stdout.closed:
            self.forecast = Forecast.from_json(
                self._process.stdout.read()
            )  # a few hundred bytes: they fit a pipe
