"""Choose what runs the micro-batches of a job's steps, and whether these come in windows."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from zrun_core.data.loader import BatchLoader
from zrun_core.spine.events import Emitter
from zrun_core.spine.sections.parallel import ParallelConfig
from zrun_core.stages.links import StageLinks
from zrun_core.stages.node_calls import install_nodes
from zrun_core.stages.stage import Stage
from zrun_core.stages.weight_grads import WeightGrads
from zrun_core.train.async_windows import AsyncWindows
from zrun_core.train.micro_batches import LayerMajorRunner, MicroBatchRunner, RunnerContext
from zrun_core.train.pipedream import PipeDreamRunner, PipeDreamWindows
from zrun_core.train.pipeline_runner import PipelineRunner
from zrun_core.train.windows import Windows
from zrun_core.zero.wrap.auto_wrap import repeated_blocks


def make_runner(context: RunnerContext, stage: Stage | None) -> MicroBatchRunner:
    """Return what runs the micro-batches of a job's steps.

    Args:
        stage: of a pipeline; None: there is none.
    """
    parallel = context.spec.job.parallel
    facts = parallel.facts
    weight_grads = put_on_for_steps(parallel, context.sharded.module, stage)
    if stage is not None:
        sharded = context.sharded
        most = max(len(border) for border in stage.borders)
        links = StageLinks(sharded.comm, sharded.mesh, stage.split, most)
        runner = PipeDreamRunner if facts.updates_each else PipelineRunner
        return runner(context, stage, links, weight_grads)
    if facts.goes_in_slices:
        return LayerMajorRunner(context)
    return MicroBatchRunner(context)


def put_on_for_steps(
    parallel: ParallelConfig, model: nn.Module, stage: Stage | None
) -> WeightGrads | None:
    """Put on a model the layers that the micro-batches of its steps need, in place: the last ones.

    Args:
        model: which is transformed.
        stage: of a pipeline; None: there is none.

    Returns:
        What keeps the gradients of weights that are made later; None: all are made at once.
    """
    if stage is not None:
        return WeightGrads(stage.own_blocks) if parallel.facts.splits_backward else None
    if parallel.draws_by_block and not parallel.facts.goes_in_slices:
        install_nodes(model, repeated_blocks(model))
    return None


def make_windows(
    context: RunnerContext,
    loader: BatchLoader,
    emitter: Emitter,
    runner: MicroBatchRunner,
    asked_to_stop: Callable[[], bool],
    saving: Callable[[], int | None],
) -> Windows | None:
    """Return what runs the steps of a job, where ranks do not meet after each; None: they do.

    Args:
        saving: returns the step that is being saved beside training.
    """
    if isinstance(runner, PipeDreamRunner):
        sharded = context.sharded
        stages = sharded.mesh.pipe.size
        return PipeDreamWindows(context.spec.job, stages, sharded, loader, runner, context.clock)
    if context.spec.job.sync == "async_server":
        return AsyncWindows(context, loader, emitter, runner, asked_to_stop, saving)
    return None
