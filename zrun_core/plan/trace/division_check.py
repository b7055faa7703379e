"""Check what ranks with slices of layers would compute, as training does when it starts.

The check is `plan_tensors`, which a worker calls before it cuts its model: here it runs in a
process without others, with a batch of the job's first samples, on a model that nobody trains.
"""

from __future__ import annotations

from pathlib import Path

import torch

from zrun_core.plan.trace.sample_batches import SampleBatches
from zrun_core.plan.trace.traced_model import TracedModel, build_whole
from zrun_core.spine.config import JobConfig
from zrun_core.train.tensor_building import plan_tensors
from zrun_core.user_code import user
from zrun_core.user_code.loss import compute_loss
from zrun_core.zero.precision import Precision

_CPU = torch.device("cpu")


def check_division(
    job: JobConfig,
    job_dir: Path,
    samples: SampleBatches,
    micro: int,
) -> list[str]:
    """Refuse a job whose ranks would compute something else than its model; return notes.

    Args:
        job: whose model is divided, if it says so.
        job_dir: against which its code is imported.
        samples: of the job's data.
        micro: samples of a micro-batch.

    Raises:
        JobError: training would refuse it.
        UserCodeError: the model cannot be built, or a batch made.
    """
    if job.parallel.tp == 1:
        return []
    loss = None if job.loss is None else user.function(job.loss, job_dir, user.TAKES["loss"])
    with user.user_code("making a batch failed"):
        batch = samples.real_batch(micro)
    precision = Precision.of(job.precision)
    model = build_whole(job, job_dir).train()
    if any(param.is_meta for param in model.parameters()):
        TracedModel(job, job_dir, model, loss, samples, "cpu").make_fake()

    def forward() -> object:
        with precision.autocast(_CPU), user.user_code("forward failed"):
            return compute_loss(model, batch, loss, micro)

    _, notes = plan_tensors(model, job.parallel, forward, precision.compute, _CPU)
    return notes
