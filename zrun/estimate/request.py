"""A request for an estimate, as the command line has it, and the question that it asks."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING

from zrun_core.errors import JobError

if TYPE_CHECKING:
    from zrun.estimate.question import Question
    from zrun.hosts.backend import HostOptions
    from zrun.hosts.cluster import Cluster
    from zrun.job.load import LoadedJob
    from zrun_core.hardware.hardware import Hardware
    from zrun_core.plan.answer.search import SearchGoal

_USUAL_GPU = "A100-80G"  # of --world and a size alone


@dataclass(frozen=True)
class EstimateRequest:
    """The arguments and options of `zrun estimate`, each under the name of its option.

    Attributes:
        what: a job file, a size such as 7.5B, or a config.json.
        overrides: keys that replace those of the job, those of short options included.
        host_options: which hosts.
        everything: show all that a search has found.
        headroom: as a share of the memory.
        patience_s: seconds that the job's model and data may take.
    """

    what: str
    overrides: tuple[str, ...]
    host_options: HostOptions
    gpu: str | None
    simulate: str | None
    world: int | None
    seq: int | None
    fit: bool
    best: bool
    headroom: float | None
    sweep: str | None
    measure: bool
    explain: str | None
    at_peak: bool
    tokens: str | None
    price: float | None
    emit: str | None
    write: Path | None
    html: Path | None
    everything: bool
    as_json: bool
    patience_s: float

    @property
    def goal(self) -> SearchGoal | None:
        """The aim of a search, if there is to be one."""
        if self.fit:
            return "fit"
        return "best" if self.best else None

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            JobError: some do.
        """
        if self.emit not in (None, "patch"):
            raise JobError(f"--emit {self.emit}: write --emit patch")
        if self.fit and self.best:
            raise JobError("--fit and --best ask for different things: leave one out")
        if self.headroom is not None and self.goal is None:
            raise JobError("--headroom is for a search: add --best or --fit")
        if self.gpu is not None and self.simulate is not None:
            raise JobError("--gpu and --simulate both name the hardware: leave one out")
        named = {"--gpu": self.gpu, "--simulate": self.simulate}
        for option, value in named.items():
            about_hosts = self.host_options.as_arguments()
            if value is not None and about_hosts:
                raise JobError(
                    f"{option} {value} names the hardware: leave out {about_hosts[0]}, which "
                    "selects real hosts"
                )
        self._check_at_peak()
        if not self.measure:
            return
        for option, value in named.items():
            if value is not None:
                raise JobError(f"--measure runs the job on real hosts: leave out {option}")
        if self.sweep is not None:
            raise JobError("--measure runs one job, and --sweep asks for several: leave one out")

    def _check_at_peak(self) -> None:
        others = {
            "--explain": self.explain is not None,
            "--json": self.as_json,
            "--emit": self.emit is not None,
        }
        for option, is_asked in others.items():
            if self.at_peak and is_asked:
                raise JobError(f"--at-peak and {option} ask for different answers: leave one out")


class QuestionMaker:
    """Asks the question of a request, and asks it again with other keys.

    Attributes:
        overrides: of the job.
        cluster: the hosts that were found, if no option names the hardware.
    """

    def __init__(self, request: EstimateRequest) -> None:
        """
        Raises:
            JobError: the options do not go with what is to be estimated.
        """
        from zrun.estimate.question import names_model_only

        self.request = request
        self.overrides = list(request.overrides)
        self.cluster: Cluster | None = None
        self._is_model = names_model_only(request.what)
        if request.seq is not None and not self._is_model:
            raise JobError(
                "--seq: a job says how long its samples are, in the arguments of its model and data"
            )
        if request.measure and self._is_model:
            raise JobError("--measure runs a job, and there is none: name a job file")
        gpu = request.gpu
        if self._is_model and request.world is not None and request.simulate is None:
            gpu = gpu or _USUAL_GPU
        self._hardware = _named_hardware(gpu, request.simulate, request.world, request.price)
        if self._hardware is None and request.world is not None:
            self.overrides.append(f"slots={request.world}")

    def ask(self, *more: str) -> tuple[Question, LoadedJob | None]:
        """Return the question, and its job if it has one.

        Args:
            more: keys that replace those of the request.
        """
        from zrun.estimate.machine import hardware_of
        from zrun.estimate.question import of_job, of_job_on, of_model

        request = self.request
        overrides = [*self.overrides, *more]
        if self._is_model:
            hardware = self._hardware
            if hardware is None:
                cluster = _find_cluster(None, request.host_options)
                gpus = len(cluster.hosts[0].gpus)
                hardware = hardware_of(cluster, "cuda" if gpus else "cpu", max(1, gpus))
            return of_model(
                request.what,
                hardware,
                overrides,
                request.seq,
                patience_s=request.patience_s,
            ), None
        from zrun.job.load import load_job

        loaded = load_job(Path(request.what), overrides)
        if self._hardware is not None:
            return of_job_on(loaded, self._hardware, request.patience_s), loaded
        self.cluster = _find_cluster(loaded, request.host_options)
        return of_job(loaded, self.cluster, patience_s=request.patience_s), loaded


def _named_hardware(
    gpu: str | None, simulate: str | None, world: int | None, price: float | None
) -> Hardware | None:
    from zrun_core.hardware.simulated import parse_simulate

    if simulate is not None:
        if world is not None:
            raise JobError("--world: --simulate says how many devices there are")
        return parse_simulate(simulate, price=price)
    if gpu is None:
        return None
    gpu = gpu.strip().replace(" ", "-")
    if re.match(r"\d+x", gpu.lower()):
        raise JobError(f"--gpu {gpu}: one device by its name; --simulate takes hosts and devices")
    return parse_simulate(f"{world or 1}x{gpu}", price=price)


def _find_cluster(loaded: LoadedJob | None, options: HostOptions) -> Cluster:
    """Return the hosts of a job. Only this one is looked at: others are taken to be like it."""
    from zrun.hosts.backend import find_backend
    from zrun.hosts.cluster import Cluster, probe_host
    from zrun.placement.gpus import check_gpus

    here = probe_host()
    if loaded is None:
        return Cluster((here,))
    backend = find_backend(
        loaded.config, options, os.environ, loaded.path.absolute().parent, gethostname()
    )
    cluster = Cluster((backend.on_this_host(here),))
    if backend.kind != "local" and backend.hosts:
        hosts = [here.called(str(entry), entry.slots, entry.chosen) for entry in backend.hosts]
        cluster = Cluster(tuple(hosts))
    check_gpus(backend.gpus, loaded.config, cluster)
    return cluster
