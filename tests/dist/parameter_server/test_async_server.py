"""The asynchronous parameter server: without staleness the synchronous one's bits, and with any
bound those of a simulator of delayed pushes that is given the order in which they came.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distances import Tensors, assert_equal, whole
from runs import JOB_DIR, Plain, PoolWorker, job, look, losses, make_spec, run
from small_jobs import GPT, gpt
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from toys import world

from zrun_core.checkpoint.checkpointer import Checkpointer, SaveConsensus
from zrun_core.distributed.rng import ForwardStreams
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.memory.buffers import Kind
from zrun_core.models.gpt import gpt as make_gpt
from zrun_core.parameter_server.messages import Push
from zrun_core.parameter_server.server import Made, Server, WindowRecord
from zrun_core.plan.answer.planner import Planner
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.trace.tracer import trace_job
from zrun_core.spine.config import JobConfig
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.train.async_windows import AsyncWindows
from zrun_core.train.user_hooks import HookContext
from zrun_core.zero.account import allocated_memory, expected_traffic, planned_memory
from zrun_core.zero.push_pull import Applied, PushPull

ADAMW = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}
SGD = {"name": "sgd", "lr": 0.02, "weight_decay": 0.0, "args": {"momentum": 0.9}}
CLIPPED = {**ADAMW, "clip": 0.3}

KINDS = ("push", "pull")


def keys_of(staleness: int | str, **keys: Any) -> dict[str, Any]:
    return job(
        **{
            "model": gpt(),
            "data": {"call": "runs.py:Plain"},
            "steps": 40,
            "batch": {"global": 12, "micro": 2},
            "optim": ADAMW,
            "hooks": {},
            "checkpoint": None,
            "sync": "async_server",
            "staleness": staleness,
            **keys,
        }
    )


SAME: list[dict[str, Any]] = [
    {"model": "runs.py:Speaker", "data": {"call": "runs.py:Tokens", "shuffle": True}},
    {"optim": CLIPPED, "precision": "bf16"},
    {"optim": SGD, "epochs": 2, "steps": None},
    {"precision": {"compute": "bf16", "reduce": "compute"}, "batch": {"global": 6, "micro": 1}},
    {"activations": "full", "eval": {"data": {"call": "runs.py:Plain"}, "every": 7}},
]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("keys", SAME, ids=str)
@pytest.mark.at_most(2)
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


def recorded(
    keys: dict[str, Any], run_dir: str, slow: int | None, **options: Any
) -> dict[str, Any]:
    """Run a job, of which one rank takes its time; return also its pushes, window by window.

    Args:
        slow: number of the rank that takes its time; None: each of them waits for as long as its
            draws say.
    """
    rank, _ = world()
    records: list[list[Made]] = []
    end, compute = Server.end, AsyncWindows._compute
    pauses = torch.Generator().manual_seed(rank)

    def keep(self: Server) -> WindowRecord:
        record = end(self)
        records.append(record.made)
        return record

    def late(self: AsyncWindows, *args: Any) -> tuple[Push, list[torch.Tensor]]:
        result = compute(self, *args)
        if slow is None:
            time.sleep(0.02 * float(torch.rand((), generator=pauses)))
        elif rank == slow:
            time.sleep(0.03)
        return result

    with patch.object(Server, "end", keep), patch.object(AsyncWindows, "_compute", late):
        return {**run(keys, run_dir, **options), "made": records}


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
@pytest.mark.at_most(3)
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
@pytest.mark.at_most(2)
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


class Sick(nn.Module):
    """Its gradient is not a number where it sees a certain sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(13, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 13)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        x = self.norm(self.first(input_ids).transpose(1, 2)).transpose(1, 2)
        loss = nn.functional.cross_entropy(self.last(x).flatten(0, 1), labels.flatten())
        return loss * (float("nan") if bool((index == 7).any()) else 1.0)


