"""PipeDream: bit-equal to a simulator of delayed gradients, whatever the stages do at once."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from distances import Tensors, assert_equal, whole
from runs import Plain, job, look, losses, run
from small_jobs import GPT, gpt
from torch import nn
from toys import world

from zrun_core.checkpoint.checkpointer import Checkpointer, SaveConsensus
from zrun_core.models.gpt import gpt as make_gpt
from zrun_core.pipeline.actions import Action
from zrun_core.train.pipedream import PipeDreamRunner
from zrun_core.train.pipeline_runner import PipelineRunner
from zrun_core.train.trainer import Trainer
from zrun_core.train.user_hooks import HookContext
from zrun_core.zero.account import allocated_memory, planned_memory
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.stage_steps import StageSteps, StageUpdate

SPLITS = {2: ["blocks.2"], 3: ["blocks.1", "blocks.2"], 4: ["blocks.1", "blocks.2", "blocks.3"]}
ADAMW = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}
SGD = {"name": "sgd", "lr": 0.02, "weight_decay": 0.0, "args": {"momentum": 0.9}}


def keys_of(stages: int, schedule: str, **keys: Any) -> dict[str, Any]:
    return job(
        **{
            "model": gpt(),
            "data": {"call": "runs.py:Plain"},
            "steps": 100,
            "batch": {"global": 2, "micro": 2},
            "optim": SGD,
            "lr": {"schedule": "constant"},
            "hooks": {},
            "checkpoint": None,
            "parallel": {"pp": stages, "schedule": schedule, "split": SPLITS[stages]},
            **keys,
        }
    )


def stage_of(name: str, stages: int) -> int:
    """Return the stage of a parameter; what is in front of blocks is on the first one."""
    if not name.startswith("blocks."):
        return 0 if name.startswith(("tokens", "positions", "embed")) else stages - 1
    number = int(name.split(".")[1])
    return sum(number >= int(first.split(".")[1]) for first in SPLITS[stages])


def simulate(
    keys: dict[str, Any], initial: Tensors, drains: list[int], dp: int = 1
) -> tuple[dict[int, float], Tensors]:
    """Train one process on gradients that are late by as much as the paper says.

    Args:
        drains: after which steps the pipeline is drained.
        dp: parts of a step's samples, whose gradients are added up.
    """
    stages, schedule = keys["parallel"]["pp"], keys["parallel"]["schedule"]
    dtype = torch.bfloat16 if keys.get("precision") == "bf16" else torch.float32
    model = make_gpt(**GPT, tied=False)
    params = dict(model.named_parameters())
    start = {
        name: torch.from_numpy(initial[name, "value"]).view(p.shape) for name, p in params.items()
    }
    history = {name: [value.clone()] for name, value in start.items()}
    newest = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    optimizer: torch.optim.Optimizer
    if keys["optim"]["name"] == "sgd":
        optimizer = torch.optim.SGD(newest.values(), lr=0.02, momentum=0.9, foreach=False)
    else:
        optimizer = torch.optim.AdamW(newest.values(), lr=1e-2, weight_decay=0.1, fused=True)
    data = Plain()
    found = {}
    base = 0
    for step in range(keys["steps"]):
        micro = step - base
        for name, param in params.items():
            stage = 0 if schedule == "pipedream_vertical" else stage_of(name, stages)
            late = max(0, micro - (stages - 1 - stage))
            param.data = history[name][base + late].to(dtype, copy=True)
            param.grad = None
        size = keys["batch"]["global"]
        samples = [data[(step * size + k) % len(data)] for k in range(size)]
        total = 0.0
        for part in range(dp):
            own = samples[part * size // dp : (part + 1) * size // dp]
            batch = {key: torch.stack([sample[key] for sample in own]) for key in own[0]}
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False):
                loss = model(**batch)
            (loss * (1 / dp)).backward()
            total += len(own) * float(loss.detach().double())
        found[step + 1] = total / size
        for name, param in params.items():
            assert param.grad is not None
            newest[name].grad = param.grad.float()
        optimizer.step()
        for name, param in newest.items():
            history[name].append(param.detach().clone())
        if step + 1 in drains:
            base = step + 1
    final = {(name, "value"): values[-1].flatten().numpy() for name, values in history.items()}
    return found, final


def drains_of(keys: dict[str, Any]) -> list[int]:
    """Return the steps after which windows end that nothing else ends."""
    longest = 16 * keys["parallel"]["pp"]
    return list(range(longest, keys["steps"] + 1, longest))


def params_of(found: Tensors) -> Tensors:
    return {key: values for key, values in found.items() if key[1] == "value"}


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_vertical"])
@pytest.mark.parametrize(
    ("stages", "precision", "optim"),
    [(2, "fp32", SGD), (3, "fp32", SGD), (4, "fp32", ADAMW), (3, "bf16", ADAMW)],
)
@pytest.mark.at_most(1)
def test_delayed_gradients(
    ranks, tmp_path: Path, stages: int, precision: str, optim: dict[str, Any], schedule: str
) -> None:
    keys = keys_of(stages, schedule, precision=precision, optim=optim)
    initial = whole([ranks(1).run(look, {**keys, "parallel": {}}, str(tmp_path / "0"), None)[0]])
    dims = {"dp": 1, "pp": stages}
    found = ranks(stages).run(run, keys, str(tmp_path / "run"), None, None, None, dims)
    expected, final = simulate(keys, initial, drains_of(keys))
    assert losses(found[0]) == expected
    assert_equal(params_of(whole(found)), final)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.thorough
def test_data_parallel_ranks(ranks, tmp_path: Path, zero: int) -> None:
    """With steps that no window of full length ends, and a last one of fewer samples."""
    keys = keys_of(2, "pipedream", batch={"global": 4, "micro": 2}, zero=zero, steps=40)
    initial = whole([ranks(1).run(look, {**keys, "parallel": {}}, str(tmp_path / "0"), None)[0]])
    dims = {"dp": 2, "pp": 2}
    found = ranks(4).run(run, keys, str(tmp_path / "run"), None, None, None, dims)
    expected, final = simulate(keys, initial, drains_of(keys), dp=2)
    assert losses(found[0]) == expected
    assert_equal(params_of(whole(found)), final)


def observed(keys: dict[str, Any], run_dir: str, dims: dict[str, int]) -> list[tuple[Any, ...]]:
    """Run a job; return its passes on this rank: which, of what micro-batch, and the version.

    The version is after how many updates the parameters were the newest that the pass begins with.
    """
    seen: list[tuple[Any, ...]] = []
    newest: list[torch.Tensor] = []
    step = StageSteps.step

    def values(sharded: ShardedModel) -> torch.Tensor:
        params = [param for unit in sharded.units for param in unit.params]
        return torch.cat([param.detach().flatten() for param in params])

    def noting(inner: Callable[..., Any]) -> Callable[..., Any]:
        def run_pass(self: PipeDreamRunner, action: Action, *args: Any, **kwargs: Any) -> Any:
            now = values(self._sharded)
            if not newest:
                newest.append(now)
            (version,) = [n for n, value in enumerate(newest) if torch.equal(value, now)]
            seen.append((action.kind.value, action.micro, version))
            return inner(self, action, *args, **kwargs)

        return run_pass

    def update(self: StageSteps, lr: float) -> StageUpdate:
        result = step(self, lr)
        self.versions.show(self.versions.newest)
        newest.append(values(self.sharded))
        return result

    with (
        patch.object(PipelineRunner, "_run_forward", noting(PipelineRunner._run_forward)),
        patch.object(PipelineRunner, "_run_backward", noting(PipelineRunner._run_backward)),
        patch.object(StageSteps, "step", update),
    ):
        run(keys, run_dir, None, None, None, dims)
    return seen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_vertical"])
@pytest.mark.at_most(1)
def test_both_passes_of_a_micro_batch_see_one_version(
    ranks, tmp_path: Path, schedule: str, precision: str
) -> None:
    keys = keys_of(3, schedule, steps=12, precision=precision)
    found = ranks(3).run(observed, keys, str(tmp_path), {"dp": 1, "pp": 3})
    for stage, passes in enumerate(found):
        late = 2 if schedule == "pipedream_vertical" else 2 - stage
        expected = {(kind, micro, max(0, micro - late)) for kind in "FB" for micro in range(12)}
        assert set(passes) == expected
        assert len(passes) == 24


@pytest.mark.thorough
def test_bf16_with_adamw_that_resumes(ranks, tmp_path: Path) -> None:
    """A save drains the pipeline, in a run that goes on and in one that goes on from it."""
    keys = keys_of(
        3,
        "pipedream",
        precision="bf16",
        optim={"lr": 1e-2, "weight_decay": 0.1},
        lr={"schedule": "cosine", "warmup": 2},
        data={"call": "runs.py:Plain", "shuffle": True},
        steps=24,
        checkpoint={"every": 9},
        eval={"data": {"call": "runs.py:Plain", "args": {"length": 4}}, "every": 7},
        hooks={"on_step": "runs.py:on_step"},
    )
    dims = {"dp": 1, "pp": 3}
    once = ranks(3).run(run, keys, str(tmp_path / "once"), None, None, None, dims)
    ranks(3).run(run, keys, str(tmp_path / "cut"), None, 18, None, dims)
    rest = ranks(3).run(run, keys, str(tmp_path / "cut"), {}, None, None, dims)
    assert [each["digest"] for each in rest] == [each["digest"] for each in once]
    expected = losses(once[0])
    assert list(expected) == list(range(1, 25))
    assert losses(rest[0]) == {step: expected[step] for step in losses(rest[0])}
    assert [e["step"] for e in once[0]["events"] if e["type"] == "eval"] == [7, 14, 21, 24]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "pipedream_vertical"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.at_most(1)
def test_memory_of_versions(ranks, tmp_path: Path, schedule: str, precision: str) -> None:
    keys = keys_of(3, schedule, steps=5, precision=precision)
    found = ranks(3).run(memory, keys, str(tmp_path), {"dp": 1, "pp": 3})
    for stage, (planned, allocated, params) in enumerate(found):
        assert allocated == planned
        held = {"1f1b": 1, "pipedream": 3 - stage, "pipedream_vertical": 3}[schedule]
        assert planned["params"] == held * params


def memory(keys: dict[str, Any], run_dir: str, dims: dict[str, int]) -> tuple[Any, ...]:
    """Return planned and allocated bytes of this rank after a run, and those of its parameters."""
    kept: list[ShardedModel] = []
    init = ShardedModel.__init__

    def keep(self: ShardedModel, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        kept.append(self)

    with patch.object(ShardedModel, "__init__", keep):
        run(keys, run_dir, None, None, None, dims)
    (sharded,) = kept
    accounts = [planned_memory(sharded), allocated_memory(sharded)]
    one = sum(unit.layout.padded_numel * unit.layout.dtype.itemsize for unit in sharded.units)
    by_kind = [{kind.value: size for kind, size in each.by_kind.items()} for each in accounts]
    return *by_kind, one


@pytest.mark.thorough
def test_skips(ranks, tmp_path: Path) -> None:
    """Every stage skips where the loss is NaN: the version of that micro-batch's update is the last
    one's."""
    keys = keys_of(
        2,
        "pipedream",
        steps=10,
        parallel={"pp": 2, "schedule": "pipedream"},
        batch={"global": 4, "micro": 2},
        model="pipeline/test_pipedream.py:Sick",
        data={"call": "pipeline/test_pipedream.py:Odd"},
    )
    found = ranks(4).run(run, keys, str(tmp_path), None, None, None, {"dp": 2, "pp": 2})
    steps = [e for e in found[0]["events"] if e["type"] == "step"]
    assert [e["step"] for e in steps if e["skipped"]] == [2]
    assert all(e["grad_norm"] > 0 for e in steps if not e["skipped"])
    warnings = [e["message"] for e in found[0]["events"] if e["type"] == "warning"]
    assert warnings == [
        "step 2 was skipped on all ranks: the loss is nan on rank 3 (indices 6-7 of the dataset)"
    ]
    for values in whole(found).values():
        assert np.isfinite(values).all()


