"""What stages keep and send: micro-batches under way, bytes between passes, bytes of messages."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import runs
import torch

from zrun_core.distributed.comm import Comm
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.pipeline.schedule import Action, ActionKind
from zrun_core.plan.answer.planner import Planner
from zrun_core.plan.memory import rank_memory
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.trace.peak import _Chunk
from zrun_core.plan.trace.tracer import trace_job
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.train.pipeline_runner import PipelineRunner

SHAPE = {"vocab_size": 2003, "dim": 128, "depth": 4, "heads": 4, "seq_len": 128}
MICRO, MICRO_BATCHES = 2, 6


def keys_of(schedule: str, pp: int, precision: str = "fp32") -> dict[str, Any]:
    return runs.job(
        model={"call": "zrun_core.models.gpt:gpt", "args": {**SHAPE, "tied": False}},
        data={"call": "memory/test_plan_bytes.py:tokens"},
        steps=2,
        batch={"global": MICRO * MICRO_BATCHES, "micro": MICRO},
        checkpoint=None,
        hooks={},
        precision=precision,
        parallel={"pp": pp, "schedule": schedule},
    )


class _Kept:
    """A tensor that autograd has saved, as long as it does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class State(NamedTuple):
    """What a stage has after an action.

    Attributes:
        graphs: micro-batches of which it has a graph.
        kept: bytes that these hold of their own.
        waiting: micro-batches whose weights' gradients are still to be made.
        left: bytes that wait for that.
    """

    graphs: int
    kept: int
    waiting: int
    left: int


class Watch:
    """Counts what the micro-batches of a step hold on a rank, and what it sends.

    Attributes:
        states: after each action.
        sent: messages to other stages: the stage, what, bytes.
    """

    def __init__(self) -> None:
        self.states: list[State] = []
        self.sent: list[tuple[int, str, int]] = []
        self._kept: dict[int, weakref.WeakSet[_Kept]] = {}
        self._others: set[int] = set()  # addresses of parameters and batches

    def run(self, runner: PipelineRunner, actions: Any, batches: Any, *others: Any) -> Any:
        """Run a step, of which nothing but the last one is remembered."""
        self.states.clear()
        self.sent.clear()
        tensors = [each for batch in batches for each in batch.batch.values()]
        tensors += runner._sharded.module.parameters()
        self._others = {_address(tensor) for tensor in tensors}
        return RUN(runner, actions, batches, *others)

    def execute(self, runner: PipelineRunner, action: Action, *others: Any) -> Any:
        """Run an action, and look."""
        is_forward = action.kind is ActionKind.FORWARD
        with self._saving(action) if is_forward else nullcontext():
            share = EXECUTE(runner, action, *others)
        graphs = [graph for graph in self._kept.values() if graph]
        kept = [each.tensor for graph in graphs for each in graph]
        left = [
            tensor
            for micro in runner._held.values()
            for grad in micro.held.grads
            if grad.make is not None
            for tensor in _tensors_of(grad.make)
        ]
        waiting = len(runner._held)
        self.states.append(State(len(graphs), self._bytes(kept), waiting, self._bytes(left)))
        return share

    def send(self, comm: Comm, tensor: torch.Tensor, peer: int, *others: Any, **named: Any) -> Any:
        """Note a message, and send it."""
        self.sent.append((peer, named["name"], tensor.nbytes))
        return SEND(comm, tensor, peer, *others, **named)

    @contextmanager
    def _saving(self, action: Action) -> Iterator[None]:
        kept = self._kept[action.micro] = weakref.WeakSet()

        def save(tensor: torch.Tensor) -> _Kept:
            found = _Kept(tensor)
            kept.add(found)
            return found

        with torch.autograd.graph.saved_tensors_hooks(save, lambda found: found.tensor):
            yield

    def _bytes(self, tensors: list[torch.Tensor]) -> int:
        storages = {_address(each): each.untyped_storage().nbytes() for each in tensors}
        return sum(size for address, size in storages.items() if address not in self._others)


