"""Checkpoints of layers divided over ranks: those of one rank, whatever the axes.

`saves_table.py` has all pairs of shapes and ZeRO stages; here each goes on from the one before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distances import Tensors, values
from runs import losses, run
from safetensors.torch import load_file
from small_jobs import gpt, small

from zrun_core.checkpoint.export import export
from zrun_core.checkpoint.folder import read_step
from zrun_core.checkpoint.manifest_fields import VALUE
from zrun_core.models.gpt import gpt as make_gpt

Case = tuple[str, int]  # a shape, and a stage of ZeRO
SHAPES: dict[str, dict[str, int]] = {
    "dp 4": {"dp": 4},
    "tp 2, dp 2": {"tp": 2, "dp": 2},
    "pp 2, dp 2": {"pp": 2, "dp": 2},
    "tp 2, pp 2": {"tp": 2, "pp": 2},
    "tp 4": {"tp": 4},
    "tp 2, pp 2, dp 2": {"tp": 2, "pp": 2, "dp": 2},
}
MODEL = gpt(tied=True, flavour="gpt2", heads=4)  # of whose 13 tokens tp 2 makes 14, and tp 4 16


def num_ranks(shape: str) -> int:
    sizes = SHAPES[shape]
    return sizes.get("dp", 1) * sizes.get("tp", 1) * sizes.get("pp", 1)


def trained(
    pool: Any, folder: Path, case: Case, source: Path | None = None, steps: int = 1
) -> list[dict[str, Any]]:
    """Run the job on the ranks of a shape.

    Args:
        source: folder of the run to go on from; None: from the beginning.
        steps: in all, each of which is saved.
    """
    shape, stage = case
    dims = {"dp": 1, **SHAPES[shape]}
    keys = small(
        model=MODEL,
        steps=steps,
        zero=stage,
        batch={"global": 8, "micro": 1},
        optim={"lr": 1e-3, "eps": 1e-3},
        lr={"schedule": "constant"},
        checkpoint={"every": 1},
        parallel={axis: size for axis, size in dims.items() if axis != "dp"},
    )
    resume = None if source is None else {"folder": f"{source}/checkpoints"}
    found: list[dict[str, Any]] = pool.run(run, keys, str(folder), resume, None, None, dims)
    for each in found:
        assert not each["error"], each["error"]
    return found


def begun(found: list[dict[str, Any]]) -> Tensors:
    """Return the weights and moments that a run began with."""
    return values([{**each, **each["begun"]} for each in found])


def differing(ours: Tensors, theirs: Tensors) -> list[str]:
    """Return names of what is not equal to the bit."""
    if ours.keys() != theirs.keys():
        return [str(key) for key in ours.keys() ^ theirs.keys()]
    return [str(key) for key in theirs if not np.array_equal(ours[key], theirs[key])]


def exported(folder: Path, found: list[dict[str, Any]]) -> list[str]:
    """Export the first step of a run into the plain model; return names of weights that differ."""
    step = folder / "checkpoints" / "step-00000001"
    out = folder / "model.safetensors"
    export(step, read_step(step), out)
    model = make_gpt(**MODEL["args"])
    model.load_state_dict(load_file(out))
    held = values(found)
    return [
        name
        for name, param in model.named_parameters()
        if not np.array_equal(param.detach().numpy(), held[name, VALUE])
    ]


@pytest.mark.thorough
def test_each_shape_goes_on_from_the_one_before(ranks, tmp_path: Path) -> None:
    """It begins with the same bits, and has the loss of the run that nobody stopped."""
    chain = [(shape, 1 + 2 * (number % 2)) for number, shape in enumerate(SHAPES)]
    chain.append(("dp 4", 3))
    expected = losses(trained(ranks(4), tmp_path / "whole", chain[0], steps=len(chain))[0])
    before: Tensors = {}
    source = None
    for steps, case in enumerate(chain, start=1):
        folder = tmp_path / str(steps)
        found = trained(ranks(num_ranks(case[0])), folder, case, source, steps)
        if source is not None:
            assert not differing(begun(found), before), case
        assert losses(found[0])[steps] == pytest.approx(expected[steps], rel=1e-6), case
        before, source = values(found), folder


def test_exports_are_of_the_plain_model(ranks, tmp_path: Path) -> None:
    """Its weights are those of the checkpoint, whole and without padding."""
    found = trained(ranks(8), tmp_path, ("tp 2, pp 2, dp 2", 3))
    assert not exported(tmp_path, found)