def rated(keys: dict[str, Any], run_dir: str, dims: dict[str, int]) -> dict[str, Any]:
    """Run a job; return also the learning rates that this rank's updates were given."""
    rates: list[float] = []
    step = StageSteps.step

    def seen(self: StageSteps, lr: float) -> StageUpdate:
        rates.append(lr)
        return step(self, lr)

    with patch.object(StageSteps, "step", seen):
        return {**run(keys, run_dir, None, None, None, dims), "rates": rates}


def test_a_skipped_step_moves_the_rate_from_the_next_window_on(ranks, tmp_path: Path) -> None:
    keys = keys_of(
        2,
        "pipedream",
        steps=10,
        lr={"schedule": "constant", "warmup": 8},
        parallel={"pp": 2, "schedule": "pipedream"},
        optim={**SGD, "lr": 0.08},
        batch={"global": 4, "micro": 4},
        eval={"data": {"call": "pipeline/test_pipedream.py:Odd"}, "every": 4},
        model="pipeline/test_pipedream.py:Sick",
        data={"call": "pipeline/test_pipedream.py:Odd"},
    )
    found = ranks(2).run(rated, keys, str(tmp_path), {"dp": 1, "pp": 2})
    steps = [e for e in found[0]["events"] if e["type"] == "step"]
    assert [e["step"] for e in steps if e["skipped"]] == [2]
    expected = [0.01, 0.02, 0.03, 0.04, 0.04, 0.05, 0.06, 0.07, 0.08, 0.08]
    assert np.allclose([e["lr"] for e in steps], expected, rtol=1e-12)
    for each in found:
        assert each["rates"] == [e["lr"] for e in steps]


