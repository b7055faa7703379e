"""`zrun train` estimates a job before it runs it, refuses what cannot fit, and compares afterwards.

An estimate needs torch and a trace of the model, some seconds of work, and a launch has none to spare. So:

- a forecast of the same job on the same hosts is kept from the last estimate, and read in milliseconds;
- else a process makes one, for the comparison and for the next launch: with a tenth of a core, once the first step has
  ended. Where there are cores to spare it begins beside the launch; if it says no before the first step has ended, the
  run ends there;
- a rank adds up its own states before it allocates them (`RunSpec.memory_bytes`), and refuses what cannot fit;
- after that, and after two first steps for which there was no memory, an estimate says what would help.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from zrun.estimate.forecast import Forecast, ForecastRequest, Making, Pace, key_of, stored
from zrun.estimate.machine import capacity_of
from zrun_core.errors import PreflightError
from zrun_core.spine.events import Event

if TYPE_CHECKING:
    from zrun.hosts.cluster import Cluster
    from zrun.job.load import LoadedJob
    from zrun.placement.plan import ResolvedJob

SWITCH = "ZRUN_ESTIMATE"  # environment variable: "off" makes no estimate beside a run
_PATIENCE_S = 150.0  # for a reason to refuse, which is wanted more than a start
_PATIENCE_AT_END_S = (
    10.0  # for what would have fitted, after a run that had no memory: it has said why it ends
)
_CORES_PER_RANK = 2  # that a launch keeps busy: imports, building, a rank's threads
_COMPARED_AT = 3  # step
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
)
_WARM_STEPS = 2  # not counted in times: the second one's memory is measured


class Gate:
    """The forecast of one launch, from the question whether it fits to the comparison at its end.

    Attributes:
        forecast: None: nobody knows yet.
        memory_bytes: that a rank may have; it refuses by itself what takes more. None: it refuses nothing.
        may_refuse: what does not fit is not to be started.
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
        """Look for a forecast.

        Args:
            environment: of the workers, whose code is to be traced.
            force: what does not fit is started all the same.
            is_restart: the run has shown already that it fits.
        """
        self.may_refuse = not (force or is_restart)
        self._environment = environment
        self._makes_own = os.environ.get(SWITCH) != "off"
        here = len(resolved.plan.ranks_on(resolved.plan.hosts[0]))
        self._has_spare_cores = cluster.hosts[0].cores >= _CORES_PER_RANK * here + _CORES_PER_RANK
        self.memory_bytes: int | None = None
        if self.may_refuse:
            per_host = max(len(resolved.plan.ranks_on(host)) for host in resolved.plan.hosts)
            device = "cpu" if resolved.job.device == "cpu" else "cuda"
            self.memory_bytes = capacity_of(cluster, device, per_host, resolved.job.limits.memory)
        job_dir = loaded.path.absolute().parent
        self._request = ForecastRequest(
            job=loaded.config.model_dump(mode="json", by_alias=True, exclude_unset=True),
            path=str(loaded.path.absolute()),
            overrides=tuple(
                origin.text for origin in loaded.origins.values() if origin.kind == "override"
            ),
            hosts=[host.to_json() for host in cluster.hosts],
            key=key_of(loaded.config, job_dir, cluster),
        )
        self.forecast = stored(self._request.key)
        self._making: Making | None = None
        self._peaks: dict[int, tuple[int, int | None]] = {}
        self._process = 0  # the most bytes that a rank's process has taken so far
        self._times: list[float] = []
        self._step = 0
        self._is_told = False

    def __enter__(self) -> Self:
        """Refuse what is known not to fit; begin to find out what is not known.

        Raises:
            PreflightError: it cannot fit.
        """
        if self.forecast is not None and not self.forecast.fits and self.may_refuse:
            # What a host has free changes: the answer that counts is today's.
            self.forecast = (
                Making(self._request, self._environment, Pace.NOW).wait(_PATIENCE_S)
                or self.forecast
            )
            self._refuse(self.forecast)
        if self.forecast is None and self._has_spare_cores and self._makes_own:
            self._making = Making(self._request, self._environment, Pace.IDLE)
        return self

    def __exit__(self, *error: object) -> None:
        if self._making is not None:
            self._making.close()
            self._making = None

    def turn(self, emit: Callable[[Event], None]) -> None:
        """Time has passed.

        Raises:
            PreflightError: it has turned out before the first step that the job cannot fit.
        """
        if self._making is not None and self._making.poll():
            self.forecast = self._making.forecast
            self._making.close()
            self._making = None
            if self.forecast is not None and not self._step and self.may_refuse:
                self._refuse(self.forecast)
            self._tell(emit)

    def see(self, event: Event, emit: Callable[[Event], None]) -> None:
        """Take in what a run tells; `emit` gets the comparison when it is due."""
        match event.get("type"):
            case "peak":
                self._peaks[event["rank"]] = (
                    event.get("peak_bytes") or 0,
                    event.get("reserved_bytes"),
                )
                self._see_process(event)
                self._tell(emit)
            case "memory":
                self._see_process(event)
            case "step":
                if (
                    not self._step and self.forecast is None and self._makes_own
                ):  # the launch is over
                    self.__exit__()
                    self._making = Making(self._request, self._environment, Pace.ASIDE)
                self._step = event["step"]
                self._times.append(float(event.get("step_s") or 0.0))
                self._tell(emit)
            case "end":
                self._is_told = False
                self._tell(emit)

    def _see_process(self, event: Event) -> None:
        self._process = max(self._process, event.get("process_bytes") or 0)

    def explanation(self, *, is_refused: bool) -> Forecast | None:
        """Why it does not fit: worth some seconds of waiting.

        Args:
            is_refused: a rank said before the first step that it does not; else it has had no memory.
        """
        if self.forecast is None or self.forecast.fits:
            self.__exit__()
            patience_s = _PATIENCE_S if is_refused else _PATIENCE_AT_END_S
            self.forecast = Making(self._request, self._environment, Pace.NOW).wait(patience_s)
        return self.forecast if self.forecast is not None and not self.forecast.fits else None

    def _refuse(self, forecast: Forecast) -> None:
        if not forecast.fits:
            raise PreflightError(refusal(forecast))

    def _tell(self, emit: Callable[[Event], None]) -> None:
        """Compare, once there is something to compare and nobody was told yet."""
        forecast = self.forecast
        if forecast is None or self._is_told or len(self._times) < _COMPARED_AT or not self._peaks:
            return
        self._is_told = True
        peak = max(value for value, _ in self._peaks.values())
        reserved = max((value or 0 for _, value in self._peaks.values()), default=0)
        values = asdict(forecast)
        predicted: dict[str, Any] = {name: values[name] for name in _PREDICTED}
        emit(
            {
                "type": "estimate",
                "time": time.time(),
                "rank": 0,
                "step": self._step,
                "predicted": predicted,
                "measured": {
                    "peak_bytes": peak or None,
                    "reserved_bytes": reserved or None,
                    "process_bytes": self._process or None,
                    "step_s": statistics.median(self._times[_WARM_STEPS:]),
                },
            }
        )


def refusal(forecast: Forecast) -> str:
    """The message of a job that does not fit: why, the keys that would help, and how to try anyway."""
    lines = [f"this job does not fit: {forecast.sentence}"]
    if forecast.patch:
        lines += [
            "with these keys it fits:",
            *(f"  {line}" for line in forecast.patch.splitlines()),
        ]
        lines.append(f"on the command line: {' '.join(forecast.changes)}")
    lines.append("--force starts it all the same; zrun estimate shows where each byte goes")
    return "\n".join(lines)
