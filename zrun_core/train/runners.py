"""Choose what runs the micro-batches of a job's steps."""

from __future__ import annotations

from zrun_core.guards.oom import MemoryGuard
from zrun_core.spine.sections.parallel import PIPEDREAMS
from zrun_core.spine.spec import RunSpec
from zrun_core.stages.links import StageLinks
from zrun_core.stages.stage import Stage
from zrun_core.telemetry.metrics import StepClock
from zrun_core.train.micro_batches import LayerMajorRunner, MicroBatchRunner
from zrun_core.train.pipedream import PipeDreamRunner
from zrun_core.train.pipeline_runner import PipelineRunner
from zrun_core.train.rank_phase import RankPhase
from zrun_core.user_code.loss import LossFunction
from zrun_core.zero.sharded_model import ShardedModel


def make_runner(
    spec: RunSpec,
    sharded: ShardedModel,
    loss: LossFunction | None,
    clock: StepClock,
    phase: RankPhase,
    memory: MemoryGuard,
    stage: Stage | None,
) -> MicroBatchRunner:
    """Return what runs the micro-batches of a job's steps.

    Args:
        spec, sharded, loss, clock, phase, memory: as of `MicroBatchRunner`.
        stage: of a pipeline; None: there is none.
    """
    schedule = spec.job.parallel.schedule
    if stage is not None:
        mesh = sharded.mesh
        most = max(len(border) for border in stage.borders)
        links = StageLinks(sharded.comm, mesh.pipe, mesh.pipe_back, stage.split, most)
        runner = PipeDreamRunner if schedule in PIPEDREAMS else PipelineRunner
        return runner(spec, sharded, loss, clock, phase, memory, stage, links)
    if schedule == "layer_major":
        return LayerMajorRunner(spec, sharded, loss, clock, phase, memory)
    return MicroBatchRunner(spec, sharded, loss, clock, phase, memory)
