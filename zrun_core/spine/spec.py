"""The specification of a run as one JSON object: job, place of each rank, batch, run directory."""

from __future__ import annotations

import json
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from zrun_core.errors import JobError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import Coordinates, ParallelDims, resolve_shard_size
from zrun_core.spine.sections.data import BatchConfig
from zrun_core.spine.sections.section import Section
from zrun_core.spine.sections.zero import ZeroConfig


class RankPlace(Section):
    """One rank's host and device, and its place along each axis of parallelism.

    Attributes:
        device: "cpu" or "cuda:<index>".
        uuid: of its GPU: CUDA counts the GPUs of a host in the order of its ranks.
        threads: of its CPU work.
        cpus: that it keeps to, as Linux writes sets: "0-7,64-71"; None: not bound.
        numa: node of its GPU, or of its CPUs.
    """

    rank: int
    host: str
    local_rank: int
    device: str
    uuid: str | None = None
    pp: int = 0
    dp: int = 0
    tp: int = 0
    threads: PositiveInt = 1
    cpus: str | None = None
    numa: int | None = None

    @property
    def coordinates(self) -> Coordinates:
        return Coordinates(self.pp, self.dp, self.tp)


class LaunchPlan(Section):
    """The host and device of each rank. Ranks of a host are contiguous."""

    ranks: list[RankPlace]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def hosts(self) -> list[str]:
        """Return the hosts in rank order, each once."""
        return list(dict.fromkeys(place.host for place in self.ranks))

    def ranks_on(self, host: str) -> range:
        """Return the ranks of one host."""
        ranks = [place.rank for place in self.ranks if place.host == host]
        return range(ranks[0], ranks[-1] + 1)

    @cached_property
    def dims(self) -> ParallelDims:
        """Return the number of ranks along each axis."""
        places = [place.coordinates for place in self.ranks]
        return ParallelDims(
            dp=1 + max(place.dp for place in places),
            tp=1 + max(place.tp for place in places),
            pp=1 + max(place.pp for place in places),
        )

    def along_axes(self, rank: int) -> str:
        """Return the place of a rank along the axes in words, as in "pp 1 dp 0 tp 1".

        Axes with one rank are left out; nothing is returned where all ranks are data-parallel.
        """
        dims = self.dims
        if dims.model_ranks == 1:
            return ""
        place = self.ranks[rank]
        axes = {"pp": (place.pp, dims.pp), "dp": (place.dp, dims.dp), "tp": (place.tp, dims.tp)}
        return " ".join(f"{axis} {index}" for axis, (index, size) in axes.items() if size > 1)

    def place_in_words(self, rank: int) -> str:
        """Return the host and device of a rank, and its place along the axes."""
        place = self.ranks[rank]
        return ", ".join(filter(None, (place.host, place.device, self.along_axes(rank))))

    def named(self, rank: int) -> str:
        """Return the number of a rank, and where it is: "5 (node2, cuda:1, pp 1 tp 0)"."""
        return f"{rank} ({self.place_in_words(rank)})"

    def shard_size(self, zero: ZeroConfig) -> int:
        """Return the size of the shard group.

        Raises:
            JobError: these are the ranks of a host, and hosts have different numbers of them.
        """
        on_hosts = Counter((place.host, place.pp, place.tp) for place in self.ranks).values()
        fewest = min(on_hosts)
        most = max(on_hosts)
        if zero.stage > 0 and zero.shard_group == "node" and fewest < most:
            raise JobError(
                f"zero.shard_group: node, but some hosts have {fewest} data-parallel ranks and "
                f"others {most}: write a number that divides {self.dims.dp}, or all"
            )
        return resolve_shard_size(zero, self.dims.dp, most)