@pytest.mark.parametrize("staleness", [0, "any"])
@pytest.mark.at_most(1)
def test_saves_beside_training_hold_the_end_of_a_window(
    ranks, tmp_path: Path, staleness: int | str
) -> None:
    """What pushes change while bytes are written is not in them."""
    keys = keys_of(
        staleness,
        optim=CLIPPED,
        steps=24,
        checkpoint={"every": 8, "keep": 9, "async": True, "busy": "wait"},
    )
    once = ranks(2).run(recorded, keys, str(tmp_path / "run"), 1)
    assert once[0]["error"] == ""
    folder = tmp_path / "run" / "checkpoints"
    saved = sorted(each.parent.name for each in folder.glob("*/manifest.json"))
    assert saved == ["step-00000008", "step-00000016", "step-00000024"]
    if staleness == 0:
        early = {**keys, "sync": "server", "checkpoint": None}
        plain = ranks(2).run(run, early, str(tmp_path / "plain"))
        rest = ranks(2).run(run, early, str(tmp_path / "rest"), {"folder": str(folder), "step": 8})
        digests = [[each["digest"] for each in found] for found in (once, rest)]
        assert digests == [[each["digest"] for each in plain]] * 2


def lengths(keys: dict[str, Any], run_dir: str, turns: int, *args: Any) -> dict[str, Any]:
    """Run a job whose files of saves are on the disk by the given turn after they were begun.

    The rest is as of `run`. Returns also the steps of each window.
    """
    seen: list[int] = []
    contribution, read = Checkpointer.contribution, AsyncWindows.read
    asked = {"of": None, "times": 0}

    def late(self: Checkpointer, is_asked: bool = False) -> SaveConsensus:
        current = self._current
        if current is None:
            return contribution(self, is_asked)
        wait([current.writing])
        asked.update(
            of=current.step, times=asked["times"] + 1 if asked["of"] == current.step else 1
        )
        told = contribution(self, is_asked)
        return told if asked["times"] >= turns else told._replace(written=0.0, settled=0.0)

    def counted(self: AsyncWindows, steps: int) -> list[Any]:
        found = read(self, steps)
        seen.append(len(found))
        return found

    with (
        patch.object(Checkpointer, "contribution", late),
        patch.object(AsyncWindows, "read", counted),
    ):
        return {**run(keys, run_dir, *args), "lengths": seen}


BESIDE: dict[str, Any] = {
    "model": "runs.py:Speaker",
    "data": {"call": "runs.py:Tokens", "shuffle": True},
    "optim": CLIPPED,
    "steps": 24,
    "checkpoint": {"every": 9, "async": True},
    "hooks": {"on_step": "runs.py:on_step"},
}


@pytest.mark.parametrize("staleness", [0, "any"])
@pytest.mark.at_most(1)
def test_a_save_beside_training_is_there_long_before_the_next_one(
    ranks, tmp_path: Path, staleness: int | str
) -> None:
    """Or a run that dies has nothing of all the steps between two saves."""
    keys = keys_of(staleness, **BESIDE)
    cut = ranks(2).run(lengths, keys, str(tmp_path / "cut"), 1, None, 18)
    assert cut[0]["lengths"] == [9, 1, 8]
    saves = [each for each in cut[0]["events"] if each["type"] in ("save", "step")]
    assert [each["step"] for each in saves if each["type"] == "save"] == [9]
    assert saves.index(next(each for each in saves if each["type"] == "save")) == 10
    rest = ranks(2).run(run, keys, str(tmp_path / "cut"), {})
    assert [each["error"] for each in rest] == ["", ""]
    assert list(losses(rest[0])) == list(range(10, 25))
    if staleness == 0:
        once = ranks(2).run(run, {**keys, "sync": "server"}, str(tmp_path / "once"))
        assert [each["digest"] for each in rest] == [each["digest"] for each in once]


def test_windows_get_longer_while_a_disk_is_slow(ranks, tmp_path: Path) -> None:
    checkpoint = {"every": 20, "async": True, "busy": "skip", "keep": 9}
    keys = keys_of("any", **{**BESIDE, "steps": 50, "checkpoint": checkpoint})
    found = ranks(2).run(lengths, keys, str(tmp_path / "run"), 4)
    assert found[0]["error"] == ""
    assert [each["lengths"] for each in found] == [[20, 1, 1, 2, 4, 12, 1, 1, 2, 4, 2]] * 2
    assert warnings(found[0]) == []
    assert [e["step"] for e in found[0]["events"] if e["type"] == "save"] == [20, 40, 50]


SICK: dict[str, Any] = {
    "model": "parameter_server/test_async_server.py:Sick",
    "data": {"call": "runs.py:Tokens"},
    "batch": {"global": 4, "micro": 1},
    "steps": 24,
}


