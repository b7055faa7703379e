"""A rank of `zrun train` without a launcher: its worker, in a process that has met the others."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zrun_core.spine import heap
from zrun_core.spine.config import JobConfig
from zrun_core.spine.spec import LaunchPlan, RankPlace, RunSpec, resolve_batch
from zrun_core.train.trainer import Trainer
from zrun_core.train.worker import Worker


def prepare(keys: Mapping[str, Any], axis: str, ranks: int, rank: int) -> Trainer:
    """Build this rank's part of a model, ready to be given its batches.

    Args:
        axis: along which the ranks are, "pp" or "tp".
    """
    heap.keep_freed_memory()  # as a worker does, unless the environment has said more
    job = JobConfig.model_validate(keys)
    here = {"host": "localhost", "device": "cpu"}
    places = [
        RankPlace(rank=number, local_rank=number, **{axis: number}, **here)
        for number in range(ranks)
    ]
    folder = Path(sys.argv[1]).parent / "run"  # beside the request
    folder.mkdir(exist_ok=True)
    spec = RunSpec(
        job=job,
        plan=LaunchPlan(ranks=places),
        batch=resolve_batch(job, 1),
        job_dir=str(Path(__file__).parent),
        run_dir=str(folder),
        run_id="bench",
    )
    worker = Worker(spec, rank)
    worker.builder._join = lambda: None  # type: ignore[method-assign]  # it has met the others
    return worker.prepare()
