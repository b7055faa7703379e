"""`zrun check --layers` lists the layers that ranks have when they begin to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import JOB_DIR, PoolWorker, make_spec
from small_jobs import gpt, small, transformer
from toys import world

from zrun_core.plan.trace.layers_check import layered_kinds
from zrun_core.spine.config import JobConfig
from zrun_core.user_code.forward_layers import Layer, layers_of

FULL = {"checkpoint": "full"}
PLAN = {
    **{"*.up": "colwise", "*.down": "rowwise", "*.qkv": "fused 3", "*.out": "rowwise"},
    **{"*.scale": "summed", "head": "head", "embed": "vocabulary"},
}
PENALTY = {"call": "tensor_parallel/test_tensor_penalties.py:Model", "args": {"how": "norms"}}
Row = tuple[str, str, list[str]]


def on_rank(keys: dict[str, Any], run_dir: str, dims: dict[str, Any]) -> list[Row]:
    """What this rank has around the modules that it runs, once it could train."""
    rank, _ = world()
    Path(run_dir).mkdir(exist_ok=True)
    worker = PoolWorker(make_spec(keys, run_dir, None, dims), rank)
    trainer = worker.prepare()
    stage = getattr(trainer.micro_batches, "_stage", None)
    elsewhere = set() if stage is None else stage.run_elsewhere
    found = [
        (name, type(module).__name__, [layer.label for layer in layers_of(module)])
        for name, module in trainer.sharded.module.named_modules()
        if not any(f"{name}.".startswith(f"{each}.") for each in elsewhere)
    ]
    trainer.loader._steps.close()
    worker.close()
    return [row for row in found if row[2]]


def listed(keys: dict[str, Any]) -> list[Row]:
    return [
        (name, kind.class_name, [layer for layer, _ in kind.layers])
        for kind in layered_kinds(JobConfig.model_validate(keys), JOB_DIR, "cpu")
        for name in kind.names
    ]


JOBS: dict[str, tuple[dict[str, Any], set[Layer]]] = {
    "one rank": (
        {
            "model": gpt(),
            "activations": {"checkpoint": "every_n", "n": 2},
            "parallel": {"draws": "block"},
        },
        {Layer.NODE, Layer.RECOMPUTED},
    ),
    "sequence": (
        {
            **transformer("MixtralForCausalLM", num_hidden_layers=4),
            "activations": FULL,
            "parallel": {"tp": 2, "sequence": True},
        },
        {Layer.RECOMPUTED, Layer.DRAWS_INSIDE, Layer.EXPERTS, Layer.ROW, Layer.COLUMN}
        | {Layer.HEAD, Layer.EMBEDDING},
    ),
    "penalty": (
        {"model": PENALTY, "activations": FULL, "parallel": {"tp": 2, "plan": PLAN}},
        {Layer.RECOMPUTED, Layer.READS, Layer.ROW, Layer.COLUMN, Layer.HEAD, Layer.EMBEDDING},
    ),
    "stages": (
        {
            "model": gpt(heads=4, tied=True),
            "activations": {**FULL, "partition": True},
            "parallel": {"tp": 2, "pp": 2},
        },
        {Layer.NODE, Layer.INPUT_ELSEWHERE, Layer.ROW, Layer.COLUMN, Layer.EMBEDDING, Layer.HEAD},
    ),
    "zero bubble": (
        {"model": gpt(), "parallel": {"pp": 2, "schedule": "zero_bubble"}},
        {Layer.NODE, Layer.LATE_WEIGHT_GRADS},
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_what_is_listed_is_what_ranks_have(ranks, tmp_path: Path, name: str) -> None:
    given, layers = JOBS[name]
    keys = small(**given)
    dims = {axis: keys["parallel"].get(axis, 1) for axis in ("tp", "pp", "dp")}
    by_rank = ranks(dims["tp"] * dims["pp"]).run(on_rank, keys, str(tmp_path / "run"), dims)
    expected = {repr(row) for rows in by_rank for row in rows}
    rows = listed(keys)
    assert {repr(row) for row in rows} == expected
    assert {label for _, _, labels in rows for label in labels} == {each.label for each in layers}
    assert len(rows) == len(expected)  # none is on two stages, or twice in the list
