"""`offload.fraction: auto`: the least share of a model's states whose absence makes it fit.

Only an estimate knows it, which traces the model. So this is the one key for which a launch waits
for a forecast, some seconds, unless an earlier one is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from zrun.estimate.forecast import Forecast, stored
from zrun.estimate.forecast_process import ForecastProcess, ForecastRequest, Pace
from zrun.estimate.gate import REFUSED_PATIENCE_S, refusal
from zrun.estimate.machine import capacity_of
from zrun_core.errors import PreflightError
from zrun_core.sizes import format_size
from zrun_core.spine.sections.auto_values import AutoValue

if TYPE_CHECKING:
    from zrun.hosts.cluster import Cluster
    from zrun.job.load import LoadedJob
    from zrun.placement.plan import ResolvedJob

KEY = "offload.fraction"


def is_open(resolved: ResolvedJob) -> bool:
    """Return whether a job leaves open how much of its states leaves the device."""
    return resolved.job.offload.fraction == "auto"


def with_least_share(
    loaded: LoadedJob,
    resolved: ResolvedJob,
    cluster: Cluster,
    environment: Mapping[str, str],
    *,
    force: bool,
) -> ResolvedJob:
    """Return the job with the least share with which it fits.

    Args:
        resolved: the job with every other `auto` resolved.
        environment: of the workers, whose code a forecast traces.
        force: start even a job that does not fit; then all of its states leave the device.

    Raises:
        PreflightError: no share makes it fit, or no estimate could be made.
    """
    forecast = _forecast(loaded, resolved, cluster, environment)
    if forecast is None or forecast.fraction is None:
        raise PreflightError(
            f"{KEY}: auto needs an estimate of the job, which failed (zrun estimate says why); "
            f"write a number from 0 to 1, such as {KEY}=1"
        )
    if not forecast.fits and not force:
        raise PreflightError(refusal(forecast))
    return _resolved(resolved, forecast.fraction, reason(forecast))


def with_share(resolved: ResolvedJob, fraction: float) -> ResolvedJob:
    """Return the job with the share of an earlier attempt of the same run."""
    return _resolved(resolved, fraction, "as the run began")


def reason(forecast: Forecast) -> str:
    """Return why the share of a forecast is what it is."""
    used = f"{format_size(forecast.device_bytes)} of {format_size(forecast.capacity)} used"
    if not forecast.fits:
        return f"no share fits: {used}"
    units = f"{forecast.units_away} of {forecast.units} units leave"
    return f"the least that fits: {units}, {used}"


def _resolved(resolved: ResolvedJob, fraction: float, why: str) -> ResolvedJob:
    job = resolved.job
    offload = job.offload.model_copy(update={"fraction": fraction})
    return replace(
        resolved,
        job=job.model_copy(update={"offload": offload}),
        reasons=(*resolved.reasons, AutoValue(KEY, f"{fraction:g}", why)),
    )


def _forecast(
    loaded: LoadedJob, resolved: ResolvedJob, cluster: Cluster, environment: Mapping[str, str]
) -> Forecast | None:
    """Return a forecast for as much memory as there is now."""
    request = ForecastRequest.of(loaded, cluster)
    known = stored(request.key)
    if known is not None and known.fits:
        per_host = max(len(resolved.plan.ranks_on(host)) for host in resolved.plan.hosts)
        device = "cpu" if resolved.job.device == "cpu" else "cuda"
        now = capacity_of(cluster, device, per_host, resolved.job.limits.memory)
        if known.capacity == now:
            return known
    return ForecastProcess(request, environment, Pace.NOW).wait(REFUSED_PATIENCE_S)