def of_steps(found: dict[str, Any], name: str) -> list[Any]:
    return [event[name] for event in found["events"] if event["type"] == "step"]


def warnings(found: dict[str, Any]) -> list[str]:
    return [event["message"] for event in found["events"] if event["type"] == "warning"]


def test_a_push_that_is_not_finite_is_left_out(ranks, tmp_path: Path) -> None:
    """The other pushes of its step are made use of: the step is not skipped, nor a fault."""
    keys = keys_of("any", **SICK, guards={"max_nonfinite": 1})
    found = ranks(2).run(run, keys, str(tmp_path / "run"))
    assert found[0]["error"] == ""
    assert not any(of_steps(found[0], "skipped"))
    told = [each for each in warnings(found[0]) if "left out" in each]
    # Samples 7, 47 and 87 of the stream.
    assert [each.split(":")[0] for each in told] == ["step 2", "step 12", "step 22"]
    assert "left out, since a gradient in " in told[0]
    assert "indices 6-7 of the dataset" in told[0]
    assert told[0].endswith("other updates of the step were made")
    assert not any("skipped on all ranks" in each for each in warnings(found[0]))
    assert sum(e["left_out"] for e in found[0]["events"] if e["type"] == "pushes") == 3
    assert np.isfinite(of_steps(found[0], "grad_norm")).all()
    assert all(np.isfinite(values).all() for values in found[0]["parts"].values())


def test_a_step_of_which_every_push_is_left_out_is_skipped(ranks, tmp_path: Path) -> None:
    keys = keys_of(
        "any",
        **{**SICK, "batch": {"global": 16, "micro": 8}, "steps": 6},
        guards={"max_nonfinite": 9},
        lr={"schedule": "constant", "warmup": 6},
    )
    with_two = {**keys, "data": {"call": "parameter_server/test_async_server.py:Sevens"}}
    found = ranks(2).run(run, with_two, str(tmp_path / "run"))
    assert of_steps(found[0], "skipped") == [True] * 6
    assert sum("was skipped on all ranks: " in each for each in warnings(found[0])) == 6
    rates = of_steps(found[0], "lr")
    assert len(set(rates)) == 6, "within a window the rate follows the steps"


