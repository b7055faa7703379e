"""Which GPUs a job may use on its hosts, the device that follows, and what to do where none is."""

from __future__ import annotations

from typing import Literal

from zrun.hosts.cluster import Cluster, listed
from zrun_core.errors import JobError, PreflightError
from zrun_core.sizes import several
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.auto_values import AutoValue


def visible_gpus(job: JobConfig, cluster: Cluster) -> Cluster:
    """Return the hosts with those GPUs that the job's own environment leaves.

    Raises:
        PreflightError: a variable names GPUs that are not there.
    """
    environ = {name: value for name, value in job.env.items() if value is not None}
    limited = Cluster(tuple(host.limited(environ) for host in cluster.hosts))
    if job.device == "cpu":
        return limited
    for host in limited.hosts:
        if host.misnamed is not None:
            raise PreflightError(
                f"{host.hostname}: {host.misnamed}: correct it, unset it for all GPUs, or write "
                "device: cpu"
            )
    return limited


def resolve_device(
    job: JobConfig, cluster: Cluster
) -> tuple[Literal["cpu", "cuda"], tuple[AutoValue, ...]]:
    """Return what every rank trains on, and why where the job leaves it open.

    Raises:
        PreflightError: a host lacks the GPUs that the job asks for, or that others have.
    """
    without = hosts_without(cluster)
    some_have = len(without) < len(cluster.hosts)
    wants_gpus = job.device == "cuda" or (job.device == "auto" and some_have)
    if without and wants_gpus:
        advice = "write device: cpu or auto"
        if some_have:
            advice = "leave out the hosts without, or write device: cpu"
        elif cluster.hosts[0].hidden is not None:
            advice = "unset it, or write device: cpu"
        raise PreflightError(f"device: {job.device}, but {lacks_gpus(cluster, without)}: {advice}")
    if job.device != "auto":
        return job.device, ()
    device: Literal["cpu", "cuda"] = "cpu" if without else "cuda"
    return device, (AutoValue("device", device, str(cluster)),)


def hosts_without(cluster: Cluster) -> list[str]:
    """Return the names of the hosts that have no GPU to be used."""
    return [host.hostname for host in cluster.hosts if not host.gpus]


def lacks_gpus(cluster: Cluster, without: list[str]) -> str:
    """Say which hosts have no GPU, and why, as far as the first of them knows."""
    have = "has" if len(without) == 1 else "have"
    first = next(host for host in cluster.hosts if host.hostname == without[0])
    why = f" ({first.why_no_gpus})" if first.why_no_gpus else ""
    return f"{listed(without)} {have} no usable GPU{why}"


def check_gpus(asked: int | None, job: JobConfig, cluster: Cluster) -> None:
    """Refuse `--gpus` where ranks would train on CPUs.

    Args:
        asked: the value of `--gpus`; None: it was not given.

    Raises:
        JobError: the job wants no GPU.
        PreflightError: a host has none.
    """
    if asked is None:
        return
    if job.device == "cpu":
        raise JobError(
            f"--gpus {asked} asks for GPUs, and the job has device: cpu: write --slots {asked} for "
            f"{several(asked, 'rank')} on CPUs, or leave device out"
        )
    without = [host for host in cluster.hosts if not host.gpus]
    if without:
        names = listed([host.hostname for host in without])
        have = "has" if len(without) == 1 else "have"
        found = str(without[0])
        advice = f"write --slots {asked} for {several(asked, 'rank')} on CPUs"
        if without[0].hidden is not None:
            found += f"; {without[0].hidden}"
            advice = f"unset it, or {advice}"
        raise PreflightError(
            f"--gpus {asked} asks for GPUs, and {names} {have} none that is usable (found "
            f"{found}): {advice}"
        )
