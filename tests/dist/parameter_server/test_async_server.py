"""The asynchronous parameter server: without staleness the synchronous one's bits, and with any
bound those of a simulator of delayed pushes that is given the order in which they came.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from async_jobs import ADAMW, CLIPPED, SGD, keys_of, of_steps, recorded
from distances import Tensors, assert_equal, whole
from runs import JOB_DIR, Plain, PoolWorker, look, losses, make_spec, run
from small_jobs import GPT
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from toys import world

from zrun_core.distributed.rng import ForwardStreams
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.memory.buffers import Kind
from zrun_core.models.gpt import gpt as make_gpt
from zrun_core.parameter_server.messages import Push
from zrun_core.parameter_server.server import Made
from zrun_core.plan.answer.planner import Planner
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.trace.tracer import trace_job
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.train.async_windows import AsyncWindows
from zrun_core.zero.account import allocated_memory, expected_traffic, planned_memory

KINDS = ("push", "pull")


SAME: list[dict[str, Any]] = [
    {"model": "runs.py:Speaker", "data": {"call": "runs.py:Tokens", "shuffle": True}},
    {"optim": CLIPPED, "precision": "bf16"},
    {"optim": SGD, "epochs": 2, "steps": None},
    {"precision": {"compute": "bf16", "reduce": "compute"}, "batch": {"global": 6, "micro": 1}},
    {"activations": "full", "eval": {"data": {"call": "runs.py:Plain"}, "every": 7}},
]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("keys", SAME, ids=str)
@pytest.mark.at_most(1)
def test_without_staleness_the_numbers_are_those_of_the_synchronous_server(
    ranks, tmp_path: Path, num_ranks: int, keys: dict[str, Any]
) -> None:
    late = keys_of(0, **keys)
    early = {**late, "sync": "server"}
    found, expected = (
        ranks(num_ranks).run(run, each, str(tmp_path / each["sync"])) for each in (late, early)
    )
    assert [each["digest"] for each in found] == [each["digest"] for each in expected]
    for name in ("loss", "grad_norm", "lr", "samples", "tokens", "epoch", "skipped"):
        of_steps = [
            [event[name] for event in each[0]["events"] if event["type"] == "step"]
            for each in (found, expected)
        ]
        assert of_steps[0] == of_steps[1], name
    evaluations = [
        [event["loss"] for event in each[0]["events"] if event["type"] == "eval"]
        for each in (found, expected)
    ]
    assert evaluations[0] == evaluations[1]


def simulate(
    keys: dict[str, Any], initial: Tensors, windows: list[list[Made]], num_ranks: int
) -> tuple[dict[int, float], Tensors]:
    """Train one process on gradients that come in a recorded order, with recorded versions.

    Args:
        windows: pushes of each window, in the order of their updates.
    """
    dtype = torch.bfloat16 if keys.get("precision") == "bf16" else torch.float32
    model = make_gpt(**GPT, tied=False)
    params = dict(model.named_parameters())
    newest = {
        name: nn.Parameter(torch.from_numpy(initial[name, "value"].copy()).view(param.shape))
        for name, param in params.items()
    }
    optimizer: torch.optim.Optimizer
    if keys["optim"]["name"] == "sgd":
        optimizer = torch.optim.SGD(newest.values(), lr=0.02, momentum=0.9, foreach=False)
    else:
        optimizer = torch.optim.AdamW(newest.values(), lr=1e-2, weight_decay=0.1, fused=True)
    size, micro = keys["batch"]["global"], keys["batch"]["micro"]
    data = Plain()
    found: dict[tuple[int, int], float] = {}
    first = 0
    for made in windows:
        history = [{name: value.detach().clone() for name, value in newest.items()}]
        for push in made:
            assert push.version == len(history) - 1
            for name, param in params.items():
                param.data = history[push.pulled][name].to(dtype, copy=True)
                param.grad = None
            step = first + push.share.step
            start = step * size + push.share.part * size // num_ranks
            total = 0.0
            wide: dict[str, torch.Tensor] = {}
            for begin in range(start, start + size // num_ranks, micro):
                samples = [data[k % len(data)] for k in range(begin, begin + micro)]
                batch = {key: torch.stack([each[key] for each in samples]) for key in samples[0]}
                enabled = dtype != torch.float32
                with torch.autocast("cpu", dtype, enabled=enabled, cache_enabled=False):
                    loss = model(**batch)
                (loss * (micro / size)).backward()
                total += micro * float(loss.detach().double())
                for name, param in params.items():
                    assert param.grad is not None
                    wide[name] = wide[name] + param.grad if name in wide else param.grad.float()
                    param.grad = None
            found[step, push.share.part] = total
            scale = 1 / num_ranks
            if (clip := keys["optim"].get("clip")) is not None:
                square = sum(float(grad.double().square().sum()) for grad in wide.values())
                scale *= max(1.0, square**0.5 / scale / clip)
            for name, value in newest.items():
                value.grad = wide[name] / torch.tensor(scale).float()
            rate = min(1.0, (step + 1) / (keys["lr"].get("warmup", 0) or 1))
            for group in optimizer.param_groups:
                group["lr"] = keys["optim"]["lr"] * rate * (size // num_ranks / size)
            optimizer.step()
            history.append({name: value.detach().clone() for name, value in newest.items()})
        first += len(made) // num_ranks
    by_step: dict[int, list[float]] = {}
    for (step, _), total in sorted(found.items()):
        by_step.setdefault(step + 1, []).append(total)
    means = {step: sum(of_step) / size for step, of_step in by_step.items()}
    return means, {(name, "value"): v.detach().flatten().numpy() for name, v in newest.items()}


def params_of(found: Tensors) -> Tensors:
    return {key: values for key, values in found.items() if key[1] == "value"}


@pytest.mark.parametrize(
    ("num_ranks", "staleness", "slow", "precision", "optim"),
    [
        (2, "any", 1, "fp32", SGD),
        (3, "any", None, "fp32", ADAMW),
        (2, 3, 0, "fp32", {**SGD, "clip": 0.3}),
        (3, 2, 0, "bf16", ADAMW),
        (4, 1, 2, "fp32", ADAMW),
    ],
)
@pytest.mark.at_most(2)
def test_delayed_pushes(
    ranks,
    tmp_path: Path,
    num_ranks: int,
    staleness: int | str,
    slow: int | None,
    precision: str,
    optim: dict[str, Any],
) -> None:
    constant = {"schedule": "constant", "warmup": 10}
    batch = {"global": 8 if num_ranks == 4 else 12, "micro": 2}
    keys = keys_of(staleness, precision=precision, optim=optim, lr=constant, batch=batch)
    plain = {**keys, "sync": "ring", "staleness": 0}
    initial = whole([ranks(1).run(look, plain, str(tmp_path / "0"), None)[0]])
    found = ranks(num_ranks).run(recorded, keys, str(tmp_path / "run"), slow)
    windows = found[0]["made"]
    every = itertools.product(range(40), range(num_ranks))
    made = [
        (32 * n + each.share.step, each.share.part) for n, w in enumerate(windows) for each in w
    ]
    assert sorted(made) == list(every)
    leads = [each.lead for window in windows for each in window]
    if isinstance(staleness, int):
        assert max(leads) <= staleness
    assert max(each.staleness for window in windows for each in window) > 0
    expected, final = simulate(keys, initial, windows, num_ranks)
    got = params_of(whole(found))
    if "clip" in optim:  # of which the norm is summed in fp32 here and in float64 there
        assert got.keys() == final.keys()
        assert all(np.allclose(got[key], final[key], rtol=1e-5, atol=1e-6) for key in final)
        assert max(of_steps(found[0], "grad_norm")) > 0.6
    else:
        assert_equal(got, final)
    told = losses(found[0])
    assert list(told) == list(expected)
    rtol = 1e-5 if "clip" in optim else 1e-12
    assert np.allclose(list(told.values()), list(expected.values()), rtol=rtol)


def compiled(keys: dict[str, Any], run_dir: str, slow: int | None) -> dict[str, Any]:
    """As `recorded`, with all of torch's compiler but the part that writes C++; return also how
    many graphs this rank has compiled.
    """
    backend = CompileCounterWithBackend("aot_eager_decomp_partition")
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        found = recorded(keys, run_dir, slow)
    return {**found, "graphs": backend.frame_count}


@pytest.mark.parametrize(
    ("num_ranks", "staleness", "slow", "activations"),
    [(2, "any", 1, "none"), (3, 2, 0, "full")],
)
@pytest.mark.thorough
def test_compiled_blocks_compute_with_the_version_that_was_pulled(
    ranks, tmp_path: Path, num_ranks: int, staleness: int | str, slow: int, activations: str
) -> None:
    keys = keys_of(staleness, optim=SGD, lr={"schedule": "constant", "warmup": 10}, compile=True)
    keys["activations"] = activations
    plain = {**keys, "sync": "ring", "staleness": 0, "compile": False}
    initial = whole([ranks(1).run(look, plain, str(tmp_path / "0"), None)[0]])
    found = ranks(num_ranks).run(compiled, keys, str(tmp_path / "run"), slow)
    assert [each["error"] for each in found] == [""] * num_ranks
    assert all(each["graphs"] for each in found)
    windows = found[0]["made"]
    assert max(each.staleness for window in windows for each in window) > 0
    expected, final = simulate(keys, initial, windows, num_ranks)
    got = params_of(whole(found))
    assert got.keys() == final.keys()
    for key, values in final.items():
        np.testing.assert_allclose(got[key], values, rtol=1e-4, atol=1e-5, err_msg=str(key))
    told = losses(found[0])
    assert list(told) == list(expected)
    assert np.allclose(list(told.values()), list(expected.values()), rtol=1e-5)


@pytest.mark.thorough
def test_compiled_without_staleness_trains_as_the_synchronous_server_does(
    ranks, tmp_path: Path
) -> None:
    late = keys_of(0, optim=SGD, compile=True, eval={"data": {"call": "runs.py:Plain"}, "every": 7})
    early = {**late, "sync": "server"}
    found, expected, plain = (
        ranks(2).run(how, keys, str(tmp_path / name), None)
        for how, keys, name in (
            (compiled, late, "late"),
            (compiled, early, "early"),
            (run, {**late, "compile": False}, "plain"),
        )
    )
    assert [each["error"] for each in (*found, *expected, *plain)] == [""] * 6
    graphs = [[each["graphs"] for each in ranks_of] for ranks_of in (found, expected)]
    assert all(graphs[0])
    assert graphs[0] == graphs[1], "two versions of the parameters take no graph more"
    assert [each["digest"] for each in found] == [each["digest"] for each in expected]
    told = [list(losses(each[0]).values()) for each in (found, plain)]
    assert np.allclose(*told, rtol=1e-5)


def counted(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """Run a job; return what this rank has sent, was to send, and holds beside its plan."""
    Path(run_dir).mkdir(exist_ok=True)
    worker = PoolWorker(make_spec(keys, run_dir, None), world()[0])
    trainer = worker.prepare()
    trainer.run()
    worker.close()
    sharded, comm = trainer.sharded, trainer.comm
    told = trainer.recorder._sent.beside({"pull": 0, "push": 0})
    return {
        "sent": {k: sum(n for key, n in comm.sent_bytes.items() if key.kind == k) for k in KINDS},
        "received": {
            k: sum(n for key, n in comm.received_bytes.items() if key.kind == k) for k in KINDS
        },
        "told": {kind: told[kind]["measured_bytes"] for kind in ("pull", "push")},
        "expected": expected_traffic(sharded, keys["steps"], trainer.progress.micro_batches),
        "pushes": sharded.num_pushes,
        "numel": sum(unit.padded_numel for unit in sharded.layouts if unit.trainable),
        "planned": planned_memory(sharded).by_kind,
        "allocated": allocated_memory(sharded).by_kind,
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("staleness", [0, 2, "any"])
@pytest.mark.at_most(1)
def test_each_push_sends_the_parameters_once_and_once_back(
    ranks, tmp_path: Path, num_ranks: int, staleness: int | str
) -> None:
    keys = keys_of(staleness, precision="bf16")
    found = ranks(num_ranks).run(counted, keys, str(tmp_path / "run"))
    numel = found[0]["numel"]
    assert sum(each["pushes"] for each in found) == 40 * num_ranks
    remote = sum(each["pushes"] for each in found[1:])
    assert found[0]["told"]["pull"] == 2 * numel * remote
    assert found[0]["received"]["push"] == 4 * numel * remote
    assert found[0]["expected"] == ({"pull": 2 * numel * remote} if remote else {})
    for each in found[1:]:
        assert each["told"]["push"] == 4 * numel * each["pushes"]
        assert each["expected"] == {"push": 4 * numel * each["pushes"]}
    for rank, each in enumerate(found):
        assert each["planned"] == each["allocated"]
        assert bool(each["planned"][Kind.OPTIM]) is (rank == 0)
    if staleness == 0:
        assert {each["pushes"] for each in found} == {40}


def planned(keys: dict[str, Any], num_ranks: int) -> tuple[dict[str, int], int]:
    """Bytes per step of rank 0, and of another rank, by the planner."""
    config = JobConfig.model_validate(keys)
    profile = trace_job(config, JOB_DIR, micros=(2,), checkpoints=("none",), threads=1)
    planner = Planner(profile, parse_simulate(f"{num_ranks}xCPU"), config)
    dims = ParallelDims(dp=num_ranks)
    candidate = Candidate(0, dims, 2, 12 // num_ranks // 2, "none", config.precision.compute)
    estimate = planner.estimate(candidate)
    return estimate.traffic, estimate.pushed


def test_an_estimate_has_the_bytes_of_pushes_and_pulls(ranks, tmp_path: Path) -> None:
    keys = keys_of(0, precision="bf16", steps=6)
    found = ranks(3).run(counted, keys, str(tmp_path / "run"))
    traffic, pushed = planned(keys, 3)
    assert traffic == {"pull": found[0]["told"]["pull"] // 6}
    assert pushed == found[1]["told"]["push"] // 6 == found[2]["told"]["push"] // 6


@pytest.mark.parametrize("staleness", [0, "any"])
@pytest.mark.at_most(1)
def test_a_run_goes_on_from_a_save(ranks, tmp_path: Path, staleness: int | str) -> None:
    keys = keys_of(
        staleness,
        model="runs.py:Speaker",
        data={"call": "runs.py:Tokens", "shuffle": True},
        optim=CLIPPED,
        steps=24,
        checkpoint={"every": 9},
        eval={"data": {"call": "runs.py:Tokens", "args": {"length": 4}}, "every": 7},
        hooks={"on_step": "runs.py:on_step"},
    )
    ranks(2).run(run, keys, str(tmp_path / "cut"), None, 18)
    rest = ranks(2).run(run, keys, str(tmp_path / "cut"), {})
    assert rest[0]["error"] == ""
    assert list(losses(rest[0])) == list(range(10, 25))
    steps = [event for event in rest[0]["events"] if event["type"] == "step"]
    assert [event["total_samples"] for event in steps] == [12 * step for step in range(10, 25)]
    ring = {**keys, "sync": "ring", "staleness": 0, "zero": 2, "steps": 30}
    assert list(losses(ranks(3).run(run, ring, str(tmp_path / "cut"), {})[0])) == [*range(25, 31)]
    if staleness == 0:
        early = {**keys, "sync": "server"}
        once = ranks(2).run(run, early, str(tmp_path / "once"))
        assert [each["digest"] for each in rest] == [each["digest"] for each in once]


def drawn(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """Run a job whose last rank is slow; return also the seeds of its forwards."""
    rank, size = world()
    seeds = []
    of_micro, compute = ForwardStreams.of_micro, AsyncWindows._compute

    @contextmanager
    def seen(self: ForwardStreams, step: int, number: int) -> Iterator[None]:
        with of_micro(self, step, number):
            seeds.append(torch.initial_seed())
            yield

    def late(self: AsyncWindows, *args: Any) -> tuple[Push, list[torch.Tensor]]:
        time.sleep(0.05 if rank == size - 1 else 0.0)
        return compute(self, *args)

    with (
        patch.object(ForwardStreams, "of_micro", seen),
        patch.object(AsyncWindows, "_compute", late),
    ):
        found = run(keys, run_dir)
    return {**found, "seeds": seeds}


def test_two_shares_of_a_step_on_one_rank_draw_apart(ranks, tmp_path: Path) -> None:
    model = {"model": "runs.py:Speaker", "data": {"call": "runs.py:Tokens"}}
    keys = keys_of("any", **model, parallel={"draws": "block"}, steps=8)
    found = ranks(2).run(drawn, keys, str(tmp_path / "run"))
    assert len(found[0]["seeds"]) > 8 * 3, "the first rank has taken shares of the last one"
    seeds = [seed for each in found for seed in each["seeds"]]
    assert len(seeds) == 8 * 6
    assert len(set(seeds)) == len(seeds)
    late = {**keys, "staleness": 0}
    early = {**late, "sync": "server"}
    found, expected = (
        ranks(2).run(run, each, str(tmp_path / each["sync"])) for each in (late, early)
    )
    assert [each["digest"] for each in found] == [each["digest"] for each in expected]


# What other ranks and watchdogs see


def test_samples_that_only_walking_finds_are_refused(ranks, tmp_path: Path) -> None:
    keys = keys_of("any", data={"call": "parameter_server/test_async_server.py:Walked"})
    found = ranks(2).run(look, keys, str(tmp_path), None)
    assert found[0]["error"].startswith("JobError: data: Walked is an iterable dataset, of which ")


class Walked(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from Plain()