class BatchPlan(Section):
    """The batch identity: global = micro * accumulation * data-parallel ranks."""

    global_size: PositiveInt
    micro: PositiveInt
    accumulation: PositiveInt
    ranks: PositiveInt

    @classmethod
    def of(cls, batch: BatchConfig, ranks: int) -> BatchPlan:
        """Return the plan of a batch that is resolved for this many data-parallel ranks."""
        assert batch.global_ != "auto"
        assert batch.micro != "auto"
        return cls(
            global_size=batch.global_,
            micro=batch.micro,
            accumulation=batch.global_ // (batch.micro * ranks),
            ranks=ranks,
        )

    def num_steps(self, samples: int) -> int:
        """Return the optimizer steps that so many samples make; the last one may be short."""
        return max(0, -(-samples // self.global_size))

    def __str__(self) -> str:
        ranks = "data-parallel ranks" if self.ranks > 1 else "data-parallel rank"
        return (
            f"global {self.global_size} = micro {self.micro} x accumulation {self.accumulation} "
            f"x {self.ranks} {ranks}"
        )


class ResumeSpec(Section):
    """The checkpoint from which a run goes on.

    Attributes:
        folder: of checkpoints.
        step: this one and no other; None: the newest valid one.
    """

    folder: str
    step: int | None = None


class ScriptSpec(Section):
    """A script of the user's own, which ranks run in place of the loop of a job.

    Attributes:
        name: path of its file, or the name of a module.
        is_module: `name` is that of a module, as of `python -m`.
        args: of the script.
        folder: in which it runs, on every host.
        master: address and port at which its ranks meet, as torchrun's MASTER_ADDR, MASTER_PORT.
    """

    name: str
    is_module: bool = False
    args: list[str]
    folder: str
    master: tuple[str, int] = ("127.0.0.1", 0)


class RunSpec(Section):
    """The one object that a launcher hands to a worker.

    Attributes:
        job: for a script only what of it says how ranks are started.
        job_dir: folder of the job file: first on the workers' sys.path.
        checkpoints: resolved folder; None in specs of earlier versions.
        resume: None: from the beginning.
        memory_bytes: that each rank may have where its model lives; None: it finds out.
        telemetry: unix datagram socket of this host's agent; None: nobody listens.
        script: that ranks run; None: they train the job.
        restart: how often the run was started again.
    """

    job: JobConfig
    plan: LaunchPlan
    batch: BatchPlan
    job_dir: str
    run_dir: str
    run_id: str
    checkpoints: str | None = None
    resume: ResumeSpec | None = None
    memory_bytes: int | None = None
    telemetry: str | None = None
    script: ScriptSpec | None = None
    restart: int = 0

    @classmethod
    def read(cls, path: Path) -> RunSpec:
        """Return the spec stored at `path`."""
        return cls.model_validate_json(path.read_bytes())

    @property
    def checkpoint_folder(self) -> Path:
        """Return the folder in which the run saves."""
        if self.checkpoints is not None:
            return Path(self.checkpoints)
        return checkpoint_folder(self.job, Path(self.run_dir))

    @property
    def offload_folder(self) -> Path:
        """Return the folder of this host in which states on disk lie."""
        return offload_folder(self.job, Path(self.job_dir), Path(self.run_dir))

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON, without defaults: so a worker knows which keys were given."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def write(self, path: Path) -> None:
        """Store the spec at `path`, readable by its owner only."""
        path.touch(mode=0o600)
        path.write_text(json.dumps(self.to_json(), indent=1))


def checkpoint_folder(job: JobConfig, run_dir: Path) -> Path:
    """Return the folder in which a run of `job` saves."""
    chosen = job.checkpoint.dir if job.checkpoint is not None else None
    return resolve_checkpoint_folder(chosen, run_dir)


def offload_folder(job: JobConfig, job_dir: Path, run_dir: Path) -> Path:
    """Return the folder of this host in which states of `job` lie that are on disk.

    Args:
        job_dir: of its file, from which the folder is looked for.
    """
    chosen = job.offload.dir
    return run_dir if chosen is None else job_dir / Path(chosen).expanduser()


def resolve_checkpoint_folder(chosen: str | None, run_dir: Path) -> Path:
    """Return `chosen`, the `checkpoint.dir` of a job; of None, a folder of the run directory."""
    if chosen is None:
        return run_dir / "checkpoints"
    return Path(chosen).expanduser().absolute()


def resolve_batch(job: JobConfig, ranks: int) -> BatchPlan:
    """Fill in what `batch` leaves to auto for this many data-parallel ranks.

    Raises:
        JobError: the global batch is not micro * a whole number * ranks.
    """
    return BatchPlan.of(job.batch.over(ranks), ranks)
