"""Skips in a row: which are told, which end the run, and when gradients are looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zrun_core.data.batch import MicroBatch
from zrun_core.errors import HangError
from zrun_core.guards.batches import BatchGuard
from zrun_core.guards.numeric import NumericGuard
from zrun_core.spine.config import JobConfig
from zrun_core.spine.events import Emitter
from zrun_core.telemetry.progress import Progress
from zrun_core.telemetry.step_totals import StepTotals
from zrun_core.zero.reduce.nonfinite import Culprit

NAN, INF = math.nan, math.inf
BASE = {"name": "j", "model": "m:f", "data": "m:f", "steps": 9, "batch": 4}


class Sharded:
    """Answers like `ShardedModel`, and remembers what it was asked."""

    def __init__(self) -> None:
        self.inspects = False
        self.num_looks = 0
        self.culprit: Culprit | None = None

    def inspect_gradients(self, wanted: bool) -> None:
        self.inspects = wanted

    def find_nonfinite(self, losses: Sequence[float], *, is_late: bool = False) -> Culprit | None:
        self.num_looks += 1
        return self.culprit or Culprit("blocks.1.down.weight", "nan", 1 if self.inspects else None)


class Ear(Emitter):
    def __init__(self) -> None:
        super().__init__(None, 0)
        self.heard: list[str] = []

    def emit(self, kind: Any, **fields: Any) -> None:
        self.heard.append(fields["message"])


def numbers(
    *,
    skipped: bool = True,
    loss: float = 1.0,
    norm: float = INF,
    scale: float = 8.0,
    weight: float = 4.0,
) -> StepTotals:
    nothing = dict.fromkeys(StepTotals._fields, 0.0)
    told = {
        "weight": weight,
        "loss": loss,
        "samples": 4.0,
        "grad_norm": norm,
        "skipped": float(skipped),
    }
    return StepTotals(**nothing | told | {"agreed": 1.0, "scale": scale})


def guard(**keys: Any) -> tuple[NumericGuard, Progress, Sharded, Ear]:
    progress, sharded, ear = Progress(), Sharded(), Ear()
    job = JobConfig.model_validate(BASE | keys)
    return NumericGuard(job, sharded, ear, is_main=True), progress, sharded, ear


def samples_of(rank: int, micro: int | None) -> str:
    return f"samples of rank {rank}, micro-batch {micro}"


def losses_of() -> list[float]:
    return [1.0]


GOOD, BAD = numbers(skipped=False, norm=1.0), numbers()


def test_without_a_scale_three_in_a_row_end_the_run_and_name_the_rank():
    numeric, progress, _, ear = guard(precision="bf16")
    found = [
        numeric.see(progress, step, each, losses_of, samples_of)
        for step, each in enumerate([BAD, BAD, GOOD, BAD, BAD], start=1)
    ]
    assert found == [None] * 5
    assert progress.skips_in_a_row == 2
    why = numeric.see(progress, 6, BAD, losses_of, samples_of)
    assert why is not None
    assert "step 6: 3 steps in a row were skipped" in why
    assert "the gradient of blocks.1.down.weight (layer blocks.1.down) is nan on rank 1 (" in why
    assert "is nan on rank 1 (samples of rank 1, micro-batch None); lower optim.lr" in why
    assert "optim.lr" in why
    assert ear.heard[0].startswith(
        "step 1 was skipped on all ranks: the gradient of blocks.1.down.weight"
    )


def test_a_good_step_puts_an_end_to_looking():
    numeric, progress, sharded, _ = guard()
    numeric.see(progress, 1, BAD, losses_of, samples_of)
    assert sharded.inspects
    numeric.see(progress, 2, GOOD, losses_of, samples_of)
    assert not sharded.inspects
    assert sharded.num_looks == 1


@pytest.mark.parametrize(
    ("guards", "inspects"), [({"max_nonfinite": 1}, True), ({"max_skips": 2}, True), ({}, False)]
)
def test_what_one_skip_may_end_is_looked_at_from_the_start(guards, inspects):
    numeric, progress, sharded, _ = guard(guards=guards)
    assert sharded.inspects == inspects
    numeric.see(progress, 1, GOOD, losses_of, samples_of)
    assert sharded.inspects == inspects
    why = numeric.see(progress, 2, BAD, losses_of, samples_of)
    if guards == {"max_nonfinite": 1}:
        assert why is not None
        assert why.startswith("step 2: it was skipped: the gradient of blocks.1.down.weight")
        assert "on rank 1" in why


@pytest.mark.parametrize(
    ("clip", "size", "advice"),
    [
        (None, None, "; lower optim.lr, set optim.clip, or look"),
        (1.0, None, "; lower optim.lr, or look"),
        (None, 1e20, "; lower optim.lr, or look"),
    ],
)
def test_advice_leaves_out_what_would_not_help(clip, size, advice):
    numeric, progress, sharded, _ = guard(guards={"max_nonfinite": 1}, optim={"clip": clip})
    sharded.culprit = Culprit("w", None if size else "inf", None, size=size)
    why = numeric.see(progress, 1, BAD, losses_of, samples_of)
    assert why is not None
    assert advice in why


def test_an_overflow_of_fp16_is_told_once_and_the_scale_has_time():
    numeric, progress, sharded, ear = guard(precision="fp16", guards={"max_skips": 20})
    scale, why = 65536.0, None
    for step in range(1, 21):
        assert why is None
        why = numeric.see(progress, step, numbers(scale=scale), losses_of, samples_of)
        scale /= 2 if step < 5 else 1
    assert len(ear.heard) == 1
    assert sharded.num_looks == 2
    assert why is not None
    assert "20 steps in a row were skipped" in why
    assert "down to a loss scale of 4096; write precision: bf16" in why
    assert progress.unrecoverable_skips == 0


@pytest.mark.parametrize(
    "bad", [numbers(loss=NAN), numbers(loss=INF, norm=1.0), numbers(scale=1.0)]
)
def test_what_no_scale_can_help_ends_soon_in_fp16_too(bad):
    numeric, progress, _, _ = guard(precision="fp16")
    assert [
        numeric.see(progress, step, bad, losses_of, samples_of) is None for step in range(1, 4)
    ] == [True, True, False]


def test_a_step_without_samples_says_nothing():
    numeric, progress, sharded, _ = guard()
    numeric.see(progress, 1, BAD, losses_of, samples_of)
    numeric.see(progress, 2, numbers(weight=0.0, loss=0.0, norm=NAN), losses_of, samples_of)
    assert progress.skips_in_a_row == 1
    assert sharded.num_looks == 1


@pytest.mark.parametrize(
    ("culprit", "words"),
    [
        (Culprit("w", "inf", None), "the gradient of w (layer the model itself) is inf"),
        (
            Culprit("a.w", "nan", 0, "nan"),
            "the loss is nan on rank 0, and the gradient of a.w (layer a) is nan",
        ),
        (Culprit(None, None, 2, "inf"), "the loss is inf on rank 2"),
        (Culprit(None, None, None, unit="blocks.1"), "a gradient in blocks.1 is not finite"),
        (
            Culprit("a.w", None, None, size=3.1e19),
            "every gradient is finite, but that of a.w (layer a) reaches 3.1e+19, "
            "and the norm of all overflows",
        ),
    ],
)
def test_words(culprit, words):
    assert str(culprit) == words


def test_a_message_of_another_size_is_told_with_what_this_rank_has_read() -> None:
    """Batches of other lengths end a step before its message could tell."""
    alone, pair = (SimpleNamespace(size=size, index=0) for size in (1, 2))
    batch = {"ids": torch.zeros(2, 4, dtype=torch.int64), "weight": 0.5}
    for tensor, told in ((pair, True), (alone, False)):
        mesh: Any = SimpleNamespace(world=pair, data=alone, tensor=tensor, pipe=alone)
        nobody: Any = None
        guard = BatchGuard(mesh, nobody, nobody)
        read = guard.digest([MicroBatch.of(batch, 2)])
        with pytest.raises(HangError) as caught, guard.explaining(read):
            raise HangError("one sent 768 bytes")
        assert str(caught.value).startswith("one sent 768 bytes")
        shapes = "its first micro-batch is batch['ids'] (int64 [2, 4]), batch['weight'] (float)"
        assert (shapes in str(caught.value)) == told
