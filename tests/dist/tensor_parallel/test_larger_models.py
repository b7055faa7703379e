"""Models of which a device holds a block at a time are compared with what their ranks compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from between_linears import PLAN, Model
from runs import losses, run
from small_jobs import gpt, small
from test_value_check import keys_of, notes, saved

from zrun_core.models.gpt import gpt as build_gpt
from zrun_core.train import rank_builder, whole_forward

WHOLE = sum(param.numel() for param in Model("gelu").parameters())
BLOCK = sum(param.numel() for param in Model("gelu").blocks[0].parameters())
NOTE = (
    "its gradients are not compared before training with what the whole model computes: it takes "
)


def run_within(
    keys: dict[str, Any],
    folder: str,
    elements: int,
    axes: dict[str, int],
    resume: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run with a device that has room for so many elements of parameters beside training."""
    itemsize = 2 if keys.get("precision") == "bf16" else 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_forward, "_MOST_BYTES", 1.0)
        free = elements * itemsize
        patch.setattr(rank_builder.RankBuilder, "_free_bytes", lambda self: free)
        return run(keys, folder, resume, None, None, axes)


def found_within(
    ranks: Any,
    keys: dict[str, Any],
    folder: Path,
    elements: int,
    resume: dict[str, Any] | None = None,
) -> list[Any]:
    parallel = keys["parallel"]
    axes = {"dp": 1, "tp": parallel.get("tp", 1), "pp": parallel.get("pp", 1)}
    world = axes["tp"] * axes["pp"]
    return ranks(world).run(run_within, keys, str(folder), elements, axes, resume)


@pytest.mark.parametrize("source", ["factory", "meta", "init_from"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("function", ["gelu", "flipped"])
@pytest.mark.at_most(4)
def test_slices_are_compared_by_block(
    ranks, tmp_path: Path, function: str, precision: str, source: str
) -> None:
    keys = keys_of(function, precision=precision)
    if source == "init_from":
        keys["init_from"] = saved(tmp_path, function)
    else:
        keys["init"] = source
    found = found_within(ranks, keys, tmp_path / "two", WHOLE - 1)
    if function == "flipped":
        assert [each["code"] for each in found] == [2, 2]
        assert "blocks.2 computes something else than in the whole model" in found[0]["error"]
        return
    (note,) = notes(found)
    assert note.startswith(NOTE)
    assert note.endswith("and has values a block at a time")
    one = ranks(1).run(run, {**keys, "parallel": {}}, str(tmp_path / "one"))
    rel = 1e-6 if precision == "fp32" else 1e-2
    assert losses(found[0]) == pytest.approx(losses(one[0]), rel=rel) != {}


@pytest.mark.parametrize("axes", [{"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_stages_are_compared_by_block(ranks, tmp_path: Path, axes: dict[str, int]) -> None:
    model = gpt()
    whole = sum(param.numel() for param in build_gpt(**model["args"]).parameters())
    found = found_within(ranks, small(model=model, parallel=axes), tmp_path, whole - 1)
    (note,) = notes(found)
    assert note.startswith(NOTE)


def test_a_run_that_goes_on_is_compared_by_block(ranks, tmp_path: Path) -> None:
    """It was saved by one rank, where the model is right."""
    keys = {**keys_of("flipped", steps=4), "checkpoint": {"every": 2}}
    ranks(1).run(run, {**keys, "parallel": {}, "steps": 2}, str(tmp_path))
    found = found_within(ranks, keys, tmp_path, WHOLE - 1, resume={})
    assert [each["code"] for each in found] == [2, 2]
    assert "blocks.2 computes something else than in the whole" in found[0]["error"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_has_no_room_by_block_either_is_said(ranks, tmp_path: Path, precision: str) -> None:
    keys = keys_of("gelu", precision=precision)
    (note,) = notes(found_within(ranks, keys, tmp_path, WHOLE - 4 * BLOCK + BLOCK - 1))
    assert note.startswith(
        "not compared before training with what the whole model computes: the whole model takes "
    )


class Penalized(Model):
    """It looks at parameters of blocks that do not run."""

    def forward(self, input_ids: Any, labels: Any) -> Any:
        penalty = sum(block.up.weight.square().mean() for block in self.blocks)
        return super().forward(input_ids, labels) + 0.01 * penalty


def test_a_model_that_reads_blocks_elsewhere_is_not_compared_so(ranks, tmp_path: Path) -> None:
    model = {
        "call": "tensor_parallel/test_larger_models.py:Penalized",
        "args": {"function": "gelu"},
    }
    keys = small(model=model, parallel={"tp": 2, "plan": PLAN})
    (note,) = notes(found_within(ranks, keys, tmp_path, WHOLE - 1))
    assert "computes: on one rank its forward fails: " in note