class Sevens(Plain):
    """Every sample is one that `Sick` does not bear."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "index": torch.tensor(7)}


def test_without_staleness_a_skipped_step_moves_the_rate_as_with_the_synchronous_server(
    ranks, tmp_path: Path
) -> None:
    late = keys_of(0, **SICK, lr={"schedule": "cosine", "warmup": 3})
    early = {**late, "sync": "server"}
    found, expected = (
        ranks(2).run(run, each, str(tmp_path / each["sync"])) for each in (late, early)
    )
    assert [n for n, each in enumerate(of_steps(found[0], "skipped"), 1) if each] == [2, 12, 22]
    for name in ("lr", "skipped", "loss"):
        pair = [of_steps(each[0], name) for each in (found, expected)]
        assert np.array_equal(*pair, equal_nan=True), name
    assert [each["digest"] for each in found] == [each["digest"] for each in expected]


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


def read_all(context: HookContext) -> None:
    """Read each parameter: afterwards ranks pull them all at once."""
    with context.gathered() as module:
        sum(float(param.detach().sum()) for param in module.parameters())


def watched(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """Run a job whose last rank is slow, and updates of it take a while.

    Returns:
        What the ranks' pages say when all is over, and while the server updates or listens.
    """
    rank, size = world()
    Path(run_dir).mkdir(exist_ok=True)
    worker = PoolWorker(make_spec(keys, run_dir, None), rank)
    board = FlightRecorder(Path(run_dir) / "pages", rank, range(size), size)
    worker.board = board
    apply, compute = PushPull.apply, AsyncWindows._compute
    updating: list[bool] = []
    listening: list[str] = []

    def slow(self: PushPull, *args: Any, **options: Any) -> Applied:
        if threading.current_thread().name.startswith("pushes of"):
            time.sleep(0.1)  # the thread that trains waits, and this one does not
            updating.append(board.state(0).waiting)
        return apply(self, *args, **options)

    def late(self: AsyncWindows, *args: Any) -> tuple[Push, list[torch.Tensor]]:
        result = compute(self, *args)
        if rank == size - 1:
            time.sleep(0.1)
            if board.state(0).waiting:
                listening.append(board.awaits_in_words(0))
        return result

    with patch.object(PushPull, "apply", slow), patch.object(AsyncWindows, "_compute", late):
        trainer = worker.prepare()
        trainer.run()
    dist.barrier()
    told = [board.disagreement(), board.stalemate()]
    dist.barrier()
    worker.close()
    return {"told": told, "updating": updating, "listening": listening}


@pytest.mark.parametrize("staleness", [0, "any"])
@pytest.mark.at_most(1)
def test_a_watchdog_takes_neither_pace_nor_a_long_update_for_a_hang(
    ranks, tmp_path: Path, staleness: int | str
) -> None:
    keys = keys_of(
        staleness,
        steps=6,
        eval={"data": {"call": "runs.py:Plain"}, "every": 2},
        hooks={"on_eval": "parameter_server/test_async_server.py:read_all"},
    )
    found = ranks(2).run(watched, keys, str(tmp_path / "run"))
    assert [each["told"] for each in found] == [[None, None]] * 2
    assert found[0]["updating"]
    assert not any(found[0]["updating"])
    if staleness == 0:
        assert found[1]["listening"]
    for words in found[1]["listening"]:
        assert words.startswith("for receive ")
        assert "from rank 1, 'gradients'" in words
        assert words.endswith("which rank 1 has not sent")


def hung(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """Run a job whose second rank does not come back from its share of the third step in time."""
    compute = AsyncWindows._compute

    def late(self: AsyncWindows, *args: Any) -> tuple[Push, list[torch.Tensor]]:
        step = args[2]  # the first of the window, which has no other
        if step == 2:  # the first one takes long by itself
            self._channel._limit_s = 1.0  # type: ignore[attr-defined]
        if world()[0] == 1 and step == 3:
            time.sleep(3.0)  # in vain: it is told so when it comes
        return compute(self, *args)

    with patch.object(AsyncWindows, "_compute", late):
        return run(keys, run_dir)


@pytest.mark.parametrize("staleness", [0, "any"])
@pytest.mark.at_most(1)
def test_who_does_not_push_in_time_is_named_on_all_ranks(
    ranks, tmp_path: Path, staleness: int | str
) -> None:
    eval_often = {"data": {"call": "runs.py:Plain", "args": {"length": 2}}, "every": 1}
    keys = keys_of(staleness, limits={"collective_s": 60}, eval=eval_often, steps=12)
    found = ranks(3).run(hung, keys, str(tmp_path / "run"))
    limits = "1 s (limits.collective_s)"
    told = f"HangError: others have waited for a push of rank 1 for more than {limits}"
    assert [each["error"] for each in found] == [told] * 3


def test_a_signal_ends_the_window_with_the_steps_that_were_begun(ranks, tmp_path: Path) -> None:
    keys = keys_of("any", checkpoint={"every": 1000}, steps=400)
    found = ranks(2).run(stopped, keys, str(tmp_path))
    assert {each["error"] for each in found} == {f"StoppedError: {found[0]['error'][14:]}"}
    last = max(losses(found[0]))
    assert last < 32
    assert found[0]["error"] == f"StoppedError: stopped after step {last}, saved"
    rest = ranks(2).run(run, {**keys, "steps": last + 8}, str(tmp_path), {})
    assert list(losses(rest[0])) == list(range(last + 1, last + 9))


def stopped(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """Run a job whose last rank gets a signal while it computes its third share."""
    compute, numbers = AsyncWindows._compute, itertools.count(1)

    def signalled(self: AsyncWindows, *args: Any) -> tuple[Push, list[torch.Tensor]]:
        rank, size = world()
        if rank == size - 1 and next(numbers) == 3:
            asked = self._asked_to_stop
            assert not asked()
            asked.__self__._stop.first = signal.SIGTERM  # type: ignore[attr-defined]
        return compute(self, *args)

    with patch.object(AsyncWindows, "_compute", signalled):
        return run(keys, run_dir)


def test_samples_that_only_walking_finds_are_refused(ranks, tmp_path: Path) -> None:
    keys = keys_of("any", data={"call": "parameter_server/test_async_server.py:Walked"})
    found = ranks(2).run(look, keys, str(tmp_path), None)
    assert found[0]["error"].startswith("JobError: data: Walked is an iterable dataset, of which ")


class Walked(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from Plain()
