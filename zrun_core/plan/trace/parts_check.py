"""Check the parts of a model that ranks would have, as training does when it starts.

The checks are those of a worker before it cuts its model: here they run in a process without
others, with a batch of the job's first samples, on a model that nobody trains.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zrun_core.activations.kv_cache import omit_cache
from zrun_core.data.batch import copied
from zrun_core.data.source import is_map_style
from zrun_core.errors import JobError, ZrunError
from zrun_core.plan.trace.block_extrapolation import UNITS, find_series, shortened
from zrun_core.plan.trace.sample_batches import SampleBatches, samples_of
from zrun_core.plan.trace.traced_model import TracedModel, build_whole
from zrun_core.spine.config import JobConfig
from zrun_core.stages.flow import ModelFlow
from zrun_core.stages.follow import calls_of, follow
from zrun_core.train.stage_building import cut
from zrun_core.train.tensor_building import plan_tensors
from zrun_core.user_code import user
from zrun_core.user_code.loss import LossFunction, compute_loss
from zrun_core.user_code.trial import kept_attributes
from zrun_core.zero.unit.precision import Precision
from zrun_core.zero.wrap.auto_wrap import repeated_blocks

_CPU = torch.device("cpu")
_MICRO = 2  # samples of a micro-batch, where the job does not say how many


def check_parts(job: JobConfig, job_dir: Path) -> list[str]:
    """Refuse a job whose model cannot be divided or cut so; return notes.

    Raises:
        JobError: training would refuse it when it starts, or its first evaluation.
        UserCodeError: the model cannot be built, or a batch made.
    """
    if job.parallel.model_ranks == 1:
        return []
    try:
        samples = samples_of(job, job_dir)
    except ZrunError as error:
        return [f"parallel: not tried on a first batch, as the data was not read: {error}"]
    micro = micro_of(job)
    notes = check_division(job, job_dir, samples, micro)
    _check_stages(job, job_dir, samples, micro)
    return notes


def check_division(
    job: JobConfig,
    job_dir: Path,
    samples: SampleBatches,
    micro: int,
    *,
    few_blocks: bool = False,
) -> list[str]:
    """Refuse a job whose ranks would compute something else than its model; return notes.

    Args:
        job: whose model is divided, if it says so.
        few_blocks: of blocks that look alike only some run, as they do where one is traced. What is
            refused so is tried with all of them: those decide, and the message names them.

    Raises:
        JobError: training would refuse it.
        UserCodeError: the model cannot be built, or a batch made.
    """
    if job.parallel.tp == 1:
        return []
    subject = Subject(job, job_dir, samples, micro)

    def checked() -> list[str]:
        _, notes = plan_tensors(subject.model, job.parallel, subject.forward, subject.dtype, _CPU)
        return notes

    if few_blocks:
        series = find_series(repeated_blocks(subject.model), subject.model, 1)
        with suppress(ZrunError), shortened(series, UNITS):
            return checked()
    return checked()


def _check_stages(job: JobConfig, job_dir: Path, samples: SampleBatches, micro: int) -> None:
    """Refuse a job whose model cannot be cut into stages so, or not be evaluated on these."""
    if job.parallel.pp == 1:
        return
    subject = Subject(job, job_dir, samples, micro)
    omit_cache(subject.model, only_with_gradients=False)
    flow = follow(subject.model, subject.forward, subject.dtype, _CPU)
    cut(job, flow, job.parallel.pp)
    if job.eval is None:
        return
    evaluating: list[Callable[[nn.Module, Any], object]] = [subject.loss_of]
    if job.eval.metrics is not None:
        metrics = user.function(job.eval.metrics, job_dir, user.TAKES["eval.metrics"])
        evaluating.insert(0, metrics)
    for name, ref in job.eval.sets.items():
        key = f"eval.data.{name}".rstrip(".")
        try:
            batch = _first_of(user.call(ref, job_dir), micro, samples)
        except ZrunError:
            continue  # the evaluation will say what is wrong with it
        for evaluate in evaluating:
            _check_calls(key, subject, flow, partial(evaluate, subject.model, batch))


def micro_of(job: JobConfig) -> int:
    """Return the samples of a micro-batch with which a job's model is tried."""
    return _MICRO if job.batch.micro == "auto" else job.batch.micro


class Subject:
    """A job's model without values, where its factory bears that, and a batch for it.

    Attributes:
        model: the module.
        dtype: that its parameters have in training.
    """

    def __init__(self, job: JobConfig, job_dir: Path, samples: SampleBatches, micro: int) -> None:
        """
        Args:
            micro: samples of the batch.

        Raises:
            UserCodeError: the model cannot be built, or a batch made.
        """
        with user.user_code("making a batch failed"):
            self._batch = samples.real_batch(micro)
        self._loss: LossFunction | None = None
        if job.loss is not None:
            self._loss = user.function(job.loss, job_dir, user.TAKES["loss"])
        self._micro = micro
        self._precision = Precision.of(job.precision)
        self.dtype = self._precision.compute
        self.model: nn.Module = build_whole(job, job_dir).train()
        if any(param.is_meta for param in self.model.parameters()):
            TracedModel(job, job_dir, self.model, self._loss, samples, "cpu").make_fake()

    def forward(self) -> object:
        """Compute the loss of the batch, which leaves no trace in it and in the model."""
        return self.run(lambda: self.loss_of(self.model, copied(self._batch)))

    def loss_of(self, model: nn.Module, batch: object) -> object:
        """Compute the loss of a batch."""
        return compute_loss(model, batch, self._loss, self._micro)

    def run(self, call: Callable[[], object]) -> object:
        """Run a forward as training does."""
        failing = user.user_code("forward failed")
        autocast = self._precision.autocast(_CPU)
        with autocast, failing, kept_attributes(self.model, self._loss):
            return call()


def _first_of(dataset: Any, micro: int, samples: SampleBatches) -> object:
    """Return a batch of the first samples of a dataset."""
    with user.user_code("reading the held-out data failed"):
        if is_map_style(dataset):
            read = (dataset[place] for place in range(len(dataset)))
        else:
            read = iter(dataset)
        return samples.collate(list(islice(read, micro)))


def _check_calls(
    key: str, subject: Subject, flow: ModelFlow, evaluate: Callable[[], object]
) -> None:
    """Refuse an evaluation that calls the model otherwise than the steps do.

    One that fails without values is followed up to there.
    """
    model = subject.model.eval()
    with torch.no_grad():
        found = calls_of(model, lambda: subject.run(evaluate), subject.dtype, _CPU)
    model.train()
    if isinstance(found.error, JobError):
        raise found.error
    expected = [call.name for call in flow.calls]
    for number, name in enumerate(found.names):
        wanted = expected[number] if number < len(expected) else "nothing more"
        if name != wanted:
            raise JobError(
                f"parallel.pp: the evaluation of {key} calls {name} in place of {wanted}, and "
                "stages run the forward of training: it must call the same modules in the same "
                "order, and eval.metrics the model once at most; write pp: 1"
            )
    missing = [block for block in flow.blocks if block not in found.names]
    if found.names and missing and found.error is None:
        raise JobError(
            f"parallel.pp: the evaluation of {key} does not call {missing[0]}, and stages run the "
            "forward of training: it must call the same modules in the same order; write pp: 1"
        )