RUN = PipelineRunner.run
EXECUTE = PipelineRunner._execute
SEND = Comm.send


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors_of(make: Any) -> list[torch.Tensor]:
    """Return what makes a gradient, or the gradient itself."""
    held = make.args if isinstance(make, partial) else [c.cell_contents for c in make.__closure__]
    return [each for each in held if isinstance(each, torch.Tensor)]


def watched(keys: dict[str, Any], run_dir: str, dims: dict[str, int]) -> Watch:
    """Train, and return what was seen in the last step."""
    watch = Watch()
    with (
        patch.object(PipelineRunner, "run", lambda *args: watch.run(*args)),
        patch.object(PipelineRunner, "_execute", lambda *args: watch.execute(*args)),
        patch.object(Comm, "send", lambda *args, **named: watch.send(*args, **named)),
    ):
        found = runs.run(keys, run_dir, None, None, None, dims)
    assert not found["error"]
    watch._kept.clear()
    return watch


def planned(keys: dict[str, Any], dims: dict[str, int]) -> list[tuple[float, float]]:
    """Return by stage the bytes that a micro-batch keeps, and leaves for its weights' gradients."""
    job = JobConfig.model_validate(keys)
    profile = trace_job(job, runs.JOB_DIR, micros=(MICRO,), checkpoints=("none",), threads=1)
    sizes = ParallelDims(**dims)
    planner = Planner(profile, parse_simulate(f"{sizes.world_size}xCPU"), job)
    candidate = Candidate(
        job.zero.stage,
        sizes,
        MICRO,
        MICRO_BATCHES,
        "none",
        job.precision.compute,
        schedule=job.parallel.schedule,
    )
    trace = rank_memory._trace_of(profile, candidate, 1).of(MICRO)
    found = []
    for number in range(sizes.pp):
        stage = planner.stage(candidate, number)
        chunk = _Chunk.of(trace, stage.chunks[0], MICRO, accumulating=True, align=1)
        found.append((float(chunk.kept.sum()), float(chunk.left.sum())))
    return found


CASES = [("1f1b", 4, "fp32"), ("gpipe", 2, "fp32"), ("zero_bubble", 4, "fp32")]
CASES += [("1f1b", 2, "bf16"), ("zero_bubble", 2, "bf16")]


@pytest.mark.parametrize(("schedule", "pp", "precision"), CASES)
@pytest.mark.at_most(1)
def test_what_waits_is_what_is_planned(
    ranks, tmp_path: Path, schedule: str, pp: int, precision: str
) -> None:
    keys = keys_of(schedule, pp, precision)
    dims = {"dp": 1, "pp": pp}
    plan = planned(keys, dims)
    for stage, watch in enumerate(ranks(pp).run(watched, keys, str(tmp_path), dims)):
        in_flight = max(state.graphs for state in watch.states)
        assert in_flight == (MICRO_BATCHES if schedule == "gpipe" else pp - stage)
        kept, left = plan[stage]
        for state in watch.states:
            assert state.kept == pytest.approx(state.graphs * kept, rel=0.001), (stage, state)
            assert state.left == pytest.approx(state.waiting * left, rel=0.001), (stage, state)
        late = max(state.waiting for state in watch.states)
        assert late == (stage + 1 if schedule == "zero_bubble" else 0)


@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.thorough
def test_each_border_is_crossed_by_its_hidden_states(
    ranks, tmp_path: Path, precision: str, itemsize: int
) -> None:
    pp = 4
    keys = keys_of("1f1b", pp, precision)
    found = ranks(pp).run(watched, keys, str(tmp_path), {"dp": 1, "pp": pp})
    hidden = MICRO * SHAPE["seq_len"] * SHAPE["dim"] * itemsize
    for stage, watch in enumerate(found):
        expected = [
            (peer, f"{what} of micro-batch {micro}", hidden)
            for peer, what in ((stage + 1, "activations"), (stage - 1, "gradients"))
            for micro in range(MICRO_BATCHES)
            if 0 <= peer < pp
        ]
        assert sorted(watch.sent) == sorted(expected), stage
