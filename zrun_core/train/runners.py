"""Choose what runs the micro-batches of a job's steps, and whether these come in windows."""

from __future__ import annotations

from collections.abc import Callable

from zrun_core.data.loader import BatchLoader
from zrun_core.spine.events import Emitter
from zrun_core.stages.links import StageLinks
from zrun_core.stages.node_calls import install_nodes
from zrun_core.stages.stage import Stage
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
    facts = context.spec.job.parallel.facts
    if stage is not None:
        sharded = context.sharded
        most = max(len(border) for border in stage.borders)
        links = StageLinks(sharded.comm, sharded.mesh, stage.split, most)
        runner = PipeDreamRunner if facts.updates_each else PipelineRunner
        return runner(context, stage, links)
    if facts.goes_in_slices:
        return LayerMajorRunner(context)
    if context.spec.job.parallel.draws_by_block:
        module = context.sharded.module
        install_nodes(module, repeated_blocks(module))
    return MicroBatchRunner(context)


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
