"""The data of a job as a rank reads them, and the user's functions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zrun_core.checkpoint.resume import Resumed
from zrun_core.data.batch import MicroBatch
from zrun_core.data.loader import BatchLoader
from zrun_core.distributed import rng
from zrun_core.distributed.mesh import Mesh
from zrun_core.errors import JobError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.section import Ref
from zrun_core.spine.spec import RunSpec
from zrun_core.train.evaluator import HeldOut
from zrun_core.train.trainer import UserFunctions
from zrun_core.user_code import user


@dataclass(frozen=True)
class JobData:
    """The data of a job, opened, and the user's functions.

    Attributes:
        dataset: the user's.
        streams: that the rank draws from.
        loader: reads this rank's micro-batches.
    """

    functions: UserFunctions
    dataset: object
    streams: rng.Streams
    loader: BatchLoader

    @classmethod
    def open(cls, spec: RunSpec, mesh: Mesh, device: torch.device) -> JobData:
        """Load the functions, make the data set, and begin its streams of random numbers."""
        job, folder = spec.job, Path(spec.job_dir)
        functions = _load_functions(job, folder)
        dataset = user.call(_without_options(job.data), folder)
        streams = rng.Streams(
            job.seed,
            device,
            dp=mesh.data.index,
            pp=mesh.pipe.index,
            tp=mesh.tensor.index,
        )
        loader = BatchLoader(
            dataset,
            job.data,
            spec.batch,
            mesh.data.index,
            job.seed,
            device,
            epochs=job.epochs,
            collate=functions.collate,
            draws=streams.data,
        )
        return cls(functions, dataset, streams, loader)

    def first_batch(self) -> MicroBatch:
        """Return the first micro-batch, which training reads too.

        Raises:
            JobError: there is none.
        """
        batch = self.loader.peek()
        if batch is None:
            raise JobError(
                "parallel: the data yields no batch, which is needed to divide the model"
            )
        return batch

    def total_steps(self, job: JobConfig, resumed: Resumed | None) -> int | None:
        """Return the optimizer steps of the whole run; None if only its end will tell."""
        if job.steps is not None:
            return job.steps
        progress = {} if resumed is None else resumed.manifest.progress
        return self.loader.total_steps(progress.get("steps", 0), progress.get("cursor", 0))

    def notes(self, spec: RunSpec, total_steps: int | None) -> list[str]:
        """Say how long the data lasts, where the user may not have meant it so."""
        epochs, size = spec.job.epochs, spec.batch.global_size
        if epochs is not None and total_steps is not None:
            return [f"epochs {epochs}: {total_steps} steps of {size} samples"]
        num_samples = self.loader.num_samples
        if epochs is None and num_samples is not None and num_samples < size:
            return [
                f"the data has {num_samples} samples and a step takes {size}: each step "
                "has some of them more than once"
            ]
        return []


def _load_functions(job: JobConfig, folder: Path) -> UserFunctions:
    def load(ref: Ref | None, key: str) -> Any:
        """Load the function of a key; None without one."""
        return None if ref is None else user.function(ref, folder, user.TAKES[key])

    loss = load(job.loss, "loss")
    collate = load(job.data.collate, "data.collate")
    hooks = {name: load(ref, "hooks") for name, ref in job.hooks if ref is not None}
    held_out = None
    if job.eval is not None:
        held_out = HeldOut(
            sets={name: user.call(ref, folder) for name, ref in job.eval.sets.items()},
            metrics=load(job.eval.metrics, "eval.metrics"),
            loss=loss,
            collate=collate,
        )
    lr_schedule = None
    if isinstance(job.lr.schedule, Ref):
        lr_schedule = load(job.lr.schedule, "lr.schedule")
    return UserFunctions(
        loss=loss, hooks=hooks, held_out=held_out, collate=collate, lr_schedule=lr_schedule
    )


def _without_options(ref: Ref) -> Ref:
    """Return the reference alone, without the options of a section that extends it."""
    return Ref(call=ref.call, args=ref.args)
