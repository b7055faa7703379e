"""The hosts on which a job is to run, and how ranks are started there: `find_backend`.

It reads the files that are named and nothing else. `wanted_hosts` and `choose_backend` are its two
halves; the second is pure.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from zrun.hosts.cluster import HostFacts
from zrun.hosts.cluster_env import NONE, ClusterEnv, detect
from zrun.hosts.host_filter import HostOptions, filtered
from zrun.hosts.hostfile import HostEntry, parse_items, parse_option, read_hostfile
from zrun.job.nearest import nearest
from zrun_core.errors import JobError
from zrun_core.sizes import several
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.auto_values import AutoValue

__all__ = [
    "Backend",
    "HostEntry",
    "HostOptions",
    "choose_backend",
    "find_backend",
    "is_this_host",
    "wanted_hosts",
    "with_backend",
]

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MAX_SHOWN = 8


@dataclass(frozen=True)
class Backend:
    """A way to start ranks.

    Attributes:
        why: it was chosen, for messages.
        hosts: None: this machine, or those of the processes that another launcher started.
        gpus: of each host, that --gpus asks for.
    """

    kind: Literal["local", "ssh", "slurm", "env"]
    why: str
    hosts: tuple[HostEntry, ...] | None
    cluster_env: ClusterEnv
    gpus: int | None = None

    def on_this_host(self, facts: HostFacts) -> HostFacts:
        """Return the facts of this host, with the slots that it was given."""
        if self.kind != "local" or self.hosts is None:
            return facts
        return facts.called(facts.hostname, self.hosts[0].slots, self.hosts[0].chosen)

    def __str__(self) -> str:
        """Return such as `2 hosts, 16 slots, by ssh (hostfile names them)`."""
        if self.hosts is None:
            return f"{self.kind} ({self.why})"
        numbers = [each.num_slots for each in self.hosts]
        slots = ""
        if all(numbers):
            total = sum(number or 0 for number in numbers)
            slots = f"{several(total, 'slot')}, "
        return f"{several(len(self.hosts), 'host')}, {slots}by {self.kind} ({self.why})"


def find_backend(
    job: JobConfig, options: HostOptions, environ: Mapping[str, str], job_dir: Path, hostname: str
) -> Backend:
    """Return the hosts of a job, and how ranks are started on them.

    Raises:
        JobError: as for `wanted_hosts` and `choose_backend`.
    """
    hosts = wanted_hosts(job, options, environ, job_dir)
    backend = choose_backend(job, hosts, _cluster_env(job, environ), hostname)
    return replace(backend, gpus=options.gpus)


def _cluster_env(job: JobConfig, environ: Mapping[str, str]) -> ClusterEnv:
    """Return what the environment says; a job that asks for `local` does not look at it."""
    if job.launch.backend == "local":
        return NONE
    return detect(environ)


def wanted_hosts(
    job: JobConfig, options: HostOptions, environ: Mapping[str, str], job_dir: Path
) -> tuple[HostEntry, ...] | None:
    """Return the hosts that the command line names, or else the job, or else the environment.

    Args:
        job_dir: folder of the job file, from which the path in its `hosts` counts.

    Returns:
        The hosts; None: this machine only.

    Raises:
        JobError: a list of hosts is wrong, or the options ask for what is not in it.
    """
    options.check()
    entries = _listed(job, options, environ, job_dir)
    if entries is None and options.include is not None and _is_about_this_host(options.include):
        entries = (HostEntry("localhost", where="--include"),)
    if entries is not None:
        return filtered(entries, options)
    asked = None
    if options.include is not None:
        asked = "--include"
    elif options.exclude is not None:
        asked = "--exclude"
    elif options.nodes is not None and options.nodes > 1:
        asked = "--nodes"
    if asked is not None:
        raise JobError(
            f"{asked} picks from a list of hosts, and there is none: name them with --hosts FILE "
            "or -H; or slots of this host with --include localhost:0,1"
        )
    if options.gpus is not None:
        return filtered((HostEntry("localhost", where="--gpus"),), options)
    return None


def _listed(
    job: JobConfig, options: HostOptions, environ: Mapping[str, str], job_dir: Path
) -> tuple[HostEntry, ...] | None:
    if options.hosts is not None:
        return read_hostfile(options.hosts)
    if options.host_list is not None:
        return _from_option(options.host_list)
    if isinstance(job.hosts, str):
        return _from_path(job.hosts, job_dir)
    if job.hosts is not None:
        return parse_items(job.hosts, "hosts")
    cluster_env = _cluster_env(job, environ)
    entries = tuple(
        HostEntry(name, slots=cluster_env.slots, where=cluster_env.source)
        for name in cluster_env.names
    )
    return entries or None


def _from_option(text: str) -> tuple[HostEntry, ...]:
    if os.path.isfile(text):  # unlike `Path.is_file`, never an error
        raise JobError(f"-H takes names of hosts, and {text} is a file: write --hosts {text}")
    return parse_option(text, "-H")


def _from_path(text: str, job_dir: Path) -> tuple[HostEntry, ...]:
    try:
        path = job_dir / Path(text).expanduser()
        is_there = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # "~nobody", a zero byte
        raise JobError(f"hosts: {text[:60]!r} is not a path: {error}") from None
    if not is_there:
        hint = "write its path"
        if "/" not in text:
            hint = f"a list of names is written in brackets, as in hosts: [{text}]"
        raise JobError(f"hosts: there is no host file {path}; {hint}")
    return read_hostfile(path)


def _is_about_this_host(picks: str) -> bool:
    return all(item.partition(":")[0] == "localhost" for item in picks.split("@"))


def with_backend(job: JobConfig, backend: Backend) -> tuple[JobConfig, tuple[AutoValue, ...]]:
    """Return `job` with its `launch.backend` resolved, and the reason where it was left to auto."""
    launch = job.launch.model_copy(update={"backend": backend.kind})
    resolved = job.model_copy(update={"launch": launch})
    if job.launch.backend != "auto":
        return resolved, ()
    return resolved, (AutoValue("launch.backend", backend.kind, backend.why),)


def is_this_host(entry: HostEntry, hostname: str) -> bool:
    """Return whether `entry` plainly names the machine called `hostname`.

    Nothing is looked up.
    """
    names = {*_LOOPBACK, hostname.lower(), hostname.lower().partition(".")[0]}
    return entry.user is None and entry.port is None and entry.name.lower() in names


def choose_backend(
    job: JobConfig, hosts: tuple[HostEntry, ...] | None, cluster_env: ClusterEnv, hostname: str
) -> Backend:
    """Resolve `launch.backend`.

    Args:
        hosts: those that `wanted_hosts` found; None: this machine only.

    Raises:
        JobError: what the job asks for contradicts its hosts or the environment.
    """
    asked = job.launch.backend
    named = hosts is not None and not all(each.where == cluster_env.source for each in hosts)
    is_one_of_many = cluster_env.member is not None
    if is_one_of_many and (asked in ("ssh", "slurm") or (named and asked == "auto")):
        wants = "hosts are named" if named else f"launch.backend is {asked}"
        raise JobError(
            f"this process is one of several already ({cluster_env.evidence}), and {wants}: run "
            "zrun train once, not under another launcher; or name no hosts and write "
            "launch.backend: env"
        )
    if asked == "auto":
        return _automatic(hosts, named, cluster_env, hostname)
    why = "launch.backend"
    match asked:
        case "local":
            _check_local(hosts, hostname)
        case "ssh" if hosts is None:
            raise JobError(
                "launch.backend: ssh needs hosts: name them with --hosts FILE, -H or the key hosts"
            )
        case "slurm":
            _check_in_allocation(hosts, cluster_env)
        case "env":
            if not is_one_of_many:
                raise JobError(
                    "launch.backend: env joins the ranks of another launcher, and the environment "
                    "tells of none: RANK, WORLD_SIZE and LOCAL_RANK (torchrun), "
                    "OMPI_COMM_WORLD_RANK (mpirun), PET_NODE_RANK or SKYPILOT_NODE_RANK must be "
                    "set; or write launch.backend: auto"
                )
            why = cluster_env.evidence
    return Backend(asked, why, None if asked == "env" else hosts, cluster_env)


def _automatic(
    hosts: tuple[HostEntry, ...] | None, named: bool, cluster_env: ClusterEnv, hostname: str
) -> Backend:
    if cluster_env.member is not None:
        return Backend("env", cluster_env.evidence, None, cluster_env)
    if hosts is None:
        return Backend("local", "no other host is named", None, cluster_env)
    if len(hosts) == 1 and is_this_host(hosts[0], hostname):
        why = "no other host is named"
        if not hosts[0].where.startswith("--"):
            why = f"{hosts[0].where} names this host only"
        return Backend("local", why, hosts, cluster_env)
    if cluster_env.names and (not named or not _outside(hosts, cluster_env)):
        return Backend("slurm", cluster_env.evidence, hosts, cluster_env)
    source = hosts[0].where.partition(":")[0].partition("[")[0]
    return Backend(
        "ssh", f"{source} names {'them' if len(hosts) > 1 else 'it'}", hosts, cluster_env
    )


def _check_local(hosts: tuple[HostEntry, ...] | None, hostname: str) -> None:
    others = [each for each in hosts or () if not is_this_host(each, hostname)]
    if others:
        are = "is" if len(others) == 1 else "are"
        raise JobError(
            f"launch.backend: local starts ranks on {hostname} only, and {_names(others)} {are} "
            "named: write launch.backend: ssh, or name no hosts"
        )


def _check_in_allocation(hosts: tuple[HostEntry, ...] | None, cluster_env: ClusterEnv) -> None:
    if not cluster_env.names or hosts is None:
        raise JobError(
            "launch.backend: slurm needs an allocation of several hosts, and this is not one: "
            "ask for one first (salloc -N 2 ..., or sbatch), and see that SLURM_JOB_NODELIST is "
            "passed on"
        )
    outside = _outside(hosts, cluster_env)
    if outside:
        near = nearest(outside[0].name, cluster_env.names)
        hint = ""
        if near is not None and near != outside[0].name:
            hint = f"; did you mean {near}?"
        raise JobError(
            f"{_names(outside)}: not a name of this Slurm job's hosts ({cluster_env.source}), "
            f"which srun takes without user and port{hint}"
        )


def _outside(hosts: tuple[HostEntry, ...], cluster_env: ClusterEnv) -> list[HostEntry]:
    """Return those that `srun` cannot reach by this name."""
    found = []
    for host in hosts:
        has_login = host.user is not None or host.port is not None
        if has_login or host.name not in cluster_env.names:
            found.append(host)
    return found


def _names(hosts: list[HostEntry]) -> str:
    more = len(hosts) - _MAX_SHOWN
    return ", ".join(map(str, hosts[:_MAX_SHOWN])) + (f" and {more} more" if more > 0 else "")
