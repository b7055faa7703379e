"""Pipelines: the losses and parameters of one process, whatever the cut and the schedule."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from distances import assert_equal, whole
from runs import VOCAB, losses, run
from small_jobs import GPT_STEPS, gpt, on_axes, small_gpt
from torch import nn

from zrun_core.tensor_parallel import linear_product
from zrun_core.tensor_parallel.linear_product import _weight_grad
from zrun_core.zero.reduce.reducer import Reducer


@pytest.fixture(scope="module")
def plain(ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return what jobs come to without a pipeline, by ZeRO stage and data-parallel ranks."""

    @cache
    def found(stage: int, dp: int) -> list[dict[str, Any]]:
        return on_axes(small_gpt(zero=stage), tmp_path_factory.mktemp("plain"), ranks, dp=dp, pp=1)

    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble"])
@pytest.mark.parametrize(("dp", "pp"), [(1, 2), (2, 2), (1, 4)])
@pytest.mark.at_most(3)
def test_one_process(
    ranks, tmp_path: Path, plain: Any, stage: int, schedule: str, dp: int, pp: int
) -> None:
    if schedule == "interleaved" and pp == 4:
        pytest.skip("4 blocks make 4 chunks")
    if dp == 1 and stage in (1, 2):
        pytest.skip("one data-parallel rank has the same states at each stage")
    keys = small_gpt(zero=stage, parallel={"schedule": schedule, "pp": pp})
    found = on_axes(keys, tmp_path / "many", ranks, dp=dp, pp=pp)
    assert losses(found[0]) == losses(plain(stage, dp)[0])
    assert_equal(whole(found), whole(plain(stage, dp)))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.thorough
def test_weights_wait_for_their_turn(ranks, tmp_path: Path, tp: int) -> None:
    keys = small_gpt(model=gpt(heads=2), parallel={"schedule": "zero_bubble", "pp": 2, "tp": tp})
    dims = {"dp": 1, "pp": 2, "tp": tp}
    assert ranks(2 * tp).run(held, keys, str(tmp_path), dims) == [GPT_STEPS * 64] * 2 * tp, (
        "4 linears, 2 blocks, 8 micro-batches"
    )


def held(keys: dict[str, Any], run_dir: str, dims: dict[str, int]) -> int:
    """Return how many products of weights a rank puts off."""
    made: list[object] = []

    def weight_grad(*args: Any, **options: Any) -> Any:
        made.append(sys._getframe(1).f_code.co_name)
        return _weight_grad(*args, **options)

    keys = {**keys, "guards": {"check_values": False}}  # which makes a step of its own
    with patch.object(linear_product, "_weight_grad", weight_grad):
        found = run(keys, run_dir, dims=dims)
    assert not found["error"]
    return made.count("_add")


def test_tied_ends(ranks, tmp_path: Path) -> None:
    optim = {"name": "sgd", "lr": 0.1, "clip": 1.0, "args": {"momentum": 0.9}}
    keys = small_gpt(model=gpt(tied=True), optim=optim, zero=2)
    one = on_axes(keys, tmp_path / "one", ranks, dp=1, pp=1)
    many = on_axes(keys, tmp_path / "many", ranks, dp=2, pp=2)
    assert losses(many[0]) == pytest.approx(losses(one[0]), rel=1e-6)
    assert_equal(whole(many), whole(one), 2e-6)


def test_the_host_reads_nothing_of_what_several_stages_have(ranks, tmp_path: Path) -> None:
    keys = small_gpt(model=gpt(tied=True), optim={"name": "sgd", "lr": 0.1})
    num_read = ranks(2).run(num_read_in_sums, keys, str(tmp_path), {"dp": 1, "pp": 2})
    assert num_read == [(GPT_STEPS, 0)] * 2


def num_read_in_sums(keys: dict[str, Any], run_dir: str, dims: dict[str, int]) -> tuple[int, int]:
    """Return how often a rank sums what other stages have too, and how often it reads a tensor."""
    counts = Counter[str]()
    sum_shared = Reducer.sum_shared

    def watched_sum(reducer: Reducer) -> Any:
        counts["sums"] += 1
        with counting_reads(counts):
            return sum_shared(reducer)

    keys = {**keys, "guards": {"check_values": False}}  # which makes a step of its own
    with patch.object(Reducer, "sum_shared", watched_sum):
        found = run(keys, run_dir, dims=dims)
    assert not found["error"]
    return counts["sums"], counts["read"]


READS = ("tolist", "item", "numpy", "__bool__", "__float__", "__int__", "__index__")


@contextmanager
def counting_reads(counts: Counter[str]) -> Iterator[None]:
    """Count, as "read", how often Python reads the values of a tensor."""

    def counted(name: str) -> Any:
        read = getattr(torch.Tensor, name)

        def watched(tensor: torch.Tensor, *args: Any, **keys: Any) -> Any:
            counts["read"] += 1
            return read(tensor, *args, **keys)

        return watched

    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(patch.object(torch.Tensor, name, counted(name)))
        yield


@pytest.mark.parametrize(
    "read",
    [
        lambda value: value.tolist(),
        lambda value: value.item(),
        lambda value: value.numpy(),
        *(bool, float, int, range),
    ],
    ids=READS,
)
def test_each_way_to_read_a_tensor_is_counted(read: Callable[[torch.Tensor], Any]) -> None:
    counts = Counter[str]()
    value = torch.ones((), dtype=torch.int64)
    with counting_reads(counts):
        read(value)
    num_read = counts["read"]
    read(value)
    assert counts["read"] == num_read > 0


def test_evaluation(ranks, tmp_path: Path) -> None:
    keys = small_gpt(eval={"data": {"call": "runs.py:Plain", "args": {"length": 12}}, "every": 2})
    one = on_axes(keys, tmp_path / "one", ranks, dp=1, pp=1)
    many = on_axes(keys, tmp_path / "many", ranks, dp=1, pp=2)
    ours, theirs = ([e for e in found[0]["events"] if e["type"] == "eval"] for found in (many, one))
    assert len(ours) == len(theirs) > 0
    assert [e["loss"] for e in ours] == [e["loss"] for e in theirs]


class Halving(nn.Module):
    """Halves the gradient of its input, whatever else uses that."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad / 2)
        return x + self.linear(x).tanh()


class OutputsOfAll(nn.Module):
    """Its head reads what each block returns."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Halving(dim) for _ in range(4))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        logits = self.head(torch.stack(outputs).mean(0))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("compares", [True, False])
def test_ghosts_hang_no_hooks_on_what_has_come(ranks, tmp_path: Path, compares: bool) -> None:
    guards = {"check_values": compares}
    keys = small_gpt(model="pipeline/test_pipelines.py:OutputsOfAll", guards=guards)
    one = on_axes(keys, tmp_path / "one", ranks, dp=1, pp=1)
    many = on_axes(keys, tmp_path / "many", ranks, dp=1, pp=2)
    assert losses(many[0]) == losses(one[0]) != {}
