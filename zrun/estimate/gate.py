"""`zrun train` refuses a job that is known not to fit, and compares each run with its forecast.

A forecast needs torch and a trace of the model, some seconds of work, and a launch has none to
spare. So no launch waits for one (but for the number that `offload.fraction: auto` stands for, see
`auto_share.py`), and memory is looked after in three places, each at its time:

1. Here, before anything starts: the forecast that an earlier estimate of the same job on the same
   hosts has stored is read in milliseconds, and what does not fit is refused.
2. In each rank, before it allocates anything: it adds up its states and refuses what exceeds
   `RunSpec.memory_bytes`.
3. In each host's agent, while the ranks train: it ends them before the kernel chooses whom to kill.

After 2 and 3 a forecast is made at once, since it says which keys would help. Where none is stored,
one is made beside the run, after the first step, to be compared with what was measured.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from zrun.estimate.forecast import Forecast, stored
from zrun.estimate.forecast_process import ForecastProcess, ForecastRequest, Pace
from zrun.estimate.history import earlier_runs, forecast_with_history, kind_of, remember
from zrun.estimate.machine import capacity_of
from zrun.estimate.quick_rates import are_due
from zrun_core.errors import PreflightError
from zrun_core.spine import memory_limits
from zrun_core.spine.events import Event

if TYPE_CHECKING:
    from zrun.hosts.cluster import Cluster
    from zrun.job.load import LoadedJob
    from zrun.placement.plan import ResolvedJob

SWITCH = "ZRUN_ESTIMATE"  # environment variable: "off" makes no estimate beside a run
REFUSED_PATIENCE_S = 150.0  # for the reason of a refusal, which is wanted more than a start
_FAILED_PATIENCE_S = 10.0  # after a run that ran out of memory, which has said why it ends
# Of free memory: a forecast in the making takes 400 MiB, and a run grows after its first step.
_ROOM_BESIDE = 1 << 30
_COMPARED_AT = 3  # step
_WARM_STEPS = 2  # left out of times: the second one's memory is measured
_PREDICTED = (
    "source",
    "peak_bytes",
    "reserved_bytes",
    "device_bytes",
    "step_s",
    "low_s",
    "high_s",
    "calibrated",
    "is_bound",
    "runs",
    "sent",
    "stages_sent",
)
_TIMED_STEPS = 8  # of a run that says something of the next one
_BUSY = 1.5  # times as many processes that want a core as there are cores


class Gate:
    """The forecast of one launch: may it start, and was it right?

    Use as a context: entering refuses, leaving ends the process that makes a forecast.

    Attributes:
        forecast: of this job on these hosts; None while there is none.
        memory_bytes: what a rank may take; it refuses a model whose states take more. None: any.
        may_refuse: a job that does not fit is not started.
    """

    def __init__(
        self,
        loaded: LoadedJob,
        resolved: ResolvedJob,
        cluster: Cluster,
        environment: Mapping[str, str],
        *,
        force: bool,
        is_restart: bool,
    ) -> None:
        """Look for a stored forecast.

        Args:
            resolved: the job with each `auto` resolved, and the ranks' places.
            environment: of the workers, whose code a forecast traces.
            force: start even a job that does not fit.
            is_restart: the run has trained before, so it fits.
        """
        self.may_refuse = not (force or is_restart)
        self.memory_bytes: int | None = None
        if self.may_refuse:
            per_host = max(len(resolved.plan.ranks_on(host)) for host in resolved.plan.hosts)
            device = "cpu" if resolved.job.device == "cpu" else "cuda"
            self.memory_bytes = capacity_of(cluster, device, per_host, resolved.job.limits.memory)
        self._environment = environment
        self._request = ForecastRequest.of(loaded, cluster)
        self.forecast = stored(self._request.key)
        self._on_cpu = resolved.job.device == "cpu"
        self._process: ForecastProcess | None = None  # makes a forecast beside the run
        self._is_due = False  # such a process, once the rates are measured
        self._rates: subprocess.Popen[bytes] | None = None  # measures those of this host's cores
        self._kind = kind_of(loaded.config, loaded.path.absolute().parent, cluster)
        self._history = earlier_runs(self._kind)  # as it was before this run
        self._measured = _Measured()
        self._is_compared = False

    def __enter__(self) -> Self:
        """Refuse a job that is known not to fit.

        Raises:
            PreflightError: why, and what would fit.
        """
        known_not_to_fit = self.forecast is not None and not self.forecast.fits
        if known_not_to_fit and self.may_refuse:
            # What a host has free changes: the answer that counts is today's.
            self.forecast = self._make_now(REFUSED_PATIENCE_S) or self.forecast
            assert self.forecast is not None
            if not self.forecast.fits:
                raise PreflightError(refusal(self.forecast))
        if self.forecast is None and self._on_cpu and os.environ.get(SWITCH) != "off":
            self._measure_cores()
        return self

    def __exit__(self, *error: object) -> None:
        self._close_process()
        if self._rates is not None:
            self._rates.kill()
            self._rates.wait()

    def turn(self, emit: Callable[[Event], None]) -> None:
        """Take the forecast that was made beside the run, once it is there."""
        self._begin_if_due()
        if self._process is not None and self._process.poll():
            self.forecast = self._process.forecast
            self._close_process()
            self._compare(emit)

    def see(self, event: Event, emit: Callable[[Event], None]) -> None:
        """Note what an event of the run says of its memory and time.

        Args:
            emit: gets the comparison with the forecast when it is due.
        """
        kind = event.get("type")
        self._measured.add(event)
        if kind == "step" and self._measured.num_steps == 1:
            self._make_beside_the_run()
        if kind == "end":
            self._is_compared = False  # once more, with the figures of the whole run
            self._remember()
        if kind in ("peak", "step", "end"):
            self._compare(emit)

    def explanation(self, *, is_refused: bool) -> Forecast | None:
        """Return a forecast that says why the job does not fit; None if it says that it does.

        Args:
            is_refused: a rank refused before the first step; else memory ran out in one.
        """
        if self.forecast is None or self.forecast.fits:
            self._close_process()
            patience_s = REFUSED_PATIENCE_S if is_refused else _FAILED_PATIENCE_S
            self.forecast = self._make_now(patience_s)
        if self.forecast is None or self.forecast.fits:
            return None
        return self.forecast

    def _make_now(self, timeout_s: float) -> Forecast | None:
        return ForecastProcess(self._request, self._environment, Pace.NOW).wait(timeout_s)

    def _make_beside_the_run(self) -> None:
        if self.forecast is not None or os.environ.get(SWITCH) == "off":
            return
        self._is_due = memory_limits.host_available() >= _ROOM_BESIDE
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        """Begin a forecast beside the run, once nothing measures the cores any more."""
        if self._is_due and (self._rates is None or self._rates.poll() is not None):
            self._is_due = False
            self._process = ForecastProcess(self._request, self._environment, Pace.BESIDE)

    def _measure_cores(self) -> None:
        """Measure the rates of this host's cores, the first time, while ranks import and build.

        Beside a run that keeps all cores busy it would take a minute or two.
        """
        if memory_limits.host_available() >= _ROOM_BESIDE and are_due(os.environ):
            self._rates = subprocess.Popen(
                [sys.executable, "-P", "-m", "zrun.estimate.quick_rates"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def _close_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _compare(self, emit: Callable[[Event], None]) -> None:
        """Emit forecast and measurements, once both are there."""
        if self.forecast is None or self._is_compared or not self._measured.is_complete:
            return
        self._is_compared = True
        forecast = asdict(self._scaled(self.forecast))
        emit(
            {
                "type": "estimate",
                "time": time.time(),
                "rank": 0,
                "step": self._measured.step,
                "predicted": {name: forecast[name] for name in _PREDICTED},
                "measured": self._measured.to_json(),
            }
        )

    def _scaled(self, forecast: Forecast) -> Forecast:
        """Return a forecast as the job's earlier runs correct it."""
        if self._history is None:
            return forecast
        return forecast_with_history(forecast, self._history)

    def _remember(self) -> None:
        """Keep how long steps took beside the forecast, unless others kept the cores busy."""
        forecast = self.forecast
        if forecast is None or forecast.source == "states alone":
            return
        if self._measured.num_steps < _WARM_STEPS + _TIMED_STEPS or _is_busy():
            return
        remember(self._kind, self._measured.step_s / forecast.step_s)


