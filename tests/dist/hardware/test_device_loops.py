"""Loops of a user's own on GPUs: the CPU's numbers to the bit, from simulated ones."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from devices_table import PLACES, AutocastlessNet, needs_simulated, without_races
from toys import data, own_device, same_bits, split

import zrun_core

pytestmark = needs_simulated

STEPS, CUT = 6, 3


def build() -> AutocastlessNet:
    torch.manual_seed(1)
    return AutocastlessNet()


def loop(
    stage: int, options: dict[str, Any], micros: int, load: str | None = None, save: str = ""
) -> dict[str, Any]:
    """Train, or go on from what an earlier loop has saved.

    Args:
        options: of `zrun_core.shard`.
        micros: backward calls of a step.
        load: folder of that checkpoint.
        save: folder of one of the state after `CUT` steps; empty: nothing is saved.
    """
    run = zrun_core.init(threads=1, patience_s=10.0, device=own_device().type)  # type: ignore[arg-type]
    zero = {"stage": stage, "bucket": 1 << 14, **options.get("zero", {})}
    model = zrun_core.shard(build, **{**options, "zero": zero, "accumulate": micros})
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2, weight_decay=0.1, clip=0.5)
    loaded = None if load is None else zrun_core.load(load, model)
    first = 0 if loaded is None else loaded.step
    losses = []
    for number, batch in enumerate(data(STEPS, batch=16)):
        if number < first:
            continue
        if number == CUT and save:
            zrun_core.save(save, model, step=number)
        total = torch.zeros((), device=own_device())
        for k in range(micros):
            loss = model(*split(split(batch, run.rank, run.world_size), k, micros))
            loss.backward()
            total += loss.detach() / micros
        optimizer.step(weight=micros)
        optimizer.zero_grad()
        losses.append(run.mean(total))
    with zrun_core.evaluation(model):
        seen = model(*split(data(1, batch=16)[0], run.rank, run.world_size))
        losses.append(run.mean(seen))
    with zrun_core.gathered(model):
        state = {
            name: value.float().cpu().numpy().copy() for name, value in model.named_parameters()
        }
    return {"losses": losses, "state": state}


def train(*args: Any) -> dict[str, Any]:
    found: dict[str, Any] = without_races(loop, *args)
    return found


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        same_bits(ours, theirs)


OPTIONS: dict[str, dict[str, Any]] = {
    "device": {},
    "bf16": {"precision": "bf16"},
    "fp16, recomputed": {
        "precision": {"compute": "fp16", "loss_scale": {"init": 2.0**10, "window": 2}},
        "activations": {"checkpoint": "full"},
    },
    "serial": {"offload": PLACES["gradients too, serial"]},
    "disk": {"offload": {**PLACES["all on disk"], "dir": "/var/tmp"}},
}
CASES = list(itertools.product((0, 1, 2, 3), OPTIONS, (1, 2)))


@pytest.mark.parametrize(
    ("stage", "options", "micros"),
    [
        pytest.param(*case, marks=[pytest.mark.covering] if case == (2, "bf16", 2) else [])
        for case in CASES
    ],
)
def test_a_loop(ranks, stage: int, options: str, micros: int) -> None:
    there, here = (
        ranks(2, device).run(train, stage, OPTIONS[options], micros) for device in ("cuda", "cpu")
    )
    same(there, here)


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.covering), 3])
def test_a_loop_of_groups_and_copies_of_them(ranks, stage: int) -> None:
    there, here = (
        ranks(4, device).run(train, stage, {"zero": {"shard_group": 2}}, 2)
        for device in ("cuda", "cpu")
    )
    same(there, here)


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, "device"),
        (1, "serial"),
        (2, "fp16, recomputed"),
        (3, "bf16"),
        pytest.param(3, "disk", marks=pytest.mark.covering),
    ],
)
def test_a_loop_goes_on(ranks, tmp_path: Path, stage: int, options: str) -> None:
    """From what GPUs have saved, on GPUs and on CPUs."""
    saved = str(tmp_path / "saved")
    whole = ranks(2).run(train, stage, OPTIONS[options], 2)
    same(ranks(2, "cuda").run(train, stage, OPTIONS[options], 2, None, saved), whole)
    for device in ("cuda", "cpu"):
        rest = ranks(2, device).run(train, stage, OPTIONS[options], 2, saved)
        for ours, theirs in zip(rest, whole, strict=True):
            same_bits(ours, {**theirs, "losses": theirs["losses"][CUT:]})
