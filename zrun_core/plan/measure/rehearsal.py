"""Steps of zrun itself, on models that compute next to nothing or are all update: what remains beside the operators.

rehearsal = Rehearsal(rank=0, ranks=2, threads=1, folder=folder)
rehearsal.step(width=8, depth=4)         seconds of a step, and of its parts
rehearsal.exchange(1 << 20)              seconds in which each rank sends so many bytes to the others
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.transport import gather_tag, reduce_tag
from zrun_core.spine.config import JobConfig
from zrun_core.spine.events import Emitter, EventType
from zrun_core.spine.spec import LaunchPlan, RankPlace, RunSpec, resolve_batch
from zrun_core.train.worker import Worker

_WARM_UP, _COUNTED = 3, 12  # steps
_EXCHANGES = 9
INPUTS, OUTPUTS = 8, 2


class Samples(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Short vectors and classes."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((INPUTS,), float(index)), index % OUTPUTS


def job_of(width: int, depth: int, ranks: int, precision: str) -> JobConfig:
    """A job that trains a perceptron of `depth` layers, `width` wide inside, on one sample per rank."""
    args = {"in_dim": INPUTS, "hidden_dim": width, "out_dim": OUTPUTS, "depth": depth}
    return JobConfig.model_validate(
        {
            "name": "rehearsal",
            "model": {"call": "zrun_core.models.mlp:mlp", "args": args},
            "data": "zrun_core.plan.measure.rehearsal:Samples",
            "steps": _WARM_UP + _COUNTED,
            "device": "cpu",
            "zero": 0,
            "precision": precision,
            "batch": {"global": ranks, "micro": 1},
            "optim": {"lr": 1e-4, "clip": 1.0},
        }
    )


class Rehearsal:
    """One rank of several, in this process."""

    def __init__(self, rank: int, ranks: int, threads: int, folder: Path) -> None:
        """`folder` is empty, and the same for all ranks."""
        self._rank, self._threads, self._folder = rank, threads, folder
        self._ranks = ranks
        self._met: tuple[Comm, Mesh] | None = None
        self._count = 0

    def step(
        self, width: int, depth: int, precision: str = "fp32"
    ) -> tuple[float, dict[str, float]]:
        """Median seconds of a step, and of its parts by name; only rank 0 knows them, the others have zeros."""
        job = job_of(width, depth, self._ranks, precision)
        places = [
            RankPlace(
                rank=rank,
                host="here",
                local_rank=rank,
                device="cpu",
                dp=rank,
                threads=self._threads,
            )
            for rank in range(self._ranks)
        ]
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir(exist_ok=True)
        spec = RunSpec(
            job=job,
            plan=LaunchPlan(ranks=places),
            batch=resolve_batch(job, self._ranks),
            job_dir=str(folder),
            run_dir=str(folder),
            run_id="rehearsal",
        )
        worker = _Rank(spec, self._rank, self._met)
        worker.run()
        self._met = worker.met
        steps = worker.ear.steps[_WARM_UP:]
        if not steps:
            return 0.0, {}
        split = {
            name: statistics.median(step["split"][name] for step in steps)
            for name in steps[0]["split"]
        }
        return statistics.median(step["step_s"] for step in steps), split

    def exchange(self, num_bytes: int) -> float:
        """Median seconds in which each rank sends `num_bytes`: half of a sum over ranks, which all of them get."""
        assert self._met is not None, "the ranks meet in their first step"
        comm, mesh = self._met
        group = mesh.world
        full = torch.zeros(num_bytes // 4 // (group.size - 1) * group.size)
        own = full.view(group.size, -1)[group.index]
        recv_buffer = torch.zeros(own.numel() * comm.num_recv_shards(group))
        times = []
        for _ in range(_EXCHANGES):
            comm.barrier(group)
            start = time.perf_counter()
            comm.reduce_scatter(
                full, recv_buffer, own, group, accumulate=False, tag=reduce_tag(0), name="rehearsal"
            ).wait()
            comm.all_gather(full, own, group, tag=gather_tag(0), name="rehearsal").wait()
            times.append((time.perf_counter() - start) / 2)
            comm.settle()
        return statistics.median(times)


class _Ear(Emitter):
    """Keeps what steps came to."""

    def __init__(self, rank: int) -> None:
        super().__init__(None, rank)
        self.steps: list[dict[str, Any]] = []

    def emit(self, kind: EventType, **fields: Any) -> None:
        if kind == "step":
            self.steps.append(fields)


class _Rank(Worker):
    """A worker that tells its steps to nobody else, and that goes on with the connections of an earlier one.

    Attributes:
        met: its connections.
    """

    def __init__(self, spec: RunSpec, rank: int, met: tuple[Comm, Mesh] | None) -> None:
        super().__init__(spec, rank)
        self.met = met
        self.ear = _Ear(rank)
        self.emitter = self.ear

    def _join(self, device: torch.device) -> None:
        if self.met is None:
            super()._join(device)

    def _connect(self, device: torch.device) -> tuple[Comm, Mesh]:
        if self.met is None:
            self.met = super()._connect(device)
        return self.met