def _is_busy() -> bool:
    """Return whether more processes want this host's cores than it has."""
    try:
        waiting = os.getloadavg()[0]
    except OSError:
        return False
    return waiting > _BUSY * (os.cpu_count() or 1)


class _Measured:
    """Memory of the fullest rank and time, from the events of a run."""

    def __init__(self) -> None:
        self.step = 0  # the last one
        self._times_s: list[float] = []
        self._peaks: dict[int, int] = {}  # bytes in tensors, by rank
        self._reserved = 0
        self._process = 0

    def add(self, event: Event) -> None:
        match event.get("type"):
            case "peak":
                self._peaks[event["rank"]] = event.get("peak_bytes") or 0
                self._reserved = max(self._reserved, event.get("reserved_bytes") or 0)
                self._process = max(self._process, event.get("process_bytes") or 0)
            case "memory":
                self._process = max(self._process, event.get("process_bytes") or 0)
            case "step":
                self.step = event["step"]
                self._times_s.append(float(event.get("step_s") or 0.0))

    @property
    def num_steps(self) -> int:
        return len(self._times_s)

    @property
    def is_complete(self) -> bool:
        return self.num_steps >= _COMPARED_AT and bool(self._peaks)

    @property
    def step_s(self) -> float:
        """The median of the steps that are timed."""
        return statistics.median(self._times_s[_WARM_STEPS:])

    def to_json(self) -> dict[str, Any]:
        return {
            "peak_bytes": max(self._peaks.values()) or None,
            "reserved_bytes": self._reserved or None,
            "process_bytes": self._process or None,
            "step_s": self.step_s,
        }


def refusal(forecast: Forecast) -> str:
    """Return the message for a job that does not fit: why, the keys that would help, --force."""
    lines = [f"this job does not fit: {forecast.sentence}"]
    if forecast.patch:
        lines.append("with these keys it fits:")
        lines += [f"  {line}" for line in forecast.patch.splitlines()]
        lines.append(f"on the command line: {' '.join(forecast.changes)}")
    lines.append("--force starts it anyway; zrun estimate shows where each byte goes")
    return "\n".join(lines)