def written(keys: dict[str, Any], run_dir: str, dims: dict[str, int]) -> dict[str, Any]:
    """Run a job whose files of a save are on the disk by the end of the next window."""
    contribution = Checkpointer.contribution

    def late(self: Checkpointer, asked: bool = False) -> SaveConsensus:
        if self._current is not None:
            wait([self._current.writing])
        return contribution(self, asked)

    with patch.object(Checkpointer, "contribution", late):
        return run(keys, run_dir, None, None, None, dims)


def test_a_save_that_is_written_makes_no_later_one_wait_or_go(ranks, tmp_path: Path) -> None:
    """Its manifest is written where ranks meet next, not one window later still."""
    checkpoint = {"every": 8, "async": True, "busy": "skip", "keep": 9}
    keys = keys_of(2, "pipedream", steps=24, checkpoint=checkpoint)
    found = ranks(2).run(written, keys, str(tmp_path), {"dp": 1, "pp": 2})
    events = found[0]["events"]
    assert [e["message"] for e in events if e["type"] == "warning"] == []
    assert [e["step"] for e in events if e["type"] == "save"] == [8, 16, 24]


class Sick(nn.Module):
    """Its loss, and so every gradient, is NaN with some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = make_gpt(**GPT, tied=False)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, is_odd: torch.Tensor
    ) -> torch.Tensor:
        loss: torch.Tensor = self.gpt(input_ids, labels)
        return loss * torch.where(is_odd.any(), float("nan"), 1.0)


class Odd(Plain):
    """Two samples are odd."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "is_odd": torch.tensor(index in (6, 7))}


def stopped(keys: dict[str, Any], run_dir: str, dims: dict[str, int]) -> dict[str, Any]:
    """Run a job; a signal reaches the last rank in its 20th update."""
    trainers: list[Trainer] = []
    init, step = Trainer.__init__, StageSteps.step
    count = itertools.count(1)

    def keep(self: Trainer, *args: Any) -> None:
        init(self, *args)
        trainers.append(self)

    def update(self: StageSteps, lr: float) -> StageUpdate:
        if next(count) == 20 and world()[0] == world()[1] - 1:
            trainers[0].stop.first = signal.SIGTERM
        return step(self, lr)

    with patch.object(Trainer, "__init__", keep), patch.object(StageSteps, "step", update):
        return run(keys, run_dir, None, None, None, dims)


@pytest.mark.thorough
def test_a_stop_drains_the_pipeline(ranks, tmp_path: Path) -> None:
    keys = keys_of(2, "pipedream", checkpoint={"every": 1000})
    dims = {"dp": 1, "pp": 2}
    found = ranks(2).run(stopped, keys, str(tmp_path), dims)
    assert [each["code"] for each in found] == [75, 75]
    assert [each["step"] for each in found] == [32, 32], "a window has 16 steps for each stage"
    rest = ranks(2).run(run, {**keys, "steps": 40}, str(tmp_path), {}, None, None, dims)
    assert list(losses(rest[0])) == list(range(33, 41))


def test_a_hook_ends_the_run(ranks, tmp_path: Path) -> None:
    keys = keys_of(2, "pipedream", hooks={"on_step": "pipeline/test_pipedream.py:end_at_five"})
    found = ranks(2).run(run, keys, str(tmp_path), None, None, None, {"dp": 1, "pp": 2})
    assert [each["step"] for each in found] == [32, 32]
    (end,) = [e for e in found[0]["events"] if e["type"] == "end"]
    assert (end["reason"], end["why"]) == ("hook", "hooks.on_step: enough")


def end_at_five(context: HookContext) -> None:
    if context.step == 5:
        context.stop("enough")


def test_tied_parameters_are_refused(ranks, tmp_path: Path) -> None:
    keys = keys_of(2, "pipedream", model=gpt(tied=True))
    found = ranks(2).run(run, keys, str(tmp_path), None, None, None, {"dp": 1, "pp": 2})
    for each in found:
        assert each["code"] == 2
        assert "tokens.weight is used on stages 0, 1, and each stage updates" in each["error"]
